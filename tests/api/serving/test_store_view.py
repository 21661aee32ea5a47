"""What a key may see: nothing that its patterns do not match, by any route."""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from callers import with_callers
from fastapi import FastAPI
from fastapi.routing import APIRoute

from adapter_store.errors import AdapterNotFound
from adapter_store.quota import StoreQuota
from adapter_store.registry import names
from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from api.auth.principal import ANYBODY, Caller, KeyLimits, Scope
from api.batches.in_process import in_process_client
from api.batches.manager import BatchManager
from api.serving.model_list import ModelList, adapter_card, base_card
from api.serving.store_view import MAX_CACHED, ScopedStores
from lorasrv.engine.pool_map import AdapterPages, RequestPages, ReservedAdapter
from lorasrv.errors import VerificationBusy
from lorasrv.offline.verify.verifier import Verifier
from lorasrv.outputs import RequestId
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams
from tests.api.conftest import BASE, SHAPES, Server

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[3]
USE = frozenset({Scope.INFER, Scope.UPLOAD})
ANN = Caller("ann", USE, ("mia*",))
BOB = Caller("bob", USE, ("bob*", "shared"))
READER = Caller("reader", USE, ("*",))
ADMIN = Caller("root", frozenset({Scope.ADMIN}), ("*",))
CALLERS = {caller.principal: caller for caller in (ANN, BOB, READER, ADMIN)}
HIDDEN, ABSENT = "bob-secret", "zob-absent"


class Tenants:
    """A server that several keys use: `tenants.ann.get(...)`."""

    def __init__(self, server: Server, app: FastAPI) -> None:
        self.server = server
        self.app = app
        self.callers = dict(CALLERS)
        with_callers(app, self.callers)

    def __getattr__(self, name: str) -> "Tenant":
        return Tenant(self.server, name)

    @property
    def routes(self) -> list[APIRoute]:
        included = [getattr(one, "original_router", self.app).routes for one in self.app.routes]
        return [route for routes in included for route in routes if isinstance(route, APIRoute)]


class Tenant:
    def __init__(self, server: Server, name: str) -> None:
        self._server = server
        self._name = name

    def ask(self, method: str, path: str, **how: Any) -> httpx2.Response:
        headers = {"x-caller": self._name, **how.pop("headers", {})}
        return self._server.http.request(method, path, headers=headers, **how)

    def get(self, path: str, **how: Any) -> httpx2.Response:
        return self.ask("GET", path, **how)

    def post(self, path: str, body: Any, **how: Any) -> httpx2.Response:
        return self.ask("POST", path, json=body, **how)

    def call(self, route: tuple[str, str, str], name: str, **more: Any) -> httpx2.Response:
        """Ask a route of `naming_routes` for this name; `more` goes into its body."""
        body = {"json": BODIES[route[0]](name) | more} if route[0] in BODIES else {}
        return self.ask(route[1], re.sub(r"{\w+}", name, route[2]), **body)

    def put(self, data: bytes) -> httpx2.Response:
        return self.ask("PUT", f"/v1/blobs/sha256:{hashlib.sha256(data).hexdigest()}", content=data)

    def register(self, folder: Path, adapter_id: str, **fields: Any) -> httpx2.Response:
        config = json.loads((folder / "adapter_config.json").read_text())
        weights = f"sha256:{hashlib.sha256(weights_of(folder)).hexdigest()}"
        return self.post("/v1/adapters", {"id": adapter_id, "config": config, "weights": weights, **fields})

    def upload(self, folder: Path, adapter_id: str, **fields: Any) -> httpx2.Response:
        self.put(weights_of(folder)).raise_for_status()
        return self.register(folder, adapter_id, **fields)

    def upload_file(self, *lines: dict[str, Any]) -> httpx2.Response:
        text = "\n".join(map(json.dumps, lines))
        return self.ask("POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", text.encode())})


