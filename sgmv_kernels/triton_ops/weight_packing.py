"""Codes as the GPU's kernels read them. Shapes: O out, H in, T tiles of a row, G groups of a row.

A *tile* is what a kernel multiplies at once, in two halves: 64 codes for groups of 32, else a group, or 128 codes of a
longer one. Rows are padded to whole tiles.

    int8  [O, H] int8: as they come
    int4  [O, T * tile / 2] uint8: a byte holds a code of the first half of its tile and, above it, one of the second
    q3h   [O, N * tile / 2] uint8, a tile being a group: a 7-bit pair is first + 11 * second, of the two halves as well.
          Eight groups take seven planes: the low bits of plane j are the pairs of group j, its top bits are bit j of
          the pairs of the eighth group. Groups left over at the end of a row have a plane each: N = 7 (G // 8) + G % 8

So a half of a tile is one operand of a product: what is unpacked never has to change its place in registers.

Scales and minima are fp16 fields of int64 *words*, [W, O], so that neighbouring outputs lie side by side and one copy
brings all of them. A word serves one tile of int4 in groups of 32, else two tiles; the lowest field first:

    int8                  of each tile the scale of its first half and that of its second
    int4 in groups of 32  scale and minimum of the first half, scale and minimum of the second
    else                  of each tile its scale and minimum

Where a weight has zeros, they stand in for minima, as fp16.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.group_quant import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS, GroupQuantizedWeight

RUN = 8
"""Groups of q3h that share seven planes."""
LEAST_GROUP = 32
"""Smallest group: what one product of bytes takes at once."""
LEAST_TILE, MOST_TILE = 64, 128
WORD_FIELDS = 4


def check_codes(codes: GroupQuantizedWeight) -> None:
    """Check that the kernels have tiles for groups of this size, and words for these factors.

    Raises:
        KernelArgumentError: they have none.
    """
    if codes.table is not None or codes.scales.dtype != torch.float16 or (codes.signed and codes.zeros is not None):
        raise KernelArgumentError("a GPU's kernels take fp16 scales, int8 codes without zeros, and no tables")
    group = codes.group
    if group % LEAST_GROUP or (not codes.signed and group & (group - 1)):
        kinds = f"a multiple of {LEAST_GROUP}" if codes.signed else f"a power of two from {LEAST_GROUP}"
        raise KernelArgumentError(f"codes have groups of {group}; a GPU's kernels take {kinds}")


def tile_of(levels: int, group: int) -> int:
    """Return the codes of a tile."""
    return group if levels == Q3H_LEVELS else min(max(group & -group, LEAST_TILE), MOST_TILE)


def pack_codes(codes: GroupQuantizedWeight) -> Tensor:
    """Pack codes into the layout of the module docstring."""
    if codes.levels == INT8_LEVELS:
        return codes.codes.contiguous()
    tile = tile_of(codes.levels, codes.group)
    halves = pad(codes.codes, (0, -codes.in_features % tile)).reshape(codes.out_features, -1, 2, tile // 2)
    first, second = halves[:, :, 0], halves[:, :, 1]
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


def word_tiles(levels: int, group: int) -> int:
    """Return the tiles that a word serves."""
    return 1 if levels == INT4_LEVELS and group < LEAST_TILE else 2


def pack_words(codes: GroupQuantizedWeight) -> Tensor:
    """Pack scales and minima into the words of the module docstring."""
    tile = tile_of(codes.levels, codes.group)
    has_halves = codes.signed or word_tiles(codes.levels, codes.group) == 1
    starts = torch.arange(0, codes.in_features, tile // 2 if has_halves else tile, device=codes.scales.device)
    zeros = None if codes.zeros is None else codes.zeros.half()
    fields = [held[:, starts // codes.group] for held in (codes.scales, codes.minima, zeros) if held is not None]
    flat = torch.stack(fields, dim=-1).flatten(1)
    whole = pad(flat, (0, -flat.shape[1] % WORD_FIELDS)).view(torch.int64)
    return whole.T.contiguous()
