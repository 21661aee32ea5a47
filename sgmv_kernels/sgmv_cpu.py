"""SGMV on the CPU: panels are read in place from the pool, bf16, fp16 or fp32, summed in fp32; no gather, no copy.

A task is a block of rows of one segment, and all its slices or one; it shrinks and expands in one go, so that a site
costs one parallel region and no barrier. Largest tasks first; threads take them as they come free.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgmv_kernels.backend import SgmvPlan
from sgmv_kernels.kernel_code import address_of
from sgmv_kernels.layout import MAX_SLICES
from sgmv_kernels.segments import Int32
from sgmv_kernels.tables import SgmvTables
from sgmv_kernels.team import Arguments, arguments, run, team_size

Int64 = npt.NDArray[np.int64]
BLOCK_ROWS = 32
"""Most rows of a task: its outputs stay in the second-level cache while its panels pass through."""
SHRINK, EXPAND = 1, 2
TASK_INTS = 5
PHASES, NUM_TASKS, TASKS, PERMUTATION, RECORDS, PANELS, SLAB = range(2, 9)
X, X_WIDTH, PARTED, Y, Y_WIDTH, V, V_WIDTH, SCRATCH, SCRATCH_BYTES, WIDTHS = range(9, 19)
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
    threads: int
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
    ranks_of = tables.records[..., 1:].sum(axis=-1)
    blocks = _blocks(tables.bounds, ranks_of.sum(axis=(0, 1)), threads)
    tasks = {n: _tasks(blocks, n, threads) for n in {len(site.out_features) for site in tables.sites}}
    ranks = ranks_of.max(axis=-1, initial=0)
    permutation, records, panels = map(np.ascontiguousarray, (tables.permutation, tables.records, tables.panels))
    v = torch.empty((len(permutation), int(ranks.max(initial=0))), dtype=torch.float32)
    parted = torch.empty((len(permutation), max((site.in_features for site in tables.sites), default=0)))
    widest = max((width for site in tables.sites for width in site.out_features), default=0)
    scratch = torch.empty(threads * widest)
    made: list[Arguments] = []
    for site in tables.sites:
        own = tasks[len(site.out_features)]
        widths = (*site.out_features, 0, 0)[:MAX_SLICES]
        made.append(
            arguments(
                SHRINK | EXPAND,
                len(own),
                own.ctypes.data,
                permutation.ctypes.data,
                0,
                panels.ctypes.data,
                0,
                0,
                site.in_features,
                parted.data_ptr(),
                0,
                site.total_out,
                v.data_ptr(),
                v.shape[1],
                scratch.data_ptr(),
                4 * widest,
                *widths,
            )
        )
    return CpuTables(
        kernel=kernel_of(dtype),
        threads=threads,
        arguments=made,
        records=records.ctypes.data,
        record_bytes=records.nbytes // max(1, len(records) * num_sites),
        ranks=ranks.tolist(),
        v=v,
        kept=(parted, scratch, tasks, permutation, records, panels),
    )


def _blocks(bounds: Int32, ranks: Int64, threads: int) -> Int32:
    """[N, 3]: segment, first and last place of blocks of rows; those with most work first."""
    lengths = np.diff(bounds).ravel()
    rows = min(BLOCK_ROWS, max(1, -(-int(lengths.sum()) // threads)))
    pieces = -(-lengths // rows)
    size = -(-lengths // np.maximum(1, pieces))
    order = np.argsort(-ranks * size, kind="stable")
    segment = np.repeat(order, pieces[order])
    ends = np.cumsum(pieces[order])
    within = np.arange(len(segment)) - np.repeat(ends - pieces[order], pieces[order])
    begin = bounds[segment, 0] + within * size[segment]
    end = np.minimum(begin + size[segment], bounds[segment, 1])
    return np.stack((segment, begin, end), axis=-1).astype(np.int32)


def _tasks(blocks: Int32, slices: int, threads: int) -> Int32:
    """[N', 5]: blocks with a first and last slice: all slices, or each apart if there are few blocks."""
    apart = slices if len(blocks) < 2 * threads else 1
    tasks = np.empty((len(blocks), apart, TASK_INTS), dtype=np.int32)
    tasks[:, :, :3] = blocks[:, None]
    tasks[:, :, 3] = np.arange(apart)
    tasks[:, :, 4] = tasks[:, :, 3] + 1 if apart > 1 else slices
    return tasks.reshape(-1, TASK_INTS)


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
    run(tables.kernel, args, tables.threads, args[NUM_TASKS])


def kernel_of(dtype: torch.dtype) -> int:
    """The address of the kernel for panels of a dtype."""
    return address_of("sgmv_numba", ENTRIES[dtype])
