"""Step planner: which requests get how many tokens in the next step, and the pages for them.

There is no prefill and no decode phase: `num_computed_tokens` catches up with `num_tokens` under a budget
(`TokenBudget`), so a long prompt is computed in chunks beside the single tokens of running requests (the insight of
vLLM's v1 scheduler).

Running and waiting requests are visited in the order of `RequestQueue`. A request whose adapter is not resident is
`WAITING_FOR_ADAPTER`: `AdapterManager` loads it meanwhile, and no other request waits for it. A request is admitted if
its adapter is resident, its limits allow it, and the pages suffice for what the batch is predicted to grow to. The
first request that lacks only pages blocks later ones, which would take pages from it; their adapters are still
prefetched, into pages that no request needs. When pages run out nevertheless, `Evictor` evicts, and as a last resort a
running request is preempted: it is swapped to host memory or computed again, whichever costs less.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

from adapter_store.spec import AdapterKey
from lorasrv.config import SchedulerOptions
from lorasrv.memory.adapter_manager import AdapterState
from lorasrv.memory.eviction import EvictionLevel, Spared
from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.memory.request_allocator import RequestAllocator
from lorasrv.outputs import RequestId
from lorasrv.request import Request, RequestStatus
from lorasrv.scheduler.beam_search import BeamGroups
from lorasrv.scheduler.length_predictor import LengthPredictor, peak_growth
from lorasrv.scheduler.quotas import Blocker, Quotas
from lorasrv.scheduler.request_queue import RequestQueue
from lorasrv.scheduler.token_budget import (
    TokenBudget,
    is_decoding,
    num_uncomputed_tokens,
    num_unscheduled_tokens,
    planned_shape,
)
from lorasrv.scheduler.waiting_lanes import BEAMS, PROMPT_ROWS
from lorasrv.scheduler_output import NO_PROBES, PlannedDrafts, ProbeTree
from lorasrv.speculation.draft_lengths import PlainStep, RowDraft, choose_lengths, min_survival
from lorasrv.speculation.drafter import DraftQuery
from lorasrv.speculation.proposal import Proposal
from lorasrv.speculation.speculator import Speculator

MAX_LOOK_AHEAD = 32
"""Most requests behind a blocked one whose adapters are considered for prefetching."""
MAX_PASSED = 32
"""Most requests that a step skips because of limits, adapters or first choices; later steps ignore them until that
changes."""
PROPOSING_SHARE = 0.01
"""Share of a step's time that may be spent on looking for drafts."""
LONG_PROMPT_SHARE = 2
"""A prompt that does not finish in this step takes the chunk divided by this while others could be admitted."""


@dataclass(slots=True)
class _PlanState:
    """Hold the state of one pass over the queue."""

    budget: TokenBudget
    # Whether a request that could run lacks a slot, or `keep_free` pages.
    blocked: bool = False
    keep_free: int = 0
    # Adapters of requests that were passed without being admitted.
    ahead: set[AdapterKey] = field(default_factory=set)
    # Whether no request further back can be admitted or prefetched.
    is_over: bool = False
    # Requests visited since one was blocked.
    num_behind: int = 0
    # Requests that were visited and neither admitted nor blocked by pages or slots.
    num_passed: int = 0
    has_preempted: bool = False
    # When the first throttled request may continue.
    wake_s: float | None = None
    # Requests that can never run because of limits, and why.
    unfit: list[tuple[Request, str]] = field(default_factory=list)


