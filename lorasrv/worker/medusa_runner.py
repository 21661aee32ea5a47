"""Medusa runner: heads guess the tokens after the next one, from the hidden state that yields the next one.

All heads of all rows share one pass of the output layer; the base itself is not computed again.

Source: Medusa (Cai et al. 2024, arXiv:2401.10774).
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lorasrv.outputs import RequestId
from lorasrv.sampling.rejection import Probabilities
from lorasrv.sampling.sampler import likeliest_finite
from lorasrv.scheduler_output import DrafterOutput, ModelDraft, ScheduledRequest, SchedulerOutput
from lorasrv.worker.draft_heads import DraftHeads, MedusaHeads
from lorasrv.worker.draft_rows import DraftRow, DrawnTokens, LastStates, confidence_of, draw
from sgmv_kernels.metadata.h2d import take


class MedusaRunner:
    """Draft with heads.

    Args:
        logits: the served model's output layer, states [N, H] -> logits [N, V] fp32.
        max_rows: most rows per pass of the output layer.
    """

    def __init__(self, heads: DraftHeads, logits: Callable[[Tensor], Tensor], max_rows: int) -> None:
        self._heads, self._logits, self._max_rows = heads, logits, max_rows
        self._drawn = DrawnTokens(max_rows)

    def prepare(self, step: SchedulerOutput) -> None:
        """Begin to read the heads of the step's adapters, so that they are loaded when they draft."""
        for scheduled in step.requests:
            if scheduled.has_draft_heads:
                self._find(scheduled)

    @torch.inference_mode()
    def draft(
        self,
        step: SchedulerOutput,
        asking: Sequence[ScheduledRequest],
        said: Mapping[RequestId, Sequence[int]],
        last: LastStates,
    ) -> DrafterOutput:
        """Draft for the requests of a step that ask for it and whose heads are loaded; `said` are the step's tokens."""
        begun = time.perf_counter()
        found = [(s, self._find(s)) for s in asking if s.request_id in said]
        there = [(s, heads) for s, heads in found if heads is not None][: self._max_rows]
        rows, deepest = [DraftRow.of(s, said[s.request_id]) for s, _ in there], 0
        if there:
            states = last.of([s for s, _ in there], said)
            deepest = self._draw(rows, [heads for _, heads in there], states)
            self._drawn.remember(rows)
        nothing = {s.request_id: ModelDraft((), ()) for s, _ in found}
        drafts = nothing | {row.scheduled.request_id: row.draft for row in rows}
        return DrafterOutput(drafts, time.perf_counter() - begun, deepest)

    def drawn_from(self, scheduled: ScheduledRequest, depth: int) -> Probabilities | None:
        """Return the distribution that a draft token was drawn from, as `DrawnTokens.find` does."""
        return self._drawn.find(scheduled, depth)

    def close(self) -> None:
        """Read no more heads."""
        self._heads.close()

    def _find(self, scheduled: ScheduledRequest) -> MedusaHeads | None:
        return self._heads.find(scheduled.adapter_key, has_own=scheduled.has_draft_heads)

    def _draw(self, rows: Sequence[DraftRow], heads: Sequence[MedusaHeads], states: Tensor) -> int:
        """Draw the tokens of all rows from logits that are computed together; return the most heads of a row."""
        counts, left = list[int](), self._max_rows
        for row, own in zip(rows, heads, strict=True):
            counts.append(min(row.scheduled.drafts.num_asked, len(own.heads), left))
            left -= counts[-1]
        guessed = [
            own.guess(states[at : at + 1], depth)
            for at, (own, count) in enumerate(zip(heads, counts, strict=True))
            for depth in range(count)
        ]
        logits = self._logits(torch.cat(guessed))
        likeliest = likeliest_finite(logits)
        confidence = confidence_of(logits, range(len(logits)), [token or 0 for token in likeliest])
        takes_likeliest = [row.takes_likeliest for row in rows]
        # For each answer whose draft continues, the row of its next logits.
        going = {at: sum(counts[:at]) for at in range(len(rows))}
        for depth in range(max(counts)):
            going = {
                at: number
                for at, number in going.items()
                if depth < counts[at] and rows[at].has_next and likeliest[number] is not None
            }
            for at, number in going.items():
                if takes_likeliest[at]:
                    rows[at].take(likeliest[number] or 0, confidence[number])
            if drawing := [at for at in going if not takes_likeliest[at]]:
                draw([rows[at] for at in drawing], take(logits, [going[at] for at in drawing]))
            going = {at: number + 1 for at, number in going.items()}
        return max(counts)
