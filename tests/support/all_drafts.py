"""Verify every draft, even if it does not save time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from lorasrv.scheduler import step_planner
from lorasrv.speculation import model_drafter
from lorasrv.speculation.draft_lengths import PlainStep, RowDraft
from lorasrv.speculation.drafter import Draft


def scripted(token_ids: Sequence[int]) -> Draft:
    return Draft(tuple(token_ids), ("scripted",) * len(token_ids))


def take_all(rows: Sequence[RowDraft], step: PlainStep, most: int) -> list[int]:
    """Replace `choose_lengths` and accept all drafts, even if they do not save time."""
    lengths = []
    for row in rows:
        lengths.append(min(len(row.survival), most))
        most -= lengths[-1]
    return lengths


@contextmanager
def every_draft() -> Iterator[None]:
    """Verify every draft, and call all drafters in every step, during the `with` block."""
    with (
        patch.object(step_planner, "choose_lengths", take_all),
        patch.object(model_drafter, "choose_lengths", take_all),
        patch.object(step_planner, "min_survival", lambda step, token_s: 0.0),
        patch.object(step_planner, "PROPOSING_SHARE", 1e9),
    ):
        yield
