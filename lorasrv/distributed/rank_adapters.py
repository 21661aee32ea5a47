"""Adapters of a partition: every rank packs its own panels from the whole matrices, into pages of the same ids.

Pages are planned with a layout that is at least as wide as any rank's (`rank_spec.pool_widths`). A rank's panels have
the same order and are no larger, so they fit into the same runs; the layout and the runs determine their places.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from cachetools import LRUCache

from adapter_store.errors import AdapterInvalid, Problem
from adapter_store.formats.weights import AdapterWeights, LoraTensors
from adapter_store.host_cache import HostCache
from adapter_store.spec import AdapterKey, AdapterSpec
from adapter_store.store import AdapterStore
from lorasrv.distributed.frames import Array, Frame
from lorasrv.distributed.partition import Partition
from lorasrv.distributed.rank_spec import RankSpec
from lorasrv.models.lora_sites import (
    EMBEDDING_A,
    HEAD,
    HEAD_A,
    adapter_layout,
    ends_layout,
    place_widths,
    site_dims,
)
from lorasrv.models.spec import ModelSpec
from lorasrv.worker.adapter_packing import PackedAdapter, pack_adapter
from lorasrv.worker.adapter_source import HostAdapterStore, LoadKernels
from lorasrv.worker.weights import ModelWeights
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, Run

WRITE = "write"
NUM_PLACES = 4096
"""Most adapter placements that a rank remembers; others are computed again."""


@dataclass(frozen=True)
class SharedAdapter(PackedAdapter):
    """Hold an adapter in host memory for all ranks: this rank's panels, and the matrices that the others pack."""

    weights: AdapterWeights

    @property
    def nbytes(self) -> int:
        """Return the bytes of both."""
        return self.data.nbytes + sum(t.a.nbytes + t.b.nbytes for t in self.weights.values())


class SharedAdapterStore(HostAdapterStore):
    """Read adapters for all ranks of a partition.

    Args:
        pool_spec: spec by which pages are planned.
        partition: used to refuse adapters that it cannot serve.
    """

    def __init__(
        self,
        store: AdapterStore,
        host_cache: HostCache[PackedAdapter],
        base: ModelWeights,
        dtype: torch.dtype,
        load_kernels: LoadKernels,
        pool_spec: ModelSpec,
        partition: Partition,
    ) -> None:
        super().__init__(store, host_cache, base, dtype, load_kernels)
        self._pool_spec, self._partition = pool_spec, partition

    def _layout_of(self, spec: AdapterSpec, weights: AdapterWeights | None) -> AdapterLayout:
        _check(spec, self._pool_spec, self._partition)
        return adapter_layout(self._pool_spec, spec, self._dtype.itemsize)

    def _pack(self, layout: AdapterLayout, weights: AdapterWeights) -> PackedAdapter:
        own = rank_layout(layout, _rank_spec(self._base.spec))
        return SharedAdapter(own, pack_adapter(self._base, own, weights, self._dtype).data, weights)


def _check(spec: AdapterSpec, base: ModelSpec, partition: Partition) -> None:
    """Check that every rank can compute its part of an adapter.

    Raises:
        AdapterInvalid: a rank cannot; the message names the part.
    """
    problems = []
    ends = {module.module for module in spec.modules} & {HEAD, base.names.embedding}
    if ends and partition.rows == 1:
        why = f"has LoRA outside the layers, which {partition.text} does not serve; --cp does, or one process"
        problems += [Problem("unsupported_partition", module, why) for module in sorted(ends)]
    if partition.has_columns and any(module.magnitude for module in spec.modules):
        why = f"has DoRA's magnitudes, whose norms over parts of a weight may differ in the last bits: {partition.text}"
        problems.append(Problem("unsupported_partition", "use_dora", f"{why} does not serve it; stages and rows do"))
    for own in spec.rows:
        why = f"has rows of the vocabulary of its own, which {partition.text} does not serve; one process does"
        problems.append(Problem("unsupported_partition", own.module, why))
    if problems:
        raise AdapterInvalid(tuple(problems))


def _rank_spec(spec: ModelSpec) -> RankSpec:
    assert isinstance(spec, RankSpec), "the base is no rank's part"
    return spec


def rank_layout(planned: AdapterLayout, spec: RankSpec) -> AdapterLayout:
    """Return the layout of a rank's panels of an adapter, from the layout by which its pages were planned."""
    first, end = spec.part.layers
    vectors = planned.vectors[first:end]
    if not any(map(any, vectors)):
        vectors = ()
    return AdapterLayout(
        site_dims(spec),
        planned.ranks[first:end],
        planned.itemsize,
        spec.kv_slabs,
        place_widths(spec) if vectors else (),
        vectors,
        planned.ends,
    )


