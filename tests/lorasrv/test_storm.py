"""A storm of requests over a thousand marker adapters: no token may ever come from another adapter, page or prompt.

`markers.py` makes the model and says what it can see. The storm drives one `Engine` as `LLM` and `AsyncEngine` build
it, with a pool for some eight adapters beside the keys and values of some sixteen requests, and a host cache of forty:
adapters come and go all the time. Requests arrive in bursts, share prefixes, are aborted and stopped; names are deleted
and uploaded anew with other contents. After every step each token is compared with what the request's own adapter says.

That a storm can tell at all is shown by taking guards away, one at a time, with no integrity check to help (`GUARDS`):

    pinned adapters stay              AdapterCache.evict_idle evicts what running requests need
    a page has one writer             PagePool.allocate_low gives out pages that are in use
    pages come back                   PagePool.release keeps them
    recomputed from the start         Scheduler._preempt keeps num_computed_tokens though the pages are gone
    placements are asked every step   AdapterCache.placed remembers where an adapter lay first
    pages are filled at every return  DeviceMemory.write_adapter does nothing for a copy that it has written once
    segments are built every step     batch.build_segments remembers them by the number of rows
    tokens go to their own rows       ModelRunner takes the scheduler's order for the batch's
    host copies by key                AdapterSource caches by name
    loads by key                      AdapterStore reads what the name means by now
    one end for each request          Scheduler._emit tells of an abort twice
"""

import importlib.util
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from adapter_store.errors import AdapterNotFound
from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv import batch, model_runner
from lorasrv.adapter_cache import AdapterCache
from lorasrv.adapter_loader import AdapterSource, InlineLoader, ThreadedLoader
from lorasrv.adapter_pack import PackedAdapter
from lorasrv.base_shapes import adapter_layout, base_shapes
from lorasrv.build import build
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions, SchedulerOptions
from lorasrv.device_memory import DeviceMemory
from lorasrv.engine import Engine
from lorasrv.llm import LLM
from lorasrv.loaders import open_checkpoint
from lorasrv.page_pool import PagePool
from lorasrv.request import AdapterTier, EngineOutput, FinishReason, Request, RequestId, SamplingParams
from lorasrv.scheduler import Scheduler
from lorasrv.step import SchedulerOutput
from lorasrv.threads import compute_alone, compute_in_parallel
from sgmv_kernels.layout import PlacedAdapter


def _neighbour(name: str) -> ModuleType:
    """A module of this folder: tests are no package, and with --import-mode=importlib no folder of theirs is a path."""
    spec = importlib.util.spec_from_file_location(f"lorasrv_tests_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


m = _neighbour("markers")

PAGE_SIZE = 4
PAGE_BYTES = 2 * m.KV_HEADS * m.HEAD_DIM * PAGE_SIZE * 4
NUM_NAMES = 1000
MAX_PROMPT, MAX_NEW = 80, 24
SEQS, RESIDENTS, HOSTED = 16, 8, 40
SHORT_TOKENS, LONG_TOKENS = 5_000, 100_000
STALL_S, STALL_STEPS = 20.0, 50


# The model, its adapters and an engine.


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """So small a model gains nothing from a team of threads, which on a busy machine wait for each other."""
    compute_alone()
    yield
    compute_in_parallel()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_file: Path) -> Path:
    return m.write_model(tmp_path_factory.mktemp("marked"), tiny_tokenizer_file.read_bytes())


@pytest.fixture(scope="module")
def filled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("library")
    checkpoint = open_checkpoint(str(model))
    checkpoint.close()
    with AdapterStore(folder / "store", base_shapes(checkpoint.spec)) as store:
        library = m.Library(store, folder / "peft")
        library.fill(NUM_NAMES)
        yield library


@pytest.fixture
def library(filled: Any) -> Any:
    """A thousand names, as they were at first."""
    filled.reset()
    return filled


def _config(model: Path, pages: int, host_cache_bytes: int = 1 << 24) -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(model=str(model), quantization="none", dtype="float32"),
        memory=MemoryOptions(
            pool_bytes=pages * PAGE_BYTES * m.LAYERS, page_size_tokens=PAGE_SIZE, host_cache_bytes=host_cache_bytes
        ),
        scheduler=SchedulerOptions(max_num_seqs=2 * SEQS, max_num_batched_tokens=96),
    )


