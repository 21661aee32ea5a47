"""Random quantized weights of the kernels' formats."""

from dataclasses import replace

import torch

from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS


def random_codes(levels: int, group: int, out: int, inputs: int, seed: int = 0) -> GroupQuantizedWeight:
    """Return codes in which every level occurs, with groups that differ in scale and minimum."""
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
    """Return codes as in quantized files: with zeros, scales of a dtype, and perhaps inputs in another order."""
    generator = torch.Generator().manual_seed(seed)
    codes = random_codes(levels, group, out, inputs, seed)
    low, high = (-128, 129) if levels == INT8_LEVELS else (0, levels + 1)
    zeros = torch.randint(low, high, codes.scales.shape, generator=generator, dtype=torch.int16)
    # More digits than fp16 has.
    scales = (codes.scales.float() * (1 if dtype == torch.float16 else 1.0001)).to(dtype)
    order = torch.randperm(inputs, generator=generator).int() if ordered else None
    return replace(codes, scales=scales, minima=None, zeros=zeros, order=order)


def random_file_codes(kind: str, out: int, inputs: int, seed: int = 0) -> GroupQuantizedWeight:
    """Return codes of a kind that only files have, one of `FILE_KINDS`."""
    generator = torch.Generator().manual_seed(seed)
    product, _, factors = kind.partition(" ")
    levels = INT8_LEVELS if product == "int8" else Q3H_LEVELS if product == "q3h" else INT4_LEVELS
    codes = random_codes(levels, 64 if levels == Q3H_LEVELS else 32, out, inputs, seed)
    table = torch.randint(-127, 128, (16,), generator=generator, dtype=torch.int8) if product == "table" else None
    shape, minima = codes.scales.shape, codes.scales.float() * -7.7
    if table is not None:
        codes = replace(codes, minima=None, table=table)
    if factors == "fp32":
        return replace(codes, scales=codes.scales.float() * 1.0001, minima=None if table is not None else minima)
    if factors == "":
        return codes
    numbers = torch.randint(-32, 64, (2, *shape), generator=generator, dtype=torch.int8)
    steps = torch.rand(out, shape[1] // 8, 2 if table is None else 1, generator=generator).half() * 0.001
    return replace(codes, scales=numbers[0], minima=numbers[1] if table is None else None, steps=steps)


FILE_KINDS = ("table", "table fp32", "table steps", "int4 fp32", "int4 steps", "int8 fp32", "int8 steps", "q3h fp32")
"""A product, and fp32 factors or steps."""
