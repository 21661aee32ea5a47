"""A predictor that is always wrong in one way, for tests of what happens when pages run out all the same."""

from lorasrv.scheduler.length_predictor import LengthPredictor


def expect_short_answers(predictor: LengthPredictor) -> None:
    """Every answer is expected to end with its next token, so that admission never holds back for growth."""
    predictor.planned_remaining = lambda request: 1  # type: ignore[method-assign]
