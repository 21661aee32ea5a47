"""Products of 16 rows with two tiles of weights in AMX registers, for Numba kernels on processors with AMX.

An AMX register is a matrix of up to 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 rounded activations
by a block of a tile, whose lines are the rows of the second matrix; this would take 128 `vpdpbusd` instructions. The
sums are integers, and are scaled and added as in `quant_matmul.make_product`, so results have the same bits. Addresses
and strides are int64, in bytes. Source: Intel's Software Developer's Manual, TDPBSUD.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sgmv_kernels.cpu_simd.quant_ir import (
    BYTES,
    HAS_AMX,
    INTS,
    LINES,
    WORDS,
    filled,
    load_table,
    load_vector,
    look_up,
    store_vector,
)
from sgmv_kernels.cpu_simd.quant_matmul import CODES, LINE, ROWS_BLOCK, TILES_AT_ONCE, UNITS
from sgmv_kernels.cpu_simd.vector_ir import LANES, Emitter, Value, align_spills, c64, loop_of
from sgmv_kernels.formats.weight_codes import CODE_BLOCK, ROW_GROUP, TILE

AMX_ROWS = ROW_GROUP
"""Rows that are multiplied at a time."""
TILE_BLOCK = TILE * CODE_BLOCK
"""Bytes of a block of a tile, line after line."""
_TILE_SUMS = AMX_ROWS * LINE
BLOCK_SUMS = TILES_AT_ONCE * _TILE_SUMS
"""Bytes of the int32 sums of a block, for the first and then for the second tile."""
AMX_CONFIG = 64
_ROWS = 0
_SUMS, _WEIGHTS = range(1, 1 + TILES_AT_ONCE), range(1 + TILES_AT_ONCE, 1 + 2 * TILES_AT_ONCE)
"""Numbers of AMX registers; the second and third kind have one for each tile."""
_SHAPES = {
    _ROWS: (AMX_ROWS, CODE_BLOCK),
    **dict.fromkeys(_SUMS, (AMX_ROWS, LINE)),
    **dict.fromkeys(_WEIGHTS, (LINES, LINE)),
}
"""Their rows, and the bytes of each."""
_A = types.int64
_I8 = ir.IntType(8)
_POINTER = _I8.as_pointer()


def _call(b: Any, name: str, *arguments: Value) -> None:
    """Call an instruction; registers are given by their numbers."""
    values = [ir.Constant(_I8, a) if isinstance(a, int) else a for a in arguments]
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), values)


def _pointer(b: Any, address: Value) -> Value:
    return b.inttoptr(address, _POINTER)


@intrinsic
def configure_amx(typingctx, config):  # type: ignore[no-untyped-def]
    """Set the shapes of this thread's registers; `AMX_CONFIG` bytes at `config` are used temporarily."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        if HAS_AMX:
            told = bytearray(AMX_CONFIG)
            told[0] = 1
            for register, (rows, row_bytes) in _SHAPES.items():
                told[16 + 2 * register] = row_bytes
                told[48 + register] = rows
            store_vector(b, ir.Constant(ir.VectorType(_I8, AMX_CONFIG), list(told)), args[0])
            _call(b, "ldtilecfg", _pointer(b, args[0]))
        return ctx.get_dummy_value()

    return types.void(_A), codegen


@intrinsic
def end_amx(typingctx):  # type: ignore[no-untyped-def]
    """Clear the registers of this thread, so that the system does not have to save them."""

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        if HAS_AMX:
            _call(b, "tilerelease")
        return ctx.get_dummy_value()

    return types.void(), codegen


