"""Who still needs a content that may have been deleted: accepted requests, until their last token."""

from collections import Counter, deque
from collections.abc import Callable

from adapter_store.spec import AdapterKey


class ContentHold:
    """Keeps one content in the store for as long as anybody refers to this object."""

    __slots__ = ("_let_go", "key")

    def __init__(self, key: AdapterKey, let_go: Callable[[AdapterKey], None]) -> None:
        self.key = key
        self._let_go = let_go

    def __del__(self) -> None:
        self._let_go(self.key)


class Holds:
    """Counts by content. The owner's lock guards it, but for the end of a hold, which may come in any thread at any
    moment: that is only noted, and counted when somebody asks.
    """

    def __init__(self) -> None:
        self._counts: Counter[AdapterKey] = Counter()
        self._ended: deque[AdapterKey] = deque()

    def take(self, key: AdapterKey) -> ContentHold:
        self._counts[key] += 1
        return ContentHold(key, self._ended.append)

    def held(self) -> frozenset[AdapterKey]:
        """What somebody holds now."""
        while self._ended:
            key = self._ended.popleft()
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
        return frozenset(self._counts)