@pytest.fixture
def start(model: Path, library: Any) -> Iterator[Callable[[bool], "Started"]]:
    """start(threaded) -> an engine whose pool and host cache are too small for what comes."""
    started: list[Started] = []

    def run(threaded: bool) -> Started:
        checkpoint = open_checkpoint(str(model))
        keys = [library.store.resolve(name).key for name in library.names[: 4 * len(m.VARIETIES)]]
        layouts = [adapter_layout(checkpoint.spec, library.store.spec(key), 4) for key in keys]
        an_adapter = sum(layout.num_pages(PAGE_BYTES) for layout in layouts) / len(layouts)
        a_request = (MAX_PROMPT + MAX_NEW) / 4 / PAGE_SIZE
        host = HOSTED * sum(layout.layer_bytes * m.LAYERS for layout in layouts) // len(layouts)
        config = _config(model, int(RESIDENTS * an_adapter + SEQS * a_request), host)
        parts = build(checkpoint, config, library.store).parts
        checkpoint.close()
        assert parts.source is not None
        wake = threading.Event() if threaded else None
        loader = InlineLoader(parts.source) if wake is None else ThreadedLoader(parts.source, wake.set)
        started.append(Started(Engine(parts, loader), wake))
        return started[-1]

    yield run
    for one in started:
        one.engine.close()


@dataclass(frozen=True)
class Started:
    """An engine, and what its loader threads set when an adapter has arrived."""

    engine: Engine
    wake: threading.Event | None


# The storm.


@dataclass
class Asked:
    """One accepted request and what is known of its answer."""

    request_id: RequestId
    name: str | None
    key: AdapterKey | None
    marker: tuple[int, int]
    topics: frozenset[int]
    max_tokens: int
    step: int
    num_tokens: int = 0


@dataclass
class Tally:
    """What a storm was made of: a calm one proves nothing."""

    steps: int = 0
    tokens: int = 0
    requests: int = 0
    uploads: int = 0
    deletes: int = 0
    unknown_names: int = 0
    lost_adapters: int = 0
    lost_midway: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    tiers: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    evictions: int = 0
    loads: int = 0
    seconds: float = 0.0


class Storm:
    """One run: everything that happens is drawn from one seed, save when threads bring their loads."""

    def __init__(self, started: Started, library: Any, seed: int, integrity_every: int = 20) -> None:
        self.engine, self.wake, self.library = started.engine, started.wake, library
        self.integrity_every = integrity_every
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.live: dict[RequestId, Asked] = {}
        self.gone: dict[AdapterKey, int] = {}
        self.absent: list[str] = []
        self.target, self.longest = SEQS, MAX_PROMPT
        self._numbers = itertools.count()
        self._still = 0
        self._popular = self.rng.sample(library.names, len(library.names))
        self._odds = list(itertools.accumulate(1 / rank**1.1 for rank in range(1, len(self._popular) + 1)))
        self._prefixes = [self._some_tokens(topic, self.rng.randint(32, 48)) for topic in range(m.TOPICS)]

    def run(self, tokens: int) -> Tally:
        """Go on until so many tokens were generated, then let everybody finish."""
        begun = time.monotonic()
        while self.tally.tokens < tokens:
            self._arrive()
            self._disturb()
            self._step()
        while self.engine.has_requests:
            self._step()
        assert not self.live, f"requests that never ended: {list(self.live)[:5]}"
        self.engine.check_integrity()
        snapshot = self.engine.metrics.snapshot()
        self.tally.preemptions = snapshot.preemptions_total
        self.tally.evictions = snapshot.adapter_evictions_total
        self.tally.loads = snapshot.adapter_loads_total
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
        message = self.engine.admit(RequestId(f"r{next(self._numbers)}"), prompt, sampling, key)
        marker = m.marker(self.library.numbers[key] if key is not None else None)
        topics = frozenset(m.topic_of(token) for token in prompt)
        asked = Asked(message.request_id, name, key, marker, topics, message.max_tokens, self.tally.steps)
        self.live[asked.request_id] = asked
        self.tally.requests += 1
        self.engine.add_request(message)
        if name is not None and self.rng.random() < 0.04:
            self._upload(name)  # what was asked for is what it meant a moment ago

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
        """Any adapter, also one that other names have; the name need not have been deleted before."""
        if name in self.absent:
            self.absent.remove(name)
        self.library.upload(name, self.rng.randrange(m.NUM_ADAPTERS), self.rng.randrange(len(m.VARIETIES)))
        self.tally.uploads += 1

    def _delete(self, name: str) -> None:
        if name not in self.absent:
            self.gone |= dict.fromkeys(self.library.delete(name), self.tally.steps)
            self.absent.append(name)
            self.tally.deletes += 1

    def _some_name(self) -> str:
        return self.rng.choices(self._popular, cum_weights=self._odds)[0]

    def _some_prompt(self) -> list[int]:
        """Half of the long ones begin as others do, and go on about another topic."""
        is_shared = self.longest == MAX_PROMPT and self.rng.random() < 0.5
        prompt = list(self.rng.choice(self._prefixes)) if is_shared else []
        rest = self.rng.randint(0 if prompt else 1, self.longest - len(prompt))
        return prompt + self._some_tokens(self.rng.randrange(m.TOPICS), rest)

    def _some_tokens(self, topic: int, count: int) -> list[int]:
        """Of one topic: the tokenizer's own, and such as adapters say."""
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
        """If only a load can change anything, for that; nothing may wait for ever."""
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
        assert said is not None, f"{what}: nobody says {token}; expected {asked.marker}"
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
            was_deleted = asked.key is not None and self.gone.get(asked.key, -1) >= asked.step
            assert was_deleted, f"{asked.request_id} ({asked.name}) failed: {output.error}"
            self.tally.lost_adapters += 1
            self.tally.lost_midway += asked.num_tokens > 0
        elif reason is FinishReason.LENGTH:
            assert asked.num_tokens == asked.max_tokens, f"{asked.request_id} ended after {asked.num_tokens} tokens"


