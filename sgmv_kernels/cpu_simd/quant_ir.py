"""LLVM code for products of weight codes with rounded activations, with the instructions that the processor has.

A vector holds LANES outputs, with four neighbours along H of each: the order in which x86 and ARM multiply bytes.
Weights are stored in tiles of TILE outputs, so that four neighbours are a line of 64 bytes, one vector or two. Sums of
a block of 32 are integers, so they do not depend on the way of computing them.
"""

from collections.abc import Callable
from typing import Any, Protocol

from llvmlite import ir
from numba.core import cgutils

from sgmv_kernels.cpu_runtime.amx import NEEDED_BY_AMX
from sgmv_kernels.cpu_runtime.processor import IS_ARM, SIGNED_DOT, features
from sgmv_kernels.cpu_simd.vector_ir import I32, LANES, Value
from sgmv_kernels.formats.weight_codes import TILE

VECTORS = TILE // LANES
"""Vectors of a tile's line."""
LINES = 8
"""Lines of a block."""
_WIDE = LANES == 16
_I8, _I16 = ir.IntType(8), ir.IntType(16)
BYTES, WORDS, INTS = (ir.VectorType(kind, n * LANES) for kind, n in ((_I8, 4), (_I16, 2), (I32, 1)))
_FEATURES = features()
HAS_BYTE_DOT = bool(_FEATURES.get("avx512vnni") if _WIDE else _FEATURES.get("avxvnni"))
HAS_AMX = _WIDE and all(_FEATURES.get(name) for name in NEEDED_BY_AMX)
HAS_SIGNED_DOT = bool(_FEATURES.get(SIGNED_DOT))
HAS_PAIR_DOT = bool(_FEATURES.get("avx512bw") if _WIDE else _FEATURES.get("avx2"))


def filled(kind: Any, value: int) -> Value:
    return ir.Constant(kind, [value] * kind.count)


def load_vector(b: Any, address: Value, kind: Any) -> Value:
    """Load a vector at any address."""
    return b.load(b.inttoptr(address, kind.as_pointer()), align=1)


def store_vector(b: Any, value: Value, address: Value) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer()), align=1)


def splat_int(b: Any, address: Value) -> Value:
    """Load the int32 at an address into every lane."""
    undefined = ir.Constant(INTS, ir.Undefined)
    value = b.load(b.inttoptr(address, I32.as_pointer()), align=4)
    first = b.insert_element(undefined, value, ir.Constant(I32, 0))
    return b.shuffle_vector(first, undefined, filled(INTS, 0))


class Dot(Protocol):
    """Accumulator of products, four neighbours to a lane, vector after vector."""

    def step(self, b: Any, total: Value | None, code: Value, quad: Value) -> Value:
        """Add the products of a vector to `total`; None: these products are the first."""
        ...

    def end(self, b: Any, total: Value) -> Value:
        """Return the sums, [LANES] int32."""
        ...


class SmallDot:
    """Accumulator of unsigned codes below 16 times signed bytes, for `LINES` vectors at most.

    Eight pairs of products are added in int16: 8 * 2 * 15 * 127 stays below 2^15.
    """

    in_pairs = HAS_PAIR_DOT and not HAS_BYTE_DOT

    def step(self, b: Any, total: Value | None, code: Value, quad: Value) -> Value:
        if not self.in_pairs:
            return (dot_signed if HAS_SIGNED_DOT else dot_bytes)(b, total or filled(INTS, 0), code, quad)
        pairs = _x86(b, WORDS, "avx512.pmaddubs.w.512" if _WIDE else "avx2.pmadd.ub.sw", BYTES, code, quad)
        return pairs if total is None else b.add(total, pairs)

    def end(self, b: Any, total: Value) -> Value:
        """Return the sums, [LANES] int32."""
        return dot_words(b, filled(INTS, 0), total, filled(WORDS, 1)) if self.in_pairs else total


class ByteDot:
    """Accumulator of unsigned codes of a byte times signed bytes."""

    def step(self, b: Any, total: Value | None, code: Value, quad: Value) -> Value:
        return dot_bytes(b, total or filled(INTS, 0), code, quad)

    def end(self, b: Any, total: Value) -> Value:
        """Return the sums, [LANES] int32."""
        return total


class SignedDot(ByteDot):
    """Accumulator of signed bytes times signed bytes, for processors with `HAS_SIGNED_DOT` or `HAS_PAIR_DOT`: ARM's
    instruction, or the magnitudes of one factor times the other factor with both signs.

    Two products are added in int16: 2 * 128 * 127 stays below 2^15. Source: ggml's AVX2 kernels (Gerganov).
    """

    def step(self, b: Any, total: Value | None, code: Value, quad: Value) -> Value:
        if HAS_SIGNED_DOT:
            return dot_signed(b, total or filled(INTS, 0), code, quad)
        code, quad = b.bitcast(code, BYTES), b.bitcast(quad, BYTES)
        is_minus = b.icmp_signed("<", code, filled(BYTES, 0))
        magnitude = b.select(is_minus, b.neg(code), code)
        signed = b.select(is_minus, b.neg(quad), quad) if _WIDE else _x86(b, BYTES, "avx2.psign.b", BYTES, quad, code)
        pairs = _x86(b, WORDS, "avx512.pmaddubs.w.512" if _WIDE else "avx2.pmadd.ub.sw", BYTES, magnitude, signed)
        return dot_words(b, total or filled(INTS, 0), pairs, filled(WORDS, 1))


