"""What only a CUDA device can show: bf16 in tensor cores, large shapes, graphs replayed with other adapters."""

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from dataclasses import replace

from sgmv_kernels.backend import SgmvPlan, plan_of
from sgmv_kernels.formats.adapter_panels import SiteDims
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.segments import build_segments
from sgmv_kernels.metadata.sgmv_tables import build_tables
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import paged_attention_reference, sgmv_reference
from sgmv_kernels.triton_ops import attention as attention_triton
from sgmv_kernels.triton_ops import sgmv as sgmv_triton
from sgmv_kernels.triton_ops.attention_metadata import AttentionCapacity, AttentionTables
from sgmv_kernels.triton_ops.sgmv_metadata import Capacity, TritonTables
from tests.helpers.float_pages import float_pages

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
PAGE = 65536
SITES = (SiteDims(4096, (4096, 1024, 1024)), SiteDims(4096, (4096,)), SiteDims(14336, (4096,)))
RANKS = [
    [[8, 8, 8], [8], [8]],
    [[16, 0, 16], [16], [0]],
    [[64, 12, 3], [0], [100]],
    [[256, 256, 256], [1], [256]],
]
MIXES = ([0, 1, 2, 3] * 4, [-1] * 16, [3] * 16, [0, -1] * 8, [2] * 15 + [1], [1] + [-1] * 15)


@pytest.fixture
def ops() -> Ops:
    return Ops(CUDA, "triton")


def filled(make_pool, dtype: torch.dtype):
    """Weights of about unit gain, so that bf16 outputs are compared at their own size."""
    torch.manual_seed(5)
    pool = make_pool(SITES, dtype, 1, PAGE, 1500 * len(RANKS))
    for i, ranks in enumerate(RANKS):
        pool.add(ranks, [(i * 1500 + 48 * j, 46 + j % 2) for j in range(30)])
    return pool


