"""One simulated server, driven from outside: the real scheduler, page pool and host cache on a simulated clock.

Each round does what a server does between two steps, in the same order: take loader reports, `Scheduler.schedule`,
issue orders, compute the step, `update_from_output`. Only the work is simulated: a step takes what `StepCosts` predicts
for its shape, a load takes what its bytes take, and an answer has as many tokens as recorded, drafted as recorded.
Queueing, chunking, eviction and the choice of drafts are the scheduler's own.

The driver calls in the order of time: `round` at `next_s`, and `give` for a request that arrives before. Torch-free.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from adapter_store.host_cache import HostCache
from adapter_store.quota import ANONYMOUS
from adapter_store.spec import AdapterKey
from adapter_store.storage.snapshots import SnapshotName
from lorasrv.config import MemoryOptions, SchedulerOptions
from lorasrv.engine.backpressure import num_queued
from lorasrv.engine.input_processor import InputProcessor
from lorasrv.errors import InvalidRequest
from lorasrv.memory.cost_model import StepShape
from lorasrv.memory.eviction import EvictionLevel
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.memory.prefix_cache import page_hashes, root_hash
from lorasrv.metrics.engine_stats import EngineStats
from lorasrv.metrics.trace import TraceRequest
from lorasrv.offline.planner.machine_profile import MachineProfile
from lorasrv.offline.planner.sim_drafter import RecordedDrafts
from lorasrv.offline.planner.sim_loader import LoadPart, SimLoader, Storage
from lorasrv.offline.planner.sim_traffic import OTHER_TOKEN, SimTraffic, SimulatedRequest, SimulationResult, key_of
from lorasrv.outputs import AdapterTier, EngineOutput, RequestId
from lorasrv.request import EngineCoreRequest, RequestOptions, RequestStatus
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.scheduler_output import ModelRunnerOutput, SchedulerOutput, SwapIn, SwapOut, path_along
from lorasrv.speculation.speculator import Speculator
from sgmv_kernels.formats.adapter_panels import AdapterLayout

EOS, WRONG_TOKEN = 0, 3
VOCABULARY = 1 << 62
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


def resized(server: SimServer, pool_bytes: int) -> SimServer:
    """Return the server with another pool size."""
    pages = max(1, pool_bytes // server.geometry.block_bytes)
    return replace(server, geometry=replace(server.geometry, num_pages=pages))


@dataclass(slots=True)
class _Pass:
    """Hold a step while its time passes."""

    step: SchedulerOutput
    begun_s: float
    # Moves later when loads delay the step.
    ends_s: float


class SimReplica:
    """Simulate a server with empty memory, from `begins_s` on.

    Args:
        storage: where its adapters' files are; None: on its own disk.
    """

    def __init__(
        self, server: SimServer, traffic: SimTraffic, begins_s: float = 0.0, storage: Storage | None = None
    ) -> None:
        self._server = server
        self._costs = server.costs
        self._traffic = traffic
        self.now = begins_s
        self.cache: HostCache[int] = HostCache(server.memory.host_cache_bytes)
        self.memory = MemoryManager.make(
            server.geometry,
            server.memory,
            server.scheduler.preemption_mode,
            self.cache.__contains__,
            lambda: self.now,
            self._costs.model(traffic.typical_bytes),
        )
        self._step_costs = self.memory.costs.step
        drafter = RecordedDrafts(lambda rid: self._live[rid].request, OTHER_TOKEN, WRONG_TOKEN)
        drafters = [drafter] if server.has_drafts and traffic.has_drafts else []
        speculator = Speculator(drafters, VOCABULARY, lambda: self.now)
        self.scheduler = Scheduler(server.scheduler, self.memory, frozenset({EOS}), speculator)
        self._loader = SimLoader(self._costs, self.cache, lambda key: traffic.layouts[key].nbytes, storage)
        self._inputs = InputProcessor(self.memory, self, server.max_model_len, VOCABULARY)
        self._live: dict[RequestId, SimulatedRequest] = {}
        self._inbox: list[tuple[EngineCoreRequest, Sequence[bytes]]] = []
        self._num_arrived = self._num_withdrawn = 0
        # The step that is being computed. Without one: when the wait for an event ends, or None to begin a round now.
        self._pass: _Pass | None = None
        self._waits_until_s: float | None = None
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

    def terms(self, key: AdapterKey, /) -> tuple[tuple[AdapterKey, float], ...]:
        return ((key, 1.0),)

    def layout(self, key: AdapterKey, /) -> AdapterLayout:
        return self._traffic.layouts[key]

    def num_draft_heads(self, _: AdapterKey, /) -> int:
        return 0

    def vocab_size(self, _: AdapterKey, /) -> int:
        return 0

    def invocation_tokens(self, _: AdapterKey, /) -> tuple[int, ...]:
        return ()

    # For the driver.

    @property
    def has_requests(self) -> bool:
        """Return whether a request has been given and has not ended."""
        return bool(self._inbox) or self.scheduler.has_requests

    @property
    def next_s(self) -> float:
        """Return when `round` is due; infinity if nothing happens until a request is given."""
        if self._pass is not None and self.now < self._pass.ends_s:
            return min(self._pass.ends_s, self._loader.next_event_s())
        if self._pass is None and self._waits_until_s is not None:
            return min(self._waits_until_s, self._loader.next_event_s())
        return self.now

    def round(self) -> list[SimulatedRequest]:
        """Let the due event happen, or begin or end a step. Return the requests that have ended."""
        if self._pass is not None:
            if self.now < self._pass.ends_s:
                self._move_to(self.next_s)
            return self._end(self._pass) if self.now >= self._pass.ends_s else []
        if self._waits_until_s is not None:
            self._move_to(self.next_s)
            self._waits_until_s = None
            return []
        return self._begin()

    def give(self, outcome: SimulatedRequest, at_s: float, pages: Sequence[bytes] = ()) -> str | None:
        """Admit a request, possibly during a step, and start reading its adapter's file; return why it is refused, or
        None.

        Args:
            at_s: not after `next_s`.
            pages: digests of pages of its prompt that arrive with it, as returned by `missing_pages`.
        """
        if at_s > self.now:
            self._move_to(at_s)
        self._waits_until_s = None
        refused = self._why_not(outcome.request)
        # A withdrawn request that returns needs another name: the step that began with it may not have ended.
        rid = RequestId(f"r{outcome.number}.{self._num_withdrawn}")
        message = None if refused else self._message(rid, outcome)
        if message is None:
            return refused or "does not fit"
        self._live[rid] = outcome
        self._num_arrived += 1
        self._inbox.append((message, pages))
        if message.found is AdapterTier.DISK:
            for term in message.terms:
                self._loader.prefetch(term.key)
        return None

    def withdraw(self, outcome: SimulatedRequest, at_s: float) -> None:
        """Abort a request, as a server does when the client has left.

        Args:
            at_s: not after `next_s`.
        """
        if at_s > self.now:
            self._move_to(at_s)
        (rid,) = (rid for rid, live in self._live.items() if live is outcome)
        del self._live[rid]
        self._num_withdrawn += 1
        self._inbox = [entry for entry in self._inbox if entry[0].request_id != rid]
        self.scheduler.finish(rid, RequestStatus.FINISHED_ABORTED)
        self._waits_until_s = None

    def prefetch(self, adapter: str | None, at_s: float) -> None:
        """Begin to read an adapter's file for a request that is coming.

        Args:
            at_s: not after `next_s`.
        """
        if at_s > self.now:
            self._move_to(at_s)
        if adapter is not None and not self.memory.adapter_manager.is_resident(key_of(adapter)):
            self._loader.prefetch(key_of(adapter))

    def stop(self, at_s: float) -> None:
        """Fail: stop reading and computing."""
        if at_s > self.now:
            self._move_to(at_s)
        self._loader.stop()

    def missing_pages(self, outcome: SimulatedRequest) -> tuple[bytes, ...]:
        """Return the digests of the full pages of a prompt that are missing here, except the page of its last token;
        none if prefixes are not cached."""
        if (prefixes := self.memory.prefixes) is None:
            return ()
        adapter, page_size = outcome.request.adapter, self._server.geometry.page_size
        root = root_hash(None if adapter is None else key_of(adapter), "")
        prompt = self._traffic.prompts.of(outcome.number)
        digests = page_hashes(root, prompt[: len(prompt) - 1], page_size)
        first = next((n for n, digest in enumerate(digests) if prefixes.page_of(digest) is None), len(digests))
        return digests[first:]

    @property
    def is_reading(self) -> bool:
        """Return whether an adapter's file is being read."""
        return self._loader.is_reading

    def resident(self) -> frozenset[str]:
        """Return the names of the adapters in the pool."""
        return frozenset(self._traffic.names[key] for key, _, _ in self.memory.adapters.placements())

    def stats(self) -> EngineStats:
        """Return the engine's counts from which its work is estimated."""
        counters, for_adapter = self.scheduler.counters, self.scheduler.num_waiting_for_adapter
        return EngineStats(
            requests_running=self.scheduler.num_running,
            requests_waiting=self.scheduler.num_waiting - for_adapter + len(self._inbox),
            requests_waiting_for_adapter=for_adapter,
            requests_arrived_total=self._num_arrived,
            prompt_tokens_total=counters.prompt_tokens,
            generated_tokens_total=counters.generated_tokens,
            requests_finished_total=dict(counters.finished),
            step_costs=self._step_costs.as_dict(),
        )

    def check_integrity(self) -> None:
        """Check the accounts of the pool and the scheduler."""
        self.memory.check_integrity()
        self.scheduler.check_integrity()

    def result(self, outcomes: Sequence[SimulatedRequest]) -> SimulationResult:
        """Return the counts, with the requests that this server got."""
        return SimulationResult(
            outcomes=outcomes,
            gaps_s=self._gaps,
            end_s=max((o.end_s or 0.0 for o in outcomes), default=0.0),
            busy_s=self._busy_s,
            steps=self._steps,
            preemptions=self.scheduler.counters.preemptions,
            loads_from_disk=self._loader.num_from_disk,
            loads_from_host=self._loader.num_from_host,
            evictions=self.memory.adapter_manager.num_evictions,
            pool_used=self._used_page_s / max(1e-12, self._busy_s * self.memory.layout.num_pages),
        )

    # Rounds.

    def _begin(self) -> list[SimulatedRequest]:
        """Plan a step and begin to compute it; without one, wait for the next event."""
        for message, pages in self._inbox:
            if pages:
                self._fill(message, pages)
            self.scheduler.add(message)
        self._inbox.clear()
        self._take_reports()
        step = self.scheduler.schedule()
        self._give_orders(step)
        if step.requests or step.num_preempted:
            self._loader.take_stall_s()
            self._pass = _Pass(step, self.now, self.now + self._seconds(step))
            return []
        ended = self._hear(self.scheduler.update_from_output(step, ModelRunnerOutput({})))
        if not self._loader.has_reports:
            wake_s = math.inf if step.wake_s is None else step.wake_s
            self._waits_until_s = max(wake_s, self.now + SHORTEST_WAIT_S)
        return ended

    def _seconds(self, step: SchedulerOutput) -> float:
        """Return the time of a step that nothing disturbs."""
        if not step.requests:
            return self._costs.between_steps_s + SHORTEST_WAIT_S
        swapped = sum(len(op.pages) for op in step.page_ops if isinstance(op, SwapOut | SwapIn))
        seconds = self._step_costs.seconds(StepShape.of(step)) + self._costs.between_steps_s
        return seconds + swapped * self._server.geometry.block_bytes * self._costs.swap_byte_s

    def _end(self, done: _Pass) -> list[SimulatedRequest]:
        self._pass = None
        if done.step.requests:
            self._steps += 1
            self._busy_s += self.now - done.begun_s
            held = self.memory.layout.num_pages - self.memory.num_free - self.memory.num_unused_prefix_pages
            self._used_page_s += held * (self.now - done.begun_s)
        return self._hear(self.scheduler.update_from_output(done.step, self._sampled(done.step)))

    def _move_to(self, time_s: float) -> None:
        assert time_s < math.inf, "requests wait, but there is no event"
        self.now = max(self.now, time_s)
        self._loader.advance(self.now)
        if self._pass is not None:
            self._pass.ends_s += self._loader.take_stall_s()

    # Requests.

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

    def _message(self, rid: RequestId, outcome: SimulatedRequest) -> EngineCoreRequest | None:
        """Return a request's message; None if it can never fit."""
        request = outcome.request
        # If the context is shorter than the recorded server's, an answer gets only the rest of the context.
        most = max(request.output_tokens, request.max_tokens or 0)
        most = min(most, self._server.max_model_len - request.prompt_tokens)
        try:
            return self._inputs.process(
                rid,
                self._traffic.prompts.of(outcome.number)[: request.prompt_tokens],
                SamplingParams(max_tokens=most, temperature=0.0),
                RequestOptions(
                    adapter_key=None if request.adapter is None else key_of(request.adapter),
                    principal=request.key or ANONYMOUS,
                    adapter_id=request.adapter or "",
                    priority=request.priority,
                    timeout_s=request.timeout_s,
                ),
            )
        except InvalidRequest:
            return None

    def _sampled(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Sample tokens as far as drafts are right. An answer's last token is the end token, unless its length ends
        it."""
        tokens = {}
        for scheduled in step.requests:
            if scheduled.samples and (outcome := self._live.get(scheduled.request_id)) is not None:
                left = outcome.request.output_tokens - scheduled.num_generated
                right = (OTHER_TOKEN,) * max(0, left - 1) + (EOS,)
                num_right = len(path_along(scheduled.draft_token_ids, scheduled.draft_parents, right))
                tokens[scheduled.request_id] = right[: num_right + 1]
        return ModelRunnerOutput(tokens)

    def _hear(self, outputs: Sequence[EngineOutput]) -> list[SimulatedRequest]:
        """Record the outputs of requests; return the requests that have ended."""
        ended = []
        for output in outputs:
            outcome = self._live.get(output.request_id)
            if outcome is None:  # withdrawn
                continue
            for _ in output.new_token_ids:
                self._has_token(outcome)
            if output.finish_reason is not None:
                outcome.timing, outcome.end_s = output.timing, self.now
                if not outcome.tokens or output.refusal is not None:
                    outcome.refused = str(output.refusal or output.finish_reason)
                ended.append(self._live.pop(output.request_id))
        return ended

    def _has_token(self, outcome: SimulatedRequest) -> None:
        if outcome.first_token_s is None:
            outcome.first_token_s = self.now
        else:
            self._gaps.append(self.now - outcome.last_token_s)
        outcome.last_token_s = self.now
        outcome.tokens += 1

    def _fill(self, message: EngineCoreRequest, digests: Sequence[bytes]) -> None:
        """Put pages that another server has computed into the prefix cache, if there is room for them."""
        kv, key = self.memory.kv, message.adapter_key
        has_room = self.memory.evictor.make_room(len(digests) + self.scheduler.num_running, EvictionLevel.PREFETCH)
        name = SnapshotName("", message.request_id)
        if has_room and kv.begin_fill(name, len(digests)) is not None:
            is_resident = key is None or self.memory.adapter_manager.is_resident(key)
            kv.end_fill(name, digests, key, is_resident=is_resident)

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
