"""Scan of every value of an adapter, in chunks: finite, representable in bf16, all zero, and norms.

NumPy has no bf16 type, so floats are tested by their bits: one integer comparison works for every type.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from adapter_store.errors import ProblemList, show
from adapter_store.formats.safetensors_file import ENDED, FILE, NUMPY_TYPES, SafetensorsHeader, TensorInfo, widen

CHUNK_BYTES = 1 << 20
CHUNK_VALUES = CHUNK_BYTES // 4


@dataclass(frozen=True, slots=True)
class _FloatBits:
    """Describe a float as an unsigned integer: `magnitude` drops the sign, `limit` is the first value refused."""

    integer: npt.DTypeLike
    magnitude: int
    limit: int
    infinity: int


# F32 is refused from the first value that rounds to infinity in bf16, the type in which adapters are kept.
_BITS: Mapping[str, _FloatBits] = {
    "BF16": _FloatBits("<u2", 0x7FFF, 0x7F80, 0x7F80),
    "F16": _FloatBits("<u2", 0x7FFF, 0x7C00, 0x7C00),
    "F32": _FloatBits("<u4", 0x7FFFFFFF, 0x7F7F8000, 0x7F800000),
}


class Hasher(Protocol):
    """Describe the only method of `hashlib` objects that is used."""

    def update(self, data: bytes, /) -> None: ...


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Hold facts that only the data shows: tensors that are all zero, and the requested Frobenius norms."""

    zero_tensors: frozenset[str] = field(default_factory=frozenset)
    norms: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _TensorFacts:
    highest: int = 0
    sum_of_squares: float = 0.0


def scan_data(
    file: BinaryIO,
    header: SafetensorsHeader,
    hasher: Hasher,
    problems: ProblemList,
    norms_of: Collection[str],
) -> DataFacts:
    """Read the data, hashing it and testing every value. `file` must be at the first byte of the data."""
    facts = {
        name: _scan_tensor(file, name, info, hasher, problems, name in norms_of)
        for name, info in header.tensors.items()
    }
    zero = frozenset(name for name, fact in facts.items() if fact.highest == 0)
    return DataFacts(zero, {name: math.sqrt(facts[name].sum_of_squares) for name in norms_of})


def read_matrix(file: BinaryIO, header: SafetensorsHeader, name: str) -> npt.NDArray[np.float32]:
    """Read a tensor of a scanned file once more."""
    info = header.tensors[name]
    return _read_values(file, header, info, 0, math.prod(info.shape)).reshape(info.shape)


def are_equal(file: BinaryIO, header: SafetensorsHeader, names: Sequence[str]) -> bool:
    """Return whether tensors of one shape have the same values; reads them once more, in chunks."""
    infos = [header.tensors[name] for name in names]
    for first in range(0, math.prod(infos[0].shape) if infos else 0, CHUNK_VALUES):
        one, *others = (_read_values(file, header, info, first, CHUNK_VALUES) for info in infos)
        if not all(np.array_equal(one, other) for other in others):
            return False
    return True


def _read_values(
    file: BinaryIO, header: SafetensorsHeader, info: TensorInfo, first: int, most: int
) -> npt.NDArray[np.float32]:
    """Read at most so many values of a tensor, from the number `first` on."""
    kind = np.dtype(NUMPY_TYPES[info.dtype])
    start = info.start + first * kind.itemsize
    file.seek(header.data_start + start)
    return widen(np.frombuffer(file.read(min(most * kind.itemsize, info.end - start)), dtype=kind), info.dtype)


def _scan_tensor(
    file: BinaryIO, name: str, info: TensorInfo, hasher: Hasher, problems: ProblemList, want_norm: bool
) -> _TensorFacts:
    """Return a tensor's facts; record NaN, infinity and overflow, once per tensor."""
    bits = _BITS[info.dtype]
    facts = _TensorFacts()
    left = info.end - info.start
    while left:
        wanted = min(left, CHUNK_BYTES)
        chunk = file.read(wanted)
        # A short read is the end of the file, perhaps in the middle of a value.
        if len(chunk) < wanted:
            problems.add("truncated", FILE, ENDED)
            return facts
        hasher.update(chunk)
        left -= len(chunk)
        facts.highest = max(facts.highest, _highest_magnitude(chunk, bits))
        if want_norm:
            facts.sum_of_squares += _sum_of_squares(chunk, info.dtype)
    if facts.highest >= bits.limit:
        problems.add("non_finite", show(name)[1:-1], _complaint(facts.highest, bits))
    return facts


def _highest_magnitude(chunk: bytes, bits: _FloatBits) -> int:
    """Return the bits of the largest magnitude as an unsigned integer; infinities and NaN are the highest."""
    values = np.frombuffer(chunk, dtype=bits.integer)
    return int((values & np.asarray(bits.magnitude, dtype=values.dtype)).max())


def _sum_of_squares(chunk: bytes, dtype: str) -> float:
    """Return the sum in fp64. It uses einsum, which starts no threads that would compete with requests."""
    with np.errstate(all="ignore"):
        values = widen(np.frombuffer(chunk, dtype=NUMPY_TYPES[dtype]), dtype).astype(np.float64)
        return float(np.einsum("i,i->", values, values))


def _complaint(highest: int, bits: _FloatBits) -> str:
    if highest < bits.infinity:
        return "holds values too large for bf16 (3.39e38); the training diverged, upload an earlier checkpoint"
    return "holds NaN or infinite values; the training diverged, upload an earlier checkpoint"
