"""Products for Numba kernels: vectors with the rows of a bf16, fp16 or fp32 matrix, or with its columns.

Numba's own loops over bf16 reach a quarter of the memory bandwidth, because LLVM does not vectorize them; the products
therefore emit vector code themselves (`cpu_simd.vector_ir`). All functions take addresses and byte strides as int64;
vectors and results are fp32. The order of a sum depends only on its length, so that a result does not depend on the
others in its batch.
"""

from collections.abc import Callable, Iterable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sgmv_kernels.cpu_simd.paging import PAGES_AHEAD, page_ahead, page_offset
from sgmv_kernels.cpu_simd.vector_ir import LANES, Emitter, Value, c64, itemsize_of, loop_of

PAIRS = 2
"""Pairs of vectors that a dot product takes at a time: enough sums to hide the latency of one."""
CACHE_LINE = 64
_A, _F = types.int64, types.float32
Intrinsic = Callable[..., Any]


@intrinsic
def deinterleave(typingctx, x, n, out, kind):  # type: ignore[no-untyped-def]
    """Copy x to out for h < n, in the order in which `make_dot` needs a vector for a matrix of `kind`."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, out = args[:3]
        step = 2 * LANES
        whole = b.mul(b.sdiv(n, c64(step)), c64(step))
        emit, one = Emitter(b, LANES), Emitter(b, 1)

        def pairs(at: Value, _: list[Value]) -> list[Value]:
            second = b.add(at, c64(LANES))
            values = emit.deinterleaved(emit.load(x, at), emit.load(x, second), sig.args[3])
            emit.store(values[0], out, at)
            emit.store(values[1], out, second)
            return []

        def rest(at: Value, _: list[Value]) -> list[Value]:
            one.store(one.load(x, at), out, at)
            return []

        loop_of(b, c64(0), whole, step, [], pairs)
        loop_of(b, whole, n, 1, [], rest)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A, kind), codegen


def make_dot(rows: int, columns: int = 1, fetch: bool = False) -> Intrinsic:
    """Return dot(x, xs, a, as_, n, out, os, ahead, kind): out[i, j] = sum over h < n of x[i, h] * a[j, h], for `rows`
    rows of x and `columns` of a.

    x and out are fp32, with `xs` and `os` bytes from row to row; x is in the order of `deinterleave`. `a`, of `kind`,
    has `as_` bytes from row to row. A matrix in memory is read row by row, front to back: one stream reaches the memory
    bandwidth, eight rows in parallel half of it. With `fetch`, the bytes of one row of a are prefetched from `ahead` on
    meanwhile.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, xs, a, as_, n, out, os, ahead = args[:8]
        kind = sig.args[8]
        size = itemsize_of(kind)
        x_rows = [b.add(x, b.mul(xs, c64(i))) for i in range(rows)]
        a_rows = [b.add(a, b.mul(as_, c64(j))) for j in range(columns)]
        pairs = [(i, j) for i in range(rows) for j in range(columns)]
        begin: Value = c64(0)
        totals: list[Value] = []
        for lanes, unroll in ((LANES, 2), (1, 1)):
            emit, step = Emitter(b, lanes), lanes * unroll
            end = b.add(begin, b.mul(b.sdiv(b.sub(n, begin), c64(step)), c64(step)))

            def body(at: Value, sums: list[Value], emit: Emitter = emit, unroll: int = unroll) -> list[Value]:
                for line in range(0, unroll * emit.lanes * size if fetch and unroll > 1 else 0, CACHE_LINE):
                    emit.fetch(b.add(b.add(ahead, b.mul(at, c64(size))), c64(line)))
                places = [b.add(at, c64(u * emit.lanes)) for u in range(unroll)]
                if unroll == 1:
                    av = [[emit.load_kind(row, at, kind)] for row in a_rows]
                else:
                    av = [[v for place in places[::2] for v in emit.load_pair(row, place, kind)] for row in a_rows]
                xv = [[emit.load(row, place) for place in places] for row in x_rows]
                return [
                    emit.fma(av[j][u], xv[i][u], sums[p * unroll + u])
                    for p, (i, j) in enumerate(pairs)
                    for u in range(unroll)
                ]

            sums = loop_of(b, begin, end, step, [emit.const(0.0)] * (len(pairs) * unroll), body)
            parts = [emit.sum(emit.total(sums[p * unroll : (p + 1) * unroll])) for p in range(len(pairs))]
            totals = [b.fadd(t, p) for t, p in zip(totals, parts, strict=True)] if totals else parts
            begin = end
        for (i, j), total in zip(pairs, totals, strict=True):
            Emitter(b, 1).store(total, b.add(out, b.mul(os, c64(i))), c64(j))
        return ctx.get_dummy_value()

    @intrinsic
    def dot(typingctx, x, xs, a, as_, n, out, os, ahead, kind):  # type: ignore[no-untyped-def]
        return types.void(*(_A,) * 8, kind), codegen

    made: Intrinsic = dot
    return made


