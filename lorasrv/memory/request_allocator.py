"""Memory of requests: KV pages and an adapter's pin while they run, a swapped copy in host memory while they wait.

The scheduler decides which request is admitted, extended, preempted and finished; this module allocates and frees pages
accordingly, and records the required page operations in order.
"""

from collections.abc import Collection, Iterable, Sequence

from lorasrv.kv_policy import HOLE, KvPolicy
from lorasrv.memory.eviction import NONE_SPARED, EvictionLevel, Spared
from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.request import FixedPrefix, Request, RequestStatus
from lorasrv.scheduler_output import CopyPages, DropSwap, PageOp, SwapIn, SwapOut


class RequestAllocator:
    """Allocate and free the memory of requests. Mutated by the engine thread only."""

    def __init__(self, memory: MemoryManager) -> None:
        self._evictor, self._kv_pool = memory.evictor, memory.kv_pool
        self._kv, self._adapters, self._swap = memory.kv, memory.adapters, memory.swap
        self._ops: list[PageOp] = []

    def allocate(
        self,
        request: Request,
        parent: Request | None,
        level: EvictionLevel,
        keep_free: int,
        spared: Spared,
        growth: int = 0,
    ) -> bool:
        """Take pages for all tokens of a waiting request, and pin its adapters, which must be resident.

        Pages of the same prefix are shared instead of taken, from `parent` or from the prefix cache.

        Args:
            parent: the first choice of the same prompt, for a further one.
            keep_free: pages to be left free.
            growth: further pages that this level must be able to free; they are not freed now.
        Returns:
            False, and nothing held, if this level cannot free so many.
        """
        rid, message = request.request_id, request.message
        self._open(request, message.kv_policy, request.swapped_holes)
        for key in request.term_keys:
            self._adapters.pin(key)
        shared = 0 if request.num_swapped_pages else self._share(request, parent)
        request.num_computed_tokens += shared
        can_grow = self._can_grow(request, growth, level, spared)
        if not (can_grow and self.extend(request, level, keep_free, spared)):
            request.num_computed_tokens -= shared
            self.free(request)
            return False
        if request.num_swapped_pages:
            self._ops.append(SwapIn(rid, self._kv.held_pages(rid, request.num_computed_tokens)))
            self._free_swap(request)
        elif not request.num_preemptions:
            # A resumed request may also find pages of its own answer.
            request.num_cached_tokens = min(shared, request.num_prompt_tokens)
            self._count_uses(request)
        return True

    def lacks_pages(self, request: Request) -> bool:
        """Return whether tokens of a running request, known or pending, have no page to be written into."""
        return self._kv.missing_pages(request.request_id, request.num_scheduled_tokens, _num_wanted(request)) > 0

    def extend(
        self,
        request: Request,
        level: EvictionLevel,
        keep_free: int = 0,
        spared: Spared = NONE_SPARED,
    ) -> bool:
        """Take the pages for all known and pending tokens, or under a policy those for the next step; return False if
        this level cannot free them."""
        rid, computed, wanted = request.request_id, request.num_scheduled_tokens, _num_wanted(request)
        missing = self._kv.missing_pages(rid, computed, wanted)
        if missing and not self._evictor.make_room(missing + keep_free, level, spared):
            return False
        copies = self._kv.allocate(rid, computed, wanted)
        assert copies is not None, "pages were counted before they were taken"
        if copies:
            self._ops.append(CopyPages(copies))
        return True

    def extend_for_drafts(self, request: Request, num_drafts: int, keep_free: int) -> int:
        """Take free pages for draft tokens after a request's known tokens, which have pages already; evict nothing.

        Args:
            num_drafts: number of draft tokens that need a place.
            keep_free: pages that stay free.
        Returns: the number of draft tokens that have a place.
        """
        rid, known = request.request_id, request.num_tokens
        free = max(0, self._kv_pool.num_free - keep_free)
        room = self._kv.num_writable_tokens(rid) + free * self._kv.page_size - known
        count = min(num_drafts, room)
        if count > 0:
            copies = self._kv.allocate(rid, known - 1, known + count)
            assert copies == (), "the page of the last known token is the request's own already"
        return count

    def truncate_drafts(self, request: Request) -> None:
        """Free the pages that held only rejected draft tokens."""
        self._kv.truncate(request.request_id, request.num_computed_tokens)

    def settle(self, request: Request) -> None:
        """Offer a request's computed pages to the prefix cache, and free the pages that its policy drops."""
        self._kv.cache_full_pages(request.request_id, request.token_ids, request.num_computed_tokens)
        if request.message.kv_policy is not None:
            self._drop(request, request.message.kv_policy)

    def observe(self, request: Request, page_table: Sequence[int], masses: Sequence[Sequence[float]]) -> None:
        """Add up the attention that some rows of a request have paid to its pages.

        Args:
            page_table: the table with which the rows were computed.
            masses: attention of each row to each page that it saw. Rows are added in order, so that the sums do not
                depend on how the rows were split into steps.
        """
        places = [place for place, page in enumerate(page_table) if page != HOLE]
        request.page_masses += [0.0] * (len(page_table) - len(request.page_masses))
        for row in masses:
            for place, mass in zip(places, row, strict=False):
                request.page_masses[place] += mass

    def _drop(self, request: Request, policy: KvPolicy) -> None:
        """Free the pages that a request's policy drops now."""
        rid, computed = request.request_id, request.num_computed_tokens
        self._kv.drop_unseen(rid, computed)
        if computed == policy.next_check(request.num_prompt_tokens, computed - 1):
            selected = policy.select(request.page_masses, computed, self._kv.holes(rid))
            if selected:
                self._kv.drop(rid, selected)
                request.num_full_rows = min(request.num_full_rows, computed)
        request.num_dropped_pages = len(self._kv.holes(rid))

    def preempt(self, request: Request) -> None:
        """Free a running request's pages: swap out what is computed, or discard it, whichever costs less."""
        rid = request.request_id
        pages = self._kv.held_pages(rid, request.num_computed_tokens)
        if self._swap.should_swap(len(pages), request.num_computed_tokens):
            self._swap.allocate(rid, len(pages))
            self._ops.append(SwapOut(rid, pages))
            request.num_swapped_pages = len(pages)
            request.swapped_holes = self._kv.holes(rid)
        else:
            _forget(request)
        self.free(request)

    def fork_from(self, request: Request, parent: Request) -> None:
        """Replace a request's pages by a fork of its parent's."""
        rid = request.request_id
        self.drop_swap(request)
        request.num_computed_tokens = 0
        request.num_charged_tokens = parent.num_charged_tokens
        if request.status is not RequestStatus.RUNNING:
            return
        self._kv.free(rid)
        self._open(request)
        if parent.status is RequestStatus.RUNNING:
            request.num_computed_tokens = parent.num_computed_tokens
            self._kv.fork(parent.request_id, rid, parent.num_computed_tokens)

    def free(self, request: Request) -> None:
        """Free the pages and the adapter's pin of a request that stops running."""
        self._kv.free(request.request_id)
        for key in request.term_keys:
            self._adapters.unpin(key)

    def drop_swap(self, request: Request) -> None:
        """Free the swapped copy of a request that finishes while it waits; do nothing if it has none."""
        if request.num_swapped_pages:
            self._ops.append(DropSwap(request.request_id))
            self._free_swap(request)

    def discard(self, request: Request) -> None:
        """Note that everything computed for a request is lost; a running request keeps its pages."""
        if request.num_swapped_pages:
            self._free_swap(request)
        _forget(request)
        if request.status is RequestStatus.RUNNING:
            self._kv.truncate(request.request_id, request.num_tokens)
            self._kv.restart(request.request_id)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Compare the pages of running requests with their tokens; nothing of these requests may be in flight.

        Raises:
            AssertionError: a request has a page without a token, or has or lacks a page contrary to its policy.
        """
        for request in requests:
            rid, policy = request.request_id, request.message.kv_policy
            most = self._kv.pages_for(request.num_tokens)
            assert len(self._kv.page_table(rid)) <= most, "a request has pages for no token"
            unseen = set[int]() if policy is None else set(policy.hole(request.num_computed_tokens))
            assert unseen <= self._kv.holes(rid), "pages that no token sees are held"
            assert len(self._kv.holes(rid)) <= max(len(unseen), request.num_dropped_pages), "a page is missing"

    def record_moves(self) -> None:
        """Append the copies required by compaction to the page operations."""
        self._ops += self._evictor.take_moves()

    def take_ops(self) -> tuple[PageOp, ...]:
        """Return the page operations since the last call, in order."""
        ops, self._ops = self._ops, []
        return tuple(ops)

    def _open(self, request: Request, policy: KvPolicy | None = None, holes: Collection[int] = ()) -> None:
        """Create a request's empty table."""
        salt, prefix, active_from = request.message.cache_salt, _prefix(request), request.message.active_from
        home = request.home_key
        self._kv.open(request.request_id, request.adapter_key, salt, policy, holes, prefix, home, active_from)

    def _can_grow(
        self,
        request: Request,
        growth: int,
        level: EvictionLevel,
        spared: Spared,
    ) -> bool:
        if not growth:
            return True
        missing = self._kv.missing_pages(request.request_id, request.num_computed_tokens, _num_wanted(request))
        return self._evictor.can_make_room(missing + growth, level, spared)

    def _share(self, request: Request, parent: Request | None) -> int:
        """Share the pages of a computed prefix; return its number of tokens. The prompt's last token is never included,
        as its logits are needed."""
        rid, shared = request.request_id, request.num_prompt_tokens - 1
        may_fork = parent is not None and shared <= request.num_reusable_tokens
        if parent is None or not may_fork or not self._kv.can_fork(parent.request_id, shared):
            shared = self._kv.attach_prefix(rid, request.token_ids, request.num_reusable_tokens)
        else:
            self._kv.fork(parent.request_id, rid, shared)
        self._kv.drop_unseen(rid, shared)
        return shared

    def _count_uses(self, request: Request) -> None:
        """Count the uses of a request once, when it is first admitted: one that waits for pages is tried every step."""
        for key in request.term_keys:
            self._adapters.count_use(key)
        self._kv.count_uses(request.request_id)

    def _free_swap(self, request: Request) -> None:
        self._swap.free(request.request_id)
        request.num_swapped_pages, request.swapped_holes = 0, frozenset()


def _prefix(request: Request) -> FixedPrefix | None:
    """Return the persona's fixed beginning of a prompt; None under a policy, as the kept pages then depend on the
    request."""
    return request.message.prefix if request.message.kv_policy is None else None


def _forget(request: Request) -> None:
    """Note that nothing of a request is computed."""
    request.num_computed_tokens = request.num_dropped_pages = 0
    request.page_masses = []


def _num_wanted(request: Request) -> int:
    """Return how many leading tokens of a request need pages now, or have needed them."""
    policy, expected = request.message.kv_policy, request.num_expected_tokens
    if policy is None:
        return expected
    # No step goes beyond the next check, so pages after it are not needed yet.
    done = request.num_scheduled_tokens
    return min(expected, done + policy.step_tokens, max(done, request.next_check))
