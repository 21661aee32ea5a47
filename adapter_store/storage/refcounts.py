"""Which contents there are, and who still needs one that may be deleted: accepted requests, until their last token.

Every request takes a hold, so taking one must not wait for a disk. The store's lock is kept while SQLite makes a change
durable; the one in here never is. A hold and a deletion meet in `mark_deleted`, which is called once no version
names the contents any more: a hold that came before it wins, and the content stays for as long as the hold lives,
also if it came while the deletion was being committed. One that comes after is refused, before the first byte is
removed. There is nothing in between: condemning takes away, in one step under this lock, what a hold needs to be taken.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable

from adapter_store.errors import AdapterNotFound
from adapter_store.spec import AdapterKey


class ContentHold:
    """Keeps one content in the store for as long as anybody refers to this object."""

    __slots__ = ("_let_go", "key")

    def __init__(self, key: AdapterKey, let_go: Callable[[AdapterKey], None]) -> None:
        self.key = key
        self._let_go = let_go

    def __del__(self) -> None:
        self._let_go(self.key)


class ContentRefcounts:
    """Counts by content. Safe to use from many threads. A hold may end in any thread at any moment, also in one that is
    in here: that is only noted, and counted by whoever comes next.

    Args:
        there: the contents that the index has.
    """

    def __init__(self, there: Iterable[AdapterKey]) -> None:
        self._lock = threading.Lock()
        self._there = set(there)
        self._counts: Counter[AdapterKey] = Counter()
        self._ended: deque[AdapterKey] = deque()

    def add(self, keys: Collection[AdapterKey]) -> None:
        """The index has them, durably: they may be held, once more if they were condemned."""
        with self._lock:
            self._there.update(keys)

    def take(self, key: AdapterKey) -> ContentHold:
        """Raises: AdapterNotFound: it is not there, or condemned."""
        with self._lock:
            if key not in self._there:
                raise AdapterNotFound(key)
            self._count_ended()
            self._counts[key] += 1
        return ContentHold(key, self._ended.append)

    def mark_deleted(self, keys: Collection[AdapterKey]) -> frozenset[AdapterKey]:
        """Those of these that nobody holds: nobody can, from now on. They are removed, or added again."""
        with self._lock:
            self._count_ended()
            doomed = frozenset(keys).difference(self._counts)
            self._there -= doomed
            return doomed

    def _count_ended(self) -> None:
        while self._ended:
            key = self._ended.popleft()
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
