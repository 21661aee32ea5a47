"""One server at a time has a store open."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_kit import BASE

from adapter_store.errors import StoreFull, StoreLocked, StoreUnusable
from adapter_store.storage.root_lock import opening_errors
from adapter_store.store import AdapterStore


def test_one_server_at_a_time(tmp_path: Path) -> None:
    root = tmp_path / "store"
    first = AdapterStore(root, BASE)
    with pytest.raises(StoreLocked, match="another server"):
        AdapterStore(root, BASE)
    script = (
        "import sys, pathlib; from adapter_store.store import AdapterStore; from adapter_store.spec import BaseShapes\n"
        "from adapter_store.errors import StoreLocked\n"
        "try: AdapterStore(pathlib.Path(sys.argv[1]), BaseShapes('llama', 1, {}))\n"
        "except StoreLocked: print('locked')"
    )
    run = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, check=True)
    assert run.stdout == "locked\n"
    first.close()
    first.close()
    AdapterStore(root, BASE).close()


def test_the_process_that_has_it_is_named_where_it_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = tmp_path / "locks"
    monkeypatch.setattr("adapter_store.storage.root_lock.LOCKS", locks)
    with AdapterStore(tmp_path / "store", BASE):
        file = (tmp_path / "store" / "lock").stat()
        place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
        others = f"1: POSIX  ADVISORY  READ 5 {place} 0 EOF\n2: FLOCK  ADVISORY  WRITE 6 fe:00:1 0 EOF\n"
        held = "3: FLOCK  ADVISORY  WRITE {} " + place + " 0 EOF\n3: -> FLOCK  ADVISORY  WRITE 8 " + place + " 0 EOF\n"
        for text, says in (
            (others + held.format(4711), "server, process 4711; stop"),
            (held.format(0), "server; stop"),
        ):
            locks.write_text(text)
            with pytest.raises(StoreLocked, match=f"another {says}"):
                AdapterStore(tmp_path / "store", BASE)


def test_a_store_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreUnusable, match=str(root)):
            AdapterStore(root, BASE)
    damaged = tmp_path / "damaged"
    AdapterStore(damaged, BASE).close()
    (damaged / "index.sqlite3").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreUnusable, match="not a database"):
        AdapterStore(damaged, BASE)


def test_a_full_disk_is_told_with_the_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreFull, match=f"^store {tmp_path}: no room on the store's disk"), opening_errors(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_that_cannot_be_written_is_told_with_the_fix(tmp_path: Path) -> None:
    fix = "Read-only file system; its folder must be writable, even for commands that only read it"
    with pytest.raises(StoreUnusable, match=f"^store {tmp_path} cannot be used: .*{fix}"), opening_errors(tmp_path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