def weights_of(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


@pytest.fixture
def tenants(make_server, dispatcher) -> Tenants:
    return Tenants(make_server(), dispatcher[0].app)


@pytest.fixture
def filled(tenants: Tenants, make_adapter) -> Tenants:
    """Ann has `mia`, and Bob an id that is hidden from her."""
    assert tenants.ann.upload(make_adapter("mia", seed=1), "mia", alias="prod").status_code == 201
    assert tenants.bob.upload(make_adapter("bob", seed=2), HIDDEN, alias="prod").status_code == 201
    return tenants


def key_of(tenants: Tenants, adapter_id: str) -> str:
    digest: str = tenants.root.get(f"/v1/adapters/{adapter_id}").json()["digest"]
    return digest


def told(response: httpx2.Response, name: str) -> tuple[int, str, dict[str, str]]:
    """All that an answer tells, but for the name that was asked for."""
    own = {"x-request-id", "date", "content-length"}
    headers = {k: v.replace(name, "NAME") for k, v in response.headers.items() if k not in own}
    return response.status_code, response.text.replace(name, "NAME"), headers


# Every route that takes a name in its body. A new one belongs here, or among those without a name.
BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "POST /v1/completions": lambda name: {"model": name, "prompt": "hi"},
    "POST /v1/chat/completions": lambda name: {"model": name, "messages": [{"role": "user", "content": "hi"}]},
    "POST /v1/responses": lambda name: {"model": name, "input": "hi"},
    "POST /generate": lambda name: {"inputs": "hi", "parameters": {"adapter_id": name}},
    "POST /generate_stream": lambda name: {"inputs": "hi", "parameters": {"adapter_id": name}},
    "POST /": lambda name: {"inputs": "hi", "parameters": {"adapter_id": name}},
    "POST /tokenize": lambda name: {"model": name, "prompt": "hi"},
    "POST /detokenize": lambda name: {"model": name, "tokens": [1]},
    "POST /v1/adapters/{reference}:warm": lambda _: {},
    "POST /v1/adapters/{reference}:verify": lambda _: {},
    "PATCH /v1/adapters/{reference}": lambda _: {"version": 1},
    "PUT /v1/adapters/{reference}/defaults": lambda _: {"temperature": 0.5},
    "POST /v1/unload_lora_adapter": lambda name: {"lora_name": name},
}
MAKES_ONE = {"POST /v1/adapters", "POST /v1/load_lora_adapter"}
NAMES_NOBODY = {"POST /v1/batches"}
# The cluster's secret alone opens these: servers have no tenant.
OF_SERVERS = {"POST /v1/registry/lease", "POST /v1/registry/usage", "POST /v1/pages/offer"}
ADAPTER_PARAMS, OTHER_PARAMS = {"adapter_id", "reference", "name"}, {"digest", "file_id", "batch_id", "lease"}
# These take an id alone.
ONLY_IDS = {"GET /v1/adapters/{adapter_id}", "POST /v1/unload_lora_adapter"}


def naming_routes(tenants: Tenants) -> Iterator[tuple[str, str, str]]:
    """Every route that can name an adapter: (what it is called here, method, path)."""
    for route in tenants.routes:
        params = set(re.findall(r"{(\w+)}", route.path_format))
        assert params <= ADAPTER_PARAMS | OTHER_PARAMS, f"what does {route.path_format} name? Say so in this test"
        for method in sorted(route.methods):
            name = f"{method} {route.path_format}"
            if route.body_field is not None:
                assert name in BODIES.keys() | MAKES_ONE | NAMES_NOBODY | OF_SERVERS, (
                    f"does the body of {name} name an adapter?"
                )
            if params & ADAPTER_PARAMS or name in BODIES:
                yield name, method, route.path_format


@pytest.fixture
def everything(filled, tmp_path, monkeypatch) -> Tenants:
    """With what every route needs in order to work."""
    monkeypatch.setitem(filled.app.state.services.settings.__dict__, "lora_import_root", tmp_path)
    encode, decode = (lambda text, **_: list(text.encode())), (lambda *_, **__: "hi")
    more = {"vocab_size": 256, "token": str, "special_ids": frozenset()}
    filled.app.state.services.engine.tokenizer = SimpleNamespace(encode=encode, decode=decode, **more)
    monkeypatch.setattr(Verifier, "check_ready", lambda *_: None)
    return filled


