"""Clusters: one of one machine is a replay, nothing is lost or doubled when machines come and go, and laws hold."""

import statistics
from collections import Counter
from dataclasses import astuple, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorasrv.config import POLICIES, MemoryOptions, SchedulerOptions
from lorasrv.errors import ConfigError
from lorasrv.memory.memory_manager import PoolLayout
from lorasrv.metrics.trace import TraceRequest
from lorasrv.offline.cluster.machine import Router
from lorasrv.offline.cluster.options import ChangeKind, ClusterOptions, MachineChange
from lorasrv.offline.cluster.report import cluster_stats
from lorasrv.offline.cluster.sim_cluster import LOST, NO_REPLICA, ClusterResult, replay_on
from lorasrv.offline.planner.adapter_sizes import layout_of_bytes
from lorasrv.offline.planner.laws import LAWS, TrafficLaw
from lorasrv.offline.planner.machine_profile import MachineProfile
from lorasrv.offline.planner.sim_replica import SimServer
from lorasrv.offline.planner.simulator import replay
from lorasrv.placement.kinds import PLACEMENTS, make_placement
from lorasrv.placement.work import WorkEstimator, WorkRates

STEP = {"step": 5e-3, "token": 5e-4, "request": 2e-4, "adapter_byte": 2e-9, "attention_pair": 1e-8, "second_token": 0.0}
BOUNDS_MS = {"ttft": 1000.0, "tpot": 100.0}
FAIL, JOIN = ChangeKind.FAIL, ChangeKind.JOIN


def _server(pages: int = 100, load_byte_s: float = 2e-9, edge_s: float = 1e-3, **options: object) -> SimServer:
    costs = MachineProfile(STEP, 1e-4, edge_s, load_s=2e-3, load_byte_s=load_byte_s, copy_s=1e-4, stall_s=5e-3)
    memory = MemoryOptions(host_cache_bytes=1 << 18, swap_bytes=1 << 16)
    scheduler = SchedulerOptions(**{"max_num_seqs": 16, "max_num_batched_tokens": 64, **options})
    layout = layout_of_bytes(16384, 2, 2)
    return SimServer(PoolLayout(pages, 16, 2048, 2), memory, scheduler, costs, lambda name: layout, 4096)


requests = st.builds(
    TraceRequest,
    arrival_s=st.floats(0, 2) | st.sampled_from((0.0, 0.5, 1.0)),
    prompt_tokens=st.integers(1, 300),
    output_tokens=st.integers(1, 20),
    adapter=st.none() | st.sampled_from("abcdef"),
    timeout_s=st.none() | st.floats(0.05, 5),
    key=st.none() | st.sampled_from("xy"),
    cached_tokens=st.just(0) | st.just(1),
    drafted_tokens=st.just(9),
    accepted_tokens=st.integers(0, 4),
    steps=st.integers(0, 9),
)
traces = st.lists(requests, min_size=1, max_size=24)
quickly = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quickly
@given(traces, st.sampled_from(PLACEMENTS), st.sampled_from(POLICIES), st.sampled_from((6, 24, 100)), st.integers(1, 3))
def test_a_cluster_of_one_is_a_replay_to_the_bit(
    trace: list[TraceRequest], placement: str, policy: str, pages: int, routers: int
) -> None:
    for edge_s in (0.0, 1e-3):
        server = _server(pages, 1e-6, edge_s, scheduling_policy=policy, max_num_queued_seqs=8)
        alone = replay(server, trace)
        (only,) = replay_on(server, trace, ClusterOptions(1, placement, routers)).machines
        assert repr(astuple(only)) == repr(astuple(alone))


@st.composite
def changes(draw: st.DrawFn, machines: int) -> list[MachineChange]:
    """Machines that fail, come back and join, in an order that is possible."""
    there, done = {f"m{number}" for number in range(machines)}, []
    times = sorted(draw(st.lists(st.floats(0, 3) | st.sampled_from((0.0, 0.5)), max_size=6)))
    for at_s in times:
        name = draw(st.sampled_from([f"m{number}" for number in range(machines + 1)]))
        done.append(MachineChange(at_s, FAIL if name in there else JOIN, name))
        there ^= {name}
    return done


def _check(done: ClusterResult, trace: list[TraceRequest]) -> None:
    """Every request ended once: in full, or refused, or lost with its machine."""
    assert [o.request for o in done.outcomes] == sorted(trace, key=lambda r: r.arrival_s)
    for outcome in done.outcomes:
        assert outcome.end_s is not None
        if outcome.refused is None:
            assert outcome.tokens == outcome.request.output_tokens
            assert outcome.first_token_s is not None
            assert outcome.request.arrival_s < outcome.first_token_s <= outcome.last_token_s == outcome.end_s
        assert (outcome.refused != LOST) or outcome.tokens < outcome.request.output_tokens
    tokens = sum(o.tokens for o in done.outcomes)
    firsts = sum(o.tokens > 0 for o in done.outcomes)
    assert sum(len(machine.gaps_s) for machine in done.machines) == tokens - firsts


