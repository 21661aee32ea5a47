"""Linears over weight codes on the CPU; activations are rounded to int8, too, with a unit for every 32 neighbours.

Sums of 32 products are therefore whole numbers, the same on every processor, and a row's result does not depend on the
rows beside it. A task is a few tiles of outputs for all rows: a tile is unpacked once and stays in the L1 cache.
Source: blocks of 32 with a scale on both sides, ggml's Q8_0 (Gerganov).
"""

from dataclasses import dataclass
from functools import cache

import llvmlite.binding as llvm
import torch
import torch.nn.functional as F
from torch import Tensor

from sgmv_kernels.cpu_ops.weight_packing import CodeTiles, pack_tiles
from sgmv_kernels.cpu_runtime.launch import NUM_ROWS, Words, empty, launch, recording_now, rows_part
from sgmv_kernels.cpu_runtime.openmp import team_size
from sgmv_kernels.formats.adapter_panels import CHUNK, CODE_BLOCK, TILE
from sgmv_kernels.formats.group_quant import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS, GroupQuantizedWeight

MODULE = "linear"
ROUND_ROWS = 4
"""Rows of a task of rounding."""
TASKS_A_THREAD = 4
"""Tasks of a thread: enough that a late one costs little."""
WIDTH, X, CODES, CODE_STRIDE, UNITS, UNIT_STRIDE = range(NUM_ROWS + 1, 9)
TILES, TASK_TILES, DATA, GROUPS, GROUP, CODE_BYTES, Y, OUT, BIAS, SCRATCH, SCRATCH_BYTES, LINES = range(9, 21)
"""Places in the kernels' arguments, after the counters."""
NUM_ARGS = LINES + 1
ENTRIES = {INT8_LEVELS: "int8", INT4_LEVELS: "int4", Q3H_LEVELS: "q3h"}


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Hold rounded activations."""

    # [T, H] int8, or int16 in the order of `cpu_simd.quant_matmul.round_block`.
    codes: Tensor
    # [T, H / 32, 2] fp32: unit, and unit * sum.
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
        return self.tiles.rows(ids).dequantize() if len(ids) else torch.empty((0, self.in_features))


def pack_linear_cpu(codes: GroupQuantizedWeight, bias: Tensor | None, wide_from: int | None) -> CpuLinear:
    """See `ops.Ops.pack_linear`."""
    tiles = pack_tiles(codes)
    if bias is not None:
        bias = F.pad(bias, (0, len(tiles.data) * TILE - len(bias)))
    return CpuLinear(tiles, bias, None if wide_from is None else codes.dequantize().bfloat16(), wide_from)


def entries() -> list[str]:
    """Return the kernels that linears need on this machine."""
    return [*ENTRIES.values(), "round8", *(("int8_words", "round16") if needs_words() else ())]


@cache
def needs_words() -> bool:
    """Return whether int8 codes are multiplied as int16, because the processor has no product of bytes that cannot
    overflow.
    """
    features = llvm.get_host_cpu_features()
    return bool(features.get("avx2")) and not (features.get("avx512vnni") or features.get("avxvnni"))


def round_rows(x: Tensor, words: bool) -> RoundedRows:
    """Round x [T, H] fp32 to whole multiples of a unit for every 32 neighbours."""
    rows, width = x.shape
    codes = empty("codes", (rows, width), torch.int16 if words else torch.int8)
    units = empty("units", (rows, width // CODE_BLOCK, 2))
    own = {WIDTH: width, X: x.data_ptr(), **_codes(codes, units)}
    launch(MODULE, "round16" if words else "round8", rows_part(rows, rows // ROUND_ROWS), own)
    return RoundedRows(codes, units)


def linear_cpu(x: Tensor, packed: CpuLinear) -> Tensor:
    """See `ops.Ops.linear`."""
    weight, bias = packed.tiles, packed.bias
    if packed.wide is not None and packed.wide_from is not None and len(x) >= packed.wide_from and not recording_now():
        y = F.linear(x.bfloat16(), packed.wide).float()
        return y if bias is None else y.add_(bias[: weight.out_features])
    words = weight.levels == INT8_LEVELS and needs_words()
    rounded = round_rows(x, words)
    y = empty("linear", (len(x), weight.out_features))
    threads, tiles = team_size(), len(weight.data)
    task_tiles = max(1, tiles // (threads * TASKS_A_THREAD))
    scratch = empty("scratch", (threads, scratch_bytes(len(x))), torch.uint8)
    own = {
        **_codes(rounded.codes, rounded.units),
        TILES: tiles,
        TASK_TILES: task_tiles,
        DATA: weight.data.data_ptr(),
        GROUPS: weight.data.shape[1],
        GROUP: weight.group,
        CODE_BYTES: weight.code_bytes,
        Y: y.data_ptr(),
        OUT: weight.out_features,
        BIAS: 0 if bias is None else bias.data_ptr(),
        SCRATCH: scratch.data_ptr(),
        SCRATCH_BYTES: scratch.stride(0),
        LINES: 16 if words else 8,
    }
    entry = ENTRIES[weight.levels] + ("_words" if words else "")
    launch(MODULE, entry, rows_part(len(x), -(-tiles // task_tiles)), own)
    return y


def _codes(codes: Tensor, units: Tensor) -> Words:
    return {
        CODES: codes.data_ptr(),
        CODE_STRIDE: codes.stride(0) * codes.itemsize,
        UNITS: units.data_ptr(),
        UNIT_STRIDE: units.stride(0) * units.itemsize,
    }


def scratch_bytes(rows: int) -> int:
    """Return the scratch bytes of a thread: codes of a chunk as int16, their factors, results of a tile that passes the
    last output.
    """
    return TILE * CHUNK * 2 + CHUNK // CODE_BLOCK * 8 * TILE + rows * 4 * TILE
