"""Row 36 of the list of faults, through a real `lorasrv serve` process and raw sockets: who comes in, and what leaks.

The sweep of every route and scope is in tests/api/auth/test_middleware.py; here are requests as no client library
would write them.
"""

import re
import socket
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import fake_serve
from served import ROOT, Served, serve

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


def running(folder: Path, *flags: str) -> AbstractContextManager[Served]:
    """Run the command with a fake engine, which asks for no keys either, on sockets of its own."""
    return serve(*flags, store=folder / "store", program=fake_serve.command())


def status(served: Served, method: str, target: str, host: str = "127.0.0.1", *headers: str) -> int:
    """Of the answer to these very bytes."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", "Connection: close", *headers, "", ""]
    port = int(served.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall("\r\n".join(lines).encode("latin-1"))
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    return int(answer.split(maxsplit=2)[1])


def test_row_36_who_comes_in(tmp_path: Path) -> None:
    with running(tmp_path) as served:
        _row_36(served, tmp_path / "store")
        secret = _secrets_are_nowhere(served, tmp_path / "store")
    assert secret not in served.log
    when = {key.name: key.last_used_s for key in KeyStore(tmp_path / "store").all()}
    assert when["boss"] is not None, "written down at the end at last"


def _row_36(process: Served, store: Path) -> None:
    assert status(process, "GET", "/metrics") == 200, "without any key a server of this machine is open to it"
    done = subprocess.run(
        [sys.executable, "-c", "from api.cli.main import main; main()", "key", "create", "--store", str(store)],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    key = done.stdout.strip()
    assert status(process, "GET", "/metrics") == 401, "the first one closes it at once"
    assert status(process, "GET", "/v1/models", "127.0.0.1", f"Authorization: Bearer {key}") == 200
    wrong = key[:-1] + ("a" if key[-1] != "a" else "b")

    headers = ((), (f"Authorization: Bearer {wrong}",), (f"Authorization: Basic {key}",))
    asked = [("GET", sent) for sent in headers] + [(method, ()) for method in ("HEAD", "OPTIONS", "POST")]
    for target in ODD_TARGETS:
        for method, sent in asked:
            found = status(process, method, target.replace("{key}", key), "127.0.0.1", *sent)
            assert found in (400, 401), (method, target, sent, found)
    for host in HOSTS:
        for target in ("/metrics", "/v1/models", "/v1/pool", "/nowhere"):
            assert status(process, "GET", target, host) in (400, 401), (host, target)
    for method in ("HEAD", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get"):
        assert status(process, method, "/v1/models") in (400, 401, 405), method
    for target in ("/health", "/ready", "/health?x=1"):
        assert status(process, "GET", target) == 200, target
    # Of infer, and so not let to these by any spelling.
    for target in ODD_TARGETS:
        if "metrics" in target.lower() or "pool" in target:
            found = status(process, "GET", target, "127.0.0.1", f"Authorization: Bearer {key}")
            assert found in (400, 403, 404), (target, found)

    KeyStore(store).revoke(KeyStore(store).all()[0].name)
    assert status(process, "GET", "/v1/models", "127.0.0.1", f"Authorization: Bearer {key}") == 401
    assert status(process, "GET", "/v1/models") == 401, "the last one that goes does not open it again"
    assert key not in process.log + done.stderr
    assert wrong not in process.log
    assert "Traceback" not in process.log


def _secrets_are_nowhere(served: Served, store: Path) -> str:
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
    return admin
