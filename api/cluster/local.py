"""Run replicas on this machine under their own Ray, and the edge in front of them in this process.

Ray only starts, watches and ends processes. Its ports are bound to the loopback interface where it allows that; the
others require a certificate made for this start. It runs no dashboard, no proxy and no usage statistics, and writes
nothing to the home directory. All its files are in one folder, which is removed at the end, or by the next start.
"""

import asyncio
import contextlib
import fcntl
import io
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from pydantic import ByteSize
from starlette.types import ASGIApp, Receive, Scope, Send

from adapter_store.errors import StoreFull
from adapter_store.storage.blobs import PROBE_BYTES
from adapter_store.storage.root_lock import in_use
from api.asgi.draining_server import DrainingServer
from api.cluster.certificates import write_certificate
from api.cluster.edge import Edge
from api.cluster.interruption import Interruption
from api.cluster.log_pipe import log_pipe
from api.cluster.pick import ReplicaWatch
from api.cluster.shape import ClusterShape
from api.config.settings import ServerSettings
from api.server import CannotStart, Progress, Ready, bind, check_guarded
from lorasrv.config import POOL_FRACTION, size
from lorasrv.errors import ConfigError, to_install
from lorasrv.models.loader.locate import read_model_shape
from lorasrv.placement.kinds import make_placement
from lorasrv.worker.host_memory import free_bytes

_LOG = logging.getLogger(__name__)
APP, REGISTRY_APP = "lorasrv", "lorasrv-registry"
STORE_BYTES = 80 << 20
"""Ray's shared memory for objects; here, these are only small messages."""
MAX_HOME_CHARS = 35
"""Longest path of the folder. Paths of Ray's sockets are some 68 characters longer, and the kernel limits them."""
LOOKS_S = 0.2
MAX_STARTS = 3
STARTING = "starting replicas"
LOG = "log"
_ERROR_LINE = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|[A-Z]\w+): (?P<what>.+)")


class ReplicasFailed(CannotStart):
    """Report that no replica can be started, with the reason that the first one gave."""


def run(settings: ServerSettings, progress: Progress, on_ready: Callable[[Ready], None]) -> None:
    """Serve `settings.replicas` replicas until SIGINT or SIGTERM, then drain; a second signal shortens the drain.

    Raises:
        ConfigError: Ray is not installed, an option cannot be used with replicas, or other machines would need no key.
        LorasrvError, AdapterError: model, options or store are not usable.
        ReplicasFailed: no replica starts.
        CannotListen: the address cannot be bound.
        KeyboardInterrupt: SIGINT before the server is ready.
        OSError.
    """
    started = time.monotonic()
    check_guarded(settings)
    check_options(settings)
    out, interruption = sys.stdout, Interruption()
    interruption.install()
    progress = interruption.checking(progress)
    is_ready = False

    def tell() -> None:
        nonlocal is_ready
        is_ready = True
        _tell(out, on_ready, replace(ready, seconds=round(time.monotonic() - started, 2)))

    with interruption.instead_of_errors():
        settings = settings.with_cluster_secret()
        with (
            bind(settings.host, settings.port) as listener,
            _home(settings.store.expanduser()) as home,
            log_pipe(home / LOG),
            _ray(home, progress, interruption),
        ):
            watch, registry, ready = _replicas(settings, home, progress)
            host, port = listener.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            ready = replace(ready, url=url)
            edge = Edge(watch, registry, settings.read_cluster_secret())
            interruption.check()
            # Runs in the main thread until a signal.
            edge_server(settings, edge, watch, tell, interruption).run(sockets=[listener])
    if interruption.number == signal.SIGINT and not is_ready:
        raise KeyboardInterrupt


