"""Whom the replicas that answer are told to take pages from: who computes prompts, or who answered the last time."""

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from fake_replicas import Dies, Seen, edge_of, fake_replica

from api.cluster.chooser import ReplicaAddress, StaticChooser
from lorasrv.placement.kinds import make_placement
from lorasrv.placement.placement import Demand

LONG = "x" * 4096
PREFILL, PAGES, CLUSTER = "x-lorasrv-prefill", "x-lorasrv-pages", "x-lorasrv-cluster"
SECRET = "of-one-cluster"


@pytest.fixture
def cluster() -> Iterator[SimpleNamespace]:
    """Three replicas, of the roles that `roles(...)` gives them; those in front are asked first."""
    with ExitStack() as opened:
        replicas = [opened.enter_context(fake_replica()) for _ in range(3)]
        edge = opened.enter_context(edge_of([one.url for one in replicas], secret=SECRET))

        def roles(*roles: str, is_ready: bool = True, kernels: str = "same") -> None:
            edge.chooser.set_addresses(
                [
                    ReplicaAddress(f"r{number}", replica.url, 1.0, is_ready or role != "prefill", role, kernels)
                    if role == "prefill"
                    else ReplicaAddress(f"r{number}", replica.url, role=role, kernels="same")
                    for number, (replica, role) in enumerate(zip(replicas, roles, strict=True))
                ]
            )

        roles("decode", "prefill", "prefill")
        yield SimpleNamespace(replicas=replicas, roles=roles, urls=[one.url for one in replicas], **vars(edge))


def ask(cluster: Any, model: str = "mia", prompt: str = LONG, **headers: str) -> Seen:
    """The request as the replica that answers sees it."""
    answer = cluster.http.post("/v1/completions", json={"model": model, "prompt": prompt}, headers=headers)
    assert answer.status_code == 200
    [seen] = [replica.seen.pop() for replica in cluster.replicas if replica.seen]
    return seen


def by_name(cluster: Any, *names: str) -> None:
    """Only these replicas are ready."""
    known = [ReplicaAddress(f"r{n}", url, is_ready=f"r{n}" in names) for n, url in enumerate(cluster.urls)]
    cluster.chooser.set_addresses(known)


def dies(_: Seen) -> None:
    raise Dies


def test_long_prompts_of_an_adapter_go_to_one_prefill_replica(cluster: Any) -> None:
    found = {model: ask(cluster, model).header(PREFILL) for model in ("mia", "tom", "mia:prod", "ann", "bob", "cid")}
    assert found["mia"] == found["mia:prod"]
    assert sorted({url for [url] in found.values()}) == sorted(cluster.urls[1:])
    assert ask(cluster).header(CLUSTER) == [SECRET]
    assert cluster.edge.stats.peers == {"prefill": 7}


def test_clients_name_no_peer(cluster: Any) -> None:
    seen = ask(cluster, "mia", "short", **{PREFILL: "http://evil", PAGES: "http://evil", CLUSTER: "guess"})
    assert (seen.header(PREFILL), seen.header(PAGES), seen.header(CLUSTER)) == ([], [], [SECRET])


def test_who_answers_computes_where_nobody_else_may(cluster: Any) -> None:
    assert not ask(cluster, prompt="short").header(PREFILL)
    cluster.roles("both", "decode", "both")
    assert not ask(cluster).header(PREFILL)
    cluster.roles("both", "prefill", "prefill", is_ready=False)
    assert not ask(cluster).header(PREFILL)
    cluster.roles("both", "prefill", "prefill", kernels="other")
    assert not ask(cluster).header(PREFILL)
    cluster.roles("prefill", "prefill", "prefill")
    assert ask(cluster).header(PREFILL), "there is nobody else to answer"


def test_nothing_is_taken_without_a_secret_or_by_other_routes(cluster: Any) -> None:
    cluster.http.post("/tokenize", json={"model": "mia", "prompt": LONG})
    assert not cluster.replicas[0].seen.pop().header(PREFILL)
    with edge_of([], chooser=cluster.chooser) as open_edge:
        cluster.roles("decode", "prefill", "prefill")
        open_edge.http.post("/v1/completions", json={"model": "mia", "prompt": LONG})
    assert not cluster.replicas[0].seen.pop().header(PREFILL)


