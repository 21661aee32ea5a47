"""Steps, page operations and adapter copies on a fake GPU, in random legal orders, against the same on the CPU.

No order that the streams' waits allow may change a result, and without any of the waits some order does.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_gpu import DEVICE, FakeGpu, Wait
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from lorasrv.models.lora_sites import site_dims
from lorasrv.models.quantization.unquantized import FloatEmbedding, FloatLinear
from lorasrv.models.spec import ModelSpec
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import (
    PENDING,
    AdapterOrders,
    CopyPages,
    PageCopy,
    ScheduledRequest,
    SchedulerOutput,
    SlotMoves,
    SwapIn,
    SwapOut,
)
from lorasrv.worker.adapter_packing import PackedAdapter
from lorasrv.worker.cuda_streams import StagingRing
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.executor import LaunchingExecutor
from lorasrv.worker.forward_batch import build_batch
from lorasrv.worker.launched_step import LaunchedStep
from lorasrv.worker.model_runner import ModelRunner
from lorasrv.worker.weights import LayerWeights, ModelWeights
from sgmv_kernels.backend import NO_TOKEN
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.ops import Ops

SPEC = ModelSpec("llama", 2, 32, 48, 2, 1, 16, 40, 64, 1e-5)
PAGE_SIZE, SLOT_BYTES = 16, 512
CPU = torch.device("cpu")
SEQUENCES, ADAPTERS, REGIONS = 3, 4, 2
PER_SEQUENCE = 2
LOW = 2 * SEQUENCES * PER_SEQUENCE
"""Pages for sequences alone; behind them are `REGIONS`, each for an adapter, or for sequences meanwhile."""
LAYOUT = AdapterLayout(site_dims(SPEC), (tuple((6,) * len(site.out_features) for site in site_dims(SPEC)),) * 2, 4)
Command = tuple[str, int]


def _weights(device: torch.device) -> ModelWeights:
    made = torch.Generator().manual_seed(1)

    def floats(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=made) * 0.3).to(device)

    def layer() -> LayerWeights:
        linears = [FloatLinear(floats(sum(site.out_features), site.in_features), None) for site in SPEC.sites()]
        return LayerWeights(*linears, floats(32) + 1, floats(32) + 1)

    layers = tuple(layer() for _ in range(SPEC.num_layers))
    embed, head = FloatEmbedding(floats(40, 32)), FloatLinear(floats(40, 32), None)
    return ModelWeights(SPEC, embed, layers, floats(32) + 1, head, "random")


class World:
    """Three sequences and two places for adapters, played by commands."""

    def __init__(self, gpu: FakeGpu | None = None, seed: int = 0) -> None:
        device = DEVICE if gpu is not None else CPU
        self.gpu, self.chance = gpu, random.Random(seed)
        self.ops = Ops(device, "torch")
        page_bytes = KV_FORMATS["float32"].page_bytes(1, 16, PAGE_SIZE)
        self.region_pages = LAYOUT.num_pages(page_bytes)
        pages = LOW + REGIONS * self.region_pages
        self.memory = DevicePool(SPEC, pages, PAGE_SIZE, KV_FORMATS["float32"], device, scratch=False)
        if gpu is not None:
            self.memory._ring = StagingRing(DEVICE, SLOT_BYTES)
        limits = DecoderLimits(64, 16, SEQUENCES, torch.float32)
        self.decoder = Decoder(_weights(device), self.memory, limits, self.ops)
        self.tables = [[PER_SEQUENCE * i, PER_SEQUENCE * i + 1] for i in range(SEQUENCES)]
        self.lengths = [0] * SEQUENCES
        self.resident: dict[int, tuple[str, PlacedAdapter]] = {}
        self.logits: list[torch.Tensor] = []
        self.arriving: int | None = None

    def play(self, commands: list[Command]) -> list[torch.Tensor]:
        for name, number in commands:
            getattr(self, name)(number)
        return [logits.cpu() for logits in self.logits]

    def step(self, number: int) -> None:
        """Compute a token of every sequence, on the adapters that are there; nothing waits for the result."""
        self.memory.apply([])
        there = [place for region, place in sorted(self.resident.items()) if region != self.arriving]
        scheduled = []
        for i, table in enumerate(self.tables):
            adapter = None if not there or (i + number) % 4 == 3 else there[(i + number) % len(there)][0]
            position = self.lengths[i] % (PER_SEQUENCE * PAGE_SIZE)
            self.lengths[i] = position + 1
            rest = (tuple(table), adapter, True, SamplingParams(), 0)
            scheduled.append(ScheduledRequest(RequestId(str(i)), ((7 * i + position + number) % 40,), position, *rest))
        step = SchedulerOutput(tuple(scheduled), dict(there), (), AdapterOrders(), 0)
        self.logits.append(self.decoder.forward(build_batch(step, self.memory, torch.float32, self.ops)))

    def read(self, number: int) -> None:
        """Wait for the newest result."""
        if self.logits:
            self.logits[-1] = self.logits[-1].cpu()

    def spread(self, number: int) -> None:
        """Move a sequence to where an adapter may come."""
        region, sequence = number % REGIONS, number % SEQUENCES
        if region not in self.resident and self._is_low(sequence):
            first = self._first(region) + (self.region_pages - PER_SEQUENCE)
            if all(first not in table for table in self.tables):
                self._move(sequence, [first, first + 1])

    def arrive(self, number: int) -> None:
        """Put an adapter in place of what is there; a step is computed beside the copy."""
        region, name = number % REGIONS, str(number % ADAPTERS)
        first = self._first(region)
        self.resident.pop(region, None)
        self.resident = {place: held for place, held in self.resident.items() if held[0] != name}
        for sequence, table in enumerate(self.tables):
            if first <= table[0] < first + self.region_pages:
                self._move(sequence, self._free_low())
        placed = LAYOUT.place([(first, self.region_pages)], self.memory.page_bytes)
        assert placed is not None
        self._poison(range(first, first + self.region_pages))
        self.memory.apply([])
        self.resident[region], self.arriving, before = (name, placed), region, len(self.logits)

        def meanwhile() -> None:
            if len(self.logits) == before and self.chance.random() < 0.3:
                self.step(number)

        if self.gpu is not None:
            self.gpu.meanwhile = meanwhile
        data = torch.randn((2, LAYOUT.slab_bytes // 4), generator=torch.Generator().manual_seed(number % ADAPTERS))
        self.memory.write_adapter(PackedAdapter(LAYOUT, data.mul(0.3).view(torch.uint8)), placed)
        if self.gpu is not None:
            self.gpu.meanwhile = None
        if len(self.logits) == before:
            self.step(number)
        self.arriving = None

    def swap(self, number: int) -> None:
        """Move a sequence out to the host and back in elsewhere."""
        sequence, request = number % SEQUENCES, RequestId("swapped")
        self.memory.apply([SwapOut(request, tuple(self.tables[sequence]))])
        target = self._free_low()
        self._poison(self.tables[sequence])
        self.tables[sequence] = target
        self.memory.apply([SwapIn(request, tuple(target))])

    def compact(self, number: int) -> None:
        """Move two tokens of each sequence to slots in front, as if they were accepted of a draft tree."""
        moves = []
        for table, length in zip(self.tables, self.lengths, strict=True):
            if length > 2 + number:
                moves.append(SlotMoves(tuple(table), (length - 2, length - 1), (number, number + 1)))
        if moves:
            self.memory.copy_slots(moves, self.ops)

    def save(self, number: int) -> None:
        """Read a sequence's pages for a snapshot; nothing waited for the steps before."""
        rows = self.memory.read_pages(self.tables[number % SEQUENCES])
        self.logits.append(rows.view(torch.float32).nan_to_num(7.0))

    def restore(self, number: int) -> None:
        """Bring a sequence's pages back from a snapshot, elsewhere."""
        sequence, target = number % SEQUENCES, self._free_low()
        old = self.tables[sequence]
        rows = self.memory.read_pages(old)
        self._poison(target)
        self.memory.apply([])
        # The page with tokens comes last: it is what is still on its way if nobody waits.
        self.memory.write_pages(rows, list(enumerate(target))[::-1])
        self._poison(old)
        self.tables[sequence] = target

    def _move(self, sequence: int, target: list[int]) -> None:
        old = self.tables[sequence]
        self.memory.apply([CopyPages(tuple(map(PageCopy, old, target)))])
        self._poison(old)
        self.tables[sequence] = target

    def _poison(self, pages: list[int] | range) -> None:
        """Free pages: what reads them before they are written reads NaN."""
        for page in pages:
            self.memory._pages[:, page].fill_(0xFF)

    def _is_low(self, sequence: int) -> bool:
        return self.tables[sequence][0] < LOW

    def _free_low(self) -> list[int]:
        return next([p, p + 1] for p in range(0, LOW, 2) if all(p not in table for table in self.tables))

    def _first(self, region: int) -> int:
        return LOW + region * self.region_pages


