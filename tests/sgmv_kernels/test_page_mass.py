"""Attention that pages get: the definition, for every set of kernels and format, and for rows however they are cut."""

import numpy as np
import pytest
import torch

from sgmv_kernels.backend import PageMasses
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.ops import Ops
from sgmv_kernels.reference import page_mass_reference

HEADS, KV_HEADS, DIM, PAGE, PAGES = 6, 2, 16, 16, 27
QUERY_LENS, KV_LENS, COUNTS = [5, 1, 40], [37, 130, 40], [3, 1, 0]


def pool(name: str) -> tuple[KvPages, torch.Tensor, torch.Tensor]:
    """Return pages with NaN in unwritten slots, page tables, and the tables' keys as they are read."""
    torch.manual_seed(3)
    kv_format = KV_FORMATS[name]
    nbytes = PAGES * kv_format.page_bytes(KV_HEADS, DIM, PAGE)
    kv = KvPages(torch.zeros(nbytes, dtype=torch.uint8), kv_format, KV_HEADS, PAGE, DIM)
    if kv.keys.is_floating_point():
        kv.keys.fill_(torch.nan)
    tables = torch.randperm(PAGES).reshape(3, 9).int()
    for table, length in zip(tables, KV_LENS, strict=True):
        at = torch.arange(length)
        keys, values = torch.randn(2, length, KV_HEADS, DIM)
        kv.write(table[at // PAGE].long(), at % PAGE, keys, values)
    return kv, tables, kv.read(torch.arange(PAGES))[0]


def masses_of(ops: Ops, kv: KvPages, tables: torch.Tensor, q: torch.Tensor, *lens: list[int], **more: float) -> object:
    counts = np.array(lens[2], dtype=np.int32)
    masses = PageMasses(counts, torch.zeros(int(counts.sum()), tables.shape[1]))
    plan = ops.plan_attention(tables.numpy(), lens[0], lens[1], PAGE, PAGES)
    for _ in range(2):
        ops.paged_attention(q, kv, plan, 0.3, masses=masses, **more)
    return masses.sums / 2


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_matches_reference(kernels: str, name: str) -> None:
    ops = Ops(torch.device("cpu"), kernels)
    kv, tables, keys = pool(name)
    q = torch.randn(sum(QUERY_LENS), HEADS, DIM)
    for softcap in (None, 2.0):
        got = masses_of(ops, kv, tables, q, QUERY_LENS, KV_LENS, COUNTS, softcap=softcap)
        want = page_mass_reference(q, keys, tables.tolist(), QUERY_LENS, KV_LENS, COUNTS, 0.3, softcap)
        torch.testing.assert_close(got, want, atol=3e-2 if name == "int8" else 1e-4, rtol=1e-4)
        torch.testing.assert_close(got.sum(-1), torch.full((4,), float(HEADS)))


@pytest.mark.parametrize("kernels", ["torch", "numba"])
def test_a_row_does_not_depend_on_the_rows_beside_it(kernels: str) -> None:
    ops = Ops(torch.device("cpu"), kernels)
    kv, tables, _ = pool("float32")
    q = torch.randn(40, HEADS, DIM)
    whole = masses_of(ops, kv, tables[2:], q, [40], [40], [32])
    for row in range(8, 40):
        alone = masses_of(ops, kv, tables[2:], q[row : row + 1].clone(), [1], [row + 1], [1])
        assert torch.equal(alone[0], whole[row - 8])


def test_refusals() -> None:
    ops = Ops(torch.device("cpu"), "torch")
    kv, tables, _ = pool("float32")
    q = torch.randn(sum(QUERY_LENS), HEADS, DIM)
    with pytest.raises(KernelArgumentError, match="window"):
        masses_of(ops, kv, tables, q, QUERY_LENS, KV_LENS, COUNTS, window=4)
    with pytest.raises(KernelArgumentError, match="at most the rows"):
        masses_of(ops, kv, tables, q, QUERY_LENS, KV_LENS, [6, 0, 0])
