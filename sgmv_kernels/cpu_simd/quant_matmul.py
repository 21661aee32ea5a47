"""Define vector functions of the quantized linears for Numba: rounding of activations, unpacking of codes, products.

Addresses and strides are int64, in bytes. A block is 32 neighbours along H; its unpacked codes are `LINES` lines of 64
bytes (`cpu_simd.quant_ir`).
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sgmv_kernels.cpu_simd.quant_ir import (
    BYTES,
    INTS,
    LINES,
    VECTORS,
    WORDS,
    ByteDot,
    Dot,
    SmallDot,
    WordDot,
    filled,
    load_vector,
    splat_int,
    store_vector,
)
from sgmv_kernels.cpu_simd.vector_ir import I32, LANES, Emitter, Value, c64, loop_of
from sgmv_kernels.formats.adapter_panels import CODE_BLOCK, TILE

LEVELS = 127
LINE, FACTORS = 4 * TILE, 8 * TILE
"""Bytes of a line, and of a block's scales and minima, fp32."""
FETCH_BYTES = 2048
"""Bytes that codes are prefetched ahead of the unpacked ones."""
_A = types.int64
_I8, _I16 = ir.IntType(8), ir.IntType(16)
_VECTOR = LINE // VECTORS


@intrinsic
def round_block(typingctx, x, codes, unit_sum, size):  # type: ignore[no-untyped-def]
    """Round 32 fp32 numbers to whole multiples of a unit, 127 for the largest magnitude; store unit and unit * sum.

    `codes`: int8 in order; where `size` is an int16, int16 in the order 0 2 1 3 of every four, which is that of
    `widen_signed`. Numbers that are none, or infinite, make the unit NaN.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, codes, unit_sum = args[:3]
        emit, one = Emitter(b, LANES), Emitter(b, 1)
        parts = [emit.load(x, c64(i)) for i in range(0, CODE_BLOCK, LANES)]
        sizes = [emit.call("fabs", part) for part in parts]
        largest = sizes[0]
        for size in sizes[1:]:
            largest = emit.call("maxnum", largest, size)
        largest, total = emit.max(largest), emit.sum(emit.total(sizes))
        finite = b.fcmp_ordered("<", total, one.const(float("inf")))
        some = b.and_(finite, b.fcmp_ordered(">", largest, one.const(1e-30)))
        factor = b.select(some, b.fdiv(one.const(float(LEVELS)), largest), one.const(0.0))
        unit = b.fmul(largest, one.const(1 / LEVELS))
        unit = b.select(finite, b.select(some, unit, one.const(0.0)), one.const(float("nan")))
        whole = []
        for part in parts:
            # Infinity times 0 is NaN, which cannot be converted to an integer.
            scaled = b.fmul(part, emit.splat(factor))
            scaled = b.select(b.fcmp_ordered("ord", scaled, scaled), scaled, emit.const(0.0))
            whole.append(b.fptosi(emit.call("rint", scaled), INTS))
        total_int = whole[0]
        for part in whole[1:]:
            total_int = b.add(total_int, part)
        total_float = b.sitofp(total_int, emit.float)
        one.store(unit, unit_sum, c64(0))
        one.store(b.fmul(unit, emit.sum(total_float)), unit_sum, c64(1))
        for i, part in enumerate(whole):
            if sig.args[3] == types.int16:
                order = [4 * q + k for q in range(LANES // 4) for k in (0, 2, 1, 3)]
                mask = ir.Constant(ir.VectorType(I32, LANES), order)
                words = b.trunc(b.shuffle_vector(part, part, mask), ir.VectorType(_I16, LANES))
                store_vector(b, words, b.add(codes, c64(2 * i * LANES)))
            else:
                store_vector(b, b.trunc(part, ir.VectorType(_I8, LANES)), b.add(codes, c64(i * LANES)))
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A, size), codegen


@intrinsic
def unpack_nibbles(typingctx, source, lines, out):  # type: ignore[no-untyped-def]
    """Unpack lines of two codes a byte: low halves to lines 0 to n - 1, high halves to n to 2n - 1."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        source, lines, out = args
        size = b.mul(lines, c64(LINE))

        def body(at: Value, state: list[Value]) -> list[Value]:
            place = b.add(source, at)
            Emitter(b, LANES).fetch(b.add(place, c64(FETCH_BYTES)))
            both = load_vector(b, place, WORDS)
            low = b.and_(both, filled(WORDS, 0x0F0F))
            high = b.and_(b.lshr(both, filled(WORDS, 4)), filled(WORDS, 0x0F0F))
            store_vector(b, low, b.add(out, at))
            store_vector(b, high, b.add(b.add(out, size), at))
            return state

        loop_of(b, c64(0), size, _VECTOR, [], body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A), codegen


