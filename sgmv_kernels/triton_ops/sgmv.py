"""SGMV on a GPU in two launches per site, without memset or atomics.

Shrink: a program computes (chunk of rows, panels, part of K) and writes fp32 partial sums, a *plane* for each part.
Expand: a program computes (chunk, tile of columns): it adds the planes, scales, multiplies by B, and adds to y in
place. Few rows, as in a decode step, are in chunks of two or four, which expand multiplies without tensor cores, whose
tiles have 16 rows.

For one device table and one site, a row's result does not depend, bit for bit, on the order of rows, on other rows or
adapters of the batch, on the places of panels, or on the use of exact or capacity tables of the same block sizes. The
order of fp32 additions over K is fixed by the site: `split_k` sums of consecutive parts, added in order, either by one
program of shrink or by expand. Results for numbers of rows with a different `block_m` are only close.

A segment's panels are in the plan's dtype or int8 codes, as its chunk says: both forms may be in one launch.

In shrink, half-precision weights are multiplied unchanged, and int8 codes in the same precision, which represents them
exactly. In expand, the fp32 sums are used as they are for few rows, and with 11 bits of mantissa (tf32) for many.

Source: SGMV, Punica (Chen et al. 2023); split sums as planes that expand adds up, and slices flattened into one list of
tiles, SGLang's triton_v2; true ranks, S-LoRA (Sheng et al. 2023).
"""

import torch
import triton.language as tl
from torch import Tensor

from sgmv_kernels.formats.adapter_panels import CODE_BYTES, MAX_SLICES, PANEL_RANKS, SCALE_BYTES
from sgmv_kernels.formats.kv_format import ALIGNMENT_BYTES
from sgmv_kernels.metadata.plans import SgmvPlan
from sgmv_kernels.metadata.sgmv_tables import SgmvTables
from sgmv_kernels.triton_ops.common import as_bound, cast, dot, kernel, power_of_two, product_dtype
from sgmv_kernels.triton_ops.sgmv_metadata import CHUNK_INTS, TritonTables

