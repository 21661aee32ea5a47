"""/v1/batches: files of requests, answered when there is room."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query

from api.asgi.json_body import JsonRoute
from api.routes.files import BatchesDep, page_after, page_ends
from api.schemas.batches import BatchBody

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/batches")
async def create(body: BatchBody, batches: BatchesDep) -> dict[str, Any]:
    """Answer every line of a file, behind all online requests. `completion_window` in minutes, hours or days: `24h`."""
    window = (body.completion_window, body.window_s())
    age_s = None if body.output_expires_after is None else body.output_expires_after.seconds
    # Also if the client has left by now: what is on the disk is in the books.
    making = batches.create(body.input_file_id, body.endpoint, window, body.metadata, age_s)
    return batches.shown(await asyncio.shield(making))


@router.get("/v1/batches")
async def list_batches(
    batches: BatchesDep, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> dict[str, Any]:
    """Newest first; behind the batch `after`, at most `limit`."""
    page, more = page_after(batches.all(), after, limit, newest_first=True)
    return {"object": "list", "data": [batches.shown(record) for record in page], **page_ends(page), "has_more": more}


@router.get("/v1/batches/{batch_id}")
async def show(batch_id: str, batches: BatchesDep) -> dict[str, Any]:
    """Where a batch stands."""
    return batches.shown(batches.get(batch_id))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel(batch_id: str, batches: BatchesDep) -> dict[str, Any]:
    """Ask nothing more; what was answered until now can be read when the batch is `cancelled`."""
    batches.get(batch_id)
    return batches.shown(await asyncio.shield(batches.cancel(batch_id)))
