"""Load a store and an engine, and serve them over HTTP, in an order that reports errors as early as possible."""

import asyncio
import gc
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import FrameType

from fastapi import FastAPI

from adapter_store.storage.root_lock import opening_errors
from adapter_store.store import AdapterStore
from api import early_stop
from api.app import create_app
from api.asgi.draining_server import DrainingServer
from api.auth.key_store import KeyStore
from api.batches.manager import BatchManager
from api.config.device_defaults import fitted
from api.config.lora_modules import register_modules
from api.config.settings import ServerSettings
from api.observability.profile import check_profile_path, profile_written
from api.replication.follower import Follower, first_page
from api.replication.page_client import PageClient
from api.replication.registry_client import HttpOrigin, RegistryClient
from api.replication.store_engine import StoreEngine
from api.serving.services import Services
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.engine.fault_injection import FaultInjector
from lorasrv.engine.watchdog import Watchdog
from lorasrv.errors import ConfigError, EngineDead, ServerStopping
from lorasrv.metrics.trace_recorder import TraceRecorder
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.loader.locate import checkpoint_name, read_tokenizer
from lorasrv.models.lora_sites import base_sample, base_shapes
from lorasrv.worker.device import resolve_device
from lorasrv.worker.host_memory import release_freed
from sgmv_kernels.backend import Progress


@dataclass(frozen=True, slots=True)
class Loaded:
    """Hold what a server serves."""

    # With the defaults of the device.
    settings: ServerSettings
    store: AdapterStore
    origin: HttpOrigin | None
    engine: AsyncEngine | StoreEngine
    # Whether the engine computes on the CPU.
    is_on_cpu: bool


def load(settings: ServerSettings, progress: Progress, opened: ExitStack, *, computes: bool) -> Loaded:
    """Open the store and load the engine, both until `opened` is closed.

    Args:
        computes: whether there is an engine; without one, the server keeps a store for the servers that follow it.
    """
    settings, faults = fitted(settings), FaultInjector(settings.faults())
    check_profile_path(settings.profile)
    observers = _open_recorder(settings, opened)
    origin = _origin(settings)
    store = opened.enter_context(open_store(settings, origin))
    # A disk without room for keys and uploads is reported before the model is loaded.
    with opening_errors(store.root):
        KeyStore(store.root).close()
        store.check_writable()
    if origin is not None:
        progress("following the registry", 0.0)
        first_page(store, RegistryClient(origin, settings.read_registry_key()))
    faults.arm_store(store)
    register_modules(store, settings.lora_modules, progress, partial(read_tokenizer, settings.model))
    engine: AsyncEngine | StoreEngine
    if computes:
        fetch = PageClient.of(settings.read_cluster_secret())
        engine = AsyncEngine.build(settings.engine_config(), store, progress, observers, fetch)
        faults.arm_engine(engine)
    else:
        engine = StoreEngine.build(settings.engine_config().model, store)
    is_on_cpu = computes and resolve_device(settings.device).type == "cpu"
    return Loaded(settings, store, origin, engine, is_on_cpu)


def serve(loaded: Loaded, listener: socket.socket, on_started: Callable[[Services, Callable[[], None]], None]) -> None:
    """Serve on a listening socket until the server is stopped.

    Args:
        on_started: called with the server's services and a function that begins to drain it, from any thread.
    """
    settings, engine = loaded.settings, loaded.engine
    app = create_app(engine, loaded.store, settings, _follower(settings, loaded.store, loaded.origin))

    def tell_started() -> None:
        if engine.error is not None:
            raise EngineDead(engine.error)
        # Exclude all present objects from garbage collection: scanning them makes a full collection take 120 ms,
        # during a step. Memory that the start has freed is returned to the system.
        gc.collect()
        gc.freeze()
        gc.enable()
        release_freed()
        early_stop.started()
        on_started(app.state.services, lambda: server.handle_exit(signal.SIGTERM, None))

    watchdog = Watchdog(engine, settings.watchdog_s)
    server = _EngineServer(app, tell_started, watchdog)
    with ExitStack() as opened:
        opened.callback(watchdog.disarm)
        opened.enter_context(profile_written(settings.profile, engine.profile))
        server.run(sockets=[listener])
        if server.failure is not None:
            raise server.failure


def _origin(settings: ServerSettings) -> HttpOrigin | None:
    if settings.registry is None:
        return None
    if settings.lora_modules:
        raise ConfigError("--lora-modules registers adapters, which belong to the registry (--registry); do it there")
    return HttpOrigin(settings.registry, settings.read_registry_key())


def _follower(settings: ServerSettings, store: AdapterStore, origin: HttpOrigin | None) -> Follower | None:
    if origin is None:
        return None
    return Follower(store, origin, RegistryClient(origin, settings.read_registry_key()), secrets.token_hex(8))


def _open_recorder(settings: ServerSettings, opened: ExitStack) -> list[TraceRecorder]:
    """Open the file of `--record-trace`, if any, before the model is loaded, so that a failure is reported at once."""
    if settings.record_trace is None:
        return []
    try:
        return [opened.enter_context(TraceRecorder(settings.record_trace.expanduser()))]
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"--record-trace {settings.record_trace} cannot be written: {why}") from None


def open_store(settings: ServerSettings, origin: HttpOrigin | None = None) -> AdapterStore:
    """Open the store, with the shapes of the base; also used by commands with an engine in their process.

    Args:
        origin: the registry to follow; None: this server owns its store.

    Raises: ModelError, AdapterError.
    """
    checkpoint = open_checkpoint(settings.model, settings.load_format)
    try:
        name = settings.served_model_name or checkpoint.name
        shapes = base_shapes(checkpoint.spec, name, checkpoint_name(settings.model))
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
        form=settings.adapter_storage,
        origin=origin,
    )


class _EngineServer(DrainingServer):
    """Serve an application around an engine, and manage its watchdog, its batches and its shutdown."""

    def __init__(self, app: FastAPI, on_started: Callable[[], None], watchdog: Watchdog) -> None:
        services: Services = app.state.services
        settings = services.settings
        cuts = services.connections_cut
        super().__init__(app, settings.connection_limits(), services.draining, settings.drain_s, on_started, cuts)
        self._services = services
        self._batches: BatchManager = app.state.batches
        self._watchdog = watchdog
        self._pausing: asyncio.Task[None] | None = None
        # Why it has never been ready.
        self.failure: EngineDead | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except EngineDead as error:
            # Raised behind the shutdown, which closes everything in order.
            self.failure, self.should_exit = error, True
            return
        if self.started:
            self._watchdog.start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        early_stop.handle(sig, frame)
        super().handle_exit(sig, frame)

    def on_drain(self) -> None:
        if self._pausing is None:
            # Batches would not finish in time; they continue at the next start.
            self._pausing = asyncio.create_task(self._batches.close())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._watchdog.close()
        self._services.engine.abort_all("the server is shutting down", ServerStopping)
        await self._services.verifier.close()
        await super().shutdown(sockets)
