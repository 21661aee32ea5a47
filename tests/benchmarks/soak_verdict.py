"""Judge a soak: check that every resource was released, and make a table of its figures."""

import json
import re
import subprocess
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import environment, lorasrv_command
from process_watch import Figures, Held, held_by, slope
from served import Served

if TYPE_CHECKING:
    from soak import Soak

# Share of the time after which memory is judged: until then caches fill.
WARM_UP = 1 / 3
# Memory is flat if it grows by less than the one or the other: a short run cannot tell an hour's growth.
GROWTH_BYTES_PER_HOUR = 48 << 20
GROWTH_BYTES = 12 << 20
DONE = "all that was taken was given back, and no answer was wrong"
BAD_LINE = re.compile(r'Traceback|^(ERROR|CRITICAL)|"level": ?"(error|critical)"')
ROUTES = ("completions", "chat", "tgi")


def verdict(soak: "Soak", served: Served, before: Held) -> dict[str, Any]:
    """Return the figures once all clients are gone and all ids deleted; add what is wrong to the run's errors."""
    served.calm_down()
    pool, shown = served.http.get("/v1/pool").json(), Figures(served.http.get("/metrics").text)
    after = settled(served, before)
    for name in ("requests_running", "requests_waiting", "requests_waiting_for_adapter", "adapters_arriving"):
        if shown.sum(name):
            soak.wrong.append(f"{name} is {shown.sum(name):g} without any request")
    owned = sum(pool[f"pages_{of}"] for of in ("free", "kv", "prefix", "adapters"))
    if owned != pool["pages_total"] or pool["pages_kv"]:
        soak.wrong.append(f"pages: {pool['pages_kv']} of requests, {owned} of {pool['pages_total']} accounted for")
    if pinned := [one["ids"] for one in pool["adapters"] if one["requests"] or one.get("pinned")]:
        soak.wrong.append(f"pinned without any request: {pinned}")
    if after.fds > before.fds + 2:
        soak.wrong.append(f"descriptors: {before.fds} before, {after.fds} after")
    warm = [(at, float(held.rss_bytes)) for at, held in soak.looks if at > WARM_UP * soak.seconds]
    per_second = slope(warm)
    grown = per_second * (warm[-1][0] - warm[0][0]) if warm else 0.0
    if per_second * 3600 > GROWTH_BYTES_PER_HOUR and grown > GROWTH_BYTES:
        soak.wrong.append(f"memory grows by {per_second * 3600 / 2**20:.0f} MiB an hour ({grown / 2**20:.1f} MiB seen)")
    churn = {name: shown.sum(f"{name}_total") for name in ("adapter_evictions", "preemptions", "prefix_evictions")}
    churn |= {f"loads from {tier}": shown.sum("adapter_loads_total", tier=tier) for tier in ("disk", "host")}
    tally = soak.traffic.tally
    calm = [what for what in ("adapter_evictions", "loads from disk", "loads from host") if not churn[what]]
    calm += [what for what in ("404", "left", "completions, stream, n", "tgi, stream", "chat") if not tally[what]]
    if calm and not soak.wrong:
        soak.wrong.append(f"too calm to prove anything: no {', no '.join(calm)}")
    return {
        "seconds": round(soak.seconds, 1),
        "requests": dict(tally),
        "changes": dict(soak.changes),
        "churn": churn,
        "memory": {
            "before_bytes": before.rss_bytes,
            "after_bytes": after.rss_bytes,
            "slope_bytes_per_hour": round(per_second * 3600),
            "grown_bytes": round(grown),
        },
        "descriptors": {
            "before": before.fds,
            "most": max((h.fds for _, h in soak.looks), default=0),
            "after": after.fds,
        },
        "threads": {"before": before.threads, "after": after.threads},
        "looks": [{"s": round(at, 1), **asdict(held)} for at, held in soak.looks],
    }


def settled(served: Served, before: Held) -> Held:
    """Wait until sockets that were just closed are gone."""
    for _ in range(50):
        if held_by(served.pid).fds <= before.fds:
            break
        time.sleep(0.1)
    return held_by(served.pid)


def fsck(store: Path, *, was_cut_short: bool) -> list[str]:
    """Return what `lorasrv store fsck` finds; a run that was cut short may leave weights that were not registered."""
    command = lorasrv_command("store", "fsck", "--json", "--store", store)
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    found = json.loads(done.stdout)["findings"]
    return [f"store fsck: {one}" for one in found if not (was_cut_short and one["kind"] == "orphaned")]


def log_complaints(log: str) -> list[str]:
    """Return the error lines of a log, text or JSON."""
    lines = [line for line in log.splitlines() if BAD_LINE.search(line)]
    return [f"the log has {len(lines)} of them: {lines[0]}"] if lines else []


def table(result: dict[str, Any], command: str) -> str:
    """Return a Markdown table."""
    requests, memory, mib = result["requests"], result["memory"], 2**20
    kinds = {
        name: count for name, count in requests.items() if name.partition(",")[0] in ("completions", "chat", "tgi")
    }
    by_force = requests.get("ended by force", 0)
    before, after = (memory[f"{when}_bytes"] / mib for when in ("before", "after"))
    fitted = f"fitted after the first third: {memory['slope_bytes_per_hour'] / mib:+.1f} MiB an hour"
    rows = {
        "time": f"{result['seconds'] / 60:.1f} minutes, {result['adapters']} ids, seed {result['seed']}",
        "answers compared, token by token": f"{requests['answered']:,} ({requests['tokens']:,} tokens)",
        "of these": ", ".join(f"{name}: {count:,}" for name, count in sorted(kinds.items())),
        "clients that left early": f"{requests['left']:,}",
        "404 for a name that was gone; ended by force": f"{requests['404']:,}; {by_force:,}",
        "changes": ", ".join(f"{name}: {count:,}" for name, count in sorted(result["changes"].items())),
        "pool and host cache": ", ".join(f"{name}: {count:,.0f}" for name, count in result["churn"].items()),
        "resident memory": f"{before:.0f} MiB before, {after:.0f} after; {fitted}",
        "descriptors": "{before} before, {most} at most, {after} after".format(**result["descriptors"]),
        "threads": "{before} before, {after} after".format(**result["threads"]),
        "wrong": "; ".join(result["wrong"]) or f"nothing: {DONE}; `store fsck` clean, no traceback in the log",
    }
    lines = [f"| {name} | {text} |" for name, text in rows.items()]
    return "\n".join(["| soak | |", "|---|---|", *lines, "", f"{date.today()}, `{command}`"])
