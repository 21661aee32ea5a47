"""Turn a file of requests into a file of results, for the command: check, resume, send.

Both files are checked completely before any line is sent.
"""

import asyncio
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adapter_store.storage.blobs import fsync_directory
from api.batches.input_lines import MalformedLine, Scan, duplicates, pending_lines, scan
from api.batches.results import (
    ResultSink,
    ResultsUnreadable,
    ScannedResults,
    Tally,
    copy_places,
    copy_without,
    recovered,
    results_in_order,
)
from api.batches.runner import Ask, LineRunner

Tell = Callable[["Job"], object]


class JobRefused(Exception):
    """Report that the two files cannot be used. `details` are more lines of the message."""

    def __init__(self, message: str, details: list[str] | None = None) -> None:
        super().__init__(message)
        self.details = details or []


@dataclass(slots=True)
class Job:
    """Hold a checked pair of files. Results of lines that are not in the source stay in the target and are not
    counted.
    """

    source: Path
    target: Path
    lines: Scan
    found: ScannedResults
    # Lines that had results before this run; `tally` counts them, too.
    already: int
    tally: Tally
    held: ExitStack
    # Empty the target once the connection is open.
    begins_anew: bool
    # Keys of results to remove from the target once the connection is open.
    retried: "np.ndarray[Any, np.dtype[np.uint64]]"

    @property
    def total(self) -> int:
        return self.lines.total

    @property
    def done_now(self) -> int:
        """Return the number of lines that this run has completed."""
        return self.tally.done - self.already

    async def run(
        self, asking: AbstractAsyncContextManager[Ask], concurrency: int, *, ordered: bool, tell: Tell
    ) -> None:
        """Run until every line has its result. However the run ends, results that have arrived are in the target.

        Raises:
            OSError: the files fail.
            Exception: raised by `asking`.
        """
        async with asking as ask:
            if self.begins_anew:
                os.truncate(self.target, 0)
            if len(self.retried):
                self._take_out()
            with ResultSink(self.target, self.target, self.tally) as sink:
                runner = LineRunner(
                    ask,
                    sink,
                    slots=asyncio.Semaphore(concurrency),
                    concurrency=concurrency,
                    ordered=ordered,
                    tell=lambda: tell(self),
                )
                await runner.run(pending_lines(self.source, None, self.lines, self.found.keys))

    def put_in_order(self) -> None:
        """Put the results into the order of the lines. Until then, results of earlier runs precede this run's.

        Raises: OSError.
        """
        places = results_in_order(self.target, self.lines.keys)
        if places is not None:
            self._rewrite(lambda into: copy_places(self.target, places, into))

    def _take_out(self) -> None:
        """Remove the results that are to be replaced."""
        self._rewrite(lambda into: copy_without(self.target, self.retried, into))

    def _rewrite(self, write: Callable[[int], object]) -> None:
        """Write a new locked file, and replace the target by it when it is complete."""
        target = self.target.resolve()
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            fd = _opened(temporary, self.held, os.O_EXCL)
            _lock(fd, self.target)
            os.fchmod(fd, stat.S_IMODE(target.stat().st_mode))
            write(fd)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_directory(target.parent)


@contextmanager
def prepared(source: Path, target: Path, *, restart: bool, retry_failed: bool = False) -> Iterator[Job]:
    """Check two files and lock the target for the duration of the job.

    Args:
        restart: drop the results in the target.
        retry_failed: drop the results of failed lines in the target.

    Raises:
        JobRefused: the source repeats a custom_id or has no lines, or the target has other content or is in use.
        OSError.
    """
    lines = _checked(source)
    if target.exists() and target.samefile(source):
        raise JobRefused("the two files are the same; name another file for the results")
    with ExitStack() as held:
        _lock(_opened(target, held), target)
        found = ScannedResults.nothing() if restart else _found(target).of(lines.keys)
        retried = ScannedResults.nothing()
        if retry_failed:
            found, retried = found.parted()
        yield Job(source, target, lines, found, len(found.keys), found.tally(), held, restart, retried.keys)


def _opened(path: Path, held: ExitStack, flags: int = 0) -> int:
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | flags, 0o666)
    held.callback(os.close, fd)
    return fd


def _checked(source: Path) -> Scan:
    lines = scan(source)
    if not lines.total:
        raise JobRefused(f"{source} has no lines")
    if repeated := duplicates(source, lines):
        raise JobRefused("custom_ids must differ; nothing was sent", list(map(_problem_text, repeated)))
    return lines


def _problem_text(one: MalformedLine) -> str:
    return f"line {one.number}: {one.message}"


def _lock(fd: int, target: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JobRefused(f"another command is writing to {target}; wait for it, or name another file") from None


def _found(target: Path) -> ScannedResults:
    try:
        return recovered(target)
    except ResultsUnreadable as error:
        raise JobRefused(f"{error}; name another file, or replace it with --restart") from None
