"""Layout of codes for the GPU kernels. Shapes: O out, H in, T tiles of a row, G groups of a row.

A *tile* is the codes that a kernel multiplies at once, in two halves: 64 codes for groups of 32, else a group, or 128
codes of a longer group. Rows are padded to whole tiles. Tiles of neighbouring outputs are adjacent, so that a program
reads one contiguous piece of memory at a time:

    int8  [T, O, tile] int8: in order
    int4  [T, O, tile / 2] uint8: a byte holds a code of the first half of its tile in its lower bits, and one of the
          second half in its upper bits
    q3h   [N, O, tile / 2] uint8, where a tile is a group: a 7-bit pair is first + 11 * second, also of the two halves.
          Eight groups take seven planes: the low bits of plane j are the pairs of group j, its top bits are bit j of
          the pairs of the eighth group. Groups left over at the end of a row have a plane each: N = 7 (G // 8) + G % 8

Half a tile is therefore one operand of a product, and unpacked codes never have to move between registers.

Scales and minima are fp16 fields of int64 *words*, [W, O], so that those of neighbouring outputs are adjacent and one
copy loads all of them. A word has the fields of one tile for int4 in groups of 32, else of two tiles; the lowest field
first:

    int8                  of each tile the scale of its first half and that of its second
    int4 in groups of 32  scale and minimum of the first half, scale and minimum of the second
    else                  of each tile its scale and minimum

If a weight has zeros, they take the place of minima, as fp16. Codes with a table have an fp32 scale in place of both,
multiplied by its step. Codes of int4 with steps have four bytes in the low half of a word (scale and minimum of the
first half of the tile and of the second), then the steps of scales and of minima.
"""

import torch
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS, STEP_GROUPS
from sgmv_kernels.triton_ops.common import kernel

RUN = 8
"""Groups of q3h that share seven planes."""
MINIMA, ZEROS, SCALES, STEPS = range(4)
"""Content of words: fp16 scales and minima, or zeros; fp32 scales; bytes and their steps."""
_ZEROS, _SCALES, _STEPS = tl.constexpr(ZEROS), tl.constexpr(SCALES), tl.constexpr(STEPS)
LEAST_GROUP = 32
"""Smallest group: the size of one byte product."""
LEAST_TILE, MOST_TILE = 64, 128
WORD_FIELDS = 4


def check_codes(codes: GroupQuantizedWeight) -> None:
    """Check that the kernels have tiles for groups of this size, and words for these factors.

    Raises:
        KernelArgumentError: they do not have them.
    """
    group, has_offsets = codes.group, codes.minima is not None or codes.zeros is not None
    has_steps = codes.steps is not None and codes.levels == INT4_LEVELS and group == LEAST_GROUP
    is_half = codes.scales.dtype == torch.float16 and not (codes.signed and has_offsets)
    if codes.table is None and not has_steps and not is_half:
        raise KernelArgumentError(
            f"a GPU's kernels take fp16 factors, int8 codes without minima and zeros, steps of int4 in groups of "
            f"{LEAST_GROUP}, and tables"
        )
    if group % LEAST_GROUP or (not codes.signed and group & (group - 1)):
        kinds = f"a multiple of {LEAST_GROUP}" if codes.signed else f"a power of two from {LEAST_GROUP}"
        raise KernelArgumentError(f"codes have groups of {group}; a GPU's kernels take {kinds}")


def tile_of(levels: int, group: int) -> int:
    """Return the number of codes of a tile."""
    return group if levels == Q3H_LEVELS else min(max(group & -group, LEAST_TILE), MOST_TILE)


