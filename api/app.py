"""The HTTP application: one factory, no state outside it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from adapter_store.errors import AdapterError
from adapter_store.store import AdapterStore
from api.errors import answer_for, describe
from api.guard import Envelope, LoopbackGuard
from api.limits import LimitKeeper
from api.metrics import EngineCollector, StoreCollector
from api.routes import adapters, generate, models, operate, pool, verify, vllm_loras
from api.services import Services
from api.settings import ServerSettings
from api.sse import ClientGone
from lorasrv import __version__
from lorasrv.errors import LorasrvError
from lorasrv.verify.verifier import Verifier

if TYPE_CHECKING:
    from lorasrv.async_engine import AsyncEngine

_LOG = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
COLLECT_EVERY_S = 60.0
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
)


def create_app(engine: "AsyncEngine", store: AdapterStore, settings: ServerSettings) -> FastAPI:
    """An application around a built engine, which it starts and shuts down; the store stays its giver's to close.

    Raises:
        ConfigError, StoreUnusable: limits, of all adapters or of one in the store, are none.
    """
    limits = LimitKeeper(engine, store, settings.limits("adapter"))
    limits.check()
    verifier = Verifier()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        collecting = asyncio.create_task(_collect(store))
        try:
            await limits.tell_all()
            yield
        finally:
            collecting.cancel()
            await verifier.close()
            await engine.shutdown()

    app = FastAPI(
        title="lorasrv",
        version=__version__,
        lifespan=lifespan,
        middleware=_middleware(settings),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.services = Services(engine, store, settings, limits, verifier, started_s=int(time.time()))
    app.state.registry = CollectorRegistry()
    app.state.registry.register(EngineCollector(engine, app.state.services.base_name))
    app.state.registry.register(StoreCollector(store))
    for module in (generate, models, adapters, pool, verify, operate, vllm_loras):
        app.include_router(module.router)
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    return app


async def _collect(store: AdapterStore) -> None:
    """What was deleted while requests needed it goes when they have ended; what was never registered goes in a day."""
    while True:
        await asyncio.sleep(COLLECT_EVERY_S)
        try:
            await run_in_threadpool(store.collect)
            await run_in_threadpool(store.remove_orphans)
        except AdapterError as error:
            _LOG.warning("deleted adapters stay on the disk for now: %s", error)


def _middleware(settings: ServerSettings) -> list[Middleware]:
    """Outermost first."""
    around = [
        Middleware(Envelope),
        Middleware(LoopbackGuard, allowed_origins=settings.allowed_origins, checks_host=settings.checks_host),
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
    return around


async def _answer_error(_: Request, error: Exception) -> Response:
    if answer_for(type(error)).status == 500 and not isinstance(error, HTTPException | RequestValidationError):
        raise error
    return describe(error).response()


async def _answer_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


_HANDLERS: Mapping[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    HTTPException: _answer_error,
    RequestValidationError: _answer_error,
    LorasrvError: _answer_error,
    AdapterError: _answer_error,
    ClientGone: _answer_nobody,
    ClientDisconnect: _answer_nobody,
}
