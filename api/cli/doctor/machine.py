"""Check the machine for doctor: libraries, processor, threads, device, compiled kernels."""

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from api.config.settings import ServerSettings
from lorasrv.config import size
from lorasrv.errors import to_install

Status = Literal["ok", "warn", "fail"]
NEEDED = (
    "torch", "numpy", "numba", "llvmlite", "safetensors", "tokenizers", "gguf", "jinja2", "cachetools", "fastapi",
    "uvicorn", "pydantic", "prometheus-client", "typer", "rich", "httpx2",
)  # fmt: skip
OPTIONAL = {"peft": "train", "transformers": "train", "triton": "cuda", "matplotlib": "plot"}
TRANSPARENT_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FEATURES = ("avx2", "fma", "avx512f", "avx512vnni", "avx512bf16", "amx-int8", "amx-bf16", "neon", "dotprod", "sve")


@dataclass(frozen=True, slots=True)
class Check:
    """Hold the result of a check."""

    status: Status
    text: str
    # What to do about it; "" if nothing.
    fix: str = ""


def libraries() -> Check:
    """Report versions of required packages, and of packages that only some commands need."""
    versions = {name: _version(name) for name in (*NEEDED, *OPTIONAL)}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    text = f"Python {platform.python_version()}, lorasrv {_version('lorasrv') or 'from its source'}, {found}"
    missing = [name for name in NEEDED if versions[name] is None]
    if missing:
        return Check("fail", f"missing: {', '.join(missing)}; {text}", f"pip install {' '.join(missing)}")
    extras = sorted({extra for name, extra in OPTIONAL.items() if versions[name] is None and extra == "train"})
    fix = f"lorasrv verify needs them: {to_install('train')}" if extras else ""
    return Check("warn" if extras else "ok", text, fix)


def processor() -> Check:
    """Report the processor and its known vector instructions."""
    import llvmlite.binding as llvm

    from lorasrv.offline.planner.machine_profile import cpu_model
    from sgmv_kernels.cpu_runtime.processor import features

    known = [name for name in FEATURES if features().get(name)]
    text = f"{cpu_model()} ({llvm.get_host_cpu_name()}): {', '.join(known) or 'no known vector instructions'}"
    if platform.machine() in ("x86_64", "AMD64") and "avx2" not in known:
        return Check("warn", text, "kernels are much slower without AVX2; use another machine if possible")
    return Check("ok", text)


def threads() -> Check:
    """Report the usable processors, and warn if more threads would run."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    text = f"{allowed} processors of {os.cpu_count()}"
    text += f", {quota:g} of them by the container's quota" if quota is not None else ""
    text += f", OMP_NUM_THREADS {wanted}" if wanted else ""
    count = int(wanted) if wanted.isdigit() else allowed
    may = min(allowed, max(1, int(quota))) if quota is not None else allowed
    if count > may:
        return Check("warn", text, f"{count} threads would wait for each other: set OMP_NUM_THREADS={may}")
    return Check("ok", text)


def huge_pages() -> Check:
    """Report whether the system provides huge pages, with which a CPU reads weights, keys and values faster."""
    try:
        known = TRANSPARENT_HUGE_PAGES.read_text().split()
    except OSError:
        return Check("ok", "this system has no setting for transparent ones")
    chosen = next((word.strip("[]") for word in known if word.startswith("[")), "unknown")
    if chosen != "never":
        return Check("ok", f"transparent ones: {chosen}")
    fix = f"let programs ask for them, as root: echo madvise > {TRANSPARENT_HUGE_PAGES}"
    return Check("warn", "transparent ones: never; without them, steps on a CPU take some 8 % longer", fix)


def device(settings: ServerSettings) -> Check:
    """Report the device that would run the model."""
    import torch

    from lorasrv.errors import ConfigError
    from lorasrv.worker.device import resolve_device

    try:
        found = resolve_device(settings.device)
    except ConfigError as error:
        return Check("fail", str(error), "leave out --device to use the available device")
    if found.type == "cuda":
        free, total = torch.cuda.mem_get_info(found)
        return Check("ok", f"{torch.cuda.get_device_name(found)}: {size(free)} of {size(total)} free")
    unused = Path("/proc/driver/nvidia").exists() and not torch.cuda.is_available()
    fix = "torch does not use the NVIDIA driver of this machine: install torch with CUDA" if unused else ""
    return Check("warn" if unused else "ok", f"cpu, torch {torch.__version__}", fix)


def kernels(settings: ServerSettings) -> Check:
    """Report whether compiled kernels are cached."""
    from sgmv_kernels.cpu_runtime.kernel_cache import cache_directory, can_be_written, missing
    from sgmv_kernels.cpu_runtime.kernel_names import common_kernels
    from sgmv_kernels.formats.kv_format import get_kv_format

    if settings.kernels == "torch":
        return Check("ok", "plain torch, as set by --kernels: slow, nothing to compile")
    directory = cache_directory()
    if directory is None:
        where = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        fix = (
            f"make {where}/lorasrv yours (chown -R) and writable by you only (chmod -R go-w), or set XDG_CACHE_HOME to "
            "such a folder"
        )
        return Check("warn", "compiled kernels cannot be cached: each start compiles them again, some 15 s", fix)
    wanted = common_kernels(settings.dtype, get_kv_format(settings.kv_cache_dtype, settings.dtype).name)
    if not can_be_written(directory) and (lacking := missing(wanted, directory)):
        what = f"{directory} cannot be written, or is on a full disk, and lacks {len(lacking)} kernels"
        text = f"{what}: each start compiles them again"
        return Check("warn", text, "make room there, make the folder writable, or set XDG_CACHE_HOME to another one")
    files = [path for path in directory.iterdir() if path.is_file() and path.suffix != ".json"]
    if not files:
        return Check("ok", f"none in {directory} yet: the first start compiles them, 5 to 15 s")
    return Check("ok", f"{len(files)} compiled ones in {directory}, {size(sum(path.stat().st_size for path in files))}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _quota() -> float | None:
    """Return the number of processors that the container may use; None if there is no limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None
