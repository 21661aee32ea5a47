"""RMSNorm with its residual, rotary embedding with the write of keys and values, gates, norms of heads and the softcap,
by every backend against its reference; Triton compiled on a CUDA device, else interpreted."""

import itertools
import math

import pytest
import torch
from float_pages import float_pages
from kernel_pools import pages_on, plan_at

from sgmv_kernels.backend import NO_TOKEN
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import (
    gelu_mul_reference,
    gelu_reference,
    layer_norm_reference,
    rms_norm_reference,
    rope_reference,
    silu_mul_reference,
    softcap_reference,
)

PAGE = 16
FLOAT, HALF, BF16 = DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CLOSE = {FLOAT: {"rtol": 1e-5, "atol": 1e-6}, HALF: {"rtol": 2e-3, "atol": 1e-4}, BF16: {"rtol": 1e-2, "atol": 1e-3}}
STORED = CLOSE | {BF16: {"rtol": 8e-3, "atol": 1e-5}}
# The CPU's kernels compute in float32; Triton's in what the model computes in.
kinds = pytest.mark.parametrize(
    ("ops", "dtype"),
    [("torch", FLOAT), ("numba", FLOAT), *itertools.product(["triton"], DTYPES)],
    indirect=["ops"],
    ids=str,
)
every_backend = pytest.mark.parametrize("ops", ["torch", "numba", "triton"], indirect=True)


@kinds
@pytest.mark.parametrize("width", [576, 100, 7, 4096])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norms_of_sums(ops: Ops, norm: str, width: int, residual: bool, dtype: torch.dtype) -> None:
    add, reference = {
        "rms": (ops.add_rms_norm_, rms_norm_reference),
        "layer": (ops.add_layer_norm_, layer_norm_reference),
    }[norm]
    spread = torch.tensor([30.0, 30.0, 3e-3])[:, None]  # of the last row epsilon is a large part
    x, weight = ((torch.randn(3, width) + 1) * spread).to(dtype), torch.randn(width)
    delta = (torch.randn(3, width) * spread / 30).to(dtype) if residual else None
    total = x + delta if residual else x.clone()
    held = x.to(ops.device, copy=True)
    got = add(held, None if delta is None else delta.to(ops.device), weight.to(ops.device), 1e-5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.cpu().float(), reference(total, weight, 1e-5), **CLOSE[dtype])
    assert torch.equal(held.cpu(), total)


def rotated(ops: Ops, qkv, cos, sin, kv: KvPages, pages, slots) -> tuple[torch.Tensor, KvPages]:
    """q, and the pages as they are afterwards."""
    there = pages_on(kv, ops.device)
    plan = plan_at(ops, pages, slots, PAGE, kv.num_pages)
    q = ops.rope_write_kv(*(t.to(ops.device, copy=True) for t in (qkv, cos, sin)), there, plan)
    return q.cpu(), pages_on(there, torch.device("cpu"))


@pytest.mark.parametrize(
    ("ops", "active", "stored"),
    [*itertools.product(["torch", "numba"], [FLOAT], [FLOAT, BF16]), *itertools.product(["triton"], DTYPES, DTYPES)],
    indirect=["ops"],
    ids=str,
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "turned", "rows"),
    [(3, 1, 64, 64, 5), (4, 2, 80, 80, 1), (2, 2, 8, 8, 5), (1, 1, 6, 6, 37), (3, 1, 64, 48, 5), (2, 2, 24, 2, 1)],
)
def test_rope_write_kv(ops: Ops, heads: int, kv_heads: int, dim: int, turned: int, rows: int, stored, active) -> None:
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
    torch.testing.assert_close(keys, rope_reference(k, angle.cos(), angle.sin()), **STORED[stored])
    assert torch.equal(kv.values[pages, :, slots], v.to(stored))
    assert int(kv.keys.isfinite().sum()) == int(kv.values.isfinite().sum()) == rows * kv_heads * dim


