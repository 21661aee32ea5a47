"""Layout of an adapter's panels: the packed form in host memory, and their places in the pool. Imports no torch.

At one (layer, site) an adapter is a list of *panels*, each contiguous and 128-byte aligned, in this order:

    scale   fp32 [R]            factor of every rank row, R the sum of the slices' ranks (0 panels if R is 0)
    A       [<=16, in] each     the slices' lora_a stacked: R rank rows, 16 a panel
    B       [<=16, out_s] each  each slice's lora_b transposed: r_s rank rows, 16 a panel

After the panels of all sites follow, for each *place* (an output of the layer to which an adapter may apply vectors):

    gain    fp32 [width]        factor of every number of the output, if the adapter has one
    shift   fp32 [width]        added to the output after the gain, if the adapter has one

After the layers of a slab follow the panels of the adapter's *ends*, if it changes the embedding or the head. They have
a separate layout with one layer per slab: a vocabulary's matrices are cut into as many blocks as there are slabs. Last
come the adapter's own *rows* of the vocabulary, if it has any. They have a third layout, whose layers are blocks of
rows, distributed over the slabs in turn. A row is stored like a rank row of A: its product with a state is a shrink.

A and B hold either numbers of the adapter dtype, and the factor is alpha / r; or int8 codes with a scale for every rank
row of A and of B, and the factor is alpha / r times both scales. All panels of an adapter are of the same kind.

Ranks are not padded: the last panel of a matrix has only the remaining rank rows. The *packed* form has a layer's
panels end to end, and layers that share a slab of the pool one after another. In the pool they have the same order
inside runs of consecutive pages. The same page ids apply to every slab, so a run is as long as the widest slab needs.
An adapter takes one run if the pool has one, else several; a panel is never split. (Sources: S-LoRA for pages shared by
KV and adapters. Panels have 16 ranks so that a program reads one table entry and then affine addresses.)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from sgmv_kernels.formats.kv_format import ALIGNMENT_BYTES

LAYOUT_VERSION = 1
PANEL_RANKS = 16
SCALE_BYTES = 4
VECTOR_BYTES = 4
CODE_BYTES = 1
"""Bytes of a weight that is stored as an int8 code."""
MAX_RANK = 256
"""Highest rank of one slice that kernels are built and tested for."""
MAX_SLICES = 3
RECORD_INTS = 1 + MAX_SLICES
Run = tuple[int, int]
"""(first page, number of pages), consecutive page ids."""

Bytes = npt.NDArray[np.int64]
"""Sizes or offsets of panels."""
LayerRanks = tuple[tuple[int, ...], ...]
"""`[site][slice]`: ranks of one layer, 0 where the adapter has no weights."""
GAIN, SHIFT = 1, 2
"""Kinds of vectors at a place."""
LayerVectors = tuple[int, ...]
"""`[place]`: the vectors of one layer at each place, as a sum of `GAIN` and `SHIFT`."""
Int32 = npt.NDArray[np.int32]
NO_VECTOR = -1


@dataclass(frozen=True, slots=True)
class SiteDims:
    """Hold the shape of one linear site: the inputs, and the outputs of each slice, which share the inputs."""

    in_features: int
    out_features: tuple[int, ...]

    @property
    def total_out(self) -> int:
        return sum(self.out_features)


@dataclass(frozen=True)
class RowTokens:
    """Hold the tokens of an adapter's own rows of the vocabulary, ascending: int64 [N] for each site of a layout.

    Rows are cut into blocks of `widths[site]`, one per layer; the last block has only the remaining rows.
    """

    tokens: tuple[npt.NDArray[np.int64], ...]
    widths: tuple[int, ...]

    @cached_property
    def _bytes(self) -> tuple[bytes, ...]:
        return tuple(own.tobytes() for own in self.tokens)

    @cached_property
    def _hash(self) -> int:
        return hash((self._bytes, self.widths))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowTokens) or hash(self) != hash(other):
            return False
        return self.widths == other.widths and self._bytes == other._bytes

    def block(self, site: int, layer: int) -> npt.NDArray[np.int64]:
        """Return the tokens of a block."""
        width = self.widths[site]
        return self.tokens[site][layer * width : (layer + 1) * width]


@dataclass(frozen=True, slots=True)
class SitePanels:
    """Hold the indices of one site's panels in the layer's panel list, with the number of rank rows of each."""

    ranks: tuple[int, ...]
    scale: int
    a: tuple[tuple[int, int], ...]
    b: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def total_rank(self) -> int:
        return sum(self.ranks)


@dataclass(frozen=True)
class AdapterLayout:
    """Compute the panels of one adapter and their sizes.

    Args:
        sites: the base's linear sites, the same in every layer.
        ranks: `ranks[layer][site][slice]`, 0 where the adapter has no weights.
        itemsize: bytes of one stored weight (2 for bf16, 4 for float32, `CODE_BYTES` for int8 codes).
        slabs: the pool's slab of each layer, counted from 0; empty if each layer has its own slab.
        places: widths of the outputs of a layer that may have vectors, the same for all adapters that have any.
        vectors: `vectors[layer][place]`; empty for an adapter without vectors.
        ends: layout of the panels outside the layers, one layer per slab; None for an adapter without.
        rows: layout of own rows of the vocabulary; None for an adapter without.
        row_tokens: in a layout of rows: the tokens of its rows.
    """

    sites: tuple[SiteDims, ...]
    ranks: tuple[LayerRanks, ...]
    itemsize: int
    slabs: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    vectors: tuple[LayerVectors, ...] = ()
    ends: "AdapterLayout | None" = None
    rows: "AdapterLayout | None" = None
    row_tokens: "RowTokens | None" = None

    @property
    def num_layers(self) -> int:
        return len(self.ranks)

    @property
    def are_codes(self) -> bool:
        """Return whether the weights are int8 codes."""
        return self.itemsize == CODE_BYTES

    @cached_property
    def panels(self) -> tuple[tuple[SitePanels, ...], ...]:
        """Return `panels[layer][site]`. Layers of equal ranks share one tuple."""
        return tuple(_index_panels(layer) for layer in self.ranks)

    @cached_property
    def panel_bytes(self) -> tuple[Bytes, ...]:
        """Return the aligned bytes of every panel: one array per layer, those of `ends` and then of `rows` last."""
        vectors = self.vectors or ((),) * self.num_layers
        own = tuple(
            _layer_panel_bytes(self.sites, layer, self.itemsize, self.places, kinds)
            for layer, kinds in zip(self.ranks, vectors, strict=True)
        )
        return own + tuple(sizes for other in self._others for sizes in other.panel_bytes)

    @property
    def _others(self) -> "tuple[AdapterLayout, ...]":
        return tuple(other for other in (self.ends, self.rows) if other is not None)

    @cached_property
    def vector_panels(self) -> Int32:
        """Return [L, places, 2]: the indices of each place's gain and shift in its layer's panels, or `NO_VECTOR`."""
        indices = np.full((len(self.vectors), len(self.places), 2), NO_VECTOR, dtype=np.int32)
        for layer, kinds in enumerate(self.vectors):
            panel = len(self.panel_bytes[layer]) - sum(kind.bit_count() for kind in kinds)
            for place, kind in enumerate(kinds):
                for column, wanted in enumerate((GAIN, SHIFT)):
                    if kind & wanted:
                        indices[layer, place, column] = panel
                        panel += 1
        return indices

    @cached_property
    def layers_of_slabs(self) -> tuple[tuple[int, ...], ...]:
        """Return the layers of each slab; layers of `ends` are numbered after the others, then those of `rows`."""
        layers: dict[int, list[int]] = {}
        others = [slab for other in self._others for slab in other.slabs or range(other.num_layers)]
        for layer, slab in enumerate((*(self.slabs or range(self.num_layers)), *others)):
            layers.setdefault(slab, []).append(layer)
        return tuple(tuple(layers[slab]) for slab in sorted(layers))

    @property
    def num_slabs(self) -> int:
        return len(self.layers_of_slabs)

    @cached_property
    def slab_bytes(self) -> int:
        """Return the bytes of the widest slab, the row length of the packed form."""
        return max((sum(int(self.panel_bytes[i].sum()) for i in layers) for layers in self.layers_of_slabs), default=0)

    @cached_property
    def packed_offsets(self) -> tuple[Bytes, ...]:
        """Return the byte offset of every panel of each layer inside its slab's packed row."""
        return self._by_layer(lambda sizes: np.cumsum(sizes) - sizes) or ()

    @cached_property
    def records(self) -> npt.NDArray[np.int32]:
        """Return records [L, sites, 4]: index of a site's first panel in its layer, then the rank of each slice. See
        `metadata.sgmv_tables`.
        """
        return np.stack([_layer_records(layer) for layer in self.ranks])

    @cached_property
    def max_slices(self) -> int:
        """Return the largest number of slices of a site."""
        return max((len(site.out_features) for site in self.sites), default=0)

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of the packed form."""
        return self.num_slabs * self.slab_bytes

    @cached_property
    def max_rank(self) -> int:
        """Return the highest rank of a slice."""
        return int(self.records[..., 1:].max(initial=0))

    def num_pages(self, page_bytes: int) -> int:
        """Return the number of pages of one run that holds the whole adapter."""
        return -(-self.slab_bytes // page_bytes)

    def place(self, runs: Sequence[Run], page_bytes: int) -> "PlacedAdapter | None":
        """Place every slab's panels, in order, into `runs`; return None if a slab does not fit."""
        offsets = self._by_layer(lambda sizes: _fill_runs(sizes, runs, page_bytes))
        return None if offsets is None else PlacedAdapter(self, tuple(runs), page_bytes, offsets)

    def _by_layer(self, place: Callable[[Bytes], Bytes | None]) -> tuple[Bytes, ...] | None:
        """Return the offsets of each layer's panels. `place` computes those of a slab from the sizes of its panels; if
        it returns None, so does this. Slabs with equal sizes share arrays.
        """
        known: dict[tuple[int, ...], list[Bytes]] = {}
        offsets: dict[int, Bytes] = {}
        for layers in self.layers_of_slabs:
            sizes = [self.panel_bytes[layer] for layer in layers]
            key = tuple(map(id, sizes))
            if key not in known:
                placed = place(np.concatenate(sizes))
                if placed is None:
                    return None
                known[key] = np.split(placed, np.cumsum([len(each) for each in sizes])[:-1])
            offsets.update(zip(layers, known[key], strict=True))
        return tuple(offsets[layer] for layer in range(len(self.panel_bytes)))


