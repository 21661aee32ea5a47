"""Codes as the GPU's kernels read them. Shapes: O out, H in, G groups of a row, P = group / 2 bytes of a plane.

    int8  [O, H] int8: as they come
    int4  [O, G * P] uint8: a byte holds a code of the first half of its group and, above it, one of the second half
    q3h   [O, N * P] uint8: a 7-bit pair is first + 11 * second, of the two halves of a group as well. Eight groups
          take seven planes: the low bits of plane j are the pairs of group j, its top bits are bit j of the pairs of
          the eighth group. Groups that are left over at the end of a row have a plane each: N = 7 (G // 8) + G % 8

So a half of a group is one operand of a product: what is unpacked never has to change its place in registers. Scales
and minima are transposed, [G, O], so that neighbouring outputs lie side by side.
"""

import torch
from torch import Tensor

from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.group_quant import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS, GroupQuantizedWeight

RUN = 8
"""Groups of q3h that share seven planes."""
LEAST_GROUP = 32
"""Smallest group: half of it must be the 16 numbers that a tensor core takes at once."""


def check_group(codes: GroupQuantizedWeight) -> None:
    """Check that the kernels have tiles for groups of this size.

    Raises:
        KernelArgumentError: they have none.
    """
    group = codes.group
    if group % LEAST_GROUP or (not codes.signed and group & (group - 1)):
        kinds = f"a multiple of {LEAST_GROUP}" if codes.signed else f"a power of two from {LEAST_GROUP}"
        raise KernelArgumentError(f"codes have groups of {group}; a GPU's kernels take {kinds}")


def pack_codes(codes: GroupQuantizedWeight) -> Tensor:
    """Pack codes into the layout of the module docstring."""
    if codes.levels == INT8_LEVELS:
        return codes.codes.contiguous()
    groups = codes.codes.view(codes.out_features, -1, 2, codes.group // 2)
    first, second = groups[:, :, 0], groups[:, :, 1]
    if codes.levels == INT4_LEVELS:
        return (first | second << 4).flatten(1)
    pairs = first + Q3H_LEVELS * second
    out, count, plane = pairs.shape
    runs = count // RUN
    whole, rest = pairs[:, : runs * RUN].view(out, runs, RUN, plane), pairs[:, runs * RUN :]
    planes = whole[:, :, : RUN - 1].clone()
    for bit in range(RUN - 1):
        planes[:, :, bit] |= (whole[:, :, RUN - 1] >> bit & 1) << 7
    return torch.cat((planes.view(out, -1, plane), rest), dim=1).flatten(1)
