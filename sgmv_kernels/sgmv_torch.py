"""SGMV in plain torch: matrix products over views of the pool, one segment after another. Any device, any rank.

Panels that lie end to end are read as one matrix, so that an adapter in one run costs one product a matrix.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sgmv_kernels.layout import PlacedAdapter, SiteDims
from sgmv_kernels.segments import BASE, Segments


def sgmv_torch(
    y: Tensor,
    x: Tensor,
    slab: Tensor,
    dtype: torch.dtype,
    segments: Segments,
    adapters: Sequence[PlacedAdapter],
    layer: int,
    site: int,
) -> None:
    """See `sgmv_kernels.ops.sgmv`."""
    for s in range(len(segments)):
        index = int(segments.adapters[s])
        if index == BASE or not adapters[index].layout.panels[layer][site].total_rank:
            continue
        rows = segments.rows(s)
        first, last = int(rows[0]), int(rows[-1])
        if last - first == len(rows) - 1:
            _add_delta(y[first : last + 1], x[first : last + 1], slab, dtype, adapters[index], layer, site)
        else:
            at = torch.from_numpy(rows).to(y.device)
            delta = torch.zeros((len(rows), y.shape[1]), dtype=y.dtype, device=y.device)
            _add_delta(delta, x.index_select(0, at), slab, dtype, adapters[index], layer, site)
            y.index_add_(0, at, delta)


def _add_delta(
    y: Tensor, x: Tensor, slab: Tensor, dtype: torch.dtype, adapter: PlacedAdapter, layer: int, site: int
) -> None:
    """y [n, out] += the delta of one adapter for rows x [n, in]."""
    panels, offsets = adapter.layout.panels[layer][site], adapter.offsets[layer]
    dims: SiteDims = adapter.layout.sites[site]
    shrunk = [x @ a.float().T for a in _matrices(slab, dtype, panels.a, offsets, dims.in_features)]
    scale = _view(slab, torch.float32, int(offsets[panels.scale]), 1, panels.total_rank)
    v = (shrunk[0] if len(shrunk) == 1 else torch.cat(shrunk, dim=1)) * scale
    rank_start = out_start = 0
    for slice_panels, out in zip(panels.b, dims.out_features, strict=True):
        columns = y[:, out_start : out_start + out]
        for b in _matrices(slab, dtype, slice_panels, offsets, out):
            columns.addmm_(v[:, rank_start : rank_start + b.shape[0]], b.float())
            rank_start += b.shape[0]
        out_start += out


def _matrices(
    slab: Tensor, dtype: torch.dtype, panels: Sequence[tuple[int, int]], offsets: npt.NDArray[np.int64], width: int
) -> Iterator[Tensor]:
    """Views [rows, width] of the panels, those that lie end to end as one."""
    start = rows = 0
    for index, count in panels:
        offset = int(offsets[index])
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
