"""Paged attention on the CPU: pages are read in place, bf16, fp16 or fp32, with an online softmax; no gather.

A task is a block of query rows of one sequence, and some of its key heads. The rows of all query heads that share a key
head go through together, so that a loaded key or value serves every one of them. Keys come in blocks that begin at
multiples of `BLOCK_TOKENS`, so that a row's sums do not depend on which rows share its task.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.backend import AttentionPlan
from sgmv_kernels.kernel_code import address_of
from sgmv_kernels.kv_pages import KvPages
from sgmv_kernels.segments import Int32
from sgmv_kernels.team import Arguments, arguments, run, team_size

BLOCK_TOKENS = 128
"""Keys of one round of the online softmax: what rescales sums is paid once a block."""
TASK_ROWS = 24
"""Rows of a task, query rows times query heads of a key head: their sums stay in the first-level cache."""
TASK_INTS = 5
NUM_TASKS, TASKS, TABLES, TABLE_WIDTH, STARTS, LENS, PAGE, Q, HEADS, KV_HEADS = range(2, 12)
DIM, KEYS, VALUES, PAGE_BYTES, OUT, SCALE, WINDOW, SLOPES, SCRATCH, SCRATCH_BYTES, ROWS, BLOCK = range(12, 24)
"""Places in the kernel's arguments, after the counters. SCALE holds a float64."""
NUM_ARGS = BLOCK + 1

ENTRIES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class CpuSequences:
    """A step's sequences; what depends on the heads of a model is added at the first layer."""

    query_lens: Int32
    threads: int
    arguments: dict[tuple[int, int, int], Arguments]
    kept: list[object]


def prepare(plan: AttentionPlan, device: torch.device) -> CpuSequences:
    """Nothing but the lengths: tasks depend on the heads."""
    del device
    return CpuSequences(np.diff(plan.query_starts), team_size(), {}, [])


def attention_cpu(
    q: Tensor, kv: KvPages, plan: AttentionPlan, scale: float, window: int | None, alibi_slopes: Tensor | None
) -> Tensor:
    """See `ops.Ops.paged_attention`."""
    sequences: CpuSequences = plan.prepared
    heads = q.shape[1]
    shape = heads, kv.num_heads, kv.head_dim
    if shape not in sequences.arguments:
        sequences.arguments[shape] = _arguments(plan, sequences, *shape)
    args = sequences.arguments[shape]
    out = torch.empty_like(q)
    args[Q], args[OUT], args[KEYS], args[VALUES] = (
        q.data_ptr(),
        out.data_ptr(),
        kv.keys.data_ptr(),
        kv.values.data_ptr(),
    )
    args[PAGE_BYTES] = kv.keys.stride(0) * kv.keys.itemsize
    args[SCALE] = np.float64(scale).view(np.int64).item()
    args[WINDOW] = window or 0
    args[SLOPES] = 0 if alibi_slopes is None else alibi_slopes.data_ptr()
    run(kernel_of(kv.dtype), args, sequences.threads, args[NUM_TASKS])
    return out


def _arguments(plan: AttentionPlan, sequences: CpuSequences, heads: int, kv_heads: int, dim: int) -> Arguments:
    group = heads // kv_heads
    rows = max(1, TASK_ROWS // group)
    threads = sequences.threads
    tasks = _tasks(sequences.query_lens, plan.kv_lens, rows, kv_heads, threads)
    block = -(-BLOCK_TOKENS // plan.page_size) * plan.page_size
    # Queries, sums, scores, then the maximum and the sum of every row.
    scratch_bytes = 4 * rows * group * (2 * dim + block + 2)
    scratch_bytes = -(-scratch_bytes // 128) * 128
    scratch = torch.empty(threads * scratch_bytes, dtype=torch.uint8)
    sequences.kept.extend((tasks, scratch))
    return arguments(
        len(tasks),
        tasks.ctypes.data,
        plan.page_tables.ctypes.data,
        plan.page_tables.shape[1],
        plan.query_starts.ctypes.data,
        plan.kv_lens.ctypes.data,
        plan.page_size,
        0,
        heads,
        kv_heads,
        dim,
        *(0,) * 7,
        scratch.data_ptr(),
        scratch_bytes,
        rows * group,
        block,
    )


def _tasks(query_lens: Int32, kv_lens: Int32, rows: int, kv_heads: int, threads: int) -> Int32:
    """[N, 5]: sequence, first and last key head, first and last query row; those with most work first."""
    blocks = -(-query_lens // rows)
    apart = int(blocks.sum()) < 4 * threads
    spans = [(h, h + 1) for h in range(kv_heads)] if apart else [(0, kv_heads)]
    work = np.minimum(query_lens, rows) * kv_lens
    tasks = [
        (s, first_head, last_head, begin, min(n, begin + rows))
        for s, n in ((s, int(query_lens[s])) for s in np.argsort(-work, kind="stable").tolist())
        for begin in range(0, n, rows)
        for first_head, last_head in spans
    ]
    return np.array(tasks, dtype=np.int32).reshape(-1, TASK_INTS)


def kernel_of(dtype: torch.dtype) -> int:
    """The address of the kernel for pages of a dtype."""
    return address_of("attention_numba", ENTRIES[dtype])
