"""Adapter packing: convert PEFT's matrices to panels in host memory, ready to be copied to pages, once per adapter and
layout."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from adapter_store.formats.int8_codes import CodedTensors
from adapter_store.formats.weights import AdapterWeights, LoraTensors
from lorasrv.models.lora_sites import EMBEDDING_A, EMBEDDING_B, HEAD, HEAD_A, HEAD_B, VocabBlocks
from lorasrv.worker.adapter_rows import rows_of
from lorasrv.worker.adapter_vectors import output_vectors
from lorasrv.worker.weights import ModelWeights
from sgmv_kernels.formats.adapter_panels import NO_VECTOR, AdapterLayout, SitePanels

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Panels = tuple[tuple[int, int], ...]
"""(index in the layer, rank rows) of each panel of one matrix."""


@dataclass(frozen=True)
class PackedAdapter:
    """Hold an adapter ready to be copied into the pool."""

    layout: AdapterLayout
    # uint8 [slabs, slab_bytes], in the layout's packed order.
    data: Tensor

    @property
    def nbytes(self) -> int:
        """Return the bytes of `data`."""
        return self.data.nbytes


def pack_adapter(
    base: ModelWeights, layout: AdapterLayout, weights: AdapterWeights, dtype: torch.dtype
) -> PackedAdapter:
    """Pack an adapter's panels end to end, layer by layer, with weights rounded to `dtype`, or in int8 if so stored.

    If the base is a rank's part, the panels have only its layers, inputs and outputs; `weights` are whole.

    NumPy is used because its calls cost a fraction of torch's: between two copies of a loader thread, the engine waits
    for the GIL. Gains and shifts (`adapter_vectors`) are computed from the base's weights.

    Raises:
        AdapterInvalid: it contains a norm that this base cannot have.
    """
    spec = base.spec
    data = np.zeros((layout.num_slabs, layout.slab_bytes), dtype=np.uint8)
    pack = _coded if layout.are_codes else partial(_rounded, dtype=dtype)
    for layer, slab in enumerate(spec.kv_slabs):
        offsets = layout.packed_offsets[layer].tolist()
        for index, (site, panels) in enumerate(zip(spec.sites(), layout.panels[layer], strict=True)):
            if panels.total_rank:
                modules = [weights.get((spec.first_layer + layer, module)) for module in site.modules]
                packed = [None if tensors is None else pack(tensors, weights.dtype) for tensors in modules]
                outputs = [spec.own_outputs(index, i) for i in range(len(modules))]
                _pack_site(data[slab], offsets, panels, packed, spec.own_inputs(index), outputs)
        if layout.vectors and any(layout.vectors[layer]):
            found = dict(output_vectors(base, weights, layer))
            for place, indices in zip(spec.places(), layout.vector_panels[layer].tolist(), strict=True):
                _pack_vectors(data[slab], offsets, indices, found.get(place, ()))
    if layout.ends is not None:
        ends = [weights.get((spec.num_layers, name)) for name in (HEAD, spec.names.embedding)]
        head, embedding = (None if tensors is None else pack(tensors, weights.dtype) for tensors in ends)
        _pack_ends(data, layout, head, embedding, VocabBlocks.of(spec))
    if layout.rows is not None:
        _pack_rows(data, layout, layout.rows, weights, (HEAD, spec.names.embedding), dtype)
    return PackedAdapter(layout, torch.from_numpy(data))


@dataclass(frozen=True, slots=True)
class _Module:
    """Hold one module's stored matrices: factors [rank] or a scalar, a [rank, in], b [rank, out]."""

    rank: int
    factors: Array | float
    a: Array
    b: Array


def _rounded(tensors: LoraTensors, _: str, dtype: torch.dtype) -> _Module:
    a, b = (_converted(matrix, dtype) for matrix in (tensors.a, tensors.b))
    return _Module(tensors.rank, tensors.scaling, a, b.T)


def _coded(tensors: LoraTensors, stored: str) -> _Module:
    coded = CodedTensors(tensors, stored)
    return _Module(tensors.rank, coded.factors, coded.a, coded.b)


