"""Forward batch: the tensors of one forward pass, built from a scheduled step. Built anew for every step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lorasrv.kv_policy import HOLE
from lorasrv.models.lora_sites import EMBEDDING_A, HEAD_A
from lorasrv.outputs import RequestId
from lorasrv.scheduler_output import PENDING, ScheduledRequest, SchedulerOutput
from lorasrv.worker.device_pool import DevicePool
from lorasrv.worker.launched_step import LaunchedStep
from sgmv_kernels.backend import PageMasses, SgmvPlan
from sgmv_kernels.formats.adapter_panels import PlacedAdapter
from sgmv_kernels.metadata.draft_trees import MAX_SLOTS, ROOT, Parents, depths_of
from sgmv_kernels.metadata.h2d import upload
from sgmv_kernels.metadata.segments import BASE, Int32, build_segments
from sgmv_kernels.ops import Ops, StepTables


@dataclass(frozen=True)
class ForwardBatch:
    """Hold T rows of B sequences, those of one adapter together.

    Logits are computed for the last `num_logit_rows` rows of each of `sampled`, then for the `prompt_rows` of `asked`.
    """

    # int64 [T].
    token_ids: Tensor
    # int64 [T].
    positions: Tensor
    tables: StepTables
    sampled: tuple[ScheduledRequest, ...]
    asked: tuple[ScheduledRequest, ...] = ()
    # Those whose last tokens are observed, one after another in the rows of `tables.masses`.
    observed: tuple[ScheduledRequest, ...] = ()
    # Rows of `tables.sample_rows` whose adapters change the head, and rows whose adapters change the embedding; None if
    # none does.
    head: SgmvPlan | None = None
    embedding: SgmvPlan | None = None

    def masses(self) -> Mapping[RequestId, Sequence[Sequence[float]]]:
        """Return the attention that each page gets of the observed tokens of each request."""
        if self.tables.masses is None:
            return {}
        rows, found, first = self.tables.masses.of_rows().tolist(), {}, 0
        for share in self.observed:
            found[share.request_id] = rows[first : first + share.num_observed]
            first += share.num_observed
        return found


@dataclass(frozen=True, slots=True)
class StepRows:
    """Hold the T rows of a step's B sequences on the host, those of one adapter together.

    A request's rows are one sequence, under a policy several: each of its sequences consists of the rows that see the
    same pages, and of these pages only.
    """

    scheduled: list[ScheduledRequest]
    # In the order of their segments.
    adapters: list[PlacedAdapter]
    # [T].
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    # [T], index into `adapters`, or `BASE`.
    row_adapters: Int32
    # [B].
    query_lens: npt.NDArray[np.int64]
    kv_lens: npt.NDArray[np.int64]
    # [B, most pages].
    page_tables: Int32
    # [S], see `ForwardBatch`.
    logit_rows: npt.NDArray[np.int64]
    # The draft tree of each sequence; nothing if there are only chains.
    parents: list[Parents]
    # [B], last rows of each sequence that are observed.
    num_observed: Int32

    @property
    def pending(self) -> list[tuple[int, RequestId]]:
        """Return the rows whose token is pending, and their requests."""
        owners = [share.request_id for share in self.scheduled if share.is_pending]
        return list(zip(np.flatnonzero(self.token_ids == PENDING).tolist(), owners, strict=True))

    @classmethod
    def of(cls, step: SchedulerOutput) -> "StepRows":
        """Order the sequences by adapter, so that a segment is a range of rows, and lay out their tokens."""
        scheduled = sorted(step.scheduled, key=lambda s: s.adapter_key or "")
        keys = sorted({s.adapter_key for s in scheduled if s.adapter_key is not None})
        index = {key: i for i, key in enumerate(keys)}
        lens = np.array([len(s.token_ids) for s in scheduled])
        starts = np.array([s.start for s in scheduled])
        firsts = np.cumsum(lens) - lens
        samples = np.array([s.samples for s in scheduled])
        asked = [firsts[i] + np.array(s.prompt_rows) for i, s in enumerate(scheduled) if s.prompt_rows]
        positions = np.arange(lens.sum()) - np.repeat(firsts, lens) + np.repeat(starts, lens)
        for share, end in zip(scheduled, (firsts + lens).tolist(), strict=True):
            if parents := share.slot_parents:
                positions[end - len(parents) : end] = _tree_positions(share)
        owners = [BASE if s.adapter_key is None else index[s.adapter_key] for s in scheduled]
        seen = [sequence for share in scheduled for sequence in _sequences(share)]
        trees = [sequence.parents for sequence in seen]
        return cls(
            scheduled=scheduled,
            adapters=[step.placements[key] for key in keys],
            token_ids=np.array([t for s in scheduled for t in s.token_ids]),
            positions=positions,
            row_adapters=np.repeat(np.array(owners, dtype=np.int32), lens),
            query_lens=np.array([sequence.num_rows for sequence in seen]),
            kv_lens=np.array([sequence.num_keys for sequence in seen]),
            page_tables=_page_tables([sequence.pages for sequence in seen]),
            logit_rows=np.concatenate([_logit_rows(scheduled, firsts + lens, samples), *asked]),
            parents=trees if any(trees) else [],
            num_observed=np.array([sequence.num_observed for sequence in seen], dtype=np.int32),
        )


def build_batch(
    step: SchedulerOutput,
    memory: DevicePool,
    adapter_dtype: torch.dtype,
    ops: Ops,
    last: LaunchedStep | None = None,
) -> ForwardBatch:
    """Lay out a step's rows on the device; pending tokens are those of the step `last`."""
    rows = StepRows.of(step)
    ids, places, logit_rows = upload([rows.token_ids, rows.positions, rows.logit_rows], memory.device)
    if last is not None:
        last.fill(ids, rows.pending)
    query_lens, kv_lens = rows.query_lens.tolist(), rows.kv_lens.tolist()
    attention = ops.plan_attention(
        rows.page_tables, query_lens, kv_lens, memory.page_size, memory.num_pages, rows.parents
    )
    lora = ops.plan_sgmv(build_segments(rows.row_adapters), rows.adapters, adapter_dtype)
    return ForwardBatch(
        token_ids=ids,
        positions=places,
        tables=StepTables(attention, lora, logit_rows, _masses(rows, memory)),
        sampled=tuple(s for s in rows.scheduled if s.samples),
        asked=tuple(s for s in rows.scheduled if s.prompt_rows),
        observed=tuple(s for s in rows.scheduled if s.num_observed),
        head=_plan_of(HEAD_A, rows, rows.row_adapters[rows.logit_rows], adapter_dtype, ops),
        embedding=_plan_of(EMBEDDING_A, rows, rows.row_adapters, adapter_dtype, ops),
    )


