"""Write to the terminal: results on stdout, everything else on stderr; progress bars on terminals, plain lines in
files.
"""

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from api.asgi.json_lines import one_line
from api.early_stop import closing

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

DIGEST_CHARS = 12
_OF_WRITING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
MULTILINE = '"""'
"""Delimits a text of several lines, in a chat as in an Ollama Modelfile."""


class ExitCode(IntEnum):
    """Define the exit codes that scripts can rely on."""

    DONE = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130


class CliError(Exception):
    """End the command with an error of one line; `details` are lines below it."""

    def __init__(self, message: str, *, details: list[str] | None = None, code: ExitCode = ExitCode.REFUSED) -> None:
        super().__init__(message)
        self.details = details or []
        self.code = code


def out() -> "Console":
    """Return a console for results; created on each call, because tests and pipes replace sys.stdout."""
    from rich.console import Console

    return Console(file=sys.stdout, soft_wrap=not sys.stdout.isatty(), highlight=False)


def err() -> "Console":
    """Return a console for progress and errors."""
    from rich.console import Console

    return Console(file=sys.stderr, soft_wrap=True, highlight=False)


@contextmanager
def names_file(path: "Path") -> Iterator[None]:
    """Add the file's name to errors of writing, which Python raises without it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _OF_WRITING or error.filename:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def print_json(value: Any) -> None:
    """Print one line of JSON on stdout and flush it, because the reader of a pipe waits for it. If the encoding lacks a
    character, all non-ASCII characters are escaped."""
    line = one_line(value)
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        line = json.dumps(value)
    print(line, flush=True)


def say(text: str) -> None:
    """Print a line of the result: no markup, no wrapping."""
    print(printable(text, sys.stdout), flush=True)


def note(text: str) -> None:
    """Print a line of information on stderr."""
    print(printable(text, sys.stderr), file=sys.stderr, flush=True)


def printable(text: str, stream: TextIO) -> str:
    """Return a text by a model or another user in a form that is safe to print: on a terminal, control characters and
    those that change the writing direction are replaced; otherwise it is unchanged."""
    return _CONTROL.sub("\ufffd", text) if stream.isatty() else text


def stdin_text() -> str:
    """Return all of stdin.

    Raises:
        CliError: the text is not UTF-8.
    """
    return "".join(stdin_lines())


def stdin_lines() -> Iterator[str]:
    """Yield lines of stdin as they arrive, with line ends.

    Raises:
        CliError: a line is not UTF-8.
    """
    try:
        for line in sys.stdin:
            # Depending on the locale, Python decodes invalid bytes as lone surrogates.
            line.encode("utf-8")
            yield line
    except UnicodeError:
        raise CliError("stdin: the text is not UTF-8; convert it first", code=ExitCode.USAGE) from None


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> None:
    """Print a table: tab-separated, or aligned on a terminal; with `numbers`, all columns but the first are
    right-aligned."""
    console = out()
    if not console.is_terminal:
        for row in (titles, *rows):
            say("\t".join(row))
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number and numbers else "left", overflow="fold")
    for row in rows:
        # As Text, because brackets in plain strings would be markup.
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def short_digest(digest: str) -> str:
    """Return a prefix of a digest that is long enough to identify a content."""
    return digest.removeprefix("sha256:")[:DIGEST_CHARS]


class Steps(Protocol):
    """Report progress: the activity, how much of it is done, and the total."""

    def __call__(self, what: str, done: float, total: float) -> None: ...


@contextmanager
def progress(*, in_bytes: bool = False) -> Iterator[Steps]:
    """Show progress: a bar on a terminal; else a line at the beginning of a step, at each quarter, and at its end."""
    if sys.stderr.isatty():
        yield from _bar(in_bytes)
    else:
        yield _Lines()


@contextmanager
def progress_of_start(
    tell: Callable[[Any], None],
) -> Iterator[tuple[Callable[[str, float], None], Callable[[Any], None]]]:
    """Show the progress of a server's start until it is ready: later, bars would be drawn over its log.

    Yields: a function to call with a step's name and completed share, and one to call when the server is ready; it ends
        the bars and calls `tell`.
    """
    with ExitStack() as shown:
        step = shown.enter_context(progress())

        def end(ready: object) -> None:
            shown.close()
            # A server whose output's disk is full, or whose reader has left, serves all the same.
            with suppress(OSError):
                tell(ready)

        yield lambda what, share: step(what, share, 1.0), end


def _bar(in_bytes: bool) -> Iterator[Steps]:
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    amount = DownloadColumn() if in_bytes else TextColumn("{task.percentage:>3.0f} %")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), amount, TimeElapsedColumn())
    with Progress(*columns, console=err()) as bar, closing(_show_cursor):
        tasks: dict[str, Any] = {}

        def step(what: str, done: float, total: float) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield step


def _show_cursor() -> None:
    os.write(sys.stderr.fileno(), b"\x1b[?25h\n")


class _Lines:
    """Write progress as lines for logs."""

    def __init__(self) -> None:
        self._quarters: dict[str, int] = {}

    def __call__(self, what: str, done: float, total: float) -> None:
        quarter = int(4 * done / total) if total else 4
        if self._quarters.get(what, -1) >= quarter:
            return
        if what not in self._quarters:
            note(f"{what} ...")
        if quarter:
            note(f"{what}: {25 * quarter} %" if quarter < 4 else f"{what} done")
        self._quarters[what] = quarter
