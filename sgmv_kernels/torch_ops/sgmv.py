"""SGMV in plain torch: matrix products over views of the pool, one segment after another. Any device, any rank.

Adjacent panels are read as one matrix, so that an adapter in one run needs one product for each matrix.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from sgmv_kernels.formats.adapter_panels import PANEL_RANKS
from sgmv_kernels.formats.kv_format import ALIGNMENT_BYTES
from sgmv_kernels.metadata.plans import SgmvPlan
from sgmv_kernels.metadata.sgmv_tables import SgmvTables


def prepare(tables: SgmvTables, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy the permutation to the device."""
    del dtype
    return torch.from_numpy(tables.permutation).to(device, torch.int64)


def shrink_torch(x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> Tensor:
    """See `ops.Ops.shrink`; makes one plane."""
    v = x.new_zeros(
        (1, len(x), plan.tables.max_rank(layer, site) if plan.tables.num_segments else 0), dtype=torch.float32
    )
    for begin, end, record, dtype, _ in _segments(plan, layer, site):
        rows = x[plan.prepared[begin:end]].float()
        rank = 0
        for a in _matrices(slab, plan, dtype, record[0] + 1, sum(record[1:]), x.shape[1]):
            v[0, begin:end, rank : rank + len(a)] = rows @ a.float().T
            rank += len(a)
    return v


def expand_torch_(y: Tensor, v: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
    """See `ops.Ops.expand_`."""
    dims = plan.tables.sites[site]
    for begin, end, record, dtype, weight in _segments(plan, layer, site):
        total = sum(record[1:])
        scale = weight * _view(slab, torch.float32, _offset(plan, record[0]), 1, total)
        scaled = v[:, begin:end, :total].sum(0) * scale
        delta = y.new_zeros((end - begin, dims.total_out), dtype=torch.float32)
        rank = column = 0
        panel = record[0] + 1 + _num_panels(total)
        for width, slice_rank in zip(dims.out_features, record[1:], strict=False):
            for b in _matrices(slab, plan, dtype, panel, slice_rank, width):
                delta[:, column : column + width].addmm_(scaled[:, rank : rank + len(b)], b.float())
                rank += len(b)
            panel += _num_panels(slice_rank)
            column += width
        y.index_add_(0, plan.prepared[begin:end], delta.to(y.dtype))


def sgmv_torch_(y: Tensor, x: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, site: int) -> None:
    """See `ops.Ops.sgmv_`."""
    expand_torch_(y, shrink_torch(x, slab, plan, layer, site), slab, plan, layer, site)


def _segments(plan: SgmvPlan, layer: int, site: int) -> Iterator[tuple[int, int, list[int], torch.dtype, float]]:
    """Yield (first place, end, record, dtype of the weights, factor) of the segments that have weights at this site."""
    tables = plan.tables
    if not tables.num_segments:
        return
    records = tables.records[layer, site].tolist()
    facts = zip(tables.bounds.tolist(), records, tables.are_codes.tolist(), tables.weights.tolist(), strict=True)
    for (begin, end), record, codes, weight in facts:
        if end > begin and any(record[1:]):
            yield begin, end, record, torch.int8 if codes else plan.dtype, weight


def _num_panels(rank: int) -> int:
    return -(-rank // PANEL_RANKS)


def _offset(plan: SgmvPlan, panel: int) -> int:
    return int(plan.tables.panels[panel]) * ALIGNMENT_BYTES


def _matrices(slab: Tensor, plan: SgmvPlan, dtype: torch.dtype, panel: int, rank: int, width: int) -> Iterator[Tensor]:
    """Yield views [rows, width] of `rank` rows in consecutive panels; adjacent panels are one view."""
    start = rows = 0
    for i in range(_num_panels(rank)):
        offset, count = _offset(plan, panel + i), min(PANEL_RANKS, rank - i * PANEL_RANKS)
        if rows and offset == start + rows * width * dtype.itemsize:
            rows += count
            continue
        if rows:
            yield _view(slab, dtype, start, rows, width)
        start, rows = offset, count
    if rows:
        yield _view(slab, dtype, start, rows, width)


def _view(slab: Tensor, dtype: torch.dtype, offset_bytes: int, rows: int, width: int) -> Tensor:
    return slab[offset_bytes : offset_bytes + rows * width * dtype.itemsize].view(dtype).view(rows, width)