def _plan_of(site: int, rows: StepRows, row_adapters: Int32, adapter_dtype: torch.dtype, ops: Ops) -> SgmvPlan | None:
    """Return the rows whose adapters have this site of the ends; None if none has."""
    ends = ((i, adapter.ends) for i, adapter in enumerate(rows.adapters) if adapter.ends is not None)
    found = {i: own for i, own in ends if own.layout.panels[0][site].total_rank}
    if not found:
        return None
    # The last place is that of `BASE`, too.
    index = np.full(len(rows.adapters) + 1, BASE, dtype=np.int32)
    index[list(found)] = np.arange(len(found))
    segments = build_segments(index[row_adapters])
    return ops.plan_sgmv(segments, list(found.values()), adapter_dtype) if (segments.adapters != BASE).any() else None


def _masses(rows: StepRows, memory: DevicePool) -> PageMasses | None:
    counts = rows.num_observed
    if not counts.any():
        return None
    size = memory.kv_pages(0).num_heads, int(counts.sum()), rows.page_tables.shape[1]
    return PageMasses(counts, torch.zeros(size, dtype=torch.float32, device=memory.device))


def _tree_positions(share: ScheduledRequest) -> list[int]:
    """Return the position of each guessed token of a tree."""
    parents = share.slot_parents
    assert len(parents) == share.num_guessed_tokens <= MAX_SLOTS, f"{len(parents)} parents of {share.request_id}"
    assert all(ROOT <= parent < slot for slot, parent in enumerate(parents)), f"a parent is behind its child: {parents}"
    last = share.start + share.num_known_tokens - 1
    return [last + depth for depth in depths_of(parents)]


def _logit_rows(
    scheduled: list[ScheduledRequest], ends: npt.NDArray[np.int64], samples: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Return the rows [S] whose logits predict next tokens, those of a sequence together; `ends` is the row behind
    each sequence."""
    if not any(s.num_guessed_tokens for s in scheduled):
        return (ends - 1)[samples]
    rows = [np.arange(end - s.num_logit_rows, end) for s, end in zip(scheduled, ends.tolist(), strict=True)]
    return np.concatenate(rows)


class _Sequence(NamedTuple):
    """Rows that see the same pages: the last `num_rows` of the `num_keys` tokens in `pages`."""

    num_rows: int
    num_keys: int
    pages: Sequence[int]
    parents: Parents = ()
    num_observed: int = 0


def _sequences(share: ScheduledRequest) -> list[_Sequence]:
    """Return a share's rows as sequences."""
    end, policy = share.start + len(share.token_ids), share.kv_policy
    if policy is None:
        return [_Sequence(len(share.token_ids), end, share.page_table, share.slot_parents)]
    assert not share.slot_parents, f"rows of {share.request_id} may see different pages, but are a tree"
    sequences = []
    for first, last in policy.pieces(share.start, end):
        hole, table = policy.hole(first), share.page_table[: -(-last // policy.page_size)]
        pages = [page for place, page in enumerate(table) if page != HOLE and place not in hole]
        sequences.append(
            _Sequence(last - first, last - (len(table) - len(pages)) * policy.page_size, pages, (), share.num_observed)
        )
    return sequences


def _page_tables(pages: Sequence[Sequence[int]]) -> Int32:
    tables = np.zeros((len(pages), max(map(len, pages))), dtype=np.int32)
    for row, of_sequence in zip(tables, pages, strict=True):
        row[: len(of_sequence)] = of_sequence
    return tables
