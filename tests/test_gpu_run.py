"""The script that measures on a GPU: every stage ends in time and leaves its rows, whatever becomes of it."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import pytest
from process_tree import is_alive

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
    assert capsys.readouterr().out == "not done: --stages slow,bad\n"
    assert run(monkeypatch, out, "--stages", "good") == 0
    assert capsys.readouterr().out.startswith("good: done")


def test_a_stage_ends_with_a_call_that_is_killed(tmp_path: Path) -> None:
    """It would keep the device's memory, and the next call would measure beside it."""
    stage = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    call = f"""
import sys
sys.path.append({str(Path(gpu_run.__file__).parent)!r})
from pathlib import Path
import gpu_run
gpu_run.run(gpu_run.Stage("hangs", 500, ("-c", {stage!r})), 500, gpu_run.Results(Path({str(tmp_path)!r})), True)
"""
    log = tmp_path / "log.txt"
    with subprocess.Popen([sys.executable, "-c", call]) as process:
        while not (log.exists() and (found := re.findall(r" (\d+)\n$", log.read_text("utf-8")))):
            time.sleep(0.05)
        process.kill()
    begun, stage_of = time.monotonic(), int(found[0])
    while is_alive(stage_of) and time.monotonic() - begun < 60:
        time.sleep(0.05)
    assert not is_alive(stage_of)


def test_wheels_are_unpacked_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "SITE", tmp_path / "site")
    monkeypatch.setattr(gpu_run, "WHEELS", tmp_path)
    for name in "ab":
        with ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            wheel.writestr(name, "")
    whole = (tmp_path / "b.whl").read_bytes()
    (tmp_path / "b.whl").write_bytes(whole[:9])
    with pytest.raises(BadZipFile):
        gpu_run.unpack()
    assert not (tmp_path / "site").exists()
    (tmp_path / "b.whl").write_bytes(whole)
    gpu_run.unpack()
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == ["a", "b"]
    # A call before may have come without them, or with others.
    (tmp_path / "a.whl").rename(tmp_path / "c.whl")
    with ZipFile(tmp_path / "c.whl", "w") as wheel:
        wheel.writestr("c", "")
    gpu_run.unpack()
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == ["b", "c"]


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
