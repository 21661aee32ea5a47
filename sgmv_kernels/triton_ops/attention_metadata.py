"""Attention work of a step on a GPU, cut on the host into one packed int32 buffer.

    decode    [I, 5]  sequence, first query row in it, first key, end of keys, slot of the partial result or -1
    prefill   [J, 5]  the same, longer tiles, never split
    reduce    [G, 4]  sequence, first query row, first slot, number of slots
    starts    [B + 1] query rows,  lens [B] keys,  pages [B, max pages]
    trees     [B]     first slot of the draft tree; rows [T, 3] position, low and high half of the word. Only in steps
                      with trees, which have no graph

A sequence with few query rows, or with a draft tree, is cut into small tiles, and its keys into parts of
`split_tokens`, so that a long context keeps many programs busy; a reduce adds the parts. The cut depends only on the
sequence, never on the batch, so that a row always has the same bits. (By arithmetic, a partial result has 1 to 2 % of
the bytes of its keys, so an unneeded cut costs little.) Long tiles do not support trees, for which they lack registers.

There are two forms, as in `sgmv_metadata`: exact, and with a fixed capacity for graph replays. Work that a step does
not use has no keys (`first key = end`), or no slots, and its programs end after one load.

Source: keys split with a reduce, Flash-Decoding (Dao et al. 2023); a plan of work items made on the host, FlashInfer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.errors import CapacityExceeded
from sgmv_kernels.metadata.draft_trees import DraftTrees
from sgmv_kernels.metadata.h2d import Ints
from sgmv_kernels.metadata.plans import AttentionPlan
from sgmv_kernels.metadata.segments import Int32
from sgmv_kernels.triton_ops.common import host_ints, section, sections

ITEM_INTS = 5
REDUCE_INTS = 4
TREE_INTS = 3
MAX_SPLITS = 64
"""Most parts of a sequence; longer contexts have longer parts."""
FEW_ROWS = 64
"""Most query rows, times the heads that share a key head, of a sequence without a tree that is cut into small tiles."""
NO_SLOT = -1
NO_REDUCES = np.empty((0, REDUCE_INTS), dtype=np.int32)
PADDING_INTS = 256
"""Padding after the page tables: a tile of keys reads the table without a mask, at most two tiles past its end."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Hold the sizes by which work is cut."""

    # Query rows of a small tile.
    decode_rows: int
    # Query rows of a long tile.
    prefill_rows: int
    # Keys of a part.
    split_tokens: int
    # Largest number of rows of a sequence that is cut into small tiles.
    few_rows: int


@dataclass(frozen=True, slots=True)
class Work:
    """Hold the work items of a step, in the tables of the module docstring."""

    decode: Int32
    prefill: Int32
    reduce: Int32
    # Number of partial results.
    slots: int


NO_WORK: Mapping[tuple[Shape, int], Work] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class AttentionCapacity:
    """Hold the largest step of one graph: sequences, their pages, items of each kind."""

    max_sequences: int
    max_pages: int
    max_decode: int
    max_prefill: int
    max_reduce: int
    max_slots: int
    # Rows of a step with draft trees; 0 for a step without.
    tree_rows: int = 0


class AttentionBuffer:
    """Hold a step's work for one `Shape` on the device. Grids and offsets depend only on the capacity."""

    def __init__(self, capacity: AttentionCapacity, device: torch.device) -> None:
        self.capacity, self.device = capacity, device
        sizes = (
            capacity.max_decode * ITEM_INTS,
            capacity.max_prefill * ITEM_INTS,
            capacity.max_reduce * REDUCE_INTS,
            capacity.max_sequences + 1,
            capacity.max_sequences,
            capacity.max_sequences * capacity.max_pages + PADDING_INTS,
            capacity.max_sequences if capacity.tree_rows else 0,
            capacity.tree_rows * TREE_INTS,
        )
        starts, self.length = sections(sizes)
        self.decode_at, self.prefill_at, self.reduce_at, self.starts_at, self.lens_at, self.pages_at = starts[:6]
        self.trees_at, self.tree_rows_at = starts[6:]
        self.ints: Tensor | None = None

    def update(self, plan: AttentionPlan, work: Work) -> None:
        """Copy a step's work to the device, in one asynchronous copy.

        Raises:
            CapacityExceeded: the step does not fit; nothing was changed.
        """
        most, tree_rows = self.capacity, 0 if plan.trees is None else plan.num_rows
        for name, has, limit in (
            ("sequences", len(plan.kv_lens), most.max_sequences),
            ("pages a sequence", plan.page_tables.shape[1], most.max_pages),
            ("decode items", len(work.decode), most.max_decode),
            ("prefill items", len(work.prefill), most.max_prefill),
            ("reduce items", len(work.reduce), most.max_reduce),
            ("slots", work.slots, most.max_slots),
            ("rows with draft trees", tree_rows, most.tree_rows),
        ):
            if has > limit:
                raise CapacityExceeded(f"a step has {has} {name}, the capacity is {limit}")
        ints, (count, width) = host_ints(self.length, self.device), plan.page_tables.shape
        numbers = ints.numpy()
        section(numbers, self.decode_at, *work.decode.shape)[:] = work.decode
        section(numbers, self.prefill_at, *work.prefill.shape)[:] = work.prefill
        section(numbers, self.reduce_at, *work.reduce.shape)[:] = work.reduce
        section(numbers, self.starts_at, count + 1)[:] = plan.query_starts
        section(numbers, self.lens_at, count)[:] = plan.kv_lens
        section(numbers, self.pages_at, count, most.max_pages)[:, :width] = plan.page_tables
        if plan.trees is not None:
            section(numbers, self.trees_at, count)[:] = plan.trees.starts
            rows = section(numbers, self.tree_rows_at, tree_rows, TREE_INTS)
            rows[:, 0] = plan.trees.positions
            rows[:, 1:] = plan.trees.words.astype("<i8").view(np.int32).reshape(-1, 2)
        if self.ints is None:
            self.ints = ints.to(self.device, non_blocking=True)
        else:
            self.ints.copy_(ints, non_blocking=True)


