"""CPU launcher of paged attention, with an online softmax over pages that are read in place.

A task is a block of query rows of one sequence and some of its key heads. The rows of all query heads that share a key
head are computed together, so that a loaded key or value is used for all of them. Blocks of keys begin at multiples of
`BLOCK_TOKENS`, so that a row's sums do not depend on the other rows of its task.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.backend import Scoring
from sgmv_kernels.cpu_arguments.attention import (
    BLOCK,
    DIM,
    HEADS,
    KEY_SCALES,
    KEYS,
    KV_HEADS,
    LENS,
    NUM_TASKS,
    OUT,
    PAGE,
    PAGE_BYTES,
    POSITIONS,
    ROWS,
    SCALE,
    SCRATCH,
    SCRATCH_BYTES,
    SLOPES,
    SOFTCAP,
    STARTS,
    TABLE_WIDTH,
    TABLES,
    TASK_INTS,
    TASKS,
    THREADS,
    TREES,
    VALUE_MINIMA,
    VALUE_SCALES,
    VALUES,
    WINDOW,
    WORDS,
    Q,
)
from sgmv_kernels.cpu_runtime.launch import Part, empty, launch
from sgmv_kernels.cpu_runtime.team import team_size
from sgmv_kernels.formats import kv_format as formats
from sgmv_kernels.formats.kv_pages import KvPages
from sgmv_kernels.metadata.plans import AttentionPlan
from sgmv_kernels.metadata.segments import Int32

MODULE, PART = "attention", "attention"
BLOCK_TOKENS = 128
"""Keys of one round of the online softmax; sums are rescaled once per block."""
TASK_ROWS = 24
"""Rows of a task (query rows times query heads of a key head), few enough that their sums stay in the L1 cache."""
ENTRIES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int8": "int8", "k8v4": "k8v4"}
"""KV formats that the kernels read, and the entry for each."""


@dataclass(frozen=True, slots=True)
class CpuSequences:
    """Hold the sequences of a step."""

    query_lens: Int32
    # Launch arguments by (heads, key heads, head dim).
    parts: dict[tuple[int, int, int], Part]
    # Arrays that the launch arguments point to.
    kept: list[object]


def prepare(plan: AttentionPlan, device: torch.device) -> CpuSequences:
    """Return the sequences of a step; their tasks depend on the heads and are made at the first layer."""
    del device
    return CpuSequences(plan.query_starts[1:] - plan.query_starts[:-1], {}, [])


def attention_cpu(q: Tensor, kv: KvPages, plan: AttentionPlan, scoring: Scoring) -> Tensor:
    """See `ops.Ops.paged_attention`."""
    scale, window, softcap, slopes = scoring
    out = empty("attended", q.shape)
    own = {
        Q: q.data_ptr(),
        OUT: out.data_ptr(),
        KEYS: kv.keys.data_ptr(),
        VALUES: kv.values.data_ptr(),
        PAGE_BYTES: kv.page_bytes,
        SCALE: np.float64(scale).view(np.int64).item(),
        SOFTCAP: np.float64(softcap or 0.0).view(np.int64).item(),
        WINDOW: window or 0,
        KEY_SCALES: kv.address(formats.KEY_SCALES),
        VALUE_SCALES: kv.address(formats.VALUE_SCALES),
        VALUE_MINIMA: kv.address(formats.VALUE_MINIMA),
        SLOPES: 0 if slopes is None else slopes.data_ptr(),
    }
    launch(MODULE, ENTRIES[kv.format.name], sequences_part(plan, q.shape[1], kv.num_heads, kv.head_dim), own)
    return out


def sequences_part(plan: AttentionPlan, heads: int, kv_heads: int, dim: int) -> Part:
    """Return a step's launch arguments for the attention of a model with these heads."""
    sequences: CpuSequences = plan.prepared
    shape = heads, kv_heads, dim
    if shape not in sequences.parts:
        part = tasks_part(plan, sequences, np.zeros_like(sequences.query_lens), shape)
        if plan.trees is not None:
            of_trees = {
                TREES: plan.trees.starts.ctypes.data,
                WORDS: plan.trees.words.ctypes.data,
                POSITIONS: plan.trees.positions.ctypes.data,
            }
            part = replace(part, words={**part.words, **of_trees})
        sequences.parts[shape] = part
    return sequences.parts[shape]


def tasks_part(
    plan: AttentionPlan, sequences: CpuSequences, begins: Int32, shape: tuple[int, int, int], least_width: int = 0
) -> Part:
    """Return the launch arguments for rows of each sequence from `begins` [B] on.

    Args:
        shape: heads, key heads, head dim.
        least_width: least width of a row of sums.
    """
    heads, kv_heads, dim = shape
    group, threads = heads // kv_heads, team_size()
    rows = max(1, TASK_ROWS // group)
    tasks = _tasks(begins, sequences.query_lens, plan.kv_lens, rows, kv_heads, threads)
    block = -(-BLOCK_TOKENS // plan.page_size) * plan.page_size
    width = 2 * formats.padded_pairs(dim)
    # Queries, sums, scores, then the maximum, the sum, a factor, and four units of every row.
    scratch_bytes = 4 * rows * group * (width + max(width, least_width) + block + 7)
    scratch_bytes = -(-scratch_bytes // 128) * 128
    scratch = torch.empty(threads * scratch_bytes, dtype=torch.uint8)
    sequences.kept.extend((tasks, scratch))
    words = {
        NUM_TASKS: len(tasks),
        TASKS: tasks.ctypes.data,
        TABLES: plan.page_tables.ctypes.data,
        TABLE_WIDTH: plan.page_tables.shape[1],
        STARTS: plan.query_starts.ctypes.data,
        LENS: plan.kv_lens.ctypes.data,
        PAGE: plan.page_size,
        HEADS: heads,
        KV_HEADS: kv_heads,
        DIM: dim,
        SCRATCH: scratch.data_ptr(),
        SCRATCH_BYTES: scratch_bytes,
        ROWS: rows * group,
        BLOCK: block,
        THREADS: threads,
    }
    return Part(PART, words, len(tasks), threads)


def _tasks(begins: Int32, query_lens: Int32, kv_lens: Int32, rows: int, kv_heads: int, threads: int) -> Int32:
    """Return tasks [N, 5] int32: sequence, first and last key head, first and last query row; largest tasks first."""
    counts = query_lens - begins
    blocks = -(-counts // rows)
    apart = int(blocks.sum()) < 4 * threads
    spans = [(h, h + 1) for h in range(kv_heads)] if apart else [(0, kv_heads)]
    work = np.minimum(counts, rows) * kv_lens
    tasks = [
        (s, first_head, last_head, begin, min(n, begin + rows))
        for s, first, n in ((s, int(begins[s]), int(query_lens[s])) for s in (-work).argsort(kind="stable").tolist())
        for begin in range(first, n, rows)
        for first_head, last_head in spans
    ]
    return np.array(tasks, dtype=np.int32).reshape(-1, TASK_INTS)
