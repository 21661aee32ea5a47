"""Define vector functions for Numba kernels: parts of softmax, norms, SiLU, rotation, single loads and stores.

As in `cpu_simd.matmul`, addresses are int64, vectors fp32, and the order of a sum depends on its length only.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sgmv_kernels.cpu_simd.vector_ir import F32, I32, I64, LANES, Emitter, Value, c64, each, itemsize_of, loop_of

BF16, FP16, FP32, INT8 = np.uint16(0), np.int16(0), np.float32(0), np.int8(0)
"""Numbers that tell a kernel how a matrix is stored, by their types."""

_I8, _I16 = ir.IntType(8), ir.IntType(16)
_A, _F = types.int64, types.float32


@intrinsic
def scaled(typingctx, x, n, factor, out):  # type: ignore[no-untyped-def]
    """Compute out[h] = x[h] * factor for h < n; out may be x."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, factor, out = args

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            emit.store(b.fmul(emit.load(x, at), emit.splat(factor)), out, at)
            return state

        each(b, n, body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _F, _A), codegen


@intrinsic
def fill(typingctx, x, n, value):  # type: ignore[no-untyped-def]
    """Set x[h] = value for h < n. A loop over single numbers would become stores to scattered addresses."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, value = args

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            emit.store(emit.splat(value), x, at)
            return state

        each(b, n, body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _F), codegen


@intrinsic
def row_max(typingctx, x, n):  # type: ignore[no-untyped-def]
    """Return the largest of n numbers that are not NaN, -inf of none."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            return [emit.larger(emit.load(args[0], at), state[0])]

        (wide, first), (one, rest) = each(b, args[1], body, (-math.inf,))
        return one.larger(wide.max(first[0]), rest[0])

    return _F(_A, _A), codegen


@intrinsic
def row_peak(typingctx, x, n):  # type: ignore[no-untyped-def]
    """Return the largest of n numbers, NaN if one of them is NaN or infinite."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            value = emit.load(args[0], at)
            return [emit.larger(value, state[0]), emit.fma(value, emit.const(0.0), state[1])]

        (wide, (first, nothing)), (one, (rest, none)) = each(b, args[1], body, (-math.inf, 0.0))
        return b.fadd(one.larger(wide.max(first), rest), b.fadd(wide.sum(nothing), none))

    return _F(_A, _A), codegen


@intrinsic
def exp_sum(typingctx, x, n, maximum):  # type: ignore[no-untyped-def]
    """Replace x[h], which is not above the maximum, by exp(x[h] - maximum), and return the sum."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            power = emit.decay(b.fsub(emit.load(args[0], at), emit.splat(args[2])))
            emit.store(power, args[0], at)
            return [b.fadd(state[0], power)]

        (wide, first), (_, rest) = each(b, args[1], body, (0.0,))
        return b.fadd(wide.sum(first[0]), rest[0])

    return _F(_A, _A, _F), codegen


@intrinsic
def add_square_sum(typingctx, x, delta, n):  # type: ignore[no-untyped-def]
    """Add delta[h] to x[h] for h < n if delta is an address and not 0; returns the sum of squares of x."""

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
def row_sum(typingctx, x, n):  # type: ignore[no-untyped-def]
    """Return the sum of n numbers."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            return [b.fadd(state[0], emit.load(args[0], at))]

        (wide, first), (_, rest) = each(b, args[1], body, (0.0,))
        return b.fadd(wide.sum(first[0]), rest[0])

    return _F(_A, _A), codegen


@intrinsic
def centered(typingctx, x, mean, n, out):  # type: ignore[no-untyped-def]
    """Compute out[h] = x[h] - mean for h < n; returns the sum of squares of out."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, mean, n, out = args

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            value = b.fsub(emit.load(x, at), emit.splat(mean))
            emit.store(value, out, at)
            return [emit.fma(value, value, state[0])]

        (wide, first), (_, rest) = each(b, n, body, (0.0,))
        return b.fadd(wide.sum(first[0]), rest[0])

    return _F(_A, _F, _A, _A), codegen


