"""Warm-up of a GPU: steps that launch every kernel that a server's steps can launch, before the first request.

The kernels of a step depend on its rows, on the rows with logits, on the ranks of its adapters, on whether keys are
split into parts and on whether there is a prompt. Numbers matter only by the classes between the bounds of the device's
table and, up to `ROPE_ROWS` rows, by powers of two. So one step of every class launches all kernels. The adapters of
these steps change everything that an adapter can, including the ends of the model, gains and shifts. Pages and panels
lie at the start of the empty pool. Each of several processes warms up alone, with the shapes of its part of the model.

Source: steps of dummy requests before the server is ready, vLLM.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from adapter_store.formats.weights import AdapterWeights, LoraTensors
from adapter_store.spec import AdapterKey, AdapterSpec
from lorasrv.kv_policy import SelectPolicy
from lorasrv.models.lora_sites import BLOCK_ROWS, site_dims, with_everything
from lorasrv.models.spec import ModelSpec
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import AdapterOrders, PlannedDrafts, ScheduledRequest, SchedulerOutput
from lorasrv.worker.adapter_vectors import output_vectors
from lorasrv.worker.cuda_graphs import MIXED_ROWS, RANKS, buckets
from lorasrv.worker.decoder import OUT, Decoder, DecoderLimits
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.forward_batch import build_batch
from lorasrv.worker.weights import ModelWeights
from sgmv_kernels.backend import Progress
from sgmv_kernels.formats.adapter_panels import MAX_SLICES, AdapterLayout, LayerRanks, PlacedAdapter
from sgmv_kernels.metadata.draft_trees import ROOT
from sgmv_kernels.ops import Ops
from sgmv_kernels.triton_ops.attention import config_for
from sgmv_kernels.triton_ops.attention_metadata import FEW_ROWS
from sgmv_kernels.triton_ops.block_sizes import PARTS, device_name, table_of
from sgmv_kernels.triton_ops.kernel_compiler import count_late, load, noted
from sgmv_kernels.triton_ops.pointwise import ROPE_ROWS
from sgmv_kernels.triton_ops.sgmv_metadata import EXPAND_RANKS

COMMON_RANKS = (0, 16)
_ADAPTER = AdapterKey("warm-up")


def compile_kernels(launches: Sequence[Callable[[], object]], progress: Progress) -> None:
    """Compile and load every kernel that these passes launch. Run them afterwards: libraries load their own kernels."""
    with torch.inference_mode(), noted() as keys:
        for run in launches:
            run()
    load(keys, progress)


def warm_up(
    decoder: Decoder, memory: DevicePool, limits: DecoderLimits, ops: Ops, max_rank: int, *, has_trees: bool
) -> None:
    """Compile and run every kernel of the part of a model that this process computes, then log those that are late."""
    steps = WarmUpSteps(decoder.weights.spec, memory, limits, max_rank, has_trees=has_trees)
    launches = passes(steps, decoder, memory, limits, ops)
    compile_kernels(launches, lambda what, done: None)
    for run in launches:
        run()
    count_late()


def compute(step: SchedulerOutput, decoder: Decoder, memory: DevicePool, limits: DecoderLimits, ops: Ops) -> None:
    """Compute a step without a graph, and move a draft token of each tree as if it were accepted."""
    decoder.forward(build_batch(step, memory, limits.adapter_dtype, ops))
    moves = [s.moves_along((len(s.draft_parents) - 1,)) for s in step.requests if s.draft_parents]
    if moves:
        memory.copy_slots(moves, ops)


def passes(
    steps: "WarmUpSteps", decoder: Decoder, memory: DevicePool, limits: DecoderLimits, ops: Ops
) -> list[Callable[[], object]]:
    """Return passes that launch every kernel of a model, or of the part of it that this process computes: those of its
    steps, and of the loads of adapters."""
    alone = decoder.alone()
    computed = [partial(compute, step, alone, memory, limits, ops) for step in steps.all()]
    return [*computed, partial(read_base, decoder.weights)]


def read_base(weights: ModelWeights) -> None:
    """Read a row of each linear, and compute the vectors of an adapter with DoRA and a bias, as loads of adapters
    do."""
    spec = weights.spec
    # Ranks that have parts of linears serve no DoRA.
    if spec.adapts_ends:
        site = spec.sites_of(0)[OUT]
        (module,), (out,) = site.modules, site.out_features
        a, b = np.zeros((2, site.in_features), np.float32), np.zeros((out, 2), np.float32)
        lora = LoraTensors(2, 1.0, a, b, magnitude=np.ones(out, np.float32), b_bias=np.zeros(out, np.float32))
        adapter = AdapterSpec(_ADAPTER, "", (), "F32", 0)
        list(output_vectors(weights, AdapterWeights(adapter, {(spec.first_layer, module): lora}), 0))
    row = torch.zeros(1, dtype=torch.int64, device=weights.final_norm.device)
    for linear in (*(linear for layer in weights.layers for linear in layer.linears()), weights.head):
        # Another rank may have the head.
        if linear.out_features:
            linear.rows(row)


def classes(table: dict[str, Any], bound: str, most: int) -> list[int]:
    """Return one number from each range between the bounds of this name in a device's table, from 1 to `most`."""
    rows = [row for part in PARTS for row in table[part]]
    return sorted({row[bound] for row in rows if row.get(bound) is not None and row[bound] < most} | {most})