@quickly
@given(st.data(), traces, st.integers(1, 3), st.sampled_from(PLACEMENTS), st.integers(1, 2))
def test_nothing_is_lost_or_doubled(
    data: st.DataObject, trace: list[TraceRequest], machines: int, placement: str, routers: int
) -> None:
    storage = data.draw(st.sampled_from((None, 1e6)))
    prefill = data.draw(st.integers(0, machines - 1))
    options = ClusterOptions(
        machines,
        placement,
        routers,
        0.1,
        data.draw(changes(machines)),
        0,
        storage,
        prefill,
        data.draw(st.sampled_from((1e5, 1e9))),
    )
    done = replay_on(_server(40), trace, options)
    _check(done, trace)
    again = replay_on(_server(40), trace, options)
    assert repr(done) == repr(again), "the same seed, the same figures"


def test_one_storage_for_all_is_shared() -> None:
    """Three adapters of 16 kB at 16 kB/s: alone one takes a second; three at once three, wherever they are read."""
    nbytes = layout_of_bytes(16384, 2, 2).nbytes
    alone = [TraceRequest(0.0, 10, 5, "a")]
    three = [TraceRequest(0.0, 10, 5, name) for name in "abc"]
    for trace, seconds in ((alone, 1.0), (three, 3.0)):
        done = replay_on(_server(), trace, ClusterOptions(3, "least", storage_bytes_per_s=nbytes))
        assert [len(machine.outcomes) for machine in done.machines].count(1) == len(trace)
        assert [o.ttft_s for o in done.outcomes] == pytest.approx([seconds] * len(trace), abs=0.02)
    shared = replay_on(_server(), three, ClusterOptions(3, "least", storage_bytes_per_s=1e12))
    own = replay_on(_server(), three, ClusterOptions(3, "least"))
    assert [o.ttft_s for o in shared.outcomes] == pytest.approx([o.ttft_s for o in own.outcomes]), "a disk's own limit"


def test_a_storage_is_free_of_what_a_failed_machine_read() -> None:
    nbytes = layout_of_bytes(16384, 2, 2).nbytes
    trace = [TraceRequest(0.0, 10, 5, name) for name in "ab"]
    options = ClusterOptions(2, "least", storage_bytes_per_s=nbytes)
    home = next(
        n for n, machine in enumerate(replay_on(_server(), trace, options).machines) if machine.outcomes[0].number
    )
    # After a second both are half read; then `b` begins anew beside `a`.
    failed = replay_on(_server(), trace, replace(options, changes=[MachineChange(1.0, FAIL, f"m{home}")]))
    _check(failed, trace)
    assert [o.ttft_s for o in failed.outcomes] == pytest.approx([2.0, 2.5], abs=0.05)


def test_a_prompt_is_handed_over_in_whole_pages() -> None:
    """100 tokens are six pages of 16 and four tokens, which are computed with the answer."""
    trace = [TraceRequest(0.0, 100, 5, "a"), TraceRequest(5.0, 16, 5, "a"), TraceRequest(9.0, 101, 5, "a")]
    page_bytes = _server().geometry.block_bytes
    options = ClusterOptions(2, prefill=1, transfer_bytes_per_s=6 * page_bytes)
    done = replay_on(_server(), trace, options)
    _check(done, trace)
    assert [len(machine.outcomes) for machine in done.machines] == [2, 3], "16 tokens have no page to hand over"
    assert (done.counters.handed_over, done.counters.handed_over_bytes) == (2, 12 * page_bytes)
    assert [o.timing.num_cached_tokens for o in done.outcomes] == [96, 0, 96]
    late = done.outcomes[0].ttft_s - replay_on(_server(), trace, ClusterOptions(1)).outcomes[0].ttft_s
    assert late == pytest.approx(1.0, abs=0.05), "its pages took a second"


def test_what_is_not_handed_over_is_computed() -> None:
    """The machine for prompts fails while it computes, or while pages go over; or none is there."""
    trace = [TraceRequest(0.0, 300, 5, "a")]
    options = ClusterOptions(2, prefill=1, transfer_bytes_per_s=1e5)
    whole = replay_on(_server(), trace, options)
    assert (whole.counters.handed_over, whole.outcomes[0].timing.num_cached_tokens) == (1, 288)
    for at_s in (0.0, 0.05, 0.3):
        done = replay_on(_server(), trace, replace(options, changes=[MachineChange(at_s, FAIL, "m0")]))
        _check(done, trace)
        assert (done.counters.handed_over, done.outcomes[0].timing.num_cached_tokens) == (0, 0)


