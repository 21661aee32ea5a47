"""Plot TTFT by the number of adapters and over the trace's time. The command's only module that needs matplotlib."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from api.cli.plan.report import Plan
from lorasrv.offline.planner.report import over_time, ttft_points
from lorasrv.offline.planner.what_if import Capacity

SIZE_INCHES = (10.0, 4.2)
DPI = 120


def draw(path: Path, plan: Plan) -> None:
    """Write a PNG.

    Raises: OSError.
    """
    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    if plan.capacity is not None:
        by_number, by_time = figure.subplots(1, 2)
        _draw_capacity(by_number, plan.capacity)
    else:
        by_time = figure.subplots()
    _draw_time(by_time, plan)
    figure.savefig(path, format="png", dpi=DPI)


def _draw_capacity(axes: Axes, fit: Capacity) -> None:
    numbers = [point.adapters for point in fit.points]
    axes.plot(numbers, [point.figures.ttft_p99_ms for point in fit.points], marker="o", label="p99")
    axes.plot(numbers, [point.figures.ttft_p50_ms for point in fit.points], marker="o", label="p50")
    axes.axhline(fit.limit_ms, linestyle="--", linewidth=1, color="gray", label="limit")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("adapters")
    axes.set_ylabel("TTFT, ms")
    axes.set_title("How many adapters fit")
    axes.legend()


def _draw_time(axes: Axes, plan: Plan) -> None:
    _line(axes, ttft_points(plan.done.outcomes), "predicted")
    if plan.measured is not None:
        _line(axes, [(r.arrival_s, r.ttft_ms) for r in plan.trace if r.ttft_ms is not None], "measured")
    axes.set_xlabel("s")
    axes.set_ylabel("TTFT, ms, median of a window")
    axes.set_title("This trace")
    axes.legend()


def _line(axes: Axes, points: list[tuple[float, float]], label: str) -> None:
    line = over_time(points)
    axes.plot([at for at, _ in line], [value for _, value in line], marker=".", label=label)
