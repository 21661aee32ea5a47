"""A serving process: address, store, model, HTTP, in the order in which failing early is cheapest."""

import gc
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from api.app import create_app
from api.lora_modules import register_modules
from api.profile import check_profile_path, profile_written
from api.settings import ServerSettings
from lorasrv.config import EngineConfig
from lorasrv.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from adapter_store.store import AdapterStore
    from lorasrv.async_engine import AsyncEngine
    from lorasrv.trace_recorder import TraceRecorder

# Streams get this long to end by themselves when the server is told to stop.
GRACE_S = 5
Progress = Callable[[str, float], None]
"""Told what is being done and how much of it is, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What a server that has just begun to answer tells whoever started it."""

    url: str
    model: str
    quantization: str
    pool_bytes: int
    pages: int
    seconds: float


def run(settings: ServerSettings, progress: Progress, on_ready: Callable[[Ready], None]) -> None:
    """Serve until SIGINT or SIGTERM, then end cleanly; both also end a server that is still loading.

    Raises:
        LorasrvError, AdapterError: model, options or store do not serve.
        ModulesRefused: adapters that are to be served are refused.
        OSError: the address cannot be had.
    """
    started = time.monotonic()
    config = settings.engine_config()
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with bind(settings.host, settings.port) as listener:
            _serve(settings, config, listener, progress, on_ready, started)
    except KeyboardInterrupt:
        return


def bind(host: str, port: int) -> socket.socket:
    """Take the address at once, before seconds go into loading; until it listens, clients are refused."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _serve(
    settings: ServerSettings,
    config: EngineConfig,
    listener: socket.socket,
    progress: Progress,
    on_ready: Callable[[Ready], None],
    started: float,
) -> None:
    progress("importing torch", 0.0)
    # Before torch: its OpenMP threads would spin for ages between products, and starve the event loop on few cores;
    # asleep at once (OMP_WAIT_POLICY=PASSIVE) they cost a step three times its time. docs/benchmarks.md has figures.
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    from lorasrv.async_engine import AsyncEngine

    progress("importing torch", 1.0)
    with ExitStack() as opened:
        check_profile_path(settings.profile)
        recorder = _open_recorder(settings, opened)
        store = opened.enter_context(_open_store(settings))
        register_modules(store, settings.lora_modules, progress)
        # One bar for the whole load, not one for each of its layers.
        engine = AsyncEngine.build(config, store, lambda _, share: progress("loading the model", share))
        engine.recorder = recorder
        app = create_app(engine, store, settings)

        def tell_ready() -> None:
            # What was made until now stays: going through it costs a full collection 120 ms, in the middle of a step.
            gc.freeze()
            on_ready(_ready(settings, engine, listener, time.monotonic() - started))

        with profile_written(settings.profile, engine.profile):
            _Uvicorn(app, tell_ready, app.state.services.verifier.close).run(sockets=[listener])


def _open_recorder(settings: ServerSettings, opened: ExitStack) -> "TraceRecorder | None":
    """Before the model is loaded: a file that cannot be written is told at once."""
    from lorasrv.trace_recorder import TraceRecorder

    if settings.record_trace is None:
        return None
    try:
        return opened.enter_context(TraceRecorder(settings.record_trace.expanduser()))
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"--record-trace {settings.record_trace} cannot be written: {why}") from None


def _open_store(settings: ServerSettings) -> "AdapterStore":
    from adapter_store.store import AdapterStore
    from lorasrv.base_shapes import base_sample, base_shapes
    from lorasrv.loaders import open_checkpoint

    checkpoint = open_checkpoint(settings.model, settings.load_format)
    try:
        name = settings.served_model_name or checkpoint.name
        shapes = replace(base_shapes(checkpoint.spec), name=name)
        sample = () if settings.load_format == "dummy" else base_sample(checkpoint)
    finally:
        checkpoint.close()
    return AdapterStore(
        settings.store.expanduser(),
        shapes,
        max_lora_rank=settings.max_lora_rank,
        reserved_ids=frozenset({name}),
        quota=settings.store_quota(),
        base_sample=sample,
        accept_base_change=settings.accept_base_change,
    )


class _Uvicorn(uvicorn.Server):
    """uvicorn that says when it has begun to answer, and when it is about to wait for the last answers."""

    def __init__(
        self, app: "FastAPI", on_started: Callable[[], None], on_shutdown: Callable[[], Awaitable[None]]
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)
        self._on_started = on_started
        self._on_shutdown = on_shutdown

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._on_shutdown()
        await super().shutdown(sockets)


def _ready(settings: ServerSettings, engine: "AsyncEngine", listener: socket.socket, seconds: float) -> Ready:
    host, port = listener.getsockname()[:2]
    snapshot = engine.metrics.snapshot()
    return Ready(
        url=f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        model=settings.served_model_name or engine.model_name,
        quantization=engine.quantization,
        pool_bytes=snapshot.pool_bytes,
        pages=snapshot.pages_total,
        seconds=round(seconds, 2),
    )


def _interrupt(_: int, __: FrameType | None) -> None:
    # While uvicorn serves it has handlers of its own; it raises the signal again, to these, once it has shut down.
    raise KeyboardInterrupt
