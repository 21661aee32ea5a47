"""How often draft tokens of some evidence were right, learned from what answers say."""

import itertools
from collections.abc import Hashable

from adapter_store.spec import AdapterKey

FORGETTING = 0.995
"""Weight of an observation one observation later: half after 140."""
PRIOR_RIGHT, PRIOR_WEIGHT = 0.5, 2.0
"""Assumed where nothing was observed: worth a try where a draft token is cheap, not where it is dear."""
POOLED_WEIGHT = 8.0
"""Observations of an adapter's own that weigh as much as what is expected of it."""
LEAST_CHANCE = 0.01
"""Of being right or wrong, where odds are compared."""
MAX_ENTRIES = 1 << 13
_ALL, _ANY = "all adapters", "any evidence"


class SurvivalTable:
    """Estimate the chance that a draft token is right, given that those before it are."""

    def __init__(self) -> None:
        # (right, seen), both with forgetting.
        self._seen: dict[Hashable, tuple[float, float]] = {}

    def estimate(self, drafter: str, adapter: AdapterKey | None, evidence: Hashable) -> float:
        """Return the chance: of the adapter's own answers as far as they are known; else of all adapters', with the
        odds changed as much as this adapter's differ from theirs whatever the evidence."""
        pooled = self._share((drafter, _ALL, evidence), PRIOR_RIGHT, PRIOR_WEIGHT)
        of_all = self._share((drafter, _ALL, _ANY), PRIOR_RIGHT, PRIOR_WEIGHT)
        of_own = self._share((drafter, adapter, _ANY), of_all, POOLED_WEIGHT)
        odds = _odds(pooled) * _odds(of_own) / _odds(of_all)
        return self._share((drafter, adapter, evidence), odds / (1.0 + odds), POOLED_WEIGHT)

    def observe(self, drafter: str, adapter: AdapterKey | None, evidence: Hashable, *, was_right: bool) -> None:
        """Enter whether a token was right; those before it were."""
        for key in itertools.product((drafter,), (_ALL, adapter), (evidence, _ANY)):
            # The entries are in the order of their last observation.
            right, seen = self._seen.pop(key, (0.0, 0.0))
            self._seen[key] = (FORGETTING * right + was_right, FORGETTING * seen + 1.0)
            if len(self._seen) > MAX_ENTRIES:
                del self._seen[next(iter(self._seen))]

    def _share(self, key: Hashable, expected: float, weight: float) -> float:
        """Return the share of right ones, of which `weight` were as expected."""
        right, seen = self._seen.get(key, (0.0, 0.0))
        return (right + expected * weight) / (seen + weight)


def _odds(chance: float) -> float:
    return max(chance, LEAST_CHANCE) / max(1.0 - chance, LEAST_CHANCE)
