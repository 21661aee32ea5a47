"""One file of requests to one file of results, as the command does it: checked, gone on with, asked.

Everything that can be wrong with the two files is found before anything runs.
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
from api.batches.results import ResultSink, ResultsUnreadable, ScannedResults, Tally, copy_without, recovered
from api.batches.runner import Ask, LineRunner

Tell = Callable[["Job"], object]


class JobRefused(Exception):
    """The two files cannot be worked with. `details` are more lines."""

    def __init__(self, message: str, details: list[str] | None = None) -> None:
        super().__init__(message)
        self.details = details or []


@dataclass(slots=True)
class Job:
    """A checked pair of files. `already` lines had their results before; `tally` counts those too.

    Results of lines that are not in the source stay in the target, and count for nothing. `begins_anew`: the target is
    emptied, and results with the keys `retried` are taken out of it, but not before somebody is there to ask.
    """

    source: Path
    target: Path
    lines: Scan
    found: ScannedResults
    already: int
    tally: Tally
    held: ExitStack
    begins_anew: bool
    retried: "np.ndarray[Any, np.dtype[np.uint64]]"

    @property
    def total(self) -> int:
        return self.lines.total

    @property
    def done_now(self) -> int:
        """Lines that this run has brought results for."""
        return self.tally.done - self.already

    async def run(
        self, asking: AbstractAsyncContextManager[Ask], concurrency: int, *, ordered: bool, tell: Tell
    ) -> None:
        """Until every line has its result. However it ends, what has come is in the target.

        Raises: OSError: the files fail. Whatever `asking` raises.
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

    def _take_out(self) -> None:
        """In a new file that takes the target's place when it is whole, locked as the old one stays."""
        target = self.target.resolve()
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            fd = _opened(temporary, self.held, os.O_EXCL)
            _lock(fd, self.target)
            os.fchmod(fd, stat.S_IMODE(target.stat().st_mode))
            copy_without(target, self.retried, fd)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        fsync_directory(target.parent)


@contextmanager
def prepared(source: Path, target: Path, *, restart: bool, retry_failed: bool = False) -> Iterator[Job]:
    """The job of two files, and the target locked until it is over. `restart`: what the target holds is dropped;
    `retry_failed`: what it holds of lines that failed.

    Raises:
        JobRefused: the source repeats a custom_id or has no lines, the target holds something else or is in use.
        OSError.
    """
    lines = _checked(source)
    if target.exists() and target.samefile(source):
        raise JobRefused("the two files are one; name another file for the results")
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
        raise JobRefused("custom_ids must differ; nothing was asked", list(map(_told, repeated)))
    return lines


def _told(one: MalformedLine) -> str:
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
