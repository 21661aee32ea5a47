"""Linears over weight codes on the CPU; activations are also rounded to int8, with a unit for every 32 neighbours.

Sums of 32 products are therefore integers, the same on every processor, and a row's result does not depend on other
rows. A task is a few tiles of outputs for all rows: two tiles at a time, which stay in the L1 cache, times up to eight
rows, whose sums stay in registers.
Source: blocks of 32 with a scale on both sides, ggml's Q8_0 (Gerganov).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sgmv_kernels.cpu_arguments.linear import (
    AMX_FROM,
    BIAS,
    CODE_BYTES,
    CODES,
    DATA,
    EARLY,
    GROUP,
    GROUPS,
    LINES,
    MOST_ROWS,
    ORDER,
    OUT,
    PEAKS,
    ROUND_BLOCKS,
    ROW_BYTES,
    SCRATCH,
    SCRATCH_AGAIN,
    SCRATCH_BYTES,
    TABLE,
    TASK_TILES,
    TILES,
    UNIT_BYTES,
    UNITS,
    WIDTH,
    Y_WIDTH,
    X,
    Y,
)
from sgmv_kernels.cpu_ops.pointwise import round_last
from sgmv_kernels.cpu_ops.weight_packing import CodeTiles, pack_tiles
from sgmv_kernels.cpu_ops.weight_rows import rows_cpu
from sgmv_kernels.cpu_runtime.kernel_compiler import compile_missing
from sgmv_kernels.cpu_runtime.kernel_names import needs_signed
from sgmv_kernels.cpu_runtime.launch import (
    Words,
    empty,
    launch,
    recorded_maker,
    recording_now,
    rows_part,
)
from sgmv_kernels.cpu_runtime.team import team_size
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import (
    CHUNK,
    CODE_BLOCK,
    INT4_LEVELS,
    INT8_LEVELS,
    Q3H_LEVELS,
    ROUND_ROWS,
    ROW_GROUP,
    TILE,
)

MODULE = "linear"
TASKS_A_THREAD = 8
"""Tasks per thread: enough that a late thread costs little time."""
ENTRIES = {INT8_LEVELS: "int8", INT4_LEVELS: "int4", Q3H_LEVELS: "q3h"}


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Hold rounded activations."""

    # [T / 16, H / 32, 16, 32] int8.
    codes: Tensor
    # [T / 16, H / 32, 2, 16] fp32: units, and units * sums.
    units: Tensor


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """Hold a quantized linear packed for the CPU; see `backend.PackedLinear`."""

    tiles: CodeTiles
    # Padded to the end of the last tile.
    bias: Tensor | None
    # [O, H] bf16, a dequantized copy for calls of at least `wide_from` rows.
    wide: Tensor | None = None
    wide_from: int | None = None
    # Number of rows from which groups of rows are multiplied in AMX registers, with the same results; None: never.
    amx_from: int | None = None

    @property
    def in_features(self) -> int:
        return self.tiles.in_features

    @property
    def out_features(self) -> int:
        return self.tiles.out_features

    @property
    def nbytes(self) -> int:
        return self.tiles.data.nbytes + sum(part.nbytes for part in (self.bias, self.wide) if part is not None)

    def dequantize(self) -> Tensor:
        return self.tiles.unpack().dequantize()

    def rows(self, ids: Tensor) -> Tensor:
        return rows_cpu(self.tiles, ids)


def pack_linear_cpu(
    codes: GroupQuantizedWeight, bias: Tensor | None, wide_from: int | None, amx_from: int | None = None
) -> CpuLinear:
    """See `ops.Ops.pack_linear`, and `CpuLinear`."""
    tiles = pack_tiles(codes)
    _compile(_entry(tiles), _round_entry(tiles.order))
    if bias is not None:
        bias = F.pad(bias, (0, len(tiles.data) * TILE - len(bias)))
    wide = None if wide_from is None else codes.dequantize().bfloat16()
    return CpuLinear(tiles, bias, wide, wide_from, amx_from)


@cache
def _compile(*entries: str) -> None:
    """Compile missing kernels, which few models need, outside this process."""
    compile_missing([(MODULE, entry) for entry in entries], lambda what, done: None)


def _is_signed(tiles: CodeTiles) -> bool:
    return (tiles.levels == INT8_LEVELS or tiles.table is not None) and needs_signed()


def _entry(tiles: CodeTiles) -> str:
    product = ENTRIES[tiles.levels] if tiles.table is None else "table"
    return product + ("_signed" if _is_signed(tiles) else "") + tiles.factors


def _round_entry(order: Tensor | None) -> str:
    return "round8" if order is None else "round8_ordered"


