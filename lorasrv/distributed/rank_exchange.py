"""Exchanges of ranks. With columns and stages: gather columns or sums within a stage, send rows to the next stage, and
send logits to rank 0. With rows: gather keys and values of all rows, and send last states to rank 0.
"""

import copy
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lorasrv.distributed.comm import Comm, LoneComm
from lorasrv.distributed.partition import Span
from lorasrv.distributed.rank_spec import RankSpec, Rows, width
from lorasrv.scheduler_output import SlotMoves
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.exchange import Exchange, SplitOutput, empty_logits
from lorasrv.worker.step_rows import StepRows
from sgmv_kernels.metadata.h2d import upload
from sgmv_kernels.metadata.plans import AttentionPlan
from sgmv_kernels.ops import Ops

Tell = Callable[[Sequence[SlotMoves]], None]


DIVIDED_FROM = 64
"""Fewest rows of a step that are divided among ranks: fewer take only the time of reading the weights, which every rank
reads."""


class RankExchange(Exchange):
    """Compute one rank's part of every pass.

    Args:
        tell: sends moves of keys and values to the other ranks; only rank 0 does that.
    """

    can_record = False

    def __init__(self, tell: Tell | None) -> None:
        self._tell = tell
        # Whether this rank waits for others or they wait for it: a failure then cannot be repaired.
        self.is_within_pass = False

    def on_pass_ended(self) -> None:
        self.is_within_pass = False

    def on_slots_moved(self, moves: Sequence[SlotMoves]) -> None:
        assert self._tell is not None, "only rank 0 accepts drafts"
        self._tell(moves)


class PartExchange(RankExchange):
    """Compute some of the layers, or some of their columns.

    Args:
        specs: specs of all ranks, by rank.
        dtype: dtype of activations.
    """

    def __init__(
        self, comm: Comm, specs: Sequence[RankSpec], dtype: torch.dtype, device: torch.device, tell: Tell | None
    ) -> None:
        super().__init__(tell)
        self._comm, self._dtype, self._device = comm, dtype, device
        own = specs[comm.rank]
        part, self._spec = own.part, own
        self.is_first, self.is_last = part.is_first, part.is_last
        self._ranks, self._leads, self._has_sums = part.stage_ranks, part.column == 0, part.has_sums
        of_stage = [specs[rank] for rank in part.stage_ranks]
        hidden = [width(spec.part.hidden) for spec in of_stage]
        self._widths = {
            SplitOutput.ATTENDED: [spec.q_width for spec in of_stage],
            SplitOutput.OUT: hidden,
            SplitOutput.GATED: [spec.intermediate_size for spec in of_stage],
            SplitOutput.DOWN: hidden,
        }
        stages = {spec.part.stage: spec.part.stage_ranks for spec in specs}
        self._before = stages.get(part.stage - 1, (0,))[0]
        self._behind = stages.get(part.stage + 1, ())
        last = [spec.part for spec in specs if spec.part.is_last]
        # Ranks with logits and their numbers of columns, in column order.
        self._heads = [(s.rank, width(s.vocab)) for s in sorted(last, key=lambda s: s.column)]

    def alone(self) -> Exchange:
        found = copy.copy(self)
        found._comm = LoneComm(self._comm.rank, self._device)
        return found

    def arrive(self, num_rows: int) -> Tensor:
        return self._comm.receive((num_rows, self._spec.hidden_size), self._dtype, self._before)

    def whole(self, part: Tensor, place: SplitOutput) -> Tensor:
        if len(self._ranks) == 1:
            return part
        if self._has_sums:
            is_sum = place in (SplitOutput.OUT, SplitOutput.DOWN)
            return self._comm.gather_sum(part, self._ranks) if is_sum else part
        return self._comm.gather_columns(part, self._widths[place], self._ranks)

    def leave(self, x: Tensor) -> None:
        if self._leads:
            for rank in self._behind:
                self._comm.send(x, rank)

    def logits(self, part: Tensor | None, num_rows: int) -> Tensor:
        nothing = empty_logits(self._spec.vocab_size, self._device)
        if not num_rows:
            return nothing
        if self._comm.rank:
            if part is not None:
                self._comm.send(part, 0)
            return nothing
        parts = [
            self._comm.receive((num_rows, columns), torch.float32, rank) if rank else part
            for rank, columns in self._heads
        ]
        return torch.cat([one for one in parts if one is not None], dim=1)


