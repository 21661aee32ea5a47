"""A scheduler with the parts that it needs, and hand-made model outputs instead of a model."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from adapter_store.spec import AdapterKey
from adapter_store.storage.snapshots import SnapshotName
from lorasrv.config import MemoryOptions, SchedulerOptions
from lorasrv.engine.input_processor import further_choices
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.outputs import EngineOutput, FinishReason, RequestId, TokenLogprobs
from lorasrv.request import AdapterTerm, EngineCoreRequest
from lorasrv.sampling_params import MAX_LOGPROBS, BeamOptions, SamplingParams
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.scheduler_output import NO_SNAPSHOTS, ModelRunnerOutput, SchedulerOutput, SnapshotOrders
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims

PAGE_SIZE = 4
PAGE_BYTES = 1024
EOS = 2
KEYS = [AdapterKey(x * 64) for x in "abcdef"]


def layout_of(key: AdapterKey) -> AdapterLayout:
    """Return a layout of rank 4 to 24, by the key's letter."""
    rank = 4 * (int(key[0], 16) - 9)
    return AdapterLayout((SiteDims(64, (64,)),), (((rank,),),), 2)


def terms_of(*keys: AdapterKey | None) -> tuple[AdapterTerm, ...]:
    """Return the terms of an adapter, or of a sum of several, in the pool; none for the base."""
    return tuple(AdapterTerm(key, 1.0, layout_of(key)) for key in keys if key is not None)


