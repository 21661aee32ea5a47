"""Run a recorded program on the CPU: a Numba kernel in which all threads run every launch and wait for each other after
it.

A thread that comes late joins at the launch that is running, and no launch waits for it before: another process or the
event loop may have its processor for milliseconds.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from sgmv_kernels.cpu_runtime.launch import BARRIER, CLOCK, ITEM_WORDS, ITEMS, NUM_ITEMS
from sgmv_kernels.cpu_simd.elementwise import i64
from sgmv_kernels.cpu_simd.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.vector_ir import I32, I64, Value

STATE, RELEASED = 0, 8
"""Indices of the barrier's words, on a cache line each: the running launch with its threads, and the number of launches
that are over."""
ARRIVED, JOINED, LAUNCH = 1, 1 << 16, 1 << 32
"""Units of the state's fields, which count threads that have ended the launch, threads that take part, and launches."""
SPINS = 20_000
"""Polls of the barrier before a thread yields its processor, about 100 microseconds."""
_NUM_ARGS = CLOCK + 1


@intrinsic
def call_kernel(typingctx, kernel, block):  # type: ignore[no-untyped-def]
    """Call kernel(block)."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        byte = ir.IntType(8).as_pointer()
        function = b.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [byte]).as_pointer())
        b.call(function, [b.inttoptr(args[1], byte)])
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def load_shared(typingctx, address):  # type: ignore[no-untyped-def]
    """Load an int64 that another thread writes; its earlier writes are visible afterwards."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_shared(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Store an int64 for `load_shared` of other threads."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        b.store_atomic(args[1], b.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return ctx.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def add_shared(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Add to an int64 that threads share, and return what it was."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def replace_shared(typingctx, address, old, new):  # type: ignore[no-untyped-def]
    """Replace an int64 that threads share, if it is `old`; return whether it was."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        place = b.inttoptr(args[0], I64.as_pointer())
        return b.extract_value(b.cmpxchg(place, args[1], args[2], "acq_rel", "acquire"), 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def ticks(typingctx):  # type: ignore[no-untyped-def]
    """Return the processor's clock."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        function = cgutils.get_or_insert_function(b.module, ir.FunctionType(I64, []), "llvm.readcyclecounter")
        return b.call(function, [])

    return types.int64(), codegen


@intrinsic
def yield_processor(typingctx):  # type: ignore[no-untyped-def]
    """Yield the processor to another thread of the system."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, []), "sched_yield"), [])
        return ctx.get_dummy_value()

    return types.void(), codegen


def run_items(raw: Any) -> None:
    _run_items(carray(raw, (_NUM_ARGS,), np.int64))


@kernel_part
def _run_items(args):  # type: ignore[no-untyped-def]
    state, released, count = args[BARRIER] + 8 * STATE, args[BARRIER] + 8 * RELEASED, args[NUM_ITEMS]
    now = add_shared(state, JOINED)
    if now == 0:
        store_shared(args[CLOCK], ticks())
    item = now // LAUNCH
    while item < count:
        kernel, block = i64(args[ITEMS], ITEM_WORDS * item), i64(args[ITEMS], ITEM_WORDS * item + 1)
        call_kernel(kernel, block)
        now = add_shared(state, ARRIVED) + ARRIVED
        item += 1
        joined = now % LAUNCH // JOINED
        # A thread that has joined meanwhile ends the launch instead.
        if now % JOINED == joined and replace_shared(state, now, item * LAUNCH + joined * JOINED):
            _count_ticks(args[CLOCK], i64(args[ITEMS], ITEM_WORDS * (item - 1) + 2))
            store_shared(released, item)
        else:
            spins = 0
            while load_shared(released) < item:
                spins += 1
                if spins > SPINS:
                    yield_processor()


@kernel_part
def _count_ticks(clock, kind):  # type: ignore[no-untyped-def]
    """Add the ticks since the end of the launch before to those of a kind. Only the thread that ends a launch does."""
    now, spent = ticks(), clock + 8 * (1 + kind)
    store_shared(spent, load_shared(spent) + now - load_shared(clock))
    store_shared(clock, now)
