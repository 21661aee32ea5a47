"""Keep the usage of each adapter since its upload, and of the base, over restarts. Torch-free.

Numbers are added up in the event loop as requests end. A thread writes them every `WRITE_EVERY_S` seconds, when the
ledger is read, and at shutdown; a crash loses unwritten numbers. Memory holds only the unwritten usage of adapters that
were busy in this interval, not that of ten thousand adapters. A registry's ledger includes the usage that its followers
have counted.
"""

import asyncio
import itertools
import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

from adapter_store.registry.records import AdapterRecord
from adapter_store.spec import AdapterId, AdapterKey
from lorasrv.errors import EngineDead
from lorasrv.metrics.request_stats import FinishedRequestStats, RequestStats
from lorasrv.metrics.step_stats import StepStats
from lorasrv.metrics.usage import Usage
from lorasrv.metrics.usage_batch import UsageBatch
from lorasrv.metrics.usage_db import LedgerFile
from lorasrv.request import Account

_LOG = logging.getLogger(__name__)
FILE_NAME = "ledger.db"
WRITE_EVERY_S = 5.0
IDLE_WRITES = 12
"""Intervals between two writes while there are no requests: only residency changes then."""
MAX_ASKING_S = 2.0
"""Longest wait for the engine. A step may take longer, or hang; the next sample then covers this time too."""
MAX_UNWRITTEN = 16384
"""Accounts kept in memory while writing fails; beyond this the oldest are dropped."""
BASE_KEY = AdapterKey("")


class LedgerEngine(Protocol):
    """Declare what the ledger reads from an engine; `AsyncEngine` implements it."""

    @property
    def request_stats(self) -> RequestStats: ...

    @property
    def step_stats(self) -> StepStats: ...

    async def residents(self) -> list[tuple[AdapterKey, int]]: ...


class LedgerStore(Protocol):
    """Declare what the ledger reads from a store; `AdapterStore` implements it."""

    def records(self) -> Mapping[AdapterId, AdapterRecord]:
        """Return the records: the same object until something changes."""


