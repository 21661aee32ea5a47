"""SGMV's Triton kernels: compiled on a CUDA device, else under Triton's interpreter. Planes and free memory are NaN."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from sgmv_kernels.backend import SgmvPlan
from sgmv_kernels.errors import CapacityExceeded
from sgmv_kernels.formats.adapter_panels import SiteDims
from sgmv_kernels.metadata.segments import build_segments
from sgmv_kernels.metadata.sgmv_tables import build_tables
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import sgmv_reference
from sgmv_kernels.triton_ops import block_sizes as triton_configs
from sgmv_kernels.triton_ops import sgmv as sgmv_triton
from sgmv_kernels.triton_ops.sgmv_metadata import Capacity, TritonTables

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 1024
SITES = (SiteDims(80, (96, 48, 40)), SiteDims(200, (72, 136)), SiteDims(576, (192,)))
RANKS = [
    [[1, 3, 8], [12, 16], [3]],
    [[24, 0, 12], [0, 64], [0]],
    [[100, 16, 64], [0, 0], [8]],
    [[0, 0, 0], [3, 256], [16]],
    [[16, 16, 16], [1, 8], [24]],
]
LAYERS = 2


@pytest.fixture
def ops(triton_ops: Ops) -> Ops:
    return triton_ops


def filled(make_pool, dtype: torch.dtype, split: bool = False):
    """The adapters, each in one run of pages or in many short ones; the same weights either way."""
    torch.manual_seed(5)
    pool = make_pool(SITES, dtype, LAYERS, PAGE, 600 * len(RANKS))
    for i, ranks in enumerate(RANKS):
        first = i * 600
        pool.add(ranks, [(first + 42 * j, 39 + j % 2) for j in range(14)] if split else [(first, 500)])
    return pool


def inputs(rows: int, dims: SiteDims, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, dims.in_features).to(dtype), torch.randn(rows, dims.total_out).to(dtype)


def added(ops: Ops, pool, rows, site: int, x, y, layer: int = 1) -> torch.Tensor:
    """y with the deltas, on the CPU."""
    plan = ops.plan_sgmv(build_segments(rows), pool.placed, pool.dtype)
    out = y.to(DEVICE, copy=True)
    ops.sgmv_(out, x.to(DEVICE), pool.slabs[layer].to(DEVICE), plan, layer, site)
    return out.cpu()


def expected(pool, rows, site: int, x, y, layer: int = 1) -> torch.Tensor:
    adapters = [per_layer[layer][site] for per_layer in pool.dense]
    return sgmv_reference(y, x, build_segments(rows), adapters, pool.sites[site].out_features)


@pytest.mark.parametrize(
    ("law", "site", "dtype"),
    [
        ("distinct", 0, torch.bfloat16),
        *(pytest.param("distinct", site, torch.bfloat16, marks=pytest.mark.long) for site in (1, 2)),
        pytest.param("distinct", 0, torch.float32),
        *(pytest.param("distinct", site, torch.float32, marks=pytest.mark.long) for site in (1, 2)),
        *itertools.product(("zipf:1.5", "identical", "uniform", "base"), (0,), (torch.float32,)),
        ("distinct", 2, torch.float16),
    ],
    ids=str,
)
def test_matches_reference(ops: Ops, make_pool, rows_for, law: str, site: int, dtype: torch.dtype) -> None:
    pool, rows = filled(make_pool, dtype), rows_for(law, 11, len(RANKS))
    x, y = inputs(len(rows), SITES[site])
    got = added(ops, pool, rows, site, x, y)
    torch.testing.assert_close(got, expected(pool, rows, site, x, y), rtol=1e-4, atol=2e-2)
    assert torch.equal(got, y) == (law == "base")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_activations(ops: Ops, make_pool, dtype: torch.dtype) -> None:
    pool, rows = filled(make_pool, dtype), [4, -1, 0, 4]
    x, y = inputs(len(rows), SITES[2], dtype)
    got, want = added(ops, pool, rows, 2, x, y), expected(pool, rows, 2, x, y)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=0.3)
    assert torch.equal(got[1], y[1])


@pytest.mark.parametrize("rows", [40, 290], ids=["decode blocks", "prefill blocks"])
def test_one_adapter_with_many_rows_beside_one_with_one(ops: Ops, make_pool, rows: int) -> None:
    pool = filled(make_pool, torch.float32)
    owners = [0] * (rows - 2) + [4, -1]
    x, y = inputs(rows, SITES[0])
    got = added(ops, pool, owners, 0, x, y)
    torch.testing.assert_close(got, expected(pool, owners, 0, x, y), rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(
    ("site", "dtype"), [(0, torch.bfloat16), pytest.param(1, torch.float32, marks=pytest.mark.long)], ids=str
)
def test_split_panels_have_the_bits_of_one_run(ops: Ops, make_pool, site: int, dtype: torch.dtype) -> None:
    whole, split = filled(make_pool, dtype), filled(make_pool, dtype, split=True)
    assert len(split.placed[2].copies(1)) > 1
    x, y = inputs(6, SITES[site])
    rows = [3, 0, 1, 2, 0, -1]
    one, other = (added(ops, pool, rows, site, x, y) for pool in (whole, split))
    assert torch.equal(one, other)
    assert not torch.equal(one, y)


def test_a_row_has_the_same_bits_alone_in_any_order_and_beside_any_rows(ops: Ops, make_pool) -> None:
    pool = filled(make_pool, torch.float32)
    rows = [2, 0, 4, 1, 2, -1, 3, 0, 2, 2, 2, 2, 2, 2, 2]
    x, y = inputs(len(rows), SITES[0])
    together = added(ops, pool, rows, 0, x, y)
    order = torch.randperm(len(rows)).tolist()
    mixed = added(ops, pool, [rows[i] for i in order], 0, x[order], y[order])
    assert torch.equal(mixed, together[order])
    for i in (0, 2, 3, 14):
        assert torch.equal(added(ops, pool, [rows[i]], 0, x[i : i + 1], y[i : i + 1]), together[i : i + 1])


def test_planes_and_one_program_add_in_the_same_order(ops: Ops, make_pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`planes` says how many programs compute the parts of K, not what the sum is."""
    pool, rows = filled(make_pool, torch.float32), [0, 2, 4, 0]
    x, y = inputs(len(rows), SITES[2])
    many = added(ops, pool, rows, 2, x, y)
    config = triton_configs.sgmv_config
    seen = []

    def one_plane(*args) -> triton_configs.SgmvConfig:
        made = config(*args)
        seen.append(made.planes)
        return replace(made, planes=1)

    monkeypatch.setattr("sgmv_kernels.triton_ops.sgmv_metadata.sgmv_config", one_plane)
    assert torch.equal(added(ops, pool, rows, 2, x, y), many)
    assert min(seen) > 1