@every_backend
@pytest.mark.parametrize("kv_format", ["float32", "int8"])
@pytest.mark.parametrize(("turned", "rows"), [(32, 5), (24, 37)])
def test_queries_alone(ops: Ops, kv_format: str, turned: int, rows: int) -> None:
    """As with keys beside them, to the bit; nothing is written."""
    heads, kv_heads, dim = 4, 2, 32
    stored = KV_FORMATS[kv_format]
    slab = torch.full((3 * stored.page_bytes(kv_heads, dim, PAGE),), 0xFF, dtype=torch.uint8, device=ops.device)
    kv = KvPages(slab, stored, kv_heads, PAGE, dim)
    plan = plan_at(ops, torch.arange(rows) // PAGE, torch.arange(rows) % PAGE, PAGE, 3)
    qkv, angle = torch.randn(rows, (heads + 2 * kv_heads) * dim, device=ops.device), torch.rand(rows, turned // 2)
    cos, sin = angle.cos().to(ops.device), angle.sin().to(ops.device)
    q = qkv[:, : heads * dim].contiguous()
    got = ops.rope_queries(q, cos, sin, kv, plan).clone()
    assert (slab == 0xFF).all()
    assert torch.equal(got, ops.rope_write_kv(qkv, cos, sin, kv, plan))
    assert (slab != 0xFF).any()


@every_backend
def test_bf16_is_rounded_to_nearest_even(ops: Ops) -> None:
    kv = float_pages(torch.zeros(2 * PAGE * 8 * 2, dtype=torch.uint8), BF16, 1, PAGE, 8)
    qkv = torch.cat((torch.zeros(1, 16), torch.randn(1, 8)), dim=1)
    qkv[0, 16:18] = torch.tensor([1.00390625, 1.01171875])
    _, kv = rotated(ops, qkv, torch.ones(1, 4), torch.zeros(1, 4), kv, torch.tensor([0]), torch.tensor([3]))
    torch.testing.assert_close(kv.values[0, 0, 3], qkv[0, 16:].bfloat16(), rtol=0, atol=0)
    assert (kv.keys[0, 0, :, 3] == 0).all()
    # What is no number in a page is one of its keys: see `kv_format.held`.
    qkv[0, 18:22] = torch.tensor([math.nan, math.inf, -math.inf, 3.4e38])
    _, kv = rotated(ops, qkv, torch.ones(1, 4), torch.zeros(1, 4), kv, torch.tensor([0]), torch.tensor([3]))
    assert (kv.values[0, 0, 3, 2:6] == 0).all()
    assert kv.keys[0, 0, :, 3].isnan().all()


@every_backend
def test_a_rotated_row_does_not_depend_on_the_rows_beside_it(ops: Ops) -> None:
    qkv, angle = torch.randn(20, 3 * 64), torch.rand(20, 32)
    kv = float_pages(torch.zeros(2 * 2 * PAGE * 64 * 4, dtype=torch.uint8), FLOAT, 1, PAGE, 64)
    place = torch.arange(20)
    many, kv_many = rotated(ops, qkv, angle.cos(), angle.sin(), kv, place // PAGE, place % PAGE)
    one = [t[17:18] for t in (qkv, angle.cos(), angle.sin())]
    alone, kv_one = rotated(ops, *one, kv, place[17:18] // PAGE, place[17:18] % PAGE)
    assert torch.equal(alone[0], many[17])
    assert torch.equal(kv_one.keys[1, 0, :, 1], kv_many.keys[1, 0, :, 1])


@kinds
@pytest.mark.parametrize("width", [48, 1536, 13])
@pytest.mark.parametrize(
    ("gate", "reference", "spread", "edges"),
    [
        ("silu_mul", silu_mul_reference, 10, [-90.0, 0.0]),
        ("gelu_mul", gelu_mul_reference, 4, [-9.0, 0.0, 1e-4, -1e-4]),
    ],
)
def test_gates(ops: Ops, gate: str, reference, spread: float, edges: list[float], width: int, dtype) -> None:
    gate_up = (torch.randn(3, 2 * width) * spread).to(dtype)
    most = 1e4 if dtype == FLOAT else 1e2
    gate_up[0, : 2 + len(edges)] = torch.tensor([-most, most, *edges])
    got = getattr(ops, gate)(gate_up.to(ops.device)).cpu()
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), reference(gate_up), **CLOSE[dtype])


@kinds
@pytest.mark.parametrize("width", [48, 1536, 13])
def test_gelu(ops: Ops, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, width) * 4).to(dtype)
    x[0, :6] = torch.tensor([-100.0, 100.0, -9.0, 0.0, 1e-4, -1e-4])
    got = ops.gelu(x.to(ops.device)).cpu()
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), gelu_reference(x), **CLOSE[dtype])


@kinds
@pytest.mark.parametrize("width", [576, 7])
def test_sums_without_a_norm(ops: Ops, width: int, dtype: torch.dtype) -> None:
    x, delta = torch.randn(19, width).to(dtype), torch.randn(19, width).to(dtype)
    held = x.to(ops.device, copy=True)
    ops.add_(held, delta.to(ops.device))
    assert torch.equal(held.cpu(), x + delta)


