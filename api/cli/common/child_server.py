"""Run `lorasrv serve` in a separate process, as a user would, for commands that need a server temporarily."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from api.asgi.address import DEFAULT_SERVER
from api.cli.common.options import client_key
from api.cli.common.terminal import CliError, note

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0


@contextmanager
def running_server(options: Sequence[str]) -> Iterator[str]:
    """Start a server on a free port and yield its URL once it is ready; stop it at the end in any case.

    Its log shows only warnings and errors unless options say otherwise, because the user did not ask for a line per
    request.
    """
    # -P: a folder named api in the working directory must not shadow this package.
    command = [sys.executable, "-P", "-c", "from api.cli.main import main; main()", "serve"]
    log = ["--log-level", "warning", "--log-format", "text"]
    place = ["--host", "127.0.0.1", "--port", "0", "--json"]
    key = client_key(DEFAULT_SERVER)
    # The server accepts the key that the command will send, from whatever source.
    environment = {**os.environ, **({} if key is None else {"LORASRV_API_KEY": key})}
    process = subprocess.Popen(
        [*command, *log, *options, *place], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    relay = threading.Thread(target=_relay, args=(process,))
    relay.start()
    try:
        yield _wait_until_ready(process)
    finally:
        _stop(process)
        relay.join()
        assert process.stdout is not None
        process.stdout.close()


def _wait_until_ready(process: "subprocess.Popen[str]") -> str:
    """Return the URL from the line that reports readiness. A server that takes too long is stopped, which ends its
    output."""
    assert process.stdout is not None
    too_late = threading.Timer(START_TIMEOUT_S, process.terminate)
    too_late.start()
    try:
        line = process.stdout.readline()
    finally:
        too_late.cancel()
    if not line:
        raise CliError("the server did not start; its last output is above")
    ready = json.loads(line)
    note(f"server ready at {ready['url']} after {ready['seconds']:.1f} s: {ready['model']}, {ready['quantization']}")
    return str(ready["url"])


def _relay(process: "subprocess.Popen[str]") -> None:
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            note(f"  server: {line.rstrip()}")


def _stop(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
