"""What the edge answers by itself, who may read it, and what it learns of its replicas."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from fake_replicas import Dies, Seen, edge_of, fake_replica
from prometheus_client.parser import text_string_to_metric_families
from server import eventually

from api.asgi.body_limits import MAX_JSON_BYTES
from api.cluster import survey

SECRET = "secret-of-the-cluster"
STEPS = {"step": 16e-3, "token": 1e-3, "request": 1e-3}
ADMIN = {"authorization": "Bearer admin"}
OTHERS = {"model": "x", "is_ready": True, "requests": 0, "seconds_ahead": 0.0, "adapters": 0}
HUGE = json.dumps({**OTHERS, "step_costs": STEPS, "requests": float("inf")}).encode()
UNKNOWN = json.dumps({**OTHERS, "step_costs": {**STEPS, "token": float("nan")}}).encode()


def replica_of(name: str, slower: float = 1.0, *, is_ready: bool = True) -> Any:
    """A replica that has keys."""

    def answer(seen: Seen) -> None:
        if seen.line.startswith("GET /v1/replica "):
            assert seen.header("authorization") == [f"Bearer {SECRET}"]
            # A replica without keys refuses any other.
            assert seen.header("host")[0].startswith("127.0.0.1:")
            costs = {key: value * slower for key, value in STEPS.items()}
            said = {"model": "base", "fingerprint": "x", "step_costs": costs, "requests": 3, "adapters": 5}
            seen.answer(json.dumps({**said, "is_ready": is_ready, "seconds_ahead": 0.0}).encode())
        elif "/v1/pool" in seen.line and seen.header("authorization") != ["Bearer admin"]:
            seen.answer(b'{"error":{"code":"forbidden"}}', 403)
        else:
            seen.answer(json.dumps({"by": name, "line": seen.line}).encode())

    return answer


@pytest.fixture
def cluster() -> Iterator[SimpleNamespace]:
    with ExitStack() as opened:
        replicas = [opened.enter_context(fake_replica(replica_of(f"r{number}", 1 + number))) for number in range(3)]
        for replica in replicas:
            replica.is_surveyed = True
        edge = opened.enter_context(edge_of([one.url for one in replicas], secret=SECRET))
        eventually(lambda: len(edge.edge._survey.figures) == 3)
        ended = threading.Event()
        opened.callback(ended.set)
        yield SimpleNamespace(replicas=replicas, ended=ended, **vars(edge))


def test_health_needs_no_key_and_ready_needs_a_replica(cluster: Any) -> None:
    assert cluster.http.get("/health").json() == {"status": "ok"}
    assert cluster.http.head("/ping").status_code == 200
    assert cluster.http.get("/ready").json() == {"status": "ready", "replicas": 3}
    cluster.chooser.set_addresses([])
    assert cluster.http.get("/health").status_code == 200
    answer = cluster.http.get("/ready")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("path", ["/metrics", "/metrics/targets", "/v1/replicas"])
def test_who_may_read_a_replicas_figures_may_read_these(cluster: Any, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer other"}, {"authorization": f"Bearer {SECRET}"}):
        answer = cluster.http.get(path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    cluster.replicas[0].answer = dies
    assert cluster.http.get(path, headers=ADMIN).status_code == 200
    cluster.chooser.set_addresses([])
    assert cluster.http.get(path, headers=ADMIN).status_code == 503, "nobody can say whether it may be read"


def dies(seen: Seen) -> None:
    raise Dies


def test_targets_are_those_of_prometheus(cluster: Any) -> None:
    found = cluster.http.get("/metrics/targets", headers=ADMIN).json()
    assert [one["targets"] for one in found] == [[one.url.removeprefix("http://")] for one in cluster.replicas]
    assert found[1]["labels"] == {"lorasrv_replica": "r1", "lorasrv_role": "both"}


def test_replicas_are_listed_with_what_they_say(cluster: Any) -> None:
    rows = cluster.http.get("/v1/replicas", headers=ADMIN).json()["replicas"]
    assert [row["id"] for row in rows] == ["r0", "r1", "r2"]
    known = {"role": "both", "is_ready": True, "load_s": 0.0, "requests": 3, "adapters": 5}
    assert all(row.items() >= known.items() for row in rows)


def test_metrics_count(cluster: Any) -> None:
    cluster.replicas[0].answer = dies
    cluster.http.post("/v1/completions", json={"model": "mia"})
    text = cluster.http.get("/metrics", headers=ADMIN).text
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found["lorasrv_edge_answers_total", "200"] == 1
    assert found["lorasrv_edge_retries_total",] == 1
    assert found["lorasrv_edge_replica_failures_total", "r0"] == 1
    assert found["lorasrv_edge_replica_requests_total", "r1"] == 1
    assert found["lorasrv_edge_replica_ready", "both", "r2"] == 1


def test_requests_that_nobody_answers_are_counted(cluster: Any) -> None:
    """An alert on errors must see them: the replicas that could count them are gone."""
    for replica in cluster.replicas:
        replica.answer = dies
    assert cluster.http.post("/v1/completions", json={"model": "mia"}).status_code == 502
    assert cluster.http.get("/v1/models").status_code == 503, "there is no registry"
    assert (cluster.edge.stats.answers, cluster.edge.stats.retries) == ({502: 1, 503: 1}, 2)
    cluster.chooser.set_addresses([])
    assert cluster.http.post("/v1/completions", json={"model": "mia"}).status_code == 503
    assert (cluster.edge.stats.answers, cluster.edge.stats.retries) == ({502: 1, 503: 2}, 2)


def test_what_the_edge_answers_by_itself_is_counted(cluster: Any) -> None:
    """Whoever refuses: the edge's counts are the clients'."""
    given = Counter(
        [
            cluster.http.get("/health").status_code,
            cluster.http.get("/v1/pool?replica=r9", headers=ADMIN).status_code,
            cluster.http.get("/metrics").status_code,
            cluster.http.post("/v1/completions", content=b" " * (MAX_JSON_BYTES + 1)).status_code,
            cluster.http.post("/v1/completions", headers={"content-encoding": "gzip"}, content=b"x").status_code,
        ]
    )
    cluster.edge.draining.begin(60.0)
    given[cluster.http.post("/v1/completions", json={"model": "mia"}).status_code] += 1
    assert given == dict.fromkeys((200, 404, 403, 413, 415, 503), 1)
    assert cluster.edge.stats.answers == given


def test_a_query_names_a_replica(cluster: Any) -> None:
    for path in ("/metrics", "/v1/pool", "/info"):
        for query, sent_on in (("replica=r2&x=1", "?x=1"), ("x=1&replica=r2", "?x=1"), ("replica=r2", "")):
            answer = cluster.http.get(f"{path}?{query}", headers=ADMIN).json()
            assert answer == {"by": "r2", "line": f"GET {path}{sent_on} HTTP/1.1"}
        assert cluster.http.get(f"{path}?xreplica=r9", headers=ADMIN).status_code != 404, "another name"
        assert cluster.http.get(f"{path}?replica=", headers=ADMIN).status_code == 404


def test_a_query_names_the_replica_whose_pool_is_changed(cluster: Any) -> None:
    """Nothing else goes there: without a registry, other changes are refused."""
    for method, path in (("PATCH", ""), ("POST", ":warm"), ("POST", ":snapshot")):
        target = f"/v1/adapters/mia{path}"
        answer = cluster.http.request(method, f"{target}?replica=r2", json={"pinned": True}).json()
        assert answer == {"by": "r2", "line": f"{method} {target} HTTP/1.1"}
        assert json.loads(cluster.replicas[2].seen[-1].body) == {"pinned": True}
    for method, path in (("DELETE", ""), ("POST", ":verify"), ("PUT", "/defaults")):
        answer = cluster.http.request(method, f"/v1/adapters/mia{path}?replica=r2", json={})
        assert answer.json()["error"]["code"] == "no_registry"


@pytest.mark.parametrize("path", ["/metrics", "/v1/pool", "/info"])
def test_a_query_that_names_no_replica_or_a_dead_one(cluster: Any, path: str) -> None:
    gone = cluster.http.get(f"{path}?replica=r9", headers=ADMIN)
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "replica")
    cluster.replicas[1].answer = dies
    dead = cluster.http.get(f"{path}?replica=r1", headers=ADMIN)
    assert (dead.status_code, dead.json()["error"]["code"]) == (503, "no_replica_ready")
    assert dead.json()["error"]["message"] == "replica r1 does not answer"


def test_figures_are_told_though_a_replica_hangs(cluster: Any) -> None:
    for replica in cluster.replicas[:2]:
        replica.answer = lambda seen: cluster.ended.wait(60)
    assert cluster.http.get("/v1/replicas", headers=ADMIN).status_code == 200
    cluster.ended.set()


def test_the_base_is_known_by_its_name(cluster: Any) -> None:
    """Its requests are tied by their conversation, not by the name: all would meet at one replica."""
    asks = []
    rank = cluster.chooser.placement.rank
    cluster.chooser.placement.rank = lambda ask: [asks.append(ask), rank(ask)][1]
    for model in ("base", "mia:prod"):
        cluster.http.post("/v1/completions", json={"model": model, "prompt": "once upon", "max_tokens": 10})
    assert [(ask.adapter_id, ask.session) for ask in asks] == [(None, "once upon"), ("mia", "once upon")]


def test_a_slow_replica_gets_less_and_is_not_thrown_out(cluster: Any) -> None:
    """Of speeds 1, 1/2 and 1/3 the second is the usual one."""

    def weights() -> dict[str, float]:
        accounts = cluster.chooser.placement._accounts.values()
        return {account.replica.id: account.replica.weight for account in accounts}

    eventually(lambda: weights() == {"r0": 1.0, "r1": 1.0, "r2": 0.75})
    assert cluster.edge.stats.estimator.rates.prompt_token_s == pytest.approx(2e-3)


@pytest.mark.parametrize(
    "said", [b"[1", b"[1]", b'{"model": "x"}', b'{"model": "x", "step_costs": null}', HUGE, UNKNOWN]
)
def test_a_replica_that_says_nothing_is_asked_nevertheless(cluster: Any, said: bytes) -> None:
    for replica in cluster.replicas:
        replica.answer = lambda seen: seen.answer(said)
    eventually(lambda: not cluster.edge._survey.figures)
    assert cluster.http.post("/v1/completions", json={"model": "mia"}).status_code == 200
    for number, replica in enumerate(cluster.replicas):
        replica.answer = replica_of(f"r{number}")
    eventually(lambda: len(cluster.edge._survey.figures) == 3)


def test_a_replica_that_refuses_the_secret_is_asked_nevertheless(cluster: Any) -> None:
    """As one that has started again with another secret: before, while it drained, it was not ready."""
    for replica in cluster.replicas:
        replica.answer = replica_of("late", is_ready=False)
    eventually(lambda: not any(one.is_ready for one in cluster.chooser.replicas()))
    assert cluster.http.post("/v1/completions", json={"model": "mia"}).status_code == 503

    def refuses(seen: Seen) -> None:
        is_survey = seen.line.startswith("GET /v1/replica ")
        seen.answer(b"{}", 403 if is_survey else 200)

    for replica in cluster.replicas:
        replica.answer = refuses
    eventually(lambda: cluster.http.post("/v1/completions", json={"model": "mia"}).status_code == 200)


def test_a_replica_that_hangs_is_asked_last_until_it_goes_on(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others say is heard meanwhile."""
    monkeypatch.setattr(survey, "ANSWER_S", 5.0)
    ask = {"model": "mia", "prompt": "once", "max_tokens": 4}
    assert cluster.http.post("/v1/completions", json=ask).json()["by"] == "r0"
    goes_on = threading.Event()

    def hangs(seen: Seen) -> None:
        goes_on.wait(60)
        replica_of("r0")(seen)

    def ready() -> dict[str, bool]:
        rows = cluster.http.get("/v1/replicas", headers=ADMIN).json()["replicas"]
        return {row["id"]: row["is_ready"] for row in rows}

    cluster.replicas[0].answer = hangs
    eventually(lambda: "r0" in cluster.edge.suspects())
    assert ready() == {"r0": False, "r1": True, "r2": True}
    assert cluster.http.get("/ready").json()["replicas"] == 2
    assert cluster.http.post("/v1/completions", json=ask, timeout=30).json()["by"] == "r1"
    cluster.replicas[1].answer = replica_of("r1", is_ready=False)
    eventually(lambda: not cluster.chooser.replicas()[1].is_ready)
    assert cluster.http.post("/v1/completions", json=ask, timeout=30).json()["by"] == "r2"
    goes_on.set()
    eventually(lambda: "r0" not in cluster.edge.suspects())
    assert ready()["r0"]
    assert cluster.http.post("/v1/completions", json=ask).json()["by"] == "r0"
