"""Send ten times a server's capacity for a minute, then nothing, and check what becomes of admitted requests.

    GOMP_SPINCOUNT=30000 python tests/benchmarks/bench_overload.py [--record docs/reliability.md]
    python tests/benchmarks/bench_overload.py --model marked --seconds 10

alone: one request after the other. full: as many clients as request slots, each with one request at a time: the
capacity, and the latency when every slot is taken and no request is refused. generator elsewhere: the same, while the
flood goes to another process that only refuses, so that its own cost is known. flood: Poisson arrivals at ten times
that rate. after: one request after the other again, from the last arrival on; the server has recovered with the first
whose time to the first token and between tokens is within 1.5 times of the slowest tenth of alone.

Server and clients share one machine's cores, so latencies include the cost of the clients. Exit code 1: an admitted
request failed, one was refused in another way than 429 with Retry-After (or, with --queue-timeout-s, 504), memory grew
beyond the bound, or descriptors are left at the end. Latencies are printed, not judged.
"""

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import httpx2
from harness import arguments
from flood import Body, Outcome, call, closed_loop, open_loop, percentile
from marker_served import SERVE_FLAGS, some_prompt, write_served_model
from process_watch import Held, held_by
from report import record
from served import Served, serve

from api.cli.bench.prompts import WORDS

MOST_REQUESTS = 50_000
WITHIN = 1.5
# By how much memory may grow in the flood: a page of text for each connection, and Python's arenas.
MEMORY_BYTES = 64 << 20
RECOVER_S = 120.0


@dataclass
class Phase:
    """The requests of one phase, its seconds, and the memory held during it."""

    outcomes: list[Outcome]
    seconds: float = 0.0
    held: list[Held] = field(default_factory=list)

    @property
    def answered(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.is_answered]

    def ttft(self, share: float) -> float:
        return percentile([one.ttft for one in self.answered if one.arrivals], share)

    def gap(self, share: float) -> float:
        return percentile([gap for one in self.answered for gap in one.gaps()], share)