@intrinsic
def unpack_sevens(typingctx, source, out):  # type: ignore[no-untyped-def]
    """Unpack seven lines of 7-bit pairs, an eighth in their top bits, to sixteen lines: pair = 11 * first + second."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        source, out = args
        for v in range(VECTORS):
            stored = [load_vector(b, b.add(source, c64(LINE * i + _VECTOR * v)), BYTES) for i in range(7)]
            pairs = [b.and_(line, filled(BYTES, 0x7F)) for line in stored]
            last = filled(BYTES, 0)
            for i, line in enumerate(stored):
                top = b.and_(b.lshr(b.bitcast(line, WORDS), filled(WORDS, 7)), filled(WORDS, 0x0101))
                last = b.or_(last, b.bitcast(b.shl(top, filled(WORDS, i)), BYTES))
            for i, pair in enumerate([*pairs, last]):
                first = b.udiv(pair, filled(BYTES, 11))
                double = b.add(first, first)
                eightfold = b.bitcast(b.shl(b.bitcast(double, WORDS), filled(WORDS, 2)), BYTES)
                second = b.sub(b.sub(b.sub(pair, first), double), eightfold)
                store_vector(b, first, b.add(out, c64(LINE * i + _VECTOR * v)))
                store_vector(b, second, b.add(out, c64(LINE * (i + 8) + _VECTOR * v)))
        return ctx.get_dummy_value()

    return types.void(_A, _A), codegen


@intrinsic
def unpack_signed(typingctx, source, lines, out):  # type: ignore[no-untyped-def]
    """Turn lines of int8 into lines of unsigned bytes by adding 128."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        source, lines, out = args

        def body(at: Value, state: list[Value]) -> list[Value]:
            value = load_vector(b, b.add(source, at), WORDS)
            store_vector(b, b.xor(value, filled(WORDS, 0x8080)), b.add(out, at))
            return state

        loop_of(b, c64(0), b.mul(lines, c64(LINE)), _VECTOR, [], body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A), codegen


@intrinsic
def widen_signed(typingctx, source, lines, out):  # type: ignore[no-untyped-def]
    """Turn lines of int8 into pairs of lines of int16: every first and third of four, then every second and fourth."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        source, lines, out = args

        def body(at: Value, state: list[Value]) -> list[Value]:
            for v in range(VECTORS):
                place = b.add(source, b.add(at, c64(_VECTOR * v)))
                Emitter(b, LANES).fetch(b.add(place, c64(FETCH_BYTES)))
                value = load_vector(b, place, WORDS)
                even = b.ashr(b.shl(value, filled(WORDS, 8)), filled(WORDS, 8))
                target = b.add(out, b.add(b.mul(at, c64(2)), c64(_VECTOR * v)))
                store_vector(b, even, target)
                store_vector(b, b.ashr(value, filled(WORDS, 8)), b.add(target, c64(LINE)))
            return state

        loop_of(b, c64(0), b.mul(lines, c64(LINE)), LINE, [], body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A), codegen


@intrinsic
def begin_tile(typingctx, bias, y):  # type: ignore[no-untyped-def]
    """Start a row of a tile with the bias, or with 0 where there is no address."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        bias, y = args
        emit = Emitter(b, LANES)
        for v in range(VECTORS):
            emit.store(emit.const(0.0), y, c64(v * LANES))
        with b.if_then(b.icmp_signed("!=", bias, c64(0))):
            for v in range(VECTORS):
                emit.store(emit.load(bias, c64(v * LANES)), y, c64(v * LANES))
        return ctx.get_dummy_value()

    return types.void(_A, _A), codegen