@dataclass(frozen=True)
class PlacedAdapter:
    """Locate an adapter inside the pool."""

    layout: AdapterLayout
    runs: tuple[Run, ...]
    page_bytes: int
    # [layer][panel], bytes from the start of that layer's slab; layers of `ends` and then of `rows` come last.
    offsets: tuple[Bytes, ...]

    @property
    def pages(self) -> list[int]:
        return [page for first, count in self.runs for page in range(first, first + count)]

    @property
    def num_pages(self) -> int:
        return sum(count for _, count in self.runs)

    @cached_property
    def panels(self) -> npt.NDArray[np.int32]:
        """Return panel offsets in units of `ALIGNMENT_BYTES`, end to end; layers with equal offsets appear once."""
        if any((offsets % ALIGNMENT_BYTES).any() for offsets in self._distinct.values()):
            raise ValueError("a panel is misaligned")
        if self.layout.max_rank > MAX_RANK:
            raise ValueError(f"rank {self.layout.max_rank} is over the limit of {MAX_RANK}")
        return (np.concatenate(list(self._distinct.values())) // ALIGNMENT_BYTES).astype(np.int32)

    @cached_property
    def layer_starts(self) -> npt.NDArray[np.int32]:
        """Return [L], the index in `panels` where each layer's offsets begin."""
        sizes = np.array([len(offsets) for offsets in self._distinct.values()])
        starts = dict(zip(self._distinct, (np.cumsum(sizes) - sizes).tolist(), strict=True))
        return np.array([starts[id(offsets)] for offsets in self.offsets[: self.layout.num_layers]], dtype=np.int32)

    @cached_property
    def vectors(self) -> Int32:
        """Return [L, places, 2]: offsets of gain and shift in units of `ALIGNMENT_BYTES`, or `NO_VECTOR`."""
        panels = self.layout.vector_panels
        vectors: Int32 = np.full(panels.shape, NO_VECTOR, dtype=np.int32)
        for own, at, offsets in zip(vectors, panels, self.offsets, strict=False):
            has_one = at != NO_VECTOR
            own[has_one] = offsets[at[has_one]] // ALIGNMENT_BYTES
        return vectors

    @cached_property
    def ends(self) -> "PlacedAdapter | None":
        """Return where the panels outside the layers are; None if there are none."""
        return self._of(self.layout.ends, self.layout.num_layers)

    @cached_property
    def rows(self) -> "PlacedAdapter | None":
        """Return where the own rows of the vocabulary are; None if there are none."""
        ends = 0 if self.layout.ends is None else self.layout.ends.num_layers
        return self._of(self.layout.rows, self.layout.num_layers + ends)

    def _of(self, other: AdapterLayout | None, first: int) -> "PlacedAdapter | None":
        if other is None:
            return None
        return PlacedAdapter(other, self.runs, self.page_bytes, self.offsets[first : first + other.num_layers])

    @cached_property
    def extent(self) -> tuple[int, int]:
        """Return (first byte, end) of all panels in a slab."""
        layers = {id(o): (o, s) for o, s in zip(self.offsets, self.layout.panel_bytes, strict=True)}.values()
        first = min((int(offsets.min()) for offsets, _ in layers if len(offsets)), default=0)
        return first, max((int((offsets + sizes).max()) for offsets, sizes in layers if len(offsets)), default=0)

    @cached_property
    def _distinct(self) -> dict[int, Bytes]:
        return {id(offsets): offsets for offsets in self.offsets}

    def trimmed(self) -> "PlacedAdapter":
        """Return the same places without the unused pages at the end of each run."""
        distinct = {id(o): (o, s) for o, s in zip(self.offsets, self.layout.panel_bytes, strict=True)}.values()
        ends = [max(self._end_inside(run, *layer) for layer in distinct) for run in self.runs]
        pages = [-(-end // self.page_bytes) for end in ends]
        runs = tuple((run[0], end - run[0]) for run, end in zip(self.runs, pages, strict=True) if end)
        return PlacedAdapter(self.layout, runs, self.page_bytes, self.offsets)

    def moved(self, runs: Mapping[Run, Run]) -> "PlacedAdapter":
        """Return the places after whole runs were moved to other pages, given as old run -> new run."""
        known = {id(offsets): offsets.copy() for offsets in self.offsets}
        for old, new in runs.items():
            for offsets, target in zip(self._distinct.values(), known.values(), strict=True):
                inside = (offsets >= old[0] * self.page_bytes) & (offsets < sum(old) * self.page_bytes)
                target[inside] += (new[0] - old[0]) * self.page_bytes
        places = tuple(runs.get(run, run) for run in self.runs)
        return PlacedAdapter(self.layout, places, self.page_bytes, tuple(known[id(o)] for o in self.offsets))

    def copies(self, layer: int) -> list[tuple[int, int, int]]:
        """Return (packed offset, slab offset, bytes) of each contiguous piece of a layer, as few as possible."""
        pieces: list[tuple[int, int, int]] = []
        packed, sizes = self.layout.packed_offsets[layer], self.layout.panel_bytes[layer]
        for source, target, size in zip(packed.tolist(), self.offsets[layer].tolist(), sizes.tolist(), strict=True):
            if pieces and pieces[-1][1] + pieces[-1][2] == target:
                pieces[-1] = (pieces[-1][0], pieces[-1][1], pieces[-1][2] + size)
            else:
                pieces.append((source, target, size))
        return pieces

    def _end_inside(self, run: Run, offsets: Bytes, sizes: Bytes) -> int:
        """Return the end, in bytes, of the last panel of a layer inside a run; 0 if the layer has none there."""
        inside = (offsets >= run[0] * self.page_bytes) & (offsets < sum(run) * self.page_bytes)
        return int((offsets + sizes)[inside].max(initial=0))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _panel_rows(rank: int) -> list[int]:
    return [min(PANEL_RANKS, rank - start) for start in range(0, rank, PANEL_RANKS)]


@lru_cache(maxsize=1024)
def _layer_panel_bytes(
    sites: tuple[SiteDims, ...], layer_ranks: LayerRanks, itemsize: int, places: tuple[int, ...], kinds: LayerVectors
) -> Bytes:
    sizes: list[int] = []
    for site, ranks in zip(sites, layer_ranks, strict=True):
        total = sum(ranks)
        if not total:
            continue
        sizes.append(_aligned(total * SCALE_BYTES))
        sizes += [_aligned(n * site.in_features * itemsize) for n in _panel_rows(total)]
        for rank, out in zip(ranks, site.out_features, strict=True):
            sizes += [_aligned(n * out * itemsize) for n in _panel_rows(rank)]
    for width, kind in zip(places, kinds, strict=bool(kinds)):
        sizes += [_aligned(width * VECTOR_BYTES)] * kind.bit_count()
    return np.array(sizes, dtype=np.int64)


@lru_cache(maxsize=1024)
def _index_panels(layer_ranks: LayerRanks) -> tuple[SitePanels, ...]:
    sites, first = [], 0
    for ranks in layer_ranks:
        total = sum(ranks)
        if not total:
            sites.append(SitePanels(ranks, -1, (), tuple(() for _ in ranks)))
            continue
        scale, index = first, first + 1
        a = tuple((index + i, n) for i, n in enumerate(_panel_rows(total)))
        index += len(a)
        b = []
        for rank in ranks:
            b.append(tuple((index + i, n) for i, n in enumerate(_panel_rows(rank))))
            index += len(b[-1])
        sites.append(SitePanels(ranks, scale, a, tuple(b)))
        first = index
    return tuple(sites)


@lru_cache(maxsize=1024)
def _layer_records(layer_ranks: LayerRanks) -> npt.NDArray[np.int32]:
    records = np.zeros((len(layer_ranks), RECORD_INTS), dtype=np.int32)
    for record, panels in zip(records, _index_panels(layer_ranks), strict=True):
        record[0] = max(0, panels.scale)
        record[1 : 1 + len(panels.ranks)] = panels.ranks
    return records


def _fill_runs(sizes: Bytes, runs: Sequence[Run], page_bytes: int) -> Bytes | None:
    """Place panels in order by next fit, each completely inside one run."""
    offsets = np.empty(len(sizes), dtype=np.int64)
    remaining = iter(runs)
    position = end = 0
    for i, size in enumerate(sizes.tolist()):
        while position + size > end:
            run = next(remaining, None)
            if run is None:
                return None
            position, end = run[0] * page_bytes, (run[0] + run[1]) * page_bytes
        offsets[i] = position
        position += size
    return offsets
