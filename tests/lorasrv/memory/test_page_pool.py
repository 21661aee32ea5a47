"""Pages: taken once, given back once, low end and high end."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lorasrv.memory.page_pool import Fragmentation, PagePool

PAGES = 44


def test_low_end_and_high_end_meet_in_the_middle() -> None:
    pool = PagePool(10)
    assert pool.allocate_singles(3) == [0, 1, 2]
    assert pool.allocate_run(4) == (6, 4)
    assert pool.allocate_run(4) is None
    assert pool.allocate_singles(4) is None
    assert pool.num_free == 3
    pool.release([1])
    assert pool.allocate_singles(2) == [1, 3]


def test_single_pages_fill_partly_used_superblocks_first() -> None:
    pool = PagePool(64)
    pages = pool.allocate_singles(20)
    assert pages == list(range(20))
    pool.release([1, 2, 3, 4, 5, 6, 9, 12])
    assert pool.allocate_singles(3) == [1, 2, 3], "the lowest superblock that is partly used"
    assert pool.allocate_singles(5) == [4, 5, 6, 9, 12]
    assert pool.allocate_singles(1) == [20]
    assert pool.fragmentation.longest_free_run == 43


def test_a_run_comes_from_the_shortest_that_holds_it() -> None:
    pool = PagePool(200)
    pages = pool.allocate_singles(120)
    assert pages is not None
    pool.release(range(10, 19))
    pool.release(range(40, 46))
    assert pool.allocate_run(6) == (40, 6), "exactly fits"
    assert pool.allocate_run(7) == (12, 7), "cut off at the upper end"
    assert pool.allocate_run(70) == (130, 70)
    assert pool.allocate_run(11) is None
    assert pool.fragmentation.free_runs == 2


def test_a_pool_may_begin_anywhere() -> None:
    pool = PagePool(10, first=5)
    assert pool.allocate_singles(10) == list(range(5, 15))
    pool.check_integrity(range(5, 15))
    assert pool.allocate_singles(1) is None
    pool.release(range(5, 15))
    assert pool.allocate_run(10) == (5, 10)


def test_a_shared_page_is_free_when_the_last_holder_lets_go() -> None:
    pool = PagePool(2)
    pages = pool.allocate_singles(1)
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
    pool.allocate_singles(2)
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
        pages = self.pool.allocate_singles(count)
        assert (pages is None) == (count > before)
        if pages is not None:
            assert len(pages) == len(set(pages)) == count
            self.holders.append(pages)

    @rule(count=st.integers(1, 8))
    def run(self, count: int) -> None:
        longest = max((n for _, n in self.pool.free_runs()), default=0)
        run = self.pool.allocate_run(count)
        assert (run is None) == (count > longest)
        if run is not None:
            self.holders.append(list(range(run[0], run[0] + run[1])))

    @rule(data=st.data())
    def take_part_of_a_run(self, data: st.DataObject) -> None:
        runs = self.pool.free_runs()
        if runs:
            first, count = data.draw(st.sampled_from(runs))
            length = data.draw(st.integers(1, count))
            self.pool.take_run((first, length))
            self.holders.append(list(range(first, first + length)))

    @rule(data=st.data())
    def take_a_page(self, data: st.DataObject) -> None:
        free = [page for first, count in self.pool.free_runs() for page in range(first, first + count)]
        if free:
            page = data.draw(st.sampled_from(free))
            self.pool.take_page(page)
            self.holders.append([page])

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        pages = sorted({page for pages in self.holders for page in pages})
        chosen = data.draw(st.lists(st.sampled_from(pages), max_size=4, unique=True)) if pages else []
        new = self.pool.allocate_singles(len(chosen))
        if new is None:
            return
        moves = dict(zip(chosen, new, strict=True))
        self.pool.move(moves)
        self.holders = [[moves.get(page, page) for page in pages] for pages in self.holders]

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
        runs = sorted(self.pool.free_runs())
        assert sum(n for _, n in runs) == self.pool.num_free
        assert all(a[0] + a[1] < b[0] for a, b in itertools.pairwise(runs))
        assert self.pool.fragmentation == Fragmentation(len(runs), max((n for _, n in runs), default=0))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_pool_machine = PoolMachine.TestCase
