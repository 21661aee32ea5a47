"""Plans of a step: its adapters, and its sequences with the places of their keys and values in the pool."""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.formats.adapter_panels import PlacedAdapter
from sgmv_kernels.metadata.draft_trees import DraftTrees
from sgmv_kernels.metadata.h2d import Ints, upload
from sgmv_kernels.metadata.segments import Int32, Segments
from sgmv_kernels.metadata.sgmv_tables import SgmvTables


@dataclass(frozen=True, slots=True)
class SgmvPlan:
    """Hold the rows and adapters of a step, checked once for all layers and sites.

    Rows whose adapters are sums have further passes, one for the second terms, one for the third and so on.
    """

    tables: SgmvTables
    # Dtype of stored panels that are not int8 codes.
    dtype: torch.dtype
    # T.
    num_rows: int
    # The backend's own form of the tables.
    prepared: Any
    # The next pass; None after the last.
    next: "SgmvPlan | None" = None

    def passes(self) -> Iterator["SgmvPlan"]:
        """Yield this pass and those after it."""
        plan: SgmvPlan | None = self
        while plan is not None:
            yield plan
            plan = plan.next

    @property
    def num_passes(self) -> int:
        """Return how many passes have adapters: 0 if all rows are the base's."""
        return sum(1 for own in self.passes() if own.tables.num_segments)


@dataclass(frozen=True, slots=True)
class PlannedSgmv:
    """Remember the arguments that a plan was made from."""

    passes: tuple[Segments, ...]
    adapters: tuple[PlacedAdapter, ...]
    weights: tuple[float, ...]
    plan: SgmvPlan
    # Number of threads that the plan has memory for: each writes its own results.
    threads: int

    def serves(
        self,
        passes: Sequence[Segments],
        adapters: Sequence[PlacedAdapter],
        weights: tuple[float, ...],
        dtype: torch.dtype,
    ) -> bool:
        """Return whether these arguments give the same plan. Placed adapters never change: moves make new objects."""
        return (
            dtype == self.plan.dtype
            and len(adapters) == len(self.adapters)
            and len(passes) == len(self.passes)
            and all(map(operator.is_, adapters, self.adapters))
            and weights == self.weights
            and torch.get_num_threads() == self.threads
            and all(map(Segments.equals, passes, self.passes))
        )


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Hold the B sequences of a step, checked once for all layers."""

    # [B, max pages].
    page_tables: Int32
    # [B + 1], bounds of each sequence's rows, which are its last positions.
    query_starts: Int32
    # [B], keys of each sequence, including this step's.
    kv_lens: Int32
    page_size: int
    # Upper bound of page ids.
    num_pages: int
    # [T] int64 on the device: page and slot in which each row's own key and value are stored.
    write_pages: Tensor
    write_slots: Tensor
    # The backend's own form of the sequences.
    prepared: Any
    # None if no sequence has a draft tree.
    trees: DraftTrees | None = None

    @property
    def num_rows(self) -> int:
        """Return T, the rows of all sequences; in a graph, including the padding rows after them."""
        return len(self.write_pages)


class RowPlaces(NamedTuple):
    """Hold the places in the pool of the rows of B sequences, in host memory."""

    # [B + 1], [B]: as in `AttentionPlan`.
    query_starts: Int32
    kv_lens: Int32
    # [T]: page and slot in which each row's own key and value are stored.
    pages: Ints
    slots: Ints

    @classmethod
    def of(
        cls,
        page_tables: Int32,
        query_lens: Sequence[int] | Ints,
        kv_lens: Sequence[int] | Ints,
        page_size: int,
    ) -> "RowPlaces":
        """Return the places of a step's rows; arguments as in `Ops.plan_attention`."""
        queries, lens = np.asarray(query_lens, dtype=np.int32), np.asarray(kv_lens, dtype=np.int32)
        starts = np.zeros(len(queries) + 1, dtype=np.int32)
        ends = queries.cumsum(dtype=np.int32, out=starts[1:])
        sequence = np.arange(len(queries)).repeat(queries)
        position = np.arange(len(sequence)) + (lens - ends)[sequence]
        return cls(starts, lens, page_tables[sequence, position // page_size], position % page_size)


@dataclass(frozen=True, slots=True)
class PageMasses:
    """Sum the attention weights that some rows of a step give to each page that they see. Used with one plan."""

    # [B] int32, number of observed rows of each sequence, its last ones; such sequences have no draft trees.
    counts: Int32
    # [key heads, observed rows, most pages of the sequences] fp32 on the device: for each key head the sum over its
    # query heads and the layers.
    sums: Tensor
    # The backend's own tables. The keys are what these depend on besides the plan.
    prepared: dict[Any, Any] = field(default_factory=dict)

    def of_rows(self) -> Tensor:
        """Return the sums over key heads, [observed rows, most pages]. Key heads are added one after another, so that a
        row's bits do not depend on the number of rows.
        """
        total = self.sums[0].clone()
        for of_head in self.sums[1:]:
            total += of_head
        return total


def plan_of(
    page_tables: Int32,
    query_lens: Sequence[int] | Ints,
    kv_lens: Sequence[int] | Ints,
    page_size: int,
    num_pages: int,
    device: torch.device,
) -> AttentionPlan:
    """Return the plan of a step's sequences without the backend's part; arguments as in `Ops.plan_attention`."""
    places = RowPlaces.of(page_tables, query_lens, kv_lens, page_size)
    write_pages, write_slots = upload((places.pages, places.slots), device)
    return AttentionPlan(
        page_tables, places.query_starts, places.kv_lens, page_size, num_pages, write_pages, write_slots, None
    )
