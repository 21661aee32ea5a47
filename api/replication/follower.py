"""Follow a registry: get names and keys from its feed, and renew a lease that says for how long they may be used.
Lease renewals also carry loans of key limits and shares of adapter limits.

The lease is extended once this server has the revision and the keys that the registry reported; it counts from just
before the question was sent. A server without a lease is not ready and answers 503, so a deleted name or a revoked key
is never honoured after the lease ends, whatever happens to the network.
"""

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from adapter_store.errors import AdapterError, CacheFull, OriginUnreachable, StoreFull, StoreUnusable
from adapter_store.registry.feed_page import FeedPage, Position
from adapter_store.registry.name_feed import Followed
from adapter_store.store import AdapterStore
from api.replication.borrowing import BorrowingLimiter
from api.replication.headers import BETWEEN_S, CHANGES, LEASE, LEASE_S, POLL_S, RENEW_S
from api.replication.key_feed import NO_KEYS, KeyFeed, take_over
from api.replication.registry_client import HttpOrigin, RegistryClient
from api.replication.registry_clock import RegistryClock
from api.replication.share_holder import ShareHolder
from lorasrv.config import Limits
from lorasrv.errors import InvalidLimits

_LOG = logging.getLogger(__name__)
PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
"""Time before the registry is asked again after a failure, doubled with each failure, and its maximum."""
ASK_AGAIN_S = 1.0
"""Least time between two questions because of names that are not known here."""
RENEWED_S = 1.0
"""Longest time that a request waits for permits of its key's limits."""
OnChanged = Callable[[Followed], Awaitable[None]]
"""Called when names have changed."""


@dataclass(frozen=True, slots=True)
class _Promise:
    """Hold a lease that takes effect once this server has the registry's revision and keys."""

    until_s: float
    position: Position
    keys: str

    def is_kept_by(self, revision: int, history: str, keys: str) -> bool:
        return revision >= self.position.revision and history == self.position.history and keys == self.keys


def first_page(store: AdapterStore, client: RegistryClient) -> None:
    """Catch up with the registry before a model is loaded, so that permanent errors are reported at once.

    Args:
        client: asks the registry; closed at the end, because the server's event loop does not exist yet.

    Raises:
        OriginDenied: the registry refuses this server's key, or the address is not a registry.
        StoreUnusable: the registry is for another base model, or of another version.
    """

    async def take() -> None:
        try:
            is_last = False
            while not is_last:
                position = store.feed.position()
                answer = await client.get(CHANGES, _asking(position, None, 0.0))
                page, _ = _take_keys(store, answer, position, NO_KEYS)
                store.follow(page)
                is_last = page.is_last
        finally:
            await client.close()

    try:
        asyncio.run(take())
    except OriginUnreachable as error:
        _LOG.warning("%s; this server is not ready until the registry answers", error)


