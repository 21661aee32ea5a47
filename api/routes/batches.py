"""Serve /v1/batches: files of requests, processed at low priority."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query

from api.asgi.json_body import JsonRoute
from api.routes.files import AnsweredBatchesDep, BatchesDep, page_after, page_ends
from api.schemas.batches import BatchBody

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/batches")
async def create(body: BatchBody, batches: AnsweredBatchesDep) -> dict[str, Any]:
    """Answer every line of a file at a lower priority than online requests.

    `completion_window` is a number of minutes, hours or days, such as `24h`.
    """
    window = (body.completion_window, body.window_s())
    age_s = None if body.output_expires_after is None else body.output_expires_after.seconds
    # Shielded from the client's disconnection, so that memory and disk agree.
    making = batches.create(body.input_file_id, body.endpoint, window, body.metadata, age_s)
    return batches.shown(await asyncio.shield(making))


@router.get("/v1/batches")
async def list_batches(
    batches: BatchesDep, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> dict[str, Any]:
    """List batches, newest first; at most `limit`, after the batch `after`."""
    page, more = page_after(batches.all(), after, limit, newest_first=True)
    return {"object": "list", "data": [batches.shown(record) for record in page], **page_ends(page), "has_more": more}


@router.get("/v1/batches/{batch_id}")
async def show(batch_id: str, batches: BatchesDep) -> dict[str, Any]:
    """Return the state of a batch."""
    return batches.shown(batches.get(batch_id))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel(batch_id: str, batches: BatchesDep) -> dict[str, Any]:
    """Stop sending lines. The results so far can be read once the batch is `cancelled`."""
    batches.get(batch_id)
    return batches.shown(await asyncio.shield(batches.cancel(batch_id)))
