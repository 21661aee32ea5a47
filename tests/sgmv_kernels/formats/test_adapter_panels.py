"""Panels: true ranks, alignment, no overlap, whole inside a run."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims
from sgmv_kernels.formats.kv_format import ALIGNMENT_BYTES

SITES = (SiteDims(48, (48, 16, 16)), SiteDims(48, (48,)), SiteDims(48, (96, 96)), SiteDims(96, (48,)))
RANK = st.integers(0, 40)
LAYER = st.tuples(st.tuples(RANK, RANK, RANK), st.tuples(RANK), st.tuples(RANK, RANK), st.tuples(RANK))
LAYERS = st.lists(LAYER, min_size=1, max_size=4).map(tuple)
LAYOUTS = st.builds(AdapterLayout, st.just(SITES), LAYERS, st.sampled_from([2, 4]))
PAGE = 1024


def _spans(layout: AdapterLayout, offsets, layer: int) -> list[tuple[int, int]]:
    return sorted((int(o), int(o + s)) for o, s in zip(offsets[layer], layout.panel_bytes[layer], strict=True))


@given(LAYOUTS)
def test_panels_hold_true_ranks_and_no_more(layout: AdapterLayout) -> None:
    for layer, sites in enumerate(layout.panels):
        exact = 0
        for dims, panels in zip(SITES, sites, strict=True):
            total = sum(panels.ranks)
            assert sum(n for _, n in panels.a) == total
            assert [sum(n for _, n in s) for s in panels.b] == list(panels.ranks)
            exact += total * dims.in_features * layout.itemsize + 4 * total
            exact += sum(r * o for r, o in zip(panels.ranks, dims.out_features, strict=True)) * layout.itemsize
        held = int(layout.panel_bytes[layer].sum())
        assert exact <= held < exact + ALIGNMENT_BYTES * len(layout.panel_bytes[layer]) + 1


@given(LAYOUTS, st.integers(0, 5))
def test_one_run_places_every_layer_without_overlap(layout: AdapterLayout, first: int) -> None:
    placed = layout.place([(first, layout.num_pages(PAGE))], PAGE)
    assert placed is not None
    for layer in range(layout.num_layers):
        spans = _spans(layout, placed.offsets, layer)
        assert all(start % ALIGNMENT_BYTES == 0 for start, _ in spans)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert not spans or (spans[0][0] >= first * PAGE and spans[-1][1] <= sum(placed.runs[0]) * PAGE)
        assert len(placed.copies(layer)) <= 1


@given(LAYOUTS, st.lists(st.integers(1, 12), min_size=1, max_size=12))
def test_split_panels_stay_whole_inside_a_run(layout: AdapterLayout, lengths: list[int]) -> None:
    runs = [(sum(lengths[:i]) + i, length) for i, length in enumerate(lengths)]
    placed = layout.place(runs, PAGE)
    if placed is None:
        return
    for layer in range(layout.num_layers):
        for start, end in _spans(layout, placed.offsets, layer):
            assert any(f * PAGE <= start and end <= (f + n) * PAGE for f, n in runs)
        moved = sum(size for _, _, size in placed.copies(layer))
        assert moved == int(layout.panel_bytes[layer].sum())
    trimmed = placed.trimmed()
    assert set(trimmed.pages) <= set(placed.pages)
    assert all(int(e) <= max((sum(r) * PAGE for r in trimmed.runs), default=0) for o in placed.offsets for e in o)


def test_does_not_fit() -> None:
    layout = AdapterLayout(SITES, (((16, 16, 16), (16,), (16, 16), (16,)),), 2)
    assert layout.place([(0, layout.num_pages(PAGE) - 1)], PAGE) is None
    assert layout.place([], PAGE) is None


@pytest.mark.parametrize(("rank", "pages"), [(16, 27), (8, 14)])
def test_smollm2_pages_are_those_of_the_arithmetic(rank: int, pages: int) -> None:
    """kernels.md's figure: rank 16 on all seven linears of SmolLM2 takes 26.5 pages of 12 KiB."""
    sites = (SiteDims(576, (576, 192, 192)), SiteDims(576, (576,)), SiteDims(576, (1536, 1536)), SiteDims(1536, (576,)))
    ranks = ((rank,) * 3, (rank,), (rank,) * 2, (rank,))
    assert AdapterLayout(sites, (ranks,) * 30, 2).num_pages(12288) == pages
