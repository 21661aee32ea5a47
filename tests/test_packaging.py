"""The wheel holds the four packages, all of their modules and data, and nothing else at the top level."""

import fcntl
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("adapter_store", "api", "lorasrv", "sgmv_kernels")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    # Two processes of pytest-xdist may build: the checkout has one build folder.
    with (ROOT / "pyproject.toml").open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        subprocess.run(command, check=True, capture_output=True, text=True)
    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        return set(wheel.namelist())


def test_top_level_names(wheel_names: set[str]) -> None:
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)


def test_every_module_and_data_file_is_inside(wheel_names: set[str]) -> None:
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for pattern in ("*.py", "py.typed", "*.toml", "*.html", "*.css", "*.js", "*.svg")
        for path in (ROOT / package).rglob(pattern)
    }
    assert wanted <= wheel_names
    assert any(name.endswith("specs/llama.toml") for name in wanted)


def test_nothing_is_told_to_be_installed_from_an_index() -> None:
    """No index has lorasrv: its extras are installed in the checkout."""
    places = [ROOT / "README.md", *(p for room in (*PACKAGES, "docs", "examples") for p in (ROOT / room).rglob("*.*"))]
    texts = {path: path.read_text("utf-8") for path in places if path.suffix in (".md", ".py", ".yaml")}
    assert [path for path, text in texts.items() if re.search(r"pip install ['\"]?lorasrv", text)] == []


def test_commands_are_on_the_path_before_a_page_uses_them() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert 0 < readme.index("source .venv/bin/activate") < readme.index("\nlorasrv ")