def test_shrink_then_expand_is_sgmv(ops: Ops, make_pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgmv_triton, "new_planes", lambda shape, **how: torch.full(shape, 7.0, **how))
    pool, rows = filled(make_pool, torch.float32), [1, 0, -1, 1]
    x, y = inputs(len(rows), SITES[0])
    plan = ops.plan_sgmv(build_segments(rows), pool.placed, pool.dtype)
    slab, out = pool.slabs[1].to(DEVICE), y.to(DEVICE, copy=True)
    v = ops.shrink(x.to(DEVICE), slab, plan, 1, 0)
    ops.expand_(out, v, slab, plan, 1, 0)
    assert torch.equal(out.cpu(), added(ops, pool, rows, 0, x, y))
    own = pool.placed[0].layout.panels[1][0].total_rank
    place = int(np.flatnonzero(plan.tables.permutation == 1)[0])
    want = x[1] @ torch.cat([s.lora_a for s in pool.dense[0][1][0]]).T
    torch.testing.assert_close(v.sum(0)[place, :own].cpu(), want, rtol=1e-4, atol=1e-4)
    assert v.shape[2] > own
    assert (v[:, place, own:] == 7).all()


def test_every_rank_row_has_its_own_scale(ops: Ops, make_pool) -> None:
    pool, site, layer = filled(make_pool, torch.float32), 1, 0
    placed = pool.placed[3]
    panels = placed.layout.panels[layer][site]
    scale = torch.rand(panels.total_rank) + 0.5
    at = int(placed.offsets[layer][panels.scale])
    pool.slabs[layer, at : at + scale.nbytes] = scale.view(torch.uint8)
    x, y = inputs(2, SITES[site])
    got = added(ops, pool, [3, 3], site, x, y, layer)
    want, column = y.clone(), 0
    for dense, own, width in zip(
        pool.dense[3][layer][site], scale.split(panels.ranks), SITES[site].out_features, strict=True
    ):
        want[:, column : column + width] += (x @ dense.lora_a.T * own) @ dense.lora_b.T
        column += width
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-2)


