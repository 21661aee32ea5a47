"""Base linears over quantized codes on a GPU: codes are unpacked in registers, sums are fp32.

Few rows: a program owns (rows, outputs, part of K). Codes go into the tensor core as whole numbers, which bf16 holds
exactly; scale and minimum are applied to the sum of a group, in fp32. So weights are never rounded. With `split_k` over
1 a part's sums are a *plane*, and a second kernel adds the planes in order. Many rows: the weight is dequantized to the
activations' dtype (the only place where it is rounded) and multiplied by cuBLAS.

A row's result does not depend on the rows beside it; between numbers of rows with another configuration only closeness
is claimed. Speed on a GPU is NOT MEASURED yet.

Source: codes as the mantissa of a float by one OR, Kim et al. 2022 ("Who says elephants can't run"); split K for few
rows, GemLite and the split-K kernels of Hoque et al. 2024, here with planes instead of atomics.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgmv_kernels.backend import PackedLinear
from sgmv_kernels.formats.group_quant import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS, GroupQuantizedWeight
from sgmv_kernels.triton_ops.block_sizes import LinearConfig, dequantize_above, device_name, linear_config
from sgmv_kernels.triton_ops.common import cast, dot, kernel, product_dtype
from sgmv_kernels.triton_ops.weight_packing import RUN, check_group, pack_codes

BITS = {INT8_LEVELS: 8, INT4_LEVELS: 4, Q3H_LEVELS: 3}
"""Bits by which configurations name the levels."""
_INT8 = tl.constexpr(INT8_LEVELS)
_INT4 = tl.constexpr(INT4_LEVELS)
_RUN = tl.constexpr(RUN)
_ELEVENTH = tl.constexpr(187)
"""v // 11 is v * 187 >> 11, for every v of seven bits."""
TILE = 128
"""Most codes of one product; a group of more has several."""
ADD_BLOCK = 1024
UNPACK_ROWS = 16
BLAS_BYTES = 256 << 20
"""Most bytes of a weight that are dequantized at a time: the head of a large vocabulary is a gigabyte."""
new_planes = torch.empty
"""Allocator of the planes; tests replace it by one that fills them with NaN."""
_MANTISSAS = {torch.bfloat16: (tl.bfloat16, 0x4300, 128.0), torch.float16: (tl.float16, 0x6400, 1024.0)}
"""dtype -> (the same, bits of the number whose last mantissa bit is worth 1, that number)."""


