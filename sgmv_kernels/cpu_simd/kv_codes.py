"""Vector functions of KV pages of codes for Numba: rotation, rounding, products of codes with rounded numbers.

Addresses are int64, strides are in bytes. Queries and weights are rounded to integers of 15 bits and multiplied exactly
by the codes of a page, so that sums are equal on every instruction set. Four neighbours of a rounded row are eight
bytes: the upper byte of each, then the lower byte of each; or, if the processor has no byte products that cannot
overflow, int16 in the order 0 2 1 3.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sgmv_kernels.cpu_simd.paging import PAGES_AHEAD, page_ahead, page_offset
from sgmv_kernels.cpu_simd.quant_ir import (
    HAS_BYTE_DOT,
    INTS,
    WORDS,
    dot_bytes,
    dot_words,
    filled,
    load_vector,
    splat_int,
    store_vector,
)
from sgmv_kernels.cpu_simd.vector_ir import F32, I32, I64, LANES, Emitter, Value, c64, each, loop_of, over_row
from sgmv_kernels.formats.kv_format import NIBBLE_LEVELS

QUERY_LEVELS = 127 * 128
"""Largest integer of a query, which is 128 times a signed byte plus -64 to 63."""
WEIGHT_LEVELS = 32767
"""Largest integer of a weight, which is 256 times a byte plus a byte, both unsigned."""
QUAD_BYTES = 8
"""Bytes of four neighbours of a rounded row."""
_SUMS = 2 if HAS_BYTE_DOT else 1
"""Number of sums of a row and vector: one for upper and one for lower bytes, or one."""
_A, _F = types.int64, types.float32
_I8, _I16 = ir.IntType(8), ir.IntType(16)
_LINE = 64
_VECTOR = 4 * LANES


@intrinsic
def largest(typingctx, x, n):  # type: ignore[no-untyped-def]
    """Return the largest magnitude of n numbers; NaN if one of them, or their sum, is NaN or infinite."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            size = emit.call("fabs", emit.load(args[0], at))
            return [emit.call("maxnum", state[0], size), b.fadd(state[1], size)]

        (wide, many), (one, rest) = each(b, args[1], body, (0.0, 0.0))
        most = one.call("maxnum", wide.max(many[0]), rest[0])
        total = b.fadd(wide.sum(many[1]), rest[1])
        return b.select(b.fcmp_ordered("<", total, one.const(float("inf"))), most, one.const(float("nan")))

    return _F(_A, _A), codegen


@intrinsic
def mix_lanes(typingctx, x, n, block):  # type: ignore[no-untyped-def]
    """Replace numbers at a distance of 1, 2, 4, ... below LANES and `block` by their sum and difference, one distance
    after another; n is a multiple of LANES.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, block = args
        emit = Emitter(b, LANES)

        def body(at: Value, state: list[Value]) -> list[Value]:
            value = emit.load(x, at)
            half = 1
            while half < LANES:
                places = ir.Constant(ir.VectorType(I32, LANES), [lane ^ half for lane in range(LANES)])
                signs = ir.Constant(emit.float, [-1.0 if lane & half else 1.0 for lane in range(LANES)])
                mixed = b.fadd(b.shuffle_vector(value, value, places), b.fmul(value, signs))
                value = b.select(b.icmp_signed(">", block, c64(half)), mixed, value)
                half *= 2
            emit.store(value, x, at)
            return []

        loop_of(b, c64(0), n, LANES, [], body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A), codegen


@intrinsic
def mix_vectors(typingctx, x, n, half):  # type: ignore[no-untyped-def]
    """Replace numbers at a distance of `half`, a multiple of LANES, by their sum and difference."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, half = args
        emit = Emitter(b, LANES)

        def body(at: Value, state: list[Value]) -> list[Value]:
            first = b.add(at, b.mul(b.sdiv(at, half), half))
            second = b.add(first, half)
            left, right = emit.load(x, first), emit.load(x, second)
            emit.store(b.fadd(left, right), x, first)
            emit.store(b.fsub(left, right), x, second)
            return []

        loop_of(b, c64(0), b.sdiv(n, c64(2)), LANES, [], body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A), codegen


