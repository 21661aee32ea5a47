"""Scheduler: the life of every request, from arrival through steps to its end. Ids, tuples and strings only; no
torch.

`StepPlanner` decides which requests get how many tokens in the next step, `RequestQueue` and its policy in which order,
`Quotas` how much at most, `Deadlines` until when. `RequestAllocator` holds what requests have in the pool. The
scheduler tells them what happens, and emits what happens to each request.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from adapter_store.spec import AdapterKey
from lorasrv.config import SchedulerOptions
from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.memory.request_allocator import RequestAllocator
from lorasrv.metrics.engine_stats import SchedulerCounters
from lorasrv.outputs import AdapterTier, EngineOutput, Refusal, RequestId, TokenLogprobs, slowest
from lorasrv.request import EngineCoreRequest, OnCold, Request, RequestStatus, is_salted
from lorasrv.scheduler.beam_search import BeamGroups, Hypothesis
from lorasrv.scheduler.deadlines import Deadlines
from lorasrv.scheduler.length_predictor import LengthPredictor
from lorasrv.scheduler.policies import make_policy
from lorasrv.scheduler.quotas import Blocker, Quotas
from lorasrv.scheduler.request_queue import RequestQueue
from lorasrv.scheduler.step_planner import StepPlan, StepPlanner
from lorasrv.scheduler.steps_in_flight import StepsInFlight
from lorasrv.scheduler.waiting_lanes import BEAMS
from lorasrv.scheduler_output import NO_DRAFTS, ModelRunnerOutput, PageOp, ScheduledRequest, SchedulerOutput
from lorasrv.speculation.speculator import Speculator

WARM_GRACE_S = 30.0
"""Seconds for which an adapter that was warmed, or for which a request was refused, is kept for the next request."""
RETRY_S = 1.0
"""Shortest Retry-After of a refused request, in seconds."""


class Scheduler:
    """Own the state of every request. Mutated by the engine thread only.

    Args:
        memory: the pool's accounts.
        speculator: proposes draft tokens; None: every step yields one token of an answer.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        memory: MemoryManager,
        eos_token_ids: frozenset[int],
        speculator: Speculator | None = None,
    ) -> None:
        self._options = options
        self._memory = memory
        self._kv, self._adapters, self._adapter_manager = memory.kv, memory.adapters, memory.adapter_manager
        self._eos = eos_token_ids
        self._clock = memory.clock
        self.counters = SchedulerCounters()
        self.predictor = LengthPredictor()
        self._allocator = RequestAllocator(memory)
        self._beams = BeamGroups(self._allocator, eos_token_ids)
        self.quotas = Quotas(options.adapter_limits, options.key_limits, memory, options.max_num_seqs, self._beams)
        self.policy = make_policy(options, memory.costs, self.predictor, self.quotas)
        self._queue = RequestQueue(self.policy, self._adapter_manager, options.max_wait_steps, self._find_blocker)
        self._deadlines = Deadlines(options, memory.costs, self.predictor, memory.clock)
        self.speculator = speculator or Speculator((), vocab_size=0)
        self._planner = StepPlanner(
            options,
            memory,
            self._queue,
            self._allocator,
            self.quotas,
            self.predictor,
            self._beams,
            self.speculator,
            self._set_status,
        )
        self._outbox: list[EngineOutput] = []
        self._num_waiting_for_adapter = 0
        self._num_steps = 0
        self._in_flight = StepsInFlight(self._allocator.free)

    @property
    def num_running(self) -> int:
        """Return the number of running requests."""
        return len(self._queue.running)

    @property
    def num_waiting(self) -> int:
        """Return the number of live requests that do not run, for whatever reason."""
        return len(self._queue.waiting)

    @property
    def num_waiting_for_adapter(self) -> int:
        """Return how many of the waiting requests wait for their adapter."""
        return self._num_waiting_for_adapter

    @property
    def num_starved(self) -> int:
        """Return how often a request was starved since the start."""
        return self._queue.num_starved_total

    @property
    def min_draft_chance(self) -> float:
        """Return the acceptance chance that a draft token had to exceed in the last step with room for drafts."""
        return self._planner.min_draft_chance

    @property
    def has_requests(self) -> bool:
        """Return whether any request is live."""
        return bool(self._queue.requests)

    def requests(self) -> list[Request]:
        """Return the live requests, the running ones first. Only read them."""
        return [*self._queue.running, *self._queue.waiting.values()]

    def leaving(self) -> list[Request]:
        """Return the requests that have finished but keep their pages until a step in flight is done."""
        return list(self._in_flight.finished)

    # Requests.
    def add(self, message: EngineCoreRequest) -> None:
        """Queue a request that can fit, or refuse it: because of a limit or its deadline, or because its adapter is
        cold and the request does not wait for it."""
        assert message.request_id not in self._queue.requests, f"request {message.request_id} exists already"
        request = Request(message, arrival_s=self._clock())
        if message.beams is not None and (ended := self._beams.add(request)) is not None:
            self._finish_with(ended, request)
        if request.status.is_finished or self._refuse_if_unfit(request):
            return
        if request.terms:
            self._find_adapter(request)
        self._memory.on_arrival(request)
        self._set_status(request, RequestStatus.WAITING)
        if request.terms:
            for key in request.term_keys:
                self._adapter_manager.add_request(key)
            if request.tier is not AdapterTier.RESIDENT:
                self._wait_or_refuse(request)

    def finish(self, request_id: RequestId, status: RequestStatus) -> None:
        """Finish a request now that was aborted or found a stop string; do nothing if it has finished already."""
        if (request := self._queue.requests.get(request_id)) is not None:
            self._finish(request, status)

    def fail(self, request_id: RequestId, error: str, refusal: Refusal | None = None) -> None:
        """Finish a request with an error; do nothing if it has finished already."""
        if (request := self._queue.requests.get(request_id)) is not None:
            request.error, request.refusal = error, refusal
            self._finish(request, RequestStatus.FINISHED_ERROR)

    def forget_answers(self, adapter: AdapterKey | None, salt: str | None) -> None:
        """Drop the past answers of an adapter, or under a salt, which serve as drafts; do not keep the answers of
        running requests either."""
        self.speculator.drop(adapter, salt)
        for request in self._queue.requests.values():
            if adapter == request.adapter_key is not None or is_salted(request.message.cache_salt, salt):
                speculation = replace(request.message.speculation, remember=False)
                request.message = replace(request.message, speculation=speculation)

    def on_swap_failed(self, request_id: RequestId, step: SchedulerOutput) -> SchedulerOutput:
        """Note that a request's pages could not be swapped out or in, and have them computed again.

        Returns: the step without this request.
        """
        if (request := self._queue.requests.get(request_id)) is not None:
            self._in_flight.leave_out(step.number, request)
            self._allocator.discard(request)
        return replace(step, requests=tuple(s for s in step.requests if s.request_id != request_id))

    def on_adapter_copied(self, key: AdapterKey) -> None:
        """Note that an ordered copy has filled the adapter's pages."""
        self._adapter_manager.on_copied(key)
        for request in self._queue.lanes.of_adapter(key):
            is_last = self._adapter_manager.are_resident(request.term_keys)
            if is_last and request.status is RequestStatus.WAITING_FOR_ADAPTER:
                self._set_status(request, RequestStatus.WAITING)

    def on_adapter_failed(self, key: AdapterKey, error: str, refusal: Refusal | None = None) -> None:
        """Note that a load or copy failed: the requests that wait for the adapter fail with the reason."""
        self._adapter_manager.on_failed(key)
        for request in self._queue.lanes.of_adapter(key):
            self.fail(request.request_id, error, refusal)

    # Steps.
    def schedule(self, *, ahead: bool = False) -> SchedulerOutput:
        """Choose the tokens of the next step and take the pages they need.

        Until its results are passed to `update_from_output`, or it is discarded, the step is in flight: its tokens are
        not chosen again, and its requests keep their pages even if they finish.

        Args:
            ahead: the next step may be planned while this one is in flight, and compute the tokens that this one
                samples, except for answers with drafts, whose number of new tokens is not known yet.
        Returns: the step; `scheduled` is empty if there is nothing to compute.
        """
        preemptions = self.counters.preemptions
        self._begin_step()
        planned = self._planner.plan()
        for request, why in planned.unfit:
            self._refuse(request, Refusal.UNFIT, why)
        if not planned.has_preempted:
            held_back = filter(self._queue.lanes.are_held_back, self._adapter_manager.on_host())
            self._memory.prefetch(planned.keep_free + self.num_running, held_back)
        self._allocator.record_moves()
        drafts = self._planner.plan_drafts(planned)  # drafts take pages last
        counts = planned.budget.counts
        chosen = [r for r in self._queue.running if r.request_id in counts]
        keys = {key for request in chosen for key in request.term_keys}
        requests = tuple(
            ScheduledRequest.of(
                r, counts[r.request_id], self._kv.page_table(r.request_id), drafts.get(r.request_id, NO_DRAFTS)
            )
            for r in chosen
        )
        held_up = {r.request_id for r in chosen if r.needs_text} | drafts.keys()
        self._num_steps += 1
        step = SchedulerOutput(
            requests=requests,
            placements={key: self._adapters.placed(key) for key in keys},
            num_preempted=self.counters.preemptions - preemptions,
            wake_s=self._wake_s(planned),
            page_ops=self._allocator.take_ops(),  # last: an exception after this would lose the operations
            orders=self._adapter_manager.take_orders(),
            snapshots=self._memory.snapshots.take_orders(),
            number=self._num_steps,
            is_awaited=ahead and any(s.samples and s.request_id in held_up for s in requests),
        )
        tokens = [
            (r, counts[r.request_id], int(ahead and s.samples and r.may_run_ahead and r.request_id not in held_up))
            for r, s in zip(chosen, requests, strict=True)
        ]
        self._in_flight.add(step.number, tokens)
        return step

    def _begin_step(self) -> None:
        """Free the resources of whatever has ended, before a step is planned, and unblock the requests that waited."""
        self._allocator.record_moves()  # of a step whose planning failed
        # Free first: nothing would trigger another step for the requests that wait for these resources.
        self._adapter_manager.begin_step()
        self._finish_missed()
        self._adapter_manager.cancel_unneeded()
        if self._beams.take_changed():
            self._queue.lanes.relieve(BEAMS)
            self.quotas.relieve_shared()
        self._memory.begin_step(self.num_running)
        restored = map(Blocker.of_snapshot, self._memory.snapshots.take_ended())
        self._queue.begin_step(self._clock(), (*self.quotas.take_relieved(), *restored))
        self.quotas.begin_step()

    def take_page_ops(self) -> tuple[PageOp, ...]:
        """Return the page operations of a step whose planning has failed, in order. The accounts count them as done."""
        self._allocator.record_moves()
        return self._allocator.take_ops()

    def expects_drafts(self) -> bool:
        """Return whether to collect the step in flight before the next is planned: the drafts that the next step can
        then verify are worth more than planning ahead."""
        return self._planner.expects_drafts()

    def discard(self, step: SchedulerOutput) -> None:
        """Drop a step whose results are lost: its tokens are chosen again."""
        self._in_flight.remove(step.number)
        for scheduled in step.requests:
            has_more = scheduled.is_pending or scheduled.drafts is not NO_DRAFTS
            if has_more and (request := self._queue.requests.get(scheduled.request_id)) is not None:
                self._kv.truncate(request.request_id, request.num_tokens)

    def discard_all(self) -> None:
        """Drop all steps in flight; their requests must be aborted before the next one."""
        self._in_flight.clear()

    def resolve(self, step: SchedulerOutput) -> SchedulerOutput:
        """Return a step in flight with its pending tokens filled in; all earlier steps must be collected."""
        pending = [s for s in step.requests if s.is_pending]
        live = [(s, self._queue.requests.get(s.request_id)) for s in pending]
        return step.with_tokens({s.request_id: r.token_ids[s.start] for s, r in live if r is not None})

    def update_from_output(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineOutput]:
        """Append the sampled tokens and finish the requests that are done. A request without its token, or without
        the prompt logprobs it asks for, fails.

        Returns: the outputs since the last call, in order.
        """
        self._in_flight.remove(step.number)
        for scheduled in step.requests:
            request = self._queue.requests.get(scheduled.request_id)
            if request is None:
                continue  # the request finished while the step was in flight
            no_token = scheduled.samples and scheduled.request_id not in output.sampled
            if no_token and scheduled.num_guessed_tokens:
                self._bar_drafts(request)
                continue
            if no_token or (scheduled.prompt_rows and scheduled.request_id not in output.prompt_logprobs):
                self._count_computed(request, scheduled, int(scheduled.samples))
                self.fail(request.request_id, *_overflow(request))
                continue
            if scheduled.num_observed:
                self._allocator.observe(request, scheduled.page_table, output.masses[scheduled.request_id])
            if scheduled.prompt_rows:
                request.prompt_logprobs += output.prompt_logprobs[scheduled.request_id]
            if scheduled.samples and request.sampling.prompt_only:
                self._end_prompt(request, scheduled)
                continue
            if scheduled.samples and request.message.beams is None:
                self._append(
                    request,
                    scheduled,
                    output.sampled[scheduled.request_id],
                    output.logprobs.get(scheduled.request_id, ()),
                )
                continue
            self._count_computed(request, scheduled, int(scheduled.samples))
            self._allocator.settle(request)
            if scheduled.samples:
                self._beams.offer(request, output.logprobs[scheduled.request_id][0].top)
                self._queue.lanes.relieve(Blocker.of_group(request))
        self.speculator.take_results(output.drafted, output.probed, self._queue.requests)
        self.counters.generated_tokens += self._beams.advance(self._finish_beam)
        return self.take_outputs()

    def take_outputs(self) -> list[EngineOutput]:
        """Return the outputs since the last call, in order."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def check_integrity(self) -> None:
        """Compare pages, pins and accounts with the requests that hold them.

        Raises:
            AssertionError: they differ.
        """
        self._memory.check_integrity()
        self._queue.check_integrity()
        running, waiting = self._queue.running, list(self._queue.waiting.values())
        self.quotas.check_integrity(running, waiting)
        holders = (*running, *self._in_flight.finished)
        pins = Counter(key for request in holders for key in request.term_keys)
        assert self._adapters.pins() == pins, "adapter pins differ from the running requests"
        needed = Counter(key for request in self._queue.requests.values() for key in request.term_keys)
        assert self._adapter_manager.requests() == needed, "wanted adapters differ from the requests"
        swapped = {r.request_id: r.num_swapped_pages for r in waiting if r.num_swapped_pages}
        assert dict(self._memory.swap.holders()) == swapped, "swapped pages differ from the waiting requests"
        self._beams.check_integrity(self._queue.requests)
        num_loading = sum(r.status is RequestStatus.WAITING_FOR_ADAPTER for r in waiting)
        assert self._num_waiting_for_adapter == num_loading, "requests that wait for adapters do not add up"
        loading = [r.term_keys for r in waiting if r.status is RequestStatus.WAITING_FOR_ADAPTER]
        all_missing = not any(map(self._adapter_manager.are_resident, loading))
        assert all_missing, "an adapter waited for is resident"
        tables = self._kv.holders()
        assert tables.keys() == {r.request_id for r in holders}, "tables differ from the running requests"
        self._allocator.check_integrity(r for r in running if not r.num_in_flight_tokens)
        self._in_flight.check_integrity(holders)

    def _bar_drafts(self, request: Request) -> None:
        """Compute a request's last token in the next step, without drafts: a draft with keys and values that are not
        finite spoils the rows computed with it."""
        self._allocator.truncate_drafts(request)
        speculation = replace(request.message.speculation, max_draft=0)
        request.message = replace(request.message, speculation=speculation)

    def _count_computed(self, request: Request, scheduled: ScheduledRequest, num_new: int) -> None:
        """Count what a step has computed for a request: its known tokens and the accepted draft tokens. Tokens
        computed again after a preemption are not charged again."""
        computed = scheduled.num_known_tokens + max(0, num_new - 1)
        request.num_computed_tokens += computed
        finish = scheduled.start + computed
        fresh = finish - max(scheduled.start, request.num_charged_tokens)
        if scheduled.start < request.num_prompt_tokens:
            self._queue.lanes.relieve(Blocker.of_prompt(request.request_id))
        if fresh > 0:
            request.num_charged_tokens = finish
            self.quotas.charge(request, fresh)
            self.policy.on_computed(request, num_new)

    def _wake_s(self, planned: StepPlan) -> float | None:
        """Return when the next step is needed even if nothing happens."""
        # Requests behind the refused ones may be admitted; others may use what adapters have left in this step.
        has_more = planned.unfit or (self._adapter_manager.has_moved and self.num_waiting)
        now = self._clock() if has_more else None
        times = (self._deadlines.next_s(), planned.wake_s, now, self._queue.lanes.wake_s(), self._memory.wake_s())
        return min((t for t in times if t is not None), default=None)

    # Refusals.
    def _refuse_if_unfit(self, request: Request) -> bool:
        """Refuse a new request if necessary; return whether it was refused."""
        if (why := self.quotas.why_unfit(request)) is not None:
            self._refuse(request, Refusal.UNFIT, why)
        elif (why := self.quotas.why_not_queue(request)) is not None:
            answer_s = self._deadlines.answer_s(self._queue.running)
            retry_s = self.quotas.retry_after_s(request, answer_s, self._options.max_num_seqs)
            self._refuse(request, Refusal.LIMIT, why, retry_s)
        elif self._options.early_abort and (
            late := self._deadlines.why_hopeless(request, self._seconds_ahead(request))
        ):
            self._refuse(request, Refusal.LATE, *late)
        return request.status.is_finished

    def _seconds_ahead(self, request: Request) -> float:
        num_ahead = self.policy.num_ahead(request, self._queue.waiting.values())
        return self._deadlines.ahead_s(self._queue.running, num_ahead, self._options.max_num_seqs)

    def _finish_missed(self) -> None:
        for request, why in self._deadlines.take_missed():
            request.error, request.refusal = why, Refusal.TIMEOUT
            self._finish(request, RequestStatus.FINISHED_TIMEOUT)
        for request, why, late_s in self._deadlines.take_hopeless():
            self._refuse(request, Refusal.LATE, why, late_s)

    def _refuse(self, request: Request, refusal: Refusal, why: str, retry_after_s: float = 0.0) -> None:
        request.error, request.refusal = why, refusal
        request.retry_after_s = max(RETRY_S, retry_after_s)
        self._finish(request, RequestStatus.FINISHED_REFUSED)

    # Adapters.
    def _find_adapter(self, request: Request) -> None:
        """Note where a new request finds its adapter; continue with the base model if the request asks for that."""
        message = request.message
        request.tier = slowest(map(self._adapter_manager.tier, request.term_keys))
        if message.found is AdapterTier.DISK and request.tier is AdapterTier.HOST:
            request.tier = AdapterTier.DISK  # the request's own prefetch has read it into host memory
        if request.tier is not AdapterTier.RESIDENT and message.on_cold is OnCold.FALLBACK_BASE:
            self._load_for_later(request)
            request.fall_back()

    def _wait_or_refuse(self, request: Request) -> None:
        """Let a request wait for its adapter, or refuse it if the request asks for that."""
        if request.message.on_cold is OnCold.WAIT:
            self._set_status(request, RequestStatus.WAITING_FOR_ADAPTER)
            return
        self._load_for_later(request)
        missing = [(t.key, t.layout) for t in request.terms if not self._adapter_manager.is_resident(t.key)]
        on_host = request.tier is AdapterTier.HOST
        seconds, why = self._memory.estimate_ready_s(missing, on_host=on_host, keep_free=self.num_running)
        request.error, request.refusal = f"the adapter is not in the pool ({request.tier}); {why}", Refusal.COLD
        request.retry_after_s = seconds
        self._finish(request, RequestStatus.FINISHED_REFUSED)

    def _load_for_later(self, request: Request) -> None:
        """Load a request's adapter for later ones if there is room."""
        for term in request.terms:
            self._adapter_manager.reserve(term.key, term.layout, self._clock() + WARM_GRACE_S)

    def _find_blocker(self, request: Request) -> Blocker | None:
        """Return what denies a request tokens, other than slots and pages."""
        is_running = request.status is RequestStatus.RUNNING
        if not is_running and self._beams.must_wait(request, self.quotas.allow_together):
            return BEAMS
        found = self.quotas.rate_blocker(request) if is_running else self.quotas.blocker(request)
        return None if found is None else found[0]

    # Ends.
    def _append(
        self, request: Request, scheduled: ScheduledRequest, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> None:
        """Append the new tokens of an answer, up to the token that ends it."""
        status, num_new = None, 0
        for token in tokens:
            request.token_ids.append(token)
            num_new += 1
            request.follow_constraint(token)
            status = self._status_after(request, token)
            if status is not None:
                break
        self.counters.generated_tokens += num_new
        request.num_steps += 1
        request.num_draft_tokens += len(scheduled.draft_token_ids)
        request.num_accepted_tokens += min(num_new, len(tokens) - 1)
        self._count_computed(request, scheduled, num_new)
        self._allocator.settle(request)
        if scheduled.drafts is not NO_DRAFTS:
            self._allocator.truncate_drafts(request)
        new_tokens = tuple(tokens[:num_new])
        if self.speculator.is_active:
            self.speculator.observe(request, new_tokens, len(scheduled.draft_token_ids))
        if status is None:
            self._emit(request, new_tokens, tuple(logprobs[:num_new]))
        else:
            self._finish(request, status, new_tokens, logprobs[:num_new])

    def _end_prompt(self, request: Request, scheduled: ScheduledRequest) -> None:
        """Finish a request that needs only its prompt computed; the token sampled after the prompt is not shown."""
        self._count_computed(request, scheduled, 0)
        self._allocator.settle(request)
        self._finish(request, RequestStatus.FINISHED_LENGTH)

    def _finish_beam(self, request: Request, answer: Hypothesis) -> None:
        """Finish a request with its answer of a beam search."""
        request.token_ids[request.num_prompt_tokens :] = answer.token_ids
        status = self._status_after(request, answer.token_ids[-1])
        self._finish(request, status or RequestStatus.FINISHED_LENGTH, answer.token_ids)

    def _status_after(self, request: Request, token: int) -> RequestStatus | None:
        sampling, state = request.sampling, request.constraint_state
        if state is not None and state.error is not None:
            request.error = state.error
            return RequestStatus.FINISHED_ERROR
        if token in sampling.stop_token_ids:
            request.stop_token_id = token
            return RequestStatus.FINISHED_STOPPED
        if not sampling.ignore_eos and token in self._eos:
            return RequestStatus.FINISHED_STOPPED
        if state is not None and state.is_over:
            return RequestStatus.FINISHED_STOPPED
        if request.num_generated_tokens >= request.message.max_tokens:
            return RequestStatus.FINISHED_LENGTH
        return None

    def _finish(
        self,
        request: Request,
        status: RequestStatus,
        new_tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        if request.status.is_finished:
            return  # finished already with another beam of its group
        if request.request_id in self._queue.requests:
            self._release(request)
        self._set_status(request, status)
        reason = request.finish_reason
        assert reason is not None
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        self._emit(request, tuple(new_tokens), tuple(logprobs))
        for other in self._beams.remove(request) if request.message.beams is not None else ():
            self._finish_with(request, other)
        self.speculator.forget(request)
        # `Deadlines` and others keep the request for a while: release its grammar and its hold on the adapter now.
        request.constraint_state = None
        request.message = replace(request.message, hold=None, constraint=None)

    def _finish_with(self, ended: Request, other: Request) -> None:
        """Finish another beam of a group for the reason for which one has ended."""
        other.error, other.refusal, other.retry_after_s = ended.error, ended.refusal, ended.retry_after_s
        self._finish(other, ended.status)

    def _set_status(self, request: Request, status: RequestStatus) -> None:
        """Change a request's status and tell every account of it; only this method changes a status.

        The caller takes pages and pins before a request runs and frees them before it stops.
        """
        was, request.status, request.told = request.status, status, None
        self._num_waiting_for_adapter += (status is RequestStatus.WAITING_FOR_ADAPTER) - (
            was is RequestStatus.WAITING_FOR_ADAPTER
        )
        if not request.number:  # a request that is refused on arrival was never added
            if status is RequestStatus.WAITING:
                self._queue.add(request)
                self.quotas.add(request)
                self._deadlines.watch(request)
        elif status is RequestStatus.RUNNING:
            self._beams.on_admitted(request, self.quotas.allow_together)
            self.quotas.admit(request)
            self._queue.admit(request)
            self.predictor.on_admitted(request)
            if request.scheduled_s is None:
                request.scheduled_s = self._clock()
                self.counters.prompt_tokens += request.num_prompt_tokens
                self.counters.cached_tokens += request.num_cached_tokens
        elif status is RequestStatus.PREEMPTED:
            request.num_preemptions += 1
            self.counters.preemptions += 1
            self.counters.swaps += request.num_swapped_pages > 0
            self.quotas.preempt(request)
            self._queue.preempt(request)
            self._queue.lanes.relieve(Blocker.of_prompt(request.request_id))
        elif status is RequestStatus.WAITING_FOR_ADAPTER:
            request.on_load_started(self._clock())
        elif status is RequestStatus.WAITING:
            request.on_load_finished(self._clock())
        else:
            if was is RequestStatus.RUNNING:
                self.quotas.preempt(request)
            self.quotas.remove(request)
            self._queue.remove(request)
            self._queue.lanes.relieve(Blocker.of_prompt(request.request_id))
            if status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH):
                self.predictor.on_finished(request, was_cut=status is RequestStatus.FINISHED_LENGTH)

    def _release(self, request: Request) -> None:
        """Release everything that a live request holds."""
        if request.num_in_flight_tokens:
            self._in_flight.keep(request)
        elif request.status is RequestStatus.RUNNING:
            self._allocator.free(request)
        self._allocator.drop_swap(request)
        for key in request.term_keys:
            self._adapter_manager.remove_request(key)

    def _emit(self, request: Request, new_tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> None:
        self._outbox.append(request.output(new_tokens, self._clock(), logprobs))


def _overflow(request: Request) -> tuple[str, Refusal | None]:
    """Return the error of a request whose logits are not finite, and the kind of its refusal."""
    found = "the model computed NaN or infinity for this request"
    if request.adapter_key is not None:
        return f"{found}; its adapter's weights are too large", None
    return f"{found}, which has no adapter: the base overflows on its prompt", Refusal.STEP
