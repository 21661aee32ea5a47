"""Default deny: every route and method without a key, with a wrong one, and with each scope; and the commands' key."""

import asyncio
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from cli_reference import parameters
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Match
from typer.main import get_command

from adapter_store.errors import StoreUnusable
from api.app import _ROUTES
from api.auth import key_cache
from api.auth.key_cache import KeyCache
from api.auth.key_store import KeyStore
from api.auth.middleware import AuthMiddleware
from api.auth.principal import ANYBODY, NOBODY, Caller, KeyLimits, Scope, caller_of
from api.auth.scopes import NEEDS, REPLICATE, needed, needs_no_key
from api.cli.common.options import client_key
from api.cli.program import app as command_line

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
ROUTES = [
    ("GET", "/openapi.json"),
    *sorted((method, route.path) for module in _ROUTES for route in module.router.routes for method in route.methods),
]
OPEN = [(m, p) for m, p in ROUTES if m in ("GET", "HEAD") and re.fullmatch(r"/|/health|/ready|/console(/.*)?", p)]


def filled(template: str) -> str:
    """A path of a route."""
    values = {"digest": "00", "file_id": "file-1", "batch_id": "batch_1"}
    return re.sub(r"{(\w+)(:path)?}", lambda found: values.get(found[1], "mia"), template)


PATHS = sorted({filled(path) for _, path in ROUTES})


@pytest.fixture
def secrets_(store) -> dict[Scope, str]:
    """A key of each scope."""
    keys = KeyStore(store.root)
    return {scope: keys.create(f"only-{scope}", frozenset({scope}))[1] for scope in Scope}


def ask(
    server: Any, method: str, path: str, key: str | None = None, body: Any = None, **headers: str
) -> httpx2.Response:
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return server.http.request(method, path, headers=headers, **({} if body is None else {"json": body}))


def refused(answer: httpx2.Response, path: str) -> bool:
    """It is a whole 401, in the shape of the route's clients."""
    if answer.status_code != 401:
        return False
    assert answer.headers["www-authenticate"] == 'Bearer realm="lorasrv"'
    assert answer.headers["x-request-id"]
    assert not answer.headers.get("x-lorasrv-revision")
    if answer.request.method != "HEAD":
        body = answer.json()
        message = body["error"] if path in ("/", "/generate", "/generate_stream") else body["error"]["message"]
        assert "Authorization: Bearer" in message or "key is not known" in message
    return True


def test_the_table_knows_every_route() -> None:
    assert set(ROUTES) - set(OPEN) == set(NEEDS)
    assert all(scopes for scopes in NEEDS.values())


def test_what_needs_no_key() -> None:
    assert [(method, path) for method, path in ROUTES if needs_no_key(method, filled(path))] == OPEN
    for path in ("/", "/health", "/ready", "/console", "/console/", "/console/app.js"):
        assert [method for method in METHODS if needs_no_key(method, path)] == ["GET", "HEAD"]
    for path in (
        *("/health/", "//health", "/health?", "/Health", "/health/x", "health", "", "//", "*", "/consolex", "/ready;x"),
        *("/console/..", "/console/../metrics", "/console/./x", "/console/a/../../v1/models", "/v1/console/x"),
        *("/console/nothing.js", "/console/a/b.css"),
    ):
        assert not any(needs_no_key(method, path) for method in METHODS), path


