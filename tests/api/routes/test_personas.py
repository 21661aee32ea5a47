"""Defaults of a version over HTTP: what requests get of them, who may read them, and what is refused."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from answers import named
from callers import with_callers
from fake_engine import CONTEXT, VOCAB
from spelled_engine import tiny_tokenizer

from adapter_store.formats.adapter_dir import open_adapter_dir
from api.auth.principal import Caller, Scope
from api.schemas.openai import LIMIT_NAMES
from lorasrv.errors import InvalidRequest
from lorasrv.request import is_salted

SECRET = "Say plover."
CLOCK = {"type": "function", "function": {"name": "clock"}}
STRICT = {"type": "function", "function": {"name": "clock", "strict": True}}
JSON = {"type": "json_object"}
FREE = {"allowed_token_ids": [5], "min_tokens": 1, "ignore_eos": True}
"""What does not go with a grammar, in the order of the fields."""
STORED = {"system": SECRET, "temperature": 0.5, "stop": ["END"], "max_tokens": 7}
CALLERS = {
    "ann": Caller("ann", frozenset({Scope.UPLOAD, Scope.INFER})),
    "bob": Caller("bob", frozenset({Scope.UPLOAD, Scope.INFER})),
    "root": Caller("root", frozenset({Scope.ADMIN})),
    "eve": Caller("eve", frozenset({Scope.INFER}), ("tom*",)),
}


def post(server: Any, adapter_id: str, caller: str = "", **body: Any) -> httpx2.Response:
    headers = {"x-caller": caller} if caller else {}
    response: httpx2.Response = server.http.post("/v1/adapters", json={"id": adapter_id, **body}, headers=headers)
    return response


def put(server: Any, reference: str, caller: str = "", **defaults: Any) -> httpx2.Response:
    headers = {"x-caller": caller} if caller else {}
    response: httpx2.Response = server.http.put(f"/v1/adapters/{reference}/defaults", json=defaults, headers=headers)
    return response


def prompt(engine: Any) -> str:
    return bytes(engine.added[-1].prompt).decode()


def persona(response: httpx2.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()["usage"]["lorasrv"].get("persona")


@pytest.fixture
def muse(server) -> Any:
    made = post(server, "muse", defaults=STORED)
    assert made.status_code == 201, made.text
    return made.json()


class TestVersions:
    def test_weights_and_defaults_make_a_version_together(self, server, make_adapter: Callable[..., Path]) -> None:
        folder = make_adapter()
        bare = server.upload(folder, "mia").json()
        kind = server.upload(folder, "mia", defaults=STORED)
        assert (kind.status_code, kind.json()["version"], kind.json()["digest"]) == (201, 2, bare["digest"])
        stern = put(server, "mia@1", system="Be stern.")
        assert (stern.status_code, stern.json()["version"], stern.json()["report"]) == (201, 3, bare["report"])
        assert put(server, "mia", **STORED).json()["version"] == 2
        assert put(server, "mia").json()["version"] == 1
        shown = server.http.get("/v1/adapters/mia").json()
        assert (shown["version"], shown["persona"]) == (1, None)
        digests = [version["persona"] for version in shown["versions"]]
        assert digests == [None, kind.json()["persona"]["digest"], stern.json()["persona"]["digest"]]

    def test_canary_and_rollback_choose_between_prompts(self, server, engine, make_adapter) -> None:
        server.upload(make_adapter(), "mia", defaults={"system": "One."})
        put(server, "mia", system="Two.")
        server.patch(aliases={"prod": 1}).raise_for_status()
        assert persona(server.chat(model="mia:prod"))["version"] == 1
        assert prompt(engine) == "system:One.\nuser:hi"
        assert persona(server.chat(model="mia"))["version"] == 2
        server.patch(version=1).raise_for_status()
        server.chat(model="mia")
        assert prompt(engine) == "system:One.\nuser:hi"
        keys = {asked.adapter_key for asked in engine.added}
        assert len(keys) == 1
        assert None not in keys

    def test_no_weights_are_the_base(self, server, engine, muse: Any) -> None:
        assert (muse["digest"], muse["report"], muse["stored"]) == (None, None, None)
        response = server.chat(model="muse")
        asked = engine.added[-1]
        assert (asked.adapter_key, asked.adapter_id, asked.versions) == (None, "muse", [("muse", 1)])
        assert "x-adapter-digest" not in response.headers
        assert response.headers["x-adapter-id"] == "muse"
        for path, code in (("warm", 400), ("verify", 400)):
            assert server.http.post(f"/v1/adapters/muse:{path}", json={}).status_code == code
        assert server.patch("muse", pinned=True).status_code == 400
        assert server.http.get("/v1/models/muse").json()["root"] is None
        stats = server.http.get("/v1/adapters/muse/stats").json()
        assert stats["requests"] == 1
        assert server.http.delete("/v1/adapters/muse").json()["versions_removed"] == 1

    def test_bodies_that_are_neither(self, server, make_adapter) -> None:
        for body in ({}, {"defaults": {}}, {"config": {}}, {"weights": "0" * 64}):
            assert post(server, "mia", **body).status_code == 400, body
        server.upload(make_adapter(), "mia")
        assert put(server, "zoe", system="x").status_code == 404
        tag = server.http.get("/v1/adapters/mia").headers["etag"]
        put(server, "mia", system="x").raise_for_status()
        late = server.http.put("/v1/adapters/mia/defaults", json={"system": "y"}, headers={"if-match": tag})
        assert late.status_code == 412


class TestPrecedence:
    def test_request_then_persona_then_server(self, server, engine, muse: Any) -> None:
        told = persona(server.chat(model="muse"))
        assert told == {
            "id": "muse", "version": 1, "digest": muse["persona"]["digest"],
            "applied": ["system", "max_tokens", "temperature", "stop"],
        }  # fmt: skip
        sampling = engine.added[-1].sampling
        assert (sampling.temperature, sampling.stop, sampling.max_tokens, sampling.top_p) == (0.5, ("END",), 7, 1.0)
        for name in LIMIT_NAMES:
            told = persona(server.chat(model="muse", temperature=0.9, stop="x", **{name: 3}))
            sampling = engine.added[-1].sampling
            assert (sampling.temperature, sampling.stop, sampling.max_tokens) == (0.9, ("x", "END"), 3)
            assert told["applied"] == ["system", "stop"]
        assert persona(server.chat(model="muse", use_defaults=False))["applied"] == []
        assert (prompt(engine), engine.added[-1].sampling.temperature) == ("user:hi", 1.0)
        assert persona(server.chat(use_defaults=True)) is None

    def test_plain_completions_get_sampling_and_stops(self, server, engine, muse: Any) -> None:
        told = persona(server.complete("x", model="muse"))
        assert (told["applied"], prompt(engine)) == (["max_tokens", "temperature", "stop"], "x")
        assert engine.added[-1].sampling.stop == ("END",)

    def test_united_and_merged(self, server, engine) -> None:
        stored = {"stop": list("abcdefgh"), "stop_token_ids": [1, 2], "logit_bias": {"5": 1, "6": 2}}
        post(server, "muse", defaults=stored).raise_for_status()
        persona(server.chat(model="muse", stop=["a", "z"], stop_token_ids=[2, 3], logit_bias={"6": -1, "7": 3}))
        sampling = engine.added[-1].sampling
        assert sampling.stop == ("a", "z", *"bcdefgh")
        assert sampling.stop_token_ids == (2, 3, 1)
        assert dict(sampling.logit_bias) == {5: 1.0, 6: -1.0, 7: 3.0}
        full = server.chat(model="muse", stop=[str(i) for i in range(9)])
        assert (full.status_code, full.json()["error"]["param"]) == (400, "stop")
        assert "17 together, 16" in full.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("stored", "request_", "expected"),
        [
            ({"min_tokens": 9}, {"max_tokens": 4}, {"min_tokens": 0, "max_tokens": 4}),
            ({"max_tokens": 4}, {"min_tokens": 9}, {"min_tokens": 9, "max_tokens": None}),
            ({"fsd_alpha": 0.5, "temperature": 0}, {"temperature": 0.7}, {"fsd_alpha": 0.0, "temperature": 0.7}),
            ({"temperature": 0.7}, {"fsd_alpha": 0.5}, {"fsd_alpha": 0.5, "temperature": 0.0}),
            ({"ignore_eos": True}, {"guided_regex": "a"}, {"ignore_eos": False}),
            ({"temperature": 0.7, "max_tokens": 4}, {"use_beam_search": True}, {"temperature": 1.0, "max_tokens": 4}),
        ],
    )  # fmt: skip
    def test_a_default_that_contradicts_the_request_is_left_out(
        self, server, engine, stored: dict[str, Any], request_: dict[str, Any], expected: dict[str, Any]
    ) -> None:
        post(server, "muse", defaults=stored).raise_for_status()
        told = persona(server.chat(model="muse", **request_))
        sampling = asdict(engine.added[-1].sampling)
        assert {name: sampling[name] for name in expected} == expected
        assert all(sampling[name] == stored[name] for name in told["applied"])

    def test_a_grammar_of_the_request_replaces_the_personas(self, server, engine) -> None:
        object_ = {"type": "json_object"}
        assert post(server, "muse", defaults={"response_format": object_}).status_code == 201
        assert persona(server.chat(model="muse"))["applied"] == ["response_format"]
        assert engine.added[-1].constraint is not None
        assert persona(server.chat(model="muse", response_format={"type": "text"}))["applied"] == []
        assert engine.added[-1].constraint is None
        assert persona(server.chat(model="muse", guided_regex="a+"))["applied"] == []

    @pytest.mark.parametrize(
        ("stored", "request_", "applied"),
        [
            # What the persona has beside its grammar is left out for a grammar of the request, whatever asks for it.
            (FREE, {"response_format": JSON}, []),
            (FREE, {"response_format": {"type": "text"}}, list(FREE)),
            (FREE, {"tools": [CLOCK], "tool_choice": "required"}, []),
            (FREE, {"tools": [STRICT]}, []),
            (FREE, {"tools": [CLOCK]}, list(FREE)),
            ({**FREE, "tools": [STRICT], "tool_choice": "none"}, {"tool_choice": "auto"}, ["tools"]),
            # And a grammar of the persona for what the request says.
            ({"response_format": JSON}, {"min_tokens": 2}, []),
            ({"response_format": JSON}, {"ignore_eos": True}, []),
            ({"response_format": JSON}, {"allowed_token_ids": [6]}, []),
            ({"response_format": JSON}, {"ignore_eos": False, "min_tokens": 0}, ["response_format"]),
            ({"tools": [CLOCK], "tool_choice": "required"}, {"min_tokens": 2}, ["tools"]),
            ({"tools": [STRICT]}, {"min_tokens": 2}, []),
            # The request's own contradiction is the request's fault.
            ({"response_format": JSON, "seed": 1}, {"min_tokens": 2, "guided_regex": "a"}, None),
            ({"tools": [CLOCK]}, {"min_tokens": 2, "tool_choice": "required"}, None),
        ],
    )
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
    def test_a_grammar_and_what_does_not_go_with_one(
        self, server, engine, path: str, stored: dict[str, Any], request_: dict[str, Any], applied: list[str] | None
    ) -> None:
        engine.chat_template.take_tools()
        engine.tokenizer = tiny_tokenizer()
        post(server, "muse", defaults=stored).raise_for_status()
        body = {"model": "muse", "messages": [{"role": "user", "content": "hi"}], **request_}
        if path == "/v1/responses":
            body["input"] = body.pop("messages")
            body = {name: value for name, value in body.items() if name not in ("response_format", "tools")}
            if "response_format" in request_:
                body["text"] = {"format": request_["response_format"]}
            if "tools" in request_:
                body["tools"] = [{"type": "function", **tool["function"]} for tool in request_["tools"]]
        answer = server.http.post(path, json=body)
        asked = engine.added[-1]
        if applied is not None:
            assert persona(answer)["applied"] == applied
        is_free = not asked.sampling.min_tokens and not asked.sampling.ignore_eos
        is_free = is_free and asked.sampling.allowed_token_ids is None
        assert (asked.constraint is None or is_free) is (applied is not None)

    def test_speculation(self, server, engine) -> None:
        post(server, "muse", defaults={"speculation": {"max_draft": 3}}).raise_for_status()
        assert persona(server.chat(model="muse"))["applied"] == ["speculation"]
        assert engine.added[-1].speculation.max_draft == 3
        server.chat(model="muse", speculation={"max_draft": 5})
        assert engine.added[-1].speculation.max_draft == 5


class TestSystemPrompt:
    OWN = ({"role": "system", "content": "Mine."}, {"role": "user", "content": "hi"})

    @pytest.mark.parametrize(
        ("mode", "told"),
        [
            ("default", "system:Mine.\nuser:hi"),
            ("prepend", f"system:{SECRET}\n\nMine.\nuser:hi"),
        ],
    )
    def test_modes(self, server, engine, mode: str, told: str) -> None:
        post(server, "muse", defaults={"system": {"text": SECRET, "mode": mode}}).raise_for_status()
        server.chat(model="muse")
        assert prompt(engine) == f"system:{SECRET}\nuser:hi"
        assert persona(server.chat(model="muse", messages=self.OWN))
        assert prompt(engine) == told

    def test_several(self, server, engine) -> None:
        """All that lead are one message behind `prepend`; they stay before the examples otherwise."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        further = {"role": "developer", "content": [{"type": "text", "text": "And mine."}]}
        later = {"role": "system", "content": "Later."}
        messages = [self.OWN[0], further, self.OWN[1], later, *turns, self.OWN[1]]
        rest = "user:hi\nsystem:Later.\nuser:a\nassistant:b\nuser:hi"
        for mode, told in (
            ("default", "system:Mine.\nsystem:And mine.\nuser:a\nassistant:b"),
            ("prepend", f"system:{SECRET}\n\nMine.\n\nAnd mine.\nuser:a\nassistant:b"),
        ):
            stored = {"system": {"text": SECRET, "mode": mode}, "examples": [turns]}
            post(server, "muse", defaults=stored).raise_for_status()
            server.chat(model="muse", messages=messages).raise_for_status()
            assert prompt(engine) == f"{told}\n{rest}"

    def test_lock(self, server, engine) -> None:
        post(server, "muse", defaults={"system": {"text": SECRET, "mode": "lock"}}).raise_for_status()
        for role in ("system", "developer"):
            late = [{"role": "user", "content": "hi"}, {"role": role, "content": "x"}]
            refused = server.chat(model="muse", messages=late)
            assert named(refused) == (400, "messages[1]")
            sent = {"model": "muse", "input": late}
            assert named(server.http.post("/v1/responses", json=sent)) == (400, "input")
            sent |= {"instructions": "x"}
            assert named(server.http.post("/v1/responses", json=sent)) == (400, "instructions")
        assert server.chat(model="muse").status_code == 200
        # A template may render such a text into the system prompt.
        written = server.chat(model="muse", chat_template_kwargs={"enable_thinking": True, "mood": "plover"})
        assert named(written) == (400, "chat_template_kwargs")
        assert "'mood'" in written.text
        assert server.chat(model="muse", chat_template_kwargs={"enable_thinking": True}).status_code == 200

    def test_examples_and_placeholders(self, server, engine) -> None:
        told = [{"role": "user", "content": "{{user}}?"}, {"role": "assistant", "content": "{{char}}!"}]
        made = post(server, "muse", defaults={"system": "To {{user}}.", "examples": [told], "name": "Ada"})
        assert made.json()["persona"]["warnings"] == [] or made.json()["persona"]["warnings"]
        server.chat(model="muse", user="Bo")
        assert prompt(engine) == "system:To Bo.\nuser:Bo?\nassistant:Ada!\nuser:hi"
        server.chat(model="muse", messages=self.OWN)
        assert prompt(engine) == "system:Mine.\nuser:User?\nassistant:Ada!\nuser:hi"
        server.chat(model="muse", user="{{char}}")
        assert prompt(engine) == "system:To {{char}}.\nuser:{{char}}?\nassistant:Ada!\nuser:hi"
        for name in ("", "x" * 65, "a\nb"):
            assert server.chat(model="muse", user=name).json()["error"]["param"] == "user"
        assert server.chat(user="x" * 65).status_code == 200

    def test_only_the_personas_own_rendering_reaches_its_pages(self, server, engine) -> None:
        """Or a guess could be compared with the hidden prompt by what is found cached."""
        stored = {"system": "For {{user}}: " + SECRET, "temperature": 0.5}
        post(server, "muse", defaults=stored).raise_for_status()

        def salt(**fields: Any) -> str:
            server.chat(model="muse", **fields).raise_for_status()
            found: str = engine.added[-1].cache_salt
            return found

        plain = salt()
        assert plain == salt(temperature=1.0)
        others = {salt(user="Bo"), salt(cache_salt="x"), salt(messages=self.OWN), salt(use_defaults=False)}
        server.complete("x", model="muse", cache_salt=plain)
        forged = engine.added[-1].cache_salt
        # Without the persona's texts, a prompt is any other prompt: two of these are the same.
        assert len({plain, forged, *others}) == 5
        assert is_salted(salt(cache_salt="x"), "salt:x")
        assert not is_salted(forged, "")


