"""Paged attention on the CPU over pages of codes.

Queries are rotated like the keys, and rounded. The weights of a block are multiplied by the scales of their values, and
rounded, too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sgmv_kernels.cpu_arguments.attention import (
    BLOCK,
    DIM,
    HEADS,
    KEY_SCALES,
    KEYS,
    OUT,
    PAGE,
    PAGE_BYTES,
    VALUE_MINIMA,
    VALUE_SCALES,
    VALUES,
)
from sgmv_kernels.cpu_kernels.attention_loop import Steps, address_ahead, ahead_of, pages_from
from sgmv_kernels.cpu_kernels.rotation import code_dim, pair_dim, rotate
from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.elementwise import scaled
from sgmv_kernels.cpu_simd.kv_codes import (
    QUERY_LEVELS,
    WEIGHT_LEVELS,
    largest,
    make_rounding,
    make_scores,
    make_sums,
    weigh,
    weigh_ranges,
)
from sgmv_kernels.cpu_simd.memory_access import fetch, i32, put_f32, put_i32
from sgmv_kernels.formats.kv_format import LEAST

_round_query, _round_weights = make_rounding(True), make_rounding(False)


class Values(NamedTuple):
    """Hold the functions of attention that depend on the kind of values; each is a part of a kernel.

    `in_a_byte` codes share a byte. `width(dim)` returns the number of fp32 sums of a row. `fetch_scales(args,
    following, at)` prefetches the scales of values that are read one block after page `at` of this block. `weigh(args,
    weights, head, page)` multiplies the weights of the page at an offset by the scales of its values, and returns the
    number that they add to every sum. `finish(args, sums, factor, row, head)` writes a head of the result.
    """

    in_a_byte: int
    width: Any
    fetch_scales: Any
    weigh: Any
    finish: Any


@kernel_part
def _unit(size, levels):  # type: ignore[no-untyped-def]
    """Return (factor that maps numbers up to `size` to integers up to `levels`, its inverse, which is NaN for NaN)."""
    if size <= np.float32(LEAST):
        return np.float32(0), np.float32(0)
    if size != size:
        return np.float32(0), size
    return np.float32(levels) / size, size * np.float32(1 / levels)


def _make_by_rows(product_of: Callable[[int], Any]) -> Any:
    """Return by_rows(rows, a, as_, units, matrix, ahead, again, c, cs), which multiplies `rows` rows of a, as many at a
    time as a product takes: product_of(n)(a, as_, units, *matrix, ahead, c, cs).

    The first product prefetches `ahead`; the others prefetch `again`, which is probably in the cache already.
    """
    product_6, product_3, product_2, product_1 = (product_of(n) for n in (6, 3, 2, 1))

    @kernel_part
    def by_rows(rows, a, as_, units, matrix, ahead, again, c, cs):  # type: ignore[no-untyped-def]
        while rows > 0:
            if rows >= 6:
                product_6(a, as_, units, *matrix, ahead, c, cs)
                done = np.int64(6)
            elif rows >= 3:
                product_3(a, as_, units, *matrix, ahead, c, cs)
                done = np.int64(3)
            elif rows == 2:
                product_2(a, as_, units, *matrix, ahead, c, cs)
                done = np.int64(2)
            else:
                product_1(a, as_, units, *matrix, ahead, c, cs)
                done = np.int64(1)
            a, units, c, ahead, rows = a + as_ * done, units + 8 * done, c + cs * done, again, rows - done

    return by_rows


def make_code_steps(values: Values) -> Steps:
    """Return the steps over pages of codes with this kind of values."""
    in_a_byte, width_of, fetch_scales, weigh_page, finish = values
    scores_of, sums_of = _make_by_rows(make_scores), _make_by_rows(partial(make_sums, in_a_byte=in_a_byte))

    @kernel_part
    def width(args):  # type: ignore[no-untyped-def]
        return width_of(args[DIM])

    @kernel_part
    def prepare(args, source, scale, units, room, queries):  # type: ignore[no-untyped-def]
        """Rotate and round a query; its `units` are its unit and the sum of its integers."""
        dim, width = args[DIM], width_of(args[DIM])
        scaled(source, dim, scale, room)
        for d in range(dim, width):
            put_f32(room, d, np.float32(0))
        rotate(room, width, dim)
        factor, unit = _unit(largest(room, width), QUERY_LEVELS)
        put_f32(units, 0, unit)
        put_i32(units, 1, _round_query(room, width, factor, queries))

    @kernel_part
    def score(args, queries, units, scores, sequence, head, rows, at, first, stop, following):  # type: ignore[no-untyped-def]
        """Compute scores[i, j] = query i . key j for whole pages."""
        page, dim, width, stride = args[PAGE], code_dim(args[DIM]), width_of(args[DIM]), 4 * args[BLOCK]
        token = first // page * page
        ids, pages = pages_from(args, sequence, token)[0], (stop - token + page - 1) // page
        keys, ahead = args[KEYS] + head * dim * page, ahead_of(following, args[KEYS], dim * page)
        scales_ahead = ahead_of(following, args[KEY_SCALES], 4 * page)
        for j in range(pages):
            fetch(address_ahead(args, scales_ahead, j))
        scales, out = args[KEY_SCALES] + 4 * head * page, scores + 4 * (token - at)
        matrix = ids, pages, args[PAGE_BYTES], keys, scales, dim, page
        scores_of(rows, queries, 4 * width, units, matrix, ahead, (ids, pages, keys, ids, pages, keys), out, stride)

    @kernel_part
    def collect(args, weights, units, sums, sequence, head, rows, at, first, stop, following):  # type: ignore[no-untyped-def]
        """Round the weights of whole pages in place, and add weight[i, j] * value j to sums[i]."""
        page, width, stride = args[PAGE], width_of(args[DIM]), 4 * args[BLOCK]
        token = first // page * page
        ids, pages = pages_from(args, sequence, token)[0], (stop - token + page - 1) // page
        values = args[VALUES] + head * (width // in_a_byte) * page
        ahead = ahead_of(following, args[VALUES], (width // in_a_byte) * page)
        for j in range(pages):
            fetch_scales(args, following, j)
        out = weights + 4 * (token - at)
        for i in range(rows):
            own, added = out + stride * i, np.float32(0)
            for j in range(pages):
                added += weigh_page(args, own + 4 * page * j, head, i32(ids, j) * args[PAGE_BYTES])
            factor, unit = _unit(largest(own, pages * page), WEIGHT_LEVELS)
            put_f32(units + 8 * i, 0, unit)
            put_f32(units + 8 * i, 1, added)
            _round_weights(own, pages * page, factor, own)
        matrix = ids, pages, args[PAGE_BYTES], values, width, page
        sums_of(rows, out, stride, units, matrix, ahead, (ids, pages, values, ids, pages, values), sums, 4 * width)

    return Steps(width, width, prepare, score, collect, finish)


@kernel_part
def _fetch_int8(args, following, at):  # type: ignore[no-untyped-def]
    fetch(address_ahead(args, ahead_of(following, args[VALUE_SCALES], 4 * args[PAGE]), at))


@kernel_part
def _weigh_int8(args, weights, head, page):  # type: ignore[no-untyped-def]
    weigh(weights, args[PAGE], args[VALUE_SCALES] + 4 * head * args[PAGE] + page)
    return np.float32(0)


@kernel_part
def _finish_int8(args, sums, factor, row, head):  # type: ignore[no-untyped-def]
    scaled(sums, args[DIM], factor, args[OUT] + 4 * args[DIM] * (row * args[HEADS] + head))


@kernel_part
def _paired(dim):  # type: ignore[no-untyped-def]
    return 2 * pair_dim(dim)


@kernel_part
def _fetch_nibbles(args, following, at):  # type: ignore[no-untyped-def]
    fetch(address_ahead(args, ahead_of(following, args[VALUE_SCALES], 2 * args[PAGE]), at))
    fetch(address_ahead(args, ahead_of(following, args[VALUE_MINIMA], 2 * args[PAGE]), at))


@kernel_part
def _weigh_nibbles(args, weights, head, page):  # type: ignore[no-untyped-def]
    skip = 2 * head * args[PAGE] + page
    return weigh_ranges(weights, args[PAGE], args[VALUE_SCALES] + skip, args[VALUE_MINIMA] + skip)


@kernel_part
def _finish_nibbles(args, sums, factor, row, head):  # type: ignore[no-untyped-def]
    rotate(sums, _paired(args[DIM]), args[DIM])
    scaled(sums, args[DIM], factor, args[OUT] + 4 * args[DIM] * (row * args[HEADS] + head))


INT8_STEPS = make_code_steps(Values(1, code_dim, _fetch_int8, _weigh_int8, _finish_int8))
K8V4_STEPS = make_code_steps(Values(2, _paired, _fetch_nibbles, _weigh_nibbles, _finish_nibbles))
