"""Adapter packing: PEFT's matrices to panels in host memory, once per adapter and layout, ready to be copied to
pages."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adapter_store.formats.weights import AdapterWeights, LoraTensors
from lorasrv.models.spec import ModelSpec
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SitePanels

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Panels = tuple[tuple[int, int], ...]
"""(index in the layer, rank rows) of each panel of one matrix."""


@dataclass(frozen=True)
class PackedAdapter:
    """Hold an adapter ready to be copied into the pool."""

    layout: AdapterLayout
    # uint8 [layers, layer_bytes], in the layout's packed order.
    data: Tensor

    @property
    def nbytes(self) -> int:
        """Return the bytes of `data`."""
        return self.data.nbytes


def pack_adapter(spec: ModelSpec, layout: AdapterLayout, weights: AdapterWeights, dtype: torch.dtype) -> PackedAdapter:
    """Pack an adapter's panels end to end, layer by layer, weights rounded to `dtype`.

    In NumPy, whose calls cost a fraction of torch's: between two copies of a loader thread the engine waits for the
    interpreter.
    """
    data = np.zeros((layout.num_layers, layout.layer_bytes), dtype=np.uint8)
    for layer in range(layout.num_layers):
        offsets = layout.packed_offsets[layer].tolist()
        for site, panels in zip(spec.sites(), layout.panels[layer], strict=True):
            if panels.total_rank:
                tensors = [weights.get((layer, module)) for module in site.modules]
                _pack_site(data[layer], offsets, panels, tensors, dtype)
    return PackedAdapter(layout, torch.from_numpy(data))


def _pack_site(
    row: Bytes, offsets: list[int], panels: SitePanels, tensors: list[LoraTensors | None], dtype: torch.dtype
) -> None:
    scales = _target(row, offsets[panels.scale], (panels.total_rank,), np.dtype("<f4"))
    first = 0
    for slice_panels, tensor in zip(panels.b, tensors, strict=True):
        if tensor is not None:
            last = first + tensor.rank
            scales[first:last] = tensor.scaling
            _write_panels(row, offsets, panels.a, first, _converted(tensor.a, dtype))
            _write_panels(row, offsets, slice_panels, 0, _converted(tensor.b, dtype).T)
            first = last


def _write_panels(row: Bytes, offsets: list[int], panels: Panels, first: int, matrix: Array) -> None:
    """Copy a matrix to the panels' rows that begin at `first`."""
    start = 0
    for index, count in panels:
        begin, end = max(first, start), min(first + len(matrix), start + count)
        if begin < end:
            target = _target(row, offsets[index], (count, matrix.shape[1]), matrix.dtype)
            target[begin - start : end - start] = matrix[begin - first : end - first]
        start += count


def _target(row: Bytes, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """View bytes of a packed row as numbers."""
    return row[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _converted(array: Array, dtype: torch.dtype) -> Array:
    """Convert a stored matrix to the adapter dtype; bf16 is its bits in uint16, stored and converted alike."""
    is_bf16 = array.dtype == np.uint16
    if is_bf16 and dtype == torch.bfloat16:
        return array
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    tensor = (tensor.view(torch.bfloat16) if is_bf16 else tensor).to(dtype)
    return (tensor.view(torch.uint16) if dtype == torch.bfloat16 else tensor).numpy()
