"""Whatever a file claims, refusing it costs a bounded number of bytes read and allocated."""

import pytest
from hostile_files import CAP_BYTES, HOSTILE, Hostile, measure


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.what)
def test_refusing_it_is_cheap(case: Hostile) -> None:
    cost = measure(case)
    assert case.code in {problem.code for problem in cost.problems}
    assert cost.read_bytes <= case.read_bytes
    assert cost.peak_bytes <= case.peak_bytes
    for problem in cost.problems:
        assert len(problem.message) < 2000
        assert len(problem.field) < 300
        assert (problem.message + problem.field).isprintable()


def test_the_bounds_are_small_beside_what_is_refused() -> None:
    """Ten MB is what row 3 of the list of faults allows to grow; a header of the cap is four thousand tensors."""
    assert CAP_BYTES == 1 << 20
    assert max(len(case.make()) for case in HOSTILE) > 50e6
