"""Multiplication of base linears in e4m3 on GPUs that support it.

Weights have a static scale per row; activations get a new scale per row in each call. Shapes: T rows, H inputs, O
outputs. Both widths must be multiples of 16.
Source: dynamic scales by token with static ones by channel, ZeroQuant (Yao et al. 2022); e4m3, Micikevicius et al.
(2022).
"""

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
LEAST_CAPABILITY = (8, 9)
WIDTH_STEP = 16
_TINY = 1e-30
"""Largest magnitude below which a row counts as zero, so that 0 / 0 cannot occur."""


def multiplies_fp8(device: torch.device) -> bool:
    """Return whether the device has e4m3 products: CUDA, from Ada (sm89) and Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [N, H] floats to values [N, H] e4m3 and scales [N, 1] fp32 = max |row| / 448. NaN and inf give NaN."""
    wide = x.float()
    scales = wide.abs().amax(dim=1, keepdim=True).clamp_min(_TINY) / E4M3_MAX
    return (wide / scales).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scales


def fp8_linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply in e4m3.

    Semantics: y = (round(x / u) W8^T) * u * scales^T + bias, u = max |x[t]| / 448; sums are fp32

    Args:
        x: [T, H] floats.
        values: [O, H] e4m3.
        scales: [O, 1] fp32.
        bias: [O], or None for 0.
    Returns: [T, O] in x's dtype, rounded to bf16.
    """
    rounded, unit = quantize_fp8(x)
    y = torch._scaled_mm(rounded, values.t(), scale_a=unit, scale_b=scales.t(), out_dtype=torch.bfloat16)
    y = y.to(x.dtype)
    return y if bias is None else y.add_(bias)
