"""Addresses of pages that a table names, for products over pages and for prefetching other pages meanwhile."""

from typing import Any

from numba import types
from numba.core import cgutils

from sgmv_kernels.cpu_simd.vector_ir import I32, I64, Value, c64

PAGES_AHEAD = types.UniTuple(types.int64, 6)
"""Type of an argument that says what to prefetch: the address of page ids, their number (0 or more), and the address of
page 0; then the same for the pages after them (1 or more)."""


def page_offset(b: Any, ids: Value, at: Value, page_bytes: Value) -> Value:
    """Return the offset of the page at index `at` of a table of int32."""
    place = b.inttoptr(b.add(ids, b.mul(at, c64(4))), I32.as_pointer())
    return b.mul(b.sext(b.load(place, align=4), I64), page_bytes)


def page_ahead(b: Any, pages_ahead: Value, at: Value, page_bytes: Value) -> Value:
    """Return the address of the page to prefetch while page `at` is read; that of the last page if there are fewer."""
    ids, count, base, then_ids, then_count, then_base = cgutils.unpack_tuple(b, pages_ahead)
    is_first = b.icmp_signed("<", at, count)
    place, last = b.sub(at, count), b.sub(then_count, c64(1))
    place = b.select(b.icmp_signed("<", place, last), place, last)
    offset = page_offset(b, b.select(is_first, ids, then_ids), b.select(is_first, at, place), page_bytes)
    return b.add(b.select(is_first, base, then_base), offset)
