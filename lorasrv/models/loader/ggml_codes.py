"""Read GGML blocks as codes, with the file's own levels, scales and minima. The layouts are ggml's.

    Q4_0 Q5_0 Q8_0   32: scale d; d * (q - 8), d * (q - 16), d * q
    Q4_1 Q5_1        32: scale d, minimum m; d * q + m
    Q4_K Q5_K        256: d, e, eight of a scale s and a minimum m of six bits; d * s * q - e * m
    IQ4_NL MXFP4     32: scale d, a power of two for MXFP4; d * table[q]
    IQ4_XS           256: d, eight scales s of six bits; d * (s - 32) * table[q]

d, e and m of 32 are fp16. Weights of every other type are rounded to 8 bits, with a scale for every 32.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorasrv.models.loader.checkpoint import StoredPacking
from lorasrv.models.loader.ggml_dequant import decode
from lorasrv.models.loader.gguf_file import BLOCK, GgmlType, TensorInfo
from lorasrv.models.loader.packed.rounded import ROUNDED, round_to_bytes
from lorasrv.models.loader.packed.unpacking import exact_scales
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS

METHOD = "gguf"
_SUBBLOCKS = 8
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of e2m1, doubled; ggml's scales are halved."""
_FLOATS = {"F32", "F16", "BF16"}
_OF_ONE_FORMAT = (_FLOATS, {"Q4_0", "Q4_1"}, {"Q8_0"})
"""Sets of types. If all linears have types of one set, another format than `METHOD` serves their codes exactly."""


def decode_codes(
    name: str, raw: npt.NDArray[np.uint8], kind: GgmlType, shape: tuple[int, ...]
) -> GroupQuantizedWeight | None:
    """Decode stored bytes to codes.

    Args:
        name: name of the tensor, for messages.
        raw, kind, shape: bytes, type and shape of the tensor.
    Returns: codes of `shape` [O, H], or None for floats, tensors that are not matrices, and minima that fp16 cannot
        hold.
    Raises:
        CorruptModel: a scale is not finite.
    """
    if kind.block_size == 1 or len(shape) != 2:
        return None
    reader = _READERS.get(kind.name)
    if reader is None:
        return round_to_bytes(name, decode(raw, kind, shape))
    # Rows are split into blocks: [O, blocks of a row, bytes].
    return reader(name, torch.from_numpy(raw).view(shape[0], -1, kind.block_bytes))


def packing_of(linears: Mapping[str, TensorInfo]) -> StoredPacking | None:
    """Describe the linears of a file; None if all are floats or have types that int4 or int8 keeps."""
    kinds = [info.type for info in linears.values()]
    names = {kind.name for kind in kinds}
    if any(names <= held for held in _OF_ONE_FORMAT):
        return None
    sizes = [math.prod(info.shape) for info in linears.values()]
    bits = {_bits(kind) for kind in kinds if kind.block_size > 1}
    held = sum(_HELD_BITS.get(kind.name, max(8, _bits(kind))) * size for kind, size in zip(kinds, sizes, strict=True))
    rounded = sorted(names - _READERS.keys() - _FLOATS)
    rounding = f"{', '.join(rounded)} {ROUNDED}" if rounded else ""
    return StoredPacking(METHOD, tuple(sorted(bits)), held / sum(sizes), rounding)


def _bits(kind: GgmlType) -> int:
    """Return the bits of a weight in the file, as a whole number."""
    return 8 * kind.block_bytes // kind.block_size


def _halves(columns: Tensor) -> Tensor:
    """Return bytes [O, N, 2 n] as fp16 [O, N, n]."""
    return columns.contiguous().view(torch.float16)


def _nibbles(levels: Tensor) -> Tensor:
    """Split bytes [..., 16] into codes [..., 32]: low halves are the first 16, high halves the others."""
    return torch.cat((levels & 15, levels >> 4), dim=-1)


def _with_bits(codes: Tensor, fifth: Tensor) -> Tensor:
    """Add bits [..., n] of 0 or 1 above codes of four bits."""
    return codes | fifth << 4


def _finite(name: str, scales: Tensor) -> Tensor:
    """Return fp16 scales after checking them."""
    exact_scales(name, scales)
    return scales.contiguous()


def _rows(codes: Tensor) -> Tensor:
    return codes.reshape(len(codes), -1)


def _q4_0(name: str, blocks: Tensor) -> GroupQuantizedWeight | None:
    """d * (q - 8) is d * q + m with m = -8 d, which fp16 holds exactly unless it overflows."""
    scales = _halves(blocks[..., :2])[..., 0].contiguous()
    minima = scales * -8
    if not minima.isfinite().all():
        return None
    return GroupQuantizedWeight(_rows(_nibbles(blocks[..., 2:])), scales, minima, INT4_LEVELS)


def _q4_1(name: str, blocks: Tensor) -> GroupQuantizedWeight | None:
    factors = _halves(blocks[..., :4])
    scales, minima = (factors[..., i].contiguous() for i in range(2))
    if not minima.isfinite().all():
        return None
    return GroupQuantizedWeight(_rows(_nibbles(blocks[..., 4:])), scales, minima, INT4_LEVELS)


