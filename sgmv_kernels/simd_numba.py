"""Vector functions for Numba kernels: products with bf16, fp16 or fp32 matrices, softmax pieces, norms, SiLU.

Numba's own loops over bf16 reach a quarter of the memory's speed, as LLVM finds no vectors in them; so they are spelled
out (`simd_ir`). All functions take addresses and byte strides as int64; vectors and results are fp32. Every result is
summed in an order that depends on its own length only, so that it is the same whatever is computed beside it.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sgmv_kernels.simd_ir import F32, I32, I64, LANES, Emitter, Value, c64, each, itemsize_of, loop_of

BF16, FP16, FP32 = np.uint16(0), np.int16(0), np.float32(0)
"""Numbers that tell a kernel how a matrix is stored, by their types."""

PAIRS = 2
"""Pairs of vectors that a dot product takes at a time: enough sums to hide the latency of one."""
CACHE_LINE = 64

_I16 = ir.IntType(16)
_A, _F = types.int64, types.float32
Intrinsic = Callable[..., Any]


@intrinsic
def part(typingctx, x, n, out, kind):  # type: ignore[no-untyped-def]
    """out[h] = x[h] for h < n, in the order in which `make_dot` wants a vector beside a matrix of `kind`."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, out = args[:3]
        step = 2 * LANES
        whole = b.mul(b.sdiv(n, c64(step)), c64(step))
        emit, one = Emitter(b, LANES), Emitter(b, 1)

        def pairs(at: Value, _: list[Value]) -> list[Value]:
            second = b.add(at, c64(LANES))
            values = emit.parted(emit.load(x, at), emit.load(x, second), sig.args[3])
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