@intrinsic
def put_key_codes(typingctx, x, n, factor, codes, line):  # type: ignore[no-untyped-def]
    """Store x[h] * factor for h < n, rounded to nearest even, as int8, each four codes `line` bytes after the previous
    four; NaN is stored as 0.
    """

    def body(emit: Emitter, at: Value, x: Value, n: Value, factor: Value, codes: Value, line: Value) -> None:
        b = emit.b
        whole = _whole(emit, emit.load(x, at), emit.splat(factor))
        first = b.add(codes, b.mul(b.sdiv(at, c64(4)), line))
        if emit.lanes == 1:
            _put_byte(b, b.trunc(whole, _I8), b.add(first, b.srem(at, c64(4))))
            return
        fours = b.bitcast(b.trunc(whole, ir.VectorType(_I8, LANES)), ir.VectorType(I32, LANES // 4))
        for quad in range(LANES // 4):
            place = b.inttoptr(b.add(first, b.mul(line, c64(quad))), I32.as_pointer())
            b.store(b.extract_element(fours, ir.Constant(I32, quad)), place, align=1)

    return types.void(_A, _A, _F, _A, _A), over_row(body, n=1)


@intrinsic
def put_value_codes(typingctx, x, n, factor, codes):  # type: ignore[no-untyped-def]
    """Store the same codes as `put_key_codes`, each 4 bytes after the previous one."""

    def body(emit: Emitter, at: Value, x: Value, n: Value, factor: Value, codes: Value) -> None:
        _spread(emit.b, emit, _whole(emit, emit.load(x, at), emit.splat(factor)), codes, at)

    return types.void(_A, _A, _F, _A), over_row(body, n=1)


@intrinsic
def put_pairs(typingctx, x, n, apart, least, factor, codes):  # type: ignore[no-untyped-def]
    """Store (x[h] - least) * factor for h < n and for h from `apart` on as 4-bit codes, in the lower and the upper half
    of a byte; bytes are 4 apart. Return the number of pairs stored, which fill whole vectors.

    Codes are rounded to nearest even, and limited to 0 to `NIBBLE_LEVELS`; NaN is stored as 0.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, apart, least, factor, codes = args
        emit, whole = Emitter(b, LANES), b.mul(b.sdiv(n, c64(LANES)), c64(LANES))

        def body(at: Value, state: list[Value]) -> list[Value]:
            pair = [_nibble(emit, emit.load(x, place), least, factor) for place in (at, b.add(at, apart))]
            _spread(b, emit, b.or_(pair[0], b.shl(pair[1], filled(INTS, 4))), codes, at)
            return []

        loop_of(b, c64(0), whole, LANES, [], body)
        return whole

    return _A(_A, _A, _A, _F, _F, _A), codegen


@intrinsic
def put_pair(typingctx, first, second, least, factor, address):  # type: ignore[no-untyped-def]
    """Store the codes of two numbers as `put_pairs` does."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        lower, upper = (_nibble(Emitter(b, 1), number, *args[2:4]) for number in args[:2])
        _put_byte(b, b.trunc(b.or_(lower, b.shl(upper, ir.Constant(I32, 4))), _I8), args[4])
        return ctx.get_dummy_value()

    return types.void(_F, _F, _F, _F, _A), codegen


def _nibble(emit: Emitter, number: Value, least: Value, factor: Value) -> Value:
    """Return 4-bit codes as int32; `maxnum` turns NaN into 0."""
    scaled = emit.b.fmul(emit.b.fsub(number, emit.splat(least)), emit.splat(factor))
    bound = emit.call("minnum", emit.call("maxnum", scaled, emit.const(0.0)), emit.const(float(NIBBLE_LEVELS)))
    return _whole(emit, bound, emit.const(1.0))


def _spread(b: Any, emit: Emitter, whole: Value, codes: Value, at: Value) -> None:
    """Store int32 as bytes, 4 apart, from index `at` on."""
    first = b.add(codes, b.mul(at, c64(4)))
    small = b.trunc(whole, _I8 if emit.lanes == 1 else ir.VectorType(_I8, LANES))
    for lane in range(emit.lanes):
        byte = small if emit.lanes == 1 else b.extract_element(small, ir.Constant(I32, lane))
        _put_byte(b, byte, b.add(first, c64(4 * lane)))


def _put_byte(b: Any, byte: Value, address: Value) -> None:
    b.store(byte, b.inttoptr(address, _I8.as_pointer()), align=1)


def make_rounding(is_signed: bool) -> Callable[..., Any]:
    """Return round(x, n, factor, out), which writes x[h] * factor for h < n, a multiple of 16, as integers to `out`,
    and returns their sum.

    Queries are signed, weights unsigned. `out` may be x.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, factor, out = args
        emit = Emitter(b, LANES)

        def body(at: Value, state: list[Value]) -> list[Value]:
            whole = _whole(emit, emit.load(x, at), emit.splat(factor))
            store_vector(b, _split(b, whole, is_signed), b.add(out, b.mul(at, c64(QUAD_BYTES // 4))))
            return [b.add(state[0], whole)]

        (total,) = loop_of(b, c64(0), n, LANES, [emit.const_int(0)], body)
        return b.sext(emit.fold(total, lambda emit, x, y: emit.b.add(x, y)), I64)

    @intrinsic
    def rounding(typingctx, x, n, factor, out):  # type: ignore[no-untyped-def]
        return types.int64(_A, _A, _F, _A), codegen

    made: Callable[..., Any] = rounding
    return made


def _whole(emit: Emitter, value: Value, factor: Value) -> Value:
    """Return numbers times a factor as int32. Infinity times 0 is NaN, which cannot be converted to an integer."""
    scaled = emit.b.fmul(value, factor)
    scaled = emit.b.select(emit.b.fcmp_ordered("ord", scaled, scaled), scaled, emit.const(0.0))
    return emit.b.fptosi(emit.call("rint", scaled), emit.int)


def _split(b: Any, whole: Value, is_signed: bool) -> Value:
    """Return LANES int32 as quads of bytes or of int16 (see above)."""
    fours = ir.VectorType(I32, LANES // 4)
    if not HAS_BYTE_DOT:
        order = [4 * quad + k for quad in range(LANES // 4) for k in (0, 2, 1, 3)]
        turned = b.shuffle_vector(whole, whole, ir.Constant(ir.VectorType(I32, LANES), order))
        return b.trunc(turned, ir.VectorType(_I16, LANES))
    if is_signed:
        upper = b.ashr(b.add(whole, filled(INTS, 64)), filled(INTS, 7))
        lower = b.sub(whole, b.shl(upper, filled(INTS, 7)))
    else:
        upper, lower = b.lshr(whole, filled(INTS, 8)), b.and_(whole, filled(INTS, 255))
    small = [b.bitcast(b.trunc(part, ir.VectorType(_I8, LANES)), fours) for part in (upper, lower)]
    order = [quad + part * (LANES // 4) for quad in range(LANES // 4) for part in (0, 1)]
    return b.shuffle_vector(*small, ir.Constant(ir.VectorType(I32, LANES // 2), order))


@intrinsic
def weigh(typingctx, weights, n, scales):  # type: ignore[no-untyped-def]
    """Replace weights[h] by weights[h] * scales[h] for h < n; a weight of 0 stays 0, whatever its scale."""

    def body(emit: Emitter, at: Value, weights: Value, n: Value, scales: Value) -> None:
        b = emit.b
        weight = emit.load(weights, at)
        some = b.fcmp_unordered("!=", weight, emit.const(0.0))
        emit.store(b.select(some, b.fmul(weight, emit.load(scales, at)), weight), weights, at)

    return types.void(_A, _A, _A), over_row(body, n=1)


@intrinsic
def weigh_ranges(typingctx, weights, n, scales, minima):  # type: ignore[no-untyped-def]
    """Do the same as `weigh` with bf16 scales, and return the sum of the original weights[h] * minima[h] (bf16)."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        weights, n, scales, minima = args

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            weight = emit.load(weights, at)
            some = b.fcmp_unordered("!=", weight, emit.const(0.0))
            scale, least = (emit.load_kind(numbers, at, types.uint16) for numbers in (scales, minima))
            emit.store(b.select(some, b.fmul(weight, scale), weight), weights, at)
            return [b.select(some, emit.fma(weight, least, state[0]), state[0])]

        (wide, many), (_, rest) = each(b, n, body, (0.0,))
        return b.fadd(wide.sum(many[0]), rest[0])

    return _F(_A, _A, _A, _A), codegen


@intrinsic
def row_min(typingctx, x, n):  # type: ignore[no-untyped-def]
    """Return the smallest of n numbers; infinity if there are none."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            return [emit.call("minnum", emit.load(args[0], at), state[0])]

        (wide, many), (_, rest) = each(b, args[1], body, (float("inf"),))
        least = wide.fold(many[0], lambda emit, x, y: emit.call("minnum", x, y))
        return Emitter(b, 1).call("minnum", least, rest[0])

    return _F(_A, _A), codegen


@intrinsic
def bf16_of(typingctx, x):  # type: ignore[no-untyped-def]
    """Return x rounded to bf16."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        bits = Emitter(b, 1).bf16_bits(args[0])
        return b.bitcast(b.shl(bits, ir.Constant(I32, 16)), F32)

    return _F(_F), codegen


def _factors(b: Any, quads: Value) -> list[Value]:
    """Load the two factors of a quad into every lane."""
    return [splat_int(b, b.add(quads, c64(4 * k))) for k in range(2)]


def _widened(b: Any, code: Value) -> list[Value]:
    """Return signed bytes as int16: every first and third of four, then every second and fourth."""
    code = b.bitcast(code, WORDS)
    return [b.ashr(b.shl(code, filled(WORDS, 8)), filled(WORDS, 8)), b.ashr(code, filled(WORDS, 8))]


def _add_keys(b: Any, sums: list[Value], code: Value, factors: list[Value]) -> list[Value]:
    """Add products of signed codes with signed factors; for byte products, of codes + 128."""
    if HAS_BYTE_DOT:
        unsigned = b.xor(code, filled(INTS, 0x80808080))
        return [dot_bytes(b, total, unsigned, factor) for total, factor in zip(sums, factors, strict=True)]
    return _add_words(b, sums, code, factors)


def _add_values(b: Any, sums: list[Value], code: Value, factors: list[Value]) -> list[Value]:
    """Add products of signed codes with unsigned factors."""
    if HAS_BYTE_DOT:
        return [dot_bytes(b, total, factor, code) for total, factor in zip(sums, factors, strict=True)]
    return _add_words(b, sums, code, factors)


def _add_words(b: Any, sums: list[Value], code: Value, factors: list[Value]) -> list[Value]:
    (total,) = sums
    for part, factor in zip(_widened(b, code), factors, strict=True):
        total = dot_words(b, total, part, factor)
    return [total]


def make_scores(rows: int) -> Callable[..., Any]:
    """Return scores(quads, apart, units, ids, pages, bytes, codes, scales, dim, page, ahead, out, stride):
    out[i, j] = query i . key j.

    `quads`: rounded queries, `apart` bytes from each other; `units`: the unit (fp32) and the sum (int32) of each.
    `ids`: ids of `pages` pages of `bytes` bytes, whose `codes` and `scales` of one head are [dim / 4, page, 4] and
    [page]. Meanwhile the same number of pages `ahead` is prefetched (`PAGES_AHEAD`).
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        quads, apart, units, ids, pages, page_bytes, codes, scales, dim, page, ahead, out, stride = args
        emit, one = Emitter(b, LANES), Emitter(b, 1)
        line_bytes = b.mul(page, c64(4))
        own = [b.add(quads, b.mul(apart, c64(i))) for i in range(rows)]
        unit = [one.load(units, c64(2 * i)) for i in range(rows)]
        sums = [b.load(one.at(units, c64(2 * i + 1), 4, I32), align=4) for i in range(rows)]

        def of_page(at: Value, _: list[Value]) -> list[Value]:
            skip = page_offset(b, ids, at, page_bytes)
            next_page = page_ahead(b, ahead, at, page_bytes)
            places = b.add(out, b.mul(at, line_bytes))

            def of_tokens(token: Value, _: list[Value]) -> list[Value]:
                first = b.add(b.add(codes, skip), b.mul(token, c64(4)))
                coming = b.add(next_page, b.mul(token, c64(4)))

                def of_quad(quad: Value, totals: list[Value]) -> list[Value]:
                    line = b.mul(quad, line_bytes)
                    code = load_vector(b, b.add(first, line), INTS)
                    emit.fetch(b.add(coming, line))
                    added: list[Value] = []
                    for i in range(rows):
                        factors = _factors(b, b.add(own[i], b.mul(quad, c64(QUAD_BYTES))))
                        added += _add_keys(b, totals[i * _SUMS : (i + 1) * _SUMS], code, factors)
                    return added

                begin = [filled(INTS, 0)] * (rows * _SUMS)
                totals = loop_of(b, c64(0), b.sdiv(dim, c64(4)), 1, begin, of_quad)
                scale = emit.load(b.add(scales, skip), token)
                for i in range(rows):
                    if HAS_BYTE_DOT:
                        whole = b.add(b.shl(totals[2 * i], filled(INTS, 7)), totals[2 * i + 1])
                        whole = b.sub(whole, _splat(b, b.shl(sums[i], ir.Constant(I32, 7))))
                    else:
                        whole = totals[i]
                    score = b.fmul(b.sitofp(whole, emit.float), b.fmul(emit.splat(unit[i]), scale))
                    emit.store(score, b.add(places, b.mul(stride, c64(i))), token)
                return []

            loop_of(b, c64(0), page, LANES, [], of_tokens)
            return []

        loop_of(b, c64(0), pages, 1, [], of_page)
        return ctx.get_dummy_value()

    @intrinsic
    def scores(typingctx, quads, apart, units, ids, pages, nbytes, codes, scales, dim, page, ahead, out, stride):  # type: ignore[no-untyped-def]
        return types.void(*(_A,) * 10, PAGES_AHEAD, _A, _A), codegen

    made: Callable[..., Any] = scores
    return made


def _splat(b: Any, value: Value) -> Value:
    undefined = ir.Constant(INTS, ir.Undefined)
    first = b.insert_element(undefined, value, ir.Constant(I32, 0))
    return b.shuffle_vector(first, undefined, filled(INTS, 0))


def make_sums(rows: int, in_a_byte: int) -> Callable[..., Any]:
    """Return sums(quads, stride, units, ids, pages, bytes, codes, dim, page, ahead, out, apart):
    out[i, :] += weights i . values.

    `quads`: rounded weights of the tokens of all pages, rows `stride` bytes apart; `units`: for each row the unit and a
    number that is added to every sum, both fp32. `codes` of one head in a page: [page / 4, dim / in_a_byte, 4] bytes;
    two codes in a byte are `dim / 2` numbers apart, the first in its lower half. `out`: fp32 [rows, dim], rows `apart`
    bytes from each other. Meanwhile the same number of pages `ahead` is prefetched (`PAGES_AHEAD`).
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        quads, stride, units, ids, pages, page_bytes, codes, dim, page, ahead, out, apart = args
        emit, one = Emitter(b, LANES), Emitter(b, 1)
        own = [b.add(quads, b.mul(stride, c64(i))) for i in range(rows)]
        unit, added_to_all = ([emit.splat(one.load(units, c64(2 * i + k))) for i in range(rows)] for k in (0, 1))
        count, width = b.sdiv(page, c64(4)), b.sdiv(dim, c64(in_a_byte))
        done: Value = c64(0)
        for vectors in (2, 1):
            if vectors < in_a_byte:
                break
            loads = vectors // in_a_byte
            step = loads * LANES
            end = b.add(done, b.mul(b.sdiv(b.sub(width, done), c64(step)), c64(step)))

            def of_dims(at: Value, _: list[Value], vectors: int = vectors, loads: int = loads) -> list[Value]:
                skip_dims = b.mul(at, c64(4))

                def of_page(j: Value, totals: list[Value]) -> list[Value]:
                    first = b.add(b.add(codes, page_offset(b, ids, j, page_bytes)), skip_dims)
                    coming = b.add(page_ahead(b, ahead, j, page_bytes), skip_dims)
                    taken = b.mul(b.mul(j, count), c64(QUAD_BYTES))

                    def of_quad(quad: Value, totals: list[Value]) -> list[Value]:
                        line = b.mul(quad, b.mul(width, c64(4)))
                        held = [load_vector(b, b.add(first, b.add(line, c64(_VECTOR * v))), INTS) for v in range(loads)]
                        code = [part for loaded in held for part in _codes(b, loaded, in_a_byte)]
                        for v in range(0, loads * _VECTOR, _LINE):
                            emit.fetch(b.add(coming, b.add(line, c64(v))))
                        added: list[Value] = []
                        for i in range(rows):
                            factors = _factors(b, b.add(own[i], b.add(taken, b.mul(quad, c64(QUAD_BYTES)))))
                            for v in range(vectors):
                                p = (i * vectors + v) * _SUMS
                                added += _add_values(b, totals[p : p + _SUMS], code[v], factors)
                        return added

                    return loop_of(b, c64(0), count, 1, totals, of_quad)

                begin = [filled(INTS, 0)] * (rows * vectors * _SUMS)
                totals = loop_of(b, c64(0), pages, 1, begin, of_page)
                for i in range(rows):
                    row = b.add(out, b.mul(apart, c64(i)))
                    for v in range(vectors):
                        p, part = (i * vectors + v) * _SUMS, v % in_a_byte
                        place = b.add(b.add(at, c64(v // in_a_byte * LANES)), b.mul(width, c64(part)))
                        whole = totals[p]
                        if HAS_BYTE_DOT:
                            whole = b.add(b.shl(whole, filled(INTS, 8)), totals[p + 1])
                        held = b.fadd(emit.load(row, place), added_to_all[i])
                        emit.store(emit.fma(unit[i], b.sitofp(whole, emit.float), held), row, place)
                return []

            loop_of(b, done, end, step, [], of_dims)
            done = end
        return ctx.get_dummy_value()

    @intrinsic
    def sums(typingctx, quads, stride, units, ids, pages, nbytes, codes, dim, page, ahead, out, apart):  # type: ignore[no-untyped-def]
        return types.void(*(_A,) * 9, PAGES_AHEAD, _A, _A), codegen

    made: Callable[..., Any] = sums
    return made


def _codes(b: Any, loaded: Value, in_a_byte: int) -> list[Value]:
    """Return the codes of loaded bytes as vectors of bytes; with two codes in a byte, the lower ones first."""
    if in_a_byte == 1:
        return [loaded]
    mask = filled(INTS, 0x0F0F0F0F)
    return [b.and_(loaded, mask), b.and_(b.lshr(loaded, filled(INTS, 4)), mask)]
