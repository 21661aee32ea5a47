"""The bare scheduler with hand-made model outputs: order, budget, preemption, adapters, and exactly one end each."""

import itertools
from dataclasses import dataclass, field

from mispredict import expect_short_answers

from adapter_store.spec import AdapterKey
from lorasrv.config import MemoryOptions, SchedulerOptions
from lorasrv.pool_books import PoolBooks, PoolGeometry
from lorasrv.request import AddRequest, EngineOutput, FinishReason, OnCold, RequestId, RequestStatus, SamplingParams
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
    preemption: str = "recompute"
    memory: MemoryOptions = MemoryOptions(host_cache_bytes=1 << 20, swap_bytes=1 << 16, prefix_caching=False)  # noqa: RUF009
    outputs: list[EngineOutput] = field(default_factory=list)
    steps: list[SchedulerOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        geometry = PoolGeometry(self.pages, PAGE_SIZE, PAGE_BYTES, num_layers=1)
        self.time = itertools.count()
        self.books = PoolBooks.make(
            geometry, self.memory, self.preemption, lambda key: key in self.on_host, lambda: float(next(self.time))
        )
        self.pool, self.kv, self.adapters = self.books.kv_pool, self.books.kv, self.books.adapters
        options = SchedulerOptions(self.max_num_seqs, self.max_num_batched_tokens, policy="fcfs", target_itl_ms=None)
        self.scheduler = Scheduler(options, self.books, frozenset({EOS}), lambda key: key in self.on_host)
        self.on_host: set[AdapterKey] = set()
        self.loading: set[AdapterKey] = set()
        self.copying: set[AdapterKey] = set()

    def add(self, name: str, prompt: int = 3, max_tokens: int = 4, key: AdapterKey | None = None, **fields) -> None:
        message = {n: fields.pop(n) for n in ("on_cold", "cache_salt", "fork_of") if n in fields}
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields)
        layout = None if key is None else _layout(key)
        ids = tuple(range(10, 10 + prompt))
        self.scheduler.add(AddRequest(RequestId(name), ids, max_tokens, params, key, layout, **message))

    def step(self, token: int = 7) -> SchedulerOutput:
        step = self.scheduler.schedule()
        assert step.num_preempted >= 0
        assert step.num_tokens <= self.max_num_batched_tokens
        orders = step.orders
        self.loading = (self.loading | set(orders.loads)) - set(orders.cancels)
        self.on_host -= set(orders.cancels)
        self.copying |= {key for key, _ in orders.copies}
        sampled = {s.request_id: token for s in step.scheduled if s.samples}
        self.outputs += self.scheduler.update_from_output(step, sampled)
        self.steps.append(step)
        self.scheduler.check_integrity()
        return step

    def load(self, key: AdapterKey) -> None:
        self.loading.discard(key)
        self.on_host.add(key)
        self.books.tiers.loaded(key)

    def copy(self, key: AdapterKey) -> None:
        self.copying.discard(key)
        self.scheduler.adapter_copied(key)

    def bring(self, key: AdapterKey) -> SchedulerOutput:
        """An adapter that is loading gets to the pool; returns the step that copies it."""
        self.load(key)
        step = self.step()
        assert [k for k, _ in step.orders.copies] == [key]
        self.copy(key)
        return step

    def run(self, steps: int = 3000) -> None:
        """Until nobody waits; loads and copies take a step each."""
        for _ in range(steps):
            if not self.scheduler.has_requests:
                self.outputs += self.scheduler.take_outputs()
                return
            for key in sorted(self.loading):
                self.load(key)
            for key in sorted(self.copying):
                self.copy(key)
            self.step()
        raise AssertionError("requests wait for ever")

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
    expect_short_answers(bench.scheduler.predictor)
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
    bench.add("base", max_tokens=9)
    step = bench.step()
    assert _names(step) == ["base"]
    assert step.orders.loads == (KEYS[0],)
    assert bench.scheduler.num_waiting_for_adapter == 1
    bench.add("cold too", key=KEYS[0])
    assert bench.step().orders.loads == (), "one load for two requests"
    bench.load(KEYS[0])
    step = bench.step()
    assert [key for key, _ in step.orders.copies] == [KEYS[0]]
    assert _names(bench.step()) == ["base"], "nobody reads what is being copied"
    bench.copy(KEYS[0])
    step = bench.step()
    assert sorted(_names(step)) == ["base", "cold", "cold too"]
    assert bench.adapters.pins() == {KEYS[0]: 2}


