"""Real servers behind an edge take pages from each other as it says; what becomes of a peer changes no answer."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from fake_replicas import Dies, InOrder, Seen, edge_of, fake_replica
from server import eventually, server

from api.cluster.chooser import ReplicaAddress
from lorasrv.memory import peer_pages
from lorasrv.placement import prefill
from lorasrv.scheduler_output import SchedulerOutput
from lorasrv.worker.executor import StepHandle

pytestmark = pytest.mark.slow

SECRET = "of-one-cluster"
PROMPT = [20 + (7 * number) % 300 for number in range(200)]
SENT = 192
PAGE = 16


@pytest.fixture(scope="module")
def replicas(
    model: Path, adapter_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[SimpleNamespace]]:
    """Two of a kind."""
    folder, one = tmp_path_factory.mktemp("taken"), {"mia": adapter_dirs["one"]}
    options = {"cluster_secret": SECRET, "served_model_name": "tiny", "kernels": "numba", "quantization": "int8"}
    with ExitStack() as opened:
        yield [opened.enter_context(server(model, folder / name, one, **options)) for name in "ab"]


@pytest.fixture
def cluster(replicas: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The edge, which asks `a` first; `there(...)` says what `b` is, and where."""
    monkeypatch.setattr(prefill, "MIN_WORK_S", 0.0)
    monkeypatch.setattr(peer_pages, "MIN_WAIT_S", 60.0)
    a, b = replicas
    with edge_of([], chooser=InOrder(()), secret=SECRET) as edge:

        def there(role: str = "both", url: str = b.url, *, is_ready: bool = True) -> None:
            kernels = a.engine.fingerprint
            other = ReplicaAddress("b", url, is_ready=is_ready, role=role, kernels=kernels)
            edge.chooser.set_addresses([ReplicaAddress("a", a.url, kernels=kernels), other])

        there()
        yield SimpleNamespace(there=there, a=a, b=b, **vars(edge))
    for served in replicas:
        served.draining._until_s = None
        served.calm_down()


