"""Limits on versions and stored bytes, in total and per principal. Only weights that versions refer to count."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from adapter_store.errors import QuotaExceeded

ANONYMOUS = "anonymous"
MAX_PER_ID = 1000
"""Most versions of an id, and most aliases: each change of the id reads and hashes all of them."""
SHARED_QUOTAS = frozenset({"store_bytes", "max_adapters"})
"""Names of the quotas that all principals share."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Count versions and the bytes of their weights; weights shared by several versions count once."""

    versions: int
    bytes: int


class UsageTotals:
    """Keep the usage of each principal and the total (principal None) as versions are added and removed.

    The cost of a change does not depend on the number of versions. Not thread-safe.
    """

    def __init__(self) -> None:
        self._used: dict[str | None, Usage] = {}
        # Versions by principal and digest of the weights.
        self._sharing: Counter[tuple[str | None, str]] = Counter()

    def of(self, principal: str | None) -> Usage:
        """Return a principal's usage."""
        return self._used.get(principal, Usage(0, 0))

    def with_version(self, principal: str | None, digest: str, num_bytes: int) -> Usage:
        """Return a principal's usage with one more version of these weights."""
        used = self.of(principal)
        return Usage(used.versions + 1, used.bytes + (0 if self._sharing[principal, digest] else num_bytes))

    def add(self, principal: str, digest: str, num_bytes: int) -> None:
        """Count a new version of a principal; without weights, the digest is empty and there are 0 bytes."""
        for owner in (None, principal):
            self._used[owner] = self.with_version(owner, digest, num_bytes)
            self._sharing[owner, digest] += 1

    def remove(self, principal: str, digest: str, num_bytes: int) -> None:
        """Stop counting a version; the arguments are the same as in `add`."""
        for owner in (None, principal):
            self._sharing[owner, digest] -= 1
            if is_last := not self._sharing[owner, digest]:
                del self._sharing[owner, digest]
            used = self._used.pop(owner)
            if used.versions > 1:
                self._used[owner] = Usage(used.versions - 1, used.bytes - (num_bytes if is_last else 0))


@dataclass(frozen=True, slots=True)
class StoreQuota:
    """Limit versions and bytes of weights, in total and per principal, and both versions and aliases of each id.

    None means no limit. `bytes_limit` is the name under which the principal's byte limit is reported.
    """

    max_adapters: int | None = None
    store_bytes: int | None = None
    max_adapters_per_key: int | None = None
    store_bytes_per_key: int | None = None
    bytes_limit: str = "store_bytes_per_key"
    max_per_id: int = MAX_PER_ID

    def with_bytes(self, max_bytes: int | None) -> "StoreQuota":
        """Return the quota for a principal with its own byte limit; None keeps the common limit."""
        return (
            self if max_bytes is None else replace(self, store_bytes_per_key=max_bytes, bytes_limit="max_stored_bytes")
        )

    def check(self, totals: UsageTotals, principal: str, digest: str, num_bytes: int) -> None:
        """Check the usage with one more version against the limits.

        Args:
            totals: the usage without the new version.
            principal: the owner of the new version.
            digest: digest of the new version's weights; empty without weights.
            num_bytes: bytes of the new version's weights.

        Raises:
            QuotaExceeded: the principal, or all principals together, would exceed a limit.
        """
        for owner in (None, principal):
            max_versions, max_bytes = self._limits(owner)
            suffix = "" if owner is None else "_per_key"
            old, new = totals.of(owner), totals.with_version(owner, digest, num_bytes)
            if max_versions is not None and new.versions > max_versions:
                _refuse(f"max_adapters{suffix}", "adapter versions", old.versions, new.versions, max_versions)
            # Weights already stored cost nothing, even if the quota was lowered below the usage meanwhile.
            if max_bytes is not None and new.bytes > max(max_bytes, old.bytes):
                quota = "store_bytes" if owner is None else self.bytes_limit
                _refuse(quota, "bytes of weights", old.bytes, new.bytes, max_bytes)

    def check_of_id(self, adapter_id: str, what: str, old: Collection[object], new: Collection[object]) -> None:
        """Check that an id may have the versions or aliases `new` in place of `old`; existing ones are never refused.

        Raises:
            QuotaExceeded: there are too many.
        """
        if len(new) > max(self.max_per_id, len(old)):
            _refuse("max_per_id", f"{what} of {adapter_id!r}", len(old), len(new), self.max_per_id)

    def _limits(self, owner: str | None) -> tuple[int | None, int | None]:
        if owner is None:
            return self.max_adapters, self.store_bytes
        return self.max_adapters_per_key, self.store_bytes_per_key


def _refuse(quota: str, what: str, used: int, would_be: int, allowed: int) -> None:
    raise QuotaExceeded(quota, what, used=used, wanted=would_be - used, allowed=allowed)
