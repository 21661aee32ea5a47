"""Step rows: which rows a step has, on the host, before they become tensors."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adapter_store.spec import AdapterKey
from lorasrv.kv_policy import HOLE
from lorasrv.outputs import RequestId, record
from lorasrv.scheduler_output import PENDING, ScheduledRequest, SchedulerOutput
from sgmv_kernels.formats.adapter_panels import PlacedAdapter
from sgmv_kernels.metadata.draft_trees import MAX_SLOTS, ROOT, Parents, depths_of
from sgmv_kernels.metadata.segments import BASE, Int32


@record
class StepRows:
    """Hold the T rows of a step's B sequences on the host, grouped by adapter.

    A request's rows are one sequence, or several under a policy: each sequence then consists of the rows that see the
    same pages, and has only these pages.
    """

    requests: list[ScheduledRequest]
    # One entry for each distinct (content, weight) that acts on any row; `weights` has the weights.
    adapters: list[PlacedAdapter]
    weights: list[float]
    # [T].
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    # [most terms, T], indices into `adapters`: a row's first term, its second and so on; `BASE` after its last.
    row_terms: Int32
    # [B].
    query_lens: npt.NDArray[np.int64]
    kv_lens: npt.NDArray[np.int64]
    # [B, most pages].
    page_tables: Int32
    # [S], see `ForwardBatch`.
    logit_rows: npt.NDArray[np.int64]
    # The draft tree of each sequence; empty if there are only chains.
    parents: list[Parents]
    # [B], number of last rows of each sequence that are observed.
    num_observed: Int32

    @property
    def row_adapters(self) -> Int32:
        """Return [T], the first term of each row."""
        first: Int32 = self.row_terms[0]
        return first

    @property
    def pending(self) -> list[tuple[int, RequestId]]:
        """Return the rows whose token is pending, and their requests."""
        owners = [s.request_id for s in self.requests if s.is_pending]
        if not owners:
            return []
        return list(zip(np.flatnonzero(self.token_ids == PENDING).tolist(), owners, strict=True))

    @classmethod
    def of(cls, step: SchedulerOutput) -> "StepRows":
        """Build the rows of a step. Sequences are ordered by adapter, so that a segment is a range of rows."""
        requests = sorted(step.requests, key=lambda s: s.adapter_key or "")
        terms = [() if s.active_from and s.num_plain_rows == len(s.token_ids) else s.terms for s in requests]
        entries = sorted({term for own in terms for term in own})
        lens = np.array([len(s.token_ids) for s in requests])
        starts = np.array([s.start for s in requests])
        firsts = lens.cumsum() - lens
        samples = np.array([s.samples for s in requests])
        asked = [firsts[i] + np.array(s.prompt_rows) for i, s in enumerate(requests) if s.prompt_rows]
        positions = np.arange(lens.sum()) + (starts - firsts).repeat(lens)
        trees: list[Parents] = []
        if any(s.num_guessed_tokens for s in requests):
            trees = [s.slot_parents for s in requests]
        for i in range(len(trees)):
            if trees[i]:
                end = firsts[i] + lens[i]
                positions[end - len(trees[i]) : end] = _tree_positions(requests[i])
        query_lens, kv_lens = lens, starts + lens
        pages = [s.page_table for s in requests]
        observed: Sequence[int] = [0] * len(requests)
        if any(s.kv_policy is not None for s in requests):
            seen = [sequence for s in requests for sequence in _sequences(s)]
            query_lens = np.array([sequence.num_rows for sequence in seen])
            kv_lens = np.array([sequence.num_keys for sequence in seen])
            pages, trees = [sequence.pages for sequence in seen], [sequence.parents for sequence in seen]
            observed = [sequence.num_observed for sequence in seen]
        own = _logit_rows(requests, firsts + lens, samples)
        return cls(
            requests=requests,
            adapters=[step.placements[key] for key, _ in entries],
            weights=[weight for _, weight in entries],
            token_ids=np.array([t for s in requests for t in s.token_ids]),
            positions=positions,
            row_terms=_row_terms(requests, terms, entries, firsts, lens),
            query_lens=query_lens,
            kv_lens=kv_lens,
            page_tables=_page_tables(pages),
            logit_rows=np.concatenate([own, *asked]) if asked else own,
            parents=trees if any(trees) else [],
            num_observed=np.array(observed, dtype=np.int32),
        )

    def part(self, first: int, end: int) -> "StepRows":
        """Return a non-empty range of the rows, with all of `scheduled` and `adapters`. There must be no KV policies.

        A sequence that is split continues in another part, as if it were computed in chunks.
        """
        ends = np.cumsum(self.query_lens)
        starts = ends - self.query_lens
        those = np.flatnonzero((starts < end) & (ends > first))
        cut = np.maximum(ends[those] - end, 0)
        kept = self.logit_rows[(self.logit_rows >= first) & (self.logit_rows < end)]
        return replace(
            self,
            token_ids=self.token_ids[first:end],
            positions=self.positions[first:end],
            row_terms=self.row_terms[:, first:end],
            query_lens=np.minimum(ends[those], end) - np.maximum(starts[those], first),
            kv_lens=self.kv_lens[those] - cut,
            page_tables=self.page_tables[those],
            logit_rows=kept - first,
            parents=[self.parents[i] for i in those] if self.parents else [],
            num_observed=self.num_observed[those],
        )


def _row_terms(
    requests: Sequence[ScheduledRequest],
    terms: Sequence[Sequence[tuple[AdapterKey, float]]],
    entries: Sequence[tuple[AdapterKey, float]],
    firsts: npt.NDArray[np.int64],
    lens: npt.NDArray[np.int64],
) -> Int32:
    """Return `row_terms`; `terms`, `firsts` and `lens` have the entries, the first row and the number of rows of each
    request."""
    index = {entry: i for i, entry in enumerate(entries)}
    owners = np.full((max(map(len, terms), default=0) or 1, len(terms)), BASE, dtype=np.int32)
    for request, own in enumerate(terms):
        for turn, term in enumerate(own):
            owners[turn, request] = index[term]
    of_rows: Int32 = owners.repeat(lens, axis=1)
    for scheduled, first in zip(requests, firsts.tolist(), strict=True):
        if scheduled.active_from:
            of_rows[:, first : first + scheduled.num_plain_rows] = BASE
    return of_rows


def _tree_positions(scheduled: ScheduledRequest) -> list[int]:
    """Return the position of each guessed token of a tree."""
    parents = scheduled.slot_parents
    assert len(parents) == scheduled.num_guessed_tokens <= MAX_SLOTS, (
        f"{len(parents)} parents of {scheduled.request_id}"
    )
    assert all(ROOT <= parent < slot for slot, parent in enumerate(parents)), f"a parent is behind its child: {parents}"
    last = scheduled.start + scheduled.num_known_tokens - 1
    return [last + depth for depth in depths_of(parents)]


def _logit_rows(
    requests: list[ScheduledRequest], ends: npt.NDArray[np.int64], samples: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Return the rows [S] whose logits predict next tokens, grouped by sequence; `ends` has the end (exclusive) of each
    sequence."""
    if not any(s.num_guessed_tokens for s in requests):
        return (ends - 1)[samples]
    rows = [np.arange(end - s.num_logit_rows, end) for s, end in zip(requests, ends.tolist(), strict=True)]
    return np.concatenate(rows)


