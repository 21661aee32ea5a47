"""What lies between the linears, on the CPU: one pass over memory for each, row by row."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from sgmv_kernels.kv_pages import KvPages
from sgmv_kernels.simd_numba import (
    KINDS,
    add_square_sum,
    f32,
    i64,
    itemsize,
    put_kind,
    rotated,
    silu_times,
    take_next,
    weighted,
)
from sgmv_kernels.team_numba import arguments, compiled, run, team_size

ROWS = 4
"""Rows of a task. Fewer rows than two tasks have are not worth waking a second thread."""
NUM_ROWS, A, B, C, OUT, WIDTH, FLOAT = range(2, 9)
PAGES, SLOTS, HEADS, KV_HEADS, PAGE, KEYS, VALUES, PAGE_BYTES = range(9, 17)
"""Places in the kernels' arguments, after the counters. FLOAT holds a float64."""
NUM_ARGS = PAGE_BYTES + 1


def add_rms_norm_numba_(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `ops.Ops.add_rms_norm_`."""
    out = torch.empty_like(x)
    bits = np.float64(eps).view(np.int64).item()
    added = 0 if delta is None else delta.data_ptr()
    _run(_norm, x.shape[0], x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), x.shape[1], bits)
    return out


def silu_mul_numba(gate_up: Tensor) -> Tensor:
    """See `ops.Ops.silu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    _run(_silu, rows, gate_up.data_ptr(), 0, 0, out.data_ptr(), width, 0)
    return out


def rope_write_kv_numba(qkv: Tensor, cos: Tensor, sin: Tensor, kv: KvPages, pages: Tensor, slots: Tensor) -> Tensor:
    """See `ops.Ops.rope_write_kv`."""
    rows, dim = qkv.shape[0], kv.head_dim
    heads = qkv.shape[1] // dim - 2 * kv.num_heads
    q = qkv.new_empty((rows, heads, dim))
    _run(
        _ROPE[kv.dtype],
        rows,
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        q.data_ptr(),
        dim,
        0,
        pages.data_ptr(),
        slots.data_ptr(),
        heads,
        kv.num_heads,
        kv.page_size,
        kv.keys.data_ptr(),
        kv.values.data_ptr(),
        kv.keys.stride(0) * kv.keys.itemsize,
    )
    return q


def _run(entry: Any, rows: int, *args: int) -> None:
    threads = min(team_size(), rows // ROWS) or 1
    run(_kernel(entry), threads, arguments(rows, *args, *(0,) * (NUM_ARGS - 3 - len(args))))


def warm_up(dtypes: Sequence[torch.dtype]) -> None:
    """Compile what pages of these dtypes need."""
    for entry in (_norm, _silu, *(_ROPE[dtype] for dtype in dtypes)):
        _kernel(entry)


@cache
def _kernel(entry: Any) -> int:
    return compiled(entry)


def _norm(raw: Any) -> None:
    _norm_rows(carray(raw, (NUM_ARGS,), np.int64), carray(raw, (NUM_ARGS,), np.float64))


def _silu(raw: Any) -> None:
    _silu_rows(carray(raw, (NUM_ARGS,), np.int64))


def _rope_bf16(raw: Any) -> None:
    _rope_rows(carray(raw, (NUM_ARGS,), np.int64), _BF16)


def _rope_fp16(raw: Any) -> None:
    _rope_rows(carray(raw, (NUM_ARGS,), np.int64), _FP16)


def _rope_fp32(raw: Any) -> None:
    _rope_rows(carray(raw, (NUM_ARGS,), np.int64), _FP32)


_BF16, _FP16, _FP32 = (KINDS[t] for t in (torch.bfloat16, torch.float16, torch.float32))
_ROPE = {torch.bfloat16: _rope_bf16, torch.float16: _rope_fp16, torch.float32: _rope_fp32}


@njit
def _norm_rows(args, floats):  # type: ignore[no-untyped-def]
    width, eps = args[WIDTH], np.float32(floats[FLOAT])
    while True:
        first = take_next(args.ctypes.data) * ROWS
        if first >= args[NUM_ROWS]:
            return
        for row in range(first, min(first + ROWS, args[NUM_ROWS])):
            skip = 4 * width * row
            x, delta = args[A] + skip, args[B] + skip if args[B] else np.int64(0)
            mean = add_square_sum(x, delta, width) / np.float32(width)
            weighted(x, args[C], width, np.float32(1) / np.sqrt(mean + eps), args[OUT] + skip)


@njit
def _silu_rows(args):  # type: ignore[no-untyped-def]
    width = args[WIDTH]
    while True:
        first = take_next(args.ctypes.data) * ROWS
        if first >= args[NUM_ROWS]:
            return
        for row in range(first, min(first + ROWS, args[NUM_ROWS])):
            gate = args[A] + 8 * width * row
            silu_times(gate, gate + 4 * width, width, args[OUT] + 4 * width * row)


@njit
def _rope_rows(args, kind):  # type: ignore[no-untyped-def]
    heads, kv_heads, dim = args[HEADS], args[KV_HEADS], args[WIDTH]
    half, page, head_bytes = dim // 2, args[PAGE], 4 * dim
    while True:
        first = take_next(args.ctypes.data) * ROWS
        if first >= args[NUM_ROWS]:
            return
        for row in range(first, min(first + ROWS, args[NUM_ROWS])):
            x = args[A] + row * (heads + 2 * kv_heads) * head_bytes
            cos, sin = args[B] + row * half * 4, args[C] + row * half * 4
            for h in range(heads):
                rotated(x + h * head_bytes, cos, sin, half, args[OUT] + (row * heads + h) * head_bytes)
            base, slot = i64(args[PAGES], row) * args[PAGE_BYTES], i64(args[SLOTS], row)
            for h in range(kv_heads):
                key, value = x + (heads + h) * head_bytes, x + (heads + kv_heads + h) * head_bytes
                skip = base + h * dim * page * itemsize(kind)
                rotated(key, cos, sin, half, key)
                for d in range(dim):
                    put_kind(args[KEYS] + skip, d * page + slot, f32(key, d), kind)
                    put_kind(args[VALUES] + skip, slot * dim + d, f32(value, d), kind)
