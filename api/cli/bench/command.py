"""Put load on a server and measure it (bench)."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from adapter_store.spec import MAX_LORA_RANK
from api.asgi.address import server_address
from api.cli.bench.options import BenchOptions
from api.cli.common.options import JsonOption, check_png
from api.cli.common.terminal import CliError, ExitCode, note, print_json, progress

if TYPE_CHECKING:
    from api.cli.bench.stats import Result
    from lorasrv.metrics.trace import TraceRequest

_WHERE, _LOAD, _REQUEST, _JUDGED, _OUTPUT = "Server", "Load", "Requests", "Measurements", "Output"


def _option(text: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text.replace("[", r"\["), rich_help_panel=panel, show_default=False, **more)


@dataclass(frozen=True)
class TargetOptions:
    """Define options of the server under load."""

    url: Annotated[
        str | None,
        _option(
            "OpenAI-compatible server that is running. [default: a lorasrv serve that is started]",
            _WHERE,
            "--url",
            "--server",
        ),
    ] = None
    key: Annotated[str | None, _option("Its API key.", _WHERE, "--api-key", "--key", envvar="LORASRV_API_KEY")] = None
    rank: Annotated[
        int, typer.Option(min=1, max=MAX_LORA_RANK, help="Rank of the adapters that are made.", rich_help_panel=_WHERE)
    ] = 16


@dataclass(frozen=True)
class LoadOptions:
    """Define options for the times and adapters of requests."""

    models: Annotated[str | None, _option("Model names to request, a,b,c, the most popular first.", _LOAD)] = None
    adapters: Annotated[
        str | None, _option("Number of adapters to spread requests over; 0: the base alone; 1,4,16 sweeps.", _LOAD)
    ] = None
    law: Annotated[
        str | None,
        _option("Popularity of adapters: distinct, uniform, zipf:S or identical. [default: distinct]", _LOAD),
    ] = None
    concurrency: Annotated[
        str | None, _option("Number of clients that each wait for their answer; 1,4,16 sweeps. [default: 8]", _LOAD)
    ] = None
    rate: Annotated[str | None, _option("Requests per second, sent at random times instead; 0.5,2 sweeps.", _LOAD)] = (
        None
    )
    trace: Annotated[
        Path | None,
        _option("Recorded traffic to send instead, as lorasrv plan reads it.", _LOAD, exists=True, dir_okay=False),
    ] = None
    requests: Annotated[
        int | None,
        _option("Number of requests per load. [default: 2 per client, at least 8; 64 with --rate]", _LOAD, min=1),
    ] = None
    warmup: Annotated[
        int, typer.Option(min=0, help="Number of requests before, not measured.", rich_help_panel=_LOAD)
    ] = 2
    seed: Annotated[int, typer.Option(help="Seed for names, lengths, words and times.", rich_help_panel=_LOAD)] = 0


@dataclass(frozen=True)
class RequestOptions:
    """Define options for the content of requests."""

    prompt_tokens: Annotated[
        str | None,
        _option("Tokens of a prompt: N, uniform:LOW:HIGH or lognormal:MEAN:SIGMA[:MOST]. [default: 64]", _REQUEST),
    ] = None
    output_tokens: Annotated[str | None, _option("Tokens of an answer, likewise. [default: 64]", _REQUEST)] = None
    shared_prefix: Annotated[
        int, typer.Option(min=0, help="Number of tokens that all prompts begin with.", rich_help_panel=_REQUEST)
    ] = 0
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Request /v1/chat/completions, not /v1/completions.", rich_help_panel=_REQUEST),
    ] = False
    timeout_s: Annotated[
        float, typer.Option(min=0.1, help="Longest silence of a stream, in seconds.", rich_help_panel=_REQUEST)
    ] = 600.0


@dataclass(frozen=True)
class MeasureOptions:
    """Define options for the measurements."""

    slo: Annotated[
        str | None,
        _option("Bounds in ms that requests should keep, to count them: ttft=500,tpot=100 (also e2e).", _JUDGED),
    ] = None
    measure_machine: Annotated[
        bool,
        typer.Option("--measure-machine", help="Measure this machine first, for MBU and MFU.", rich_help_panel=_JUDGED),
    ] = False
    model_bytes: Annotated[
        str | None, _option("Size of the base model, if the server does not report it: 270MB.", _JUDGED)
    ] = None
    model_ops: Annotated[
        str | None, _option("Operations per token, if the server does not report them: 269M.", _JUDGED)
    ] = None


def bench(
    target: TargetOptions,
    load: LoadOptions,
    request: RequestOptions,
    measured: MeasureOptions,
    serve_flags: Annotated[
        list[str] | None, typer.Argument(metavar="-- FLAGS OF SERVE", help="Flags for the server that is started.")
    ] = None,
    label: Annotated[str, typer.Option(help="Label to put into the results.", rich_help_panel=_OUTPUT)] = "",
    plot: Annotated[
        Path | None, _option("File for a plot of latency by load and throughput by adapters: FILE.png.", _OUTPUT)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Load a server with requests spread over adapters: throughput, latencies, goodput, failures."""
    from api.cli.bench.workload import InvalidOption, amount, service_bounds

    if plot is not None:
        check_png("--plot", plot)
    try:
        options = BenchOptions(
            url=None if target.url is None else server_address(target.url),
            key=target.key,
            flags=_flags(serve_flags, target.url),
            rank=target.rank,
            names=_names(load.models),
            adapters=_adapters(load.adapters, load.models),
            loads=_loads(load.concurrency, load.rate, load.trace),
            requests=_requests(load, request),
            trace=_trace(load.trace),
            chat=request.chat,
            timeout_s=request.timeout_s,
            slo=service_bounds(measured.slo) if measured.slo else {},
            model_bytes=amount("--model-bytes", measured.model_bytes) if measured.model_bytes else 0.0,
            model_ops=amount("--model-ops", measured.model_ops) if measured.model_ops else 0.0,
            measure=measured.measure_machine,
            label=label,
            as_json=as_json,
        )
    except InvalidOption as error:
        raise CliError(str(error), code=ExitCode.USAGE) from None
    _bench(options, plot)


