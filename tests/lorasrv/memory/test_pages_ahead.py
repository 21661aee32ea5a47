"""Pieces that get memory ahead of use: each once, in every slab, near what was used, and never what is used already."""

from hypothesis import given
from hypothesis import strategies as st

from lorasrv.memory.page_pool import PagePool
from lorasrv.memory.pages_ahead import AHEAD_SHARE, PIECE_BYTES, PagePiece, PagesAhead


def _all(ahead: PagesAhead) -> list[PagePiece]:
    return list(iter(ahead.take, None))


@given(
    num_pages=st.integers(1, 3000),
    first=st.sampled_from([0, 7]),
    slabs=st.integers(1, 5),
    pages_a_piece=st.integers(1, 40),
    used=st.lists(st.integers(0, 400), max_size=6),
)
def test_pieces_are_near_and_each_is_returned_once(
    num_pages: int, first: int, slabs: int, pages_a_piece: int, used: list[int]
) -> None:
    pool = PagePool(num_pages, first)
    page_bytes = PIECE_BYTES // pages_a_piece
    ahead = PagesAhead(pool, page_bytes, slabs, page_bytes * slabs)
    seen: set[tuple[int, int]] = set()
    for count in [0, *used]:
        pool.allocate_singles(count)
        reach, end = pool.reach, first + num_pages
        pieces = _all(ahead)
        for piece in pieces:
            pages = {(piece.slab, page) for page in range(piece.first_page, piece.first_page + piece.num_pages)}
            assert not pages & seen
            seen |= pages
            # Of a piece that is used in part the rest still gets memory.
            assert piece.first_page + piece.num_pages > reach
            assert piece.first_page + piece.num_pages <= min(end, reach + num_pages // AHEAD_SHARE)
        # All slabs alike.
        held = [{page for slab, page in seen if slab == own} for own in range(slabs)]
        assert all(pages == held[0] for pages in held)
        # Less than a piece is left of what is near.
        near = min(end, reach + min(num_pages // AHEAD_SHARE, (256 << 20) // (page_bytes * slabs)))
        assert len([page for page in range(reach, near) if page not in held[0]]) < pages_a_piece


def test_what_comes_back_is_not_asked_for_again() -> None:
    pool = PagePool(4000)
    ahead = PagesAhead(pool, PIECE_BYTES // 10, 2, PIECE_BYTES // 5)
    first = _all(ahead)
    assert [piece.slab for piece in first[:2]] == [0, 1]
    taken = pool.allocate_singles(300)
    assert taken is not None
    more = _all(ahead)
    assert more
    assert more[0].first_page == first[-1].first_page + 10
    pool.release(taken)
    pool.allocate_singles(200)
    assert _all(ahead) == []
