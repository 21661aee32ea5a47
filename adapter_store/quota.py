"""How much may be stored: in all, and by each principal. What counts is what versions name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from adapter_store.errors import QuotaExceeded

ANONYMOUS = "anonymous"
OF_ALL = frozenset({"store_bytes", "max_adapters"})
"""Quotas of all principals together."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Versions, and bytes of the weights that they name: weights that several versions share count once."""

    versions: int
    bytes: int


Usages = Mapping[str | None, Usage]
"""What a principal has stored; None stands for everybody."""


@dataclass(frozen=True, slots=True)
class StoreQuota:
    """Most versions and most bytes of weights, in all and of each principal; None is no limit. `bytes_limit` is what
    that of a principal's bytes is called."""

    max_adapters: int | None = None
    store_bytes: int | None = None
    max_adapters_per_key: int | None = None
    store_bytes_per_key: int | None = None
    bytes_limit: str = "store_bytes_per_key"

    @property
    def is_set(self) -> bool:
        return any(limit is not None for limit in self._limits(None) + self._limits(ANONYMOUS))

    def with_bytes(self, max_bytes: int | None) -> "StoreQuota":
        """For a principal that has its own number of bytes; None: it has as many as each."""
        return (
            self if max_bytes is None else replace(self, store_bytes_per_key=max_bytes, bytes_limit="max_stored_bytes")
        )

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
                quota = "store_bytes" if whose is None else self.bytes_limit
                _refuse(quota, "bytes of weights", old.bytes, new.bytes, max_bytes)

    def _limits(self, whose: str | None) -> tuple[int | None, int | None]:
        if whose is None:
            return self.max_adapters, self.store_bytes
        return self.max_adapters_per_key, self.store_bytes_per_key


def _refuse(quota: str, what: str, used: int, would_be: int, allowed: int) -> None:
    raise QuotaExceeded(quota, what, used=used, wanted=would_be - used, allowed=allowed)
