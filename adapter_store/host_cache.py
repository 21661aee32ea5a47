"""Packed adapters in host memory, bounded by bytes. The values are opaque to the cache."""

import math
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cachetools import LRUCache

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class HostCacheStats:
    """Count accesses since the start and bytes now. `bytes_used` includes `bytes_pinned`."""

    entries: int
    bytes_used: int
    bytes_pinned: int
    max_bytes: int
    hits: int
    misses: int
    evictions: int


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    nbytes: int
    pins: int = 0


class HostCache(Generic[V]):
    """Cache values by key, evicting the least recently used unpinned ones when the bytes exceed `max_bytes`.

    A caller pins an entry while using it, and must itself limit the bytes that it pins. Safe to use from many threads.
    A key contains everything that a packed adapter depends on: (AdapterKey, layout version).
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, not {max_bytes}")
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        # cachetools has no pins, so the limit is enforced here and pinned entries are kept outside the LRU.
        self._unpinned: LRUCache[Hashable, _Entry[V]] = LRUCache(math.inf, getsizeof=lambda entry: entry.nbytes)
        self._pinned: dict[Hashable, _Entry[V]] = {}
        self._bytes_pinned = 0
        self._hits = self._misses = self._evictions = 0

    def get_pinned(self, key: Hashable) -> V | None:
        """Return the value with one more pin, or None if it is not cached."""
        with self._lock:
            entry = self._take(key)
            self._hits += entry is not None
            self._misses += entry is None
            return entry.value if entry else None

    def put_pinned(self, key: Hashable, value: V, nbytes: int) -> V:
        """Insert a value with one pin, evicting others for it; return the existing value if there is one."""
        with self._lock:
            entry = self._take(key)
            if entry is None:
                entry = self._pinned[key] = _Entry(value, nbytes, pins=1)
                self._bytes_pinned += nbytes
                self._shrink()
            return entry.value

    def pinned(self, key: Hashable) -> V:
        """Return the value of a pinned entry.

        Raises:
            KeyError: the entry is not pinned.
        """
        with self._lock:
            return self._pinned[key].value

    def unpin(self, key: Hashable) -> None:
        """Release one pin.

        Raises:
            KeyError: the entry is not pinned.
        """
        with self._lock:
            entry = self._pinned[key]
            entry.pins -= 1
            if entry.pins == 0:
                del self._pinned[key]
                self._bytes_pinned -= entry.nbytes
                self._unpinned[key] = entry
                self._shrink()

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._pinned or key in self._unpinned

    def stats(self) -> HostCacheStats:
        """Return the counters and sizes."""
        with self._lock:
            return HostCacheStats(
                entries=len(self._pinned) + len(self._unpinned),
                bytes_used=self._bytes_used(),
                bytes_pinned=self._bytes_pinned,
                max_bytes=self.max_bytes,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
            )

    def _take(self, key: Hashable) -> _Entry[V] | None:
        entry = self._pinned.get(key)
        if entry is None:
            entry = self._unpinned.pop(key, None)
            if entry is None:
                return None
            self._pinned[key] = entry
            self._bytes_pinned += entry.nbytes
        entry.pins += 1
        return entry

    def _shrink(self) -> None:
        while self._bytes_used() > self.max_bytes and self._unpinned:
            self._unpinned.popitem()
            self._evictions += 1

    def _bytes_used(self) -> int:
        return int(self._unpinned.currsize) + self._bytes_pinned
