"""Kernels on disk: compiled once, loaded without Numba, never from a file that is not whole or a folder of others."""

import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sgmv_kernels.cpu_runtime import kernel_cache as kernel_code
from sgmv_kernels.cpu_runtime import kernel_compiler, measurements

NORM = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, format="%(message)s")
from sgmv_kernels.ops import Ops
ops = Ops(torch.device("cpu"))
x = torch.randn(3, 40)
assert torch.allclose(ops.add_rms_norm_(x, None, torch.ones(40), 1e-5), torch.nn.functional.rms_norm(x, (40,)), 1e-4)
print(ops.name, "numba" in sys.modules)
"""


def _run(code: str, cache: Path | str) -> tuple[str, str]:
    env = os.environ | {"XDG_CACHE_HOME": str(cache)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


def _stored(cache: Path) -> Path:
    (kernel,) = (cache / "lorasrv" / "kernels").rglob("pointwise.norm")
    return kernel


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, str]]:
    """What the first process of a machine leaves on disk, and what it printed and logged."""
    cache = tmp_path_factory.mktemp("first")
    return cache, _run(NORM, cache)


@pytest.fixture
def filled(first_run: tuple[Path, tuple[str, str]], tmp_path: Path) -> Path:
    """A copy of that for one test, which may damage it."""
    return shutil.copytree(first_run[0], tmp_path / "filled")


@pytest.mark.long
def test_no_start_imports_numba(first_run: tuple[Path, tuple[str, str]], filled: Path) -> None:
    (first, compiled), (second, loaded) = first_run[1], _run(NORM, filled)
    assert (first, "pointwise.norm is missing: compiling 1 kernels" in compiled) == ("numba False", True)
    assert (second, "compiling" in loaded) == ("numba False", False)
    assert _stored(filled).parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.long
@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1] + b"x", pytest.param(lambda data: data[:100], marks=pytest.mark.exhaustive)]
)
def test_a_damaged_file_is_compiled_anew(filled: Path, damage) -> None:
    stored = _stored(filled)
    whole = stored.read_bytes()
    stored.write_bytes(damage(whole))
    out, log = _run(NORM, filled)
    assert (out, "compiling" in log) == ("numba False", True)
    assert len(stored.read_bytes()) == len(whole)


@pytest.mark.long
def test_a_folder_that_others_may_write_is_not_trusted(filled: Path) -> None:
    _stored(filled).parent.chmod(0o770)
    out, log = _run(NORM, filled)
    assert (out, "open to other users" in log) == ("numba True", True)


def test_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    assert kernel_code.cache_directory.__wrapped__() is None
    assert "lorasrv belongs to another user" in caplog.text
    assert "chown it, or set XDG_CACHE_HOME" in caplog.text


@pytest.mark.parametrize("part", ["lorasrv", "lorasrv/kernels", "lorasrv/kernels/*"])
@pytest.mark.parametrize("how", ["mode", "link"])
def test_whose_the_folder_has_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, how: str) -> None:
    """Code in it is run: its folder, and those above it, are nobody else's to write, and no link leads elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find = kernel_code.cache_directory.__wrapped__
    assert find() is not None
    [folder] = tmp_path.glob(part)
    if how == "mode":
        folder.chmod(0o770)
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    assert find() is None


def test_a_folder_of_somebody_else_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
    assert kernel_code.cache_directory.__wrapped__() is None


def test_folders_of_versions_that_nobody_starts_any_more_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = kernel_code.cache_directory.__wrapped__()
    kernels, elsewhere, now = own.parent, tmp_path / "elsewhere", time.time()
    ages = {kernels / ("a" * 16): 31, kernels / ("b" * 16): 29, kernels / "of-somebody": 31, elsewhere: 31, own: 31}
    for folder, days in ages.items():
        folder.mkdir(exist_ok=True)
        (folder / "pointwise.norm").write_bytes(b"code")
        os.utime(folder, (now - days * 86400,) * 2)
    (kernels / ("c" * 16)).symlink_to(elsewhere)
    assert kernel_code.cache_directory.__wrapped__() == own
    assert set(kernels.iterdir()) == {*ages, kernels / ("c" * 16)} - {elsewhere}, "only a compiling process deletes"
    kernel_code._write(own / "pointwise.norm", kernel_code.ObjectCode("norm", (), b"code"))
    for _ in range(2):
        subprocess.run([*kernel_compiler.COMMAND, "pointwise.norm"], check=True)
    assert set(kernels.iterdir()) == {*ages, kernels / ("c" * 16)} - {kernels / ("a" * 16), elsewhere}
    assert all((folder / "pointwise.norm").exists() for folder in {*ages} - {kernels / ("a" * 16)})
    assert own.stat().st_mtime > now - 60, "the next version's start deletes it otherwise"


