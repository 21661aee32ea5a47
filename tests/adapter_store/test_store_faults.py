"""A disk that refuses a call, each in turn: the store's own error, nothing or everything changed, and on it goes."""

import errno
import hashlib
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlite_watch import is_possible
from store_faults import FaultRun
from store_runs import run, scratch_folder
from store_scenarios import BASE, SCENARIOS, Hand, observe, prepare

from adapter_store.errors import AdapterError, BlobNotFound, StoreUnusable
from adapter_store.registry.records import Change
from adapter_store.store import AdapterStore

pytestmark = pytest.mark.skipif(not is_possible(), reason="this Python's sqlite3 does not link a shared SQLite")


@pytest.fixture
def scratch() -> Iterator[Path]:
    with scratch_folder() as folder:
        yield folder


def _refuse_each(name: str, folder: Path, every: int, numbers: tuple[int, ...]) -> int:
    """Every `every`-th call of the scenario fails, with each errno in turn; how many did."""
    outcome, template = run(name, folder / "run").outcome, folder / "template"
    prepare(SCENARIOS[name], template)
    failed = 0
    for turn in range(0, 10_000, every):
        fault = None
        for number in numbers:
            top = folder / f"{turn}-{number}"
            shutil.copytree(template, top)
            fault = FaultRun(name, outcome, top, turn, number)
            try:
                fault.run()
            except (AssertionError, AdapterError) as error:
                raise AssertionError(
                    f"{name}, call {turn} ({fault.kind}), {errno.errorcode[number]}: {error}"
                ) from error
            for path in folder.glob(f"{top.name}*"):
                shutil.rmtree(path)
            failed += fault.kind != ""
        if fault is not None and not fault.kind:
            break
    return failed


@pytest.mark.parametrize("name", SCENARIOS)
def test_some_calls_fail(name: str, scratch: Path) -> None:
    numbers = (errno.ENOSPC, errno.EIO)
    assert _refuse_each(name, scratch, 17, numbers) > 3


def test_weights_cannot_be_registered_before_their_name_is_durable(
    store: AdapterStore, put: Any, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client may ask for them in the moment between the rename and the fsync of the folder."""
    data, found = build.file(), []
    digest = hashlib.sha256(data).hexdigest()

    def look(path: Path) -> None:
        found.append(store.blob_exists(digest))
        with pytest.raises(BlobNotFound):
            store.register("mia", build.config(), digest)

    monkeypatch.setattr("adapter_store.storage.blobs.fsync_directory", look)
    put(store, data)
    assert found == [False]
    assert store.register("mia", build.config(), digest).ref.version == 1


class FailingIndex:
    """A connection whose statement number `turn` is refused, as one that must read a bad sector is."""

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
        lambda h: h.upload("mia", 3),
        lambda h: h.upload("mia", 1),
        lambda h: h.upload("new", 3),
        lambda h: h.store.change("mia", Change(version=1, aliases={"prod": 2}, limits={"weight": 2.0})),
        lambda h: h.store.delete("mia@2"),
        lambda h: h.store.delete("mia"),
    ],
)
def test_memory_and_disk_agree_whichever_statement_fails(step: Any, scratch: Path) -> None:
    """What is refused is not done, and what is done is not refused: nothing is read after a change is durable."""
    refused = 0
    for turn in range(100):
        with AdapterStore(scratch / f"{turn}", BASE) as store:
            hand = Hand(scratch, opened=store)
            for value in (1, 2):
                hand.upload("mia", value)
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", SCENARIOS)
def test_any_call_fails(name: str, number: int, scratch: Path) -> None:
    assert _refuse_each(name, scratch, 1, (number,)) > 40
