"""Vector functions of the quantized linears for Numba: rounding of activations, unpacking of codes, products.

Addresses and strides are int64, in bytes. A block is 32 neighbours along H. Rounded activations are stored in groups of
`ROW_GROUP` rows: a block of every row of the group, then the next block. The rows that are multiplied at a time are
therefore adjacent.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sgmv_kernels.cpu_simd.quant_ir import (
    BYTES,
    INTS,
    LINES,
    VECTORS,
    WORDS,
    ByteDot,
    Dot,
    SignedDot,
    SmallDot,
    filled,
    load_table,
    load_vector,
    look_up,
    splat_int,
    store_vector,
)
from sgmv_kernels.cpu_simd.vector_ir import I32, LANES, Emitter, Value, align_spills, c64, itemsize_of, loop_of
from sgmv_kernels.formats.weight_codes import CODE_BLOCK, ROUND_ROWS, ROW_GROUP, STEP_GROUPS, TILE

LEVELS = 127
LINE = 4 * TILE
"""Bytes of a line of codes, four neighbours of every output of a tile."""
ROWS_BLOCK = ROW_GROUP * CODE_BLOCK
"""Bytes of a block of a group of rows, row after row."""
UNITS = 8 * ROW_GROUP
"""Bytes of the units, then of the units times sums, of a block of a group of rows."""
TILES_AT_ONCE = 2 // VECTORS
"""Tiles that are multiplied at a time: two vectors of outputs, so that a loaded activation is used twice."""
FETCH_BYTES = 2048
"""Distance, in bytes, at which codes are prefetched that are unpacked to entries of a table."""
NONE, MINIMA, ZEROS = range(3)
_A = types.int64
_I8, _I16 = ir.IntType(8), ir.IntType(16)
_VECTOR = LINE // VECTORS


def make_rounding(is_ordered: bool) -> Callable[..., Any]:
    """Return round(x, xs, rows, order, codes, units), which rounds 32 fp32 numbers of each of `ROUND_ROWS` rows to
    multiples of a unit, 127 for the largest magnitude.

    `x`: the first number of the first row; if ordered, the row from which the 32 int32 at `order` select; `xs` bytes
    from row to row. `rows`: the number of rows from x on; if there are too few, the last row is repeated. `codes`:
    address of the int8 results, row after row. `units`: address of the unit of each row, followed after `UNITS` / 2
    bytes by the unit times the sum. NaN or infinite numbers make the unit NaN.
    """

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, xs, rows, order, codes, units = args
        emit, group = Emitter(b, LANES), Emitter(b, ROUND_ROWS)
        last = b.sub(rows, c64(1))
        parts = []
        for i in range(ROUND_ROWS):
            index = b.select(b.icmp_signed("<", c64(i), last), c64(i), last)
            row = b.add(x, b.mul(index, xs))
            if is_ordered:
                parts.append([_gathered(b, row, b.add(order, c64(4 * at))) for at in range(0, CODE_BLOCK, LANES)])
            else:
                parts.append([emit.load(row, c64(at)) for at in range(0, CODE_BLOCK, LANES)])
        # As integers, the bits of magnitudes have the same order, and those of infinity and NaN are the largest.
        magnitudes = [[b.and_(b.bitcast(part, INTS), filled(INTS, 0x7FFFFFFF)) for part in row] for row in parts]
        largest_bits = _largest_of_rows(b, [reduce(partial(_larger_int, b), row) for row in magnitudes])
        largest = b.bitcast(largest_bits, group.float)
        finite = b.icmp_signed("<", largest_bits, filled(group.int, 0x7F800000))
        some = b.and_(finite, b.fcmp_ordered(">", largest, group.const(1e-30)))
        factors = b.select(some, b.fdiv(group.const(float(LEVELS)), largest), group.const(0.0))
        unit = b.select(some, b.fmul(largest, group.const(1 / LEVELS)), group.const(0.0))
        unit = b.select(finite, unit, group.const(float("nan")))
        dot = SmallDot()
        sums: Value | None = None
        rounded = [_rounded(b, row, factors, i) for i, row in enumerate(parts)]
        for i, row in enumerate(rounded):
            store_vector(b, row, b.add(codes, c64(CODE_BLOCK * i)))
        for quad in _by_quads(b, rounded):
            sums = dot.step(b, sums, filled(BYTES, 1), quad)
        assert sums is not None
        whole = dot.end(b, sums)
        places = [list(range(at, at + ROUND_ROWS)) for at in range(0, LANES, ROUND_ROWS)]
        total = reduce(b.add, [_chosen(b, whole, whole, own) for own in places])
        group.store(unit, units, c64(0))
        group.store(b.fmul(unit, b.sitofp(total, group.float)), units, c64(ROW_GROUP))
        return ctx.get_dummy_value()

    @intrinsic
    def rounding(typingctx, x, xs, rows, order, codes, units):  # type: ignore[no-untyped-def]
        return types.void(*(_A,) * 6), codegen

    made: Callable[..., Any] = rounding
    return made


def _larger_int(b: Any, one: Value, other: Value) -> Value:
    return b.select(b.icmp_signed(">", one, other), one, other)


def _chosen(b: Any, one: Value, other: Value, places: list[int]) -> Value:
    """Return some numbers of two vectors, by their indices in the concatenation of both."""
    return b.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, len(places)), places))


def _joined(b: Any, vectors: list[Value]) -> Value:
    """Return the numbers of all vectors, whose number is a power of two, in one vector."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [_chosen(b, one, other, list(range(2 * one.type.count))) for one, other in pairs]
    return vectors[0]


