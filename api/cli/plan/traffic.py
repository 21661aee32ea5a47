"""Define the traffic to plan for: a recorded trace, or a law that generates requests."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.common.terminal import CliError, ExitCode

if TYPE_CHECKING:
    from lorasrv.metrics.trace import TraceRequest

_PANEL = "Traffic"


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text.replace("[", r"\["), rich_help_panel=_PANEL, show_default=False, **more)


@dataclass(frozen=True)
class TrafficOptions:
    """Define options of the traffic."""

    trace: Annotated[
        Path | None,
        _option("File that serve --record-trace wrote.", "--trace", metavar="FILE", exists=True, dir_okay=False),
    ] = None
    law: Annotated[
        str | None, _option("Requests by a law instead: poisson, diurnal, flash (a crowd) or mmpp (bursts).")
    ] = None
    rate: Annotated[float | None, _option("Mean requests per second. [default: 10]")] = None
    seconds: Annotated[float | None, _option("Length of the traffic. [default: 60]")] = None
    adapters: Annotated[int | None, _option("Number of adapters. [default: 1000]")] = None
    zipf: Annotated[float | None, _option("Exponent of their popularity; 0: all alike. [default: 1]")] = None
    prompt_tokens: Annotated[float | None, _option("Mean tokens of a prompt. [default: 256]")] = None
    output_tokens: Annotated[float | None, _option("Mean tokens of an answer. [default: 128]")] = None
    sigma: Annotated[float | None, _option("Standard deviation of the logarithm of both lengths. [default: 0.8]")] = (
        None
    )
    seed: Annotated[int, typer.Option(help="Seed of the law, and of placements by chance.", rich_help_panel=_PANEL)] = 0

    def requests(self) -> tuple["TraceRequest", ...]:
        """Return the traffic.

        Raises:
            CliError: the traffic is given twice or not at all, or has no requests.
            ConfigError: a value of the law is out of range.
            OSError: the trace cannot be read.
        """
        from lorasrv.metrics.trace import read_trace
        from lorasrv.offline.planner.laws import TrafficLaw

        given = {name: value for name, value in vars(self).items() if name not in ("trace", "law", "seed")}
        given = {name: value for name, value in given.items() if value is not None}
        if (self.trace is None) == (self.law is None):
            raise CliError("give either --trace, a recorded file, or --law", code=ExitCode.USAGE)
        if self.trace is not None:
            for name in given:
                option = f"--{name.replace('_', '-')}"
                raise CliError(f"{option} and --trace exclude each other: it is for --law", code=ExitCode.USAGE)
            return read_trace(self.trace)
        requests = TrafficLaw(self.law or "", **given, seed=self.seed).trace()
        if not requests:
            raise CliError("--law: no request in so few --seconds at so low a --rate", code=ExitCode.USAGE)
        return requests

    def to_dict(self) -> dict[str, Any]:
        """Return the given options as JSON data."""
        named = {name: value for name, value in vars(self).items() if value is not None and name != "trace"}
        return named if self.trace is None else {"trace": str(self.trace), "seed": self.seed}
