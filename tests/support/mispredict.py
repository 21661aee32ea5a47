"""A predictor that is always wrong in one way, for tests in which pages run out in spite of admission."""

from lorasrv.scheduler.length_predictor import LengthPredictor


def expect_short_answers(predictor: LengthPredictor) -> None:
    """Predict that every answer ends with its next token, so that admission reserves nothing for growth."""
    predictor.planned_remaining = lambda request: 1  # type: ignore[method-assign]