@pytest.fixture
def drained_in_time(replicas: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `a` take its time, so that its streams last until it drains, also if the test stands still for a moment."""
    executor = replicas[0].engine._executor
    submit = executor.submit

    def slowly(step: SchedulerOutput) -> StepHandle:
        time.sleep(0.02)
        return submit(step)

    monkeypatch.setattr(executor, "submit", slowly)


def body_of(model: str, salt: str, tokens: int = 24) -> dict[str, Any]:
    sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "speculation": False}
    return {"model": model, "prompt": PROMPT, "cache_salt": salt, **sampling}


def alone(served: SimpleNamespace, model: str, tokens: int = 24) -> str:
    """What a server says without any peer."""
    answer = served.http.post("/v1/completions", json=body_of(model, "alone", tokens))
    return str(answer.json()["choices"][0]["text"])


def ask(cluster: Any, model: str, salt: str) -> tuple[str, int | None]:
    """The text of an answer, and how many tokens of its prompt a peer has sent."""
    answer = cluster.http.post("/v1/completions", json=body_of(model, salt))
    assert answer.status_code == 200, answer.text
    transfer = answer.json()["usage"]["lorasrv"].get("kv_transfer")
    return answer.json()["choices"][0]["text"], transfer and transfer["tokens"]


def received(served: SimpleNamespace) -> int:
    """Tokens whose pages it has taken from peers since its start."""
    counters = served.engine.metrics.stats()
    return int(counters.peer_pages_received_total) * PAGE


@pytest.mark.parametrize("name", ["tiny", "mia"])
def test_long_prompts_are_computed_by_prefill_replicas(cluster: Any, name: str) -> None:
    cluster.there("prefill")
    before = received(cluster.a)
    assert ask(cluster, name, "apart") == (alone(cluster.b, name), SENT)
    assert received(cluster.a) - before == SENT
    assert alone(cluster.b, "tiny") != alone(cluster.b, "mia")


def test_a_prompt_that_moves_is_not_computed_again(cluster: Any) -> None:
    text = alone(cluster.b, "mia")
    assert ask(cluster, "mia", "moved") == (text, None)
    cluster.chooser.placement.by_affinity = lambda _, ready: sorted(ready, key=lambda one: one.replica.id, reverse=True)
    assert ask(cluster, "mia", "moved") == (text, SENT)
    assert ask(cluster, "mia", "moved") == (text, None), "it has them now"


def cut(seen: Seen) -> None:
    seen.begin_stream()
    seen.chunk(b"{")
    seen.socket.close()


@pytest.mark.parametrize(
    "answer",
    [
        cut,
        lambda seen: seen.answer(b'{"error":{"message":"busy"}}', 429),
        lambda seen: seen.answer(b"<html>", 200),
        lambda seen: seen.answer(json.dumps({"lease": "x", "pages": 12, "page_bytes": 1}).encode()),
        lambda seen: seen.wait_until_gone(),
    ],
    ids=["cut", "refuses", "nonsense", "other pages", "hangs"],
)
def test_a_peer_that_gives_nothing_changes_nothing(
    cluster: Any, answer: Any, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_pages, "MIN_WAIT_S", 0.5)
    with fake_replica(answer) as peer:
        cluster.there("prefill", peer.url)
        assert ask(cluster, "mia", request.node.name) == (alone(cluster.b, "mia"), 0)
        assert any("/v1/pages/offer" in seen.line for seen in peer.seen)


def test_a_peer_that_dies_between_offer_and_pages(cluster: Any) -> None:
    def passes_on(seen: Seen) -> None:
        method, target, _ = seen.line.split()
        kept = {name: value for name, value in seen.headers if name in ("authorization", "content-type")}
        answer = httpx2.request(method, cluster.b.url + target, content=seen.body, headers=kept, trust_env=False)
        if method == "GET":
            seen.begin_stream()
            seen.chunk(answer.content[:9999])
            raise Dies
        seen.answer(answer.content, answer.status_code)

    with fake_replica(passes_on) as peer:
        cluster.there("prefill", peer.url)
        assert ask(cluster, "tiny", "dies") == (alone(cluster.b, "tiny"), 0)
        assert [seen.line.split()[0] for seen in peer.seen] == ["POST", "GET"]


class Stream:
    """A streamed answer of a thread; `begun` once some of it is there."""

    def __init__(self, cluster: Any, model: str, salt: str, tokens: int) -> None:
        self.begun, self.text, self.errors = threading.Event(), "", list[Any]()
        self._body = {**body_of(model, salt, tokens), "stream": True}
        self._url = f"{cluster.url}/v1/completions"
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        with httpx2.stream("POST", self._url, json=self._body, timeout=60, trust_env=False) as answer:
            for line in filter(None, answer.iter_lines()):
                assert line.startswith("data: "), line
                if line == "data: [DONE]":
                    return
                event = json.loads(line[6:])
                self.errors += [event] if "error" in event else []
                self.text += event["choices"][0]["text"] if "choices" in event else ""
                if len(self.text) > 60:
                    self.begun.set()


TOKENS = 250


@pytest.mark.usefixtures("drained_in_time")
@pytest.mark.parametrize("name", ["tiny", "mia"])
def test_a_draining_replica_hands_its_streams_over_with_their_pages(cluster: Any, name: str) -> None:
    expected, before = alone(cluster.b, name, TOKENS), received(cluster.b)
    stream = Stream(cluster, name, "drained", TOKENS)
    assert stream.begun.wait(60)
    cluster.a.draining.begin(60.0)
    stream.thread.join(60)
    assert (stream.text, stream.errors) == (expected, [])
    stats = cluster.edge.stats
    assert (stats.moved, stats.resumed, stats.lost, stats.failed) == (1, 1, 0, {})
    assert SENT < received(cluster.b) - before < SENT + TOKENS, "pages of the prompt, and of the answer so far"


@pytest.mark.usefixtures("drained_in_time")
def test_a_stream_that_moves_is_a_request_of_both(cluster: Any) -> None:
    """Each counts what it has generated, so that sums over replicas are of tokens that were computed."""

    def counted() -> list[tuple[int, int, int]]:
        stats = [one.engine.request_stats for one in (cluster.a, cluster.b)]
        return [(one.total.requests, one.aborted["client"], one.total.tokens) for one in stats]

    before = counted()
    stream = Stream(cluster, "mia", "counted", TOKENS)
    assert stream.begun.wait(60)
    cluster.a.draining.begin(60.0)
    stream.thread.join(60)
    eventually(lambda: counted()[0][1] > before[0][1])
    first, second = (
        [now - then for now, then in zip(*pair, strict=True)] for pair in zip(counted(), before, strict=True)
    )
    assert (first[:2], second[:2]) == ([1, 1], [1, 0])
    assert 0 < second[2] < TOKENS <= first[2] + second[2] < 2 * TOKENS


@pytest.mark.usefixtures("drained_in_time")
def test_a_draining_replica_hands_a_response_over(cluster: Any) -> None:
    sampling = {"max_output_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "speculation": False}
    body = {"model": "mia", "input": "of the sea", **sampling}
    expected = cluster.b.http.post("/v1/responses", json=body).json()["output"][0]["content"][0]["text"]
    events = list[Any]()
    asked = {"json": {**body, "stream": True}, "timeout": 60, "trust_env": False}
    with httpx2.stream("POST", f"{cluster.url}/v1/responses", **asked) as answer:
        for line in filter(lambda line: line.startswith("data: "), answer.iter_lines()):
            events.append(json.loads(line[6:]))
            if len(events) == 10:
                cluster.a.draining.begin(60.0)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if event["type"].endswith(".delta")) == expected
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == expected
    assert (cluster.edge.stats.moved, cluster.edge.stats.lost) == (1, 0)


@pytest.mark.parametrize("why", ["nobody", "refuses", "is gone"])
def test_a_stream_stays_where_nobody_else_goes_on(cluster: Any, why: str) -> None:
    """It ends where it is, within the time of the drain."""
    expected = alone(cluster.b, "mia", TOKENS)
    with fake_replica(lambda seen: seen.answer(b"{}", 429)) as other:
        cluster.there(url=other.url if why == "refuses" else "http://127.0.0.1:9", is_ready=why != "nobody")
        stream = Stream(cluster, "mia", "stays", TOKENS)
        assert stream.begun.wait(60)
        cluster.a.draining.begin(60.0)
        stream.thread.join(60)
        assert (stream.text, stream.errors) == (expected, [])
        named = [seen.header("x-lorasrv-pages") for seen in other.seen]
        assert named == ([[cluster.a.url]] if why == "refuses" else [])
    assert (cluster.edge.stats.moved, cluster.edge.stats.lost) == (0, 0)


@pytest.mark.usefixtures("drained_in_time")
def test_what_moved_and_then_breaks_goes_on_once_more(cluster: Any) -> None:
    """The replica that took the stream over dies: the one that drains is not asked again, a third is."""
    expected = alone(cluster.b, "mia", TOKENS)

    def begins_and_dies(seen: Seen) -> None:
        seen.begin_stream()
        seen.chunk(b": tok")
        raise Dies

    with fake_replica(begins_and_dies) as second:
        kernels = cluster.a.engine.fingerprint
        urls = {"a": cluster.a.url, "b": second.url, "c": cluster.b.url}
        cluster.chooser.set_addresses([ReplicaAddress(name, url, kernels=kernels) for name, url in urls.items()])
        stream = Stream(cluster, "mia", "twice", TOKENS)
        assert stream.begun.wait(60)
        cluster.a.draining.begin(60.0)
        stream.thread.join(60)
    assert (stream.text, stream.errors) == (expected, [])
    assert (cluster.edge.stats.moved, cluster.edge.stats.failed) == (1, {"b": 1})
