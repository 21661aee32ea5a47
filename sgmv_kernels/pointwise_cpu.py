"""What lies between the linears, on the CPU: one pass over memory for each, row by row."""

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.kv_pages import KvPages
from sgmv_kernels.launches import NUM_ROWS, Part, Words, empty, launch, rows_are_now, rows_part

MODULE = "pointwise_numba"
ROWS = 4
"""Rows of a task. Fewer rows than two tasks have are not worth waking a second thread."""
TAKEN, SAMPLED, ROPE_PART = "taken", "sampled", "rope"
"""Parts of a step that these kernels are told."""
A, B, C, OUT, WIDTH, FLOAT = range(NUM_ROWS + 1, 9)
PAGES, SLOTS, HEADS, KV_HEADS, PAGE, KEYS, VALUES, PAGE_BYTES = range(9, 17)
"""Places in the kernels' arguments, after the counters. FLOAT holds a float64."""
NUM_ARGS = PAGE_BYTES + 1
ROPE = {torch.bfloat16: "rope_bf16", torch.float16: "rope_fp16", torch.float32: "rope_fp32"}


def add_rms_norm_cpu_(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `ops.Ops.add_rms_norm_`."""
    out = empty("normed", x.shape)
    own = {
        A: x.data_ptr(),
        B: 0 if delta is None else delta.data_ptr(),
        C: weight.data_ptr(),
        OUT: out.data_ptr(),
        WIDTH: x.shape[1],
        FLOAT: np.float64(eps).view(np.int64).item(),
    }
    _launch("norm", len(x), own)
    return out


def silu_mul_cpu(gate_up: Tensor) -> Tensor:
    """See `ops.Ops.silu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty("gated", (rows, width))
    _launch("silu", rows, {A: gate_up.data_ptr(), OUT: out.data_ptr(), WIDTH: width})
    return out


def take_rows_cpu(x: Tensor, rows: Tensor) -> Tensor:
    """See `ops.Ops.take_rows`."""
    out = empty("taken", (len(rows), x.shape[1]))
    launch(MODULE, "take", taken_part(rows), {A: x.data_ptr(), OUT: out.data_ptr(), WIDTH: x.shape[1]})
    rows_are_now(SAMPLED)
    return out


def taken_part(rows: Tensor) -> Part:
    """What a step tells `take_rows`."""
    return Part(TAKEN, {NUM_ROWS: len(rows), B: rows.data_ptr()}, len(rows) // ROWS)


def rope_part(rows: int, cos: Tensor, sin: Tensor, pages: Tensor, slots: Tensor) -> Part:
    """What a step tells `rope_write_kv`."""
    addresses = {B: cos.data_ptr(), C: sin.data_ptr(), PAGES: pages.data_ptr(), SLOTS: slots.data_ptr()}
    return Part(ROPE_PART, {NUM_ROWS: rows, **addresses}, rows // ROWS)


def rope_write_kv_cpu(qkv: Tensor, cos: Tensor, sin: Tensor, kv: KvPages, pages: Tensor, slots: Tensor) -> Tensor:
    """See `ops.Ops.rope_write_kv`."""
    rows, dim = qkv.shape[0], kv.head_dim
    heads = qkv.shape[1] // dim - 2 * kv.num_heads
    q = empty("queries", (rows, heads, dim))
    own = {
        A: qkv.data_ptr(),
        OUT: q.data_ptr(),
        WIDTH: dim,
        HEADS: heads,
        KV_HEADS: kv.num_heads,
        PAGE: kv.page_size,
        KEYS: kv.keys.data_ptr(),
        VALUES: kv.values.data_ptr(),
        PAGE_BYTES: kv.keys.stride(0) * kv.keys.itemsize,
    }
    launch(MODULE, ROPE[kv.dtype], rope_part(rows, cos, sin, pages, slots), own)
    return q


def _launch(entry: str, rows: int, own: Words) -> None:
    launch(MODULE, entry, rows_part(rows, rows // ROWS), own)
