"""Reference counts of contents, so that a deleted content stays on disk until its last request has finished.

Every request takes a hold, so taking one must not wait for a disk: the store's lock is held while SQLite commits, but
this module's lock never is. `mark_deleted`, called once no version refers to the contents any more, decides between
holds and the deletion. An earlier hold keeps its content for the lifetime of the hold, even if it was taken while the
deletion was being committed. A later hold is refused before the first byte is removed.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence

from adapter_store.composition import Composition
from adapter_store.errors import AdapterNotFound
from adapter_store.spec import AdapterKey


class ContentHold:
    """Keep one content in the store for as long as this object is referenced."""

    __slots__ = ("_release", "key")

    def __init__(self, key: AdapterKey, let_go: Callable[[AdapterKey], None]) -> None:
        self.key = key
        self._release = let_go

    def __del__(self) -> None:
        self._release(self.key)


class CompositionHold:
    """Keep a sum and its contents in the store for as long as this object is referenced."""

    __slots__ = ("_composition", "_holds", "key")

    def __init__(self, key: AdapterKey, composition: Composition, holds: Sequence[ContentHold]) -> None:
        self.key = key
        self._composition, self._holds = composition, holds


class ContentRefcounts:
    """Count holds by content.

    Safe to use from many threads. A hold may end in any thread at any moment, even in one that is executing a method
    of this class: `__del__` only queues the release, and the next call counts it.

    Args:
        keys: the contents in the index.
    """

    def __init__(self, keys: Iterable[AdapterKey]) -> None:
        self._lock = threading.Lock()
        self._keys = set(keys)
        self._counts: Counter[AdapterKey] = Counter()
        self._released: deque[AdapterKey] = deque()

    def add(self, keys: Collection[AdapterKey]) -> None:
        """Allow holds of contents that are durably in the index, including contents marked deleted."""
        with self._lock:
            self._keys.update(keys)

    def acquire(self, key: AdapterKey) -> ContentHold:
        """Take a hold of a content.

        Raises:
            AdapterNotFound: there is no such content, or it is marked deleted.
        """
        with self._lock:
            if key not in self._keys:
                raise AdapterNotFound(key)
            self._count_released()
            self._counts[key] += 1
        return ContentHold(key, self._released.append)

    def held(self) -> list[AdapterKey]:
        """Return the contents that have holds."""
        with self._lock:
            self._count_released()
            return list(self._counts)

    def mark_deleted(self, keys: Collection[AdapterKey]) -> frozenset[AdapterKey]:
        """Refuse holds of the contents among these that have none; return them, for the caller to remove or re-add."""
        with self._lock:
            self._count_released()
            deleted = frozenset(keys).difference(self._counts)
            self._keys -= deleted
            return deleted

    def _count_released(self) -> None:
        while self._released:
            key = self._released.popleft()
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
