"""The bare scheduler with hand-made model outputs: order, budget, preemption, adapters, and exactly one end each."""

import itertools
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from adapter_store.spec import AdapterKey
from lorasrv.adapter_cache import AdapterCache
from lorasrv.config import SchedulerOptions
from lorasrv.kv_cache import KVCacheManager
from lorasrv.page_pool import PagePool
from lorasrv.request import AddRequest, EngineOutput, FinishReason, RequestId, RequestStatus, SamplingParams
from lorasrv.scheduler import Scheduler
from lorasrv.step import SchedulerOutput
from sgmv_kernels.layout import AdapterLayout, SiteDims

PAGE_SIZE = 4
PAGE_BYTES = 1024
EOS = 2
KEYS = [AdapterKey(x * 64) for x in "abcdef"]


def _layout(key: AdapterKey) -> AdapterLayout:
    rank = 4 * (KEYS.index(key) + 1)
    return AdapterLayout((SiteDims(64, (64,)),), (((rank,),),), 2)


@dataclass
class Bench:
    """A scheduler with everything it stands on, and a model that says `token` for every request."""

    pages: int = 64
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 16
    outputs: list[EngineOutput] = field(default_factory=list)
    steps: list[SchedulerOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.pages)
        self.kv = KVCacheManager(self.pool, PAGE_SIZE)
        self.adapters = AdapterCache(self.pool, PAGE_BYTES)
        options = SchedulerOptions(self.max_num_seqs, self.max_num_batched_tokens)
        self.time = itertools.count()
        self.scheduler = Scheduler(
            options, self.pool, self.kv, self.adapters, frozenset({EOS}), lambda: float(next(self.time))
        )
        self.loading: set[AdapterKey] = set()

    def add(self, name: str, prompt: int = 3, max_tokens: int = 4, key: AdapterKey | None = None, **sampling) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)
        self.scheduler.add(AddRequest(RequestId(name), tuple(range(10, 10 + prompt)), max_tokens, params, key))

    def step(self, token: int = 7) -> SchedulerOutput:
        step = self.scheduler.schedule()
        assert step.num_preempted >= 0
        assert sum(len(s.token_ids) for s in step.scheduled) <= self.max_num_batched_tokens
        self.loading.update(step.loads)
        sampled = {s.request_id: token for s in step.scheduled if s.samples}
        self.outputs += self.scheduler.update_from_output(step, sampled)
        self.steps.append(step)
        self.scheduler.check_integrity()
        return step

    def load(self, key: AdapterKey) -> None:
        self.loading.discard(key)
        self.scheduler.adapter_loaded(key, _layout(key))

    def ends(self) -> dict[str, FinishReason]:
        ended = [o for o in self.outputs if o.finish_reason is not None]
        assert len({o.request_id for o in ended}) == len(ended), "a request ended twice"
        return {o.request_id: o.finish_reason for o in ended if o.finish_reason}

    def tokens(self, name: str) -> int:
        return sum(len(o.new_token_ids) for o in self.outputs if o.request_id == name)


def _names(step: SchedulerOutput) -> list[str]:
    return [s.request_id for s in step.scheduled]


def test_a_long_prompt_is_chunked_beside_running_requests() -> None:
    bench = Bench()
    bench.add("short", prompt=2, max_tokens=20)
    bench.step()
    bench.add("long", prompt=40)
    chunks = [{s.request_id: len(s.token_ids) for s in bench.step().scheduled} for _ in range(3)]
    assert chunks == [{"short": 1, "long": 15}, {"short": 1, "long": 15}, {"short": 1, "long": 10}]
    assert bench.tokens("long") == 1, "only the last chunk samples"
    assert bench.tokens("short") == 4


