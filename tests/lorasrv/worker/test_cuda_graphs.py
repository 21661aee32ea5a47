"""Steps in buckets: padded, replayed with other sequences and adapters, against the same steps computed without.

There is no GPU here: Triton's interpreter computes, and a fake graph runs again what was captured, on the memory that
was there at the capture.
"""

import os
import random

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest import mock

import pytest
from fake_gpu import DEVICE, FakeGpu, FakeGraph
from hypothesis import given, settings
from hypothesis import strategies as st

from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import site_dims
from lorasrv.models.quantization import get_format
from lorasrv.models.spec import ModelSpec
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import (
    NO_DRAFTS,
    PENDING,
    AdapterOrders,
    PlannedDrafts,
    ScheduledRequest,
    SchedulerOutput,
)
from lorasrv.worker import cuda_graphs
from lorasrv.worker.adapter_packing import PackedAdapter
from lorasrv.worker.cuda_graphs import MAX_CONTEXT, PARTS, GraphedSteps, Recorded, _Bucket, buckets
from lorasrv.worker.decoder import Decoder, DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.forward_batch import build_batch
from lorasrv.worker.launched_step import LaunchedStep
from lorasrv.worker.weights import load_weights
from sgmv_kernels.errors import CapacityExceeded
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter
from sgmv_kernels.formats.kv_format import KV_FORMATS
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.ops import Ops
from sgmv_kernels.triton_ops.graph_plans import PlanDims, StaticCapacity, StaticPlans

if torch.cuda.is_available():
    pytest.skip("with a GPU real graphs are tested", allow_module_level=True)

CPU = torch.device("cpu")
PAGES, PAGE_SIZE, MAX_LEN = 200, 16, 512
CONFIG = """{"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 40, "max_position_embeddings": 512}"""
RANKS = {"a": 4, "b": 20}
PIECE = 40
Share = tuple[str | None, int] | tuple[str | None, int, int] | tuple[str | None, int, int, int]
"""(adapter, keys before, tokens: one unless told otherwise, how many of them are draft tokens)"""