@intrinsic
def add_weighted(typingctx, x, delta, n, factor):  # type: ignore[no-untyped-def]
    """Add factor * delta[h] to x[h] for h < n."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, delta, n, factor = args

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            emit.store(emit.fma(emit.load(delta, at), emit.splat(factor), emit.load(x, at)), x, at)
            return state

        each(b, n, body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A, _F), codegen


@intrinsic
def weighted(typingctx, x, weight, n, factor, out):  # type: ignore[no-untyped-def]
    """Compute out[h] = x[h] * factor * weight[h] for h < n."""

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
    """Compute out[h] = gate[h] / (1 + exp(-gate[h])) * up[h] for h < n."""

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
def gelu_times(typingctx, gate, up, n, out):  # type: ignore[no-untyped-def]
    """Compute out[h] = gelu(gate[h]) * up[h] for h < n; 0.5 (1 + tanh z) is 1 / (1 + exp(-2 z))."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        gate, up, n, out = args
        twice = 2 * math.sqrt(2 / math.pi)

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            g = emit.load(gate, at)
            cubic = emit.fma(b.fmul(g, g), emit.const(-0.044715 * twice), emit.const(-twice))
            total = b.fadd(emit.const(1.0), emit.exp(b.fmul(g, cubic)))
            emit.store(b.fmul(b.fdiv(g, total), emit.load(up, at)), out, at)
            return state

        each(b, n, body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A, _A), codegen


@intrinsic
def gelu_of(typingctx, x, n, out):  # type: ignore[no-untyped-def]
    """Compute out[h] = x[h] (1 + erf(x[h] / sqrt 2)) / 2 for h < n; erf to 1.5e-7 (Abramowitz and Stegun 7.1.26)."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, out = args

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            value = emit.load(x, at)
            size = b.fmul(emit.call("fabs", value), emit.const(math.sqrt(0.5)))
            one = emit.const(1.0)
            t = b.fdiv(one, emit.fma(size, emit.const(0.3275911), one))
            poly = emit.const(1.061405429)
            for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
                poly = emit.fma(poly, t, emit.const(factor))
            power = emit.exp(b.fneg(b.fmul(size, size)))
            tail = b.fmul(b.fmul(b.fmul(poly, t), power), emit.const(0.5))
            share = b.select(b.fcmp_ordered("<", value, emit.const(0.0)), tail, b.fsub(one, tail))
            emit.store(b.fmul(value, share), out, at)
            return state

        each(b, n, body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A), codegen


@intrinsic
def sloped(typingctx, x, n, slope, first):  # type: ignore[no-untyped-def]
    """Add slope * (first + h) to x[h] for h < n; the sums of whole numbers are exact below 2^24."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, slope, first = args

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            lanes = [float(lane) for lane in range(emit.lanes)]
            steps = emit.const(0.0) if emit.lanes == 1 else ir.Constant(emit.float, lanes)
            distance = b.fadd(emit.splat(b.sitofp(b.add(first, at), F32)), steps)
            emit.store(emit.fma(emit.splat(slope), distance, emit.load(x, at)), x, at)
            return state

        each(b, n, body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _F, _A), codegen


@intrinsic
def capped(typingctx, x, n, cap):  # type: ignore[no-untyped-def]
    """Replace x[h] by cap * tanh(x[h] / cap) for h < n."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, cap = args

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            wide = emit.splat(cap)
            emit.store(b.fmul(emit.tanh(b.fdiv(emit.load(x, at), wide)), wide), x, at)
            return state

        each(b, n, body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _F), codegen


@intrinsic
def rotated(typingctx, x, cos, sin, half, out):  # type: ignore[no-untyped-def]
    """Rotate to (x1 cos - x2 sin, x2 cos + x1 sin), x1 the first `half` numbers of x, x2 the next; out may be x."""

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
def keep_below(typingctx, x, n, limit):  # type: ignore[no-untyped-def]
    """Replace those of n numbers by 0 that are NaN, or not between -limit and limit; returns 0 if there are none."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, limit = args

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            value = emit.load(x, at)
            is_kept = b.fcmp_ordered("<", emit.call("fabs", value), emit.splat(limit))
            emit.store(b.select(is_kept, value, emit.const(0.0)), x, at)
            return [b.select(is_kept, state[0], emit.const(1.0))]

        (wide, many), (_, rest) = each(b, n, body, (0.0,))
        return b.fadd(wide.sum(many[0]), rest[0])

    return _F(_A, _A, _F), codegen


