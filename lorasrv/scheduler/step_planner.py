"""The next step: who gets how many tokens, and the pages for them.

There is no prefill and no decode phase: `num_computed_tokens` chases `num_tokens` under a budget (`TokenBudget`), so a
long prompt is computed in chunks beside the single tokens of running requests (the insight of vLLM's v1 scheduler).

Requests are gone through in their order (`RequestQueue`), those that run and those that wait alike. One whose
adapter is not in the pool is `WAITING_FOR_ADAPTER`: it comes nearer by the work of others (`AdapterManager`) and
nobody else waits for it. A request starts if its adapter is there, its limits allow it, and the pages suffice for
what the batch is predicted to grow to. The first that could run but for pages holds back later ones, which would
only take more of them; their adapters are still brought near, with pages that nobody needs (prefetch). When pages
run out all the same, others give way (`Evictor`), at last a running request: it is swapped to host memory or
computed again, whichever costs less.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from adapter_store.spec import AdapterKey
from lorasrv.config import SchedulerOptions
from lorasrv.memory.eviction import EvictionLevel
from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.memory.request_allocator import RequestAllocator
from lorasrv.outputs import RequestId
from lorasrv.request import Request, RequestStatus
from lorasrv.scheduler.beam_search import BeamGroups
from lorasrv.scheduler.length_predictor import LengthPredictor, peak_growth
from lorasrv.scheduler.quotas import Quotas
from lorasrv.scheduler.request_queue import RequestQueue
from lorasrv.scheduler.token_budget import TokenBudget, is_decoding, num_uncomputed_tokens, num_unscheduled_tokens
from lorasrv.speculation.checked_drafter import MAX_DRAFT_TOKENS, CheckedDrafter
from lorasrv.speculation.drafter import DraftAsk

MAX_LOOK_AHEAD = 256
"""So many behind one that is blocked are looked at, for adapters to bring near."""
LONG_PROMPT_SHARE = 2
"""A prompt that does not end in this step leaves so many parts but one of the chunk to those that could start."""


@dataclass(slots=True)
class _PlanState:
    """One going through of the line. `blocked`: one could run but for a seat, or for `keep_free` pages. `is_over`:
    nobody further back can start or come nearer. `wake_s`: when the first has paid that owes tokens. `held`: accounts
    whose limits let nobody further back start. `never`: those whose limits forbid that they ever run.
    """

    budget: TokenBudget
    blocked: bool = False
    keep_free: int = 0
    ahead: set[AdapterKey] = field(default_factory=set)
    is_over: bool = False
    num_behind: int = 0
    has_preempted: bool = False
    wake_s: float | None = None
    throttled: set[tuple[str, str]] = field(default_factory=set)
    unfit: list[tuple[Request, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Tokens for each request. `keep_free` pages are what the first without room waits for. `wake_s`: when somebody
    can go on whom a rate holds up now."""

    budget: TokenBudget
    keep_free: int
    has_preempted: bool
    wake_s: float | None
    unfit: tuple[tuple[Request, str], ...]