def make_unpack(kind: str) -> Callable[..., Any]:
    """unpack(source, group, table, out): write the codes of a tile's group, a multiple of 32, as unsigned bytes."""
    codes = CODES[kind]
    stored = LINES // (2 if codes.is_halved else 1)

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        source, group, table, out = args

        def body(at: Value, state: list[Value]) -> list[Value]:
            lines, target = b.add(source, b.mul(at, c64(stored * LINE))), b.add(out, b.mul(at, c64(LINES * LINE)))
            for n in range(stored):
                value = load_vector(b, b.add(lines, c64(n * LINE)), WORDS)
                for half in range(LINES // stored):
                    read = codes.read(b, value, half > 0)
                    found = read if entries is None else look_up(b, entries, read)
                    store_vector(b, found, b.add(target, c64((n + half * stored) * LINE)))
            return state

        entries = b.xor(load_table(b, table), filled(BYTES, codes.shift)) if codes.has_table else None
        loop_of(b, c64(0), b.sdiv(group, c64(CODE_BLOCK)), 1, [], body)
        return ctx.get_dummy_value()

    @intrinsic
    def unpack(typingctx, source, group, table, out):  # type: ignore[no-untyped-def]
        return types.void(*(_A,) * 4), codegen

    made: Callable[..., Any] = unpack
    return made


def make_amx_product(kind: str) -> Callable[..., Any]:
    """product(x, u, codes, next_codes, data, next, groups, group, stored, soon, share, start, start_bytes, out,
    out_bytes, sums): out[i, :] = start[i, :] + x[i] @ tiles for `AMX_ROWS` rows.

    `x`, `u`: rounded activations and units of a group of rows. `codes`: codes of the first tile's groups as `unpack`
    writes them; those of the second are `next_codes` bytes further. The tiles themselves are at `data`, and `next`
    bytes further; their groups have `stored` bytes of codes before their factors. The data that is read next is at
    `soon`: every block of each tile prefetches `share` bytes of it. `start`, `out`: fp32 [AMX_ROWS, TILES_AT_ONCE *
    TILE], with `start_bytes` and `out_bytes` from row to row. `sums`: memory for `BLOCK_SUMS` bytes per block. The
    products of all blocks are computed before all scaling and adding: alternating is slower.
    """
    codes_kind = CODES[kind]

    def codegen(ctx: Any, b: Any, sig: Any, args: Any) -> Value:
        x, u, codes, next_codes, data, following, groups, group, stored, soon, share = args[:11]
        start, start_bytes, out, out_bytes, sums = args[11:]
        align_spills(b.function)
        emit, one = Emitter(b, LANES), Emitter(b, 1)
        blocks = b.sdiv(group, c64(CODE_BLOCK))
        group_bytes = b.add(stored, c64(codes_kind.factors.nbytes))
        all_blocks = b.mul(groups, blocks)

        def multiply_block(block: Value, state: list[Value]) -> list[Value]:
            _call(b, "tileloadd64", _ROWS, _pointer(b, b.add(x, b.mul(block, c64(ROWS_BLOCK)))), c64(CODE_BLOCK))
            for tile, weights in enumerate(_WEIGHTS):
                place = b.add(b.add(codes, b.mul(next_codes, c64(tile))), b.mul(block, c64(TILE_BLOCK)))
                _call(b, "tileloadd64", weights, _pointer(b, place), c64(LINE))
            for whole, weights in zip(_SUMS, _WEIGHTS, strict=True):
                _call(b, "tilezero", whole)
                _call(b, "tdpbsud", whole, _ROWS, weights)
            for tile, whole in enumerate(_SUMS):
                place = b.add(sums, b.add(b.mul(block, c64(BLOCK_SUMS)), c64(tile * _TILE_SUMS)))
                _call(b, "tilestored64", whole, _pointer(b, place), c64(LINE))
            return state

        def add_tile(tile: Value, state: list[Value]) -> list[Value]:
            tile_data, tile_sums = b.add(data, b.mul(following, tile)), b.add(sums, b.mul(tile, c64(_TILE_SUMS)))
            columns = b.mul(tile, c64(4 * TILE))
            own_start, own_out = b.add(start, columns), b.add(out, columns)

            def add_group(at: Value, state: list[Value]) -> list[Value]:
                factors = b.add(b.add(tile_data, b.mul(at, group_bytes)), stored)

                def add_block(j: Value, state: list[Value]) -> list[Value]:
                    block = b.add(b.mul(at, blocks), j)
                    scale, minimum = codes_kind.load_factors(emit, factors, j, 0)
                    units, lines = b.add(u, b.mul(block, c64(UNITS))), b.add(tile_sums, b.mul(block, c64(BLOCK_SUMS)))
                    own_share = b.add(soon, b.mul(b.add(b.mul(tile, all_blocks), block), share))

                    def fetch(at: Value, state: list[Value]) -> list[Value]:
                        emit.fetch(b.add(own_share, at))
                        return state

                    loop_of(b, c64(0), share, LINE, [], fetch)
                    results = []
                    for i, before in enumerate(state):
                        unit, unit_sum = (emit.splat(one.load(units, c64(i + m * ROW_GROUP))) for m in (0, 1))
                        whole = load_vector(b, b.add(lines, c64(i * LINE)), INTS)
                        total = emit.fma(unit, b.fmul(b.sitofp(whole, emit.float), scale), before)
                        results.append(total if minimum is None else emit.fma(unit_sum, minimum, total))
                    return results

                return loop_of(b, c64(0), blocks, 1, state, add_block)

            begun = [emit.load(b.add(own_start, b.mul(start_bytes, c64(i))), c64(0)) for i in range(AMX_ROWS)]
            for i, total in enumerate(loop_of(b, c64(0), groups, 1, begun, add_group)):
                emit.store(total, b.add(own_out, b.mul(out_bytes, c64(i))), c64(0))
            return state

        loop_of(b, c64(0), all_blocks, 1, [], multiply_block)
        loop_of(b, c64(0), c64(TILES_AT_ONCE), 1, [], add_tile)
        return ctx.get_dummy_value()

    @intrinsic
    def product(  # type: ignore[no-untyped-def]
        typingctx, x, u, codes, next_codes, data, following, groups, group, stored, soon, share, start, start_bytes,
        out, out_bytes, sums,
    ):  # fmt: skip
        return types.void(*(_A,) * 16), codegen

    made: Callable[..., Any] = product
    return made
