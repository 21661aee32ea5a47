"""SGMV by every backend against its fp32 reference and PEFT's own layer; Triton compiled on a CUDA device, else
interpreted."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from kernel_pools import LAWS, KernelPool, rows_by_law

from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims
from sgmv_kernels.metadata.segments import BASE, Segments, build_segments
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import sgmv_reference

FLOAT, HALF, BF16 = torch.float32, torch.float16, torch.bfloat16
SITES = (SiteDims(576, (576, 192, 192)), SiteDims(576, (576,)), SiteDims(576, (1536, 1536)), SiteDims(1536, (576,)))
CODES = (1, 4, 5)
"""Adapters of the following lists that are stored as int8 codes."""
RANKS = [
    [[1, 1, 1], [1], [1, 1], [1]],
    [[3, 0, 3], [0], [0, 0], [0]],
    [[8, 8, 8], [8], [8, 8], [8]],
    [[12, 24, 16], [100], [16, 3], [256]],
    [[0, 0, 0], [64], [0, 0], [0]],
    [[16, 16, 16], [16], [16, 16], [16]],
]
TRITON_SITES = (SiteDims(80, (96, 48, 40)), SiteDims(200, (72, 136)), SiteDims(576, (192,)))
TRITON_RANKS = [
    [[1, 3, 8], [12, 16], [3]],
    [[24, 0, 12], [0, 64], [0]],
    [[0, 0, 0], [3, 256], [16]],
    [[100, 16, 64], [0, 0], [8]],
    [[16, 16, 16], [1, 8], [24]],
]


def long(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.long)


def filled(ops: Ops, dtype: torch.dtype, split: bool = False) -> KernelPool:
    """The adapters, each in one run of pages or in many short ones; smaller ones where Triton may be interpreted."""
    return _filled(ops.name == "triton", dtype, split)


@cache
def _filled(small: bool, dtype: torch.dtype, split: bool) -> KernelPool:
    """Made once: tests only read it."""
    torch.manual_seed(5)
    sites, all_ranks, page, run = (TRITON_SITES, TRITON_RANKS, 1024, 39) if small else (SITES, RANKS, 12288, 11)
    pool = KernelPool(sites, dtype, 2, page, 4096)
    for i, ranks in enumerate(all_ranks):
        runs = [(660 * i + at, run + j % 2) for j, at in enumerate(range(0, 600, run + 3))]
        pool.add(ranks, runs if split else [(660 * i, 600)], codes=i in CODES)
    return pool


def one_adapter(out: int = 96) -> KernelPool:
    pool = KernelPool((SiteDims(64, (out,)),), FLOAT, 1, 1024, 64)
    pool.add([[6]], [(3, 20)])
    return pool


def segments_of(permutation, indptr, adapters) -> Segments:
    return Segments(*(np.array(a, dtype=np.int32) for a in (permutation, indptr, adapters)))


@pytest.mark.parametrize(
    ("ops", "law", "site", "dtype", "split"),
    [
        *itertools.product(("torch", "numba"), LAWS, range(4), (FLOAT, BF16), (False, True)),
        *(("triton", law, 0, FLOAT, False) for law in LAWS),
        *(("triton", "distinct", site, dtype, False) for site, dtype in ((0, BF16), (2, HALF))),
        *(long("triton", "distinct", site, dtype, False) for site in (1, 2) for dtype in (FLOAT, BF16)),
    ],
    indirect=["ops"],
    ids=str,
)
def test_matches_reference(ops: Ops, law: str, site: int, dtype: torch.dtype, split: bool) -> None:
    pool = filled(ops, dtype, split)
    got, y = pool.check(ops, rows_by_law(law, 11 if ops.name == "triton" else 23, len(pool.placed)), site)
    assert torch.equal(got, y) == (law == "base")


@pytest.mark.parametrize("codes", [False, True])
def test_every_rank_in_one_call(ops: Ops, codes: bool) -> None:
    """Ranks from 1 to 256 beside each other, each adapter with a row count of its own, rows shuffled."""
    ranks = [1, 3, 8, 12, 16, 24, 64, 100, 256]
    pool = KernelPool((SiteDims(576, (96, 32, 40)),), BF16, 1, 12288, 1024)
    for i, rank in enumerate(ranks):
        pool.add([[rank, 0 if i % 3 == 0 else rank, max(1, rank // 2)]], [(100 * i, 100)], codes=codes)
    rows = np.repeat(np.arange(-1, len(ranks)), [4, 1, 2, 3, 4, 5, 6, 7, 8, 40]).astype(np.int32)
    np.random.default_rng(0).shuffle(rows)
    pool.check(ops, rows, 0, layer=0)


@pytest.mark.parametrize("ops", ["torch", "numba", "triton"], indirect=True)
def test_sums_are_added_term_by_term(ops: Ops) -> None:
    """Rows of one to three terms beside rows of the base, some of the same adapters with other weights."""
    pool = filled(ops, FLOAT)
    placed, weights = [*pool.placed[:5], pool.placed[0]], [0.5, 1.0, -2.0, 1.25, 0.1, -1.0]
    passes = [[0, BASE, 3, 1, 5, 0, 2], [BASE, BASE, 1, 5, BASE, 3, 4], [BASE] * 6 + [0]]
    first, *more = map(build_segments, passes)
    plan = ops.plan_sgmv(first, placed, FLOAT, weights, more)
    assert plan.num_passes == 3
    for site in range(len(pool.sites)):
        x, y = pool.inputs(7, site)
        got = y.to(ops.device, copy=True)
        ops.sgmv_(got, x.to(ops.device), pool.slabs[1].to(ops.device), plan, 1, site)
        dense = [pool.dense[i][1][site] for i in (0, 1, 2, 3, 4, 0)]
        weighted = [
            [own and replace(own, scaling=own.scaling * weight) for own in slices]
            for slices, weight in zip(dense, weights, strict=True)
        ]
        want = y
        for turn in passes:
            want = sgmv_reference(want, x, build_segments(turn), weighted, pool.sites[site].out_features)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=2e-2)
        assert torch.equal(got.cpu()[1], y[1])
    assert ops.plan_sgmv(first, placed, FLOAT, weights, more) is plan
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert ops.plan_sgmv(first, placed, FLOAT, weights, more) is not plan, "it has no room for another thread"
    finally:
        torch.set_num_threads(threads)
    for changed in ([0.25, *weights[1:]], weights[::-1]):
        assert ops.plan_sgmv(first, placed, FLOAT, changed, more) is not plan
    assert ops.plan_sgmv(first, placed, FLOAT, weights, more[:1]).num_passes == 2
    assert ops.plan_sgmv(first, placed, FLOAT, weights, [build_segments([BASE] * 7)]).num_passes == 1


@pytest.mark.parametrize("dtype", [FLOAT, HALF, BF16], ids=str)
def test_shrink_then_expand_equals_both_at_once(ops: Ops, dtype: torch.dtype) -> None:
    pool, rows = filled(ops, dtype, split=True), rows_by_law("zipf:1.5", 23, len(RANKS))
    plan = ops.plan_sgmv(build_segments(rows), pool.placed, dtype)
    for site in range(4):
        whole, y = pool.check(ops, rows, site)
        v = ops.shrink(pool.inputs(23, site)[0], pool.slabs[1], plan, 1, site)
        assert (v.dim(), v.shape[1]) == (3, 23)
        ops.expand_(y, v, pool.slabs[1], plan, 1, site)
        torch.testing.assert_close(y, whole, rtol=1e-5, atol=1e-3)


# Not torch: one product over a run sums otherwise than several over its panels, or than one of another shape.


@pytest.mark.parametrize(
    ("ops", "site", "dtype"),
    [*(("numba", site, BF16) for site in range(4)), ("triton", 0, BF16), long("triton", 1, FLOAT)],
    indirect=["ops"],
    ids=str,
)
def test_split_panels_have_the_bits_of_one_run(ops: Ops, site: int, dtype: torch.dtype) -> None:
    whole, split = filled(ops, dtype), filled(ops, dtype, split=True)
    assert len(split.placed[3].copies(1)) > 1
    rows = [3, 0, *range(-1, len(whole.placed))]
    x, y = whole.inputs(len(rows), site)
    one, other = (pool.added(ops, rows, site, x, y) for pool in (whole, split))
    assert torch.equal(one, other)
    assert not torch.equal(one, y)


@pytest.mark.parametrize(
    ("ops", "site", "dtype"),
    [*(("numba", site, BF16) for site in range(4)), ("triton", 0, FLOAT)],
    indirect=["ops"],
    ids=str,
)
def test_a_row_has_the_same_bits_alone_in_any_order_and_beside_any_rows(ops: Ops, site: int, dtype) -> None:
    pool, rows = filled(ops, dtype), [3, 0, 4, 1, 3, -1, 2, 0, *[3] * 7]
    x, y = pool.inputs(len(rows), site)
    together = pool.added(ops, rows, site, x, y)
    order = torch.randperm(len(rows)).tolist()
    mixed = pool.added(ops, [rows[i] for i in order], site, x[order], y[order])
    assert torch.equal(mixed, together[order])
    for i in (0, 2, 3, 14) if ops.name == "triton" else range(len(rows)):
        assert torch.equal(pool.added(ops, [rows[i]], site, x[i : i + 1], y[i : i + 1]), together[i : i + 1])


@pytest.mark.parametrize(
    ("ops", "owners", "site", "dtype", "atol"),
    [
        *((name, [5] * 301 + [2, -1] + [3] * 77, 2, BF16, 2e-2) for name in ("torch", "numba")),
        *(("triton", [0] * (rows - 2) + [4, -1], 0, FLOAT, 2e-3) for rows in (40, 290)),
    ],
    indirect=["ops"],
    ids=["torch", "numba", "triton-decode-blocks", "triton-prefill-blocks"],
)
def test_adapters_with_many_rows(ops: Ops, owners: list[int], site: int, dtype: torch.dtype, atol: float) -> None:
    filled(ops, dtype).check(ops, owners, site, atol=atol)


def test_zero_length_segments_are_skipped(ops: Ops) -> None:
    filled(ops, BF16).check(ops, segments_of([1, 0], [0, 0, 2, 2, 2], [3, 5, 2, -1]), 1)


def test_a_plan_is_kept_until_rows_or_places_change(ops: Ops) -> None:
    pool = filled(ops, FLOAT)
    rows, moved = build_segments([0, 1, BASE]), [replace(placed) for placed in pool.placed]
    plan = ops.plan_sgmv(rows, pool.placed, FLOAT)
    assert ops.plan_sgmv(build_segments([0, 1, BASE]), list(pool.placed), FLOAT) is plan
    for segments, placed in ((build_segments([0, BASE, 1]), pool.placed), (rows, moved), (rows, pool.placed[:-1])):
        other = ops.plan_sgmv(segments, placed, FLOAT)
        assert other is not plan
        assert ops.plan_sgmv(rows, pool.placed, FLOAT) is not other


def test_linear_matches_peft(ops: Ops) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=6, lora_alpha=9, use_rslora=True, target_modules=["0"], init_lora_weights=False)
    peft = get_peft_model(torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False)), config).base_model.model[0]
    pool = one_adapter()
    dense = pool.dense[0][0][0][0]
    x = torch.randn(5, 64)
    with torch.no_grad():
        peft.lora_A["default"].weight.copy_(dense.lora_a)
        peft.lora_B["default"].weight.copy_(dense.lora_b)
        peft.scaling["default"] = dense.scaling
        base, want = peft.base_layer(x), peft(x)
    torch.testing.assert_close(pool.added(ops, [0] * 5, 0, x, base, layer=0), want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(want, base)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 64, dtype=BF16)}, "x must be float32|same dtype|x must be"),
        ({"x": torch.zeros(2, 63)}, "x has 63 columns"),
        ({"x": torch.zeros(3, 64)}, "same rows"),
        ({"y": torch.zeros(2, 95)}, "y has 95 columns, the site has 96"),
        ({"dtype": torch.float64}, "dtype"),
        ({"dtype": BF16}, "packed"),
        ({"segments": build_segments([0, 1])}, "name adapter 1"),
        ({"slab": torch.zeros(2, 2, dtype=torch.uint8)}, "slab"),
        ({"slab": torch.zeros(4096, dtype=torch.uint8)}, "slab ends before"),
        ({"y": torch.zeros(2, 192)[:, ::2]}, "y must be contiguous"),
        ({"segments": segments_of([0, 0], [0, 1, 2], [0, -1])}, "every row once"),
        ({"segments": segments_of([-1, 0], [0, 1, 2], [0, -1])}, "every row once"),
        ({"segments": replace(build_segments([0, -1]), permutation=np.arange(2))}, "int32"),
        ({"layer": -1}, "layer -1, site 0: the adapters have 1 layers, 1 sites"),
        ({"site": 1}, "layer 0, site 1"),
        ({"slab": torch.zeros(131072, dtype=torch.uint8)[::2]}, "slab must be contiguous"),
        ({"x": torch.zeros(2, 64, device="meta")}, "x is on meta"),
        ({"segments": segments_of([0, 1], [0, 2, 1], [0, -1])}, "indptr must rise"),
        ({"segments": segments_of([0, 1], [0, 1, 2], [0, -2])}, "indices, or BASE"),
        ({"adapters": [*one_adapter().placed, *one_adapter(80).placed]}, "same sites"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_written(ops: Ops, change: dict, message: str) -> None:
    pool = one_adapter()
    planned = {"segments": build_segments([0, -1]), "adapters": pool.placed, "dtype": FLOAT}
    arguments = {"y": torch.zeros(2, 96), "x": torch.zeros(2, 64), "slab": pool.slabs[0], "layer": 0, "site": 0}
    for name, value in change.items():
        (planned if name in planned else arguments)[name] = value
    with pytest.raises(KernelArgumentError, match=message):
        ops.sgmv_(**arguments, plan=ops.plan_sgmv(**planned))


def test_misaligned_panels_and_ranks_over_the_limit_are_refused(ops: Ops) -> None:
    [placed] = one_adapter().placed
    moved = replace(placed, offsets=tuple(offsets + 64 for offsets in placed.offsets))
    large = AdapterLayout(placed.layout.sites, (((257,),),), 4).place([(0, 1000)], 1024)
    for adapter, message in ((moved, "misaligned"), (large, "rank 257 is over the limit of 256")):
        with pytest.raises(KernelArgumentError, match=message):
            ops.plan_sgmv(build_segments([0]), [adapter], FLOAT)
