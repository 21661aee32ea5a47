"""The edge in front of replicas that die, hang and refuse at every place: what the client gets, and who was asked."""

import gc
import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from fake_replicas import Dies, Seen, edge_of, fake_replica
from raw_client import RawClient, head_of, json_request
from server import eventually

from api.asgi.sse import event
from api.cluster import forwarding
from api.cluster.chooser import ReplicaAddress
from api.cluster.edge import Edge
from api.cluster.forwarded_request import ForwardedRequest
from api.cluster.interruption import Interruption
from api.cluster.local import edge_server
from api.cluster.pick import ReplicaWatch
from api.cluster.upstream import UpstreamRequest, Upstreams
from api.config.sources import Sources
from api.errors import describe_at
from api.server import bind
from lorasrv.errors import EngineDead, ServerStopping
from lorasrv.placement.kinds import make_placement

CHAT, TGI = "/v1/chat/completions", "/generate"
EVENT = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def cluster() -> Any:
    """Three replicas, asked in their order, a registry, and the edge."""
    with ExitStack() as opened:
        replicas = [opened.enter_context(fake_replica(answering(f"r{number}"))) for number in range(3)]
        registry = opened.enter_context(fake_replica(answering("registry")))
        edge = opened.enter_context(edge_of([one.url for one in replicas], registry.url))
        yield SimpleNamespace(replicas=replicas, registry=registry, **vars(edge))


def answering(name: str) -> Any:
    return lambda seen: seen.answer(json.dumps({"by": name}).encode(), 200, "content-type: application/json")


def ask(cluster: Any, path: str = CHAT, **fields: Any) -> Any:
    return cluster.http.post(path, json={"model": "mia", **fields})


def num_seen(cluster: Any) -> list[int]:
    return [len(one.seen) for one in cluster.replicas]


def dies(seen: Seen) -> None:
    raise Dies


def dies_behind_head(seen: Seen) -> None:
    seen.begin_stream()
    raise Dies


def dies_in_whole_answer(seen: Seen) -> None:
    seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
    raise Dies


def speaks_nonsense(seen: Seen) -> None:
    seen.send(b"hello\r\n\r\n")
    raise Dies


def has_no_length(seen: Seen) -> None:
    """Its end would be that of the connection: a short answer would look whole."""
    seen.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}")
    raise Dies


UNBEGUN = [dies, dies_behind_head, dies_in_whole_answer, speaks_nonsense, has_no_length]


@pytest.mark.parametrize("fault", UNBEGUN)
def test_what_has_not_begun_is_answered_by_the_next(cluster: Any, fault: Any) -> None:
    cluster.replicas[0].answer = fault
    assert ask(cluster).json() == {"by": "r1"}
    assert num_seen(cluster) == [1, 1, 0]
    # The one that failed comes last for a moment: no second request has to find out.
    assert ask(cluster).json() == {"by": "r1"}
    assert num_seen(cluster) == [1, 2, 0]


@pytest.mark.parametrize(("path", "status"), [(CHAT, 502), (TGI, 502)])
def test_after_two_retries_it_is_told(cluster: Any, path: str, status: int) -> None:
    for replica in cluster.replicas:
        replica.answer = dies_in_whole_answer
    answer = ask(cluster, path)
    assert answer.status_code == status
    assert "replica that answered is gone" in answer.text
    assert "127.0.0.1" not in answer.text
    if path == CHAT:
        assert answer.json()["error"]["code"] == "replica_lost"
    assert answer.headers["retry-after"] == "1"
    assert num_seen(cluster) == [1, 1, 1]


def test_replicas_that_refuse_connections_leave_the_request_unseen(caplog: pytest.LogCaptureFixture) -> None:
    with fake_replica() as one:
        pass
    with edge_of([one.url] * 3) as edge:
        answer = ask(edge)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica_ready")
        assert answer.headers["retry-after"] == "1"
        assert "127.0.0.1" not in answer.text
    assert caplog.text.count(f"{one.url} does not answer") == 3, "its address is for the operator"


