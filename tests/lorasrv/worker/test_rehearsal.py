"""What a GPU's server calls of torch while it serves, it has called before: operators of a day of mixed steps, beside
the forward passes, against those of the rehearsal. And ranks have met wherever a day takes them.

An operator counts with the dtypes of its tensors, whether they have one row or several, and whether rows are short:
torch has different kernels for these.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
from fake_gpu import DEVICE, FakeGpu
from partitions import SHORT, ranks, replica
from tiny_engine import LONG
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adapter_store.formats.weights import AdapterWeights, LoraTensors
from adapter_store.spec import AdapterKey, AdapterSpec
from lorasrv.distributed.comm import MemoryComm
from lorasrv.errors import DeviceLost
from lorasrv.kv_policy import SelectPolicy
from lorasrv.models.quantization.unquantized import FloatEmbedding, FloatLinear
from lorasrv.models.spec import ModelSpec
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import (
    PENDING,
    AdapterOrders,
    CopyPages,
    PageCopy,
    PlannedDrafts,
    ScheduledRequest,
    SchedulerOutput,
    SwapIn,
    SwapOut,
)
from lorasrv.worker.adapter_vectors import output_vectors
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.draft_heads import DraftHeads, MedusaHeads
from lorasrv.worker.exchange import Exchange
from lorasrv.worker.executor import InProcessExecutor, LaunchingExecutor
from lorasrv.worker.model_runner import ModelRunner
from lorasrv.worker.rehearsal import KINDS, Rehearsal
from lorasrv.worker.warm_up import read_base
from lorasrv.worker.weights import LayerWeights, ModelWeights
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.ops import Ops

SPEC = ModelSpec("llama", 2, 32, 48, 2, 1, 16, 5000, 64, 1e-5)
PAGES, PAGE_SIZE, MOST, STEPS = 8, 16, 5, 40
LONG_ROW = 4096
"""Above it torch sorts in another way."""
Operator = tuple[Any, ...]


class Watched(TorchDispatchMode):
    """Collect the operators on the device's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[Operator] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        if not func.is_view and any(isinstance(x, torch.Tensor) and x.device == DEVICE for x in leaves):
            self.operators.add((str(func), *map(_kind_of, leaves)))
        return func(*args, **(kwargs or {}))


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        is_table = leaf.dim() > 1
        rows = len(leaf) > 1 if is_table else None
        return leaf.dtype, max(1, leaf.dim()), rows, is_table and leaf.shape[-1] > LONG_ROW, leaf.device == DEVICE
    return leaf if isinstance(leaf, torch.dtype) else type(leaf)


def _weights() -> ModelWeights:
    made = torch.Generator().manual_seed(1)

    def floats(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=made) * 0.3).to(DEVICE)

    def layer() -> LayerWeights:
        linears = [FloatLinear(floats(sum(site.out_features), site.in_features), None) for site in SPEC.sites()]
        return LayerWeights(*linears, floats(32) + 1, floats(32) + 1)

    layers = tuple(layer() for _ in range(SPEC.num_layers))
    embed, head = FloatEmbedding(floats(5000, 32)), FloatLinear(floats(5000, 32), None)
    return ModelWeights(SPEC, embed, layers, floats(32) + 1, head, "random")


def _runner() -> ModelRunner:
    memory = DevicePool(SPEC, PAGES, PAGE_SIZE, KV_FORMATS["float32"], DEVICE, scratch=False)
    block = (np.eye(32, dtype=np.float32), None)
    heads = DraftHeads(MedusaHeads.of(((block,),), torch.float32, DEVICE), None, 0, torch.float32, DEVICE)
    limits = DecoderLimits(64, 64, MOST, torch.float32)
    return ModelRunner(_weights(), memory, limits, Ops(DEVICE, "torch"), draft_layers=(0,), draft_heads=heads)


def _random_sampling(chance: random.Random) -> SamplingParams:
    found: dict[str, Any] = {"seed": 1, "temperature": chance.choice((0.0, 0.8))}
    if chance.random() < 0.5:
        found |= chance.choice(({"top_p": 0.7}, {"top_k": 30}, {"top_k": 300}, {"top_k": 7, "top_p": 0.5}))
    if chance.random() < 0.3:
        found |= chance.choice(({"min_p": 0.2}, {"typical_p": 0.8}))
    if chance.random() < 0.4:
        found |= chance.choice(
            (
                {"repetition_penalty": 1.2},
                {"frequency_penalty": 0.5, "logit_bias": ((3, 1.0), (4, -2.0))},
                {"allowed_token_ids": (1, 2, 3)},
                {"watermark": True},
                {"temperature": 0.0, "fsd_alpha": 0.3},
            )
        )
    if chance.random() < 0.3:
        found["logprobs"] = chance.choice((0, 1, 20))
    return SamplingParams(**found)


