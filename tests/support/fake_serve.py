"""The real `lorasrv` command with a fake engine, since a real model would import torch and take seconds.

`--model` decides what it does: "slow" loads until its standard input ends, "hanging" stops after two tokens, a number
kills the process at that request, "full" finds no room for an upload on the store's disk, "dead" ends in its warm-up.
"""

import errno
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any


def command(*arguments: object) -> list[str]:
    """Return the command line of `lorasrv` with these arguments."""
    return [sys.executable, __file__, *map(str, arguments)]


def serve(*options: object, **how: Any) -> "subprocess.Popen[str]":
    """Start `lorasrv serve` on a free port; its output goes to pipes unless `how` says otherwise."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command("serve", "--port", 0, *options), **pipes | how)


def main() -> None:
    """Run the command, with the fake engine in place of the real one."""
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root), str(root / "tests" / "support")]
    from fake_engine import HANG, FakeEngine
    from tiny_adapter import SHAPES

    import api.asgi.draining_server
    from adapter_store.store import AdapterStore
    from api.cli.main import main

    class AsyncEngine(FakeEngine):
        kill_at, dies = -1, False

        @classmethod
        def build(
            cls, config: Any, store: AdapterStore, progress: Any, observers: Any = (), fetch: Any = None
        ) -> "AsyncEngine":
            for layer in range(8):
                progress("loading the model", layer / 8)
            engine, does = cls(), config.model.model
            if does == "slow":
                sys.stdin.read()
            elif does == "hanging":
                engine.breaks(2, HANG)
            elif does.isdigit():
                engine.kill_at = int(does)
            engine.dies = does == "dead"
            progress("loading the model", 1.0)
            return engine

        async def warmed(self) -> None:
            if self.dies:
                self.abort_all("the engine died: RuntimeError")

        async def add_choices(self, *arguments: Any, **options: Any) -> Any:
            if len(self.added) == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return await super().add_choices(*arguments, **options)

    def has_no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if "full" in sys.argv:
        os.posix_fallocate = has_no_room
    module = sys.modules["lorasrv.engine.async_engine"] = types.ModuleType("lorasrv.engine.async_engine")
    module.AsyncEngine = AsyncEngine  # type: ignore[attr-defined]
    api.asgi.draining_server.GRACE_S = 1
    from api import engine_server

    engine_server.open_store = lambda settings, origin=None: AdapterStore(settings.store, SHAPES)
    main()


if __name__ == "__main__":
    main()
