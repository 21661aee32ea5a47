"""SGMV against its fp32 reference and against PEFT's own layer."""

import pytest
import torch

from sgmv_kernels.layout import SiteDims
from sgmv_kernels.ops import KernelArgumentError, Ops
from sgmv_kernels.reference import sgmv_reference
from sgmv_kernels.segments import build_segments

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


def _filled(make_pool, dtype: torch.dtype, split: bool):
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
    ],
)
def test_bad_arguments_are_named_before_anything_is_written(ops: Ops, make_pool, change: dict, message: str) -> None:
    pool = make_pool((SiteDims(64, (96,)),), torch.float32, 1, 1024, 64)
    pool.add([[6]], [(3, 20)])
    arguments = {"y": torch.zeros(2, 96), "x": torch.zeros(2, 64), "slab": pool.slabs[0]}
    planned = {"segments": build_segments([0, -1]), "adapters": pool.placed, "dtype": torch.float32}
    planned |= {name: value for name, value in change.items() if name in planned}
    arguments |= {name: value for name, value in change.items() if name in arguments}
    with pytest.raises(KernelArgumentError, match=message):
        ops.sgmv_(**arguments, plan=ops.plan_sgmv(**planned), layer=0, site=0)


def test_adapters_of_another_base_are_refused(ops: Ops, make_pool) -> None:
    one = make_pool((SiteDims(64, (96,)),), torch.float32, 1, 1024, 64)
    other = make_pool((SiteDims(64, (80,)),), torch.float32, 1, 1024, 64)
    one.add([[6]], [(3, 20)])
    other.add([[6]], [(3, 20)])
    with pytest.raises(KernelArgumentError, match="same sites"):
        ops.plan_sgmv(build_segments([0, 1]), [*one.placed, *other.placed], torch.float32)
