"""The registry's side of replication: answers to its followers' questions."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from adapter_store.errors import StoreFollows
from adapter_store.registry.feed_page import Position
from adapter_store.store import AdapterStore
from api.asgi.draining import Draining
from api.replication.headers import BETWEEN_S, LEASE_S, RENEW_S
from api.replication.key_feed import KeyFeed
from api.replication.leases import Leases
from api.replication.lending import LendingLimiter
from api.replication.loans import LoanQuestion
from api.replication.share_holder import ShareHolder
from api.replication.share_lender import HERE, ShareLender
from api.replication.shares import ShareQuestion

_LOG = logging.getLogger(__name__)
KEYS_EVERY_S = 0.1
"""Time between two checks for changed keys, which commands change while the server runs. A check takes microseconds."""


class Registry:
    """Answer followers. For the event loop's thread; the store is read in other threads.

    Args:
        draining: when it begins, followers that wait for changes are answered at once.
        shares: the part of adapters' limits that this server's own engine may use.
        on_refused: as for `RateLimiter`.

    Raises:
        StoreUnusable, StoreFull: the keys cannot be read.
    """

    def __init__(
        self,
        store: AdapterStore,
        draining: Draining,
        shares: ShareHolder,
        on_refused: Callable[[Exception], object] = lambda _: None,
    ) -> None:
        self._store, self._draining = store, draining
        self._keys = KeyFeed(store.root)
        self.leases = Leases(store.root)
        self.limiter = LendingLimiter(self.leases, time.monotonic, on_refused)
        self._shares, self._lender = shares, ShareLender(self.leases, store.limits)
        self._sharing: asyncio.Task[None] | None = None
        self._renew_own = asyncio.Event()
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_listening = store.feed.listen(self._tell)

    async def start(self) -> None:
        """Share the limits of adapters from the start if the previous process had followers."""
        if not self.leases.are_all_known:
            self._share()

    async def close(self) -> None:
        if self._sharing is not None:
            self._sharing.cancel()
            await asyncio.gather(self._sharing, return_exceptions=True)
        self._stop_listening()
        self._keys.close()

    def check_is_owner(self) -> None:
        """Check that this server owns its names.

        Raises:
            StoreFollows: it follows another server.
        """
        if self._store.feed.follows is not None:
            raise StoreFollows(self._store.feed.follows)

    async def changes(self, after: Position | None, keys: str | None, wait_s: float) -> dict[str, Any]:
        """Return what changed after a position, and the keys that changed; wait for either change.

        Args:
            keys: digest of the keys that the follower has; None: it wants no keys.
        """
        self.check_is_owner()
        loop = self._loop = asyncio.get_running_loop()
        ends_s = loop.time() + wait_s
        while True:
            changed = self._changed
            page = await run_in_threadpool(self._store.feed.changes, after)
            said = None
            if keys is not None and keys != self._keys.tag():
                said = await run_in_threadpool(self._keys.since, self._keys.number_of(keys))
            if page.ids or page.is_first or said is not None or loop.time() >= ends_s or self._draining.is_on:
                return {"page": page.to_dict(), "keys": said}
            await self._until(changed, keys, ends_s)

    async def _until(self, changed: asyncio.Event, keys: str | None, ends_s: float) -> None:
        """Wait for a change of names or of keys."""
        loop = asyncio.get_running_loop()
        while not changed.is_set() and loop.time() < ends_s and not self._draining.is_on:
            if keys is not None and self._keys.tag() != keys:
                return
            try:
                async with asyncio.timeout(min(KEYS_EVERY_S, ends_s - loop.time())):
                    await changed.wait()
            except TimeoutError:
                continue

    def _share(self) -> None:
        """Share the limits of adapters with followers from now on."""
        if self._sharing is None:
            self._sharing = asyncio.create_task(self._keep_own_shares())

    async def _keep_own_shares(self) -> None:
        """Renew the shares of this server's own engine, as a follower does with its lease."""
        await self._shares.begin(self._ask_own, self._renew_own.set)
        while True:
            self._renew_own.clear()
            try:
                self._lend_own()
            except Exception:
                _LOG.exception("cannot divide the limits of adapters; trying again")
            await asyncio.sleep(BETWEEN_S)
            try:
                async with asyncio.timeout(RENEW_S):
                    await self._renew_own.wait()
            except TimeoutError:
                pass

    async def _ask_own(self) -> None:
        self._lend_own()

    def _lend_own(self) -> None:
        answer = self._lender.lend(HERE, ShareQuestion.model_validate(self._shares.question()))
        self._shares.on_answer(answer, math.inf)

    async def lease(
        self, replica: str, history: str, revision: int, loans: LoanQuestion, shares: ShareQuestion
    ) -> dict[str, Any]:
        """Extend a follower's lease, and answer its questions about loans and shares.

        Returns:
            The answer, as JSON, with the revision and keys' digest that the follower needs for the lease to count.

        Raises:
            OSError: the disk failed.
        """
        self.check_is_owner()
        now = await run_in_threadpool(self._store.feed.head)
        # A follower that is ahead has followed a state that was lost when this store was restored.
        is_here = history == now.history and revision <= now.revision
        await self.leases.renew(replica, revision if is_here else -1, now.revision)
        self._share()
        return {
            "lease_s": LEASE_S,
            "now_s": time.time(),
            "history": now.history,
            "revision": now.revision,
            "keys": self._keys.tag(),
            "loans": self.limiter.lend(replica, loans, self._keys.limits()),
            "shares": self._lender.lend(replica, shares),
        }

    def blob(self, digest: str) -> Path:
        """Return the path of a blob.

        Raises:
            StoreFollows, InvalidDigest, BlobNotFound.
        """
        self.check_is_owner()
        return self._store.blob_path(digest)

    def _tell(self) -> None:
        """Wake the waiting questions; called in the thread that made the change."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