def test_no_route_tells_a_hidden_id_from_one_that_does_not_exist(
    everything: Tenants, make_adapter, engine, monkeypatch
) -> None:
    """The same 404 by the same steps: both names are compared with those that the caller may see."""
    digest = key_of(everything, HIDDEN)
    routes = list(naming_routes(everything))
    assert len(routes) >= 14
    compared: list[list[str]] = []
    near = names.near_names
    monkeypatch.setattr(names, "near_names", lambda name, known: compared.append(sorted(known)) or near(name, known))
    for route in routes:
        for suffix in ("",) if route[0] in ONLY_IDS else ("", ":prod", "@1", f"@{digest}"):
            for more in ({}, {"stream": True}) if route[2].endswith("/completions") else ({},):
                hidden, absent = (
                    told(everything.ann.call(route, name + suffix, **more), name) for name in (HIDDEN, ABSENT)
                )
                assert hidden == absent, (route, suffix)
                assert hidden[0] == 404, (route, suffix)
                assert not [header for header in hidden[2] if header.startswith("x-adapter")]
    assert engine.added == []
    assert compared
    assert all(known == ["mia"] for known in compared)
    assert len(compared) % 2 == 0
    # The same requests by a caller who may see it: they were good ones.
    everything.bob.ask("PATCH", f"/v1/adapters/{HIDDEN}", json={"aliases": {"prod": None}}).raise_for_status()
    for route in sorted(routes, key=lambda one: "DELETE" in one[0] or "unload" in one[0]):
        if route[0] not in ("POST /v1/adapters/{reference}:verify", "POST /v1/adapters/{reference}:snapshot"):
            found = everything.bob.call(route, HIDDEN)
            assert found.status_code in (200, 201, 202), (route, found.text)
        if "DELETE" in route[0]:
            everything.bob.upload(make_adapter("bob", seed=2), HIDDEN).raise_for_status()


def test_a_digest_does_not_help(filled) -> None:
    """Bob's content under Ann's id is what any other digest is there."""
    hidden, none = key_of(filled, HIDDEN), f"sha256:{'1' * 64}"
    answers = [filled.ann.post("/v1/completions", {"model": f"mia@{d}", "prompt": "hi"}) for d in (hidden, none)]
    assert told(answers[0], hidden) == told(answers[1], none)
    assert answers[0].status_code == 404


@pytest.mark.parametrize("path", ["/v1/models", "/v1/adapters"])
def test_lists_have_what_may_be_seen(filled, make_adapter, path: str) -> None:
    filled.ann.upload(make_adapter("mia2", seed=3), "mia-two")
    base = [BASE] if path == "/v1/models" else []

    def ids(who: str, query: str = "") -> list[str]:
        return [entry["id"] for entry in getattr(filled, who).get(f"{path}{query}").json()["data"]]

    assert ids("ann") == [*base, "mia", "mia-two"]
    assert ids("bob") == [*base, HIDDEN]
    assert ids("reader") == ids("root") == ids("nobody") == [*base, HIDDEN, "mia", "mia-two"]
    assert ids("ann", "?search=b") == base
    assert ids("ann", "?after=bob") == ids("ann", f"?after={HIDDEN}") == ["mia", "mia-two"]
    page = filled.ann.get(f"{path}?limit={1 + len(base)}").json()
    assert (page["data"][-1]["id"], page["has_more"]) == ("mia", True)
    assert not filled.ann.get(f"{path}?limit={2 + len(base)}").json()["has_more"]
    assert b"bob" not in filled.ann.get(path).content


def test_near_names_are_of_what_may_be_seen(filled) -> None:
    message = lambda of, name: of.get(f"/v1/adapters/{name}").json()["error"]["message"]  # noqa: E731
    assert "did you mean" not in message(filled.ann, "bob-secre")
    assert f"did you mean {HIDDEN}" in message(filled.bob, "bob-secre")
    assert "did you mean mia" in message(filled.ann, "miaa")
    assert "did you mean" not in message(filled.bob, "miaa")


