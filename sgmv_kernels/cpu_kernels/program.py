"""Run a recorded program on the CPU: a Numba kernel in which all threads run every launch and wait for each other after
it.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from sgmv_kernels.cpu_runtime.launch import BARRIER, CLOCK, GRANTED, ITEM_WORDS, ITEMS, NUM_ITEMS
from sgmv_kernels.cpu_simd.elementwise import i64, take_next
from sgmv_kernels.cpu_simd.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.vector_ir import I32, I64, Value

ARRIVED, RELEASED = 0, 8
"""Indices of the barrier's words, on a cache line each."""
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
def count_threads(typingctx, function):  # type: ignore[no-untyped-def]
    """Call a C function `int f(void)` and return its result."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        count = b.call(b.inttoptr(args[0], ir.FunctionType(I32, []).as_pointer()), [])
        return b.sext(count, I64)

    return types.int64(types.int64), codegen


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
def arrive(typingctx, address):  # type: ignore[no-untyped-def]
    """Count one more thread at the barrier, and return how many arrived before."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), ir.Constant(I64, 1), "acq_rel")

    return types.int64(types.int64), codegen


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
    member = take_next(args.ctypes.data + 8)
    threads = count_threads(args[GRANTED]) if args[GRANTED] else np.int64(1)
    barrier, clock = args[BARRIER], args[CLOCK]
    if member == 0:
        store_shared(clock, ticks())
    for item in range(args[NUM_ITEMS]):
        kernel, block = i64(args[ITEMS], ITEM_WORDS * item), i64(args[ITEMS], ITEM_WORDS * item + 1)
        call_kernel(kernel, block)
        if arrive(barrier + 8 * ARRIVED) == (item + 1) * threads - 1:
            store_shared(barrier + 8 * RELEASED, item + 1)
        else:
            spins = 0
            while load_shared(barrier + 8 * RELEASED) <= item:
                spins += 1
                if spins > SPINS:
                    yield_processor()
        if member == 0:
            store_shared(clock + 8 * (item + 1), ticks())