@kinds
@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_dim", "k_dim"),
    [(3, 1, 64, 64), (4, 2, 20, 20), (2, 2, 7, 7), (1, 1, 1536, 192), (1, 1, 24, 40), (2, 0, 16, 16)],
)
def test_norm_heads(ops: Ops, heads: int, kv_heads: int, q_dim: int, k_dim: int, dtype: torch.dtype) -> None:
    widths = heads * q_dim, kv_heads * k_dim, kv_heads * k_dim
    qkv = (torch.randn(3, sum(widths)) * 30).to(dtype)
    q_weight, k_weight = torch.randn(q_dim), torch.randn(k_dim)
    q, k, v = qkv.split(widths, dim=1)
    parts = [rms_norm_reference(p.view(3, -1, len(w)), w, 1e-5).flatten(1) for p, w in ((q, q_weight), (k, k_weight))]
    held = qkv.to(ops.device, copy=True)
    ops.norm_heads_(held, q_weight.to(ops.device), k_weight.to(ops.device), kv_heads, 1e-5)
    torch.testing.assert_close(held.cpu().float(), torch.cat([*parts, v.float()], dim=1), **CLOSE[dtype])


@kinds
@pytest.mark.parametrize("width", [384, 2000, 13])
def test_softcap(ops: Ops, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(5, width) * torch.tensor([1e-5, 0.1, 1.0, 30.0, 1e4])[:, None]).to(dtype)
    x[4, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    held = x.to(ops.device, copy=True)
    ops.softcap_(held, 30.0)
    close = CLOSE[dtype] if ops.name == "triton" else {"rtol": 1e-6, "atol": 1e-9}
    torch.testing.assert_close(held.cpu().float(), softcap_reference(x, 30.0), **close, equal_nan=True)


@pytest.mark.parametrize("width", [1, 13, 1024, 3000])
def test_likeliest(ops: Ops, width: int) -> None:
    x = torch.randn(9, width + 5)
    x[0], x[1, : width // 2], x[2] = 0.0, 7.0, -1e30
    for row, number in ((5, float("inf")), (6, -float("inf")), (7, float("nan"))):
        x[row, width // 2] = number
    got = ops.likeliest(x[:, :width].to(ops.device))
    assert (got.dtype, got.device.type) == (torch.int64, ops.device.type)
    want = x[:, :width].argmax(dim=-1)
    want[5:8] = NO_TOKEN
    assert got.tolist() == want.tolist()
    assert not len(ops.likeliest(x[:0].to(ops.device)))


def test_bad_arguments(ops: Ops) -> None:
    x, gate_up, qkv = torch.zeros(2, 8), torch.zeros(2, 7), torch.zeros(2, 24)
    kv = float_pages(torch.zeros(2 * PAGE * 8 * 4, dtype=torch.uint8), FLOAT, 1, PAGE, 8)
    two, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4)
    plan = plan_at(ops, two, two, PAGE, 1)
    for call, arguments, message in (
        (ops.add_rms_norm_, (x, None, torch.zeros(7), 1e-5), "weight must be"),
        (ops.add_rms_norm_, (x, None, torch.zeros(1).expand(8), 1e-5), "weight must be contiguous"),
        (ops.add_rms_norm_, (x, torch.zeros(1, 8), torch.zeros(8), 1e-5), "delta must be"),
        (ops.add_rms_norm_, (x.double(), None, torch.zeros(8), 1e-5), "x must be float32"),
        (ops.silu_mul, (gate_up,), "gate_up"),
        (ops.gelu_mul, (gate_up,), "gate_up"),
        (ops.add_, (x, torch.zeros(1, 8)), "delta must be"),
        (ops.norm_heads_, (qkv, torch.ones(8), torch.ones(4).double(), 1, 1e-5), "k_weight must be contiguous float32"),
        (ops.norm_heads_, (qkv, torch.ones(8), torch.ones(6), 1, 1e-5), "no number of heads"),
        (ops.norm_heads_, (torch.zeros(2, 16), torch.ones(8), torch.ones(8), 1, 1e-5), "no number of heads"),
        (ops.softcap_, (x, 0.0), "cap positive"),
        (ops.likeliest, (x.double(),), "logits must be fp32"),
        (ops.likeliest, (x.T,), "rows contiguous"),
        (ops.rope_write_kv, (torch.zeros(2, 20), table, table, kv, plan), "number of heads"),
        (ops.rope_write_kv, (qkv, table[:1], table, kv, plan), "cos"),
        (ops.rope_write_kv, (qkv, table, table, kv, plan_at(ops, two[:1], two[:1], PAGE, 1)), "sum to the rows"),
        (ops.rope_write_kv, (qkv, table, table, kv, plan_at(ops, two, two, PAGE, 9)), "for 9 pages, but there are 1"),
        (ops.rope_write_kv, (qkv, table, table, kv, plan_at(ops, two, two, 8, 1)), "pages of 8 tokens"),
    ):
        with pytest.raises(KernelArgumentError, match=message):
            call(*arguments)
