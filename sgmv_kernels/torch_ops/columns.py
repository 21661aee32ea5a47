"""Columns of A by token, for adapters of an embedding: one gather per adapter, in plain torch on every device.

A token's column has only `rank` numbers, in as many rows of a panel: a separate kernel would not be faster.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sgmv_kernels.formats.adapter_panels import PANEL_RANKS
from sgmv_kernels.formats.kv_format import ALIGNMENT_BYTES
from sgmv_kernels.metadata.plans import SgmvPlan


def columns_torch(ids: Tensor, slabs: Tensor, plan: SgmvPlan, site: int, firsts: Sequence[int]) -> Tensor:
    """See `ops.Ops.columns`."""
    tables, device = plan.tables, ids.device
    # The length of a row: a rank that kernels are compiled for.
    held = -(-tables.max_rank(0, site) // PANEL_RANKS) * PANEL_RANKS
    v = torch.zeros((1, plan.num_rows, held), device=device)
    width = tables.sites[site].in_features
    permutation = torch.from_numpy(tables.permutation).to(device)
    starts = torch.tensor(firsts, device=device)
    for s, (begin, end) in enumerate(tables.bounds.tolist()):
        own = ids[permutation[begin:end]]
        blocks = own // width
        rank, dtype = int(tables.records[0, site, s, 1]), torch.int8 if tables.are_codes[s] else plan.dtype
        ranks = np.arange(rank)
        panels = tables.records[:, site, s, :1] + 1 + ranks // PANEL_RANKS
        # [L, rank]: the start of each row of a block, counted in numbers from the start of slab 0.
        rows = (
            tables.panels[panels].astype(np.int64) * (ALIGNMENT_BYTES // dtype.itemsize) + ranks % PANEL_RANKS * width
        )
        rows += np.arange(len(slabs))[:, None] * (slabs.shape[1] // dtype.itemsize)
        at = torch.from_numpy(rows).to(device)[blocks] + (own - starts[blocks])[:, None]
        v[0, begin:end, :rank] = slabs.view(-1).view(dtype)[at].float()
    return v
