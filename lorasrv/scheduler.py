"""Who runs in the next step, and what became of the last. Ints, tuples and strings in and out; no torch.

There is no prefill and no decode phase: `num_computed_tokens` chases `num_tokens` under a token budget, so a long
prompt is computed in chunks beside the single tokens of running requests (the insight of vLLM's v1 scheduler).

A request whose adapter is not resident is `WAITING_FOR_ADAPTER`: its load runs elsewhere and nobody else waits for it.
Requests are admitted in order of arrival. One that could run but for pages holds back later ones, which would only take
more of them; when pages run out, idle adapters go first, then the newest running request is preempted and recomputed.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from adapter_store.spec import AdapterKey
from lorasrv.adapter_cache import AdapterCache
from lorasrv.config import SchedulerOptions
from lorasrv.kv_cache import KVCacheManager
from lorasrv.page_pool import PagePool
from lorasrv.request import (
    AdapterTier,
    AddRequest,
    EngineOutput,
    Request,
    RequestId,
    RequestStatus,
    RequestTiming,
)
from lorasrv.step import ScheduledRequest, SchedulerOutput
from sgmv_kernels.layout import AdapterLayout


@dataclass(slots=True)
class SchedulerCounters:
    """What happened since the start."""

    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Plan:
    """A step in the making: tokens for each request, and what is left of the budget."""

    budget: int
    counts: dict[RequestId, int] = field(default_factory=dict)
    copies: list[AdapterKey] = field(default_factory=list)
    loads: list[AdapterKey] = field(default_factory=list)

    def take(self, request: Request) -> None:
        count = min(request.num_tokens - request.num_computed_tokens, self.budget)
        self.counts[request.request_id] = count
        self.budget -= count


class Scheduler:
    """Owns every request's state. Mutated by the engine thread only."""

    def __init__(
        self,
        options: SchedulerOptions,
        pool: PagePool,
        kv: KVCacheManager,
        adapters: AdapterCache,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._pool = pool
        self._kv = kv
        self._adapters = adapters
        self._eos = eos_token_ids
        self._clock = clock
        self._requests: dict[RequestId, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._loading: set[AdapterKey] = set()
        self._on_host: dict[AdapterKey, AdapterLayout] = {}
        self._outbox: list[EngineOutput] = []
        self.counters = SchedulerCounters()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(r.status is not RequestStatus.WAITING_FOR_ADAPTER for r in self._waiting)

    @property
    def num_waiting_for_adapter(self) -> int:
        return sum(r.status is RequestStatus.WAITING_FOR_ADAPTER for r in self._waiting)

    @property
    def on_host(self) -> Set[AdapterKey]:
        """Adapters whose host copy is held, as a request that lives needs them."""
        return self._on_host.keys()

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def add(self, message: AddRequest, tier: AdapterTier | None = None) -> None:
        """Queue a request that can fit. `tier` says where its adapter was found, if it is not resident."""
        assert message.request_id not in self._requests, f"request {message.request_id} exists already"
        key = message.adapter_key
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            max_tokens=message.max_tokens,
            sampling=message.sampling,
            adapter_key=key,
            principal=message.principal,
            arrival_s=self._clock(),
            tier=AdapterTier.RESIDENT if key is not None and key in self._adapters else tier,
        )
        self._requests[request.request_id] = request
        self._waiting.append(request)

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

    def adapter_loaded(self, key: AdapterKey, layout: AdapterLayout) -> None:
        """A load that `SchedulerOutput.loads` asked for has reached host memory."""
        self._loading.discard(key)
        self._on_host[key] = layout
        for request in self._waiting:
            if request.adapter_key == key and request.load_started_s is not None:
                request.load_s += self._clock() - request.load_started_s
                request.load_started_s = None
                request.status = RequestStatus.WAITING

    def adapter_failed(self, key: AdapterKey, error: str) -> None:
        """A load failed: the requests that wait for it end with the reason, nobody else notices."""
        self._loading.discard(key)
        for request in [r for r in self._waiting if r.adapter_key == key]:
            self.fail(request.request_id, error)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's tokens and take the pages they need."""
        plan = _Plan(budget=self._options.max_num_batched_tokens)
        preemptions = self.counters.preemptions
        self._schedule_running(plan)
        self._forget_unwanted()
        if self.counters.preemptions == preemptions:
            self._admit(plan)
        chosen = [r for r in self._running if r.request_id in plan.counts]
        keys = {r.adapter_key for r in chosen if r.adapter_key is not None}
        return SchedulerOutput(
            scheduled=tuple(self._share(r, plan.counts[r.request_id]) for r in chosen),
            placements={key: self._adapters.placed(key) for key in (*keys, *plan.copies)},
            copies=tuple(plan.copies),
            loads=tuple(plan.loads),
            num_preempted=self.counters.preemptions - preemptions,
        )

    def update_from_output(self, step: SchedulerOutput, sampled: Mapping[RequestId, int]) -> list[EngineOutput]:
        """Append the sampled tokens and end what has ended; a request without its token has failed."""
        for share in step.scheduled:
            request = self._requests.get(share.request_id)
            if request is None:
                continue
            request.num_computed_tokens += len(share.token_ids)
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
        self._pool.check_integrity([*self._kv.references(), *self._adapters.references()])
        expected: dict[AdapterKey, int] = {}
        for request in self._running:
            if request.adapter_key is not None:
                expected[request.adapter_key] = expected.get(request.adapter_key, 0) + 1
        assert self._adapters.pins() == expected, "adapter pins differ from the running requests"
        assert set(self._requests) == {r.request_id for r in (*self._waiting, *self._running)}, "a request is lost"

    # Running requests first, so that nobody who has begun is delayed by somebody new.

    def _schedule_running(self, plan: _Plan) -> None:
        for request in list(self._running):
            if not plan.budget:
                break
            if request.status is RequestStatus.RUNNING and self._make_room(request, plan):
                plan.take(request)

    def _make_room(self, request: Request, plan: _Plan) -> bool:
        """Pages for all tokens of a running request; False if the request itself had to give way."""
        while not self._kv.allocate(request.request_id, request.num_tokens):
            if self._adapters.evict_idle():
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Take back everything but the tokens; they are computed again when the request's turn comes."""
        self._running.remove(request)
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self._waiting.appendleft(request)

    # Admission, in order of arrival.

    def _admit(self, plan: _Plan) -> None:
        blocked = False
        for request in list(self._waiting):
            if not self._adapter_is_near(request, plan):
                continue
            blocked = blocked or not plan.budget or len(self._running) >= self._options.max_num_seqs
            if not blocked and self._start(request, plan):
                plan.take(request)
            else:
                blocked = True

    def _adapter_is_near(self, request: Request, plan: _Plan) -> bool:
        """Whether the request's adapter is resident or in host memory; if not, ask for its load once.

        At most `max_num_seqs` adapters are on their way at a time: each holds host memory until it is placed.
        """
        key = request.adapter_key
        if key is None or key in self._adapters or key in self._on_host:
            return True
        request.status = RequestStatus.WAITING_FOR_ADAPTER
        if key not in self._loading and self._num_arriving() < self._options.max_num_seqs:
            self._loading.add(key)
            plan.loads.append(key)
        if key in self._loading and request.load_started_s is None:
            request.load_started_s = self._clock()
        return False

    def _num_arriving(self) -> int:
        return len(self._loading) + sum(key not in self._adapters for key in self._on_host)

    def _start(self, request: Request, plan: _Plan) -> bool:
        """Take pages for all of the request's tokens, and its adapter's; each running request keeps one to grow."""
        key = request.adapter_key
        needed = self._kv.missing_pages(request.request_id, request.num_tokens) + len(self._running)
        if key is not None:
            if not self._bring_in(key, needed, plan):
                return False
            self._adapters.pin(key)
        while self._pool.num_free < needed:
            if not self._adapters.evict_idle():
                return self._start_over(request, plan)
        allocated = self._kv.allocate(request.request_id, request.num_tokens)
        assert allocated, "pages were counted before they were taken"
        self._waiting.remove(request)
        self._running.append(request)
        self._mark_running(request)
        return True

    def _start_over(self, request: Request, plan: _Plan) -> bool:
        """There is no room. If nobody runs, only the request's own adapter is left: placed in pieces it may hold more
        pages than its size, so it goes, and comes back in one run."""
        key = request.adapter_key
        if key is None:
            return False
        self._adapters.unpin(key)
        if self._running:
            return False
        self._adapters.evict_idle()
        return self._adapter_is_near(request, plan) and self._start(request, plan)

    def _bring_in(self, key: AdapterKey, keep_free: int, plan: _Plan) -> bool:
        if key in self._adapters:
            return True
        if self._adapters.place(key, self._on_host[key], keep_free=keep_free) is None:
            return False
        plan.copies.append(key)
        return True

    def _mark_running(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        if request.scheduled_s is None:
            request.scheduled_s = self._clock()
            self.counters.prompt_tokens += request.num_prompt_tokens

    def _forget_unwanted(self) -> None:
        """Host copies are held for as long as a request of theirs lives: one that is preempted must find its adapter
        again, though the store may have let go of it."""
        if self._on_host:
            wanted = {r.adapter_key for r in self._requests.values()}
            self._on_host = {key: layout for key, layout in self._on_host.items() if key in wanted}

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
        if request.num_generated_tokens >= request.max_tokens:
            return RequestStatus.FINISHED_LENGTH
        return None

    def _finish(self, request: Request, status: RequestStatus, new_tokens: Sequence[int] = ()) -> None:
        if request in self._running:
            self._running.remove(request)
            self._release(request)
        else:
            self._waiting.remove(request)
        request.status = status
        del self._requests[request.request_id]
        reason = request.finish_reason
        assert reason is not None
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        self._emit(request, tuple(new_tokens))

    def _release(self, request: Request) -> None:
        self._kv.free(request.request_id)
        if request.adapter_key is not None:
            self._adapters.unpin(request.adapter_key)

    def _emit(self, request: Request, new_tokens: tuple[int, ...]) -> None:
        self._outbox.append(
            EngineOutput(
                request_id=request.request_id,
                new_token_ids=new_tokens,
                finish_reason=request.finish_reason,
                timing=self._timing(request),
                stop_token_id=request.stop_token_id,
                error=request.error,
            )
        )

    def _timing(self, request: Request) -> RequestTiming:
        begun = request.scheduled_s if request.scheduled_s is not None else self._clock()
        return RequestTiming(
            queue_ms=max(0.0, begun - request.arrival_s - request.load_s) * 1e3,
            load_ms=request.load_s * 1e3,
            tier=request.tier,
            num_preemptions=request.num_preemptions,
        )

    def _share(self, request: Request, count: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        return ScheduledRequest(
            request_id=request.request_id,
            token_ids=tuple(request.token_ids[start : start + count]),
            start=start,
            page_table=self._kv.page_table(request.request_id),
            adapter_key=request.adapter_key,
            samples=start + count == request.num_tokens,
            sampling=request.sampling,
            num_generated=request.num_generated_tokens,
        )
