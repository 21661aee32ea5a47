"""SGMV on the CPU: panels are read in place from the pool, bf16, fp16 or fp32, summed in fp32; no gather, no copy.

A task is a block of rows of one segment, and all its slices or one; it shrinks and expands in one go, so that a site
costs one parallel region and no barrier. Largest tasks first; threads take them as they come free.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.backend import SgmvPlan
from sgmv_kernels.kernel_code import address_of
from sgmv_kernels.layout import MAX_SLICES
from sgmv_kernels.segments import Int32
from sgmv_kernels.tables import SgmvTables
from sgmv_kernels.team import Arguments, arguments, run, team_size

BLOCK_ROWS = 32
"""Most rows of a task: its outputs stay in the second-level cache while its panels pass through."""
SHRINK, EXPAND = 1, 2
TASK_INTS = 5
PHASES, NUM_TASKS, TASKS, PERMUTATION, RECORDS, PANELS, NUM_PANELS, SLAB = range(2, 10)
X, X_WIDTH, PARTED, Y, Y_WIDTH, V, V_WIDTH, WIDTHS = range(10, 18)
"""Places in the kernel's arguments, after the counters."""
NUM_ARGS = WIDTHS + MAX_SLICES
ENTRIES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class CpuTables:
    """A step for the kernel: what of its arguments stays the same, `arguments[site]`, and what those point to.

    `ranks[layer][site]` is the most rank rows of a segment; `v` [T, most ranks] fp32 scratch; `record_bytes` those of a
    (layer, site).
    """

    kernel: int
    threads: list[int]
    arguments: list[Arguments]
    records: int
    record_bytes: int
    ranks: list[list[int]]
    v: Tensor
    kept: tuple[object, ...]


def prepare(tables: SgmvTables, dtype: torch.dtype, device: torch.device) -> CpuTables:
    """Cut segments into tasks, and lay out the kernel's arguments."""
    del device
    threads, num_sites = team_size(), len(tables.sites)
    counts = {len(site.out_features) for site in tables.sites}
    tasks = {n: _tasks(tables, n, threads) for n in counts}
    permutation, records, panels = map(np.ascontiguousarray, (tables.permutation, tables.records, tables.panels))
    ranks = records[..., 1:].sum(axis=-1).max(axis=-1, initial=0)
    v = torch.empty((len(permutation), int(ranks.max(initial=0))), dtype=torch.float32)
    parted = torch.empty((len(permutation), max((site.in_features for site in tables.sites), default=0)))
    blocks = []
    for site in tables.sites:
        own = tasks[len(site.out_features)]
        widths = (*site.out_features, 0, 0)[:MAX_SLICES]
        blocks.append(
            arguments(
                SHRINK | EXPAND,
                len(own),
                own.ctypes.data,
                permutation.ctypes.data,
                0,
                panels.ctypes.data,
                len(panels),
                0,
                0,
                site.in_features,
                parted.data_ptr(),
                0,
                site.total_out,
                v.data_ptr(),
                v.shape[1],
                *widths,
            )
        )
    return CpuTables(
        kernel=kernel_of(dtype),
        threads=[min(threads, len(tasks[len(site.out_features)])) for site in tables.sites],
        arguments=blocks,
        records=records.ctypes.data,
        record_bytes=records.nbytes // max(1, len(records) * num_sites),
        ranks=ranks.tolist(),
        v=v,
        kept=(parted, tasks, permutation, records, panels),
    )


def _tasks(tables: SgmvTables, slices: int, threads: int) -> Int32:
    """Whole segments, in blocks of rows; their slices apart if there are few."""
    lengths = np.diff(tables.bounds).ravel()
    ranks = tables.records[..., 1:].sum(axis=(0, 1, 3))
    share = max(1, -(-int(lengths.sum()) // threads))
    rows = min(BLOCK_ROWS, share)
    blocks = -(-lengths // rows)
    apart = slices if int(blocks.sum()) < 2 * threads else 1
    made = []
    for s in np.argsort(-ranks * np.minimum(lengths, rows), kind="stable").tolist():
        begin, end = tables.bounds[s].tolist()
        size = -(-(end - begin) // max(1, int(blocks[s])))
        for first in range(begin, end, max(1, size)):
            last = min(end, first + size)
            made += [(s, first, last, *span) for span in (_spans(slices, apart))]
    return np.array(made, dtype=np.int32).reshape(-1, TASK_INTS)


def _spans(slices: int, apart: int) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(slices)] if apart > 1 else [(0, slices)]


def shrink_cpu(x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> Tensor:
    """See `ops.Ops.shrink`: one plane."""
    v = torch.empty((1, len(x), plan.tables.max_rank(layer, site) if plan.tables.num_segments else 0))
    _launch(SHRINK, x, x, v, slab, plan, layer, site)
    return v


def expand_cpu_(y: Tensor, v: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
    """See `ops.Ops.expand_`."""
    _launch(EXPAND, y, y, v.sum(0), slab, plan, layer, site)


def sgmv_cpu_(y: Tensor, x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
    """See `ops.Ops.sgmv_`."""
    _launch(SHRINK | EXPAND, y, x, plan.prepared.v, slab, plan, layer, site)


def _launch(phases: int, y: Tensor, x: Tensor, v: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
    tables: CpuTables = plan.prepared
    if not tables.arguments or not tables.ranks[layer][site]:
        return
    args = tables.arguments[site]
    args[PHASES], args[V], args[V_WIDTH] = phases, v.data_ptr(), v.shape[-1]
    args[RECORDS] = tables.records + (layer * len(tables.arguments) + site) * tables.record_bytes
    args[SLAB], args[X], args[Y] = slab.data_ptr(), x.data_ptr(), y.data_ptr()
    run(tables.kernel, tables.threads[site], args)


def kernel_of(dtype: torch.dtype) -> int:
    """The address of the kernel for panels of a dtype."""
    return address_of("sgmv_numba", ENTRIES[dtype])