class TestSweep:
    """All routes and methods there are, through a socket."""

    @pytest.fixture
    def closed(self, make_server, secrets_) -> Any:
        return make_server()

    def test_without_a_key(self, closed) -> None:
        opened = {(m, p) for p in PATHS for m in METHODS if not refused(ask(closed, m, p), p)}
        assert opened == {(method, path) for _, path in OPEN for method in ("GET", "HEAD")}

    def test_what_is_nowhere_is_as_closed(self, closed, secrets_) -> None:
        for path in ("/nowhere", "/v1/nowhere", "/docs", "/redoc", "/v1", "/v1/models/", "//v1/models", "/health/"):
            assert refused(ask(closed, "GET", path), path), path
            assert ask(closed, "GET", path, secrets_[Scope.INFER]).status_code == 404

    @pytest.mark.parametrize(
        "header",
        [
            *("Bearer lorasrv-" + "x" * 43, "Bearer", "Basic {key}", "{key}", "Bearer {key}x", "Bearer x{key}"),
            *("Bearer {key} {key}", "Bearer {KEY}", "Token {key}", "Bearer,{key}"),
        ],
    )
    def test_a_wrong_key(self, closed, secrets_, header: str) -> None:
        key = secrets_[Scope.ADMIN]
        sent = header.format(key=key, KEY=key.upper())
        for method, path in (("GET", "/v1/models"), ("POST", "/generate"), ("GET", "/metrics"), ("GET", "/nowhere")):
            answer = ask(closed, method, path, authorization=sent)
            assert refused(answer, path)
            assert key not in answer.text

    def test_two_keys_are_none(self, closed, secrets_) -> None:
        key = f"Bearer {secrets_[Scope.ADMIN]}"
        headers = [("authorization", key), ("authorization", key)]
        assert closed.http.get("/v1/models", headers=headers).status_code == 401

    @pytest.mark.parametrize("name", ["api_key", "key", "Access_Token"])
    def test_a_key_in_the_address(self, closed, secrets_, name: str) -> None:
        answer = ask(closed, "GET", f"/v1/models?{name}={secrets_[Scope.ADMIN]}")
        assert refused(answer, "/v1/models")
        assert "a key in the address ends up in logs and is not read" in answer.text
        assert secrets_[Scope.ADMIN] not in answer.text

    @pytest.mark.parametrize("name", ["x-api-key", "api-key"])
    def test_a_key_in_another_header(self, closed, secrets_, name: str) -> None:
        assert refused(ask(closed, "GET", "/v1/models", **{name: secrets_[Scope.ADMIN]}), "/v1/models")

    @pytest.mark.parametrize("scope", list(Scope))
    def test_each_scope_may_do_what_the_table_says(self, closed, secrets_, scope: Scope) -> None:
        for method, path in ROUTES:
            answer = ask(closed, method, filled(path), secrets_[scope])
            needs = NEEDS.get((method, path))
            if needs is None or scope in needs or (scope is Scope.ADMIN and needs != REPLICATE):
                assert answer.status_code not in (401, 403), (method, path, answer.text)
                continue
            assert answer.status_code == 403, (method, path)
            error = answer.json()["error"]
            message = error["message"] if isinstance(error, dict) else error
            if needs == REPLICATE:
                assert message.startswith("only servers of this cluster may ask this")
                continue
            more = " (pins and limits: admin)" if (method, path) == ("PATCH", "/v1/adapters/{reference}") else ""
            assert message == f"this needs a key of scope {' or '.join(sorted(needs))}{more}; yours has {scope}"
            assert not isinstance(error, dict) or error["code"] == "forbidden"

    def test_head_needs_what_get_needs(self, closed, secrets_) -> None:
        assert ask(closed, "HEAD", "/metrics", secrets_[Scope.INFER]).status_code == 403
        assert ask(closed, "HEAD", "/metrics", secrets_[Scope.ADMIN]).status_code in (200, 405)

    def test_a_refused_key_is_in_the_metrics(self, closed, secrets_) -> None:
        assert ask(closed, "GET", "/metrics", secrets_[Scope.INFER]).status_code == 403
        told = ask(closed, "GET", "/metrics", secrets_[Scope.ADMIN]).text
        assert 'lorasrv_key_requests_total{key="only-infer"} 1.0' in told

    @pytest.mark.parametrize(("path", "body"), [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/generate", {"inputs": "x"}),
    ])  # fmt: skip
    def test_only_admin_may_lower_the_priority_below_0(self, closed, engine, secrets_, path: str, body: Any) -> None:
        def status(scope: Scope, priority: int) -> int:
            wanted = {"parameters": {"priority": priority}} if "inputs" in body else {"priority": priority}
            return ask(closed, "POST", path, secrets_[scope], {"model": "tiny-base", **body, **wanted}).status_code

        encode = lambda text, **_: list(text.encode())  # noqa: E731
        engine.tokenizer = SimpleNamespace(encode=encode, special_ids=frozenset(), token=str)
        assert status(Scope.INFER, -1) == 403
        assert engine.added == []
        assert [status(Scope.INFER, 0), status(Scope.INFER, 5), status(Scope.ADMIN, -1)] == [200] * 3
        assert [added.priority for added in engine.added] == [0, 5, -1]

    def test_nothing_reaches_the_engine(self, closed, engine, secrets_) -> None:
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": []})):
            for key, status in ((None, 401), (secrets_[Scope.UPLOAD], 403)):
                assert ask(closed, "POST", path, key, {"model": "tiny-base", **body}).status_code == status
        assert engine.added == []