def test_without_any_replica_it_says_so(cluster: Any) -> None:
    cluster.chooser.set_addresses([])
    answer = ask(cluster)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica_ready")


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/generate_stream"])
@pytest.mark.parametrize("cut", [b"", b'data: {"choices":[{"del'])
def test_a_stream_that_breaks_ends_with_an_error_behind_whole_events(cluster: Any, path: str, cut: bytes) -> None:
    def breaks(seen: Seen) -> None:
        seen.begin_stream()
        seen.chunk(EVENT)
        if cut:
            seen.chunk(cut)
        raise Dies

    cluster.replicas[0].answer = breaks
    answer = ask(cluster, path, stream=True)
    events = answer.content.split(b"\n\n")
    assert events.pop(0) + b"\n\n" == EVENT
    name, _, data = events.pop(0).rpartition(b"data: ")
    error = json.loads(data)
    assert name == (b"event: error\n" if path == "/v1/responses" else b"")
    if path == "/v1/responses":
        assert (error["type"], error["code"], error["error"]["code"]) == ("error", "replica_lost", "replica_lost")
        assert error["sequence_number"] == 1
        assert events == [b""]
    elif path == CHAT:
        assert error["error"]["code"] == "replica_lost"
        assert events == [b"data: [DONE]", b""]
    else:
        assert error["error_type"] == "generation"
        assert events == [b""]
    assert num_seen(cluster) == [1, 0, 0]
    assert cluster.edge.stats.lost == 1