class TestTgi:
    def generate(self, server: Any, **parameters: Any) -> httpx2.Response:
        body = {"inputs": "hi", "model": "muse", "parameters": parameters}
        response: httpx2.Response = server.http.post("/generate", json=body)
        return response

    def test_the_same_defaults(self, server, engine) -> None:
        stored = {**STORED, "stop_token_ids": [3], "min_tokens": 2}
        post(server, "muse", defaults=stored).raise_for_status()
        engine.tokenizer = SimpleNamespace(encode=lambda text, **_: list(text.encode()), special_ids=frozenset())
        told = persona(self.generate(server))
        sampling = engine.added[-1].sampling
        assert set(told["applied"]) == {"max_tokens", "temperature", "stop", "stop_token_ids", "min_tokens"}
        assert (sampling.temperature, sampling.stop, sampling.max_tokens, sampling.min_tokens) == (0.5, ("END",), 7, 2)
        assert (sampling.stop_token_ids, prompt(engine)) == ((3,), "hi")
        self.generate(server, do_sample=False, stop=["x"], max_new_tokens=1)
        sampling = engine.added[-1].sampling
        assert (sampling.temperature, sampling.stop, sampling.max_tokens, sampling.min_tokens) == (
            0,
            ("x", "END"),
            1,
            0,
        )
        told = persona(self.generate(server, apply_chat_template=True))
        assert (told["applied"][0], prompt(engine)) == ("system", f"system:{SECRET}\nuser:hi")
        assert self.generate(server, apply_chat_template=True, truncate=3).status_code == 422
        assert persona(self.generate(server, use_defaults=False))["applied"] == []

    @pytest.mark.parametrize(
        ("parameters", "alpha"),
        [({}, 0.5), ({"apply_chat_template": True}, 0.5), ({"temperature": 0.7}, 0), ({"do_sample": True}, 0)],
    )
    def test_fsd_unless_the_request_samples(self, server, engine, parameters: dict[str, Any], alpha: float) -> None:
        engine.tokenizer = SimpleNamespace(encode=lambda text, **_: list(text.encode()), special_ids=frozenset())
        post(server, "muse", defaults={"fsd_alpha": 0.5, "fsd_ngram": 2}).raise_for_status()
        told = persona(self.generate(server, **parameters))
        sampling = engine.added[-1].sampling
        assert (sampling.fsd_alpha, sampling.fsd_ngram) == ((alpha, 2) if alpha else (0, 3))
        assert told["applied"] == (["fsd_alpha", "fsd_ngram"] if alpha else [])

    @pytest.mark.parametrize(
        ("stored", "parameters", "applied"),
        [
            (FREE, {"grammar": {"type": "regex", "value": "a"}}, []),
            (FREE, {"response_format": {"type": "text"}}, ["ignore_eos", "allowed_token_ids", "min_tokens"]),
            ({"response_format": JSON}, {"ignore_eos_token": True}, []),
            ({"response_format": JSON}, {}, ["response_format"]),
        ],
    )
    def test_a_grammar_and_what_does_not_go_with_one(
        self, server, engine, stored: dict[str, Any], parameters: dict[str, Any], applied: list[str]
    ) -> None:
        engine.tokenizer = SimpleNamespace(encode=lambda text, **_: list(text.encode()), special_ids=frozenset())
        post(server, "muse", defaults=stored).raise_for_status()
        assert persona(self.generate(server, apply_chat_template=True, **parameters))["applied"] == applied
        asked = engine.added[-1]
        assert (asked.constraint is None) is ("ignore_eos" in applied or "ignore_eos_token" in parameters)
        assert asked.sampling.ignore_eos is (asked.constraint is None)


