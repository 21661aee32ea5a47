"""Grouping rows: a permutation, sorted by adapter, stable."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sgmv_kernels.metadata.segments import BASE, build_segments


@given(st.lists(st.integers(BASE, 5), max_size=40))
def test_every_row_is_in_its_adapters_segment_once(adapters: list[int]) -> None:
    segments = build_segments(adapters)
    assert sorted(segments.permutation.tolist()) == list(range(len(adapters)))
    assert segments.indptr[0] == 0
    assert segments.indptr[-1] == len(adapters)
    assert len(set(segments.adapters.tolist())) == len(segments)
    for s in range(len(segments)):
        rows = segments.rows(s)
        assert len(rows) > 0
        assert np.all(np.diff(rows) > 0)
        assert all(adapters[row] == segments.adapters[s] for row in rows)
