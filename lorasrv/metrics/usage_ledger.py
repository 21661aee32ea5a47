"""What every adapter was asked and cost since it was uploaded, and the base: kept over restarts. No torch.

Figures are added up in the event loop as requests end, and written by a thread every `WRITE_EVERY_S` seconds, when
somebody asks for them, and at the end; a crash loses what was not written. In memory is only that: not what ten
thousand adapters had, but what those that were busy in these seconds have had in them.
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
from lorasrv.metrics.step_stats import Account, StepStats
from lorasrv.metrics.usage import Usage
from lorasrv.metrics.usage_db import LedgerFile

_LOG = logging.getLogger(__name__)
FILE_NAME = "ledger.db"
WRITE_EVERY_S = 5.0
IDLE_WRITES = 12
"""While nobody asks, only how long adapters are resident changes: every so many turns is enough for that."""
MAX_ASKING_S = 2.0
"""A step may take longer, or hang; then the next look counts for this time too."""
MAX_UNWRITTEN = 16384
"""Accounts kept in memory while the disk refuses to take them; of more, the oldest are lost."""
BASE_KEY = AdapterKey("")


class LedgerEngine(Protocol):
    """What the ledger hears of an engine; `AsyncEngine` is one."""

    @property
    def traffic(self) -> RequestStats: ...

    @property
    def step_stats(self) -> StepStats: ...

    async def residents(self) -> list[tuple[AdapterKey, int]]: ...


class LedgerStore(Protocol):
    """What it must know of names; `AdapterStore` knows it."""

    def records(self) -> Mapping[AdapterId, AdapterRecord]:
        """The same object as long as nothing changes."""


class Ledger:
    """Belongs to the event loop's thread. Listens to an engine's traffic from its construction on.

    Bytes moved and resident bytes are a content's: they count for the id by which it was asked for last, so that of two
    ids with the same content neither sees what is done for the other.
    """

    def __init__(
        self, engine: LedgerEngine, store: LedgerStore, folder: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine = engine
        self._store = store
        self._file = LedgerFile(folder / FILE_NAME)
        self._unwritten: dict[Account, Usage] = {}
        self._clock = clock
        self._sampled_s = clock()
        self._records: Mapping[AdapterId, AdapterRecord] | None = None
        self._names: dict[AdapterKey, str] = {}
        self._is_failing = False
        self._has_news = False
        self._turn = asyncio.Lock()
        engine.traffic.listeners.append(self.ended)

    def ended(self, request: FinishedRequestStats) -> None:
        """A request is over."""
        self._has_news = True
        asked = self._usage(request.adapter_id, request.adapter_key)
        asked.asked(request, time.time())
        (self._usage("", None) if request.fell_back else asked).answered(request)

    async def run(self) -> None:
        """Write every some seconds, until cancelled."""
        await self._prune()
        for turn in itertools.count(1):
            await asyncio.sleep(WRITE_EVERY_S)
            if self._has_news or turn % IDLE_WRITES == 0:
                self._has_news = False
                try:
                    await self._settle()
                except Exception:
                    _LOG.exception("the ledger was not kept this time; it goes on")

    async def stats(self, adapter_id: str, keys: Collection[AdapterKey]) -> dict[AdapterKey, Usage]:
        """By content, what an id has had so far, of these contents; "" is the base, with the key `BASE_KEY`.

        Raises: sqlite3.Error, OSError: the disk failed.
        """
        await self._settle()
        async with self._turn:
            found = await asyncio.to_thread(self._file.read, adapter_id)
        return {key: found.get(key, Usage()) for key in keys}

    async def forget(self, adapter_id: str, keys: Collection[AdapterKey]) -> None:
        """These contents of an id were deleted: the id is free at once, and what it had is nobody else's business."""
        for key in keys:
            self._unwritten.pop((adapter_id, key), None)
        async with self._turn:
            try:
                await asyncio.to_thread(self._file.drop, adapter_id, keys)
            except (sqlite3.Error, OSError) as error:
                # Pruned at the next start; and shown to nobody who has other contents.
                _LOG.warning("the ledger of deleted adapters stays for now: %s", error)

    async def close(self) -> None:
        """Write what is left; the engine may have ended."""
        await self._settle()

    async def _settle(self) -> None:
        """Take what the engine has counted, and write."""
        self._take_spent()
        await self._sample_residents()
        async with self._turn:
            unwritten, self._unwritten = self._unwritten, {}
            try:
                await asyncio.to_thread(self._write, unwritten)
                self._is_failing = False
            except Exception as error:
                # Whatever it is: what was counted stays, and the next time may be better.
                self._keep(unwritten)
                if not self._is_failing:
                    self._is_failing = True
                    why = "the ledger cannot be written, and is kept in memory for now: %s"
                    _LOG.error(why, error, exc_info=None if isinstance(error, sqlite3.Error | OSError) else error)

    def _write(self, usages: Mapping[Account, Usage]) -> None:
        """What ended after its adapter was deleted is dropped: the id may be another's by now."""
        records = self._store.records()
        self._file.add({account: usage for account, usage in usages.items() if _exists(account, records)})

    def _keep(self, usages: dict[Account, Usage]) -> None:
        for account, usage in self._unwritten.items():
            usages.setdefault(account, Usage()).merge(usage)
        self._unwritten = usages
        for account in list(usages)[: max(0, len(usages) - MAX_UNWRITTEN)]:
            del usages[account]

    async def _prune(self) -> None:
        """Adapters may have been deleted while nobody kept a ledger."""
        async with self._turn:
            try:
                await asyncio.to_thread(self._drop_unknown)
            except (sqlite3.Error, OSError) as error:
                _LOG.error("the ledger cannot be read: %s", error)

    def _drop_unknown(self) -> None:
        records = self._store.records()
        for adapter_id, key in self._file.accounts():
            if not _exists((adapter_id, key), records):
                self._file.drop(adapter_id, [key])

    def _take_spent(self) -> None:
        spent = self._engine.step_stats.take()
        for (adapter_id, key), seconds in spent.seconds.items():
            self._usage(adapter_id, key).compute_s += seconds
        for key, moved in spent.moved.items():
            usage = self._usage(self._asker(key), key)
            usage.loads += moved.loads
            usage.load_bytes += moved.load_bytes
            usage.copies += moved.copies
            usage.copy_bytes += moved.copy_bytes

    async def _sample_residents(self) -> None:
        """What is in the pool now has been there since the last time that we looked."""
        try:
            async with asyncio.timeout(MAX_ASKING_S):
                residents = await self._engine.residents()
        except (EngineDead, TimeoutError):
            return
        now_s = self._clock()
        seconds, self._sampled_s = now_s - self._sampled_s, now_s
        for key, nbytes in residents:
            self._usage(self._asker(key), key).resident_byte_s += nbytes * seconds

    def _asker(self, key: AdapterKey) -> str:
        """The id by which a content was asked for last; else, of one that was only warmed or pinned, or whose asker is
        gone, an id that has it; else ""."""
        records = self._store.records()
        asker = self._engine.traffic.askers.get(key)
        if asker is not None and _exists((asker, key), records):
            return asker
        if records is not self._records:
            self._records = records
            self._names = {version.key: name for name, record in records.items() for version in record.versions}
        return self._names.get(key, "")

    def _usage(self, adapter_id: str, key: AdapterKey | None) -> Usage:
        account = (adapter_id, key) if key is not None else ("", None)
        usage = self._unwritten.get(account)
        if usage is None:
            usage = self._unwritten[account] = Usage()
        return usage


def _exists(account: Account, records: Mapping[AdapterId, AdapterRecord]) -> bool:
    adapter_id, key = account
    if not key:
        return not adapter_id
    record = records.get(AdapterId(adapter_id))
    return record is not None and _has(record, key)


def _has(record: AdapterRecord, key: AdapterKey) -> bool:
    return any(version.key == key for version in record.versions)