class RowExchange(RankExchange):
    """Compute some of the rows of each step with the whole model, and keep the keys and values of all rows.

    A row does not depend on its neighbours, so its bits are the same as in a single process. Every rank computes all
    rows of small steps, without an exchange.

    Args:
        spec: spec of this rank.
        memory: pool of this rank.
    """

    divided_from = DIVIDED_FROM

    def __init__(self, comm: Comm, spec: RankSpec, memory: DevicePool, ops: Ops, tell: Tell | None) -> None:
        super().__init__(tell)
        self._comm, self._memory, self._ops = comm, memory, ops
        self._ranks, self._q_width = spec.part.row_ranks, spec.q_width
        # The span of each rank in the next pass; empty if all ranks compute all rows.
        self._spans: list[Span] = []
        self._written: AttentionPlan | None = None
        # For each rank, the places of its rows among all rows that need logits.
        self._sampled: list[Rows] = []

    def alone(self) -> Exchange:
        # A rank computes any number of rows, up to those of the largest step.
        return Exchange()

    def divide(self, rows: StepRows) -> StepRows:
        self._spans = spans_of(rows, len(self._ranks)) if len(rows.token_ids) >= DIVIDED_FROM else []
        if not self._spans:
            return rows
        self._written = self._ops.plan_attention(
            rows.page_tables,
            rows.query_lens.tolist(),
            rows.kv_lens.tolist(),
            self._memory.page_size,
            self._memory.num_pages,
            rows.parents,
        )
        places = rows.logit_rows
        self._sampled = [np.flatnonzero((places >= first) & (places < end)) for first, end in self._spans]
        return rows.part(*self._spans[self._comm.rank])

    def all_rows(self, qkv: Tensor, own: AttentionPlan) -> tuple[Tensor, AttentionPlan]:
        if not self._spans:
            return qkv, own
        assert self._written is not None
        counts = [width(span) for span in self._spans]
        rows = qkv.new_zeros((sum(counts), qkv.shape[1]))
        self.own_rows(rows).copy_(qkv)
        if qkv.shape[1] > self._q_width:
            kv = qkv[:, self._q_width :].contiguous()
            rows[:, self._q_width :] = self._comm.gather_rows(kv, counts, self._ranks)
        return rows, self._written

    def own_rows(self, q: Tensor) -> Tensor:
        return q[slice(*self._spans[self._comm.rank])] if self._spans else q

    def has_states(self, num_own: int) -> bool:
        if self._comm.rank:
            return bool(self._spans) and num_own > 0
        return any(map(len, self._sampled)) if self._spans else num_own > 0

    def states(self, own: Tensor) -> Tensor:
        if not self._spans:
            return own
        if self._comm.rank:
            self._comm.send(own, 0)
            return own[:0]
        states = own.new_empty((sum(map(len, self._sampled)), own.shape[1]))
        for rank, places in enumerate(upload(self._sampled, own.device)):
            if len(places):
                part = self._comm.receive((len(places), own.shape[1]), own.dtype, rank) if rank else own
                states.index_copy_(0, places, part)
        return states


def spans_of(rows: StepRows, count: int) -> list[Span]:
    """Return `count` spans of rows of about equal length that split no draft tree; empty if the trees leave a rank
    without rows.
    """
    total, ends = len(rows.token_ids), np.cumsum(rows.query_lens)
    cuts = [total * i // count for i in range(count + 1)]
    for parents, first, end in zip(rows.parents, (ends - rows.query_lens).tolist(), ends.tolist(), strict=False):
        if parents:
            cuts = [first if first < cut < end else cut for cut in cuts]
    spans = list(itertools.pairwise(cuts))
    return spans if all(map(width, spans)) else []


def make_exchange(
    comm: Comm,
    specs: Sequence[RankSpec],
    activation: torch.dtype,
    memory: DevicePool,
    ops: Ops,
    tell: Tell | None = None,
) -> RankExchange:
    """Return the exchange of a rank; see `PartExchange` and `RowExchange`."""
    own = specs[comm.rank]
    if own.part.row_ranks:
        return RowExchange(comm, own, memory, ops, tell)
    return PartExchange(comm, specs, activation, memory.device, tell)
