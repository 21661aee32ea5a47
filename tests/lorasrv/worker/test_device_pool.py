"""Page operations on memory, in their order; adapters written where they were placed."""

import pytest
import torch

from lorasrv.models.spec import ModelSpec
from lorasrv.outputs import RequestId
from lorasrv.scheduler_output import CopyPages, DropSwap, PageCopy, SwapIn, SwapOut
from lorasrv.worker.adapter_packing import PackedAdapter
from lorasrv.worker.device_pool import DevicePool
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims
from sgmv_kernels.formats.kv_format import KV_FORMATS

A, B = RequestId("a"), RequestId("b")
SPEC = ModelSpec("llama", 3, 64, 64, 2, 2, 16, 100, 100, 1e-5)


@pytest.fixture
def memory() -> DevicePool:
    memory = DevicePool(SPEC, 40, 16, KV_FORMATS["float32"], torch.device("cpu"))
    for layer in range(3):
        memory.slab(layer).copy_(torch.randint(0, 255, memory.slab(layer).shape, dtype=torch.uint8))
    return memory


def _page(memory: DevicePool, page: int) -> torch.Tensor:
    return torch.stack([memory.slab(layer).view(40, -1)[page] for layer in range(3)])


def test_a_page_is_read_before_it_is_reused(memory: DevicePool) -> None:
    """Swapped out, taken by a copy, and that one copied on: what each gets is what stood there at its turn."""
    three, four = _page(memory, 3), _page(memory, 4)
    ops = [SwapOut(A, (3,)), CopyPages((PageCopy(4, 3),)), CopyPages((PageCopy(3, 9),)), SwapIn(A, (10,))]
    assert memory.apply(ops) == 2 * 3 * memory.page_bytes
    assert torch.equal(_page(memory, 3), four)
    assert torch.equal(_page(memory, 9), four)
    assert torch.equal(_page(memory, 10), three)


def test_swapped_pages_keep_their_order_and_are_forgotten(memory: DevicePool) -> None:
    before = [_page(memory, page) for page in (7, 2, 30)]
    memory.apply([SwapOut(A, (7, 2, 30)), SwapOut(B, (1,)), DropSwap(B), SwapIn(A, (11, 12, 13))])
    assert all(torch.equal(_page(memory, 11 + i), page) for i, page in enumerate(before))
    assert not memory._swapped


def test_an_adapter_in_pieces(memory: DevicePool) -> None:
    layout = AdapterLayout((SiteDims(64, (64, 32)),), (((24, 3),), ((24, 3),), ((0, 3),)), 2)
    packed = PackedAdapter(layout, torch.randint(0, 255, (3, layout.layer_bytes), dtype=torch.uint8))
    placed = layout.place([(30, 1), (5, 1), (20, 4)], memory.page_bytes)
    assert placed is not None
    assert len(placed.trimmed().runs) > 1
    memory.write_adapter(packed, placed)
    for layer in range(3):
        for panel, size in enumerate(layout.panel_bytes[layer].tolist()):
            at, source = int(placed.offsets[layer][panel]), int(layout.packed_offsets[layer][panel])
            assert torch.equal(memory.slab(layer)[at : at + size], packed.data[layer, source : source + size])
