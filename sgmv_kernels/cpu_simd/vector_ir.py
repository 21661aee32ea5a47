"""LLVM code for vectors of fp32 numbers, the basis of the intrinsics in this package.

LLVM lowers `<8 x float>` to AVX2, AVX-512 or NEON, so that the user's machine needs no compiler except Numba. A matrix
has a *kind* of number, given by a Numba type: uint16 for bf16, int16 for fp16, float32 for fp32, int8 for codes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from sgmv_kernels.cpu_runtime.processor import features

LANES = 16 if features().get("avx512f") else 8
"""fp32 numbers of one vector."""
F32, _F16, _I16, I32, I64 = ir.FloatType(), ir.HalfType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_I8 = ir.IntType(8)
Value = Any


def c64(value: int) -> Value:
    return ir.Constant(I64, value)


class Emitter:
    """Emit arithmetic on `lanes` fp32 numbers at a time; one lane is plain scalar code."""

    def __init__(self, builder: Any, lanes: int) -> None:
        self.b = builder
        self.lanes = lanes
        self.float = self._of(F32)
        self.int = self._of(I32)

    def _of(self, scalar: Any) -> Any:
        return scalar if self.lanes == 1 else ir.VectorType(scalar, self.lanes)

    def const(self, value: float) -> Value:
        return ir.Constant(self.float, value if self.lanes == 1 else [value] * self.lanes)

    def const_int(self, value: int) -> Value:
        return ir.Constant(self.int, value if self.lanes == 1 else [value] * self.lanes)

    def at(self, address: Value, index: Value, itemsize: int, pointee: Any) -> Value:
        return self.b.inttoptr(self.b.add(address, self.b.mul(index, c64(itemsize))), pointee.as_pointer())

    def load(self, address: Value, index: Value) -> Value:
        """Load fp32 numbers from `index` on."""
        return self.b.load(self.at(address, index, 4, self.float), align=4)

    def store(self, value: Value, address: Value, index: Value) -> None:
        self.b.store(value, self.at(address, index, 4, self.float), align=4)

    def load_kind(self, address: Value, index: Value, kind: Any) -> Value:
        """Load numbers of a matrix from `index` on, as fp32. bf16 is the upper half of an fp32: widen and shift."""
        if kind == types.float32:
            return self.load(address, index)
        if kind == types.int8:
            code = self.b.load(self.at(address, index, 1, self._of(_I8)), align=1)
            return self.b.sitofp(self.b.sext(code, self.int), self.float)
        if kind == types.int16:
            half = self.b.load(self.at(address, index, 2, self._of(_F16)), align=2)
            return self.b.fpext(half, self.float)
        half = self.b.load(self.at(address, index, 2, self._of(_I16)), align=2)
        return self.b.bitcast(self.b.shl(self.b.zext(half, self.int), self.const_int(16)), self.float)

    def load_pair(self, address: Value, index: Value, kind: Any) -> tuple[Value, Value]:
        """Load two vectors of a matrix's numbers from `index` on: for bf16 the even and the odd ones, else consecutive
        ones.

        Two bf16 are one int32: a mask gives the odd number and a shift the even one, which takes half the instructions
        of widening each.
        """
        if kind != types.uint16:
            second = self.b.add(index, c64(self.lanes))
            return self.load_kind(address, index, kind), self.load_kind(address, second, kind)
        both = self.b.load(self.at(address, index, 2, self.int), align=2)
        even = self.b.shl(both, self.const_int(16))
        odd = self.b.and_(both, self.const_int(0xFFFF0000))
        return self.b.bitcast(even, self.float), self.b.bitcast(odd, self.float)

    def deinterleaved(self, first: Value, second: Value, kind: Any) -> tuple[Value, Value]:
        """Return two vectors of consecutive numbers in the order of `load_pair`."""
        if kind != types.uint16:
            return first, second
        return self._shuffled(first, second, 0, 2), self._shuffled(first, second, 1, 2)

    def interleaved(self, first: Value, second: Value, kind: Any) -> tuple[Value, Value]:
        """Return two vectors in the order of `load_pair` as consecutive numbers."""
        if kind != types.uint16:
            return first, second
        order = [i // 2 + (i % 2) * self.lanes for i in range(2 * self.lanes)]
        low, high = (ir.Constant(ir.VectorType(I32, self.lanes), o) for o in (order[: self.lanes], order[self.lanes :]))
        return self.b.shuffle_vector(first, second, low), self.b.shuffle_vector(first, second, high)

    def _shuffled(self, first: Value, second: Value, start: int, step: int) -> Value:
        order = list(range(start, 2 * self.lanes, step))
        return self.b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, self.lanes), order))

    def call(self, name: str, *values: Value) -> Value:
        """Call an LLVM intrinsic of fp32 numbers, element by element."""
        suffix = "f32" if self.lanes == 1 else f"v{self.lanes}f32"
        function = ir.FunctionType(self.float, [self.float] * len(values))
        return self.b.call(cgutils.get_or_insert_function(self.b.module, function, f"llvm.{name}.{suffix}"), values)

    def bf16_bits(self, value: Value) -> Value:
        """Round fp32 to the bits of bf16, in the lower half of an int32: nearest, ties to even; NaN stays NaN."""
        b = self.b
        bits = b.bitcast(value, self.int)
        odd = b.and_(b.lshr(bits, self.const_int(16)), self.const_int(1))
        rounded = b.lshr(b.add(bits, b.add(odd, self.const_int(0x7FFF))), self.const_int(16))
        quiet = b.or_(b.lshr(bits, self.const_int(16)), self.const_int(0x40))
        return b.select(b.fcmp_unordered("uno", value, value), quiet, rounded)

    def narrow(self, value: Value, kind: Any) -> Value:
        """Return fp32 numbers as a kind other than codes, rounded to nearest even; bf16 as int16."""
        if kind == types.float32:
            return value
        if kind == types.int16:
            return self.b.fptrunc(value, self._of(_F16))
        return self.b.trunc(self.bf16_bits(value), self._of(_I16))

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        return self.call("fma", x, y, z)

    def larger(self, x: Value, y: Value) -> Value:
        """Return the larger of two numbers, or y if one is NaN: one x86 instruction (LLVM's `maxnum` takes three)."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def splat(self, scalar: Value) -> Value:
        if self.lanes == 1:
            return scalar
        undefined = ir.Constant(self.float, ir.Undefined)
        first = self.b.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, self.lanes), [0] * self.lanes))

    def fold(self, value: Value, combine: Callable[["Emitter", Value, Value], Value]) -> Value:
        """Combine all lanes to one number, halves first, in a fixed order."""
        lanes, emit = self.lanes, self
        while lanes > 1:
            lanes //= 2
            parts = [
                self.b.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, lanes), list(half)))
                for half in (range(lanes), range(lanes, 2 * lanes))
            ]
            if lanes == 1:
                parts = [self.b.extract_element(part, ir.Constant(I32, 0)) for part in parts]
            emit = Emitter(self.b, lanes)
            value = combine(emit, *parts)
        return value

    def total(self, values: list[Value]) -> Value:
        """Return the sum of vectors, first to last."""
        result = values[0]
        for value in values[1:]:
            result = self.b.fadd(result, value)
        return result

    def fetch(self, address: Value) -> None:
        """Prefetch a cache line; any address is valid."""
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        read, near, data = (ir.Constant(I32, value) for value in (0, 2, 1))
        prefetch = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        self.b.call(prefetch, [self.b.inttoptr(address, byte), read, near, data])

    def sum(self, value: Value) -> Value:
        return self.fold(value, lambda emit, x, y: emit.b.fadd(x, y))

    def max(self, value: Value) -> Value:
        """Return the largest of all lanes, which are not NaN."""
        return self.fold(value, lambda emit, x, y: emit.larger(x, y))

    def exp(self, x: Value) -> Value:
        """Return e^x to 2 units in the last place, 0 below -87.3, NaN for NaN (Cephes' expf polynomial)."""
        b = self.b
        before = x
        small = b.fcmp_ordered("<", x, self.const(-87.3))
        x = self.call("maxnum", self.call("minnum", x, self.const(88.7)), self.const(-87.3))
        n = self.call("floor", self.fma(x, self.const(1.4426950408889634), self.const(0.5)))
        y = self._rest_of_power(x, n)
        # 2^127 is the largest power of two, but n is 128 for x = 88.7, so one factor of 2 is applied separately.
        exponent = b.shl(b.add(b.fptosi(n, self.int), self.const_int(126)), self.const_int(23))
        y = b.fmul(b.fmul(y, b.bitcast(exponent, self.float)), self.const(2.0))
        y = b.select(small, self.const(0.0), y)
        return b.select(b.fcmp_unordered("uno", before, before), before, y)

    def _rest_of_power(self, x: Value, n: Value) -> Value:
        """Return e^x / 2^n by a polynomial, where n is the integer nearest to x / ln 2."""
        r = self.fma(n, self.const(2.12194440e-4), self.fma(n, self.const(-0.693359375), x))
        p = self.const(1.9875691500e-4)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.fma(p, r, self.const(c))
        return self.b.fadd(self.fma(self.b.fmul(r, r), p, r), self.const(1.0))

    def decay(self, x: Value) -> Value:
        """Return e^x for x <= 0, to 2 units in the last place, 0 below -87.7; NaN for NaN.

        This takes two thirds of the instructions of `exp`.
        x / ln 2 is rounded to an integer n by adding 1.5 * 2^23 + 127. The lowest bits of that sum are n + 127, the
        exponent bits of 2^n; they are all 0 for n = -127, the smallest possible n.
        """
        b, rounder = self.b, self.const(1.5 * 2**23 + 127)
        x = self.larger(self.const(-88.0), x)
        shifted = self.fma(x, self.const(1.4426950408889634), rounder)
        n = b.fsub(shifted, rounder)
        y = self._rest_of_power(x, n)
        return b.fmul(y, b.bitcast(b.shl(b.bitcast(shifted, self.int), self.const_int(23)), self.float))

    def tanh(self, x: Value) -> Value:
        """Return tanh x to 3 units in the last place, NaN for NaN (Cephes' tanhf: a polynomial near 0, else e^2x)."""
        b = self.b
        size = self.call("fabs", x)
        z = b.fmul(x, x)
        p = self.const(-5.70498872745e-3)
        for c in (2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
            p = self.fma(p, z, self.const(c))
        near = self.fma(b.fmul(p, z), x, x)
        power = b.fadd(self.exp(b.fadd(size, size)), self.const(1.0))
        far = self.call("copysign", b.fsub(self.const(1.0), b.fdiv(self.const(2.0), power)), x)
        return b.select(b.fcmp_ordered("<", size, self.const(0.625)), near, far)


def itemsize_of(kind: Any) -> int:
    return {types.float32: 4, types.int8: 1}.get(kind, 2)


def align_spills(function: Any) -> None:
    """Make LLVM align the stack of a function to cache lines, so that spilled vectors do not cross cache lines.

    LLVM does this by itself only if it knows of the spills before register allocation. The function is not inlined,
    since its callers would not inherit the attribute. Products of eight rows are a sixth faster.
    """
    function.attributes.alignstack = 64
    function.attributes.add("noinline")


def loop_of(
    b: Any, start: Value, end: Value, step: int, state: list[Value], body: Callable[[Value, list[Value]], list[Value]]
) -> list[Value]:
    """Emit `for i in range(start, end, step): state = body(i, state)`; return the last state, in registers."""
    before = b.block
    head, inside, after = (b.append_basic_block(name) for name in ("loop.head", "loop.body", "loop.end"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(I64)
    index.add_incoming(start, before)
    current = [b.phi(value.type) for value in state]
    for phi, value in zip(current, state, strict=True):
        phi.add_incoming(value, before)
    b.cbranch(b.icmp_signed("<", index, end), inside, after)
    b.position_at_end(inside)
    following = body(index, current)
    last = b.block
    index.add_incoming(b.add(index, c64(step)), last)
    for phi, value in zip(current, following, strict=True):
        phi.add_incoming(value, last)
    b.branch(head)
    b.position_at_end(after)
    return current


def each(
    b: Any, n: Value, body: Callable[[Emitter, Value, list[Value]], list[Value]], initial: tuple[float, ...] = ()
) -> list[tuple[Emitter, list[Value]]]:
    """Run `body(emitter, index, state)` over n numbers, whole vectors first, then the rest one by one.

    Returns the emitter and last state of both loops, each of which began with `initial`.
    """
    whole = b.mul(b.sdiv(n, c64(LANES)), c64(LANES))
    states = []
    for lanes, start, end in ((LANES, c64(0), whole), (1, whole, n)):
        emit = Emitter(b, lanes)
        state = [emit.const(value) for value in initial]
        states.append((emit, loop_of(b, start, end, lanes, state, partial(body, emit))))
    return states


def over_row(body: Callable[..., None], n: int) -> Callable[[Any, Any, Any, Sequence[Value]], Value]:
    """Return the codegen of an intrinsic without a result: run `body(emitter, index, *arguments)` as `each` does.

    Args:
        n: index of the argument that has the count of numbers.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Sequence[Value]) -> Value:
        def step(emit: Emitter, at: Value, state: list[Value]) -> list[Value]:
            body(emit, at, *args)
            return state

        each(b, args[n], step)
        return ctx.get_dummy_value()

    return codegen
