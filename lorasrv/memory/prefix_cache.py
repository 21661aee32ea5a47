"""Prefix cache: full KV pages kept after their request has ended, looked up by a hash of what they were computed from.

A page's key is a hash chained over (adapter content, tenant salt, every token up to the page's end). It contains no
name, so a re-uploaded adapter never hits pages of its previous version (vllm#42125, llama.cpp#26207), and it always
covers the whole prefix. Pages before the tokens on which an aLoRA acts are the base's (arXiv 2504.12397). Pages in the
cache are immutable; the cache holds one reference of its own to each.

A page without another reference may be evicted: the tail of a prompt before its head, the lowest score first. The score
is uses x seconds to compute the page again, in the unit of `AdapterCache`. For a page without a hit so far, the share
of pages that ever had a hit takes the place of the uses; it goes to zero if prompts never repeat. An unreferenced page
is *cached* while its adapter is resident, and *orphaned* once that is evicted: it is useless until the adapter is back,
and evicted before everything else (the dependency that FASTLIBRA describes).
"""

import hashlib
import heapq
import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from adapter_store.spec import AdapterKey
from lorasrv.kv_policy import KvPolicy
from lorasrv.memory.cost_model import GdsfClock
from lorasrv.memory.page_pool import PagePool
from lorasrv.request import FixedPrefix

MAX_COUNTED_USES = 64
NUM_NEWEST_INSERTED = 2048
Scored = dict[int, tuple[float, int]]
"""page -> (score, order of its release)."""


def root_hash(adapter: AdapterKey | None, salt: str, active_from: int = 0) -> bytes:
    """Return what the hash of every page depends on besides tokens: the adapter (None: the base model), the salt and
    the first token that the adapter acts on. Parts are length-prefixed in the hash input."""
    parts = [b"" if adapter is None else adapter.encode(), salt.encode("utf-8", "surrogatepass")]
    if active_from:
        parts.append(active_from.to_bytes(8, "little"))
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def page_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a page that holds `token_ids` and follows the page or root with the key `parent`."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def page_hashes(root: bytes, token_ids: Sequence[int], page_size: int) -> tuple[bytes, ...]:
    """Return the keys of the full pages of `token_ids` that follow a root."""
    hashes, parent = list[bytes](), root
    for end in range(page_size, len(token_ids) + 1, page_size):
        parent = page_hash(parent, token_ids[end - page_size : end])
        hashes.append(parent)
    return tuple(hashes)


