"""Slow replicas weigh less, at worst half; small differences change nothing."""

from lorasrv.placement.speed import speed_weights
from lorasrv.placement.work import WorkRates


def _weights(*answer_token_s: float) -> list[float]:
    rates = {str(number): WorkRates(1e-3, seconds) for number, seconds in enumerate(answer_token_s)}
    return list(speed_weights(rates).values())


def test_weights() -> None:
    assert _weights() == []
    assert _weights(5.0) == [1.0]
    assert _weights(1.0, 1.1, 1.0, 0.2) == [1.0, 1.0, 1.0, 1.0]
    assert _weights(1.0, 1.0, 1.0, 1.0, 1.4, 2.0, 100.0) == [1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.5]
    assert _weights(0.0, 0.0) == [1.0, 1.0]
