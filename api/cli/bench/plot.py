"""Plot latency by load and throughput by adapters. The only module of the command that needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from api.cli.bench.stats import Result

SIZE_INCHES = (10.0, 4.2)
DPI = 120
LATENCIES = (("ttft_ms", "TTFT", "-"), ("itl_ms", "ITL", "--"))
QUANTILES = ("p50", "p90", "p99")


def draw(path: Path, results: Sequence[Result]) -> None:
    """Write a PNG.

    Raises: OSError.
    """
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    latencies, throughput = figure.subplots(1, 2)
    _draw_latencies(latencies, results)
    _draw_throughput(throughput, results)
    figure.savefig(path, format="png", dpi=DPI)


def _draw_latencies(axes: Axes, results: Sequence[Result]) -> None:
    """Draw the latencies at the largest number of adapters."""
    most = max(result["figures"]["adapters"] for result in results)
    shown = sorted((r for r in results if r["figures"]["adapters"] == most), key=_load_of)
    for name, title, style in LATENCIES:
        for number, q in enumerate(QUANTILES):
            values = [(_load_of(r), r["figures"][name][q]) for r in shown if r["figures"][name][q] is not None]
            _line(axes, values, f"{title} {q}", style, f"C{number}")
    axes.set_yscale("log")
    axes.set_xlabel(_load_name(results[0]))
    axes.set_ylabel("ms")
    axes.set_title(f"Latency, {most} adapters")
    axes.legend()


def _draw_throughput(axes: Axes, results: Sequence[Result]) -> None:
    loads = sorted({_load_of(result) for result in results})
    for number, load in enumerate(loads):
        points = sorted(
            (r["figures"]["adapters"], r["figures"]["output_tok_per_s"]) for r in results if _load_of(r) == load
        )
        _line(axes, points, f"{_load_name(results[0])} {load:g}", "-", f"C{number % 10}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("adapters")
    axes.set_ylabel("output tokens/s")
    axes.set_title("Throughput")
    axes.legend()


def _line(axes: Axes, points: Sequence[tuple[float, Any]], label: str, style: str, colour: str) -> None:
    if points:
        axes.plot([x for x, _ in points], [y for _, y in points], style, marker="o", label=label, color=colour)


def _load_of(result: Result) -> float:
    settings = result["settings"]
    return float(settings.get("concurrency") or settings.get("rate") or result["figures"]["requests_per_s"])


def _load_name(result: Result) -> str:
    return "concurrency" if result["settings"].get("concurrency") else "requests/s"
