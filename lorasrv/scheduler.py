"""Who runs in the next step, and what became of the last. Ints, tuples and strings in and out; no torch.

There is no prefill and no decode phase: `num_computed_tokens` chases `num_tokens` under a token budget, so a long
prompt is computed in chunks beside the single tokens of running requests (the insight of vLLM's v1 scheduler).

A request whose adapter is not in the pool is `WAITING_FOR_ADAPTER`: it comes nearer by the work of others
(`AdapterTiers`) and nobody else waits for it. Requests are admitted in order of arrival. One that could run but for
pages holds back later ones, which would only take more of them; their adapters are still brought near, with pages that
nobody needs (prefetch). When pages run out, others give way (`Reclaimer`), at last the newest running request: it is
swapped to host memory or computed again, whichever costs less.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from adapter_store.spec import AdapterKey
from lorasrv.config import SchedulerOptions
from lorasrv.metrics import SchedulerCounters
from lorasrv.pool_books import PoolBooks
from lorasrv.reclaim import Need
from lorasrv.request import (
    AdapterTier,
    AddRequest,
    EngineOutput,
    OnCold,
    Request,
    RequestId,
    RequestStatus,
)
from lorasrv.request_memory import RequestMemory
from lorasrv.step import ScheduledRequest, SchedulerOutput
from sgmv_kernels.layout import AdapterLayout

WARM_GRACE_S = 30.0
"""An adapter that was warmed, or that a request was refused for, is spared this long for the request to come."""


@dataclass(slots=True)
class _Plan:
    """A step in the making: tokens for each request, and what is left of the budget."""

    budget: int
    counts: dict[RequestId, int] = field(default_factory=dict)

    def take(self, request: Request) -> None:
        count = min(request.num_tokens - request.num_computed_tokens, self.budget)
        self.counts[request.request_id] = count
        self.budget -= count


class Scheduler:
    """Owns every request's state. Mutated by the engine thread only.

    Args:
        books: the pool's accounts.
        is_on_host: whether an adapter is in host memory, which tells in what tier it was found.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        books: PoolBooks,
        eos_token_ids: frozenset[int],
        is_on_host: Callable[[AdapterKey], bool] = lambda _: False,
    ) -> None:
        self._options = options
        self._books = books
        self._kv, self._adapters = books.kv, books.adapters
        self._tiers = books.tiers
        self._memory = RequestMemory(books)
        self._eos = eos_token_ids
        self._is_on_host = is_on_host
        self._clock = books.clock
        self._requests: dict[RequestId, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._wanted: Counter[AdapterKey] = Counter()
        self._outbox: list[EngineOutput] = []
        self.counters = SchedulerCounters()
        books.reclaimer.is_wanted = self._is_wanted

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) - self.num_waiting_for_adapter

    @property
    def num_waiting_for_adapter(self) -> int:
        return sum(r.status is RequestStatus.WAITING_FOR_ADAPTER for r in self._waiting)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def requests(self) -> list[Request]:
        """Those that live, the running ones first. For reading."""
        return [*self._running, *self._waiting]

    def tier(self, key: AdapterKey) -> AdapterTier:
        """Where an adapter is now."""
        if self._adapters.is_ready(key):
            return AdapterTier.RESIDENT
        return AdapterTier.HOST if self._is_on_host(key) else AdapterTier.DISK

    def add(self, message: AddRequest) -> None:
        """Queue a request that can fit, or refuse it if its adapter is cold and it would not wait."""
        assert message.request_id not in self._requests, f"request {message.request_id} exists already"
        request = Request(message, arrival_s=self._clock())
        self._requests[request.request_id] = request
        self._waiting.append(request)
        key, layout = message.adapter_key, message.layout
        if key is None:
            return
        assert layout is not None, "an adapter's layout is known when its request is admitted"
        request.tier = self.tier(key)
        if message.found is AdapterTier.DISK and request.tier is AdapterTier.HOST:
            request.tier = AdapterTier.DISK  # this request's own prefetch has brought it to the host
        self._wanted[key] += 1
        if request.tier is not AdapterTier.RESIDENT and message.on_cold is not OnCold.WAIT:
            self._answer_cold(request, key, layout)

    def end(self, request_id: RequestId, status: RequestStatus) -> None:
        """End a request now, aborted or stopped by its text; nothing happens if it has ended already."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, status)

    def fail(self, request_id: RequestId, error: str) -> None:
        """End a request with an error; nothing happens if it has ended already."""
        request = self._requests.get(request_id)
        if request is not None:
            request.error = error
            self._finish(request, RequestStatus.FINISHED_ERROR)

    def adapter_copied(self, key: AdapterKey) -> None:
        """A copy that the step's orders asked for has filled its pages."""
        self._tiers.copied(key)
        for request in self._waiting:
            if request.adapter_key == key:
                request.load_ends(self._clock())

    def adapter_failed(self, key: AdapterKey, error: str) -> None:
        """A load failed: the requests that wait for it end with the reason, nobody else notices."""
        self._tiers.failed(key)
        for request in [r for r in self._waiting if r.adapter_key == key]:
            self.fail(request.request_id, error)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens and take the pages they need."""
        plan = _Plan(budget=self._options.max_num_batched_tokens)
        preemptions = self.counters.preemptions
        self._tiers.begin_step()
        self._schedule_running(plan)
        self._tiers.forget_unwanted(self._is_wanted)
        if self.counters.preemptions == preemptions:
            keep_free = self._admit(plan)
            self._tiers.keep_promises(keep_free + self._pages_to_grow(), self._wanted.__contains__)
        self._memory.note_moves()
        chosen = [r for r in self._running if r.request_id in plan.counts]
        keys = {r.adapter_key for r in chosen if r.adapter_key is not None}
        return SchedulerOutput(
            scheduled=tuple(
                ScheduledRequest.of(r, plan.counts[r.request_id], self._kv.page_table(r.request_id)) for r in chosen
            ),
            placements={key: self._adapters.placed(key) for key in keys},
            page_ops=self._memory.take_ops(),
            orders=self._tiers.take_orders(),
            num_preempted=self.counters.preemptions - preemptions,
        )

    def update_from_output(self, step: SchedulerOutput, sampled: Mapping[RequestId, int]) -> list[EngineOutput]:
        """Append the sampled tokens and end what has ended; a request without its token has failed."""
        for share in step.scheduled:
            request = self._requests.get(share.request_id)
            if request is None:
                continue
            request.num_computed_tokens += len(share.token_ids)
            failed = share.samples and share.request_id not in sampled
            if not failed:
                self._kv.keep_computed(request.request_id, request.token_ids, request.num_computed_tokens)
            if share.samples:
                self._take_sampled(request, sampled.get(share.request_id))
        return self.take_outputs()

    def take_outputs(self) -> list[EngineOutput]:
        """Everything that happened since the last call, in order."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def check_integrity(self) -> None:
        """Pages and pins add up with the requests that hold them.

        Raises:
            AssertionError: they do not.
        """
        self._books.check_integrity()
        pins = Counter(r.adapter_key for r in self._running if r.adapter_key is not None)
        assert self._adapters.pins() == pins, "adapter pins differ from the running requests"
        assert set(self._requests) == {r.request_id for r in (*self._waiting, *self._running)}, "a request is lost"
        wanted = Counter(r.adapter_key for r in self._requests.values() if r.adapter_key is not None)
        assert self._wanted == wanted, "wanted adapters differ from the requests"
        swapped = {r.request_id: r.num_swapped_pages for r in self._waiting if r.num_swapped_pages}
        assert dict(self._books.swap.holders()) == swapped, "swapped pages differ from the waiting requests"
        assert self._kv.holders().keys() == {r.request_id for r in self._running}, "tables differ from those that run"

    # Running requests first, so that nobody who has begun is delayed by somebody new.

    def _schedule_running(self, plan: _Plan) -> None:
        for request in list(self._running):
            if not plan.budget:
                break
            if request.status is RequestStatus.RUNNING and self._make_room(request):
                plan.take(request)

    def _make_room(self, request: Request) -> bool:
        """Pages for all tokens of a running request; False if the request itself had to give way."""
        begun = {r.adapter_key for r in self._waiting if r.num_preemptions and r.adapter_key is not None}
        while not self._memory.grow(request, Need.PROGRESS, ahead=begun):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Take back everything but the tokens."""
        self._memory.give_way(request)
        self._running.remove(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self.counters.swaps += request.num_swapped_pages > 0
        self._waiting.appendleft(request)

    # Admission, in order of arrival.

    def _admit(self, plan: _Plan) -> int:
        """Start what can start. Returns the pages that the first request without room waits for."""
        keep_free = 0
        blocked = False
        ahead: set[AdapterKey] = set()
        for request in list(self._waiting):
            key = request.adapter_key
            if key is not None and not self._adapters.is_ready(key):
                has_room = self._bring_near(request, key, ahead, keep_free if blocked else None)
            elif self._waits_for_parent(request):
                has_room = True
            elif not blocked and plan.budget and len(self._running) < self._options.max_num_seqs:
                has_room = self._start(request, ahead)
            else:
                has_room, blocked = True, True
            if request.status is RequestStatus.RUNNING:
                plan.take(request)
                continue
            if not has_room and not blocked:
                blocked, keep_free = True, self._pages_to_start(request) + self._pages_to_come(request)
            if key is not None:
                ahead.add(key)
            if blocked and len(ahead) >= self._options.max_num_seqs:
                break
        return keep_free

    def _need(self) -> Need:
        return Need.ADMISSION if self._running else Need.PROGRESS

    def _pages_to_grow(self) -> int:
        """Pages that new ones leave to those that run: one each."""
        return len(self._running)

    def _pages_to_start(self, request: Request) -> int:
        return self._kv.pages_for(request.num_tokens)

    def _pages_to_come(self, request: Request) -> int:
        """Pages of the request's adapter, if it has none yet."""
        key, layout = request.adapter_key, request.message.layout
        return 0 if key is None or layout is None or key in self._adapters else self._adapters.pages_for(layout)

    def _bring_near(
        self, request: Request, key: AdapterKey, ahead: Set[AdapterKey], keep_free: int | None = None
    ) -> bool:
        """Have the request's adapter come nearer; False if there is no room for it. Behind a blocked request, which
        waits for `keep_free` pages, it only takes what nobody needs.
        """
        layout = request.message.layout
        assert layout is not None, "an adapter's layout is known when its request is admitted"
        request.load_begins(self._clock())
        need = self._need() if keep_free is None else Need.AHEAD
        pages = self._pages_to_grow() + (self._pages_to_start(request) if keep_free is None else keep_free)
        came = self._tiers.bring(key, layout, pages, need, ahead.__contains__)
        self._memory.note_moves()
        return came

    def _parent(self, request: Request) -> Request | None:
        """The first choice of the same prompt on the same adapter, where a further one has begun nothing yet."""
        parent = self._requests.get(request.message.fork_of) if request.message.fork_of is not None else None
        if parent is None or parent.num_preemptions or request.num_preemptions:
            return None
        return parent if parent.adapter_key == request.adapter_key else None

    def _waits_for_parent(self, request: Request) -> bool:
        """Whether the first choice is still to compute the prompt, which the further ones will share."""
        parent = self._parent(request)
        if parent is None:
            return False
        return parent.status is not RequestStatus.RUNNING or parent.num_computed_tokens < request.num_prompt_tokens - 1

    def _start(self, request: Request, ahead: Set[AdapterKey]) -> bool:
        """Take pages for all of the request's tokens; each running request keeps one to grow."""
        if not self._memory.start(request, self._parent(request), self._need(), self._pages_to_grow(), ahead):
            self._start_over(request, ahead)
            return False
        self._waiting.remove(request)
        self._running.append(request)
        request.status = RequestStatus.RUNNING
        if request.scheduled_s is None:
            request.scheduled_s = self._clock()
            self.counters.prompt_tokens += request.num_prompt_tokens
            self.counters.cached_tokens += request.num_cached_tokens
        return True

    def _start_over(self, request: Request, ahead: Set[AdapterKey]) -> None:
        """There is no room. If nobody runs and nobody comes, only the request's own adapter is left: placed in pieces
        it may hold more pages than its size, so it goes, and comes back in one run."""
        key = request.adapter_key
        if key is not None and not self._running and not self._adapters.num_filling:
            self._adapters.evict(key)
            self._bring_near(request, key, ahead)

    def _answer_cold(self, request: Request, key: AdapterKey, layout: AdapterLayout) -> None:
        """The adapter is brought in all the same, if there is room, so that the next request finds it."""
        self._tiers.warm(key, layout, self._clock() + WARM_GRACE_S)
        if request.message.on_cold is OnCold.FALLBACK_BASE:
            self._lose_interest(key)
            request.adapter_key, request.fell_back = None, True
            return
        on_host = request.tier is AdapterTier.HOST
        request.retry_after_s, why = self._tiers.outlook(key, layout, on_host=on_host, keep_free=self._pages_to_grow())
        request.error = f"the adapter is not in the pool ({request.tier}); {why}"
        self._finish(request, RequestStatus.FINISHED_REFUSED)

    def _is_wanted(self, key: AdapterKey) -> bool:
        return key in self._wanted or self._tiers.is_promised(key)

    def _lose_interest(self, key: AdapterKey) -> None:
        self._wanted[key] -= 1
        if not self._wanted[key]:
            del self._wanted[key]

    # Ends.

    def _take_sampled(self, request: Request, token: int | None) -> None:
        if token is None:
            self.fail(request.request_id, "the model's values are no numbers; the adapter's weights are too large")
        else:
            self._append(request, token)

    def _append(self, request: Request, token: int) -> None:
        request.token_ids.append(token)
        self.counters.generated_tokens += 1
        status = self._status_after(request, token)
        if status is None:
            self._emit(request, (token,))
        else:
            self._finish(request, status, (token,))

    def _status_after(self, request: Request, token: int) -> RequestStatus | None:
        sampling = request.sampling
        if token in sampling.stop_token_ids:
            request.stop_token_id = token
            return RequestStatus.FINISHED_STOPPED
        if not sampling.ignore_eos and token in self._eos:
            return RequestStatus.FINISHED_STOPPED
        if request.num_generated_tokens >= request.message.max_tokens:
            return RequestStatus.FINISHED_LENGTH
        return None

    def _finish(self, request: Request, status: RequestStatus, new_tokens: Sequence[int] = ()) -> None:
        if request in self._running:
            self._running.remove(request)
            self._memory.release(request)
        else:
            self._waiting.remove(request)
        self._memory.drop_swap(request)
        if request.adapter_key is not None:
            self._lose_interest(request.adapter_key)
        request.status = status
        del self._requests[request.request_id]
        reason = request.finish_reason
        assert reason is not None
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        self._emit(request, tuple(new_tokens))

    def _emit(self, request: Request, new_tokens: tuple[int, ...]) -> None:
        self._outbox.append(request.output(new_tokens, self._clock()))
