"""Measurements of this machine, kept in files beside the compiled kernels. Imports no torch."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from sgmv_kernels.cpu_runtime.kernel_cache import cache_directory

logger = logging.getLogger(__name__)


def kept(file: str) -> dict[str, Any]:
    """Return the measured values of the machine's file, or {} if it does not exist or cannot be read."""
    directory = cache_directory()
    return {} if directory is None else _facts(directory / file)


def keep(file: str, facts: dict[str, Any]) -> None:
    """Add measured values to the machine's file, atomically; do nothing if it cannot be written."""
    directory = cache_directory()
    if directory is None:
        return
    path = directory / file
    try:
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({**_facts(path), **facts}))
        part.replace(path)
    except OSError as error:
        logger.warning("%s cannot be kept: %s", file, error)


def _facts(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