@dataclass(frozen=True)
class TritonLinear:
    """Hold a quantized linear packed for a GPU; see `PackedLinear`."""

    # Packed by `triton_ops.weight_packing`.
    codes: Tensor
    # [G, O] fp16, as the minima.
    scales: Tensor
    minima: Tensor | None
    # [O] fp32.
    bias: Tensor | None
    levels: int
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        held = (self.codes, self.scales, self.minima, self.bias)
        return sum(t.nbytes for t in held if t is not None)

    @property
    def tile(self) -> int:
        """Return the codes of one product: a group, or a part of one for int8."""
        group = self.in_features // len(self.scales)
        return min(group & -group, TILE) if self.levels == INT8_LEVELS else group

    @property
    def step(self) -> int:
        """Return the tiles that a program takes at a time: a run of q3h; for others what makes up 128 codes."""
        return RUN if self.levels == Q3H_LEVELS else max(1, TILE // self.tile)

    def dequantize(self) -> Tensor:
        return _unpack(self, None, self.out_features, torch.float32)

    def rows(self, ids: Tensor) -> Tensor:
        return _unpack(self, ids, len(ids), torch.float32)


def pack_linear(codes: GroupQuantizedWeight, bias: Tensor | None) -> PackedLinear:
    """See `ops.Ops.pack_linear`. The result stays on the device of the codes."""
    check_group(codes)
    minima = None if codes.minima is None else codes.minima.T.contiguous()
    kept = None if bias is None else bias.float().contiguous()
    sizes = (codes.levels, codes.in_features, codes.out_features)
    return TritonLinear(pack_codes(codes), codes.scales.T.contiguous(), minima, kept, *sizes)


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """See `ops.Ops.linear`."""
    assert isinstance(packed, TritonLinear)
    name, bits = device_name(x.device), BITS[packed.levels]
    if len(x) > dequantize_above(name, bits):
        return through_blas(x, packed)
    return through_tiles(x, packed, linear_config(name, bits, len(x), packed.out_features))


def through_blas(x: Tensor, packed: TritonLinear) -> Tensor:
    """Dequantize to x's dtype and multiply by torch."""
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
    """Multiply with codes that are unpacked in registers."""
    rows, out = len(x), packed.out_features
    y = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    if not rows:
        return y
    tiles = packed.in_features // packed.tile
    steps = -(-tiles // packed.step)
    per_part = -(-steps // config.split_k)
    planes = -(-steps // per_part)
    sums = y if planes == 1 else new_planes((planes, rows, out), dtype=torch.float32, device=x.device)
    compute, precision = product_dtype(x.dtype, x.dtype)
    exact, mantissa, offset = _MANTISSAS.get(x.dtype, (tl.float32, 0, 0.0))
    bias = packed.bias
    _linear_kernel[(triton.cdiv(rows, config.block_m), triton.cdiv(out, config.block_n), planes)](
        x,
        packed.codes,
        packed.scales,
        packed.scales if packed.minima is None else packed.minima,
        packed.scales if bias is None else bias,
        sums,
        rows,
        K=packed.in_features,
        OUT=out,
        ROW_BYTES=packed.codes.shape[1],
        LEVELS=packed.levels,
        TILE=packed.tile,
        TILES=tiles,
        SCALE_EVERY=tiles // len(packed.scales),
        STEP=packed.step,
        STEPS=per_part,
        EVEN=planes * per_part * packed.step == tiles,
        PLANES=planes,
        BIAS=bias is not None,
        EXACT=exact,
        MANTISSA=mantissa,
        OFFSET=offset,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        COMPUTE=compute,
        PRECISION=precision,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if planes > 1:
        _add_planes_kernel[(rows, triton.cdiv(out, ADD_BLOCK))](
            sums,
            packed.scales if bias is None else bias,
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
    tiles = packed.in_features // packed.tile
    if count:
        _unpack_kernel[(triton.cdiv(count, UNPACK_ROWS), triton.cdiv(tiles, packed.step))](
            packed.codes if ids is None else ids,
            packed.codes,
            packed.scales,
            packed.scales if packed.minima is None else packed.minima,
            out,
            start,
            count,
            IDS=ids is not None,
            K=packed.in_features,
            OUT=packed.out_features,
            ROW_BYTES=packed.codes.shape[1],
            LEVELS=packed.levels,
            TILE=packed.tile,
            TILES=tiles,
            SCALE_EVERY=tiles // len(packed.scales),
            STEP=packed.step,
            ROWS=UNPACK_ROWS,
            num_warps=4,
        )
    return out


@kernel()
def _halves(stored, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Split int32 bytes of int4, or pairs of q3h, into codes of the first and of the second half of a group."""
    if LEVELS == _INT4:
        first, second = stored & 15, stored >> 4
    else:
        second = (stored * _ELEVENTH) >> 11
        first = stored - second * LEVELS
    return first, second


@kernel()
def _number(code, EXACT: tl.constexpr, MANTISSA: tl.constexpr, COMPUTE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Turn a code into an operand plus the OFFSET of its dtype: the code is the mantissa, so nothing is converted."""
    if MANTISSA == 0:  # noqa: SIM108 - decided when compiling
        made = code.to(COMPUTE)
    else:
        made = (code | MANTISSA).to(tl.uint16).to(EXACT, bitcast=True).to(COMPUTE)
    return made


@kernel("num_rows")
def _linear_kernel(  # type: ignore[no-untyped-def]
    x,
    codes,
    scales,
    minima,
    bias,
    y,
    num_rows,
    K: tl.constexpr,
    OUT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    LEVELS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    SCALE_EVERY: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    EVEN: tl.constexpr,
    PLANES: tl.constexpr,
    BIAS: tl.constexpr,
    EXACT: tl.constexpr,
    MANTISSA: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute y[rows, outputs], or its plane, over STEPS steps of STEP tiles."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok, out_ok = m < num_rows, n < OUT
    half: tl.constexpr = TILE if LEVELS == _INT8 else TILE // 2
    k = tl.arange(0, half)
    x_rows = x + m.to(tl.int64)[:, None] * K + k[None, :]
    code_rows = codes + n.to(tl.int64)[None, :] * ROW_BYTES + k[:, None]
    nothing = tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
    total = tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
    begin = tl.program_id(2) * STEPS
    for step in range(STEPS):
        run = begin + step
        eighth = tl.full((half, BLOCK_N), 0, dtype=tl.int32)
        for i in tl.static_range(STEP):
            tile = run * STEP + i
            there = out_ok & (EVEN or tile < TILES)
            x_ok = row_ok[:, None] & (EVEN or tile < TILES)
            group_at = tile // SCALE_EVERY * OUT + n
            scale = tl.load(scales + group_at, mask=there, other=0.0).to(tl.float32)
            x_tile = tl.load(x_rows + tile * TILE, mask=x_ok, other=0.0)
            if LEVELS == _INT8:
                weight = tl.load(code_rows + tile * TILE, mask=there[None, :], other=0)
                total += dot(x_tile.to(COMPUTE), weight.to(COMPUTE), nothing, PRECISION) * scale[None, :]
            else:
                x_next = tl.load(x_rows + tile * TILE + half, mask=x_ok, other=0.0)
                if LEVELS == _INT4:
                    stored = tl.load(code_rows + tile * half, mask=there[None, :], other=0).to(tl.int32)
                elif i < _RUN - 1:
                    plane = tl.load(code_rows + (run * (_RUN - 1) + i) * half, mask=there[None, :], other=0)
                    stored = plane.to(tl.int32) & 127
                    eighth = eighth | ((plane.to(tl.int32) >> 7) << i)
                else:
                    stored = eighth
                first, second = _halves(stored, LEVELS)
                product = dot(x_tile.to(COMPUTE), _number(first, EXACT, MANTISSA, COMPUTE), nothing, PRECISION)
                product = dot(x_next.to(COMPUTE), _number(second, EXACT, MANTISSA, COMPUTE), product, PRECISION)
                x_sum = tl.sum(x_tile.to(tl.float32), 1) + tl.sum(x_next.to(tl.float32), 1)
                least = tl.load(minima + group_at, mask=there, other=0.0).to(tl.float32) - OFFSET * scale
                total += product * scale[None, :] + x_sum[:, None] * least[None, :]
    if BIAS and PLANES == 1:
        total += tl.load(bias + n, mask=out_ok, other=0.0)[None, :]
    place = (tl.program_id(2) * num_rows + m).to(tl.int64)
    target = y + place[:, None] * OUT + n[None, :]
    tl.store(target, cast(total, y.dtype.element_ty), mask=row_ok[:, None] & out_ok[None, :])


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
    scales,
    minima,
    out,
    start,
    count,
    IDS: tl.constexpr,
    K: tl.constexpr,
    OUT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    LEVELS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    SCALE_EVERY: tl.constexpr,
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
    half: tl.constexpr = TILE if LEVELS == _INT8 else TILE // 2
    k = tl.arange(0, half)
    code_rows = codes + row[:, None] * ROW_BYTES + k[None, :]
    out_rows = out + r.to(tl.int64)[:, None] * K + k[None, :]
    run = tl.program_id(1)
    eighth = tl.full((ROWS, half), 0, dtype=tl.int32)
    for i in tl.static_range(STEP):
        tile = run * STEP + i
        ok = row_ok & (tile < TILES)
        group_at = (tile // SCALE_EVERY).to(tl.int64) * OUT + row
        scale = tl.load(scales + group_at, mask=ok, other=0.0).to(tl.float32)[:, None]
        target = out_rows + tile * TILE
        if LEVELS == _INT8:
            weight = tl.load(code_rows + tile * TILE, mask=ok[:, None], other=0).to(tl.float32) * scale
            tl.store(target, cast(weight, out.dtype.element_ty), mask=ok[:, None])
        else:
            least = tl.load(minima + group_at, mask=ok, other=0.0).to(tl.float32)[:, None]
            if LEVELS == _INT4:
                stored = tl.load(code_rows + tile * half, mask=ok[:, None], other=0).to(tl.int32)
            elif i < _RUN - 1:
                plane = tl.load(code_rows + (run * (_RUN - 1) + i) * half, mask=ok[:, None], other=0)
                stored = plane.to(tl.int32) & 127
                eighth = eighth | ((plane.to(tl.int32) >> 7) << i)
            else:
                stored = eighth
            first, second = _halves(stored, LEVELS)
            weight = first.to(tl.float32) * scale + least
            tl.store(target, cast(weight, out.dtype.element_ty), mask=ok[:, None])
            weight = second.to(tl.float32) * scale + least
            tl.store(target + half, cast(weight, out.dtype.element_ty), mask=ok[:, None])
