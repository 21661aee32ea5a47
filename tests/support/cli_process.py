"""The `lorasrv` command in a separate process."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

COMMAND = (sys.executable, "-c", "from api.cli.main import main; main()")


def run(*arguments: object, env: Mapping[str, str] | None = None, **how: Any) -> "subprocess.CompletedProcess[str]":
    """Run the command to its end; `env` adds to the environment."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 400, "check": False}
    return subprocess.run([*COMMAND, *map(str, arguments)], env={**os.environ, **(env or {})}, **pipes | how)


@contextmanager
def started(*arguments: object, **how: Any) -> Iterator["subprocess.Popen[str]"]:
    """Start the command; kill it at the end of the `with` block if it still runs."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*COMMAND, *map(str, arguments)], **pipes | how)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
