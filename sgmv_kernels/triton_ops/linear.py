"""Base linears over quantized codes on a GPU: weights are unpacked into registers and multiplied by tensor cores.

A program computes (rows, outputs, part of K). The operands are transposed: weights are the first operand, which tensor
cores of sm90 read from registers, so unpacked weights never go through shared memory. One OR turns a code into an
integer, and one multiply-add in the activations' dtype turns that into a weight. A weight is therefore rounded to that
dtype; for int8, and for int4 without a table, its scale and offset are rounded before. Sums are fp32. With `split_k`
above 1, a part's sums are a *plane*, and a second kernel adds the planes in order. For very many rows, the weight is
dequantized to the activations' dtype and multiplied by cuBLAS.

A row's result does not depend on other rows. Results for numbers of rows with different configurations are only close.

Source: codes as the mantissa of a float by one OR, Kim et al. 2022 ("Who says elephants can't run"); split K for few
rows, GemLite and the split-K kernels of Hoque et al. 2024, here with planes instead of atomics; weights as the operand
in registers, Marlin (Frantar et al. 2024) and its kernels for Hopper.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgmv_kernels.backend import PackedLinear
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS
from sgmv_kernels.triton_ops.block_sizes import LinearConfig, dequantize_above, device_name, linear_config
from sgmv_kernels.triton_ops.common import MOST_REGISTERS, cast, dot, finished, kernel, product_dtype
from sgmv_kernels.triton_ops.unpacking import halves_of, number_of, weights_of_int4, weights_of_int8
from sgmv_kernels.triton_ops.weight_packing import (
    MINIMA,
    RUN,
    SCALES,
    STEPS,
    ZEROS,
    check_codes,
    entries_of,
    field_of,
    fields_of,
    least_of,
    pack_codes,
    pack_table,
    pack_words,
    scale_of,
    tile_of,
    word_tiles,
)

BITS = {INT8_LEVELS: 8, INT4_LEVELS: 4, Q3H_LEVELS: 3}
"""Bits that stand for the levels in configurations."""
_INT8 = tl.constexpr(INT8_LEVELS)
_INT4 = tl.constexpr(INT4_LEVELS)
_RUN = tl.constexpr(RUN)
ADD_BLOCK = 1024
UNPACK_ROWS, UNPACK_CODES = 16, 128
"""Size of the piece that a program dequantizes, except for q3h, where it is a run."""
LEAST_STEPS = 2
"""Fewest steps of a part of the sum: with one, there is no loop that prefetches its loads, and q3h spills registers."""
BLAS_BYTES = 256 << 20
"""Most bytes of a weight that are dequantized at a time: the head of a large vocabulary has a gigabyte."""
new_planes = torch.empty
"""Allocator of the planes; tests replace it with one that fills them with NaN."""


@dataclass(frozen=True)
class TritonLinear:
    """Hold a quantized linear packed for a GPU; see `PackedLinear`."""

    # [P, O, B], packed by `triton_ops.weight_packing`, like the words.
    codes: Tensor
    # [W, O] int64: scales and minima of one or two tiles.
    words: Tensor
    # [O] fp32.
    bias: Tensor | None
    levels: int
    group: int
    in_features: int
    out_features: int
    # Content of the words: `MINIMA`, `ZEROS`, `SCALES` or `STEPS`.
    factors: int = MINIMA
    # The table that codes select from, as two int64; None if the codes are the values.
    table: tuple[int, int] | None = None
    # [H] int64: input of each column of the codes, as in `GroupQuantizedWeight`, and column of each input.
    order: Tensor | None = None
    columns: Tensor | None = None

    @property
    def nbytes(self) -> int:
        held = (self.codes, self.words, self.bias, self.order, self.columns)
        return sum(t.nbytes for t in held if t is not None)

    @property
    def tile(self) -> int:
        return tile_of(self.levels, self.group)

    @property
    def tiles(self) -> int:
        return -(-self.in_features // self.tile)

    def dequantize(self) -> Tensor:
        return self.rows(torch.arange(self.out_features, device=self.codes.device))

    def rows(self, ids: Tensor) -> Tensor:
        return self._in_place(_unpack(self, ids, len(ids), torch.float32))

    def _in_place(self, weight: Tensor) -> Tensor:
        return weight if self.columns is None else weight.index_select(1, self.columns)


def pack_linear(codes: GroupQuantizedWeight, bias: Tensor | None) -> PackedLinear:
    """See `ops.Ops.pack_linear`. The result stays on the device of the codes."""
    check_codes(codes)
    kept = None if bias is None else bias.float().contiguous()
    sizes = (codes.levels, codes.group, codes.in_features, codes.out_features)
    order = None if codes.order is None else codes.order.long()
    columns = None if order is None else order.argsort()
    factors = SCALES if codes.table is not None else STEPS if codes.steps is not None else MINIMA
    factors = ZEROS if codes.zeros is not None else factors
    table = None if codes.table is None else pack_table(codes.table)
    return TritonLinear(pack_codes(codes), pack_words(codes), kept, *sizes, factors, table, order, columns)


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """See `ops.Ops.linear`."""
    assert isinstance(packed, TritonLinear)
    if packed.order is not None:
        x = x.index_select(1, packed.order)
    name, bits = device_name(x.device), BITS[packed.levels]
    if len(x) > dequantize_above(name, bits):
        return through_blas(x, packed)
    config = linear_config(name, bits, packed.group, len(x), packed.out_features)
    if x.dtype == torch.float32:
        # These tiles have twice the bytes.
        config = replace(config, block_m=min(config.block_m, 32), stages=2)
    return through_tiles(x, packed, config)


def through_blas(x: Tensor, packed: TritonLinear) -> Tensor:
    """Dequantize to x's dtype and multiply with torch."""
    y = torch.empty((len(x), packed.out_features), dtype=x.dtype, device=x.device)
    piece = max(UNPACK_ROWS, BLAS_BYTES // (packed.in_features * x.dtype.itemsize))
    for start in range(0, packed.out_features, piece):
        count = min(piece, packed.out_features - start)
        weight = _unpack(packed, None, count, x.dtype, start)
        if count == packed.out_features:
            torch.mm(x, weight.T, out=y)
        else:
            y[:, start : start + count] = torch.mm(x, weight.T)
    return y if packed.bias is None else y.add_(packed.bias)


def through_tiles(x: Tensor, packed: TritonLinear, config: LinearConfig) -> Tensor:
    """Multiply by codes that are unpacked in registers."""
    rows, out = len(x), packed.out_features
    y = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    if not rows:
        return y
    tiles = packed.tiles
    step = RUN if packed.levels == Q3H_LEVELS else 1
    steps = -(-tiles // step)
    per_part = min(steps, max(LEAST_STEPS, -(-steps // config.split_k)))
    planes = -(-steps // per_part)
    sums = y if planes == 1 else new_planes((planes, rows, out), dtype=torch.float32, device=x.device)
    compute, precision = product_dtype(x.dtype, x.dtype)
    bias = packed.bias
    grid = (triton.cdiv(rows, config.block_m), triton.cdiv(out, config.block_n), planes)
    (_tiles_kernel if step == 1 else _runs_kernel)[grid](
        x,
        packed.codes,
        packed.words,
        x if bias is None else bias,
        sums,
        rows,
        K=packed.in_features,
        OUT=out,
        BYTES=packed.codes.shape[2],
        LEVELS=packed.levels,
        FACTORS=packed.factors,
        TABLE=packed.table is not None,
        LOW=0 if packed.table is None else packed.table[0],
        HIGH=0 if packed.table is None else packed.table[1],
        TILE=packed.tile,
        TILES=tiles,
        WORD_TILES=word_tiles(packed.levels, packed.group),
        STEP=step,
        STEPS=per_part,
        EVEN=planes * per_part * step * packed.tile == packed.in_features,
        PLANES=planes,
        BIAS=bias is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        COMPUTE=compute,
        PRECISION=precision,
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=MOST_REGISTERS,
    )
    if planes > 1:
        _add_planes_kernel[(rows, triton.cdiv(out, ADD_BLOCK))](
            sums,
            sums if bias is None else bias,
            y,
            rows,
            OUT=out,
            PLANES=planes,
            BIAS=bias is not None,
            BLOCK=ADD_BLOCK,
            num_warps=4,
        )
    return y


def _unpack(packed: TritonLinear, ids: Tensor | None, count: int, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Return [count, H]: the rows `ids`, or those from `start` on."""
    out = torch.empty((count, packed.in_features), dtype=dtype, device=packed.codes.device)
    step = RUN if packed.levels == Q3H_LEVELS else max(1, UNPACK_CODES // packed.tile)
    if count:
        _unpack_kernel[(triton.cdiv(count, UNPACK_ROWS), triton.cdiv(packed.tiles, step))](
            packed.codes if ids is None else ids,
            packed.codes,
            packed.words,
            out,
            start,
            count,
            IDS=ids is not None,
            K=packed.in_features,
            OUT=packed.out_features,
            BYTES=packed.codes.shape[2],
            LEVELS=packed.levels,
            FACTORS=packed.factors,
            TABLE=packed.table is not None,
            LOW=0 if packed.table is None else packed.table[0],
            HIGH=0 if packed.table is None else packed.table[1],
            TILE=packed.tile,
            TILES=packed.tiles,
            WORD_TILES=word_tiles(packed.levels, packed.group),
            STEP=step,
            ROWS=UNPACK_ROWS,
            num_warps=4,
        )
    return out


@kernel("num_rows")
def _tiles_kernel(  # type: ignore[no-untyped-def]
    x,
    codes,
    words,
    bias,
    y,
    num_rows,
    K: tl.constexpr,
    OUT: tl.constexpr,
    BYTES: tl.constexpr,
    LEVELS: tl.constexpr,
    FACTORS: tl.constexpr,
    TABLE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    WORD_TILES: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    PLANES: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute y[rows, outputs], or its plane, of int8 or int4 over STEPS tiles."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, out_ok = m < num_rows, n < OUT
    half: tl.constexpr = TILE // 2
    # The place of the second half's factors in a word.
    at: tl.constexpr = 2 - WORD_TILES
    k = tl.arange(0, half)
    x_columns = x + m.to(tl.int64)[None, :] * K + k[:, None]
    code_rows = codes + n.to(tl.int64)[:, None] * BYTES + k[None, :]
    total = tl.full((BLOCK_N, BLOCK_M), 0.0, dtype=tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        tile = tl.program_id(2) * STEPS + step
        if EVEN:
            there, first_x, second_x = out_ok, row_ok[None, :], row_ok[None, :]
        else:
            there = out_ok & (tile < TILES)
            first_x = row_ok[None, :] & (tile * TILE + k < K)[:, None]
            second_x = row_ok[None, :] & (tile * TILE + half + k < K)[:, None]
        word = tl.load(words + tile // WORD_TILES * OUT + n, mask=there, other=0)
        word = fields_of(word, tile, WORD_TILES)
        x_first = tl.load(x_columns + tile * TILE, mask=first_x, other=0.0).to(COMPUTE)
        x_second = tl.load(x_columns + tile * TILE + half, mask=second_x, other=0.0).to(COMPUTE)
        of_tile = code_rows + tile.to(tl.int64) * (OUT * BYTES)
        stored = tl.load(of_tile, mask=there[:, None], other=0)
        if LEVELS == _INT8:
            more = tl.load(of_tile + half, mask=there[:, None], other=0)
            first = weights_of_int8(stored, field_of(word, 0).to(COMPUTE)[:, None], COMPUTE)
            second = weights_of_int8(more, field_of(word, 1).to(COMPUTE)[:, None], COMPUTE)
        else:
            scale, second_scale = scale_of(word, 0, FACTORS), scale_of(word, at, FACTORS)
            if TABLE:
                first, second = halves_of(stored.to(tl.int32), LEVELS)
                first = entries_of(first, LOW, HIGH).to(tl.float32) * scale[:, None]
                second = entries_of(second, LOW, HIGH).to(tl.float32) * second_scale[:, None]
                first, second = first.to(COMPUTE), second.to(COMPUTE)
            else:
                offset = least_of(word, 0, FACTORS) + 8.0 * scale
                second_offset = least_of(word, at, FACTORS) + 8.0 * second_scale
                first, second = weights_of_int4(
                    stored,
                    scale.to(COMPUTE)[:, None],
                    offset.to(COMPUTE)[:, None],
                    second_scale.to(COMPUTE)[:, None],
                    second_offset.to(COMPUTE)[:, None],
                    COMPUTE,
                )
        total = dot(first, x_first, total, PRECISION)
        total = finished(dot(second, x_second, total, PRECISION))
    if BIAS and PLANES == 1:
        total += tl.load(bias + n, mask=out_ok, other=0.0)[:, None]
    place = (tl.program_id(2) * num_rows + m).to(tl.int64)
    target = y + place[None, :] * OUT + n[:, None]
    tl.store(target, cast(total, y.dtype.element_ty), mask=row_ok[None, :] & out_ok[:, None])


@kernel("num_rows")
def _runs_kernel(  # type: ignore[no-untyped-def]
    x,
    codes,
    words,
    bias,
    y,
    num_rows,
    K: tl.constexpr,
    OUT: tl.constexpr,
    BYTES: tl.constexpr,
    LEVELS: tl.constexpr,
    FACTORS: tl.constexpr,
    TABLE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    WORD_TILES: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    PLANES: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute y[rows, outputs], or its plane, of q3h over STEPS steps of a run of STEP groups."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, out_ok = m < num_rows, n < OUT
    half: tl.constexpr = TILE // 2
    k = tl.arange(0, half)
    x_columns = x + m.to(tl.int64)[None, :] * K + k[:, None]
    code_rows = codes + n.to(tl.int64)[:, None] * BYTES + k[None, :]
    total = tl.full((BLOCK_N, BLOCK_M), 0.0, dtype=tl.float32)
    for step in tl.range(STEPS, num_stages=STAGES):
        run = tl.program_id(2) * STEPS + step
        eighth = tl.full((BLOCK_N, half), 0, dtype=tl.int32)
        for i in tl.static_range(STEP):
            tile = run * STEP + i
            there = out_ok & (EVEN or tile < TILES)
            x_ok = row_ok[None, :] & (EVEN or tile < TILES)
            word = fields_of(tl.load(words + tile // WORD_TILES * OUT + n, mask=there, other=0), tile, WORD_TILES)
            x_first = tl.load(x_columns + tile * TILE, mask=x_ok, other=0.0).to(COMPUTE)
            x_second = tl.load(x_columns + tile * TILE + half, mask=x_ok, other=0.0).to(COMPUTE)
            if i < _RUN - 1:
                of_plane = code_rows + (run * (_RUN - 1) + i).to(tl.int64) * (OUT * BYTES)
                plane = tl.load(of_plane, mask=there[:, None], other=0)
                stored = plane.to(tl.int32) & 127
                eighth = eighth | ((plane.to(tl.int32) >> 7) << i)
            else:
                stored = eighth
            first, second = halves_of(stored, LEVELS)
            scale = field_of(word, 0)
            offset = (least_of(word, 0, FACTORS) - 128.0 * scale)[:, None]
            first, second = number_of(first) * scale[:, None] + offset, number_of(second) * scale[:, None] + offset
            total = dot(first.to(COMPUTE), x_first, total, PRECISION)
            total = finished(dot(second.to(COMPUTE), x_second, total, PRECISION))
    if BIAS and PLANES == 1:
        total += tl.load(bias + n, mask=out_ok, other=0.0)[:, None]
    place = (tl.program_id(2) * num_rows + m).to(tl.int64)
    target = y + place[None, :] * OUT + n[:, None]
    tl.store(target, cast(total, y.dtype.element_ty), mask=row_ok[None, :] & out_ok[:, None])


@kernel("num_rows")
def _add_planes_kernel(  # type: ignore[no-untyped-def]
    sums, bias, y, num_rows, OUT: tl.constexpr, PLANES: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the planes of columns of one row in order, then the bias."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = n < OUT
    total = tl.full((BLOCK,), 0.0, dtype=tl.float32)
    for plane in tl.static_range(PLANES):
        total += tl.load(sums + (plane * num_rows + row).to(tl.int64) * OUT + n, mask=ok, other=0.0)
    if BIAS:
        total += tl.load(bias + n, mask=ok, other=0.0)
    tl.store(y + row.to(tl.int64) * OUT + n, cast(total, y.dtype.element_ty), mask=ok)


@kernel("start", "count")
def _unpack_kernel(  # type: ignore[no-untyped-def]
    ids,
    codes,
    words,
    out,
    start,
    count,
    IDS: tl.constexpr,
    K: tl.constexpr,
    OUT: tl.constexpr,
    BYTES: tl.constexpr,
    LEVELS: tl.constexpr,
    FACTORS: tl.constexpr,
    TABLE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    WORD_TILES: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Unpack STEP tiles of ROWS rows."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok = r < count
    if IDS:  # noqa: SIM108 - decided when compiling
        row = tl.load(ids + r, mask=row_ok, other=0).to(tl.int64)
    else:
        row = (start + r).to(tl.int64)
    half: tl.constexpr = TILE // 2
    # The place of the second half's factors in a word.
    at: tl.constexpr = 2 - WORD_TILES
    k = tl.arange(0, half)
    code_rows = codes + row[:, None] * BYTES + k[None, :]
    plane_bytes: tl.constexpr = OUT * BYTES
    out_rows = out + r.to(tl.int64)[:, None] * K + k[None, :]
    run = tl.program_id(1)
    eighth = tl.full((ROWS, half), 0, dtype=tl.int32)
    for i in tl.static_range(STEP):
        tile = run * STEP + i
        there = row_ok & (tile < TILES)
        first_ok = there[:, None] & (tile * TILE + k < K)[None, :]
        second_ok = there[:, None] & (tile * TILE + half + k < K)[None, :]
        word = tl.load(words + (tile // WORD_TILES).to(tl.int64) * OUT + row, mask=there, other=0)[:, None]
        word = fields_of(word, tile, WORD_TILES)
        scale, second_scale = field_of(word, 0), field_of(word, 1)
        least, second_least = tl.zeros_like(scale), tl.zeros_like(scale)
        if LEVELS == _INT8:
            of_tile = code_rows + tile.to(tl.int64) * plane_bytes
            first = tl.load(of_tile, mask=first_ok, other=0)
            second = tl.load(of_tile + half, mask=second_ok, other=0)
        else:
            scale, second_scale = scale_of(word, 0, FACTORS), scale_of(word, at, FACTORS)
            if not TABLE:
                least, second_least = least_of(word, 0, FACTORS), least_of(word, at, FACTORS)
            if LEVELS == _INT4:
                of_tile = code_rows + tile.to(tl.int64) * plane_bytes
                stored = tl.load(of_tile, mask=there[:, None], other=0).to(tl.int32)
            elif i < _RUN - 1:
                of_plane = code_rows + (run * (_RUN - 1) + i).to(tl.int64) * plane_bytes
                plane = tl.load(of_plane, mask=there[:, None], other=0)
                stored = plane.to(tl.int32) & 127
                eighth = eighth | ((plane.to(tl.int32) >> 7) << i)
            else:
                stored = eighth
            first, second = halves_of(stored, LEVELS)
            if TABLE:
                first, second = entries_of(first, LOW, HIGH), entries_of(second, LOW, HIGH)
        target = out_rows + tile * TILE
        weight = first.to(tl.float32) * scale + least
        tl.store(target, cast(weight, out.dtype.element_ty), mask=first_ok)
        weight = second.to(tl.float32) * second_scale + second_least
        tl.store(target + half, cast(weight, out.dtype.element_ty), mask=second_ok)