class Served:
    """One model over a pool of random keys and values, on a fake GPU if there is one."""

    def __init__(
        self,
        folder: Path,
        kernels: str = "triton",
        gpu: FakeGpu | None = None,
        kv_format: str = "float32",
    ) -> None:
        torch.manual_seed(0)
        self.gpu, device = gpu, CPU if gpu is None else DEVICE
        self.ops = Ops(device, kernels)
        checkpoint = open_checkpoint(str(folder), "dummy")
        weights = load_weights(checkpoint, get_format("none", self.ops), torch.float32, device=device)
        limits = DecoderLimits(MAX_LEN, 64, 4, torch.float32)
        self.memory = DevicePool(weights.spec, PAGES, PAGE_SIZE, KV_FORMATS[kv_format], device, scratch=True)
        self.decoder = Decoder(weights, self.memory, limits, self.ops)
        for layer in range(2):
            self.memory.slab(layer).copy_(self._random_pages(layer))
        self.placements: dict[str, PlacedAdapter] = {}
        sites, self.end = site_dims(weights.spec), PAGES
        for name, rank in RANKS.items():
            layout = AdapterLayout(sites, (tuple((rank,) * len(site.out_features) for site in sites),) * 2, 4)
            count = layout.num_pages(self.memory.page_bytes)
            self.end -= count
            placed = layout.place([(self.end, count)], self.memory.page_bytes)
            assert placed is not None
            data = torch.randn(2, layout.slab_bytes // 4).view(torch.uint8)
            self.memory.write_adapter(PackedAdapter(layout, data), placed)
            self.placements[name] = placed
        self.graphs: list[FakeGraph] = []
        self.graphed = GraphedSteps(self.decoder.forward, weights.spec, self.memory, limits, self._record)

    def _random_pages(self, layer: int) -> torch.Tensor:
        kv = self.memory.kv_pages(layer)
        pages = KvPages(torch.zeros(kv.slab.shape, dtype=torch.uint8), kv.format, 1, PAGE_SIZE, kv.head_dim)
        page, slot = (t.flatten() for t in torch.meshgrid(torch.arange(PAGES), torch.arange(PAGE_SIZE), indexing="ij"))
        pages.write(page, slot, *torch.randn(2, len(page), 1, kv.head_dim))
        return pages.slab[: len(self.memory.slab(layer))]

    def held(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the pages that no adapter has."""
        kv = self.memory.kv_pages(layer)
        pages = KvPages(kv.slab.cpu(), kv.format, 1, PAGE_SIZE, kv.head_dim)
        return pages.read(torch.arange(self.end))

    def _record(self, compute: Callable[[], torch.Tensor]) -> FakeGraph:
        assert self.gpu is not None
        self.graphs.append(FakeGraph(self.gpu, compute))
        return self.graphs[-1]

    def step(self, requests: list[Share]) -> SchedulerOutput:
        """Return a step; a share of `PIECE` tokens is part of a prompt, without its end."""
        scheduled, first = [], 0
        for i, (name, before, *counts) in enumerate(requests):
            tokens, guessed = (*counts, 0)[:2] if counts else (1, 0)
            pages = tuple(range(first, first - (-(before + tokens) // PAGE_SIZE)))
            first += len(pages)
            ids = tuple((7 * i + before + j) % 40 for j in range(tokens))
            drafts = PlannedDrafts(ids[tokens - guessed :], ("lookup",) * guessed) if guessed else NO_DRAFTS
            rest = (name, tokens != PIECE, SamplingParams(), 0)
            scheduled.append(ScheduledRequest(RequestId(str(i)), ids, before, pages, *rest, drafts=drafts))
        assert first <= self.end
        used = {name: self.placements[name] for name, *_ in requests if name is not None}
        return SchedulerOutput(tuple(scheduled), used, (), (), 0)

    def eager(self, step: SchedulerOutput) -> tuple[torch.Tensor, list[str]]:
        batch = build_batch(step, self.memory, torch.float32, self.ops)
        return self.decoder.forward(batch), [s.request_id for s in batch.sampled]


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with FakeGpu() as gpu:
        yield gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dummy")
    (folder / "config.json").write_text(CONFIG)
    return folder


STEPS: list[list[Share]] = [
    [("a", 5), (None, 40), ("b", 17)],
    [("b", 70), ("a", 0), ("b", 31)],
    [(None, 9), (None, 33), (None, 1)],
    [("b", 16), ("a", 2), ("a", 3), (None, 15)],
    [(None, 300), ("a", 20)],
    [("b", 280), (None, 47)],
    [(None, 8), (None, 15), (None, 64)],
]
MIXED: list[list[Share]] = [
    [("a", 5), (None, 0, 50), ("b", 17)],
    [("b", 70), ("a", 10, 3), ("b", 0, PIECE)],
    [(None, 300), ("a", 30, 40), ("b", 3)],
    [("b", 280, 2), (None, 0, 33), ("a", 4, 25)],
]
DRAFTS: list[list[Share]] = [
    [("a", 5, 3, 2), (None, 40)],
    [("a", 15, 2, 1), ("b", 16, 2, 1)],
    [(None, 300, 4, 3)],
]
# (4 rows, whole, rank 32), (4, whole, none), (2, cut keys, rank 16), (2, cut keys, rank 32), then 64 rows with prompts
# of rank 32: (whole), (cut keys), then 8 rows with drafts: (whole, rank 16), (whole, 32), (cut keys, none).
REPLAYS = [2, 1, 0, 0, 1, 1, 0, 0, 0]
# A graph of each kind, and a replay.
FEW = [*STEPS[:2], STEPS[4], MIXED[0], DRAFTS[1]]
FEW_REPLAYS = [1, 0, 0, 0]


# A number on the border of two codes may get the other one. Rows that pad a bucket hold no numbers.
@pytest.mark.long
@pytest.mark.aside
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("kv_format", "step_of_a_code", "steps", "replays"),
    [
        ("float32", 1e-5, FEW, FEW_REPLAYS),
        *(
            pytest.param(*code, STEPS + MIXED + DRAFTS, REPLAYS, marks=pytest.mark.exhaustive)
            for code in (("float32", 1e-5), ("int8", 0.03), ("k8v4", 0.4))
        ),
    ],
    ids=["float32, few", "float32", "int8", "k8v4"],
)
def test_steps_replayed_from_graphs_are_those_computed_without(
    folder: Path,
    gpu: FakeGpu,
    kv_format: str,
    step_of_a_code: float,
    steps: list[list[Share]],
    replays: list[int],
) -> None:
    served, plain = Served(folder, gpu=gpu, kv_format=kv_format), Served(folder, kv_format=kv_format)
    for requests in steps:
        want, of = plain.eager(plain.step(requests))
        logits, sampled = served.graphed.compute(served.step(requests))
        assert [s.request_id for s in sampled] == of
        torch.testing.assert_close(logits.cpu(), want, rtol=1e-4, atol=1e-5)
        for layer in range(2):
            torch.testing.assert_close(served.held(layer), plain.held(layer), rtol=1e-4, atol=step_of_a_code)
            adapters, others = (world.memory.slab(layer).view(PAGES, -1)[world.end :] for world in (served, plain))
            assert torch.equal(adapters.cpu(), others)
    assert [graph.num_replays for graph in served.graphs] == replays


def test_what_a_graph_reads_lives_as_long(folder: Path, gpu: FakeGpu) -> None:
    """Memory that dies after the capture belongs to others when it is replayed."""
    served, plain = Served(folder, gpu=gpu), Served(folder, "torch")
    for requests in STEPS[:2]:
        want, _ = plain.eager(plain.step(requests))
        logits, _ = served.graphed.compute(served.step(requests))
        torch.testing.assert_close(logits.cpu(), want, rtol=1e-4, atol=1e-5)
    assert [(graph.num_replays, graph.lost()) for graph in served.graphs] == [(1, [])]


def test_pending_tokens_are_those_of_the_step_before(folder: Path, gpu: FakeGpu) -> None:
    """Captured or replayed, the graph reads what has been written over its inputs meanwhile."""
    served, plain = Served(folder, gpu=gpu), Served(folder, "torch")
    for tokens in ([11, 3, 29], [8, 30, 5]):
        step = plain.step([("a", 5), (None, 9), ("b", 17)])
        known = [replace(s, token_ids=(t,)) for s, t in zip(step.requests, tokens, strict=True)]
        want, of = plain.eager(step.only(known))
        pending = [replace(s, token_ids=(PENDING,)) for s in step.requests[:2]] + known[2:]
        last = LaunchedStep(step.requests, torch.tensor(tokens, device=DEVICE))
        logits, sampled = served.graphed.compute(step.only(pending), last)
        assert [s.request_id for s in sampled] == of
        torch.testing.assert_close(logits.cpu(), want, rtol=1e-4, atol=1e-5)
    assert [graph.num_replays for graph in served.graphs] == [1]


def test_adapters_matter(folder: Path, gpu: FakeGpu) -> None:
    served = Served(folder, gpu=gpu)
    one, other = (served.graphed.compute(served.step([(name, 5), (None, 9)])) for name in ("a", None))
    logits = {s.request_id: row for row, s in zip(one[0].cpu(), one[1], strict=True)}
    base = other[0].cpu()
    assert not torch.allclose(logits["0"], base[0], atol=1e-3)
    torch.testing.assert_close(logits["1"], base[1], rtol=1e-4, atol=1e-5)


def test_a_graph_captured_before_an_alora_acts_is_none_of_those_in_which_it_does(folder: Path, gpu: FakeGpu) -> None:
    served, plain = Served(folder, gpu=gpu), Served(folder, "torch")
    found = []
    for active_from in (8, 0):
        step = plain.step([("a", 5), (None, 9)])
        step = step.only([replace(s, active_from=active_from) for s in step.requests])
        want, _ = plain.eager(step)
        logits, _ = served.graphed.compute(step)
        torch.testing.assert_close(logits.cpu(), want, rtol=1e-4, atol=1e-5)
        found.append(want)
    assert not torch.allclose(*found, atol=1e-3)


def test_an_adapter_that_has_moved_is_read_at_its_new_place(folder: Path, gpu: FakeGpu) -> None:
    """All else is as in the step before; where it lay is NaN now."""
    served = Served(folder, gpu=gpu)
    step = served.step([("a", 5)])
    logits = [served.graphed.compute(step)[0].cpu()]
    placed, target = served.placements["a"], 5
    ((first, count),) = placed.runs
    assert target + count <= served.end
    for layer in range(2):
        pages = served.memory.slab(layer).view(PAGES, -1)
        pages[target : target + count] = pages[first : first + count]
        pages[first : first + count] = 0xFF
    moved = replace(step, placements={"a": placed.moved({(first, count): (target, count)})})
    logits.append(served.graphed.compute(moved)[0].cpu())
    assert torch.equal(*logits)
    assert [graph.num_replays for graph in served.graphs] == [1]


def test_padding_rows_write_to_no_page_of_the_pool(folder: Path, gpu: FakeGpu) -> None:
    served = Served(folder, gpu=gpu)
    owned = served.step([(None, 5)])
    for layer in range(2):
        pages = served.memory.slab(layer).view(PAGES, -1)
        pages[len(owned.requests[0].page_table) :] = 0xFF
    step = served.step([(None, 5), (None, 3), (None, 2)])
    for _ in range(2):
        logits, _ = served.graphed.compute(step)
        assert len(logits) == 3
    for layer in range(2):
        pages = served.memory.slab(layer).view(PAGES, -1).cpu()
        assert bool((pages[3:] == 0xFF).all())
        scratch = served.memory.kv_pages(layer).keys[PAGES].cpu()
        assert int((scratch != 0).any(dim=(0, 1)).sum()) == 1


def test_what_fits_no_bucket_has_no_graph(folder: Path) -> None:
    served = Served(folder)
    (scheduled,) = served.step([(None, 0, 3)]).requests
    asks = replace(scheduled, prompt_rows=range(2))
    tree = replace(scheduled, drafts=PlannedDrafts(scheduled.token_ids[1:], parents=(-1, -1)))
    for requests in ([asks], [tree], served.step([(None, i) for i in range(5)]).requests):
        assert served.graphed.compute(SchedulerOutput(tuple(requests), {}, (), AdapterOrders(), 0)) is None
    assert served.graphs == []
    assert (buckets(1), buckets(20), buckets(64)[-1]) == ((1,), (1, 2, 4, 8, 16, 24), 64)
    assert buckets(100)[-3:] == (64, 96, 128)


def test_a_failed_capture_is_tried_again_much_later(
    folder: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory is short: the step is computed, those that follow have no graph, other buckets keep theirs."""
    monkeypatch.setattr(cuda_graphs, "RETRY_STEPS", 3)
    served, attempts = Served(folder, gpu=gpu), 0

    def record(compute: Callable[[], torch.Tensor]) -> FakeGraph:
        nonlocal attempts
        attempts += 1
        if attempts in (1, 2):
            raise torch.OutOfMemoryError("out of memory")
        return served._record(compute)

    served.graphed._record = record
    one, other = served.step([(None, 5)]), served.step([(None, 5), (None, 9)])
    logits, _ = served.graphed.compute(one)
    assert torch.isfinite(logits.cpu()).all()
    assert [served.graphed.compute(one) for _ in range(2)] == [None, None]
    assert served.graphed.compute(one) is not None
    assert (attempts, len(caplog.records)) == (2, 2)
    assert served.graphed.compute(other) is not None
    assert served.graphed.compute(one) is None
    assert served.graphed.compute(other) is not None
    assert [graph.num_replays for graph in served.graphs] == [1]


def test_a_step_without_memory_for_its_buckets_capacity_has_no_graph(folder: Path, gpu: FakeGpu) -> None:
    """It may need less itself. Other errors are the step's."""
    served, forward = Served(folder, gpu=gpu), mock.Mock(side_effect=torch.OutOfMemoryError("out of memory"))
    one, served.graphed._forward = served.step([(None, 5)]), forward
    assert [served.graphed.compute(one) for _ in range(2)] == [None, None]
    assert (forward.call_count, served.graphs) == (1, [])
    forward.side_effect = RuntimeError("an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal"):
        served.graphed.compute(served.step([(None, 5), (None, 9)]))


def test_buckets_are_made_once(folder: Path, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts fit only the later buckets of parts: none is made to find that out."""
    made: list[StaticCapacity] = []

    def counted(dims: PlanDims, capacity: StaticCapacity) -> StaticPlans:
        made.append(capacity)
        return StaticPlans(dims, capacity)

    monkeypatch.setattr(cuda_graphs, "StaticPlans", counted)
    served = Served(folder, gpu=gpu)
    served.graphed._forward = lambda batch: torch.zeros((len(batch.token_ids), 40), device=DEVICE)
    for _ in range(2):
        for requests in ([(None, 500)], [(None, 300), (None, 2)], [(None, 5)]):
            assert served.graphed.compute(served.step(requests)) is not None
    assert [(capacity.rows, capacity.small_items) for capacity in made] == [(1, 4), (2, 8), (1, 1)]


KINDS = {
    "single tokens": st.lists(st.tuples(st.integers(1, MAX_CONTEXT), st.just(1)), min_size=1, max_size=64),
    "any": st.lists(st.tuples(st.integers(1, 4000), st.just(1) | st.integers(1, 90)), min_size=1, max_size=64),
    "prompts that fill no tile": st.lists(st.tuples(st.integers(36, 400), st.integers(33, 36)), max_size=31),
}
"""Steps as (keys, tokens) of each sequence."""


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(
    st.data(),
    st.lists(st.tuples(*[st.integers(0, 20)] * 6, st.integers(1, 256)), min_size=4, max_size=4),
    st.integers(0, 2**32),
)
def test_a_step_fits_the_bucket_that_it_gets(
    kind: str, data: st.DataObject, ranks: list[tuple[int, ...]], seed: int
) -> None:
    """Filling it refuses nothing, whatever the lengths and ranks; the next smaller number of parts would."""
    spec = ModelSpec("llama", 1, 32, 48, 2, 1, 16, 40, MAX_CONTEXT, 1e-5)
    memory = DevicePool(spec, 1, PAGE_SIZE, KV_FORMATS["float32"], CPU, scratch=True)
    limits = DecoderLimits(MAX_CONTEXT, 1024, 64, torch.float32)
    graphed = GraphedSteps(
        lambda batch: torch.zeros(len(batch.token_ids), 40), spec, memory, limits, lambda compute: cast(Recorded, None)
    )
    placements = {}
    for number, (q, k, v, o, gate, up, down) in enumerate(ranks):
        layout = AdapterLayout(site_dims(spec), (((q, k, v), (o,), (gate, up), (down,)),), 4)
        placed = layout.place([(0, 1000)], memory.page_bytes)
        assert placed is not None
        placements[str(number)] = placed
    scheduled = []
    owners = random.Random(seed)
    for i, (length, tokens) in enumerate(data.draw(KINDS[kind].filter(bool))):
        pages, name = (0,) * -(-length // PAGE_SIZE), owners.choice((None, *placements))
        start = max(0, length - tokens)
        rest = (pages, name, True, SamplingParams(), 0)
        scheduled.append(ScheduledRequest(RequestId(str(i)), (1,) * (length - start), start, *rest))
    step = SchedulerOutput(tuple(scheduled), placements, (), AdapterOrders(), 0)
    assert (graphed.compute(step) is None) == (not graphed._buckets)
    for capacity in graphed._buckets:
        parts = capacity.small_items // capacity.sequences
        if parts > PARTS[0]:
            fewer = PARTS[PARTS.index(parts) - 1]
            smaller = replace(capacity, small_items=fewer * capacity.sequences, is_cut=fewer > 1)
            graphed._buckets = {smaller: _Bucket(StaticPlans(graphed.dims, smaller))}
            graphed._capacity_for = lambda rows, work, smaller=smaller: smaller
            with pytest.raises(CapacityExceeded):
                graphed.compute(step)
