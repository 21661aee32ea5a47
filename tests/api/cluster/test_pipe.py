"""What clients send and read goes through the edge as it is: recorded bodies, status, headers and bytes."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fake_replicas import Seen, edge_of, fake_replica

from api.cluster.forwarding import Destination, destination
from api.cluster.own_routes import GUARDED, OPEN

FOLDER = Path(__file__).parents[1] / "data" / "clients"
RECORDED = [
    {**request, "client": path.stem}
    for path in sorted(FOLDER.glob("*.json"))
    for request in json.loads(path.read_text("utf-8"))["requests"]
    if request["path"] not in {**OPEN, **GUARDED}
]
OWN = {"date", "transfer-encoding", "connection", "server"}


def headers_of(answer: httpx2.Response) -> list[tuple[str, str]]:
    return [(name, value) for name, value in answer.headers.multi_items() if name not in OWN]


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda one: f"{one['client']}: {one['what']}")
def test_a_recorded_request_and_its_answer(server: Any, recorded: dict[str, Any]) -> None:
    """The replica says again, byte by byte, what the server has said."""
    method, path = recorded["method"], recorded["path"]
    content = json.dumps(recorded["body"]).encode() if recorded.get("body") is not None else b""
    sent = {**recorded.get("headers", {}), "content-type": "application/json", "x-request-id": "same"}
    direct = server.http.request(method, path, content=content, headers=sent)

    def says_it_again(seen: Seen) -> None:
        lines = [f"{name}: {value}" for name, value in headers_of(direct)]
        if "content-length" in direct.headers:
            lines = [line for line in lines if not line.startswith("content-length")]
            seen.answer(direct.content, direct.status_code, *lines)
        else:
            seen.begin_stream(*[line for line in lines if not line.startswith("content-type")])
            for at in range(0, len(direct.content), 7):
                seen.chunk(direct.content[at : at + 7])
            seen.end()

    with fake_replica(says_it_again) as replica, edge_of([replica.url], replica.url) as edge:
        through = edge.http.request(method, path, content=content, headers=sent)
    assert through.status_code == direct.status_code
    assert sorted(headers_of(through)) == sorted(headers_of(direct))
    assert through.content == direct.content
    [seen] = replica.seen
    assert seen.body == content
    assert seen.line == f"{method} {path} HTTP/1.1"
    assert {name: seen.header(name) for name in sent} == {name: [value] for name, value in sent.items()}
    if content:
        assert destination(method, path) is Destination.REPLICA
