"""The loader of snapshots alone: what fails is reported, and nothing is raised in the engine's thread."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapter_store.storage.snapshots import SnapshotFiles, SnapshotName, digest_of
from lorasrv.scheduler_output import SnapshotFile, SnapshotOrders
from lorasrv.worker.snapshot_loader import SnapshotFailed, SnapshotLoader, SnapshotReport, SnapshotSaved

FACTS = {"pages": 3}
FILE = SnapshotFile(SnapshotName("mia.1", digest_of(FACTS)), FACTS, 3)
PAGE_BYTES = 64
Make = Callable[..., SnapshotLoader]


@pytest.fixture
def ready() -> threading.Semaphore:
    return threading.Semaphore(0)


@pytest.fixture
def make(tmp_path: Path, ready: threading.Semaphore) -> Iterator[Make]:
    made = []

    def make(read: Callable[[tuple[int, ...]], Tensor], timeout_s: float | None = None) -> SnapshotLoader:
        files = SnapshotFiles(tmp_path, lambda: {"mia.1"})
        made.append(SnapshotLoader(files, PAGE_BYTES, 1 << 20, read, lambda *_: None, ready.release, timeout_s))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def reports(loader: SnapshotLoader, ready: threading.Semaphore, count: int = 1) -> list[SnapshotReport]:
    for _ in range(count):
        assert ready.acquire(timeout=60)
    return loader.poll()


def test_pages_that_cannot_be_read_are_reported(make: Make, ready: threading.Semaphore) -> None:
    pages = [MemoryError("no memory"), torch.zeros(3, PAGE_BYTES, dtype=torch.uint8)]

    def read(_: tuple[int, ...]) -> Tensor:
        if isinstance(found := pages.pop(0), Exception):
            raise found
        return found

    loader = make(read)
    loader.send(SnapshotOrders(saves=((FILE, (0, 1, 2)),)))
    assert reports(loader, ready) == [SnapshotFailed(FILE.name, "memory", "MemoryError", is_save=True)]
    loader.send(SnapshotOrders(saves=((FILE, (0, 1, 2)),)))
    assert [type(report) for report in reports(loader, ready)] == [SnapshotSaved]


def test_reads_that_wait_for_a_hung_disk_are_given_up_with_it(
    make: Make, ready: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, hangs = list[SnapshotName](), threading.Event()

    def read(_: SnapshotFiles, name: SnapshotName, *__: object) -> None:
        begun.append(name)
        hangs.wait(60)

    monkeypatch.setattr(SnapshotFiles, "read", read)
    loader = make(lambda _: torch.empty(0), 0.05)
    files = [FILE._replace(name=SnapshotName("mia.1", f"{number}")) for number in range(3)]
    loader.send(SnapshotOrders(loads=tuple(files)))
    given_up = reports(loader, ready, len(files))
    hangs.set()
    assert begun == [files[0].name]
    assert {type(report) for report in given_up} == {SnapshotFailed}
    assert {report.name for report in given_up} == {file.name for file in files}
