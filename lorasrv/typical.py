"""Locally typical sampling: tokens about as surprising as the distribution is on average, likelier ones left out too.

Meister et al. 2022, "Locally Typical Sampling" (arXiv:2202.00666); transformers' `TypicalLogitsWarper` is the oracle.
"""

import torch
from torch import Tensor


def typical(probs: Tensor, mass: float | Tensor) -> Tensor:
    """Which tokens stay: those whose surprise -log p is nearest to the entropy, until they have this mass together.

    Args:
        probs: [..., V], not negative; need not add up to 1. What is 0 never stays, and at least one stays.
        mass: above 0; a number, or [..., 1].
    Returns: [..., V] bool.
    """
    probs = probs / probs.sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(probs).sum(dim=-1, keepdim=True)
    distance = (-probs.log() - entropy).abs()
    nearest, order = distance.sort(dim=-1)
    before = probs.gather(-1, order).cumsum(dim=-1) < mass
    last = before.sum(dim=-1, keepdim=True).clamp_max(probs.shape[-1] - 1)
    stays: Tensor = (distance <= nearest.gather(-1, last)) & (probs > 0)
    return stays