def test_machines_for_prompts_answer_where_no_other_is_left() -> None:
    """And compute the prompts of each other."""
    trace = [TraceRequest(0.0, 300, 5, "a")]
    for machines in (2, 3):
        changed = [MachineChange(0.05, FAIL, f"m{machines - 1}")]
        options = ClusterOptions(machines, prefill=machines - 1, transfer_bytes_per_s=1e6, changes=changed)
        done = replay_on(_server(), trace, options)
        _check(done, trace)
        assert (done.outcomes[0].refused, done.counters.resent) == (None, 1)
        assert done.counters.handed_over == machines - 2
        assert len(done.machines[machines - 1].outcomes) == 0


def test_a_router_moves_requests_that_have_not_begun() -> None:
    """One machine computes a long prompt first; of the short ones behind it, those that may wait long go elsewhere."""
    trace = [TraceRequest(0.0, 1000, 5, "a")] * 4 + [TraceRequest(0.01, 2000, 5, None)] * 2
    changed = [MachineChange(0.5, JOIN, "m1")]
    server = _server(400, max_num_seqs=1)
    moved, stayed = (
        replay_on(server, trace, ClusterOptions(1, name, report_s=0.1, changes=changed))
        for name in ("migrate", "least")
    )
    for done in (moved, stayed):
        _check(done, trace)
    assert [len(machine.outcomes) for machine in stayed.machines] == [6, 0]
    assert moved.counters.moved == len(moved.machines[1].outcomes) == 2
    assert moved.end_s < 0.75 * stayed.end_s


def test_a_failure_ends_streams_and_sends_the_rest_again() -> None:
    """Both requests are where their adapter is at home; one has begun when that machine fails."""
    trace = [TraceRequest(0.0, 10, 200, "a"), TraceRequest(0.98, 300, 5, "a")]
    stayed = replay_on(_server(), trace, ClusterOptions(3))
    assert [o.refused for o in stayed.outcomes] == [None, None]
    (home,) = (number for number, machine in enumerate(stayed.machines) if machine.outcomes)
    done = replay_on(_server(), trace, ClusterOptions(3, changes=[MachineChange(1.0, FAIL, f"m{home}")]))
    _check(done, trace)
    begun, waiting = done.outcomes
    assert (begun.refused, begun.end_s, 0 < begun.tokens < 200) == (LOST, 1.0, True)
    assert waiting.first_token_s is not None
    assert (waiting.refused, waiting.first_token_s > 1.0, done.counters.resent) == (None, True, 1)
    assert sorted(len(machine.outcomes) for machine in done.machines) == [0, 1, 2]


def test_without_machines_requests_are_refused_until_one_joins() -> None:
    trace = [TraceRequest(1.0, 10, 5, "a"), TraceRequest(3.0, 10, 5, "a")]
    changed = [MachineChange(0.5, FAIL, "m0"), MachineChange(2.0, JOIN, "m0")]
    done = replay_on(_server(), trace, ClusterOptions(1, changes=changed))
    assert [o.refused for o in done.outcomes] == [NO_REPLICA, None]
    assert [len(machine.outcomes) for machine in done.machines] == [0, 1]


def test_a_full_machine_passes_a_request_on_once() -> None:
    trace = [TraceRequest(0.0, 40, 40, "a") for _ in range(8)]
    server = _server(max_num_seqs=1, max_num_queued_seqs=1)
    done = replay_on(server, trace, ClusterOptions(2, "hash"))
    _check(done, trace)
    assert Counter(o.refused for o in done.outcomes) == {None: 4, "overloaded": 4}


def test_affinity_loads_less_than_chance() -> None:
    trace = TrafficLaw("poisson", 30.0, 8.0, 40, 0.8, 40, 10).trace()
    stats = {
        name: cluster_stats(name, replay_on(_server(), trace, ClusterOptions(4, name)), BOUNDS_MS)
        for name in ("bounded", "random")
    }
    assert stats["bounded"].loads_from_disk < 0.7 * stats["random"].loads_from_disk
    assert {one.requests for one in stats.values()} == {len(trace)}


def test_base_requests_that_begin_alike_meet() -> None:
    """An edge takes the first 256 characters, some 64 tokens, for the conversation."""
    for cached, num_machines in ((64, 1), (63, 4)):
        trace = [TraceRequest(0.2 * number, 80, 5, cached_tokens=cached) for number in range(40)]
        done = replay_on(_server(), trace, ClusterOptions(4))
        assert sum(bool(machine.outcomes) for machine in done.machines) == num_machines