def test_the_next_replica_is_told_too_but_not_of_one_that_died(cluster: Any) -> None:
    cluster.roles("decode", "decode", "prefill")
    cluster.replicas[0].answer = dies
    cluster.http.post("/v1/completions", json={"model": "mia", "prompt": LONG})
    # On a connection that was kept a request is sent once more.
    found = [{*seen.header(PREFILL)} for replica in cluster.replicas[:2] for seen in replica.seen[-1:]]
    assert found == [{cluster.urls[2]}, {cluster.urls[2]}]
    cluster.replicas[1].seen.clear()
    cluster.edge.suspect(cluster.chooser.replicas()[2])
    cluster.http.post("/v1/completions", json={"model": "mia", "prompt": LONG})
    assert cluster.replicas[1].seen[0].header(PREFILL) == []


def test_the_next_replica_is_told_who_answered_before(cluster: Any) -> None:
    by_name(cluster, "r0", "r1", "r2")
    first = ask(cluster)
    assert (first.header(PREFILL), first.header(PAGES)) == ([], [])
    assert ask(cluster).header(PAGES) == [], "it has them itself"
    cluster.edge.suspect(cluster.chooser.replicas()[0])
    assert ask(cluster).header(PAGES) == [], "nobody asks a replica that did not answer a moment ago"
    cluster.edge._suspects.clear()
    # r1 has them now, and r0 is asked first: only for what began so.
    for other in ("another beginning" + LONG, LONG[:99]):
        assert ask(cluster, prompt=other).header(PAGES) == []
    assert ask(cluster, model="tom").header(PAGES) == []
    assert ask(cluster, authorization="Bearer of somebody else").header(PAGES) == []
    assert ask(cluster).header(PAGES) == [cluster.urls[1]]
    assert ask(cluster).header(PAGES) == []


def test_who_is_gone_or_of_another_kind_is_not_named(cluster: Any) -> None:
    by_name(cluster, "r0", "r1")
    ask(cluster)
    by_name(cluster, "r1")
    assert ask(cluster).header(PAGES) == [], "r0 is not ready"
    others = [ReplicaAddress("r1", cluster.urls[1]), ReplicaAddress("r2", cluster.urls[2], kernels="other")]
    cluster.chooser.set_addresses(others)
    ask(cluster)
    cluster.edge.suspect(others[0])
    assert ask(cluster).line
    cluster.edge._suspects.clear()
    assert ask(cluster).header(PAGES) == [], "of other kernels"


def test_work_of_prompts_is_bounded_and_no_work_of_who_answers() -> None:
    replicas = [ReplicaAddress(f"p{number}", f"http://p{number}", role="prefill") for number in range(3)]
    chooser = StaticChooser([*replicas, ReplicaAddress("d", "http://d")], make_placement("bounded"))
    wanted = Demand("mia", work_s=5.0)
    with ExitStack() as opened:
        named = [opened.enter_context(chooser.choose_prefill(wanted, "", ())) for _ in range(3)]
        assert {one.id for one in named if one} == {"p0", "p1", "p2"}
        assert chooser.loads_s() == {"p0": 5.0, "p1": 5.0, "p2": 5.0, "d": 0.0}
    assert set(chooser.loads_s().values()) == {0.0}
    small = Demand("mia", work_s=0.1)
    with chooser.choose_prefill(small, "", ()) as first, chooser.choose_prefill(small, "", ()) as again:
        assert first == again
        with chooser.choose_prefill(small, "", {first.id if first else ""}) as other:
            assert other not in (None, first)


def test_an_answer_counts_without_its_prompt(cluster: Any) -> None:
    """What a prefill replica computes is no work of the one that answers."""
    loads: list[dict[str, float]] = []

    def note(seen: Seen) -> None:
        loads.append(dict(cluster.chooser.loads_s()))
        seen.answer(b"{}")

    cluster.replicas[0].answer = note
    for roles in (("decode", "prefill", "prefill"), ("decode", "decode", "decode")):
        cluster.roles(*roles)
        ask(cluster)
    apart, alone = loads
    prompt_s = sum(load for name, load in apart.items() if name != "r0")
    assert prompt_s > 0
    assert apart["r0"] + prompt_s == pytest.approx(alone["r0"], abs=1e-5)
