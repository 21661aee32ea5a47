"""The Triton attention: compiled on a CUDA device, else interpreted. NaN in every slot without a token."""

import os
from dataclasses import dataclass, replace

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

import numpy as np
import pytest

from sgmv_kernels.backend import plan_of
from sgmv_kernels.errors import CapacityExceeded
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import paged_attention_reference
from sgmv_kernels.triton_ops import attention as attention_triton
from sgmv_kernels.triton_ops.attention_metadata import AttentionCapacity, AttentionTables
from tests.helpers.float_pages import float_pages

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALE = 0.125


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial result that is read but was not written shows as NaN."""

    def poisoned(shape, dtype, device) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    monkeypatch.setattr(attention_triton, "new_partials", poisoned)


@pytest.fixture
def ops() -> Ops:
    return Ops(DEVICE, "triton")


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 64 keys, so that short contexts are cut as well."""
    config = attention_triton.attention_config
    monkeypatch.setattr(attention_triton, "attention_config", lambda *key: replace(config(*key), split_tokens=64))


@dataclass
class Case:
    """Sequences over pages in random order."""

    q: torch.Tensor
    kv: KvPages
    tables: np.ndarray
    query_lens: list[int]
    kv_lens: list[int]

    def kv_on(self, device: torch.device) -> KvPages:
        kv = self.kv
        return KvPages(kv.slab.to(device), kv.format, kv.num_heads, kv.page_size, kv.head_dim)

    def attend(self, ops: Ops, window: int | None = None, only: list[int] | None = None, softcap=None) -> torch.Tensor:
        """Through the kernels, of some of the sequences in the given order."""
        order = list(range(len(self.kv_lens))) if only is None else only
        starts = np.concatenate(([0], np.cumsum(self.query_lens)))
        q = torch.cat([self.q[starts[i] : starts[i + 1]] for i in order]).to(DEVICE)
        lens = ([self.query_lens[i] for i in order], [self.kv_lens[i] for i in order])
        plan = ops.plan_attention(self.tables[order], *lens, self.kv.page_size, self.kv.num_pages)
        kv = self.kv_on(DEVICE)
        return ops.paged_attention(q, kv, plan, SCALE, window, softcap).cpu()

    def check(self, ops: Ops, window: int | None = None, softcap=None) -> torch.Tensor:
        pages = [-(-n // self.kv.page_size) for n in self.kv_lens]
        tables = [row[:n].tolist() for row, n in zip(self.tables, pages, strict=True)]
        args = (self.q, self.kv.keys, self.kv.values, tables, self.query_lens, self.kv_lens)
        got = self.attend(ops, window, softcap=softcap)
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if self.q.dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        want = paged_attention_reference(*args, SCALE, window, softcap)
        torch.testing.assert_close(got.float(), want, check_dtype=False, **tolerance)
        return got


def make_case(query_lens, kv_lens, heads, kv_heads, dim, dtype=torch.float32, page=16, active=torch.float32) -> Case:
    counts = [-(-n // page) for n in kv_lens]
    order = torch.randperm(sum(counts) + 5).tolist()
    size = (sum(counts) + 5) * 2 * kv_heads * page * dim * dtype.itemsize
    kv = float_pages(torch.full((size,), 0xFF, dtype=torch.uint8), dtype, kv_heads, page, dim)
    tables = np.full((len(counts), max(counts)), 1 << 20, dtype=np.int32)  # entries past a sequence name no page
    for row, n, length in zip(tables, counts, kv_lens, strict=True):
        row[:n] = [order.pop() for _ in range(n)]
        for i, p in enumerate(row[:n].tolist()):
            used = min(page, length - i * page)
            kv.keys[p, :, :, :used] = torch.randn(kv_heads, dim, used).to(dtype)
            kv.values[p, :, :used] = torch.randn(kv_heads, used, dim).to(dtype)
    return Case(torch.randn(sum(query_lens), heads, dim).to(active), kv, tables, query_lens, kv_lens)


MIXED = ([1, 20, 1, 5], [57, 41, 130, 50])
HEADS = [(9, 3, 64), (2, 2, 80), (8, 1, 96), (4, 2, 128), (2, 1, 256), (18, 1, 16)]


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.long), 40])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_heads_and_dims(ops: Ops, heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    make_case(*MIXED, heads, kv_heads, dim).check(ops, window)


@pytest.mark.parametrize(
    "active",
    [torch.float32, *(pytest.param(kind, marks=pytest.mark.long) for kind in (torch.float16, torch.bfloat16))],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_pages(ops: Ops, dtype: torch.dtype, active: torch.dtype) -> None:
    assert make_case(*MIXED, 4, 2, 64, dtype, active=active).check(ops).dtype == active


@pytest.mark.parametrize("page", [4, 24, 128])
def test_page_sizes(ops: Ops, page: int) -> None:
    make_case(*MIXED, 6, 2, 24, page=page).check(ops, 33)


@pytest.mark.parametrize("window", [None, 1, *(pytest.param(window, marks=pytest.mark.long) for window in (9, 100))])
def test_parts_of_keys(ops: Ops, short_parts: None, window: int | None) -> None:
    make_case([1, 9, 40, 1], [300, 70, 40, 64], 4, 2, 64).check(ops, window)


@pytest.mark.parametrize("window", [None, pytest.param(9, marks=pytest.mark.long)])
def test_softcap(ops: Ops, short_parts: None, window: int | None) -> None:
    case = make_case([1, 9, 40, 1], [300, 70, 40, 64], 4, 2, 64)
    case.q *= 5
    got = case.check(ops, window, softcap=2.0)
    assert not torch.allclose(got, case.attend(ops, window), atol=1e-3)


def test_cutting_changes_little(ops: Ops, request: pytest.FixtureRequest) -> None:
    case = make_case([1, 3], [700, 301], 4, 2, 64)
    whole = case.check(ops)
    request.getfixturevalue("short_parts")
    cut_finer = case.check(ops)
    assert not torch.equal(whole, cut_finer)


def test_large_logits_are_safe(ops: Ops, short_parts: None) -> None:
    case = make_case([1, 4, 30], [200, 4, 31], 4, 2, 64)
    case.q *= 1e4
    assert case.check(ops).isfinite().all()


@pytest.mark.long
def test_long_context(ops: Ops) -> None:
    make_case([1, 3], [8192, 8001], 3, 1, 16, torch.float16).check(ops)


def test_a_row_has_the_same_bits_whatever_sequences_are_beside_it(ops: Ops, short_parts: None) -> None:
    case = make_case([1, 7, 1, 25], [57, 33, 200, 90], 9, 3, 64, torch.bfloat16)
    together = case.attend(ops).split(case.query_lens)
    for i in range(4):
        assert torch.equal(case.attend(ops, only=[i]), together[i])
    mixed = case.attend(ops, only=[3, 1, 0, 2]).split([25, 7, 1, 1])
    assert all(torch.equal(mixed[k], together[i]) for k, i in enumerate((3, 1, 0, 2)))


@pytest.mark.long
def test_a_capacity_takes_other_sequences(ops: Ops, short_parts: None) -> None:
    """The buffer that a graph was captured with: the same memory and grid, the bits of exact tables."""
    case = make_case([1, 1, 1, 3], [57, 200, 16, 130], 4, 2, 32)
    most = AttentionCapacity(4, 20, 12, 0, 8, 12)
    held = None
    kv = case.kv_on(DEVICE)
    for order in ([1, 0, 3], [2], [3, 1], [0, 1, 2]):
        lens = ([case.query_lens[i] for i in order], [case.kv_lens[i] for i in order])
        plan = plan_of(case.tables[order], *lens, case.kv.page_size, case.kv.num_pages, DEVICE)
        if held is None:
            held = AttentionTables(plan, DEVICE, most)
        else:
            held.update(plan)
        starts = np.concatenate(([0], np.cumsum(case.query_lens)))
        q = torch.cat([case.q[starts[i] : starts[i + 1]] for i in order]).to(DEVICE)
        got = attention_triton.attention(q, kv, replace(plan, prepared=held), SCALE, None, None)
        assert torch.equal(got.cpu(), case.attend(ops, only=order))
    with pytest.raises(CapacityExceeded, match="sequences"):
        held.update(plan_of(np.zeros((5, 1), dtype=np.int32), [1] * 5, [1] * 5, 16, 1, DEVICE))