REFUSE = """
import asyncio

async def refuse(reader, writer):
    head = await reader.readuntil(b"\\r\\n\\r\\n")
    length = next(line for line in head.lower().split(b"\\r\\n") if line.startswith(b"content-length:"))
    await reader.readexactly(int(length.split(b":")[1]))
    writer.write(b"HTTP/1.1 429 Too Many Requests\\r\\ncontent-length: 25\\r\\nconnection: close\\r\\n\\r\\n")
    writer.write(b'{"error":{"code":"none"}}')
    await writer.drain()
    writer.close()

async def main():
    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@contextmanager
def refusing_server() -> Iterator[str]:
    """Yield the URL of a server in a process of its own that answers everything with 429."""
    with subprocess.Popen([sys.executable, "-c", REFUSE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


class Overload:
    """One run against one server."""

    def __init__(self, served: Served, a: argparse.Namespace) -> None:
        self.served, self.a = served, a
        self.phases: dict[str, Phase] = {}
        self.recovered_s: float | None = None
        self.drained_s = 0.0
        self.pool_grown_bytes = 0

    async def run(self) -> None:
        # None is kept for the next request: the server may be closing it just then.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx2.AsyncClient(base_url=self.served.url, trust_env=False, timeout=600, limits=limits) as http:
            body = self._body()
            await closed_loop(http, body, self.a.slots, 2.0)
            self.phases["alone"] = await self._timed(closed_loop(http, body, 1, self.a.calm_seconds))
            self.phases["full"] = await self._timed(closed_loop(http, body, self.a.slots, self.a.calm_seconds))
            rate = self.a.times * self.capacity
            self.phases["beside"] = await self._beside_generator(http, body, rate)
            print(f"capacity {self.capacity:.2f} requests/s; flood of {rate:.1f} for {self.a.seconds:g} s", flush=True)
            in_use = self._pool_bytes()
            flood = asyncio.create_task(
                self._timed(open_loop(http, body, rate, self.a.seconds, MOST_REQUESTS), watched=True)
            )
            after = asyncio.create_task(self._after(http, body, self.a.seconds))
            self.phases["flood"], self.phases["after"] = await flood, await after
            self.pool_grown_bytes = max(0, self._pool_bytes() - in_use)

    async def _beside_generator(self, http: httpx2.AsyncClient, body: Body, rate: float) -> Phase:
        """Fill every slot, and send the flood to a server that only refuses: what the generator itself costs."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        with refusing_server() as url:
            async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=600, limits=limits) as elsewhere:
                flood = asyncio.create_task(open_loop(elsewhere, body, rate, self.a.calm_seconds, MOST_REQUESTS))
                phase = await self._timed(closed_loop(http, body, self.a.slots, self.a.calm_seconds))
                await flood
        return phase

    def _pool_bytes(self) -> int:
        """Return the used bytes of the pool, which is committed on first write, and caches prompts."""
        total, free, size = (
            self.served.figure(f"lorasrv_{name}") for name in ("pages_total", "pages_free", "pool_bytes")
        )
        return int((total - free) / total * size)

    @property
    def capacity(self) -> float:
        """Return the requests a second with every slot taken."""
        full = self.phases["full"]
        return len(full.answered) / full.seconds

    def _body(self) -> Body:
        rng = random.Random(0)

        def body(number: int) -> dict[str, Any]:
            prompt: Any = " ".join(rng.choices(WORDS, k=self.a.prompt_words))
            if self.a.model == "marked":
                prompt = list(some_prompt(rng).ids)
            return {"model": self.a.name, "prompt": prompt, "max_tokens": self.a.tokens, "ignore_eos": True}

        return body

    async def _timed(self, work: Any, *, watched: bool = False) -> Phase:
        begun, held = time.monotonic(), []
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait([task], timeout=0.5)
            if watched:
                held.append(held_by(self.served.pid))
        return Phase(task.result(), time.monotonic() - begun, held)

    async def _after(self, http: httpx2.AsyncClient, body: Body, seconds: float) -> Phase:
        """Send one request after the other from the last arrival on; at first the queue is still full."""
        await asyncio.sleep(seconds)
        begun, outcomes, alone = time.monotonic(), [], self.phases["alone"]
        while time.monotonic() < begun + RECOVER_S:
            outcomes.append(one := await call(http, body(0)))
            if one.status == 429:
                await asyncio.sleep(0.2)
                continue
            self.drained_s = self.drained_s or one.sent - begun
            fast = one.is_answered and one.ttft <= WITHIN * alone.ttft(0.9)
            if fast and percentile(one.gaps(), 0.5) <= WITHIN * alone.gap(0.9):
                self.recovered_s = one.sent - begun
                break
        return Phase(outcomes, time.monotonic() - begun)


def complaints(run: Overload, before: Held, after: Held) -> list[str]:
    """Return what is wrong, latencies aside."""
    flood = run.phases["flood"].outcomes
    found = []
    if failed := [one for one in flood if not one.is_answered and not one.is_refused]:
        found.append(f"{len(failed)} admitted requests failed, the first: {failed[0].status} {failed[0].error}")
    allowed = {429, 504} if run.a.queue_timeout_s else {429}
    if other := [one for one in flood if one.is_refused and one.status not in allowed]:
        found.append(f"{len(other)} were refused with {other[0].status} {other[0].error}")
    if silent := [one for one in flood if one.status == 429 and one.retry_after is None]:
        found.append(f"{len(silent)} times 429 without Retry-After")
    if not any(one.status == 429 for one in flood):
        found.append("no request was refused: that was no flood")
    if (grown := peak_growth(run, before)) > MEMORY_BYTES:
        found.append(f"memory grew by {grown >> 20} MiB")
    if run.recovered_s is None:
        found.append(f"no recovery within {RECOVER_S:g} s")
    if after.fds > before.fds + 2:
        found.append(f"descriptors: {before.fds} before, {after.fds} after")
    return found


def peak_growth(run: Overload, before: Held) -> int:
    """Return the growth of memory in the flood, without the pool, whose size is given."""
    most = max((held.rss_bytes for held in run.phases["flood"].held), default=0)
    return most - before.rss_bytes - run.pool_grown_bytes


