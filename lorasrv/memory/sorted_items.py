"""Sorted items: an order that is maintained while items come, change and go, not computed when it is needed."""

import bisect
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

Rank = tuple[Any, ...]
"""Comparable rank; the smaller goes first."""
T = TypeVar("T", bound=Hashable)


class SortedItems(Generic[T]):
    """Keep items sorted by unique ranks. Adding and removing cost O(log n) comparisons."""

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, T]] = []
        self._ranks: dict[T, Rank] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return (item for _, item in self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._ranks

    @property
    def first(self) -> T:
        """Return the item with the smallest rank."""
        return self._entries[0][1]

    def first_of(self, count: int) -> list[T]:
        """Return the first `count` items."""
        return [item for _, item in self._entries[:count]]

    def rank(self, item: T) -> Rank:
        """Return the rank under which an item is sorted."""
        return self._ranks[item]

    def add(self, item: T, rank: Rank) -> None:
        """Add an item, or sort it again under another rank."""
        if item in self._ranks:
            if self._ranks[item] == rank:
                return
            self.remove(item)
        self._ranks[item] = rank
        bisect.insort(self._entries, (rank, item))

    def remove(self, item: T) -> None:
        """Remove an item."""
        at = bisect.bisect_left(self._entries, (self._ranks.pop(item),))
        assert self._entries[at][1] == item, "two items share a rank"
        del self._entries[at]