class TestReaders:
    @pytest.fixture
    def served(self, server, dispatcher) -> Any:
        with_callers(dispatcher[0].app, CALLERS)
        return server

    def test_owner_and_admin_read_what_others_do_not(self, served) -> None:
        stored = {"system": {"text": SECRET, "mode": "lock"}, "greetings": ["I am {{char}}, {{user}}."]}
        post(served, "muse", "ann", defaults=stored).raise_for_status()
        for caller in ("ann", "root"):
            found = served.http.get("/v1/adapters/muse/defaults", headers={"x-caller": caller})
            assert found.json()["defaults"] == stored
            assert served.http.get("/v1/adapters/muse", headers={"x-caller": caller}).json()["persona"]["defaults"]
        bob = {"x-caller": "bob"}
        assert served.http.get("/v1/adapters/muse/defaults", headers=bob).status_code == 403
        shown = served.http.get("/v1/adapters/muse", headers=bob)
        assert SECRET not in shown.text
        assert shown.json()["persona"]["greetings"] == ["I am muse, {{user}}."]
        assert shown.json()["persona"]["fields"] == ["system", "greetings"]
        eve = {"x-caller": "eve"}
        missing = served.http.get("/v1/adapters/nobody/defaults", headers=eve).json()["error"]
        unseen = served.http.get("/v1/adapters/muse/defaults", headers=eve).json()["error"]
        assert unseen["message"].replace("muse", "nobody") == missing["message"]

    def test_another_uploader_inherits_nothing(self, served) -> None:
        post(served, "muse", "ann", defaults=STORED).raise_for_status()
        assert post(served, "muse", "bob", defaults={"temperature": 0.1}).json()["version"] == 2
        shown = served.http.get("/v1/adapters/muse", headers={"x-caller": "bob"})
        assert shown.json()["persona"]["defaults"] == {"temperature": 0.1}
        assert served.http.get("/v1/adapters/muse@1/defaults", headers={"x-caller": "bob"}).status_code == 403

    def test_owner_and_admin_change_what_others_do_not(self, served, make_adapter) -> None:
        """The weights under a prompt are not had without it by making another version of them."""
        with open_adapter_dir(make_adapter()) as peft:
            data, config = peft.weights_path.read_bytes(), dict(peft.config)
        weights = f"sha256:{hashlib.sha256(data).hexdigest()}"
        ann = {"x-caller": "ann"}
        served.http.put(f"/v1/blobs/{weights}", content=data, headers=ann).raise_for_status()
        locked = {"system": {"text": SECRET, "mode": "lock"}}
        post(served, "muse", "ann", config=config, weights=weights, defaults=locked).raise_for_status()
        post(served, "plain", "ann", config=config, weights=weights).raise_for_status()
        other = {"temperature": 0.1}
        statuses = {caller: put(served, "muse@1", caller, **other).status_code for caller in ("bob", "eve", "ann")}
        assert statuses == {"bob": 403, "eve": 404, "ann": 201}
        assert put(served, "muse@1", "bob").status_code == 403
        assert put(served, "muse@1", "root", seed=1).status_code == 201
        refused = put(served, "muse", "bob", **other).json()["error"]
        assert refused["code"] == "forbidden"
        assert "muse@3" in refused["message"]
        # A version without defaults may get some from whoever may upload under its id; then they are that key's.
        assert put(served, "plain", "bob", **other).json()["version"] == 2
        assert put(served, "plain", "ann", **other).status_code == 403
        assert put(served, "plain@1", "ann", **other).json()["version"] == 3

    def test_a_locked_persona_is_not_switched_off(self, served) -> None:
        post(served, "muse", "ann", defaults={"system": {"text": SECRET, "mode": "lock"}}).raise_for_status()
        body = {"model": "muse", "messages": [{"role": "user", "content": "hi"}], "use_defaults": False}
        status = {
            caller: served.http.post("/v1/chat/completions", json=body, headers={"x-caller": caller}).status_code
            for caller in ("ann", "bob", "root")
        }
        assert status == {"ann": 200, "bob": 400, "root": 200}

    @pytest.mark.parametrize("defaults", [{"tools": [CLOCK]}, {"chat_template_kwargs": {"mood": "plover"}}])
    def test_tools_and_template_variables_are_hidden_like_texts(self, served, engine, defaults) -> None:
        engine.chat_template.take_tools()
        engine.tokenizer = tiny_tokenizer()
        for adapter_id, stored in (("muse", defaults), ("bare", {"temperature": 0.5})):
            post(served, adapter_id, "ann", defaults=stored).raise_for_status()

        def ask(model: str, caller: str = "bob", **fields: Any) -> httpx2.Response:
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
            return served.http.post("/v1/chat/completions", json=body, headers={"x-caller": caller})

        salts = []
        for model, fields in (("bare", {}), ("muse", {}), ("muse", {"tool_choice": "none"})):
            ask(model, **fields).raise_for_status()
            salts.append(engine.added[-1].cache_salt)
        # Without the tools, the prompt is the caller's from the first token on: it must not meet pages with them.
        assert len(set(salts)) == (3 if "tools" in defaults else 2)
        refused = ask("muse", prompt_logprobs=0)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
        assert "hidden" in refused.text
        if "tools" not in defaults:
            for name, value in (("decoder_input_details", True), ("truncate", 3)):
                parameters = {"adapter_id": "muse", "apply_chat_template": True, "details": True, name: value}
                sent = {"inputs": "hi", "parameters": parameters}
                refused = served.http.post("/generate", json=sent, headers={"x-caller": "bob"})
                assert (refused.status_code, name in refused.text) == (422, True)

        def refuse(*_: Any, **variables: Any) -> list[int]:
            raise InvalidRequest(f"messages: not with {variables}", param="messages")

        engine.chat_template.encode = refuse
        told = {caller: ask("muse", caller).json()["error"]["message"] for caller in ("ann", "bob")}
        assert ["not with" in told[caller] for caller in told] == [True, False]

    def test_a_locked_prompt_is_not_dropped_from_the_keys_and_values(self, served, engine) -> None:
        for mode in ("lock", "prepend"):
            stored = {"system": {"text": SECRET, "mode": mode}}
            post(served, mode, "ann", defaults=stored).raise_for_status()
        engine.tokenizer = SimpleNamespace(encode=lambda text, **_: list(text.encode()), special_ids=frozenset())
        policy = {"kv_policy": {"kind": "window", "recent": 64}}
        bodies: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], **policy},
            "/v1/responses": {"input": "hi", **policy},
            "/v1/completions": {"prompt": "hi", **policy},
            "/generate": {"inputs": "hi", "parameters": {"apply_chat_template": True, **policy}},
        }
        for path, body in bodies.items():
            for model, caller in (("lock", "bob"), ("lock", "ann"), ("prepend", "bob")):
                answer = served.http.post(path, json={"model": model, **body}, headers={"x-caller": caller})
                if (model, caller) == ("lock", "bob"):
                    assert answer.status_code in (400, 422), path
                    assert "kv_policy could drop" in answer.text
                else:
                    assert answer.status_code == 200, answer.text


