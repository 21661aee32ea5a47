"""Leases of followers, at the registry: which followers may still answer, and which revision each has applied."""

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from adapter_store.storage.blobs import NEW_FILE, disk_errors, fsync_directory
from api.replication.headers import LEASE_S

FILE_NAME = "followers.json"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Lease:
    """Hold the last state that a follower reported."""

    revision: int
    # Revision that the follower must have applied -> until when it may then answer, by this machine's monotonic clock.
    # By its own clock, its lease ends earlier.
    ends_s: Mapping[int, float]


class Leases:
    """Keep the leases of followers. For the event loop's thread.

    A follower counts its lease from before it asked, so the lease always ends there before it ends here, and no two
    machines' clocks are compared. The names of followers are kept in a file, so that after a restart the registry knows
    which ones to wait for: until each has asked again, or until `LEASE_S` after the start, when its lease has ended.

    Args:
        folder: the store's folder.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = folder / FILE_NAME, clock
        self._all_known_s = clock() + LEASE_S
        # Followers of the previous process that have not asked this one yet.
        self._unknown = _read(self._file)
        self._kept = self._unknown
        self._keeping = asyncio.Lock()
        self._leases: dict[str, _Lease] = {}
        self._news = asyncio.Event()

    @property
    def are_all_known(self) -> bool:
        """Return whether this process knows every lease."""
        return not self._unknown or self._clock() >= self._all_known_s

    async def renew(self, replica: str, revision: int, promised: int) -> None:
        """Note which revision a follower has applied, and extend its lease.

        Args:
            revision: the revision that it has applied.
            promised: the revision that it must have applied before the extension takes effect.

        Raises:
            StoreFull, StoreUnusable: the disk failed; the lease is not extended.
        """
        if replica not in self._kept:
            await self._keep(replica)
        now_s = self._clock()
        before = self._leases[replica].ends_s if replica in self._leases else {}
        lasting = {needed: end_s for needed, end_s in before.items() if end_s > now_s}
        self._leases[replica] = _Lease(revision, lasting | {promised: now_s + LEASE_S})
        self._unknown -= {replica}
        self._tell()

    async def end(self, replica: str) -> None:
        """Forget a follower that has ended."""
        self._leases.pop(replica, None)
        self._unknown -= {replica}
        self._tell()
        await self._keep()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _keep(self, *more: str) -> None:
        """Write the names of all followers and `more` to the file."""
        async with self._keeping:
            names = frozenset([*self.replicas(), *more, *(() if self.are_all_known else self._unknown)])
            await run_in_threadpool(_write, self._file, names)
            self._kept = names

    def replicas(self) -> list[str]:
        """Return the names of followers that have a lease."""
        now_s = self._clock()
        self._leases = {name: lease for name, lease in self._leases.items() if max(lease.ends_s.values()) > now_s}
        return sorted(self._leases)

    async def everywhere(self, revision: int) -> int:
        """Wait until no follower can answer with an older revision; return how many have applied this one.

        For each follower, this is once it reports the revision, or once its leases for older revisions have ended.
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
        """Return the seconds until all leases end that let a follower answer without the revision."""
        behind = (lease for lease in self._leases.values() if lease.revision < revision)
        ends = [end_s for lease in behind for needed, end_s in lease.ends_s.items() if needed < revision]
        return max([-math.inf if self.are_all_known else self._all_known_s, *ends]) - self._clock()


def _read(file: Path) -> frozenset[str]:
    try:
        return frozenset(map(str, json.loads(file.read_bytes())))
    except FileNotFoundError:
        return frozenset()
    except (OSError, ValueError, TypeError) as error:
        _LOG.warning("cannot read the names of followers (%s): waiting until all leases are over", error)
        return frozenset({"?"})


def _write(file: Path, names: frozenset[str]) -> None:
    part = file.with_suffix(".part")
    part.unlink(missing_ok=True)
    with disk_errors("noting a follower"):
        with os.fdopen(os.open(part, NEW_FILE, 0o600), "w") as opened:
            json.dump(sorted(names), opened)
            opened.flush()
            os.fsync(opened.fileno())
        part.replace(file)
        fsync_directory(file.parent)
