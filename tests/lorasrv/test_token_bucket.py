"""A bucket beside the same arithmetic in exact fractions, by a clock that the test holds."""

from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from clock import Clock
from hypothesis import given, settings
from hypothesis import strategies as st

from lorasrv.token_bucket import TokenBucket


@dataclass
class Exact:
    """What a bucket holds, without rounding."""

    rate: Fraction
    capacity: Fraction
    level: Fraction = field(init=False)

    def __post_init__(self) -> None:
        self.level = self.capacity

    def passes(self, seconds: Fraction) -> None:
        self.level = min(self.capacity, self.level + self.rate * seconds)


RATES = st.integers(1, 4000).map(lambda n: n / 16)
STEPS = st.one_of(
    st.tuples(st.just("pass"), st.integers(0, 5000).map(lambda n: n / 64)),
    st.tuples(st.just("take"), st.integers(0, 300).map(float)),
    st.tuples(st.just("give_back"), st.integers(0, 300).map(float)),
    st.tuples(st.just("resize"), RATES),
)


@given(rate=RATES, steps=st.lists(STEPS, max_size=30))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_it_holds_what_it_should_and_says_how_long_the_rest_takes(rate: float, steps: list[tuple[str, float]]) -> None:
    clock = Clock()
    bucket, exact = TokenBucket(rate, 2 * rate, clock), Exact(Fraction(rate), 2 * Fraction(rate))
    for what, amount in steps:
        match what:
            case "pass":
                clock.now += amount
                exact.passes(Fraction(amount))
            case "take":
                bucket.take(amount)
                exact.level -= Fraction(amount)
            case "give_back":
                bucket.give_back(amount)
                exact.level = min(exact.capacity, exact.level + Fraction(amount))
            case "resize":
                bucket.resize(amount, 2 * amount)
                exact.rate, exact.capacity = Fraction(amount), 2 * Fraction(amount)
                exact.level = min(exact.capacity, exact.level)
        assert bucket.level == pytest.approx(float(exact.level), abs=1e-6)
        assert bucket.is_full == (bucket.level == bucket.capacity)
        for wanted in (0.0, 1.0, bucket.capacity):
            missing = float(max(Fraction(0), Fraction(wanted) - exact.level) / exact.rate)
            assert bucket.wait_s(wanted) == pytest.approx(missing, abs=1e-4)


@given(rate=RATES, wanted=st.lists(st.integers(1, 8).map(float), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_what_it_says_to_wait_is_enough_and_not_more(rate: float, wanted: list[float]) -> None:
    """Whoever waits as told, and no longer, gets the rate over any time, and a full bucket beside it."""
    clock, capacity = Clock(), 8.0
    bucket, taken = TokenBucket(rate, capacity, clock), 0.0
    for amount in wanted:
        wait_s = bucket.wait_s(amount)
        if wait_s:
            clock.now += wait_s / 2
            assert bucket.wait_s(amount) > 0
            clock.now += wait_s / 2
        assert bucket.wait_s(amount) == 0
        bucket.take(amount)
        taken += amount
        assert taken <= capacity + rate * (clock.now - 1000.0) + 1e-4


def test_a_debt_is_paid_before_anything_else_may_be_taken() -> None:
    clock = Clock()
    bucket = TokenBucket(2.0, 10.0, clock)
    bucket.take(30.0)
    assert (bucket.level, bucket.wait_s(0.0), bucket.wait_s(1.0)) == (-20.0, 10.0, 10.5)
    clock.now += 10.0
    assert (bucket.level, bucket.wait_s(0.0)) == (0.0, 0.0)


def test_a_clock_that_goes_back_takes_nothing() -> None:
    clock = Clock()
    bucket = TokenBucket(2.0, 10.0, clock)
    clock.now -= 5.0
    assert bucket.is_full


def test_time_before_a_change_counts_at_the_old_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(2.0, 10.0, clock)
    bucket.take(10.0)
    clock.now += 2.0
    bucket.resize(100.0, 1000.0)
    assert bucket.level == 4.0
    bucket.resize(1.0, 3.0)
    assert bucket.level == 3.0, "no more than it now holds"
