"""Missing kernels are compiled by other processes; whatever becomes of those, the caller goes on."""

import fcntl
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgmv_kernels.cpu_ops import attention, linear, page_mass, pointwise, sgmv, slots
from sgmv_kernels.cpu_runtime import kernel_cache, kernel_compiler
from sgmv_kernels.cpu_runtime.kernel_names import OF_SOME_MODELS, common_kernels, further_kernels, needs_signed
from sgmv_kernels.formats.kv_format import KV_FORMATS

KERNELS = (("sgmv", "bf16"), ("pointwise", "norm"), ("pointwise", "take"))


def test_what_launchers_name_is_compiled_before_serving() -> None:
    entries = {(sgmv.MODULE, entry) for entry in sgmv.ENTRIES.values()}
    entries |= {(attention.MODULE, entry) for entry in attention.ENTRIES.values()}
    entries |= {(page_mass.MODULE, entry) for entry in attention.ENTRIES.values()}
    entries |= {(pointwise.MODULE, entry) for entry in pointwise.ROPE.values()}
    entries |= {(slots.MODULE, slots.ENTRY)}
    int8 = "int8_signed" if needs_signed() else "int8"
    entries |= {(linear.MODULE, int8 if entry == "int8" else entry) for entry in linear.ENTRIES.values()}
    formats = [(str(dtype).removeprefix("torch."), kv_format) for dtype, _ in sgmv.ENTRIES for kv_format in KV_FORMATS]
    found = {kernel for each in formats for kernel in common_kernels(*each)}
    further = {kernel for each in formats for kernel in further_kernels(*each)}
    assert entries <= found | further
    assert not found & further


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory, empty."""
    monkeypatch.setattr(kernel_compiler, "cache_directory", lambda: tmp_path)
    return tmp_path


Told = list[tuple[str, float]]


@pytest.fixture
def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Told, int]]:
    """Let this code compile three kernels, then return the progress, and the process's id. The file `told-N` says that
    progress was told N times; behind the first kernel, another must come within `stalled_s`."""

    def run(code: str, stalled_s: float = kernel_compiler.STALLED_S) -> tuple[Told, int]:
        told: Told = []
        seen: list[int] = []
        popen = subprocess.Popen

        def start(command: list[str], **options: object) -> "subprocess.Popen[bytes]":
            assert command[-3:] == ["sgmv.bf16", "pointwise.norm", "pointwise.take"]
            process = popen([sys.executable, "-c", code], **options)  # type: ignore[call-overload]
            seen.append(process.pid)
            return process  # type: ignore[no-any-return]

        def tell(what: str, share: float) -> None:
            told.append((what, share))
            if share:
                monkeypatch.setattr(kernel_compiler, "STALLED_S", stalled_s)
            (folder / f"told-{len(told)}").touch()

        monkeypatch.setattr(kernel_compiler.subprocess, "Popen", start)

        kernel_compiler.compile_missing(KERNELS, tell)
        return told, seen[0]

    return run


KEEPS = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from sgmv_kernels.cpu_runtime.kernel_cache import ObjectCode, _write
folder = Path(%r)
def keep(name, times):
    _write(folder / name, ObjectCode(name, (), b"code"))
    while not (folder / f"told-{{times}}").exists():
        time.sleep(0.01)
"""


def test_progress_rises_with_the_kernels_that_are_there(compiled, folder: Path, caplog) -> None:
    names = [".".join(kernel) for kernel in KERNELS]
    told, _ = compiled(KEEPS % str(folder) + f"for at, name in enumerate({names}): keep(name, at + 2)")
    assert {what for what, _ in told} == {"compiling 3 kernels, once on this machine"}
    assert [round(3 * share, 6) for _, share in told] == [0, 1, 2, 3]
    assert not caplog.records


@pytest.mark.parametrize(
    ("end", "stalled_s", "why"),
    [
        ("os.kill(os.getpid(), 9)", 100.0, "the one for it ended with code -9: it said nothing"),
        ("raise ImportError('no numba')", 100.0, "the one for it ended with code 1: ImportError: no numba"),
        ("time.sleep(600)", 1.0, "no other has compiled one for 1 s"),
    ],
)
def test_a_process_that_fails_leaves_the_rest_to_this_one(
    compiled, folder: Path, caplog: pytest.LogCaptureFixture, end: str, stalled_s: float, why: str
) -> None:
    begun = time.monotonic()
    with caplog.at_level(logging.INFO):
        told, pid = compiled(KEEPS % str(folder) + f"keep('pointwise.norm', 2)\n{end}", stalled_s)
    assert time.monotonic() - begun < 120
    assert caplog.messages == [f"2 kernels are compiled in this process, as {why}"]
    assert kernel_cache.missing(KERNELS, folder) == [KERNELS[0], KERNELS[2]]
    assert told[-1][1] == pytest.approx(1 / 3)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("lacks", ["a folder", "the right to write", "room", "Numba", "a missing kernel"])