@dataclass(slots=True)
class PageChain:
    """Hash the full pages of one sequence on demand, each once."""

    page_size: int
    # The hash of a page depends on the root with its number, if there is one, and on those of all pages before it.
    roots: Mapping[int, bytes]
    policy: KvPolicy | None = None
    # Number of leading pages without a token that the adapter acts on; they are the base's.
    num_plain: int = 0
    _hashes: list[bytes] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        page_size: int,
        adapter: AdapterKey | None,
        salt: str,
        policy: KvPolicy | None = None,
        prefix: FixedPrefix | None = None,
        active_from: int = 0,
    ) -> "PageChain":
        """Return the chain of a request's pages.

        Args:
            prefix: beginning of the prompt that is cached under another salt; None if there is `active_from`.
            active_from: first token that the adapter acts on.
        """
        if adapter is not None and active_from:
            assert prefix is None, "the beginning of a prompt before an aLoRA acts is the base's"
            num_plain = active_from // page_size
            roots = {0: root_hash(None, salt), num_plain: root_hash(adapter, salt, active_from)}
            return cls(page_size, roots, policy, num_plain)
        roots = {0: root_hash(adapter, salt)}
        if prefix is not None and prefix.num_tokens >= page_size:
            roots = {0: root_hash(adapter, prefix.salt), prefix.num_tokens // page_size: roots[0]}
        return cls(page_size, roots, policy)

    def hash(self, token_ids: Sequence[int], number: int) -> bytes:
        """Return the key of a page; `token_ids` must reach at least to the end of the page."""
        while (count := len(self._hashes)) <= number:
            parent = (self._hashes[-1] if self._hashes else b"") + self.roots.get(count, b"")
            salt = b"" if self.policy is None else self.policy.salt(count)
            first = count * self.page_size
            self._hashes.append(page_hash(parent + salt, token_ids[first : first + self.page_size]))
        return self._hashes[number]


@dataclass(slots=True)
class _Entry:
    digest: bytes
    adapter: AdapterKey | None
    uses: int = 0


class PrefixCache:
    """Keep KV pages by hash. Mutated by the engine thread only.

    Args:
        clock: shared with the adapter cache if both compete for the same pages.
        page_s: seconds to compute a page again.
    """

    def __init__(
        self, pool: PagePool, clock: GdsfClock | None = None, page_s: Callable[[], float] = lambda: 1.0
    ) -> None:
        self._pool = pool
        self._clock = clock or GdsfClock()
        self._page_s = page_s
        self._pages: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._cached: Scored = {}
        self._orphaned: Scored = {}
        self._queue: list[tuple[float, int, int]] = []
        self._order = itertools.count()
        self._num_inserted = self._num_reused = 0
        self._by_adapter: dict[AdapterKey, set[int]] = {}
        self._absent: set[AdapterKey] = set()
        self.num_evictions = 0

    @property
    def num_pages(self) -> int:
        """Return the number of pages in the cache, used by requests or not."""
        return len(self._entries)

    def __contains__(self, page: int) -> bool:
        return page in self._entries

    @property
    def num_cached(self) -> int:
        """Return the number of pages that no request uses and whose adapter is resident."""
        return len(self._cached)

    @property
    def num_orphaned(self) -> int:
        """Return the number of pages that no request uses and whose adapter was evicted."""
        return len(self._orphaned)

    def unused(self) -> Iterator[int]:
        """Yield the pages that no request uses, cached and orphaned."""
        yield from self._cached
        yield from self._orphaned

    def lookup(self, digest: bytes) -> int | None:
        """Return the page of this hash, with one more reference for the caller; None if there is none."""
        page = self._pages.get(digest)
        if page is not None:
            self._pool.share((page,))
            self._cached.pop(page, None)
            self._orphaned.pop(page, None)
        return page

    def count_use(self, page: int) -> None:
        """Count one more use of a page that `lookup` has returned, which raises its score; do nothing if the page has
        left the cache."""
        entry = self._entries.get(page)
        if entry is not None:
            self._num_reused += entry.uses == 0
            entry.uses = min(entry.uses + 1, MAX_COUNTED_USES)

    def page_of(self, digest: bytes) -> int | None:
        """Return the page of this hash without taking a reference; None if there is none."""
        return self._pages.get(digest)

    def insert(self, digest: bytes, page: int, adapter: AdapterKey | None, *, is_resident: bool = True) -> bool:
        """Take a reference to a full page; return False if another page of the same content is in the cache.

        Args:
            is_resident: whether the adapter is resident.
        """
        if digest in self._pages:
            return False
        assert page not in self._entries, f"page {page} is in the cache under another hash"
        self._pool.share((page,))
        self._pages[digest] = page
        self._entries[page] = _Entry(digest, adapter)
        self._count_insertion()
        if adapter is not None:
            self._by_adapter.setdefault(adapter, set()).add(page)
            if not is_resident:
                self._absent.add(adapter)
        return True

    def release(self, page: int) -> None:
        """Score a page that a request has released; it may be evicted if no other request holds it."""
        entry = self._entries.get(page)
        if entry is not None and self._pool.refcount(page) == 1:
            score = self._clock.now + (entry.uses or self.reuse_rate) * self._page_s()
            scored = (score, next(self._order))
            (self._orphaned if entry.adapter in self._absent else self._cached)[page] = scored
            if page in self._cached:
                self._push(page)

    def evict_orphaned(self) -> bool:
        """Free a page whose adapter was evicted; return False if there is none."""
        if not self._orphaned:
            return False
        self._evict(next(iter(self._orphaned)))
        return True

    def evict_lowest(self) -> bool:
        """Free the cached page with the lowest score; return False if there is none."""
        if not self._skip_outdated():
            return False
        score, _, page = heapq.heappop(self._queue)
        self._clock.advance(score)
        self._evict(page)
        return True

    def lowest_score(self) -> float:
        """Return the score of the page that `evict_lowest` would free; infinite if there is none."""
        return self._queue[0][0] if self._skip_outdated() else math.inf

    @property
    def reuse_rate(self) -> float:
        """Return the share of the newest pages that had a hit."""
        return (self._num_reused + 1) / (self._num_inserted + 2)

    def on_adapter_evicted(self, adapter: AdapterKey) -> None:
        """Orphan the cached pages of an adapter that has left the pool."""
        if adapter in self._by_adapter:
            self._absent.add(adapter)
            self._transfer(adapter, self._cached, self._orphaned)

    def on_adapter_resident(self, adapter: AdapterKey) -> None:
        """Make the orphaned pages of an adapter cached pages again."""
        self._absent.discard(adapter)
        self._transfer(adapter, self._orphaned, self._cached)
        for page in self._by_adapter.get(adapter, set()) & self._cached.keys():
            self._push(page)

    def move(self, moves: Mapping[int, int]) -> None:
        """Follow pages that were moved: old id -> new id."""
        for old in moves.keys() & self._entries.keys():
            entry = self._entries.pop(old)
            self._entries[moves[old]] = entry
            self._pages[entry.digest] = moves[old]
            if entry.adapter is not None:
                of_adapter = self._by_adapter[entry.adapter]
                of_adapter.discard(old)
                of_adapter.add(moves[old])
        for pages in (self._cached, self._orphaned):
            for old in moves.keys() & pages.keys():
                pages[moves[old]] = pages.pop(old)
        for new in self._cached.keys() & set(moves.values()):
            self._push(new)

    def references(self) -> Iterator[int]:
        """Yield every page id that the cache holds, for `PagePool.check_integrity`."""
        yield from self._entries

    def check_integrity(self, is_resident: Callable[[AdapterKey], bool] | None = None) -> None:
        """Compare hashes, references and adapters with the pages.

        Raises:
            AssertionError: hashes and pages are not one to one, or the evictable pages are not exactly the pages
                without a request, or a page is orphaned although its adapter is resident, or the reverse.
        """
        for adapter in self._by_adapter if is_resident is not None else ():
            assert is_resident is not None
            assert is_resident(adapter) != (adapter in self._absent), (
                f"pages of adapter {adapter} are cached or orphaned wrongly"
            )
        assert {entry.digest: page for page, entry in self._entries.items()} == self._pages, "prefix pages differ"
        alone = {page for page in self._entries if self._pool.refcount(page) == 1}
        assert alone == self._cached.keys() | self._orphaned.keys(), "evictable pages differ"
        queued = set(self._queue)
        assert all((*s, page) in queued for page, s in self._cached.items()), "a page can never be evicted"
        assert not self._cached.keys() & self._orphaned.keys(), "a page is cached and orphaned"
        assert all(self._entries[page].adapter in self._absent for page in self._orphaned), "a page is not orphaned"
        assert not any(self._entries[page].adapter in self._absent for page in self._cached), "a page is orphaned"
        by_adapter = {page for pages in self._by_adapter.values() for page in pages}
        assert by_adapter == {p for p, entry in self._entries.items() if entry.adapter is not None}

    def _evict(self, page: int) -> None:
        self._cached.pop(page, None)
        self._orphaned.pop(page, None)
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

    def _push(self, page: int) -> None:
        """Queue a cached page. Once most entries are outdated, drop these: if pages are never short, nothing else
        does."""
        heapq.heappush(self._queue, (*self._cached[page], page))
        if len(self._queue) > 2 * len(self._cached) + 64:
            self._queue = [(*scored, page) for page, scored in self._cached.items()]
            heapq.heapify(self._queue)

    def _skip_outdated(self) -> bool:
        """Drop outdated entries (pages used or moved since) from the head of the queue; return whether any is left."""
        while self._queue and self._cached.get(self._queue[0][2]) != self._queue[0][:2]:
            heapq.heappop(self._queue)
        return bool(self._queue)

    def _count_insertion(self) -> None:
        self._num_inserted += 1
        if self._num_inserted > NUM_NEWEST_INSERTED:
            self._num_inserted //= 2
            self._num_reused //= 2

    def _transfer(self, adapter: AdapterKey, source: Scored, target: Scored) -> None:
        for page in sorted(self._by_adapter.get(adapter, set()) & source.keys(), key=source.__getitem__):
            target[page] = source.pop(page)