def make_dot(rows: int, fetch: bool = False) -> Intrinsic:
    """dot(x, xs, a, n, out, os, ahead, kind): out[i] = sum over h < n of x[i, h] * a[h], for `rows` rows of x, fp32.

    `xs` and `os` are the bytes from row to row; x in the order of `part`. `a`, of `kind`, is read front to back: one
    stream reaches the memory's speed, eight rows of a matrix side by side half of it. With `fetch`, as many bytes as a
    has are fetched into the cache from `ahead` on meanwhile.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, xs, a, n, out, os, ahead = args[:7]
        kind = sig.args[7]
        size = itemsize_of(kind)
        x_rows = [b.add(x, b.mul(xs, c64(i))) for i in range(rows)]
        begin: Value = c64(0)
        totals: list[Value] = []
        for lanes, unroll in ((LANES, 2 * PAIRS), (LANES, 2), (1, 1)):
            emit, step = Emitter(b, lanes), lanes * unroll
            end = b.add(begin, b.mul(b.sdiv(b.sub(n, begin), c64(step)), c64(step)))

            def body(at: Value, sums: list[Value], emit: Emitter = emit, unroll: int = unroll) -> list[Value]:
                for line in range(0, unroll * emit.lanes * size if fetch and unroll > 2 else 0, CACHE_LINE):
                    emit.fetch(b.add(b.add(ahead, b.mul(at, c64(size))), c64(line)))
                places = [b.add(at, c64(u * emit.lanes)) for u in range(unroll)]
                if unroll == 1:
                    av = [emit.load_kind(a, at, kind)]
                else:
                    av = [v for place in places[::2] for v in emit.load_pair(a, place, kind)]
                return [
                    emit.fma(av[u], emit.load(row, place), sums[i * unroll + u])
                    for i, row in enumerate(x_rows)
                    for u, place in enumerate(places)
                ]

            sums = loop_of(b, begin, end, step, [emit.const(0.0)] * (rows * unroll), body)
            parts = [emit.sum(emit.total(sums[i * unroll : (i + 1) * unroll])) for i in range(rows)]
            totals = [b.fadd(t, p) for t, p in zip(totals, parts, strict=True)] if totals else parts
            begin = end
        for i, total in enumerate(totals):
            Emitter(b, 1).store(total, b.add(out, b.mul(os, c64(i))), c64(0))
        return ctx.get_dummy_value()

    @intrinsic
    def dot(typingctx, x, xs, a, n, out, os, ahead, kind):  # type: ignore[no-untyped-def]
        return types.void(_A, _A, _A, _A, _A, _A, _A, kind), codegen

    made: Intrinsic = dot
    return made


def make_mul(rows: int, pairs: int, add: bool, fetch: bool = False, parted: bool = False) -> Intrinsic:
    """mul(a, as_, n, m, ms, columns, c, cs, ahead, kind): c[i, o] (+)= sum over k < n of a[i, k] * m[k, o].

    i < `rows` rows of a and c (fp32, `as_` and `cs` bytes apart), k < n rows of m (of `kind`, `ms` bytes apart), o <
    columns, taken `pairs` pairs of vectors at a time, then one, then number by number. `add` tells whether c counts, or
    is replaced; `parted`, that c is in the order of `part` and stays so. With `fetch`, as many bytes as m has are
    fetched into the cache from `ahead` on meanwhile.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        a, as_, n, m, ms, columns, c, cs, ahead = args[:9]
        kind = sig.args[9]
        size = itemsize_of(kind)
        a_rows = [b.add(a, b.mul(as_, c64(i))) for i in range(rows)]
        c_rows = [b.add(c, b.mul(cs, c64(i))) for i in range(rows)]
        done: Value = c64(0)
        for lanes, width in dict.fromkeys(((LANES, 2 * pairs), (LANES, 2), (1, 1))):
            emit, step = Emitter(b, lanes), lanes * width
            end = b.add(done, b.mul(b.sdiv(b.sub(columns, done), c64(step)), c64(step)))

            def tile(
                at: Value, _: list[Value], emit: Emitter = emit, width: int = width, step: int = step
            ) -> list[Value]:
                places = [b.add(at, c64(v * emit.lanes)) for v in range(width)]
                coming = b.add(ahead, b.mul(b.mul(at, n), c64(size)))

                def body(k: Value, sums: list[Value]) -> list[Value]:
                    if fetch and emit.lanes > 1:
                        for line in range(0, step * size, CACHE_LINE):
                            emit.fetch(b.add(coming, b.add(b.mul(k, c64(step * size)), c64(line))))
                    row = b.add(m, b.mul(k, ms))
                    if width == 1:
                        mv = [emit.load_kind(row, at, kind)]
                    else:
                        mv = [v for place in places[::2] for v in emit.load_pair(row, place, kind)]
                    factors = [emit.splat(Emitter(b, 1).load(a_row, k)) for a_row in a_rows]
                    return [emit.fma(mv[v], factors[i], sums[i * width + v]) for i in range(rows) for v in range(width)]

                begin: list[Value] = [emit.const(0.0)] * (rows * width)
                if add:
                    begin = [emit.load(row, place) for row in c_rows for place in places]
                    if width > 1 and not parted:
                        begin = _by_pairs(begin, lambda x, y: emit.parted(x, y, kind))
                sums = loop_of(b, c64(0), n, 1, begin, body)
                if width > 1 and not parted:
                    sums = _by_pairs(sums, lambda x, y: emit.joined(x, y, kind))
                for i, row in enumerate(c_rows):
                    for v, place in enumerate(places):
                        emit.store(sums[i * width + v], row, place)
                return []

            loop_of(b, done, end, step, [], tile)
            done = end
        return ctx.get_dummy_value()

    @intrinsic
    def mul(typingctx, a, as_, n, m, ms, columns, c, cs, ahead, kind):  # type: ignore[no-untyped-def]
        return types.void(_A, _A, _A, _A, _A, _A, _A, _A, _A, kind), codegen

    made: Intrinsic = mul
    return made