def test_what_is_deleted_has_near_names_too(filled) -> None:
    assert "did you mean mia" in filled.root.ask("DELETE", "/v1/adapters/miaa").text
    assert "did you mean mia" in filled.ann.ask("DELETE", "/v1/adapters/miaa").text
    assert "did you mean" not in filled.bob.ask("DELETE", "/v1/adapters/miaa").text


def test_an_id_outside_the_patterns_cannot_be_made(filled, make_adapter) -> None:
    folder = make_adapter("new", seed=7)
    answers = [filled.ann.upload(folder, name, if_not_exists=True) for name in (HIDDEN, ABSENT)]
    assert told(answers[0], HIDDEN) == told(answers[1], ABSENT)
    error = answers[0].json()["error"]
    assert (answers[0].status_code, error["code"], error["param"]) == (403, "forbidden", "id")
    assert "mia*" in error["message"]
    assert "bob*, shared" in filled.bob.upload(folder, "mia").json()["error"]["message"]
    assert filled.ann.upload(folder, "mia", if_not_exists=True).status_code == 409
    assert filled.ann.upload(folder, "Mia").json()["error"]["code"] == "invalid_adapter_id"
    assert filled.root.get("/v1/adapters/mia").json()["version"] == 1


def test_folders_of_the_server(everything, make_adapter, tmp_path) -> None:
    folder = make_adapter("new", seed=7)
    assert folder.is_relative_to(tmp_path)
    path = str(folder.relative_to(tmp_path))
    for name in (HIDDEN, ABSENT):
        refused = everything.ann.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    done = everything.ann.post("/v1/load_lora_adapter", {"lora_name": "mia-new", "lora_path": path})
    assert done.status_code == 200, done.text
    store = everything.app.state.services.store
    assert store._index.owners()["mia-new", 1] == "ann"


class TestDigests:
    """A key knows weights that it has sent, and those of adapters that it may see."""

    def test_sending_what_another_has(self, filled, make_adapter) -> None:
        theirs, new = weights_of(make_adapter("bob", seed=2)), weights_of(make_adapter("new", seed=9))
        first, second = filled.ann.put(theirs), filled.ann.put(new)
        assert (first.status_code, second.status_code) == (201, 201)
        assert first.json() | {"digest": ""} == second.json() | {"digest": ""}
        assert first.json()["created"] is True
        # Now she has sent them; Bob and those who may read the id knew before.
        for who in ("ann", "bob", "reader", "root"):
            again = getattr(filled, who).put(theirs)
            assert (again.status_code, again.json()["created"]) == (200, False), who
        assert filled.bob.put(new).status_code == 201, "not registered by anybody, and sent by another"

    def test_all_of_it_is_read_and_hashed(self, filled, make_adapter) -> None:
        theirs = weights_of(make_adapter("bob", seed=2))
        path = f"/v1/blobs/sha256:{hashlib.sha256(theirs).hexdigest()}"
        wrong = filled.ann.ask("PUT", path, content=theirs[:-1] + b"x")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "digest_mismatch")
        short = filled.ann.ask("PUT", path, content=theirs, headers={"content-length": str(len(theirs))})
        assert short.status_code == 201

    def test_registering_what_another_has(self, filled, make_adapter) -> None:
        theirs, nobodys = make_adapter("bob", seed=2), make_adapter("new", seed=9)
        hidden, none = filled.ann.register(theirs, "mia-b"), filled.ann.register(nobodys, "mia-b")
        names = [hashlib.sha256(weights_of(folder)).hexdigest() for folder in (theirs, nobodys)]
        assert told(hidden, names[0]) == told(none, names[1])
        assert (hidden.status_code, hidden.json()["error"]["code"]) == (404, "blob_not_found")
        # It comes as late among the reasons to refuse as that one does.
        both = [filled.ann.register(folder, "mia-b", alias="Not one") for folder in (theirs, nobodys)]
        assert {answer.json()["error"]["code"] for answer in both} == {"invalid_alias"}
        assert filled.ann.upload(theirs, "mia-b").status_code == 201
        assert filled.ann.register(theirs, "mia-c").status_code == 201, "she can read an id that has them"
        assert filled.root.get("/v1/adapters/mia-b").json()["digest"] == key_of(filled, HIDDEN), "stored once"

    def test_an_upload_is_good_for_one_registration(self, filled, make_adapter) -> None:
        """A registration that is refused takes the weights away, if nobody has them: so it does if somebody has."""
        theirs, nobodys = make_adapter("bob", seed=2), make_adapter("new", seed=9)
        for folder in (theirs, nobodys):
            filled.ann.put(weights_of(folder)).raise_for_status()
            config = json.loads((folder / "adapter_config.json").read_text())
            (folder / "adapter_config.json").write_text(json.dumps({**config, "r": 77}))
            assert filled.ann.register(folder, "mia-b").status_code == 422
            assert filled.ann.register(folder, "mia-b").status_code == 404
            assert filled.ann.put(weights_of(folder)).status_code == 201

    def test_what_was_sent_before_a_restart_is_sent_again(self, filled, make_adapter, store, tmp_path) -> None:
        folder = make_adapter("new", seed=9)
        filled.ann.put(weights_of(folder)).raise_for_status()
        store.close()
        with AdapterStore(store.root, SHAPES, max_lora_rank=8, reserved_ids=frozenset({BASE})) as reopened:
            views = ScopedStores(
                reopened, lambda: ModelList(base_card(BASE, 0, 1, {}, batch_invariant=True), lambda record: {})
            )
            digest = hashlib.sha256(weights_of(folder)).hexdigest()
            assert reopened.blob_exists(digest)
            assert not views.of(ANN)._knows(digest)
            assert views.of(ANYBODY)._knows(digest), "without keys nothing changes"


