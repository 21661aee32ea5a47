"""Page lender: prefix pages for other replicas. The engine owns the leases; pages are read while its steps run.

A leased page is neither written nor moved, so any thread may copy it without involving the engine's thread. A lease
ends here before it ends in the engine. After copying, a thread checks the lease again and drops pages read too late.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from adapter_store.storage.snapshots import Facts
from lorasrv.engine.messages import EndLease, OfferPages
from lorasrv.errors import LeaseEnded
from lorasrv.outputs import PageLease
from lorasrv.worker.snapshot_loader import ReadPages


class PageLender:
    """Lend pages. For the event loop's thread, except `read`.

    Args:
        facts: all that keys and values depend on besides adapter and tokens; None: nothing is lent.
        page_bytes: bytes of a page in all slabs.
        read: reads leased pages, in any thread.
        call: calls the engine.
    """

    def __init__(
        self,
        facts: Facts | None,
        page_bytes: int,
        read: ReadPages,
        call: Callable[[OfferPages | EndLease], Awaitable[Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts, self.page_bytes = facts, page_bytes
        self._read, self._call, self._clock = read, call, clock
        self._leases: dict[str, PageLease] = {}

    async def offer(self, digests: Sequence[bytes]) -> PageLease:
        """Lease the first cached pages of these hashes; if none are cached, there is no lease.

        Raises:
            EngineDead: the engine does not run.
        """
        for ended in [lease for lease in self._leases.values() if lease.until_s <= self._clock()]:
            del self._leases[ended.lease_id]
        lease: PageLease = await self._call(OfferPages(tuple(digests)))
        if lease.pages:
            self._leases[lease.lease_id] = lease
        return lease

    def num_pages(self, lease_id: str) -> int:
        """Return the number of a lease's pages.

        Raises:
            LeaseEnded: it has ended.
        """
        return len(self._live(lease_id).pages)

    def read(self, lease_id: str, first: int, count: int) -> memoryview:
        """Return the bytes of a lease's pages, `count` from `first` on. Call it in a thread: pages are many bytes.

        Raises:
            LeaseEnded: the lease has ended, perhaps during the read.
        """
        rows = self._read(self._live(lease_id).pages[first : first + count])
        self._live(lease_id)
        return memoryview(rows.numpy().data).cast("B")

    async def end(self, lease_id: str) -> None:
        """End a lease; do nothing if it has ended.

        Raises:
            EngineDead: the engine does not run.
        """
        if self._leases.pop(lease_id, None) is not None:
            await self._call(EndLease(lease_id))

    def _live(self, lease_id: str) -> PageLease:
        lease = self._leases.get(lease_id)
        if lease is None or lease.until_s <= self._clock():
            raise LeaseEnded("the pages are not held any more: the lease has ended")
        return lease
