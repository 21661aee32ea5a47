"""Vector functions of rows for Numba kernels: parts of softmax, norms, gates, rotation.

As in `cpu_simd.matmul`, addresses are int64, vectors fp32, and the order of a sum depends only on its length.
"""

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sgmv_kernels.cpu_simd.vector_ir import F32, Emitter, Value, c64, each, over_row

_A, _F = types.int64, types.float32


@intrinsic
def scaled(typingctx, x, n, factor, out):  # type: ignore[no-untyped-def]
    """Compute out[h] = x[h] * factor for h < n; out may be x."""

    def body(emit: Emitter, at: Value, x: Value, n: Value, factor: Value, out: Value) -> None:
        emit.store(emit.b.fmul(emit.load(x, at), emit.splat(factor)), out, at)

    return types.void(_A, _A, _F, _A), over_row(body, n=1)


@intrinsic
def fill(typingctx, x, n, value):  # type: ignore[no-untyped-def]
    """Set x[h] = value for h < n. LLVM would compile a loop over single numbers to scattered stores."""

    def body(emit: Emitter, at: Value, x: Value, n: Value, value: Value) -> None:
        emit.store(emit.splat(value), x, at)

    return types.void(_A, _A, _F), over_row(body, n=1)


@intrinsic
def row_max(typingctx, x, n):  # type: ignore[no-untyped-def]
    """Return the largest of those of n numbers that are not NaN; -inf if there are none."""

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
    """Replace x[h], which must not exceed the maximum, by exp(x[h] - maximum), and return the sum."""

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
    """Add delta[h] to x[h] for h < n, unless the address `delta` is 0; return the sum of squares of x."""

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

    def body(emit: Emitter, at: Value, x: Value, delta: Value, n: Value, factor: Value) -> None:
        emit.store(emit.fma(emit.load(delta, at), emit.splat(factor), emit.load(x, at)), x, at)

    return types.void(_A, _A, _A, _F), over_row(body, n=2)


@intrinsic
def weighted(typingctx, x, weight, n, factor, out):  # type: ignore[no-untyped-def]
    """Compute out[h] = x[h] * factor * weight[h] for h < n."""

    def body(emit: Emitter, at: Value, x: Value, weight: Value, n: Value, factor: Value, out: Value) -> None:
        b = emit.b
        value = b.fmul(emit.load(x, at), emit.splat(factor))
        emit.store(b.fmul(value, emit.load(weight, at)), out, at)

    return types.void(_A, _A, _A, _F, _A), over_row(body, n=2)


@intrinsic
def silu_times(typingctx, gate, up, n, out):  # type: ignore[no-untyped-def]
    """Compute out[h] = gate[h] / (1 + exp(-gate[h])) * up[h] for h < n."""

    def body(emit: Emitter, at: Value, gate: Value, up: Value, n: Value, out: Value) -> None:
        b = emit.b
        g = emit.load(gate, at)
        total = b.fadd(emit.const(1.0), emit.exp(b.fneg(g)))
        emit.store(b.fmul(b.fdiv(g, total), emit.load(up, at)), out, at)

    return types.void(_A, _A, _A, _A), over_row(body, n=2)


@intrinsic
def gelu_times(typingctx, gate, up, n, out):  # type: ignore[no-untyped-def]
    """Compute out[h] = gelu(gate[h]) * up[h] for h < n; 0.5 (1 + tanh z) is 1 / (1 + exp(-2 z))."""

    twice = 2 * math.sqrt(2 / math.pi)

    def body(emit: Emitter, at: Value, gate: Value, up: Value, n: Value, out: Value) -> None:
        b = emit.b
        g = emit.load(gate, at)
        cubic = emit.fma(b.fmul(g, g), emit.const(-0.044715 * twice), emit.const(-twice))
        total = b.fadd(emit.const(1.0), emit.exp(b.fmul(g, cubic)))
        emit.store(b.fmul(b.fdiv(g, total), emit.load(up, at)), out, at)

    return types.void(_A, _A, _A, _A), over_row(body, n=2)


@intrinsic
def gelu_of(typingctx, x, n, out):  # type: ignore[no-untyped-def]
    """Compute out[h] = x[h] (1 + erf(x[h] / sqrt 2)) / 2 for h < n; erf to 1.5e-7 (Abramowitz and Stegun 7.1.26)."""

    def body(emit: Emitter, at: Value, x: Value, n: Value, out: Value) -> None:
        b = emit.b
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

    return types.void(_A, _A, _A), over_row(body, n=1)


@intrinsic
def sloped(typingctx, x, n, slope, first):  # type: ignore[no-untyped-def]
    """Add slope * (first + h) to x[h] for h < n; sums of integers are exact below 2^24."""

    def body(emit: Emitter, at: Value, x: Value, n: Value, slope: Value, first: Value) -> None:
        b = emit.b
        lanes = [float(lane) for lane in range(emit.lanes)]
        steps = emit.const(0.0) if emit.lanes == 1 else ir.Constant(emit.float, lanes)
        distance = b.fadd(emit.splat(b.sitofp(b.add(first, at), F32)), steps)
        emit.store(emit.fma(emit.splat(slope), distance, emit.load(x, at)), x, at)

    return types.void(_A, _A, _F, _A), over_row(body, n=1)


@intrinsic
def capped(typingctx, x, n, cap):  # type: ignore[no-untyped-def]
    """Replace x[h] by cap * tanh(x[h] / cap) for h < n."""

    def body(emit: Emitter, at: Value, x: Value, n: Value, cap: Value) -> None:
        b = emit.b
        wide = emit.splat(cap)
        emit.store(b.fmul(emit.tanh(b.fdiv(emit.load(x, at), wide)), wide), x, at)

    return types.void(_A, _A, _F), over_row(body, n=1)


@intrinsic
def rotated(typingctx, x, cos, sin, half, out):  # type: ignore[no-untyped-def]
    """Rotate to (x1 cos - x2 sin, x2 cos + x1 sin), x1 the first `half` numbers of x, x2 the next; out may be x."""

    def body(emit: Emitter, at: Value, x: Value, cos: Value, sin: Value, half: Value, out: Value) -> None:
        b = emit.b
        second = b.add(at, half)
        x1, x2, c, s = emit.load(x, at), emit.load(x, second), emit.load(cos, at), emit.load(sin, at)
        emit.store(b.fsub(b.fmul(x1, c), b.fmul(x2, s)), out, at)
        emit.store(b.fadd(b.fmul(x2, c), b.fmul(x1, s)), out, second)

    return types.void(_A, _A, _A, _A, _A), over_row(body, n=3)


@intrinsic
def keep_below(typingctx, x, n, limit):  # type: ignore[no-untyped-def]
    """Replace those of n numbers by 0 that are NaN or not between -limit and limit; return 0 if there are none."""

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
