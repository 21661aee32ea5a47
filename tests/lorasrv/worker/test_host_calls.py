"""What the host asks of a GPU in a step of 32 answers, counted on a device that does nothing: each call takes the
engine's thread some microseconds, whether a graph computes the step or not."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

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

from lorasrv.distributed.comm import LoneComm
from lorasrv.distributed.rank_exchange import DIVIDED_FROM, RowExchange
from lorasrv.kv_policy import SelectPolicy
from lorasrv.models.lora_sites import rows_layout, site_dims, with_everything
from lorasrv.models.spec import ModelSpec
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import AdapterOrders, PlannedDrafts, ProbeTree, ScheduledRequest, SchedulerOutput
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.draft_heads import DraftHeads, MedusaHeads
from lorasrv.worker.launched_step import LaunchedStep
from lorasrv.worker.model_runner import ModelRunner
from lorasrv.worker.rehearsal import KINDS
from lorasrv.worker.step_rows import StepRows
from sgmv_kernels import adapter_ops
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
        with patch.object(adapter_ops, "upload", wraps=adapter_ops.upload) as tokens_of_rows:
            launched = [runner.launch(step) for _ in range(2)]
        assert tokens_of_rows.call_count == 1, "the tokens of own rows stay on the device"
        assert all(isinstance(each, LaunchedStep) for each in launched)
        assert gpu.num_waits == waits
        assert [len(runner.finish(each).sampled) for each in launched] == [len(KINDS)] * 2
        assert gpu.num_waits > waits
        gpu.synchronize()


VOCABULARY, BEST, MANY = SMALL.vocab_size, 7, 4
GREEDY, RANDOM = SamplingParams(temperature=0.0), SamplingParams(seed=1, temperature=0.5)


def _verified(sampling: SamplingParams, **rest: Any) -> dict[str, Any]:
    """Return a request with two draft tokens, of which the first is the likeliest."""
    drafts = PlannedDrafts((BEST, 3), ("lookup", "lookup"))
    return {"sampling": sampling, "token_ids": (1, BEST, 3), "drafts": drafts, **rest}


def _drafted(drafter: str, sampling: SamplingParams, **rest: Any) -> dict[str, Any]:
    return {"sampling": sampling, "drafts": PlannedDrafts(asked=drafter, num_asked=1), **rest}


WAITS: dict[str, tuple[dict[str, Any], int]] = {
    **{
        f"tokens and their log-probabilities, {number}": ({"sampling": replace(kind, seed=1, logprobs=3)}, 2)
        for number, kind in enumerate(KINDS)
    },
    "log-probabilities of a prompt": (
        {"sampling": replace(GREEDY, prompt_logprobs=3), "token_ids": (1,) * 9, "prompt_rows": range(8)},
        2,
    ),
    "drafts": (_verified(GREEDY), 1),
    "random drafts": (_verified(RANDOM), 2),
    "drafts by rejection": (_verified(RANDOM, by_rejection=True), 4),
    "probes": (
        {"token_ids": (1, 5), "drafts": PlannedDrafts(probes=ProbeTree((5,), (-1,)))},
        2,
    ),
    "a vocabulary of its own": ({"vocab_size": VOCABULARY}, 1),
    "attention to pages": ({"kv_policy": SelectPolicy(budget=PAGE_SIZE, page_size=PAGE_SIZE), "num_observed": 1}, 2),
    "drafted by layers": (_drafted("layers", GREEDY), 3),
    "drafted by layers at random": (_drafted("layers", RANDOM), 3),
    "drafted by layers for rejection": (_drafted("layers", RANDOM, by_rejection=True), 4),
    "drafted by heads": (_drafted("medusa", GREEDY), 3),
    "drafted by heads at random": (_drafted("medusa", RANDOM), 5),
}
"""(what is special about all requests of a step, how often the host waits in it)"""


def _waits_of(count: int, special: dict[str, Any]) -> int:
    """Return how often the host waits in a step of equal requests."""
    request = {"token_ids": (1,), "sampling": GREEDY} | special
    tokens, sampling = request.pop("token_ids"), request.pop("sampling")
    with FakeGpu() as gpu:
        ops, limits = Ops(DEVICE, "triton"), DecoderLimits(64, 64, MANY, torch.float32)
        memory = DevicePool(SMALL, PAGES, PAGE_SIZE, KV_FORMATS["float32"], DEVICE, scratch=False)
        heads = MedusaHeads.of((((np.eye(SMALL.hidden_size, dtype=np.float32), None),),), torch.float32, DEVICE)
        runner = ModelRunner(
            random_weights(SMALL, ops, "bf16", torch.float32),
            memory,
            limits,
            ops,
            draft_layers=(0,),
            draft_heads=DraftHeads(heads, None, 0, torch.float32, DEVICE),
        )
        row = torch.zeros(1, VOCABULARY)
        row[0, BEST] = 9.0
        of_rows = row.to(DEVICE)
        requests = tuple(
            ScheduledRequest(RequestId(str(i)), tokens, 0, (i,), None, True, sampling, 0, history=[1] * 9, **request)
            for i in range(count)
        )
        waits = gpu.num_waits
        with patch.object(Decoder, "forward", lambda self, batch: of_rows.repeat(len(batch.tables.sample_rows), 1)):
            output = runner.finish(runner.launch(SchedulerOutput(requests, {}, (), AdapterOrders(), 0)))
        assert len(output.sampled) == count
        found = gpu.num_waits - waits
        gpu.synchronize()
        return found


@pytest.mark.parametrize("kind", WAITS)
def test_a_step_waits_as_often_for_many_requests_as_for_one(kind: str) -> None:
    special, most = WAITS[kind]
    assert [_waits_of(count, special) for count in (1, MANY)] == [most] * 2


def test_ranks_that_divide_the_rows_of_a_step_do_not_wait_to_put_states_in_order() -> None:
    requests = tuple(
        ScheduledRequest(RequestId(str(i)), (1,) * (DIVIDED_FROM // 2), 0, (2 * i, 2 * i + 1), None, True, GREEDY, 0)
        for i in range(2)
    )
    with FakeGpu() as gpu:
        memory = DevicePool(SMALL, PAGES, PAGE_SIZE, KV_FORMATS["float32"], DEVICE, scratch=False)
        spec: Any = SimpleNamespace(part=SimpleNamespace(row_ranks=(0, 1)), q_width=SMALL.q_width)
        exchange = RowExchange(LoneComm(0, DEVICE), spec, memory, Ops(DEVICE, "triton"), None)
        exchange.divide(StepRows.of(SchedulerOutput(requests, {}, (), AdapterOrders(), 0)))
        waits = gpu.num_waits
        states = exchange.states(torch.ones(1, SMALL.hidden_size).to(DEVICE, non_blocking=True))
        assert gpu.num_waits == waits
        assert states.sum(1).tolist() == [SMALL.hidden_size, 0]