@intrinsic
def axpy(typingctx, factor, m, n, y, ahead, kind):  # type: ignore[no-untyped-def]
    """Add factor * m[o] to y[o] for o < n, y in the order of `deinterleave`.

    The same number of bytes as m has is prefetched from `ahead` on.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        factor, m, n, y, ahead = args[:5]
        kind = sig.args[5]
        size = itemsize_of(kind)
        begin: Value = c64(0)
        for lanes, unroll in ((LANES, 2 * PAIRS), (LANES, 2), (1, 1)):
            emit, step = Emitter(b, lanes), lanes * unroll
            end = b.add(begin, b.mul(b.sdiv(b.sub(n, begin), c64(step)), c64(step)))
            factors = emit.splat(factor)

            def body(
                at: Value, _: list[Value], emit: Emitter = emit, unroll: int = unroll, factors: Value = factors
            ) -> list[Value]:
                for line in range(0, unroll * emit.lanes * size if unroll > 2 else 0, CACHE_LINE):
                    emit.fetch(b.add(b.add(ahead, b.mul(at, c64(size))), c64(line)))
                places = [b.add(at, c64(u * emit.lanes)) for u in range(unroll)]
                if unroll == 1:
                    values = [emit.load_kind(m, at, kind)]
                else:
                    values = [v for place in places[::2] for v in emit.load_pair(m, place, kind)]
                for value, place in zip(values, places, strict=True):
                    emit.store(emit.fma(value, factors, emit.load(y, place)), y, place)
                return []

            loop_of(b, begin, end, step, [], body)
            begin = end
        return ctx.get_dummy_value()

    return types.void(_F, _A, _A, _A, _A, kind), codegen


def make_mul(rows: int, pairs: int, add: bool, fetch: bool = False, row_ahead: int = 0) -> Intrinsic:
    """Return mul(a, as_, n, m, ms, columns, c, cs, ahead, kind): c[i, o] (+)= sum over k < n of a[i, k] * m[k, o].

    i < `rows` rows of a and c (fp32, `as_` and `cs` bytes apart), k < n rows of m (of `kind`, `ms` bytes apart), o <
    columns, processed in `pairs` pairs of vectors at a time, then one vector, then number by number. With `add` the
    products are added to c, else they replace it. With `fetch`, the same number of bytes as m has is prefetched from
    `ahead` on meanwhile; with `row_ahead`, each row of m is prefetched that many bytes before it is read.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        a, as_, n, m, ms, columns, c, cs, ahead = args[:9]
        kind = sig.args[9]
        size = itemsize_of(kind)
        a_rows = [b.add(a, b.mul(as_, c64(i))) for i in range(rows)]
        c_rows = [b.add(c, b.mul(cs, c64(i))) for i in range(rows)]

        def tile(emit: Emitter, places: list[Value]) -> None:
            width = len(places)
            coming, step_bytes = b.add(ahead, b.mul(b.mul(places[0], n), c64(size))), emit.lanes * width * size

            def body(k: Value, sums: list[Value]) -> list[Value]:
                if fetch and emit.lanes > 1:
                    _fetch(emit, b.add(coming, b.mul(k, c64(step_bytes))), step_bytes)
                if row_ahead and width > 2:
                    place = b.add(b.mul(k, ms), b.mul(places[0], c64(size)))
                    _fetch(emit, b.add(m, b.add(place, c64(row_ahead))), step_bytes)
                return _add_products(emit, sums, a_rows, k, b.add(m, b.mul(k, ms)), places, kind)

            begin: list[Value] = [emit.const(0.0)] * (rows * width)
            if add:
                begin = [emit.load(row, place) for row in c_rows for place in places]
                if width > 1:
                    begin = _by_pairs(begin, lambda x, y: emit.deinterleaved(x, y, kind))
            sums = loop_of(b, c64(0), n, 1, begin, body)
            if width > 1:
                sums = _by_pairs(sums, lambda x, y: emit.interleaved(x, y, kind))
            _store(emit, sums, c_rows, places)

        _by_columns(b, columns, (2 * pairs, 2, 1), tile)
        return ctx.get_dummy_value()

    @intrinsic
    def mul(typingctx, a, as_, n, m, ms, columns, c, cs, ahead, kind):  # type: ignore[no-untyped-def]
        return types.void(_A, _A, _A, _A, _A, _A, _A, _A, _A, kind), codegen

    made: Intrinsic = mul
    return made