def _random_request(name: str, chance: random.Random) -> ScheduledRequest:
    sampling, tokens = _random_sampling(chance), (chance.randrange(5000),)
    if chance.random() < 0.2:
        sampling, tokens = replace(sampling, prompt_logprobs=2), tuple(range(chance.choice((2, 5, 25))))
    history, start = list(tokens), chance.randrange(2)
    pages = tuple(chance.sample(range(PAGES), 2))
    found = ScheduledRequest(
        RequestId(name), tokens, start, pages, None, True, sampling, 0, history=[*range(start), *history]
    )
    if sampling.prompt_logprobs is not None:
        return replace(found, prompt_rows=range(len(tokens) - 1))
    kind = chance.randrange(6)
    if kind == 0:
        drafts = tuple(chance.randrange(5000) for _ in range(chance.randint(1, 3)))
        by_rejection = sampling.temperature > 0 and chance.random() < 0.5
        planned = PlannedDrafts(drafts, ("lookup",) * len(drafts))
        return replace(found, token_ids=tokens + drafts, drafts=planned, by_rejection=by_rejection)
    if kind == 1:
        return replace(found, drafts=PlannedDrafts(asked=chance.choice(("layers", "medusa")), num_asked=2))
    if kind == 2:
        return replace(found, vocab_size=5000)
    if kind == 3:
        return replace(found, kv_policy=SelectPolicy(budget=16, page_size=PAGE_SIZE), num_observed=1)
    return found


def _day(chance: random.Random) -> Iterator[SchedulerOutput]:
    """Yield mixed steps; some take the tokens of the step before."""
    for _ in range(STEPS):
        requests = [_random_request(str(i), chance) for i in range(chance.choice((1, 1, 2, MOST)))]
        ops = chance.choice(
            (
                (),
                (),
                (CopyPages((PageCopy(2, 3), PageCopy(1, 4))),),
                (SwapOut(RequestId("x"), (1, 2)), SwapIn(RequestId("x"), (3, 4))),
            )
        )
        yield SchedulerOutput(tuple(requests), {}, ops, AdapterOrders(), 0)
        if chance.random() < 0.5:
            pending = [
                replace(
                    request.without_drafts(),
                    token_ids=(PENDING,),
                    start=5,
                    sampling=replace(request.sampling, prompt_logprobs=None),
                    prompt_rows=range(0),
                    kv_policy=None,
                    num_observed=0,
                )
                for request in requests
            ]
            yield SchedulerOutput(tuple(pending), {}, (), AdapterOrders(), 0)