class TestClosing:
    def test_at_once_in_a_running_server(self, server, store) -> None:
        assert ask(server, "GET", "/metrics").status_code == 200
        keys = KeyStore(store.root)
        _, infer = keys.create("alice", frozenset({Scope.INFER}))
        assert ask(server, "GET", "/metrics").status_code == 401
        assert ask(server, "GET", "/v1/models", infer).status_code == 200
        keys.revoke("alice")
        answer = ask(server, "GET", "/v1/models", infer)
        assert (answer.status_code, answer.json()["error"]["message"]) == (401, "this key is revoked")
        assert ask(server, "GET", "/metrics").status_code == 401, "revoking the last key does not open it again"

    def test_the_operators_own_key(self, make_server, store) -> None:
        server = make_server(api_key="s3cret-key")
        assert ask(server, "GET", "/metrics").status_code == 401
        assert ask(server, "GET", "/metrics", "s3cret-key").status_code == 200
        _, infer = KeyStore(store.root).create("alice", frozenset({Scope.INFER}))
        assert ask(server, "GET", "/v1/models", infer).status_code == 200
        assert ask(server, "GET", "/metrics", "s3cret-key").status_code == 200

    def test_the_clusters_secret_is_no_key_of_a_client(self, make_server, store) -> None:
        keys = KeyCache(store.root, cluster_secret="of-one-cluster")
        assert keys.is_open()
        assert [keys.is_cluster(secret) for secret in ("of-one-cluster", "of-one-cluste", "")] == [True, False, False]
        assert keys.caller("of-one-cluster").scopes == {Scope.REPLICATE}
        keys.close()
        admin = Caller("ops", frozenset({Scope.ADMIN}))
        assert (ANYBODY.may(Scope.REPLICATE), admin.may(Scope.REPLICATE), admin.may(Scope.UPLOAD)) == (0, 0, 1)
        server = make_server(cluster_secret="of-one-cluster")
        assert ask(server, "GET", "/v1/models").status_code == 200
        refusal = ask(server, "GET", "/v1/models", "of-one-cluster")
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (403, "forbidden")

    def test_insecure_asks_for_keys_where_there_are_some(self, make_server, secrets_) -> None:
        server = make_server(host="0.0.0.0", insecure=True)
        assert ask(server, "GET", "/v1/models").status_code == 401

    def test_another_address_without_keys_is_closed(self, make_server) -> None:
        """`serve` would not have started; its keys may have been taken away since."""
        assert ask(make_server(host="0.0.0.0"), "GET", "/v1/models").status_code == 401

    def test_a_key_store_that_cannot_be_read(self, server, store, secrets_, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(_: object) -> int:
            raise StoreUnusable("disk I/O error in /srv")

        monkeypatch.setattr(key_cache, "STALE_S", -1.0)
        monkeypatch.setattr(KeyStore, "changes", fail)
        answer = ask(server, "GET", "/v1/models", secrets_[Scope.ADMIN])
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
        assert "/srv" not in answer.text
        assert ask(server, "GET", "/health").status_code == 200


class TestBrowsers:
    @pytest.fixture
    def closed(self, make_server, secrets_) -> Any:
        return make_server(allowed_origins="https://app.example")

    def test_the_host_does_not_matter_any_more(self, closed, secrets_) -> None:
        assert ask(closed, "GET", "/v1/models", secrets_[Scope.INFER], host="models.example").status_code == 200
        assert ask(closed, "GET", "/health", host="models.example").status_code == 200

    def test_the_origin_does(self, closed, secrets_) -> None:
        answer = ask(closed, "GET", "/v1/models", secrets_[Scope.INFER], origin="https://evil.example")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert ask(closed, "GET", "/health", origin="https://evil.example").status_code == 403

    def test_a_preflight_needs_no_key(self, closed) -> None:
        sent = {"origin": "https://app.example", "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type"}  # fmt: skip
        answer = ask(closed, "OPTIONS", "/v1/completions", **sent)
        assert answer.status_code == 200
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert ask(closed, "OPTIONS", "/v1/completions", **{**sent, "origin": "https://b.example"}).status_code == 403
        assert ask(closed, "OPTIONS", "/v1/completions", origin="https://app.example").status_code == 401

    def test_a_page_can_read_why_it_is_refused(self, closed) -> None:
        answer = ask(closed, "GET", "/v1/models", origin="https://app.example")
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == "https://app.example"


class TestRoutes:
    def test_a_route_that_is_not_in_the_table_needs_admin(self, server, dispatcher, secrets_) -> None:
        dispatcher[0].app.add_api_route("/v1/new", lambda: {"secret": 1})
        statuses = [ask(server, "GET", "/v1/new", key).status_code for key in (None, *secrets_.values())]
        assert statuses == [401, 403, 403, 403, 200, 403]

    @given(st.sampled_from(sorted(NEEDS)), st.text("a:@./%~-wvrm", max_size=8), st.sampled_from(METHODS))
    def test_the_table_takes_the_route_that_the_router_takes(
        self, entry: tuple[str, str], text: str, method: str
    ) -> None:
        path = entry[1]
        for name in ("{reference}", "{adapter_id}", "{name:path}", "{digest}", "{file_id}", "{batch_id}"):
            path = path.replace(name, text)
        for asked in {entry[0], method}:
            scope = {"type": "http", "method": asked, "path": path, "root_path": "", "headers": []}
            routes = (route for module in _ROUTES for route in module.router.routes)
            taken = next((route.path for route in routes if route.matches(scope)[0] is Match.FULL), None)
            if taken is not None:
                assert needed(asked, path) == NEEDS.get((asked, taken))
            elif path not in ("/openapi.json",) and asked != "HEAD" and not path.endswith("/stats"):
                assert needed(asked, path) is None

    def test_a_route_knows_its_caller(self, store) -> None:
        keys, cache = KeyStore(store.root), KeyCache(store.root)
        shared = {"of": "the server"}
        seen: list[dict[str, Any]] = []
        answers: list[Any] = []

        async def app(scope: Any, *_: object) -> None:
            seen.append(scope)

        async def send(message: Any) -> None:
            answers.append(message)

        def request(path: str, key: str = "", kind: str = "http") -> None:
            headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
            scope = {"type": kind, "method": "GET", "path": path, "headers": headers, "query_string": b""}
            asyncio.run(AuthMiddleware(app, cache)({**scope, "state": shared}, None, send))

        request("/v1/models")
        limits = KeyLimits(max_concurrent=3)
        _, secret = keys.create("alice", frozenset({Scope.INFER}), ("mia*",), limits)
        request("/v1/models", secret)
        request("/health", secret)
        alice = Caller("alice", frozenset({Scope.INFER}), ("mia*",), limits)
        assert [caller_of(scope) for scope in seen] == [ANYBODY, alice, NOBODY], "an open route knows no caller"
        assert shared == {"of": "the server"}
        assert all(scope["state"]["of"] == "the server" for scope in seen)
        request("/v1/models", secret, kind="websocket")
        assert (len(seen), answers) == (3, [{"type": "websocket.close", "code": 1008}])


class TestCommandLine:
    """Commands that ask a server show it a key."""

    @pytest.fixture
    def key(self, server, secrets_) -> str:
        return secrets_[Scope.ADMIN]

    def test_every_command_with_a_server_takes_one(self) -> None:
        def lacking(group: Any) -> Iterator[str]:
            for name, command in group.commands.items():
                if hasattr(command, "commands"):
                    yield from lacking(command)
                    continue
                options = {option for parameter in parameters(command) for option in parameter.opts}
                if options & {"--server", "--url"} and "--api-key" not in options:
                    yield name

        assert list(lacking(get_command(command_line))) == []

    def test_no_key(self, cli, server, key: str) -> None:
        says = "lorasrv: the server requires an API key: give one with --api-key or LORASRV_API_KEY\n"
        for command in (["list"], ["pool"], ["generate", "hi"], ["show", "mia"], ["top", "--once"], ["rm", "mia"]):
            done = cli(*command, "--server", server.url)
            assert (done.code, done.out, done.err) == (1, "", says), command

    def test_a_wrong_key_and_one_without_the_scope(self, cli, server, secrets_) -> None:
        wrong = "this key is not known here; give another with --api-key or LORASRV_API_KEY"
        for command, key, says in (
            ("list", "lorasrv-wrong", f"the server refuses the API key: {wrong}"),
            ("pool", secrets_[Scope.INFER], "this needs a key of scope metrics; yours has infer"),
            ("pin mia", secrets_[Scope.UPLOAD], "pins need a key of scope admin"),
        ):
            done = cli(*command.split(), "--server", server.url, "--api-key", key)
            assert (done.code, done.err) == (1, f"lorasrv: {says}\n")
        assert cli("list", "--server", server.url).code == 1, "the flag was for that command alone"

    @pytest.mark.parametrize("where", ["flag", "environment", "file", "file of serve"])
    def test_the_right_key(self, cli, server, key: str, where: str, tmp_path, monkeypatch) -> None:
        if where == "environment":
            monkeypatch.setenv("LORASRV_API_KEY", key)
        if where.startswith("file"):
            (tmp_path / "c.toml").write_text(f'{"[client]" if where == "file" else ""}\napi_key = "{key}"\n')
            monkeypatch.setenv("LORASRV_CONFIG", str(tmp_path / "c.toml"))
        flags = ["--api-key", key] if where == "flag" else []
        body = {"model": "tiny-base", "prompt": "hi"}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        (tmp_path / "in.jsonl").write_text(json.dumps(line))
        batch = ["batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl"]
        for command in (["list"], ["pool"], ["generate", "hi"], ["top", "--once", "--json"], batch):
            done = cli(*command, "--server", server.url, *flags)
            assert done.code == 0, done.err
            assert key not in done.out + done.err

    @pytest.mark.parametrize("key", ["schlüssel", "a\nb", "two words"])
    def test_a_key_that_no_header_can_hold(self, cli, server, key: str, monkeypatch) -> None:
        monkeypatch.setenv("LORASRV_API_KEY", key)
        for command in (["list"], ["generate", "hi"], ["bench", "--url", server.url, "--adapters", "0"]):
            done = cli(*command, *([] if command[0] == "bench" else ["--server", server.url]))
            assert (done.code, done.out) == (2, ""), done.err
            assert "LORASRV_API_KEY" in done.err
            assert key not in done.err

    def test_the_servers_own_key_goes_to_no_other_machine(self, tmp_path, monkeypatch) -> None:
        (tmp_path / "c.toml").write_text('api_key = "s3cret-key"\n')
        monkeypatch.setenv("LORASRV_CONFIG", str(tmp_path / "c.toml"))
        assert client_key("http://127.0.0.1:8000") == client_key("http://[::1]:8000/") == "s3cret-key"
        assert client_key("https://models.example") is client_key("http://127.0.0.1.models.example") is None