def pack_codes(codes: GroupQuantizedWeight) -> Tensor:
    """Pack codes into the layout of the module docstring."""
    tile = tile_of(codes.levels, codes.group)
    padded = pad(codes.codes, (0, -codes.in_features % tile))
    if codes.levels == INT8_LEVELS:
        return padded.reshape(codes.out_features, -1, tile).transpose(0, 1).contiguous()
    halves = padded.reshape(codes.out_features, -1, 2, tile // 2)
    first, second = halves[:, :, 0], halves[:, :, 1]
    if codes.levels == INT4_LEVELS:
        return (first | second << 4).transpose(0, 1).contiguous()
    pairs = first + Q3H_LEVELS * second
    out, count, plane = pairs.shape
    runs = count // RUN
    whole, rest = pairs[:, : runs * RUN].view(out, runs, RUN, plane), pairs[:, runs * RUN :]
    planes = whole[:, :, : RUN - 1].clone()
    for bit in range(RUN - 1):
        planes[:, :, bit] |= (whole[:, :, RUN - 1] >> bit & 1) << 7
    return torch.cat((planes.view(out, -1, plane), rest), dim=1).transpose(0, 1).contiguous()


def word_tiles(levels: int, group: int) -> int:
    """Return the number of tiles whose factors are in one word."""
    return 1 if levels == INT4_LEVELS and group < LEAST_TILE else 2


def pack_words(codes: GroupQuantizedWeight) -> Tensor:
    """Pack scales and minima into the words of the module docstring."""
    tile = tile_of(codes.levels, codes.group)
    if codes.table is None and codes.steps is not None:
        return _words_of_steps(codes)
    has_halves = codes.signed or word_tiles(codes.levels, codes.group) == 1
    starts = torch.arange(0, codes.in_features, tile // 2 if has_halves else tile, device=codes.scales.device)
    groups = starts // codes.group
    if codes.table is not None:
        flat = codes.factors()[0].float()[:, groups].view(torch.int16)
    else:
        zeros = None if codes.zeros is None else codes.zeros.half()
        fields = [held[:, groups] for held in (codes.scales, codes.minima, zeros) if held is not None]
        flat = torch.stack(fields, dim=-1).flatten(1).view(torch.int16)
    whole = pad(flat, (0, -flat.shape[1] % WORD_FIELDS)).view(torch.int64)
    return whole.T.contiguous()


def _words_of_steps(codes: GroupQuantizedWeight) -> Tensor:
    assert codes.minima is not None
    assert codes.steps is not None
    bytes_of_tile = torch.stack((codes.scales, codes.minima), dim=-1).view(codes.out_features, -1, WORD_FIELDS)
    steps = codes.steps.repeat_interleave(STEP_GROUPS // 2, dim=1)
    words = torch.cat((bytes_of_tile.view(torch.int16), steps.view(torch.int16)), dim=-1)
    return words.view(torch.int64)[..., 0].T.contiguous()


def pack_table(table: Tensor) -> tuple[int, int]:
    """Return the 16 bytes of a table as two int64, with the first entries in the lowest bytes."""
    low, high = table.cpu().view(torch.int64).tolist()
    return low, high


@kernel()
def fields_of(word, tile, WORD_TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Shift the fields of tiles to the low end of their words."""
    return word if WORD_TILES == 1 else word >> (tile % WORD_TILES * (64 // WORD_TILES))


@kernel()
def field_of(word, PLACE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a field of words, fp32."""
    return ((word >> (16 * PLACE)) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@kernel()
def byte_of(word, PLACE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a signed byte of words, fp32."""
    return ((word >> (8 * PLACE)) & 0xFF).to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32)


@kernel()
def scale_of(word, HALF: tl.constexpr, FACTORS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scales in words, from one of the two fields that a word has for them."""
    if FACTORS == _SCALES:
        scale = ((word >> (32 * HALF)) & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    elif FACTORS == _STEPS:
        scale = byte_of(word, 2 * HALF) * field_of(word, 2)
    else:
        scale = field_of(word, 2 * HALF)
    return scale


@kernel()
def least_of(word, HALF: tl.constexpr, FACTORS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the minima in words, which follow these scales."""
    if FACTORS == _ZEROS:
        least = -field_of(word, 2 * HALF + 1) * field_of(word, 2 * HALF)
    elif FACTORS == _STEPS:
        least = byte_of(word, 2 * HALF + 1) * field_of(word, 3)
    else:
        least = field_of(word, 2 * HALF + 1)
    return least


@kernel()
def entries_of(code, LOW: tl.constexpr, HIGH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the entries of a table that int32 codes select, int8."""
    half = tl.where(code < 8, tl.full(code.shape, LOW, tl.int64), tl.full(code.shape, HIGH, tl.int64))
    return ((half >> ((code & 7) * 8)) & 0xFF).to(tl.uint8).to(tl.int8, bitcast=True)
