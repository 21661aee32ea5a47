"""Leases of followers, at the registry: who may still be answering, and which revision each has taken over."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from api.replication.headers import LEASE_S


@dataclass(frozen=True, slots=True)
class _Lease:
    """Hold what a follower said last."""

    revision: int
    # End by this machine's monotonic clock; the follower's own ends earlier.
    ends_s: float


class Leases:
    """Keep the leases of followers. For the event loop's thread.

    A follower counts its lease from before it asked, so that by its clock it always ends first: no two machines' clocks
    are compared. What was leased before this process began is not known; it has ended `lease_s` after the start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, lease_s: float = LEASE_S) -> None:
        self._clock = clock
        self.lease_s = lease_s
        self._all_known_s = clock() + lease_s
        self._leases: dict[str, _Lease] = {}
        self._news = asyncio.Event()

    def renew(self, replica: str, revision: int) -> None:
        """Note that a follower has taken over a revision, and extend its lease."""
        self._leases[replica] = _Lease(revision, self._clock() + self.lease_s)
        self._news.set()
        self._news = asyncio.Event()

    def end(self, replica: str) -> None:
        """Forget a follower that has ended."""
        self._leases.pop(replica, None)
        self._news.set()
        self._news = asyncio.Event()

    def replicas(self) -> list[str]:
        """Return the followers whose leases last."""
        now_s = self._clock()
        self._leases = {name: lease for name, lease in self._leases.items() if lease.ends_s > now_s}
        return sorted(self._leases)

    async def everywhere(self, revision: int) -> int:
        """Wait until no follower answers with an older revision; return how many have taken it over.

        That is once each has said so, or its lease is over.
        """
        while (left_s := self._left_s(revision)) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await self._news.wait()
            except TimeoutError:
                continue
        self.replicas()
        return sum(lease.revision >= revision for lease in self._leases.values())

    def _left_s(self, revision: int) -> float:
        """Return the seconds until every lease of an older revision is over."""
        ends = [lease.ends_s for lease in self._leases.values() if lease.revision < revision]
        return max([self._all_known_s, *ends]) - self._clock()
