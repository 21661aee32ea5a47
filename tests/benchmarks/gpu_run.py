"""Run everything that this project wants to know from a GPU, in calls that end in time.

    python tests/benchmarks/gpu_run.py --out DIR [--budget-s 570]            # the stages that are not done, in order
    python tests/benchmarks/gpu_run.py --out DIR --stages tune,steps        # these, done or not
    python tests/benchmarks/gpu_run.py --out DIR --dry-run                  # without a GPU: interpreter, tiny shapes
    python tests/benchmarks/gpu_run.py --out DIR --report                   # tables of what was measured

Each stage is a process with its own time limit; one that fails or is cut leaves its rows, and the next one starts.
A line that a stage prints as a JSON object is a row: it goes to DIR/results.jsonl as it comes, all to DIR/log.txt. What
a stage needs and this machine lacks comes from build/gpu, which `gpu_fetch.py` fills. See docs/gpu.md.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO
from zipfile import ZipFile

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WHEELS, SITE = ROOT / "build" / "gpu" / "wheels", ROOT / "build" / "gpu-site"
"""What travels, and where it is unpacked."""
SPARE_S = 5.0
"""Of a budget, for ending."""
KILL_AFTER_S = 10.0
DRY_TIMES = 4
"""Limits are those of a GPU's machine; a dry run may share its processors."""
LAST_LINES = 20
"""Lines of a stage that are printed if it is cut or fails."""
OPS_TESTS = (
    "tests/sgmv_kernels/test_attention.py",
    "tests/sgmv_kernels/test_pointwise.py",
    "tests/sgmv_kernels/test_sgmv.py",
    "tests/sgmv_kernels/triton_ops/test_sgmv.py",
    "tests/sgmv_kernels/triton_ops/test_linear.py",
    "tests/sgmv_kernels/test_affine.py",
    "tests/sgmv_kernels/test_copy_slots.py",
    "tests/sgmv_kernels/test_kv_codes.py",
    "tests/sgmv_kernels/test_page_mass.py",
    "tests/sgmv_kernels/test_tree_attention.py",
)
WORKER_TESTS = (
    "tests/lorasrv/worker/test_device_pool.py",
    "tests/lorasrv/worker/test_cuda_graphs_gpu.py",
    "tests/lorasrv/sampling/test_logits_processors_gpu.py",
)
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-W", "default")


@dataclass(frozen=True)
class Stage:
    """One process: Python's arguments, after a program that runs it if there is one."""

    name: str
    seconds: float
    arguments: tuple[str, ...]
    program: tuple[str, ...] = ()
    # Share of its time below which it is left for the next call.
    least_share: float = 0.25
    # Whether it goes on where it was cut.
    resumes: bool = False


def stages(out: Path, dry: bool) -> tuple[Stage, ...]:
    """Return all stages in order, first those that show whether answers are right and that a server works; four calls
    of 570 s hold env to http, to ops, to a part of tune, and the rest."""

    def script(name: str, seconds: float, *arguments: str, file: str = "", program: tuple[str, ...] = ()) -> Stage:
        return Stage(name, seconds, (str(HERE / (file or f"gpu_{name}.py")), *arguments), program)

    ops_tests = OPS_TESTS[1:2] if dry else OPS_TESTS
    spread = ("-n", "8") if find_spec("xdist") and not dry else ()
    # Tests are `long` because the interpreter is slow.
    slow_ones = () if dry else ("-m", "not exhaustive and not cluster")
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    memcheck = () if dry or not Path(sanitizer).exists() else (sanitizer, "--tool", "memcheck", "--error-exitcode", "9")
    return (
        script("env", 20),
        script("compile", 70),
        script("checks", 90),
        script("answers", 200),
        script("http", 180, "--tiny", file="gpu_server.py"),
        replace(script("server", 360), least_share=0.9),
        Stage("worker", 40, (*PYTEST, "--noconftest", *WORKER_TESTS)),
        Stage("ops", 150, (*PYTEST, *spread, *slow_ones, "-k", "triton", *ops_tests)),
        script("memcheck", 90, "--small", file="gpu_checks.py", program=memcheck),
        script("kernels", 155, file="bench_gpu.py"),
        replace(script("tune", 420, "--out", str(out), file="tune_triton.py"), resumes=True),
        script("steps", 120, file="gpu_step.py"),
        script("peers", 200),
    )