class TestStoredBytes:
    def test_a_keys_versions(self, filled, make_adapter) -> None:
        folders = [make_adapter(f"n{i}", seed=20 + i) for i in range(2)]
        size = filled.ann.get("/v1/adapters/mia").json()["versions"][0]["bytes"]
        for folder in folders:
            filled.ann.put(weights_of(folder)).raise_for_status()
        limited = replace(ANN, limits=KeyLimits(max_stored_bytes=2 * size))
        filled.callers["ann"] = limited
        assert filled.ann.register(folders[0], "mia-n0").status_code == 201
        refused = filled.ann.register(folders[1], "mia-n1")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (507, "quota_exceeded")
        assert f"{2 * size} bytes of weights are stored, {size} more" in error["message"]
        assert f"{2 * size} are allowed (max_stored_bytes)" in error["message"]
        filled.callers["bob"] = replace(BOB, limits=KeyLimits(max_stored_bytes=10_000))
        assert filled.bob.upload(folders[1], "bob-n1").status_code == 201, "each has its own"

    def test_what_is_sent_and_not_registered(self, filled, make_adapter) -> None:
        folders = [make_adapter(f"n{i}", seed=20 + i) for i in range(3)]
        size = len(weights_of(folders[0]))
        filled.callers["ann"] = replace(ANN, limits=KeyLimits(max_stored_bytes=2 * size))
        assert [filled.ann.put(weights_of(folder)).status_code for folder in folders] == [201, 201, 507]
        assert str(2 * size) in filled.ann.put(weights_of(folders[2])).json()["error"]["message"]
        # Bob's are no exception to her, although they are on the disk: that would tell her so.
        theirs = weights_of(make_adapter("bob", seed=2))
        assert filled.ann.put(theirs).status_code == 507
        assert filled.bob.put(theirs).status_code == 200
        assert filled.ann.register(folders[0], "mia-n0").status_code == 201
        assert filled.ann.put(weights_of(folders[2])).status_code == 201

    @pytest.mark.parametrize("quota", [StoreQuota(store_bytes=100), StoreQuota(max_adapters=1)])
    def test_how_much_others_have_is_not_told(self, filled, make_adapter, store, quota: StoreQuota) -> None:
        """Where the store is full for all; an administrator is told by how much."""
        folder = make_adapter("mia-new", seed=30)
        store.quota = quota
        told = filled.ann.put(weights_of(folder))
        if told.is_success:
            told = filled.ann.register(folder, "mia-new")
        error = told.json()["error"]
        assert (told.status_code, error["code"], told.headers["x-should-retry"]) == (507, "quota_exceeded", "false")
        assert error["message"].startswith("quota exceeded: there is no room for it among the adapters of all keys")
        assert not re.search(r"\d", error["message"])
        answer = filled.root.put(weights_of(folder))
        answer = filled.root.register(folder, "mia-new") if answer.is_success else answer
        assert "are stored" in answer.json()["error"]["message"]

    def test_files(self, filled) -> None:
        filled.callers["ann"] = replace(ANN, limits=KeyLimits(max_stored_bytes=600))
        assert filled.ann.upload_file({"a": "x" * 100}).status_code == 200
        refused = filled.ann.upload_file({"a": "x" * 400})
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "quota_exceeded")
        assert filled.bob.upload_file({"a": "x" * 400}).status_code == 200


