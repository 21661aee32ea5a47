"""Regions of launches on the CPU: the Numba kernels with which all threads of a `cpu_runtime.team.Team` run every
launch and wait for each other after it.

A thread that arrives late joins at the current launch, and no launch waits for it before that: another process or the
event loop may have its processor for milliseconds. The thread that opened a region may leave after a launch and come
back later.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sgmv_kernels.cpu_arguments.team import (
    BASE,
    CLOCK,
    COUNT,
    HELPERS,
    ITEM_WORDS,
    ITEMS,
    LEFT,
    NEVER,
    NEW_CLOCK,
    NEW_COUNT,
    NEW_ITEMS,
    NUMBER,
    RELEASED,
    SLEEPER_WORDS,
    SLEEPERS,
    STATE,
    STOP,
    TEAM,
    TICKS,
)
from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.memory_access import i64
from sgmv_kernels.cpu_simd.vector_ir import I32, I64, Value

ARRIVED, JOINED, LAUNCH, OPEN = 1, 1 << 16, 1 << 32, 1 << 62
"""Units of the fields of a state, which count threads that have ended the launch, threads that take part, and launches;
OPEN is added while a region is open."""
SPINS = 20_000
"""Polls, about 100 microseconds, before a waiting thread yields its processor, or one without work sleeps."""
_BYTE = ir.IntType(8).as_pointer()


@intrinsic
def call_kernel(typingctx, kernel, block):  # type: ignore[no-untyped-def]
    """Call kernel(block)."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        function = b.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [_BYTE]).as_pointer())
        b.call(function, [b.inttoptr(args[1], _BYTE)])
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
    """Add to an int64 that threads share, and return its old value."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def swap_shared(typingctx, address, value):  # type: ignore[no-untyped-def]
    """Store an int64 that threads share, and return its old value. All threads see such stores, and the loads after
    them, in the same order."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        return b.atomic_rmw("xchg", b.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def replace_shared(typingctx, address, old, new):  # type: ignore[no-untyped-def]
    """Replace an int64 that threads share if it is `old`; return whether it was replaced."""

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


def _of_semaphore(name: str, what: str) -> Any:
    @intrinsic
    def call(typingctx, semaphore):  # type: ignore[no-untyped-def]
        def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
            function = cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, [_BYTE]), name)
            return b.call(function, [b.inttoptr(args[0], _BYTE)])

        return types.int32(types.int64), codegen

    call.__doc__ = what
    return call


post = _of_semaphore("sem_post", "Let one thread that waits for a semaphore go on, or the next that will.")
wait = _of_semaphore("sem_wait", "Wait for a semaphore; not 0 if a signal has come meanwhile.")


@kernel_part
def _compute(args):  # type: ignore[no-untyped-def]
    """Open a region if there are new items, and take part in it for some ticks."""
    team, num_ticks = args[TEAM], args[TICKS]
    if args[NEW_ITEMS]:
        _open(team, args[NEW_ITEMS], args[NEW_COUNT], args[NEW_CLOCK])
    if num_ticks:
        # A thread must not run a launch twice: it has only one part of the launch's scratch memory.
        wait_for(team + 8 * RELEASED, load_shared(team + 8 * LEFT))
        _take_part(team, ticks() + num_ticks)
    if num_ticks == NEVER:
        wait_for(team + 8 * RELEASED, load_shared(team + 8 * BASE) + load_shared(team + 8 * COUNT))


@kernel_part
def _open(team, items, count, clock):  # type: ignore[no-untyped-def]
    store_shared(team + 8 * ITEMS, items)
    store_shared(team + 8 * COUNT, count)
    store_shared(team + 8 * BASE, load_shared(team + 8 * RELEASED))
    store_shared(team + 8 * CLOCK, clock)
    store_shared(clock, ticks())
    swap_shared(team + 8 * STATE, OPEN)
    _wake(team, np.int64(0))


@kernel_part
def _take_part(team, until):  # type: ignore[no-untyped-def]
    """Run launches with the others until the region is complete, or leave after the first that ends after `until`."""
    state = team + 8 * STATE
    now = add_shared(state, JOINED)
    if now < OPEN:
        return
    # These words change only after every thread that joined has finished its part.
    items, count = load_shared(team + 8 * ITEMS), load_shared(team + 8 * COUNT)
    base, clock = load_shared(team + 8 * BASE), load_shared(team + 8 * CLOCK)
    item, leaves = (now - OPEN) // LAUNCH, False
    while item < count and not leaves:
        call_kernel(i64(items, ITEM_WORDS * item), i64(items, ITEM_WORDS * item + 1))
        item += 1
        leaves = item < count and ticks() >= until
        if leaves:
            store_shared(team + 8 * LEFT, base + item)
        change = -JOINED if leaves else ARRIVED
        now = add_shared(state, change) + change
        joined = now % LAUNCH // JOINED
        then = OPEN + item * LAUNCH + joined * JOINED if item < count else 0
        # If a thread has joined meanwhile, that thread ends the launch.
        if now % JOINED == joined and replace_shared(state, now, then):
            _count_ticks(clock, i64(items, ITEM_WORDS * (item - 1) + 2))
            # Add instead of storing: this thread may be delayed here while others have already ended later launches.
            add_shared(team + 8 * RELEASED, 1)
        elif not leaves:
            wait_for(team + 8 * RELEASED, base + item)


@kernel_part
def wait_for(counter, count):  # type: ignore[no-untyped-def]
    """Wait until other threads have counted this far."""
    spins = 0
    while load_shared(counter) < count:
        spins += 1
        if spins > SPINS:
            yield_processor()


@kernel_part
def _count_ticks(clock, kind):  # type: ignore[no-untyped-def]
    """Add the ticks since the end of the previous launch to those of a kind. The first word of a clock is that end;
    each further word has the ticks of a kind. Only the thread that ends a launch calls this."""
    now, spent = ticks(), clock + 8 * (1 + kind)
    store_shared(spent, load_shared(spent) + now - load_shared(clock))
    store_shared(clock, now)


@kernel_part
def _help(args):  # type: ignore[no-untyped-def]
    """Take part in every region until the team is closed."""
    team, number = args[TEAM], args[NUMBER]
    spins = 0
    while not load_shared(team + 8 * STOP):
        if load_shared(team + 8 * STATE) >= OPEN:
            _wake(team, number)
            _take_part(team, np.int64(NEVER))
            spins = 0
        elif spins < SPINS:
            spins += 1
        else:
            _sleep(team, team + 8 * (SLEEPERS + SLEEPER_WORDS * number))
            spins = 0


@kernel_part
def _wake(team, number):  # type: ignore[no-untyped-def]
    """Wake two threads, which wake two others each."""
    for child in range(2 * number + 1, 2 * number + 3):
        sleeper = team + 8 * (SLEEPERS + SLEEPER_WORDS * child)
        if child <= load_shared(team + 8 * HELPERS) and swap_shared(sleeper, 0):
            post(load_shared(sleeper + 8))


@kernel_part
def _sleep(team, sleeper):  # type: ignore[no-untyped-def]
    """Sleep until a region is opened or the team closed."""
    swap_shared(sleeper, 1)
    has_work = load_shared(team + 8 * STATE) >= OPEN or load_shared(team + 8 * STOP) != 0
    # If the mark is gone, a thread has taken it to wake this one.
    if not has_work or not swap_shared(sleeper, 0):
        while wait(load_shared(sleeper + 8)):
            pass


KERNELS = {"compute": _compute, "help": _help}
