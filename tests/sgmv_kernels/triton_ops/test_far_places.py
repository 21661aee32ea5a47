"""Keys, values and adapters at the end of a pool of more than 2^31 numbers: the same bits as at its start."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kernel_pools import KernelPool

from sgmv_kernels.backend import Scoring
from sgmv_kernels.formats.adapter_panels import GAIN, SHIFT, AdapterLayout, PlacedAdapter, SiteDims
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.plans import PageMasses
from sgmv_kernels.metadata.segments import build_segments
from sgmv_kernels.ops import Ops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FAR_BYTES = 9 << 30
"""More than 2^31 numbers of four bytes."""
PAGE_BYTES, PAGE, HEADS, KV_HEADS, DIM, TOKENS = 1024, 16, 4, 2, 64, 40
SITES = (SiteDims(80, (96, 48, 40)),)
ROWS = [0, 1, 2, -1, 0]


@pytest.fixture
def ops(triton_ops: Ops) -> Ops:
    return triton_ops


@pytest.fixture
def slab(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.Tensor]:
    """Zeros; on the CPU they take memory only where they are written."""
    if DEVICE.type == "cuda":
        yield torch.zeros(FAR_BYTES, dtype=torch.uint8, device=DEVICE)
        return
    from triton.runtime.interpreter import GridExecutor

    # After a launch, the interpreter copies all memory of its arguments onto itself.
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    yield torch.from_numpy(np.zeros(FAR_BYTES, dtype=np.uint8))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "k8v4"])
def test_pages(ops: Ops, slab: torch.Tensor, name: str) -> None:
    kv_format = KV_FORMATS[name]
    page_bytes = kv_format.page_bytes(KV_HEADS, DIM, PAGE)
    kv = KvPages(slab[: FAR_BYTES // page_bytes * page_bytes], kv_format, KV_HEADS, PAGE, DIM)
    qkv = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * DIM, device=DEVICE)
    cos, sin = torch.rand(2, TOKENS, DIM // 2, device=DEVICE)
    found = []
    for first in (0, kv.num_pages - 3):
        tables = np.arange(first, first + 3, dtype=np.int32)[None]
        plan = ops.plan_attention(tables, [TOKENS], [TOKENS], PAGE, kv.num_pages)
        q = ops.rope_write_kv(qkv.clone(), cos, sin, kv, plan)
        ops.copy_slots([kv], np.array([(first + 2, 3, first, 5)], dtype=np.int32))
        masses = PageMasses(np.array([2], dtype=np.int32), torch.zeros(KV_HEADS, 2, 3, device=DEVICE))
        attended = ops.paged_attention(q, kv, plan, Scoring(0.1), masses)
        held = kv.slab.view(-1, page_bytes)[first : first + 3]
        found.append((attended, masses.sums, held))
    assert found[0][0].isfinite().all()
    assert held.any(dim=1).all()
    assert all(map(torch.equal, *found))


def test_adapters(ops: Ops, slab: torch.Tensor) -> None:
    """Panels of numbers and of codes."""
    near = KernelPool(SITES, torch.float32, 1, PAGE_BYTES, 3 * 200)
    for number, ranks in enumerate(([[16, 3, 8]], [[24, 0, 12]], [[100, 16, 64]])):
        near.add(ranks, [(200 * number, 190)], codes=number == 1)
    start = FAR_BYTES - near.slabs.shape[1]
    slab[start:] = near.slabs[0].to(DEVICE)
    runs = [(start // PAGE_BYTES + 200 * number, 190) for number in range(len(near.placed))]
    far = [own.layout.place([run], PAGE_BYTES) for own, run in zip(near.placed, runs, strict=True)]
    x, y = near.inputs(len(ROWS), 0)
    got = y.to(DEVICE, copy=True)
    ops.sgmv_(got, x.to(DEVICE), slab, ops.plan_sgmv(build_segments(ROWS), far, torch.float32), 0, 0)
    assert torch.equal(got.cpu(), near.added(ops, ROWS, 0, x, y, 0))
    assert not torch.equal(got.cpu(), y)


def test_gains_and_shifts(ops: Ops, slab: torch.Tensor) -> None:
    width = SITES[0].total_out
    layout = AdapterLayout(SITES, (((0, 0, 0),),), 4, places=(width,), vectors=((GAIN | SHIFT,),))
    pages = layout.num_pages(PAGE_BYTES)
    y, vectors, found = torch.randn(3, width, device=DEVICE), torch.randn(pages * PAGE_BYTES // 4, device=DEVICE), []
    for first in (0, FAR_BYTES // PAGE_BYTES - pages):
        slab[first * PAGE_BYTES :][: vectors.nbytes] = vectors.view(torch.uint8)
        placed = layout.place([(first, pages)], PAGE_BYTES)
        assert isinstance(placed, PlacedAdapter)
        found.append(y.clone())
        ops.affine_(found[-1], slab, ops.plan_sgmv(build_segments([0, -1, 0]), [placed], torch.float32), 0, 0)
    assert torch.equal(*found)
    assert not torch.equal(found[0], y)
