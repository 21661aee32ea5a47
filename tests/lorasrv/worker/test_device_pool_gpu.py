"""Adapters and pages on a CUDA device: staged copies beside a busy stream, moves, swaps."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from lorasrv.models.spec import ModelSpec
from lorasrv.outputs import RequestId
from lorasrv.scheduler_output import CopyPages, PageCopy, SwapIn, SwapOut
from lorasrv.worker.adapter_packing import PackedAdapter
from lorasrv.worker.cuda_streams import StagingRing
from lorasrv.worker.device_pool import DevicePool
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims
from sgmv_kernels.formats.kv_format import KV_FORMATS

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SPEC = ModelSpec(
    family="llama",
    num_layers=4,
    hidden_size=256,
    intermediate_size=512,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=100,
    max_position=100,
    norm_eps=1e-5,
)


@pytest.fixture
def memory() -> DevicePool:
    return DevicePool(SPEC, 200, 16, KV_FORMATS["bfloat16"], CUDA)


def test_an_adapter_arrives_whole_while_the_engine_computes(memory: DevicePool) -> None:
    layout = AdapterLayout((SiteDims(256, (256,)),), (((48,),),) * 4, 2)
    packed = PackedAdapter(layout, torch.randint(0, 255, (4, layout.layer_bytes), dtype=torch.uint8))
    pages = layout.num_pages(memory.page_bytes)
    placed = layout.place([(150, pages)], memory.page_bytes)
    assert placed is not None
    busy = torch.randn(4096, 4096, device=CUDA)
    for _ in range(20):
        busy = busy @ busy
    memory.apply([])
    memory.write_adapter(packed, placed)
    for layer in range(4):
        for source, target, size in placed.copies(layer):
            found = memory.slab(layer)[target : target + size].cpu()
            assert torch.equal(found, packed.data[layer, source : source + size])


def test_pieces_longer_than_a_slot_are_cut() -> None:
    ring = StagingRing(CUDA, slot_bytes=1000)
    source = torch.randint(0, 255, (12_345,), dtype=torch.uint8)
    target = torch.zeros(12_345, dtype=torch.uint8, device=CUDA)
    ring.mark_arranged()
    ring.copy([(source, target)])
    assert torch.equal(target.cpu(), source)


def test_pages_are_copied_and_swapped(memory: DevicePool) -> None:
    for layer in range(4):
        memory.slab(layer).copy_(torch.randint(0, 255, memory.slab(layer).shape, dtype=torch.uint8))
    pages = [memory.slab(layer).view(200, -1) for layer in range(4)]
    before = [page[[3, 5]].clone() for page in pages]
    swapped = memory.apply([SwapOut(RequestId("r"), (3, 5)), CopyPages((PageCopy(3, 9),))])
    assert swapped == 2 * 4 * memory.page_bytes
    for page in pages:
        page[[3, 5]] = 0
    memory.apply([SwapIn(RequestId("r"), (20, 21))])
    for page, old in zip(pages, before, strict=True):
        assert torch.equal(page[[20, 21]], old)
        assert torch.equal(page[9], old[0])
