"""Whole KV pages kept after their request, found again by what they were computed from.

A page's key is a hash chained over (adapter content, tenant salt, every token up to the page's end): never a name, so a
re-uploaded adapter meets none of its forerunner's keys and values (vllm#42125, llama.cpp#26207), and never less than
the whole past. Pages are immutable once they are here; the cache holds one reference of its own to each.

A page that only the cache holds *rests*, and may be dropped: the tail of a prompt before its head, the one that is
worth least first. Its worth is uses x seconds to compute it again, in the currency of `AdapterCache`; for a page that
nobody has used again yet, the share of pages that ever were stands for the uses: where prompts never repeat, it goes to
nothing. Pages of adapters that have left the pool go before all others: nobody can use them before the adapter is back
(the dependency that FASTLIBRA describes).
"""

import hashlib
import heapq
import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from adapter_store.spec import AdapterKey
from lorasrv.memory.cost_model import GdsfClock
from lorasrv.memory.page_pool import PagePool

MAX_COUNTED_USES = 64
NUM_NEWEST_KEPT = 2048
Rests = dict[int, tuple[float, int]]
"""page -> (worth, order of its coming to rest)."""


def root_hash(adapter: AdapterKey | None, salt: str) -> bytes:
    """Where the chain of an adapter's (or the base's) pages begins. Both parts have their length in front."""
    parts = (b"" if adapter is None else adapter.encode(), salt.encode("utf-8", "surrogatepass"))
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def page_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a page that holds `token_ids`, behind the page or root whose key is `parent`."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


@dataclass(slots=True)
class _Entry:
    digest: bytes
    adapter: AdapterKey | None
    uses: int = 0