_CHUNK = tl.constexpr(CHUNK_INTS)
_RECORD = tl.constexpr(4)
_PANEL = tl.constexpr(PANEL_RANKS)
_SCALE_UNIT = tl.constexpr(ALIGNMENT_BYTES // SCALE_BYTES)
_CODE_UNIT = tl.constexpr(ALIGNMENT_BYTES // CODE_BYTES)
_MOST_R = tl.constexpr(64)
"""Most ranks of a product in expand."""
LEAST_ROWS = 16
"""Rows of a tensor core's product."""
new_planes = torch.empty
"""Allocator of the planes; tests replace it with one that fills them with NaN."""


def prepare(tables: SgmvTables, dtype: torch.dtype, device: torch.device) -> TritonTables:
    """Return the exact tables of a step, on the device."""
    del dtype
    return TritonTables.exact(tables, device)


def shrink(x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> Tensor:
    """See `ops.Ops.shrink`; makes one plane, or one for each part of K."""
    tables: TritonTables = plan.prepared
    if not tables.chunk_grid or not tables.rank(layer, site):
        return new_planes((1, len(x), 0), dtype=torch.float32, device=x.device)
    config, rank = tables.config(layer, site), tables.rank(layer, site)
    v = new_planes((config.planes, len(x), rank), dtype=torch.float32, device=x.device)
    width = tables.sites[site].in_features
    steps = -(-width // (config.block_k * config.split_k))
    compute, precision = product_dtype(x.dtype, plan.dtype)
    _shrink_kernel[(tables.chunk_grid, -(-rank // config.shrink_n), config.planes)](
        x,
        slab.view(plan.dtype),
        slab.view(torch.int8),
        tables.ints,
        v,
        tables.permutation_at,
        tables.record_at(layer, site),
        tables.panels_at,
        len(x),
        rank,
        K=width,
        UNIT=ALIGNMENT_BYTES // plan.dtype.itemsize,
        STEPS=steps,
        PARTS=config.split_k // config.planes,
        EVEN_K=steps * config.split_k * config.block_k == width,
        BLOCK_M=max(LEAST_ROWS, tables.block_m),
        BLOCK_N=config.shrink_n,
        BLOCK_K=config.block_k,
        COMPUTE=compute,
        PRECISION=precision,
        num_warps=config.shrink_warps,
        num_stages=config.shrink_stages,
    )
    return v


def expand_(y: Tensor, v: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
    """See `ops.Ops.expand_`."""
    tables: TritonTables = plan.prepared
    if not tables.chunk_grid or not tables.rank(layer, site):
        return
    config = tables.config(layer, site)
    widths = tables.sites[site].out_features
    tiles = [-(-width // config.expand_n) for width in widths]
    n0, n1, n2 = (*widths, 0, 0)[:MAX_SLICES]
    arguments = (
        y,
        v,
        slab.view(plan.dtype),
        slab.view(torch.int8),
        slab.view(torch.float32),
        tables.ints,
        tables.permutation_at,
        tables.record_at(layer, site),
        tables.panels_at,
        v.shape[1],
        v.shape[2],
        y.stride(0),
    )
    constants = {
        # Else y is columns of logits, of which there are more in steps with added tokens.
        "DENSE": y.stride(0) == sum(widths),
        "N0": n0,
        "N1": n1,
        "N2": n2,
        "UNIT": ALIGNMENT_BYTES // plan.dtype.itemsize,
        "PLANES": v.shape[0],
        "PLANES_PAD": power_of_two(v.shape[0], 1),
        "RANKS": tables.expand_ranks(layer, site),
        "BLOCK_M": tables.block_m,
        "BLOCK_N": config.expand_n,
    }
    grid = (tables.chunk_grid, sum(tiles))
    if tables.block_m < LEAST_ROWS:
        _expand_few_kernel[grid](*arguments, **constants, num_warps=config.expand_warps)
    else:
        precision = "ieee" if plan.dtype == torch.float32 else "tf32"
        _expand_kernel[grid](*arguments, **constants, PRECISION=precision, num_warps=config.expand_warps)


def sgmv_(y: Tensor, x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
    """See `ops.Ops.sgmv_`."""
    expand_(y, shrink(x, slab, plan, layer, site), slab, plan, layer, site)


@kernel("permutation_at", "record_at", "panels_at", "num_rows")
def _shrink_kernel(  # type: ignore[no-untyped-def]
    x,
    panels,
    codes,
    ints,
    v,
    permutation_at,
    record_at,
    panels_at,
    num_rows,
    rank_stride,
    K: tl.constexpr,
    UNIT: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute v[plane, place, n], the sum over the plane's parts of K of x[row, k] A[n, k]; a part is STEPS blocks."""
    chunk = ints + tl.program_id(0) * _CHUNK
    count = tl.load(chunk + 1)
    if count == 0:
        return
    begin = tl.load(chunk)
    record = ints + record_at + tl.load(chunk + 2) * _RECORD
    total = tl.load(record + 1) + tl.load(record + 2) + tl.load(record + 3)
    first_rank = tl.program_id(1) * BLOCK_N
    if first_rank >= total:
        return
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row_ok, rank_ok = m < count, first_rank + n < total
    rows = tl.load(ints + permutation_at + begin + m, mask=row_ok, other=0).to(tl.int64)
    panel = ints + panels_at + tl.load(record) + 1 + first_rank // _PANEL
    if BLOCK_N == _PANEL:
        units = tl.load(panel).to(tl.int64)
    else:
        units = tl.load(panel + n // _PANEL, mask=rank_ok, other=0).to(tl.int64)
    in_panel = (n % _PANEL) * K
    plane = tl.program_id(2)
    start = plane * (PARTS * STEPS * BLOCK_K)
    x_tile = x + rows[:, None] * K + k[None, :]
    if tl.load(chunk + 3) == 0:
        sums = _sums(
            x_tile,
            (panels + units * UNIT + in_panel)[None, :] + k[:, None],
            row_ok,
            rank_ok,
            k,
            start,
            K,
            STEPS,
            PARTS,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            COMPUTE,
            PRECISION,
        )
    else:
        sums = _sums(
            x_tile,
            (codes + units * _CODE_UNIT + in_panel)[None, :] + k[:, None],
            row_ok,
            rank_ok,
            k,
            start,
            K,
            STEPS,
            PARTS,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            COMPUTE,
            PRECISION,
        )
    place = (plane * num_rows + begin + m).to(tl.int64)
    target = v + place[:, None] * rank_stride + (first_rank + n)[None, :]
    tl.store(target, sums, mask=row_ok[:, None] & rank_ok[None, :])


@kernel()
def _sums(  # type: ignore[no-untyped-def]
    x_tile,
    a_tile,
    row_ok,
    rank_ok,
    k,
    start,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the sums over PARTS parts of K of rows of x and of a, from `start` on."""
    total_sum = tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
    part_sum = tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
    for step in range(PARTS * STEPS):
        at = start + step * BLOCK_K
        if EVEN_K:
            x_block = tl.load(x_tile + at, mask=row_ok[:, None], other=0.0)
            a_block = tl.load(a_tile + at, mask=rank_ok[None, :], other=0.0)
        else:
            x_block = tl.load(x_tile + at, mask=row_ok[:, None] & (at + k < K)[None, :], other=0.0)
            a_block = tl.load(a_tile + at, mask=rank_ok[None, :] & (at + k < K)[:, None], other=0.0)
        part_sum = dot(x_block.to(COMPUTE), a_block.to(COMPUTE), part_sum, PRECISION)
        if PARTS > 1:  # noqa: SIM102 - one is known when compiling, the other is not
            # The end of a part, whose sum would otherwise be another program's plane.
            if (step + 1) % STEPS == 0:
                total_sum += part_sum
                part_sum = tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
    if PARTS == 1:
        total_sum = part_sum
    return total_sum


@kernel()
def _tile_of(  # type: ignore[no-untyped-def]
    record, panels, tile, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the rank and width of a tile's slice, the start of the slice's columns and ranks, the tile's columns
    within the slice, and the places of the panels of scales and of the slice's B.

    Tiles of all slices are in one list, so that no program is launched for missing columns of a narrow slice.
    """
    r0, r1, r2 = tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    tiles0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    tiles1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    in1, in2 = tile >= tiles0, tile >= tiles0 + tiles1
    rank = tl.where(in2, r2, tl.where(in1, r1, r0))
    width = tl.where(in2, N2, tl.where(in1, N1, N0))
    column_at = tl.where(in2, N0 + N1, tl.where(in1, N0, 0))
    rank_at = tl.where(in2, r0 + r1, tl.where(in1, r0, 0))
    column = (tile - tl.where(in2, tiles0 + tiles1, tl.where(in1, tiles0, 0))) * BLOCK_N + tl.arange(0, BLOCK_N)
    panels_before = tl.where(in1, (r0 + _PANEL - 1) // _PANEL, 0) + tl.where(in2, (r1 + _PANEL - 1) // _PANEL, 0)
    scale_panel = panels + tl.load(record)
    b_panel = scale_panel + 1 + (r0 + r1 + r2 + _PANEL - 1) // _PANEL + panels_before
    return rank, width, column_at, rank_at, column, scale_panel, b_panel


@kernel("permutation_at", "record_at", "panels_at", "num_rows", "row_stride")
def _expand_kernel(  # type: ignore[no-untyped-def]
    y,
    v,
    panels,
    codes,
    scales,
    ints,
    permutation_at,
    record_at,
    panels_at,
    num_rows,
    rank_stride,
    row_stride,
    DENSE: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    UNIT: tl.constexpr,
    PLANES: tl.constexpr,
    PLANES_PAD: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add (factor * scale * sum of planes of v[place]) B to y[row, columns], for one tile of one slice's columns."""
    chunk = ints + tl.program_id(0) * _CHUNK
    count = tl.load(chunk + 1)
    if count == 0:
        return
    begin = tl.load(chunk)
    record = ints + record_at + tl.load(chunk + 2) * _RECORD
    rank, width, column_at, rank_at, column, scale_panel, b_panel = _tile_of(
        record, ints + panels_at, tl.program_id(1), N0, N1, N2, BLOCK_N
    )
    if rank == 0:
        return
    are_codes = tl.load(chunk + 3) != 0
    factor = tl.load(chunk + 4).to(tl.float32, bitcast=True)

    block_r: tl.constexpr = RANKS if RANKS < _MOST_R else _MOST_R
    m, r = tl.arange(0, BLOCK_M), tl.arange(0, block_r)
    row_ok, column_ok = m < count, column < width
    rows = tl.load(ints + permutation_at + begin + m, mask=row_ok, other=0).to(tl.int64)
    scale = scales + tl.load(scale_panel).to(tl.int64) * _SCALE_UNIT + rank_at
    # Loaded as one tensor: if planes were added one by one, each would be distributed to the warps separately.
    plane = tl.arange(0, PLANES_PAD)
    plane_ok = plane < PLANES
    v_rows = v + (begin + m[:, None] + num_rows * plane[None, :]).to(tl.int64)[:, :, None] * rank_stride + rank_at
    target = y + rows[:, None] * (N0 + N1 + N2 if DENSE else row_stride) + (column_at + column)[None, :]
    ok = row_ok[:, None] & column_ok[None, :]
    total = tl.load(target, mask=ok, other=0.0).to(tl.float32)
    # A loop with one iteration is removed, and all its loads are issued at once.
    for block in tl.range(1 if block_r == RANKS else as_bound((rank + block_r - 1) // block_r), num_stages=1):
        at = block * block_r + r
        rank_ok = at < rank
        v_ok = row_ok[:, None, None] & plane_ok[None, :, None] & rank_ok[None, None, :]
        low = tl.sum(tl.load(v_rows + at[None, None, :], mask=v_ok, other=0.0), 1)
        low *= (factor * tl.load(scale + at, mask=rank_ok, other=0.0))[None, :]
        units = tl.load(b_panel + at // _PANEL, mask=rank_ok, other=0).to(tl.int64)
        b_at = (at % _PANEL * width)[:, None] + column[None, :]
        b_ok = rank_ok[:, None] & column_ok[None, :]
        if are_codes:
            b_block = tl.load(codes + (units * _CODE_UNIT)[:, None] + b_at, mask=b_ok, other=0).to(tl.float32)
        else:
            b_block = tl.load(panels + (units * UNIT)[:, None] + b_at, mask=b_ok, other=0.0).to(tl.float32)
        total = dot(low, b_block, total, PRECISION)
    tl.store(target, cast(total, y.dtype.element_ty), mask=ok)


@kernel("permutation_at", "record_at", "panels_at", "num_rows", "row_stride")
def _expand_few_kernel(  # type: ignore[no-untyped-def]
    y,
    v,
    panels,
    codes,
    scales,
    ints,
    permutation_at,
    record_at,
    panels_at,
    num_rows,
    rank_stride,
    row_stride,
    DENSE: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    UNIT: tl.constexpr,
    PLANES: tl.constexpr,
    PLANES_PAD: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Do the same as `_expand_kernel`, for chunks of few rows."""
    chunk = ints + tl.program_id(0) * _CHUNK
    count = tl.load(chunk + 1)
    if count == 0:
        return
    begin = tl.load(chunk)
    record = ints + record_at + tl.load(chunk + 2) * _RECORD
    rank, width, column_at, rank_at, column, scale_panel, b_panel = _tile_of(
        record, ints + panels_at, tl.program_id(1), N0, N1, N2, BLOCK_N
    )
    if rank == 0:
        return
    are_codes = tl.load(chunk + 3) != 0
    factor = tl.load(chunk + 4).to(tl.float32, bitcast=True)

    m, r, plane = tl.arange(0, BLOCK_M), tl.arange(0, _PANEL), tl.arange(0, PLANES_PAD)
    row_ok, column_ok = m < count, column < width
    rows = tl.load(ints + permutation_at + begin + m, mask=row_ok, other=0).to(tl.int64)
    scale = scales + tl.load(scale_panel).to(tl.int64) * _SCALE_UNIT + rank_at + r
    places = (begin + m[:, None] + num_rows * plane[None, :]).to(tl.int64)
    v_rows = v + places[:, :, None] * rank_stride + (rank_at + r)[None, None, :]
    b_at = (r * width)[:, None] + column[None, :]
    target = y + rows[:, None] * (N0 + N1 + N2 if DENSE else row_stride) + (column_at + column)[None, :]
    ok = row_ok[:, None] & column_ok[None, :]
    total = tl.load(target, mask=ok, other=0.0).to(tl.float32)
    # With few ranks, all loads are issued at once.
    unrolled: tl.constexpr = RANKS // _PANEL if RANKS <= _MOST_R else 1
    panels_of_slice = (rank + _PANEL - 1) // _PANEL
    for turn in tl.range(1 if RANKS <= _MOST_R else as_bound(panels_of_slice), num_stages=1):
        for part in tl.static_range(unrolled):
            panel = turn * unrolled + part
            first = panel * _PANEL
            rank_ok = first + r < rank
            v_ok = row_ok[:, None, None] & (plane < PLANES)[None, :, None] & rank_ok[None, None, :]
            low = tl.sum(tl.load(v_rows + first, mask=v_ok, other=0.0), 1)
            low *= (factor * tl.load(scale + first, mask=rank_ok, other=0.0))[None, :]
            unit = tl.load(b_panel + panel, mask=first < rank, other=0).to(tl.int64)
            b_ok = rank_ok[:, None] & column_ok[None, :]
            if are_codes:
                b_codes = tl.load(codes + unit * _CODE_UNIT + b_at, mask=b_ok, other=0)
                total += tl.sum(low[:, :, None] * b_codes.to(tl.float32)[None, :, :], 1)
            else:
                b_block = tl.load(panels + unit * UNIT + b_at, mask=b_ok, other=0.0)
                total += tl.sum(low[:, :, None] * b_block.to(tl.float32)[None, :, :], 1)
    tl.store(target, cast(total, y.dtype.element_ty), mask=ok)