@intrinsic
def put_kind(typingctx, address, index, value, kind):  # type: ignore[no-untyped-def]
    """Store one number as `kind`, rounded to nearest even."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        one = Emitter(b, 1)
        _put(b, one.narrow(args[2], sig.args[3]), one.at(args[0], args[1], itemsize_of(sig.args[3]), _I8))
        return ctx.get_dummy_value()

    return types.void(_A, _A, _F, kind), codegen


@intrinsic
def put_row(typingctx, x, n, out, kind):  # type: ignore[no-untyped-def]
    """Store n numbers at x as `kind`, rounded to nearest even, one after another."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, out = args[:3]
        kind = sig.args[3]

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            _put(b, emit.narrow(emit.load(x, at), kind), emit.at(out, at, itemsize_of(kind), _I8))
            return state

        each(b, n, body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A, kind), codegen


@intrinsic
def put_column(typingctx, x, n, out, stride, kind):  # type: ignore[no-untyped-def]
    """Store n numbers at x as `kind`, rounded to nearest even, `stride` bytes from each other."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, n, out, stride = args[:4]

        def body(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            numbers = emit.narrow(emit.load(x, at), sig.args[4])
            for lane in range(emit.lanes):
                place = b.add(out, b.mul(b.add(at, c64(lane)), stride))
                one = numbers if emit.lanes == 1 else b.extract_element(numbers, ir.Constant(I32, lane))
                _put(b, one, b.inttoptr(place, _I8.as_pointer()))
            return state

        each(b, n, body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A, _A, kind), codegen


def _put(b: Any, value: Value, place: Value) -> None:
    """Store numbers at a place of any alignment."""
    b.store(value, b.bitcast(place, value.type.as_pointer()), align=1)


@intrinsic
def copy_number(typingctx, source, at, target, to, kind):  # type: ignore[no-untyped-def]
    """Copy number `at` of a matrix to place `to` of another, bit for bit."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        size, one = itemsize_of(sig.args[4]), Emitter(b, 1)
        whole = ir.IntType(8 * size)
        number = b.load(one.at(args[0], args[1], size, whole), align=size)
        b.store(number, one.at(args[2], args[3], size, whole), align=size)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A, _A, kind), codegen


@intrinsic
def read_all(typingctx, address, n):  # type: ignore[no-untyped-def]
    """Read n bytes, a multiple of 256, front to back; returns a value that depends on all of them."""

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
def byte(typingctx, address, index):  # type: ignore[no-untyped-def]
    """Return the unsigned byte at `index`, as int64."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return b.zext(b.load(Emitter(b, 1).at(args[0], args[1], 1, _I8), align=1), I64)

    return types.int64(_A, _A), codegen


@intrinsic
def number(typingctx, address, index, kind):  # type: ignore[no-untyped-def]
    """Return one number of a matrix as fp32."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return Emitter(b, 1).load_kind(args[0], args[1], sig.args[2])

    return _F(_A, _A, kind), codegen


@intrinsic
def i32(typingctx, address, index):  # type: ignore[no-untyped-def]
    """Return the int32 at `index` of a table, as int64."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return b.sext(b.load(Emitter(b, 1).at(args[0], args[1], 4, I32), align=4), I64)

    return types.int64(_A, _A), codegen


@intrinsic
def i64(typingctx, address, index):  # type: ignore[no-untyped-def]
    """Return the int64 at `index` of a table."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return b.load(Emitter(b, 1).at(args[0], args[1], 8, I64), align=8)

    return types.int64(_A, _A), codegen


@intrinsic
def f32(typingctx, address, index):  # type: ignore[no-untyped-def]
    """Return the fp32 number at `index`."""

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
def put_i32(typingctx, address, index, value):  # type: ignore[no-untyped-def]
    """Store an int64 that fits as int32 at `index`."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        b.store(b.trunc(args[2], I32), Emitter(b, 1).at(args[0], args[1], 4, I32), align=4)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A), codegen


@intrinsic
def itemsize(typingctx, kind):  # type: ignore[no-untyped-def]
    """Return the bytes of one number of a kind."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return c64(itemsize_of(sig.args[0]))

    return types.int64(kind), codegen


@intrinsic
def take_next(typingctx, counter):  # type: ignore[no-untyped-def]
    """Take the next number from a counter that all threads share."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), c64(1), "monotonic")

    return types.int64(_A), codegen
