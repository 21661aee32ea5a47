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
    held: set[tuple[str, str]] = field(default_factory=set)
    never: list[tuple[Request, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Tokens for each request. `keep_free` pages are what the first without room waits for. `wake_s`: when somebody
    can go on whom a rate holds up now."""

    budget: TokenBudget
    keep_free: int
    has_preempted: bool
    wake_s: float | None
    never: tuple[tuple[Request, str], ...]


class StepPlanner:
    """Mutated by the engine thread only.

    Args:
        set_status: moves a request on in its life, and tells everybody.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        books: MemoryManager,
        lineup: RequestQueue,
        memory: RequestAllocator,
        quotas: Quotas,
        predictor: LengthPredictor,
        beams: BeamGroups,
        drafter: CheckedDrafter,
        set_status: Callable[[Request, RequestStatus], None],
    ) -> None:
        self._options = options
        self._books = books
        self._kv, self._adapters = books.kv, books.adapters
        self._adapter_manager = books.adapter_manager
        self._queue = lineup
        self._memory = memory
        self._quotas = quotas
        self._predictor = predictor
        self._beams = beams
        self._drafter = drafter
        self._set_status = set_status
        self._target_s = None if options.target_itl_ms is None else options.target_itl_ms / 1e3

    def plan(self) -> StepPlan:
        """Choose the step's tokens and take the pages they need."""
        this = _PlanState(self._budget())
        unseen = {request.request_id for request in self._queue.running}
        for request in self._queue.order():
            unseen.discard(request.request_id)
            if request.status is RequestStatus.RUNNING:
                self._schedule_running(request, this)
            else:
                self._schedule_waiting(request, this)
            if this.is_over:
                break
        for request in self._queue.running_in_order() if unseen else ():
            # One of them may have had to give way to another meanwhile.
            if request.request_id in unseen and request.status is RequestStatus.RUNNING:
                self._schedule_running(request, this)
        self._share_the_rest(this)
        for request in list(self._queue.running):
            if request.request_id in this.budget.counts:
                self._queue.mark_scheduled(request)
        return StepPlan(this.budget, this.keep_free, this.has_preempted, this.wake_s, tuple(this.never))

    def _budget(self) -> TokenBudget:
        options, running = self._options, self._queue.running
        others_first = bool(self._queue.starved) or (self._queue.policy.may_displace and bool(self._queue.waiting))
        return TokenBudget.of(
            options.max_num_batched_tokens,
            options.max_num_seqs,
            running,
            self._target_s,
            self._books.costs.step,
            seats_ahead=int(others_first),
        )

    def plan_drafts(self, planned: StepPlan) -> dict[RequestId, tuple[int, ...]]:
        """Have the answers of a planned step guessed ahead, with the tokens, the logit rows and the free pages that it
        leaves over. Nothing else is evicted, preempted or put off for a guess."""
        room = planned.budget.num_draft_tokens
        if not self._drafter.is_active or planned.has_preempted or room <= 0:
            return {}
        asks = [DraftAsk(r, most) for r in self._queue.running if (most := self._most_drafts(r, planned.budget)) > 0]
        keep_free = planned.keep_free + self._pages_to_grow()
        drafts = {}
        for ask, tokens in zip(asks, self._drafter.propose(asks), strict=True):
            count = self._memory.extend_for_drafts(ask.request, min(len(tokens), room), keep_free) if tokens else 0
            if count > 0:
                drafts[ask.request.request_id] = tokens[:count]
                room -= count
        return drafts

    def _most_drafts(self, request: Request, budget: TokenBudget) -> int:
        """The last token of an answer needs no guess: it comes with the one before it."""
        if request.request_id not in budget.counts or not is_decoding(request) or request.message.beams is not None:
            return 0
        left = request.message.max_tokens - request.num_generated_tokens
        return min(MAX_DRAFT_TOKENS, budget.num_draft_tokens, left - 1)

    # Those that run.

    def _schedule_running(self, request: Request, this: _PlanState) -> None:
        """Tokens for one that runs, unless it has no seat, or owes tokens to its rate."""
        if self._owes_tokens(request, this):
            self._queue.mark_throttled(request)
        elif this.budget.may_take(request) and self._make_room(request, this):
            this.budget.take(request, self._share_of_prompt(request, this))

    def _share_of_prompt(self, request: Request, this: _PlanState) -> int:
        if num_unscheduled_tokens(request) <= this.budget.chunk or not self._somebody_could_start():
            return 1
        return LONG_PROMPT_SHARE

    def _somebody_could_start(self) -> bool:
        return any(
            r.adapter_key is None or self._adapter_manager.is_resident(r.adapter_key)
            for r in self._queue.waiting.values()
        )

    def _make_room(self, request: Request, this: _PlanState) -> bool:
        """Pages for all tokens of a running request; False if there are none before a step that is under way is over,
        or the request itself had to give way."""
        while not self._memory.extend(request, self._need_to_grow(), ahead=self._adapters_ahead()):
            victim = self._queue.select_victim()
            if victim is None:
                return False
            self._give_way(victim, this)
            if victim is request:
                return False
        return True

    def _need_to_grow(self) -> EvictionLevel:
        """One that is due does not lose its adapter to those that could give way to it."""
        return EvictionLevel.ADMIT if self._queue.starved and len(self._queue.running) > 1 else EvictionLevel.RUNNING

    def _adapters_ahead(self) -> set[AdapterKey]:
        """Of those that wait, but not behind those that run: they have begun, or are due."""
        ahead = (*self._queue.preempted.values(), *self._queue.starved.values())
        return {r.adapter_key for r in ahead if r.adapter_key is not None}

    def preempt(self, request: Request) -> None:
        """Take back everything but the tokens."""
        self._memory.preempt(request)
        self._set_status(request, RequestStatus.PREEMPTED)

    def _give_way(self, request: Request, this: _PlanState) -> None:
        self.preempt(request)
        this.budget.give_back(request)
        # Whoever started now would take the pages that were just given up.
        this.has_preempted = this.is_over = True

    def _share_the_rest(self, this: _PlanState) -> None:
        """What nobody who could start has taken goes to the prompts that left it."""
        for request in self._queue.running:
            if this.budget.chunk > 0 and this.budget.counts.get(request.request_id):
                this.budget.take_more(request)

    # Those that wait.

    def _schedule_waiting(self, request: Request, this: _PlanState) -> None:
        """Have a waiting request start, or come nearer to it."""
        key = request.adapter_key
        this.num_behind += this.blocked
        if this.num_behind >= MAX_LOOK_AHEAD:
            this.is_over = True
        if this.is_over or self._beams.is_held(request) or not self._is_within_limits(request, this):
            return
        if key is not None and not self._adapter_manager.is_resident(key):
            if not self._bring_near(request, key, this):
                self._block(request, this)
        elif not self._waits_for_parent(request):
            self._start_or_block(request, this)
        if request.status is not RequestStatus.RUNNING and key is not None:
            this.ahead.add(key)
        if this.blocked and len(this.ahead) >= self._options.max_num_seqs:
            this.is_over = True

    def _start_or_block(self, request: Request, this: _PlanState) -> None:
        if this.blocked or this.budget.lacks_rows(request):
            return
        if not this.budget.may_take(request):
            this.blocked = True
        elif self._start(request, this):
            this.budget.take(request)
        else:
            self._block(request, this)

    def _block(self, request: Request, this: _PlanState) -> None:
        """The first that has no room: nobody further back takes the pages that it waits for."""
        if not this.blocked:
            this.blocked, this.keep_free = True, self._pages_to_start(request) + self._pages_to_come(request)

    def _is_within_limits(self, request: Request, this: _PlanState) -> bool:
        account = (request.message.principal, request.message.adapter_id)
        if account in this.held:
            return False
        if self._quotas.may_start(request) and not self._owes_tokens(request, this):
            return True
        self._queue.mark_throttled(request)
        if (why := self._quotas.why_never(request)) is not None:
            this.never.append((request, why))
        else:
            this.held.add(account)
        return False

    def _owes_tokens(self, request: Request, this: _PlanState) -> bool:
        until_s = self._quotas.owes_until_s(request)
        if until_s is None:
            return False
        this.wake_s = until_s if this.wake_s is None else min(this.wake_s, until_s)
        return True

    def _start(self, request: Request, this: _PlanState) -> bool:
        """Take pages for all of the request's tokens; others give way if it is due, or the policy says so."""
        while not self._try_to_start(request, this):
            victim = self._queue.select_victim_below(request) or self._worst_that_rests()
            if victim is None:
                self._start_over(request, this)
                return False
            self._give_way(victim, this)
        self._set_status(request, RequestStatus.RUNNING)
        return True

    def _try_to_start(self, request: Request, this: _PlanState) -> bool:
        growth = self._growth_with(request) if self._queue.running else 0
        keep_free = self._pages_to_grow()
        return self._memory.allocate(request, self._parent(request), self._need(), keep_free, this.ahead, growth)

    def _growth_with(self, request: Request) -> int:
        """Pages that the batch is predicted to want at its worst moment, with this request in it."""
        everybody = ((r.num_tokens, self._predictor.planned_remaining(r)) for r in (*self._queue.running, request))
        return peak_growth(everybody, self._kv.page_size)

    def _need(self) -> EvictionLevel:
        return EvictionLevel.ADMIT if any(map(num_uncomputed_tokens, self._queue.running)) else EvictionLevel.RUNNING

    def _worst_that_rests(self) -> Request | None:
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

    def _bring_near(self, request: Request, key: AdapterKey, this: _PlanState) -> bool:
        """Have the request's adapter come nearer; False if there is no room for it. Behind a blocked request, which
        waits for some pages, it only takes what nobody needs.
        """
        layout = request.message.layout
        assert layout is not None, "an adapter's layout is known when its request is admitted"
        self._set_status(request, RequestStatus.WAITING_FOR_ADAPTER)
        need = EvictionLevel.PREFETCH if this.blocked else self._need()
        while not self._bring(key, request, need, this):
            victim = self._queue.select_victim_below(request) if not this.blocked else None
            if victim is None:
                return False
            self._give_way(victim, this)
        return True

    def _bring(self, key: AdapterKey, request: Request, need: EvictionLevel, this: _PlanState) -> bool:
        layout = request.message.layout
        assert layout is not None, "an adapter's layout is known when its request is admitted"
        pages = self._pages_to_grow() + (this.keep_free if this.blocked else self._pages_to_start(request))
        came = self._books.load_adapter(key, layout, pages, need, this.ahead.__contains__)
        self._memory.note_moves()
        return came

    def _start_over(self, request: Request, this: _PlanState) -> None:
        """There is no room. If nobody runs and nobody comes, only the request's own adapter is left: placed in pieces
        it may hold more pages than its size, so it goes, and comes back in one run."""
        key = request.adapter_key
        if key is not None and not self._queue.running and not self._adapter_manager.num_copying:
            self._adapter_manager.evict(key)
            self._bring_near(request, key, this)

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
