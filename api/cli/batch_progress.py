"""How far a batch is: a bar with rate and time left on a terminal, elsewhere a line at every tenth."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from api.cli.console import err, note

if TYPE_CHECKING:
    from api.batches.job import Job

LINES = 10


@contextmanager
def watching(job: "Job") -> Iterator[Callable[["Job"], None]]:
    """To be told whenever results have been written."""
    if sys.stderr.isatty():
        with _bar(job) as tell:
            yield tell
    else:
        yield _Lines(job)


@contextmanager
def _bar(job: "Job") -> Iterator[Callable[["Job"], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    begun = time.monotonic()
    with Progress(*columns, console=err()) as bar:
        task = bar.add_task("batch", total=job.total, completed=job.already, figures="")

        def tell(job: "Job") -> None:
            bar.update(task, completed=job.tally.done, figures=figures(job, time.monotonic() - begun))

        yield tell


class _Lines:
    """Progress for logs."""

    def __init__(self, job: "Job") -> None:
        self._begun = time.monotonic()
        self._tenth = LINES * job.tally.done // job.total

    def __call__(self, job: "Job") -> None:
        tenth = LINES * job.tally.done // job.total
        if tenth > self._tenth:
            self._tenth = tenth
            note(f"{job.tally.done} of {job.total} lines, {figures(job, time.monotonic() - self._begun)}")


def figures(job: "Job", seconds: float) -> str:
    """Failures if there are any, lines a second in this run, and the time that the rest will take at that rate."""
    failed = f"{job.tally.failed} failed, " if job.tally.failed else ""
    if not job.done_now or not seconds:
        return f"{failed}waiting for the first"
    rate = job.done_now / seconds
    left = round((job.total - job.tally.done) / rate)
    return f"{failed}{rate:.1f} lines/s, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
