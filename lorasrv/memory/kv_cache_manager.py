"""KV cache manager: the page table of each request, and the only owner of this mapping.

A page may be in several tables: of requests with the same beginning (`PrefixCache`), or of the choices of one request
(`fork`). A request that writes into a page of other tables gets a copy first. Pages that a policy drops leave holes, so
that the other pages keep their places. `SwapSpace` counts the KV pages of preempted requests in host memory, and
decides when swapping costs less than recomputing.
"""

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from adapter_store.spec import AdapterKey
from adapter_store.storage.snapshots import SnapshotName
from lorasrv.kv_policy import HOLE, KvPolicy
from lorasrv.memory.cost_model import CostModel
from lorasrv.memory.page_pool import PagePool
from lorasrv.memory.prefix_cache import PageChain, PrefixCache
from lorasrv.outputs import RequestId
from lorasrv.request import FixedPrefix
from lorasrv.scheduler_output import PageCopy

PageTable: TypeAlias = "array[int]"


@dataclass(slots=True)
class _Table:
    """Hold one request's pages."""

    # Adapter whose eviction makes the cached pages useless.
    home: AdapterKey | None
    policy: KvPolicy | None
    # Keys of its full pages.
    chain: PageChain
    # Places without a page, including places that the table has not grown to yet.
    holes: set[int]
    # `HOLE` in place of dropped pages. Steps read the table, so it is replaced and never changed in place.
    pages: PageTable = field(default_factory=lambda: array("i"))
    # Number of leading pages that were offered to the prefix cache.
    num_kept: int = 0
    # Number of leading pages that came from the prefix cache.
    num_attached: int = 0


