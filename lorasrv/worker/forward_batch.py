"""Forward batch: the tensors of one forward pass, built from a scheduled step for every step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lorasrv.models.lora_sites import EMBEDDING_A, EMBEDDING_ROWS, HEAD_A, HEAD_ROWS
from lorasrv.outputs import RequestId
from lorasrv.scheduler_output import ScheduledRequest, SchedulerOutput
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.exchange import Exchange
from lorasrv.worker.launched_step import LaunchedStep
from lorasrv.worker.step_rows import StepRows
from sgmv_kernels.formats.adapter_panels import PlacedAdapter, RowTokens
from sgmv_kernels.forward_pass import StepTables
from sgmv_kernels.metadata.h2d import upload
from sgmv_kernels.metadata.plans import PageMasses, SgmvPlan
from sgmv_kernels.metadata.segments import BASE, Int32, Segments, build_segments
from sgmv_kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """Hold the rows of a step whose adapters have own rows of the vocabulary."""

    plan: SgmvPlan
    # For each segment of the plan.
    tokens: tuple[RowTokens, ...]
    # One above the highest token.
    vocab_size: int


@dataclass(frozen=True)
class ForwardBatch:
    """Hold T rows of B sequences, grouped by adapter.

    Logits are computed for the last `num_logit_rows` rows of each of `sampled`, then for the `prompt_rows` of `asked`.
    If several processes compute rows of one step, `token_ids`, `tables` and the fields of the embedding cover the rows
    of this process; all other fields cover all rows.
    """

    # int64 [T].
    token_ids: Tensor
    # int64 [T].
    positions: Tensor
    tables: StepTables
    sampled: tuple[ScheduledRequest, ...]
    asked: tuple[ScheduledRequest, ...] = ()
    # Requests whose last tokens are observed, in the order of the rows of `tables.masses`.
    observed: tuple[ScheduledRequest, ...] = ()
    # Rows of `tables.sample_rows` whose adapters change the head, and rows whose adapters change the embedding; None if
    # none does.
    head: SgmvPlan | None = None
    embedding: SgmvPlan | None = None
    # The same for adapters that have their own rows there.
    head_rows: RowsPlan | None = None
    embedding_rows: RowsPlan | None = None
    # Rows whose token is pending, with the request of each.
    pending: Sequence[tuple[int, RequestId]] = ()

    @property
    def changes_embedding(self) -> bool:
        """Return whether any row's adapter changes the embedding."""
        return self.embedding is not None or self.embedding_rows is not None

    @property
    def changes_head(self) -> bool:
        """Return whether any row's adapter changes the head."""
        return self.head is not None or self.head_rows is not None

    def fill(self, tokens: Mapping[RequestId, int]) -> None:
        """Write tokens in place of pending ones, on a CPU; any token for requests without one: they have finished."""
        ids = self.token_ids.numpy()  # takes a tenth of torch's time
        for row, request in self.pending:
            ids[row] = tokens.get(request, 0)

    def masses(self) -> Mapping[RequestId, Sequence[Sequence[float]]]:
        """Return the attention that the observed tokens of each request pay to each page."""
        if self.tables.masses is None:
            return {}
        rows, found, first = self.tables.masses.of_rows().tolist(), {}, 0
        for scheduled in self.observed:
            found[scheduled.request_id] = rows[first : first + scheduled.num_observed]
            first += scheduled.num_observed
        return found