def table(run: Overload, before: Held, after: Held, wrong: list[str]) -> str:
    """Return Markdown: latencies, then everything else."""
    phases = [run.phases[name] for name in ("alone", "full", "beside", "flood")]
    flood = phases[-1]
    lines = [
        "| ms | alone | full | full, generator elsewhere | flood, of those admitted | flood over alone | over full "
        "| over generator elsewhere |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, of in (("to the first token", Phase.ttft), ("between tokens", Phase.gap)):
        for share in (0.5, 0.99):
            *calm, o = (1e3 * of(phase, share) for phase in phases)
            over = [f"{o / base:.2f}" if base else "-" for base in calm]
            cells = [*(f"{ms:.1f}" for ms in (*calm, o)), *over]
            lines.append(f"| {name}, p{100 * share:.0f} | {' | '.join(cells)} |")
    statuses = Counter(one.status for one in flood.outcomes)
    waits = Counter(one.retry_after for one in flood.outcomes if one.status == 429)
    seconds = sorted(float(wait or 0) for wait in waits.elements())
    told = f"{seconds[0]:g} to {seconds[-1]:g} s, half of them up to {percentile(seconds, 0.5):g} s" if seconds else "-"
    grown = peak_growth(run, before) / 2**20
    recovered = "not" if run.recovered_s is None else f"{run.recovered_s:.1f} s"
    memory = (
        f"{before.rss_bytes >> 20} MiB, {after.rss_bytes >> 20} after; the flood took "
        f"{run.pool_grown_bytes >> 20} MiB more of the pool into use, and beside that {grown:+.1f} at most"
    )
    facts = [
        ("capacity", f"{run.capacity:.2f} requests/s with {run.a.slots} request slots"),
        ("offered", f"{len(flood.outcomes):,} requests in {run.a.seconds:g} s ({run.a.times:g} times)"),
        ("answered", f"{len(flood.answered):,}, {len(flood.answered) / flood.seconds:.2f} a second"),
        ("refused", ", ".join(f"{status}: {n:,}" for status, n in sorted(statuses.items()) if status != 200)),
        ("Retry-After", told),
        ("memory", memory),
        ("descriptors", f"{before.fds} before, {after.fds} after"),
        ("after the last arrival", f"not refused after {run.drained_s:.1f} s, as fast as alone after {recovered}"),
        ("wrong", "; ".join(wrong) or "nothing"),
    ]  # fmt: skip
    return "\n".join([*lines, "", "| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in facts)])


def measure(a: argparse.Namespace) -> tuple[str, list[str]]:
    """Return the table, and what is wrong."""
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as folder:
        if a.model == "marked":
            model: list[object] = ["--model", write_served_model(Path(folder) / "model"), *SERVE_FLAGS]
        else:
            model = ["--model", a.model, "--served-model-name", "marked"]
        a.name = "marked"
        bounds = ["--max-num-seqs", a.slots, "--max-queued", a.max_queued]
        bounds += ["--queue-timeout-s", a.queue_timeout_s] if a.queue_timeout_s else []
        with serve(*model, *bounds, *a.serve_flags.split(), store=Path(folder) / "store") as served:
            run = Overload(served, a)
            before = held_by(served.pid)
            asyncio.run(run.run())
            served.calm_down()
            time.sleep(1.0)
            # Once every slot had been taken, and before the flood: what is compared is what the flood did.
            base = min((before, *run.phases["flood"].held[:1]), key=lambda held: -held.rss_bytes)
            after = held_by(served.pid)
            base = Held(base.rss_bytes, base.peak_bytes, before.fds, before.threads)
            wrong = complaints(run, base, after)
            if "Traceback" in served.log:
                wrong.append("the log has a traceback")
            return table(run, base, after, wrong), wrong


def main() -> None:
    a = arguments(
        __doc__,
        model=("smollm2-135m", "served model; marked: the tiny model of the tests"),
        seconds=(60.0, "of the flood"),
        times=(10.0, "offered load, as a multiple of the capacity"),
        calm_seconds=(20.0, "of alone, and of full"),
        slots=(4, "--max-num-seqs of the server"),
        max_queued=(8, "requests in the server, running or not"),
        queue_timeout_s=(float, "of the server"),
        tokens=(64, "of each answer"),
        prompt_words=(48, "of each prompt"),
        record=(Path, "page whose section bench:overload is replaced"),
        serve_flags=("", "more flags for lorasrv serve"),
    )
    shown, wrong = measure(a)
    print(f"\n{shown}")
    if a.record is not None and not wrong:
        words = " ".join(["python tests/benchmarks/bench_overload.py", *sys.argv[1:]])
        command = words.replace(f"--record {a.record}", "").strip()
        record(a.record, "overload", f"{shown}\n\n{date.today()}, `{command}`")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
