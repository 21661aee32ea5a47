"""What a request holds in the pool while it runs: its pages, its adapter's pin, its copy in host memory while it waits.

The scheduler says who starts, grows, gives way and ends; here is what that means for pages. The operations on the
memory itself that this makes due are noted in their order.
"""

from collections.abc import Set

from adapter_store.spec import AdapterKey
from lorasrv.memory.eviction import EvictionLevel
from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.request import Request, RequestStatus
from lorasrv.scheduler_output import CopyPages, DropSwap, PageOp, SwapIn, SwapOut


class RequestAllocator:
    """Pages of requests. Mutated by the engine thread only."""

    def __init__(self, books: MemoryManager) -> None:
        self._books = books
        self._kv, self._adapters, self._swap = books.kv, books.adapters, books.swap
        self._ops: list[PageOp] = []

    def start(
        self,
        request: Request,
        parent: Request | None,
        need: EvictionLevel,
        keep_free: int,
        ahead: Set[AdapterKey],
        growth: int = 0,
    ) -> bool:
        """Take pages for all of a waiting request's tokens beside `keep_free`, and pin its adapter, which is ready.
        Others must be able to give way for `growth` pages beyond, but do not have to yet.

        What others have computed of its beginning is shared: by `parent`, the first choice of the same prompt, or by
        the prefix cache. False, and nothing held, if others do not give way so far.
        """
        rid, key = request.request_id, request.adapter_key
        self._kv.open(rid, key, request.message.cache_salt)
        if key is not None:
            self._adapters.pin(key)
        shared = 0 if request.num_swapped_pages else self._share(request, parent)
        request.num_computed_tokens += shared
        if not (self._can_grow(request, growth, need, ahead) and self.grow(request, need, keep_free, ahead)):
            request.num_computed_tokens -= shared
            self.release(request)
            return False
        if request.num_swapped_pages:
            self._ops.append(SwapIn(rid, self._kv.page_table(rid)[: request.num_swapped_pages]))
            self._forget_swap(request)
        elif not request.num_preemptions:
            request.num_cached_tokens = shared
        return True

    def extend(
        self, request: Request, need: EvictionLevel, keep_free: int = 0, ahead: Set[AdapterKey] = frozenset()
    ) -> bool:
        """Take the pages that all known tokens of a request need; False if others do not give way so far."""
        rid, computed = request.request_id, request.num_scheduled_tokens
        missing = self._kv.missing_pages(rid, computed, request.num_tokens)
        if missing and not self._books.reclaimer.make_room(missing + keep_free, need, ahead.__contains__):
            return False
        copies = self._kv.allocate(rid, computed, request.num_tokens)
        assert copies is not None, "pages were counted before they were taken"
        if copies:
            self._ops.append(CopyPages(copies))
        return True

    def grow_for_drafts(self, request: Request, num_drafts: int, keep_free: int) -> int:
        """Take pages for draft tokens behind all known tokens of a request, which have theirs; returns for how many.

        Nothing is evicted for a guess, and `keep_free` pages stay free.
        """
        rid, known = request.request_id, request.num_tokens
        free = max(0, self._books.kv_pool.num_free - keep_free)
        room = self._kv.num_writable_tokens(rid) + free * self._kv.page_size - known
        count = min(num_drafts, room)
        if count > 0:
            copies = self._kv.allocate(rid, known - 1, known + count)
            assert copies == (), "the page of the last known token is the request's own already"
        return count

    def trim(self, request: Request) -> None:
        """Give back pages that only draft tokens were in, which are not the answer's."""
        self._kv.truncate(request.request_id, request.num_computed_tokens)

    def _can_grow(self, request: Request, growth: int, need: EvictionLevel, ahead: Set[AdapterKey]) -> bool:
        if not growth:
            return True
        missing = self._kv.missing_pages(request.request_id, request.num_computed_tokens, request.num_tokens)
        return self._books.reclaimer.can_make_room(missing + growth, need, ahead.__contains__)

    def give_way(self, request: Request) -> None:
        """Take back a running request's pages. What is computed goes to host memory, or will be computed again,
        whichever costs less."""
        rid = request.request_id
        pages = self._kv.page_table(rid)[: self._kv.pages_for(request.num_computed_tokens)]
        if self._swap.should_swap(len(pages), request.num_computed_tokens):
            self._swap.take(rid, len(pages))
            self._ops.append(SwapOut(rid, pages))
            request.num_swapped_pages = len(pages)
        else:
            request.num_computed_tokens = 0
        self.release(request)

    def fork_from(self, request: Request, parent: Request) -> None:
        """A request goes on from where another one is, on its pages, and forgets what it had."""
        rid = request.request_id
        self.drop_swap(request)
        request.num_computed_tokens = 0
        request.num_charged_tokens = parent.num_charged_tokens
        if request.status is not RequestStatus.RUNNING:
            return
        self._kv.free(rid)
        self._kv.open(rid, request.adapter_key, request.message.cache_salt)
        if parent.status is RequestStatus.RUNNING:
            request.num_computed_tokens = parent.num_computed_tokens
            self._kv.fork(parent.request_id, rid, parent.num_computed_tokens)

    def release(self, request: Request) -> None:
        """Give back the pages and the pin of a request that runs no more."""
        self._kv.free(request.request_id)
        if request.adapter_key is not None:
            self._adapters.unpin(request.adapter_key)

    def drop_swap(self, request: Request) -> None:
        """A request that ends while it waits needs its copy no more."""
        if request.num_swapped_pages:
            self._ops.append(DropSwap(request.request_id))
            self._forget_swap(request)

    def lose(self, request: Request) -> None:
        """What a request had computed is gone; it keeps its pages, if it runs."""
        if request.num_swapped_pages:
            self._forget_swap(request)
        request.num_computed_tokens = 0
        if request.status is RequestStatus.RUNNING:
            self._kv.truncate(request.request_id, request.num_tokens)

    def note_moves(self) -> None:
        """Put the copies that moves have made due behind what is noted already."""
        self._ops += self._books.reclaimer.take_moves()

    def take_ops(self) -> tuple[PageOp, ...]:
        """What is due since the last call, in its order."""
        ops, self._ops = self._ops, []
        return tuple(ops)

    def _share(self, request: Request, parent: Request | None) -> int:
        """Returns how many tokens need not be computed; the last one of the prompt does, as its logits are wanted."""
        if parent is None:
            return self._kv.attach_prefix(request.request_id, request.token_ids, request.num_reusable_tokens)
        shared = request.num_prompt_tokens - 1
        self._kv.fork(parent.request_id, request.request_id, shared)
        return shared

    def _forget_swap(self, request: Request) -> None:
        self._swap.give_back(request.request_id)
        request.num_swapped_pages = 0