class Ledger:
    """Listen to an engine's requests and keep their usage. Owned by the event loop's thread.

    Bytes moved and residency belong to a content and count for the id that requested it last, so that of two ids with
    the same content neither sees the other's usage.

    Args:
        clock: monotonic seconds.
        sends: whether the store's origin also counts the usage that is counted here.
    """

    def __init__(
        self,
        engine: LedgerEngine,
        store: LedgerStore,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        sends: bool = False,
    ) -> None:
        self._engine = engine
        self._store = store
        self._file = LedgerFile(folder / FILE_NAME, sends=sends)
        self.written = asyncio.Event()
        """Set when there may be something to send; also at the start, as a killed server may have left something."""
        self.written.set()
        self._unwritten: dict[Account, Usage] = {}
        self._clock = clock
        self._sampled_s = clock()
        self._records: Mapping[AdapterId, AdapterRecord] | None = None
        self._names: dict[AdapterKey, str] = {}
        self._is_failing = False
        self._has_news = False
        self._turn = asyncio.Lock()
        engine.request_stats.listeners.append(self.on_request_finished)

    def on_request_finished(self, request: FinishedRequestStats) -> None:
        """Count a finished request."""
        self._has_news = True
        asked = self._usage(*request.account)
        asked.on_asked(request, time.time())
        (self._usage("", None) if request.fell_back else asked).on_answered(request)

    async def run(self) -> None:
        """Write periodically until cancelled."""
        # Adapters may have been deleted while no ledger was open.
        await self.prune()
        for turn in itertools.count(1):
            await asyncio.sleep(WRITE_EVERY_S)
            if self._has_news or turn % IDLE_WRITES == 0:
                self._has_news = False
                try:
                    await self._settle()
                except Exception:
                    _LOG.exception("the ledger was not updated; trying again at the next interval")

    async def stats(self, adapter_id: str, keys: Collection[AdapterKey]) -> dict[AdapterKey, Usage]:
        """Return the usage of an id by content, for these contents. Usage without weights has the key `BASE_KEY`; the
        base has the id "".

        Raises:
            sqlite3.Error, OSError: the disk failed.
        """
        await self._settle()
        async with self._turn:
            found = await asyncio.to_thread(self._file.read, adapter_id)
        return {key: found.get(key, Usage()) for key in keys}

    async def forget(self, adapter_id: str, keys: Collection[AdapterKey | None]) -> None:
        """Drop the usage of deleted contents of an id: the id may be reused at once by another principal.

        The key None stands for usage without weights.
        """
        for key in keys:
            self._unwritten.pop((adapter_id, key), None)
        async with self._turn:
            try:
                await asyncio.to_thread(self._file.drop, adapter_id, [key or BASE_KEY for key in keys])
            except (sqlite3.Error, OSError) as error:
                # Pruned at the next start; until then shown only for the same contents.
                _LOG.warning("cannot remove deleted adapters from the ledger now: %s", error)

    async def prune(self, adapter_ids: Collection[str] | None = None) -> None:
        """Drop the usage of contents that are no longer registered; only under the given ids, if any are given."""
        async with self._turn:
            try:
                await asyncio.to_thread(self._drop_unknown, adapter_ids)
            except (sqlite3.Error, OSError) as error:
                _LOG.error("the ledger cannot be read: %s", error)

    async def next_batch(self, behind: UsageBatch | None = None) -> UsageBatch | None:
        """Return the batch to send now, or after a batch that waits; the same one until `on_batch_counted`.

        Raises:
            sqlite3.Error, OSError: the disk failed.
        """
        async with self._turn:
            return await asyncio.to_thread(self._file.next_batch, behind)

    async def on_batch_counted(self, batch: UsageBatch) -> None:
        """Note that a batch was counted by the origin.

        Raises:
            sqlite3.Error, OSError: the disk failed; it may be sent again.
        """
        async with self._turn:
            await asyncio.to_thread(self._file.on_batch_counted, batch)

    async def on_batch_refused(self, batch: UsageBatch, why: str) -> None:
        """Set a batch aside that the origin will never count.

        Raises:
            sqlite3.Error, OSError: the disk failed; it may be sent again.
        """
        async with self._turn:
            await asyncio.to_thread(self._file.on_batch_refused, batch, why)

    async def receive(self, source: str, sequence: int, usages: Mapping[Account, Usage]) -> bool:
        """Count a follower's batch once; return whether it was counted now.

        Raises:
            sqlite3.Error, OSError: the disk failed; nothing was counted.
        """
        records = self._store.records()
        known = {account: usage for account, usage in usages.items() if _exists(account, records)}
        async with self._turn:
            return await asyncio.to_thread(self._file.receive, source, sequence, known)

    async def close(self) -> None:
        """Write the remaining usage; the engine may have ended."""
        await self._settle()

    async def _settle(self) -> None:
        """Collect the engine's counts and write."""
        self._take_spent()
        await self._sample_residents()
        async with self._turn:
            unwritten, self._unwritten = self._unwritten, {}
            try:
                await asyncio.to_thread(self._write, unwritten)
                self._is_failing = False
                self.written.set()
            except Exception as error:
                # Keep the counts after any error; the next write may succeed.
                self._keep(unwritten)
                if not self._is_failing:
                    self._is_failing = True
                    why = "cannot write the ledger; it stays in memory for now: %s"
                    _LOG.error(why, error, exc_info=None if isinstance(error, sqlite3.Error | OSError) else error)

    def _write(self, usages: Mapping[Account, Usage]) -> None:
        """Write the usage of existing adapters; the id of a deleted one may already belong to another adapter."""
        records = self._store.records()
        self._file.add({account: usage for account, usage in usages.items() if _exists(account, records)})

    def _keep(self, usages: dict[Account, Usage]) -> None:
        for account, usage in self._unwritten.items():
            usages.setdefault(account, Usage()).merge(usage)
        self._unwritten = usages
        for account in list(usages)[: max(0, len(usages) - MAX_UNWRITTEN)]:
            del usages[account]

    def _drop_unknown(self, adapter_ids: Collection[str] | None) -> None:
        records = self._store.records()
        for adapter_id, key in self._file.accounts(adapter_ids):
            if not _exists((adapter_id, key), records):
                self._file.drop(adapter_id, [key])

    def _take_spent(self) -> None:
        spent = self._engine.step_stats.take()
        for (adapter_id, key), seconds in spent.seconds.items():
            self._usage(adapter_id, key).compute_s += seconds
        for key, moved in spent.moved.items():
            usage = self._usage(*self._asker(key))
            usage.loads += moved.loads
            usage.load_bytes += moved.load_bytes
            usage.copies += moved.copies
            usage.copy_bytes += moved.copy_bytes

    async def _sample_residents(self) -> None:
        """Charge residency since the last sample to the contents that are resident now."""
        try:
            async with asyncio.timeout(MAX_ASKING_S):
                residents = await self._engine.residents()
        except (EngineDead, TimeoutError):
            return
        now_s = self._clock()
        seconds, self._sampled_s = now_s - self._sampled_s, now_s
        for key, nbytes in residents:
            self._usage(*self._asker(key)).resident_byte_s += nbytes * seconds

    def _asker(self, key: AdapterKey) -> Account:
        """Return the account that requested an adapter last.

        For a content that was only warmed or pinned, or whose last id was deleted, return any id that has it; else "".
        """
        records = self._store.records()
        asker = self._engine.request_stats.askers.get(key)
        if asker is not None and _exists(asker, records):
            return asker
        if records is not self._records:
            self._records = records
            self._names = {
                v.key: name for name, record in records.items() for v in record.versions if v.key is not None
            }
        return self._names.get(key, ""), key

    def _usage(self, adapter_id: str, key: AdapterKey | None) -> Usage:
        account = (adapter_id, key)
        if key is None and not _exists(account, self._store.records()):
            # The base has answered for an adapter.
            account = ("", None)
        usage = self._unwritten.get(account)
        if usage is None:
            usage = self._unwritten[account] = Usage()
        return usage


def _exists(account: Account, records: Mapping[AdapterId, AdapterRecord]) -> bool:
    adapter_id, key = account
    if not adapter_id:
        return not key
    record = records.get(AdapterId(adapter_id))
    return record is not None and any(version.key == (key or None) for version in record.versions)