def _same(commands: list[Command], seed: int, dropped: Wait | None = None) -> bool:
    """Whether the fake GPU computes what the CPU does."""
    want = World().play(commands)
    gpu = FakeGpu(seed, dropped)
    try:
        with gpu:
            found = World(gpu, seed).play(commands)
    except IndexError:
        assert dropped is not None
        return False  # a poisoned index
    assert dropped is None or gpu.num_dropped
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, want, strict=True))


KINDS = ["step", "step", "arrive", "spread", "swap", "read", "compact", "save", "restore"]
COMMAND = st.tuples(st.sampled_from(KINDS), st.integers(0, 11))


@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.lists(COMMAND, max_size=14), st.integers(0, 2**32))
@example([*[("step", i) for i in range(5)], ("compact", 0), ("save", 1), ("step", 5), ("restore", 1), ("step", 6)], 0)
def test_every_order_that_streams_allow_computes_the_same(commands: list[Command], seed: int) -> None:
    assert _same(commands, seed)


SHORT: list[Command] = [("spread", 0), ("step", 1), ("arrive", 0), ("step", 4), ("arrive", 1), ("step", 5)]


@pytest.mark.parametrize("dropped", Wait)
def test_without_a_wait_some_order_computes_something_else(dropped: Wait) -> None:
    assert any(not _same(SHORT, seed, dropped) for seed in range(60))