@dataclass
class Bench:
    """A scheduler, and a model that outputs `token` for every request, or ends a request at `ends_at` tokens. `now` is
    its clock, which advances by `step_s` per step. Without `checks`, accounts are not checked after every step.
    """

    pages: int = 64
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    preemption: str = "recompute"
    memory: MemoryOptions = MemoryOptions(host_cache_bytes=1 << 20, swap_bytes=1 << 16, enable_prefix_caching=False)  # noqa: RUF009
    options: dict[str, Any] = field(default_factory=dict)
    page_size: int = PAGE_SIZE
    step_s: float = 1.0
    checks: bool = True
    facts: dict[str, Any] | None = None
    stored: dict[SnapshotName, int] = field(default_factory=dict)
    peer_facts: dict[str, Any] | None = None
    outputs: list[EngineOutput] = field(default_factory=list)
    steps: list[SchedulerOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = PoolLayout(self.pages, self.page_size, PAGE_BYTES, num_slabs=1)
        self.now = 0.0
        self.on_host: set[AdapterKey] = set()
        self.loading: set[AdapterKey] = set()
        self.copying: set[AdapterKey] = set()
        self.ends_at: dict[str, int] = {}
        self.snapshot_orders: list[SnapshotOrders] = []
        is_on_host = self.on_host.__contains__
        kept: dict[str, Any] = {"facts": self.facts, "stored": self.stored, "peer_facts": self.peer_facts}
        self.accounts = MemoryManager.make(layout, self.memory, self.preemption, is_on_host, lambda: self.now, **kept)
        self.pool, self.kv, self.adapters = self.accounts.kv_pool, self.accounts.kv, self.accounts.adapters
        given = {"scheduling_policy": "fcfs", "target_itl_ms": None, "preemption_mode": self.preemption, **self.options}
        options = SchedulerOptions(self.max_num_seqs, self.max_num_batched_tokens, **given)
        self.scheduler = Scheduler(options, self.accounts, frozenset({EOS}))

    def add(
        self, name: str, prompt: int = 3, max_tokens: int = 4, key: AdapterKey | None = None, **fields: Any
    ) -> None:
        of_sampling = {n: fields.pop(n) for n in ("ignore_eos", "stop_token_ids") if n in fields}
        self.ends_at[name] = fields.pop("ends_at", 1 << 30)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **of_sampling)
        ids, terms = tuple(range(10, 10 + prompt)), fields.pop("terms", None) or terms_of(key)
        fields.setdefault("adapter_id", key or "")
        self.scheduler.add(
            EngineCoreRequest(RequestId(name), ids, max_tokens, params, terms, adapter_key=key, **fields)
        )

    def add_beams(
        self, name: str, prompt: int, max_tokens: int, width: int, key: AdapterKey | None = None, **fields: Any
    ) -> None:
        """Add a group of beams, whose next tokens depend on their tokens so far."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=MAX_LOGPROBS)
        ids = tuple(range(10, 10 + prompt))
        options = {"adapter_id": key or "", "beams": BeamOptions(width), **fields}
        first = EngineCoreRequest(RequestId(name), ids, max_tokens, params, terms_of(key), adapter_key=key, **options)
        for message in (first, *further_choices(first, [RequestId(f"{name}.{i}") for i in range(1, width)])):
            self.scheduler.add(message)

    def step(self, token: int = 7) -> SchedulerOutput:
        self.now += self.step_s
        step = self.scheduler.schedule()
        assert step.num_preempted >= 0
        assert step.num_tokens <= self.max_num_batched_tokens
        orders = step.orders
        self.loading = (self.loading | set(orders.loads)) - set(orders.cancels)
        self.on_host -= set(orders.cancels)
        self.copying |= {key for key, _ in orders.copies}
        sampled = {
            s.request_id: (self._says(s.request_id, s.num_generated, token),) for s in step.requests if s.samples
        }
        offered = {s.request_id: (_offer(s.history),) for s in step.requests if s.samples and s.sampling.logprobs}
        masses = {s.request_id: [[1.0] * len(s.page_table)] * s.num_observed for s in step.requests if s.num_observed}
        self.outputs += self.scheduler.update_from_output(step, ModelRunnerOutput(sampled, offered, masses=masses))
        self.steps.append(step)
        if step.snapshots != NO_SNAPSHOTS:
            self.snapshot_orders.append(step.snapshots)
        if self.checks:
            self.scheduler.check_integrity()
        return step

    def _says(self, name: str, num_generated: int, token: int) -> int:
        return EOS if num_generated + 1 >= self.ends_at.get(name, 1 << 30) else token

    def load(self, key: AdapterKey) -> None:
        self.loading.discard(key)
        self.on_host.add(key)
        self.accounts.adapter_manager.on_loaded(key)

    def copy(self, key: AdapterKey) -> None:
        self.copying.discard(key)
        self.scheduler.on_adapter_copied(key)

    def bring(self, key: AdapterKey) -> SchedulerOutput:
        """Bring a loading adapter to the pool; return the step that copies it."""
        self.load(key)
        step = self.step()
        assert [k for k, _ in step.orders.copies] == [key]
        self.copy(key)
        return step

    def arrive(self) -> None:
        """Complete all loads and copies in progress."""
        for key in sorted(self.loading):
            self.load(key)
        for key in sorted(self.copying):
            self.copy(key)

    def run(self, steps: int = 3000) -> None:
        """Step until no request waits; each load and each copy takes a step."""
        for _ in range(steps):
            if not self.scheduler.has_requests:
                self.outputs += self.scheduler.take_outputs()
                return
            self.arrive()
            self.step()
        raise AssertionError("requests wait for ever")

    def steps_until_idle(self) -> None:
        """Step until all requests that can run have run; others may still wait."""
        for _ in range(20):
            self.step()

    def ends(self) -> dict[str, FinishReason]:
        ended = [o for o in self.outputs if o.finish_reason is not None]
        assert len({o.request_id for o in ended}) == len(ended), "a request ended twice"
        return {o.request_id: o.finish_reason for o in ended if o.finish_reason}

    def errors(self) -> dict[str, str]:
        return {o.request_id: o.error for o in self.outputs if o.error is not None}

    def tokens(self, name: str) -> int:
        return sum(len(o.new_token_ids) for o in self.outputs if o.request_id == name)

    def computed(self) -> Counter[str]:
        """Return the number of computed tokens of prompt and answer, by request."""
        counts: Counter[str] = Counter()
        for step in self.steps:
            for scheduled in step.requests:
                counts[scheduled.request_id] += len(scheduled.token_ids)
        return counts

    def first_step(self, name: str) -> int:
        """Return the first step in which a request was scheduled, from 0."""
        return next(i for i, step in enumerate(self.steps) if name in names(step))


def _offer(history: Sequence[int]) -> TokenLogprobs:
    chance = random.Random(repr(history))
    values = sorted((-chance.random() for _ in range(MAX_LOGPROBS)), reverse=True)
    top = tuple(zip(chance.sample(range(10, 60), MAX_LOGPROBS), values, strict=True))
    return TokenLogprobs(*top[0], top)


def names(step: SchedulerOutput) -> list[str]:
    return [s.request_id for s in step.requests]
