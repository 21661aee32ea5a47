"""Replays: nothing is lost or doubled, time goes one way, and what costs more takes longer."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapter_store.host_cache import HostCache
from adapter_store.spec import AdapterKey
from lorasrv.config import POLICIES, MemoryOptions, SchedulerOptions
from lorasrv.errors import ConfigError
from lorasrv.memory.memory_manager import PoolLayout
from lorasrv.metrics.trace import TraceRequest
from lorasrv.offline.planner.adapter_sizes import layout_of_bytes
from lorasrv.offline.planner.machine_profile import MachineProfile
from lorasrv.offline.planner.report import measured, over_time, predicted, quantile
from lorasrv.offline.planner.sim_loader import LoadPart, SimLoader
from lorasrv.offline.planner.sim_replica import SimReplica, SimServer
from lorasrv.offline.planner.sim_traffic import SimulatedPrompts, SimulatedRequest, SimulationResult
from lorasrv.offline.planner.simulator import replay
from lorasrv.offline.planner.what_if import Popularity, best_change, capacity, changes, fit_zipf, name_of_size
from sgmv_kernels.formats.adapter_panels import AdapterLayout

STEP = {"step": 5e-3, "token": 5e-4, "request": 2e-4, "adapter_byte": 2e-9, "attention_pair": 1e-8, "second_token": 0.0}
COSTS = MachineProfile(step=STEP, between_steps_s=1e-4, edge_s=1e-3, load_s=2e-3, load_byte_s=2e-9, stall_s=5e-3)
LAYERS, PAGE_BYTES = 2, 2048


def _layout(name: str) -> AdapterLayout:
    return layout_of_bytes(LAYERS * 8192, LAYERS, 2)


def _server(pages: int = 400, costs: MachineProfile = COSTS, host: int = 1 << 20, **options: object) -> SimServer:
    memory = MemoryOptions(host_cache_bytes=host, swap_bytes=1 << 16)
    scheduler = SchedulerOptions(**{"max_num_seqs": 16, "max_num_batched_tokens": 64, **options})
    return SimServer(PoolLayout(pages, 16, PAGE_BYTES, LAYERS), memory, scheduler, costs, _layout, 4096)


def _trace(count: int = 60, adapters: int = 12, rate: float = 20.0, seed: int = 0) -> list[TraceRequest]:
    rng = random.Random(seed)
    arrivals = itertools.accumulate(rng.expovariate(rate) for _ in range(count))
    return [
        TraceRequest(at, rng.randint(4, 120), rng.randint(1, 24), f"a{rng.randrange(adapters)}", max_tokens=32)
        for at in arrivals
    ]


class _Watched(SimReplica):
    """Checks every account after every round, and that the clock does not go back nor past what was announced."""

    def round(self) -> list[SimulatedRequest]:
        before, announced = self.now, self.next_s
        done = super().round()
        self.scheduler.check_integrity()
        assert before <= self.now <= announced
        return done


def _check(server: SimServer, trace: list[TraceRequest]) -> SimulationResult:
    with patch("lorasrv.offline.planner.simulator.SimReplica", _Watched):
        done = replay(server, trace)
    assert [o.request for o in done.outcomes] == sorted(trace, key=lambda r: r.arrival_s)
    assert all(outcome.end_s is not None for outcome in done.outcomes)
    for outcome in (o for o in done.outcomes if o.refused is None):
        assert outcome.tokens == outcome.request.output_tokens
        assert outcome.first_token_s is not None
        assert outcome.request.arrival_s < outcome.first_token_s <= outcome.last_token_s == outcome.end_s
    assert len(done.gaps_s) == sum(o.tokens - 1 for o in done.outcomes if o.tokens)
    assert min(done.gaps_s, default=0.0) >= 0.0
    return done


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_once(policy: str) -> None:
    assert not predicted(_check(_server(scheduling_policy=policy), _trace())).refused


def test_the_same_seed_gives_the_same() -> None:
    first, second = (predicted(replay(_server(pages=40), _trace())) for _ in range(2))
    assert first == second


def test_drafts_are_right_as_often_as_recorded_where_there_is_time() -> None:
    """Two thirds of the steps; all of them where a token costs nearly as much as a step."""
    dear = replace(COSTS, step={**STEP, "token": 2e-2})
    quiet = [TraceRequest(10.0 * n, 20, 61, "a", steps=40, drafted_tokens=60, accepted_tokens=20) for n in range(8)]
    plain = [replace(request, accepted_tokens=0) for request in quiet]
    for costs, least, most in ((COSTS, 0.6, 0.75), (dear, 0.98, 1.01)):
        with_drafts, without = (_check(_server(costs=costs), trace).steps for trace in (quiet, plain))
        assert least < with_drafts / without < most
    assert _check(replace(_server(), has_drafts=False), quiet).steps == _check(_server(), plain).steps


requests = st.builds(
    TraceRequest,
    arrival_s=st.floats(0, 3),
    prompt_tokens=st.integers(1, 300),
    output_tokens=st.integers(1, 20),
    adapter=st.none() | st.sampled_from("abcdef"),
    priority=st.integers(-2, 2),
    steps=st.integers(0, 9),
    drafted_tokens=st.integers(9, 30),
    accepted_tokens=st.integers(0, 9),
    timeout_s=st.none() | st.floats(0.05, 5),
    key=st.none() | st.sampled_from("xy"),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(requests, min_size=1, max_size=30), st.integers(6, 60), st.integers(16, 200), st.sampled_from(POLICIES))
def test_small_pools_and_any_traffic(trace: list[TraceRequest], pages: int, host_kib: int, policy: str) -> None:
    _check(_server(pages, host=host_kib * 1024, scheduling_policy=policy), trace)


def test_a_slower_machine_takes_longer() -> None:
    slower = replace(COSTS, step={part: 3 * s for part, s in STEP.items()})
    fast, slow = (predicted(replay(_server(costs=costs), _trace())) for costs in (COSTS, slower))
    assert slow.ttft_p50_ms > 1.5 * fast.ttft_p50_ms
    assert slow.tpot_p50_ms > 1.5 * fast.tpot_p50_ms
    assert slow.tok_per_s < fast.tok_per_s


def test_a_load_costs_the_step_that_runs_meanwhile() -> None:
    trace = [TraceRequest(0.0, 20, 200), TraceRequest(0.05, 20, 1, "a")]
    costs = replace(COSTS, stall_s=0.0)
    calm, disturbed = (replay(_server(costs=replace(costs, stall_s=s)), trace) for s in (0.0, 0.3))
    assert disturbed.busy_s - calm.busy_s == pytest.approx(0.3, abs=1e-6)


def test_a_pool_for_all_loads_each_adapter_once() -> None:
    done = replay(_server(pages=2000), _trace(adapters=12))
    assert (done.loads_from_disk, done.loads_from_host, done.evictions) == (12, 0, 0)
    tiers = predicted(done).tiers
    assert sum(tiers.values()) == pytest.approx(1.0)
    assert tiers["resident"] > 0.5


def test_a_small_pool_evicts_and_a_small_host_cache_reads_again() -> None:
    trace = _trace(count=120, adapters=12)
    evicting, reading = (replay(_server(pages=40, host=host), trace) for host in (1 << 20, 3 * 17000))
    assert min(evicting.evictions, evicting.loads_from_host) > 0
    assert evicting.loads_from_disk == 12
    assert reading.loads_from_disk > 24


def test_what_can_never_fit_is_refused() -> None:
    trace = [TraceRequest(0.0, 5000, 1), TraceRequest(0.0, 2000, 1), TraceRequest(0.0, 10, 2, "a")]
    done = replay(_server(pages=20), trace)
    assert [o.refused for o in done.outcomes] == ["too long", "does not fit", None]
    assert predicted(done).refused == {"too long": 1, "does not fit": 1}


def test_shared_beginnings_are_found_by_the_prefix_cache() -> None:
    trace = [TraceRequest(0.2 * n, 100, 2, "a", cached_tokens=64 if n else 0) for n in range(5)]
    done = replay(_server(), [*trace, TraceRequest(3.0, 100, 2, "a")])
    assert [o.timing.num_cached_tokens for o in done.outcomes] == [0, 64, 64, 64, 64, 0]


def test_prompts_have_their_lengths_and_share_what_they_shared() -> None:
    trace = [TraceRequest(0.0, 10, 1, "a"), TraceRequest(1.0, 8, 1, "a", cached_tokens=4), TraceRequest(2.0, 1, 1)]
    first, second, third = map(SimulatedPrompts(trace).of, range(3))
    assert (len(first), len(second), len(third)) == (10, 8, 1)
    assert first[:4] == second[:4]
    assert first[4] != second[4]


# The loader.


A, B = (AdapterKey(x * 64) for x in "ab")


def _loader() -> SimLoader:
    costs = MachineProfile(step=STEP, load_s=1.0, load_byte_s=1e-3, copy_s=0.5, copy_byte_s=0.0)
    return SimLoader(costs, HostCache(1 << 20), lambda key: 1000)


def _run(loader: SimLoader, until_s: float) -> None:
    while loader.next_event_s() <= until_s:
        loader.advance(loader.next_event_s())
    loader.advance(until_s)


def test_two_loads_share_the_disk() -> None:
    loader = _loader()
    loader.load(A)
    assert loader.next_event_s() == pytest.approx(2.0)
    loader.load(B)
    assert loader.next_event_s() == pytest.approx(3.0)
    _run(loader, 3.0)
    assert loader.poll() == [(A, LoadPart.LOADED), (B, LoadPart.LOADED)]
    loader.copy(A)
    loader.copy(B)
    _run(loader, 3.6)
    assert loader.poll() == [(A, LoadPart.COPIED)]
    _run(loader, 4.1)
    assert loader.poll() == [(B, LoadPart.COPIED)]
    loader.load(A)
    assert loader.poll() == [(A, LoadPart.LOADED)], "it lies in host memory"
    assert (loader.num_from_disk, loader.num_from_host) == (2, 1)


def test_a_cancelled_load_leaves_nothing_behind() -> None:
    loader = _loader()
    loader.load(A)
    loader.load(B)
    _run(loader, 1.5)
    loader.cancel(A)
    _run(loader, 9.0)
    assert loader.poll() == [(B, LoadPart.LOADED)]
    loader.cancel(B)
    assert loader.next_event_s() == float("inf")


def test_what_is_read_ahead_counts_once() -> None:
    loader = _loader()
    loader.prefetch(A)
    _run(loader, 5.0)
    assert loader.poll() == []
    loader.load(A)
    assert loader.poll() == [(A, LoadPart.LOADED)]
    assert (loader.num_from_disk, loader.num_from_host) == (1, 0)


# Figures and plans.


def test_quantiles_and_windows() -> None:
    assert (quantile([3, 1, 2], 0.5), quantile([1], 0.99)) == (2, 1)
    assert (quantile([1, 2], 0.5), quantile(range(1, 101), 0.99)) == (1, 99), "so many of all are at most that"
    assert quantile([], 0.5) != quantile([], 0.5)
    assert over_time([(0, 1.0), (1, 3.0), (9, 5.0), (10, 7.0)], windows=2) == [(2.5, 1.0), (7.5, 5.0)]
    assert over_time([]) == []


def test_measured_needs_every_request_measured() -> None:
    known = [TraceRequest(n, 4, 3, "a", ttft_ms=10.0 * (n + 1), total_ms=100.0) for n in range(4)]
    figures = measured(known)
    assert figures is not None
    assert (figures.ttft_p50_ms, figures.requests) == (20.0, 4)
    assert figures.tok_per_s == pytest.approx(12 / 3.1)
    assert measured([*known, TraceRequest(9, 1, 1)]) is None


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.4])
def test_zipf_is_found_again(exponent: float) -> None:
    counts = [round(1e6 / rank**exponent) for rank in range(1, 65)]
    assert fit_zipf(counts) == pytest.approx(exponent, abs=0.01)


def test_spreading_keeps_all_but_the_adapters() -> None:
    trace = [*_trace(), TraceRequest(0.0, 4, 4)]
    popularity = Popularity.of(trace)
    spread = popularity.spread(trace, 500)
    assert [replace(r, adapter=None) for r in spread] == [replace(r, adapter=None) for r in trace]
    assert spread[-1].adapter is None
    assert len({r.adapter for r in spread}) > 20
    assert {name_of_size(r.adapter) for r in spread if r.adapter} <= set(popularity.names)
    assert popularity.spread(trace, 500) == spread


def test_capacity_lies_between_what_fits_and_what_does_not() -> None:
    trace = _trace(count=80, adapters=4, rate=12.0)
    server = _server(pages=60, host=1 << 18, costs=replace(COSTS, load_s=20e-3))
    limit_ms = 1.5 * predicted(replay(server, trace)).ttft_p99_ms
    fit = capacity(server, trace, limit_ms, lambda _: None)
    assert fit.fits is not None
    by_number = {point.adapters: point.figures.ttft_p99_ms for point in fit.points}
    assert by_number[fit.fits] <= limit_ms
    if fit.is_bound:
        assert min(n for n, ms in by_number.items() if n > fit.fits) <= 1.1 * fit.fits + 1
    assert capacity(server, trace, 1e-3, lambda _: None).fits is None


def test_changes_cover_the_options_and_the_best_helps() -> None:
    server = _server(pages=24, costs=replace(COSTS, load_s=20e-3))
    trace = _trace(count=60, rate=6.0)
    now = predicted(replay(server, trace))
    tried = changes(server, trace, lambda _: None)
    assert [c.name for c in tried][:4] == ["pool x 2", "pool / 2", "host cache x 2", "host cache / 2"]
    assert {f"policy {p}" for p in POLICIES if p != server.scheduler.scheduling_policy} <= {c.name for c in tried}
    best = best_change(now, tried, target_itl_ms=100.0)
    assert best is not None
    assert (best.name, best.flags) == ("pool x 2", f"--pool-bytes {2 * 24 * LAYERS * PAGE_BYTES}")
    assert best.figures.ttft_p99_ms < 0.95 * now.ttft_p99_ms
    assert best_change(best.figures, [best]) is None


@pytest.mark.parametrize(
    "facts",
    [
        [],
        {},
        {"step": {}},
        {"step": {**STEP, "more": 1}},
        {"step": {**STEP, "token": -1}},
        {"step": STEP, "load_s": "x"},
        {"step": STEP, "load_s": float("nan")},
        {"step": STEP, "speed": 1},
    ],
)
def test_costs_that_are_none(facts: object) -> None:
    with pytest.raises(ConfigError, match=r"^costs: "):
        MachineProfile.of(facts)


def test_costs_are_read_back(tmp_path: Path) -> None:
    assert MachineProfile.of(COSTS.to_dict()) == COSTS
    (tmp_path / "c").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        MachineProfile.read(tmp_path / "c")
