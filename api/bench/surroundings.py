"""The machine and the versions that a figure belongs to, as far as they can be told without asking anybody."""

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

from lorasrv import __version__

ROOT = Path(__file__).parents[2]
TELLING_FLAGS = (
    "avx2",
    "avx512f",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "bf16",
    "sve",
)
PACKAGES = ("torch", "numba", "httpx2")


def machine() -> dict[str, object]:
    """Processor, its vector instructions, cores that this process may use, memory, system."""
    info = _text("/proc/cpuinfo")
    flags = set(_found(r"^(?:flags|Features)\s*:(.*)$", info).split())
    memory = _found(r"^MemTotal:\s*(\d+)", _text("/proc/meminfo"))
    return {
        "cpu": _found(r"^model name\s*:(.*)$", info) or platform.processor() or platform.machine(),
        "cores": _cores(),
        "instructions": [flag for flag in TELLING_FLAGS if flag in flags],
        "memory_bytes": 1024 * int(memory) if memory else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def client_versions() -> dict[str, str]:
    """Of what made the load, and of packages that a server in the same environment would use."""
    versions = {"lorasrv": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def commit() -> str | None:
    """Of the checkout that this file lies in, with `+changes` if files differ; None outside one."""
    if not (ROOT / ".git").exists():
        return None
    try:
        found = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return found + ("+changes" if changed else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1).strip() if match else ""
