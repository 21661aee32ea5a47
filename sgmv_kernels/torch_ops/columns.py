"""Columns of A by token, for adapters of an embedding: one gather per adapter, in plain torch on every device.

A token's column has only `rank` numbers, in as many rows of a panel: a separate kernel would not be faster.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.formats.adapter_panels import PANEL_RANKS
from sgmv_kernels.formats.kv_format import ALIGNMENT_BYTES
from sgmv_kernels.metadata.h2d import upload
from sgmv_kernels.metadata.plans import SgmvPlan
from sgmv_kernels.metadata.segments import Int32
from sgmv_kernels.metadata.sgmv_tables import SgmvTables


def columns_torch(ids: Tensor, slabs: Tensor, plan: SgmvPlan, site: int, firsts: Sequence[int]) -> Tensor:
    """See `ops.Ops.columns`."""
    tables, device = plan.tables, ids.device
    # The length of a row: a rank that kernels are compiled for.
    held = -(-tables.max_rank(0, site) // PANEL_RANKS) * PANEL_RANKS
    v = torch.zeros((1, plan.num_rows, held), device=device)
    width = tables.sites[site].in_features
    panels = [tables.panels[places] for places in _panel_places(tables, site)]
    permutation, starts, *units = upload([tables.permutation, np.array(firsts), *map(np.ravel, panels)], device)
    for s, (begin, end) in enumerate(tables.bounds.tolist()):
        own = ids[permutation[begin:end]]
        blocks = own // width
        rank, dtype = panels[s].shape[1], torch.int8 if tables.are_codes[s] else plan.dtype
        # Where the row of a rank begins, counted in numbers from the start of slab 0: over 2^31 in a large pool.
        rows = units[s].view(panels[s].shape)[blocks] * (ALIGNMENT_BYTES // dtype.itemsize)
        rows += torch.arange(rank, device=device) % PANEL_RANKS * width
        rows += (blocks * (slabs.shape[1] // dtype.itemsize) + own - starts[blocks])[:, None]
        v[0, begin:end, :rank] = slabs.view(-1).view(dtype)[rows].float()
    return v


def _panel_places(tables: SgmvTables, site: int) -> Iterator[Int32]:
    """Yield, for each segment, the places [L, rank] in `tables.panels` of the panels that hold the rows of A."""
    for record in tables.records[:, site].swapaxes(0, 1):
        yield record[:, :1] + 1 + np.arange(record[0, 1], dtype=np.int32) // PANEL_RANKS