def check_options(settings: ServerSettings) -> None:
    """Refuse options that replicas do not support, and a base that is not there or not supported, before Ray starts. A
    base of the hub is downloaded, once for all replicas.

    Raises:
        ConfigError, ModelError.
    """
    if find_spec("ray") is None or find_spec("cryptography") is None:
        raise ConfigError(f"--replicas needs Ray, which is not installed: {to_install('cluster')}")
    if settings.profile is not None:
        raise ConfigError("--profile is of one server; leave --replicas out to profile it")
    settings.check_replicated()
    if settings.load_format != "dummy":
        read_model_shape(settings.model, download=True)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def replica_settings(settings: ServerSettings) -> ServerSettings:
    """Return the settings of one replica, with its share of each memory size that no option sets."""
    number = (settings.max_replicas or settings.replicas or 1) + (settings.prefill_replicas or 0)
    is_terminal = sys.stderr.isatty()
    changed: dict[str, Any] = {"log_format": "text" if is_terminal else "json"} if settings.log_format == "auto" else {}
    whole = settings.for_gpu(free_bytes()) if has_gpu(settings) else settings
    for name in ("host_cache_bytes", "swap_bytes", "corpus_bytes"):
        if name not in settings.model_fields_set:
            changed[name] = ByteSize(getattr(whole, name) // number)
    if settings.pool_bytes is None and settings.gpu_memory_utilization is None and not has_gpu(settings):
        changed["pool_bytes"] = ByteSize(free_bytes() * POOL_FRACTION / number)
    return settings.model_copy(update=changed)


def has_gpu(settings: ServerSettings) -> bool:
    """Return whether replicas would run on GPUs."""
    return settings.device != "cpu" and Path("/dev/nvidiactl").exists()


@contextmanager
def _home(store: Path) -> Iterator[Path]:
    """Make an empty folder for the block: in the store's folder if the paths of Ray's sockets are short enough there.

    Raises:
        StoreLocked: another process has locked the store's folder.
        StoreFull: the disk has no room for the files of Ray and the replicas.
    """
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The folder itself is locked, because a lock file could not be removed afterwards.
    lock = os.open(store, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(store, lock) from None
        home = store / "replicas"
        _remove(home)
        if len(str(home)) > MAX_HOME_CHARS:
            home.symlink_to(tempfile.mkdtemp(prefix="lorasrv-replicas-"))
        else:
            home.mkdir(mode=0o700)
        try:
            for folder in (store, home.resolve()):
                _check_room(folder)
            yield home.resolve()
        finally:
            _remove(home)
    finally:
        os.close(lock)


def _check_room(folder: Path) -> None:
    """Check that Ray and the replicas can write their files: on a full disk, the errors of Ray's processes do not say
    why.

    Raises: StoreFull.
    """
    if (free := shutil.disk_usage(folder).free) < PROBE_BYTES:
        raise StoreFull(
            f"{size(free)} are free on the disk of {folder}, and replicas need {size(PROBE_BYTES)}: free some space"
        )


def _remove(home: Path) -> None:
    """Remove the folder of this start, or of an earlier one that was killed."""
    shutil.rmtree(home.resolve(), ignore_errors=True)
    if home.is_symlink():
        home.unlink()


def ray_variables(home: Path) -> dict[str, str]:
    """Write the secrets of a local Ray, and return the environment variables that isolate it."""
    token = home / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        # Despite its name, it decides on every system whether there may be other nodes; 0: everything on 127.0.0.1.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # 0: any free port. The default ports are fixed, and a second cluster would find them taken.
        "AUTOSCALER_METRIC_PORT": "0",
        "DASHBOARD_METRIC_PORT": "0",
        **write_certificate(home),
    }


@contextmanager
def _ray(home: Path, progress: Progress, interruption: Interruption) -> Iterator[None]:
    """Run Ray while the block runs."""
    progress("starting Ray", 0.0)
    os.environ.update(ray_variables(home))
    import ray
    from ray import serve

    # Ray's own record factory adds a time of its own to each line.
    logging.setLogRecordFactory(logging.LogRecord)
    for name in ("ray", "ray.serve"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [logging.NullHandler()]
        logger.propagate = False
    with contextlib.redirect_stdout(_RayLines()):
        try:
            with _ray_errors():
                _start(home)
            # Ray has set a handler of its own.
            interruption.install()
            progress("starting Ray", 0.6)
            with _ray_errors():
                serve.start(proxy_location="Disabled")
            progress("starting Ray", 1.0)
            yield
        finally:
            # Another signal's exception would leave Ray's processes and their folder behind.
            interruption.only_remember()
            _LOG.info("stopping the replicas, which may take half a minute")
            with contextlib.suppress(Exception):
                serve.shutdown()
            ray.shutdown()


def _start(home: Path) -> None:
    """Start Ray's processes, which end when the calling thread ends.

    Retry, because on a busy machine some may not be up within Ray's own 30 s.
    """
    import ray

    for attempt in range(MAX_STARTS):
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                # Ray prestarts a process per CPU; replicas request none.
                num_cpus=0,
                object_store_memory=STORE_BYTES,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=str(home / f"ray{attempt}"),
            )
        except Exception as error:
            ray.shutdown()
            if attempt + 1 == MAX_STARTS:
                raise
            _LOG.warning("Ray does not start, and is started again: %s", reason_of(str(error)))
        else:
            return


@contextmanager
def _ray_errors() -> Iterator[None]:
    """Report in one line why Ray does not start.

    Raises:
        ReplicasFailed.
    """
    try:
        yield
    except Exception as error:
        raise ReplicasFailed(f"Ray does not start: {reason_of(str(error))}") from None


def _replicas(settings: ServerSettings, home: Path, progress: Progress) -> tuple[ReplicaWatch, str, Ready]:
    """Start the replicas and wait for them; return their chooser, their registry's address and their description.

    Raises:
        ReplicasFailed.
    """
    from ray import serve

    from api.cluster.app import PREFILL, REPLICA, RegistryApp, application, look_at, registry_application

    number, names = settings.replicas or 1, [REPLICA]
    if settings.prefill_replicas is not None:
        number, names = number + settings.prefill_replicas, [REPLICA, PREFILL]
    progress(STARTING, 0.0)
    shape = ClusterShape(
        edges=0,
        cpus=0.0,
        gpus=1.0 if has_gpu(settings) else 0.0,
        cache=home / "cache",
        registry_port=free_port(),
        threads=max(1, len(os.sched_getaffinity(0)) // number),
        log=str(home / LOG),
        registry_app=None if settings.registry else REGISTRY_APP,
    )
    parts = {APP: application(replica_settings(settings), shape)}
    if shape.registry_app is not None:
        # The registry comes first: if it fails, replicas fail because of it.
        parts = {shape.registry_app: registry_application(replica_settings(settings), shape), **parts}
    targets = [serve.RunTarget(part, name, None) for name, part in parts.items()]
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    while True:
        known = serve.status().applications
        apps = {name: known[name] for name in parts}
        failed = [
            one.message for app in apps.values() for one in app.deployments.values() if "failed to start" in one.message
        ] + [app.message for app in apps.values() if app.status == "DEPLOY_FAILED"]
        if failed:
            raise ReplicasFailed(reason_of(failed[0]))
        deployments = apps[APP].deployments
        num_ready = sum(deployments[name].replica_states.get("RUNNING", 0) for name in names if name in deployments)
        progress(STARTING, num_ready / number)
        if all(app.status == "RUNNING" for app in apps.values()):
            break
        time.sleep(LOOKS_S)
    handles = [serve.get_deployment_handle(name, APP) for name in names]
    watch = ReplicaWatch(look_at(*handles), make_placement(settings.placement))
    readies: list[Ready] = [ready for handle in handles for ready in handle.broadcast("ready").results()]
    registry = settings.registry or RegistryApp(REGISTRY_APP).handle().address.remote().result()
    return watch, registry, replace(readies[0], replicas=len(readies))


def _tell(out: TextIO, on_ready: Callable[[Ready], None], ready: Ready) -> None:
    """Call `on_ready` with the command's own stdout, which Ray's lines do not reach."""
    with contextlib.redirect_stdout(out):
        on_ready(ready)


def reason_of(message: str) -> str:
    """Return the error text of the last traceback line in Serve's message about a replica, without the class name."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    found = [match for line in lines if (match := _ERROR_LINE.match(line))]
    return found[-1]["what"] if found else (lines or ["Ray does not say why"])[-1]


def edge_server(
    settings: ServerSettings,
    edge: Edge,
    watch: ReplicaWatch,
    on_ready: Callable[[], None],
    interruption: Interruption,
) -> DrainingServer:
    """Return the server of the edge, which keeps the list of replicas while it runs.

    Args:
        on_ready: called once a replica is ready in the sense of `/ready`: a follower of a registry needs a lease.
    """
    limits, cuts = settings.connection_limits(), edge.stats.cuts

    async def wait() -> None:
        await watch.was_ready.wait()
        on_ready()

    def start_to_wait() -> None:
        server.waiting = asyncio.create_task(wait())

    server = _EdgeServer(
        _Watching(edge, watch), limits, edge.draining, settings.drain_s, start_to_wait, cuts, interruption=interruption
    )
    return server


class _EdgeServer(DrainingServer):
    """Drain at a signal once it serves; before that, a signal ends the start."""

    def __init__(self, *arguments: Any, interruption: Interruption) -> None:
        super().__init__(*arguments)
        self._interruption = interruption
        self._starting: asyncio.Task[Any] | None = None
        # Referenced here, because an event loop holds only weak references to its tasks.
        self.waiting: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._starting = asyncio.current_task()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.started or self._starting is None:
            super().handle_exit(sig, frame)
            return
        # Do not raise: if uvicorn were in the application's startup, it would serve without what startup prepares.
        self._interruption.remember(sig)
        asyncio.get_running_loop().call_soon_threadsafe(self._starting.cancel)


class _Watching:
    """Keep the list of replicas up to date while an application runs."""

    def __init__(self, app: ASGIApp, watch: ReplicaWatch) -> None:
        self._app, self._watch = app, watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        # After an exception here, uvicorn would serve without the application's lifespan; `run` refreshes again.
        with contextlib.suppress(Exception):
            await self._watch.refresh()
        keeping = asyncio.create_task(self._watch.run())
        try:
            await self._app(scope, receive, send)
        finally:
            keeping.cancel()


class _RayLines(io.TextIOBase):
    """Log what Ray prints, which would otherwise mix with the command's output."""

    def write(self, text: str) -> int:
        for line in filter(None, map(str.strip, text.splitlines())):
            _LOG.debug("ray: %s", line)
        return len(text)
