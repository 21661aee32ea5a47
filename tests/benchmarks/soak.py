"""Run every operation at once for a quarter of an hour against `lorasrv serve` on the marker model: `make soak`.

    python tests/benchmarks/soak.py --minutes 15 [--record docs/reliability.md]

Two hundred ids, each answered by one adapter that forces tokens of its own, in a pool for some eight of them and a host
cache for some forty. Clients follow Zipf's law, whose favourites change every minute: three routes, streamed or not,
one choice or several, and every sixth client disconnects early. Meanwhile ids are uploaded with other contents,
aliased, rolled back, pinned, warmed, deleted, and uploaded again under the old name. Each token is compared with what
its name could mean (`marker_traffic.py`); nothing but 200, and 404 for deleted ids, is accepted.

At the end every resource must have been released: see `verdict`. The result is build/soak/result.json; the table is
printed, and with --record written into a page. Exit code 1: something was wrong.
"""

import asyncio
import contextlib
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import harness
import httpx2
import markers as m
from marker_served import (
    SERVE_FLAGS,
    host_cache_bytes,
    pool_bytes,
    some_prompt,
    some_text,
    upload,
    write_served_model,
)
from marker_traffic import GONE, Ask, Traffic, Wrong
from process_watch import Figures, Held, held_by, slope
from report import record
from served import ROOT, Served, serve

BASE, ALIAS = "marked", "prod"
RESIDENTS, HOSTED, SEQS, LONGEST = 8, 40, 8, 120
# Clients at a time, in turns, a minute each.
CLIENTS = (24, 6, 48)
MOST_VERSIONS = 3
LOOK_S = 2.0

# Share of the time after which memory is judged: until then caches fill.
WARM_UP = 1 / 3
# Memory is flat if it grows by less than the one or the other: a short run cannot tell an hour's growth.
GROWTH_BYTES_PER_HOUR = 48 << 20
GROWTH_BYTES = 12 << 20
DONE = "all that was taken was given back, and no answer was wrong"
BAD_LINE = re.compile(r'Traceback|^(ERROR|CRITICAL)|"level": ?"(error|critical)"')


@dataclass
class Id:
    """One id and its versions, as its uploads were answered; changed under its lock."""

    name: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    versions: dict[int, int] = field(default_factory=dict)
    current: int | None = None
    alias: int | None = None


