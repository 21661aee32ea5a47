"""One server at a time has a store open."""

import subprocess
import sys
from pathlib import Path

import pytest
from store_kit import BASE

from adapter_store.errors import StoreLocked, StoreUnusable
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