class _WantedDrafts(NamedTuple):
    """Hold the drafts of an answer that are worth verifying in a step, or worth drafting for the next one."""

    request: Request
    proposal: Proposal
    # The draft model that runs, and for how many tokens.
    model: str
    num_asked: int
    probes: ProbeTree


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Hold the tokens of each request in a step."""

    budget: TokenBudget
    # Pages that the first blocked request waits for.
    keep_free: int
    has_preempted: bool
    # When a throttled request may continue; None if none is throttled by a rate.
    wake_s: float | None
    # Requests that can never run because of limits, and why.
    unfit: tuple[tuple[Request, str], ...]


class StepPlanner:
    """Plan steps. Mutated by the engine thread only.

    Args:
        set_status: changes a request's status and tells every account of it.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        memory: MemoryManager,
        queue: RequestQueue,
        allocator: RequestAllocator,
        quotas: Quotas,
        predictor: LengthPredictor,
        beams: BeamGroups,
        speculator: Speculator,
        set_status: Callable[[Request, RequestStatus], None],
    ) -> None:
        self._options = options
        self._memory = memory
        self._kv, self._adapters = memory.kv, memory.adapters
        self._adapter_manager = memory.adapter_manager
        self._queue = queue
        self._allocator = allocator
        self._quotas = quotas
        self._predictor = predictor
        self._beams = beams
        self._speculator = speculator
        self._set_status = set_status
        # Request on a sum whose adapters are being loaded for it.
        self._assembling: Request | None = None
        # Acceptance chance that a draft token had to exceed in the newest step that had room for drafts.
        self.min_draft_chance = 0.0
        self._target_s = None if options.target_itl_ms is None else options.target_itl_ms / 1e3

    def plan(self) -> StepPlan:
        """Choose the tokens of the next step and take the pages they need."""
        for beam in self._beams.stop_youngest(self._quotas.allow_together):
            self.preempt(beam)
        state = _PlanState(self._budget())
        unseen = {request.request_id for request in self._queue.running}
        with closing(self._queue.order()) as in_order:
            for request in in_order:
                unseen.discard(request.request_id)
                if request.status is RequestStatus.RUNNING:
                    self._schedule_running(request, state)
                else:
                    self._schedule_waiting(request, state)
                if state.is_over:
                    break
        for request in self._queue.running_in_order() if unseen else ():
            # A request may have been preempted for another one in this loop.
            if request.request_id in unseen and request.status is RequestStatus.RUNNING:
                self._schedule_running(request, state)
        self._distribute_rest(state)
        for request in list(self._queue.running):
            if request.request_id in state.budget.counts:
                self._queue.mark_scheduled(request)
            elif not state.budget.request_slots and num_unscheduled_tokens(request):
                self._queue.mark_without_slot(request)
        return StepPlan(state.budget, state.keep_free, state.has_preempted, state.wake_s, tuple(state.unfit))

    def _budget(self) -> TokenBudget:
        options = self._options
        running = [request for request in self._queue.running if not request.is_paused]
        has_priority_waiting = bool(self._queue.starved) or (
            self._queue.policy.may_displace and bool(self._queue.waiting)
        )
        return TokenBudget.of(
            options.max_num_batched_tokens,
            options.max_num_seqs,
            running,
            self._target_s,
            self._options.target_itl_ratio,
            self._memory.costs.step,
            slots_ahead=int(has_priority_waiting),
        )

    def plan_drafts(self, planned: StepPlan) -> dict[RequestId, PlannedDrafts]:
        """Propose draft tokens for the answers in a planned step, as many as raise its tokens per second, within the
        tokens, logit rows and free pages that the step leaves. Request drafts for the next step as well. No page is
        evicted, and no request is preempted or delayed, for a draft.

        Returns:
            Drafts by request; their pages are taken.
        """
        if planned.has_preempted:
            return {}
        known = [request for request in self._queue.running if not request.num_pending_tokens]
        wanted = self._wanted_drafts(known, planned.budget)
        room = planned.budget.num_draft_tokens - sum(len(row.proposal.token_ids) for row in wanted)
        keep_free, drafts = planned.keep_free + self._pages_to_grow(), dict[RequestId, PlannedDrafts]()
        for request, proposal, model, num_asked, probes in wanted:
            length = len(proposal.token_ids)
            count = self._allocator.extend_for_drafts(
                request, length + max(num_asked, len(probes.token_ids)), keep_free
            )
            if count > 0:
                taken = proposal.first(count)
                left = count - len(taken.token_ids)
                kept = probes if len(probes.token_ids) <= min(left, room) else NO_PROBES
                room -= len(kept.token_ids)
                parents = () if taken.is_chain else taken.parents
                drafts[request.request_id] = PlannedDrafts(
                    taken.token_ids, taken.drafters, model, min(num_asked, left), parents, kept
                )
        return drafts

    def expects_drafts(self) -> bool:
        """Return whether the next step should verify drafts, or request some, if the step in flight is collected before
        it is planned. The later start of that step counts as a cost."""
        if not self._speculator.is_active:
            return False
        budget = self._budget()
        for request in self._queue.running:
            if is_decoding(request) and budget.may_take(request):
                budget.take(request)
        return bool(self._wanted_drafts(self._queue.running, budget))

    def _wanted_drafts(self, requests: Sequence[Request], budget: TokenBudget) -> list[_WantedDrafts]:
        """Return the drafts that are worth their cost, regardless of pages, for requests that have their tokens from a
        budget. For a request with a pending token this is an estimate."""
        room = budget.num_draft_tokens
        if not self._speculator.is_active or room <= 0:
            return []
        limits = [(request, most) for request in requests if (most := self._max_drafts(request, budget)) > 0]
        if not limits:
            return []
        costs, step = self._memory.costs.step, self._plain_step(budget.counts)
        token_s = [costs.draft_token_s(request.num_tokens) for request, _ in limits]
        queries = [
            DraftQuery(request, most + request.num_pending_tokens, min_survival(step, seconds))
            for (request, most), seconds in zip(limits, token_s, strict=True)
        ]
        self.min_draft_chance = min(query.min_survival for query in queries)
        proposals = self._speculator.propose(queries, PROPOSING_SHARE * step.seconds)
        rows = [RowDraft(proposal.survival, seconds) for proposal, seconds in zip(proposals, token_s, strict=True)]
        lengths = choose_lengths(rows, step, room)
        verified = [proposal.first(length) for proposal, length in zip(proposals, lengths, strict=True)]
        asked = self._speculator.ask_models(queries, verified, token_s, step)
        found = (
            _WantedDrafts(query.request, proposal, *of_model, self._speculator.probes(query))
            for query, proposal, of_model in zip(queries, verified, asked, strict=True)
        )
        return [row for row in found if row.proposal.token_ids or row.num_asked or row.probes.token_ids]

    def _plain_step(self, counts: Mapping[RequestId, int]) -> PlainStep:
        """Return what a step of `counts` tokens yields and costs without drafts. The cost of the first draft includes
        the time for which the device waits because the next step is not planned ahead."""
        costs, chosen = self._memory.costs, [r for r in self._queue.running if r.request_id in counts]
        shape = planned_shape(chosen, counts)
        num_sampled = sum(r.num_scheduled_tokens + counts[r.request_id] == r.num_expected_tokens for r in chosen)
        second_s = costs.step.second_token_s if shape.tokens == 1 else 0.0
        return PlainStep(num_sampled, costs.step.seconds(shape), second_s + costs.lead.seconds)

    def _max_drafts(self, request: Request, budget: TokenBudget) -> int:
        """Return the most draft tokens of a request. The last token of an answer needs no draft: verifying the one
        before it yields it."""
        if request.request_id not in budget.counts or not is_decoding(request) or request.message.beams is not None:
            return 0
        left = request.message.max_tokens - request.num_generated_tokens - request.num_pending_tokens
        return min(request.message.speculation.max_draft, budget.num_draft_tokens, left - 1)

    # Running requests.
    def _schedule_running(self, request: Request, state: _PlanState) -> None:
        """Give tokens to a running request, unless no slot is left or its rate throttles it."""
        if (blocker := self._quotas.rate_blocker(request)) is not None:
            self._queue.mark_throttled(request, blocker[0])
            state.wake_s = blocker[1] if state.wake_s is None else min(state.wake_s, blocker[1])
        elif state.budget.may_take(request) and self._make_room(request, state):
            state.budget.take(request, LONG_PROMPT_SHARE if self._queue.lanes.has_ready else 1)

    def _make_room(self, request: Request, state: _PlanState) -> bool:
        """Take pages for all tokens of a running request, preempting others if need be.

        Returns:
            False if no pages can be freed before a step in flight is done, or the request itself was preempted.
        """
        if not self._allocator.lacks_pages(request):
            return True
        while not self._allocator.extend(request, self._growth_level(), spared=Spared(self._adapters_ahead())):
            victim = self._queue.select_victim()
            if victim is None:
                return False
            self._preempt(victim, state)
            if victim is request:
                return False
        return True

    def _growth_level(self) -> EvictionLevel:
        """Return the eviction level for running requests. A starved request keeps its adapter while others could be
        preempted."""
        return EvictionLevel.ADMIT if self._queue.starved and len(self._queue.running) > 1 else EvictionLevel.RUNNING

    def _adapters_ahead(self) -> set[AdapterKey]:
        """Return the adapters of the waiting requests that count as ahead, which are the preempted and the starved."""
        ahead = (*self._queue.preempted.values(), *self._queue.starved.values())
        return {key for request in ahead for key in request.term_keys} | self._assembled()

    def _assembled(self) -> Set[AdapterKey]:
        """Return the terms of the sum that is being loaded, until all are loaded. They stay in the pool so long:
        otherwise two waiting sums could evict each other's terms for ever."""
        request = self._assembling
        if request is None or request.request_id not in self._queue.waiting:
            return frozenset()
        is_coming = self._adapter_manager.next_to_move(request.term_keys)[0] in (
            AdapterState.LOADING,
            AdapterState.COPYING,
        )
        return frozenset(request.term_keys) if is_coming else frozenset()

    def preempt(self, request: Request) -> None:
        """Preempt a running request: free everything but its tokens."""
        self._allocator.preempt(request)
        self._set_status(request, RequestStatus.PREEMPTED)

    def _preempt(self, request: Request, state: _PlanState) -> None:
        self.preempt(request)
        state.budget.give_back(request)
        # A request admitted now would take the pages just freed.
        state.has_preempted = state.is_over = True

    def _distribute_rest(self, state: _PlanState) -> None:
        """Give the rest of the chunk to the prompts that were cut to leave tokens to others."""
        for request in self._queue.running:
            if request.request_id in state.budget.cut and state.budget.counts.get(request.request_id):
                state.budget.take_more(request)

    # Waiting requests.
    def _schedule_waiting(self, request: Request, state: _PlanState) -> None:
        """Admit a waiting request, or prefetch its adapter."""
        was_blocked = state.blocked
        is_cold = not self._adapter_manager.are_resident(request.term_keys)
        state.num_behind += was_blocked
        if state.num_behind >= MAX_LOOK_AHEAD or (was_blocked and not is_cold and not self._queue.lanes.has_cold):
            state.is_over = True
        if state.is_over or self._is_blocked(request, state):
            return
        if is_cold:
            if not self._prefetch(request, state):
                self._block(request, state)
        else:
            self._admit_or_block(request, state)
        if request.status is not RequestStatus.RUNNING:
            state.ahead.update(request.term_keys)
            self._count_passed(state)
        if state.blocked and len(state.ahead) >= self._options.max_num_seqs:
            state.is_over = True

    def _is_blocked(self, request: Request, state: _PlanState) -> bool:
        """Return whether something other than pages, slots and its adapter prevents a request from running. Steps skip
        its lane until that changes."""
        if self._beams.must_wait(request, self._quotas.allow_together):
            self._beams.hold_back(request)
            has_begun = self._beams.is_of_running_group(request)
            self._queue.lanes.block(request, Blocker.of_group(request) if has_begun else BEAMS)
        elif (found := self._quotas.blocker(request)) is not None:
            self._throttle(request, *found, state)
        elif self._waits_for_parent(request):
            assert request.message.fork_of is not None
            self._queue.lanes.block(request, Blocker.of_prompt(request.message.fork_of))
        else:
            return False
        self._count_passed(state)
        return True

    def _count_passed(self, state: _PlanState) -> None:
        """Count a request that was not admitted; after too many, end the pass until the next step."""
        state.num_passed += 1
        if state.num_passed >= MAX_PASSED and not state.blocked:
            state.is_over, state.wake_s = True, 0.0

    def _admit_or_block(self, request: Request, state: _PlanState) -> None:
        if state.blocked:
            return
        if request.snapshot is not None and self._memory.snapshots.is_arriving(request.snapshot):
            self._queue.lanes.block(request, Blocker.of_snapshot(request.snapshot))
        elif state.budget.lacks_rows(request):
            self._queue.lanes.block(request, PROMPT_ROWS)
        elif not state.budget.may_take(request):
            state.blocked = True
        elif self._admit(request, state):
            state.budget.take(request)
        else:
            self._block(request, state)

    def _block(self, request: Request, state: _PlanState) -> None:
        """Note the first request that lacks pages: requests further back may not take the pages that it waits for."""
        if not state.blocked:
            state.blocked, state.keep_free = True, self._pages_to_start(request) + self._pages_to_come(request)

    def _throttle(self, request: Request, limit: Blocker, until_s: float | None, state: _PlanState) -> None:
        """Note that a limit prevents a waiting request from running, now or ever."""
        self._queue.mark_throttled(request, limit)
        if (why := self._quotas.why_unfit(request)) is not None:
            state.unfit.append((request, why))
        else:
            self._queue.lanes.block(request, limit, until_s)

    def _admit(self, request: Request, state: _PlanState) -> bool:
        """Take pages for all of the request's tokens, preempting others if it is starved or the policy allows it."""
        while not self._try_to_admit(request, state):
            victim = self._select_victim_for(request)
            if victim is None:
                self._reload_own_adapter(request, state)
                return False
            self._preempt(victim, state)
        self._set_status(request, RequestStatus.RUNNING)
        return True

    def _try_to_admit(self, request: Request, state: _PlanState) -> bool:
        growth = self._growth_with(request) if self._queue.running else 0
        keep_free = self._pages_to_grow()
        level, spared = self._admission_level(), Spared(state.ahead, self._assembled())
        return self._allocator.allocate(request, self._parent(request), level, keep_free, spared, growth)

    def _growth_with(self, request: Request) -> int:
        """Return the pages that the batch is predicted to need at its peak, with this request in it."""
        batch = (
            (r.num_tokens, self._predictor.planned_remaining(r), r.most_tokens) for r in (*self._queue.running, request)
        )
        return peak_growth(batch, self._kv.page_size)

    def _admission_level(self) -> EvictionLevel:
        return EvictionLevel.ADMIT if any(map(num_uncomputed_tokens, self._queue.running)) else EvictionLevel.RUNNING

    def _select_victim_for(self, request: Request) -> Request | None:
        """Return the request to preempt so that another one, or its adapter, has room; None if there is none.

        If no running request has anything to compute, any of them may be preempted. These are beams that wait for one
        another: they need no pages until all are ready, but a request waiting ahead of one may leave it too few pages.
        """
        victim = self._queue.select_victim_below(request)
        if victim is None and not any(map(num_uncomputed_tokens, self._queue.running)):
            victim = self._queue.select_victim()
        return victim

    def _pages_to_grow(self) -> int:
        """Return the pages to leave to running requests: one for each that computes."""
        return sum(num_uncomputed_tokens(request) > 0 for request in self._queue.running)

    def _pages_to_start(self, request: Request) -> int:
        """Return the pages of all tokens of the request that are held at a time."""
        return self._kv.pages_for(min(request.num_tokens, request.most_tokens))

    def _pages_to_come(self, request: Request) -> int:
        """Return the number of pages that the request's adapter still needs."""
        return sum(self._adapters.pages_for(term.layout) for term in request.terms if term.key not in self._adapters)

    def _prefetch(self, request: Request, state: _PlanState) -> bool:
        """Move the request's adapter towards the pool; return False if there is no room for it. Behind a blocked
        request it only takes pages that no request needs."""
        self._set_status(request, RequestStatus.WAITING_FOR_ADAPTER)
        level = EvictionLevel.PREFETCH if state.blocked else self._admission_level()
        while not self._load_adapter(request, level, state):
            victim = self._select_victim_for(request) if not state.blocked else None
            if victim is None:
                self._begin_anew(request, state)
                return False
            self._preempt(victim, state)
        return True

    def _begin_anew(self, request: Request, state: _PlanState) -> None:
        """Evict the terms of a sum that are in the pool, if nothing else can be moved: they may be placed so that no
        run is long enough for the next term. All fit into an empty pool."""
        is_alone = not (state.blocked or self._queue.running or self._adapter_manager.num_copying)
        if is_alone and len(request.terms) > 1:
            for key in filter(self._adapters.is_evictable, request.term_keys):
                self._adapter_manager.evict(key)

    def _load_adapter(self, request: Request, level: EvictionLevel, state: _PlanState) -> bool:
        """Load the missing adapters; return False if one has no room. Those in the pool already are not evicted for
        it."""
        pages = self._pages_to_grow() + (state.keep_free if state.blocked else self._pages_to_start(request))
        spared = Spared(state.ahead, self._assembled() | frozenset(request.term_keys))
        are_loading = [self._memory.load_adapter(term.key, term.layout, pages, level, spared) for term in request.terms]
        self._allocator.record_moves()
        if len(request.terms) > 1 and not self._assembled():
            self._assembling = request
        return all(are_loading)

    def _reload_own_adapter(self, request: Request, state: _PlanState) -> None:
        """Evict and reload the request's own adapter if nothing else is left to free. Placed in pieces, it may hold
        more pages than its size; in one run it may fit."""
        is_alone = not (self._queue.running or self._adapter_manager.num_copying)
        if request.terms and is_alone and all(map(self._adapters.is_evictable, request.term_keys)):
            for key in request.term_keys:
                self._adapter_manager.evict(key)
            self._prefetch(request, state)

    def _parent(self, request: Request) -> Request | None:
        """Return the first choice of the same prompt on the same adapter, for a further choice that has computed
        nothing yet."""
        first = request.message.fork_of
        parent = self._queue.requests.get(first) if first is not None else None
        if parent is None or parent.num_preemptions or request.num_preemptions:
            return None
        return parent if parent.adapter_key == request.adapter_key else None

    def _waits_for_parent(self, request: Request) -> bool:
        """Return whether the first choice has not yet computed the prompt that further choices share."""
        parent = self._parent(request)
        if parent is None:
            return False
        return parent.status is not RequestStatus.RUNNING or parent.num_computed_tokens < request.num_prompt_tokens - 1
