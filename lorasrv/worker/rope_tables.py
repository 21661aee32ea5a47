"""Rotary tables: cosine and sine of every position, fp32, computed as Hugging Face computes them, for every scaling."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lorasrv.models.spec import RopeSpec


def rope_tables(rope: RopeSpec | None, head_dim: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each [length, N / 2] fp32.

    N is the number of rotated dimensions of a head: `rope.dims`, or `head_dim` if that is 0; none without a `rope`.
    """
    if rope is None:
        return torch.empty((length, 0), device=device), torch.empty((length, 0), device=device)
    dims = rope.dims or head_dim
    exponents = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
    frequencies = _SCALINGS[rope.kind](torch.reciprocal(rope.theta**exponents), rope)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    cos, sin = (table.mul_(rope.attention_factor).to(device) for table in (angles.cos(), angles.sin()))
    return cos, sin


def _llama3(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Divide frequencies of long wavelengths by the factor, keep short ones, and blend those between (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    long, short = (rope.original_max_position / f for f in (rope.low_freq_factor, rope.high_freq_factor))
    blend = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    scaled = torch.where(wavelengths > long, frequencies / rope.factor, frequencies)
    return torch.where((wavelengths <= long) & (wavelengths >= short), blended, scaled)


def _yarn(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Divide frequencies that rotate seldom within the original context by the factor, and keep those that rotate
    often.

    A ramp blends those between. Source: YaRN (Peng et al. 2023).
    """
    dims = 2 * len(frequencies)

    def dim_of(turns: float) -> float:
        return dims * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = (torch.arange(len(frequencies), dtype=torch.float32) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return frequencies / rope.factor * (1 - kept) + frequencies * kept


_SCALINGS: dict[str, Callable[[Tensor, RopeSpec], Tensor]] = {
    "default": lambda frequencies, rope: frequencies,
    "linear": lambda frequencies, rope: frequencies / rope.factor,
    "llama3": _llama3,
    "yarn": _yarn,
    "factors": lambda frequencies, rope: frequencies / torch.tensor(rope.factors),
}
