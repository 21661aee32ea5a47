"""Serve /v1/files: the inputs and results of batches, which expire."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from api.asgi.multipart import check_form_headers, receive_form
from api.auth.dependency import CallerDep
from api.batches.files import MAX_NAME_CHARS
from api.batches.manager import BatchManager
from api.batches.records import BatchRecord, FileRecord
from api.batches.scoped_batches import ScopedBatches
from api.errors import ApiError
from api.schemas.batches import file_age_s, file_purpose
from api.serving.services import ServicesDep

router = APIRouter()
READ_BYTES = 1 << 18
T = TypeVar("T", FileRecord, BatchRecord)
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "file": {"type": "string", "format": "binary"},
                    },
                }
            }
        },
    }
}


async def get_batches(request: Request, caller: CallerDep) -> ScopedBatches:
    manager = request.app.state.batches
    assert isinstance(manager, BatchManager)
    return ScopedBatches(manager, caller)


BatchesDep = Annotated[ScopedBatches, Depends(get_batches)]


async def get_answered_batches(batches: BatchesDep, services: ServicesDep) -> ScopedBatches:
    """Return the caller's batches, if this server can answer their lines.

    Raises:
        NoEngine: this server has no engine.
    """
    services.engine.check_computes(
        "keeps no batches: lorasrv batch sends the lines of a file to any other server, or to an edge; /v1/batches of "
        "a server with an engine keeps them"
    )
    return batches


AnsweredBatchesDep = Annotated[ScopedBatches, Depends(get_answered_batches)]


@router.post("/v1/files", openapi_extra=_FORM)
async def upload(request: Request, batches: AnsweredBatchesDep) -> dict[str, Any]:
    """Store a file of batch lines: a multipart form with `purpose=batch` and `file`. A batch validates its content."""
    length = check_form_headers(request)
    async with batches.receiving(length) as place:
        form = await receive_form(request, place.write)
        purpose, age_s = file_purpose(form.fields), file_age_s(form.fields)
        if form.filename is None:
            raise ApiError(400, "the form needs a part named file", code="invalid_form", param="file")
        # A name from the client's machine may include folders.
        name = form.filename.replace("\\", "/").rpartition("/")[2].replace("\0", "")[:MAX_NAME_CHARS] or "file"
        record = await batches.keep(place, name, purpose, age_s)
    return record.shown()


@router.get("/v1/files")
async def list_files(
    batches: BatchesDep,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """List files, newest first, or oldest first with `order=asc`; at most `limit`, after the file `after`."""
    wanted = [record for record in batches.files() if purpose in (None, record.purpose)]
    page, more = page_after(wanted, after, limit, newest_first=order == "desc")
    return {"object": "list", "data": [record.shown() for record in page], **page_ends(page), "has_more": more}


@router.get("/v1/files/{file_id}")
async def show_file(file_id: str, batches: BatchesDep) -> dict[str, Any]:
    """Return a file's description."""
    return batches.file(file_id).shown()


@router.get("/v1/files/{file_id}/content")
async def read_file(file_id: str, batches: BatchesDep) -> Response:
    """Return a file's content: the bytes as sent, or one result per line."""
    record = batches.file(file_id)
    content = await run_in_threadpool(_opened, batches.path(file_id))
    headers = {"content-length": str(record.bytes)}
    return StreamingResponse(content, media_type="application/octet-stream", headers=headers)


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, batches: BatchesDep) -> dict[str, Any]:
    """Delete a file. Refused with 409 if an open batch needs it."""
    await asyncio.shield(batches.delete_file(file_id))
    return {"object": "file", "id": file_id, "deleted": True}


def _opened(path: Path) -> Iterator[bytes]:
    """Open the file now, so that it can be read to its end even if it is deleted meanwhile."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise ApiError(404, "the file is gone", code="file_not_found", param="file_id") from None

    def pieces() -> Iterator[bytes]:
        with file:
            while piece := file.read(READ_BYTES):
                yield piece

    return pieces()


def page_after(oldest_first: list[T], after: str | None, limit: int, *, newest_first: bool) -> tuple[list[T], bool]:
    """Return a page after the record `after`, and whether there are more.

    Raises:
        ApiError: 400, the record `after` does not exist, or no longer exists.
    """
    records = oldest_first[::-1] if newest_first else oldest_first
    begin = 0
    if after is not None:
        begin = next((i for i, record in enumerate(records, 1) if record.id == after), 0)
        if not begin:
            raise ApiError(
                400, "after names nothing that exists; start again without it", code="invalid_value", param="after"
            )
    return records[begin : begin + limit], len(records) > begin + limit


def page_ends(page: list[Any]) -> dict[str, str | None]:
    return {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
