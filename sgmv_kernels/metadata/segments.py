"""Grouping of token rows by adapter, on the host for every step. Imports no torch.

A *segment* is the rows of one adapter (SGMV: Punica). Rows without an adapter form the segment of adapter `BASE`, which
has rank 0. Rows may be in any order: a permutation brings the rows of a segment together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BASE = -1
Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Segments:
    """Hold S segments over T rows."""

    # [T], the rows segment by segment.
    permutation: Int32
    # [S + 1], bounds of each segment in the permutation.
    indptr: Int32
    # [S], the adapter of each segment: an index into the caller's list of placed adapters, or `BASE`.
    adapters: Int32

    @property
    def num_rows(self) -> int:
        return len(self.permutation)

    def __len__(self) -> int:
        return len(self.adapters)

    def equals(self, other: "Segments") -> bool:
        """Return whether all arrays are equal."""
        return (
            np.array_equal(self.permutation, other.permutation)
            and np.array_equal(self.indptr, other.indptr)
            and np.array_equal(self.adapters, other.adapters)
        )

    def rows(self, segment: int) -> Int32:
        """Return the rows of one segment."""
        return self.permutation[self.indptr[segment] : self.indptr[segment + 1]]


def build_segments(row_adapters: Sequence[int] | Int32) -> Segments:
    """Group rows by adapter; rows of one adapter keep their order.

    Args:
        row_adapters: [T] the adapter of each row, `BASE` for none.
    """
    adapters = np.asarray(row_adapters, dtype=np.int32)
    permutation = adapters.argsort(kind="stable").astype(np.int32)
    ordered = adapters[permutation]
    is_first = np.ones(len(ordered) + 1, dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:-1])
    indptr = is_first.nonzero()[0].astype(np.int32)
    return Segments(permutation, indptr, ordered[indptr[:-1]])
