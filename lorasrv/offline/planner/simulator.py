"""Replay a trace through the real scheduler, page pool and host cache on a simulated clock. Torch-free.

Each round does what a server does between two steps, in the same order: take loader reports, `Scheduler.schedule`,
issue orders, compute the step, `update_from_output`. Only the work is simulated: a step takes what `StepCosts` predicts
for its shape, a load takes what its bytes take, and an answer has as many tokens as recorded, drafted as recorded.
Queueing, chunking, eviction and the choice of drafts are the scheduler's own.

Prompts have the recorded lengths and share tokens where the recorded ones did. A trace tells how many tokens of a
prompt were cached, but not which. Here the requests of one adapter begin with the same tokens, as many as were cached;
the first of each adapter begins with as many as any other shares, since it is their origin. All other tokens are a
request's own. Whether a shared beginning is still cached is decided by the real prefix cache.
"""

import hashlib
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from adapter_store.host_cache import HostCache
from adapter_store.spec import AdapterKey
from lorasrv.config import MemoryOptions, SchedulerOptions
from lorasrv.engine.backpressure import num_queued
from lorasrv.engine.input_processor import InputProcessor
from lorasrv.errors import InvalidRequest
from lorasrv.memory.cost_model import StepShape
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.metrics.trace import TraceRequest
from lorasrv.offline.planner.machine_profile import MachineProfile
from lorasrv.offline.planner.sim_drafter import RecordedDrafts
from lorasrv.offline.planner.sim_loader import LoadPart, SimLoader
from lorasrv.outputs import AdapterTier, EngineOutput, RequestId, RequestTiming
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.scheduler_output import SchedulerOutput, SwapIn, SwapOut, path_along
from lorasrv.speculation.speculator import Speculator
from sgmv_kernels.formats.adapter_panels import AdapterLayout

EOS, OTHER_TOKEN, SHARED_TOKEN, WRONG_TOKEN = 0, 1, 2, 3
FIRST_OWN_TOKEN = 4
VOCABULARY = 1 << 62


class SimulatedPrompts:
    """Generate token ids by a request's number in the trace."""

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        self._trace = trace
        self._shared = [request.cached_tokens for request in trace]
        most: dict[str | None, int] = {}
        first: dict[str | None, int] = {}
        for number, request in enumerate(trace):
            most[request.adapter] = max(most.get(request.adapter, 0), request.cached_tokens)
            first.setdefault(request.adapter, number)
        for adapter, number in first.items():
            self._shared[number] = most[adapter]

    def of(self, number: int) -> tuple[int, ...]:
        """Return the tokens of a request. A page's hash identifies its request from the first own token on."""
        length = self._trace[number].prompt_tokens
        shared = min(self._shared[number], length)
        if shared == length:
            return (SHARED_TOKEN,) * length
        return (SHARED_TOKEN,) * shared + (FIRST_OWN_TOKEN + number,) + (OTHER_TOKEN,) * (length - shared - 1)


Progress = Callable[[float], None]
TELL_EVERY = 512
SHORTEST_WAIT_S = 1e-3
"""Minimum advance of the clock; without it the simulation could wait without end."""


@dataclass(frozen=True)
class SimServer:
    """Describe the server on which a trace is replayed."""

    geometry: PoolLayout
    memory: MemoryOptions
    scheduler: SchedulerOptions
    costs: MachineProfile
    # Adapter name -> its layout in the pool.
    layout_of: Callable[[str], AdapterLayout]
    max_model_len: int = 1 << 30
    # Whether answers are drafted as recorded.
    has_drafts: bool = True