def test_ends_by_length_eos_and_stop_id() -> None:
    bench = Bench()
    bench.add("length", max_tokens=2)
    bench.add("eos", max_tokens=9)
    bench.add("ignores", max_tokens=3, ignore_eos=True)
    bench.add("stop", max_tokens=9, stop_token_ids=(EOS,), ignore_eos=True)
    bench.step()
    bench.step(token=EOS)
    bench.step(token=EOS)
    assert bench.ends() == {
        "length": FinishReason.STOP,
        "eos": FinishReason.STOP,
        "ignores": FinishReason.LENGTH,
        "stop": FinishReason.STOP,
    }
    assert {o.request_id: o.stop_token_id for o in bench.outputs if o.finish_reason} == {
        "length": None,
        "eos": None,
        "ignores": None,
        "stop": EOS,
    }


def test_max_num_seqs_and_order_of_arrival() -> None:
    bench = Bench(max_num_seqs=2)
    for name in ("a", "b", "c"):
        bench.add(name, max_tokens=2)
    assert _names(bench.step()) == ["a", "b"]
    bench.step()
    assert _names(bench.step()) == ["c"]


def test_pool_exhaustion_preempts_the_newest_and_nobody_fails() -> None:
    bench = Bench(pages=8, max_num_batched_tokens=64)
    bench.add("old", prompt=8, max_tokens=20)
    bench.add("new", prompt=8, max_tokens=20)
    for _ in range(80):
        bench.step()
    assert bench.ends() == {"old": FinishReason.LENGTH, "new": FinishReason.LENGTH}
    assert bench.tokens("old") == bench.tokens("new") == 20
    preempted = {o.request_id: o.timing.num_preemptions for o in bench.outputs if o.finish_reason}
    assert preempted["old"] == 0
    assert preempted["new"] >= 1
    assert bench.pool.num_free == 8


def test_a_request_waits_for_its_adapter_and_nobody_else_does() -> None:
    bench = Bench()
    bench.add("cold", key=KEYS[0])
    bench.add("base")
    step = bench.step()
    assert _names(step) == ["base"]
    assert step.loads == (KEYS[0],)
    assert bench.scheduler.num_waiting_for_adapter == 1
    bench.add("cold too", key=KEYS[0])
    assert bench.step().loads == (), "one load for two requests"
    bench.load(KEYS[0])
    step = bench.step()
    assert step.copies == (KEYS[0],)
    assert sorted(_names(step)) == ["base", "cold", "cold too"]
    assert bench.adapters.pins() == {KEYS[0]: 2}


def test_a_failed_load_fails_its_own_requests_only() -> None:
    bench = Bench()
    bench.add("bad", key=KEYS[0])
    bench.add("good", key=KEYS[1], max_tokens=1)
    bench.step()
    bench.scheduler.adapter_failed(KEYS[0], "corrupt")
    bench.load(KEYS[1])
    bench.step()
    assert bench.ends() == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}
    assert next(o.error for o in bench.outputs if o.request_id == "bad") == "corrupt"
    bench.add("again", key=KEYS[0])
    assert bench.step().loads == (KEYS[0],), "a later request tries again"


def test_cancel_during_load_forgets_the_adapter_when_it_arrives() -> None:
    bench = Bench()
    bench.add("gone", key=KEYS[0])
    bench.step()
    bench.scheduler.end(RequestId("gone"), RequestStatus.FINISHED_ABORTED)
    bench.load(KEYS[0])
    assert bench.step().copies == ()
    assert not bench.scheduler.on_host
    assert bench.ends() == {"gone": FinishReason.ABORT}


def test_idle_adapters_make_room_for_growing_requests() -> None:
    bench = Bench(pages=12)
    bench.add("persona", max_tokens=1, key=KEYS[3])
    bench.step()
    bench.load(KEYS[3])
    bench.step()
    assert KEYS[3] in bench.adapters
    bench.add("greedy", prompt=4, max_tokens=44)
    for _ in range(60):
        bench.step()
    assert bench.ends()["greedy"] is FinishReason.LENGTH
    assert KEYS[3] not in bench.adapters
    assert bench.scheduler.counters.preemptions == 0