class KVCacheManager:
    """Hold page tables over a `PagePool`; a page holds `page_size` tokens, in every layer. Mutated by the engine
    thread only."""

    def __init__(self, pool: PagePool, page_size: int, prefixes: PrefixCache | None = None) -> None:
        self._pool = pool
        self._prefixes = prefixes
        self.page_size = page_size
        self._tables: dict[RequestId, _Table] = {}
        self._filling: dict[SnapshotName, tuple[int, ...]] = {}
        self._lent: dict[str, tuple[int, ...]] = {}
        self.num_copies = 0

    @property
    def num_pages(self) -> int:
        """Return the number of pages in any table; a shared page counts once."""
        return len(set(self.references()))

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def open(
        self,
        request_id: RequestId,
        adapter: AdapterKey | None,
        salt: str,
        policy: KvPolicy | None = None,
        holes: Collection[int] = (),
        prefix: FixedPrefix | None = None,
        home: AdapterKey | None = None,
        active_from: int = 0,
    ) -> None:
        """Create an empty table for a request.

        Args:
            adapter: adapter with which the keys and values are computed.
            home: adapter in the pool whose eviction makes the pages useless.
            holes: places that need no page.
            prefix: beginning of the prompt that is cached under another salt.
            active_from: first token that the adapter acts on.
        """
        assert request_id not in self._tables, f"request {request_id} has a table"
        chain = PageChain.of(self.page_size, adapter, salt, policy, prefix, active_from)
        self._tables[request_id] = _Table(home, policy, chain, set(holes))

    def attach_prefix(self, request_id: RequestId, token_ids: Sequence[int], most: int | None = None) -> int:
        """Put the cached pages of a prefix of `token_ids`, at most `most` tokens, into the request's empty table.

        Returns:
            The number of tokens in these pages. At least one token is left to compute, as its logits are needed.
        """
        table = self._tables[request_id]
        assert not table.pages, f"request {request_id} has pages"
        if self._prefixes is None:
            return 0
        most = len(token_ids) - 1 if most is None else min(most, len(token_ids) - 1)
        found = array("i")
        for number in range(most // self.page_size):
            page = self._prefixes.lookup(table.chain.hash(token_ids, number))
            if page is None:
                break
            found.append(page)
        table.pages = found
        table.num_kept = table.num_attached = len(table.pages)
        return len(table.pages) * self.page_size

    def count_uses(self, request_id: RequestId) -> None:
        """Count a use of each page that `attach_prefix` found and the request still has."""
        table = self._tables[request_id]
        for page in _real(table.pages[: table.num_attached]):
            assert self._prefixes is not None, "pages came from the prefix cache"
            self._prefixes.count_use(page)

    def fork(self, parent: RequestId, child: RequestId, num_tokens: int) -> None:
        """Share the pages of the parent's first `num_tokens` tokens with the child's empty table."""
        source, table = self._tables[parent], self._tables[child]
        assert not table.pages, f"request {child} has pages"
        table.pages = source.pages[: self.pages_for(num_tokens)]
        table.holes = set(source.holes)
        self._pool.share(_real(table.pages))

    def can_fork(self, parent: RequestId, num_tokens: int) -> bool:
        """Return whether the parent still has all pages that a fork of its first `num_tokens` tokens needs."""
        table = self._tables[parent]
        return len(table.holes) <= (0 if table.policy is None else len(table.policy.hole(num_tokens)))

    def missing_pages(self, request_id: RequestId, num_computed: int, num_tokens: int) -> int:
        """Return the number of pages to take before tokens `num_computed .. num_tokens - 1` can be written."""
        table = self._tables[request_id]
        missing, first, end = 0, len(table.pages), -(-num_tokens // self.page_size)
        if self._is_shared(table, num_computed // self.page_size):
            missing = 1
        if end > first:
            missing += end - first - sum(first <= place < end for place in table.holes)
        return missing

    def allocate(self, request_id: RequestId, num_computed: int, num_tokens: int) -> tuple[PageCopy, ...] | None:
        """Make tokens `num_computed .. num_tokens - 1` of the request writable.

        Returns:
            The copies to make before the step writes; None, and nothing changed, if the pool has too few free pages.
        """
        table = self._tables[request_id]
        place, new = num_computed // self.page_size, range(len(table.pages), self.pages_for(num_tokens))
        is_shared = self._is_shared(table, place)
        if not is_shared and not new:
            return ()
        taken = self._pool.allocate_singles(self.missing_pages(request_id, num_computed, num_tokens))
        if taken is None:
            return None
        pages, copies = table.pages[:], tuple[PageCopy, ...]()
        if is_shared:
            copies = (PageCopy(pages[place], taken.pop()),)
            self._release_page(pages[place])
            pages[place] = copies[0].target
        rest = iter(taken)
        pages.extend(HOLE if place in table.holes else next(rest) for place in new)
        table.pages = pages
        self.num_copies += len(copies)
        return copies

    def num_writable_tokens(self, request_id: RequestId) -> int:
        """Return how many tokens fit into the request's pages."""
        return len(self._tables[request_id].pages) * self.page_size

    def truncate(self, request_id: RequestId, num_tokens: int) -> None:
        """Free the request's pages after those of its first `num_tokens` tokens."""
        table = self._tables[request_id]
        kept = self.pages_for(num_tokens)
        surplus = table.pages[kept:]
        if not surplus:
            return
        table.pages = table.pages[:kept]
        table.holes.difference_update(range(len(table.pages), len(table.pages) + len(surplus)))
        for page in reversed(_real(surplus)):
            self._release_page(page)

    def restart(self, request_id: RequestId) -> None:
        """Free all of the request's pages if any is missing: all are computed again."""
        if self._tables[request_id].holes:
            self.truncate(request_id, 0)
            self._tables[request_id].num_kept = 0

    def drop_unseen(self, request_id: RequestId, num_computed: int) -> None:
        """Free the pages that no token from `num_computed` on attends to; other holders keep a shared page."""
        table = self._tables[request_id]
        if table.policy is None:
            return
        unseen = table.policy.hole(num_computed)
        if len(unseen) > len(table.holes):
            self.drop(request_id, unseen[len(table.holes) :])

    def drop(self, request_id: RequestId, places: Sequence[int]) -> None:
        """Free the request's pages at some places."""
        table = self._tables[request_id]
        pages = table.pages[:]
        for place in places:
            self._release_page(pages[place])
            pages[place] = HOLE
        table.pages = pages
        table.holes.update(places)

    def holes(self, request_id: RequestId) -> frozenset[int]:
        """Return the places of the request's table that have no page."""
        return frozenset(self._tables[request_id].holes)

    def cache_full_pages(self, request_id: RequestId, token_ids: Sequence[int], num_computed: int) -> None:
        """Offer the request's newly full pages to the prefix cache, unless their contents depend on this request."""
        table = self._tables[request_id]
        if self._prefixes is None or num_computed // self.page_size <= table.num_kept:
            return
        if table.policy is not None and len(table.holes) > len(table.policy.hole(num_computed)):
            return
        for number in range(table.num_kept, num_computed // self.page_size):
            page = table.pages[number]
            if page != HOLE and page not in self._prefixes:
                home = None if number < table.chain.num_plain else table.home
                self._prefixes.insert(table.chain.hash(token_ids, number), page, home)
        table.num_kept = num_computed // self.page_size

    def page_table(self, request_id: RequestId) -> PageTable:
        """Return the request's pages in order, with `HOLE` in place of dropped ones; do not change it."""
        return self._tables[request_id].pages

    def held_pages(self, request_id: RequestId, num_tokens: int) -> tuple[int, ...]:
        """Return the pages that the request has for its first `num_tokens` tokens, in order."""
        return tuple(_real(self._tables[request_id].pages[: self.pages_for(num_tokens)]))

    def free(self, request_id: RequestId) -> None:
        """Free the request's table; do nothing if it has none. Of its cached pages the last are evicted first."""
        table = self._tables.pop(request_id, None)
        for page in reversed(_real(table.pages) if table else ()):
            self._release_page(page)

    def holders(self) -> Mapping[RequestId, tuple[int, ...]]:
        """Return every request's pages."""
        return {request_id: tuple(_real(table.pages)) for request_id, table in self._tables.items()}

    def move(self, moves: Mapping[int, int]) -> None:
        """Follow pages that were moved: old id -> new id."""
        for table in self._tables.values():
            if not moves.keys().isdisjoint(table.pages):
                table.pages = array("i", (moves.get(page, page) for page in table.pages))

    def references(self) -> Iterator[int]:
        """Yield every page id that a table holds, for `PagePool.check_integrity`."""
        for table in self._tables.values():
            yield from _real(table.pages)
        yield from self.fixed()

    # Pages that are filled while steps run.

    def begin_fill(self, name: SnapshotName, count: int) -> tuple[int, ...] | None:
        """Take free pages for a snapshot; they are not moved until `end_fill`. None if there are too few."""
        assert name not in self._filling, f"snapshot {name} is being copied"
        pages = self._pool.allocate_singles(count)
        if pages is not None:
            self._filling[name] = tuple(pages)
        return None if pages is None else self._filling[name]

    def end_fill(
        self, name: SnapshotName, hashes: Sequence[bytes], home: AdapterKey | None, *, is_resident: bool
    ) -> None:
        """Pass the pages of a snapshot to the prefix cache, or free them.

        Args:
            hashes: hashes of the pages; empty if they were not filled.
            home: adapter whose eviction makes the pages useless.
            is_resident: whether `home` is resident.
        """
        pages = self._filling.pop(name)
        for digest, page in zip(hashes, pages, strict=False):
            assert self._prefixes is not None
            self._prefixes.insert(digest, page, home, is_resident=is_resident)
        for page in reversed(pages):
            self._release_page(page)

    def filling(self) -> Mapping[SnapshotName, tuple[int, ...]]:
        """Return the pages that are filled for each snapshot."""
        return self._filling

    def fixed(self) -> Iterator[int]:
        """Yield the pages that may not be moved, because they are filled or read while steps run."""
        for pages in (*self._filling.values(), *self._lent.values()):
            yield from pages

    # Pages that are read while steps run.

    def lend(self, lease: str, digests: Sequence[bytes]) -> int:
        """Hold the cached pages of these hashes, up to the first that is missing, in place until `end_lease`. Nothing
        is held if the first one is missing.

        Returns: their number.
        """
        assert lease not in self._lent, f"lease {lease} exists"
        pages = list[int]()
        for digest in digests if self._prefixes is not None else ():
            assert self._prefixes is not None
            if (page := self._prefixes.lookup(digest)) is None:
                break
            self._prefixes.count_use(page)
            pages.append(page)
        if pages:
            self._lent[lease] = tuple(pages)
        return len(pages)

    def lent(self, lease: str) -> tuple[int, ...]:
        """Return the pages of a lease."""
        return self._lent[lease]

    def leases(self) -> Collection[str]:
        """Return the leases that hold pages."""
        return self._lent.keys()

    def end_lease(self, lease: str) -> None:
        """Release the pages of a lease."""
        for page in reversed(self._lent.pop(lease)):
            self._release_page(page)

    def _is_shared(self, table: _Table, place: int) -> bool:
        """Return whether other tables hold the page of the request's next token, if that page exists. Later pages
        belong to this request alone."""
        return place < len(table.pages) and self._pool.refcount(table.pages[place]) > 1

    def _release_page(self, page: int) -> None:
        self._pool.release((page,))
        if self._prefixes is not None:
            self._prefixes.release(page)


def _real(pages: Sequence[int]) -> Sequence[int]:
    """Return the pages without the holes."""
    return [page for page in pages if page != HOLE] if HOLE in pages else pages


class SwapSpace:
    """Count the host pages of swapped requests. Mutated by the engine thread only.

    Args:
        mode: `swap`: whenever there is room; `recompute`: never; `auto`: whichever costs less.
        capacity_bytes: most host memory.
        block_bytes: bytes of one page in all layers.
    """

    def __init__(self, mode: str, capacity_bytes: int, block_bytes: int, costs: CostModel) -> None:
        self._mode = mode
        self._num_free = capacity_bytes // block_bytes
        self._block_bytes = block_bytes
        self._costs = costs
        self._pages: dict[RequestId, int] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes in use."""
        return sum(self._pages.values()) * self._block_bytes

    def should_swap(self, num_pages: int, num_tokens: int) -> bool:
        """Return whether to swap `num_pages` pages out, rather than compute their `num_tokens` tokens again."""
        if not 0 < num_pages <= self._num_free or self._mode == "recompute":
            return False
        cost = self._costs.swap_s(num_pages * self._block_bytes)
        return self._mode == "swap" or cost < self._costs.recompute_s(num_tokens)

    def allocate(self, request_id: RequestId, num_pages: int) -> None:
        """Take host pages for a request."""
        assert request_id not in self._pages, f"request {request_id} is swapped out already"
        self._pages[request_id] = num_pages
        self._num_free -= num_pages

    def free(self, request_id: RequestId) -> None:
        """Give back a request's host pages."""
        self._num_free += self._pages.pop(request_id)

    def holders(self) -> Iterator[tuple[RequestId, int]]:
        """Yield (request id, pages) of every swapped request."""
        yield from self._pages.items()
