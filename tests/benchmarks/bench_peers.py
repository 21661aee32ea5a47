"""lorasrv and its peers on this machine, one after the other in one run, under the same load: `lorasrv bench`'s.

    bash tests/benchmarks/peers/setup_vllm.sh VENV
    python tests/benchmarks/bench_peers.py --vllm VENV                      # everything: hours on a small machine
    python tests/benchmarks/bench_peers.py --vllm VENV --rows 1/1,16/16 --prompts 64 --max-tokens 32
    python tests/benchmarks/bench_peers.py --peers lorasrv,peft             # some of them

Rows are REQUESTS/ADAPTERS at a time, `base` without any; `zipf`: 32 at a time over 64 adapters by Zipf's law, exponent
1.1. Peers: `lorasrv`; `vllm-16`, `vllm-32`: vLLM's CPU build with so many LoRA slots; `vllm-base`: LoRA not enabled,
base rows only; `peft`: transformers and PEFT in this process, static batches, bf16 or fp32, whichever is faster in the
row; `llama`: llama.cpp's server, base rows only. A peer that the machine does not have is skipped with a word.

Adapters are seeded, rank 16 on all seven linears, in memory before the load, as vLLM and PEFT have them. The machine's
bandwidth and arithmetic are measured first; `of floor` is the share reached of what they allow for each server's own
weights (`api/cli/bench/roofline.py`). Results go to --out as JSON lines as they come; tests/benchmarks/report.py
writes them into docs/benchmarks.md.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from peer_rows import ROWS, TITLES, Row, as_base, better, comparison, peer_work, rows_of, with_floor
from peer_servers import PEERS, ROOT, Missing, Served, llama_cpp, lorasrv, resident_bytes, vllm

from api.cli.bench import machine as probe
from api.cli.bench.client import BenchClient
from api.cli.bench.load import Load
from api.cli.bench.machine import client_versions, commit, machine
from api.cli.bench.prompts import Ruler
from api.cli.bench.roofline import MachineRates, Work
from api.cli.bench.server_info import read_server_info, work_of
from api.cli.bench.stats import Result, figures, result
from api.cli.bench.sweep import make_asks, measure_ruler, run_point
from api.client import Client

ALL_PEERS = ("lorasrv", "vllm-16", "vllm-32", "vllm-base", "peft", "llama")
BF16_BYTES, FP32_BYTES = 2, 4


@dataclass
class Run:
    """What all peers share, and where results go."""

    a: argparse.Namespace
    rows: Sequence[Row]
    names: list[str]
    rates: MachineRates
    file: TextIO
    results: list[Result] = field(default_factory=list)

    def cases(self, *, base_only: bool = False) -> Iterator[tuple[Row, int]]:
        for row in self.rows:
            if row.adapters and base_only:
                continue
            for prompt in self.a.prompts:
                yield row, prompt

    def result(self, peer: str, row: Row, prompt: int, load: Load, work: Work, server: dict[str, Any]) -> Result:
        work = work if row.adapters else as_base(work)
        settings = row.settings(self.names, "base", prompt, self.a.max_tokens, self.a.requests)
        done = result(
            peer,
            figures(load, {}, work, self.rates),
            False,
            point=str(row.point),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            settings=settings.to_dict(row.point),
            server=server,
            machine={**machine(), "measured": {f"{k}_per_s": v for k, v in _rates(self.rates).items()}},
            client=client_versions(),
            commit=commit(),
            command=["python", "tests/benchmarks/bench_peers.py", *sys.argv[1:]],
        )
        return with_floor(done, row, prompt, self.a.max_tokens, work, self.rates)

    def keep(self, done: Result) -> None:
        self.results.append(done)
        self.file.write(json.dumps(done) + "\n")
        self.file.flush()
        f = done["figures"]
        print(
            f"{done['label']}: {done['row']}, prompts of {done['settings']['prompt']}: {f['output_tok_per_s']} tok/s, "
            f"TTFT p50 {f['ttft_ms']['p50']} ms, ITL p50 {f['itl_ms']['p50']} ms, "
            f"{100 * done['floor']['of_floor']:.0f} % of the floor's, {f['failed']} failed"
            + (f" ({f['first_error']})" if f["failed"] else ""),
            flush=True,
        )


def serve(run: Run, peer: str, served: Served, *, base_only: bool) -> None:
    """All rows on one server."""
    print(f"\n{peer}: ready after {served.start_s:.1f} s", flush=True)
    with Client(served.url) as client:
        seen = read_server_info(client)
        own = work_of(client, seen, [n for n in seen.adapters if n in run.names])
        if peer == "lorasrv":
            # As the others, which have every adapter in memory when they are ready.
            for adapter in seen.adapters:
                client.warm(adapter)
    name = "vLLM" if peer.startswith("vllm") else "llama.cpp" if peer == "llama" else seen.name
    server = {**seen.to_dict(), "name": name, "start_s": round(served.start_s, 1)}
    work = own or peer_work(run.a.assets, BF16_BYTES)
    ruler: Ruler | None = None
    for row, prompt in run.cases(base_only=base_only):
        settings = row.settings(run.names, seen.base, prompt, run.a.max_tokens, run.a.requests)
        load = Load()

        async def measure(row: Row = row, settings: Any = settings, load: Load = load) -> None:
            nonlocal ruler
            async with BenchClient(served.url, timeout_s=1800) as caller:
                ruler = ruler or await measure_ruler(caller.ask, seen.base)
                asks = make_asks(row.point, settings, ruler)
                await run_point(caller.ask, row.point, asks, settings.warmup, load, lambda _: None)

        asyncio.run(measure())
        memory = {"peak_resident_bytes": resident_bytes(served.pid)}
        run.keep(run.result(peer, row, prompt, load, work, {**server, **memory}))


def peft(run: Run) -> None:
    """Static batches in this process."""
    try:
        from importlib.metadata import version

        from peer_peft import StaticBatches
    except ImportError as error:
        raise Missing(f"{error}; pip install 'lorasrv[train]'") from None
    most = max((row.adapters for row in run.rows), default=0)
    found: dict[tuple[str, int], list[Result]] = {}
    print("\npeft: static batches in this process", flush=True)
    for dtype in run.a.peft_dtypes.split(","):
        model = StaticBatches(run.a.assets, run.names[:most], dtype)
        work = peer_work(run.a.assets, FP32_BYTES if dtype == "fp32" else BF16_BYTES)
        server = {"name": "PEFT", "version": version("peft"), "base": "base", "dtype": dtype}
        for row, prompt in run.cases():
            settings = row.settings(run.names, "base", prompt, run.a.max_tokens, run.a.requests)
            load = model.run(make_asks(row.point, settings, model.ruler()), row.concurrency)
            found.setdefault((row.key, prompt), []).append(run.result("peft", row, prompt, load, work, server))
    for tried in found.values():
        run.keep(better(tried))


def peer(run: Run, name: str, folder: Path) -> None:
    """Raises: Missing."""
    if name == "peft":
        peft(run)
        return
    base_only = name in ("vllm-base", "llama")
    if not list(run.cases(base_only=base_only)):
        raise Missing("no base rows are asked for")
    with _started(run, name, folder) as served:
        serve(run, name, served, base_only=base_only)


def _started(run: Run, name: str, folder: Path) -> AbstractContextManager[Served]:
    a, count = run.a, max(row.adapters for row in run.rows)
    if name == "lorasrv":
        adapters = [a.assets / "adapters" / adapter for adapter in run.names[:count]]
        return lorasrv(folder, adapters, a.serve_flags.split())
    if name == "llama":
        return llama_cpp(folder, a.llama_server)
    if name == "vllm-base":
        return vllm(folder, a.vllm, a.assets, 0, 0)
    return vllm(folder, a.vllm, a.assets, max(count, 1), int(name.removeprefix("vllm-")))


def _rates(rates: MachineRates) -> dict[str, float]:
    named = {"read_bytes": rates.read_bytes, "fp32_ops": rates.fp32_ops, "int8_ops": rates.int8_ops}
    return {name: float(f"{value:.4g}") for name, value in named.items()}


def _told(rates: MachineRates) -> str:
    return ", ".join(f"{name} {value / 1e9:.1f} G/s" for name, value in _rates(rates).items())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=rows_of, default=ROWS, help=",".join(row.key for row in ROWS))
    parser.add_argument("--peers", default=",".join(ALL_PEERS))
    parser.add_argument("--prompts", type=lambda s: [int(n) for n in s.split(",")], default=[64, 1000], help="tokens")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, help="of each row; default: 3 for one at a time, 32 to 64 for more")
    parser.add_argument("--vllm", type=Path, help="virtual environment with vLLM's CPU build")
    parser.add_argument("--llama-server", help="llama.cpp's server, if it is not in PATH")
    parser.add_argument("--peft-dtypes", default="bf16,fp32")
    parser.add_argument("--serve-flags", default="", help="more flags for lorasrv serve")
    parser.add_argument(
        "--assets", type=Path, default=ROOT / "build" / "bench", help="base and adapters, made if need be"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "peers.jsonl")
    a = parser.parse_args()
    for name in a.peers.split(","):
        if name not in ALL_PEERS:
            parser.error(f"--peers {name!r} is unknown; choose from {','.join(ALL_PEERS)}")
    return a


def main() -> None:
    a = arguments()
    most = max(row.adapters for row in a.rows)
    if not (a.assets / "adapters" / f"a{max(most, 1) - 1:04d}").exists():
        make = [sys.executable, str(PEERS / "make_assets.py"), "--out", str(a.assets), "--adapters", str(max(most, 1))]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    names = sorted(folder.name for folder in (a.assets / "adapters").iterdir())[: max(most, 1)]
    rates = probe.measure()
    print(f"{machine()['cpu']}: {_told(rates)}", flush=True)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lorasrv-bench-") as folder, a.out.open("w") as file:
        run = Run(a, a.rows, names, rates, file)
        for name in a.peers.split(","):
            try:
                peer(run, name, Path(folder))
            except Missing as missing:
                print(f"\n{name}: skipped: {missing}", flush=True)
    print(f"\nthe machine again: {_told(probe.measure())}; if it differs much, something else ran meanwhile")
    print(f"\n| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}")
    for line in comparison(run.results):
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
