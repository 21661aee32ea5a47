"""Small int32 tables of a step's adapters, built on the host for all layers and sites at once.

Panel offsets count units of `ALIGNMENT_BYTES` from the start of a layer's slab, so that int32 reaches 256 GiB. A
(layer, site) of an adapter is one record `[first, rank of slice 0, 1, 2]`: `first` is the index in `panels` of its
scale vector's offset; those of its A panels follow, then those of each slice's B panels, 16 rank rows to a panel. A
kernel therefore derives everything from one 16-byte record. (Source: SGLang's triton_v2 metadata has one packed record
per segment.) Vectors at places are few and have a table of offsets, which is empty if no adapter of the step has any.

A row whose adapter is a sum is in the tables of several *passes*, one for each term, each with its weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sgmv_kernels.formats.adapter_panels import NO_VECTOR, RECORD_INTS, PlacedAdapter, SiteDims
from sgmv_kernels.metadata.segments import BASE, Int32, Segments


@dataclass(frozen=True)
class SgmvTables:
    """Hold S segments over the T rows of a step, without the base's segment."""

    sites: tuple[SiteDims, ...]
    # [T], rows grouped by segment.
    permutation: Int32
    # [S, 2], begin and end of each segment in the permutation.
    bounds: Int32
    # [L, sites, S, 4], see above; ranks are 0 where the adapter has no weights.
    records: Int32
    # [S], 1 where a segment's panels are int8 codes, else 0.
    are_codes: Int32
    # [S], factor of the delta of a segment's adapter.
    weights: npt.NDArray[np.float32]
    # [N], panel offsets.
    panels: Int32
    # End of the last panel in a slab, in bytes, over all passes.
    slab_bytes: int
    # Highest rank of a slice.
    highest_rank: int
    # Widths of the places, and [L, places, S, 2], offsets of each segment's gain and shift, or `NO_VECTOR`; empty if no
    # adapter has any.
    places: tuple[int, ...] = ()
    vectors: Int32 = field(default_factory=lambda: np.zeros((0, 0, 0, 2), dtype=np.int32))
    # Number of the pass, from 0.
    turn: int = 0

    @property
    def num_segments(self) -> int:
        return len(self.bounds)

    @property
    def has_vectors(self) -> bool:
        """Return whether an adapter of the step has vectors."""
        return bool(self.places)

    @property
    def has_codes(self) -> bool:
        """Return whether the panels of a segment are int8 codes."""
        return bool(self.are_codes.any())

    def vector_rows(self) -> Int32:
        """Return [N, 3] for every row whose adapter has vectors: segment, row and the bits of the segment's weight."""
        has_any = (self.vectors != NO_VECTOR).any(axis=(0, 1, 3))
        segments = np.repeat(np.arange(self.num_segments, dtype=np.int32), np.diff(self.bounds).ravel())
        rows = [self.permutation[begin:end] for begin, end in self.bounds.tolist()]
        found = np.stack((segments, np.concatenate(rows), self.weight_bits[segments]), axis=-1)
        return np.ascontiguousarray(found[has_any[segments]])

    @property
    def weight_bits(self) -> Int32:
        """Return `weights` as int32, to be read as fp32."""
        return self.weights.view(np.int32)

    def max_rank(self, layer: int, site: int) -> int:
        """Return the highest number of rank rows of a segment at a site, summed over slices."""
        return int(self.records[layer, site, :, 1:].sum(axis=-1).max(initial=0))


def build_tables(
    segments: Segments,
    adapters: Sequence[PlacedAdapter],
    weights: Sequence[float] | None = None,
    *,
    places: tuple[int, ...] | None = None,
    turn: int = 0,
) -> SgmvTables:
    """Build the tables of one pass over a step's adapters; `segments.adapters` index into `adapters`.

    Args:
        weights: weight of each adapter; None: 1.
        places: places at which adapters of any pass have vectors; None: those of this pass.
        turn: number of the pass.
    """
    own = np.flatnonzero(segments.adapters != BASE)
    used = segments.adapters[own].tolist()
    placed = [adapters[i] for i in used]
    bounds = np.stack((segments.indptr[:-1][own], segments.indptr[1:][own]), axis=-1)
    factors = np.array([1.0 if weights is None else weights[i] for i in used], dtype=np.float32)
    if not placed:
        nothing = np.zeros((0, 0, 0, RECORD_INTS), dtype=np.int32)
        none = np.zeros(0, dtype=np.int32)
        return SgmvTables((), segments.permutation.copy(), bounds, nothing, none, factors, none, 0, 0)
    records = np.stack([adapter.layout.records for adapter in placed], axis=2)
    panels = [adapter.panels for adapter in placed]
    lengths = np.array([len(own) for own in panels])
    starts = np.cumsum(lengths) - lengths
    records[..., 0] += (starts + np.stack([adapter.layer_starts for adapter in placed], axis=-1))[:, None]
    places = places_of(placed) if places is None else places
    return SgmvTables(
        sites=placed[0].layout.sites,
        permutation=segments.permutation.copy(),
        bounds=bounds,
        records=records,
        are_codes=np.array([adapter.layout.are_codes for adapter in placed], dtype=np.int32),
        weights=factors,
        panels=np.concatenate(panels),
        slab_bytes=max(adapter.extent[1] for adapter in adapters),
        highest_rank=max(adapter.layout.max_rank for adapter in placed),
        places=places,
        vectors=_vectors(placed, places),
        turn=turn,
    )


def places_of(adapters: Sequence[PlacedAdapter]) -> tuple[int, ...]:
    """Return the widths of the places at which one of these adapters may have vectors; all adapters have the same."""
    return next((adapter.layout.places for adapter in adapters if adapter.layout.places), ())


def _vectors(placed: Sequence[PlacedAdapter], places: tuple[int, ...]) -> Int32:
    """Return the offsets of the segments' vectors."""
    if not places:
        return np.zeros((0, 0, 0, 2), dtype=np.int32)
    none = np.full((placed[0].layout.num_layers, len(places), 2), NO_VECTOR, dtype=np.int32)
    return np.stack([adapter.vectors if adapter.layout.vectors else none for adapter in placed], axis=2)


def rankless_tables(
    sites: Sequence[SiteDims],
    num_layers: int,
    rows: int,
    places: Sequence[int] = (),
    turn: int = 0,
    *,
    has_codes: bool = False,
) -> SgmvTables:
    """Return tables for a recording: all rows are in one segment whose adapter has rank 0 and no vectors at `places`;
    without sites, there is no segment."""
    segments = 1 if sites else 0
    return SgmvTables(
        sites=tuple(sites),
        permutation=np.arange(rows, dtype=np.int32),
        bounds=np.full((segments, 2), (0, rows), dtype=np.int32),
        records=np.zeros((num_layers if sites else 0, len(sites), segments, RECORD_INTS), dtype=np.int32),
        are_codes=np.full(segments, has_codes, dtype=np.int32),
        weights=np.ones(segments, dtype=np.float32),
        panels=np.zeros(segments, dtype=np.int32),
        slab_bytes=0,
        highest_rank=0,
        places=tuple(places),
        vectors=np.full((num_layers, len(places), segments, 2), NO_VECTOR, dtype=np.int32),
        turn=turn,
    )