def test_an_adapter_without_room_holds_back_later_requests_until_it_fits() -> None:
    layout = _layout(KEYS[5])
    bench = Bench(pages=layout.num_pages(PAGE_BYTES) + 3, max_num_batched_tokens=64)
    bench.add("running", prompt=8, max_tokens=4)
    bench.step()
    bench.add("persona", prompt=2, max_tokens=2, key=KEYS[5])
    bench.step()
    bench.load(KEYS[5])
    bench.add("later", prompt=2, max_tokens=2)
    assert _names(bench.step()) == ["running"]
    for _ in range(12):
        bench.step()
    assert set(bench.ends()) == {"running", "persona", "later"}


def test_an_adapter_placed_in_pieces_gives_way_to_itself() -> None:
    """In pieces it holds a page more than its size. Alone, its request grows to the very last page that admission
    promised: the adapter must leave and come back in one run, or the request waits for itself for ever."""
    bench = Bench(pages=24, max_num_seqs=32, max_num_batched_tokens=128)
    size = _layout(KEYS[4]).num_pages(PAGE_BYTES)
    for i in range(8):
        bench.add(f"r{i}", prompt=5, max_tokens=40)
    for _ in range(5):
        bench.step()
    for i in range(1, 8, 2):
        bench.scheduler.end(RequestId(f"r{i}"), RequestStatus.FINISHED_ABORTED)
    most = (24 - size) * PAGE_SIZE - 3
    bench.add("X", prompt=3, max_tokens=most, key=KEYS[4])
    bench.step()
    bench.load(KEYS[4])
    bench.step()
    assert bench.adapters.num_pages > size, "the pool was meant to be too scattered for one run"
    for i in range(0, 8, 2):
        bench.scheduler.end(RequestId(f"r{i}"), RequestStatus.FINISHED_ABORTED)
    bench.add("base", prompt=3, max_tokens=2)
    for _ in range(200):
        for key in bench.step().loads:
            bench.load(key)
    assert bench.tokens("X") == most
    assert bench.ends()["X"] is FinishReason.LENGTH
    assert bench.ends()["base"] is FinishReason.LENGTH


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps, loads, failures and aborts: pages add up and every request ends exactly once."""

    requests = Bundle("requests")

    @initialize(pages=st.integers(14, 40), seqs=st.integers(1, 5), budget=st.integers(1, 20))
    def begin(self, pages: int, seqs: int, budget: int) -> None:
        self.bench = Bench(pages=pages, max_num_seqs=seqs, max_num_batched_tokens=budget)
        self.count = 0

    @rule(
        target=requests,
        prompt=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        key=st.sampled_from([None, *KEYS]),
    )
    def add(self, prompt: int, max_tokens: int, key: AdapterKey | None) -> str:
        name = f"r{self.count}"
        self.count += 1
        self.bench.add(name, prompt, max_tokens, key)
        return name

    @rule(token=st.sampled_from([7, 7, 7, EOS]))
    def step(self, token: int) -> None:
        self.bench.step(token)

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        if self.bench.loading:
            self.bench.load(data.draw(st.sampled_from(sorted(self.bench.loading))))

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        if self.bench.loading:
            key = data.draw(st.sampled_from(sorted(self.bench.loading)))
            self.bench.loading.discard(key)
            self.bench.scheduler.adapter_failed(key, "broken")

    @rule(name=requests)
    def abort(self, name: str) -> None:
        self.bench.scheduler.end(RequestId(name), RequestStatus.FINISHED_ABORTED)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "bench"):
            self.bench.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        for _ in range(2000):
            if not self.bench.scheduler.has_requests:
                break
            for key in sorted(self.bench.loading):
                self.bench.load(key)
            self.bench.step()
        self.bench.outputs += self.bench.scheduler.take_outputs()
        assert len(self.bench.ends()) == self.count
        assert self.bench.kv.num_pages == 0
        assert not self.bench.adapters.pins()


SchedulerMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
test_scheduler_machine = SchedulerMachine.TestCase
