"""Draft trees of a step: which of the last keys of a sequence each row sees. Imports no torch.

The draft tokens of a sequence are in consecutive *slots* after its known tokens, parents before children. A row of a
tree sees every key before the tree, and those slots of the tree whose bits are set in the row's 64-bit word: its
ancestors and itself. Its *position*, used for rotation and windows, is that of the last known token plus its depth.

Source: tree attention of SpecInfer (Miao et al. 2024) and Medusa (Cai et al. 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sgmv_kernels.metadata.segments import Int32

MAX_SLOTS = 64
"""Most slots of a tree: the bits of a word."""
ROOT = -1
"""Parent of the draft tokens that follow the last known token."""
Parents = Sequence[int]
"""Index of each draft token's parent among the draft tokens of its sequence, or `ROOT`; empty: no tree."""


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """Hold the trees of B sequences of T rows."""

    # [B], first slot of each tree; without a tree, the number of the sequence's keys.
    starts: Int32
    # [T], bit j: the row sees slot j of its tree; 0 for rows of known tokens.
    words: npt.NDArray[np.int64]
    # [T], position of each row.
    positions: Int32


def build_trees(parents: Sequence[Parents], query_lens: Int32, kv_lens: Int32) -> DraftTrees:
    """Lay out the trees of a step.

    Args:
        parents: the tree of each sequence, in its last slots; a step's rows may be only the last of these.
        query_lens: [B] rows of each sequence, its last slots.
        kv_lens: [B] keys of each sequence, including this step's.
    """
    lens = np.array([len(one) for one in parents], dtype=np.int32)
    starts, ends = (kv_lens - lens).astype(np.int32), np.cumsum(query_lens)
    sequence = np.repeat(np.arange(len(query_lens)), query_lens)
    positions = (np.arange(len(sequence)) + (kv_lens - ends)[sequence]).astype(np.int32)
    words = np.zeros(len(sequence), dtype=np.uint64)
    for i in np.flatnonzero(lens).tolist():
        count, end = min(int(lens[i]), int(query_lens[i])), int(ends[i])
        words[end - count : end] = ancestor_words(parents[i])[-count:]
        positions[end - count : end] = starts[i] - 1 + np.bitwise_count(words[end - count : end])
    return DraftTrees(starts, words.view(np.int64), positions)


def ancestor_words(parents: Parents) -> list[int]:
    """Return the word of each draft token: a bit for each of its ancestors, and for itself."""
    words: list[int] = []
    for slot, parent in enumerate(parents):
        words.append((0 if parent == ROOT else words[parent]) | 1 << slot)
    return words


def depths_of(parents: Parents) -> list[int]:
    """Return the depth of each draft token, from 1: its position minus that of the last known token."""
    return [word.bit_count() for word in ancestor_words(parents)]
