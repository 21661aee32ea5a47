"""A command in a pseudo-terminal, and the screen that a person would see, which pyte renders."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pyte

COLUMNS, LINES = 100, 30
PATIENCE_S = 60.0
# It must be the process's controlling terminal, or Ctrl-C would reach no process.
SCRIPT = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from api.cli.main import main
main()
"""


class Terminal:
    """A running `lorasrv` and its screen."""

    def __init__(self, process: "subprocess.Popen[bytes]", fd: int, columns: int, lines: int) -> None:
        self.process = process
        self.raw = b""
        self._fd = fd
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def lines(self) -> list[str]:
        """Return the lines of the screen, without trailing blanks."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip()

    def until(self, *texts: str) -> str:
        """Wait until all of these texts are on the screen; return the screen."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(text in self.text for text in texts):
            assert time.monotonic() < deadline, f"{texts} did not come:\n{self.text}"
            assert self._read(0.1) or self.process.poll() is None, f"it ended without {texts}:\n{self.text}"
        return self.text

    def until_without(self, text: str) -> str:
        """Wait until this text is no longer on the screen; return the screen."""
        deadline = time.monotonic() + PATIENCE_S
        while text in self.text:
            assert time.monotonic() < deadline, f"{text} does not go:\n{self.text}"
            self._read(0.1)
        return self.text

    def send(self, text: str) -> None:
        """Send text as if it were typed."""
        os.write(self._fd, text.encode())

    def enter(self, text: str) -> None:
        self.send(text + "\r")

    def interrupt(self) -> None:
        """Send Ctrl-C."""
        self.send("\x03")

    def resize(self, columns: int, lines: int) -> None:
        self._screen.resize(lines, columns)
        set_size(self._fd, columns, lines)
        self.process.send_signal(signal.SIGWINCH)

    def leave(self) -> int:
        """Send Ctrl-D until the process ends, since it has no effect while no process reads; return the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not leave:\n{self.text}"
            with contextlib.suppress(OSError):
                self.send("\x04")
            for _ in range(10):
                self._read(0.05)
        return self.end()

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            self._read(0.05)
            assert time.monotonic() < deadline, f"it does not end:\n{self.text}"
        while self._read(0.05):
            pass
        return self.process.returncode

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._fd], [], [], seconds)
        if not ready:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the other end is closed
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)


@contextmanager
def terminal(
    *arguments: object, columns: int = COLUMNS, lines: int = LINES, environment: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Start `lorasrv` with these arguments; kill it at the end of the `with` block if it still runs."""
    ours, theirs = pty.openpty()
    set_size(ours, columns, lines)
    variables = {**os.environ, "TERM": "xterm-256color", **(environment or {})}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        variables.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=variables,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours, columns, lines)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def set_size(fd: int, columns: int, lines: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
