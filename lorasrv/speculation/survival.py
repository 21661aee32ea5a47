"""How often draft tokens of the same evidence were right, learned from answers."""

import itertools
from collections.abc import Hashable

from adapter_store.spec import AdapterKey

FORGETTING = 0.995
"""Factor on the weight of an observation for each later one: half after 140."""
PRIOR_RIGHT, PRIOR_WEIGHT = 0.5, 2.0
"""Prior without observations: worth a trial if a draft token is cheap, not if it is expensive."""
POOLED_WEIGHT = 8.0
"""Number of an adapter's own observations that weigh as much as the expectation from all adapters."""
LEAST_CHANCE = 0.01
"""Bound of the chances of being right and wrong when odds are compared."""
MAX_ENTRIES = 1 << 13
_ALL, _ANY = "all adapters", "any evidence"


class SurvivalTable:
    """Estimate the chance that a draft token is right, given that those before it are."""

    def __init__(self) -> None:
        # (number right, number seen), both with forgetting.
        self._seen: dict[Hashable, tuple[float, float]] = {}

    def estimate(self, drafter: str, adapter: AdapterKey | None, evidence: Hashable) -> float:
        """Return the chance from the adapter's own answers, as far as they are known. The rest is the chance from all
        adapters' answers, with odds scaled by how this adapter's differ from theirs over all evidence."""
        pooled = self._share((drafter, _ALL, evidence), PRIOR_RIGHT, PRIOR_WEIGHT)
        of_all = self._share((drafter, _ALL, _ANY), PRIOR_RIGHT, PRIOR_WEIGHT)
        of_own = self._share((drafter, adapter, _ANY), of_all, POOLED_WEIGHT)
        odds = _odds(pooled) * _odds(of_own) / _odds(of_all)
        return self._share((drafter, adapter, evidence), odds / (1.0 + odds), POOLED_WEIGHT)

    def observe(self, drafter: str, adapter: AdapterKey | None, evidence: Hashable, *, was_right: bool) -> None:
        """Learn whether a token was right; those before it were."""
        for key in itertools.product((drafter,), (_ALL, adapter), (evidence, _ANY)):
            # The entries are in the order of their last observation.
            right, seen = self._seen.pop(key, (0.0, 0.0))
            self._seen[key] = (FORGETTING * right + was_right, FORGETTING * seen + 1.0)
            if len(self._seen) > MAX_ENTRIES:
                del self._seen[next(iter(self._seen))]

    def _share(self, key: Hashable, expected: float, weight: float) -> float:
        """Return the share of right tokens, with `expected` as a prior that counts as `weight` observations."""
        right, seen = self._seen.get(key, (0.0, 0.0))
        return (right + expected * weight) / (seen + weight)


def _odds(chance: float) -> float:
    return max(chance, LEAST_CHANCE) / max(1.0 - chance, LEAST_CHANCE)
