"""SGMV of the CPU's default kernels, for any adapters and rows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pools import KernelPool

from sgmv_kernels.formats.adapter_panels import SiteDims
from sgmv_kernels.ops import Ops


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