class _Sequence(NamedTuple):
    """Hold rows that see the same pages: the last `num_rows` of the `num_keys` tokens in `pages`."""

    num_rows: int
    num_keys: int
    pages: Sequence[int]
    parents: Parents = ()
    num_observed: int = 0


def _sequences(scheduled: ScheduledRequest) -> list[_Sequence]:
    """Return a request's rows as sequences."""
    end, policy = scheduled.start + len(scheduled.token_ids), scheduled.kv_policy
    if policy is None:
        return [_Sequence(len(scheduled.token_ids), end, scheduled.page_table, scheduled.slot_parents)]
    assert not scheduled.slot_parents, f"rows of {scheduled.request_id} may see different pages, but are a tree"
    sequences = []
    for first, last in policy.pieces(scheduled.start, end):
        hole, table = policy.hole(first), scheduled.page_table[: -(-last // policy.page_size)]
        pages = [page for place, page in enumerate(table) if page != HOLE and place not in hole]
        sequences.append(
            _Sequence(
                last - first, last - (len(table) - len(pages)) * policy.page_size, pages, (), scheduled.num_observed
            )
        )
    return sequences


def _page_tables(pages: Sequence[Sequence[int]]) -> Int32:
    tables = np.zeros((len(pages), max(map(len, pages))), dtype=np.int32)
    for row, of_sequence in zip(tables, pages, strict=True):
        row[: len(of_sequence)] = of_sequence
    return tables