@pytest.mark.long
@pytest.mark.parametrize("rows", [[0, 0, 4], [-1, -1], [0, 1, 2, 3, 4, 4, -1, 0]])
def test_a_capacity_takes_more_fewer_and_no_adapters(ops: Ops, make_pool, rows: list[int]) -> None:
    """The buffer that a graph was captured with: the same memory and grid, the bits of exact tables."""
    pool = filled(make_pool, torch.float32)
    most = Capacity(8, 5, 2000, tuple(max(sum(r[site]) for r in RANKS) for site in range(3)))
    held = TritonTables.for_capacity(SITES, LAYERS, most, DEVICE)
    address, grid = held.ints.data_ptr(), held.chunk_grid
    for step in ([3, 2, 1, 0, 4, -1, 2, 2], rows):
        tables = build_tables(build_segments(step), pool.placed)
        held.update(tables)
        exact = SgmvPlan(tables, pool.dtype, len(step), sgmv_triton.prepare(tables, pool.dtype, DEVICE))
        x, y = (t.to(DEVICE) for t in inputs(len(step), SITES[0]))
        want, got = y.clone(), y.clone()
        sgmv_triton.sgmv_(want, x, pool.slabs[0].to(DEVICE), exact, 0, 0)
        planned = SgmvPlan(tables, pool.dtype, len(step), held)
        sgmv_triton.sgmv_(got, x, pool.slabs[0].to(DEVICE), planned, 0, 0)
        assert torch.equal(got, want)
        assert (held.ints.data_ptr(), held.chunk_grid) == (address, grid)


def test_what_exceeds_a_capacity_is_named(make_pool) -> None:
    pool = filled(make_pool, torch.float32)
    tables = build_tables(build_segments([0, 1, 4, 4]), pool.placed)
    fits = {"max_rows": 4, "max_segments": 3, "max_panels": 500, "max_ranks": (256, 300, 300)}
    for change, message in (
        ({"max_rows": 3}, "4 rows"),
        ({"max_segments": 2}, "3 segments"),
        ({"max_panels": 3}, "panels"),
        ({"max_ranks": (40, 300, 300)}, "rank rows at site 0"),
    ):
        held = TritonTables.for_capacity(SITES, LAYERS, Capacity(**(fits | change)), DEVICE)
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


def full_size(make_pool, dtype: torch.dtype):
    torch.manual_seed(5)
    pool = make_pool(FULL_SITES, dtype, 1, 65536, 1500 * len(FULL_RANKS))
    for i, ranks in enumerate(FULL_RANKS):
        pool.add(ranks, [(i * 1500 + 48 * j, 46 + j % 2) for j in range(30)])
    return pool


@on_gpu
@pytest.mark.parametrize("rows", [16, 300, 1500])
@pytest.mark.parametrize("site", range(3))
@pytest.mark.parametrize(
    ("active", "stored"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
    ],
    ids=str,
)
def test_matches_reference_at_full_size(ops: Ops, make_pool, rows: int, site: int, active, stored) -> None:
    """Inputs of about unit gain, so that bf16 outputs are compared at their own size."""
    pool, owners = full_size(make_pool, stored), (list(range(-1, 4)) * rows)[:rows]
    x, y = inputs(rows, FULL_SITES[site])
    x, y = (x / FULL_SITES[site].in_features ** 0.5).to(active), y.to(active)
    got = added(ops, pool, owners, site, x, y, layer=0)
    tolerance = {"rtol": 1e-4, "atol": 1e-3} if torch.float32 == active == stored else {"rtol": 2e-2, "atol": 0.15}
    torch.testing.assert_close(got.float(), expected(pool, owners, site, x, y, layer=0), **tolerance)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone_at_full_size(ops: Ops, make_pool, dtype: torch.dtype) -> None:
    pool, owners = full_size(make_pool, dtype), MIXES[0]
    x, y = inputs(len(owners), FULL_SITES[0], dtype)
    together = added(ops, pool, owners, 0, x, y, layer=0)
    for i in range(4):
        alone = added(ops, pool, [owners[i]], 0, x[i : i + 1], y[i : i + 1], layer=0)
        assert torch.equal(alone[0], together[i])


@on_gpu
@pytest.mark.parametrize("site", range(3))
def test_a_graph_replays_with_more_fewer_and_no_adapters(ops: Ops, make_pool, site: int) -> None:
    """Captured with one mix; every replay has the bits of the eager step with exact tables."""
    pool, dtype, rows = full_size(make_pool, torch.bfloat16), torch.bfloat16, 16
    slab = pool.slabs[0].to(DEVICE)
    most = Capacity(rows, rows, 2000, tuple(max(sum(r[s]) for r in FULL_RANKS) for s in range(3)))
    held = TritonTables.for_capacity(FULL_SITES, 1, most, DEVICE)
    first = build_tables(build_segments(MIXES[3]), pool.placed)
    held.update(first)
    plan = SgmvPlan(first, dtype, rows, held)
    x, base = (t.to(DEVICE) for t in inputs(rows, FULL_SITES[site], dtype))
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
            exact = SgmvPlan(tables, dtype, rows, sgmv_triton.prepare(tables, dtype, DEVICE))
            sgmv_triton.sgmv_(eager, x, slab, exact, 0, site)
        assert torch.equal(y, eager)
        assert torch.equal(y, base) == (not tables.num_segments or not tables.records[0, site, :, 1:].any())
