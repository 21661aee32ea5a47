"""GGML tensor types: how many bytes a block has, and its values in fp32. The formulas are ggml's.

A block of the types that are decoded here holds 32 neighbours of a row: an fp16 scale d, a minimum m or none, then the
levels q. The K-quants and their kind are left to the gguf package, imported when the first such tensor is met.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorasrv.errors import UnsupportedModel
from sgmv_kernels.ops import INT4_LEVELS, INT8_LEVELS, GroupCodes

BLOCK = 32


@dataclass(frozen=True, slots=True)
class GgmlType:
    """`decode` takes blocks [N, block_bytes] uint8 and gives their values [N, block_size], fp32 or as stored."""

    name: str
    block_size: int
    block_bytes: int
    decode: Callable[[Tensor], Tensor]


def _nibbles(q: Tensor) -> Tensor:
    """[N, 16] uint8 -> [N, 32] fp32: low halves are the first sixteen values, high halves the rest."""
    values = torch.empty((q.shape[0], BLOCK), dtype=torch.float32)
    values[:, :16] = q & 15
    values[:, 16:] = q >> 4
    return values


def _halves(columns: Tensor) -> Tensor:
    return columns.contiguous().view(torch.float16).float()


def _q4_0(blocks: Tensor) -> Tensor:
    """Semantics: d * (q - 8)."""
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_halves(blocks[:, :2]))


def _q4_1(blocks: Tensor) -> Tensor:
    """Semantics: d * q + m."""
    d_m = _halves(blocks[:, :4])
    return _nibbles(blocks[:, 4:]).mul_(d_m[:, :1]).add_(d_m[:, 1:])


def _q8_0(blocks: Tensor) -> Tensor:
    """Semantics: d * q."""
    return blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks[:, :2]))


def _stored_as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.view(dtype).clone()


def _by_gguf(name: str) -> Callable[[Tensor], Tensor]:
    """A decoder by the gguf package, which takes most of a second to import."""

    def decode_blocks(blocks: Tensor) -> Tensor:
        try:
            gguf = importlib.import_module("gguf")
            dequantize, number = importlib.import_module("gguf.quants").dequantize, gguf.GGMLQuantizationType[name]
        except (ImportError, KeyError):
            raise UnsupportedModel(f"GGUF type {name} needs a newer gguf package: pip install -U gguf") from None
        # A damaged scale may be infinite, and NaN follows; those who look at logits will see it.
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.ascontiguousarray(dequantize(blocks.numpy(), number), dtype=np.float32))

    return decode_blocks


_LEFT_TO_GGUF = {
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
_TYPES = {
    0: GgmlType("F32", 1, 4, _stored_as(torch.float32)),
    1: GgmlType("F16", 1, 2, _stored_as(torch.float16)),
    2: GgmlType("Q4_0", BLOCK, 18, _q4_0),
    3: GgmlType("Q4_1", BLOCK, 20, _q4_1),
    8: GgmlType("Q8_0", BLOCK, 34, _q8_0),
    30: GgmlType("BF16", 1, 2, _stored_as(torch.bfloat16)),
    **{number: GgmlType(name, n, size, _by_gguf(name)) for number, (name, n, size) in _LEFT_TO_GGUF.items()},
}
_OTHER_NAMES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4"}


def ggml_type(number: int, tensor: str) -> GgmlType:
    """Raises UnsupportedModel naming the type, the tensor and the known types."""
    if number not in _TYPES:
        name = _OTHER_NAMES.get(number, f"number {number}")
        known = ", ".join(kind.name for kind in _TYPES.values())
        raise UnsupportedModel(f"tensor {tensor!r:.80} has GGUF type {name}, which is not supported; known: {known}")
    return _TYPES[number]


def decode(raw: npt.NDArray[np.uint8], kind: GgmlType, shape: tuple[int, ...]) -> Tensor:
    """Stored bytes -> a new tensor of `shape`, fp32 or as stored."""
    return kind.decode(torch.from_numpy(raw).view(-1, kind.block_bytes)).view(shape)


def decode_codes(raw: npt.NDArray[np.uint8], kind: GgmlType, shape: tuple[int, ...]) -> GroupCodes | None:
    """Stored bytes as codes: levels, scales and minima are the file's. None for types that are no such codes.

    Q4_0's d * (q - 8) is d * q + m with m = -8 d, which fp16 holds exactly unless it overflows.
    """
    if kind.name not in ("Q4_0", "Q4_1", "Q8_0") or len(shape) != 2:
        return None
    blocks = torch.from_numpy(raw).view(-1, kind.block_bytes)
    scale_bytes = 4 if kind.name == "Q4_1" else 2
    factors = blocks[:, :scale_bytes].contiguous().view(torch.float16).view(shape[0], -1, scale_bytes // 2)
    scales, levels = factors[..., 0].contiguous(), blocks[:, scale_bytes:]
    if kind.name == "Q8_0":
        codes = levels.contiguous().view(torch.int8).view(shape)
        return GroupCodes(codes, scales, None, INT8_LEVELS)
    codes = torch.cat((levels & 15, levels >> 4), dim=1).view(shape)
    minima = factors[..., 1].contiguous() if kind.name == "Q4_1" else scales * -8
    if not minima.isfinite().all():
        return None
    return GroupCodes(codes, scales, minima, INT4_LEVELS)
