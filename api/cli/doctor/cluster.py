"""Check for doctor what several replicas need: Ray, shared memory, ports, folders for Ray's files, memory for all."""

import importlib.metadata
import os
import shutil
import socket
from pathlib import Path

from api.cli.doctor.machine import Check
from api.config.settings import ServerSettings
from lorasrv.config import size
from lorasrv.errors import to_install

NEEDED = ("ray", "cryptography")
MINOR = (2, 60)
SHARED_MEMORY = Path("/dev/shm")
SHARED_BYTES = 80 << 20
"""Object store of `serve --replicas`."""
MAX_HOME_CHARS = 35
PORTS = {6379: "Ray's head", 8265: "its dashboard", 10001: "its clients", 52365: "its agent", 8000: "Serve's proxy"}
"""Fixed ports of `ray start --head` and `serve run`."""
_INSTALL = to_install("cluster")


def versions() -> Check:
    """Check that Ray and cryptography are installed, and Ray's version."""
    missing = [name for name in NEEDED if _version(name) is None]
    if missing:
        return Check("fail", f"not installed: {', '.join(missing)}", _INSTALL)
    version = _version("ray") or ""
    if tuple(int(part) for part in version.split(".")[:2]) != MINOR:
        wanted = ".".join(map(str, MINOR))
        return Check("fail", f"ray {version}: the cluster is made for {wanted}, and tested with no other", _INSTALL)
    return Check("ok", f"ray {version}, cryptography {_version('cryptography')}")


def shared_memory() -> Check:
    """Check that Ray's object store has room; containers have 64 MiB of shared memory by default."""
    if not SHARED_MEMORY.is_dir():
        return Check("fail", f"{SHARED_MEMORY} does not exist", f"mount a tmpfs of {size(2 * SHARED_BYTES)} there")
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < SHARED_BYTES:
        fix = "docker run --shm-size 256m; in Kubernetes an emptyDir of medium Memory"
        return Check("warn", f"{size(free)} free in {SHARED_MEMORY}, Ray takes {size(SHARED_BYTES)}", fix)
    return Check("ok", f"{size(free)} free in {SHARED_MEMORY}")


def ports() -> Check:
    """Report which of Ray's fixed ports are in use. `serve --replicas` uses free ports instead."""
    used = [f"{port} ({what})" for port, what in PORTS.items() if _is_used(port)]
    if not used:
        return Check("ok", f"{', '.join(map(str, PORTS))} are free for ray start and serve run")
    text = f"in use: {', '.join(used)}"
    return Check("warn", text, "serve --replicas needs none of them; another Ray on this machine does")


def folders(settings: ServerSettings) -> Check:
    """Check the folders for Ray's files and its token."""
    store, home = settings.store.expanduser().absolute(), Path.home()
    place = store / "replicas"
    where = f"serve --replicas keeps Ray's files in {place}"
    if len(str(place)) > MAX_HOME_CHARS:
        where = f"{place} is too long for Ray's sockets, so that its files are in a private folder of /tmp"
    if not os.access(home, os.W_OK):
        fix = "set HOME, or RAY_AUTH_TOKEN_PATH, to a place that can be written; serve --replicas needs neither"
        return Check("warn", f"{where}; ray start would keep its token in {home}, which is not writable", fix)
    return Check("ok", f"{where}; ray start keeps its token in {home / '.ray'}")


def memory(settings: ServerSettings, rank: int) -> Check:
    """Compare the memory that all replicas on this machine need together with the free memory. A single replica plans
    as if all of it were its own."""
    from api.cli.doctor import serving
    from api.cluster.local import replica_settings
    from lorasrv.worker.host_memory import free_bytes

    number = settings.max_replicas or settings.replicas or 2
    each = replica_settings(settings.model_copy(update={"replicas": number}))
    needed = serving.needed_bytes(each)
    one = serving.memory(each, rank)
    text = f"{number} replicas need {size(number * needed)} of {size(free_bytes())} free; each: {one.text}"
    if one.status != "fail" and number * needed > free_bytes():
        return Check("fail", text, "fewer --replicas, or a smaller --pool-bytes")
    return Check(one.status, text, one.fix)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_used(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
