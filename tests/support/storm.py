"""One engine under a storm of random requests, and checks of its answers: see `tests/lorasrv/engine/test_storm.py`."""

import itertools
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import markers as m
from all_drafts import scripted
from late_executor import LateExecutor
from mispredict import expect_short_answers

from adapter_store.errors import AdapterNotFound
from adapter_store.spec import AdapterKey
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions, SchedulerOptions
from lorasrv.engine import factory as building
from lorasrv.engine.core import EngineCore
from lorasrv.engine.input_processor import InputProcessor, further_choices
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import adapter_layout
from lorasrv.outputs import EngineOutput, FinishReason, RequestId
from lorasrv.request import RequestOptions
from lorasrv.sampling_params import SamplingParams
from lorasrv.speculation.drafter import Draft, Drafter, DraftQuery
from lorasrv.worker.adapter_loader import InlineLoader, ThreadedLoader
from lorasrv.worker.executor import InProcessExecutor

PAGE_SIZE = 4
PAGE_BYTES = 2 * m.KV_HEADS * m.HEAD_DIM * PAGE_SIZE * 4
MAX_PROMPT, MAX_NEW, MAX_DRAFT = 80, 24, 4
SEQS, RESIDENTS, HOSTED = 16, 8, 40
STALL_S, STALL_STEPS = 20.0, 50


@dataclass(frozen=True)
class Started:
    """An engine, and the event that its loader threads set when an adapter has arrived."""

    engine: EngineCore
    input_processor: InputProcessor
    wake: threading.Event | None


def small_pages() -> Any:
    """Patch the page size for engines that are built in the `with` block."""
    return patch.object(building, "PAGE_SIZE_TOKENS", PAGE_SIZE)


def config(
    model: Path, pages: int, host_cache_bytes: int = 1 << 24, preemption: str = "auto", policy: str = "fair"
) -> EngineConfig:
    """Return a configuration with small pages and steps, so that everything happens often."""
    return EngineConfig(
        model=ModelOptions(model=str(model), quantization="none", dtype="float32"),
        memory=MemoryOptions(pool_bytes=pages * PAGE_BYTES * m.LAYERS, host_cache_bytes=host_cache_bytes),
        scheduler=SchedulerOptions(
            max_num_seqs=2 * SEQS, max_num_batched_tokens=96, preemption_mode=preemption, scheduling_policy=policy
        ),
    )


class UnreliableDrafter(Drafter):
    """A drafter that proposes the tokens that followed the same token earlier, or random ones. Every other draft is
    wrong from some token on: it has the tokens of another adapter, about any topic. Sometimes it proposes nothing for
    several steps, which are then planned ahead."""

    name = "unreliable"

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._asked = 0

    def draft(self, ask: DraftQuery) -> Draft:
        self._asked += 1
        if self._asked % 256 < 32:
            return scripted([])
        ids, most = ask.request.token_ids, min(MAX_DRAFT, ask.max_tokens)
        before = next((at for at in range(len(ids) - 2, -1, -1) if ids[at] == ids[-1]), None)
        found = ids[before + 1 :] if before is not None else self._rng.sample(ids, min(3, len(ids)))
        found = (found * most)[:most]
        if self._rng.random() < 0.5:
            true = self._rng.randrange(len(found) + 1)
            found[true:] = [self._lie() for _ in found[true:]]
        return scripted(found)

    def _lie(self) -> int:
        return m.token_of(self._rng.randrange(m.TOPICS), m.marker(self._rng.randrange(m.NUM_ADAPTERS)))


def start(
    model: Path,
    library: Any,
    *,
    threaded: bool,
    preemption: str = "auto",
    drafter: Drafter | None = None,
    late: bool = False,
) -> Started:
    """Start an engine whose pool and host cache are too small for the load. `late`: its steps are collected late;
    without a drafter, a step uses the tokens of the step before it."""
    checkpoint = open_checkpoint(str(model))
    keys = [library.store.resolve(name).key for name in library.names[: 4 * len(m.VARIETIES)]]
    layouts = [adapter_layout(checkpoint.spec, library.store.spec(key), 4) for key in keys]
    an_adapter = sum(layout.num_pages(PAGE_BYTES) for layout in layouts) / len(layouts)
    a_request = (MAX_PROMPT + MAX_NEW) / 4 / PAGE_SIZE
    host = HOSTED * sum(layout.nbytes for layout in layouts) // len(layouts)
    options = config(model, int(RESIDENTS * an_adapter + SEQS * a_request), host, preemption)
    with small_pages():
        built = building.build(checkpoint, options, library.store, drafters=[] if drafter is None else [drafter])
    checkpoint.close()
    parts = built.parts
    expect_short_answers(parts.scheduler.predictor)
    if late:
        assert isinstance(parts.executor, InProcessExecutor)
        parts = replace(parts, executor=LateExecutor(parts.executor))
    assert parts.source is not None
    wake, write = threading.Event() if threaded else None, parts.executor.write_adapter
    loader = InlineLoader(parts.source, write) if wake is None else ThreadedLoader(parts.source, write, wake.set)
    return Started(EngineCore(parts, loader), built.input_processor, wake)


