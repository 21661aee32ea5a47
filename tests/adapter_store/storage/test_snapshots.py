"""Snapshots on disk: found whole and by all their facts, or not at all; a write that ends early loses nothing."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from adapter_store.errors import StoreFull
from adapter_store.spec import AdapterId
from adapter_store.storage.snapshots import (
    SnapshotDamaged,
    SnapshotFiles,
    SnapshotName,
    VersionGone,
    digest_of,
    owner_of,
)

MIA, ZOE = owner_of("mia", 1), owner_of("zoe", 2)
FACTS = {"base": "ab", "kernels": "numba", "prefix": "cd", "pages": 3}
NAME = SnapshotName(MIA, digest_of(FACTS))
DATA = bytes(range(256)) * 12
PLENTY = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> SnapshotFiles:
    return SnapshotFiles(tmp_path, lambda: {MIA, ZOE})


def kept(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "snapshots").iterdir()}


def write(files: SnapshotFiles, name: SnapshotName = NAME, max_bytes: int = PLENTY) -> int:
    return files.write(name, FACTS, memoryview(DATA), max_bytes).nbytes


def test_what_was_written_is_read(files: SnapshotFiles, tmp_path: Path) -> None:
    nbytes = write(files)
    assert files.read(NAME, FACTS, len(DATA)).tobytes() == DATA
    assert files.sizes() == SnapshotFiles(tmp_path, lambda: {MIA}).sizes() == {NAME: nbytes}
    assert nbytes == (tmp_path / "snapshots" / NAME.file).stat().st_size


def test_a_large_snapshot_has_a_long_head(files: SnapshotFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapter_store.storage.snapshots.PIECE_BYTES", 2)
    nbytes = write(files)
    assert nbytes - len(DATA) > 64 << 10
    assert files.read(NAME, FACTS, len(DATA)).tobytes() == DATA


@pytest.mark.parametrize("fact", FACTS)
def test_another_fact_is_another_name_and_never_the_same_bytes(files: SnapshotFiles, tmp_path: Path, fact: str) -> None:
    other = {**FACTS, fact: "else"}
    assert digest_of(other) != NAME.digest
    write(files)
    with pytest.raises(FileNotFoundError):
        files.read(SnapshotName(MIA, digest_of(other)), other, len(DATA))
    with pytest.raises(SnapshotDamaged):
        files.read(NAME, other, len(DATA))
    assert not kept(tmp_path)


@pytest.mark.parametrize("place", ["first", "head", "line", "data", "last", "cut", "longer", "no head"])
def test_a_damaged_file_is_removed(files: SnapshotFiles, tmp_path: Path, place: str) -> None:
    write(files)
    path = tmp_path / "snapshots" / NAME.file
    good = path.read_bytes()
    line = good.index(b"\n")
    at = {"first": 0, "head": line // 2, "line": line, "data": line + 7, "last": len(good) - 1}.get(place)
    bad = bytearray(good)
    if at is not None:
        bad[at] ^= 1
    path.write_bytes({"cut": good[:-1], "longer": good + b"x", "no head": DATA}.get(place, bytes(bad)))
    with pytest.raises(SnapshotDamaged):
        files.read(NAME, FACTS, len(DATA))
    assert not kept(tmp_path)


@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
def test_a_disk_that_refuses_changes_nothing(
    files: SnapshotFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "full")

    zoe = SnapshotName(ZOE, NAME.digest)
    nbytes = write(files, zoe)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        for name in (NAME, zoe):
            with pytest.raises(StoreFull):
                write(files, name, max_bytes=nbytes)
    assert kept(tmp_path) == {zoe.file}
    assert write(files, max_bytes=nbytes)
    assert kept(tmp_path) == {NAME.file}


_KILLED = """
import os, signal, sys
from pathlib import Path
from adapter_store.storage.snapshots import SnapshotFiles, SnapshotName
setattr(os, sys.argv[2], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
files = SnapshotFiles(Path(sys.argv[1]), lambda: sys.argv[3:5])
files.write(SnapshotName(sys.argv[4], "new"), {"pages": 1}, memoryview(b"new" * 1000), 1 << 20)
"""


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_process_killed_while_it_writes_loses_nothing(files: SnapshotFiles, tmp_path: Path, call: str) -> None:
    write(files)
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path), call, MIA, ZOE], check=False)
    assert done.returncode == -9
    assert len(kept(tmp_path)) == 2
    again = SnapshotFiles(tmp_path, lambda: {MIA, ZOE})
    assert kept(tmp_path) == {NAME.file}
    assert again.read(NAME, FACTS, len(DATA)).tobytes() == DATA


def test_a_snapshot_goes_with_its_version(files: SnapshotFiles, tmp_path: Path) -> None:
    other = SnapshotName(ZOE, NAME.digest)
    write(files)
    write(files, other)
    files.remove_versions(AdapterId("mia"), frozenset({1, 2}))
    files.remove_versions(AdapterId("zoe"), frozenset({1, 3}))
    assert kept(tmp_path) == {other.file}
    # One that is written while its version is deleted, and one that a killed deletion has left.
    with pytest.raises(VersionGone, match="deleted meanwhile"):
        write(files, SnapshotName("gone", NAME.digest))
    assert files.take_removed() == [NAME]
    assert not files.take_removed()
    assert kept(tmp_path) == {other.file}
    SnapshotFiles(tmp_path, set)
    assert not kept(tmp_path)


def test_one_that_vanishes_keeps_no_other(
    files: SnapshotFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, zoe = SnapshotName(MIA, "old"), SnapshotName(ZOE, NAME.digest)
    write(files, zoe)
    write(files, old)
    listed = list(os.scandir(tmp_path / "snapshots"))
    files.remove(zoe)
    monkeypatch.setattr(os, "scandir", lambda _: contextlib.nullcontext(listed))
    assert list(files.sizes()) == [old]
    files.remove_versions(AdapterId("mia"), frozenset({1}))
    monkeypatch.undo()
    assert not kept(tmp_path)


def test_a_version_has_one_snapshot_and_all_of_them_so_many_bytes(files: SnapshotFiles, tmp_path: Path) -> None:
    old, zoe = SnapshotName(MIA, "old"), SnapshotName(ZOE, NAME.digest)
    nbytes = write(files, old)
    assert files.write(NAME, FACTS, memoryview(DATA), PLENTY).removed == (old,)
    os.utime(tmp_path / "snapshots" / NAME.file, ns=(1, 1))
    assert files.write(zoe, FACTS, memoryview(DATA), 2 * nbytes).removed == ()
    assert files.read(NAME, FACTS, len(DATA)).tobytes() == DATA  # the one used last
    third = SnapshotFiles(tmp_path, lambda: {MIA, ZOE, "third"})
    os.utime(tmp_path / "snapshots" / zoe.file, ns=(2, 2))
    assert third.write(SnapshotName("third", "new"), FACTS, memoryview(DATA), 2 * nbytes).removed == (zoe,)
    with pytest.raises(StoreFull):
        files.write(zoe, FACTS, memoryview(DATA), nbytes - 1)
    assert len(kept(tmp_path)) == 2


def test_fewer_bytes_keep_what_was_used_last(files: SnapshotFiles, tmp_path: Path) -> None:
    zoe = SnapshotName(ZOE, NAME.digest)
    nbytes = write(files, zoe)
    write(files)
    os.utime(tmp_path / "snapshots" / NAME.file, ns=(1, 1))
    files.trim(2 * nbytes)
    assert kept(tmp_path) == {NAME.file, zoe.file}
    files.trim(2 * nbytes - 1)
    assert kept(tmp_path) == {zoe.file}
    files.trim(0)
    assert not kept(tmp_path)
