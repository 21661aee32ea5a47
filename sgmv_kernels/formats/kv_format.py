"""Describe the layout of keys and values inside a page of the pool, one class for each format. Imports no torch.

All code that needs the size of a page or a view of its interior uses the format. A new format is one subclass of
`KVFormat` in `KV_FORMATS`, and one kernel for each backend that should read it fast; the plain torch kernels read every
format through its `read` and `write`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ALIGNMENT_BYTES = 128
"""Pages and adapter panels begin at multiples of this, so that kernels read whole cache lines."""
Tensor = Any
"""Stands for torch.Tensor: schedulers and planners read sizes here, so torch is not imported even for types."""
Parts = Mapping[str, Tensor]
"""Views [P, kv_heads, *shape of a head's block] of the pages of one layer, by the names of a format's parts."""
TOKEN, HEAD_DIM = "token", "head_dim"
"""Axes of a part: the tokens of a page, the numbers of a head."""
KEYS, VALUES = "keys", "values"
"""Names of the two parts that every format has."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class KVPart:
    """Describe one array of a page: a dense block for each key head, one after the other."""

    name: str
    # Name of the torch dtype of one stored item, a key of ITEM_BYTES.
    dtype: str
    # Axes of a head's block, the slowest first; none for one item a head.
    axes: tuple[str, ...]
    # Numbers that share one item, along the last axis: 2 for codes of 4 bits in uint8.
    per_item: int = 1

    def shape(self, head_dim: int, page_size: int) -> tuple[int, ...]:
        """Return the shape of one head's block in items."""
        sizes = [{TOKEN: page_size, HEAD_DIM: head_dim}[axis] for axis in self.axes]
        if sizes:
            sizes[-1] = -(-sizes[-1] // self.per_item)
        return tuple(sizes)

    def nbytes(self, heads: int, head_dim: int, page_size: int) -> int:
        """Return the bytes of this part in one page of one layer."""
        return heads * math.prod(self.shape(head_dim, page_size)) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVFormat(ABC):
    """Store keys and values in a page.

    Parts begin at multiples of their item size, pages at multiples of `ALIGNMENT_BYTES`, because adapter panels share
    the pool.
    """

    # Value of --kv-dtype that selects this format.
    name: str
    # Arrays of a page in the order of their bytes; "keys" and "values" are among them.
    parts: tuple[KVPart, ...]

    def offsets(self, heads: int, head_dim: int, page_size: int) -> tuple[int, ...]:
        """Return the byte offset of every part in its page, and behind them the bytes of the page."""
        offsets, end = [], 0
        for part in self.parts:
            offsets.append(_aligned(end, ITEM_BYTES[part.dtype]))
            end = offsets[-1] + part.nbytes(heads, head_dim, page_size)
        return (*offsets, _aligned(end, ALIGNMENT_BYTES))

    def page_bytes(self, heads: int, head_dim: int, page_size: int) -> int:
        """Return the bytes of one page of one layer.

        Args:
            heads: key heads of a layer.
            head_dim: numbers of a head.
            page_size: tokens of a page.
        """
        return self.offsets(heads, head_dim, page_size)[-1]

    @abstractmethod
    def write(self, parts: Parts, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one token per row.

        Args:
            parts: the pages of one layer.
            pages, slots: [T] int64, the page of each row's token and its place inside the page.
            keys, values: [T, kv_heads, D] floats, keys rotated.
        """

    @abstractmethod
    def read(self, parts: Parts, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [..., kv_heads, D, page] and values [..., kv_heads, page, D], fp32, of `pages` [...] int64.

        Unwritten slots may contain anything, NaN included.
        """


class FloatKV(KVFormat):
    """Store keys and values as floats of one dtype, keys transposed.

    A vector of stored keys then holds one dimension of neighbouring tokens: the scores of a page come out as vectors,
    without horizontal sums, and one loaded key serves every query head of its group.
    """

    def __init__(self, dtype: str) -> None:
        parts = (KVPart(KEYS, dtype, (HEAD_DIM, TOKEN)), KVPart(VALUES, dtype, (TOKEN, HEAD_DIM)))
        super().__init__(dtype, parts)

    def write(self, parts: Parts, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        parts[KEYS][pages, :, :, slots] = keys.to(parts[KEYS].dtype)
        parts[VALUES][pages, :, slots] = values.to(parts[VALUES].dtype)

    def read(self, parts: Parts, pages: Tensor) -> tuple[Tensor, Tensor]:
        return parts[KEYS][pages].float(), parts[VALUES][pages].float()


KV_FORMATS: dict[str, KVFormat] = {dtype: FloatKV(dtype) for dtype in ("bfloat16", "float16", "float32")}
"""Every format by its name, which `--kv-dtype` takes."""


def get_kv_format(name: str, dtype: str) -> KVFormat:
    """Return the format that `--kv-dtype` names; "auto" is that of the weights' `dtype`."""
    return KV_FORMATS[dtype if name == "auto" else name]


def _aligned(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
