"""Measurements of this machine, kept in files beside the compiled kernels. Imports no torch."""

import json
from pathlib import Path
from typing import Any

from sgmv_kernels.cpu_runtime.kernel_cache import cache_directory, replace_file


def kept(file: str) -> dict[str, Any]:
    """Return the measured values of the machine's file, or {} if it does not exist or cannot be read."""
    directory = cache_directory()
    return {} if directory is None else _facts(directory / file)


def keep(file: str, facts: dict[str, Any]) -> None:
    """Add measured values to the machine's file, atomically; do nothing if it cannot be written."""
    directory = cache_directory()
    if directory is not None:
        path = directory / file
        replace_file(path, json.dumps({**_facts(path), **facts}).encode())


def _facts(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