def _by_pairs(values: list[Value], change: Callable[[Value, Value], tuple[Value, Value]]) -> list[Value]:
    return [v for first, second in zip(values[::2], values[1::2], strict=True) for v in change(first, second)]


@intrinsic
def unpart(typingctx, x, n, factor, out, kind):  # type: ignore[no-untyped-def]
    """out[h] = x[h] * factor for h < n, x in the order of `part`."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, factor, out = args[:4]
        step = 2 * LANES
        whole = b.mul(b.sdiv(n, c64(step)), c64(step))
        emit, one = Emitter(b, LANES), Emitter(b, 1)
        factors = emit.splat(factor)

        def pairs(at: Value, _: list[Value]) -> list[Value]:
            second = b.add(at, c64(LANES))
            values = emit.joined(emit.load(x, at), emit.load(x, second), sig.args[4])
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


@intrinsic
def scaled(typingctx, x, n, factor, out):  # type: ignore[no-untyped-def]
    """out[h] = x[h] * factor for h < n; out may be x."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, factor, out = args

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            emit.store(b.fmul(emit.load(x, at), emit.splat(factor)), out, at)
            return state

        each(b, n, body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _F, _A), codegen


@intrinsic
def row_max(typingctx, x, n):  # type: ignore[no-untyped-def]
    """The largest of n numbers, -inf of none."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            return [emit.call("maxnum", emit.load(args[0], at), state[0])]

        (wide, first), (one, rest) = each(b, args[1], body, (-math.inf,))
        return one.call("maxnum", wide.max(first[0]), rest[0])

    return _F(_A, _A), codegen


@intrinsic
def exp_sum(typingctx, x, n, maximum):  # type: ignore[no-untyped-def]
    """x[h] = exp(x[h] - maximum) in place; returns the sum."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            power = emit.exp(b.fsub(emit.load(args[0], at), emit.splat(args[2])))
            emit.store(power, args[0], at)
            return [b.fadd(state[0], power)]

        (wide, first), (_, rest) = each(b, args[1], body, (0.0,))
        return b.fadd(wide.sum(first[0]), rest[0])

    return _F(_A, _A, _F), codegen


@intrinsic
def exp_of(typingctx, x):  # type: ignore[no-untyped-def]
    """exp of one number, as `exp_sum` computes it."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return Emitter(b, 1).exp(args[0])

    return _F(_F), codegen


@intrinsic
def add_square_sum(typingctx, x, delta, n):  # type: ignore[no-untyped-def]
    """x[h] += delta[h] for h < n, if delta is an address and not 0; returns the sum of squares of x."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, delta, n = args
        result = cgutils.alloca_once(b, F32)

        def square(added: bool) -> None:
            def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
                value = emit.load(x, at)
                if added:
                    value = b.fadd(value, emit.load(delta, at))
                    emit.store(value, x, at)
                return [emit.fma(value, value, state[0])]

            (wide, first), (_, rest) = each(b, n, body, (0.0,))
            b.store(b.fadd(wide.sum(first[0]), rest[0]), result)

        with b.if_else(b.icmp_signed("!=", delta, c64(0))) as (then, otherwise):
            with then:
                square(True)
            with otherwise:
                square(False)
        return b.load(result)

    return _F(_A, _A, _A), codegen


@intrinsic
def weighted(typingctx, x, weight, n, factor, out):  # type: ignore[no-untyped-def]
    """out[h] = x[h] * factor * weight[h] for h < n."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, weight, n, factor, out = args

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            value = b.fmul(emit.load(x, at), emit.splat(factor))
            emit.store(b.fmul(value, emit.load(weight, at)), out, at)
            return state

        each(b, n, body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A, _F, _A), codegen


@intrinsic
def silu_times(typingctx, gate, up, n, out):  # type: ignore[no-untyped-def]
    """out[h] = gate[h] / (1 + exp(-gate[h])) * up[h] for h < n."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        gate, up, n, out = args

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            g = emit.load(gate, at)
            total = b.fadd(emit.const(1.0), emit.exp(b.fneg(g)))
            emit.store(b.fmul(b.fdiv(g, total), emit.load(up, at)), out, at)
            return state

        each(b, n, body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A, _A), codegen


