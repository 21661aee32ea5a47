"""Counts by bounds: sums, quantiles, merging."""

import pytest

from lorasrv.metrics.histogram import SECONDS, Histogram


def test_by_bounds() -> None:
    counted = Histogram()
    for seconds in (0.0, 0.002, 0.0021, 1e9):
        counted.add(seconds)
    rows = counted.cumulative()
    assert rows[:2] == [("0.002", 2), ("0.005", 3)]
    assert rows[-2:] == [("300.0", 3), ("+Inf", 4)]
    assert len(rows) == len(SECONDS) + 1
    assert counted.count == 4


def test_several_at_a_time() -> None:
    counted = Histogram((1.0, 2.0))
    counted.add(1.5, 3)
    assert (counted.counts, counted.sum, counted.mean) == ([0, 3, 0], 4.5, 1.5)


def test_quantiles_are_spread_evenly_between_bounds() -> None:
    counted = Histogram((1.0, 2.0, 4.0))
    assert counted.quantile(0.5) is None
    assert counted.mean is None
    for value in (1.5, 1.5, 3.0, 3.0):
        counted.add(value)
    assert counted.quantile(0.25) == 1.5
    assert counted.quantile(0.5) == 2.0
    assert counted.quantile(0.75) == 3.0
    counted.add(100.0)
    assert counted.quantile(0.99) == 4.0, "nobody knows how much more it was"


def test_merged_is_as_if_counted_together() -> None:
    first, second, both = Histogram((1.0,)), Histogram((1.0,)), Histogram((1.0,))
    for value, into in ((0.5, first), (2.0, second), (0.25, second)):
        into.add(value)
        both.add(value)
    first.merge(second)
    assert (first.counts, first.sum) == (both.counts, pytest.approx(both.sum))