@dataclass(slots=True)
class SimulatedRequest:
    """Record the result of a request; times are on the trace's clock."""

    request: TraceRequest
    first_token_s: float | None = None
    last_token_s: float = 0.0
    end_s: float | None = None
    tokens: int = 0
    timing: RequestTiming = field(default_factory=RequestTiming)
    # Why the request was not served; None: it was.
    refused: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time per token after the first."""
        if self.first_token_s is None or self.tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.tokens - 1)


@dataclass(frozen=True)
class SimulationResult:
    """Hold the counts of a replay."""

    outcomes: Sequence[SimulatedRequest]
    # Gaps between the tokens of each answer, for all answers.
    gaps_s: Sequence[float]
    end_s: float
    busy_s: float
    steps: int
    preemptions: int
    loads_from_disk: int
    loads_from_host: int
    evictions: int
    pool_used: float
    """Mean share of the pool held by requests and adapters while steps were computed."""


class Simulator:
    """Replay one trace; call `run` once."""

    def __init__(self, server: SimServer, trace: Sequence[TraceRequest]) -> None:
        self._server = server
        self._costs = server.costs
        self.now = 0.0
        self._trace = sorted(trace, key=lambda request: request.arrival_s)
        self._names = {_key(r.adapter): r.adapter for r in self._trace if r.adapter is not None}
        self._layouts = {key: server.layout_of(name) for key, name in self._names.items()}
        self.cache: HostCache[int] = HostCache(server.memory.host_cache_bytes)
        self.memory = MemoryManager.make(
            server.geometry,
            server.memory,
            server.scheduler.preemption_mode,
            self.is_on_host,
            lambda: self.now,
            self._costs.model(_typical_bytes(self._layouts)),
        )
        self._step_costs = self.memory.costs.step
        drafter = RecordedDrafts(lambda rid: self._live[rid].request, OTHER_TOKEN, WRONG_TOKEN)
        drafters = [drafter] if server.has_drafts and any(request.accepted_tokens for request in trace) else []
        speculator = Speculator(drafters, VOCABULARY, lambda: self.now)
        self.scheduler = Scheduler(server.scheduler, self.memory, frozenset({EOS}), self.is_on_host, speculator)
        self._loader = SimLoader(self._costs, self.cache, lambda key: self._layouts[key].nbytes)
        self._inputs = InputProcessor(self.memory, self, server.max_model_len, VOCABULARY)
        self._prompts = SimulatedPrompts(self._trace)
        self._outcomes = [SimulatedRequest(request) for request in self._trace]
        self._live: dict[RequestId, SimulatedRequest] = {}
        self._inbox: list[EngineCoreRequest] = []
        self._next = 0
        self._wake_s = math.inf
        self._gaps = array("d")
        self._steps = 0
        self._busy_s = 0.0
        self._used_page_s = 0.0

    # Facts about adapters for `InputProcessor`.

    @property
    def max_host_bytes(self) -> int:
        return self.cache.max_bytes

    def hold(self, key: AdapterKey, /) -> None:
        """Do nothing: no adapter is deleted in a replay."""

    def layout(self, key: AdapterKey, /) -> AdapterLayout:
        return self._layouts[key]

    def knows_layout(self, _: AdapterKey) -> bool:
        return True

    def num_draft_heads(self, _: AdapterKey, /) -> int:
        return 0

    def is_on_host(self, key: AdapterKey) -> bool:
        return key in self.cache

    def run(self, progress: Progress = lambda _: None) -> SimulationResult:
        """Simulate until the last request has ended."""
        told = 0
        while self._is_busy:
            if not self._step() and self._is_busy:
                self._wait()
            if self._next - told >= TELL_EVERY:
                told = self._next
                progress(told / len(self._trace))
        self.memory.check_integrity()
        self.scheduler.check_integrity()
        return self._replayed()

    @property
    def _is_busy(self) -> bool:
        return self._next < len(self._trace) or bool(self._inbox) or self.scheduler.has_requests

    def _step(self) -> bool:
        """Run one round of the engine; return whether anything was computed or given up."""
        for message in self._inbox:
            self.scheduler.add(message)
        self._inbox.clear()
        self._take_reports()
        step = self.scheduler.schedule()
        self._wake_s = math.inf if step.wake_s is None else step.wake_s
        self._give_orders(step)
        if step.scheduled:
            self._compute(step)
        elif step.num_preempted:
            self._pass(self._costs.between_steps_s + SHORTEST_WAIT_S)
        self._hear(self.scheduler.update_from_output(step, self._sampled(step)))
        return bool(step.scheduled) or step.num_preempted > 0

    # Time.

    def _wait(self) -> None:
        """Move the clock to the next event when nothing can be computed."""
        if not self._inbox and not self._loader.has_reports:
            wake_s = max(self._wake_s, self.now + SHORTEST_WAIT_S)
            self._move_to(min(self._arrival_s(), self._loader.next_event_s(), wake_s))

    def _compute(self, step: SchedulerOutput) -> None:
        begun = self.now
        swapped = sum(len(op.pages) for op in step.page_ops if isinstance(op, SwapOut | SwapIn))
        seconds = self._step_costs.seconds(StepShape.of(step)) + self._costs.between_steps_s
        self._pass(seconds + swapped * self._server.geometry.block_bytes * self._costs.swap_byte_s)
        self._steps += 1
        self._busy_s += self.now - begun
        held = self.memory.layout.num_pages - self.memory.num_free - self.memory.num_unused_prefix_pages
        self._used_page_s += held * (self.now - begun)

    def _pass(self, work_s: float) -> None:
        """Pass the time of `work_s` of computing, and of the stalls by loads that end meanwhile."""
        ends_s = self.now + work_s
        self._loader.take_stall_s()
        while self.now < ends_s:
            self._move_to(min(ends_s, self._arrival_s(), self._loader.next_event_s()))
            ends_s += self._loader.take_stall_s()

    def _move_to(self, time_s: float) -> None:
        assert time_s < math.inf, "requests wait, but there is no event"
        self.now = max(self.now, time_s)
        self._loader.advance(self.now)
        while self._arrival_s() <= self.now:
            self._arrives(self._outcomes[self._next], self._next)
            self._next += 1

    def _arrival_s(self) -> float:
        if self._next == len(self._trace):
            return math.inf
        return self._trace[self._next].arrival_s + self._costs.edge_s

    # Requests.

    def _arrives(self, outcome: SimulatedRequest, number: int) -> None:
        """Admit a request, possibly during a step, and start reading its adapter's file."""
        request, rid = outcome.request, RequestId(f"r{number}")
        outcome.refused = self._why_not(request)
        message = None if outcome.refused else self._message(rid, request, number)
        if message is None:
            outcome.refused, outcome.end_s = outcome.refused or "does not fit", self.now
            return
        self._live[rid] = outcome
        self._inbox.append(message)
        if message.adapter_key is not None and message.found is AdapterTier.DISK:
            self._loader.prefetch(message.adapter_key)

    def _why_not(self, request: TraceRequest) -> str | None:
        """Return the reason to refuse a request before tokenization, if there is one."""
        options, scheduler = self._server.scheduler, self.scheduler
        sent = len(self._inbox) + 1
        if num_queued(sent, scheduler.num_waiting, scheduler.num_running, options.max_num_seqs) > (
            options.max_num_queued_seqs
        ):
            return "overloaded"
        if request.prompt_tokens + request.output_tokens > self._server.max_model_len:
            return "too long"
        return None

    def _message(self, rid: RequestId, request: TraceRequest, number: int) -> EngineCoreRequest | None:
        """Admit a request; return None if it can never fit."""
        # Where the context is shorter than the recorded server's, an answer gets only the rest of the context.
        most = max(request.output_tokens, request.max_tokens or 0)
        most = min(most, self._server.max_model_len - request.prompt_tokens)
        try:
            return self._inputs.process(
                rid,
                self._prompts.of(number),
                SamplingParams(max_tokens=most, temperature=0.0),
                None if request.adapter is None else _key(request.adapter),
                principal=request.key or "anonymous",
                adapter_id=request.adapter or "",
                priority=request.priority,
                timeout_s=request.timeout_s,
            )
        except InvalidRequest:
            return None

    def _sampled(self, step: SchedulerOutput) -> dict[RequestId, tuple[int, ...]]:
        """Sample the end token as an answer's last token, unless its length ends it, and others as far as drafts are
        right."""
        tokens = {}
        for share in step.scheduled:
            if share.samples:
                left = self._live[share.request_id].request.output_tokens - share.num_generated
                right = (OTHER_TOKEN,) * max(0, left - 1) + (EOS,)
                num_right = len(path_along(share.draft_token_ids, share.draft_parents, right))
                tokens[share.request_id] = right[: num_right + 1]
        return tokens

    def _hear(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            outcome = self._live[output.request_id]
            for _ in output.new_token_ids:
                self._has_token(outcome)
            if output.finish_reason is not None:
                outcome.timing, outcome.end_s = output.timing, self.now
                if not outcome.tokens or output.refusal is not None:
                    outcome.refused = str(output.refusal or output.finish_reason)
                del self._live[output.request_id]

    def _has_token(self, outcome: SimulatedRequest) -> None:
        if outcome.first_token_s is None:
            outcome.first_token_s = self.now
        else:
            self._gaps.append(self.now - outcome.last_token_s)
        outcome.last_token_s = self.now
        outcome.tokens += 1

    # Adapters.

    def _take_reports(self) -> None:
        for key, part in self._loader.poll():
            if part is LoadPart.LOADED:
                self.memory.adapter_manager.on_loaded(key)
            else:
                self.scheduler.on_adapter_copied(key)

    def _give_orders(self, step: SchedulerOutput) -> None:
        for key in step.orders.cancels:
            self._loader.cancel(key)
        for key in step.orders.loads:
            self._loader.load(key)
        for key, _ in step.orders.copies:
            self._loader.copy(key)

    def _replayed(self) -> SimulationResult:
        return SimulationResult(
            outcomes=self._outcomes,
            gaps_s=self._gaps,
            end_s=max((o.end_s or 0.0 for o in self._outcomes), default=0.0),
            busy_s=self._busy_s,
            steps=self._steps,
            preemptions=self.scheduler.counters.preemptions,
            loads_from_disk=self._loader.num_from_disk,
            loads_from_host=self._loader.num_from_host,
            evictions=self.memory.adapter_manager.num_evictions,
            pool_used=self._used_page_s / max(1e-12, self._busy_s * self.memory.layout.num_pages),
        )


def replay(server: SimServer, trace: Sequence[TraceRequest], progress: Progress = lambda _: None) -> SimulationResult:
    """Simulate this traffic on a server that starts with empty memory."""
    return Simulator(server, trace).run(progress)


def resized(server: SimServer, pool_bytes: int) -> SimServer:
    """Return the server with another pool size."""
    pages = max(1, pool_bytes // server.geometry.block_bytes)
    return replace(server, geometry=replace(server.geometry, num_pages=pages))


def _key(adapter: str) -> AdapterKey:
    """Return a stand-in for a name's content: in a trace a name means one content only."""
    return AdapterKey(hashlib.sha256(adapter.encode("utf-8", "surrogatepass")).hexdigest())


def _typical_bytes(layouts: Mapping[AdapterKey, AdapterLayout]) -> int:
    return sum(layout.nbytes for layout in layouts.values()) // max(1, len(layouts))
