"""The Triton pointwise kernels: compiled on a CUDA device, else under Triton's interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import numpy as np
import pytest

from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import (
    gelu_mul_reference,
    rms_norm_reference,
    rope_reference,
    silu_mul_reference,
    softcap_reference,
)
from tests.helpers.float_pages import float_pages

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 16
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float16: {"rtol": 2e-3, "atol": 1e-4},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-3},
}


@pytest.fixture
def ops() -> Ops:
    return Ops(DEVICE, "triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [576, 100, 7, 4096])
@pytest.mark.parametrize("residual", [False, True])
def test_add_rms_norm(ops: Ops, width: int, residual: bool, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(3, width) * 30).to(dtype), torch.randn(width)
    delta = torch.randn(3, width).to(dtype) if residual else None
    total = x + delta if residual else x.clone()
    held = x.to(DEVICE, copy=True)
    got = ops.add_rms_norm_(held, None if delta is None else delta.to(DEVICE), weight.to(DEVICE), 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu().float(), rms_norm_reference(total, weight, 1e-5), **CLOSE[dtype])
    assert torch.equal(held.cpu(), total)


def moved(kv: KvPages, device: torch.device) -> KvPages:
    return KvPages(kv.slab.to(device), kv.format, kv.num_heads, kv.page_size, kv.head_dim)


def rotated(ops: Ops, qkv, cos, sin, kv: KvPages, pages, slots) -> tuple[torch.Tensor, KvPages]:
    """q, and the pages as they are afterwards."""
    there = moved(kv, DEVICE)
    tables = pages.numpy().astype(np.int32)[:, None]
    plan = ops.plan_attention(tables, [1] * len(tables), (slots + 1).tolist(), PAGE, kv.num_pages)
    q = ops.rope_write_kv(*(t.to(DEVICE) for t in (qkv, cos, sin)), there, plan)
    return q.cpu(), moved(there, torch.device("cpu"))


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("active", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "turned", "rows"),
    [(3, 1, 64, 64, 5), (2, 2, 80, 80, 1), (1, 1, 6, 6, 37), (2, 1, 64, 48, 5), (1, 1, 24, 2, 1)],
)
def test_rope_write_kv(
    ops: Ops, heads: int, kv_heads: int, dim: int, turned: int, rows: int, stored: torch.dtype, active: torch.dtype
) -> None:
    place = torch.randperm(3 * PAGE)[:rows]
    pages, slots = place // PAGE, place % PAGE
    size = 3 * 2 * kv_heads * PAGE * dim * stored.itemsize
    kv = float_pages(torch.full((size,), 0xFF, dtype=torch.uint8), stored, kv_heads, PAGE, dim)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(active)
    angle = torch.rand(rows, turned // 2) * 6
    got, kv = rotated(ops, qkv, angle.cos(), angle.sin(), kv, pages, slots)
    q, k, v = qkv.view(rows, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    assert got.dtype == active
    torch.testing.assert_close(got.float(), rope_reference(q, angle.cos(), angle.sin()), **CLOSE[active])
    keys = kv.keys[pages, :, :, slots].float()
    torch.testing.assert_close(keys, rope_reference(k, angle.cos(), angle.sin()), **CLOSE[stored])
    assert torch.equal(kv.values[pages, :, slots], v.to(stored))
    assert int(kv.keys.isfinite().sum()) == int(kv.values.isfinite().sum()) == rows * kv_heads * dim


def test_bf16_is_rounded_to_nearest_even(ops: Ops) -> None:
    kv = float_pages(torch.zeros(2 * PAGE * 8 * 2, dtype=torch.uint8), torch.bfloat16, 1, PAGE, 8)
    qkv = torch.cat((torch.zeros(1, 16), torch.randn(1, 8)), dim=1)
    qkv[0, 16:20] = torch.tensor([1.00390625, 1.01171875, float("nan"), -float("inf")])
    _, kv = rotated(ops, qkv, torch.ones(1, 4), torch.zeros(1, 4), kv, torch.tensor([0]), torch.tensor([3]))
    torch.testing.assert_close(kv.values[0, 0, 3], qkv[0, 16:].bfloat16(), rtol=0, atol=0, equal_nan=True)


def test_a_rotated_row_does_not_depend_on_the_rows_beside_it(ops: Ops) -> None:
    qkv, angle = torch.randn(20, 3 * 64), torch.rand(20, 32)
    kv = float_pages(torch.zeros(2 * 2 * PAGE * 64 * 4, dtype=torch.uint8), torch.float32, 1, PAGE, 64)
    place = torch.arange(20)
    many, kv_many = rotated(ops, qkv, angle.cos(), angle.sin(), kv, place // PAGE, place % PAGE)
    one = [t[17:18] for t in (qkv, angle.cos(), angle.sin())]
    alone, kv_one = rotated(ops, *one, kv, place[17:18] // PAGE, place[17:18] % PAGE)
    assert torch.equal(alone[0], many[17])
    assert torch.equal(kv_one.keys[1, 0, :, 1], kv_many.keys[1, 0, :, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [48, 1536, 13])
def test_silu_mul(ops: Ops, width: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 2 * width) * 10).to(dtype)
    gate_up[0, :4] = torch.tensor([-1e3, 1e3, -90.0, 0.0])
    got = ops.silu_mul(gate_up.to(DEVICE)).cpu()
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), silu_mul_reference(gate_up), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [48, 1536, 13])
def test_gelu_mul(ops: Ops, width: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(3, 2 * width) * 4).to(dtype)
    gate_up[0, :4] = torch.tensor([-1e2, 1e2, -9.0, 0.0])
    got = ops.gelu_mul(gate_up.to(DEVICE)).cpu()
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), gelu_mul_reference(gate_up), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (4, 2, 20)])
def test_norm_heads(ops: Ops, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    qkv = (torch.randn(3, (heads + 2 * kv_heads) * dim) * 30).to(dtype)
    q_weight, k_weight = torch.randn(dim), torch.randn(dim)
    q, k, v = qkv.view(3, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    parts = rms_norm_reference(q, q_weight, 1e-5), rms_norm_reference(k, k_weight, 1e-5), v.float()
    held = qkv.to(DEVICE, copy=True)
    ops.norm_heads_(held, q_weight.to(DEVICE), k_weight.to(DEVICE), kv_heads, 1e-5)
    torch.testing.assert_close(held.cpu().float(), torch.cat(parts, dim=1).flatten(1), **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2000, 13])
def test_softcap(ops: Ops, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, width) * torch.tensor([0.1, 1.0, 300.0])[:, None]).to(dtype)
    x[2, 0] = float("nan")
    held = x.to(DEVICE, copy=True)
    ops.softcap_(held, 30.0)
    want = softcap_reference(x, 30.0)
    torch.testing.assert_close(held.cpu().float(), want, **CLOSE[dtype], equal_nan=True)