LOST = "import pathlib\ndef lost(): raise RuntimeError('no home')\npathlib.Path.home = lost\n"
BROKEN = """
import os, pathlib, sys
folder = pathlib.Path(os.environ["XDG_CACHE_HOME"], "broken")
folder.mkdir(parents=True)
(folder / "numba.py").write_text("raise ImportError('broken')")
sys.path.insert(0, str(folder))
os.environ["PYTHONPATH"] = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
"""
DELETED = """
import shutil
from sgmv_kernels.cpu_runtime.kernel_cache import cache_directory
shutil.rmtree(cache_directory())
"""
HIDDEN = "import importlib.metadata as m; m.version = lambda name: (_ for _ in ()).throw(m.PackageNotFoundError(name))"
IMPORTED = """
import importlib, pkgutil, sys
from sgmv_kernels import cpu_kernels
for module in pkgutil.iter_modules(cpu_kernels.__path__):
    importlib.import_module(f"sgmv_kernels.cpu_kernels.{module.name}")
print(*(own.__file__ for name, own in sys.modules.items() if "sgmv_kernels." in name and not hasattr(own, "__path__")))
"""
WARM = "from sgmv_kernels.formats.kv_format import KV_FORMATS\nops.warm_up(torch.float32, KV_FORMATS['float32'])\nx ="


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "folder", "out", "log"),
    [
        pytest.param(NORM, "file", "numba True", "cannot be kept", id="a folder that cannot be made costs time only"),
        pytest.param(DELETED + NORM, "new", "numba True", "cannot be kept", id="a later version deleted the folder"),
        pytest.param(LOST + NORM, "", "numba True", "cannot be kept: no home", id="no home"),
        pytest.param(BROKEN + NORM.replace("x =", WARM), "new", "torch ", "using plain torch", id="numba is broken"),
        pytest.param(HIDDEN + NORM, "new", "torch False", "using plain torch", id="numba is not installed"),
    ],
)
def test_what_is_missing_is_said_once_and_kernels_run(
    tmp_path: Path, code: str, folder: str, out: str, log: str
) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "file/lorasrv").write_text("a file where a folder should be")
    said, logged = _run(code, folder and tmp_path / folder)
    assert said.startswith(out)
    assert logged.count(log) == 1


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For all kernels and measurements together."""
    folder = tmp_path / "gone"
    monkeypatch.setattr(measurements, "cache_directory", lambda: folder)
    code = kernel_code.ObjectCode("norm", (), b"")
    assert [kernel_code._write(folder / name, code) for name in ("pointwise.norm", "pointwise.take")] == [False, False]
    measurements.keep("threads.json", {"threads": 2})
    [message] = caplog.messages
    assert f"cannot be kept in {folder}: No such file or directory" in message
    assert "set XDG_CACHE_HOME" in message


def test_the_version_changes_with_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is with every module that compiling imports, and with those that measure what is kept beside the kernels:
    another version of lorasrv must use neither code nor measurements of this one."""
    package = Path(kernel_code.__file__).parents[1]
    compiled_from, _ = _run(IMPORTED, tmp_path)
    measuring = (package / "cpu_ops" / name for name in ("linear.py", "linear_autotune.py", "thread_autotune.py"))
    sources = {*map(Path, compiled_from.split()), *measuring, package / "cpu_runtime" / "team.py"}
    copy = shutil.copytree(package, tmp_path / "copy")
    monkeypatch.setattr(kernel_code, "__file__", str(copy / Path(kernel_code.__file__).relative_to(package)))
    last, ignored = kernel_code._version(), []
    for source in sources:
        (copy / source.relative_to(package)).write_text("changed")
        ignored += [source.name] if last == kernel_code._version() else []
        last = kernel_code._version()
    assert ignored == []


def test_compiling_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert kernel_code._compile("pointwise", "silu").code
    assert "compiling pointwise.silu, once on this machine" in caplog.text


APART = """
import sys
from sgmv_kernels.cpu_runtime.kernel_cache import address_of
address_of("linear", "round8")
address_of("linear", sys.argv[1])
"""
TOGETHER = """
import torch
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, Q3H_LEVELS
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import linear_reference
ops, x = Ops(torch.device("cpu"), "numba"), torch.randn(3, 128)
for levels in (INT4_LEVELS, Q3H_LEVELS):
    scales = torch.rand(32, 2).half()
    codes = GroupQuantizedWeight(torch.randint(0, levels, (32, 128), dtype=torch.uint8), scales, -scales, levels)
    wanted = linear_reference(x, codes, None, rounded=True)
    assert torch.allclose(ops.linear(x, ops.pack_linear(codes, None)).double(), wanted, 1e-4, 1e-4), levels
"""


@pytest.mark.long
@pytest.mark.aside
def test_kernels_compiled_by_different_processes_do_not_meet(tmp_path: Path) -> None:
    """Their inner functions may have the same names: Numba numbers them by process."""
    for entry in ("q3h", "int4"):
        _run(f"import sys; sys.argv[1:] = ['{entry}']\n{APART}", tmp_path)
    _run(TOGETHER, tmp_path)