def test_a_day_calls_no_operator_that_the_rehearsal_has_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes, whose kernels the warm-up has launched, are random numbers here."""
    with FakeGpu() as gpu:
        some = (torch.randn((64, SPEC.vocab_size), generator=torch.Generator().manual_seed(1)) * 3).to(DEVICE)
        monkeypatch.setattr(Decoder, "forward", lambda decoder, batch: some[: len(batch.tables.sample_rows)])
        executor = LaunchingExecutor(_runner())
        with Watched() as rehearsed:
            executor.rehearse()
        assert (executor.profile.steps, executor.profile.rows, executor.profile.seconds()) == (0, 0, {})
        with Watched() as served:
            for step in _day(random.Random(0)):
                executor.apply_page_ops(step.page_ops)
                executor.collect(executor.submit(step))
                executor.read_pages((1, 2))
        gpu.synchronize()
    assert len(served.operators) > 100
    assert sorted(map(str, served.operators - rehearsed.operators)) == []


@pytest.mark.parametrize("text", ["0&1;2", "0;1&2", "cp=2"])
def test_ranks_meet_in_the_rehearsal_wherever_they_meet_later(text: str, model: Path) -> None:
    """A transport may connect at the first exchange of two ranks."""
    met: set[tuple[int, ...]] = set()
    send = MemoryComm.send

    def noted(comm: MemoryComm, tensor: torch.Tensor, to: int) -> None:
        met.add((comm.rank, to))
        send(comm, tensor, to)

    def as_on_a_gpu(runner: ModelRunner) -> Sequence[SchedulerOutput]:
        limits, exchange = runner._limits, runner._exchange
        return tuple(Rehearsal(runner._spec, limits, runner._memory.page_size, (), exchange).steps())

    with (
        patch.object(MemoryComm, "send", noted),
        patch.object(ModelRunner, "rehearsal", as_on_a_gpu),
        replica(model, ranks(text), max_num_seqs=8) as llm,
    ):
        llm.engine.bind_thread()
        rehearsed = set(met)
        llm.generate([LONG[:100], LONG[:3]], SHORT)
    assert rehearsed
    assert met == rehearsed


@pytest.mark.parametrize(
    ("max_model_len", "max_rows", "max_samples"), [(2, 1, 1), (2, 64, 64), (3, 8, 4), (64, 70, 200)]
)
def test_no_step_is_larger_than_the_server_allows(max_model_len: int, max_rows: int, max_samples: int) -> None:
    """A position behind the rotary table would end a GPU's context."""
    limits = DecoderLimits(max_model_len, max_rows, max_samples, torch.float32)
    steps = list(Rehearsal(SPEC, limits, PAGE_SIZE, ("layers",), Exchange()).steps())
    assert len(steps) > len(KINDS)
    for step in steps:
        assert step.num_tokens <= max_rows
        assert len(step.requests) <= max_samples
        for scheduled in step.requests:
            assert scheduled.start + len(scheduled.token_ids) + scheduled.drafts.num_asked <= max_model_len
            assert scheduled.start + len(scheduled.token_ids) <= len(scheduled.page_table) * PAGE_SIZE


def test_swaps_of_one_page_of_two_and_of_many_are_rehearsed() -> None:
    """Torch gathers up to 16 pages with one kernel, and more with another."""
    limits = DecoderLimits(64, 64, 64, torch.float32)
    ops = [op for step in Rehearsal(SPEC, limits, PAGE_SIZE, (), Exchange()).steps() for op in step.page_ops]
    for kind in (SwapOut, SwapIn):
        assert [min(len(op.pages), 17) for op in ops if isinstance(op, kind)] == [1, 2, 17]


@pytest.mark.parametrize("can_go_on", [True, False])
def test_a_step_that_fails_ends_the_start_only_if_the_device_is_lost(
    can_go_on: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel of a rare kind of request may not compile on some GPU."""
    executor, computed = InProcessExecutor(_runner()), []

    def run(step: SchedulerOutput) -> None:
        computed.append(step)
        if len(computed) == 2:
            raise RuntimeError("no such kernel")

    monkeypatch.setattr(executor.runner, "run", run)
    monkeypatch.setattr(executor.runner, "apply_page_ops", lambda ops: 0)
    monkeypatch.setattr(executor.runner, "recover", lambda: can_go_on)
    steps = executor.runner.rehearsal()
    with nullcontext() if can_go_on else pytest.raises(DeviceLost, match="RuntimeError"):
        executor.rehearse()
    assert computed == list(steps if can_go_on else steps[:2])
    assert "requests of its kind may fail" in caplog.text
    assert "no such kernel" in caplog.text


def test_loads_of_adapters_call_no_operator_that_the_warm_up_has_not_called() -> None:
    """With DoRA and biases at every linear."""
    made = np.random.default_rng(0)

    def floats(*shape: int) -> npt.NDArray[np.float32]:
        return made.standard_normal(shape).astype(np.float32)

    loras = {
        (layer, module): LoraTensors(3, 0.5, floats(3, site.in_features), floats(out, 3), floats(out), floats(out))
        for layer in range(SPEC.num_layers)
        for site in SPEC.sites()
        for module, out in zip(site.modules, site.out_features, strict=True)
    }
    adapter = AdapterWeights(AdapterSpec(AdapterKey("a"), "", (), "F32", 0), loras)
    with FakeGpu() as gpu:
        weights = _weights()
        with Watched() as warm:
            read_base(weights)
        with Watched() as loading:
            for layer in range(SPEC.num_layers):
                for _, vectors in output_vectors(weights, adapter, layer):
                    assert all(vector.cpu().isfinite().all() for vector in vectors)
        gpu.synchronize()
    assert any("addmm" in name for name, *_ in loading.operators)
    assert sorted(map(str, loading.operators - warm.operators)) == []
