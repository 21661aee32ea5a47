"""Build the HTTP application, without global state."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from anyio import to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from adapter_store.errors import AdapterError
from adapter_store.registry.name_feed import Followed
from adapter_store.store import AdapterStore
from api.asgi.body_limits import BodyLimitMiddleware
from api.asgi.draining import DrainMiddleware
from api.asgi.middleware import Envelope, HeadRequests, LoopbackGuard
from api.asgi.response_limits import ResponseLimitMiddleware
from api.asgi.resumption import ResumptionMiddleware
from api.asgi.sse import ClientDisconnected
from api.auth.key_cache import KeyCache
from api.auth.middleware import AuthMiddleware, check_key
from api.auth.rate_limits import HEADERS as RATE_HEADERS
from api.auth.rate_limits import RateLimitMiddleware
from api.batches.in_process import in_process_client
from api.batches.manager import BatchManager
from api.config.settings import ServerSettings
from api.console import pages as console
from api.errors import INTERNAL_MESSAGE, answer_for, describe_at
from api.observability.setup import Observability
from api.replication.follower import Follower
from api.replication.gate import ReplicationGate
from api.replication.headers import REVISION
from api.replication.peer_headers import PeerHeaders
from api.replication.share_holder import ShareHolder
from api.replication.usage_sender import UsageSender
from api.routes import (
    adapter_stats,
    adapters,
    batches,
    files,
    health,
    models,
    openai,
    pages,
    personas,
    pool,
    registry,
    replica,
    tgi,
    tokenize,
    unsupported,
    verify,
    vllm_lora,
)
from api.schemas.openapi import DocumentedApi
from api.schemas.openapi_examples import EXAMPLES
from api.serving.adapter_limits import AdapterLimits
from api.serving.generation import key_salt
from api.serving.served_engine import ServedEngine
from api.serving.services import Services
from api.serving.tgi_responses import LORAX_HEADERS
from lorasrv import __version__
from lorasrv.errors import EngineDead, InvalidLimits, LorasrvError
from lorasrv.offline.verify.verifier import Verifier

_LOG = logging.getLogger(__name__)
CLIENT_CLOSED_REQUEST = 499
COLLECT_EVERY_S = 60.0
MANY_IDS = 100
EXPOSED_HEADERS = (
    "etag",
    "x-request-id",
    "x-adapter-id",
    "x-adapter-version",
    "x-adapter-digest",
    "x-adapter-tier",
    "x-adapter-fallback",
    "x-queue-ms",
    "x-load-ms",
    REVISION,
    *RATE_HEADERS,
    *LORAX_HEADERS,
)
_ROUTES = (
    openai,
    tgi,
    tokenize,
    models,
    adapters,
    pool,
    replica,
    adapter_stats,
    verify,
    personas,
    registry,
    files,
    batches,
    health,
    vllm_lora,
    pages,
    console,
    unsupported,
)


def create_app(
    engine: ServedEngine, store: AdapterStore, settings: ServerSettings, follower: Follower | None = None
) -> FastAPI:
    """Build an application around an engine, which it starts and shuts down; the caller closes the store.

    Args:
        follower: keeps the store up to date if it follows a registry; started and closed here.

    Raises:
        ConfigError, StoreUnusable: limits of all adapters, or of one in the store, are invalid.
    """
    parts = _AppParts.of(engine, store, settings, follower)
    services, watching = parts.services, parts.watching
    app = DocumentedApi(
        EXAMPLES,
        title="lorasrv",
        version=__version__,
        lifespan=parts.running,
        middleware=[watching.middleware, *_middleware(settings, parts.keys, services)],
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.services = services
    app.state.batches = parts.batches
    app.state.registry = watching.registry
    app.state.residents = watching.residents
    for module in _ROUTES:
        app.include_router(module.router)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    return app


@dataclass(frozen=True, slots=True)
class _AppParts:
    """Hold the parts of the application that run besides requests."""

    services: Services
    limits: AdapterLimits
    verifier: Verifier
    watching: Observability
    keys: KeyCache
    batches: BatchManager
    # Sends the usage of adapters to the registry; None: this server follows no registry.
    sender: UsageSender | None

    @classmethod
    def of(
        cls, engine: ServedEngine, store: AdapterStore, settings: ServerSettings, follower: Follower | None
    ) -> "_AppParts":
        clock = time.monotonic if follower is None else follower.clock
        limits = AdapterLimits(engine, store, settings.limits("adapter"), ShareHolder(engine, clock))
        limits.check()
        verifier = Verifier()
        services = Services.create(engine, store, settings, limits, verifier, follower)
        keys = KeyCache(
            store.root,
            settings.secret_key,
            open_without_keys=settings.serves_without_keys,
            cluster_secret=settings.read_cluster_secret(),
            now=time.time if follower is None else follower.registry_clock,
        )
        return cls(
            services,
            limits,
            verifier,
            Observability.of(services),
            keys,
            BatchManager(store.root, partial(in_process_client, services, check=partial(check_key, keys))),
            None if follower is None else UsageSender(services.ledger, follower.client),
        )

    @asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncIterator[None]:
        """Start all parts, and end all of them even if one fails to start or to end."""
        engine, follower, sender = self.services.engine, self.services.follower, self.sender
        async with AsyncExitStack() as ends:  # called in reverse order
            if follower is not None:
                ends.push_async_callback(follower.close)
            if sender is not None:
                ends.push_async_callback(sender.close)
            ends.push_async_callback(self.watching.close)
            ends.push_async_callback(self.services.registry.close)
            ends.callback(self.keys.close)
            ends.push_async_callback(self.keys.write_uses)
            ends.push_async_callback(engine.shutdown)
            ends.push_async_callback(self.verifier.close)
            ends.push_async_callback(self.batches.close)
            await engine.start()
            # Makes anyio import what it needs now, which takes 25 ms, and not at the first request.
            to_thread.current_default_thread_limiter()
            self.watching.start()
            for work in (_collect(self.services.store), self.keys.keep_uses(), _forget_answers(self.keys, engine)):
                ends.callback(asyncio.create_task(work).cancel)
            if follower is not None:
                ends.push_async_callback(follower.stop)
                await follower.share(self.limits.shares)
            else:
                await self.services.registry.start()
            await self.limits.apply_all()
            await self.batches.start()
            if follower is not None:
                await follower.start(partial(_followed, self.services))
            if sender is not None:
                sender.start()
            # Last: the engine thread warms up beside all others.
            await engine.warmed()
            yield


async def _collect(store: AdapterStore) -> None:
    """Remove deleted adapters once their requests have ended, and unregistered weights after a day."""
    while True:
        await asyncio.sleep(COLLECT_EVERY_S)
        try:
            await run_in_threadpool(store.collector.collect)
            await run_in_threadpool(store.collector.remove_orphans)
        except AdapterError as error:
            _LOG.warning("cannot remove deleted adapters from the disk now: %s", error)


async def _followed(services: Services, changed: Followed) -> None:
    """Apply a change that came by the feed, in the same way as the server that received it."""
    # A page of a whole history has thousands of ids.
    await services.ledger.prune(changed.ids if len(changed.ids) < MANY_IDS else None)
    try:
        await services.forget_deleted(changed.ids, changed.unnamed)
    except (EngineDead, InvalidLimits) as error:
        _LOG.warning("limits of changed adapters are not applied: %s", error)


async def _forget_answers(keys: KeyCache, engine: ServedEngine) -> None:
    """Drop past answers to keys that have ended: later answers would be drafted from them."""
    with suppress(EngineDead):
        while True:
            await asyncio.sleep(COLLECT_EVERY_S)
            for name in keys.take_ended():
                await engine.forget_answers(salt=key_salt(name))


def _middleware(settings: ServerSettings, keys: KeyCache, services: Services) -> list[Middleware]:
    """Return the middleware, outermost first. Browsers' preflight requests, which have no key, are answered before
    authentication.
    """
    around = [
        Middleware(Envelope),
        Middleware(DrainMiddleware, draining=services.draining),
        Middleware(ReplicationGate, store=services.store, follower=services.follower),
        Middleware(HeadRequests),
        Middleware(
            LoopbackGuard,
            allowed_origins=settings.allowed_origins,
            checks_host=lambda: settings.checks_host and keys.is_open(),
        ),
    ]
    if settings.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
        around.append(cors)
    return [
        *around,
        Middleware(AuthMiddleware, keys=keys),
        Middleware(ResponseLimitMiddleware),
        # Before the limits, which are those of the client's body.
        Middleware(ResumptionMiddleware, is_cluster=keys.is_cluster),
        Middleware(BodyLimitMiddleware),
        Middleware(RateLimitMiddleware, rate_limiter=services.admission.rate_limiter),
        Middleware(PeerHeaders, keys=keys),
    ]


async def _answer_error(request: Request, error: Exception) -> Response:
    if answer_for(type(error)).message == INTERNAL_MESSAGE and not isinstance(
        error, HTTPException | RequestValidationError
    ):
        raise error
    return describe_at(request.url.path, error).response()


async def _answer_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


_HANDLERS: Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    HTTPException: _answer_error,
    RequestValidationError: _answer_error,
    LorasrvError: _answer_error,
    AdapterError: _answer_error,
    ClientDisconnected: _answer_nobody,
    ClientDisconnect: _answer_nobody,
}