def test_an_example_is_not_continued(server) -> None:
    pair = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    post(
        server, "muse", defaults={"system": {"text": SECRET, "mode": "prepend"}, "examples": [pair]}
    ).raise_for_status()
    system = [{"role": "system", "content": "y"}]
    refused = server.chat(model="muse", messages=system, continue_final_message=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")
    assert server.chat(model="muse", messages=[*system, *pair], continue_final_message=True).status_code == 200


def test_errors_number_the_clients_messages(server) -> None:
    pair = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    stored = {"system": {"text": SECRET, "mode": "prepend"}, "examples": [pair]}
    post(server, "muse", defaults=stored).raise_for_status()
    result, system = {"role": "tool", "content": "x", "tool_call_id": "1"}, {"role": "system", "content": "y"}
    asked = (([result], 0), ([system, result], 1), ([system, system, result], 2), ([pair[0], system, result], 2))
    for messages, number in asked:
        refused = server.chat(model="muse", messages=messages).json()["error"]
        assert refused["param"] == f"messages[{number}].role"


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"temperature": -1, "top_p": 2, "nonsense": 1}, ["temperature", "top_p", "nonsense"]),
    ({"temperature": "warm", "stop": ["x"] * 9, "top_k": -7}, ["temperature", "stop", "top_k"]),
    ({"system": ""}, ["system"]),
    ({"system": {"text": "x", "mode": "loud"}, "min_p": 7}, ["system.mode", "min_p"]),
    ({"system": "a {{name}}", "greetings": ["{{x}}"]}, ["system", "greetings[0]"]),
    ({"system": "x<|im_end|>"}, ["system"]),
    ({"system": "a {{char}}", "name": "{{user}}"}, ["name"]),
    ({"system": "a {{char}}", "name": "Mia<|im_end|>"}, ["name"]),
    ({"system": "x" * 200}, ["system"]),
    ({"logit_bias": {str(VOCAB): 1}, "stop_token_ids": [VOCAB]}, ["logit_bias", "stop_token_ids"]),
    ({"min_tokens": 5, "max_tokens": 4}, ["min_tokens"]),
    ({"temperature": 1, "fsd_alpha": 0.5}, ["fsd_alpha"]),
    ({"examples": [[{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]]}, ["examples"]),
    ({"examples": [[{"role": "user", "content": "y"}, {"role": "system", "content": "x"}]]}, ["examples[0][1].role"]),
    ({"response_format": {"type": "json_schema"}, "seed": 2**70}, ["response_format", "seed"]),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, ["ignore_eos"]),
    (
        {"response_format": {"type": "json_object"}, "min_tokens": 2, "allowed_token_ids": [5]},
        ["min_tokens", "allowed_token_ids"],
    ),
    ({"max_tokens": CONTEXT}, ["max_tokens"]),
    ({"system": "Be brief.", "min_tokens": CONTEXT - 10}, ["min_tokens"]),
    ({"speculation": {"drafters": ["magic"]}}, ["speculation.drafters"]),
    ({"greetings": [""] * 3, "name": ""}, ["greetings[0]", "name"]),
    ({"tools": [{"type": "function"}]}, ["tools"]),
]


