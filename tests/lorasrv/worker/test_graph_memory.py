"""The plan of a GPU's memory against what graphs take: bytes of captured passes and of their inputs, counted on a
device whose tensors have none."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("counted in Triton's interpreter", allow_module_level=True)
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from bench_gpu_host import launches
from gpu_step import random_weights

from lorasrv.models.spec import SHAPES
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import AdapterOrders, ScheduledRequest, SchedulerOutput
from lorasrv.worker.cuda_graphs import GraphedSteps, Recorded
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.graph_memory import META, graph_bytes, pass_bytes
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.ops import Ops

SPEC = replace(SHAPES["llama-3-8b"], num_layers=2)
BF16, KV = torch.bfloat16, KV_FORMATS["bfloat16"]
LIMITS = DecoderLimits(16384, 1024, 64, BF16, BF16)
MAX_RANK, MOST_TOKENS = 64, 1 << 20
STEP = SchedulerOutput(
    (ScheduledRequest(RequestId("0"), (1,), 0, (0,), None, True, SamplingParams(), 0),), {}, (), AdapterOrders(), 0
)


class Allocated(TorchDispatchMode):
    """Count the bytes of memory that lives at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: list[ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        is_new, before = all(returned.alias_info is None for returned in func._schema.returns), self._living()
        found = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor) and leaf.device == META]
        self._made += [ref(leaf) for leaf in found if is_new or leaf.untyped_storage()._cdata in before]
        self.most = max(self.most, sum(self._living().values()))
        return made

    def _living(self) -> dict[int, int]:
        """Return the bytes of each memory that a tensor or a view of it still holds."""
        tensors = [tensor for tensor in (of() for of in self._made) if tensor is not None]
        self._made = [ref(tensor) for tensor in tensors]
        return {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}


@pytest.mark.parametrize("quantization", ["int4", pytest.param("bf16", marks=pytest.mark.long)])
def test_a_pass_of_every_bucket_allocates_what_is_planned(quantization: str) -> None:
    """No more, and for the largest not much less; the inputs of each are known to the byte."""
    ops, counts = Ops(META, "triton"), list[int]()
    memory = DevicePool(SPEC, 4000, 16, KV, META, scratch=True)
    decoder = Decoder(random_weights(SPEC, ops, quantization, BF16), memory, LIMITS, ops)

    def record(compute: Callable[[], Tensor]) -> Recorded:
        with Allocated() as allocated:
            output = compute()
        counts.append(allocated.most)
        return mock.Mock(output=output)

    graphs = GraphedSteps(decoder.forward, SPEC, memory, LIMITS, record)
    capacities = list(graphs.capacities(MAX_RANK, MOST_TOKENS))
    assert len(set(capacities)) == len(capacities)
    planned = []
    with launches():
        for capacity in capacities:
            graphs._capacity_for = lambda rows, work, own=capacity: own  # type: ignore[method-assign]
            assert graphs.compute(STEP) is not None
            planned.append(pass_bytes(SPEC, graphs.dims, capacity, BF16.itemsize))
            plans = graphs._buckets[capacity].plans
            held = [plans._inputs, *(buffer.ints for buffer in plans._attention._buffers.values())]
            held += [] if plans._lora is None else [plans._lora.ints]
            assert plans.nbytes == sum(tensor.nbytes for tensor in held)
    beyond = [
        (capacity, has, most) for capacity, has, most in zip(capacities, counts, planned, strict=True) if has > most
    ]
    assert not beyond
    assert max(counts) > max(planned) / 2


def test_graphs_as_a_whole() -> None:
    """More memory for keys has more parts of them, higher ranks have larger tables; a server of few rows has little."""

    def planned(limits: DecoderLimits = LIMITS, max_rank: int = 16, most_tokens: int = MOST_TOKENS) -> int:
        return graph_bytes(SPEC, limits, 16, KV, max_rank, most_tokens)

    assert planned(most_tokens=1000) < planned() < planned(max_rank=256)
    assert planned(replace(LIMITS, max_samples=1, max_rows=8)) < planned() / 4