def test_a_snapshot_is_written_behind_what_its_pages_held_before() -> None:
    commands: list[Command] = [*[("step", i) for i in range(3)], ("restore", 1), ("step", 4)]
    assert all(_same(commands, seed) for seed in range(5))
    for dropped in (Wait.STREAM_FOR_EVENT, Wait.HOST_FOR_STREAM):
        assert any(not _same(commands, seed, dropped) for seed in range(60)), dropped


SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=1.3, seed=2, top_k=7),
)


def _said(gpu: FakeGpu | None, asks_logprobs_at: int = -1, steps: int = 5) -> list[Any]:
    """Return the tokens of three answers; on a GPU each step takes those that the one before it has launched."""
    device = CPU if gpu is None else DEVICE
    memory = DevicePool(SPEC, 2 * SEQUENCES, PAGE_SIZE, KV_FORMATS["float32"], device, scratch=False)
    limits = DecoderLimits(64, 16, SEQUENCES, torch.float32)
    runner = ModelRunner(_weights(device), memory, limits, Ops(device, "torch"))
    said: list[Any] = []
    launched: list[Any] = []
    for number in range(steps):
        requests = []
        for i, sampling in enumerate(SAMPLING):
            ids = (3 * i, 5, 7) if not number else (PENDING,) if gpu else said[-1][str(i)]
            asks = replace(sampling, logprobs=2) if number == asks_logprobs_at else sampling
            rest = ((2 * i, 2 * i + 1), None, True, asks, number)
            requests.append(ScheduledRequest(RequestId(str(i)), ids, number + 2 if number else 0, *rest))
        step = SchedulerOutput(tuple(requests), {}, (), AdapterOrders(), 0)
        if gpu is None:
            said.append(runner.run(step).sampled)
        else:
            launched.append(runner.launch(step))
            said += [runner.finish(launched.pop(0)).sampled for _ in launched[1:]]
    return said + [runner.finish(last).sampled for last in launched]


@pytest.mark.parametrize("asks_logprobs_at", [-1, 3])
def test_tokens_go_from_step_to_step_without_the_host(asks_logprobs_at: int) -> None:
    want = _said(None, asks_logprobs_at)
    assert len({tokens["1"] for tokens in want}) > 2
    for seed in range(3):
        with FakeGpu(seed) as gpu:
            assert _said(gpu, asks_logprobs_at) == want


def test_tokens_are_read_when_they_are_there() -> None:
    want = _said(None)

    def said(seed: int) -> list[Any]:
        with FakeGpu(seed, Wait.HOST_FOR_EVENT) as gpu:
            return _said(gpu)

    assert any(said(seed) != want for seed in range(15))


def test_a_row_without_a_token_is_none_and_harms_no_next_step() -> None:
    requests = [ScheduledRequest(RequestId(name), (1,), 0, (0,), None, True, SAMPLING[0], 0) for name in "ab"]
    with FakeGpu() as gpu:
        launched = LaunchedStep(requests, torch.tensor([NO_TOKEN, 5], device=DEVICE))
        token_ids = torch.tensor([9, PENDING, PENDING], device=DEVICE)
        launched.fill(token_ids, [(1, RequestId("b")), (2, RequestId("a"))])
        assert (token_ids.tolist(), launched.wait()) == ([9, 5, 0], {"b": (5,)})
        gpu.synchronize()


def test_a_step_behind_one_that_was_not_launched_is_not_either() -> None:
    """Its tokens would be no numbers of tokens."""
    scheduled = ScheduledRequest(RequestId("a"), (PENDING,), 3, (0,), None, True, SAMPLING[0], 0)
    memory = DevicePool(SPEC, 2, PAGE_SIZE, KV_FORMATS["float32"], CPU, scratch=False)
    runner = ModelRunner(_weights(CPU), memory, DecoderLimits(64, 16, 1, torch.float32), Ops(CPU, "torch"))
    executor = LaunchingExecutor(runner)
    handle = executor.submit(SchedulerOutput((scheduled,), {}, (), AdapterOrders(), 0))
    with pytest.raises(RuntimeError, match="could not be launched"):
        executor.collect(handle)


def test_a_copy_that_fails_leaves_nothing_in_flight() -> None:
    """Its pages are free at once: what is written there next stays."""
    source = torch.arange(1, 5 * SLOT_BYTES + 1).to(torch.uint8)
    for seed in range(20):
        with FakeGpu(seed) as gpu:
            ring, pool = StagingRing(DEVICE, SLOT_BYTES), torch.zeros(5 * SLOT_BYTES, dtype=torch.uint8, device=DEVICE)
            ring.mark_arranged()
            with pytest.raises(RuntimeError, match="size"):
                ring.copy([(source, pool), (source, pool[:100])])
            pool.fill_(7)
            gpu.synchronize()
            assert pool.tolist() == [7] * len(source)
