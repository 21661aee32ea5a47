"""Run a sweep on one server: read its description, measure its tokenizer, run point after point."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from api.cli.bench.client import BenchClient
from api.cli.bench.load import Load
from api.cli.bench.machine import client_versions, commit, machine
from api.cli.bench.prompts import Ruler
from api.cli.bench.roofline import MachineRates, Work
from api.cli.bench.server_info import Served, look, work_of
from api.cli.bench.stats import Result, figures, result
from api.cli.bench.sweep import Point, Settings, Unserved, make_asks, measure_ruler, run_point, trace_names
from api.cli.bench.workload import hidden_key, spelled
from api.cli.common.options import connected
from api.cli.common.terminal import CliError, ExitCode, Steps, progress
from api.client import Client, Refused

if TYPE_CHECKING:
    from lorasrv.metrics.trace import TraceRequest

DEFAULT_ADAPTERS = 8
MAX_NAMED = 8


class Bench:
    """Run the points of a sweep on one server. `run` yields a result per point, and stops after an interrupted one."""

    def __init__(self, asked: "BenchOptions", url: str, rates: MachineRates | None) -> None:
        self._asked, self._url, self._rates = asked, url, rates
        with connected(url, asked.key) as client:
            self._served = look(client)
            names = _wanted_names(asked, self._served)
            _check_names(client, self._served, names, "--models" if asked.names is not None else "--trace")
            adapters = [name for name in names if name != self._served.base]
            self._work = _work(asked, work_of(client, self._served, adapters))
        self._settings = Settings(names=names, base=self._served.base, trace=asked.trace, **asked.requests)
        self._surroundings = {"machine": _machine(rates), "client": client_versions(), "commit": commit()}

    def run(self) -> Iterator[Result]:
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
        names, asked = self._settings.names, self._asked
        numbers: tuple[int | None, ...] = asked.adapters or ((None,) if asked.trace is not None else (len(names),))
        if asked.trace is not None and asked.adapters is None and asked.names is not None:
            numbers = (len(names),)
        return [Point(number, **load) for number in numbers for load in asked.loads]

    def _ruler(self) -> Ruler:
        names = self._settings.names
        model = names[0] if names and self._asked.adapters != (0,) else self._served.base

        async def measure() -> Ruler:
            async with self._caller() as caller:
                return await measure_ruler(caller.ask, model)

        try:
            return asyncio.run(measure())
        except Unserved as error:
            code = ExitCode.UNREACHABLE if error.failure == "unreachable" else ExitCode.REFUSED
            raise CliError(f"{self._url} does not answer one token of {model!r}: {error}", code=code) from None

    def _point(self, point: Point, ruler: Ruler, step: Steps) -> Result:
        asks = make_asks(point, self._settings, ruler)
        load, interrupted = Load(), False

        async def run() -> None:
            async with self._caller() as caller:
                tell = lambda done: step(str(point), done, len(asks))  # noqa: E731
                step(str(point), 0, len(asks))
                await run_point(caller.ask, point, asks, self._settings.warmup, load, tell)

        began = datetime.now(UTC)
        try:
            asyncio.run(run())
        except KeyboardInterrupt:
            interrupted = True
        found = figures(load, self._asked.slo, self._work, self._rates)
        return result(
            self._asked.label,
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
        asked = self._asked
        more = {"chat": asked.chat, "slo": spelled(asked.slo), "url": asked.url, "serve_flags": list(asked.flags)}
        return {**self._settings.to_dict(point), **more, "rank": asked.rank if asked.url is None else None}

    def _caller(self) -> BenchClient:
        return BenchClient(self._url, chat=self._asked.chat, key=self._asked.key, timeout_s=self._asked.timeout_s)


def _wanted_names(asked: "BenchOptions", served: Served) -> tuple[str, ...]:
    """Return the names of the adapters that may take part."""
    if asked.names is not None:
        return asked.names
    if asked.url is None:
        return asked.made_names
    if asked.trace is not None and asked.adapters is None:
        return tuple(trace_names(asked.trace))
    most = max(asked.adapters) if asked.adapters is not None else len(served.adapters)
    if most > len(served.adapters):
        raise CliError(f"--adapters {most}: the server at {asked.url} has {len(served.adapters)}")
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
            raise CliError(f"{option}: {name!r} is unknown at {client.url}; it has {shown}") from None


def _work(asked: "BenchOptions", told: Work | None) -> Work | None:
    """Return the model's costs from the command line where given, else from the server."""
    if told is None and not (asked.model_bytes or asked.model_ops):
        return None
    work = told or Work()
    return replace(
        work,
        model_bytes=asked.model_bytes or work.model_bytes,
        token_ops=asked.model_ops or work.token_ops,
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


@dataclass(frozen=True)
class BenchOptions:
    """Hold the validated command line."""

    url: str | None
    key: str | None
    flags: tuple[str, ...]
    rank: int
    # None: the server's.
    names: tuple[str, ...] | None
    adapters: tuple[int, ...] | None
    loads: tuple[dict[str, Any], ...]
    requests: dict[str, Any]
    trace: "tuple[TraceRequest, ...] | None"
    chat: bool
    timeout_s: float
    slo: dict[str, float]
    model_bytes: float
    model_ops: float
    measure: bool
    label: str
    as_json: bool

    @property
    def made_names(self) -> tuple[str, ...]:
        """Return the adapters to generate for a started server."""
        from api.cli.bench.server import adapter_names
        from api.cli.bench.sweep import trace_names

        if self.names is not None:
            return self.names
        if self.trace is not None and self.adapters is None:
            return tuple(trace_names(self.trace))
        return adapter_names(max(self.adapters or (DEFAULT_ADAPTERS,)))
