"""Uploading, listing, warming, pinning, limiting and removing adapters."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from adapter_store.blobs import BlobUpload
from adapter_store.errors import AdapterNotFound
from adapter_store.records import AdapterRecord, Registration
from adapter_store.references import parse_reference
from adapter_store.spec import AdapterKey
from api.errors import ApiError
from api.json_body import JsonRoute
from api.schemas.adapters import AdapterBody, AdapterPatch, WarmBody
from api.services import Services, ServicesDep
from api.sse import unless_disconnected
from lorasrv.errors import InvalidRequest
from lorasrv.request import AdapterTier

router = APIRouter(route_class=JsonRoute)

# A hop to a worker thread costs about 50 us: not for every 64 KiB that the socket brings.
WRITE_BYTES = 1 << 20

NotBuilt = Annotated[Literal["false", "0", ""] | None, "a switch that is refused unless it is off"]


@router.put("/v1/blobs/sha256:{digest}")
async def put_blob(digest: str, request: Request, services: ServicesDep) -> JSONResponse:
    """Store weights under their digest. Bytes that are there already are written once more: that repairs a bad disk."""
    length = _content_length(request)
    known = await run_in_threadpool(services.store.blob_exists, digest)
    upload = await run_in_threadpool(services.store.open_blob, digest, length)
    try:
        await _receive(request, upload)
        await run_in_threadpool(upload.commit)
    finally:
        # Not in a thread: a cancelled request (the client went away) may not wait for one. It closes and unlinks.
        upload.abort()
    body = {"object": "blob", "digest": f"sha256:{digest}", "bytes": length, "created": not known}
    return JSONResponse(body, 200 if known else 201)


@router.post("/v1/adapters")
async def register(body: AdapterBody, services: ServicesDep) -> JSONResponse:
    """Check uploaded weights and give them an id: 201 for a new version, 200 if the id had this content already."""
    body.refuse_unbuilt()
    done: Registration = await run_in_threadpool(
        services.store.register, body.id, body.config, body.weights, if_not_exists=body.if_not_exists
    )
    content = {
        "object": "adapter",
        "id": done.ref.adapter_id,
        "version": done.ref.version,
        "digest": f"sha256:{done.ref.key}",
        "created": done.created,
        "report": done.report.to_dict(),
    }
    return JSONResponse(content, 201 if done.created else 200)


@router.get("/v1/adapters")
async def list_adapters(services: ServicesDep) -> dict[str, Any]:
    """Every id with its versions."""
    records = await run_in_threadpool(services.store.list_adapters)
    return {"object": "list", "data": [_as_json(record) for record in records]}


@router.get("/v1/adapters/{adapter_id}")
async def show_adapter(adapter_id: str, services: ServicesDep) -> dict[str, Any]:
    """One id with its versions and the upload report of the current one."""
    record = await run_in_threadpool(services.store.get, adapter_id)
    report = await run_in_threadpool(services.store.report, record.key)
    return {**_as_json(record), "report": report.to_dict()}


@router.post("/v1/adapters/{reference}:warm")
async def warm_adapter(reference: str, body: WarmBody, request: Request, services: ServicesDep) -> dict[str, Any]:
    """Bring an adapter to the pool ahead of its requests; answers as soon as it is there, or at the deadline."""
    ref = await run_in_threadpool(services.store.resolve, reference)
    work = services.engine.warm(ref.key, body.deadline_ms / 1000)
    reached = await unless_disconnected(request.receive, work)
    return {
        "object": "adapter.warm",
        "id": ref.adapter_id,
        "digest": f"sha256:{ref.key}",
        "tier": reached.tier,
        "reached": reached.tier is AdapterTier.RESIDENT,
        "load_ms": round(reached.load_ms, 1),
    }


@router.patch("/v1/adapters/{reference}")
async def change_adapter(reference: str, body: AdapterPatch, services: ServicesDep) -> dict[str, Any]:
    """Pin an adapter to the pool, answering when it is there or after ten seconds; or let it go, answering at once.
    Limit an id, for all its versions, until it is deleted.

    What is pinned is the content that the reference names now, until it is unpinned or the server restarts: a version
    that is uploaded later is not, and the older one is unpinned by its own name (`mia@1`).
    """
    limits = body.wanted_limits()
    ref = await run_in_threadpool(services.store.resolve, reference)
    if limits is not None and reference != ref.adapter_id:
        raise InvalidRequest(f"limits are of all versions; name {ref.adapter_id!r} without one", param="limits")
    changed: dict[str, Any] = {"object": "adapter", "id": ref.adapter_id, "digest": f"sha256:{ref.key}"}
    # Before the limits: a pin may be refused, and then nothing is to change.
    if body.pinned is not None:
        changed |= {"pinned": body.pinned, "tier": await _set_pinned(services, ref.key, reference, body.pinned)}
    if limits is not None:
        # Also if the client has left by now: the engine would keep to the old ones.
        await asyncio.shield(_set_limits(services, ref.adapter_id, limits))
        changed["limits"] = limits
    return changed


async def _set_pinned(services: Services, key: AdapterKey, reference: str, pinned: bool) -> AdapterTier:
    reached = await (services.engine.pin if pinned else services.engine.unpin)(key)
    if pinned and not await run_in_threadpool(services.store.is_named, key):
        # Deleted meanwhile: nothing would be left to unpin it by.
        await services.engine.unpin(key)
        raise AdapterNotFound(reference)
    return reached.tier


async def _set_limits(services: Services, adapter_id: str, limits: Mapping[str, float]) -> None:
    await run_in_threadpool(services.store.set_limits, adapter_id, limits)
    await services.limits.tell(adapter_id)


@router.delete("/v1/adapters/{reference}", status_code=202)
async def delete_adapter(
    reference: str, services: ServicesDep, wait: NotBuilt = None, force: NotBuilt = None
) -> dict[str, Any]:
    """Forget an id, or one version (`mia@3`). Running requests finish on what they started with; pins are let go of
    where nothing is left to unpin them by.
    """
    gone = await run_in_threadpool(services.store.delete, reference)
    # Also if the client has left by now: pins without a name would stay for ever, and limits for the next of the name.
    await asyncio.shield(_forget(services, parse_reference(reference).adapter_id, gone.contents))
    return {"object": "adapter.deleted", "id": reference, "deleted": True, "versions_removed": gone.num_versions}


async def _forget(services: Services, adapter_id: str, keys: Sequence[AdapterKey]) -> None:
    await services.limits.tell(adapter_id)
    for key in keys:
        await services.engine.unpin(key)


async def _receive(request: Request, upload: BlobUpload) -> None:
    pending = bytearray()
    async for chunk in request.stream():
        pending += chunk
        if len(pending) >= WRITE_BYTES:
            await run_in_threadpool(upload.write, bytes(pending))
            pending.clear()
    await run_in_threadpool(upload.write, bytes(pending))


def _content_length(request: Request) -> int:
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "compressed bodies are not accepted", code="unsupported_media_type")
    text = request.headers.get("content-length", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ApiError(411, "Content-Length is required: how many bytes the file has", code="length_required")
    return int(text)


def _as_json(record: AdapterRecord) -> dict[str, Any]:
    versions = [
        {
            "version": v.version,
            "digest": f"sha256:{v.key}",
            "created": int(v.created_s),
            "rank": v.rank_max,
            "bytes": v.bytes,
        }
        for v in record.versions
    ]
    return {
        "object": "adapter",
        "id": record.adapter_id,
        "version": record.current_version,
        "digest": f"sha256:{record.key}",
        "created": int(record.created_s),
        "limits": dict(record.limits),
        "versions": versions,
    }
