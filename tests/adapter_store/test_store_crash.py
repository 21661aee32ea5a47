"""Power loss, failed calls and kills: what was acknowledged is there, everything else old or new.

`store_scenarios.py` says what is done, `store_runner.py` how it is disturbed, docs/reliability.md what is promised.
Each disturbance is sampled here, and exhaustive in `make test-crash`.
"""

import errno
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import store_runner
from sqlite_watch import is_possible
from store_disk import DATA_ONLY, KILLED, NAMES_ONLY, SAFE_ONLY, Loss
from store_runner import Run, refuse_each, run, scratch_folder
from store_scenarios import BASE, SCENARIOS, Hand, change, delete, observe, up

from adapter_store.errors import StoreUnusable
from adapter_store.store import AdapterStore

pytestmark = pytest.mark.skipif(not is_possible(), reason="this Python's sqlite3 does not link a shared SQLite")
exhaustive = pytest.mark.exhaustive

LOSSES = (KILLED, SAFE_ONLY, NAMES_ONLY)
CHANCES = (DATA_ONLY, *(Loss(seed=seed) for seed in range(24)))
# The store's own fsyncs. One missing in the code was deleted, one missing in here needs a scenario.
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


@pytest.fixture
def own_scratch() -> Iterator[Path]:
    with scratch_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def runs(scratch: Path) -> dict[str, Run]:
    return {name: run(name, scratch / f"run-{n}") for n, name in enumerate(SCENARIOS)}


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(
    ("losses", "at_least"), [(LOSSES, 11), pytest.param(CHANCES, 0, marks=exhaustive)], ids=["quick", "any part"]
)
def test_power_loss_after_any_change(
    losses: tuple[Loss, ...], at_least: int, name: str, runs: dict[str, Run], scratch: Path
) -> None:
    checked, failure = runs[name].unplug(scratch, losses)
    assert failure is None
    assert checked >= at_least


def test_no_fsync_can_be_left_out(runs: dict[str, Run], scratch: Path) -> None:
    """Without each of the store's fsyncs, and each of SQLite's, some power loss loses something."""
    sites = {site for run in runs.values() for site in run.sites()}
    assert {site for site in sites if not site.startswith("sqlite")} == SITES
    for site in [*sorted(SITES), "sqlite wal", "sqlite folder", "sqlite database"]:
        dropped = frozenset({site} | ALSO_BY_SQLITE.get(site, set()))
        failures = (run.unplug(scratch, LOSSES, dropped)[1] for run in runs.values() if dropped & run.sites())
        assert any(failures), f"nothing notices that {site} is missing"


def test_the_index_needs_all_of_synchronous_full(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Relaxed(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            return super().execute(sql.replace("synchronous = FULL", "synchronous = NORMAL"), *values)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=Relaxed))
    relaxed = run("replace", scratch / "relaxed")
    monkeypatch.undo()
    assert relaxed.unplug(scratch, LOSSES)[1] is not None


@pytest.mark.parametrize(("every", "more_than"), [(40, 15), pytest.param(1, 600, marks=exhaustive)])
def test_kills_of_real_processes(every: int, more_than: int, own_scratch: Path) -> None:
    """A kill leaves everything that was written, which the power losses above cover call by call."""
    helpers = str(Path(store_runner.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([helpers, *filter(None, sys.path)])}
    command = [sys.executable, store_runner.__file__, str(own_scratch), str(every)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > more_than


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(
    ("every", "numbers", "more_than"),
    [
        (17, (errno.ENOSPC, errno.EIO), 3),
        pytest.param(1, (errno.ENOSPC,), 40, marks=exhaustive),
        pytest.param(1, (errno.EIO,), 40, marks=exhaustive),
    ],
    ids=["quick", "ENOSPC", "EIO"],
)
def test_calls_that_fail(every: int, numbers: tuple[int, ...], more_than: int, name: str, own_scratch: Path) -> None:
    assert refuse_each(name, own_scratch, every, numbers) > more_than


class FailingIndex:
    """Refuse statement number `turn` of a connection, as one that must read a bad sector is refused."""

    def __init__(self, connection: sqlite3.Connection, turn: int) -> None:
        self.connection = connection
        self.left = turn

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        self.left -= 1
        if self.left == -1:
            raise sqlite3.OperationalError("disk I/O error")
        return self.connection.execute(sql, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


@pytest.mark.parametrize(
    "step",
    [
        *up("mia", 3, 1), *up("new", 3), delete("mia@2"), delete("mia"),
        change("mia", version=1, aliases={"prod": 2}, limits={"weight": 2.0})
    ]
)  # fmt: skip
def test_memory_and_disk_agree_whichever_statement_fails(step: Any, own_scratch: Path) -> None:
    """What is refused is not done, and what is done is not refused: nothing is read after a change is durable."""
    refused = 0
    for turn in range(100):
        with AdapterStore(own_scratch / f"{turn}", BASE) as store:
            hand = Hand(own_scratch, opened=store)
            for setup in up("mia", 1, 2):
                setup(hand)
            before = observe(store)
            failing = FailingIndex(store._index._db, turn)
            store._index._db = failing  # type: ignore[assignment]
            is_refused = False
            try:
                step(hand)
            except StoreUnusable:
                is_refused = True
            store._index._db = failing.connection
            refused += is_refused
            assert (observe(store) == before) == is_refused
            assert store._index.records() == dict(store.records())
            for record in store.list_adapters():
                store.load(store.hold(record.key).key)
            if failing.left >= 0:
                break
    assert refused >= 2
