"""The list of faults fits the code, and the tool that tries them tells a fault that is caught from one that is not."""

import json
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN, LIST = ROOT / "tests/faults/run.py", ROOT / "tests/faults/faults.toml"
MODULE = "def double(x):\n    return 2 * x\n\n\ndef unused():\n    return None\n"
TESTS = "from module import double\n\n\ndef test_double():\n    assert double(2) == 4\n"
FAULT = '[[fault]]\nid = "{}"\nwhat = "."\nfile = "module.py"\nold = "{}"\nnew = "{}"\ntests = ["test_module.py"]\n'
FAULTS = (
    ("caught", "2 * x", "3 * x"),
    ("escaped", "return None", "return 1"),
    ("unknown", "4 * x", "3 * x"),
    ("ambiguous", "return", "yield"),
    ("not-python", "2 * x", "2 *"),
)


def test_every_fault_fits_the_code() -> None:
    faults = tomllib.loads(LIST.read_text("utf-8"))["fault"]
    assert [f["id"] for f in faults if (ROOT / f["file"]).read_text("utf-8").count(f["old"]) != 1] == []
    assert [f["id"] for f in faults for test in f["tests"] if not (ROOT / test.partition("::")[0]).is_file()] == []
    assert len({f["id"] for f in faults}) == len(faults) >= 50
    assert min(Counter(f["file"].partition("/")[0] for f in faults).values()) >= 4


def _verdicts(tree: Path, module: str, *only: str) -> tuple[int, dict[str, str]]:
    tree.mkdir()
    (tree / "module.py").write_text(module)
    (tree / "test_module.py").write_text(TESTS)
    (tree / "faults.toml").write_text("".join(FAULT.format(*fault) for fault in FAULTS))
    command = [sys.executable, str(RUN), "--root", str(tree), "--list", str(tree / "faults.toml"), "--json"]
    done = subprocess.run(
        [*command, *(word for name in only for word in ("--only", name))], check=False, capture_output=True, text=True
    )
    assert (tree / "module.py").read_text() == module
    return done.returncode, {r["id"]: r["verdict"] for r in json.loads(done.stdout or "[]")}


def test_what_is_caught_what_escapes_and_what_must_be_updated(tmp_path: Path) -> None:
    stale = "must be updated"
    assert _verdicts(tmp_path / "all", MODULE) == (
        1,
        {"caught": "caught", "escaped": "NOT caught", "unknown": stale, "ambiguous": stale, "not-python": stale},
    )
    assert _verdicts(tmp_path / "one", MODULE, "caught") == (0, {"caught": "caught"})


def test_tests_that_fail_anyway_prove_nothing(tmp_path: Path) -> None:
    assert _verdicts(tmp_path / "broken", MODULE.replace("2 *", "3 *"), "escaped") == (2, {})
