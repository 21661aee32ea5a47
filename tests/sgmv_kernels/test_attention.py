"""Paged attention against its fp32 reference, with NaN in every slot that no token owns."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.ops import KernelArgumentError, Ops
from sgmv_kernels.reference import paged_attention_reference
from tests.helpers.float_pages import float_pages

PAGE = 16


@dataclass
class Case:
    """Sequences over pages in random order."""

    q: torch.Tensor
    kv: KvPages
    tables: np.ndarray
    query_lens: list[int]
    kv_lens: list[int]

    def attend(self, ops: Ops, scale: float, window: int | None = None, softcap=None, **lens) -> torch.Tensor:
        lens = {"query_lens": self.query_lens, "kv_lens": self.kv_lens} | lens
        plan = ops.plan_attention(self.tables, **lens, page_size=self.kv.page_size, num_pages=self.kv.num_pages)
        return ops.paged_attention(self.q, self.kv, plan, scale, window, softcap)

    def reference(self, scale: float, window: int | None = None, softcap=None) -> torch.Tensor:
        pages = [-(-n // self.kv.page_size) for n in self.kv_lens]
        tables = [row[:n].tolist() for row, n in zip(self.tables, pages, strict=True)]
        args = (self.q, self.kv.keys, self.kv.values, tables, self.query_lens, self.kv_lens)
        return paged_attention_reference(*args, scale, window, softcap)


def make_case(query_lens, kv_lens, heads, kv_heads, dim, dtype, page=PAGE) -> Case:
    counts = [-(-n // page) for n in kv_lens]
    order = torch.randperm(sum(counts) + 5).tolist()
    bytes_ = (sum(counts) + 5) * 2 * kv_heads * page * dim * dtype.itemsize
    kv = float_pages(torch.full((bytes_,), 0xFF, dtype=torch.uint8), dtype, kv_heads, page, dim)
    tables = np.zeros((len(counts), max(counts)), dtype=np.int32)
    for row, n, length in zip(tables, counts, kv_lens, strict=True):
        row[:n] = [order.pop() for _ in range(n)]
        for i, p in enumerate(row[:n].tolist()):
            used = min(page, length - i * page)
            kv.keys[p, :, :, :used] = torch.randn(kv_heads, dim, used).to(dtype)
            kv.values[p, :, :used] = torch.randn(kv_heads, used, dim).to(dtype)
    return Case(torch.randn(sum(query_lens), heads, dim), kv, tables, query_lens, kv_lens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 80), (4, 2, 96), (7, 1, 128), (2, 1, 256)]
)
def test_matches_reference(
    ops: Ops, heads: int, kv_heads: int, dim: int, window: int | None, dtype: torch.dtype
) -> None:
    case = make_case([1, 20, 1, 33, 5, 1], [1, 20, 57, 33, 50, 16], heads, kv_heads, dim, dtype)
    got, want = case.attend(ops, dim**-0.5, window), case.reference(dim**-0.5, window)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page", [4, 16, 32])
@pytest.mark.parametrize("dim", [8, 24])
def test_small_pages_and_odd_dims(ops: Ops, page: int, dim: int) -> None:
    case = make_case([1, 3, 11, 1], [6, 3, 70, 130], 6, 2, dim, torch.float32, page)
    torch.testing.assert_close(case.attend(ops, 0.3), case.reference(0.3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("softcap", [50.0, 0.5])
def test_softcap(ops: Ops, softcap: float, window: int | None) -> None:
    case = make_case([1, 9, 40, 1], [30, 70, 40, 300], 4, 2, 64, torch.float32)
    case.q *= 5
    got = case.attend(ops, 0.5, window, softcap)
    torch.testing.assert_close(got, case.reference(0.5, window, softcap), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, case.attend(ops, 0.5, window), atol=1e-3)


def test_softcap_keeps_nan_and_bits(ops: Ops) -> None:
    case = make_case([5], [45], 4, 2, 64, torch.float32)
    case.q[0, 1] = float("nan")
    got = case.attend(ops, 0.125, softcap=30.0)
    assert got[0, 1].isnan().all()
    assert got[1:].isfinite().all()
    if ops.name != "torch":
        case.q, case.query_lens, case.kv_lens = case.q[2:3].contiguous(), [1], [43]
        assert torch.equal(case.attend(ops, 0.125, softcap=30.0), got[2:3])


def test_large_logits_are_safe(ops: Ops) -> None:
    case = make_case([1, 4], [30, 4], 4, 2, 64, torch.float32)
    case.q *= 1e4
    got = case.attend(ops, 1.0)
    assert got.isfinite().all()
    torch.testing.assert_close(got, case.reference(1.0))


def test_long_context(ops: Ops) -> None:
    case = make_case([1, 3], [8192, 8001], 3, 1, 64, torch.bfloat16)
    torch.testing.assert_close(case.attend(ops, 0.125), case.reference(0.125), rtol=1e-3, atol=1e-4)


def test_a_row_does_not_depend_on_the_rows_beside_it(ops: Ops) -> None:
    if ops.name == "torch":
        pytest.skip("matrix products of torch differ in the last bits by shape")
    case = make_case([1, 7, 1], [57, 33, 200], 9, 3, 64, torch.bfloat16)
    together = case.attend(ops, 0.125)
    case.q, case.tables, case.query_lens, case.kv_lens = case.q[8:], case.tables[2:], [1], [200]
    assert torch.equal(case.attend(ops, 0.125), together[8:])


def test_a_row_has_the_same_bits_in_any_chunk(ops: Ops) -> None:
    if ops.name == "torch":
        pytest.skip("matrix products of torch differ in the last bits by shape")
    case = make_case([150], [150], 6, 2, 64, torch.bfloat16)
    whole, q = case.attend(ops, 0.125), case.q
    for begin, end in ((0, 1), (0, 37), (37, 38), (37, 149), (120, 130), (149, 150)):
        case.q, case.query_lens, case.kv_lens = q[begin:end].contiguous(), [end - begin], [end]
        assert torch.equal(case.attend(ops, 0.125), whole[begin:end]), (begin, end)


def test_nan_stays_nan(ops: Ops) -> None:
    """A request whose adapter overflows must fail, not answer something."""
    case = make_case([1, 9], [40, 30], 4, 2, 64, torch.float32)
    case.q[0, 1] = float("nan")
    case.q[3] = float("inf")
    got = case.attend(ops, 0.125)
    assert got[0, 1].isnan().all()
    assert got[3].isnan().any()
    assert got[[1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("window", [5, 8, 20])
def test_keys_and_values_before_the_window_are_not_seen(ops: Ops, window: int) -> None:
    case = make_case([1], [40], 4, 2, 64, torch.float32)
    want = case.reference(0.125, window)
    for t in range(40 - window):
        page = case.tables[0, t // PAGE]
        case.kv.keys[page, :, :, t % PAGE] = float("nan")
        case.kv.values[page, :, t % PAGE] = float("nan")
    torch.testing.assert_close(case.attend(ops, 0.125, window), want, rtol=1e-4, atol=1e-5)


def test_bad_arguments(ops: Ops) -> None:
    case = make_case([1, 4], [30, 4], 4, 2, 64, torch.float32)
    with pytest.raises(KernelArgumentError, match="sum to the rows"):
        case.attend(ops, 1.0, query_lens=[1, 3])
    with pytest.raises(KernelArgumentError, match="at most kv_lens"):
        case.attend(ops, 1.0, kv_lens=[30, 3])
    with pytest.raises(KernelArgumentError, match="too short"):
        case.attend(ops, 1.0, kv_lens=[33, 4])
    with pytest.raises(KernelArgumentError, match="one entry a sequence"):
        case.attend(ops, 1.0, kv_lens=[30])
    with pytest.raises(KernelArgumentError, match="window"):
        case.attend(ops, 1.0, window=0)
    with pytest.raises(KernelArgumentError, match="softcap must be positive"):
        case.attend(ops, 1.0, softcap=0.0)
    case.tables[0, 1] = 999
    with pytest.raises(KernelArgumentError, match="outside the pool"):
        case.attend(ops, 1.0)