def _largest_of_rows(b: Any, rows: list[Value]) -> Value:
    """Return the largest number of each row; each row is a vector of integers."""
    vectors, size = rows, LANES
    while size > 1:
        # The lower and the upper halves of the remaining numbers of each row, for two vectors at a time.
        pairs = list(zip(vectors[::2], vectors[1::2], strict=False)) or [(vectors[0], vectors[0])]
        lower = [n for n in range(min(2, len(vectors)) * vectors[0].type.count) if n % size < size // 2]
        upper = [n + size // 2 for n in lower]
        vectors = [_larger_int(b, _chosen(b, *pair, lower), _chosen(b, *pair, upper)) for pair in pairs]
        size //= 2
    return vectors[0]


def _rounded(b: Any, parts: list[Value], factors: Value, row: int) -> Value:
    """Return a row's numbers times its factor as integers, four int8 in each int32."""
    emit = Emitter(b, LANES)
    factor = _chosen(b, factors, factors, [row] * LANES)
    # Adding 1.5 * 2^23 rounds. NaN gives an arbitrary code; its unit is NaN.
    whole = [b.bitcast(b.fadd(b.fmul(part, factor), emit.const(1.5 * 2**23)), INTS) for part in parts]
    codes = _joined(b, [b.trunc(part, ir.VectorType(_I8, LANES)) for part in whole])
    return b.bitcast(codes, ir.VectorType(I32, CODE_BLOCK // 4))


def _by_quads(b: Any, rows: list[Value]) -> list[Value]:
    """Return the first int32 of every row, then the second of every row, and so on, in vectors of LANES."""
    half = ROUND_ROWS // 2
    low = [place for n in range(half) for place in (n, n + ROUND_ROWS)]
    high = [place + half for place in low]
    for _ in range(ROUND_ROWS.bit_length() - 1):
        rows = [_chosen(b, rows[i], rows[i + half], places) for i in range(half) for places in (low, high)]
    together = LANES // ROUND_ROWS
    return [_joined(b, rows[i : i + together]) for i in range(0, ROUND_ROWS, together)]


def _gathered(b: Any, x: Value, order: Value) -> Value:
    """Load a vector of the row at `x`: the numbers that the int32 at `order` select."""
    emit, one = Emitter(b, LANES), Emitter(b, 1)
    chosen = emit.const(0.0)
    for lane in range(LANES):
        place = b.inttoptr(b.add(order, c64(4 * lane)), I32.as_pointer())
        number = one.load(x, b.zext(b.load(place, align=4), c64(0).type))
        chosen = b.insert_element(chosen, number, ir.Constant(I32, lane))
    return chosen


@intrinsic
def unpack_sevens(typingctx, source, out):  # type: ignore[no-untyped-def]
    """Unpack seven lines of 7-bit pairs, with an eighth in their top bits, to 16 lines: pair = 11 * first + second."""

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
def unpack_entries(typingctx, source, blocks, table, out):  # type: ignore[no-untyped-def]
    """Unpack blocks of int4 to lines of bytes: the entries of a table that they select."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        source, blocks, table, out = args
        entries, half = load_table(b, table), LINES // 2

        def body(at: Value, state: list[Value]) -> list[Value]:
            for n in range(half * VECTORS):
                place = b.add(source, b.add(at, c64(_VECTOR * n)))
                Emitter(b, LANES).fetch(b.add(place, c64(FETCH_BYTES)))
                stored, target = load_vector(b, place, WORDS), b.add(out, b.add(b.mul(at, c64(2)), c64(_VECTOR * n)))
                for is_second in (False, True):
                    found = look_up(b, entries, _nibbles(b, stored, is_second))
                    store_vector(b, found, b.add(target, c64(half * LINE * is_second)))
            return state

        loop_of(b, c64(0), b.mul(blocks, c64(half * LINE)), half * LINE, [], body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A, _A), codegen


@intrinsic
def begin_tile(typingctx, bias, y):  # type: ignore[no-untyped-def]
    """Write the bias of a tile, or zeros if its address is 0."""

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
def copy_factors(typingctx, factors, nbytes, out):  # type: ignore[no-untyped-def]
    """Copy the factors of a tile's group."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        factors, nbytes, out = args

        def body(at: Value, state: list[Value]) -> list[Value]:
            half = ir.VectorType(_I8, 2 * TILE)
            store_vector(b, load_vector(b, b.add(factors, at), half), b.add(out, at))
            return state

        loop_of(b, c64(0), nbytes, 2 * TILE, [], body)
        return ctx.get_dummy_value()

    return types.void(_A, _A, _A), codegen


class FactorRows(NamedTuple):
    """Describe the factors after the codes of a group: 16 scales, and 16 minima or zeros if it has them.

    With steps, a group is all blocks that share them; after the steps follow 16 scales, and 16 minima, of every block.
    """

    # The number that is added to scale * code: a stored minimum, a stored zero times -scale, or none.
    offsets: int = NONE
    # Numba's type of the factors for `Emitter.load_kind`: int16 for fp16, or float32.
    kind: Any = types.int16
    has_steps: bool = False

    @property
    def stored(self) -> int:
        """Return how many rows of 16 a group, or a block with steps, has."""
        return 1 if self.offsets == NONE else 2

    @property
    def nbytes(self) -> int:
        steps = TILE * self.stored * STEP_GROUPS if self.has_steps else 0
        return TILE * self.stored * itemsize_of(self.kind) + steps

    def load(self, emit: Emitter, factors: Value, block: Value, lane: int) -> tuple[Value, Value | None]:
        """Load the scales, and the minima or zeros, of the outputs of a tile from `lane` on, for a block of a group."""
        rows = [emit.load_kind(factors, c64(TILE * row + lane), self.kind) for row in range(self.stored)]
        if self.has_steps:
            own = emit.b.add(factors, c64(TILE * self.stored * itemsize_of(self.kind)))
            own = emit.b.add(own, emit.b.mul(block, c64(TILE * self.stored)))
            numbers = [emit.load_kind(own, c64(TILE * row + lane), types.int8) for row in range(self.stored)]
            rows = [emit.b.fmul(step, number) for step, number in zip(rows, numbers, strict=True)]
        return rows[0], rows[1] if len(rows) > 1 else None


class Codes(NamedTuple):
    """Describe how a tile's group is stored: lines of codes, then factors."""

    dot: type[Dot]
    # Turns a loaded vector into the codes of the first or the second half of a block.
    read: Callable[[Any, Value, bool], Value]
    # The lines of a block's second half share the bytes of its first.
    is_halved: bool = False
    # Added to signed codes so that they can be multiplied as unsigned ones.
    shift: int = 0
    # Codes select from a table of int8.
    has_table: bool = False
    factors: FactorRows = FactorRows()

    def load_factors(self, emit: Emitter, factors: Value, block: Value, lane: int) -> tuple[Value, Value | None]:
        """Load the scales of the outputs of a tile from `lane` on, and the numbers that are added to the products; None
        if there are none.
        """
        scale, stored = self.factors.load(emit, factors, block, lane)
        shift = emit.const(-float(self.shift))
        if stored is None:
            return scale, emit.b.fmul(scale, shift) if self.shift else None
        if self.factors.offsets == ZEROS:
            return scale, emit.b.fmul(scale, emit.b.fsub(shift, stored))
        return scale, emit.fma(scale, shift, stored) if self.shift else stored


def _nibbles(b: Any, value: Value, is_second: bool) -> Value:
    return b.and_(b.lshr(value, filled(WORDS, 4)) if is_second else value, filled(WORDS, 0x0F0F))


_INT4, _SMALL = Codes(SmallDot, _nibbles, is_halved=True), Codes(SmallDot, lambda b, v, _: v)
_INT8 = Codes(ByteDot, lambda b, v, _: b.xor(v, filled(WORDS, 0x8080)), shift=128)
_TABLE = Codes(ByteDot, _nibbles, is_halved=True, shift=128, has_table=True)
_SIGNED = Codes(SignedDot, lambda b, v, _: v)
_FP32_MINIMA = {"_minima": FactorRows(MINIMA, types.float32), "_steps": FactorRows(MINIMA, has_steps=True)}
_OF_UNSIGNED = {
    "": FactorRows(MINIMA),
    "_zeros": FactorRows(ZEROS),
    "_fp32": FactorRows(ZEROS, types.float32),
    **_FP32_MINIMA,
}
_OF_SIGNED = {"": FactorRows(), "_fp32": FactorRows(ZEROS, types.float32), **_FP32_MINIMA}
_OF_TABLE = {"": FactorRows(), "_fp32": FactorRows(NONE, types.float32), "_steps": FactorRows(has_steps=True)}
CODES = {
    f"{name}{ending}": codes._replace(factors=factors)
    for name, codes, every in (
        ("int4", _INT4, _OF_UNSIGNED),
        ("small", _SMALL, _OF_UNSIGNED),
        ("int8", _INT8, _OF_SIGNED),
        ("signed", _SIGNED, _OF_SIGNED),
        ("table", _TABLE, _OF_TABLE),
        ("signed_table", _SIGNED, _OF_TABLE),
    )
    for ending, factors in every.items()
}
"""Codes that `make_product` multiplies, by name and the ending of `cpu_ops.weight_packing.Factors`."""


def make_product(rows: int, kind: str) -> Callable[..., Any]:
    """Return product(x, u, data, next, groups, group, stored, lines, table, soon, share, start, start_bytes, out,
    out_bytes, kept, again): out[i, :] = start[i, :] + x[i] @ tiles for `rows` rows.

    `x` and `u`: rounded activations and units of the first row, in a group of `ROW_GROUP`. The first tile is at `data`,
    the second `next` bytes further. `stored` bytes of a group are codes, `lines` lines per block. `table`: 16 int8, if
    codes select from a table. The data that is read next is at `soon`: every block prefetches `share` bytes of it.
    `start`, `out`: fp32 [rows, TILES_AT_ONCE * TILE], with `start_bytes` and `out_bytes` from row to row. Every row is
    summed block after block. `kept` holds these sums between blocks if there are few registers. `again` must be the
    same address as `kept`. If LLVM knew this, it would keep all sums in registers between blocks, and spill most.
    """
    codes = CODES[kind]
    dot = codes.dot()
    num_stored = LINES // (2 if codes.is_halved else 1)
    vectors = [(tile, v) for tile in range(TILES_AT_ONCE) for v in range(VECTORS)]
    num_sums = rows * len(vectors)
    # With 32 registers, half hold sums; with 16, more than a few would displace the integer sums of a block.
    in_registers = num_sums <= (16 if LANES == 16 else 4)
    # With few rows, only memory limits the speed.
    is_few = num_sums <= 4

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, u, data, following, groups, group, stored, lines, table, soon, share = args[:11]
        start, start_bytes, out, out_bytes, kept, again = args[11:]
        align_spills(b.function)
        emit, one = Emitter(b, LANES), Emitter(b, 1)
        places = [(i, k, c64(i * TILES_AT_ONCE * TILE + k * LANES)) for i in range(rows) for k in range(len(vectors))]
        tiles = [b.add(data, b.mul(following, c64(tile))) for tile in range(TILES_AT_ONCE)]
        blocks = b.sdiv(group, c64(CODE_BLOCK))
        entries = b.xor(load_table(b, table), filled(BYTES, codes.shift)) if codes.has_table else None
        group_bytes = b.add(stored, c64(codes.factors.nbytes))

        def add_group(at: Value, state: list[Value]) -> list[Value]:
            first = b.mul(at, group_bytes)
            starts = [b.add(tile, first) for tile in tiles]

            def add_block(j: Value, state: list[Value]) -> list[Value]:
                block = b.add(b.mul(at, blocks), j)
                codes_of_rows = b.add(x, b.mul(block, c64(ROWS_BLOCK)))
                lines_of = [b.add(start, b.mul(j, c64(num_stored * LINE))) for start in starts]
                own_share = b.add(soon, b.mul(block, share))

                def fetch(at: Value, state: list[Value]) -> list[Value]:
                    emit.fetch(b.add(own_share, at))
                    return state

                loop_of(b, c64(0), share, LINE, [], fetch)

                def add_line(n: Value, whole: Sequence[Value | None]) -> list[Value]:
                    stored_lines = [b.add(line, b.mul(n, c64(LINE))) for line in lines_of]
                    loaded = [load_vector(b, b.add(stored_lines[tile], c64(_VECTOR * v)), WORDS) for tile, v in vectors]
                    for half in range(LINES // num_stored):
                        read = [codes.read(b, value, half > 0) for value in loaded]
                        if entries is not None:
                            read = [look_up(b, entries, value) for value in read]
                        own = b.add(codes_of_rows, b.mul(b.add(n, c64(half * num_stored)), c64(4)))
                        taken = [splat_int(b, b.add(own, c64(CODE_BLOCK * i))) for i in range(rows)]
                        whole = [dot.step(b, whole[p], read[k], taken[i]) for p, (i, k, _) in enumerate(places)]
                    return list(whole)

                whole = add_line(c64(0), [None] * num_sums)
                if in_registers and not is_few:
                    for n in range(1, num_stored):
                        whole = add_line(c64(n), whole)
                else:
                    whole = loop_of(b, c64(1), c64(num_stored) if is_few else lines, 1, whole, add_line)
                factors = [b.add(start, stored) for start in starts]
                loaded_factors = [codes.load_factors(emit, factors[tile], j, v * LANES) for tile, v in vectors]
                units = b.add(u, b.mul(block, c64(UNITS)))
                products = [b.sitofp(dot.end(b, total), emit.float) for total in whole]
                scaled = [b.fmul(own, loaded_factors[k][0]) for own, (_, k, _) in zip(products, places, strict=True)]
                results, of_row = [], list[Value]()
                for p, (i, k, place) in enumerate(places):
                    if p % len(vectors) == 0:
                        of_row = [emit.splat(one.load(units, c64(i + m * ROW_GROUP))) for m in (0, 1)]
                    before, minimum = state[p] if in_registers else emit.load(kept, place), loaded_factors[k][1]
                    total = emit.fma(of_row[0], scaled[p], before)
                    if minimum is not None:
                        total = emit.fma(of_row[1], minimum, total)
                    results.append(total)
                    if not in_registers:
                        emit.store(total, again, place)
                return results if in_registers else []

            return loop_of(b, c64(0), blocks, 1, state, add_block)

        sums = [emit.load(b.add(start, b.mul(start_bytes, c64(i))), c64(k * LANES)) for i, k, _ in places]
        if in_registers:
            sums = loop_of(b, c64(0), groups, 1, sums, add_group)
        else:
            for total, (_, _, place) in zip(sums, places, strict=True):
                emit.store(total, again, place)
            loop_of(b, c64(0), groups, 1, [], add_group)
            sums = [emit.load(kept, place) for _, _, place in places]
        for total, (i, k, _) in zip(sums, places, strict=True):
            emit.store(total, b.add(out, b.mul(out_bytes, c64(i))), c64(k * LANES))
        return ctx.get_dummy_value()

    @intrinsic
    def product(  # type: ignore[no-untyped-def]
        typingctx, x, u, data, following, groups, group, stored, lines, table, soon, share, start, start_bytes, out,
        out_bytes, kept, again,
    ):  # fmt: skip
        return types.void(*(_A,) * 17), codegen

    made: Callable[..., Any] = product
    return made
