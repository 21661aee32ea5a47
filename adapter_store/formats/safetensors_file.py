"""Strict, bounded reader of a safetensors header.

The safetensors library (0.8, measured) accepts a repeated key, zero-size tensors, and a 58 MB header of a million
empty tensors, for which it takes 20 s and 1.9 GB. Here the base model limits the length before the header is read, and
the rest is checked: unique names, integers, known types, offsets that cover the data exactly once. Layout: u64
little-endian header length, JSON header, data. NumPy has no bf16 type, so its values are kept as their bits.
"""

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from adapter_store.errors import AdapterInvalid, Problem, ProblemList, show
from adapter_store.formats.strict_json import unique_pairs
from adapter_store.spec import BaseShapes

ENDED = "ended while it was read; upload it again"
UNGATHERED = (
    "DeepSpeed ZeRO-3 and FSDP save parts of a model so if they are not gathered before; gather them and save it again"
)
LENGTH_BYTES = 8
LFS_POINTER = b"version "
"""First bytes of a Git LFS pointer, which Git keeps in place of a large file."""
BYTES_PER_TENSOR = 256
MIN_HEADER_CAP_BYTES = 1 << 20
ITEM_BYTES: Mapping[str, int] = {"BF16": 2, "F16": 2, "F32": 4}
FILE = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Describe one tensor: type, shape, and the range of its bytes, relative to the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Hold a checked header. `tensors` is in the order of the data, which starts at `data_start` without gaps."""

    tensors: Mapping[str, TensorInfo]
    data_start: int
    data_bytes: int


def header_cap_bytes(base: BaseShapes) -> int:
    """Return the bytes of the largest header that an adapter of this base can need: twice those for five tensors of
    every module of the layers, nine of every linear outside them, and one of every norm.
    """
    expected_tensors = base.num_layers * (5 * len(base.modules) + len(base.norms)) + 9 * len(base.ends) + 1
    return max(MIN_HEADER_CAP_BYTES, 2 * expected_tensors * BYTES_PER_TENSOR)


def read_header(file: BinaryIO, file_bytes: int, cap_bytes: int) -> SafetensorsHeader:
    """Read and check the header; `file` is left at the first byte of the data.

    Reads 8 bytes, then at most `cap_bytes`; accepts at most one tensor per 256 bytes of `cap_bytes`.

    Raises:
        AdapterInvalid: with every problem found; the check stops at the first structural one.
    """
    first = file.read(LENGTH_BYTES)
    length = _header_length(first, file_bytes, cap_bytes)
    raw = _parse_json(file.read(length))
    _check_count(len(raw), cap_bytes)
    data_start = LENGTH_BYTES + length
    problems = ProblemList()
    _check_metadata(raw.pop("__metadata__", None), problems)
    tensors = {name: info for name, entry in raw.items() if (info := _tensor(name, entry, problems))}
    ordered = dict(sorted(tensors.items(), key=lambda item: item[1].start))
    if not len(problems):
        _check_tiling(ordered, file_bytes - data_start, problems)
    problems.raise_if_any()
    return SafetensorsHeader(ordered, data_start, file_bytes - data_start)


def parse_header(data: bytes | bytearray, cap_bytes: int) -> SafetensorsHeader:
    """Read and check the header of a file that is in memory."""
    length = min(int.from_bytes(data[:LENGTH_BYTES], "little"), cap_bytes)
    return read_header(io.BytesIO(memoryview(data)[: LENGTH_BYTES + length]), len(data), cap_bytes)


def _header_length(first: bytes, file_bytes: int, cap_bytes: int) -> int:
    if len(first) < LENGTH_BYTES:
        raise _invalid("truncated", f"has {file_bytes} bytes, too few for a safetensors file; upload it again")
    length = int.from_bytes(first, "little")
    if length <= min(cap_bytes, file_bytes - LENGTH_BYTES):
        return length
    if first == LFS_POINTER:
        raise _invalid(
            "not_safetensors", "is a pointer of Git LFS, not the weights; run git lfs pull, and upload it again"
        )
    # Only for implausible lengths: a valid file with a header of 1,152 bytes begins with 80 04, as a pickle does.
    if hint := _other_format(first):
        raise _invalid(
            "not_safetensors",
            f"is {hint}, not safetensors, and was not opened; convert it where it was trained: load it with PEFT and "
            "call save_pretrained(), which writes safetensors",
        )
    if length > cap_bytes:
        raise _invalid(
            "header_too_large",
            f"has a header of {length} bytes, more than an adapter of this base can need ({cap_bytes}); it is not "
            "an adapter for this base, or not a safetensors file",
        )
    raise _invalid(
        "truncated",
        f"ends inside its header: {file_bytes} bytes, at least {LENGTH_BYTES + length} expected; upload it again",
    )


def _other_format(first: bytes) -> str | None:
    if first.startswith(b"PK\x03\x04"):
        return "a zip archive (as torch.save writes)"
    if first[:1] == b"\x80" and first[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "a pickle"
    return "a GGUF file" if first.startswith(b"GGUF") else None


def _parse_json(data: bytes) -> dict[str, object]:
    try:
        raw = json.loads(data.decode("utf-8"), object_pairs_hook=unique_pairs)
    except RecursionError:
        raise _invalid("malformed_header", "has a header that is nested too deeply") from None
    except ValueError as error:
        raise _invalid("malformed_header", f"has a header that is not strict JSON: {error}") from None
    if not isinstance(raw, dict):
        raise _invalid("malformed_header", f"has a header that is not a JSON object: {show(raw)}")
    return raw


def _check_count(num_entries: int, cap_bytes: int) -> None:
    """Refuse a header with too many short entries, which could have ten times the tensors of any adapter."""
    most = max(cap_bytes, MIN_HEADER_CAP_BYTES) // BYTES_PER_TENSOR
    if num_entries > most:
        raise _invalid("too_many_tensors", f"holds {num_entries} tensors; an adapter of this base has at most {most}")


def _invalid(code: str, message: str) -> AdapterInvalid:
    return AdapterInvalid((Problem(code, FILE, message),))


def _check_metadata(metadata: object, problems: ProblemList) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        problems.add("malformed_header", "__metadata__", "must map strings to strings")


def _tensor(name: str, entry: object, problems: ProblemList) -> TensorInfo | None:
    """Return the tensor that `entry` describes; record a problem and return None if it is malformed."""
    shown = show(name)[1:-1]
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        problems.add("malformed_header", shown, "must have dtype, shape and data_offsets, and nothing else")
        return None
    dtype, shape, offsets = entry["dtype"], _sizes(entry["shape"]), _sizes(entry["data_offsets"])
    if shape is None or offsets is None or len(offsets) != 2:
        problems.add("malformed_header", shown, "shape and data_offsets must be lists of integers of at least 0")
        return None
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        problems.add("unsupported_dtype", shown, f"has type {show(dtype)}; save it as one of {', '.join(ITEM_BYTES)}")
        return None
    info = TensorInfo(dtype, shape, *offsets)
    expected_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if expected_bytes == 0:
        problems.add("empty_tensor", shown, f"has shape {list(shape)}, no values: {UNGATHERED}")
    elif info.end - info.start != expected_bytes:
        problems.add(
            "malformed_header",
            shown,
            f"{dtype} {list(shape)} takes {expected_bytes} bytes, its data_offsets "
            f"{list(offsets)} hold {info.end - info.start}",
        )
    return info


def _sizes(value: object) -> tuple[int, ...] | None:
    """Return the value if it is a short list of non-negative integers (a bool is not an integer), else None."""
    if not isinstance(value, list) or len(value) > 8:
        return None
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63 for n in value):
        return None
    return tuple(value)


def _check_tiling(tensors: Mapping[str, TensorInfo], data_bytes: int, problems: ProblemList) -> None:
    """Check that the offsets cover the data exactly once."""
    if not tensors:
        problems.add("no_tensors", FILE, f"holds no tensors: {UNGATHERED}")
        return
    position = 0
    for name, info in tensors.items():
        if info.start != position:
            what = "overlaps the tensor before it" if info.start < position else "leaves a hole before it"
            problems.add("malformed_header", show(name)[1:-1], f"{what}: starts at {info.start}, expected {position}")
        position = info.end
    if position > data_bytes:
        problems.add(
            "truncated",
            FILE,
            f"is cut short: {data_bytes} bytes of data, the header describes {position}; upload it again",
        )
    elif position < data_bytes:
        problems.add("trailing_bytes", FILE, f"has {data_bytes - position} bytes after the last tensor; save it again")


NUMPY_TYPES: Mapping[str, str] = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}


def widen(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Return values of a type of `NUMPY_TYPES` as float32, exactly."""
    if dtype == "BF16":
        return (array.astype("<u4") << 16).view("<f4")
    return array.astype("<f4")
