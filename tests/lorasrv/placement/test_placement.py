"""Placement: routers agree, bounds hold, few keys move, and accounts come back to nothing."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorasrv.errors import ConfigError, NoReplicaReady
from lorasrv.placement import rendezvous
from lorasrv.placement.kinds import FACTOR, FREE_BELOW_S, PLACEMENTS, make_placement
from lorasrv.placement.placement import Demand, Placement, Replica, ReplicaReport, SentRequest
from lorasrv.placement.rendezvous import hash_of, order
from lorasrv.placement.work import FIRST_ANSWER, WorkEstimator, WorkRates

names = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=12, unique=True)
weights = st.sampled_from((0.5, 1.0, 1.0, 3.0))
demands = st.builds(
    Demand, st.none() | st.sampled_from("abcdef"), st.floats(0, 5), st.none() | st.sampled_from(("chat", "talk"))
)


def _replicas(count: int) -> list[Replica]:
    return [Replica(f"r{number}") for number in range(count)]


@st.composite
def loaded(draw: st.DrawFn, kind: str | None = None) -> Placement:
    """A placement whose replicas have got some requests, and reports of others."""
    replicas = [Replica(name, draw(weights)) for name in draw(names)]
    placement = make_placement(kind or draw(st.sampled_from(PLACEMENTS)), replicas, seed=draw(st.integers(0, 3)))
    for demand in draw(st.lists(demands, max_size=20)):
        placement.on_request_sent(placement.rank(demand)[draw(st.integers(0, len(replicas) - 1))], demand)
    for replica in replicas:
        placement.on_report(replica.id, ReplicaReport(draw(st.floats(0, 9)), draw(st.sets(st.sampled_from("abcdef")))))
    return placement


@given(names, st.lists(demands, min_size=1, max_size=20), st.randoms())
def test_all_routers_rank_a_key_alike(ids: list[str], wanted: list[Demand], rng: random.Random) -> None:
    """Whatever order they know the replicas in, and whatever they did before."""
    shuffled = rng.sample(ids, len(ids))
    for kind in ("bounded", "hash"):
        first, second = (make_placement(kind, map(Replica, known)) for known in (ids, shuffled))
        second.rank(wanted[0])
        for demand in wanted:
            if demand.key is not None and demand.work_s <= FREE_BELOW_S:
                assert first.rank(demand) == second.rank(demand)


@given(st.data())
def test_a_rank_has_every_ready_replica_once(data: st.DataObject) -> None:
    placement = data.draw(loaded())
    known = list(placement.loads_s())
    ready = data.draw(st.sets(st.sampled_from(known)))
    placement.set_replicas(Replica(name, is_ready=name in ready) for name in known)
    if ready:
        assert sorted(placement.rank(data.draw(demands))) == sorted(ready)
        return
    with pytest.raises(NoReplicaReady, match=f"none of {len(known)} replicas is ready"):
        placement.rank(data.draw(demands))


def test_no_replica_at_all() -> None:
    with pytest.raises(NoReplicaReady, match="none of 0 replicas"):
        make_placement("bounded").rank(Demand("a", 1.0))


@given(st.data(), demands)
def test_the_bound_holds(data: st.DataObject, demand: Demand) -> None:
    """No replica gets above 1.25 times the mean, or a second of work, while another could stay below; a full one that
    must be taken is the one that is ready soonest, its own speed included."""
    placement = data.draw(loaded("bounded"))
    weight = {name: account.replica.weight for name, account in placement._accounts.items()}
    loads = placement.loads_s()
    most = max(FREE_BELOW_S, FACTOR * (sum(loads.values()) + demand.work_s) / sum(weight.values()))
    ranked = placement.rank(demand)
    fits = {name: (loads[name] + demand.work_s) / weight[name] for name in ranked}
    free = [name for name in ranked if fits[name] <= most * (1 + 1e-6)]
    assert fits[ranked[0]] <= most * (1 + 1e-6) or not free
    if min(fits.values()) > most * (1 + 1e-6):
        assert fits[ranked[0]] == pytest.approx(min(fits.values()), rel=1e-6, abs=1e-5)


def test_a_hot_adapter_spreads_over_its_first_replicas_only_as_far_as_it_must() -> None:
    placement = make_placement("bounded", _replicas(8))
    at_home = order("adapter hot", [(r.id, hash_of(r.id), 1.0) for r in _replicas(8)])
    sent = Counter(_send(placement, Demand("hot", 0.25)).replica_id for _ in range(16))
    assert sent == {at_home[0]: 4, at_home[1]: 4, at_home[2]: 4, at_home[3]: 4}, "a second of work each"
    for _ in range(400):
        _send(placement, Demand("hot", 0.25))
    loads = placement.loads_s()
    assert max(loads.values()) <= FACTOR * sum(loads.values()) / 8 + 0.25


def _send(placement: Placement, demand: Demand) -> SentRequest:
    return placement.on_request_sent(placement.rank(demand)[0], demand)


@settings(max_examples=25)
@given(names.filter(lambda ids: len(ids) > 1), st.integers(0, 1 << 30))
def test_one_replica_more_moves_few_keys(ids: list[str], salt: int) -> None:
    """Only to the new one, and at most 1/N + 5 % of them."""
    keys = [f"{salt}/{number}" for number in range(800)]
    before, after = (
        {key: order(key, [(name, hash_of(name), 1.0) for name in known])[0] for key in keys} for known in (ids[1:], ids)
    )
    moved = [key for key in keys if before[key] != after[key]]
    assert {after[key] for key in moved} <= {ids[0]}
    assert len(moved) / len(keys) <= 1 / len(ids[1:]) + 0.05


def test_keys_spread_by_weight() -> None:
    replicas = [("a", hash_of("a"), 1.0), ("b", hash_of("b"), 1.0), ("c", hash_of("c"), 2.0)]
    firsts = Counter(order(f"k{number}", replicas)[0] for number in range(4000))
    assert [firsts[name] / 4000 for name in "abc"] == pytest.approx([0.25, 0.25, 0.5], abs=0.04)


def test_ranks_are_the_same_on_every_machine() -> None:
    replicas = [(f"r{number}", hash_of(f"r{number}"), 1.0) for number in range(6)]
    ranks = {key: "".join(order(key, replicas))[:6] for key in ("mia", "tom", "ü")}
    assert ranks == {"mia": "r2r5r4", "tom": "r4r5r0", "ü": "r4r0r1"}


def test_a_hundred_thousand_ids_cost_one_hash_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one for each replica, however many requests there are."""
    hashed = Counter[str]()

    def counted(text: str) -> int:
        hashed[text] += 1
        return len(hashed) * 0x9E3779B97F4A7C15 % (1 << 64)

    monkeypatch.setattr(rendezvous, "hash_of", counted)
    monkeypatch.setattr("lorasrv.placement.placement.hash_of", counted)
    placement = make_placement("bounded", _replicas(4))
    for number in range(100_000):
        placement.rank(Demand(f"a{number}", 0.0))
    assert hashed.total() == 100_004
    assert max(hashed.values()) == 1


