"""Page operations on memory, in their order; adapters written where they were placed; on a CUDA device as well."""

import numpy as np
import pytest
import torch
from fake_gpu import DEVICE, FakeGpu

from lorasrv.models.spec import ModelSpec
from lorasrv.outputs import RequestId
from lorasrv.scheduler_output import CopyPages, DropSwap, PageCopy, SwapIn, SwapOut
from lorasrv.worker import device_pool
from lorasrv.worker.adapter_packing import PackedAdapter
from lorasrv.worker.cuda_streams import StagingRing
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.host_memory import resident_bytes
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims
from sgmv_kernels.formats.kv_format import KV_FORMATS, CodesKV, KVFormat

A, B = RequestId("a"), RequestId("b")
LAYERS, PAGES = 4, 200
SPEC = ModelSpec("llama", LAYERS, 256, 512, 4, 2, 64, 100, 100, 1e-5)
CUDA = torch.device("cuda")
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=["bfloat16", *(name for name, kind in KV_FORMATS.items() if isinstance(kind, CodesKV))])
def kv_format(request: pytest.FixtureRequest) -> KVFormat:
    return KV_FORMATS[request.param]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def memory(request: pytest.FixtureRequest, kv_format: KVFormat) -> DevicePool:
    memory = DevicePool(SPEC, PAGES, 16, kv_format, torch.device(request.param))
    for layer in range(LAYERS):
        memory.slab(layer).copy_(torch.randint(0, 255, memory.slab(layer).shape, dtype=torch.uint8))
    return memory


def _page(memory: DevicePool, page: int) -> torch.Tensor:
    return torch.stack([memory.slab(layer).view(PAGES, -1)[page] for layer in range(LAYERS)])


def test_a_page_is_read_before_it_is_reused(memory: DevicePool) -> None:
    """Swapped out, taken by a copy, and that one copied on: what each gets is what stood there at its turn."""
    three, four = _page(memory, 3), _page(memory, 4)
    ops = [SwapOut(A, (3,)), CopyPages((PageCopy(4, 3),)), CopyPages((PageCopy(3, 9),)), SwapIn(A, (10,))]
    assert memory.apply(ops) == 2 * LAYERS * memory.page_bytes
    assert torch.equal(_page(memory, 3), four)
    assert torch.equal(_page(memory, 9), four)
    assert torch.equal(_page(memory, 10), three)


def test_swapped_pages_keep_their_order_and_are_forgotten(memory: DevicePool) -> None:
    before = [_page(memory, page) for page in (7, 2, 30)]
    assert memory.apply([SwapOut(A, (7, 2, 30)), SwapOut(B, (1,)), DropSwap(B)]) == 4 * LAYERS * memory.page_bytes
    for layer in range(LAYERS):
        memory.slab(layer).view(PAGES, -1)[[7, 2, 30]] = 0
    memory.apply([SwapIn(A, (11, 12, 13))])
    assert all(torch.equal(_page(memory, 11 + i), page) for i, page in enumerate(before))
    assert not memory._swapped


def test_pages_go_to_a_gpus_host_and_back_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each copy the host waits."""
    out, back = (7, 2, 30, 4, 9), (11, 12, 13, 14, 15)
    with FakeGpu() as gpu:
        memory = DevicePool(SPEC, PAGES, 16, KV_FORMATS["bfloat16"], DEVICE)
        monkeypatch.setattr(device_pool, "GATHERED_BYTES", 2 * memory.block_bytes)
        memory.slabs.copy_(torch.randint(0, 255, memory.slabs.shape, dtype=torch.uint8))
        before = memory.read_pages(out)
        waits = [gpu.num_waits]
        for op in (SwapOut(A, out), SwapIn(A, back)):
            memory.apply([op])
            waits.append(gpu.num_waits)
        assert torch.equal(memory.read_pages(back), before)
        assert torch.equal(before[:1], memory._pages[:, 7].cpu().view(1, -1))
    assert np.diff(waits).tolist() == [3, 3]


@pytest.mark.parametrize("is_busy", [False, pytest.param(True, marks=on_gpu)])
def test_an_adapter_in_pieces(memory: DevicePool, is_busy: bool) -> None:
    layout = AdapterLayout((SiteDims(64, (64, 32)),), (((240, 3),), ((240, 3),), ((0, 3),), ((240, 3),)), 2)
    packed = PackedAdapter(layout, torch.randint(0, 255, (LAYERS, layout.slab_bytes), dtype=torch.uint8))
    placed = layout.place([(30, 1), (5, 1), (40, 90)], memory.page_bytes)
    assert placed is not None
    assert len(placed.trimmed().runs) > 1
    if is_busy:
        busy = torch.randn(4096, 4096, device=CUDA)
        for _ in range(20):
            busy = busy @ busy
    memory.apply([])
    memory.write_adapter(packed, placed)
    for layer in range(LAYERS):
        for panel, size in enumerate(layout.panel_bytes[layer].tolist()):
            at, source = int(placed.offsets[layer][panel]), int(layout.packed_offsets[layer][panel])
            found = memory.slab(layer)[at : at + size].cpu()
            assert torch.equal(found, packed.data[layer, source : source + size])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pieces_longer_than_a_slot_are_cut() -> None:
    ring = StagingRing(CUDA, slot_bytes=1000)
    source = torch.randint(0, 255, (12_345,), dtype=torch.uint8)
    target = torch.zeros(12_345, dtype=torch.uint8, device=CUDA)
    ring.mark_arranged()
    ring.copy([(source, target)])
    assert torch.equal(target.cpu(), source)


@pytest.mark.skipif(resident_bytes() is None, reason="the system does not say what a process holds")
def test_pages_get_memory_before_they_are_written() -> None:
    """64 MiB of one slab, and nothing of the others; a slab that is not there gets none."""
    kind = KV_FORMATS["bfloat16"]
    memory = DevicePool(SPEC, 30_000, 16, kind, torch.device("cpu"))
    count = (64 << 20) // memory.page_bytes
    before = resident_bytes() or 0
    memory.commit(LAYERS, 0, count)
    assert (resident_bytes() or 0) - before < 16 << 20
    memory.commit(1, 100, count)
    assert 60 << 20 < (resident_bytes() or 0) - before < 80 << 20
    assert not memory.slab(1)[100 * memory.page_bytes :][: count * memory.page_bytes].any()
