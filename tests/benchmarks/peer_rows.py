"""Describe the rows that every peer is measured with, their lower bounds, and the comparison of the results."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from api.cli.bench.roofline import Floor, MachineRates, Wave, Work, floor
from api.cli.bench.stats import Result
from api.cli.bench.sweep import Point, Settings
from api.cli.bench.workload import Law, Lengths


@dataclass(frozen=True)
class Row:
    """A load: `concurrency` clients over `adapters` adapters; 0: the base alone."""

    key: str
    concurrency: int
    adapters: int
    requests: int
    law: Law = Law("distinct")  # noqa: RUF009 - frozen

    def distinct(self, asked: int) -> float:
        """Return how many distinct adapters so many requests name, on average."""
        if self.law.kind != "zipf":
            return min(self.adapters, asked)
        weights = [(k + 1) ** -self.law.exponent for k in range(self.adapters)]
        return sum(1 - (1 - weight / sum(weights)) ** asked for weight in weights)

    @property
    def point(self) -> Point:
        return Point(self.adapters, concurrency=self.concurrency)

    def settings(self, names: Sequence[str], base: str, prompt: int, tokens: int, requests: int | None) -> Settings:
        return Settings(
            names=names,
            base=base,
            law=self.law,
            prompt=Lengths("fixed", prompt),
            output=Lengths("fixed", tokens),
            requests=requests or self.requests,
        )


ROWS = (
    Row("1/1", 1, 1, 3),
    Row("1/base", 1, 0, 3),
    Row("16/16", 16, 16, 32),
    Row("32/32", 32, 32, 32),
    Row("64/64", 64, 64, 64),
    Row("16/base", 16, 0, 32),
    Row("zipf", 32, 64, 64, Law("zipf", 1.1)),
)
VERSUS_ROWS = tuple(row for row in ROWS if row.key in ("1/1", "16/16", "16/base"))


def rows_of(text: str) -> tuple[Row, ...]:
    """Parse `1/1,zipf`. Raises: SystemExit."""
    known = {row.key: row for row in ROWS}
    unknown = [key for key in text.split(",") if key not in known]
    if unknown:
        raise SystemExit(f"--rows {unknown[0]!r} is unknown; choose from {','.join(known)}")
    return tuple(known[key] for key in text.split(","))


def peer_work(assets: Path, itemsize: int) -> Work:
    """Return the cost of the base in `assets` and of its adapters, in floats of `itemsize` bytes."""
    from contextlib import closing

    from lorasrv.models.loader import open_checkpoint
    from lorasrv.models.spec import operations

    with closing(open_checkpoint(str(assets / "base"))) as checkpoint:
        spec = checkpoint.spec
    ops = operations(spec)
    # The files are bf16; their headers are a few KB.
    weights = (assets / "base" / "model.safetensors").stat().st_size // 2
    numbers = (assets / "adapters" / "a0000" / "adapter_model.safetensors").stat().st_size // 2
    return Work(
        model_bytes=weights * itemsize,
        kv_token_bytes=2 * spec.num_layers * spec.kv_width * itemsize,
        adapter_bytes=numbers * itemsize,
        token_ops=ops.token,
        sampled_ops=ops.sampled_token,
        context_ops=ops.context_token,
        adapter_ops=2 * numbers,
    )


def with_floor(result: Result, row: Row, prompt: int, tokens: int, work: Work, rates: MachineRates) -> Result:
    """Add the lower bound of that model on that machine; `of_floor` is the share of its throughput that was reached."""
    asked = min(row.concurrency, result["figures"]["requests"])
    least: Floor = floor(Wave(asked, row.distinct(asked), prompt, tokens), work, rates)
    reached = result["figures"]["output_tok_per_s"] / least.tok_per_s
    facts = {"ttft_ms": least.ttft_ms, "tpot_ms": least.tpot_ms, "tok_per_s": least.tok_per_s, "of_floor": reached}
    return {**result, "row": row.key, "floor": {name: float(f"{value:.4g}") for name, value in facts.items()}}


def better(results: Sequence[Result]) -> Result:
    """Return the result with more tokens a second."""
    return max(results, key=lambda result: float(result["figures"]["output_tok_per_s"]))


def as_base(work: Work) -> Work:
    """Return the cost without adapters."""
    return replace(work, adapter_bytes=0.0, adapter_ops=0.0)


TITLES = ("row", "prompt", "server", "tok/s", "lorasrv is", "TTFT p50 ms", "ITL p50 ms", "of floor", "failed")


def comparison(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return a line for each row, prompt and server; `lorasrv is` so many times as fast."""
    ours = {_place(result): result["figures"]["output_tok_per_s"] for result in results if result["label"] == "lorasrv"}
    return [_line(result, ours.get(_place(result))) for result in sorted(results, key=_order)]


def _line(result: Result, ours: float | None) -> tuple[str, ...]:
    figures = result["figures"]
    theirs = figures["output_tok_per_s"]
    ratio = f"{ours / theirs:.1f} ×" if ours and theirs and result["label"] != "lorasrv" else "–"
    return (
        result["row"],
        str(result["settings"]["prompt"]),
        result["label"],
        f"{theirs:.1f}",
        ratio,
        _ms(figures["ttft_ms"]["p50"]),
        _ms(figures["itl_ms"]["p50"]),
        f"{100 * result['floor']['of_floor']:.0f} %",
        str(figures["failed"]),
    )


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _place(result: Result) -> tuple[Any, ...]:
    return result["row"], result["settings"]["prompt"]


def _order(result: Result) -> tuple[Any, ...]:
    return [row.key for row in ROWS].index(result["row"]), int(result["settings"]["prompt"])
