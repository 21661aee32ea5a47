"""Lookup of rows of packed codes on the CPU: the Numba kernel that runs one thread's rows of `cpu_ops.weight_rows`.

A row is spread over its tile, four bytes of every line (`cpu_ops.weight_packing`), so it is read number by number.
"""

import numpy as np

from sgmv_kernels.cpu_arguments.block import NUM_ROWS
from sgmv_kernels.cpu_arguments.weight_rows import (
    CODE_BYTES,
    COUNT,
    DATA,
    FLOAT,
    GROUP,
    IDS,
    KIND,
    LEVELS,
    ORDER,
    OUT,
    RUN_BYTES,
    RUNS,
    STEPS,
    TABLE,
    ZEROS,
)
from sgmv_kernels.cpu_runtime.kernel_parts import kernel_part
from sgmv_kernels.cpu_simd.memory_access import FP16, byte, f32, i32, i64, number, put_f32, take_next
from sgmv_kernels.formats.weight_codes import CODE_BLOCK, INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS, STEP_GROUPS, TILE

_QUAD, _LINE = 4, 4 * TILE
_HALF = CODE_BLOCK // 2
_SEVENS = 8
"""Half of the 16 lines of 64 codes of 11 levels: a code of the first half shares seven bits with one of the second."""


@kernel_part
def _work(args):  # type: ignore[no-untyped-def]
    """Take rows until none is left."""
    group, tile_bytes = args[GROUP], args[RUNS] * args[RUN_BYTES]
    while True:
        row = take_next(args.ctypes.data)
        if row >= args[NUM_ROWS]:
            return
        output = i64(args[IDS], row)
        run = args[DATA] + output // TILE * tile_bytes
        out = args[OUT] + row * 4 * args[RUNS] * group
        for first in range(0, args[RUNS] * group, group):
            _write_run(args, run, output % TILE, first, out)
            run += args[RUN_BYTES]


@kernel_part
def _write_run(args, run, lane, first, out):  # type: ignore[no-untyped-def]
    """Write a row's weights of one run, whose first input is `first`."""
    unit = args[GROUP] // STEP_GROUPS if args[KIND] == STEPS else args[GROUP]
    for start in range(0, args[GROUP], unit):
        scale, offset = _factors(args, run + args[CODE_BYTES], lane, start // unit)
        for h in range(start, start + unit):
            code = _code(run + _QUAD * lane, args[LEVELS], h)
            if args[TABLE]:
                code = _signed(byte(args[TABLE], code))
            value = np.float32(code)
            value = (value - offset) * scale if args[KIND] >= ZEROS else value * scale + offset
            place = i32(args[ORDER], first + h) if args[ORDER] else first + h
            put_f32(out, place, value)


@kernel_part
def _code(lines, levels, h):  # type: ignore[no-untyped-def]
    """Return code `h` of an output's stored lines."""
    line, inside = h // _QUAD, h % _QUAD
    if levels == INT8_LEVELS:
        return _signed(byte(lines, line * _LINE + inside))
    if levels == INT4_LEVELS:
        # The lines of a block's second half share the bytes of its first half.
        block, at = h // CODE_BLOCK, h % _HALF // _QUAD
        both = byte(lines, (block * (_HALF // _QUAD) + at) * _LINE + inside)
        return both >> 4 if h % CODE_BLOCK >= _HALF else both & 15
    lines += line // (2 * _SEVENS) * (_SEVENS - 1) * _LINE + inside
    at, pair = line % _SEVENS, np.int64(0)
    if at < _SEVENS - 1:
        pair = byte(lines, at * _LINE) & 0x7F
    else:
        for bit in range(_SEVENS - 1):
            pair |= byte(lines, bit * _LINE) >> 7 << bit
    return pair % Q3H_LEVELS if line % (2 * _SEVENS) >= _SEVENS else pair // Q3H_LEVELS


@kernel_part
def _factors(args, behind, lane, group):  # type: ignore[no-untyped-def]
    """Return the scale, and the minimum or zero, of an output in a group; 0 if it has none."""
    kind, count = args[KIND] % ZEROS, args[COUNT]
    if kind == FLOAT:
        return f32(behind, lane), f32(behind, TILE + lane) if count == 2 else np.float32(0)
    scale = number(behind, lane, FP16)
    offset = number(behind, TILE + lane, FP16) if count == 2 else np.float32(0)
    if kind == STEPS:
        numbers = behind + 2 * TILE * count + group * TILE * count
        scale *= np.float32(_signed(byte(numbers, lane)))
        if count == 2:
            offset *= np.float32(_signed(byte(numbers, TILE + lane)))
    return scale, offset


@kernel_part
def _signed(value):  # type: ignore[no-untyped-def]
    """Return the int8 with the bits of a byte."""
    return (value ^ 128) - 128


KERNELS = {"rows": _work}