@given(st.data())
def test_accounts_come_back_to_nothing(data: st.DataObject) -> None:
    """Whatever ends first, twice, or on a replica that has gone and come back."""
    placement = make_placement(data.draw(st.sampled_from(PLACEMENTS)), _replicas(3))
    sent = [_send(placement, demand) for demand in data.draw(st.lists(demands, max_size=12))]
    lost = data.draw(st.sampled_from(["r0", "r1", "none"]))
    loads = placement.loads_s()
    placement.set_replicas(replica for replica in _replicas(3) if replica.id != lost)
    placement.set_replicas(_replicas(3))
    assert placement.loads_s() == {**loads, **({} if lost == "none" else {lost: 0.0})}
    for one in data.draw(st.permutations(sent + sent)):
        placement.on_request_ended(one)
        assert min(placement.loads_s().values()) >= 0.0
    assert set(placement.loads_s().values()) == {0.0}
    assert not any(account.in_flight for account in placement._accounts.values())


def test_what_others_sent_counts_and_late_reports_do_not() -> None:
    placement = make_placement("least", _replicas(2))
    placement.on_report("r0", ReplicaReport(others_s=3.0))
    placement.on_report("gone", ReplicaReport(others_s=3.0))
    assert placement.rank(Demand("a", 1.0)) == ("r1", "r0")
    for _ in range(4):
        placement.on_request_sent("r1", Demand("a", 1.0))
    assert placement.rank(Demand("a", 1.0)) == ("r0", "r1")


def test_holders_are_asked_first_then_those_with_the_fewest() -> None:
    placement = make_placement("holders", _replicas(3))
    placement.on_report("r0", ReplicaReport(adapters=frozenset("ab")))
    placement.on_report("r1", ReplicaReport(adapters=frozenset("c")))
    assert placement.rank(Demand("a", 1.0)) == ("r0", "r2", "r1")
    assert placement.rank(Demand("d", 1.0)) == ("r2", "r1", "r0")
    placement.on_request_sent("r2", Demand("d", 1.0))
    assert placement.rank(Demand("d", 1.0))[0] == "r2", "it is getting it"


