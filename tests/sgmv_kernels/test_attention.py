"""Paged attention against its fp32 reference, with NaN in every slot that no token owns."""

import numpy as np
import pytest
import torch

from sgmv_kernels import ops
from sgmv_kernels.reference import paged_attention_reference

PAGE = 16


def _case(query_lens, kv_lens, heads, kv_heads, dim, dtype):
    pages = [-(-n // PAGE) for n in kv_lens]
    order = torch.randperm(sum(pages) + 5).tolist()
    tables, kv = [], torch.full((sum(pages) + 5, 2, kv_heads, PAGE, dim), float("nan"), dtype=dtype)
    for n, length in zip(pages, kv_lens, strict=True):
        table = [order.pop() for _ in range(n)]
        tables.append(table)
        for t in range(length):
            kv[table[t // PAGE], :, :, t % PAGE] = torch.randn(2, kv_heads, dim).to(dtype)
    padded = np.zeros((len(tables), max(pages)), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return torch.randn(sum(query_lens), heads, dim), kv, padded, tables


def _attend(q, kv, padded, query_lens, kv_lens, scale, window=None):
    plan = ops.plan_attention(padded, query_lens, kv_lens, PAGE, len(kv))
    return ops.paged_attention(q, kv, plan, scale, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 80)])
def test_matches_reference(heads: int, kv_heads: int, dim: int, window: int | None, dtype: torch.dtype) -> None:
    query_lens, kv_lens = [1, 20, 1, 33, 5, 1], [1, 20, 57, 33, 50, 16]
    q, kv, padded, tables = _case(query_lens, kv_lens, heads, kv_heads, dim, dtype)
    got = _attend(q, kv, padded, query_lens, kv_lens, dim**-0.5, window)
    want = paged_attention_reference(q, kv, tables, query_lens, kv_lens, dim**-0.5, window)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_large_logits_are_safe() -> None:
    q, kv, padded, tables = _case([1, 4], [30, 4], 4, 2, 64, torch.float32)
    q = q * 1e4
    got = _attend(q, kv, padded, [1, 4], [30, 4], 1.0)
    assert got.isfinite().all()
    torch.testing.assert_close(got, paged_attention_reference(q, kv, tables, [1, 4], [30, 4], 1.0))


def test_bad_arguments() -> None:
    q, kv, padded, _ = _case([1, 4], [30, 4], 4, 2, 64, torch.float32)
    with pytest.raises(ops.KernelArgumentError, match="sum to the rows"):
        _attend(q, kv, padded, [1, 3], [30, 4], 1.0)
    with pytest.raises(ops.KernelArgumentError, match="at most kv_lens"):
        _attend(q, kv, padded, [1, 4], [30, 3], 1.0)
    with pytest.raises(ops.KernelArgumentError, match="too short"):
        _attend(q, kv, padded, [1, 4], [33, 4], 1.0)
    padded[0, 1] = 999
    with pytest.raises(ops.KernelArgumentError, match="outside the pool"):
        _attend(q, kv, padded, [1, 4], [30, 4], 1.0)


def test_write_kv_touches_its_slots_only() -> None:
    kv = torch.full((3, 2, 2, PAGE, 8), float("nan"), dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    ops.write_kv(k, v, kv, torch.tensor([2, 0]), torch.tensor([5, 15]))
    assert torch.equal(kv[2, 0, :, 5], k[0].bfloat16())
    assert torch.equal(kv[0, 1, :, 15], v[1].bfloat16())
    assert int(kv.isfinite().sum()) == 2 * 2 * 2 * 8