class Soak:
    """One run. `wrong` collects errors; the first ends it."""

    def __init__(self, served: Served, http: httpx2.AsyncClient, adapters: int, seed: int) -> None:
        self.served, self.http = served, http
        self.traffic = Traffic(http, BASE)
        self.rng = random.Random(seed)
        self.ids = [Id(f"m{number:04}") for number in range(adapters)]
        self.order = list(self.ids)
        self.odds = m.zipf_odds(adapters)
        self.prefixes = [some_text(self.rng, self.rng.randint(32, 48)) for _ in range(m.TOPICS)]
        self.changes: Counter[str] = Counter()
        self.looks: list[tuple[float, Held]] = []
        self.wrong: list[str] = []
        self.begun = time.monotonic()
        self.stop = asyncio.Event()
        self.clients = 0
        self._numbers = itertools.cycle(self.rng.sample(range(m.NUM_ADAPTERS), m.NUM_ADAPTERS))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    async def fill(self) -> None:
        for one in self.ids:
            await self.upload(one)
        self.changes.clear()

    async def run(self, seconds: float) -> None:
        self.begun = time.monotonic()
        tasks = [self._client(number) for number in range(max(CLIENTS))]
        await self._together([*tasks, self._changer(), self._changer(), self._look(), self._turns(seconds)])

    async def _together(self, works: list[Coroutine[Any, Any, None]]) -> None:
        with contextlib.suppress(BaseExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for work in works:
                    group.create_task(self._guarded(work))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (Wrong, AssertionError, httpx2.HTTPError, OSError) as error:
            self.wrong.append(f"{type(error).__name__}: {error}")
            self.stop.set()
            raise

    async def _turns(self, seconds: float) -> None:
        """Change favourites and the number of clients every minute, or every ninth part of a short run."""
        turn_s = min(60.0, seconds / 9)
        for turn in itertools.count():
            self.clients = CLIENTS[turn % len(CLIENTS)]
            self.rng.shuffle(self.order)
            left = seconds - self.seconds
            if left <= 0 or await self._stopped(min(turn_s, left)):
                break
        self.stop.set()

    async def _stopped(self, seconds: float) -> bool:
        """Sleep, and return whether the run is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.stop.wait(), seconds)
        return self.stop.is_set()

    # Clients.

    async def _client(self, number: int) -> None:
        while not self.stop.is_set():
            if number >= self.clients:
                await self._stopped(0.5)
            else:
                await self.traffic.ask(self.some_ask())

    def some_ask(self) -> Ask:
        rng = self.rng
        route = rng.choices(("completions", "chat", "tgi"), (6, 3, 2))[0]
        stream = rng.random() < 0.5
        n = rng.choice((2, 3)) if route != "tgi" and rng.random() < 0.15 else 1
        leaves = rng.random() < 1 / 6
        after_tokens = rng.randint(1, 6) if leaves and stream and rng.random() < 0.5 else None
        return Ask(
            self._some_name(),
            some_prompt(rng, self.prefixes),
            max_tokens=rng.choice((24, rng.randint(1, 24))),
            route=route,
            stream=stream,
            n=n,
            leave_after_s=rng.expovariate(20) if leaves and after_tokens is None else None,
            leave_after_tokens=after_tokens,
        )

    def _some_name(self) -> str:
        if self.rng.random() < 0.05:
            return BASE
        name = self._some_id().name
        draw = self.rng.random()
        return f"{name}:{ALIAS}" if draw < 0.2 and f"{name}:{ALIAS}" in self.traffic.names else name

    def _some_id(self) -> Id:
        return self.order[self.rng.choices(range(len(self.order)), cum_weights=self.odds)[0]]

    # Changes beside them.

    async def _changer(self) -> None:
        works = (self.upload, self.delete, self.move_alias, self.roll_back, self.warm, self.pin)
        while not await self._stopped(self.rng.expovariate(10)):
            one = self._some_id()
            work = self.rng.choices(works, (40, 12, 15, 8, 8, 4))[0]
            if one.current is None:
                work = self.upload
            await work(one)

    async def upload(self, one: Id) -> None:
        """Upload another content, perhaps one that other ids have too, and delete an old version if there are many."""
        number, variety = next(self._numbers), self.rng.randrange(len(m.VARIETIES))
        async with one.lock:
            name = self.traffic.name(one.name)
            name.begin(number)
            version, digest = await upload(self.http, one.name, number, variety)
            self.traffic.digests[digest] = number
            one.versions[version], one.current = number, version
            name.settle(number)
            self.changes["upload"] += 1
            while len(one.versions) > MOST_VERSIONS:
                old = min(v for v in one.versions if v not in (one.current, one.alias))
                await self._send("DELETE", f"{one.name}@{old}")
                del one.versions[old]

    async def delete(self, one: Id) -> None:
        """Delete the id and its alias; half of the time with force, which ends its requests, too."""
        async with one.lock:
            if one.current is None:
                return
            force = self.rng.random() < 0.5
            name, alias = self.traffic.name(one.name), self.traffic.name(f"{one.name}:{ALIAS}")
            if one.alias is not None and not force:
                alias.begin(GONE)
                await self._send("PATCH", one.name, aliases={ALIAS: None})
                alias.settle(GONE)
            for gone in (name, alias):
                gone.begin(GONE)
                if force:
                    gone.break_off()
            await self._send("DELETE", f"{one.name}?force=true" if force else one.name)
            for gone in (name, alias):
                gone.settle(GONE)
            one.versions, one.current, one.alias = {}, None, None
            self.changes["delete, force" if force else "delete"] += 1

    async def move_alias(self, one: Id) -> None:
        async with one.lock:
            if one.current is None:
                return
            version = self.rng.choice(list(one.versions))
            alias = self.traffic.name(f"{one.name}:{ALIAS}")
            alias.begin(one.versions[version])
            await self._send("PATCH", one.name, aliases={ALIAS: version})
            alias.settle(one.versions[version])
            one.alias = version
            self.changes["alias"] += 1

    async def roll_back(self, one: Id) -> None:
        async with one.lock:
            if one.current is None:
                return
            version = self.rng.choice(list(one.versions))
            name = self.traffic.name(one.name)
            name.begin(one.versions[version])
            await self._send("PATCH", one.name, version=version)
            name.settle(one.versions[version])
            one.current = version
            self.changes["rollback"] += 1

    async def warm(self, one: Id) -> None:
        async with one.lock:
            if one.current is not None:
                await self._send("POST", f"{one.name}:warm", deadline_ms=self.rng.choice((0, 50, 500)))
                self.changes["warm"] += 1

    async def pin(self, one: Id) -> None:
        """Pin for a moment: at most half of the pool may be pinned."""
        async with one.lock:
            if one.current is None:
                return
            reference = f"{one.name}@{one.current}"
            try:
                await self._send("PATCH", reference, pinned=True)
                await self._stopped(0.2)
            finally:
                await self._send("PATCH", reference, pinned=False)
            self.changes["pin"] += 1

    async def _send(self, method: str, reference: str, **body: object) -> Any:
        answer = await self.http.request(method, f"/v1/adapters/{reference}", json=body or None)
        if answer.status_code not in (200, 202):
            raise Wrong(f"{method} {reference} {body}: {answer.status_code} {answer.text[:300]}")
        return answer.json()

    # Watching.

    async def _look(self) -> None:
        while not await self._stopped(LOOK_S):
            self.looks.append((self.seconds, held_by(self.served.pid)))
            health = await self.http.get("/health")
            if health.status_code != 200:
                raise Wrong(f"/health: {health.status_code} {health.text}")
            self._show()

    def _show(self) -> None:
        tally, held = self.traffic.tally, self.looks[-1][1]
        text = (
            f"{self.seconds:6.0f} s  {tally['answered']:7} answered  {tally['tokens']:8} tokens  "
            f"{tally['left']:6} left  {sum(self.changes.values()):6} changes  "
            f"{held.rss_bytes >> 20:5} MiB  {held.fds:4} descriptors"
        )
        if sys.stdout.isatty():
            print(f"\r{text}", end="", flush=True)
        elif len(self.looks) % 10 == 1:
            print(text, flush=True)

    async def delete_all(self) -> None:
        """Delete every id; no request may be counted on any of them then."""
        for one in self.ids:
            if one.current is not None:
                answer = await self._send("DELETE", f"{one.name}?force=true&wait=10")
                if answer["requests_running"]:
                    self.wrong.append(f"{one.name}: {answer['requests_running']} requests are still counted")


async def storm(served: Served, adapters: int, seconds: float, seed: int) -> tuple[Soak, Held]:
    """Run the storm; return it and what the server held before, with its store filled."""
    # None is kept for the next request: the server may be closing it just then.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx2.AsyncClient(base_url=served.url, trust_env=False, timeout=120, limits=limits) as http:
        soak = Soak(served, http, adapters, seed)
        await soak.fill()
        before = held_by(served.pid)
        await soak.run(seconds)
        if not soak.wrong:
            await soak._together([soak.delete_all()])
    return soak, before


# The verdict.


def verdict(soak: Soak, served: Served, before: Held) -> dict[str, Any]:
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
    command = harness.lorasrv_command("store", "fsck", "--json", "--store", store)
    done = subprocess.run(command, capture_output=True, text=True, env=harness.environment(), check=False)
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


# The command.


def run(folder: Path, adapters: int, seconds: float, seed: int, flags: list[str]) -> dict[str, Any]:
    """Run everything and return the result, with `wrong` empty if nothing is wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    model = write_served_model(folder / "model")
    memory = ("--pool-bytes", pool_bytes(RESIDENTS, SEQS, LONGEST), "--host-cache-bytes", host_cache_bytes(HOSTED))
    wrong: list[str] = []
    result: dict[str, Any] = {}
    try:
        with serve(
            "--model", model, *SERVE_FLAGS, *memory, "--max-num-seqs", 4 * SEQS, *flags, store=folder / "store"
        ) as served:
            soak, before = asyncio.run(storm(served, adapters, seconds, seed))
            wrong = soak.wrong
            result = verdict(soak, served, before)
            (folder / "server.log").write_text(served.log)
            wrong += log_complaints(served.log)
    except AssertionError as error:
        wrong.append(str(error))
    wrong += fsck(folder / "store", was_cut_short=bool(wrong))
    result |= {"adapters": adapters, "seed": seed, "wrong": wrong}
    (folder / "result.json").write_text(json.dumps(result, indent=1))
    return result


def main() -> None:
    a = harness.arguments(
        __doc__,
        minutes=(15.0, "of the run"),
        adapters=(200, "ids"),
        seed=(int, "of the run; random if left out"),
        folder=(ROOT / "build" / "soak", "emptied first"),
        record=(Path, "page whose section bench:soak is replaced"),
        serve_flags=("", "more flags for lorasrv serve"),
    )
    seed = random.randrange(1 << 30) if a.seed is None else a.seed
    print(f"{a.minutes:g} minutes, {a.adapters} ids, seed {seed}", flush=True)
    result = run(a.folder, a.adapters, 60 * a.minutes, seed, a.serve_flags.split())
    if "memory" in result:
        shown = table(result, f"make soak MINUTES={a.minutes:g}")
        print(f"\n{shown}")
        if a.record is not None and not result["wrong"]:
            record(a.record, "soak", shown)
    for error in result["wrong"]:
        print(f"WRONG: {error}", file=sys.stderr)
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
