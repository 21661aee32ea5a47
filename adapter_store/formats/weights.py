"""Validated weights, read from disk into NumPy arrays over one writable buffer, with the digest verified."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from adapter_store.errors import AdapterCorrupt, LoadCancelled
from adapter_store.formats.safetensors_file import NUMPY_TYPES, SafetensorsHeader, TensorInfo, parse_header, widen
from adapter_store.spec import AdapterSpec, HeadBlock

Array = npt.NDArray[Any]
HeadArrays = tuple[tuple[tuple[Array, Array | None], ...], ...]
READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class LoraTensors:
    """Hold one module's matrices: `a` [rank, in], `b` [out, rank]; delta = (b * scaling) @ a.

    `scaling` is one number, or float64 [rank] in a sum of adapters. `magnitude` [out] is DoRA's; `b_bias` [out],
    already scaled, is added to the delta; both float32.
    """

    rank: int
    scaling: float | Array
    a: Array
    b: Array
    magnitude: Array | None = None
    b_bias: Array | None = None


class AdapterWeights(Mapping[tuple[int, str], LoraTensors]):
    """Map (layer, module) to matrices, in the order of `spec.modules`. Every array has the type `dtype`.

    BF16 values are kept as their bits in uint16 (NumPy has no bfloat16); F16 and F32 have NumPy's types. `heads` holds
    the weight [H, H] and bias [H] of each block of each Medusa head, `saved` the biases and norm weights that replace
    the base's, by (layer, module); both float32. `rows` holds a matrix [N, H] for each of `spec.rows`, in its own type.
    """

    def __init__(
        self,
        spec: AdapterSpec,
        tensors: Mapping[tuple[int, str], LoraTensors],
        heads: HeadArrays = (),
        saved: Mapping[tuple[int, str], Array] | None = None,
        rows: tuple[Array, ...] = (),
    ) -> None:
        self.spec = spec
        self.rows = rows
        self.saved = saved or {}
        self.dtype = spec.dtype
        self.heads = heads
        self._tensors = tensors

    def __getitem__(self, site: tuple[int, str]) -> LoraTensors:
        return self._tensors[site]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def load_weights(path: Path, spec: AdapterSpec) -> AdapterWeights:
    """Read a file whose spec is known.

    Raises:
        AdapterCorrupt: the bytes no longer have the validated digest.
    """
    with path.open("rb") as file:
        data = read_verified(file, spec.weights_digest)
    return weights_from_bytes(data, parse_header(data, len(data)), spec)


def read_verified(
    file: BufferedReader, weights_digest: str, should_stop: Callable[[], bool] = lambda: False
) -> bytearray:
    """Return the whole file, from its start, after checking its digest.

    Raises:
        AdapterCorrupt: it does not have this digest.
        LoadCancelled: `should_stop` returned True between two chunks.
    """
    data = bytearray(os.fstat(file.fileno()).st_size)
    sha256 = hashlib.sha256()
    length = 0
    with memoryview(data) as view:
        while length < len(data):
            if should_stop():
                raise LoadCancelled("the load was cancelled")
            count = file.readinto(view[length : length + READ_BYTES])
            if not count:
                break
            sha256.update(view[length : length + count])
            length += count
    if length != len(data) or sha256.hexdigest() != weights_digest:
        raise AdapterCorrupt(
            f"stored weights sha256:{weights_digest[:12]} are damaged: the disk returned other bytes than were "
            "uploaded; upload the same file again to repair it"
        )
    return data


def weights_from_bytes(data: bytearray, header: SafetensorsHeader, spec: AdapterSpec) -> AdapterWeights:
    """Return arrays that are views of `data` and keep it alive; mixed types and unaligned tensors are copied."""

    def vector(name: str | None) -> Array | None:
        return None if name is None else _array(data, header, header.tensors[name], "F32")

    tensors = {}
    for m in spec.modules:
        a, b = (_array(data, header, header.tensors[name], spec.dtype) for name in (m.a_name, m.b_name))
        a = unpooled(a, m.group_size)
        bias = vector(m.b_bias)
        scaled = None if bias is None else np.float32(m.scaling) * bias
        tensors[m.layer, m.module] = LoraTensors(m.rank, m.scaling, a, b, vector(m.magnitude), scaled)
    saved = {(s.layer, s.module): _array(data, header, header.tensors[s.name], "F32") for s in spec.saved}
    rows = tuple(_array(data, header, header.tensors[r.name], header.tensors[r.name].dtype) for r in spec.rows)
    return AdapterWeights(spec, tensors, head_arrays(data, header, spec.heads), saved, rows)


def pooling_factor(n_in: int, group_size: int) -> float:
    """Return by what QALoRA multiplies the sum of a group's inputs: their mean times the number of groups is used."""
    return 1.0 if group_size == 1 else n_in / group_size**2


def unpooled(a: Array, group_size: int) -> Array:
    """Return lora_A [rank, in] from QALoRA's [rank, in / group_size], without the factor: the inputs of a group share a
    column.
    """
    return a if group_size == 1 else np.repeat(a, group_size, axis=1)


def head_arrays(data: bytearray, header: SafetensorsHeader, heads: Iterable[Iterable[HeadBlock]]) -> HeadArrays:
    """Return the weight [H, H] and bias [H] of each block of each head, float32."""

    def array(name: str) -> Array:
        return _array(data, header, header.tensors[name], "F32")

    return tuple(
        tuple((array(block.weight), None if block.bias is None else array(block.bias)) for block in head)
        for head in heads
    )


def _array(data: bytearray, header: SafetensorsHeader, info: TensorInfo, dtype: str) -> Array:
    view = memoryview(data)[header.data_start + info.start : header.data_start + info.end]
    array: Array = np.frombuffer(view, dtype=NUMPY_TYPES[info.dtype]).reshape(info.shape)
    if info.dtype != dtype:
        return widen(array, info.dtype)
    return array if array.flags.aligned else array.copy()
