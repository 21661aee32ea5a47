"""How often draft tokens of some evidence were right, learned from what answers say."""

from collections.abc import Hashable

from adapter_store.spec import AdapterKey

FORGETTING = 0.995
"""Weight of an observation one observation later: half after 140."""
PRIOR_RIGHT, PRIOR_WEIGHT = 0.5, 2.0
"""Assumed of evidence that nobody has seen: worth a try where a draft token is cheap, not where it is dear."""
POOLED_WEIGHT = 8.0
"""Observations of an adapter's own that weigh as much as those of all adapters."""
MAX_ENTRIES = 1 << 13
_ALL = "all adapters"


class SurvivalTable:
    """Estimate the chance that a draft token is right, given that those before it are."""

    def __init__(self) -> None:
        # (right, seen), both with forgetting.
        self._seen: dict[Hashable, tuple[float, float]] = {}

    def estimate(self, drafter: str, adapter: AdapterKey | None, evidence: Hashable) -> float:
        """Return the chance, of the adapter's own answers as far as they are known, else of all adapters'."""
        right, seen = self._seen.get((drafter, _ALL, evidence), (0.0, 0.0))
        pooled = (right + PRIOR_RIGHT * PRIOR_WEIGHT) / (seen + PRIOR_WEIGHT)
        right, seen = self._seen.get((drafter, adapter, evidence), (0.0, 0.0))
        return (right + pooled * POOLED_WEIGHT) / (seen + POOLED_WEIGHT)

    def observe(self, drafter: str, adapter: AdapterKey | None, evidence: Hashable, *, was_right: bool) -> None:
        """Enter whether a token was right; those before it were."""
        for whose in (_ALL, adapter):
            key = (drafter, whose, evidence)
            # The entries are in the order of their last observation.
            right, seen = self._seen.pop(key, (0.0, 0.0))
            self._seen[key] = (FORGETTING * right + was_right, FORGETTING * seen + 1.0)
            if len(self._seen) > MAX_ENTRIES:
                del self._seen[next(iter(self._seen))]