def test_a_failed_load_fails_its_own_requests_only() -> None:
    bench = Bench()
    bench.add("bad", key=KEYS[0])
    bench.add("good", key=KEYS[1], max_tokens=1)
    bench.step()
    bench.scheduler.adapter_failed(KEYS[0], "corrupt")
    bench.bring(KEYS[1])
    bench.step()
    assert bench.ends() == {"bad": FinishReason.ERROR, "good": FinishReason.LENGTH}
    assert next(o.error for o in bench.outputs if o.request_id == "bad") == "corrupt"
    bench.add("again", key=KEYS[0])
    assert bench.step().orders.loads == (KEYS[0],), "a later request tries again"


def test_a_cancelled_request_takes_its_load_along_wherever_it_is() -> None:
    bench = Bench()
    for state in ("loading", "on host"):
        bench.add(state, key=KEYS[0])
        bench.step()
        if state == "on host":
            bench.load(KEYS[0])
        bench.scheduler.end(RequestId(state), RequestStatus.FINISHED_ABORTED)
        step = bench.step()
        assert step.orders.cancels == (KEYS[0],)
        assert step.orders.copies == ()
        assert bench.books.tiers.num_arriving == 0
    bench.add("copying", key=KEYS[0])
    bench.step()
    bench.load(KEYS[0])
    bench.step()
    bench.scheduler.end(RequestId("copying"), RequestStatus.FINISHED_ABORTED)
    assert bench.step().orders.cancels == (), "its pages are being written"
    bench.copy(KEYS[0])
    assert bench.adapters.is_ready(KEYS[0])
    assert set(bench.ends().values()) == {FinishReason.ABORT}


def test_a_choice_on_another_adapter_than_the_first_one_shares_nothing_with_it() -> None:
    """The adapter arrives between the two, which fall back where it is cold: the first has the base's pages."""
    bench = Bench(max_num_batched_tokens=64)
    bench.add("first", prompt=9, max_tokens=9, key=KEYS[0], on_cold=OnCold.FALLBACK_BASE)
    bench.step()
    bench.bring(KEYS[0])
    bench.add("second", prompt=9, max_tokens=9, key=KEYS[0], on_cold=OnCold.FALLBACK_BASE, fork_of=RequestId("first"))
    step = bench.step()
    shares = {s.request_id: s for s in step.scheduled}
    assert shares["first"].adapter_key is None
    assert shares["second"].adapter_key == KEYS[0]
    assert shares["second"].start == 0
    assert not set(shares["first"].page_table) & set(shares["second"].page_table)


def test_idle_adapters_make_room_for_growing_requests() -> None:
    bench = Bench(pages=12)
    bench.add("persona", max_tokens=1, key=KEYS[3])
    bench.step()
    bench.bring(KEYS[3])
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
    bench.run()
    assert set(bench.ends()) == {"running", "persona", "later"}


def test_an_adapter_placed_in_pieces_gives_way_to_itself() -> None:
    """In pieces it holds a page more than its size. Alone, its request grows to the very last page that admission
    promised: the adapter must leave and come back in one run, or the request waits for itself for ever."""
    bench = Bench(pages=24, max_num_seqs=32, max_num_batched_tokens=128)
    expect_short_answers(bench.scheduler.predictor)
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
    bench.bring(KEYS[4])
    bench.step()
    assert bench.adapters.num_pages > size, "the pool was meant to be too scattered for one run"
    for i in range(0, 8, 2):
        bench.scheduler.end(RequestId(f"r{i}"), RequestStatus.FINISHED_ABORTED)
    bench.add("base", prompt=3, max_tokens=2)
    bench.run()
    assert bench.tokens("X") == most
    assert bench.ends()["X"] is FinishReason.LENGTH
    assert bench.ends()["base"] is FinishReason.LENGTH