class StepPlanner:
    """Mutated by the engine thread only.

    Args:
        set_status: moves a request on in its life, and tells everybody.
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
        drafter: CheckedDrafter,
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
        self._drafter = drafter
        self._set_status = set_status
        self._target_s = None if options.target_itl_ms is None else options.target_itl_ms / 1e3

    def plan(self) -> StepPlan:
        """Choose the step's tokens and take the pages they need."""
        state = _PlanState(self._budget())
        unseen = {request.request_id for request in self._queue.running}
        for request in self._queue.order():
            unseen.discard(request.request_id)
            if request.status is RequestStatus.RUNNING:
                self._schedule_running(request, state)
            else:
                self._schedule_waiting(request, state)
            if state.is_over:
                break
        for request in self._queue.running_in_order() if unseen else ():
            # One of them may have had to give way to another meanwhile.
            if request.request_id in unseen and request.status is RequestStatus.RUNNING:
                self._schedule_running(request, state)
        self._distribute_rest(state)
        for request in list(self._queue.running):
            if request.request_id in state.budget.counts:
                self._queue.mark_scheduled(request)
        return StepPlan(state.budget, state.keep_free, state.has_preempted, state.wake_s, tuple(state.unfit))

    def _budget(self) -> TokenBudget:
        options, running = self._options, self._queue.running
        has_priority_waiting = bool(self._queue.starved) or (self._queue.policy.may_displace and bool(self._queue.waiting))
        return TokenBudget.of(
            options.max_num_batched_tokens,
            options.max_num_seqs,
            running,
            self._target_s,
            self._memory.costs.step,
            slots_ahead=int(has_priority_waiting),
        )

    def plan_drafts(self, planned: StepPlan) -> dict[RequestId, tuple[int, ...]]:
        """Have the answers of a planned step guessed ahead, with the tokens, the logit rows and the free pages that it
        leaves over. Nothing else is evicted, preempted or put off for a guess."""
        room = planned.budget.num_draft_tokens
        if not self._drafter.is_active or planned.has_preempted or room <= 0:
            return {}
        asks = [DraftAsk(r, most) for r in self._queue.running if (most := self._max_drafts(r, planned.budget)) > 0]
        keep_free = planned.keep_free + self._pages_to_grow()
        drafts = {}
        for ask, tokens in zip(asks, self._drafter.propose(asks), strict=True):
            count = self._allocator.extend_for_drafts(ask.request, min(len(tokens), room), keep_free) if tokens else 0
            if count > 0:
                drafts[ask.request.request_id] = tokens[:count]
                room -= count
        return drafts

    def _max_drafts(self, request: Request, budget: TokenBudget) -> int:
        """The last token of an answer needs no guess: it comes with the one before it."""
        if request.request_id not in budget.counts or not is_decoding(request) or request.message.beams is not None:
            return 0
        left = request.message.max_tokens - request.num_generated_tokens
        return min(MAX_DRAFT_TOKENS, budget.num_draft_tokens, left - 1)

    # Those that run.

    def _schedule_running(self, request: Request, state: _PlanState) -> None:
        """Tokens for one that runs, unless it has no seat, or owes tokens to its rate."""
        if self._check_rate(request, state):
            self._queue.mark_throttled(request)
        elif state.budget.may_take(request) and self._make_room(request, state):
            state.budget.take(request, self._share_of_prompt(request, state))

    def _share_of_prompt(self, request: Request, state: _PlanState) -> int:
        if num_unscheduled_tokens(request) <= state.budget.chunk or not self._could_admit_another():
            return 1
        return LONG_PROMPT_SHARE

    def _could_admit_another(self) -> bool:
        return any(
            r.adapter_key is None or self._adapter_manager.is_resident(r.adapter_key)
            for r in self._queue.waiting.values()
        )

    def _make_room(self, request: Request, state: _PlanState) -> bool:
        """Pages for all tokens of a running request; False if there are none before a step that is under way is over,
        or the request itself had to give way."""
        while not self._allocator.extend(request, self._growth_level(), ahead=self._adapters_ahead()):
            victim = self._queue.select_victim()
            if victim is None:
                return False
            self._preempt(victim, state)
            if victim is request:
                return False
        return True

    def _growth_level(self) -> EvictionLevel:
        """One that is due does not lose its adapter to those that could give way to it."""
        return EvictionLevel.ADMIT if self._queue.starved and len(self._queue.running) > 1 else EvictionLevel.RUNNING

    def _adapters_ahead(self) -> set[AdapterKey]:
        """Of those that wait, but not behind those that run: they have begun, or are due."""
        ahead = (*self._queue.preempted.values(), *self._queue.starved.values())
        return {r.adapter_key for r in ahead if r.adapter_key is not None}

    def preempt(self, request: Request) -> None:
        """Take back everything but the tokens."""
        self._allocator.preempt(request)
        self._set_status(request, RequestStatus.PREEMPTED)

    def _preempt(self, request: Request, state: _PlanState) -> None:
        self.preempt(request)
        state.budget.give_back(request)
        # Whoever started now would take the pages that were just given up.
        state.has_preempted = state.is_over = True

    def _distribute_rest(self, state: _PlanState) -> None:
        """What nobody who could start has taken goes to the prompts that left it."""
        for request in self._queue.running:
            if state.budget.chunk > 0 and state.budget.counts.get(request.request_id):
                state.budget.take_more(request)

    # Those that wait.

    def _schedule_waiting(self, request: Request, state: _PlanState) -> None:
        """Have a waiting request start, or come nearer to it."""
        key = request.adapter_key
        state.num_behind += state.blocked
        if state.num_behind >= MAX_LOOK_AHEAD:
            state.is_over = True
        if state.is_over or self._beams.must_wait(request) or not self._check_limits(request, state):
            return
        if key is not None and not self._adapter_manager.is_resident(key):
            if not self._prefetch(request, key, state):
                self._block(request, state)
        elif not self._waits_for_parent(request):
            self._admit_or_block(request, state)
        if request.status is not RequestStatus.RUNNING and key is not None:
            state.ahead.add(key)
        if state.blocked and len(state.ahead) >= self._options.max_num_seqs:
            state.is_over = True

    def _admit_or_block(self, request: Request, state: _PlanState) -> None:
        if state.blocked or state.budget.lacks_rows(request):
            return
        if not state.budget.may_take(request):
            state.blocked = True
        elif self._admit(request, state):
            state.budget.take(request)
        else:
            self._block(request, state)

    def _block(self, request: Request, state: _PlanState) -> None:
        """The first that has no room: nobody further back takes the pages that it waits for."""
        if not state.blocked:
            state.blocked, state.keep_free = True, self._pages_to_start(request) + self._pages_to_come(request)

    def _check_limits(self, request: Request, state: _PlanState) -> bool:
        account = (request.message.principal, request.message.adapter_id)
        if account in state.throttled:
            return False
        if self._quotas.may_admit(request) and not self._check_rate(request, state):
            return True
        self._queue.mark_throttled(request)
        if (why := self._quotas.why_unfit(request)) is not None:
            state.unfit.append((request, why))
        else:
            state.throttled.add(account)
        return False

    def _check_rate(self, request: Request, state: _PlanState) -> bool:
        until_s = self._quotas.throttled_until_s(request)
        if until_s is None:
            return False
        state.wake_s = until_s if state.wake_s is None else min(state.wake_s, until_s)
        return True

    def _admit(self, request: Request, state: _PlanState) -> bool:
        """Take pages for all of the request's tokens; others give way if it is due, or the policy says so."""
        while not self._try_to_admit(request, state):
            victim = self._queue.select_victim_below(request) or self._select_idle_victim()
            if victim is None:
                self._reload_own_adapter(request, state)
                return False
            self._preempt(victim, state)
        self._set_status(request, RequestStatus.RUNNING)
        return True

    def _try_to_admit(self, request: Request, state: _PlanState) -> bool:
        growth = self._growth_with(request) if self._queue.running else 0
        keep_free = self._pages_to_grow()
        return self._allocator.allocate(request, self._parent(request), self._admission_level(), keep_free, state.ahead, growth)

    def _growth_with(self, request: Request) -> int:
        """Pages that the batch is predicted to want at its worst moment, with this request in it."""
        batch = ((r.num_tokens, self._predictor.planned_remaining(r)) for r in (*self._queue.running, request))
        return peak_growth(batch, self._kv.page_size)

    def _admission_level(self) -> EvictionLevel:
        return EvictionLevel.ADMIT if any(map(num_uncomputed_tokens, self._queue.running)) else EvictionLevel.RUNNING

    def _select_idle_victim(self) -> Request | None:
        """Who gives way if nobody gets on: beams that wait for one another run, and need no pages until all are ready.
        An adapter that lies in pieces may leave too few for all of them."""
        return None if any(map(num_uncomputed_tokens, self._queue.running)) else self._queue.select_victim()

    def _pages_to_grow(self) -> int:
        """Pages that new ones leave to those that run and get on: one each."""
        return sum(num_uncomputed_tokens(request) > 0 for request in self._queue.running)

    def _pages_to_start(self, request: Request) -> int:
        return self._kv.pages_for(request.num_tokens)

    def _pages_to_come(self, request: Request) -> int:
        """Pages of the request's adapter, if it has none yet."""
        key, layout = request.adapter_key, request.message.layout
        return 0 if key is None or layout is None or key in self._adapters else self._adapters.pages_for(layout)

    def _prefetch(self, request: Request, key: AdapterKey, state: _PlanState) -> bool:
        """Have the request's adapter come nearer; False if there is no room for it. Behind a blocked request, which
        waits for some pages, it only takes what nobody needs.
        """
        layout = request.message.layout
        assert layout is not None, "an adapter's layout is known when its request is admitted"
        self._set_status(request, RequestStatus.WAITING_FOR_ADAPTER)
        level = EvictionLevel.PREFETCH if state.blocked else self._admission_level()
        while not self._load_adapter(key, request, level, state):
            victim = self._queue.select_victim_below(request) if not state.blocked else None
            if victim is None:
                return False
            self._preempt(victim, state)
        return True

    def _load_adapter(self, key: AdapterKey, request: Request, level: EvictionLevel, state: _PlanState) -> bool:
        layout = request.message.layout
        assert layout is not None, "an adapter's layout is known when its request is admitted"
        pages = self._pages_to_grow() + (state.keep_free if state.blocked else self._pages_to_start(request))
        is_loading = self._memory.load_adapter(key, layout, pages, level, state.ahead.__contains__)
        self._allocator.record_moves()
        return is_loading

    def _reload_own_adapter(self, request: Request, state: _PlanState) -> None:
        """There is no room. If nobody runs and nobody comes, only the request's own adapter is left: placed in pieces
        it may hold more pages than its size, so it goes, and comes back in one run."""
        key = request.adapter_key
        if key is not None and not self._queue.running and not self._adapter_manager.num_copying:
            self._adapter_manager.evict(key)
            self._prefetch(request, key, state)

    def _parent(self, request: Request) -> Request | None:
        """The first choice of the same prompt on the same adapter, where a further one has begun nothing yet."""
        first = request.message.fork_of
        parent = self._queue.requests.get(first) if first is not None else None
        if parent is None or parent.num_preemptions or request.num_preemptions:
            return None
        return parent if parent.adapter_key == request.adapter_key else None

    def _waits_for_parent(self, request: Request) -> bool:
        """Whether the first choice is still to compute the prompt, which the further ones will share."""
        parent = self._parent(request)
        if parent is None:
            return False
        return parent.status is not RequestStatus.RUNNING or parent.num_computed_tokens < request.num_prompt_tokens - 1
