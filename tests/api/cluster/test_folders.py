"""Folders of replicas: never shared, taken over with what is in them."""

import subprocess
import sys
from pathlib import Path

from api.cluster.folders import free_folder


def test_two_at_a_time_and_one_after_the_other(tmp_path: Path) -> None:
    parent = tmp_path / "deep" / "folders"
    with free_folder(parent) as first, free_folder(parent) as second:
        assert first != second
        (first / "blob").write_text("kept")
    with free_folder(parent) as again:
        assert (again / "blob").read_text() == "kept"
    assert parent.stat().st_mode & 0o077 == 0


def test_a_killed_holder_leaves_its_folder_free(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib\nfrom api.cluster.folders import free_folder\n"
        "with free_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'mine').touch(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    with free_folder(tmp_path) as folder:
        assert (folder / "mine").exists()
