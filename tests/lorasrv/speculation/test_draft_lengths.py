"""Draft lengths: the law against all choices there are."""

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lorasrv.speculation.draft_lengths import MARGIN, PlainStep, RowDraft, choose_lengths, min_survival


@st.composite
def rows(draw: st.DrawFn) -> RowDraft:
    chances = draw(st.lists(st.floats(0, 1), max_size=4))
    return RowDraft(tuple(itertools.accumulate(chances, lambda a, b: a * b)), draw(st.floats(1e-4, 1e-2)))


def speed(drafts: list[RowDraft], lengths: Sequence[int], step: PlainStep) -> float:
    tokens = step.num_tokens + sum(sum(row.survival[:n]) for row, n in zip(drafts, lengths, strict=True))
    seconds = step.seconds + sum(row.token_s * n for row, n in zip(drafts, lengths, strict=True))
    return tokens / (seconds + step.first_draft_s * any(lengths))


@given(
    drafts=st.lists(rows(), min_size=1, max_size=4),
    step_s=st.floats(1e-3, 1e-1),
    first_s=st.just(0.0) | st.floats(0, 1e-1),
)
def test_no_other_choice_is_faster(drafts: list[RowDraft], step_s: float, first_s: float) -> None:
    """The margin makes each token dearer, and the first one of a step."""
    step, dear = PlainStep(len(drafts), step_s, first_s), PlainStep(len(drafts), step_s, MARGIN * first_s)
    dearer = [row._replace(token_s=MARGIN * row.token_s) for row in drafts]
    every = itertools.product(*(range(len(row.survival) + 1) for row in drafts))
    best = max(speed(dearer, lengths, dear) for lengths in every)
    chosen = choose_lengths(drafts, step, most=100)
    assert speed(dearer, chosen, dear) >= best * (1 - 1e-9)
    for row, length in zip(drafts, chosen, strict=True):
        assert all(chance > min_survival(step, row.token_s) for chance in row.survival[:length])


@given(drafts=st.lists(rows(), min_size=1, max_size=6), most=st.integers(0, 8))
def test_never_more_than_there_is_room_for(drafts: list[RowDraft], most: int) -> None:
    lengths = choose_lengths(drafts, PlainStep(len(drafts), 1e3), most)
    assert min(most, sum(survival > 0.01 for row in drafts for survival in row.survival)) <= sum(lengths) <= most


def test_a_full_step_takes_only_what_is_nearly_certain() -> None:
    row = RowDraft((0.95, 0.8, 0.4), 1e-3)
    assert choose_lengths([row], PlainStep(1, 10e-3), 16) == [3]
    assert choose_lengths([row] * 16, PlainStep(16, 22e-3), 64) == [1] * 16
    assert choose_lengths([row] * 16, PlainStep(16, 16e-3), 64) == [0] * 16


def test_a_first_draft_that_costs_more_must_bring_more() -> None:
    row = RowDraft((0.5,), 1e-3)
    assert choose_lengths([row], PlainStep(1, 6e-3, 1e-3), 16) == [1]
    assert choose_lengths([row], PlainStep(1, 6e-3, 3e-3), 16) == [0]
