"""The script that measures on a GPU: every stage ends in time and leaves its rows, whatever becomes of it."""

import json
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "benchmarks"))

import gpu_fetch
import gpu_run

ROWS = """
import json, sys, time
for i in range(3):
    print(json.dumps({"table": "t", "row": i}), flush=True)
    print("no row")
"""
ENDS = {
    "good": ROWS,
    "bad": ROWS + "sys.exit(3)",
    # With a child of its own that ignores interrupts, and holds the pipe.
    "slow": ROWS
    + """
import subprocess
child = "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child]).wait()
""",
}
LIMITS_S = {"good": 60.0, "bad": 60.0, "slow": 4.0}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in ENDS.items():
        (tmp_path / f"{name}.py").write_text(text, "utf-8")
    made = tuple(gpu_run.Stage(name, LIMITS_S[name], (str(tmp_path / f"{name}.py"),)) for name in ENDS)
    monkeypatch.setattr(gpu_run, "stages", lambda out, dry: made)
    monkeypatch.setattr(gpu_run, "DRY_TIMES", 1)
    monkeypatch.setattr(gpu_run, "KILL_AFTER_S", 0.5)
    return tmp_path / "out"


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_run.py", "--dry-run", "--out", str(out), *arguments])
    return gpu_run.main()


def test_a_stage_that_fails_or_is_cut_leaves_its_rows(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = time.monotonic()
    assert run(monkeypatch, out) == 1
    assert time.monotonic() - begun < 300
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text("utf-8").splitlines()]
    assert [(row["stage"], row["row"]) for row in rows if "row" in row] == [(n, i) for n in ENDS for i in range(3)]
    assert {row["stage"]: row["state"] for row in rows if "state" in row} == {
        "good": "done",
        "bad": "failed",
        "slow": "cut",
    }
    assert (out / "log.txt").read_text("utf-8").count("no row") == 9
    tables = gpu_run.report(rows)
    assert "| good | done |" in tables
    assert tables.count("| 2 |") == len(ENDS)


def test_the_next_call_runs_what_is_not_done(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, out, "--stages", "good,bad")
    capsys.readouterr()
    run(monkeypatch, out, "--budget-s", "5.1")
    assert capsys.readouterr().out == "not done: --stages bad,slow\n"
    assert run(monkeypatch, out, "--stages", "good") == 0
    assert capsys.readouterr().out.startswith("good: done")


def test_what_travels_is_all_that_server_and_tests_need_but_torch() -> None:
    needed = gpu_fetch.needed("3.12")
    assert {"hypothesis", "fastapi", "pydantic-core", "uvicorn", "tokenizers", "typing-extensions"} <= set(needed)
    assert not gpu_fetch.THERE & set(needed)
    assert not [name for name in needed if name.startswith(("nvidia", "pytest"))]


def test_what_is_timed_is_what_is_served() -> None:
    """Groups of 32 in both formats, and a head of int8."""
    pytest.importorskip("triton")
    import gpu_cases

    from lorasrv.models.quantization.grouped import Int4Format, Int8Format

    assert {fmt.default_group for fmt in (Int4Format, Int8Format)} == {gpu_cases.GROUP}
    assert gpu_cases.HEAD.items() <= gpu_cases.linear_sites("int8").items()
