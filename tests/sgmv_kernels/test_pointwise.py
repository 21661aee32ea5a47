"""RMSNorm with its residual, rotary embedding with the write of keys and values, gated SiLU, against references."""

import pytest
import torch

from sgmv_kernels.ops import KernelArgumentError, Ops
from sgmv_kernels.reference import (
    gelu_mul_reference,
    rms_norm_reference,
    rope_reference,
    silu_mul_reference,
    softcap_reference,
)
from tests.helpers.float_pages import float_pages

PAGE = 16


@pytest.mark.parametrize("width", [576, 100, 7])
@pytest.mark.parametrize("residual", [False, True])
def test_add_rms_norm(ops: Ops, width: int, residual: bool) -> None:
    x, weight = torch.randn(5, width) * 30, torch.randn(width)
    delta = torch.randn(5, width) if residual else None
    total = x + delta if residual else x.clone()
    got = ops.add_rms_norm_(x, delta, weight, 1e-5)
    torch.testing.assert_close(got, rms_norm_reference(total, weight, 1e-5))
    torch.testing.assert_close(x, total, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "turned"),
    [(3, 1, 64, 64), (4, 2, 80, 80), (2, 2, 8, 8), (3, 1, 64, 48), (2, 2, 24, 2)],
)
def test_rope_write_kv(
    ops: Ops, plan_for, heads: int, kv_heads: int, dim: int, turned: int, dtype: torch.dtype
) -> None:
    rows, pages, slots = 5, torch.tensor([2, 0, 1, 1, 2]), torch.tensor([5, 15, 0, 1, 6])
    kv = float_pages(torch.full((3 * 2 * kv_heads * PAGE * dim * dtype.itemsize,), 0xFF, dtype=torch.uint8), dtype,
                  kv_heads, PAGE, dim)  # fmt: skip
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim)
    angle = torch.rand(rows, turned // 2) * 6
    cos, sin = angle.cos(), angle.sin()
    got = ops.rope_write_kv(qkv.clone(), cos, sin, kv, plan_for(ops, pages, slots, PAGE, 3))
    q, k, v = qkv.view(rows, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    torch.testing.assert_close(got, rope_reference(q, cos, sin))
    for t in range(rows):
        key = kv.keys[pages[t], :, :, slots[t]].float()
        expected = rope_reference(k, cos, sin)[t]
        torch.testing.assert_close(key, expected, **({} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-5}))
        assert torch.equal(kv.values[pages[t], :, slots[t]], v[t].to(dtype))
    assert int(kv.keys.isfinite().sum()) == int(kv.values.isfinite().sum()) == rows * kv_heads * dim


def test_bf16_keys_are_rounded_to_nearest_even(ops: Ops, plan_for) -> None:
    kv = float_pages(torch.zeros(2 * PAGE * 8 * 2, dtype=torch.uint8), torch.bfloat16, 1, PAGE, 8)
    qkv = torch.cat((torch.zeros(1, 16), torch.randn(1, 8)), dim=1)
    qkv[0, 16:20] = torch.tensor([1.00390625, 1.01171875, float("nan"), float("inf")])
    plan = plan_for(ops, torch.tensor([0]), torch.tensor([3]), PAGE, 1)
    ops.rope_write_kv(qkv, torch.ones(1, 4), torch.zeros(1, 4), kv, plan)
    torch.testing.assert_close(kv.values[0, 0, 3], qkv[0, 16:].bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", [48, 1536, 13])
def test_silu_mul(ops: Ops, width: int) -> None:
    gate_up = torch.randn(5, 2 * width) * 10
    gate_up[0, :4] = torch.tensor([-1e4, 1e4, -90.0, 0.0])
    torch.testing.assert_close(ops.silu_mul(gate_up), silu_mul_reference(gate_up), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [48, 1536, 13])
def test_gelu_mul(ops: Ops, width: int) -> None:
    gate_up = torch.randn(5, 2 * width) * 4
    gate_up[0, :6] = torch.tensor([-1e4, 1e4, -9.0, 0.0, 1e-4, -1e-4])
    torch.testing.assert_close(ops.gelu_mul(gate_up), gelu_mul_reference(gate_up), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (4, 2, 20), (2, 2, 7)])
def test_norm_heads(ops: Ops, heads: int, kv_heads: int, dim: int) -> None:
    qkv, q_weight, k_weight = torch.randn(5, (heads + 2 * kv_heads) * dim) * 30, torch.randn(dim), torch.randn(dim)
    q, k, v = qkv.view(5, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    parts = rms_norm_reference(q, q_weight, 1e-5), rms_norm_reference(k, k_weight, 1e-5), v
    want = torch.cat(parts, dim=1).flatten(1)
    ops.norm_heads_(qkv, q_weight, k_weight, kv_heads, 1e-5)
    torch.testing.assert_close(qkv, want)


@pytest.mark.parametrize("width", [384, 13])
def test_softcap(ops: Ops, width: int) -> None:
    x = torch.randn(5, width) * torch.tensor([1e-5, 0.1, 1.0, 30.0, 1e4])[:, None]
    x[4, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    want = softcap_reference(x, 30.0)
    ops.softcap_(x, 30.0)
    torch.testing.assert_close(x, want, rtol=1e-6, atol=1e-9, equal_nan=True)


def test_bad_arguments(ops: Ops, plan_for) -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(KernelArgumentError, match="weight must be"):
        ops.add_rms_norm_(x, None, torch.zeros(7), 1e-5)
    with pytest.raises(KernelArgumentError, match="weight must be contiguous"):
        ops.add_rms_norm_(x, None, torch.zeros(1).expand(8), 1e-5)
    with pytest.raises(KernelArgumentError, match="delta must be"):
        ops.add_rms_norm_(x, torch.zeros(1, 8), torch.zeros(8), 1e-5)
    with pytest.raises(KernelArgumentError, match="x must be float32"):
        ops.add_rms_norm_(x.double(), None, torch.zeros(8), 1e-5)
    with pytest.raises(KernelArgumentError, match="gate_up"):
        ops.silu_mul(torch.zeros(2, 7))
    with pytest.raises(KernelArgumentError, match="gate_up"):
        ops.gelu_mul(torch.zeros(2, 7))
    with pytest.raises(KernelArgumentError, match="k_weight must be contiguous float32"):
        ops.norm_heads_(torch.zeros(2, 24), torch.ones(8), torch.ones(4), 1, 1e-5)
    with pytest.raises(KernelArgumentError, match="no number of heads"):
        ops.norm_heads_(torch.zeros(2, 16), torch.ones(8), torch.ones(8), 1, 1e-5)
    with pytest.raises(KernelArgumentError, match="cap positive"):
        ops.softcap_(x, 0.0)
    kv = float_pages(torch.zeros(2 * PAGE * 8 * 4, dtype=torch.uint8), torch.float32, 1, PAGE, 8)
    two, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4)
    plan = plan_for(ops, two, two, PAGE, 1)
    with pytest.raises(KernelArgumentError, match="number of heads"):
        ops.rope_write_kv(torch.zeros(2, 20), table, table, kv, plan)
    with pytest.raises(KernelArgumentError, match="cos"):
        ops.rope_write_kv(torch.zeros(2, 24), table[:1], table, kv, plan)
    with pytest.raises(KernelArgumentError, match="sum to the rows"):
        ops.rope_write_kv(torch.zeros(2, 24), table, table, kv, plan_for(ops, two[:1], two[:1], PAGE, 1))
    with pytest.raises(KernelArgumentError, match="plan is for 9 pages, but there are 1"):
        ops.rope_write_kv(torch.zeros(2, 24), table, table, kv, plan_for(ops, two, two, PAGE, 9))
    with pytest.raises(KernelArgumentError, match="pages of 8 tokens"):
        ops.rope_write_kv(torch.zeros(2, 24), table, table, kv, plan_for(ops, two, two, 8, 1))
