"""Decode GGML blocks to fp32. The formulas are ggml's.

A block of the types decoded here holds 32 neighbours of a row: an fp16 scale d, in some types a minimum m, then the
levels q. The gguf package decodes K-quants and similar types; it is imported when the first such tensor is read.
"""

import importlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorasrv.errors import UnsupportedModel
from lorasrv.models.loader.gguf_file import BLOCK, GgmlType, ggml_type

__all__ = ["decode", "ggml_type"]


def _nibbles(q: Tensor) -> Tensor:
    """Split bytes [N, 16] into values [N, 32] fp32: low halves are the first 16, high halves the others."""
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
    """Return a decoder of the gguf package, which takes most of a second to import."""

    def decode_blocks(blocks: Tensor) -> Tensor:
        try:
            gguf = importlib.import_module("gguf")
            dequantize, number = importlib.import_module("gguf.quants").dequantize, gguf.GGMLQuantizationType[name]
        except (ImportError, KeyError):
            raise UnsupportedModel(f"GGUF type {name} needs a newer gguf package: pip install -U gguf") from None
        # A damaged scale may be infinite and give NaN, which building the model refuses later.
        with np.errstate(all="ignore"):
            return torch.from_numpy(np.ascontiguousarray(dequantize(blocks.numpy(), number), dtype=np.float32))

    return decode_blocks


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _stored_as(torch.float32),
    "F16": _stored_as(torch.float16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "BF16": _stored_as(torch.bfloat16),
}
"""Blocks [N, block_bytes] uint8 -> their values [N, block_size], fp32 or as stored."""


def decode(raw: npt.NDArray[np.uint8], kind: GgmlType, shape: tuple[int, ...]) -> Tensor:
    """Decode stored bytes to a new tensor of `shape`, fp32 or the stored float dtype."""
    decoder = _DECODERS.get(kind.name) or _by_gguf(kind.name)
    return decoder(torch.from_numpy(raw).view(-1, kind.block_bytes)).view(shape)
