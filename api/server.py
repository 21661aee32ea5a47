"""Run a server process: address, store, model, HTTP, in an order that reports errors as early as possible."""

import asyncio
import errno
import gc
import os
import secrets
import shlex
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from adapter_store.errors import StoreUnusable
from adapter_store.registry.feed import is_followed
from adapter_store.storage.root_lock import opening_errors
from api import early_stop
from api.asgi.draining_server import DrainingServer
from api.auth.key_store import KeyStore, has_keys
from api.config.device_defaults import fitted
from api.config.settings import ServerSettings
from api.observability.profile import check_profile_path, profile_written
from api.replication.follower import Follower, first_page
from api.replication.page_client import PageClient
from api.replication.registry_client import HttpOrigin, RegistryClient
from lorasrv.config import EngineConfig, default_store_dir
from lorasrv.engine.fault_injection import FaultInjector
from lorasrv.engine.watchdog import Watchdog
from lorasrv.errors import ConfigError, EngineDead, ServerStopping
from lorasrv.worker.host_memory import release_freed
from sgmv_kernels.cpu_runtime.kernel_compiler import compiling, compiling_in_background
from sgmv_kernels.cpu_runtime.kernel_names import Kernel, common_kernels, further_kernels
from sgmv_kernels.formats.kv_format import get_kv_format

if TYPE_CHECKING:
    from fastapi import FastAPI

    from adapter_store.store import AdapterStore
    from api.batches.manager import BatchManager
    from api.serving.served_engine import ServedEngine
    from api.serving.services import Services
    from lorasrv.metrics.trace_recorder import TraceRecorder

WAITING = "waiting for the registry"
Progress = Callable[[str, float], None]
"""Called with the current activity and the completed share of it, from 0 to 1."""
BACKGROUND_DELAY_S = 30.0
"""Delay of compiling kernels that few models need: in the meantime, the engine starts and measures threads."""


class CannotStart(Exception):
    """Report a server that cannot start, with the reason, if no other package has an error for it."""


class CannotListen(CannotStart):
    """Report an address that cannot be bound, with the reason; distinguishes it from other system errors."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Describe a server that has just started to serve."""

    url: str
    model: str
    quantization: str
    pool_bytes: int
    pages: int
    seconds: float
    # Number of servers behind the address, each with a pool of this size.
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Running:
    """Hold a running server."""

    ready: Ready
    services: "Services"
    # Begins to drain the server; may be called from any thread.
    stop: Callable[[], None]


def run(
    settings: ServerSettings, progress: Progress, on_ready: Callable[[Ready], None], *, computes: bool = True
) -> None:
    """Serve until SIGINT or SIGTERM, then drain (`api/asgi/draining.py`); a second signal shortens the drain.

    While the server is still loading, both signals end the process at once (`api/early_stop.py`).

    Args:
        on_ready: called when the server is ready in the sense of `/ready`; a follower first waits for a lease.
        computes: whether the server has an engine; without one, it keeps a store for the servers that follow it.

    Raises:
        LorasrvError, AdapterError: model, options or store are not usable, an option would have no effect, or other
            machines would need no key.
        ModulesRefused: adapters of `--lora-modules` are refused.
        CannotListen: the address cannot be bound.
        OSError.
    """
    started = time.monotonic()
    settings.check_alone()
    check_guarded(settings)
    faults = FaultInjector(settings.faults())
    early_stop.end_at_signals()

    def tell_ready(running: Running) -> None:
        follower = running.services.follower
        if follower is None:
            on_ready(running.ready)
            return
        progress(WAITING, 0.0)
        follower.when_leased(lambda: on_ready(replace(running.ready, seconds=_since(started))))

    with bind(settings.host, settings.port) as listener:
        serve_on(listener, settings, faults, progress, tell_ready, started, computes=computes)


def check_guarded(settings: ServerSettings) -> None:
    """Check that clients on other machines need a key, unless the options allow access without one.

    Raises:
        ConfigError: they would need none.
        StoreUnusable: the store's keys cannot be read, or a registry's would replace them.
    """
    root = settings.store.expanduser()
    if settings.registry is not None:
        # The registry's keys are not here yet; until they are, no request is served.
        _check_no_own_keys(root)
        return
    # Keys are read even if none is needed, to report an error before the model is loaded.
    if has_keys(root) or settings.serves_without_keys or settings.api_key is not None:
        return
    raise ConfigError(
        f"--host {settings.host} opens the server to other machines without a key; create one with "
        f"`{key_command(settings)}` or --api-key, add --insecure if that is what you want, or leave --host at 127.0.0.1"
    )


def key_command(settings: ServerSettings) -> str:
    """Return the command that creates a key for this server."""
    store = settings.store.expanduser()
    return "lorasrv key create" + ("" if store == default_store_dir() else f" --store {shlex.quote(str(store))}")


def _check_no_own_keys(root: Path) -> None:
    """Check that a follower's folder has no keys of its own, which its registry's keys would replace."""
    if has_keys(root) and not is_followed(root / "index.sqlite3"):
        raise StoreUnusable(
            f"store {root} has keys of its own (keys.db), and a server that follows a registry has that one's: create "
            "keys in the registry's folder, and name another --store here"
        )


