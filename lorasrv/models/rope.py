"""Rotary tables: cosine and sine of every position, fp32, computed as Hugging Face does."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lorasrv.models.spec import RopeSpec


def rope_tables(rope: RopeSpec, head_dim: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [length, head_dim / 2] fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = _SCALINGS[rope.kind](torch.reciprocal(rope.theta**exponents), rope)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos().to(device), angles.sin().to(device)


def _llama3(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    long, short = (rope.original_max_position / f for f in (rope.low_freq_factor, rope.high_freq_factor))
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > long, frequencies / rope.factor, frequencies)
    return torch.where((wavelengths <= long) & (wavelengths >= short), blended, scaled)


_SCALINGS: dict[str, Callable[[Tensor, RopeSpec], Tensor]] = {
    "default": lambda frequencies, rope: frequencies,
    "linear": lambda frequencies, rope: frequencies / rope.factor,
    "llama3": _llama3,
    "factors": lambda frequencies, rope: frequencies / torch.tensor(rope.factors),
}
