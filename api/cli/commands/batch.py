"""Answer a file of requests with a running server or an engine in this process (batch).

On a terminal, progress is a bar with rate and remaining time; elsewhere, a line for every tenth of the requests.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.asgi.address import DEFAULT_SERVER
from api.cli.common.options import JsonOption, ServerOption, client_key, connected
from api.cli.common.settings_options import given_settings
from api.cli.common.terminal import CliError, ExitCode, err, names_file, note, print_json, progress, say

if TYPE_CHECKING:
    from api.batches.job import Job
    from api.batches.runner import Ask

ENGINE_SETTINGS = ("model", "store", "quantization", "device", "pool_bytes", "load_format")
"""Options of `serve` that configure a local engine."""


def batch(
    ctx: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, metavar="IN", help="OpenAI batch lines: custom_id, method, url, body."
        ),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="Results, one per line; an existing file is continued.")
    ],
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Maximum number of lines in progress. [default: 16, or --max-num-seqs]"),
    ] = None,
    priority: Annotated[int, typer.Option(min=0, max=1000, help="Priority of the requests; online ones have 0.")] = 100,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Write results in the order of the lines, not as they arrive.")
    ] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Start again: drop the results in OUT.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Retry lines whose result in OUT is an error, and replace it.")
    ] = False,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
) -> None:
    """Answer a file of requests with any mix of adapters. The same command resumes where it was stopped.

    Giving any option of the local engine uses that engine instead of a server. Options that are not given come from
    LORASRV_NAME in the environment or from a configuration file. OUT has the reason for failed and malformed lines.
    """
    own = given_settings(ctx)
    given = ctx.get_parameter_source("server")
    if own and given is not None and given.name == "COMMANDLINE":
        flags = ", ".join(f"--{name}".replace("_", "-") for name in own)
        raise CliError(
            f"--server and the local engine ({flags}) exclude each other: give one of them", code=ExitCode.USAGE
        )
    if restart and retry_failed:
        raise CliError("--restart and --retry-failed exclude each other: give one of them", code=ExitCode.USAGE)
    _check_paths(source, target)
    with _prepared(source, target, restart, retry_failed) as job:
        begun = time.monotonic()
        if job.already:
            note(f"{job.already} of {job.total} lines have results already")
        if job.already < job.total:
            asking = _embedded(own, concurrency) if own else _remote(server, priority, concurrency)
            with asking as (ask, at_a_time):
                begun = time.monotonic()
                _run(job, ask, at_a_time, ordered)
        if ordered and job.already:
            with names_file(job.target):
                job.put_in_order()
        _report(job, time.monotonic() - begun, as_json)


def _check_paths(source: Path, target: Path) -> None:
    if not source.is_file():
        raise CliError(f"IN: {source} is read twice, so that it has to be a regular file", code=ExitCode.USAGE)
    if target.exists() and not target.is_file():
        # The command reads the results again when it resumes.
        raise CliError(f"OUT: results cannot be written to {target}: name a regular file", code=ExitCode.USAGE)
    if not target.absolute().parent.is_dir():
        raise CliError(f"OUT: the folder {target.absolute().parent} does not exist", code=ExitCode.USAGE)


@contextmanager
def _prepared(source: Path, target: Path, restart: bool, retry_failed: bool) -> Iterator["Job"]:
    from api.batches.job import JobRefused, prepared

    try:
        with prepared(source, target, restart=restart, retry_failed=retry_failed) as job:
            yield job
    except JobRefused as error:
        raise CliError(str(error), details=error.details, code=ExitCode.USAGE) from None


@contextmanager
def _remote(
    server: str, priority: int, concurrency: int | None
) -> Iterator[tuple[AbstractAsyncContextManager["Ask"], int]]:
    from api.batches.remote import remote
    from api.batches.runner import DEFAULT_CONCURRENCY

    at_a_time = concurrency or DEFAULT_CONCURRENCY
    with connected(server) as client:
        client.base_name()  # fails early if the server does not respond
        yield remote(server, priority, at_a_time, client_key(server)), at_a_time


@contextmanager
def _embedded(
    options: dict[str, Any], concurrency: int | None
) -> Iterator[tuple[AbstractAsyncContextManager["Ask"], int]]:
    from api.cli.commands.batch_local import embedded
    from api.config.sources import Sources

    settings = Sources.gather(options).settings()
    with progress() as step, embedded(settings, lambda what, share: step(what, share, 1.0)) as asking:
        yield asking, concurrency or settings.max_num_seqs


def _run(job: "Job", asking: AbstractAsyncContextManager["Ask"], concurrency: int, ordered: bool) -> None:

    try:
        with watching(job) as tell, names_file(job.target):
            asyncio.run(job.run(asking, concurrency, ordered=ordered, tell=tell))
    finally:
        if job.tally.done < job.total:
            note(f"{job.tally.done} of {job.total} lines have results; run the same command to resume")


def _report(job: "Job", seconds: float, as_json: bool) -> None:
    tally = job.tally
    rate = job.done_now / seconds if seconds else 0.0
    if as_json:
        print_json(
            {
                "input": str(job.source),
                "output": str(job.target),
                "total": job.total,
                "completed": tally.completed,
                "failed": tally.failed,
                "already": job.already,
                "malformed": job.lines.num_malformed,
                "seconds": round(seconds, 3),
                "lines_per_s": round(rate, 3),
                "prompt_tokens": tally.prompt_tokens,
                "completion_tokens": tally.completion_tokens,
            }
        )
    elif not job.done_now:
        say(f"{tally.completed} of {job.total} lines have answers already; nothing was sent")
    else:
        tokens = f", {tally.completion_tokens / seconds:.0f} tokens/s" if seconds and tally.completion_tokens else ""
        say(f"{tally.completed} of {job.total} lines answered in {seconds:.1f} s ({rate:.1f} lines/s{tokens})")
    if tally.failed:
        raise CliError(
            f"{tally.failed} of {job.total} lines failed; {job.target} says why, --retry-failed retries them"
        )


LINES = 10


@contextmanager
def watching(job: "Job") -> Iterator[Callable[["Job"], None]]:
    """Yield a function to call whenever results have been written."""
    if sys.stderr.isatty():
        with _bar(job) as tell:
            yield tell
    else:
        yield _ProgressLines(job)


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


class _ProgressLines:
    """Write progress as lines for logs."""

    def __init__(self, job: "Job") -> None:
        self._begun = time.monotonic()
        self._tenth = LINES * job.tally.done // job.total

    def __call__(self, job: "Job") -> None:
        tenth = LINES * job.tally.done // job.total
        if tenth > self._tenth:
            self._tenth = tenth
            note(f"{job.tally.done} of {job.total} lines, {figures(job, time.monotonic() - self._begun)}")


def figures(job: "Job", seconds: float) -> str:
    """Format the number of failures (if any), lines per second in this run, and the remaining time at that rate."""
    failed = f"{job.tally.failed} failed, " if job.tally.failed else ""
    if not job.done_now or not seconds:
        return f"{failed}waiting for the first"
    rate = job.done_now / seconds
    left = round((job.total - job.tally.done) / rate)
    return f"{failed}{rate:.1f} lines/s, {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
