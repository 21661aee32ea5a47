"""What was measured on this machine, kept for the next time: one small file for each model and form of it. No torch."""

import hashlib
import json
import os
import platform
import re
from pathlib import Path

from lorasrv import __version__
from lorasrv.config import ModelOptions
from lorasrv.errors import ConfigError
from lorasrv.planning.machine_costs import MachineCosts

FORMAT = 1


def cache_file(model_name: str, options: ModelOptions) -> Path:
    """Where the costs of this model are kept: they are this CPU's and this version's."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    made = str(options.quantized_weights.absolute()) if options.quantized_weights is not None else None
    weights = [options.quantization, options.quantization_group, made, options.load_format]
    facts = [FORMAT, model_name, *weights, options.dtype, options.device, options.kernels, cpu_model(), os.cpu_count()]
    digest = hashlib.sha256(json.dumps([*facts, __version__]).encode()).hexdigest()
    return Path(base) / "lorasrv" / f"costs-{digest[:16]}.json"


def read_cached(path: Path) -> MachineCosts | None:
    """None if there is nothing, or nothing that can be read."""
    try:
        return MachineCosts.read(path)
    except (OSError, ConfigError):
        return None


def write_cached(path: Path, costs: MachineCosts) -> None:
    """Whole or not at all. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(costs.to_dict(), indent=1) + "\n", "utf-8")
    part.replace(path)


def cpu_model() -> str:
    """What this machine computes with."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()
