"""Measure `lorasrv serve` from its start to the line `ready`, with compiled kernels and without.

    python tests/benchmarks/bench_start.py --pairs 5 [--versus ../old-checkout] [--no-bytecode]

Starts take turns: this checkout and the other, with a full and with an empty kernel cache. Python's bytecode is kept in
a folder of the run, filled before the first figure, unless --no-bytecode. Medians of wall seconds, of processor seconds
(the processes that compile included), and of memory that the serving process shares with no other.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-P", "-c", "from api.cli.main import main; main()", "serve", "--port", "0")


def start(checkout: Path, cache: Path, environment: dict[str, str]) -> tuple[float, float, float]:
    """Return seconds until ready, processor seconds, and private MiB of one start."""
    env = {**environment, "PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(cache)}
    with tempfile.TemporaryDirectory() as store:
        before, begun = _cpu_s(), time.monotonic()
        command = [*COMMAND, "--store", store]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
        ) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            seconds = time.monotonic() - begun
            assert line.startswith("ready: "), line
            private = Path(f"/proc/{process.pid}/smaps_rollup").read_text().split("Private_Dirty:")[1].split()[0]
            process.terminate()
            process.communicate()
        return seconds, _cpu_s() - before, int(private) / 1024


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--versus", type=Path, help="another checkout")
    parser.add_argument("--no-bytecode", action="store_true", help="every start compiles all modules that it imports")
    a = parser.parse_args()
    checkouts = {"new": ROOT, **({"old": a.versus.resolve()} if a.versus else {})}
    with tempfile.TemporaryDirectory() as folder:
        env = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")
        }
        env |= {"PYTHONDONTWRITEBYTECODE": "1"} if a.no_bytecode else {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode"}
        for name, checkout in checkouts.items():
            start(checkout, Path(folder, name), env)
        seen: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for number in range(a.pairs):
            for name, checkout in checkouts.items():
                for kernels, cache in (("kept", Path(folder, name)), ("missing", Path(folder, f"{name}{number}"))):
                    seen.setdefault((kernels, name), []).append(start(checkout, cache, env))
                    print(name, kernels, *(round(x, 1) for x in seen[kernels, name][-1]), file=sys.stderr)
    print("| kernels | checkout | s to ready: median (least) | processor s | private MiB |\n|---|---|---|---|---|")
    for (kernels, name), runs in sorted(seen.items()):
        wall, cpu, private = ([run[i] for run in runs] for i in range(3))
        median = statistics.median
        print(
            f"| {kernels} | {name} | {median(wall):.1f} ({min(wall):.1f}) | {median(cpu):.1f} | {median(private):.0f} |"
        )


if __name__ == "__main__":
    main()
