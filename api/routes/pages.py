"""Serve POST /v1/pages/offer and GET /v1/pages/{lease}: prefix pages for other servers of the cluster.

These routes require the cluster's secret, because a hash that is found reveals that some client has sent this prompt.
"""

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from adapter_store.spec import AdapterKey
from adapter_store.storage.snapshots import differing
from api.asgi.json_body import JsonRoute
from api.asgi.sse import ByteStream, run_until_disconnect
from api.config.replication_settings import DECODE
from api.errors import ApiError
from api.replication.page_frames import LAYOUT, PageOffer, check_of, frames, stream_bytes
from api.serving.served_engine import ServedEngine
from api.serving.services import Services, ServicesDep
from lorasrv.errors import LeaseEnded, PagesDiffer
from lorasrv.outputs import PageLease
from lorasrv.request import FixedPrefix, RequestOptions
from lorasrv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from lorasrv.engine.page_lender import PageLender

NUM_READERS = 2
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""The token is discarded. A pass that generates no token would need its own path through the scheduler."""
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

# Hidden from the API description: only servers of the same version read these routes, no clients.
router = APIRouter(route_class=JsonRoute, include_in_schema=False)


class PrefixBody(BaseModel):
    """Describe the beginning of a prompt that comes from a persona."""

    model_config = ConfigDict(extra="forbid")

    owner: str
    salt: str
    num_tokens: int


class PromptBody(BaseModel):
    """Hold a prompt whose pages to compute if they are missing."""

    model_config = ConfigDict(extra="forbid")

    token_ids: list[int]
    adapter: str | None
    adapter_id: str
    principal: str
    salt: str
    priority: int
    prefix: PrefixBody | None


class OfferBody(BaseModel):
    """Ask for pages by their hashes."""

    model_config = ConfigDict(extra="forbid")

    layout: int
    # Properties that must be equal on both servers.
    facts: dict[str, Any]
    digests: Annotated[list[_Digest], Field(min_length=1)]
    # None: send existing pages only.
    prompt: PromptBody | None
    # How long the requesting server waits at most.
    wait_s: Annotated[float, Field(gt=0, le=600)]


@router.post("/v1/pages/offer")
async def offer_pages(request: Request, body: OfferBody, services: ServicesDep) -> PageOffer:
    """Hold pages for half a minute, so that another server can read them. Given their prompt, compute missing ones."""
    lender = services.engine.pages
    check_equal(lender, body)
    if body.prompt is not None and services.settings.role == DECODE:
        raise ApiError(409, "this server computes no prompts for others: --role decode", code="role", param="prompt")
    prompt = None if services.draining.is_on else body.prompt
    lease = await run_until_disconnect(request.receive, _offer(services, body, prompt))
    pages = len(lease.pages)
    return PageOffer(lease=lease.lease_id if pages else None, pages=pages, page_bytes=lender.page_bytes)


@router.get("/v1/pages/{lease}")
async def read_pages(lease: str, services: ServicesDep) -> Response:
    """Send the pages of a lease as frames, and end the lease."""
    lender = services.engine.pages
    num_pages = lender.num_pages(lease)
    return ByteStream(
        _frames(lender, lease, num_pages),
        partial(lender.end, lease),
        {"content-type": "application/octet-stream"},
        stream_bytes(num_pages, lender.page_bytes),
    )


def check_equal(lender: "PageLender", body: OfferBody) -> None:
    """Check that the pages of both servers are compatible bit by bit.

    Raises:
        PagesDiffer: they are not; the message names the differences.
    """
    if body.layout != LAYOUT:
        raise PagesDiffer(f"layout: this server sends pages in layout {LAYOUT}, not {body.layout}")
    if lender.facts is None:
        raise PagesDiffer("this server keeps no pages: its prefix cache is off")
    if different := differing(lender.facts, body.facts):
        raise PagesDiffer(f"pages of this server are others: {', '.join(different)} differ")


async def _offer(services: Services, body: OfferBody, prompt: PromptBody | None) -> PageLease:
    """Lease the pages; given `prompt`, compute missing ones first."""
    engine = services.engine
    digests = [bytes.fromhex(digest) for digest in body.digests]
    lease = await engine.pages.offer(digests)
    if len(lease.pages) < len(digests) and prompt is not None:
        await engine.pages.end(lease.lease_id)
        await services.limits.shares.prepare(prompt.adapter_id, 1)
        await _compute(engine, prompt, body.wait_s)
        lease = await engine.pages.offer(digests)
    return lease


async def _compute(engine: ServedEngine, prompt: PromptBody, wait_s: float) -> None:
    """Compute the pages of a prompt, scheduled like the other requests of its key.

    Raises:
        LorasrvError, AdapterError: as `AsyncEngine.add`.
    """
    own = prompt.prefix
    options = RequestOptions(
        adapter_key=None if prompt.adapter is None else AdapterKey(prompt.adapter),
        adapter_id=prompt.adapter_id,
        principal=prompt.principal,
        cache_salt=prompt.salt,
        prefix=None if own is None else FixedPrefix(own.owner, own.salt, own.num_tokens),
        priority=prompt.priority,
        timeout_s=wait_s,
        is_for_peer=True,
    )
    async for _ in engine.generate(prompt.token_ids, _ONE_TOKEN, options):
        pass


async def _frames(lender: "PageLender", lease: str, num_pages: int) -> AsyncGenerator[memoryview | bytes, None]:
    """Yield the stream of a lease, reading one frame ahead.

    Raises:
        ConnectionAbortedError: the lease ended meanwhile.
    """
    loop = asyncio.get_running_loop()

    def read_next() -> "asyncio.Future[tuple[memoryview, bytes]] | None":
        frame = next(ahead, None)
        return None if frame is None else loop.run_in_executor(_readers(), _read, lender, lease, *frame)

    ahead = frames(num_pages, lender.page_bytes)
    reading = read_next()
    while reading is not None:
        try:
            data, check = await reading
        except LeaseEnded as error:
            raise ConnectionAbortedError(str(error)) from None
        reading = read_next()
        yield data
        yield check


def _read(lender: "PageLender", lease: str, first: int, count: int) -> tuple[memoryview, bytes]:
    data = lender.read(lease, first, count)
    return data, check_of(data)


@cache
def _readers() -> Executor:
    # Imported late, because the server has work to do at its start before it imports torch.
    from lorasrv.worker.device import compute_alone

    return ThreadPoolExecutor(NUM_READERS, "page-read", initializer=compute_alone)
