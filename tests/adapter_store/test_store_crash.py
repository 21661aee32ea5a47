"""Power loss and kills at every change of the disk: what was acknowledged is there, everything else old or new.

`store_scenarios.py` says what is done, `forgetful_disk.py` what a crash leaves, docs/reliability.md what is promised.
"""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forgetful_disk import DATA_ONLY, KILLED, NAMES_ONLY, SAFE_ONLY, Loss
from sqlite_watch import is_possible
from store_runs import Run, run, scratch_folder
from store_scenarios import SCENARIOS

pytestmark = pytest.mark.skipif(not is_possible(), reason="this Python's sqlite3 does not link a shared SQLite")

DRIVER = Path(__file__).parent / "crash_driver.py"
HELPERS = Path(__file__).parents[1] / "helpers"
LOSSES = (KILLED, SAFE_ONLY, NAMES_ONLY)
CHANCES = (DATA_ONLY, *(Loss(seed=seed) for seed in range(24)))
# The store's own fsyncs. One that is gone from here was deleted, one that is not in here needs a scenario.
SITES = {
    "blobs.BlobDirectory.remove_old of data/store/blobs/sha256",
    "blobs.BlobUpload.commit",
    "blobs.BlobDirectory.adopt of data/store/blobs/sha256",
    "blobs.BlobDirectory.remove of data/store/blobs/sha256",
    "blobs.BlobDirectory.__init__ of data/store/blobs/sha256",
    "blobs.BlobDirectory.__init__ of data/store/blobs",
    "blobs.BlobDirectory.__init__ of data/store",
    "root_lock._create_durably of data",
    "root_lock._create_durably of .",
}
# SQLite syncs this folder as well, when it makes its first log: only without both is something lost.
ALSO_BY_SQLITE = {"blobs.BlobDirectory.__init__ of data/store": {"sqlite folder"}}


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with scratch_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def runs(scratch: Path) -> dict[str, Run]:
    return {name: run(name, scratch / f"run-{n}") for n, name in enumerate(SCENARIOS)}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_power_loss_after_any_change(name: str, runs: dict[str, Run], scratch: Path) -> None:
    looked, failure = runs[name].failure(scratch, LOSSES)
    assert failure is None
    assert looked > 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_power_loss_that_leaves_any_part(name: str, runs: dict[str, Run], scratch: Path) -> None:
    _, failure = runs[name].failure(scratch, CHANCES)
    assert failure is None


def test_no_fsync_can_be_left_out(runs: dict[str, Run], scratch: Path) -> None:
    """Each of the store's own, and each of SQLite's that it asks for: without it, some power loss loses something."""
    sites = {site for run in runs.values() for site in run.sites()}
    assert {site for site in sites if not site.startswith("sqlite")} == SITES
    for site in [*sorted(SITES), "sqlite wal", "sqlite folder", "sqlite database"]:
        dropped = frozenset({site} | ALSO_BY_SQLITE.get(site, set()))
        failures = (run.failure(scratch, LOSSES, dropped)[1] for run in runs.values() if dropped & run.sites())
        assert any(failures), f"nothing notices that {site} is missing"


def test_the_index_needs_all_of_synchronous_full(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Relaxed(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            return super().execute(sql.replace("synchronous = FULL", "synchronous = NORMAL"), *values)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=Relaxed))
    relaxed = run("replace", scratch / "relaxed")
    monkeypatch.undo()
    assert relaxed.failure(scratch, LOSSES)[1] is not None


def _kill(folder: Path, every: int) -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), *filter(None, sys.path)])}
    command = [sys.executable, str(DRIVER), str(folder), str(every)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_kills_of_real_processes(scratch: Path) -> None:
    """Some of them: what a kill leaves is everything that was written, which is looked at call by call above."""
    assert _kill(scratch, 40) > 15


@pytest.mark.exhaustive
def test_a_kill_at_every_call(scratch: Path) -> None:
    assert _kill(scratch, 1) > 600