def round_rows(x: Tensor, order: Tensor | None = None) -> RoundedRows:
    """Round every 32 neighbours of x [T, H] fp32 to multiples of a unit; `order` [H] int32 permutes x first.

    In a recording, the launch that makes x also rounds it, if it was recorded just before and supports this.
    """
    rows, width = x.shape
    groups, blocks = -(-rows // ROW_GROUP), width // CODE_BLOCK
    codes = empty("codes", (groups, blocks, ROW_GROUP, CODE_BLOCK), torch.int8)
    units = empty("units", (groups, blocks, 2, ROW_GROUP))
    rounded = RoundedRows(codes, units)
    target = _codes(rounded)
    if order is None and round_last(x, *(target[place] for place in (CODES, ROW_BYTES, UNITS, UNIT_BYTES))):
        return rounded
    tasks = -(-rows // ROUND_ROWS) * -(-blocks // ROUND_BLOCKS)
    own = {X: x.data_ptr(), ORDER: 0 if order is None else order.data_ptr(), **target}
    launch(MODULE, _round_entry(order), rows_part(rows, tasks), own)
    return rounded


def linear_cpu(x: Tensor, packed: CpuLinear) -> Tensor:
    """See `ops.Ops.linear`."""
    return linear_parts_cpu(x, (packed,))


def linear_parts_cpu(x: Tensor, parts: Sequence[CpuLinear]) -> Tensor:
    """See `ops.Ops.linear`; every part writes its own columns of the result."""
    if all(_takes_copy(part, x) for part in parts):
        return _cat([_by_copy(x, part) for part in parts])
    y = empty("linear", (len(x), sum(part.out_features for part in parts)))
    rounded: RoundedRows | None = None
    before: Tensor | None = None
    first = 0
    for part in parts:
        columns = y if len(parts) == 1 else y[:, first : first + part.out_features]
        first += part.out_features
        if rounded is None or part.tiles.order is not before:
            rounded, before = round_rows(x, part.tiles.order), part.tiles.order
        _multiply(rounded, part, columns)
    return y


def _takes_copy(packed: CpuLinear, x: Tensor) -> bool:
    return (
        packed.wide is not None and packed.wide_from is not None and len(x) >= packed.wide_from and not recording_now()
    )


def _by_copy(x: Tensor, packed: CpuLinear) -> Tensor:
    assert packed.wide is not None
    y = F.linear(x.bfloat16(), packed.wide).float()
    return y if packed.bias is None else y.add_(packed.bias[: packed.out_features])


def _cat(columns: Sequence[Tensor]) -> Tensor:
    return columns[0] if len(columns) == 1 else torch.cat(list(columns), dim=1)


def _multiply(rounded: RoundedRows, packed: CpuLinear, y: Tensor) -> None:
    """Write the product to y, columns of a contiguous [T, all outputs]."""
    weight, bias, rows = packed.tiles, packed.bias, len(y)
    threads, tiles = team_size(), len(weight.data)
    # Even, because two tiles may be multiplied at a time.
    task_tiles = 2 * max(1, tiles // (2 * threads * TASKS_A_THREAD))
    tasks = -(-tiles // task_tiles)
    scratch = empty("scratch", (threads, scratch_bytes(rows)), torch.uint8)
    own = {
        **_codes(rounded),
        TILES: tiles,
        TASK_TILES: task_tiles,
        DATA: weight.data.data_ptr(),
        GROUPS: weight.data.shape[1],
        GROUP: weight.group,
        CODE_BYTES: weight.code_bytes,
        Y: y.data_ptr(),
        Y_WIDTH: y.stride(0),
        OUT: weight.out_features,
        BIAS: 0 if bias is None else bias.data_ptr(),
        SCRATCH: scratch.data_ptr(),
        SCRATCH_AGAIN: scratch.data_ptr(),
        SCRATCH_BYTES: scratch.stride(0),
        LINES: 4 if weight.levels == INT4_LEVELS and not _is_signed(weight) else 8,
        TABLE: 0 if weight.table is None else weight.table.data_ptr(),
        # With few tasks, taking one early would leave none for other threads.
        EARLY: int(tasks >= 3 * threads),
        AMX_FROM: packed.amx_from or 0,
    }
    launch(MODULE, _entry(weight), rows_part(rows, tasks), own, result=y)


def peaks_of(y: Tensor) -> Tensor | None:
    """Make the linear that computes y also find the largest output of each row, if it is the last recorded launch.

    Returns: [tasks, T] int64 with the largest output of each task: its value as fp32 in the first bytes, its index as
        int32 in the last (the first of equals); NaN and `NO_TOKEN` if an output is NaN or infinite. None if y was
        computed by something else.
    """
    own = recorded_maker(y, MODULE)
    if own is None:
        return None
    peaks = empty("peaks", (-(-own[TILES] // own[TASK_TILES]), len(y)), torch.int64)
    own[PEAKS] = peaks.data_ptr()
    return peaks


def _codes(rounded: RoundedRows) -> Words:
    codes, units = rounded.codes, rounded.units
    return {
        WIDTH: codes.shape[1] * codes.shape[3],
        CODES: codes.data_ptr(),
        ROW_BYTES: codes.stride(0) * codes.itemsize // ROW_GROUP,
        UNITS: units.data_ptr(),
        UNIT_BYTES: units.stride(0) * units.itemsize // ROW_GROUP,
    }


def scratch_bytes(rows: int) -> int:
    """Return the scratch bytes of a thread: sums of the rows that are multiplied at a time, initial values of sums,
    sums of all rows in tiles that reach beyond the last output, a chunk of two tiles as bytes with its factors, and the
    sums of the chunk's blocks from AMX registers.
    """
    blocks = CHUNK // CODE_BLOCK
    known = 2 * ((MOST_ROWS + 1 + rows) * 4 * TILE + TILE * CHUNK + blocks * 8 * TILE)
    return known + 2 * blocks * ROW_GROUP * 4 * TILE