def storm(started: Started, library: Any, tokens: int, seed: int = 0, integrity_every: int = 20) -> Tally:
    """One run. Raises AssertionError with the request, what its adapter says and what it got."""
    return Storm(started, library, seed, integrity_every).run(tokens)


# Markers are certain, or the storm would cry wolf.


@pytest.fixture(scope="module")
def marked(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Three adapters of every variety, the first and the last number among them: name -> (PEFT directory, marker)."""
    folder = tmp_path_factory.mktemp("marked")
    rng = random.Random(3)
    adapters = {}
    for i, variety in enumerate(m.VARIETIES):
        for number in (i, rng.randrange(m.NUM_ADAPTERS), m.NUM_ADAPTERS - 1 - i):
            path = m.write_adapter(folder / f"a{number}", number, variety)
            adapters[path.name] = (path, m.marker(number))
    return adapters


def _prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Any tokens, one to sixty: the first and the last length among them."""
    lengths = [1, 60, *(rng.randint(2, 59) for _ in range(count - 2))]
    return [[rng.randrange(3, m.VOCAB) for _ in range(length)] for length in lengths]


def test_every_adapter_says_its_own_token_and_no_other(model: Path, marked: dict[str, tuple[Path, Any]]) -> None:
    greedy = SamplingParams(max_tokens=MAX_NEW, temperature=0.0, ignore_eos=True)
    rng = random.Random(4)
    with LLM(str(model), _config(model, pages=1000)) as llm:
        for name, (path, _) in marked.items():
            llm.add_adapter(name, path)
        asked = [(name, prompt) for name in (None, *marked) for prompt in _prompts(rng, 6)]
        rng.shuffle(asked)
        answers = llm.generate([prompt for _, prompt in asked], greedy, [name for name, _ in asked])
    for (name, prompt), answer in zip(asked, answers, strict=True):
        said = [m.said_by(token) for token in answer.token_ids]
        assert len(said) == MAX_NEW
        assert {s.marker for s in said} == {marked[name][1] if name else m.BASE}, name
        assert {s.topic for s in said} <= {m.topic_of(token) for token in prompt}, name


@pytest.mark.parametrize("name", [None, "a0", "a3", "a1017"])
def test_transformers_and_peft_agree(model: Path, marked: dict[str, tuple[Path, Any]], name: str | None) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model)
    if name is not None:
        oracle = PeftModel.from_pretrained(oracle, marked[name][0])
    prompts = _prompts(random.Random(5), 3)
    with LLM(str(model), _config(model, pages=200)) as llm:
        if name is not None:
            llm.add_adapter(name, marked[name][0])
        greedy = SamplingParams(max_tokens=MAX_NEW, temperature=0.0, ignore_eos=True)
        answers = llm.generate(prompts, greedy, [name] * len(prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = oracle.eval()(torch.tensor([[*prompt, *answer.token_ids[:-1]]])).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == answer.token_ids


# Storms.


def _assert_stormy(tally: Tally) -> None:
    print(tally)
    assert tally.preemptions
    assert tally.evictions
    assert set(tally.tiers) == {tier.value for tier in AdapterTier}
    assert {"length", "abort", "stop"} <= set(tally.ends)
    assert tally.uploads
    assert tally.deletes
    assert tally.lost_adapters <= 0.02 * tally.requests


@pytest.mark.parametrize("threaded", [False, True], ids=["inline", "threads"])
def test_storm_short(start, library, threaded: bool) -> None:
    _assert_stormy(storm(start(threaded), library, SHORT_TOKENS))


@pytest.mark.long
def test_storm(start, library) -> None:
    tally = storm(start(threaded=True), library, LONG_TOKENS, seed=1, integrity_every=100)
    _assert_stormy(tally)
    assert tally.tokens >= LONG_TOKENS


# Guards: each patch takes one away.


def _evict_pinned(patch: pytest.MonkeyPatch) -> None:
    def evict_idle(self: AdapterCache) -> bool:
        for key, resident in self._residents.items():
            self._pool.release(resident.placed.pages)
            del self._residents[key]
            return True
        return False

    patch.setattr(AdapterCache, "evict_idle", evict_idle)


def _share_a_page(patch: pytest.MonkeyPatch) -> None:
    """Every tenth page that a request takes is one that somebody has already."""
    allocate, count = PagePool.allocate_low, itertools.count()

    def allocate_low(self: PagePool, wanted: int) -> list[int] | None:
        pages = allocate(self, wanted)
        used = [page for page, held in enumerate(self._refcounts) if held and page not in (pages or ())]
        if pages and used and next(count) % 10 == 9:
            self.release(pages[-1:])
            self.share(used[:1])
            pages[-1] = used[0]
        return pages

    patch.setattr(PagePool, "allocate_low", allocate_low)


def _leak(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagePool, "release", lambda self, pages: None)


def _skip_recomputing(patch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler._preempt

    def keep(self: Scheduler, request: Request) -> None:
        computed = request.num_computed_tokens
        preempt(self, request)
        request.num_computed_tokens = computed

    patch.setattr(Scheduler, "_preempt", keep)


def _remember_places(patch: pytest.MonkeyPatch) -> None:
    placed, known = AdapterCache.placed, {}
    patch.setattr(AdapterCache, "placed", lambda self, key: known.setdefault(key, placed(self, key)))


def _fill_once(patch: pytest.MonkeyPatch) -> None:
    write, written = DeviceMemory.write_adapter, set()

    def write_adapter(self: DeviceMemory, packed: PackedAdapter, placed: PlacedAdapter) -> None:
        if id(packed) not in written:
            written.add(id(packed))
            write(self, packed, placed)

    patch.setattr(DeviceMemory, "write_adapter", write_adapter)


def _remember_segments(patch: pytest.MonkeyPatch) -> None:
    build_segments, known = batch.build_segments, {}
    patch.setattr(batch, "build_segments", lambda rows: known.setdefault(len(rows), build_segments(rows)))


def _mix_up_rows(patch: pytest.MonkeyPatch) -> None:
    build_batch = model_runner.build_batch

    def in_order_of_arrival(step: SchedulerOutput, *rest: Any) -> batch.ForwardBatch:
        return replace(build_batch(step, *rest), sampled=tuple(s for s in step.scheduled if s.samples))

    patch.setattr(model_runner, "build_batch", in_order_of_arrival)


def _cache_by_name(patch: pytest.MonkeyPatch) -> None:
    name_of = _names_of_keys()
    patch.setattr(AdapterSource, "_cache_key", lambda self, key: name_of(self._store, key))


def _load_by_name(patch: pytest.MonkeyPatch) -> None:
    content, name_of = AdapterStore._content, _names_of_keys()

    def what_it_means_now(self: AdapterStore, key: AdapterKey) -> Any:
        try:
            return content(self, self.resolve(name_of(self, key)).key)
        except AdapterNotFound:
            return content(self, key)

    patch.setattr(AdapterStore, "_content", what_it_means_now)


def _names_of_keys() -> Callable[[AdapterStore, AdapterKey], str]:
    """A name that has, or had, a content."""
    known: dict[AdapterKey, str] = {}

    def name_of(store: AdapterStore, key: AdapterKey) -> str:
        if key not in known:
            known.update({v.key: record.adapter_id for record in store.list_adapters() for v in record.versions})
        return known.get(key, "")

    return name_of


def _end_twice(patch: pytest.MonkeyPatch) -> None:
    emit = Scheduler._emit

    def again(self: Scheduler, request: Request, new_tokens: tuple[int, ...]) -> None:
        emit(self, request, new_tokens)
        if request.finish_reason is FinishReason.ABORT:
            emit(self, request, ())

    patch.setattr(Scheduler, "_emit", again)


GUARDS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "pinned adapters stay": _evict_pinned,
    "a page has one writer": _share_a_page,
    "pages come back": _leak,
    "recomputed from the start": _skip_recomputing,
    "placements are asked every step": _remember_places,
    "pages are filled at every return": _fill_once,
    "segments are built every step": _remember_segments,
    "tokens go to their own rows": _mix_up_rows,
    "host copies by key": _cache_by_name,
    "loads by key": _load_by_name,
    "one end for each request": _end_twice,
}
CAUGHT = (AssertionError, KeyError, IndexError, ValueError)


@pytest.mark.parametrize("guard", GUARDS)
def test_each_guard_is_needed(start, library, monkeypatch: pytest.MonkeyPatch, guard: str) -> None:
    """Taken away, it fails the storm that passes otherwise (`test_storm_short[inline]`)."""
    started = start(threaded=False)
    with monkeypatch.context() as patch:
        GUARDS[guard](patch)
        with pytest.raises(CAUGHT) as caught:
            storm(started, library, SHORT_TOKENS, integrity_every=0)
    print(f"{guard}: {caught.type.__name__}: {str(caught.value)[:200]}")