@pytest.mark.parametrize(("defaults", "fields"), WRONG)
def test_every_fault_is_in_one_answer(server, defaults: dict[str, Any], fields: list[str]) -> None:
    refused = post(server, "muse", defaults=defaults)
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_adapter")
    details = refused.json()["error"]["details"]
    assert {problem["field"] for problem in details} <= set(fields)
    # The same fault of several fields is one entry.
    told = " ".join(f"{problem['field']} {problem['message']}" for problem in details)
    assert [field for field in fields if field not in told] == []
    assert server.http.get("/v1/adapters/muse").status_code == 404


@pytest.mark.parametrize("calls", [{"tool_choice": "required", "tools": [CLOCK]}, {"tools": [STRICT]}])
def test_what_contradicts_forced_or_strict_calls(server, engine, calls: dict[str, Any]) -> None:
    engine.chat_template.take_tools()
    engine.tokenizer = tiny_tokenizer()
    free = {"min_tokens": 2, "ignore_eos": True, "allowed_token_ids": [5]}
    refused = post(server, "muse", defaults={**calls, **free})
    assert refused.status_code == 422
    told = refused.json()["error"]["message"]
    assert [name for name in free if name not in told] == []
    assert post(server, "muse", defaults={**calls, "tool_choice": "none", **free}).status_code == 201


def test_dates_and_users_that_stand_early_are_told(server) -> None:
    made = post(server, "muse", defaults={"system": "On 2026-11-23 {{user}} " + "came and said a few words. " * 3})
    assert [warning[:8] for warning in made.json()["persona"]["warnings"]] == ["{{user}}", "the date"]
    assert made.json()["persona"]["prompt_tokens"] > 100