def make_beside(rows: int) -> Intrinsic:
    """Return beside(a, as_, n, m, other, ms, c, cs, ahead, kind): c[i, o] = sum over k < n of a[i, k] * m[k, o] for the
    columns of one vector of m, followed by as many columns of `other`.

    The rest is as in `make_mul`, and the sums are the same, bit for bit. A loaded number of a is used for two products,
    and twice as many sums hide latency. The bytes of one matrix are prefetched from each of two addresses.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        a, as_, n, m, other, ms, c, cs, ahead = args[:9]
        kind = sig.args[9]
        step = LANES * itemsize_of(kind)
        half = b.sdiv(n, c64(2))
        first, second = cgutils.unpack_tuple(b, ahead)
        second = b.sub(second, b.mul(half, c64(2 * step)))
        emit = Emitter(b, LANES)
        a_rows = [b.add(a, b.mul(as_, c64(i))) for i in range(rows)]

        def body(k: Value, sums: list[Value]) -> list[Value]:
            coming = b.select(b.icmp_signed("<", k, half), first, second)
            _fetch(emit, b.add(coming, b.mul(k, c64(2 * step))), 2 * step)
            mv = [emit.load_kind(b.add(base, b.mul(k, ms)), c64(0), kind) for base in (m, other)]
            return _add_scaled(emit, sums, a_rows, k, mv)

        sums = loop_of(b, c64(0), n, 1, [emit.const(0.0)] * (2 * rows), body)
        _store(emit, sums, [b.add(c, b.mul(cs, c64(i))) for i in range(rows)], [c64(0), c64(LANES)])
        return ctx.get_dummy_value()

    @intrinsic
    def beside(typingctx, a, as_, n, m, other, ms, c, cs, ahead, kind):  # type: ignore[no-untyped-def]
        return types.void(*(_A,) * 8, types.UniTuple(_A, 2), kind), codegen

    made: Intrinsic = beside
    return made


def make_paged_mul(rows: int) -> Intrinsic:
    """Return paged(a, as_, ids, inside, n, base, page, bytes, ms, columns, c, cs, ahead, kind): c[i, o] += sum over
    k < n of a[i, k] * m[k, o], the rows of m being on pages.

    m begins at row `inside` of the first page of `ids`; a page has `page` rows, `ms` bytes apart, and is at `base` +
    `bytes` * id. The same number of pages `ahead` is prefetched (`PAGES_AHEAD`). Sums stay in registers from page to
    page; in c they are in the order of `deinterleave`. The rest is as in `make_mul`.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        a, as_, ids, inside, n, base, page, page_bytes, ms, columns, c, cs, ahead = args[:13]
        kind = sig.args[13]
        size = itemsize_of(kind)
        a_rows = [b.add(a, b.mul(as_, c64(i))) for i in range(rows)]
        c_rows = [b.add(c, b.mul(cs, c64(i))) for i in range(rows)]
        last = b.sdiv(b.sub(b.add(inside, n), c64(1)), page)

        def tile(emit: Emitter, places: list[Value]) -> None:
            step_bytes = emit.lanes * len(places) * size

            def of_page(index: Value, state: list[Value]) -> list[Value]:
                before, sums = state[0], state[1:]
                start = b.select(b.icmp_signed("==", index, c64(0)), inside, c64(0))
                whole, left = b.sub(page, start), b.sub(n, before)
                count = b.select(b.icmp_signed("<", whole, left), whole, left)
                first = b.add(b.add(base, page_offset(b, ids, index, page_bytes)), b.mul(start, ms))
                coming = b.add(page_ahead(b, ahead, index, page_bytes), b.mul(b.mul(places[0], page), c64(size)))

                def body(k: Value, sums: list[Value]) -> list[Value]:
                    if emit.lanes > 1:
                        _fetch(emit, b.add(coming, b.mul(k, c64(step_bytes))), step_bytes)
                    row = b.add(first, b.mul(k, ms))
                    return _add_products(emit, sums, a_rows, b.add(before, k), row, places, kind)

                return [b.add(before, count), *loop_of(b, c64(0), count, 1, sums, body)]

            begin = [emit.load(row, place) for row in c_rows for place in places]
            _, *sums = loop_of(b, c64(0), b.add(last, c64(1)), 1, [c64(0), *begin], of_page)
            _store(emit, sums, c_rows, places)

        _by_columns(b, columns, (2, 1), tile)
        return ctx.get_dummy_value()

    @intrinsic
    def paged(typingctx, a, as_, ids, inside, n, base, page, bytes_, ms, columns, c, cs, ahead, kind):  # type: ignore[no-untyped-def]
        return types.void(*(_A,) * 12, PAGES_AHEAD, kind), codegen

    made: Intrinsic = paged
    return made


