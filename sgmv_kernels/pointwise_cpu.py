"""What lies between the linears, on the CPU: one pass over memory for each, row by row."""

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.kernel_code import address_of
from sgmv_kernels.kv_pages import KvPages
from sgmv_kernels.team import arguments, run, team_size

ROWS = 4
"""Rows of a task. Fewer rows than two tasks have are not worth waking a second thread."""
NUM_ROWS, A, B, C, OUT, WIDTH, FLOAT = range(2, 9)
PAGES, SLOTS, HEADS, KV_HEADS, PAGE, KEYS, VALUES, PAGE_BYTES = range(9, 17)
"""Places in the kernels' arguments, after the counters. FLOAT holds a float64."""
NUM_ARGS = PAGE_BYTES + 1
ROPE = {torch.bfloat16: "rope_bf16", torch.float16: "rope_fp16", torch.float32: "rope_fp32"}


def add_rms_norm_cpu_(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See `ops.Ops.add_rms_norm_`."""
    out = torch.empty_like(x)
    bits = np.float64(eps).view(np.int64).item()
    added = 0 if delta is None else delta.data_ptr()
    _run("norm", x.shape[0], x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), x.shape[1], bits)
    return out


def silu_mul_cpu(gate_up: Tensor) -> Tensor:
    """See `ops.Ops.silu_mul`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width))
    _run("silu", rows, gate_up.data_ptr(), 0, 0, out.data_ptr(), width, 0)
    return out


def rope_write_kv_cpu(qkv: Tensor, cos: Tensor, sin: Tensor, kv: KvPages, pages: Tensor, slots: Tensor) -> Tensor:
    """See `ops.Ops.rope_write_kv`."""
    rows, dim = qkv.shape[0], kv.head_dim
    heads = qkv.shape[1] // dim - 2 * kv.num_heads
    q = qkv.new_empty((rows, heads, dim))
    _run(
        ROPE[kv.dtype],
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


def _run(entry: str, rows: int, *args: int) -> None:
    block = arguments(rows, *args, *(0,) * (NUM_ARGS - 3 - len(args)))
    run(kernel_of(entry), block, team_size(), rows // ROWS)


def kernel_of(entry: str) -> int:
    """The address of a kernel by its name."""
    return address_of("pointwise_numba", entry)
