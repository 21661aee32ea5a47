"""Break the code on purpose, one fault of faults.toml at a time, and require that a test fails: `make test-faults`.

Faults are put into a temporary copy of the tree, never into the tree itself. First the tests of all chosen faults must
pass there without any fault; then each fault must make one of its own tests fail. A module that does not import, or a
test that is not found, is no failure: the fault must be updated.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("faults.toml")
PACKAGES = ("adapter_store", "api", "lorasrv", "sgmv_kernels")
LEFT_OUT = (".git", ".venv", ".*_cache", ".hypothesis", "build", "dist", "__pycache__", "*.egg-info")
OPTIONS = ("-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-seed=0")
# A test has "::" in its name; a module that could not be imported has not.
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - .*)?$", re.MULTILINE)
CAUGHT, ESCAPED, STALE = "caught", "NOT caught", "must be updated"


@dataclass(frozen=True)
class Fault:
    """One entry of faults.toml."""

    id: str
    what: str
    file: str
    old: str
    new: str
    tests: list[str]


@dataclass(frozen=True)
class Result:
    """What became of one fault; `told` is the first failing test, or what to update."""

    id: str
    verdict: str
    seconds: float
    told: str


def read_faults(path: Path) -> list[Fault]:
    """Return every fault of the list. Raises: TypeError: an entry lacks a field, or has one too many."""
    return [Fault(**entry) for entry in tomllib.loads(path.read_text("utf-8"))["fault"]]


def text_with(fault: Fault, root: Path) -> str:
    """Return the text of the fault's file with the fault in it.

    Raises: ValueError: the text to be replaced does not occur exactly once; names the files that hold it.
    """
    path = root / fault.file
    text = path.read_text("utf-8") if path.is_file() else ""
    if text.count(fault.old) == 1:
        return text.replace(fault.old, fault.new)
    modules = sorted(module for package in PACKAGES for module in (root / package).rglob("*.py"))
    holders = [m.relative_to(root).as_posix() for m in modules if fault.old in m.read_text("utf-8")]
    raise ValueError(
        f"update file or old: the text is in {', '.join(holders) or 'no file'}, and must be once in its own"
    )


def run_tests(tree: Path, tests: Sequence[str], cache: Path | None = None) -> tuple[int, str]:
    """Run tests in a copy of the tree; returns pytest's exit code and output. `cache`: where compiled kernels go."""
    env = os.environ | {"PYTHONPATH": str(tree)} | ({"XDG_CACHE_HOME": str(cache)} if cache else {})
    command = [sys.executable, "-m", "pytest", *OPTIONS, *tests]
    done = subprocess.run(command, cwd=tree, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def check(fault: Fault, number: int, tree: Path) -> Result:
    """Put a fault into the copy, run its tests, and take it out again. `number` differs from every other fault's."""
    begun = time.monotonic()
    path = tree / fault.file
    try:
        broken = text_with(fault, tree)
    except ValueError as error:
        return Result(fault.id, STALE, 0.0, str(error))
    sound, dates = path.read_text("utf-8"), path.stat()
    path.write_text(broken, "utf-8")
    # Bytecode is known by date and size: two faults of one file within a second may have both in common.
    os.utime(path, (number, number))
    # Kernels of a fault are compiled for nobody else.
    own_cache = tree.parent / "cache" if fault.file.startswith("sgmv_kernels/") else None
    try:
        code, output = run_tests(tree, fault.tests, own_cache)
    finally:
        path.write_text(sound, "utf-8")
        os.utime(path, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    seconds = round(time.monotonic() - begun, 1)
    if code == 0:
        return Result(fault.id, ESCAPED, seconds, "all its tests pass")
    if (failed := FAILED.search(output)) is None:
        return Result(fault.id, STALE, seconds, "update tests or new, no test failed:\n" + output[-2000:])
    return Result(fault.id, CAUGHT, seconds, failed[1])


def main() -> int:
    """Check the faults; returns 0 if all are caught, 1 if one is not, 2 if the tests fail without a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="ID", action="append", help="this fault; may be given several times")
    parser.add_argument("--json", action="store_true", help="write the results to stdout as JSON, the rest to stderr")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to copy")
    parser.add_argument("--list", type=Path, default=LIST, help="the file of faults")
    given = parser.parse_args()
    shown = sys.stderr if given.json else sys.stdout
    faults = read_faults(given.list)
    if unknown := set(given.only or ()) - {fault.id for fault in faults}:
        parser.error(f"--only: there is no fault {', '.join(sorted(unknown))}")
    faults = [fault for fault in faults if not given.only or fault.id in given.only]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(given.root, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        tests = sorted({test for fault in faults for test in fault.tests})
        print(f"{len(faults)} faults; first their tests without any ({len(tests)})", file=shown, flush=True)
        code, output = run_tests(tree, tests)
        if code:
            print(output[-4000:] + "\nthe tests must pass without a fault", file=shown)
            return 2
        results = []
        for number, fault in enumerate(faults, 1):
            results.append(result := check(fault, number, tree))
            line = (
                f"[{number:2}/{len(faults)}] {fault.id:24} {result.verdict:10} {result.seconds:6.1f} s  {result.told}"
            )
            print(line, file=shown, flush=True)
    caught = sum(result.verdict == CAUGHT for result in results)
    seconds = sum(result.seconds for result in results)
    print(f"{caught} of {len(results)} faults caught in {seconds:.0f} s", file=shown)
    if given.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
    return int(caught < len(results))


if __name__ == "__main__":
    sys.exit(main())
