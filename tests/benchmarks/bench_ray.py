"""What Ray costs alone: `lorasrv serve --replicas 1` beside plain `lorasrv serve`, asked in turn, on the same machine.

Prints memory (PSS of all processes of each), milliseconds of a request, and CPU of all processes a generated token.
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import httpx2
from process_tree import descendants
from served import Served, serve

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def pids_of(served: Served) -> list[int]:
    return [served.pid, *descendants(served.pid)]


def pss_mib(served: Served) -> float:
    total = 0
    for pid in pids_of(served):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def cpu_s(served: Served) -> float:
    parts = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids_of(served)]
    return sum(int(part[11]) + int(part[12]) for part in parts) * TICK_S


def ask(served: Served, tokens: int) -> float:
    begun = time.perf_counter()
    body = {"model": "tiny", "prompt": "the river", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer: httpx2.Response = served.post("/v1/completions", **body)
    assert answer.status_code == 200, answer.text
    return (time.perf_counter() - begun) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    flags = ("--model", args.model, "--served-model-name", "tiny", "--pool-bytes", "16MiB", "--log-level", "warning")
    with serve(*flags, ready_s=600) as plain, serve("--replicas", 1, *flags, ready_s=600) as ray:
        kinds = {"plain": plain, "--replicas 1": ray}
        short: dict[str, list[float]] = {name: [] for name in kinds}
        cpu = dict.fromkeys(kinds, 0.0)
        for _ in range(args.rounds):
            for name, served in kinds.items():
                short[name] += [ask(served, 1) for _ in range(10)]
                before = cpu_s(served)
                ask(served, 200)
                cpu[name] += cpu_s(served) - before
        for name, served in kinds.items():
            per_token = cpu[name] / args.rounds / 200 * 1e6
            print(f"{name}: {pss_mib(served):.0f} MiB, {median(short[name]):.2f} ms, {per_token:.0f} us a token")


if __name__ == "__main__":
    main()