def bind(host: str, port: int) -> socket.socket:
    """Bind the address, before loading, which takes seconds; clients are refused until the socket listens.

    Raises: CannotListen.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> CannotListen:
    fix = {
        errno.EADDRINUSE: "; --port 0 takes a free port",
        errno.EADDRNOTAVAIL: "; --host is no address of this machine",
    }.get(error.errno or 0, "")
    return CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}{fix}")


def serve_on(
    listener: socket.socket,
    settings: ServerSettings,
    faults: FaultInjector,
    progress: Progress,
    on_running: Callable[[Running], None],
    started: float,
    *,
    computes: bool,
) -> None:
    """Serve on a bound socket until `Running.stop` is called or, in the main thread, a signal comes.

    Args:
        started: monotonic time from which `Ready.seconds` counts.
        computes: as for `run`.
    """
    progress("importing torch", 0.0)
    # Set before torch is imported: by default, its OpenMP threads busy-wait for long between products, and starve the
    # event loop on few cores. Without busy-waiting (OMP_WAIT_POLICY=PASSIVE), a step takes three times as long.
    # Figures: docs/benchmarks/steps.md#threads.
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    with ExitStack() as opened:
        # No garbage collection until the server is ready: hardly any object that the start creates can be freed.
        gc.disable()
        opened.callback(gc.enable)
        # Compiling comes first: it takes longest at a first start, and needs nothing of what follows.
        compiling_early = opened.enter_context(ExitStack())
        common, further = _cpu_kernels(settings.engine_config()) if computes else ((), ())
        compilation = compiling_early.enter_context(compiling(common))
        if compilation is not None:
            compiling_early.enter_context(early_stop.closing(compilation.end))
        from api.app import create_app
        from api.config.lora_modules import register_modules
        from api.replication.store_engine import StoreEngine
        from lorasrv.engine.async_engine import AsyncEngine
        from lorasrv.models.loader.locate import read_tokenizer
        from lorasrv.worker.device import resolve_device

        progress("importing torch", 1.0)
        settings = fitted(settings)
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
        engine: ServedEngine
        if computes:
            fetch = PageClient.of(settings.read_cluster_secret())
            engine = AsyncEngine.build(settings.engine_config(), store, progress, observers, fetch)
            faults.arm_engine(engine)
        else:
            engine = StoreEngine.build(settings.engine_config().model, store)
        compiling_early.close()
        if further and resolve_device(settings.device).type == "cpu":
            opened.enter_context(compiling_in_background(further, BACKGROUND_DELAY_S))
        app = create_app(engine, store, settings, _follower(settings, store, origin))

        def tell_ready() -> None:
            if engine.error is not None:
                raise EngineDead(engine.error)
            # Exclude all present objects from garbage collection: scanning them makes a full collection take 120 ms,
            # during a step. Memory that the start has freed is returned to the system.
            gc.collect()
            gc.freeze()
            gc.enable()
            release_freed()
            ready = _ready(settings, engine, listener, _since(started))
            early_stop.started()
            on_running(Running(ready, app.state.services, lambda: server.handle_exit(signal.SIGTERM, None)))

        watchdog = Watchdog(engine, settings.watchdog_s)
        opened.callback(watchdog.disarm)
        with profile_written(settings.profile, engine.profile):
            server = _EngineServer(app, tell_ready, watchdog)
            try:
                listener.listen()
            except OSError as error:
                # Another server bound the address while this one was loading.
                host, port = listener.getsockname()[:2]
                raise _cannot_listen(host, port, error) from None
            server.run(sockets=[listener])
            if server.failure is not None:
                raise server.failure


def _origin(settings: ServerSettings) -> HttpOrigin | None:
    if settings.registry is None:
        return None
    if settings.lora_modules:
        raise ConfigError("--lora-modules registers adapters, which belong to the registry (--registry); do it there")
    return HttpOrigin(settings.registry, settings.read_registry_key())


def _follower(settings: ServerSettings, store: "AdapterStore", origin: HttpOrigin | None) -> Follower | None:
    if origin is None:
        return None
    return Follower(store, origin, RegistryClient(origin, settings.read_registry_key()), secrets.token_hex(8))


def _cpu_kernels(config: EngineConfig) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Return the kernels that the engine will load, as far as known before torch tells whether there is a GPU, and
    kernels that it may need later."""
    if config.model.device == "cuda" or config.model.kernels not in ("auto", "numba"):
        return (), ()
    formats = config.model.dtype, get_kv_format(config.memory.kv_cache_dtype, config.model.dtype).name
    return common_kernels(*formats), further_kernels(*formats)


def _open_recorder(settings: ServerSettings, opened: ExitStack) -> "list[TraceRecorder]":
    """Open the file of `--record-trace`, if any, before the model is loaded, so that a failure is reported at once."""
    from lorasrv.metrics.trace_recorder import TraceRecorder

    if settings.record_trace is None:
        return []
    try:
        return [opened.enter_context(TraceRecorder(settings.record_trace.expanduser()))]
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"--record-trace {settings.record_trace} cannot be written: {why}") from None


def open_store(settings: ServerSettings, origin: HttpOrigin | None = None) -> "AdapterStore":
    """Open the store, with the shapes of the base; also used by commands with an engine in their process.

    Args:
        origin: the registry to follow; None: this server owns its store.

    Raises: ModelError, AdapterError.
    """
    from adapter_store.store import AdapterStore
    from lorasrv.models.loader import open_checkpoint
    from lorasrv.models.loader.locate import checkpoint_name
    from lorasrv.models.lora_sites import base_sample, base_shapes

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

    def __init__(self, app: "FastAPI", on_started: Callable[[], None], watchdog: Watchdog) -> None:
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


def _ready(settings: ServerSettings, engine: "ServedEngine", listener: socket.socket, seconds: float) -> Ready:
    host, port = listener.getsockname()[:2]
    stats = engine.metrics.stats()
    return Ready(
        url=f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        model=settings.served_model_name or engine.model_name,
        quantization=engine.quantization,
        pool_bytes=stats.pool_bytes,
        pages=stats.pages_total,
        seconds=seconds,
    )


def _since(begun_s: float) -> float:
    return round(time.monotonic() - begun_s, 2)
