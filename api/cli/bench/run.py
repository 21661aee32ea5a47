"""Run a sweep on one server: read its description, measure its tokenizer, run point after point."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from api.cli.bench.client import BenchClient
from api.cli.bench.load import Load
from api.cli.bench.machine import client_versions, commit, machine
from api.cli.bench.options import BenchOptions
from api.cli.bench.prompts import Ruler
from api.cli.bench.roofline import MachineRates, Work
from api.cli.bench.server_info import Served, read_server_info, work_of
from api.cli.bench.stats import Result, figures, result
from api.cli.bench.sweep import NoAnswer, Point, Settings, make_requests, measure_ruler, run_point, trace_names
from api.cli.bench.workload import hidden_key, spelled
from api.cli.common.options import connected
from api.cli.common.terminal import CliError, ExitCode, Steps, progress
from api.client import Client, Refused

MAX_NAMED = 8


class Bench:
    """Run the points of a sweep on one server."""

    def __init__(self, options: BenchOptions, url: str, rates: MachineRates | None) -> None:
        self._options, self._url, self._rates = options, url, rates
        with connected(url, options.key) as client:
            self._served = read_server_info(client)
            names = _wanted_names(options, self._served)
            _check_names(client, self._served, names, "--models" if options.names is not None else "--trace")
            adapters = [name for name in names if name != self._served.base]
            self._work = _work(options, work_of(client, self._served, adapters))
        self._settings = Settings(names=names, base=self._served.base, trace=options.trace, **options.requests)
        self._surroundings = {"machine": _machine(rates), "client": client_versions(), "commit": commit()}

    def run(self) -> Iterator[Result]:
        """Run all points, and yield the result of each; stop after an interrupted one."""
        with progress() as step:
            step("querying the server", 0.0, 1.0)
            ruler = self._ruler()
            step("querying the server", 1.0, 1.0)
            for point in self._points():
                done = self._point(point, ruler, step)
                yield done
                if done.get("interrupted"):
                    return

    def _points(self) -> list[Point]:
        names, options = self._settings.names, self._options
        numbers: tuple[int | None, ...] = options.adapters or ((None,) if options.trace is not None else (len(names),))
        if options.trace is not None and options.adapters is None and options.names is not None:
            numbers = (len(names),)
        return [Point(number, **load) for number in numbers for load in options.loads]

    def _ruler(self) -> Ruler:
        names = self._settings.names
        model = names[0] if names and self._options.adapters != (0,) else self._served.base

        async def measure() -> Ruler:
            async with self._caller() as caller:
                return await measure_ruler(caller.send, model)

        try:
            return asyncio.run(measure())
        except NoAnswer as error:
            code = ExitCode.UNREACHABLE if error.failure == "unreachable" else ExitCode.REFUSED
            message = f"the server at {self._url} does not generate one token with {model!r}: {error}"
            raise CliError(message, code=code) from None

    def _point(self, point: Point, ruler: Ruler, step: Steps) -> Result:
        requests = make_requests(point, self._settings, ruler)
        load, interrupted = Load(), False

        async def run() -> None:
            async with self._caller() as caller:
                on_progress = lambda done: step(str(point), done, len(requests))  # noqa: E731
                step(str(point), 0, len(requests))
                await run_point(caller.send, point, requests, self._settings.warmup, load, on_progress)

        began = datetime.now(UTC)
        try:
            asyncio.run(run())
        except KeyboardInterrupt:
            interrupted = True
        found = figures(load, self._options.slo, self._work, self._rates)
        return result(
            self._options.label,
            found,
            interrupted,
            point=str(point),
            time=began.isoformat(timespec="seconds"),
            settings=self._settings_of(point),
            server=self._served.to_dict(),
            command=["lorasrv", *hidden_key(sys.argv[1:])],
            **self._surroundings,
        )

    def _settings_of(self, point: Point) -> dict[str, Any]:
        options = self._options
        more = {
            "chat": options.chat,
            "slo": spelled(options.slo),
            "url": options.url,
            "serve_flags": hidden_key(options.flags),
        }
        return {**self._settings.to_dict(point), **more, "rank": options.rank if options.url is None else None}

    def _caller(self) -> BenchClient:
        return BenchClient(self._url, chat=self._options.chat, key=self._options.key, timeout_s=self._options.timeout_s)


def _wanted_names(options: BenchOptions, served: Served) -> tuple[str, ...]:
    """Return the names of the adapters that may take part."""
    if options.names is not None:
        return options.names
    if options.url is None:
        return options.made_names
    if options.trace is not None and options.adapters is None:
        return tuple(trace_names(options.trace))
    most = max(options.adapters) if options.adapters is not None else len(served.adapters)
    if most > len(served.adapters):
        raise CliError(f"--adapters {most}: the server at {options.url} has {len(served.adapters)}")
    return served.adapters[:most]


def _check_names(client: Client, served: Served, names: tuple[str, ...], option: str) -> None:
    known = {served.base, *served.adapters}
    for name in names:
        if name in known:
            continue
        try:
            # A name that is not listed may still be valid, such as a version of an adapter.
            client.get(f"/v1/models/{quote(name, safe='')}")
        except Refused:
            listed = [served.base, *served.adapters]
            shown = ", ".join(listed[:MAX_NAMED]) + (", …" if len(listed) > MAX_NAMED else "")
            raise CliError(f"{option}: {name!r} is unknown at {client.url}; known: {shown}") from None


def _work(options: BenchOptions, reported: Work | None) -> Work | None:
    """Return the model's costs: those given on the command line, others from the server; None if none is known."""
    if reported is None and not (options.model_bytes or options.model_ops):
        return None
    work = reported or Work()
    return replace(
        work,
        model_bytes=options.model_bytes or work.model_bytes,
        token_ops=options.model_ops or work.token_ops,
    )


def _machine(rates: MachineRates | None) -> dict[str, object]:
    measured = None
    if rates is not None:
        measured = {
            "read_bytes_per_s": float(f"{rates.read_bytes:.4g}"),
            "fp32_ops_per_s": float(f"{rates.fp32_ops:.4g}"),
            "int8_ops_per_s": float(f"{rates.int8_ops:.4g}"),
        }
    return {**machine(), "measured": measured}