def _by_columns(b: Any, columns: Value, widths: Iterable[int], tile: Callable[[Emitter, list[Value]], None]) -> None:
    """Emit `tile(emitter, places)` for all columns: as many vectors at a time as the first width says, then by the next
    width, and the remaining columns number by number. `places` are the first columns of the vectors.
    """
    done: Value = c64(0)
    for lanes, width in (*((LANES, width) for width in dict.fromkeys(widths)), (1, 1)):
        emit, step = Emitter(b, lanes), lanes * width
        end = b.add(done, b.mul(b.sdiv(b.sub(columns, done), c64(step)), c64(step)))

        def of_tile(at: Value, _: list[Value], emit: Emitter = emit, width: int = width) -> list[Value]:
            tile(emit, [b.add(at, c64(v * emit.lanes)) for v in range(width)])
            return []

        loop_of(b, done, end, step, [], of_tile)
        done = end


def _fetch(emit: Emitter, address: Value, nbytes: int) -> None:
    """Prefetch the cache lines of `nbytes` bytes."""
    for line in range(0, nbytes, CACHE_LINE):
        emit.fetch(emit.b.add(address, c64(line)))


def _store(emit: Emitter, sums: list[Value], rows: list[Value], places: list[Value]) -> None:
    """Store the sums of each row at its places."""
    targets = [(row, place) for row in rows for place in places]
    for value, (row, place) in zip(sums, targets, strict=True):
        emit.store(value, row, place)


def _add_products(
    emit: Emitter, sums: list[Value], a_rows: list[Value], k: Value, row: Value, places: list[Value], kind: Any
) -> list[Value]:
    """Add a[i, k] * m[k, o] to the sums of each row i, for a row of m and the columns `places`."""
    if len(places) == 1:
        return _add_scaled(emit, sums, a_rows, k, [emit.load_kind(row, places[0], kind)])
    return _add_scaled(emit, sums, a_rows, k, [v for place in places[::2] for v in emit.load_pair(row, place, kind)])


def _add_scaled(emit: Emitter, sums: list[Value], a_rows: list[Value], k: Value, vectors: list[Value]) -> list[Value]:
    """Add a[i, k] times each vector to the sums of each row i."""
    factors = [emit.splat(Emitter(emit.b, 1).load(row, k)) for row in a_rows]
    products = [(vector, factor) for factor in factors for vector in vectors]
    return [emit.fma(vector, factor, added) for (vector, factor), added in zip(products, sums, strict=True)]


def _by_pairs(values: list[Value], change: Callable[[Value, Value], tuple[Value, Value]]) -> list[Value]:
    return [v for first, second in zip(values[::2], values[1::2], strict=True) for v in change(first, second)]


@intrinsic
def interleave(typingctx, x, n, factor, out, kind):  # type: ignore[no-untyped-def]
    """Compute out[h] = x[h] * factor for h < n, x in the order of `deinterleave`."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, factor, out = args[:4]
        step = 2 * LANES
        whole = b.mul(b.sdiv(n, c64(step)), c64(step))
        emit, one = Emitter(b, LANES), Emitter(b, 1)
        factors = emit.splat(factor)

        def pairs(at: Value, _: list[Value]) -> list[Value]:
            second = b.add(at, c64(LANES))
            values = emit.interleaved(emit.load(x, at), emit.load(x, second), sig.args[4])
            emit.store(b.fmul(values[0], factors), out, at)
            emit.store(b.fmul(values[1], factors), out, second)
            return []

        def rest(at: Value, _: list[Value]) -> list[Value]:
            one.store(b.fmul(one.load(x, at), factor), out, at)
            return []

        loop_of(b, c64(0), whole, step, [], pairs)
        loop_of(b, whole, n, 1, [], rest)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _F, _A, kind), codegen