def test_adapters_that_must_be_read_are_work_where_that_is_known() -> None:
    """A replica is ready later while it reads one, until it says that it has it."""
    placement = make_placement("migrate", _replicas(2))
    placement.on_request_sent("r0", Demand("a", 0.1, load_s=0.6))
    assert placement.rank(Demand("a", 0.1, load_s=0.6)) == ("r1", "r0"), "0.6 s beside 0.7"
    assert placement.rank(Demand("b", 0.1, load_s=0.6)) == ("r1", "r0")
    placement.on_report("r0", ReplicaReport(adapters=frozenset("a")))
    assert placement.rank(Demand("a", 0.1, load_s=0.6)) == ("r0", "r1")


@pytest.mark.parametrize("name", ["bounded", "least", "hash"])
def test_placements_of_an_edge_do_not_depend_on_what_it_cannot_know(name: str) -> None:
    """How long adapters are read, and which adapters replicas have."""
    knowing, edge = (make_placement(name, _replicas(8)) for _ in range(2))
    for number in range(200):
        adapter, work_s = f"a{number % 7}", 0.1 * (1 + number % 5)
        chosen = knowing.rank(Demand(adapter, work_s, load_s=0.6))[0]
        assert edge.rank(Demand(adapter, work_s))[0] == chosen
        knowing.on_request_sent(chosen, Demand(adapter, work_s, load_s=0.6))
        edge.on_request_sent(chosen, Demand(adapter, work_s))
        knowing.on_report("r0", ReplicaReport(adapters=frozenset({adapter})))
        edge.on_report("r0", ReplicaReport())


def test_a_report_counts_what_others_sent_and_the_own_not_twice() -> None:
    assert ReplicaReport.beside(1, 4, 8.0, frozenset("a")) == ReplicaReport(6.0, frozenset("a"))
    assert ReplicaReport.beside(5, 4, 8.0) == ReplicaReport.beside(0, 0, 0.0) == ReplicaReport(0.0)


def test_migration_moves_the_newest_once_and_only_to_where_they_are_sooner() -> None:
    placement = make_placement("migrate", _replicas(1))
    sent = [_send(placement, Demand("a", 1.0, load_s=0.5)) for _ in range(6)]
    assert placement.moves() == []
    placement.set_replicas(_replicas(2))
    assert placement.moves() == [(one, "r1") for one in (sent[5], sent[4])], "1.25 times the mean is 3.75"
    placement.on_request_ended(sent[5])
    moved = placement.on_request_sent("r1", sent[5].demand, moves=1)
    assert placement.moves() == [(sent[4], "r1")]
    for one in sent[:5]:
        placement.on_request_ended(one)
    placement.set_replicas(_replicas(3))
    assert placement.moves() == [], f"{moved} was moved before"
    placement.on_request_sent("r1", Demand("b", 0.2, load_s=9.0))
    assert placement.moves() == [], "reading it elsewhere takes longer"


def test_sessions_meet_and_a_request_without_key_goes_where_it_is_quiet() -> None:
    placement = make_placement("bounded", _replicas(5))
    assert len({placement.rank(Demand(None, 0.1, "chat")) for _ in range(9)}) == 1
    placement.on_request_sent("r2", Demand(None, 0.1))
    assert placement.rank(Demand(None, 0.1))[-1] == "r2"


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_are_none(weight: float) -> None:
    with pytest.raises(ConfigError, match="replica r: weight must be positive"):
        Replica("r", weight)


def test_an_unknown_kind_is_told_the_known() -> None:
    with pytest.raises(ConfigError, match="placement 'best' is unknown; there are bounded, least, random, hash"):
        make_placement("best")


def test_work_follows_the_answers_of_an_adapter() -> None:
    step = {"step": 16e-3, "token": 1e-3, "request": 1e-3}
    work = WorkEstimator(WorkRates.of_steps(step))
    assert work.work_s("a", 100) == pytest.approx(0.1 + 3e-3 * FIRST_ANSWER)
    for _ in range(200):
        work.observe("a", 10)
        work.observe("b", 90)
    assert work.work_s("a", 0) == pytest.approx(30e-3, rel=1e-3)
    assert work.work_s("b", 0) == pytest.approx(270e-3, rel=1e-3)
    assert 30e-3 < work.work_s("new", 0) < 270e-3
