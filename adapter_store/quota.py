"""Limits on what may be stored, in total and per principal. Only what versions refer to counts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from adapter_store.errors import QuotaExceeded

ANONYMOUS = "anonymous"
SHARED_QUOTAS = frozenset({"store_bytes", "max_adapters"})
"""Names of the quotas that all principals share."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Count versions and the bytes of their weights; weights shared by several versions count once."""

    versions: int
    bytes: int


Usages = Mapping[str | None, Usage]
"""Usage by principal; the key None holds the total."""


@dataclass(frozen=True, slots=True)
class StoreQuota:
    """Limit versions and bytes of weights, in total and per principal; None means no limit.

    `bytes_limit` is the name under which the principal's byte limit is reported.
    """

    max_adapters: int | None = None
    store_bytes: int | None = None
    max_adapters_per_key: int | None = None
    store_bytes_per_key: int | None = None
    bytes_limit: str = "store_bytes_per_key"

    @property
    def is_set(self) -> bool:
        """Return whether any limit is set."""
        return any(limit is not None for limit in self._limits(None) + self._limits(ANONYMOUS))

    def with_bytes(self, max_bytes: int | None) -> "StoreQuota":
        """Return the quota for a principal with a byte limit of its own; None keeps the common limit."""
        return (
            self if max_bytes is None else replace(self, store_bytes_per_key=max_bytes, bytes_limit="max_stored_bytes")
        )

    def check(self, principal: str, before: Usages, after: Usages) -> None:
        """Check the usage after adding a version against the limits.

        Args:
            principal: the owner of the new version.
            before: usage without the version, of the principal and in total (key None).
            after: usage with the version.

        Raises:
            QuotaExceeded: the principal, or all together, would exceed a limit.
        """
        for owner in (None, principal):
            max_versions, max_bytes = self._limits(owner)
            suffix = "" if owner is None else "_per_key"
            old, new = before[owner], after[owner]
            if max_versions is not None and new.versions > max_versions:
                _refuse(f"max_adapters{suffix}", "adapter versions", old.versions, new.versions, max_versions)
            # Weights already stored cost nothing, even if the quota was lowered below the usage meanwhile.
            if max_bytes is not None and new.bytes > max(max_bytes, old.bytes):
                quota = "store_bytes" if owner is None else self.bytes_limit
                _refuse(quota, "bytes of weights", old.bytes, new.bytes, max_bytes)

    def _limits(self, owner: str | None) -> tuple[int | None, int | None]:
        if owner is None:
            return self.max_adapters, self.store_bytes
        return self.max_adapters_per_key, self.store_bytes_per_key


def _refuse(quota: str, what: str, used: int, would_be: int, allowed: int) -> None:
    raise QuotaExceeded(quota, what, used=used, wanted=would_be - used, allowed=allowed)