@dataclass
class Asked:
    """One accepted request and the facts known about its answer."""

    request_id: RequestId
    name: str | None
    key: AdapterKey | None
    marker: tuple[int, int]
    topics: frozenset[int]
    max_tokens: int
    num_tokens: int = 0


@dataclass
class Tally:
    """Counts of the events in a storm: a storm without them proves nothing."""

    steps: int = 0
    tokens: int = 0
    requests: int = 0
    uploads: int = 0
    deletes: int = 0
    unknown_names: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    tiers: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    evictions: int = 0
    loads: int = 0
    moved_pages: int = 0
    swaps: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0


class Storm:
    """One run. All events are drawn from one seed, except the times at which threads complete loads."""

    def __init__(self, started: Started, library: Any, seed: int, integrity_every: int = 20) -> None:
        self.engine, self.wake, self.library = started.engine, started.wake, library
        self.input_processor = started.input_processor
        self.integrity_every = integrity_every
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.live: dict[RequestId, Asked] = {}
        self.absent: list[str] = []
        self.target, self.longest = SEQS, MAX_PROMPT
        self._numbers = itertools.count()
        self._still = 0
        self._popular: list[str] = self.rng.sample(library.names, len(library.names))
        self._odds = m.zipf_odds(len(self._popular))
        self._prefixes = [self._some_tokens(topic, self.rng.randint(32, 48)) for topic in range(m.TOPICS)]

    def run(self, tokens: int) -> Tally:
        """Run until `tokens` tokens were generated and memory was short, then let all requests finish.

        The engine decides by learned times, so memory shortage depends on the machine's load: on a busy machine, memory
        was short once in 5,000 tokens, on an idle one up to twelve times.
        """
        begun = time.monotonic()
        while self.tally.tokens < tokens or not self.engine.metrics.stats().preemptions_total:
            self._arrive()
            self._disturb()
            self._step()
        while self.engine.has_requests:
            self._step()
        assert not self.live, f"requests that never ended: {list(self.live)[:5]}"
        self.engine.check_integrity()
        stats = self.engine.metrics.stats()
        self.tally.preemptions = stats.preemptions_total
        self.tally.evictions = stats.adapter_evictions_total
        self.tally.loads = stats.adapter_loads_disk_total + stats.adapter_loads_host_total
        self.tally.moved_pages = stats.moved_pages_total
        self.tally.swaps = stats.swaps_total
        self.tally.cached_tokens = stats.cached_tokens_total
        self.tally.seconds = time.monotonic() - begun
        return self.tally

    # What clients do.

    def _arrive(self) -> None:
        if self.rng.random() < 0.05 or not self.target + len(self.live):
            self.target = self.rng.choice((0, 4, SEQS, 3 * SEQS))
            self.longest = self.rng.choice((8, MAX_PROMPT))
        for _ in range(min(self.target - len(self.live), self.rng.choice((0, 1, 2, 16)))):
            self._ask()

    def _ask(self) -> None:
        name = self._some_name() if self.rng.random() < 0.9 else None
        try:
            key = self.library.store.resolve(name).key if name is not None else None
        except AdapterNotFound:
            assert name in self.absent
            self.tally.unknown_names += 1
            return
        prompt = self._some_prompt()
        max_tokens = self.rng.choice((MAX_NEW, self.rng.randint(1, MAX_NEW)))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        first = self.input_processor.process(self._new_id(), prompt, sampling, RequestOptions(adapter_key=key))
        marker = m.marker(self.library.numbers[key] if key is not None else None)
        topics = frozenset(m.topic_of(token) for token in prompt)
        others = [self._new_id() for _ in range(self.rng.choice((0, 0, 0, 0, 1, 3)))]
        for message in (first, *further_choices(first, others)):
            asked = Asked(message.request_id, name, key, marker, topics, message.max_tokens)
            self.live[asked.request_id] = asked
            self.tally.requests += 1
            self.engine.add_request(message)
        if name is not None and self.rng.random() < 0.04:
            self._upload(name)  # the request was for the earlier meaning of the name

    def _new_id(self) -> RequestId:
        return RequestId(f"r{next(self._numbers)}")

    def _disturb(self) -> None:
        draw = self.rng.random()
        if draw < 0.06 and self.live:
            self.engine.abort(self.rng.choice(list(self.live)))
        elif draw < 0.08 and self.live:
            self.engine.stop(self.rng.choice(list(self.live)))
        elif draw < 0.14:
            self._upload(self.absent[0] if self.absent else self._some_name())
        elif draw < 0.18:
            names = [asked.name for asked in self.live.values() if asked.name is not None]
            self._delete(self.rng.choice(names) if names else self._some_name())

    def _upload(self, name: str) -> None:
        """Upload any adapter, also one that other names have, under a name that may exist."""
        if name in self.absent:
            self.absent.remove(name)
        self.library.upload(name, self.rng.randrange(m.NUM_ADAPTERS), self.rng.randrange(len(m.VARIETIES)))
        self.tally.uploads += 1

    def _delete(self, name: str) -> None:
        if name not in self.absent:
            self.library.delete(name)
            self.absent.append(name)
            self.tally.deletes += 1

    def _some_name(self) -> str:
        return self.rng.choices(self._popular, cum_weights=self._odds)[0]

    def _some_prompt(self) -> list[int]:
        """Return a prompt; half of the long ones begin like others, and continue with another topic."""
        is_shared = self.longest == MAX_PROMPT and self.rng.random() < 0.5
        prompt = list(self.rng.choice(self._prefixes)) if is_shared else []
        rest = self.rng.randint(0 if prompt else 1, self.longest - len(prompt))
        return prompt + self._some_tokens(self.rng.randrange(m.TOPICS), rest)

    def _some_tokens(self, topic: int, count: int) -> list[int]:
        """Return tokens of one topic: the tokenizer's own, and those that adapters force."""
        plain = [token for token in range(3, m.OFFSET) if m.topic_of(token) == topic]
        said = m.token_of(topic, m.marker(self.rng.randrange(m.NUM_ADAPTERS)))
        return [self.rng.choice(plain) if self.rng.random() < 0.9 else said for _ in range(count)]

    # What the engine must do.

    def _step(self) -> None:
        if self.wake is not None:
            self.wake.clear()
        for output in self.engine.step():
            self._take(output)
        self.tally.steps += 1
        if self.integrity_every and self.tally.steps % self.integrity_every == 0:
            self.engine.check_integrity()
        if self.engine.has_requests:
            self._wait()

    def _wait(self) -> None:
        """Wait for a load if only a load can change anything; check that nothing waits forever."""
        self._still = 0 if self.engine.made_progress else self._still + 1
        if self._still and self.wake is not None:
            assert self.wake.wait(STALL_S), f"stalled with {len(self.live)} requests"
        assert self._still < STALL_STEPS, f"stalled with {len(self.live)} requests"

    def _take(self, output: EngineOutput) -> None:
        asked = self.live.get(output.request_id)
        assert asked is not None, f"{output.request_id} has ended already, but brought {output}"
        for token in output.new_token_ids:
            self._check(asked, token)
        if output.finish_reason is not None:
            del self.live[output.request_id]
            self._check_end(asked, output)

    def _check(self, asked: Asked, token: int) -> None:
        said = m.said_by(token)
        what = f"token {asked.num_tokens} of {asked.request_id} ({asked.name}, {asked.key})"
        assert said is not None, f"{what}: no adapter says {token}; expected {asked.marker}"
        assert said.marker == asked.marker, f"{what}: expected {asked.marker}, got {tuple(said.marker)}"
        assert said.topic in asked.topics, f"{what}: topic {said.topic} is not in its prompt, which has {asked.topics}"
        asked.num_tokens += 1
        self.tally.tokens += 1

    def _check_end(self, asked: Asked, output: EngineOutput) -> None:
        reason = output.finish_reason
        self.tally.ends[str(reason)] += 1
        if output.timing.tier is not None:
            self.tally.tiers[str(output.timing.tier)] += 1
        if reason is FinishReason.ERROR:
            raise AssertionError(f"{asked.request_id} ({asked.name}) failed: {output.error}")
        if reason is FinishReason.LENGTH:
            assert asked.num_tokens == asked.max_tokens, f"{asked.request_id} ended after {asked.num_tokens} tokens"


def storm(started: Started, library: Any, tokens: int, seed: int = 0, integrity_every: int = 20) -> Tally:
    """Run a storm once.

    Raises:
        AssertionError: an answer is wrong; the message has the request, its adapter's marker and the answer.
    """
    return Storm(started, library, seed, integrity_every).run(tokens)
