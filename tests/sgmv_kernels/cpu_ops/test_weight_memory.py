"""Memory of packed weights: parts of large chunks, which are given back, in huge pages where the system has them."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantized_codes import random_codes
from torch import Tensor

from lorasrv.worker.host_memory import resident_bytes
from sgmv_kernels.cpu_ops import weight_memory
from sgmv_kernels.cpu_ops.weight_memory import WeightMemory
from sgmv_kernels.cpu_ops.weight_packing import pack_tiles
from sgmv_kernels.formats.weight_codes import INT4_LEVELS

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+.*\n(?:\w+:.*\n)*?VmFlags: (.*)\n")


@given(st.lists(st.integers(0, 3000), max_size=40), st.integers(1, 2000))
def test_parts_share_no_byte(sizes: list[int], chunk_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_memory, "CHUNK_BYTES", chunk_bytes)
        memory = WeightMemory()
        parts = [memory.take(size) for size in sizes]
    for i, part in enumerate(parts):
        part.fill_(i)
    for i, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        assert (part.shape, part.dtype) == ((size,), torch.uint8)
        assert bool((part == i).all())
        assert size == 0 or part.data_ptr() % 64 == 0


def test_a_chunk_is_freed_with_the_last_of_its_parts() -> None:
    """Also the one that further parts would be taken from: nothing is left of a model that is closed."""
    memory = WeightMemory()
    parts = [memory.take(15 << 20).fill_(1) for _ in range(4)]
    held = resident_bytes()
    assert held is not None
    last = parts.pop()
    parts.clear()
    assert 28 << 20 < held - (resident_bytes() or 0) < 34 << 20, "the first two share a chunk"
    assert bool((last == 1).all())
    del last
    assert 58 << 20 < held - (resident_bytes() or 0) < 68 << 20
    assert bool((memory.take(1000).fill_(2) == 2).all())


def test_a_part_larger_than_a_chunk_is_freed_alone() -> None:
    memory = WeightMemory()
    first = memory.take(1 << 20)
    large = memory.take(100 << 20).fill_(1)
    held = resident_bytes()
    assert held is not None
    del large
    assert held - (resident_bytes() or 0) > 90 << 20
    assert memory.take(1 << 20).data_ptr() == first.data_ptr() + (1 << 20), "what was left of the chunk is given on"


def test_a_part_is_a_tensor_of_its_own() -> None:
    """Of the mode in which it was taken, whatever that of the chunk's other parts was, and copied without these."""
    memory = WeightMemory()
    with torch.inference_mode():
        assert memory.take(64).fill_(1).is_inference()
    part = memory.take(64).fill_(2)
    assert not part.is_inference()
    assert part.untyped_storage().nbytes() == 64


def test_packed_weights_lie_in_memory_for_which_huge_pages_are_asked() -> None:
    flags = flags_of(pack_tiles(random_codes(INT4_LEVELS, 32, 4096, 4096)).data)
    if flags is None or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system does not say how memory is mapped, or has no huge pages")
    assert "hg" in flags


def flags_of(tensor: Tensor) -> list[str] | None:
    """Return the flags of the mapping in which a tensor's middle lies."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    for first, end, flags in _MAPPING.findall(Path("/proc/self/smaps").read_text()):
        if int(first, 16) <= middle < int(end, 16):
            return str(flags).split()
    return None