def test_answers_are_counted_by_their_limit() -> None:
    work = WorkEstimator(WorkRates(1e-3, 1e-2))
    router = Router(0, make_placement("least"), make_placement("least"), work, 0.0)
    demands = [router.demand(TraceRequest(0.0, 100, 9, max_tokens=limit), "", 100, 0) for limit in (9, None)]
    assert [demand.work_s for demand in demands] == pytest.approx([0.1 + 0.09, 0.1 + 1.28])


def test_reports_let_routers_see_what_others_sent() -> None:
    """Each of two routers gets one of two long requests: they go to different machines, ten times in a row."""
    trace = [TraceRequest(10.0 * pair + at_s, 40, 50) for pair in range(10) for at_s in (0.0, 0.05)]
    done = replay_on(_server(), trace, ClusterOptions(2, "least", routers=2, report_s=0.01))
    assert [sorted(o.number // 2 for o in machine.outcomes) for machine in done.machines] == [list(range(10))] * 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"machines": 0}, "machines must be positive, not 0"),
        ({"machines": 1, "routers": 0}, "routers must be positive, not 0"),
        ({"machines": 1, "report_s": 0.0}, "report_s must be positive, not 0.0"),
        ({"machines": 1, "storage_bytes_per_s": 0.0}, "storage_bytes_per_s must be positive, not 0.0"),
        ({"machines": 2, "prefill": 2}, "prefill must be from 0 to 1, one less than machines: 2"),
        ({"machines": 1, "changes": [MachineChange(1.0, FAIL, "m1")]}, "fail m1@1: m1 is not there; there are m0"),
        ({"machines": 1, "changes": [MachineChange(1.0, JOIN, "m0")]}, "join m0@1: m0 is there already; there are m0"),
        (
            {"machines": 1, "changes": [MachineChange(1.0, FAIL, "m0"), MachineChange(2.5, FAIL, "m0")]},
            "fail m0@2.5: m0 is not there; there are none",
        ),
    ],
)
def test_wrong_options(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ClusterOptions(**options)


# Laws.


@pytest.mark.parametrize("law", LAWS)
def test_laws_keep_their_means(law: str) -> None:
    traffic = TrafficLaw(law, 50.0, 400.0, 100, 1.0, 200, 50, 0.8, seed=3)
    trace = traffic.trace()
    assert trace == traffic.trace()
    assert [r.arrival_s for r in trace] == sorted(r.arrival_s for r in trace)
    assert 0 <= trace[0].arrival_s <= trace[-1].arrival_s < 400
    # The busy state of `mmpp` lasts a random share of the time.
    assert len(trace) == pytest.approx(20_000, rel=0.2 if law == "mmpp" else 0.05)
    assert statistics.mean(r.prompt_tokens for r in trace) == pytest.approx(200, rel=0.05)
    assert statistics.mean(r.output_tokens for r in trace) == pytest.approx(50, rel=0.05)
    by_adapter = Counter(r.adapter for r in trace)
    if law != "flash":
        assert by_adapter["a0"] / by_adapter["a9"] == pytest.approx(10, rel=0.35)


def test_laws_differ_in_when_they_ask() -> None:
    def share(law: str, begin: float, end: float) -> float:
        trace = TrafficLaw(law, 50.0, 400.0, 100).trace()
        return sum(begin <= r.arrival_s < end for r in trace) / len(trace)

    assert share("diurnal", 0, 40) + share("diurnal", 180, 220) < 0.1 < 0.17 < share("diurnal", 80, 120)
    assert share("flash", 200, 280) == pytest.approx(0.5, abs=0.03)
    crowd = Counter(r.adapter for r in TrafficLaw("flash", 50.0, 400.0, 100).trace() if 200 <= r.arrival_s < 280)
    assert crowd.most_common(1)[0][1] > 0.45 * crowd.total()
    counts = Counter(int(r.arrival_s) for r in TrafficLaw("mmpp", 50.0, 400.0, 100, seed=3).trace())
    assert statistics.variance(counts.values()) > 5 * statistics.mean(counts.values()), "Poisson's is equal to its mean"


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("law", "chaos", "law 'chaos' is unknown; there are poisson, diurnal, flash, mmpp"),
        ("rate", 0.0, "rate must be positive, not 0.0"),
        ("seconds", float("inf"), "seconds must be positive, not inf"),
        ("zipf", -1.0, "zipf must be from 0 to 10, not -1.0"),
    ],
)
def test_wrong_laws(field: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TrafficLaw(**{field: value})
