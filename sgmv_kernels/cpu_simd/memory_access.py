"""Loads and stores for Numba kernels: single numbers, rows and columns of any kind, counters shared by threads.

As in `cpu_simd.matmul`, addresses are int64.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sgmv_kernels.cpu_simd.vector_ir import I32, I64, LANES, Emitter, Value, c64, each, itemsize_of, loop_of

BF16, FP16, FP32, INT8 = np.uint16(0), np.int16(0), np.float32(0), np.int8(0)
"""Numbers whose types tell a kernel how a matrix is stored."""

_I8 = ir.IntType(8)
_A, _F = types.int64, types.float32


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
def fetch(typingctx, address):  # type: ignore[no-untyped-def]
    """Prefetch the cache line of an address."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        Emitter(b, LANES).fetch(args[0])
        return ctx.get_dummy_value()

    return types.void(_A), codegen


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
def f64(typingctx, address, index):  # type: ignore[no-untyped-def]
    """Return the fp64 number at `index`."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return b.load(Emitter(b, 1).at(args[0], args[1], 8, ir.DoubleType()), align=8)

    return types.float64(_A, _A), codegen


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
def put_i64(typingctx, address, index, value):  # type: ignore[no-untyped-def]
    """Store an int64 at `index`."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        b.store(args[2], Emitter(b, 1).at(args[0], args[1], 8, I64), align=8)
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
