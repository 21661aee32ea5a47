"""Own rows of the vocabulary: one gather per adapter for the embedding; for the head, products by `shrink`.

Blocks of rows, which are the layers of their layout, are distributed over the slabs in turn.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sgmv_kernels.formats.adapter_panels import PANEL_RANKS, RowTokens
from sgmv_kernels.formats.kv_format import ALIGNMENT_BYTES
from sgmv_kernels.metadata.h2d import upload
from sgmv_kernels.metadata.plans import SgmvPlan

Shrink = Callable[[Tensor, Tensor, SgmvPlan, int, int], Tensor]


def own_embeddings_torch_(
    x: Tensor,
    ids: Tensor,
    slabs: Tensor,
    plan: SgmvPlan,
    site: int,
    tokens: Sequence[RowTokens],
    known_tokens: Sequence[Tensor],
) -> None:
    """See `ops.Ops.own_embeddings_`; `known_tokens` are those of the site on the device."""
    tables, device, width = plan.tables, ids.device, x.shape[1]
    numbers = slabs.view(-1).view(plan.dtype)
    firsts = tables.records[:, site, :, 0].T
    permutation, panels, first_panels = upload([tables.permutation, tables.panels, firsts.ravel()], device)
    columns = torch.arange(width, device=device)
    for s, (begin, end) in enumerate(tables.bounds.tolist()):
        known, first = known_tokens[s], first_panels.view(firsts.shape)[s]
        if not len(known):
            continue
        rows = permutation[begin:end]
        own = ids[rows]
        at = torch.searchsorted(known, own).clamp_(max=len(known) - 1)
        block, inside = at // tokens[s].widths[site], at % tokens[s].widths[site]
        offsets = panels[first[block] + 1 + inside // PANEL_RANKS] * (ALIGNMENT_BYTES // plan.dtype.itemsize)
        offsets += inside % PANEL_RANKS * width + block % len(slabs) * (slabs.shape[1] // plan.dtype.itemsize)
        found = numbers[offsets[:, None] + columns].to(x.dtype)
        x[rows] = torch.where((known[at] == own)[:, None], found, x[rows])


def own_logits_(
    logits: Tensor,
    states: Tensor,
    slabs: Tensor,
    plan: SgmvPlan,
    site: int,
    tokens: Sequence[RowTokens],
    known_tokens: Sequence[Tensor],
    shrink: Shrink,
) -> None:
    """See `ops.Ops.own_logits_`; `known_tokens` are those of the site on the device."""
    tables, device = plan.tables, logits.device
    bounds = tables.bounds.tolist()
    parts: list[list[Tensor]] = [[] for _ in bounds]
    for layer in range(len(tables.records)):
        if not tables.max_rank(layer, site):
            continue
        v = shrink(states, slabs[layer % len(slabs)], plan, layer, site).sum(0)
        for s, (begin, end) in enumerate(bounds):
            if count := len(tokens[s].block(site, layer)):
                parts[s].append(v[begin:end, :count])
    (permutation,) = upload([tables.permutation], device)
    for s, (begin, end) in enumerate(bounds):
        if parts[s]:
            logits[permutation[begin:end, None], known_tokens[s]] = torch.cat(parts[s], dim=1).to(logits.dtype)
