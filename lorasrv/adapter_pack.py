"""PEFT's matrices -> panels in host memory, once for each adapter and layout: what the pool's pages are filled from."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adapter_store.loader import AdapterWeights, LoraTensors
from lorasrv.models.spec import ModelSpec
from sgmv_kernels.layout import AdapterLayout, SitePanels


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter ready to be copied into the pool: `data` [layers, layer_bytes] uint8 in the layout's packed order."""

    layout: AdapterLayout
    data: Tensor

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


def pack_adapter(spec: ModelSpec, layout: AdapterLayout, weights: AdapterWeights, dtype: torch.dtype) -> PackedAdapter:
    """Lay an adapter's panels end to end, layer by layer, weights rounded to `dtype`."""
    data = torch.zeros((layout.num_layers, layout.layer_bytes), dtype=torch.uint8)
    for layer in range(layout.num_layers):
        offsets = layout.packed_offsets[layer].tolist()
        for site, panels in zip(spec.sites(), layout.panels[layer], strict=True):
            if panels.total_rank:
                tensors = [weights.get((layer, module)) for module in site.modules]
                _pack_site(data[layer], offsets, panels, tensors, dtype)
    return PackedAdapter(layout, data)


def _pack_site(
    row: Tensor, offsets: list[int], panels: SitePanels, tensors: list[LoraTensors | None], dtype: torch.dtype
) -> None:
    present = [t for t in tensors if t is not None]
    scales = torch.cat([torch.full((t.rank,), t.scaling, dtype=torch.float32) for t in present])
    _write(row, offsets[panels.scale], scales)
    _write_panels(row, offsets, panels.a, torch.cat([_tensor(t.a, dtype) for t in present]))
    for slice_panels, tensor in zip(panels.b, tensors, strict=True):
        if tensor is not None:
            _write_panels(row, offsets, slice_panels, _tensor(tensor.b, dtype).T)


def _write_panels(row: Tensor, offsets: list[int], panels: tuple[tuple[int, int], ...], matrix: Tensor) -> None:
    start = 0
    for index, count in panels:
        _write(row, offsets[index], matrix[start : start + count])
        start += count


def _write(row: Tensor, offset: int, values: Tensor) -> None:
    values = values.contiguous()
    row[offset : offset + values.nbytes] = values.view(-1).view(torch.uint8)


def _tensor(array: npt.NDArray[np.generic], dtype: torch.dtype) -> Tensor:
    """A stored matrix as torch; bf16 arrives as its bits in uint16."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return (tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor).to(dtype)