def test_a_long_answer_that_breaks_is_cut_and_not_ended(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A client must not take the part for the whole."""

    def breaks(seen: Seen) -> None:
        seen.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n" + b"x" * 70_000)
        raise Dies

    cluster.replicas[0].answer = breaks
    with RawClient(cluster.port) as client:
        got = client.send(json_request(CHAT, model="mia")).read()
    head, _, body = got.partition(b"\r\n\r\n")
    assert b"content-length: 100000" in head
    assert 0 < len(body) <= 70_000
    eventually(lambda: "broke off" in caplog.text)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("path", ["/v1/adapters/mia:verify", CHAT])
def test_who_leaves_before_an_answer_begins_is_noticed(path: str) -> None:
    """The registry and replicas hear of it, and stop working."""
    begun, gone = threading.Event(), threading.Event()

    def works(seen: Seen) -> None:
        begun.set()
        seen.wait_until_gone()
        gone.set()

    with fake_replica(works) as one, edge_of([one.url], one.url) as edge:
        with RawClient(edge.port) as client:
            client.send(json_request(path, model="mia"))
            assert begun.wait(5)
        assert gone.wait(5)


def test_a_first_look_that_fails_is_followed_by_others() -> None:
    """On a busy machine replicas may take longer to answer than a look waits."""
    looks = iter([TimeoutError("busy")])

    async def look() -> list[ReplicaAddress | BaseException]:
        for error in looks:
            raise error
        return [ReplicaAddress("r0", "http://127.0.0.1:9")]

    watch, is_ready = ReplicaWatch(look, make_placement("hash")), threading.Event()
    listener, settings = bind("127.0.0.1", 0), Sources.of_flags({"replicas": 1}).settings()
    server = edge_server(settings, Edge(watch, None), watch, is_ready.set, Interruption())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        assert is_ready.wait(10)
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join(30)


def full(retry_after_s: int, status: int = 429, *headers: str) -> Any:
    body = json.dumps({"error": {"code": "server_overloaded", "wait": retry_after_s}}).encode()
    return lambda seen: seen.answer(body, status, f"retry-after: {retry_after_s}", *headers)


def test_a_full_replica_is_passed_over_once(cluster: Any) -> None:
    cluster.replicas[0].answer = full(7)
    assert ask(cluster).json() == {"by": "r1"}
    # It is full, not broken: it stays the first of its keys.
    assert ask(cluster).json() == {"by": "r1"}
    assert num_seen(cluster) == [2, 2, 0]


@pytest.mark.parametrize(("first", "second"), [(7, 3), (3, 7)])
def test_of_two_full_replicas_the_shorter_wait_is_told(cluster: Any, first: int, second: int) -> None:
    cluster.replicas[0].answer, cluster.replicas[1].answer = full(first), full(second)
    answer = ask(cluster)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["wait"] == 3
    assert num_seen(cluster) == [1, 1, 0]


def test_a_draining_replica_sends_its_requests_on(cluster: Any) -> None:
    cluster.replicas[0].answer = full(5, 503, "connection: close")
    assert ask(cluster).json() == {"by": "r1"}


def test_draining_and_full_replicas_leave_the_third(cluster: Any) -> None:
    cluster.replicas[0].answer, cluster.replicas[1].answer = full(2, 503, "connection: close"), full(7)
    assert ask(cluster).json() == {"by": "r2"}
    cluster.replicas[2].answer = full(9)
    assert ask(cluster).headers["retry-after"] == "7", "of those that are full, the shorter wait"


def test_that_one_is_full_is_told_before_that_others_stop(cluster: Any) -> None:
    cluster.replicas[0].answer = full(7)
    for replica in cluster.replicas[1:]:
        replica.answer = full(2, 503, "connection: close")
    answer = ask(cluster)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")


@pytest.mark.parametrize("error", [EngineDead("the engine died"), ServerStopping("the server is shutting down")])
@pytest.mark.parametrize("path", [CHAT, TGI])
def test_a_replica_whose_engine_ends_sends_its_requests_on(cluster: Any, path: str, error: Exception) -> None:
    failure = describe_at(path, error)
    headers = [f"{name}: {value}" for name, value in failure.headers.items()]
    cluster.replicas[0].answer = lambda seen: seen.answer(json.dumps(failure.body).encode(), failure.status, *headers)
    assert ask(cluster, path).json() == {"by": "r1"}


@pytest.mark.parametrize("path", [CHAT, "/generate_stream"])
def test_a_stream_whose_engine_ends_goes_on_elsewhere(path: str) -> None:
    """The event that says so is the replica's, in any protocol, and so is one whose tokens are not told; its client
    reads the next one's.
    """
    offer = json.dumps({"answer_id": "a", "created_s": 1, "seed": 1, "digest": "d"})

    def ends(seen: Seen) -> None:
        seen.begin_stream(f"x-lorasrv-resume: {offer}")
        seen.chunk(EVENT + b": tokens 17\n\n" + EVENT + b": stopping\n\n")
        seen.chunk(event(describe_at(path, EngineDead("dead")).body))
        seen.end()

    def goes_on(seen: Seen) -> None:
        seen.begin_stream(f"x-lorasrv-resume: {offer}")
        seen.chunk(EVENT)
        seen.end()

    with ExitStack() as opened:
        replicas = [opened.enter_context(fake_replica(answer)) for answer in (ends, goes_on)]
        edge = opened.enter_context(edge_of([one.url for one in replicas], secret="secret"))
        assert ask(edge, path, stream=True).content == 2 * EVENT
        assert json.loads(replicas[1].seen[0].body.partition(b"}")[0] + b"}")["token_ids"] == [17]


def test_a_refusal_that_is_the_answer_is_passed_on(cluster: Any) -> None:
    cluster.replicas[0].answer = full(5, 503)
    assert ask(cluster, on_cold="reject").status_code == 503
    assert num_seen(cluster) == [1, 0, 0]


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_client_that_leaves_takes_its_request_along(cluster: Any, when: str) -> None:
    gone = threading.Event()

    def hangs(seen: Seen) -> None:
        if when == "behind":
            seen.begin_stream()
            seen.chunk(EVENT)
        seen.wait_until_gone()
        gone.set()

    cluster.replicas[0].answer = hangs
    with RawClient(cluster.port) as client:
        client.send(json_request(CHAT, model="mia", stream=True))
        if when == "behind":
            client.read_until(b"content")
        eventually(lambda: num_seen(cluster)[0])
    assert gone.wait(10)
    assert num_seen(cluster) == [1, 0, 0]
    eventually(lambda: set(cluster.chooser.placement.loads_s().values()) == {0.0})


def test_a_hung_replica_is_waited_for_until_it_is_killed(cluster: Any) -> None:
    killed = threading.Event()

    def hangs(seen: Seen) -> None:
        killed.wait(20)
        raise Dies

    cluster.replicas[0].answer = hangs
    waiting = threading.Thread(target=lambda: results.append(ask(cluster).json()))
    results: list[Any] = []
    waiting.start()
    eventually(lambda: num_seen(cluster)[0])
    killed.set()
    waiting.join(20)
    assert results == [{"by": "r1"}]


@pytest.mark.parametrize("stream", [False, True])
def test_what_an_edge_has_not_ended_when_it_stops_is_told(stream: bool) -> None:
    """Its replica goes on answering; the edge does not wait for longer than it drains."""

    def goes_on(seen: Seen) -> None:
        if stream:
            seen.begin_stream()
            seen.chunk(EVENT)
        seen.wait_until_gone()

    got: list[httpx2.Response] = []
    with fake_replica(goes_on) as replica:
        with edge_of([replica.url]) as edge:
            asking = threading.Thread(
                target=lambda: got.append(httpx2.post(f"{edge.url}{CHAT}", json={"stream": stream}, timeout=20))
            )
            asking.start()
            eventually(lambda: replica.seen)
            if stream:
                eventually(lambda: edge.edge.stats.answers[200])
            edge.edge.draining.begin(0.0)
        asking.join(20)
    assert got[0].status_code == (200 if stream else 503)
    assert b'"code":"server_stopping"' in got[0].content
    assert got[0].content.endswith(DONE) == stream


def test_a_reader_who_stops_stops_the_replica(cluster: Any) -> None:
    """What is between them is bounded by buffers of a known size, however much the replica would say."""
    sent = 0

    def floods(seen: Seen) -> None:
        nonlocal sent
        seen.begin_stream()
        seen.socket.settimeout(1.0)
        try:
            while sent < 64 << 20:
                seen.chunk(EVENT * 200)
                sent += 200 * len(EVENT)
        except TimeoutError:
            raise Dies from None

    cluster.replicas[0].answer = floods
    with RawClient(cluster.port, buffer=4096) as client:
        client.send(json_request(CHAT, model="mia", stream=True))
        client.read_until(b"content")
        eventually(lambda: sent > 0)
        eventually(lambda: not (cluster.edge.stats.failed["r0"] == 0 and sent > 8 << 20), 20)
        assert sent < 8 << 20


def test_a_kept_connection_that_has_just_ended_is_no_failure(cluster: Any) -> None:
    def once(seen: Seen) -> None:
        seen.answer(b"{}")
        raise Dies

    cluster.replicas[0].answer = once
    for _ in range(5):
        assert ask(cluster).content == b"{}"
    assert num_seen(cluster) == [5, 0, 0]
    assert cluster.edge.stats.retries == 0


async def test_an_answer_that_is_closed_twice_cuts_no_other() -> None:
    """Its connection is kept, and another answer may come on it."""
    is_closed = threading.Event()

    def later(seen: Seen) -> None:
        seen.begin_stream()
        is_closed.wait(10)
        seen.chunk(b"whole")
        seen.end()

    with fake_replica(answering("r0")) as replica:
        upstreams, request = Upstreams(), UpstreamRequest("GET", b"/", [(b"host", b"replica")])
        first = await upstreams.ask(replica.url, request)
        await first.read_all()
        first.close()
        replica.answer = later
        second = await upstreams.ask(replica.url, request)
        first.close()
        is_closed.set()
        assert await second.read_all() == b"whole"
        second.close()
        assert len({id(seen.socket) for seen in replica.seen}) == 1, "kept"
        upstreams.close()


def test_headers_that_go_through_and_those_that_do_not(cluster: Any) -> None:
    def answer(seen: Seen) -> None:
        lines = ("x-adapter-id: mia", "keep-alive: timeout=5", "connection: x-private", "x-private: 1", 'etag: "a"')
        seen.answer(b"{}", 200, *lines, "date: then", "set-cookie: a=1", "set-cookie: b=2")

    cluster.replicas[0].answer = answer
    sent = [
        ("authorization", "Bearer k"),
        ("x-lorasrv-cluster", "guess"),
        ("x-lorasrv-resume", "3"),
        ("x-lorasrv-prefill", "http://evil"),
        ("x-lorasrv-min-revision", "12"),
        ("connection", "x-mine"),
        ("x-mine", "1"),
        ("te", "trailers"),
        ("x-request-id", "given"),
        ("x-session-id", "s"),
    ]
    got = cluster.http.post(CHAT + "?a=%2F&b", json={"model": "mia"}, headers=sent)
    [seen] = cluster.replicas[0].seen
    assert seen.line == f"POST {CHAT}?a=%2F&b HTTP/1.1"
    for name, value in sent:
        passes = name in ("authorization", "x-lorasrv-min-revision", "x-request-id", "x-session-id")
        assert seen.header(name) == ([value] if passes else []), name
    assert seen.header("host") == [f"127.0.0.1:{cluster.port}"], "the replica checks the client's own"
    assert got.headers["x-request-id"] == "given"
    assert got.headers["etag"] == '"a"'
    assert got.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert not {"keep-alive", "x-private", "connection"} & set(got.headers)
    assert got.headers.get_list("date") != ["then"]


@pytest.mark.parametrize("lines", ["HTTP/1.0\r\n", "HTTP/1.1\r\nhost: a\r\nconnection: host, close\r\n"])
def test_a_host_that_is_missing_or_named_by_connection(cluster: Any, lines: str) -> None:
    with RawClient(cluster.port) as client:
        got = client.send(f"POST {CHAT} {lines}content-length: 2\r\n\r\n{{}}".encode()).read()
    assert b" 200 " in got.split(b"\r\n")[0]
    [seen] = cluster.replicas[0].seen
    assert [host for host in seen.header("host") if host] == (["a"] if "host: a" in lines else [])


def test_a_body_that_no_stream_can_need_again_is_let_go(cluster: Any) -> None:
    """A stream may last for hours."""
    bodies, earlier = [], [one for one in gc.get_objects() if type(one) is ForwardedRequest]

    def answer(seen: Seen) -> None:
        seen.begin_stream()
        seen.chunk(EVENT)
        forwarded = [one for one in gc.get_objects() if type(one) is ForwardedRequest and one not in earlier]
        eventually(lambda: not any(one._request.body for one in forwarded))
        bodies.extend(one._request.body for one in forwarded)
        seen.chunk(DONE)
        seen.end()

    cluster.replicas[0].answer = answer
    assert ask(cluster, stream=True).status_code == 200
    assert bodies == [b""]


@pytest.mark.parametrize("path", [CHAT, "/v1/adapters"])
def test_a_length_that_is_said_twice_is_refused(cluster: Any, path: str) -> None:
    lines = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
    with RawClient(cluster.port) as client:
        got = client.send(lines.encode() + b"0\r\n\r\nGET /v1/pool HTTP/1.1\r\nhost: a\r\n\r\n").read()
    assert got.startswith(b"HTTP/1.1 400")
    assert b"given twice" in got
    assert got.count(b"HTTP/1.1") == 1
    assert num_seen(cluster) == [0, 0, 0]
    assert cluster.registry.seen == []


def test_bodies_are_framed_anew(cluster: Any) -> None:
    body = b'{"model": "mia"}'
    chunks = (
        b"".join(b"%x;ext=1\r\n%b\r\n" % (1, body[at : at + 1]) for at in range(len(body))) + b"0\r\nx-t: 1\r\n\r\n"
    )
    with RawClient(cluster.port) as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
        client.read_until(b'"by"')
    [seen] = cluster.replicas[0].seen
    assert seen.body == body
    assert seen.header("content-length") == [str(len(body))]
    assert seen.header("transfer-encoding") == seen.header("x-t") == []


def test_bodies_that_are_too_long_reach_nobody(cluster: Any) -> None:
    answer = cluster.http.post(CHAT, content=b" " * ((8 << 20) + 1), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert num_seen(cluster) == [0, 0, 0]
    assert ask(cluster, text="x" * (8 << 20 - 1)).status_code == 200


REGISTRY = [
    ("PUT", "/v1/blobs/sha256:0"),
    ("POST", "/v1/adapters"),
    ("GET", "/v1/adapters/mia"),
    ("DELETE", "/v1/adapters/mia"),
    ("GET", "/v1/models"),
    ("POST", "/v1/batches"),
    ("GET", "/console"),
    ("GET", "/"),
    ("GET", "/no/such/path"),
]


@pytest.mark.parametrize(("method", "path"), REGISTRY)
def test_what_the_registry_answers(cluster: Any, method: str, path: str) -> None:
    content = b"{}" if method in ("PUT", "POST") else b""
    assert cluster.http.request(method, path, content=content).json() == {"by": "registry"}
    assert cluster.registry.seen[0].body == content


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/"), ("POST", "/tokenize"), ("GET", "/info"), ("POST", "/v1/adapters/mia:warm")]
)
def test_what_replicas_answer(cluster: Any, method: str, path: str) -> None:
    content = b"{}" if method == "POST" else b""
    assert cluster.http.request(method, path, content=content).json()["by"] in ("r0", "r1", "r2")
    assert cluster.http.head("/info").headers["content-type"] == "application/json"


UPLOAD = b"PUT /v1/blobs/sha256:0 HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000000\r\n\r\n"


def test_an_upload_is_streamed_and_ends_with_its_answer(cluster: Any) -> None:
    """The registry has the first bytes while the last ones are not even sent."""

    def refuses(seen: Seen) -> None:
        assert seen.file.read1(10)
        seen.answer(b'{"error":{"code":"unauthorized"}}', 401)
        seen.wait_until_gone()

    cluster.registry.answers_early, cluster.registry.answer = True, refuses
    with RawClient(cluster.port) as client:
        client.send(UPLOAD, b"x" * 1000)
        assert b"401" in client.read_until(b"unauthorized")
    [seen] = cluster.registry.seen
    assert seen.header("content-length") == ["1000000000"]


def test_an_upload_whose_client_leaves_is_cut(cluster: Any) -> None:
    gone = threading.Event()

    def reads(seen: Seen) -> None:
        seen.wait_until_gone()
        gone.set()

    cluster.registry.answers_early, cluster.registry.answer = True, reads
    with RawClient(cluster.port) as client:
        client.send(UPLOAD, b"x" * 100_000)
        eventually(lambda: cluster.registry.seen)
    eventually(gone.is_set)


@pytest.mark.parametrize("path", [CHAT, "/v1/files"])
def test_a_body_that_stops_in_the_middle_is_refused_and_counted_once(path: str) -> None:
    """What has been sent on is cut as well: nobody waits for the rest. A client that closes is no limit's doing."""
    gone = threading.Event()

    def reads(seen: Seen) -> None:
        seen.wait_until_gone()
        gone.set()

    with fake_replica(lambda seen: seen.answer(b"{}")) as replica, fake_replica(reads) as registry:
        registry.answers_early = True

        async def look() -> list[ReplicaAddress]:
            return [ReplicaAddress("r0", replica.url)]

        watch = ReplicaWatch(look, make_placement("hash"))
        settings = Sources.of_flags({"replicas": 1, "body_timeout_s": 0.3}).settings()
        listener, started = bind("127.0.0.1", 0), threading.Event()
        server = edge_server(settings, Edge(watch, registry.url), watch, started.set, Interruption())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert started.wait(30)
            port = listener.getsockname()[1]
            half = head_of(path, "Content-Type: application/json", "Content-Length: 1000") + b" " * 500
            with RawClient(port) as client:
                status, _, body = client.send(half).answer()
            assert (status, body["error"]["code"]) == (408, "body_timeout")
            assert path == CHAT or gone.wait(10)
            with RawClient(port) as client:
                client.send(half)
            figures = httpx2.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
            assert 'lorasrv_connections_cut_total{reason="body_timeout"} 1.0' in figures
            assert not any(seen.line.startswith("POST") for seen in replica.seen)
        finally:
            server.handle_exit(signal.SIGTERM, None)
            thread.join(30)


def test_ready_is_told_when_a_replica_is_ready() -> None:
    """Replicas that follow a registry run without a lease, when they may not answer."""
    is_ready = threading.Event()

    async def look() -> list[ReplicaAddress]:
        return [ReplicaAddress("r0", "http://127.0.0.1:9", is_ready=is_ready.is_set())]

    watch, told = ReplicaWatch(look, make_placement("hash")), threading.Event()
    listener, settings = bind("127.0.0.1", 0), Sources.of_flags({"replicas": 1}).settings()
    server = edge_server(settings, Edge(watch, None), watch, told.set, Interruption())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/ready"
        assert httpx2.get(url, trust_env=False, timeout=30).status_code == 503
        assert not told.wait(1.5)
        is_ready.set()
        assert told.wait(30)
        assert httpx2.get(url, trust_env=False).status_code == 200
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join(30)


def test_without_a_registry_only_inference_is_answered() -> None:
    with fake_replica() as replica, edge_of([replica.url]) as edge:
        answer = edge.http.get("/v1/adapters")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_registry")
        assert ask(edge).status_code == 200


def test_a_registry_that_is_down_is_told(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    with fake_replica() as gone:
        pass
    with edge_of([cluster.replicas[0].url], gone.url) as edge:
        answer = edge.http.post("/v1/adapters", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "registry_unreachable")
        assert answer.headers["retry-after"] == "2"
        assert "127.0.0.1" not in answer.text
    assert f"{gone.url} does not answer" in caplog.text


def test_a_write_is_never_sent_twice(cluster: Any) -> None:
    cluster.registry.answer = dies
    for _ in range(2):
        assert cluster.http.post("/v1/adapters", json={}).status_code == 503
    assert len(cluster.registry.seen) == 2


@pytest.mark.parametrize(
    ("path", "usage"),
    [
        (CHAT, {"prompt_tokens": 3, "completion_tokens": 41}),
        ("/v1/responses", {"input_tokens": 3, "output_tokens": 41}),
    ],
)
def test_lengths_of_answers_are_learnt_from_their_usage_alone(cluster: Any, path: str, usage: dict[str, int]) -> None:
    """A response repeats what its client sent."""
    repeated = {"default": {"completion_tokens": 10**9, "output_tokens": 10**9}}
    body = json.dumps({"tools": [repeated], "usage": usage}, separators=(",", ":")).encode()
    cluster.replicas[0].answer = lambda seen: seen.answer(body)
    learnt: list[int] = []
    cluster.edge.stats.observe_answer = lambda adapter_id, num_tokens: learnt.append(num_tokens)
    assert ask(cluster, path).status_code == 200
    assert learnt == [41]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_a_registry_that_hangs_is_told(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """Before an answer; one that has begun, and a request that waits by itself, have their time."""
    for name in ("READ_S", "WRITE_S"):
        monkeypatch.setattr(forwarding, name, 0.3)
    cluster.registry.answer = lambda seen: seen.wait_until_gone()
    answer = cluster.http.request(method, "/v1/adapters", content=b"{}" if method == "POST" else b"")
    assert answer.status_code == 503
    if method != "HEAD":
        assert answer.json()["error"]["code"] == "registry_unreachable"
        assert "127.0.0.1" not in answer.text
    assert f"{cluster.registry.url} has not answered for 0.3 s" in caplog.text
    assert len(cluster.registry.seen) == 1

    def slowly(seen: Seen) -> None:
        time.sleep(0.6)
        seen.answer(b"{}")

    cluster.registry.answer = slowly
    assert cluster.http.request(method, "/v1/adapters/mia", params={"wait": "30"}).status_code == 200
    assert cluster.http.request(method, "/v1/adapters", params={"wait": "all"}).status_code == 503


def test_a_registry_that_stops_reading_is_told(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "WRITE_S", 0.3)
    over = threading.Event()
    cluster.registry.answers_early, cluster.registry.answer = True, lambda seen: over.wait(60)
    with RawClient(cluster.port) as client, ThreadPoolExecutor(1) as sending:
        sending.submit(client.send, UPLOAD, b"x" * (64 << 20))
        assert b"503" in client.read_until(b"registry_unreachable")
        over.set()
        client.socket.shutdown(socket.SHUT_RDWR)
