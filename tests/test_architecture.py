"""Rules of the house that no other tool checks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("adapter_store", "api", "lorasrv", "sgmv_kernels")
MAX_LINES = 400
TORCH_FREE = (
    "lorasrv.scheduler.scheduler",
    "lorasrv.request",
    "lorasrv.text.tokenizer",
    "adapter_store.store",
    "adapter_store.validation.validate",
    "api.cli.main",
)
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_files_stay_one_concept_long() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text("utf-8").splitlines()) for path in MODULES}
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_every_module_says_what_it_is() -> None:
    assert [p.name for p in MODULES if not p.read_text("utf-8").startswith('"""')] == []


def test_no_pickle_in_the_packages() -> None:
    lines = [(path.name, line.strip()) for path in MODULES for line in path.read_text("utf-8").splitlines()]
    assert [name for name, line in lines if line.startswith(("import pickle", "from pickle"))] == []


def test_every_module_is_in_the_map() -> None:
    """ARCHITECTURE.md names every module of the three packages that have a map of modules."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    folders = ("loaders", "quant", "policies", "routes", "schemas", "cli")
    missing = [
        path.relative_to(ROOT).as_posix()
        for path in MODULES
        if path.name != "__init__.py" and path.parent.name not in folders and f"`{path.name}`" not in text
    ]
    assert missing == []


@pytest.mark.parametrize("module", TORCH_FREE)
def test_importing_it_brings_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