def build_batch(
    step: SchedulerOutput,
    memory: DevicePool,
    adapter_dtype: torch.dtype,
    ops: Ops,
    last: LaunchedStep | None = None,
    exchange: Exchange | None = None,
) -> ForwardBatch:
    """Lay out a step's rows on the device.

    Args:
        last: the step that samples the pending tokens.
        exchange: determines which of the rows are computed here; None: all.
    """
    whole = StepRows.of(step)
    rows = whole if exchange is None else exchange.divide(whole)
    ids, places, logit_rows = upload([rows.token_ids, whole.positions, rows.logit_rows], memory.device)
    pending = rows.pending
    if last is not None:
        last.fill(ids, pending)
    query_lens, kv_lens = rows.query_lens.tolist(), rows.kv_lens.tolist()
    attention = ops.plan_attention(
        rows.page_tables, query_lens, kv_lens, memory.page_size, memory.num_pages, rows.parents
    )
    first, *more = map(build_segments, rows.row_terms)
    lora = ops.plan_sgmv(first, rows.adapters, adapter_dtype, rows.weights, more)
    sampled_terms = whole.row_terms[:, whole.logit_rows]
    return ForwardBatch(
        token_ids=ids,
        positions=places,
        tables=StepTables(attention, lora, logit_rows, _masses(rows, memory)),
        sampled=tuple(s for s in rows.requests if s.samples),
        asked=tuple(s for s in rows.requests if s.prompt_rows),
        observed=tuple(s for s in rows.requests if s.num_observed),
        head=_ends_plan(HEAD_A, rows, sampled_terms, adapter_dtype, ops),
        embedding=_ends_plan(EMBEDDING_A, rows, rows.row_terms, adapter_dtype, ops),
        head_rows=_rows_plan(HEAD_ROWS, rows, sampled_terms[0], adapter_dtype, ops),
        embedding_rows=_rows_plan(EMBEDDING_ROWS, rows, rows.row_adapters, adapter_dtype, ops),
        pending=pending,
    )


def _ends_plan(site: int, rows: StepRows, row_terms: Int32, adapter_dtype: torch.dtype, ops: Ops) -> SgmvPlan | None:
    """Return the rows whose adapters have this site of the ends; None if none do."""
    ends = ((i, adapter.ends) for i, adapter in enumerate(rows.adapters) if adapter.ends is not None)
    having = {i: own for i, own in ends if own.layout.panels[0][site].total_rank}
    passes = [own for turn in row_terms if (own := _segments_of(having, rows, turn)) is not None]
    if not passes:
        return None
    weights = [rows.weights[i] for i in having]
    return ops.plan_sgmv(passes[0], list(having.values()), adapter_dtype, weights, passes[1:])


def _rows_plan(site: int, rows: StepRows, row_adapters: Int32, adapter_dtype: torch.dtype, ops: Ops) -> RowsPlan | None:
    """Return the rows whose adapters have their own rows of the vocabulary at a site; None if none do. Sums have no own
    rows."""
    placed = ((i, adapter.rows) for i, adapter in enumerate(rows.adapters) if adapter.rows is not None)
    having = {i: own for i, own in placed if own.layout.row_tokens and len(own.layout.row_tokens.tokens[site])}
    segments = _segments_of(having, rows, row_adapters)
    if segments is None:
        return None
    found = list(having.values())
    tokens = (found[i].layout.row_tokens for i in segments.adapters.tolist() if i != BASE)
    own = tuple(own for own in tokens if own is not None)
    highest = max(int(each.tokens[site][-1]) for each in own)
    return RowsPlan(ops.plan_sgmv(segments, found, adapter_dtype), own, highest + 1)


def _segments_of(having: Mapping[int, PlacedAdapter], rows: StepRows, row_adapters: Int32) -> Segments | None:
    """Return the segments of the given adapters of a step, by their index; None if no row has one of them."""
    if not having:
        return None
    # The last place also serves as that of `BASE`.
    index = np.full(len(rows.adapters) + 1, BASE, dtype=np.int32)
    index[list(having)] = np.arange(len(having))
    segments = build_segments(index[row_adapters])
    return segments if (segments.adapters != BASE).any() else None


def _masses(rows: StepRows, memory: DevicePool) -> PageMasses | None:
    counts = rows.num_observed
    if not counts.any():
        return None
    size = memory.kv_pages(0).num_heads, int(counts.sum()), rows.page_tables.shape[1]
    return PageMasses(counts, torch.zeros(size, dtype=torch.float32, device=memory.device))
