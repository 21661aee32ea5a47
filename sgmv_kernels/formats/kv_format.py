"""Layouts of keys and values inside a page of the pool, one class for each format. Imports no torch.

All code that needs the size of a page or a view of its contents uses the format. A new format needs a subclass of
`KVFormat` in `KV_FORMATS`, and a kernel for each backend that should read it fast; the plain torch kernels support
every format through its `read` and `write`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ALIGNMENT_BYTES = 128
"""Pages and adapter panels begin at multiples of this, so that kernels read whole cache lines."""
Tensor = Any
"""Stands for torch.Tensor. Schedulers and planners use this module for sizes, so it does not import torch for types."""
Parts = Mapping[str, Tensor]
"""Views [P, kv_heads, *shape of a head's block] of the pages of one layer, by the names of a format's parts."""
TOKEN, HEAD_DIM = "token", "head_dim"
"""Axes of a part: the tokens of a page, the numbers of a head."""
TOKEN_QUAD, QUAD_TOKEN, DIM_QUAD, QUAD_DIM, CODE_DIM = "token_quad", "quad_token", "dim_quad", "quad_dim", "code_dim"
"""Axes of codes: groups of four tokens, the tokens of a group; groups of four numbers, the numbers of a group; the
padded numbers of a head."""
DIM_PAIR = "dim_pair"
"""Axis of codes of 4 bits: pairs of numbers that share a byte."""
CODES_STEP = 16
"""The codes of a head, and the tokens of a page, are a multiple of this: whole vectors on every processor."""
LEVELS = 127
"""Code of the largest magnitude of a head."""
NIBBLE_LEVELS = 15
"""4-bit code of the largest number of a head; the smallest has code 0."""
MOST = 1e34
"""Magnitude from which numbers count as infinite in pages of codes, so that sums of a rotated head stay finite."""
LEAST = 1e-30
"""Heads without a larger magnitude are stored as zeros."""
_SIZES: Mapping[str, Callable[[int, int], int]] = {
    TOKEN: lambda head_dim, page_size: page_size,
    HEAD_DIM: lambda head_dim, page_size: head_dim,
    TOKEN_QUAD: lambda head_dim, page_size: page_size // 4,
    QUAD_TOKEN: lambda head_dim, page_size: 4,
    DIM_QUAD: lambda head_dim, page_size: padded_dim(head_dim) // 4,
    QUAD_DIM: lambda head_dim, page_size: 4,
    CODE_DIM: lambda head_dim, page_size: padded_dim(head_dim),
    DIM_PAIR: lambda head_dim, page_size: padded_pairs(head_dim),
}
_OF_A_SLOT: Mapping[str, Callable[[Any], Any]] = {
    TOKEN: lambda slots: slots,
    TOKEN_QUAD: lambda slots: slots // 4,
    QUAD_TOKEN: lambda slots: slots % 4,
}
KEYS, VALUES = "keys", "values"
"""Names of the two parts that every format has."""
KEY_SCALES, VALUE_SCALES, VALUE_MINIMA = "key_scales", "value_scales", "value_minima"
"""Names of parts with one number for each token and key head."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class KVPart:
    """Describe one array of a page: a dense block for each key head, one after the other."""

    name: str
    # Name of the torch dtype of one stored item, a key of ITEM_BYTES.
    dtype: str
    # Axes of a head's block, the slowest first.
    axes: tuple[str, ...]

    def shape(self, head_dim: int, page_size: int) -> tuple[int, ...]:
        """Return the shape of one head's block in items."""
        return tuple(_SIZES[axis](head_dim, page_size) for axis in self.axes)

    def nbytes(self, heads: int, head_dim: int, page_size: int) -> int:
        """Return the bytes of this part in one page of one layer."""
        return heads * math.prod(self.shape(head_dim, page_size)) * ITEM_BYTES[self.dtype]

    def at(self, pages: Tensor, slots: Tensor) -> tuple[Any, ...]:
        """Return the index that selects the items of tokens, [T, kv_heads, *other axes], in a view of this part."""
        return pages, slice(None), *(_OF_A_SLOT[a](slots) if a in _OF_A_SLOT else slice(None) for a in self.axes)


@dataclass(frozen=True, slots=True)
class KVFormat(ABC):
    """Store keys and values in a page.

    Parts begin at multiples of their item size, pages at multiples of `ALIGNMENT_BYTES`, because adapter panels share
    the pool.
    """

    # Value of --kv-cache-dtype that selects this format.
    name: str
    # Arrays of a page in the order of their bytes; "keys" and "values" are among them.
    parts: tuple[KVPart, ...]
    # The tokens of a page are a multiple of this.
    page_step: int = 1

    def offsets(self, heads: int, head_dim: int, page_size: int) -> tuple[int, ...]:
        """Return the byte offset of every part in its page, and last the bytes of the page."""
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
            keys, values: [T, kv_heads, D] floats; keys are rotated by their positions.
        """

    @abstractmethod
    def read(self, parts: Parts, pages: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Return keys [..., kv_heads, D, page] and values [..., kv_heads, page, D], fp32, of `pages` [...] int64.

        They equal those that were written, except for rounding. Unwritten slots may contain anything, including NaN.
        """

    def copy(self, parts: Parts, sources: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> None:
        """Copy single tokens, (pages, slots) [N] int64 each, bit for bit; all are read before one is written."""
        for part in self.parts:
            view = parts[part.name]
            view[part.at(*targets)] = view[part.at(*sources)]


def held(keys: Tensor, values: Tensor, are_finite: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens [T, kv_heads, D] as they are stored: values that are not finite as 0, their head's keys as NaN.

    Rows that see such a token then get NaN, and no other rows do: those multiply the token's values by 0, and infinity
    or NaN times 0 would be NaN. An infinite key is also stored as NaN: a score of -inf would only mean weight 0.
    """
    return keys.masked_fill(~are_finite.all(-1, keepdim=True), math.nan), values.masked_fill(~are_finite, 0)


class FloatKV(KVFormat):
    """Store keys and values as floats of one dtype, keys transposed.

    A vector of stored keys then holds one dimension of neighbouring tokens: the scores of a page are computed as
    vectors, without horizontal sums, and a loaded key is used for every query head of its group.
    """

    def __init__(self, dtype: str) -> None:
        parts = (KVPart(KEYS, dtype, (HEAD_DIM, TOKEN)), KVPart(VALUES, dtype, (TOKEN, HEAD_DIM)))
        super().__init__(dtype, parts)

    def write(self, parts: Parts, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        keys, values = keys.to(parts[KEYS].dtype), values.to(parts[VALUES].dtype)
        keys, values = held(keys.masked_fill(~keys.isfinite(), math.nan), values, values.isfinite())
        parts[KEYS][pages, :, :, slots] = keys
        parts[VALUES][pages, :, slots] = values

    def read(self, parts: Parts, pages: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        return parts[KEYS][pages].float(), parts[VALUES][pages].float()


class CodesKV(KVFormat):
    """Store keys as int8 codes with a scale for each token and head, and values as the codes of a subclass.

    Keys are rotated by a Hadamard matrix before they are rounded, which spreads a head's few large numbers over all of
    them. Kernels rotate queries in the same way, so that scores do not change. A token's bytes depend only on that
    token. Four neighbours along the axis that attention sums over are in one word: numbers of a key, tokens of a value.

    Source: rotation before rounding, QuaRot (Ashkboos et al. 2024).
    """

    def __init__(self, name: str, values: tuple[KVPart, ...]) -> None:
        keys = KVPart(KEYS, "int8", (DIM_QUAD, TOKEN, QUAD_DIM)), KVPart(KEY_SCALES, "float32", (TOKEN,))
        super().__init__(name, keys + values, CODES_STEP)

    def write(self, parts: Parts, pages: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        keys, values = keys.where(keys.abs() < MOST, math.nan), values.float()
        keys, values = held(keys, values, values.abs() < MOST)
        codes, scales = round_symmetric(hadamard(keys.float()))
        padded = _padded(codes, padded_dim(codes.shape[-1]))
        items = {KEYS: padded.unflatten(-1, (-1, 4)), KEY_SCALES: scales} | self.round_values(values.float())
        for part in self.parts:
            view = parts[part.name]
            view[part.at(pages, slots)] = items[part.name].to(view.dtype)

    def read(self, parts: Parts, pages: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        codes = parts[KEYS][pages].float().transpose(-1, -2).flatten(-3, -2)
        keys = (codes * parts[KEY_SCALES][pages][..., None, :])[..., :head_dim, :]
        return hadamard(keys.transpose(-1, -2)).transpose(-1, -2), self.read_values(parts, pages, head_dim)

    @abstractmethod
    def round_values(self, values: Tensor) -> dict[str, Tensor]:
        """Return the items of values [T, kv_heads, D] fp32 by the names of their parts."""

    @abstractmethod
    def read_values(self, parts: Parts, pages: Tensor, head_dim: int) -> Tensor:
        """Return values as in `read`."""


class Int8KV(CodesKV):
    """Store values as int8 codes with a scale for each token and head."""

    def __init__(self) -> None:
        codes = KVPart(VALUES, "int8", (TOKEN_QUAD, CODE_DIM, QUAD_TOKEN))
        super().__init__("int8", (codes, KVPart(VALUE_SCALES, "float32", (TOKEN,))))

    def round_values(self, values: Tensor) -> dict[str, Tensor]:
        codes, scales = round_symmetric(values)
        return {VALUES: _padded(codes, padded_dim(codes.shape[-1])), VALUE_SCALES: scales}

    def read_values(self, parts: Parts, pages: Tensor, head_dim: int) -> Tensor:
        codes = parts[VALUES][pages].float().transpose(-1, -2).flatten(-3, -2)
        return (codes * parts[VALUE_SCALES][pages][..., None])[..., :head_dim]


class K8V4(CodesKV):
    """Store values as 4-bit codes between the smallest and the largest number of each token and head.

    Values are rotated before they are rounded, like keys, and kernels rotate the result of attention back. A byte has
    two numbers of one token, half a padded head apart, so that tokens share no byte.
    """

    def __init__(self) -> None:
        codes = KVPart(VALUES, "uint8", (TOKEN_QUAD, DIM_PAIR, QUAD_TOKEN))
        ranges = (KVPart(name, "bfloat16", (TOKEN,)) for name in (VALUE_SCALES, VALUE_MINIMA))
        super().__init__("k8v4", (codes, *ranges))

    def round_values(self, values: Tensor) -> dict[str, Tensor]:
        codes, scales, minima = round_range(hadamard(values))
        pairs = padded_pairs(values.shape[-1])
        padded = _padded(codes, 2 * pairs)
        return {VALUES: padded[..., :pairs] + 16 * padded[..., pairs:], VALUE_SCALES: scales, VALUE_MINIMA: minima}

    def read_values(self, parts: Parts, pages: Tensor, head_dim: int) -> Tensor:
        stored = parts[VALUES][pages].transpose(-1, -2).flatten(-3, -2)
        codes = stored.new_empty((*stored.shape[:-1], 2, stored.shape[-1])).float()
        codes[..., 0, :], codes[..., 1, :] = stored & 15, stored >> 4
        scales, minima = (parts[name][pages].float()[..., None] for name in (VALUE_SCALES, VALUE_MINIMA))
        return hadamard((codes.flatten(-2) * scales + minima)[..., :head_dim])


KV_FORMATS: dict[str, KVFormat] = {dtype: FloatKV(dtype) for dtype in ("bfloat16", "float16", "float32")}
KV_FORMATS |= {kv_format.name: kv_format for kv_format in (Int8KV(), K8V4())}
"""Every format by its name in `--kv-cache-dtype`."""


def get_kv_format(name: str, dtype: str) -> KVFormat:
    """Return the format that `--kv-cache-dtype` names; "auto" means the format of the weights' `dtype`."""
    return KV_FORMATS[dtype if name == "auto" else name]


def padded_dim(head_dim: int) -> int:
    """Return the number of codes of a head; those after `head_dim` are 0."""
    return _aligned(head_dim, CODES_STEP)


def padded_pairs(head_dim: int) -> int:
    """Return the bytes of a head in 4-bit codes; each byte has one number in its lower and one in its upper half."""
    return _aligned(head_dim, 2 * CODES_STEP) // 2


def rotated_block(head_dim: int) -> int:
    """Return the numbers that are rotated together: the largest power of two that divides a head."""
    return head_dim & -head_dim


def hadamard(x: Tensor) -> Tensor:
    """Rotate heads [..., D] fp32 block by block with the orthonormal Hadamard matrix, which is its own inverse."""
    block = rotated_block(x.shape[-1])
    half = 1
    while half < block:
        pairs = x.unflatten(-1, (-1, 2, half))
        x = x.new_empty(pairs.shape)
        x[..., 0, :] = pairs[..., 0, :] + pairs[..., 1, :]
        x[..., 1, :] = pairs[..., 0, :] - pairs[..., 1, :]
        x, half = x.flatten(-3), 2 * half
    return x * block**-0.5


def round_symmetric(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round heads [..., D] fp32 to integer codes, `LEVELS` for the largest magnitude; return codes and scales [...].

    The scale of a head with a number that is not finite is NaN.
    """
    sizes = x.abs()
    largest, is_finite = sizes.amax(-1), sizes.sum(-1) < math.inf
    is_some = largest > LEAST
    factors = (LEVELS / largest).where(is_finite & is_some, largest.new_zeros(()))
    scales = (largest * (1 / LEVELS)).where(is_some, largest.new_zeros(()))
    codes = (x * factors[..., None]).nan_to_num(0.0).round()
    return codes, scales.where(is_finite, scales.new_tensor(math.nan))


def round_range(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round heads [..., D] fp32 to integer codes from 0 to `NIBBLE_LEVELS`; return codes, scales and minima [...].

    A number is code * scale + minimum, where scale and minimum are rounded to bfloat16. The scale of a head with a
    number that is not finite is NaN.
    """
    minima = x.amin(-1).bfloat16().float()
    scales = ((x.amax(-1) - minima) * (1 / NIBBLE_LEVELS)).bfloat16().float()
    is_finite, is_some = x.abs().sum(-1) < math.inf, scales > LEAST
    factors = (1 / scales).where(is_finite & is_some, scales.new_zeros(()))
    codes = ((x - minima[..., None]) * factors[..., None]).nan_to_num(0.0).round().clamp(0, NIBBLE_LEVELS)
    scales = scales.where(is_some, scales.new_zeros(()))
    return codes, scales.where(is_finite, scales.new_tensor(math.nan)), minima


def _padded(codes: Tensor, width: int) -> Tensor:
    """Append zeros to heads [..., D]."""
    padded = codes.new_zeros((*codes.shape[:-1], width))
    padded[..., : codes.shape[-1]] = codes
    return padded


def _aligned(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