def line(name: str, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": "hi"}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


BATCH = {"endpoint": "/v1/completions", "completion_window": "24h"}


class TestFilesAndBatches:
    def test_others_do_not_see_them(self, filled) -> None:
        file = filled.bob.upload_file(line("a", HIDDEN)).json()
        assert "principal" not in file
        batch = filled.bob.post("/v1/batches", {**BATCH, "input_file_id": file["id"]}).json()
        assert not {"principal", "adapters", "limits"} & batch.keys()
        for what, own in (("files", file["id"]), ("batches", batch["id"])):
            assert filled.ann.get(f"/v1/{what}").json()["data"] == []
            assert filled.ann.get(f"/v1/{what}?after={own}").status_code == 400
            assert [one["id"] for one in filled.bob.get(f"/v1/{what}").json()["data"]] == [own]
            assert own in [one["id"] for one in filled.root.get(f"/v1/{what}").json()["data"]]
        none = "file-0123"
        for method, path, hidden in (
            ("GET", "/v1/files/{}", file["id"]),
            ("GET", "/v1/files/{}/content", file["id"]),
            ("DELETE", "/v1/files/{}", file["id"]),
            ("GET", "/v1/batches/{}", batch["id"]),
            ("POST", "/v1/batches/{}/cancel", batch["id"]),
        ):
            answers = [filled.ann.ask(method, path.format(one)) for one in (hidden, none)]
            assert told(answers[0], hidden) == told(answers[1], none), path
            assert answers[0].status_code == 404
        answers = [filled.ann.post("/v1/batches", {**BATCH, "input_file_id": one}) for one in (file["id"], none)]
        assert told(answers[0], file["id"]) == told(answers[1], none)
        assert filled.root.get(f"/v1/files/{file['id']}").status_code == 200

    async def test_a_batch_asks_as_its_creator_also_after_a_restart(self, filled, engine, store) -> None:
        services, limits = filled.app.state.services, KeyLimits(requests_per_min=60)
        caller = replace(ANN, limits=limits)
        asked: list[Caller] = []

        def hang(caller: Caller) -> Any:
            asked.append(caller)
            return lambda *_: asyncio.Event().wait()

        def ask_as(caller: Caller) -> Any:
            asked.append(caller)
            return in_process_client(services, caller)

        first = BatchManager(store.root, hang)
        data = "\n".join(json.dumps(line(name, name)) for name in ("mia", HIDDEN)).encode()
        async with first.files.receiving(len(data), caller) as place:
            place.write(data)
            file = await first.files.keep(place, "in.jsonl", "batch", None, "ann")
        made = await first.create(file.id, "/v1/completions", ("24h", 86400), caller=caller)
        while not asked:
            await asyncio.sleep(0.001)
        await first.close()
        second = BatchManager(store.root, ask_as)
        await second.start()
        while not (record := second.records[made.id]).state.is_over:
            await asyncio.sleep(0.001)
        await second.close()
        assert asked == [Caller("ann", frozenset({Scope.INFER}), ("mia*",), limits)] * 2
        files = (record.output_file, record.error_file)
        assert {second.files.records[name].principal for name in files} == {"ann"}
        statuses = [json.loads(second.files.path(name).read_text())["response"]["status_code"] for name in files]
        assert statuses == [200, 404]
        assert [(asked.principal, asked.cache_salt) for asked in engine.added] == [("ann", "key:ann")]
        assert services.admission.rate_limiter.headers(caller)["x-ratelimit-remaining-requests"] == "59"


class TestPool:
    def test_nothing_of_others(self, filled, engine) -> None:
        mine, theirs = (AdapterKey(key_of(filled, name)[7:]) for name in ("mia", HIDDEN))
        pages = [AdapterPages(key, "ready", 2, (), 1, 1, 1, False) for key in (mine, theirs, AdapterKey("f" * 64))]
        engine.pool = replace(
            engine.pool,
            requests=tuple(
                RequestPages(RequestId(f"cmpl-{who}"), key, 3, 2, principal=who)
                for who, key in (("ann", mine), ("bob", theirs), ("carl", mine))
            ),
            adapters=tuple(pages),
            promised=(ReservedAdapter(mine, True, "ready"), ReservedAdapter(theirs, True, "ready")),
        )
        for name, key in (("", None), ("mia", mine), (HIDDEN, theirs)):
            asked = (RequestId(f"r{name}"), (1,), 1, SamplingParams(max_tokens=1), key)
            engine.request_stats.on_accepted([EngineCoreRequest(*asked, adapter_id=name)], 0.0)
        whole, seen = filled.root.get("/v1/pool").json(), filled.ann.get("/v1/pool").json()
        opened = filled.nobody.get("/v1/pool").json()
        assert opened.keys() == whole.keys()
        assert [name for name in whole if whole[name] != opened[name]] in ([], ["memory"]), "resident bytes change"
        assert seen["memory"] is None
        assert (len(whole["requests"]), len(whole["adapters"]), len(whole["promised"])) == (3, 3, 2)
        assert [one["id"] for one in whole["traffic"]["hottest"]] == [BASE, "mia", HIDDEN]
        assert [one["request_id"] for one in seen["requests"]] == ["cmpl-ann"]
        assert [one["ids"] for one in seen["adapters"]] == [["mia"]]
        assert [one["ids"] for one in seen["promised"]] == [["mia"]]
        assert [one["id"] for one in seen["traffic"]["hottest"]] == ["mia"]
        assert (whole["traffic"]["requests"], seen["traffic"]["requests"]) == (3, 1)
        assert theirs not in json.dumps(seen)
        assert filled.reader.get("/v1/pool").json()["requests"] == [], "seeing every adapter is not the scope admin"
        assert filled.ann.get("/info").json() == filled.root.get("/info").json()


def test_requests_carry_their_principal_and_its_salt(everything, engine) -> None:
    for route in list(BODIES)[:5]:
        assert everything.ann.post(route.partition(" ")[2], BODIES[route]("mia")).status_code == 200
    assert [(one.principal, one.cache_salt) for one in engine.added] == [("ann", "key:ann")] * 5
    engine.added.clear()
    for who, salt in (("ann", "key:bob"), ("bob", None), ("bob", "key:bob"), ("ann", ""), ("nobody", None)):
        body = {"model": BASE, "prompt": "hi", "cache_salt": salt}
        assert getattr(everything, who).post("/v1/completions", body).status_code == 200
    salts = [one.cache_salt for one in engine.added]
    assert salts == ["salt:key:bob", "key:bob", "salt:key:bob", "key:ann", ""]


def test_a_verdict_belongs_to_one_version(filled, store, make_adapter, monkeypatch) -> None:
    filled.ann.upload(make_adapter("bob", seed=2), "mia-same")
    refs = [store.resolve(name) for name in (HIDDEN, "mia-same")]
    assert refs[0].key == refs[1].key
    for ref in refs:
        store.version_history.record_verdict(ref, {"id": ref.adapter_id, "version": 1})
        assert filled.bob.get(f"/v1/adapters/{HIDDEN}").json()["verified"]["id"] == HIDDEN
        anns = filled.ann.get("/v1/adapters/mia-same").json()["verified"]
        assert anns == (None if ref is refs[0] else {"id": "mia-same", "version": 1})
    verifier = Verifier()
    monkeypatch.setattr("lorasrv.offline.verify.verifier.ORACLES", ())
    verifier._running = f"{HIDDEN}@1"
    with pytest.raises(VerificationBusy, match="another adapter is being verified"):
        verifier.check_ready(ANN.may_see)
    with pytest.raises(VerificationBusy, match=HIDDEN):
        verifier.check_ready(BOB.may_see)


def test_reports_on_shared_weights_are_the_keys_own(filled, make_adapter) -> None:
    anns = make_adapter("one", seed=7, base_model_name_or_path="acme/secret-base-13b")
    assert filled.ann.upload(anns, "mia-x").status_code == 201
    targets = ["q_proj", "v_proj", "down_proj"]
    bobs = make_adapter("one", seed=7, base_model_name_or_path="probe", target_modules=targets)
    told = filled.bob.upload(bobs, "bob-x", allow_partial=True).json()
    shown = filled.bob.get("/v1/adapters/bob-x")
    assert shown.json()["report"] == told["report"]
    warnings = [warning.split(":")[0] for warning in told["report"]["warnings"]]
    assert warnings == ["partial", f"trained on 'probe', served on {BASE!r}"]
    assert "secret-base" not in shown.text
    assert "secret-base" in filled.ann.get("/v1/adapters/mia-x").text


class TestViews:
    """What a set of patterns matches is found once."""

    @pytest.fixture
    def views(self, store) -> ScopedStores:
        base = base_card(BASE, 0, 1, {}, batch_invariant=True)
        return ScopedStores(store, lambda: ModelList(base, lambda record: adapter_card(base, record)))

    def test_what_others_do_changes_nothing(self, views, store, filled, make_adapter) -> None:
        ann, bob, everybody = (views.of(caller) for caller in (ANN, BOB, ANYBODY))
        records, page = ann.records(), ann.models("", None, None)
        assert everybody.records() is store.records()
        assert filled.bob.upload(make_adapter("new", seed=3), "bob-new").status_code == 201
        assert ann.records() is records
        assert ann.models("", None, None) is page
        assert sorted(bob.records()) == ["bob-new", HIDDEN]
        assert sorted(everybody.records()) == ["bob-new", HIDDEN, "mia"]
        filled.ann.upload(make_adapter("new", seed=4), "mia")
        assert ann.records() is not records
        assert ann.get("mia").current_version == 2
        assert ann.models("", None, None) != page
        filled.ann.ask("DELETE", "/v1/adapters/mia?force=1")
        assert dict(ann.records()) == {}

    def test_cached_views_are_bounded(self, views) -> None:
        for number in range(2 * MAX_CACHED):
            views.of(replace(ANN, adapters=(f"a{number}*",))).records()
        assert len(views._cached) == MAX_CACHED

    def test_an_adapter_that_goes_before_it_is_deleted(self, views, store, filled, monkeypatch) -> None:
        monkeypatch.setattr(store, "delete", lambda *_, **__: store.get("bob-secre"))
        with pytest.raises(AdapterNotFound) as caught:
            views.of(ANN).delete("mia")
        assert caught.value.near == ()
        assert HIDDEN not in str(caught.value)


def test_routes_know_the_store_through_a_view() -> None:
    allowed = {
        "adapters.py": {"quarantined", "version_history", "hold", "is_named", "compositions", "feed"},
        "verify.py": {"hold", "version_history", "load", "max_lora_rank"},
    }
    for path in (path for glob in ("*.py", "routes/*.py", "batches/*.py") for path in (ROOT / "api").glob(glob)):
        text = path.read_text("utf-8")
        used = set(re.findall(r"\bservices\.store\.(\w+)", text))
        assert used <= allowed.get(path.name, set()), path
