"""Random quantized weights of the kernels' formats."""

from dataclasses import replace

import torch

from sgmv_kernels.formats.group_quant import INT8_LEVELS, GroupQuantizedWeight


def random_codes(levels: int, group: int, out: int, inputs: int, seed: int = 0) -> GroupQuantizedWeight:
    """Codes in which every level occurs, and groups that differ in scale and minimum."""
    generator = torch.Generator().manual_seed(seed)
    scales = (torch.rand(out, inputs // group, generator=generator) * 0.01 + 0.001).half()
    if levels == INT8_LEVELS:
        codes = torch.randint(-128, 128, (out, inputs), generator=generator, dtype=torch.int8)
        return GroupQuantizedWeight(codes, scales, None, levels)
    codes = torch.randint(0, levels, (out, inputs), generator=generator, dtype=torch.uint8)
    minima = -(torch.rand(out, inputs // group, generator=generator) * 0.05).half()
    return GroupQuantizedWeight(codes, scales, minima, levels)


def random_packed(
    levels: int, group: int, out: int, inputs: int, *, dtype: torch.dtype, ordered: bool = False, seed: int = 0
) -> GroupQuantizedWeight:
    """Codes as quantized files have them: with zeros, scales of a dtype, and perhaps their inputs in another order."""
    generator = torch.Generator().manual_seed(seed)
    codes = random_codes(levels, group, out, inputs, seed)
    low, high = (-128, 129) if levels == INT8_LEVELS else (0, levels + 1)
    zeros = torch.randint(low, high, codes.scales.shape, generator=generator, dtype=torch.int16)
    # More digits than fp16 has.
    scales = (codes.scales.float() * (1 if dtype == torch.float16 else 1.0001)).to(dtype)
    order = torch.randperm(inputs, generator=generator).int() if ordered else None
    return replace(codes, scales=scales, minima=None, zeros=zeros, order=order)
