"""Print the results of `lorasrv bench` as a table of load points, with failures and missing values."""

from collections.abc import Callable, Sequence
from typing import Any

from api.cli.bench.stats import Result
from api.cli.common.terminal import note, print_table, say

Cells = list[tuple[str, str]]
"""Title and text of each cell of one row."""


def print_results(results: Sequence[Result]) -> None:
    rows = [_cells(result) for result in results]
    titles = [title for title, _ in rows[0]]
    shown = [k for k in range(len(titles)) if k < 2 or any(row[k][1] != "–" for row in rows)]
    print_table([titles[k] for k in shown], [[row[k][1] for k in shown] for row in rows])
    for result in results:
        _print_failures(result)
    say(_about(results[0]))
    for line in _left_out(results[0]):
        note(line)


def _cells(result: Result) -> Cells:
    figures = result["figures"]
    return [
        ("load", result["point"] + (" (interrupted)" if result.get("interrupted") else "")),
        ("answered", f"{figures['requests'] - figures['failed']} of {figures['requests']}"),
        ("tok/s", f"{figures['output_tok_per_s']:.1f}"),
        ("with prompts", f"{figures['total_tok_per_s']:.1f}"),
        ("TTFT p50/p90/p99 ms", _spread(figures["ttft_ms"])),
        ("TPOT ms", _spread(figures["tpot_ms"])),
        ("ITL ms", _spread(figures["itl_ms"])),
        ("goodput/s", _known(figures["goodput_per_s"], lambda value: f"{value:.2f}")),
        ("kept", _known(figures["good_share"], _percent)),
        ("MBU", _known(figures["mbu"], _percent)),
        ("MFU", _known(figures["mfu"], _percent)),
    ]


def _print_failures(result: Result) -> None:
    figures = result["figures"]
    if figures["failed"]:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in figures["failures"].items())
        say(f"{result['point']}: {figures['failed']} failed ({kinds}); the first: {figures['first_error']}")


def _about(result: Result) -> str:
    server, settings, figures = result["server"], result["settings"], result["figures"]
    lengths = f"{figures['prompt_tokens_mean']:.0f} + {figures['output_tokens_mean']:.0f} tokens a request"
    law = f", law {settings['law']}" if settings["law"] else ""
    return f"{server['name']} {server['version'] or ''} {server['base']}: {lengths}{law}, seed {settings['seed']}"


def _left_out(result: Result) -> list[str]:
    figures = result["figures"]
    if figures["mbu"] is not None and figures["mfu"] is not None:
        return []
    if result["machine"]["measured"] is None:
        return ["MBU and MFU are left out: they need --measure-machine"]
    missing = [("MBU", "mbu", "--model-bytes"), ("MFU", "mfu", "--model-ops")]
    return [
        f"{title} is left out: the server does not report the costs of its model; give {option}"
        for title, name, option in missing
        if figures[name] is None and figures["failed"] < figures["requests"]
    ]


def _spread(values: dict[str, float | None]) -> str:
    if values["p50"] is None:
        return "–"
    return " / ".join(
        f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values.values() if value is not None
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _known(value: Any, show: Callable[[Any], str]) -> str:
    return "–" if value is None else show(value)
