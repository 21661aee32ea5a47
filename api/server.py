"""Run a server process: check the options, bind the address, and compile kernels while `api.engine_server` is imported.

Imports neither torch nor FastAPI, so that compiling, which takes longest at a first start, begins at once.
"""

import errno
import gc
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from adapter_store.errors import StoreUnusable
from adapter_store.registry.feed import is_followed
from api import early_stop
from api.auth.key_store import has_keys
from api.config.settings import ServerSettings
from lorasrv.config import EngineConfig, default_store_dir
from lorasrv.errors import ConfigError
from sgmv_kernels.cpu_runtime.kernel_compiler import compiling, compiling_in_background
from sgmv_kernels.cpu_runtime.kernel_names import Kernel, common_kernels, further_kernels
from sgmv_kernels.formats.kv_format import get_kv_format

if TYPE_CHECKING:
    from api.serving.served_engine import ServedEngine
    from api.serving.services import Services

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
    early_stop.end_at_signals()

    def tell_ready(running: Running) -> None:
        follower = running.services.follower
        if follower is None:
            on_ready(running.ready)
            return
        progress(WAITING, 0.0)
        follower.when_leased(lambda: on_ready(replace(running.ready, seconds=_since(started))))

    with bind(settings.host, settings.port) as listener:
        serve_on(listener, settings, progress, tell_ready, started, computes=computes)


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


def _listen(listener: socket.socket) -> None:
    """Let clients connect.

    Raises:
        CannotListen: another server bound the address while this one was loading.
    """
    try:
        listener.listen()
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> CannotListen:
    fix = {
        errno.EADDRINUSE: "; --port 0 takes a free port",
        errno.EADDRNOTAVAIL: "; --host is no address of this machine",
    }.get(error.errno or 0, "")
    return CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}{fix}")


def serve_on(
    listener: socket.socket,
    settings: ServerSettings,
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
        common, further = _cpu_kernels(settings.engine_config()) if computes else ((), ())
        with _compiling_meanwhile(common):
            from api import engine_server

            # What modules hold is never freed; scanning it before the server is ready takes 0.2 s.
            gc.freeze()
            progress("importing torch", 1.0)
            loaded = engine_server.load(settings, progress, opened, computes=computes)
        if further and loaded.is_on_cpu:
            opened.enter_context(compiling_in_background(further, BACKGROUND_DELAY_S))
        _listen(listener)

        def tell_running(services: "Services", stop: Callable[[], None]) -> None:
            ready = _ready(loaded.settings, loaded.engine, listener, _since(started))
            on_running(Running(ready, services, stop))

        engine_server.serve(loaded, listener, tell_running)


@contextmanager
def _compiling_meanwhile(kernels: Sequence[Kernel]) -> Iterator[None]:
    """Compile missing kernels during the block, which imports torch: this takes longest at a first start, and needs
    nothing of what the block does."""
    with ExitStack() as opened:
        compilation = opened.enter_context(compiling(kernels))
        if compilation is not None:
            opened.enter_context(early_stop.closing(compilation.end))
        yield


def _cpu_kernels(config: EngineConfig) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """Return the kernels that the engine will load, as far as known before torch tells whether there is a GPU, and
    kernels that it may need later."""
    if config.model.device == "cuda" or config.model.kernels not in ("auto", "numba"):
        return (), ()
    formats = config.model.dtype, get_kv_format(config.memory.kv_cache_dtype, config.model.dtype).name
    return common_kernels(*formats), further_kernels(*formats)


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
