"""What a signal does to a start: closes what was opened last first, then ends the process; nothing once it serves.

As processes: `tests/api/cli/commands/test_serve.py::test_a_signal_before_it_is_ready`.
"""

import os
import signal
from collections.abc import Iterator

import pytest

from api import early_stop


class Ended(BaseException):
    """In place of the process's end, with its code."""


@pytest.fixture(autouse=True)
def _starting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    handlers = {number: signal.getsignal(number) for number in (*early_stop.EXIT_CODES, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    early_stop.end_at_signals()
    yield
    early_stop.started()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_what_is_open_is_closed_even_if_closing_one_fails() -> None:
    closed: list[str] = []
    with early_stop.closing(lambda: closed.append("over")):
        pass
    with (
        early_stop.closing(lambda: closed.append("first")),
        early_stop.closing(lambda: 1 / 0),
        early_stop.closing(lambda: closed.append("last")),
        pytest.raises(Ended, match="130"),
    ):
        signal.raise_signal(signal.SIGINT)
    assert closed == ["last", "first"]


def test_a_server_that_serves_closes_by_itself() -> None:
    early_stop.started()
    for number in early_stop.EXIT_CODES:
        signal.raise_signal(number)


def test_a_terminal_that_is_closed_ends_it_as_sigterm_does() -> None:
    with pytest.raises(Ended, match="0"):
        signal.raise_signal(signal.SIGHUP)


def test_a_terminal_that_is_closed_counts_once() -> None:
    """A shell that ends tells its jobs, and then the system does. A second signal would shorten the drain."""
    early_stop.started()
    got: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)
    assert got == [signal.SIGTERM]


def test_nohup_is_respected() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    early_stop.end_at_signals()
    signal.raise_signal(signal.SIGHUP)