# Options.
def _flags(flags: list[str] | None, url: str | None) -> tuple[str, ...]:
    from api.cli.bench.server import check_flags

    check_flags(flags or [])
    if flags and url is not None:
        raise CliError(
            "--url and flags of serve exclude each other: the flags are for a server that bench starts",
            code=ExitCode.USAGE,
        )
    return tuple(flags or ())


def _names(models: str | None) -> tuple[str, ...] | None:
    from api.cli.bench.workload import InvalidOption

    if models is None:
        return None
    names = tuple(name.strip() for name in models.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise InvalidOption(f"--models {models!r}: expected distinct, non-empty names, as in a,b,c")
    return names


def _adapters(text: str | None, models: str | None) -> tuple[int, ...] | None:
    from api.cli.bench.workload import InvalidOption, counts

    if text is None:
        return None
    wanted = counts("--adapters", text, least=0)
    names = _names(models)
    if names is not None and max(wanted) > len(names):
        raise InvalidOption(f"--adapters {max(wanted)}: --models names only {len(names)}")
    return wanted


def _loads(concurrency: str | None, rate: str | None, trace: Path | None) -> tuple[dict[str, Any], ...]:
    from api.cli.bench.workload import InvalidOption, counts, rates

    if concurrency is not None and rate is not None:
        raise InvalidOption("--concurrency and --rate exclude each other")
    if rate is not None:
        return tuple({"rate": value} for value in rates("--rate", rate))
    if concurrency is None and trace is not None:
        return ({},)
    return tuple({"concurrency": value} for value in counts("--concurrency", concurrency or "8"))


def _requests(load: LoadOptions, request: RequestOptions) -> dict[str, Any]:
    from api.cli.bench.workload import InvalidOption, parse_law, parse_lengths

    prompt, output = request.prompt_tokens, request.output_tokens
    for option, value in (("--law", load.law), ("--prompt-tokens", prompt), ("--output-tokens", output)):
        if load.trace is not None and value is not None:
            raise InvalidOption(f"{option} and --trace exclude each other: the trace has it for each request")
    return {
        "law": parse_law(load.law or "distinct"),
        "prompt": parse_lengths("--prompt-tokens", prompt or "64"),
        "output": parse_lengths("--output-tokens", output or "64"),
        "requests": load.requests,
        "warmup": load.warmup,
        "seed": load.seed,
        "shared_prefix": request.shared_prefix,
    }


def _trace(path: Path | None) -> "tuple[TraceRequest, ...] | None":
    from lorasrv.metrics.trace import read_trace

    return None if path is None else read_trace(path)


# The bench.
def _bench(options: BenchOptions, plot: Path | None) -> None:
    from api.cli.bench.report import print_results
    from api.cli.bench.run import Bench

    results: list[Result] = []
    try:
        with _interrupt_on_sigterm():
            rates = _rates(options)
            with _server(options) as url:
                for done in Bench(options, url, rates).run():
                    results.append(done)
                    if options.as_json:
                        print_json(done)
    finally:
        # Also print partial results after Ctrl-C.
        if results and not options.as_json:
            print_results(results)
        if results and plot is not None:
            from api.cli.bench.plot import draw

            draw(plot, results)
    _end(results)


def _end(results: Sequence["Result"]) -> None:
    if any(done.get("interrupted") for done in results):
        note("lorasrv: interrupted; the figures are partial")
        raise KeyboardInterrupt
    for done in results:
        if done["figures"]["failed"] == done["figures"]["requests"]:
            raise CliError(f"no request of {done['point']} was answered: {done['figures']['first_error']}")


def _rates(options: BenchOptions) -> Any:
    if not options.measure:
        return None
    from urllib.parse import urlsplit

    from api.asgi.address import is_loopback
    from api.cli.bench.machine import measure

    if options.url is not None and not is_loopback(urlsplit(options.url).hostname or ""):
        raise CliError("--measure-machine measures this machine, but the server is on another one", code=ExitCode.USAGE)
    with progress() as step:
        step("measuring the machine", 0.0, 1.0)
        rates = measure()
        step("measuring the machine", 1.0, 1.0)
    return rates


def _server(options: BenchOptions) -> AbstractContextManager[str]:
    from api.cli.bench.server import started

    if options.url is not None:
        return nullcontext(options.url)
    return started(options.flags, options.made_names, options.rank, options.requests["seed"])


@contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that a started server is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