def dot_bytes(b: Any, total: Value, code: Value, quad: Value) -> Value:
    """Add the products of unsigned bytes with signed bytes, four to a lane."""
    code, quad = b.bitcast(code, INTS), b.bitcast(quad, INTS)
    if HAS_BYTE_DOT:
        name = f"llvm.x86.avx512.vpdpbusd.{512 if _WIDE else 256}"
        function = cgutils.get_or_insert_function(b.module, ir.FunctionType(INTS, [INTS] * 3), name)
        return b.call(function, [total, code, quad])
    for byte in range(4):
        unsigned = b.and_(b.lshr(code, filled(INTS, 8 * byte)), filled(INTS, 0xFF))
        signed = b.ashr(b.shl(quad, filled(INTS, 24 - 8 * byte)), filled(INTS, 24))
        total = b.add(total, b.mul(unsigned, signed))
    return total


def dot_signed(b: Any, total: Value, code: Value, quad: Value) -> Value:
    """Add the products of signed bytes, four to a lane, with ARM's instruction. It is written as assembly because LLVM
    selects it only for processors whose names it knows."""
    quarter = ir.VectorType(I32, 4)
    function = ir.FunctionType(quarter, [quarter] * 3)
    text = ".arch_extension dotprod\nsdot $0.4s, $2.16b, $3.16b"
    return _by_registers(b, lambda *parts: b.asm(function, text, "=w,0,w,w", parts, False), INTS, total, code, quad)


def dot_words(b: Any, total: Value, code: Value, pair: Value) -> Value:
    """Add the products of int16 with int16, two to a lane."""
    if HAS_PAIR_DOT:
        return b.add(total, _x86(b, INTS, "avx512.pmaddw.d.512" if _WIDE else "avx2.pmadd.wd", WORDS, code, pair))
    code, pair = b.bitcast(code, INTS), b.bitcast(pair, INTS)
    for up in (16, 0):
        factors = (b.ashr(b.shl(v, filled(INTS, up)), filled(INTS, 16)) for v in (code, pair))
        total = b.add(total, b.mul(*factors))
    return total


def look_up(b: Any, table: Value, codes: Value) -> Value:
    """Return the bytes of a table that codes below 16 select; `table` is repeated for every 16 bytes of the vector."""
    if HAS_PAIR_DOT:
        return b.bitcast(_x86(b, BYTES, "avx512.pshuf.b.512" if _WIDE else "avx2.pshuf.b", BYTES, table, codes), WORDS)
    if IS_ARM:
        sixteen = ir.VectorType(_I8, 16)
        kind = ir.FunctionType(sixteen, [sixteen] * 2)
        function = cgutils.get_or_insert_function(b.module, kind, "llvm.aarch64.neon.tbl1.v16i8")
        return b.bitcast(_by_registers(b, lambda *parts: b.call(function, parts), BYTES, table, codes), WORDS)
    codes = b.bitcast(codes, BYTES)
    found = filled(BYTES, 0)
    for i in range(16):
        entry = b.shuffle_vector(table, table, filled(ir.VectorType(I32, BYTES.count), i))
        found = b.select(b.icmp_unsigned("==", codes, filled(BYTES, i)), entry, found)
    return b.bitcast(found, WORDS)


def load_table(b: Any, address: Value) -> Value:
    """Load 16 bytes into every 16 bytes of a vector."""
    once = load_vector(b, address, ir.VectorType(_I8, 16))
    places = ir.Constant(ir.VectorType(I32, BYTES.count), list(range(16)) * (BYTES.count // 16))
    return b.shuffle_vector(once, once, places)


def _x86(b: Any, result: Any, name: str, kind: Any, left: Value, right: Value) -> Value:
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(result, [kind, kind]), f"llvm.x86.{name}")
    return b.call(function, [b.bitcast(left, kind), b.bitcast(right, kind)])


def _by_registers(b: Any, call: Callable[..., Value], kind: Any, *vectors: Value) -> Value:
    """Call with every 16 bytes of the vectors, the size of ARM's registers, and return the results as one vector."""
    size = 16 * kind.count // BYTES.count
    results = []
    for start in range(0, kind.count, size):
        part = ir.Constant(ir.VectorType(I32, size), list(range(start, start + size)))
        whole = (b.bitcast(vector, kind) for vector in vectors)
        results.append(call(*(b.shuffle_vector(vector, vector, part) for vector in whole)))
    while len(results) > 1:
        size *= 2
        both = ir.Constant(ir.VectorType(I32, size), list(range(size)))
        results = [b.shuffle_vector(*pair, both) for pair in zip(results[::2], results[1::2], strict=True)]
    return results[0]
