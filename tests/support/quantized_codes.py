"""Random quantized weights of the kernels' formats."""

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