class LayoutNumbers:
    """Number the layouts of adapters, so that a step need not describe them. For rank 0, any thread."""

    def __init__(self) -> None:
        self._numbers: dict[AdapterLayout, int] = {}
        self._lock = threading.Lock()

    def of(self, planned: AdapterLayout) -> int:
        """Return the number of a layout; a new layout gets a new number."""
        with self._lock:
            return self._numbers.setdefault(planned, len(self._numbers))


class RankPlaces:
    """Find where adapters lie in a rank's pool.

    `learn` may run in another thread than `place`: no step uses an adapter before its pages are filled.
    """

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._layouts: dict[int, AdapterLayout] = {}
        self._known: LRUCache[tuple[int, tuple[Run, ...]], PlacedAdapter] = LRUCache(NUM_PLACES)

    def learn(self, number: int, layout: AdapterLayout) -> None:
        """Note the rank's layout with this number."""
        self._layouts.setdefault(number, layout)

    def make(self, layout: AdapterLayout, runs: tuple[Run, ...]) -> PlacedAdapter:
        """Return the placement of a layout's panels in these runs of pages."""
        placed = layout.place(runs, self._page_bytes)
        assert placed is not None, f"panels of a rank do not fit into the pages that were planned for them: {runs}"
        return placed

    def place(self, number: int, runs: tuple[Run, ...]) -> PlacedAdapter:
        """Return the placement of the adapter in these runs; the same object as long as it is remembered."""
        found = self._known.get((number, runs))
        if found is None:
            found = self._known[number, runs] = self.make(self._layouts[number], runs)
        return found


def encode_adapter(adapter: SharedAdapter, planned: PlacedAdapter, number: int, spec: RankSpec) -> Frame:
    """Return the frame from which a rank fills its pages of an adapter: the matrices of its layers."""
    layout, weights = rank_layout(planned.layout, spec), adapter.weights
    own = range(*spec.part.layers) if planned.layout.ends is None else range(spec.whole.num_layers + 1)
    arrays: list[Array] = []

    def put(array: Array | None) -> int | None:
        """Add an array to the frame; return its index."""
        if array is None:
            return None
        arrays.append(array)
        return len(arrays) - 1

    modules = [
        {
            "layer": layer,
            "module": module,
            "rank": lora.rank,
            "scaling": lora.scaling if isinstance(lora.scaling, float | int) else None,
            "scalings": None if isinstance(lora.scaling, float | int) else put(lora.scaling),
            "arrays": [put(array) for array in (lora.a, lora.b, lora.magnitude, lora.b_bias)],
        }
        for (layer, module), lora in weights.items()
        if layer in own
    ]
    saved = [[layer, module, put(array)] for (layer, module), array in weights.saved.items() if layer in own]
    fields = {
        "number": number,
        "runs": planned.runs,
        "itemsize": layout.itemsize,
        "ranks": layout.ranks,
        "vectors": layout.vectors,
        "ends": (0, 0) if layout.ends is None else _end_ranks(layout.ends),
        "dtype": weights.dtype,
        "stored": weights.spec.stored,
        "modules": modules,
        "saved": saved,
    }
    return Frame(WRITE, fields, arrays)


def _end_ranks(ends: AdapterLayout) -> tuple[int, int]:
    """Return the ranks of head and embedding."""
    return ends.ranks[0][HEAD_A][0], ends.ranks[0][EMBEDDING_A][0]


def decode_layout(frame: Frame, spec: RankSpec) -> AdapterLayout:
    """Return the rank's layout of the adapter in a frame."""
    fields = frame.fields
    head, embedding = fields["ends"]
    ends = ends_layout(spec, head, embedding, fields["itemsize"])
    vectors = tuple(map(tuple, fields["vectors"]))
    ranks = tuple(tuple(tuple(site) for site in layer) for layer in fields["ranks"])
    places = place_widths(spec) if vectors else ()
    return AdapterLayout(site_dims(spec), ranks, fields["itemsize"], spec.kv_slabs, places, vectors, ends)


def decode_runs(frame: Frame) -> tuple[Run, ...]:
    """Return the runs of pages of the adapter in a frame."""
    return tuple((first, count) for first, count in frame.fields["runs"])


def decode_weights(frame: Frame) -> AdapterWeights:
    """Return the matrices in a frame."""
    fields, arrays = frame.fields, frame.arrays

    def get(place: int | None) -> Array | None:
        return None if place is None else arrays[place]

    tensors: dict[tuple[int, str], LoraTensors] = {}
    for one in fields["modules"]:
        a, b, magnitude, b_bias = map(get, one["arrays"])
        assert a is not None
        assert b is not None
        scaling: float | Array = one["scaling"] if one["scalings"] is None else arrays[one["scalings"]]
        tensors[one["layer"], one["module"]] = LoraTensors(one["rank"], scaling, a, b, magnitude, b_bias)
    saved: Mapping[tuple[int, str], Array] = {(layer, name): arrays[place] for layer, name, place in fields["saved"]}
    spec = AdapterSpec(AdapterKey(""), "", (), fields["dtype"], 0, fields["stored"])
    return AdapterWeights(spec, tensors, (), saved)
