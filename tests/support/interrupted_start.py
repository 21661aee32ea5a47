"""`lorasrv serve --replicas 2` with a fake Ray, which waits at one moment of the start until a signal comes.

The first argument names the moment; the others are the command's.
"""

import asyncio
import signal
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any, Never

from api.cluster import local
from api.cluster.pick import ReplicaWatch
from api.config.settings import ServerSettings
from api.server import Ready
from lorasrv.placement.kinds import make_placement


def wait() -> None:
    """Wait for the signal that the test sends once it reads this."""
    print("held", file=sys.stderr, flush=True)
    time.sleep(4)


def as_another_error() -> None:
    """Wait as an extension module does, which reports another error."""
    try:
        wait()
    except BaseException:
        raise SystemError("as an extension module reports it") from None


class WaitsAtItsEnd:
    """Wait in a destructor, which ignores exceptions."""

    def __del__(self) -> None:
        wait()


def as_rays_handler(number: int, frame: object) -> Never:
    """End the process as Ray's own handler of SIGTERM does."""
    sys.exit(number)


def held_after_ray() -> None:
    """Wait with the handler that `ray.init` sets."""
    signal.signal(signal.SIGTERM, as_rays_handler)
    wait()


async def look(moments: list[str]) -> Any:
    """Return no replica; the first call first waits in a task of the server."""
    moment = moments.pop() if moments else ""
    if moment == "the edge starts":
        wait()
    if moment == "the edge waits":
        print("held", file=sys.stderr, flush=True)
        await asyncio.sleep(4)
    return []


MOMENT = sys.argv[1]
AT = {
    "the handlers are there": ("with_cluster_secret", wait),
    "Ray is imported": ("ray_variables", as_another_error),
    "Ray's processes start": ("start", as_another_error),
    "a destructor runs": ("start", lambda: WaitsAtItsEnd() and None),
    "Ray has handlers of its own": ("start", held_after_ray),
    "replicas start": ("replicas", wait),
}
PLACE, HOLD = AT.get(MOMENT, ("", wait))


def held(place: str, value: Any = None) -> Any:
    """Return a function that waits if `place` is the chosen moment."""
    real = value if callable(value) else lambda *_: value

    def run(*arguments: Any) -> Any:
        if place == PLACE:
            HOLD()
        return real(*arguments)

    return run


def replicas(settings: ServerSettings, home: object, progress: Any) -> tuple[ReplicaWatch, str, Ready]:
    """Return a cluster without a replica."""
    progress(local.STARTING, 1.0)
    ready = Ready("", "tiny", "int8", 1 << 20, 1, 0.0)
    return ReplicaWatch(partial(look, [MOMENT]), make_placement("hash")), "http://127.0.0.1:1", ready


def main() -> None:
    """Run the command."""
    ray = SimpleNamespace(serve=SimpleNamespace(start=lambda **_: None, shutdown=lambda: None), shutdown=lambda: None)
    sys.modules["ray"] = ray  # type: ignore[assignment]
    local.find_spec = lambda name: object()  # type: ignore[attr-defined, assignment, misc]
    local.ray_variables = held("ray_variables", {})
    local._start = held("start")
    local._replicas = held("replicas", replicas)
    settings: Any = ServerSettings
    settings.with_cluster_secret = held("with_cluster_secret", settings.with_cluster_secret)
    del sys.argv[1]
    from api.cli.main import main

    main()


if __name__ == "__main__":
    main()
