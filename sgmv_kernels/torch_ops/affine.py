"""Gain and shift of an adapter in plain torch, one segment after another. Any device."""

import torch
from torch import Tensor

from sgmv_kernels.formats.adapter_panels import NO_VECTOR
from sgmv_kernels.formats.kv_format import ALIGNMENT_BYTES
from sgmv_kernels.metadata.plans import SgmvPlan


def affine_torch_(y: Tensor, slab: Tensor, plan: SgmvPlan, layer: int, place: int) -> None:
    """See `ops.Ops.affine_`."""
    tables = plan.tables
    facts = zip(tables.bounds.tolist(), tables.vectors[layer, place].tolist(), tables.weights.tolist(), strict=True)
    for (begin, end), offsets, weight in facts:
        gain, shift = (_vector(slab, offset, y.shape[1]) for offset in offsets)
        rows = plan.prepared[begin:end]
        if gain is not None or shift is not None:
            own = y[rows].float()
            own = own if gain is None else own * gain
            y[rows] = (own if shift is None else own + weight * shift).to(y.dtype)


def _vector(slab: Tensor, offset: int, width: int) -> Tensor | None:
    if offset == NO_VECTOR:
        return None
    start = offset * ALIGNMENT_BYTES
    return slab[start : start + 4 * width].view(torch.float32)
