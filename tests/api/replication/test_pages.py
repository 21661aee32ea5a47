"""Two whole servers on sockets of this process: pages go from one to the other by the real routes and client."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from server import server

from api.replication import page_frames
from lorasrv.memory.prefix_cache import page_hashes, root_hash

SECRET = "of-one-cluster"
BEARER = {"authorization": f"Bearer {SECRET}"}
PROMPT = [10 + (7 * i) % 300 for i in range(100)]
SENT = 96
Servers = tuple[SimpleNamespace, SimpleNamespace]


@pytest.fixture(scope="module")
def servers(model: Path, adapter_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One that computes prompts, and one that answers."""
    folder, one = tmp_path_factory.mktemp("pages"), {"mia": adapter_dirs["one"]}
    options = {"cluster_secret": SECRET, "served_model_name": "tiny"}
    with (
        server(model, folder / "prefill", one, role="prefill", **options) as first,
        server(model, folder / "decode", one, role="decode", **options) as second,
    ):
        yield first, second


@pytest.fixture
def pair(servers: Servers) -> Iterator[Servers]:
    yield servers
    for served in servers:
        served.calm_down()


def complete(served: SimpleNamespace, model: str = "tiny", salt: str = "", **headers: str) -> httpx2.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= {"cache_salt": salt} if salt else {}
    return served.http.post("/v1/completions", json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})


def from_peer(
    served: SimpleNamespace, peer: str, model: str = "tiny", salt: str = "", by: str = "x_lorasrv_prefill"
) -> tuple[str, int]:
    """The text of an answer whose edge names a peer, and how many tokens that has sent."""
    answer = complete(served, model, salt, x_lorasrv_cluster=SECRET, **{by: peer})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["usage"]["lorasrv"]["kv_transfer"]["tokens"]


def offer(served: SimpleNamespace, salt: str = "", **changes: Any) -> httpx2.Response:
    hashes = page_hashes(root_hash(None, salt), PROMPT, 16)
    body = {"layout": page_frames.LAYOUT, "facts": dict(served.engine.pages.facts), "prompt": None, "wait_s": 9.0}
    body["digests"] = [digest.hex() for digest in hashes]
    return served.http.post("/v1/pages/offer", json=body | changes, headers=BEARER)


@pytest.mark.parametrize("name", ["tiny", "mia"])
def test_one_computes_and_another_answers(pair: Servers, name: str) -> None:
    first, second = pair
    text, sent = from_peer(second, first.url, name, salt="x")
    assert sent == SENT
    alone = complete(first, name, "own").json()
    assert (text, "kv_transfer" in alone["usage"]["lorasrv"]) == (alone["choices"][0]["text"], False)
    assert from_peer(second, first.url, name, salt="x") == (text, 0), "they are here now"
    other = "mia" if name == "tiny" else "tiny"
    assert complete(first, other, "own").json()["choices"][0]["text"] != text


def test_a_request_counts_where_it_is_answered(pair: Servers) -> None:
    first, second = pair
    before = [served.engine.request_stats.total.requests for served in pair]
    from_peer(second, first.url, "mia", salt="counted")
    after = [served.engine.request_stats.total.requests for served in pair]
    assert (after[0] - before[0], after[1] - before[1]) == (0, 1)


def test_the_next_server_takes_what_is_there(pair: Servers) -> None:
    first, second = pair
    assert from_peer(second, first.url, salt="new", by="x_lorasrv_pages")[1] == 0, "nothing is computed for it"
    text = complete(first, salt="begun").json()["choices"][0]["text"]
    assert from_peer(second, first.url, salt="begun", by="x_lorasrv_pages") == (text, SENT)


def test_no_peer_is_no_error(pair: Servers) -> None:
    text = complete(pair[0], salt="z").json()["choices"][0]["text"]
    assert from_peer(pair[1], "http://127.0.0.1:9", salt="y") == (text, 0)
    assert from_peer(pair[0], pair[1].url, salt="w") == (text, 0), "that one has the role decode"


@pytest.mark.parametrize("name", ["x-lorasrv-prefill", "x-lorasrv-pages"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"x-lorasrv-cluster": "guessed-secret"}, 403),
        ({"authorization": f"Bearer {SECRET}"}, 403),
        ({"x-lorasrv-cluster": SECRET, "{name}": "file:///etc/passwd"}, 400),
        ({"x-lorasrv-cluster": SECRET, "{name}": "http://a/b"}, 400),
        ({"x-lorasrv-cluster": SECRET, "{name}": "http://user:word@a"}, 400),
        ({"x-lorasrv-cluster": SECRET, "{name}": "http://a:0"}, 400),
        ({"x-lorasrv-cluster": SECRET, "x-lorasrv-prefill": "http://a", "x-lorasrv-pages": "http://a"}, 400),
    ],
)
def test_only_the_edge_names_a_peer(pair: Servers, name: str, headers: dict[str, str], status: int) -> None:
    given = {name: pair[0].url} | {key.format(name=name): value for key, value in headers.items()}
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
    answer = pair[1].http.post("/v1/completions", json=body, headers=given)
    assert answer.status_code == status, answer.text
    assert "authorization" in headers or "lorasrv-" in answer.text


@pytest.mark.parametrize("key", ["base", "kv_dtype", "layout", "kernels", "sources", "libraries", "spec", "processor"])
def test_another_model_format_or_version_is_refused_by_name(pair: Servers, key: str) -> None:
    known = dict(pair[0].engine.pages.facts)
    assert key in known
    for facts in (known | {key: "another"}, {name: known[name] for name in known if name != key}):
        refusal = offer(pair[0], facts=facts)
        assert refusal.status_code == 409
        assert refusal.json()["error"]["code"] == "pages_differ"
        assert f": {key} differ" in refusal.json()["error"]["message"]


def test_another_layout_is_refused(pair: Servers) -> None:
    refusal = offer(pair[0], layout=2)
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (409, "pages_differ")
    assert "layout 1, not 2" in refusal.json()["error"]["message"]


def test_clients_get_no_pages(pair: Servers) -> None:
    first, _ = pair
    complete(first, salt="theirs")
    lease = offer(first, "salt:theirs").json()
    assert lease["pages"] == 6
    body = {"layout": 1, "facts": {}, "digests": ["00" * 32], "prompt": None, "wait_s": 1.0}
    for headers in ({}, {"authorization": "Bearer guessed-secret"}):
        assert first.http.get(f"/v1/pages/{lease['lease']}", headers=headers).status_code == 403
        assert first.http.post("/v1/pages/offer", json=body, headers=headers).status_code == 403
    assert first.http.get(f"/v1/pages/{lease['lease']}", headers=BEARER).status_code == 200


def test_a_lease_is_read_once_and_counted(pair: Servers) -> None:
    first, _ = pair
    complete(first, salt="once")
    assert offer(first, "salt:another").json() == {
        "lease": None,
        "pages": 0,
        "page_bytes": first.engine.pages.page_bytes,
    }
    lease = offer(first, "salt:once").json()
    data = first.http.get(f"/v1/pages/{lease['lease']}", headers=BEARER)
    assert len(data.content) == page_frames.stream_bytes(6, lease["page_bytes"])
    again = first.http.get(f"/v1/pages/{lease['lease']}", headers=BEARER)
    assert (again.status_code, again.json()["error"]["code"]) == (404, "lease_ended")