@intrinsic
def rotated(typingctx, x, cos, sin, half, out):  # type: ignore[no-untyped-def]
    """out = (x1 cos - x2 sin, x2 cos + x1 sin), x1 and x2 the halves of x; out may be x."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, cos, sin, half, out = args

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            second = b.add(at, half)
            x1, x2, c, s = emit.load(x, at), emit.load(x, second), emit.load(cos, at), emit.load(sin, at)
            emit.store(b.fsub(b.fmul(x1, c), b.fmul(x2, s)), out, at)
            emit.store(b.fadd(b.fmul(x2, c), b.fmul(x1, s)), out, second)
            return state

        each(b, half, body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A, _A, _A), codegen


@intrinsic
def put_kind(typingctx, address, index, value, kind):  # type: ignore[no-untyped-def]
    """Store one number as `kind`, rounded to nearest even."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        address, index, value = args[:3]
        kind, one = sig.args[3], Emitter(b, 1)
        if kind == types.float32:
            one.store(value, address, index)
        elif kind == types.int16:
            half = ir.HalfType()
            b.store(b.fptrunc(value, half), one.at(address, index, 2, half), align=2)
        else:
            b.store(b.trunc(one.bf16_bits(value), _I16), one.at(address, index, 2, _I16), align=2)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _F, kind), codegen


@intrinsic
def read_all(typingctx, address, n):  # type: ignore[no-untyped-def]
    """Read n bytes, a multiple of 256, front to back; returns some function of them."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        emit = Emitter(b, LANES)
        count = 256 // (4 * LANES)

        def body(at: Value, state: list[Value]) -> list[Value]:
            starts = [b.add(args[0], b.add(at, c64(4 * LANES * i))) for i in range(count)]
            values = [b.load(b.inttoptr(start, emit.int.as_pointer()), align=4) for start in starts]
            return [b.xor(one, other) for one, other in zip(state, values, strict=True)]

        states = loop_of(b, c64(0), args[1], 256, [emit.const_int(0)] * count, body)
        mixed = states[0]
        for state in states[1:]:
            mixed = b.xor(mixed, state)
        return b.sext(b.extract_element(mixed, ir.Constant(I32, 0)), I64)

    return types.int64(_A, _A), codegen


@intrinsic
def i32(typingctx, address, index):  # type: ignore[no-untyped-def]
    """The int32 at `index` of a table, as int64."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return b.sext(b.load(Emitter(b, 1).at(args[0], args[1], 4, I32), align=4), I64)

    return types.int64(_A, _A), codegen


@intrinsic
def i64(typingctx, address, index):  # type: ignore[no-untyped-def]
    """The int64 at `index` of a table."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return b.load(Emitter(b, 1).at(args[0], args[1], 8, I64), align=8)

    return types.int64(_A, _A), codegen


@intrinsic
def f32(typingctx, address, index):  # type: ignore[no-untyped-def]
    """The fp32 number at `index`."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return Emitter(b, 1).load(*args)

    return _F(_A, _A), codegen


@intrinsic
def put_f32(typingctx, address, index, value):  # type: ignore[no-untyped-def]
    """Store an fp32 number at `index`."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        Emitter(b, 1).store(args[2], args[0], args[1])
        return ctx.get_dummy_value()

    return types.void(_A, _A, _F), codegen


@intrinsic
def itemsize(typingctx, kind):  # type: ignore[no-untyped-def]
    """Bytes of one number of a kind."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return c64(itemsize_of(sig.args[0]))

    return types.int64(kind), codegen


@intrinsic
def take_next(typingctx, counter):  # type: ignore[no-untyped-def]
    """Take the next number from a counter that all threads share."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), c64(1), "monotonic")

    return types.int64(_A), codegen
