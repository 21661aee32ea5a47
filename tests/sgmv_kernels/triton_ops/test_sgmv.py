"""What only SGMV's Triton kernels have: planes, capacities, graphs, tensor cores. Compiled on a CUDA device, else under
Triton's interpreter; planes and free memory are NaN."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from kernel_pools import KernelPool

from sgmv_kernels.errors import CapacityExceeded
from sgmv_kernels.formats.adapter_panels import SiteDims
from sgmv_kernels.metadata.plans import SgmvPlan
from sgmv_kernels.metadata.segments import build_segments
from sgmv_kernels.metadata.sgmv_tables import build_tables
from sgmv_kernels.ops import Ops
from sgmv_kernels.triton_ops import block_sizes as triton_configs
from sgmv_kernels.triton_ops import sgmv as sgmv_triton
from sgmv_kernels.triton_ops.sgmv_metadata import Capacity, TritonTables

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOAT, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
SITES = (SiteDims(80, (96, 48, 40)), SiteDims(200, (72, 136)), SiteDims(576, (192,)))
RANKS = [
    [[1, 3, 8], [12, 16], [3]],
    [[24, 0, 12], [0, 64], [0]],
    [[100, 16, 64], [0, 0], [8]],
    [[0, 0, 0], [3, 256], [16]],
    [[16, 16, 16], [1, 8], [24]],
]


@pytest.fixture
def ops(triton_ops: Ops) -> Ops:
    return triton_ops


def filled(dtype: torch.dtype) -> KernelPool:
    torch.manual_seed(5)
    pool = KernelPool(SITES, dtype, 2, 1024, 600 * len(RANKS))
    for i, ranks in enumerate(RANKS):
        pool.add(ranks, [(600 * i, 500)], codes=i in (1, 4))
    return pool


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_half_activations(ops: Ops, dtype: torch.dtype) -> None:
    filled(dtype).check(ops, [4, -1, 0, 4], 2, dtype=dtype, rtol=2e-2, atol=0.3)


@pytest.mark.parametrize("block_m", [4, 32])
@pytest.mark.parametrize("site", range(len(SITES)))
def test_chunks_of_any_size(ops: Ops, monkeypatch: pytest.MonkeyPatch, site: int, block_m: int) -> None:
    """As steps of more rows have; ranks of every class, 0 and codes beside each other, and chunks that are not full."""
    config = triton_configs.RowsConfig(block_m, planes=block_m < 16)
    monkeypatch.setattr("sgmv_kernels.triton_ops.sgmv_metadata.rows_config", lambda *_: config)
    rows = [0, 1, 2, 3, 4, -1] + [0] * 5 + [3] * 4
    got, y = filled(FLOAT).check(ops, rows, site)
    assert not torch.equal(got, y)


def test_planes_and_one_program_add_the_same_parts(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """`planes` says how many programs compute the parts of K, not what the sum is but for its last bits."""
    pool, rows, seen = filled(FLOAT), [0, 2, 4, 0], []
    x, y = pool.inputs(len(rows), 2)
    many = pool.added(ops, rows, 2, x, y)
    config = triton_configs.sgmv_config

    def one_plane(*args) -> triton_configs.SgmvConfig:
        made = config(*args)
        seen.append(made.planes)
        return replace(made, planes=1)

    monkeypatch.setattr("sgmv_kernels.triton_ops.sgmv_metadata.sgmv_config", one_plane)
    # A GPU's expand adds planes as a tree.
    torch.testing.assert_close(pool.added(ops, rows, 2, x, y), many, rtol=1e-5, atol=1e-5)
    assert min(seen) > 1


def test_shrink_then_expand_is_sgmv(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgmv_triton, "new_planes", lambda shape, **how: torch.full(shape, 7.0, **how))
    pool, rows = filled(FLOAT), [1, 0, -1, 1]
    x, y = pool.inputs(len(rows), 0)
    plan = ops.plan_sgmv(build_segments(rows), pool.placed, FLOAT)
    slab, out = pool.slabs[1].to(DEVICE), y.to(DEVICE, copy=True)
    v = ops.shrink(x.to(DEVICE), slab, plan, 1, 0)
    ops.expand_(out, v, slab, plan, 1, 0)
    assert torch.equal(out.cpu(), pool.added(ops, rows, 0, x, y))
    own = pool.placed[0].layout.panels[1][0].total_rank
    place = int(np.flatnonzero(plan.tables.permutation == 1)[0])
    want = x[1] @ torch.cat([s.lora_a for s in pool.dense[0][1][0]]).T
    torch.testing.assert_close(v.sum(0)[place, :own].cpu(), want, rtol=1e-4, atol=1e-4)
    assert v.shape[2] > own
    assert (v[:, place, own:] == 7).all()


def test_every_rank_row_has_its_own_scale(ops: Ops) -> None:
    pool, site, layer = filled(FLOAT), 1, 0
    placed = pool.placed[3]
    panels = placed.layout.panels[layer][site]
    scale = torch.rand(panels.total_rank) + 0.5
    at = int(placed.offsets[layer][panels.scale])
    pool.slabs[layer, at : at + scale.nbytes] = scale.view(torch.uint8)
    x, y = pool.inputs(2, site)
    parts = zip(pool.dense[3][layer][site], scale.split(panels.ranks), strict=True)
    want = y + torch.cat([(x @ dense.lora_a.T * own) @ dense.lora_b.T for dense, own in parts], dim=1)
    torch.testing.assert_close(pool.added(ops, [3, 3], site, x, y, layer), want, rtol=1e-4, atol=2e-2)


def exact_plan(pool: KernelPool, rows: list[int]) -> SgmvPlan:
    tables = build_tables(build_segments(rows), pool.placed)
    return SgmvPlan(tables, pool.dtype, len(rows), sgmv_triton.prepare(tables, pool.dtype, DEVICE))


@pytest.mark.long
@pytest.mark.parametrize("rows", [[0, 0, 4], [-1, -1], [0, 1, 2, 3, 4, 4, -1, 0]])
def test_a_capacity_takes_more_fewer_and_no_adapters(ops: Ops, rows: list[int]) -> None:
    """The buffer that a graph was captured with: the same memory and grid, the bits of exact tables."""
    pool = filled(FLOAT)
    slab, most = pool.slabs[0].to(DEVICE), Capacity(8, 5, 2000, 256)
    held = TritonTables.for_capacity(SITES, 2, most, DEVICE)
    address, grid = held.ints.data_ptr(), held.chunk_grid
    for step in ([3, 2, 1, 0, 4, -1, 2, 2], rows):
        exact = exact_plan(pool, step)
        held.update(exact.tables)
        x, y = (t.to(DEVICE) for t in pool.inputs(len(step), 0))
        want, got = y.clone(), y.clone()
        sgmv_triton.sgmv_(want, x, slab, exact, 0, 0)
        sgmv_triton.sgmv_(got, x, slab, replace(exact, prepared=held), 0, 0)
        assert torch.equal(got, want)
        assert (held.ints.data_ptr(), held.chunk_grid) == (address, grid)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_rows": 3}, "4 rows"),
        ({"max_segments": 2}, "3 segments"),
        ({"max_panels": 3}, "panels"),
        ({"max_rank": 40}, "64 ranks of a slice"),
    ],
)
def test_what_exceeds_a_capacity_is_named(change: dict, message: str) -> None:
    tables = build_tables(build_segments([0, 1, 4, 4]), filled(FLOAT).placed)
    fits = {"max_rows": 4, "max_segments": 3, "max_panels": 500, "max_rank": 256}
    held = TritonTables.for_capacity(SITES, 2, Capacity(**(fits | change)), DEVICE)
    before = held.ints.clone()
    with pytest.raises(CapacityExceeded, match=message):
        held.update(tables)
    assert torch.equal(held.ints, before)


# At the size of Llama 3's linears, in tensor cores: only a CUDA device can show that.

FULL_SITES = (SiteDims(4096, (4096, 1024, 1024)), SiteDims(4096, (4096,)), SiteDims(14336, (4096,)))
FULL_RANKS = [
    [[8, 8, 8], [8], [8]],
    [[16, 0, 16], [16], [0]],
    [[64, 12, 3], [0], [100]],
    [[256, 256, 256], [1], [256]],
]
MIXES = ([0, 1, 2, 3] * 4, [-1] * 16, [3] * 16, [0, -1] * 8, [2] * 15 + [1], [1] + [-1] * 15)


def on_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")(test))


@cache
def full_size(dtype: torch.dtype) -> KernelPool:
    torch.manual_seed(5)
    pool = KernelPool(FULL_SITES, dtype, 1, 65536, 1500 * len(FULL_RANKS))
    for i, ranks in enumerate(FULL_RANKS):
        pool.add(ranks, [(i * 1500 + 48 * j, 46 + j % 2) for j in range(30)], codes=i in (1, 2))
    return pool


@on_gpu
@pytest.mark.parametrize("rows", [16, 300, 1500])
@pytest.mark.parametrize("site", range(3))
@pytest.mark.parametrize(
    ("active", "stored"), [(BF16, BF16), (HALF, HALF), (FLOAT, FLOAT), (FLOAT, BF16), (HALF, BF16)], ids=str
)
def test_matches_reference_at_full_size(ops: Ops, rows: int, site: int, active, stored) -> None:
    """Inputs of about unit gain, so that bf16 outputs are compared at their own size."""
    pool, owners = full_size(stored), (list(range(-1, 4)) * rows)[:rows]
    x, y = pool.inputs(rows, site)
    x, y = (x / FULL_SITES[site].in_features ** 0.5).to(active), y.to(active)
    got, want = pool.added(ops, owners, site, x, y, layer=0), pool.expected(owners, site, x, y, layer=0)
    tolerance = {"rtol": 1e-4, "atol": 1e-3} if FLOAT == active == stored else {"rtol": 2e-2, "atol": 0.15}
    torch.testing.assert_close(got.float(), want, **tolerance)


@on_gpu
@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=str)
def test_a_row_has_the_same_bits_alone_at_full_size(ops: Ops, dtype: torch.dtype) -> None:
    pool, owners = full_size(dtype), MIXES[0]
    x, y = pool.inputs(len(owners), 0, dtype)
    together = pool.added(ops, owners, 0, x, y, layer=0)
    for i in range(4):
        alone = pool.added(ops, [owners[i]], 0, x[i : i + 1], y[i : i + 1], layer=0)
        assert torch.equal(alone[0], together[i])


@on_gpu
@pytest.mark.parametrize("site", range(3))
def test_a_graph_replays_with_more_fewer_and_no_adapters(ops: Ops, site: int) -> None:
    """Captured with one mix; every replay has the bits of the eager step with exact tables."""
    pool = full_size(BF16)
    slab, most = pool.slabs[0].to(DEVICE), Capacity(16, 16, 2000, 256)
    held = TritonTables.for_capacity(FULL_SITES, 1, most, DEVICE)
    first = exact_plan(pool, MIXES[3])
    held.update(first.tables)
    plan = replace(first, prepared=held)
    x, base = (t.to(DEVICE) for t in pool.inputs(16, site, BF16))
    y = base.clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        sgmv_triton.sgmv_(y, x, slab, plan, 0, site)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(base)
        sgmv_triton.sgmv_(y, x, slab, plan, 0, site)
    for mix in MIXES:
        tables = build_tables(build_segments(mix), pool.placed)
        held.update(tables)
        graph.replay()
        eager = base.clone()
        if tables.num_segments:
            sgmv_triton.sgmv_(eager, x, slab, exact_plan(pool, mix), 0, site)
        assert torch.equal(y, eager)
        assert torch.equal(y, base) == (not tables.num_segments or not tables.records[0, site, :, 1:].any())