def _q8_0(name: str, blocks: Tensor) -> GroupQuantizedWeight:
    codes = blocks[..., 2:].contiguous().view(torch.int8)
    return GroupQuantizedWeight(_rows(codes), _halves(blocks[..., :2])[..., 0].contiguous(), None, INT8_LEVELS)


def _fifth_of_32(stored: Tensor) -> Tensor:
    """Return bits [..., 32] of four bytes, the lowest first."""
    return (stored[..., torch.arange(BLOCK) // 8] >> torch.arange(BLOCK, dtype=torch.uint8) % 8) & 1


def _q5_0(name: str, blocks: Tensor) -> GroupQuantizedWeight:
    codes = _with_bits(_nibbles(blocks[..., 6:]), _fifth_of_32(blocks[..., 2:6])).view(torch.int8) - 16
    return GroupQuantizedWeight(_rows(codes), _finite(name, _halves(blocks[..., :2])[..., 0]), None, INT8_LEVELS)


def _q5_1(name: str, blocks: Tensor) -> GroupQuantizedWeight:
    factors = _finite(name, _halves(blocks[..., :4])).float()
    codes = _with_bits(_nibbles(blocks[..., 8:]), _fifth_of_32(blocks[..., 4:8])).view(torch.int8)
    scales, minima = (factors[..., i].contiguous() for i in range(2))
    return GroupQuantizedWeight(_rows(codes), scales, minima, INT8_LEVELS)


def _six_bits(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima, [..., 8] int8, from 12 bytes.

    The first four of each have their own bytes; the upper two bits of these bytes belong to the last four.
    """
    first, second, third = stored[..., :4], stored[..., 4:8], stored[..., 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    return scales.view(torch.int8), minima.view(torch.int8)


def _of_256(name: str, blocks: Tensor, codes: Tensor, levels: int) -> GroupQuantizedWeight:
    steps = _finite(name, _halves(blocks[..., :4]) * torch.tensor([1, -1], dtype=torch.float16))
    scales, minima = _six_bits(blocks[..., 4:16])
    return GroupQuantizedWeight(_rows(codes), _rows(scales), _rows(minima), levels, steps=steps)


def _pairs_of_32(levels: Tensor) -> Tensor:
    """Split bytes [..., 128] into codes [..., 8, 32]: 32 bytes hold two sub-blocks, the first in their low halves."""
    pairs = levels.reshape(*levels.shape[:-1], _SUBBLOCKS // 2, BLOCK)
    return torch.stack((pairs & 15, pairs >> 4), dim=-2).flatten(-3, -2)


def _q4_k(name: str, blocks: Tensor) -> GroupQuantizedWeight:
    return _of_256(name, blocks, _pairs_of_32(blocks[..., 16:]), INT4_LEVELS)


def _q5_k(name: str, blocks: Tensor) -> GroupQuantizedWeight:
    places = torch.arange(_SUBBLOCKS, dtype=torch.uint8)[:, None]
    codes = _with_bits(_pairs_of_32(blocks[..., 48:]), blocks[..., None, 16:48] >> places & 1)
    return _of_256(name, blocks, codes.view(torch.int8), INT8_LEVELS)


def _iq4_nl(name: str, blocks: Tensor) -> GroupQuantizedWeight:
    scales = _finite(name, _halves(blocks[..., :2])[..., 0])
    return _of_table(_nibbles(blocks[..., 2:]), scales, _IQ4_VALUES)


def _iq4_xs(name: str, blocks: Tensor) -> GroupQuantizedWeight:
    steps = _finite(name, _halves(blocks[..., :2]))
    high = blocks[..., 2:4].contiguous().view(torch.int16).int()
    places = torch.arange(_SUBBLOCKS)
    low = blocks[..., 4 + places // 2].int() >> 4 * (places % 2) & 15
    scales = (low | (high >> 2 * places & 3) << 4) - 32
    codes = _nibbles(blocks[..., 8:].reshape(*blocks.shape[:-1], _SUBBLOCKS, BLOCK // 2))
    return _of_table(codes, _rows(scales.to(torch.int8)), _IQ4_VALUES, steps)


def _mxfp4(name: str, blocks: Tensor) -> GroupQuantizedWeight:
    scales = torch.from_numpy(np.ldexp(np.float32(1), blocks[..., 0].numpy().astype(np.int32) - 128))
    return _of_table(_nibbles(blocks[..., 1:]), exact_scales(name, scales), _MXFP4_VALUES)


def _of_table(
    codes: Tensor, scales: Tensor, values: tuple[int, ...], steps: Tensor | None = None
) -> GroupQuantizedWeight:
    table = torch.tensor(values, dtype=torch.int8)
    return GroupQuantizedWeight(_rows(codes), scales, None, INT4_LEVELS, table=table, steps=steps)


_READERS: Mapping[str, Callable[[str, Tensor], GroupQuantizedWeight | None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
"""(name, blocks [O, blocks of a row, bytes] uint8) -> codes, by type."""
_HELD_BITS = dict.fromkeys(("Q4_0", "Q4_1", "Q4_K", "IQ4_NL", "IQ4_XS", "MXFP4"), 4)
"""Types whose codes are kept in four bits. Other types are kept in eight bits, or are floats."""