def inputs(rows: int, site: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, SITES[site].in_features) / SITES[site].in_features ** 0.5
    return x.to(dtype), torch.randn(rows, SITES[site].total_out).to(dtype)


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
def test_sgmv_at_full_size(ops: Ops, make_pool, rows: int, site: int, active, stored) -> None:
    pool = filled(make_pool, stored)
    owners = (list(range(-1, 4)) * rows)[:rows]
    x, y = inputs(rows, site, active)
    segments = build_segments(owners)
    plan = ops.plan_sgmv(segments, pool.placed, stored)
    out = y.to(CUDA)
    ops.sgmv_(out, x.to(CUDA), pool.slabs[0].to(CUDA), plan, 0, site)
    adapters = [per_layer[0][site] for per_layer in pool.dense]
    want = sgmv_reference(y, x, segments, adapters, SITES[site].out_features)
    tolerance = {"rtol": 1e-4, "atol": 1e-3} if torch.float32 == active == stored else {"rtol": 2e-2, "atol": 0.15}
    torch.testing.assert_close(out.cpu().float(), want, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone(ops: Ops, make_pool, dtype: torch.dtype) -> None:
    pool = filled(make_pool, dtype)
    slab = pool.slabs[0].to(CUDA)
    owners = MIXES[0]
    x, y = (t.to(CUDA) for t in inputs(len(owners), 0, dtype))
    together = y.clone()
    ops.sgmv_(together, x, slab, ops.plan_sgmv(build_segments(owners), pool.placed, dtype), 0, 0)
    for i in range(4):
        alone = y[i : i + 1].clone()
        ops.sgmv_(
            alone, x[i : i + 1].clone(), slab, ops.plan_sgmv(build_segments([owners[i]]), pool.placed, dtype), 0, 0
        )
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("site", range(3))
def test_a_graph_replays_with_more_fewer_and_no_adapters(make_pool, site: int) -> None:
    """Captured with one mix; every replay has the bits of the eager step with exact tables."""
    pool, dtype, rows = filled(make_pool, torch.bfloat16), torch.bfloat16, 16
    slab = pool.slabs[0].to(CUDA)
    most = Capacity(rows, rows, 2000, tuple(max(sum(r[s]) for r in RANKS) for s in range(3)))
    held = TritonTables.for_capacity(SITES, 1, most, CUDA)
    first = build_tables(build_segments(MIXES[3]), pool.placed)
    held.update(first)
    plan = SgmvPlan(first, dtype, rows, held)
    x, base = (t.to(CUDA) for t in inputs(rows, site, dtype))
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
            exact = SgmvPlan(tables, dtype, rows, sgmv_triton.prepare(tables, dtype, CUDA))
            sgmv_triton.sgmv_(eager, x, slab, exact, 0, site)
        assert torch.equal(y, eager)
        assert torch.equal(y, base) == (not tables.num_segments or not tables.records[0, site, :, 1:].any())


def pages_with(kv_lens: list[int], kv_heads: int, dim: int, dtype: torch.dtype) -> tuple[KvPages, np.ndarray]:
    counts = [-(-n // 16) for n in kv_lens]
    order = torch.randperm(sum(counts)).tolist()
    slab = torch.randn(sum(counts) * 2 * kv_heads * 16 * dim).to(dtype).view(torch.uint8)
    tables = np.zeros((len(counts), max(counts)), dtype=np.int32)
    for row, n in zip(tables, counts, strict=True):
        row[:n] = [order.pop() for _ in range(n)]
    return float_pages(slab.to(CUDA), dtype, kv_heads, 16, dim), tables


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (8, 2, 80), (8, 1, 256)])
def test_attention_at_full_size(
    ops: Ops, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, window: int | None
) -> None:
    query_lens, kv_lens = [1, 200, 1, 17, 512], [57, 200, 4000, 900, 1024]
    kv, tables = pages_with(kv_lens, kv_heads, dim, dtype)
    q = torch.randn(sum(query_lens), heads, dim, device=CUDA).to(dtype)
    plan = ops.plan_attention(tables, query_lens, kv_lens, 16, kv.num_pages)
    got = ops.paged_attention(q, kv, plan, dim**-0.5, window)
    lists = [row[: -(-n // 16)].tolist() for row, n in zip(tables, kv_lens, strict=True)]
    args = (q.cpu(), kv.keys.cpu(), kv.values.cpu(), lists, query_lens, kv_lens, dim**-0.5, window)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got.cpu().float(), paged_attention_reference(*args), **tolerance)


def test_an_attention_graph_replays_with_other_sequences(ops: Ops) -> None:
    kv_lens = [57, 200, 4000, 900, 1024, 1, 16, 17]
    kv, tables = pages_with(kv_lens, 8, 128, torch.bfloat16)
    q = torch.randn(4, 32, 128, device=CUDA, dtype=torch.bfloat16)
    most = AttentionCapacity(4, 256, 64, 0, 4, 64)
    steps = [[kv_lens[i] for i in order] for order in ((0, 1, 2, 3), (4, 5, 6, 7), (2, 2, 2, 2))]
    orders = [[0, 1, 2, 3], [4, 5, 6, 7], [2, 2, 2, 2]]
    plan = plan_of(tables[orders[0]], [1] * 4, steps[0], 16, 1, CUDA)
    held = AttentionTables(plan, CUDA, most)
    planned = replace(plan, prepared=held)
    attention_triton.attention(q, kv, planned, 0.1, None, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention_triton.attention(q, kv, planned, 0.1, None, None)
    for order, lens in zip(orders, steps, strict=True):
        held.update(plan_of(tables[order], [1] * 4, lens, 16, 1, CUDA))
        graph.replay()
        eager = ops.plan_attention(tables[order], [1] * 4, lens, 16, kv.num_pages)
        assert torch.equal(out, ops.paged_attention(q, kv, eager, 0.1))
