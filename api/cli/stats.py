"""What an adapter was asked and what it cost, as lines of `lorasrv show`."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

MIB = 2**20


def stats_lines(stats: dict[str, Any]) -> Iterator[str]:
    """Of an answer of `GET /v1/adapters/{id}/stats`; one line if nothing was ever asked."""
    if not stats["requests"]:
        yield "never asked"
        return
    ends = {name: stats[name] for name in ("errors", "refused", "aborted", "fallbacks") if stats[name]}
    shown = "".join(f", {count} {name}" for name, count in ends.items())
    yield f"asked {stats['requests']} times{shown}, last {_when(stats['last_used'])}"
    yield (
        f"{stats['prompt_tokens']} prompt tokens ({stats['cached_tokens']} cached), "
        f"{stats['generated_tokens']} generated, in {stats['compute_seconds']:.1f} s of computing"
    )
    if any(stats["found"].values()):
        ratios = ", ".join(f"{tier} {100 * share:.0f} %" for tier, share in stats["hit_ratio"].items())
        moved = f"{stats['disk_bytes'] / MIB:.1f} MiB from disk, {stats['pool_bytes'] / MIB:.1f} MiB to the pool"
        yield f"found: {ratios}; moved {moved}; held {stats['resident_byte_hours'] / MIB:.1f} MiB hours of the pool"
    for kind, first in stats["ttft"].items():
        if first["count"]:
            yield (
                f"first token, {kind}: {first['mean_ms']:.0f} ms on average, half within {first['p50_ms']:.0f}, "
                f"95 % within {first['p95_ms']:.0f} ({first['count']})"
            )


def _when(unix_s: int | None) -> str:
    return "never" if unix_s is None else datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
