"""Render `top`: a screen of any width for terminals, and a line per sample for files."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from api.cli.top.stats import PARTS
from lorasrv.config import size

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

COLOURS = {"kv": "cyan", "prefix": "blue", "adapters": "magenta", "free": "bright_black"}
# Parts are distinguishable without colours, too.
GLYPHS = {"kv": "█", "prefix": "▓", "adapters": "▒", "free": "░"}
NARROW, SMALL_BAR = 64, 10
GAP, INDENT = "   ", "  "
Figures = Mapping[str, Any]


def line(figures: Figures, clock: str) -> str:
    """Format one sample as a line of name=value."""
    requests, pages, latency = figures["requests"], figures["pages"], figures["latency_ms"]
    shares = {part: f"{100 * pages[part] / max(1, pages['total']):.0f}%" for part in PARTS}
    cells = {
        "running": requests["running"],
        "waiting": requests["waiting"],
        "waiting_for_adapter": requests["waiting_for_adapter"],
        **{name: "-" if rate is None else f"{rate:.1f}" for name, rate in figures["rates"].items()},
        **{f"pages_{part}": share for part, share in shares.items()},
        **{
            f"{name}_{share}_ms": "-" if latency[name] is None else latency[name][share]
            for name in latency
            for share in ("p50", "p95")
        },
        **figures["tiers"],
        **figures["totals"],
        "hottest": ",".join(f"{hot['id']}:{hot['tokens_per_s']:.1f}" for hot in figures["hottest"][:3]) or "-",
    }
    return " ".join((clock, *(f"{name}={value}" for name, value in cells.items())))


def screen(figures: Figures, title: str, problem: str | None, width: int, height: int) -> "Group":
    """Render one sample within the given size. If there is a `problem`, the figures are from before it."""
    from rich.console import Group
    from rich.text import Text

    parts = [Text(title, style="bold"), Text(problem or "", style="bold red")]
    parts += [Text(text) for group in _groups(figures) for text in _wrapped(group, width)]
    parts += [_bar(figures["pages"], width), *_legend(figures["pages"], width)]
    for text in parts:
        text.no_wrap, text.overflow = True, "ellipsis"
    # Two lines are needed besides: the table's heading, and one that stays free.
    rows = max(0, height - len(parts) - 2)
    shown: list[Any] = [*parts, *([_hottest(figures["hottest"][:rows], width)] if rows else [])]
    return Group(*shown)


def _groups(figures: Figures) -> Iterator[list[str]]:
    """Yield the figures by subject, in pieces that stay together."""
    rates, requests, tiers, totals = (figures[name] for name in ("rates", "requests", "tiers", "totals"))
    yield [
        f"tokens/s {_rate(rates['output_tokens_per_s'])} out, {_rate(rates['prompt_tokens_per_s'])} in",
        f"answers/s {_rate(rates['ended_per_s'])}",
        f"steps/s {_rate(rates['steps_per_s'])}",
    ]
    yield [
        f"requests {requests['running']} running, {requests['waiting']} waiting, "
        f"{requests['waiting_for_adapter']} for an adapter",
        f"{totals['preemptions']} preempted, {totals['swaps']} swapped",
    ]
    yield ["latency", *_latencies(figures["latency_ms"])]
    yield [
        f"adapters {tiers['resident']} in the pool, {tiers['arriving']} arriving",
        f"{size(tiers['host_cache_bytes'])} on host",
        f"loads {totals['adapter_loads_disk']} disk, {totals['adapter_loads_host']} host, "
        f"{totals['adapter_load_failures']} failed",
        f"{totals['adapter_evictions']} evicted",
    ]


def _wrapped(pieces: Sequence[str], width: int) -> Iterator[str]:
    """Yield lines of at most `width` that break between pieces only; later lines are indented."""
    line = pieces[0]
    for piece in pieces[1:]:
        if len(line) + len(GAP) + len(piece) <= width:
            line += GAP + piece
        else:
            yield line
            line = INDENT + piece
    yield line


def _latencies(latency: Figures) -> Iterator[str]:
    names = {"first_token": "first token", "inter_token": "between tokens", "request": "answer"}
    for key, name in names.items():
        shown = latency[key]
        yield f"{name} -" if shown is None else f"{name} {_ms(shown['p50'])} (p95 {_ms(shown['p95'])})"


def _bar(pages: Figures, width: int) -> "Text":
    """Draw the pool; each part with a page gets at least one character, and free pages the rest."""
    from rich.text import Text

    room, total = max(SMALL_BAR, width - 1), max(1, pages["total"])
    widths = {part: -(-room * pages[part] // total) for part in PARTS if part != "free"}
    # Rounding up may exceed the width: shorten the widest parts.
    while sum(widths.values()) > room:
        widths[max(widths, key=lambda part: widths[part])] -= 1
    widths["free"] = room - sum(widths.values())
    return Text.assemble(*((GLYPHS[part] * widths[part], COLOURS[part]) for part in PARTS))


def _legend(pages: Figures, width: int) -> Iterator["Text"]:
    from rich.text import Text

    pieces = [*(f"{GLYPHS[part]} {part} {pages[part]}" for part in PARTS), f"of {pages['total']} pages"]
    for line in _wrapped(pieces, width):
        text = Text(line)
        for part in PARTS:
            text.highlight_regex(rf"{GLYPHS[part]} {part} \d+", COLOURS[part])
        yield text


def _hottest(hottest: Any, width: int) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, expand=False)
    table.add_column("hottest", no_wrap=True, overflow="ellipsis", min_width=8)
    columns = ["tier", "tokens/s", *(["requests", "tokens"] if width >= NARROW else [])]
    for column in columns:
        least = len("resident") if column == "tier" else len(column)
        table.add_column(column, justify="right" if column != "tier" else "left", no_wrap=True, min_width=least)
    for hot in hottest:
        cells = [hot["tier"] or "base", f"{hot['tokens_per_s']:.1f}", str(hot["requests"]), str(hot["tokens"])]
        table.add_row(Text(hot["id"]), *cells[: len(columns)])
    return table


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}"


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"
