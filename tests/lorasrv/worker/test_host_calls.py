"""What the host asks of a GPU in a step of 32 answers, counted on a device that does nothing: each call takes the
engine's thread some microseconds, whether a graph computes the step or not."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("counted in Triton's interpreter", allow_module_level=True)
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from bench_gpu_host import SPEC, DeviceCalls, launches, warmed
from fake_gpu import DEVICE, FakeGpu
from gpu_step import random_weights

from lorasrv.models.lora_sites import rows_layout, site_dims, with_everything
from lorasrv.models.spec import ModelSpec
from lorasrv.outputs import RequestId
from lorasrv.scheduler_output import AdapterOrders, ScheduledRequest, SchedulerOutput
from lorasrv.worker.decoder import DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.launched_step import LaunchedStep
from lorasrv.worker.model_runner import ModelRunner
from lorasrv.worker.rehearsal import KINDS
from sgmv_kernels.formats.adapter_panels import CODE_BYTES, AdapterLayout
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.ops import Ops

ROWS, CONTEXT = 32, 300
SMALL = ModelSpec("llama", 2, 32, 64, 2, 1, 16, 40, 64, 1e-5)
PAGES, PAGE_SIZE, RANK = 40, 16, 3


@pytest.mark.parametrize("mode", ["graph", "graph, off"])
@pytest.mark.parametrize("adapters", [0, 8])
def test_a_replayed_step_is_two_copies(mode: str, adapters: int) -> None:
    """One of ids, positions and slots, one of the tables of attention; adapters only when they or rows change."""
    with launches() as launched:
        engine = warmed(ROWS, adapters, CONTEXT, 20, mode)
        launched.clear()
        for _ in range(3):
            with DeviceCalls() as calls:
                assert len(engine.step()) == ROWS
            assert calls.count == 2
    assert not launched


def test_a_step_without_a_graph_launches_each_kernel_once() -> None:
    """Of a layer: two norms, four times shrink, linear and expand, rotation and write, attention and its reduce, SiLU;
    and one each to add what three narrow linears compute in parts."""
    with launches() as launched:
        engine = warmed(ROWS, 8, CONTEXT, 20, "eager")
        launched.clear()
        with DeviceCalls() as calls:
            assert len(engine.step()) == ROWS
    assert launched.total() <= 21 * SPEC.num_layers + 3, launched
    assert calls.count <= 18 * SPEC.num_layers + 30, calls.count


def test_the_host_launches_a_step_without_waiting_for_the_one_before() -> None:
    """Whatever adapters and sampling it has: a copy from memory that is not pinned, or of a number to the host, would
    take as long as all that the device has in its queue."""
    sites = site_dims(SMALL)
    ranks = (tuple((RANK,) * len(site.out_features) for site in sites),) * SMALL.num_layers
    plain, tokens = AdapterLayout(sites, ranks, 4), np.array([3, 5, 39, 41])
    every = with_everything(SMALL, plain, RANK, 1)
    layouts = {
        "codes": AdapterLayout(sites, ranks, CODE_BYTES),
        "ends": replace(plain, ends=every.ends),
        "plain": plain,
        "rows": replace(plain, rows=rows_layout(SMALL, (tokens, tokens), 4)),
        "vectors": replace(plain, vectors=every.vectors, places=every.places),
    }
    with FakeGpu() as gpu:
        ops, limits = Ops(DEVICE, "triton"), DecoderLimits(64, 64, len(KINDS), torch.float32)
        memory = DevicePool(SMALL, PAGES, PAGE_SIZE, KV_FORMATS["float32"], DEVICE, scratch=True)
        runner = ModelRunner(random_weights(SMALL, ops, "bf16", torch.float32), memory, limits, ops)
        placements = {
            name: layout.place([(PAGES // 2, PAGES // 2)], memory.page_bytes) for name, layout in layouts.items()
        }
        names, requests = [*layouts, None], []
        for number, kind in enumerate(KINDS):
            name = names[number % len(names)]
            summed = (("plain", 1.0), ("codes", 0.5)) if name == "plain" else ()
            rest = ((number,), name, True, replace(kind, seed=number), 2)
            scheduled = ScheduledRequest(RequestId(str(number)), (3,), 4, *rest, history=[1, 2, 1, 2, 3], summed=summed)
            requests.append(replace(scheduled, active_from=number % 2))
        step = SchedulerOutput(tuple(requests), placements, (), AdapterOrders(), 0)
        waits = gpu.num_waits
        launched = [runner.launch(step) for _ in range(2)]
        assert all(isinstance(each, LaunchedStep) for each in launched)
        assert gpu.num_waits == waits
        assert [len(runner.finish(each).sampled) for each in launched] == [len(KINDS)] * 2
        assert gpu.num_waits > waits
        gpu.synchronize()