def test_no_process_without_a_use_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    def no_numba() -> Path:
        raise ImportError("Numba is not installed")

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(kernel_compiler.subprocess, "Popen", refused)
    if lacks == "a folder":
        monkeypatch.setattr(kernel_compiler, "cache_directory", lambda: None)
    elif lacks == "the right to write":
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    elif lacks == "room":
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    elif lacks == "Numba":
        monkeypatch.setattr(kernel_compiler, "cache_directory", no_numba)
    else:
        for module, name in KERNELS:
            kernel_cache._write(folder / f"{module}.{name}", kernel_cache.ObjectCode(name, (), b"code"))
    kernel_compiler.compile_missing(KERNELS, lambda *_: None)


def test_no_folder_for_temporary_files_is_needed(compiled, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_folder() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", no_folder)
    names = [".".join(kernel) for kernel in KERNELS]
    told, _ = compiled(KEEPS % str(folder) + f"for at, name in enumerate({names}): keep(name, at + 2)")
    assert told[-1][1] == 1


def test_no_process_can_be_started(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(kernel_compiler, "COMMAND", (str(folder / "nothing"),))
    kernel_compiler.compile_missing(KERNELS, lambda *_: None)
    assert "no process can be started to compile kernels: " in caplog.text


def test_a_compiler_that_crashes_is_not_run_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the server with it; without the kernels, torch computes."""
    said = "import os, sys; print('LLVM ERROR: no', file=sys.stderr, flush=True); os.abort()"
    monkeypatch.setattr(kernel_compiler, "COMMAND", (sys.executable, "-c", said))
    with pytest.raises(ImportError, match=r"cannot be compiled on this machine: .* LLVM ERROR: no"):
        kernel_compiler.compile_missing(KERNELS, lambda *_: None)


WORKERS = f"""
import os, sys, types
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from pathlib import Path
from sgmv_kernels.cpu_runtime import kernel_compiler as it
folder = Path(sys.argv[1])
def compile_into(directory, kernel):
    if kernel[1] == "dies":
        os.kill(os.getpid(), 9)
    with open(folder / kernel[1], "a") as file:
        file.write("once")
    return kernel[1] != "not kept"
it.importlib = types.SimpleNamespace(import_module=lambda name: None)
it.cache_directory, it.compile_into = (lambda: folder), compile_into
sys.exit(it.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("bad", "code"), [("", 0), ("dies", 9), ("not kept", 1)])
def test_workers_share_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, code: int) -> None:
    """Each is compiled once; the death of one worker costs its kernel only, a full disk ends the one that sees it."""
    names = [*([bad] if bad else []), *(f"k{i}" for i in range(20))]
    command = [sys.executable, "-c", WORKERS, str(tmp_path), *(f"m.{name}" for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    others = len(os.sched_getaffinity(0)) > 1
    if others or not bad:
        assert {name: kept.get(name) for name in names if name != bad} == dict.fromkeys(names[bool(bad) :], "once")


def test_kernels_in_the_background_have_the_lowest_priority_and_lock_nothing(tmp_path: Path) -> None:
    code = WORKERS.replace('file.write("once")', "file.write(str(os.getpriority(os.PRIO_PROCESS, 0)))")
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    command = [sys.executable, "-c", code, str(tmp_path), "--in-background", "m.one", "m.two", "m.three"]
    subprocess.run(command, check=True, timeout=60)
    os.close(lock)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(("one", "two", "three"), "19")


@pytest.mark.parametrize(("code", "end"), [("import time; time.sleep(600)", -9), ("pass", 0), ("exit(3)", 3)])
def test_a_process_in_background_ends_with_the_server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: str, end: int
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: object) -> "subprocess.Popen[bytes]":
        assert command[-4:] == ["--in-background", "sgmv.bf16", "pointwise.norm", "pointwise.take"]
        started.append(popen([sys.executable, "-c", code], **options))  # type: ignore[call-overload]
        return started[0]

    monkeypatch.setattr(kernel_compiler.subprocess, "Popen", start)
    with kernel_compiler.compiling_in_background(KERNELS, after_s=0.0):
        deadline = time.monotonic() + 60
        while not started or (end >= 0 and started[0].returncode is None):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert started[0].returncode == end
    why = "3 kernels are compiled when they are needed, as the one for it ended with code 3: it said nothing"
    assert caplog.messages == ([why] if end > 0 else [])


def test_nothing_is_compiled_in_background_before_its_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_compiler, "compiling", None)
    begun = time.monotonic()
    with kernel_compiler.compiling_in_background(KERNELS, after_s=600.0):
        pass
    assert time.monotonic() - begun < 60


@pytest.mark.long
def test_a_kernel_that_is_needed_and_missing_is_compiled_elsewhere(tmp_path: Path) -> None:
    """With what a model that needs it often needs, too; where none can be kept, the start loads them all."""
    code = """
import sys
from sgmv_kernels.cpu_runtime.kernel_compiler import kernel_address
from sgmv_kernels.cpu_runtime.kernel_cache import cache_directory
assert kernel_address("pointwise", "cap")
print(*sorted(path.name for path in cache_directory().iterdir()), "numba" in sys.modules)
"""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*sorted(map(".".join, OF_SOME_MODELS)), "False"], done.stderr