class AttentionTables:
    """Hold the sequences of a step; work is cut once for each shape that a model's layers use (usually one).

    With a `capacity`, the buffers keep their addresses, and `update` refills the existing ones. For a graph, call
    attention once before the capture, so that the buffers exist.
    """

    def __init__(self, plan: AttentionPlan, device: torch.device, capacity: AttentionCapacity | None = None) -> None:
        self._plan, self._device, self._capacity = plan, device, capacity
        self._buffers: dict[tuple[Shape, int], AttentionBuffer] = {}

    def buffer(self, shape: Shape, group: int) -> AttentionBuffer:
        """Return the work on the device, for query heads that share a key head in groups of `group`."""
        made = self._buffers.get((shape, group))
        if made is None:
            work = cut(self._plan.query_starts, self._plan.kv_lens, shape, group, self._plan.trees)
            made = AttentionBuffer(self._capacity or _exact(self._plan, work), self._device)
            made.update(self._plan, work)
            self._buffers[shape, group] = made
        return made

    def update(self, plan: AttentionPlan, known: Mapping[tuple[Shape, int], Work] = NO_WORK) -> None:
        """Replace the step; only with a capacity.

        Args:
            known: work that is already cut, by shape and group.
        """
        assert self._capacity is not None
        self._plan = plan
        for key, buffer in self._buffers.items():
            work = known.get(key) or cut(plan.query_starts, plan.kv_lens, *key, plan.trees)
            buffer.update(plan, work)


def cut(query_starts: Int32, kv_lens: Int32, shape: Shape, group: int, trees: DraftTrees | None = None) -> Work:
    """Cut every sequence into tiles and parts, independent of the other sequences; arguments as in `AttentionPlan`."""
    query_lens = query_starts[1:] - query_starts[:-1]
    few = (query_lens == 1) | (query_lens * group <= shape.few_rows)
    if trees is not None:
        few |= trees.starts < kv_lens
    (small,), (long,) = few.nonzero(), (~few).nonzero()
    rows, lens = query_lens[small], kv_lens[small]
    part = split_of(lens, shape.split_tokens)
    decode, parts = _items(small, rows, lens, shape.decode_rows, part)
    whole = kv_lens[long]
    prefill, _ = _items(long, query_lens[long], whole, shape.prefill_rows, whole)
    slots = _number_slots(decode, parts)
    return Work(decode, prefill, _reduces(decode, parts) if slots else NO_REDUCES, slots)


def split_of(lens: Ints, split_tokens: int) -> Int32:
    """Return the keys of a part for each length: `split_tokens` times a power of two, which limits the parts."""
    if not len(lens) or lens.max() <= MAX_SPLITS * split_tokens:
        return np.full(len(lens), split_tokens, dtype=np.int32)
    parts = -(-lens // split_tokens)
    doublings = np.frexp(-(-parts // MAX_SPLITS) - 1)[1]
    return (split_tokens << doublings.astype(np.int32)).astype(np.int32)


def _items(sequences: Ints, rows: Int32, lens: Int32, tile_rows: int, part: Int32) -> tuple[Int32, Int32]:
    """Return items [I, 5] without slots, with the parts of a tile adjacent and in order, and the parts of each tile."""
    tiles, parts = -(-rows // tile_rows), -(-lens // part)
    counts = tiles * parts
    items = np.empty((int(counts.sum()), ITEM_INTS), dtype=np.int32)
    items[:, 4] = NO_SLOT
    if len(items) == len(sequences):  # one of each
        items[:, 0], items[:, 1:3], items[:, 3] = sequences, 0, lens
        return items, parts
    of = np.arange(len(sequences)).repeat(counts)
    within = np.arange(len(of)) - (counts.cumsum() - counts).repeat(counts)
    items[:, 0] = sequences[of]
    items[:, 1] = within // parts[of] * tile_rows
    items[:, 2] = within % parts[of] * part[of]
    items[:, 3] = np.minimum(items[:, 2] + part[of], lens[of])
    return items, parts.repeat(tiles)


def _number_slots(items: Int32, parts: Int32) -> int:
    """Assign a slot to every part of tiles with several parts, and return the number of slots; `parts` has the number
    of parts of each tile.
    """
    if len(items) == len(parts):
        return 0
    split = (parts > 1).repeat(parts)
    count = int(split.sum())
    items[split, 4] = np.arange(count)
    return count


def _reduces(items: Int32, parts: Int32) -> Int32:
    """Return [G, 4]: the tiles that have several parts."""
    first = items[parts.cumsum() - parts]
    return np.stack((first[:, 0], first[:, 1], first[:, 4], parts), axis=-1)[parts > 1].astype(np.int32)


def _exact(plan: AttentionPlan, work: Work) -> AttentionCapacity:
    sizes = (len(work.decode), len(work.prefill), len(work.reduce), work.slots)
    tree_rows = 0 if plan.trees is None else plan.num_rows
    return AttentionCapacity(len(plan.kv_lens), plan.page_tables.shape[1], *sizes, tree_rows)
