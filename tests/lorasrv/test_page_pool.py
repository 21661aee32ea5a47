"""Pages: taken once, given back once, low end and high end."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lorasrv.page_pool import PagePool

PAGES = 24


def test_low_end_and_high_end_meet_in_the_middle() -> None:
    pool = PagePool(10)
    assert pool.allocate_low(3) == [0, 1, 2]
    assert pool.allocate_run(4) == (6, 4)
    assert pool.allocate_run(4) is None
    assert pool.allocate_low(4) is None
    assert pool.num_free == 3
    pool.release([1])
    assert pool.allocate_low(2) == [1, 3]


def test_a_shared_page_is_free_when_the_last_holder_lets_go() -> None:
    pool = PagePool(2)
    pages = pool.allocate_low(1)
    assert pages == [0]
    pool.share(pages)
    pool.release(pages)
    pool.check_integrity([0])
    pool.release(pages)
    pool.check_integrity([])
    with pytest.raises(AssertionError, match="free already"):
        pool.release(pages)


def test_integrity_check_bites() -> None:
    pool = PagePool(4)
    pool.allocate_low(2)
    with pytest.raises(AssertionError, match="wrong reference count"):
        pool.check_integrity([0])
    with pytest.raises(AssertionError, match="wrong reference count"):
        pool.check_integrity([0, 1, 1])


class PoolMachine(RuleBasedStateMachine):
    """The pool against a list of holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, 8))
    def low(self, count: int) -> None:
        before = self.pool.num_free
        pages = self.pool.allocate_low(count)
        assert (pages is None) == (count > before)
        if pages is not None:
            assert pages == sorted(set(pages))
            self.holders.append(pages)

    @rule(count=st.integers(1, 8))
    def run(self, count: int) -> None:
        longest = max((n for _, n in self.pool.free_runs_from_top()), default=0)
        run = self.pool.allocate_run(count)
        assert (run is None) == (count > longest)
        if run is not None:
            self.holders.append(list(range(run[0], run[0] + run[1])))

    @rule(data=st.data())
    def take_part_of_a_run(self, data: st.DataObject) -> None:
        runs = self.pool.free_runs_from_top()
        if runs:
            first, count = data.draw(st.sampled_from(runs))
            length = data.draw(st.integers(1, count))
            self.pool.take_run((first, length))
            self.holders.append(list(range(first, first + length)))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.holders:
            pages = data.draw(st.sampled_from(self.holders))
            self.pool.share(pages)
            self.holders.append(list(pages))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.holders:
            self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @invariant()
    def adds_up(self) -> None:
        self.pool.check_integrity([page for pages in self.holders for page in pages])
        runs = self.pool.free_runs_from_top()
        assert sum(n for _, n in runs) == self.pool.num_free
        assert all(a[0] > b[0] + b[1] for a, b in itertools.pairwise(runs))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_pool_machine = PoolMachine.TestCase
