"""KV identity: everything that the bits of keys and values depend on besides the adapter and the tokens, as plain JSON
values.

Snapshots are restored only if all of it is equal. Too much in it only means that a prompt is computed again after a
change; too little would give a wrong answer. So it covers the source files of everything that computes, not versions.
"""

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import sgmv_kernels
from adapter_store import composition, formats
from lorasrv import models, worker
from lorasrv.config import ModelOptions
from lorasrv.models.loader.locate import weight_files
from lorasrv.models.quantization import QuantFormat
from lorasrv.worker.weights import ModelWeights
from sgmv_kernels.formats.kv_format import KVFormat
from sgmv_kernels.ops import Ops

_COMPUTING = (sgmv_kernels, models, worker, formats, composition)
"""Packages and modules that compute, or make the weights of adapters."""
_SOURCES = (".py", ".toml", ".json")
_LIBRARIES = ("torch", "numpy", "numba", "llvmlite", "triton")


def kv_identity(
    weights: ModelWeights,
    fmt: QuantFormat,
    options: ModelOptions,
    ops: Ops,
    kv_format: KVFormat,
    layout: tuple[int, ...],
    draft: ModelWeights | None,
) -> dict[str, Any]:
    """Return what the bits of a served model's keys and values depend on.

    Args:
        layout: sizes of a page.
        draft: draft model, whose keys and values are in pages with the same ids.
    """
    return {
        # A sample of every tensor, and the file stamps, which change with any other byte.
        "base": weights.fingerprint,
        "files": weight_stamps(options),
        "spec": _digest([repr(weights.spec).encode()]),
        "rope": [repr(weights.spec.rope), repr(weights.spec.rope_local)],
        "quantization": fmt.name,
        "group": options.quantization_group,
        "codes": [weights.kept_codes, weights.remade_codes],
        "dtype": options.dtype,
        "bf16_linears": options.bf16_linears,
        "kv_dtype": kv_format.name,
        "layout": list(layout),
        "kernels": ops.name,
        "sources": _digest(_sources()),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "processor": _processor(ops),
        "draft": "" if draft is None else draft.fingerprint,
    }


def same_tokens(identity: dict[str, Any]) -> str:
    """Return a fingerprint of everything that determines tokens: engines with the same one give the same answers. File
    times differ between copies, so the base is identified by the sample of its tensors.
    """
    facts = {name: value for name, value in identity.items() if name != "files"}
    return _digest([json.dumps(facts, sort_keys=True).encode()])


def peer_identity(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part that must be equal on two machines that exchange pages: all but the times of files."""
    return {**identity, "files": [[name, nbytes] for name, nbytes, _ in identity["files"]]}


def weight_stamps(options: ModelOptions) -> list[list[str | int]]:
    """Return name, size and time of the files that the base's weights are read from."""
    files = [] if options.load_format == "dummy" else weight_files(options.model)
    if options.quantized_weights is not None:
        files.append(options.quantized_weights)
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def source_files() -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of the source files that determine how keys and values are computed."""
    for module in _COMPUTING:
        assert module.__file__ is not None
        file = Path(module.__file__)
        found = file.parent.rglob("*") if hasattr(module, "__path__") else [file]
        for path in sorted(path for path in found if path.suffix in _SOURCES):
            yield f"{module.__name__}/{path.relative_to(file.parent).as_posix()}", path


def _sources() -> Iterator[bytes]:
    for name, path in source_files():
        yield name.encode()
        yield path.read_bytes()


def _digest(parts: Iterator[bytes] | list[bytes]) -> str:
    known = hashlib.sha256()
    for part in parts:
        known.update(len(part).to_bytes(8, "little") + part)
    return known.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _processor(ops: Ops) -> str:
    """Return the processor that computes, and the features of it that kernels may use."""
    if ops.device.type == "cuda":
        return f"{torch.cuda.get_device_name(ops.device)} CUDA {torch.version.cuda}"
    own = ""
    if ops.name == "numba":
        # Only where it is loaded anyway.
        from sgmv_kernels.cpu_runtime.processor import name_and_features

        own = name_and_features()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {own}".strip()
