"""Serve /v1/registry: the routes for servers that follow this one."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from adapter_store.registry.feed_page import Position
from api.asgi.json_body import JsonRoute
from api.errors import ApiError
from api.replication.loans import LoanQuestion
from api.replication.shares import ShareQuestion
from api.routes.adapter_stats import unusable_ledger
from api.serving.services import ServicesDep
from lorasrv.metrics.usage_batch import MAX_NUMBER, from_rows
from lorasrv.metrics.usage_db import BATCH_ACCOUNTS

# Hidden from the API description: only servers of the cluster use these routes, no clients.
router = APIRouter(route_class=JsonRoute, include_in_schema=False)
MAX_WAIT_S = 60.0
_History = Annotated[str, Field(pattern="^[0-9a-f]{0,32}$")]
_Replica = Annotated[str, Field(pattern="^[0-9a-f]{8,64}$")]


class LeaseBody(BaseModel):
    """Hold a follower's state, sent when it renews its lease."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replica: _Replica
    history: _History = ""
    # Revision of the names that the follower shows; -1: it has none yet.
    revision: Annotated[int, Field(ge=-1)] = -1
    # Whether the follower is stopping.
    ends: bool = False
    loans: LoanQuestion = LoanQuestion(number=0)
    shares: ShareQuestion = ShareQuestion(number=0)


class UsageBody(BaseModel):
    """Hold a batch of a follower's ledger."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: _Replica
    sequence: Annotated[int, Field(ge=1, lt=MAX_NUMBER)]
    usage: Annotated[list[Any], Field(max_length=BATCH_ACCOUNTS)]


class _Weights(FileResponse):
    """Send a file, or a range of it, in chunks so large that the event loop handles few of them."""

    chunk_size = 1 << 20


@router.get("/v1/registry/changes")
async def changes(
    services: ServicesDep,
    history: Annotated[_History | None, Query()] = None,
    after: Annotated[int | None, Query(ge=0)] = None,
    keys: Annotated[str | None, Query(max_length=32)] = None,
    wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0,
) -> Response:
    """Return the ids that changed after the revision `after` of `history`, and the keys that changed since their digest
    was `keys`.

    Waits up to `wait_s` seconds for a change of either. If the history is unknown, returns all ids, in pages; if the
    digest is unknown, all keys.
    """
    position = None if history is None or after is None else Position(history, after)
    found = await services.registry.changes(position, keys, wait_s)
    body = await run_in_threadpool(lambda: json.dumps(found, separators=(",", ":")).encode())
    return Response(body, media_type="application/json")


@router.get("/v1/registry/blobs/{digest}")
async def blob(digest: str, services: ServicesDep) -> FileResponse:
    """Return weights by their digest; `Range` resumes an interrupted transfer."""
    path = await run_in_threadpool(services.registry.blob, digest)
    return _Weights(path, media_type="application/octet-stream")


@router.post("/v1/registry/lease")
async def lease(body: LeaseBody, services: ServicesDep) -> dict[str, Any]:
    """Extend a follower's lease, and record the revision that it has applied as acknowledged."""
    if body.ends:
        await services.registry.leases.end(body.replica)
        return {"lease_s": 0.0}
    return await services.registry.lease(body.replica, body.history, body.revision, body.loans, body.shares)


@router.post("/v1/registry/usage")
async def usage(body: UsageBody, services: ServicesDep) -> dict[str, bool]:
    """Add a batch of a follower's usage to the ledger, unless it was added before; return whether it was added now."""
    services.registry.check_is_owner()
    try:
        usages = await run_in_threadpool(from_rows, body.usage)
    except ValueError as error:
        raise ApiError(400, f"usage: {error}", code="invalid_value", param="usage") from None
    with unusable_ledger():
        return {"counted": await services.ledger.receive(body.source, body.sequence, usages)}
