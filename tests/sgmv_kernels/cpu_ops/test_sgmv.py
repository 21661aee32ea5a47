"""SGMV of the CPU's default kernels, for any adapters and rows."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pools import KernelPool

from sgmv_kernels.formats.adapter_panels import SiteDims
from sgmv_kernels.metadata.segments import build_segments
from sgmv_kernels.ops import Ops

SetThreads = Callable[[int], None]


@pytest.fixture
def set_threads() -> Iterator[SetThreads]:
    """Sets torch's threads; puts them back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_batch_of_any_adapters(data: st.DataObject) -> None:
    """Random ranks (0 included), widths that no vector divides, bf16 and int8 mixed, rows in any order."""
    widths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    sites = (SiteDims(data.draw(st.integers(1, 100)), tuple(widths)),)
    pool = KernelPool(sites, data.draw(st.sampled_from([torch.float32, torch.bfloat16])), 1, 1024, 2048)
    ranks = st.lists(st.integers(0, 40), min_size=len(widths), max_size=len(widths))
    count = data.draw(st.integers(1, 5))
    for i in range(count):
        pool.add([data.draw(ranks)], [(400 * i, 400)], codes=data.draw(st.booleans()))
    rows = data.draw(st.lists(st.integers(-1, count - 1), min_size=1, max_size=40))
    pool.check(Ops(torch.device("cpu")), rows, 0, layer=0, atol=1e-2)


@pytest.mark.parametrize("codes", [False, True], ids=["floats", "codes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_row_of_a_tile_has_the_bits_that_it_has_alone(dtype: torch.dtype, codes: bool) -> None:
    """Tiles of one to three rows, and later ones of a task that take two rank rows at a time; odd ranks, and widths
    that no vector divides.
    """
    ops, pool = Ops(torch.device("cpu")), KernelPool((SiteDims(205, (150, 33)),), dtype, 1, 1024, 400)
    pool.add([[17, 5]], [(0, 400)], codes=codes)
    for count in (2, 4, 5, 100):
        x, y = pool.inputs(count, 0)
        together = pool.added(ops, [0] * count, 0, x, y, layer=0)
        for i in range(count):
            assert torch.equal(pool.added(ops, [0], 0, x[i : i + 1], y[i : i + 1], layer=0), together[i : i + 1])


@pytest.mark.parametrize("rows", [[0], [1] * 8, [2, -1, 0, 0], [2, 1, 0, 1, 1]], ids=str)
def test_threads_that_share_an_adapter_add_the_bits_of_one_thread(rows: list[int], set_threads: SetThreads) -> None:
    """Fewer rank rows than threads, none at all, and more than a panel; fewer columns than a share."""
    ops, pool = Ops(torch.device("cpu")), KernelPool((SiteDims(4099, (150, 33)),), torch.bfloat16, 1, 1024, 1200)
    for i, ranks in enumerate(([17, 5], [0, 2], [0, 0])):
        pool.add([ranks], [(400 * i, 400)], codes=i == 1)
    x, y = pool.inputs(len(rows), 0)
    set_threads(1)
    alone = pool.added(ops, rows, 0, x, y, layer=0)
    assert not torch.equal(alone, y)
    for threads in (2, 3, 7):
        set_threads(threads)
        for _ in range(150):
            assert torch.equal(pool.added(ops, rows, 0, x, y, layer=0), alone)
        plan, apart = ops.plan_sgmv(build_segments(rows), pool.placed, torch.bfloat16), y.clone()
        ops.expand_(apart, ops.shrink(x, pool.slabs[0], plan, 0, 0), pool.slabs[0], plan, 0, 0)
        assert torch.equal(apart, alone)