class PrefixCache:
    """Pages by hash. Mutated by the engine thread only. `seconds_a_page`: to compute one again."""

    def __init__(
        self, pool: PagePool, clock: GdsfClock | None = None, seconds_a_page: Callable[[], float] = lambda: 1.0
    ) -> None:
        self._pool = pool
        self._clock = clock or GdsfClock()
        self._seconds_a_page = seconds_a_page
        self._pages: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._resting: Rests = {}
        self._stranded: Rests = {}
        self._queue: list[tuple[float, int, int]] = []
        self._order = itertools.count()
        self._num_kept = self._num_reused = 0
        self._by_adapter: dict[AdapterKey, set[int]] = {}
        self._absent: set[AdapterKey] = set()
        self.num_evictions = 0

    @property
    def num_pages(self) -> int:
        """Pages in the cache, resting or in use."""
        return len(self._entries)

    def __contains__(self, page: int) -> bool:
        return page in self._entries

    @property
    def num_resting(self) -> int:
        """Pages that could be dropped though their adapter is there."""
        return len(self._resting)

    @property
    def num_stranded(self) -> int:
        """Pages that nobody can use before their adapter is back."""
        return len(self._stranded)

    def unused(self) -> Iterator[int]:
        """Pages that no request uses: those that rest, and those that are stranded."""
        yield from self._resting
        yield from self._stranded

    def find(self, digest: bytes) -> int | None:
        """The page of this hash, now with one reference more, which is the caller's."""
        page = self._pages.get(digest)
        if page is not None:
            self._pool.share((page,))
            self._resting.pop(page, None)
            self._stranded.pop(page, None)
            entry = self._entries[page]
            self._num_reused += entry.uses == 0
            entry.uses = min(entry.uses + 1, MAX_COUNTED_USES)
        return page

    def keep(self, digest: bytes, page: int, adapter: AdapterKey | None) -> bool:
        """Take a reference to a full page; False if another page of the same content is here already."""
        if digest in self._pages:
            return False
        assert page not in self._entries, f"page {page} is in the cache under another hash"
        self._pool.share((page,))
        self._pages[digest] = page
        self._entries[page] = _Entry(digest, adapter)
        self._count_kept()
        if adapter is not None:
            self._by_adapter.setdefault(adapter, set()).add(page)
        return True

    def release(self, page: int) -> None:
        """Somebody has let go of a page; if nobody else holds it, it may be dropped, after those that rest already."""
        entry = self._entries.get(page)
        if entry is not None and self._pool.refcount(page) == 1:
            worth = self._clock.now + (entry.uses or self.reuse_share) * self._seconds_a_page()
            rest = (worth, next(self._order))
            (self._stranded if entry.adapter in self._absent else self._resting)[page] = rest
            if page in self._resting:
                heapq.heappush(self._queue, (*rest, page))

    def drop_stranded(self) -> bool:
        """Give back a page whose adapter has left; False if there is none."""
        if not self._stranded:
            return False
        self._drop(next(iter(self._stranded)))
        return True

    def drop_resting(self) -> bool:
        """Give back the page that is worth least; False if none rests."""
        if not self._skip_the_past():
            return False
        worth, _, page = heapq.heappop(self._queue)
        self._clock.passes(worth)
        self._drop(page)
        return True

    def least_worth(self) -> float:
        """What `drop_resting` would give up; infinite if there is nothing."""
        return self._queue[0][0] if self._skip_the_past() else math.inf

    @property
    def reuse_share(self) -> float:
        """How many of the pages that were kept lately somebody has used again."""
        return (self._num_reused + 1) / (self._num_kept + 2)

    def adapter_left(self, adapter: AdapterKey) -> None:
        """The pool holds this adapter no more."""
        if adapter in self._by_adapter:
            self._absent.add(adapter)
            self._transfer(adapter, self._resting, self._stranded)

    def adapter_came(self, adapter: AdapterKey) -> None:
        """The pool holds this adapter (again)."""
        self._absent.discard(adapter)
        self._transfer(adapter, self._stranded, self._resting)
        for page in self._by_adapter.get(adapter, set()) & self._resting.keys():
            heapq.heappush(self._queue, (*self._resting[page], page))

    def move(self, moves: Mapping[int, int]) -> None:
        """Pages lie elsewhere now: old id -> new id."""
        for old in moves.keys() & self._entries.keys():
            entry = self._entries.pop(old)
            self._entries[moves[old]] = entry
            self._pages[entry.digest] = moves[old]
            if entry.adapter is not None:
                pages = self._by_adapter[entry.adapter]
                pages.discard(old)
                pages.add(moves[old])
        for rests in (self._resting, self._stranded):
            for old in moves.keys() & rests.keys():
                rests[moves[old]] = rests.pop(old)
        for new in self._resting.keys() & set(moves.values()):
            heapq.heappush(self._queue, (*self._resting[new], new))

    def references(self) -> Iterator[int]:
        """Every page id that the cache holds, for `PagePool.check_integrity`."""
        yield from self._entries

    def check_integrity(self, is_resident: Callable[[AdapterKey], bool] | None = None) -> None:
        """Hashes and pages are one to one, and exactly the pages that nobody else holds may be dropped."""
        for adapter in self._by_adapter if is_resident is not None else ():
            assert is_resident is not None
            assert is_resident(adapter) != (adapter in self._absent), f"adapter {adapter} is here or not?"
        assert {entry.digest: page for page, entry in self._entries.items()} == self._pages, "prefix pages differ"
        alone = {page for page in self._entries if self._pool.refcount(page) == 1}
        assert alone == self._resting.keys() | self._stranded.keys(), "resting pages differ"
        queued = set(self._queue)
        assert all((*rest, page) in queued for page, rest in self._resting.items()), "a page can never be dropped"
        assert not self._resting.keys() & self._stranded.keys(), "a page rests twice"
        assert all(self._entries[page].adapter in self._absent for page in self._stranded), "a page is not stranded"
        assert not any(self._entries[page].adapter in self._absent for page in self._resting), "a page is stranded"
        by_adapter = {page for pages in self._by_adapter.values() for page in pages}
        assert by_adapter == {p for p, entry in self._entries.items() if entry.adapter is not None}

    def _drop(self, page: int) -> None:
        self._resting.pop(page, None)
        self._stranded.pop(page, None)
        entry = self._entries.pop(page)
        del self._pages[entry.digest]
        if entry.adapter is not None:
            of_adapter = self._by_adapter[entry.adapter]
            of_adapter.discard(page)
            if not of_adapter:
                del self._by_adapter[entry.adapter]
                self._absent.discard(entry.adapter)
        self._pool.release((page,))
        self.num_evictions += 1

    def _skip_the_past(self) -> bool:
        """Whether a page rests; if so, it heads the queue, which also holds what has been used or moved since."""
        if len(self._queue) > 2 * len(self._resting) + 64:
            self._queue = [(*rest, page) for page, rest in self._resting.items()]
            heapq.heapify(self._queue)
        while self._queue and self._resting.get(self._queue[0][2]) != self._queue[0][:2]:
            heapq.heappop(self._queue)
        return bool(self._queue)

    def _count_kept(self) -> None:
        self._num_kept += 1
        if self._num_kept > NUM_NEWEST_KEPT:
            self._num_kept //= 2
            self._num_reused //= 2

    def _transfer(self, adapter: AdapterKey, source: Rests, target: Rests) -> None:
        for page in sorted(self._by_adapter.get(adapter, set()) & source.keys(), key=source.__getitem__):
            target[page] = source.pop(page)
