"""Watch a running server live (top)."""

import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.asgi.address import DEFAULT_SERVER
from api.cli.common.options import JsonOption, ReplicaOption, ServerOption, check_one_server, connected
from api.cli.common.terminal import note, out, print_json, say
from api.cli.top.stats import History, Sample

if TYPE_CHECKING:
    from api.client import Client

WAIT_S = 5.0
"""Time after which a server that does not respond is shown as gone; it is polled again."""
KEY_POLL_S = 0.2
"""Interval of checks for a pressed key or a resized terminal."""


def top(
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Time between two samples, which refresh the screen.")
    ] = 2.0,
    count: Annotated[int | None, typer.Option("--count", min=1, help="Stop after so many samples.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one sample as plain lines.")] = False,
    replica: ReplicaOption = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Watch a server: throughput, queue, pool, tiers, latencies, busiest adapters. q or Ctrl-C ends.

    Without a terminal: one line per sample. If the server stops, wait for it.
    """
    num_samples = 1 if once else count
    with connected(server, wait_s=WAIT_S) as client:
        watch = _Watch(client, replica)
        first = watch.sample()  # a server that never responded is an error
        if as_json or once or not out().is_terminal:
            _print(watch, first, interval, num_samples, as_json)
        else:
            _show(watch, first, interval, num_samples)


class _Watch:
    """Sample one server repeatedly."""

    def __init__(self, client: "Client", replica: str | None) -> None:
        self._client, self._replica = client, replica
        self._history = History()
        self.url = client.url
        self.model = ""

    def sample(self) -> dict[str, Any]:
        """Take a sample.

        Raises:
            ServerUnreachable, Refused.
            CliError: the address is an edge's, and no replica was chosen.
        """
        metrics = self._client.metrics(self._replica)
        check_one_server(self.url, metrics)
        self.model = self.model or self._client.info(self._replica)["model_id"]
        sample = Sample(time.monotonic(), metrics, self._client.pool(self._replica))
        about = {"time": round(time.time(), 3), "server": self.url, "model": self.model, "up": True}
        return {**about, **self._history.add(sample)}

    def try_sample(self) -> tuple[dict[str, Any] | None, str | None]:
        """Return the figures and None, or None and the reason why there are none."""
        from api.client import Refused, ServerUnreachable

        try:
            return self.sample(), None
        except (Refused, ServerUnreachable) as error:
            return None, str(error)


def _print(watch: _Watch, first: dict[str, Any], interval: float, num_samples: int | None, as_json: bool) -> None:
    """Print lines for files and programs. A missing server is reported once as text, or in every sample as JSON."""
    from api.cli.top.view import line

    figures: dict[str, Any] | None = first
    problem = reported = None
    done = 0
    while True:
        if as_json:
            gone = {"time": round(time.time(), 3), "server": watch.url, "up": False, "error": problem}
            print_json(figures or gone)
        elif figures is not None:
            say(line(figures, datetime.now().strftime("%H:%M:%S")))
        if problem != reported and problem is not None:
            note(f"lorasrv: {problem}; trying again")
        reported = problem
        done += 1
        if num_samples is not None and done >= num_samples:
            return
        time.sleep(interval)
        figures, problem = watch.try_sample()


def _show(watch: _Watch, first: dict[str, Any], interval: float, num_samples: int | None) -> None:
    """Show a live screen."""
    from rich.live import Live

    from api.cli.top.view import screen

    console = out()
    figures = first
    problem: str | None = None
    done = 1

    def drawn() -> Any:
        clock = datetime.now().strftime("%H:%M:%S")
        title = f"lorasrv top  {watch.model}  {watch.url}  {clock}  q ends"
        return screen(figures, title, problem and f"{problem}; trying again", console.width, console.height)

    with _keys() as pressed, Live(drawn(), console=console, screen=True, auto_refresh=False) as live:
        while num_samples is None or done < num_samples:
            until = time.monotonic() + interval
            size = console.size
            while time.monotonic() < until:
                if pressed(min(KEY_POLL_S, until - time.monotonic())) in ("q", "Q"):
                    return
                if console.size != size:
                    size = console.size
                    live.update(drawn(), refresh=True)
            latest, problem = watch.try_sample()
            figures = latest or figures
            live.update(drawn(), refresh=True)
            done += 1


@contextmanager
def _keys() -> Iterator[Any]:
    """Yield a function that waits up to the given seconds for a key ("" if none), with echo and line buffering off."""
    if not sys.stdin.isatty():

        def sleep(seconds: float) -> str:
            time.sleep(max(0.0, seconds))
            return ""

        yield sleep
        return
    import os
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([fd], [], [], max(0.0, seconds))
        return os.read(fd, 1).decode("ascii", "replace") if ready else ""

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
