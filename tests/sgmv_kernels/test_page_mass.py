"""Attention that pages get: the definition, for every set of kernels and format, and for rows however they are cut."""

import itertools

import numpy as np
import pytest
import torch
from kernel_pools import pages_on

from sgmv_kernels.backend import Scoring
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.plans import PageMasses
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import page_mass_reference

pytestmark = pytest.mark.aside
PAGE, PAGES = 16, 33
QUERY_LENS, KV_LENS, COUNTS = [5, 1, 4], [37, 300, 40], [3, 1, 0]
SHAPES = [(6, 2, 16), (9, 3, 64), (8, 1, 80), (2, 2, 24)]
"""(query heads, key heads, numbers of a head)."""
CASES = [
    *itertools.product(("torch", "numba"), KV_FORMATS),
    *(("triton", name) for name in ("float32", "k8v4")),
    *(pytest.param("triton", name, marks=pytest.mark.long) for name in ("bfloat16", "float16", "int8")),
]
every_case = pytest.mark.parametrize(("ops", "name"), CASES, indirect=["ops"])


def pool(name: str, kv_heads: int, dim: int, lens: list[int] = KV_LENS) -> tuple[KvPages, np.ndarray]:
    """Return pages with NaN in unwritten slots, and page tables that name no page behind the last."""
    kv_format = KV_FORMATS[name]
    nbytes = PAGES * kv_format.page_bytes(kv_heads, dim, PAGE)
    kv = KvPages(torch.full((nbytes,), 0xFF, dtype=torch.uint8), kv_format, kv_heads, PAGE, dim)
    order, tables = torch.randperm(PAGES).tolist(), np.full((len(lens), 20), 1 << 20, dtype=np.int32)
    for table, length in zip(tables, lens, strict=True):
        used = -(-length // PAGE)
        table[:used] = [order.pop() for _ in range(used)]
        at, (keys, values) = np.arange(length), torch.randn(2, length, kv_heads, dim)
        kv.write(torch.from_numpy(table[at // PAGE]).long(), torch.from_numpy(at % PAGE), keys, values)
    return kv, tables


def masses_of(
    ops: Ops, kv: KvPages, tables: np.ndarray, q: torch.Tensor, lens: list[list[int]], times: int = 1, **more: float
) -> torch.Tensor:
    counts, on = np.array(lens[2], dtype=np.int32), pages_on(kv, ops.device)
    masses = PageMasses(counts, torch.zeros(kv.num_heads, int(counts.sum()), tables.shape[1], device=ops.device))
    plan = ops.plan_attention(tables, lens[0], lens[1], PAGE, PAGES)
    for _ in range(times):
        ops.paged_attention(q.to(ops.device), on, plan, Scoring(0.3, **more), masses)
    return masses.sums.cpu()


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("softcap", [None, pytest.param(2.0, marks=pytest.mark.exhaustive)])
@every_case
def test_matches_reference(ops: Ops, name: str, softcap: float | None) -> None:
    """The sums over two layers are twice the reference over what the pages hold."""
    for heads, kv_heads, dim in SHAPES[:1] if ops.name == "triton" else SHAPES:
        kv, tables = pool(name, kv_heads, dim)
        q = torch.randn(sum(QUERY_LENS), heads, dim)
        got = masses_of(ops, kv, tables, q, [QUERY_LENS, KV_LENS, COUNTS], times=2, softcap=softcap)
        used = [table[table < PAGES].tolist() for table in tables]
        keys = kv.read(torch.arange(PAGES))[0]
        want = page_mass_reference(q, keys, used, QUERY_LENS, KV_LENS, COUNTS, 0.3, softcap)
        torch.testing.assert_close(got[..., : want.shape[-1]], 2 * want, atol=1e-3, rtol=1e-3)
        assert not got[..., want.shape[-1] :].any()
        torch.testing.assert_close(got.sum((0, -1)), torch.full((4,), 2.0 * heads))


@pytest.mark.usefixtures("short_parts")
@every_case
def test_a_row_does_not_depend_on_the_rows_beside_it(ops: Ops, name: str) -> None:
    (heads, kv_heads, dim), count = (SHAPES[0], 3) if ops.name == "triton" else (SHAPES[1], 17)
    kv, tables = pool(name, kv_heads, dim, [130])
    q = torch.randn(count, heads, dim)
    whole = masses_of(ops, kv, tables, q, [[count], [130], [count]])
    for row in (0, 1, count - 1):
        alone = masses_of(ops, kv, tables, q[row, None].clone(), [[1], [131 - count + row], [1]])
        assert torch.equal(alone[:, 0], whole[:, row])


def test_refusals() -> None:
    ops = Ops(torch.device("cpu"), "torch")
    kv, tables = pool("float32", 2, 16)
    q = torch.randn(sum(QUERY_LENS), 6, 16)
    with pytest.raises(KernelArgumentError, match="window"):
        masses_of(ops, kv, tables, q, [QUERY_LENS, KV_LENS, COUNTS], window=4)
    with pytest.raises(KernelArgumentError, match="at most the rows"):
        masses_of(ops, kv, tables, q, [QUERY_LENS, KV_LENS, [6, 0, 0]])