def _pack_site(
    row: Bytes,
    offsets: list[int],
    panels: SitePanels,
    modules: list[_Module | None],
    inputs: slice,
    outputs: list[slice | npt.NDArray[np.int64]],
) -> None:
    scales = _target(row, offsets[panels.scale], (panels.total_rank,), np.dtype("<f4"))
    first = 0
    for slice_panels, module, own in zip(panels.b, modules, outputs, strict=True):
        if module is not None:
            last = first + module.rank
            scales[first:last] = module.factors
            _write_panels(row, offsets, panels.a, first, module.a[:, inputs])
            _write_panels(row, offsets, slice_panels, 0, module.b[:, own])
            first = last


def _pack_ends(
    data: Bytes, layout: AdapterLayout, head: _Module | None, embedding: _Module | None, blocks: VocabBlocks
) -> None:
    """Pack the parts outside the layers: whole matrices into slab 0, and of those with a vocabulary axis one block into
    each slab."""
    assert layout.ends is not None
    for slab, sites in enumerate(layout.ends.panels):
        offsets = layout.packed_offsets[layout.num_layers + slab].tolist()
        if head is not None:
            _write_panels(data[slab], offsets, sites[HEAD_A].a, 0, head.a)
            _write_panels(data[slab], offsets, sites[HEAD_B].b[0], 0, _block(head.b, blocks, slab))
        if embedding is not None:
            _write_panels(data[slab], offsets, sites[EMBEDDING_A].a, 0, _block(embedding.a, blocks, slab))
            _write_panels(data[slab], offsets, sites[EMBEDDING_B].b[0], 0, embedding.b)
        for module, panels in ((head, sites[HEAD_B]), (embedding, sites[EMBEDDING_B])):
            if module is not None and panels.total_rank:
                scale = _target(data[slab], offsets[panels.scale], (module.rank,), np.dtype("<f4"))
                scale[:] = module.factors


def _pack_rows(
    data: Bytes,
    layout: AdapterLayout,
    rows: AdapterLayout,
    weights: AdapterWeights,
    modules: tuple[str, ...],
    dtype: torch.dtype,
) -> None:
    """Pack the adapter's own rows of the vocabulary, for the modules of each site, block by block."""
    assert rows.row_tokens is not None
    first = len(layout.packed_offsets) - rows.num_layers
    for layer, (slab, sites) in enumerate(zip(rows.slabs, rows.panels, strict=True)):
        offsets = layout.packed_offsets[first + layer].tolist()
        for site, module in enumerate(modules):
            if sites[site].total_rank:
                block = rows_of(weights, module, rows.row_tokens.block(site, layer))
                _write_panels(data[slab], offsets, sites[site].a, 0, _converted(block, dtype))


def _block(matrix: Array, blocks: VocabBlocks, index: int) -> Array:
    """Return one block of a matrix [rank, V]; columns outside the block's own are 0."""
    block, owned = np.zeros((len(matrix), blocks.width), dtype=matrix.dtype), blocks.owned(index)
    first = owned.start - blocks.start(index)
    block[:, first : first + len(owned)] = matrix[:, owned.start : owned.stop]
    return block


def _pack_vectors(row: Bytes, offsets: list[int], indices: list[int], vectors: Sequence[Tensor]) -> None:
    for index, vector in zip(indices, vectors, strict=False):
        if index != NO_VECTOR:
            _target(row, offsets[index], (len(vector),), np.dtype("<f4"))[:] = vector.cpu().numpy()


def _write_panels(row: Bytes, offsets: list[int], panels: Panels, first: int, matrix: Array) -> None:
    """Copy a matrix to the panels' rows from `first` on."""
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
    """Convert a stored matrix to the adapter dtype. bf16 numbers are their bits in uint16, before and after."""
    is_bf16 = array.dtype == np.uint16
    if is_bf16 and dtype == torch.bfloat16:
        return array
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    tensor = (tensor.view(torch.bfloat16) if is_bf16 else tensor).to(dtype)
    return (tensor.view(torch.uint16) if dtype == torch.bfloat16 else tensor).numpy()