class WarmUpSteps:
    """Make the steps for one model and device.

    Args:
        max_rank: highest rank of an adapter that is served; 0 for a model that only drafts.
        has_trees: whether drafts may be trees.
    """

    def __init__(
        self, spec: ModelSpec, memory: DevicePool, limits: DecoderLimits, max_rank: int, *, has_trees: bool = False
    ) -> None:
        self._spec, self._memory, self._limits = spec, memory, limits
        # Graphs round ranks up.
        self._max_rank = next(rank for rank in RANKS if rank >= max_rank)
        self._has_trees = has_trees
        self._table = table_of(device_name(memory.device))
        self._cut_keys = config_for(limits.activation.itemsize, memory.kv_pages(0)).split_tokens + 1

    def all(self) -> Iterator[SchedulerOutput]:
        """Return steps that launch every kernel: prompts on adapters of every class of rank, and single tokens."""
        adapters = list(self._adapters())
        bounds = {*classes(self._table, "max_rows", self._limits.max_rows), *self._table["dequantize_above"].values()}
        # More rows with logits only make steps larger; they launch no other kernels.
        asked = max(self._table["dequantize_above"].values()) + 1
        for rows in sorted({2**power for power in range(ROPE_ROWS.bit_length())} | bounds):
            if rows <= self._limits.max_rows:
                for adapter in adapters:
                    yield self._step(self._prompts(rows, asked, adapter), adapter)
            if rows <= self._limits.max_samples:
                yield self._singles(rows, 0, self._cut_keys)
        if self._max_rank and self._spec.why_no_kv_policy is None:
            yield self._observed()
        if self._has_trees:
            yield self._trees()

    def common(self) -> Iterator[SchedulerOutput]:
        """Return a step for every graph that most servers need, the largest first: later ones fit into its memory."""
        ranks = [rank for rank in COMMON_RANKS if rank <= self._max_rank]
        for rows in reversed([rows for rows in MIXED_ROWS if rows <= self._limits.max_rows]):
            yield from (self._mixed(rows, rank) for rank in ranks)
        for rows in reversed(buckets(self._limits.max_samples)):
            for num_keys in (self._cut_keys, 1):
                yield from (self._singles(rows, rank, num_keys) for rank in ranks)

    def _singles(self, rows: int, rank: int, num_keys: int) -> SchedulerOutput:
        """Return a step of single tokens with `num_keys` keys each, on an adapter of this rank or on the base."""
        adapter = self._uniform(rank)
        return self._step([self._single(str(i), num_keys, adapter) for i in range(rows)], adapter)

    def _observed(self) -> SchedulerOutput:
        """Return a step of one token whose attention to each page is observed."""
        policy = SelectPolicy(budget=self._memory.page_size, page_size=self._memory.page_size)
        return self._step([replace(self._single("0", 1, None), kv_policy=policy, num_observed=1)], None)

    def _trees(self) -> SchedulerOutput:
        """Return a step of a draft tree, an answer with split keys and a prompt that is split into long tiles."""
        drafts = PlannedDrafts((0, 0), ("lookup",) * 2, parents=(ROOT, ROOT))
        tree = replace(self._scheduled("tree", 3, 0, None), drafts=drafts)
        prompt = max(1, min(FEW_ROWS + 1, self._limits.max_rows - 4, self._limits.max_model_len))
        return self._step(
            [tree, self._single("answer", self._cut_keys, None), self._scheduled("prompt", prompt, 0, None)], None
        )

    def _mixed(self, rows: int, rank: int) -> SchedulerOutput:
        """Return a step of an answer's token with split keys, and of prompts."""
        adapter = self._uniform(rank)
        return self._step(
            [self._single("answer", self._cut_keys, adapter), *self._prompts(rows - 1, 0, adapter)], adapter
        )

    def _prompts(self, rows: int, asked: int, adapter: PlacedAdapter | None) -> Iterator[ScheduledRequest]:
        """Return one prompt, or as many as the longest context requires; the logits of `asked` rows are requested."""
        for start in range(0, rows, self._limits.max_model_len):
            count = min(self._limits.max_model_len, rows - start)
            yield self._scheduled(str(start), count, 0, adapter, range(max(0, min(count, asked - start))))

    def _single(self, name: str, num_keys: int, adapter: PlacedAdapter | None) -> ScheduledRequest:
        return self._scheduled(name, 1, min(num_keys, self._limits.max_model_len) - 1, adapter)

    def _scheduled(
        self, name: str, count: int, start: int, adapter: PlacedAdapter | None, asked: range = range(0)
    ) -> ScheduledRequest:
        pages = (0,) * -(-(start + count) // self._memory.page_size)
        key = None if adapter is None else _ADAPTER
        rest = (pages, key, True, SamplingParams(), 0)
        return ScheduledRequest(RequestId(name), (0,) * count, start, *rest, prompt_rows=asked)

    def _step(self, requests: Iterable[ScheduledRequest], adapter: PlacedAdapter | None) -> SchedulerOutput:
        placements = {} if adapter is None else {_ADAPTER: adapter}
        return SchedulerOutput(tuple(requests), placements, (), AdapterOrders(), 0)

    def _ranks(self, total: int, highest: int) -> tuple[int, ...]:
        """Return ranks of slices, each at most `highest`, with the sum `total` or as close as possible."""
        slices = max(len(site.out_features) for site in self._spec.sites())
        return tuple(max(0, min(highest, total - i * highest)) for i in range(slices))

    def _adapters(self) -> Iterator[PlacedAdapter | None]:
        """Yield an adapter for every class of ranks, and of own rows; the slices of each site have the first of these
        ranks."""
        if not self._max_rank:
            yield None
            return
        slices = max(len(site.out_features) for site in self._spec.sites())
        totals = classes(self._table, "max_rank", slices * self._max_rank)
        highest = [*(rank for rank in EXPAND_RANKS if rank < self._max_rank), self._max_rank]
        kinds = sorted({self._ranks(*pair) for pair in itertools.product(totals, highest)})
        # Kernels handle own rows of the head as they handle ranks.
        blocks = classes(self._table, "max_rank", BLOCK_ROWS)
        for at in range(max(len(kinds), len(blocks))):
            ranks, rows = kinds[at % len(kinds)], blocks[at % len(blocks)]
            yield self._placed(with_everything(self._spec, self._layout(ranks), ranks[0], rows))

    def _uniform(self, rank: int) -> PlacedAdapter | None:
        """Return an adapter whose slices all have this rank and which changes nothing else; None for rank 0."""
        return self._placed(self._layout((rank,) * MAX_SLICES)) if rank else None

    def _layout(self, ranks: tuple[int, ...]) -> AdapterLayout:
        """Return a layout of equal layers; the slices of each site have the first of these ranks."""
        layer, itemsize = self._layer_ranks(ranks), self._limits.adapter_dtype.itemsize
        return AdapterLayout(site_dims(self._spec), (layer,) * self._spec.num_layers, itemsize, self._spec.kv_slabs)

    def _layer_ranks(self, ranks: tuple[int, ...]) -> LayerRanks:
        return tuple(ranks[: len(site.out_features)] for site in self._spec.sites())

    def _placed(self, layout: AdapterLayout) -> PlacedAdapter:
        """Return an adapter whose panels all lie at the start of the pool."""
        starts = {len(sizes): np.zeros(len(sizes), dtype=np.int64) for sizes in layout.panel_bytes}
        offsets = tuple(starts[len(sizes)] for sizes in layout.panel_bytes)
        return PlacedAdapter(layout, (), self._memory.page_bytes, offsets)
