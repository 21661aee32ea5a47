"""SGMV against its fp32 reference and against PEFT's own layer."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims
from sgmv_kernels.metadata.segments import Segments, build_segments
from sgmv_kernels.ops import KernelArgumentError, Ops
from sgmv_kernels.reference import sgmv_reference


def _segments(permutation, indptr, adapters) -> Segments:
    return Segments(*(np.array(a, dtype=np.int32) for a in (permutation, indptr, adapters)))


SITES = (SiteDims(576, (576, 192, 192)), SiteDims(576, (576,)), SiteDims(576, (1536, 1536)), SiteDims(1536, (576,)))
PAGE = 12288
RANKS = [
    [[1, 1, 1], [1], [1, 1], [1]],
    [[3, 0, 3], [0], [0, 0], [0]],
    [[8, 8, 8], [8], [8, 8], [8]],
    [[12, 24, 16], [100], [16, 3], [256]],
    [[0, 0, 0], [64], [0, 0], [0]],
    [[16, 16, 16], [16], [16, 16], [16]],
]


@cache
def _filled(make_pool, dtype: torch.dtype, split: bool):
    """Made once: tests only read it."""
    torch.manual_seed(5)
    pool = make_pool(SITES, dtype, 2, PAGE, 4096)
    for i, ranks in enumerate(RANKS):
        first = i * 660
        pool.add(ranks, [(first + 14 * j, 11 + j % 3) for j in range(45)] if split else [(first, 600)])
    return pool


def _run(ops: Ops, pool, rows, site: int, layer: int):
    segments = build_segments(rows)
    x = torch.randn(len(rows), SITES[site].in_features)
    y = torch.randn(len(rows), SITES[site].total_out)
    adapters = [per_layer[layer][site] for per_layer in pool.dense]
    expected = sgmv_reference(y, x, segments, adapters, SITES[site].out_features)
    base = y.clone()
    ops.sgmv_(y, x, pool.slabs[layer], ops.plan_sgmv(segments, pool.placed, pool.dtype), layer, site)
    return y, expected, base


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["one run", "split"])
@pytest.mark.parametrize("site", range(4))
def test_matches_reference(ops: Ops, make_pool, rows_for, law: str, dtype: torch.dtype, split: bool, site: int) -> None:
    pool = _filled(make_pool, dtype, split)
    y, expected, base = _run(ops, pool, rows_for(law, 23, len(RANKS)), site, layer=1)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=2e-2)
    assert torch.equal(y, base) == (law == "base")


def test_every_rank_in_one_call(ops: Ops, make_pool) -> None:
    """Ranks from 1 to 256 beside each other, each adapter with a row count of its own, rows shuffled."""
    ranks = [1, 3, 8, 12, 16, 24, 64, 100, 256]
    sites = (SiteDims(576, (96, 32, 40)),)
    pool = make_pool(sites, torch.bfloat16, 1, PAGE, 1024)
    for i, rank in enumerate(ranks):
        pool.add([[rank, 0 if i % 3 == 0 else rank, max(1, rank // 2)]], [(100 * i, 100)])
    rows = np.repeat(np.arange(-1, len(ranks)), [4, 1, 2, 3, 4, 5, 6, 7, 8, 40]).astype(np.int32)
    np.random.default_rng(0).shuffle(rows)
    segments = build_segments(rows)
    x, y = torch.randn(len(rows), 576), torch.randn(len(rows), 168)
    expected = sgmv_reference(y, x, segments, [a[0][0] for a in pool.dense], sites[0].out_features)
    ops.sgmv_(y, x, pool.slabs[0], ops.plan_sgmv(segments, pool.placed, pool.dtype), 0, 0)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_shrink_then_expand_equals_both_at_once(ops: Ops, make_pool, rows_for, dtype: torch.dtype) -> None:
    pool = _filled(make_pool, dtype, split=True)
    segments = build_segments(rows_for("zipf:1.5", 23, len(RANKS)))
    plan = ops.plan_sgmv(segments, pool.placed, dtype)
    for site, dims in enumerate(SITES):
        x, y = torch.randn(23, dims.in_features), torch.randn(23, dims.total_out)
        whole, expected = y.clone(), sgmv_reference(
            y, x, segments, [a[0][site] for a in pool.dense], dims.out_features
        )  # fmt: skip
        v = ops.shrink(x, pool.slabs[0], plan, 0, site)
        assert v.dim() == 3
        assert v.shape[1] == 23
        ops.expand_(y, v, pool.slabs[0], plan, 0, site)
        ops.sgmv_(whole, x, pool.slabs[0], plan, 0, site)
        torch.testing.assert_close(y, whole, rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=2e-2)


def test_split_panels_give_the_same_bits(ops: Ops, make_pool, rows_for) -> None:
    results = []
    for split in (False, True):
        pool = _filled(make_pool, torch.bfloat16, split)
        torch.manual_seed(6)
        results.append([_run(ops, pool, rows_for("uniform", 23, len(RANKS)), site, layer=1)[0] for site in range(4)])
    if ops.name == "torch":
        pytest.skip("one product over a run sums otherwise than several over its panels")
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_row_does_not_depend_on_the_rows_beside_it(ops: Ops, make_pool) -> None:
    if ops.name == "torch":
        pytest.skip("matrix products of torch differ in the last bits by shape")
    pool = _filled(make_pool, torch.bfloat16, split=False)
    rows = [3, 5, -1, 3, 3, 3, 2, 0, 3, 5, 3, 3, 3, 3]
    for site, dims in enumerate(SITES):
        x, y = torch.randn(len(rows), dims.in_features), torch.randn(len(rows), dims.total_out)
        together = y.clone()
        ops.sgmv_(together, x, pool.slabs[0], ops.plan_sgmv(build_segments(rows), pool.placed, pool.dtype), 0, site)
        for t, adapter in enumerate(rows):
            alone = y[t : t + 1].clone()
            plan = ops.plan_sgmv(build_segments([adapter]), pool.placed, pool.dtype)
            ops.sgmv_(alone, x[t : t + 1], pool.slabs[0], plan, 0, site)
            assert torch.equal(alone[0], together[t]), (site, t)


def test_adapter_with_many_rows(ops: Ops, make_pool) -> None:
    pool = _filled(make_pool, torch.bfloat16, split=False)
    y, expected, _ = _run(ops, pool, [5] * 301 + [2, -1] + [3] * 77, 2, layer=0)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=2e-2)


def test_zero_length_segments_are_skipped(ops: Ops, make_pool) -> None:
    pool = _filled(make_pool, torch.bfloat16, split=False)
    segments = Segments(
        np.array([1, 0], dtype=np.int32),
        np.array([0, 0, 2, 2, 2], dtype=np.int32),
        np.array([3, 5, 2, -1], dtype=np.int32),
    )
    x, y = torch.randn(2, 576), torch.randn(2, 576)
    expected = sgmv_reference(y, x, segments, [a[0][1] for a in pool.dense], (576,))
    ops.sgmv_(y, x, pool.slabs[0], ops.plan_sgmv(segments, pool.placed, pool.dtype), 0, 1)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=2e-2)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_batch_of_any_adapters(make_pool, data: st.DataObject) -> None:
    """Random ranks (0 included), widths that no vector divides, rows in any order, on the default kernels."""
    ops = Ops(torch.device("cpu"))
    widths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    sites = (SiteDims(data.draw(st.integers(1, 100)), tuple(widths)),)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    pool = make_pool(sites, dtype, 1, 1024, 2048)
    count = data.draw(st.integers(1, 5))
    for i in range(count):
        pool.add(
            [data.draw(st.lists(st.integers(0, 40), min_size=len(widths), max_size=len(widths)))], [(400 * i, 400)]
        )
    rows = data.draw(st.lists(st.integers(-1, count - 1), min_size=1, max_size=40))
    segments = build_segments(rows)
    x, y = torch.randn(len(rows), sites[0].in_features), torch.randn(len(rows), sum(widths))
    expected = sgmv_reference(y, x, segments, [a[0][0] for a in pool.dense], tuple(widths))
    ops.sgmv_(y, x, pool.slabs[0], ops.plan_sgmv(segments, pool.placed, dtype), 0, 0)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-2)


def test_base_rows_are_untouched_bit_for_bit(ops: Ops, make_pool) -> None:
    pool = _filled(make_pool, torch.bfloat16, split=False)
    y, _, base = _run(ops, pool, [5, -1, 2, -1, 5], 0, layer=0)
    assert torch.equal(y[[1, 3]], base[[1, 3]])
    assert not torch.isclose(y[[0, 2, 4]], base[[0, 2, 4]]).all(dim=1).any()


def test_swapping_two_adapters_changes_the_rows(ops: Ops, make_pool) -> None:
    pool = _filled(make_pool, torch.float32, split=False)
    torch.manual_seed(3)
    one, _, _ = _run(ops, pool, [2, 5], 0, layer=0)
    torch.manual_seed(3)
    other, _, _ = _run(ops, pool, [5, 2], 0, layer=0)
    assert not torch.allclose(one, other)


def test_linear_matches_peft(ops: Ops, make_pool) -> None:
    from peft import LoraConfig, get_peft_model

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = torch.nn.Linear(64, 96, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x)

    config = LoraConfig(r=6, lora_alpha=9, use_rslora=True, target_modules=["q"], init_lora_weights=False)
    peft = get_peft_model(Model(), config).base_model.model.q
    pool = make_pool((SiteDims(64, (96,)),), torch.float32, 1, 1024, 64)
    pool.add([[6]], [(3, 20)])
    dense = pool.dense[0][0][0][0]
    with torch.no_grad():
        peft.lora_A["default"].weight.copy_(dense.lora_a)
        peft.lora_B["default"].weight.copy_(dense.lora_b)
        peft.scaling["default"] = dense.scaling
    x = torch.randn(5, 64)
    y = peft.base_layer(x).detach()
    base = y.clone()
    ops.sgmv_(y, x, pool.slabs[0], ops.plan_sgmv(build_segments([0] * 5), pool.placed, torch.float32), 0, 0)
    torch.testing.assert_close(y, peft(x).detach(), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(y, base)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 64, dtype=torch.bfloat16)}, "x must be float32|same dtype|x must be"),
        ({"x": torch.zeros(2, 63)}, "x has 63 columns"),
        ({"x": torch.zeros(3, 64)}, "same rows"),
        ({"y": torch.zeros(2, 95)}, "y has 95 columns, the site has 96"),
        ({"dtype": torch.float64}, "dtype"),
        ({"dtype": torch.bfloat16}, "packed"),
        ({"segments": build_segments([0, 1])}, "name adapter 1"),
        ({"slab": torch.zeros(2, 2, dtype=torch.uint8)}, "slab"),
        ({"slab": torch.zeros(4096, dtype=torch.uint8)}, "slab ends before"),
        ({"y": torch.zeros(2, 192)[:, ::2]}, "y must be contiguous"),
        ({"segments": _segments([0, 0], [0, 1, 2], [0, -1])}, "every row once"),
        ({"segments": _segments([-1, 0], [0, 1, 2], [0, -1])}, "every row once"),
        ({"segments": replace(build_segments([0, -1]), permutation=np.arange(2))}, "int32"),
        ({"layer": -1}, "layer -1, site 0: the adapters have 1 layers, 1 sites"),
        ({"site": 1}, "layer 0, site 1"),
        ({"slab": torch.zeros(131072, dtype=torch.uint8)[::2]}, "slab must be contiguous"),
        ({"x": torch.zeros(2, 64, device="meta")}, "x is on meta"),
        ({"segments": _segments([0, 1], [0, 2, 1], [0, -1])}, "indptr must rise"),
        ({"segments": _segments([0, 1], [0, 1, 2], [0, -2])}, "indices, or BASE"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_written(ops: Ops, make_pool, change: dict, message: str) -> None:
    pool = make_pool((SiteDims(64, (96,)),), torch.float32, 1, 1024, 64)
    pool.add([[6]], [(3, 20)])
    arguments = {"y": torch.zeros(2, 96), "x": torch.zeros(2, 64), "slab": pool.slabs[0]}
    planned = {"segments": build_segments([0, -1]), "adapters": pool.placed, "dtype": torch.float32}
    planned |= {name: value for name, value in change.items() if name in planned}
    arguments |= {"layer": 0, "site": 0}
    arguments |= {name: value for name, value in change.items() if name in arguments}
    with pytest.raises(KernelArgumentError, match=message):
        ops.sgmv_(**arguments, plan=ops.plan_sgmv(**planned))


def test_adapters_of_another_base_are_refused(ops: Ops, make_pool) -> None:
    one = make_pool((SiteDims(64, (96,)),), torch.float32, 1, 1024, 64)
    other = make_pool((SiteDims(64, (80,)),), torch.float32, 1, 1024, 64)
    one.add([[6]], [(3, 20)])
    other.add([[6]], [(3, 20)])
    with pytest.raises(KernelArgumentError, match="same sites"):
        ops.plan_sgmv(build_segments([0, 1]), [*one.placed, *other.placed], torch.float32)


def test_misaligned_panels_and_ranks_over_the_limit_are_refused(ops: Ops, make_pool) -> None:
    pool = make_pool((SiteDims(64, (96,)),), torch.float32, 1, 1024, 64)
    pool.add([[6]], [(3, 20)])
    moved = replace(pool.placed[0], offsets=tuple(offsets + 64 for offsets in pool.placed[0].offsets))
    with pytest.raises(KernelArgumentError, match="misaligned"):
        ops.plan_sgmv(build_segments([0]), [moved], torch.float32)
    layout = AdapterLayout((SiteDims(64, (96,)),), (((257,),),), 4)
    placed = layout.place([(0, 1000)], 1024)
    with pytest.raises(KernelArgumentError, match="rank 257 is over the limit of 256"):
        ops.plan_sgmv(build_segments([0]), [placed], torch.float32)
