"""The reading side of pages against a server that misbehaves: whole frames are used, and nothing else."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from small_server import QuietHandler

from adapter_store.storage.snapshots import SnapshotName
from api.replication import page_client, page_frames
from api.replication.page_client import PageClient
from api.replication.page_frames import CHECK_BYTES, LAYOUT, check_of, frames, stream_bytes
from lorasrv.errors import PeerFailed
from lorasrv.outputs import RequestId
from lorasrv.request import EngineCoreRequest, FixedPrefix, Peer
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import PeerSnapshot

PAGE_BYTES, PAGES = 10, 7
DATA = bytes(range(PAGE_BYTES * PAGES))
FRAME = 3 * PAGE_BYTES + CHECK_BYTES
"""Three pages are a frame here."""


class Giver(ThreadingHTTPServer):
    """A server of pages, and what is wrong with it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.offer: dict[str, Any] = {"lease": "abc", "pages": PAGES, "page_bytes": PAGE_BYTES}
        self.status = 200
        self.stream = b"".join(
            DATA[first * PAGE_BYTES : (first + count) * PAGE_BYTES]
            + check_of(memoryview(DATA[first * PAGE_BYTES : (first + count) * PAGE_BYTES]))
            for first, count in frames(PAGES, PAGE_BYTES)
        )
        self.length = len(self.stream)
        self.wait = lambda: None
        self.asked: list[tuple[str, str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(QuietHandler):
    server: Giver

    def do_POST(self) -> None:  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, self.headers["authorization"], body))
        self.server.wait()
        error = {"error": {"message": "kernels differ"}}
        content = json.dumps(self.server.offer if self.server.status == 200 else error).encode()
        self._send(self.server.status, content, len(content))

    def do_GET(self) -> None:  # noqa: N802
        self.server.asked.append((self.path, self.headers["authorization"], None))
        self._send(200, self.server.stream, self.server.length)

    def _send(self, status: int, content: bytes, length: int) -> None:
        self.send_response(status)
        self.send_header("content-length", str(length))
        self.end_headers()
        self.wfile.write(content)
        if len(content) < length:
            self.close_connection = True


@pytest.fixture
def giver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Giver]:
    monkeypatch.setattr(page_frames, "FRAME_BYTES", 3 * PAGE_BYTES)
    with Giver() as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield server
        server.shutdown()
        serving.join()


def wanted(giver: Giver, *, computes: bool = True, wait_s: float = 30.0, count: int = PAGES) -> PeerSnapshot:
    message = EngineCoreRequest(
        RequestId("r"),
        tuple(range(120)),
        5,
        SamplingParams(),
        adapter_id="mia",
        principal="ann",
        cache_salt="key:ann",
        prefix=FixedPrefix("mia.1", "prefix:mia", 40),
    )
    digests = tuple(bytes([number]) * 32 for number in range(count))
    peer = Peer(giver.url, computes)
    return PeerSnapshot(SnapshotName("peer", "x"), peer, {"base": "ab"}, digests, 0, tuple(range(112)), message, wait_s)


def fetch(of: PeerSnapshot, is_wanted: Callable[[], bool] = lambda: True) -> bytes:
    data = PageClient("of-one-cluster")(of, PAGE_BYTES, is_wanted)
    assert data.dtype == np.uint8
    return data.tobytes()


@pytest.mark.parametrize("computes", [True, False])
def test_pages_are_asked_for_and_read(giver: Giver, computes: bool) -> None:
    assert len(giver.stream) == stream_bytes(PAGES, PAGE_BYTES)
    assert fetch(wanted(giver, computes=computes)) == DATA
    (offer, key, body), (read, same_key, _) = giver.asked
    assert (offer, read, key, same_key) == ("/v1/pages/offer", "/v1/pages/abc", *["Bearer of-one-cluster"] * 2)
    assert (body["layout"], body["facts"], len(body["digests"]), body["wait_s"]) == (LAYOUT, {"base": "ab"}, PAGES, 30)
    assert body["digests"][1] == "01" * 32
    assert (body["prompt"] is None) is not computes
    if computes:
        own = {"owner": "mia.1", "salt": "prefix:mia", "num_tokens": 40}
        assert body["prompt"]["token_ids"] == list(range(112))
        assert body["prompt"] | {"token_ids": ()} == {
            "token_ids": (),
            "adapter": None,
            "adapter_id": "mia",
            "principal": "ann",
            "salt": "key:ann",
            "priority": 0,
            "prefix": own,
        }


