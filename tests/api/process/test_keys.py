"""Requests without a key, as no client library would write them, and where secrets leak.

The sweep of every route and scope is in tests/api/auth/test_middleware.py.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import fake_serve
import pytest
from raw_client import RawClient
from served import Served, lorasrv, serve

from api.auth.key_store import KeyStore
from api.auth.principal import Scope

# `{key}`: of a key that may infer. Each of them without it, too.
ODD_TARGETS = (
    *("/v1/models?api_key={key}", "/v1/models?key={key}#health", "/v1/models;/health", "/v1/models?/health"),
    *("//v1/models", "/v1/../metrics", "/health/../metrics", "/ready/../v1/pool", "/console/../metrics"),
    *("/console/..%2fmetrics", "/console/%2e%2e/metrics", "/health%2f..%2fmetrics", "/%2fmetrics", "/metrics%00"),
    *("/./metrics", "/metrics/", "/METRICS", "/health%3f", "/health%20", "/v1%2fmodels", "/v1/models%3fx=/health"),
    *("http://x/metrics", "http://x/health/../metrics", "http://health/v1/models", "*", "metrics"),
)
HOSTS = ("x/health?", "x/health#", "127.0.0.1/health", "/health", "evil.example", "health", "x\\health", "")


def status(served: Served, method: str, target: str, host: str = "127.0.0.1", *headers: str) -> int:
    """The status of the answer to these very bytes."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", "Connection: close", *headers, "", ""]
    with RawClient(served.port) as client:
        return int(client.send("\r\n".join(lines).encode("latin-1")).read().split(maxsplit=2)[1])


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Served]:
    """The command with a fake engine, which asks for no keys either."""
    with serve(store=tmp_path / "store", program=fake_serve.command()) as served:
        yield served


def test_odd_requests(process: Served, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert status(process, "GET", "/metrics") == 200, "without any key a server of this machine is open to it"
    done = lorasrv("key", "create", "--store", store)
    key = done.stdout.strip()
    bearer = ("127.0.0.1", f"Authorization: Bearer {key}")
    assert status(process, "GET", "/metrics") == 401, "the first key closes it at once"
    assert status(process, "GET", "/v1/models", *bearer) == 200
    wrong = key[:-1] + ("a" if key[-1] != "a" else "b")

    headers = ((), (f"Authorization: Bearer {wrong}",), (f"Authorization: Basic {key}",))
    asked = [("GET", sent) for sent in headers] + [(method, ()) for method in ("HEAD", "OPTIONS", "POST")]
    for target in ODD_TARGETS:
        for method, sent in asked:
            found = status(process, method, target.replace("{key}", key), "127.0.0.1", *sent)
            assert found in (400, 401), (method, target, sent, found)
        # A key of scope infer opens these by no spelling.
        if "metrics" in target.lower() or "pool" in target:
            assert status(process, "GET", target, *bearer) in (400, 403, 404), target
    for host in HOSTS:
        for target in ("/metrics", "/v1/models", "/v1/pool", "/nowhere"):
            assert status(process, "GET", target, host) in (400, 401), (host, target)
    for method in ("HEAD", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get"):
        assert status(process, method, "/v1/models") in (400, 401, 405), method
    for target in ("/health", "/ready", "/health?x=1"):
        assert status(process, "GET", target) == 200, target

    KeyStore(store).revoke(KeyStore(store).all()[0].name)
    assert status(process, "GET", "/v1/models", *bearer) == 401
    assert status(process, "GET", "/v1/models") == 401, "revoking the last key does not open it again"
    assert key not in process.log + done.stderr
    assert wrong not in process.log
    assert "Traceback" not in process.log


def test_secrets_are_nowhere(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with serve(store=store, program=fake_serve.command()) as served:
        _, admin = KeyStore(store).create("boss", frozenset({Scope.ADMIN}))
        served.http.headers["authorization"] = f"Bearer {admin}"
        paths = ("/info", "/metrics", "/v1/pool", "/openapi.json", "/v1/adapters", f"/v1/models/{admin}", f"/{admin}")
        answers = [served.http.get(path) for path in paths]
        answers += [served.post("/v1/completions", model="nobody", prompt="x"), served.post("/v1/completions")]
        assert [answer.status_code for answer in answers] == [200] * 5 + [404, 404, 404, 400]
        # What a client asks for by name, it is told by that name.
        shown = "".join(answer.text.replace(f"'{admin}'", "") + str(answer.headers) for answer in answers) + served.log
        assert not re.search(r"lorasrv-[A-Za-z0-9]{43}", shown)
        stored = b"".join(path.read_bytes() for path in store.iterdir() if path.is_file())
        assert b"boss" in stored
        assert admin.encode() not in stored
    assert admin not in served.last_log
    [key] = KeyStore(store).all()
    assert key.last_used_s is not None, "written at the end at last"
