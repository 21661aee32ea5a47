"""How many more pages the batch will want at its worst moment, if answers are as long as predicted.

Requests that end give theirs back to those that go on, so the sum of all ends would be too much. The worst moment is
just before one of them ends (the estimate of LightLLM's scheduler; S-LoRA counts adapters in the same budget).
"""

from collections.abc import Iterable

import numpy as np


def peak_growth(requests: Iterable[tuple[int, int]], page_size: int) -> int:
    """Pages beyond those held now.

    Args:
        requests: (tokens now, tokens to come) of each.
    """
    now, to_come = np.array(list(requests), dtype=np.int64).reshape(-1, 2).T
    held = -(-now // page_size)
    times = np.unique(to_come)
    alive = to_come[:, None] >= times
    pages = -(-(now[:, None] + times) // page_size)
    return max(0, int((pages * alive).sum(axis=0).max(initial=0) - held.sum()))