def test_any_cut_leaves_the_whole_frames(giver: Giver) -> None:
    whole = giver.stream
    for cut in range(len(whole)):
        giver.stream = whole[:cut]
        pages = min(PAGES, 3 * (cut // FRAME)) if cut < len(whole) else PAGES
        if pages:
            assert fetch(wanted(giver)) == DATA[: pages * PAGE_BYTES], cut
        else:
            with pytest.raises(PeerFailed, match="cut off"):
                fetch(wanted(giver))


def test_any_damage_leaves_the_frames_before_it(giver: Giver) -> None:
    whole = giver.stream
    for at in range(len(whole)):
        giver.stream = whole[:at] + bytes([whole[at] ^ 8]) + whole[at + 1 :]
        if pages := 3 * (at // FRAME):
            assert fetch(wanted(giver)) == DATA[: pages * PAGE_BYTES], at
        else:
            with pytest.raises(PeerFailed, match="damaged"):
                fetch(wanted(giver))


@pytest.mark.parametrize(
    ("wrong", "reason", "why"),
    [
        ({"status": 409}, "refused", "409 kernels differ"),
        ({"status": 503}, "refused", "503"),
        ({"offer": {"lease": None, "pages": 0, "page_bytes": PAGE_BYTES}}, "missing", "no pages"),
        ({"offer": {"lease": "a", "pages": 7, "page_bytes": 9}}, "refused", "pages of 9 bytes, not 10"),
        ({"offer": ["nonsense"]}, "unreachable", "gave no pages"),
        ({"offer": {}}, "unreachable", "gave no pages"),
        ({"length": 1}, "unreachable", "gave no pages"),
    ],
)
def test_what_gives_no_page(giver: Giver, wrong: dict[str, Any], reason: str, why: str) -> None:
    for name, value in wrong.items():
        setattr(giver, name, value)
    with pytest.raises(PeerFailed, match=why) as failed:
        fetch(wanted(giver))
    assert failed.value.reason == reason


def test_a_peer_that_sends_more_than_is_wanted_is_read_as_far(giver: Giver) -> None:
    giver.stream, giver.length = giver.stream, len(giver.stream)
    assert fetch(wanted(giver, count=6)) == DATA[: 6 * PAGE_BYTES]


def test_nobody_is_there(giver: Giver) -> None:
    gone = wanted(giver)
    gone = gone._replace(peer=Peer("http://127.0.0.1:1", computes=True))
    with pytest.raises(PeerFailed) as failed:
        fetch(gone)
    assert failed.value.reason == "unreachable"


@pytest.mark.parametrize("unwanted", [True, False])
def test_a_wait_ends(giver: Giver, monkeypatch: pytest.MonkeyPatch, unwanted: bool) -> None:
    monkeypatch.setattr(page_client, "POLL_S", 0.01)
    over = threading.Event()
    giver.wait = lambda: over.wait(60)  # type: ignore[assignment, return-value]
    begun = time.monotonic()
    with pytest.raises(PeerFailed) as failed:
        fetch(wanted(giver, wait_s=60 if unwanted else 0.2), lambda: not (unwanted and giver.asked))
    over.set()
    assert failed.value.reason == "timeout"
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("drips", ["head", "offer", "pages"])
def test_a_peer_that_drips_has_no_more_time_than_a_silent_one(
    giver: Giver, monkeypatch: pytest.MonkeyPatch, drips: str
) -> None:
    """Pages that came before are used."""
    written: list[bytes] = []

    def send(handler: Handler, status: int, content: bytes, length: int) -> None:
        is_offer = handler.command == "POST"
        body = content.ljust(150) if is_offer else content
        head = f"HTTP/1.1 {status} OK\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        whole = head + body
        at = {"head": 9, "offer": len(head) + 5, "pages": len(whole) if is_offer else len(head) + 2 * FRAME}[drips]
        try:
            for piece in (whole[:at], *(whole[place : place + 1] for place in range(at, len(whole)))):
                written.append(piece)
                handler.wfile.write(piece)
                time.sleep(0.2)
        except ConnectionError:
            handler.close_connection = True

    monkeypatch.setattr(Handler, "_send", send)
    if drips == "pages":
        assert fetch(wanted(giver, wait_s=3.0)) == DATA[: 6 * PAGE_BYTES]
    else:
        with pytest.raises(PeerFailed) as failed:
            fetch(wanted(giver, wait_s=3.0))
        assert failed.value.reason == "timeout"
    assert len(written) < 75
