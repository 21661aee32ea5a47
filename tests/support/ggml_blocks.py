"""Blocks of ggml types that the gguf package can only read, built from numbers according to their layouts."""

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Number = float | np.floating[Any]
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def kind_of(name: str, kinds: Mapping[str, str]) -> str:
    """Return the type of a tensor: that of the first key that is part of its name."""
    return next(kind for part, kind in kinds.items() if part in name)


def quantize(values: Floats, kind: str) -> Bytes:
    """Convert rows of numbers [N, H] to bytes [N, ...] of a type."""
    makers = {"Q4_K": lambda v: _of_256(v, 4), "Q5_K": lambda v: _of_256(v, 5), "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs}
    makers["Q6_K"] = _q6_k
    if kind not in makers:
        stored: Bytes = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        return stored
    blocks = values.reshape(-1, 32 if kind == "IQ4_NL" else 256).astype(np.float32)
    return np.stack([makers[kind](block) for block in blocks]).reshape(len(values), -1)


def _half(*numbers: Number) -> Bytes:
    return np.array(numbers, np.float16).view(np.uint8)


def _of_256(values: Floats, bits: int) -> Bytes:
    parts = values.reshape(8, 32)
    low, high = np.minimum(parts.min(1), 0), parts.max(1)
    wide, deep = (high - low) / ((1 << bits) - 1), -low
    d, e = (np.float32(np.float16(max(part.max(), 1e-4) / 63)) for part in (wide, deep))
    scales, minima = (np.rint(part / by).clip(0, 63).astype(np.uint8) for part, by in ((wide, d), (deep, e)))
    steps = np.maximum(d * scales, 1e-9)[:, None]
    codes = np.rint((parts + (e * minima)[:, None]) / steps).clip(0, (1 << bits) - 1).astype(np.uint8)
    packed = np.zeros(12, np.uint8)
    for j in range(4):
        packed[j] = scales[j] | scales[j + 4] >> 4 << 6
        packed[j + 4] = minima[j] | minima[j + 4] >> 4 << 6
        packed[j + 8] = scales[j + 4] & 15 | (minima[j + 4] & 15) << 4
    high_bits = np.zeros(32 if bits == 5 else 0, np.uint8)
    for j in range(8 if bits == 5 else 0):
        high_bits |= (codes[j] >> 4) << j
    low_bits = [codes[2 * j] & 15 | (codes[2 * j + 1] & 15) << 4 for j in range(4)]
    return np.concatenate([_half(d, e), packed, high_bits, *low_bits])


def _nearest(values: Floats, unit: Number) -> Bytes:
    """Return codes of 32 numbers, two in a byte: the first sixteen in the lower halves."""
    codes = np.abs(values[:, None] / unit - IQ4_VALUES).argmin(1).astype(np.uint8)
    joined: Bytes = codes[:16] | codes[16:] << 4
    return joined


def _iq4_nl(values: Floats) -> Bytes:
    unit = np.float32(np.float16(max(np.abs(values).max(), 1e-3) / 127))
    return np.concatenate([_half(unit), _nearest(values, unit)])


def _iq4_xs(values: Floats) -> Bytes:
    parts = values.reshape(8, 32)
    units = np.maximum(np.abs(parts).max(1), 1e-3) / 127
    # The largest scale is 31; every second sub-block has a negative scale, as files may have.
    d = np.float32(np.float16(units.max() / 31))
    scales = np.rint(units / d).clip(1, 31).astype(int) * np.where(np.arange(8) % 2, -1, 1)
    stored, high, low = scales + 32, 0, np.zeros(4, np.uint8)
    for j, scale in enumerate(stored):
        high |= int(scale) >> 4 << 2 * j
        low[j // 2] |= (int(scale) & 15) << 4 * (j % 2)
    codes = [_nearest(part, d * scale) for part, scale in zip(parts, scales, strict=True)]
    return np.concatenate([_half(d), np.array([high], np.uint16).view(np.uint8), low, *codes])


def _q6_k(values: Floats) -> Bytes:
    parts = values.reshape(16, 16)
    units = np.maximum(np.abs(parts).max(1), 1e-3) / 31
    d = np.float32(np.float16(units.max() / 127))
    scales = np.rint(units / d).clip(1, 127)
    codes = (np.rint(parts / (d * scales)[:, None]).clip(-32, 31) + 32).astype(np.uint8).reshape(2, 4, 32)
    low = np.stack((codes[:, 0] & 15 | (codes[:, 2] & 15) << 4, codes[:, 1] & 15 | (codes[:, 3] & 15) << 4), axis=1)
    high = sum((codes[:, i] >> 4) << 2 * i for i in range(4))
    return np.concatenate([low.reshape(-1), high.reshape(-1), scales.astype(np.int8).view(np.uint8), _half(d)])
