"""How much may be stored: in all, and by each principal. What counts is what versions name."""

from collections.abc import Mapping
from dataclasses import dataclass

from adapter_store.errors import QuotaExceeded

ANONYMOUS = "anonymous"


@dataclass(frozen=True, slots=True)
class Usage:
    """Versions, and bytes of the weights that they name: weights that several versions share count once."""

    versions: int
    bytes: int


Usages = Mapping[str | None, Usage]
"""What a principal has stored; None stands for everybody."""


@dataclass(frozen=True, slots=True)
class StoreQuota:
    """Most versions and most bytes of weights, in all and of each principal; None is no limit."""

    max_adapters: int | None = None
    store_bytes: int | None = None
    max_adapters_per_key: int | None = None
    store_bytes_per_key: int | None = None

    @property
    def is_set(self) -> bool:
        return any(limit is not None for limit in self._limits(None) + self._limits(ANONYMOUS))

    def check(self, principal: str, before: Usages, after: Usages) -> None:
        """Whether a principal's new version may stay.

        Raises: QuotaExceeded: it, or all together, would have more than is allowed.
        """
        for whose in (None, principal):
            max_versions, max_bytes = self._limits(whose)
            suffix = "" if whose is None else "_per_key"
            old, new = before[whose], after[whose]
            if max_versions is not None and new.versions > max_versions:
                _refuse(f"max_adapters{suffix}", "adapter versions", old.versions, new.versions, max_versions)
            # Weights that are there already cost nothing, also where a lower quota is exceeded since.
            if max_bytes is not None and new.bytes > max(max_bytes, old.bytes):
                _refuse(f"store_bytes{suffix}", "bytes of weights", old.bytes, new.bytes, max_bytes)

    def _limits(self, whose: str | None) -> tuple[int | None, int | None]:
        if whose is None:
            return self.max_adapters, self.store_bytes
        return self.max_adapters_per_key, self.store_bytes_per_key


def _refuse(quota: str, what: str, used: int, would_be: int, allowed: int) -> None:
    raise QuotaExceeded(quota, what, used=used, wanted=would_be - used, allowed=allowed)
