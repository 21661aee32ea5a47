"""Scattered pages become a run: whole runs move as wholes, what is being filled stays, books change only on success."""

import random

import pytest

from lorasrv.memory.eviction import compact
from lorasrv.memory.page_pool import PagePool


def _scattered(size: int, free: set[int]) -> PagePool:
    pool = PagePool(size)
    taken = pool.allocate_singles(size)
    assert taken is not None
    pool.release(sorted(free))
    return pool


def test_the_window_with_the_fewest_pages_to_move_is_cleared() -> None:
    pool = _scattered(24, {2, 8, 9, 11, 12, 20})
    moves = compact(pool, 5, {}, {})
    assert moves is not None
    assert set(moves.singles) == {10}
    assert moves.singles[10] in {2, 20}
    assert pool.allocate_run(5) == (8, 5)


def test_a_run_moves_as_a_whole_to_a_run() -> None:
    pool = _scattered(24, {0, 1, 2, 8, 9, 10, 14, 15, 16})
    runs = {(11, 3): "mia"}
    moves = compact(pool, 9, runs, {})
    assert moves is not None
    assert dict(moves.runs) == {(11, 3): (0, 3)}
    assert pool.allocate_run(9) == (8, 9)


def test_what_is_being_filled_stays() -> None:
    pool = _scattered(16, {4, 5, 7, 8, 14, 15})
    assert compact(pool, 6, {}, {(0, 4): "arriving", (6, 1): "arriving", (9, 5): "arriving"}) is None
    pool.check_integrity([p for p in range(16) if p not in {4, 5, 7, 8, 14, 15}])


def test_too_few_pages() -> None:
    assert compact(_scattered(8, {1, 3}), 3, {}, {}) is None


@pytest.mark.parametrize("seed", range(60))
def test_any_pool(seed: int) -> None:
    """Whatever lies where: afterwards there is such a run, or nothing has changed."""
    rng = random.Random(seed)
    size = rng.randint(16, 60)
    pool, movable, fixed, singles = PagePool(size), {}, {}, set()
    for _ in range(40):
        if rng.random() < 0.4 and (run := pool.allocate_run(rng.randint(1, 6))):
            (movable if rng.random() < 0.7 else fixed)[run] = None
        elif page := pool.allocate_singles(1):
            singles.add(page[0])
    for page in [p for p in singles if rng.random() < 0.5]:
        pool.release((page,))
        singles.discard(page)
    for run in [r for r in movable if rng.random() < 0.3]:
        pool.release(range(run[0], sum(run)))
        del movable[run]
    before = pool.num_free
    wanted = rng.randint(1, max(1, pool.num_free))
    moves = compact(pool, wanted, movable, fixed)
    assert pool.num_free == before
    if moves is not None:
        assert pool.fragmentation.longest_free_run >= wanted
        assert not set(moves.runs) & set(fixed)
        movable = {moves.runs.get(run, run): None for run in movable}
        singles = {moves.singles.get(page, page) for page in singles}
    in_runs = [page for first, count in (*movable, *fixed) for page in range(first, first + count)]
    pool.check_integrity([*singles, *in_runs])
