"""What the store writes is its owner's alone, in a folder that others may read, too."""

from pathlib import Path

import pytest

from adapter_store.registry.index import Index
from adapter_store.storage.private_file import make_private
from lorasrv.metrics.usage_db import LedgerFile


def open_index(path: Path) -> None:
    Index(path).close()


def open_ledger(path: Path) -> None:
    LedgerFile(path).accounts()


@pytest.mark.parametrize("opened", [open_index, open_ledger])
def test_databases_are_the_owners_alone(tmp_path: Path, opened, caplog) -> None:
    """Among them are personas' hidden prompts."""
    tmp_path.chmod(0o755)
    path = tmp_path / "x.db"
    opened(path)
    assert {found.stat().st_mode & 0o777 for found in tmp_path.iterdir()} == {0o600}
    assert caplog.text == "", "and never were others'"
    path.chmod(0o644)
    opened(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert "was accessible to other users" in caplog.text


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "x.db").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="not a regular file"):
        make_private(tmp_path / "x.db")