class Results:
    """The rows of all calls so far, in one file."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self.log = folder / "results.jsonl", folder / "log.txt"

    def add(self, stage: str, row: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": stage, **row}) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._path.read_text("utf-8").splitlines()] if self._path.exists() else []

    def ends(self) -> dict[str, str]:
        """Return how each stage ended last."""
        return {row["stage"]: row["state"] for row in self.rows() if "state" in row}

    def left(self, known: Iterable[Stage]) -> list[str]:
        """Return the stages that are not done; last those that have failed, or were cut and begin anew: they would
        probably end in the same way."""
        ends = self.ends()
        left = [stage for stage in known if ends.get(stage.name) != "done"]
        return [stage.name for stage in sorted(left, key=lambda stage: stage.name in ends and not stage.resumes)]


def run(stage: Stage, limit: float, results: Results, dry: bool) -> str:
    """Run a stage and return how it ended: done, failed or cut. A guard ends it with this process, however that ends:
    it would keep the device's memory."""
    started = time.monotonic()
    with results.log.open("a", encoding="utf-8") as log:
        log.write(f"\n===== {stage.name}, at most {limit:.0f} s =====\n")
        log.flush()
        process = subprocess.Popen(
            (*stage.program, sys.executable, *stage.arguments),
            cwd=ROOT,
            env=environment(stage, dry),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        guard = subprocess.Popen(
            ("sh", "-c", f"read _; kill -s KILL -- -{process.pid}"), stdin=subprocess.PIPE, start_new_session=True
        )
        cut = threading.Event()
        timer = threading.Timer(limit, _stop, (process, cut))
        timer.start()
        try:
            assert process.stdout is not None
            with process.stdout as lines:
                last = _read(lines, log, stage.name, results, started)
            code = process.wait()
        finally:
            timer.cancel()
            _kill(process)
            guard.kill()
            guard.communicate()
            process.wait()
    state = "cut" if cut.is_set() else "failed" if code else "done"
    took = round(time.monotonic() - started, 1)
    results.add(stage.name, {"state": state, "exit": code, "seconds": took, "limit": round(limit, 1)})
    print(f"{stage.name}: {state} after {took} s", flush=True)
    if state != "done":
        print(*last, sep="", end="", flush=True)
    return state


def environment(stage: Stage, dry: bool) -> dict[str, str]:
    """Return the variables of a stage: what is carried comes before what this machine has."""
    made = dict(os.environ) | {"PYTHONUNBUFFERED": "1"}
    carried = () if dry else (SITE,)
    made["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, HERE, HERE.parent / "support", *carried)))
    if stage.name == "memcheck":
        # Else the sanitizer sees one large allocation.
        made["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if dry:
        made |= {"GPU_DRY_RUN": "1", "OMP_NUM_THREADS": "1"}
        if stage.name != "compile":
            made["TRITON_INTERPRET"] = "1"
    return made


def _read(lines: Iterable[str], log: TextIO, stage: str, results: Results, started: float) -> Sequence[str]:
    """Keep the rows of a stage; write all lines to the log, with the seconds since its start, and return the last."""
    last = deque[str](maxlen=LAST_LINES)
    for line in lines:
        last.append(f"{time.monotonic() - started:6.1f} {line}")
        log.write(last[-1])
        log.flush()
        if line.startswith("{"):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            results.add(stage, row)
            if row.get("ok") is False:
                print(f"{stage}: {line}", end="", flush=True)
    return last


def _stop(process: "subprocess.Popen[str]", cut: threading.Event) -> None:
    """Interrupt a stage, so that it can stop what it started; then kill it and what it left."""
    cut.set()
    try:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(KILL_AFTER_S)
    except (subprocess.TimeoutExpired, ProcessLookupError):
        pass
    _kill(process)


def _kill(process: "subprocess.Popen[str]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def unpack() -> None:
    """Unpack the carried wheels, unless a call before has unpacked the same; they hold no scripts that are needed."""
    wheels = sorted(WHEELS.glob("*.whl"))
    names, unpacked = "\n".join(wheel.name for wheel in wheels), SITE.with_suffix(".txt")
    if SITE.exists() and unpacked.is_file() and unpacked.read_text("utf-8") == names:
        return
    # A call that is cut off here leaves no part behind that looks whole.
    part = SITE.with_suffix(".part")
    for folder in (SITE, part):
        shutil.rmtree(folder, ignore_errors=True)
    part.mkdir(parents=True)
    for wheel in wheels:
        ZipFile(wheel).extractall(part)
    unpacked.write_text(names, "utf-8")
    part.rename(SITE)


def report(rows: list[dict[str, Any]]) -> str:
    """Return Markdown: how the stages ended, then a table for each kind of row of each stage."""
    ends = [{"stage": row["stage"], **row} for row in rows if "state" in row]
    tables: dict[str, list[dict[str, Any]]] = {"stages": ends} if ends else {}
    for row in rows:
        if "state" not in row:
            rest = {name: value for name, value in row.items() if name not in ("stage", "table")}
            tables.setdefault(f"{row['stage']}: {row.get('table', 'rows')}", []).append(rest)
    return "\n".join(_markdown(title, of) for title, of in tables.items())


def _markdown(title: str, rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, dict)))
    lines = [[str(row.get(column, "")) for column in columns] for row in rows]
    text = [" | ".join(line) for line in (columns, ["---"] * len(columns), *lines)]
    return "\n".join((f"## {title}\n", *(f"| {line} |" for line in text), ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of results.jsonl, log.txt and the tuned table")
    parser.add_argument("--stages", default="", help="run these, a,b,c; default: all that are not done")
    parser.add_argument("--budget-s", type=float, default=570.0, help="seconds of this call")
    parser.add_argument("--dry-run", action="store_true", help="interpreter and tiny shapes instead of a GPU")
    parser.add_argument("--report", action="store_true", help="print tables of the results, run nothing")
    a = parser.parse_args()
    started, results, out = time.monotonic(), Results(a.out), a.out.resolve()
    if a.report:
        print(report(results.rows()))
        return 0
    known = {stage.name: stage for stage in stages(out, a.dry_run)}
    asked = a.stages.split(",") if a.stages else results.left(known.values())
    if unknown := [name for name in asked if name not in known]:
        parser.error(f"--stages {unknown[0]!r} is unknown; choose from {','.join(known)}")
    if not a.dry_run:
        unpack()
    ends: dict[str, str] = {}
    for name in asked:
        left = a.budget_s - SPARE_S - (time.monotonic() - started)
        if left < known[name].seconds * known[name].least_share:
            ends[name] = "left"
            continue
        limit = known[name].seconds * (DRY_TIMES if a.dry_run else 1)
        ends[name] = run(known[name], min(limit, left), results, a.dry_run)
    again = [name for name, state in ends.items() if state != "done"]
    if again:
        print(f"not done: --stages {','.join(again)}")
    return 1 if "failed" in ends.values() else 0


if __name__ == "__main__":
    sys.exit(main())