@intrinsic
def put_factors(typingctx, scales, minima, out, times):  # type: ignore[no-untyped-def]
    """Convert a tile's fp16 scales and minima (0: none; 1: -128 scales) to fp32, for `times` blocks."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        scales, minima, out, times = args
        emit = Emitter(b, LANES)
        first, second = ([cgutils.alloca_once(b, emit.float) for _ in range(VECTORS)] for _ in range(2))
        for v in range(VECTORS):
            scale = emit.load_kind(scales, c64(v * LANES), types.int16)
            b.store(scale, first[v])
            b.store(b.fmul(scale, emit.const(-128.0)), second[v])
        with b.if_else(b.icmp_signed(">", minima, c64(1))) as (stored, derived):
            with stored:
                for v in range(VECTORS):
                    b.store(emit.load_kind(minima, c64(v * LANES), types.int16), second[v])
            with derived:
                pass

        def body(at: Value, state: list[Value]) -> list[Value]:
            place = b.add(out, b.mul(at, c64(FACTORS)))
            for v in range(VECTORS):
                emit.store(b.load(first[v]), place, c64(v * LANES))
                emit.store(b.load(second[v]), place, c64(TILE + v * LANES))
            return state

        loop_of(b, c64(0), times, 1, [], body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A, _A), codegen


def make_product(rows: int, kind: str) -> Callable[..., Any]:
    """product(x, xs, u, us, codes, factors, blocks, lines, y, ys): y[i, :16] += x[i] @ a tile, for `rows` rows.

    `x`: rounded activations, `xs` bytes from row to row; `u` their units and unit * sum; `codes` and `factors` of the
    tile, unpacked; `y` fp32. kind: "small" codes below 16, "bytes" unsigned, "words" int16 without minima.
    """
    kinds: dict[str, type[Dot]] = {"small": SmallDot, "bytes": ByteDot, "words": WordDot}
    dot = kinds[kind]()
    parts = 2 if kind == "words" else 1

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, xs, u, us, codes, factors, blocks, lines_of_block, y, ys = args
        emit, one = Emitter(b, LANES), Emitter(b, 1)
        x_rows, u_rows, y_rows = (
            [b.add(start, b.mul(stride, c64(i))) for i in range(rows)] for start, stride in ((x, xs), (u, us), (y, ys))
        )

        def body(at: Value, sums: list[Value]) -> list[Value]:
            lines, quads = b.add(codes, b.mul(at, c64(LINES * LINE * parts))), b.mul(at, c64(CODE_BLOCK * parts))

            def line(n: Value, sums: list[Value]) -> list[Value]:
                place = b.add(lines, b.mul(n, c64(LINE)))
                loaded = [load_vector(b, b.add(place, c64(_VECTOR * v)), INTS) for v in range(VECTORS)]
                taken = [splat_int(b, b.add(b.add(row, quads), b.mul(n, c64(4)))) for row in x_rows]
                return [
                    dot.step(b, sums[i * VECTORS + v], loaded[v], quad)
                    for i, quad in enumerate(taken)
                    for v in range(VECTORS)
                ]

            whole = loop_of(b, c64(0), lines_of_block, 1, [dot.begin() for _ in sums], line)
            factor = b.mul(at, c64(2 * TILE))
            scales = [emit.load(factors, b.add(factor, c64(v * LANES))) for v in range(VECTORS)]
            minima = [emit.load(factors, b.add(factor, c64(TILE + v * LANES))) for v in range(VECTORS)]
            results = []
            for i, row in enumerate(u_rows):
                place = b.mul(at, c64(2))
                unit, unit_sum = (emit.splat(one.load(row, b.add(place, c64(k)))) for k in (0, 1))
                for v in range(VECTORS):
                    products = b.sitofp(dot.end(b, whole[i * VECTORS + v]), emit.float)
                    total = emit.fma(unit, b.fmul(products, scales[v]), sums[i * VECTORS + v])
                    results.append(total if kind == "words" else emit.fma(unit_sum, minima[v], total))
            return results

        begin = [emit.load(row, c64(v * LANES)) for row in y_rows for v in range(VECTORS)]
        sums = loop_of(b, c64(0), blocks, 1, begin, body)
        for i, row in enumerate(y_rows):
            for v in range(VECTORS):
                emit.store(sums[i * VECTORS + v], row, c64(v * LANES))
        return ctx.get_dummy_value()

    @intrinsic
    def product(typingctx, x, xs, u, us, codes, factors, blocks, lines, y, ys):  # type: ignore[no-untyped-def]
        return types.void(*(_A,) * 10), codegen

    made: Callable[..., Any] = product
    return made