class Follower:
    """Keep a store and its keys up to date. For the event loop's thread; disk work runs in other threads.

    Args:
        store: a store that follows a registry.
        origin: the registry, for blobs.
        client: the registry, for changes and leases.
        replica: this server's name at the registry.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: AdapterStore,
        origin: HttpOrigin,
        client: RegistryClient,
        replica: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._origin, self.clock = store, origin, clock
        self.client, self.registry_clock = client, RegistryClock(clock)
        self.replica = replica
        self._lease_until_s = -1.0
        self._promise: _Promise | None = None
        self._history, self._keys = "", _keys_of(store.root)
        self._applying = asyncio.Lock()
        self._applied = asyncio.Event()
        self._asked_s = -ASK_AGAIN_S
        self._asking: asyncio.Task[None] | None = None
        self._renew_now = asyncio.Event()
        self._renewed = asyncio.Event()
        self._renewed_s = 0.0
        self._is_cut_off = False
        self._limiter = BorrowingLimiter(self.renew_lease, clock)
        self._shares: ShareHolder | None = None
        self._on_changed: OnChanged | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._was_leased = False
        self._first_leased: Future[None] = Future()
        self._why_cut_off = ""

    @property
    def address(self) -> str:
        """Return the registry's address."""
        return self._origin.address

    @property
    def has_lease(self) -> bool:
        """Return whether this server may answer requests."""
        return self.clock() < self._lease_until_s

    def when_leased(self, call: Callable[[], object]) -> None:
        """Call a function when this server gets its first lease; at once if it has had one already."""
        self._first_leased.add_done_callback(lambda _: call())

    def check_lease(self) -> None:
        """Check that this server may answer requests.

        Raises:
            OriginUnreachable: it may not, for the given reason.
        """
        if not self.has_lease:
            raise OriginUnreachable(
                f"this server has had no lease from the registry at {self.address} for {LEASE_S:g} s: "
                f"{self._why_cut_off or 'it has not heard of it'}"
            )

    def limiter(self, on_refused: Callable[[Exception], object]) -> BorrowingLimiter:
        """Return a new limiter of keys; its questions are sent with lease renewals from now on."""
        self._limiter = BorrowingLimiter(self.renew_lease, self.clock, on_refused)
        return self._limiter

    async def share(self, shares: ShareHolder) -> None:
        """Share the limits of an engine's adapters; the questions are sent with lease renewals from now on."""
        self._shares = shares
        await shares.begin(self.renew_lease, self._renew_now.set)

    async def start(self, on_changed: OnChanged) -> None:
        """Begin to follow."""
        self._on_changed = on_changed
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._renew())]

    async def stop(self) -> None:
        """Stop following."""
        for task in [*self._tasks, *([self._asking] if self._asking else [])]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """End the lease, after the last request has ended, and close the connections to the registry."""
        with contextlib.suppress(AdapterError):
            await self.client.post(LEASE, {"replica": self.replica, "ends": True})
        await self.client.close()
        self._origin.close()

    async def renew_lease(self) -> None:
        """Renew the lease at once; return when this is done, has failed or has taken `RENEWED_S`.

        Concurrent callers share one question. While the registry cannot be reached, no caller waits.
        """
        asked_s = self.clock()
        self._renew_now.set()
        try:
            async with asyncio.timeout(RENEWED_S):
                while self._renewed_s < asked_s and not self._is_cut_off:
                    await self._renewed.wait()
        except TimeoutError:
            pass

    async def until_revision(self, revision: int, timeout_s: float) -> bool:
        """Wait until the names have at least a revision; return whether they do."""
        ends_s = self.clock() + timeout_s
        while self._store.feed.revision < revision:
            if (left_s := ends_s - self.clock()) <= 0:
                return False
            await self._until_applied(left_s)
        return True

    async def news_since(self, begun_s: float) -> bool:
        """Wait for changes or the end of a question for them; return whether a question sent after `begun_s` has ended.

        Concurrent callers share one question, and questions are at least `ASK_AGAIN_S` apart.

        Raises:
            OriginUnreachable: the registry does not answer.
        """
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
        asking = self._asking
        applied = asyncio.create_task(self._applied.wait())
        try:
            await asyncio.wait([asking, applied], return_when=asyncio.FIRST_COMPLETED)
        finally:
            applied.cancel()
        if not asking.done():
            return False
        asking.result()
        return self._asked_s >= begun_s

    async def _ask(self) -> None:
        try:
            await asyncio.sleep(max(0.0, self._asked_s + ASK_AGAIN_S - self.clock()))
            self._asked_s = self.clock()
            await self._catch_up()
        finally:
            self._asking = None

    async def _until_applied(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._applied.wait()
        except TimeoutError:
            pass

    # The feed.

    async def _follow(self) -> None:
        """Ask for changes repeatedly; each question waits at the registry until there are some."""
        pause_s, logged = PAUSE_S, ""
        while True:
            try:
                await self._poll(POLL_S)
                pause_s, logged = PAUSE_S, ""
            except Exception as error:
                if not isinstance(error, OriginUnreachable) and repr(error) != logged:
                    logged = repr(error)  # the text alone may be empty
                    _LOG.error(
                        "cannot follow the registry, and try again until it works: %s",
                        error,
                        exc_info=None if isinstance(error, AdapterError) else error,
                    )
                # Random, so that not all followers ask at once after a registry has restarted.
                await asyncio.sleep(pause_s * (0.5 + random.random()))
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _catch_up(self) -> None:
        """Apply all changes up to now."""
        while not await self._poll(0.0):
            pass

    async def _poll(self, wait_s: float) -> bool:
        """Ask for a page of changes and apply it; return whether it was the last one. A page that another question has
        overtaken is dropped."""
        position, known = await run_in_threadpool(self._store.feed.position), self._keys
        answer = await self.client.get(CHANGES, _asking(position, known, wait_s), wait_s)
        async with self._applying:
            if self._keys != known or await run_in_threadpool(self._store.feed.position) != position:
                # Another question has changed the store meanwhile.
                return False
            with _room_for_changes():
                # Keys first: a new name must not be visible with old keys.
                page, keys = await run_in_threadpool(_take_keys, self._store, answer, position, known)
                self._keys = self._keys if keys is None else keys
                changed = await run_in_threadpool(self._store.follow, page)
        self._history = page.position.history
        if changed.ids and self._on_changed is not None:
            await self._on_changed(changed)
        self._applied.set()
        self._applied = asyncio.Event()
        self._settle()
        if page.is_last and (changed.ids or keys is not None):
            self._renew_now.set()
        return page.is_last

    # The lease.

    async def _renew(self) -> None:
        while True:
            self._renew_now.clear()
            try:
                if not await self._ask_for_lease():
                    await self._catch_up()
                self._why_cut_off = ""
            except (AdapterError, LookupError, TypeError, ValueError, ArithmeticError) as error:
                # All but AdapterError: an answer that this version does not understand.
                self._why_cut_off = str(error)
                self._tell_lost(error)
            await asyncio.sleep(BETWEEN_S)
            try:
                async with asyncio.timeout(RENEW_S):
                    await self._renew_now.wait()
            except TimeoutError:
                pass

    async def _ask_for_lease(self) -> bool:
        """Ask for a lease, loans and shares; return whether the lease takes effect at once."""
        begun_s = self.clock()
        said: dict[str, Any] = {
            "replica": self.replica,
            "history": self._history,
            "revision": self._store.feed.revision,
            "loans": self._limiter.question(),
        }
        if self._shares is not None:
            said["shares"] = self._shares.question()
        is_cut_off = True
        try:
            answer = await self.client.post(LEASE, said)
            until_s = begun_s + min(LEASE_S, float(answer["lease_s"]))
            self.registry_clock.on_answer(float(answer["now_s"]), begun_s)
            self._limiter.on_answer(answer["loans"], until_s)
            if self._shares is not None:
                self._shares.on_answer(answer["shares"], until_s)
            is_cut_off = False
        finally:
            self._is_cut_off = self._origin.is_cut_off = is_cut_off
            self._renewed_s = begun_s
            self._renewed.set()
            self._renewed = asyncio.Event()
        position = Position(str(answer["history"]), int(answer["revision"]))
        self._promise = _Promise(until_s, position, str(answer["keys"]))
        return self._settle()

    def _settle(self) -> bool:
        """Extend the lease if this server has the revision and the keys that the registry reported."""
        promise = self._promise
        if promise is None or not promise.is_kept_by(self._store.feed.revision, self._history, self._keys):
            return False
        self._lease_until_s = max(self._lease_until_s, promise.until_s)
        if not self._was_leased:
            _LOG.info("following the registry at %s, revision %d", self.address, self._store.feed.revision)
        self._was_leased = True
        if not self._first_leased.done():
            self._first_leased.set_result(None)
        return True

    def _tell_lost(self, error: Exception) -> None:
        if self._was_leased and not self.has_lease:
            self._was_leased = False
            _LOG.error("the lease of %g s is over, requests get 503 until the registry is back: %s", LEASE_S, error)


@contextlib.contextmanager
def _room_for_changes() -> Iterator[None]:
    """Turn StoreFull, which tells a client that its own change was refused, into CacheFull."""
    try:
        yield
    except StoreFull as error:
        raise CacheFull(
            "no room on this replica's disk for the registry's changes; once some is free, they are taken"
        ) from error


def _asking(position: Position | None, keys: str | None, wait_s: float) -> dict[str, Any]:
    asked: dict[str, Any] = {"wait_s": wait_s}
    if position is not None:
        asked |= {"history": position.history, "after": position.revision}
    return asked if keys is None else asked | {"keys": keys}


def _take_keys(
    store: AdapterStore, answer: Mapping[str, Any], position: Position | None, known: str
) -> tuple[FeedPage, str | None]:
    """Check the page after a position, and store the keys that came with it.

    Args:
        known: digest of the keys that are stored.

    Returns: the page, and the keys' digest; None: no keys came.
    """
    page = FeedPage.from_dict(answer.get("page"))
    _check_goes_on(page, position)
    _check_limits(page)
    if "keys" not in answer:
        # Asked again, it would answer the same at once, forever.
        raise StoreUnusable("the registry's changes come without keys; run the same version on both")
    return page, None if answer["keys"] is None else take_over(store.root, answer["keys"], known)


def _check_goes_on(page: FeedPage, position: Position | None) -> None:
    """Check that a page continues from a position. Otherwise a page that is not the last would be requested forever."""
    is_older = not page.is_first and position is not None and page.position.revision < position.revision
    if is_older or (page.position == position and not page.is_last):
        raise StoreUnusable("the registry's changes do not go on from those that are here")


def _check_limits(page: FeedPage) -> None:
    """Check that this server can enforce the limits in a page: with others stored, it could not start again."""
    for adapter_id, limits in page.rows["adapter_limits"]:
        try:
            Limits(**json.loads(limits))
        except (InvalidLimits, TypeError) as error:
            raise StoreUnusable(
                f"the registry keeps limits of {adapter_id!r} that this version of lorasrv cannot enforce: {error}"
            ) from None


def _keys_of(root: Path) -> str:
    feed = KeyFeed(root)
    try:
        return feed.tag()
    finally:
        feed.close()
