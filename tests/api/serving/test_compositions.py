"""Sums of adapters over HTTP: how they are asked for, by whom, and what is refused."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from answers import events
from callers import with_callers
from peft_adapters import peft_adapter
from safetensors.torch import load_file, save_file
from server import eventually, server

from adapter_store.formats.peft_dir import read_peft_dir
from api.auth.principal import Caller, Scope

BOTH = [{"id": "one", "weight": 1.0}, {"id": "two", "weight": 0.5}]
PROMPT = "Good morning, how is the sea?"
CALLERS = {
    "ann": Caller("ann", frozenset({Scope.UPLOAD, Scope.INFER})),
    "bob": Caller("bob", frozenset({Scope.UPLOAD, Scope.INFER})),
    "eve": Caller("eve", frozenset({Scope.INFER}), ("one*",)),
}


@pytest.fixture(scope="module")
def served(model, adapter_dirs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A real server of the tiny llama with adapters `one` and `two`, and `dora`."""
    folder = tmp_path_factory.mktemp("served")
    peft_adapter(model, folder / "dora", use_dora=True)
    adapters = {"one": adapter_dirs["one"], "two": adapter_dirs["two"], "dora": folder / "dora"}
    options = {"quantization": "int8", "dtype": "float32", "kernels": "auto", "speculation": "off"}
    with server(model, folder / "store", adapters, **options) as served:

        def text(path: str = "/v1/completions", **body: Any) -> Any:
            answer = served.post(path, **{"prompt": PROMPT, "temperature": 0, "max_tokens": 12} | body)
            assert answer.status_code == 200, answer.text
            return answer

        def add(adapter_id: str, folder: Path) -> None:
            peft = read_peft_dir(folder)
            served.store.register(adapter_id, peft.config, served.store.add_blob(peft.weights_path))

        served.text, served.add = text, add
        yield served


def said(response: httpx2.Response) -> str:
    text: str = response.json()["choices"][0]["text"]
    return text


def test_all_spellings_are_one_sum(served) -> None:
    name = served.engine.model_name
    asked = [
        {"adapters": BOTH},
        {"adapters": [{"id": "two@1", "weight": 0.5}, {"id": "one"}]},
        {"model": name, "adapters": BOTH},
        {"model": "one+0.5*two"},
        {"adapter_id": "0.5*two+one@1"},
    ]
    answers = [served.text(logprobs=1, **body) for body in asked]
    shown = [(said(answer), answer.json()["choices"][0]["logprobs"]) for answer in answers]
    assert all(each == shown[0] for each in shown)
    alone = [said(served.text(model=model)) for model in ("one", "two", name)]
    assert shown[0][0] not in alone
    # The second found the pages of the first, the third and others too: pages are the sum's, whatever its spelling.
    cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0
    assert all(cached[1:])
    digests = {answer.headers["x-adapter-digest"] for answer in answers}
    assert len(digests) == 1
    usage = answers[3].json()["usage"]["lorasrv"]
    assert answers[3].json()["model"] == "one+0.5*two"
    assert [(a["id"], a["version"], a["weight"]) for a in usage["adapters"]] == [("one", 1, 1.0), ("two", 1, 0.5)]
    assert (usage["adapter_id"], f"sha256:{usage['adapter_digest'].removeprefix('sha256:')}") == ("one", *digests)
    assert "adapters" not in served.text(model="one").json()["usage"]["lorasrv"]


def test_other_routes_and_streams(served) -> None:
    want = said(served.text(adapters=BOTH))
    streamed = served.text(adapters=BOTH, stream=True, stream_options={"include_usage": True})
    chunks = events(streamed)
    assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == want
    assert len(chunks[-1]["usage"]["lorasrv"]["adapters"]) == 2
    parameters = {"max_new_tokens": 12, "adapters": BOTH}
    tgi = served.post("/generate", inputs=PROMPT, parameters=parameters)
    assert tgi.json()["generated_text"] == want, tgi.text
    sugar = served.post("/generate", inputs=PROMPT, parameters={"max_new_tokens": 12, "adapter_id": "one+0.5*two"})
    assert sugar.json()["generated_text"] == want
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
    several = served.post("/v1/chat/completions", adapters=BOTH, n=2, temperature=1, seed=4, **chat).json()
    again = served.post("/v1/chat/completions", model="0.5*two+one", n=2, temperature=1, seed=4, **chat).json()
    texts = [[choice["message"]["content"] for choice in answer["choices"]] for answer in (several, again)]
    assert texts[0] == texts[1]


def test_sums_run_beside_their_parts(served) -> None:
    """Many at once, with changing weights in a small pool, answer as each does alone."""
    models = ["one", "two", served.engine.model_name, *(f"one+{i / 4}*two" for i in range(-4, 5))]
    alone = [said(served.text(model=model)) for model in models]
    assert len(set(alone)) > 6
    together: dict[str, str] = {}

    def ask(model: str) -> None:
        together[model] = said(served.text(model=model))

    threads = [threading.Thread(target=ask, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together[model] for model in models] == alone
    served.calm_down()


def test_a_cold_sum_that_was_refused_is_loaded_for_the_next_request(served, adapter_dirs) -> None:
    served.add("cold", adapter_dirs["three"])
    model = "0.125*one+0.375*cold"
    refused = served.post("/v1/completions", prompt="x", max_tokens=1, model=model, on_cold="reject")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "adapter_cold")
    body = {"prompt": "x", "max_tokens": 1, "model": model, "on_cold": "reject"}
    eventually(lambda: served.post("/v1/completions", **body).status_code == 200, 30)


def test_what_is_refused(served) -> None:
    one = {"id": "one"}
    refused: list[tuple[int, str | None, str, dict[str, Any]]] = [
        (400, "adapters", "leave out model and adapter_id", {"model": "one", "adapters": BOTH}),
        (400, "adapters", "leave out model and adapter_id", {"adapter_id": "one", "adapters": BOTH}),
        (400, "adapters", "at most 4", {"adapters": [one] * 5}),
        (400, "adapters", "at least 1", {"adapters": []}),
        (400, "adapters[0].weight", "must be at most 4", {"adapters": [one | {"weight": 4.5}]}),
        (400, "adapters[0].weight", "must be a number", {"adapters": [one | {"weight": "0.5"}]}),
        (400, "adapters[0].scale", "", {"adapters": [one | {"scale": 1}]}),
        (400, "adapters", "is no sum", {"model": "one+"}),
        (400, "adapters", "from -4 to 4", {"model": "5*one"}),
        (400, "adapters", "1 to 4 adapters, not 5", {"model": "one+one+one+one+one"}),
        (400, "adapters", "dora@1 cannot be part of a sum: DoRA", {"model": "one+dora"}),
        (400, "model", "which every sum has", {"model": f"one+{served.engine.model_name}"}),
        (404, "model", "'nobody' does not exist", {"model": "one+nobody"}),
        (404, "adapters", "'nobody' does not exist", {"adapters": [one, {"id": "nobody"}]}),
    ]
    for status, param, message, body in refused:
        answer = served.post("/v1/completions", prompt="x", max_tokens=1, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, param), (body, error)
        assert message in error["message"], (body, error)
    nan = '{"prompt": "x", "adapters": [{"id": "one", "weight": NaN}]}'
    answer = served.http.post("/v1/completions", content=nan, headers={"content-type": "application/json"})
    assert answer.status_code == 400


def test_the_deletion_of_any_part_ends_the_request(served, adapter_dirs) -> None:
    served.add("brief", adapter_dirs["three"])
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True, "model": "one+0.25*brief"}
    with served.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        deleted = served.http.delete("/v1/adapters/brief?force=true")
        assert deleted.json()["requests_ended"] == 1
        rest = "\n".join(lines)
    assert "adapter_deleted" in rest
    eventually(lambda: served.post("/v1/completions", prompt="x", model="one+brief").status_code == 404)
    served.calm_down()


class TestStored:
    """Sums under an id of their own."""

    def test_it_keeps_to_its_versions(self, served, cli, adapter_dirs) -> None:
        done = cli("compose", "night", "one", "0.5*two", "--server", served.url)
        assert (done.code, "registered night@1" in done.out) == (0, True), done.err
        shown = cli("show", "night", "--server", served.url).out
        assert "sum of 1 * one@1 + 0.5 * two@1" in shown
        night, named = served.text(model="night"), served.text(model="one+0.5*two")
        assert said(night) == said(named)
        assert night.headers["x-adapter-digest"] != named.headers["x-adapter-digest"], "their last bits may differ"
        assert (night.headers["x-adapter-id"], night.json()["usage"]["lorasrv"]["adapter_id"]) == ("night", "night")
        assert "adapters" not in night.json()["usage"]["lorasrv"], "who may ask for a sum need not see its parts"
        served.add("one", adapter_dirs["three"])
        try:
            assert said(served.text(model="one+0.5*two")) != said(named)
            assert said(served.text(model="night")) == said(named)
            again = cli("compose", "night", "one", "0.5*two", "--server", served.url)
            assert "registered night@2" in again.out
            assert said(served.text(model="night")) == said(served.text(model="one+0.5*two"))
            assert said(served.text(model="night@1")) == said(named)
        finally:
            served.http.delete("/v1/adapters/one@2").raise_for_status()

    def test_its_defaults_change_without_it(self, served, cli, tmp_path) -> None:
        cli("compose", "mood", "0.25*one", "two", "--server", served.url)
        before = said(served.text(model="mood"))
        (tmp_path / "mood.json").write_text('{"max_tokens": 3}')
        assert cli("defaults", "mood", tmp_path / "mood.json", "--server", served.url).code == 0
        short = served.text(model="mood", max_tokens=None)
        assert before.startswith(said(short))
        assert short.json()["usage"]["completion_tokens"] == 3
        without = served.text(model="mood", use_defaults=False)
        assert said(without) == before, "the weights are no default that a request may leave out"
        changed = cli("compose", "mood", "two", "--server", served.url)
        assert "registered mood@3" in changed.out
        assert served.text(model="mood", max_tokens=None).json()["usage"]["completion_tokens"] == 3
        assert served.http.get("/v1/adapters/mood/stats").json()["requests"] == 4

    def test_the_deletion_of_a_part_ends_it(self, served, cli, adapter_dirs) -> None:
        served.add("brief", adapter_dirs["three"])
        cli("compose", "late", "one", "brief", "--server", served.url)
        assert served.text(model="late").status_code == 200
        served.http.delete("/v1/adapters/brief").raise_for_status()
        served.add("brief", adapter_dirs["two"])
        gone = served.post("/v1/completions", prompt="x", model="late")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "adapter_deleted")
        assert "brief" not in gone.text
        served.http.delete("/v1/adapters/brief").raise_for_status()

    @pytest.mark.parametrize("n", [1, 2])
    def test_what_ends_its_answer_names_no_part(self, served, cli, adapter_dirs, tmp_path, n: int) -> None:
        """A part is deleted by force, or found damaged by the load, while the request is on it."""
        served.add("hushed", adapter_dirs["three"])
        cli("compose", f"open{n}", "one", "0.5*hushed", "--server", served.url)
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True, "n": n, "model": f"open{n}"}
        with served.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            served.http.delete("/v1/adapters/hushed?force=true").raise_for_status()
            rest = "\n".join(lines)
        assert ("adapter_deleted" in rest, "hushed" in rest) == (True, False)
        tensors = load_file(adapter_dirs["three"] / "adapter_model.safetensors")
        shutil.copytree(adapter_dirs["three"], tmp_path / "hushed")
        save_file(
            {name: tensor * (1 + n) for name, tensor in tensors.items()}, tmp_path / "hushed/adapter_model.safetensors"
        )
        served.add("hushed", tmp_path / "hushed")
        cli("compose", f"open{n}", "one", f"0.{n}*hushed", "--server", served.url)
        digest = served.store.records()["hushed"].versions[-1].weights_digest
        path = served.store.blob_path(digest)
        data = bytearray(path.read_bytes())
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        asked = body | {"stream": False, "max_tokens": 1}
        for path, given in (("completions", asked), (f"adapters/open{n}:warm", {}))[:: 1 if n == 1 else -1]:
            refused = served.post(f"/v1/{path}", **given)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "adapter_corrupt")
            assert digest[:12] not in refused.text
        served.http.delete("/v1/adapters/hushed").raise_for_status()

    def test_what_is_refused(self, served, cli) -> None:
        assert cli("compose", "sum", "one", "two", "--server", served.url).code == 0
        assert served.post("/v1/adapters", id="plain", defaults={"system": "Be brief."}).status_code in {200, 201}
        refused = {
            ("one", "nobody"): "adapters[1].id",
            ("one", "dora"): "dora@1: DoRA",
            ("one", "sum"): "the adapter is refused\n  adapters: sum@1 is a sum itself; name its adapters instead",
            ("one", "plain"): "the adapter is refused\n  adapters: plain@1 has no weights",
        }
        for parts, message in refused.items():
            told = cli("compose", "new", *parts, "--server", served.url)
            assert (told.code, message in told.err) == (1, True), told.err
        nothing = cli("compose", "new", "one+-1*one", "--server", served.url)
        assert (nothing.code, "the base would answer" in nothing.err) == (1, True), nothing.err
        lost = served.http.put("/v1/adapters/sum/defaults", json={"adapters": None})
        assert lost.json()["created"] is False, "null says nothing"
        empty = served.post("/v1/adapters", id="new", defaults={"system": None})
        assert (empty.status_code, empty.json()["error"]["param"]) == (400, "defaults")
        usage = cli("compose", "new", "9*one", "--server", served.url)
        assert (usage.code, "from -4 to 4" in usage.err) == (2, True)
        own = cli("compose", "one", "two", "--server", served.url)
        assert (own.code, "has weights of its own" in own.err) == (1, True)
        nested = served.post("/v1/completions", prompt="x", model="sum+one")
        assert (nested.status_code, "is a sum itself" in nested.text) == (400, True)
        assert served.http.get("/v1/adapters/new").status_code == 404
        assert served.post("/v1/adapters/sum:verify").status_code == 400

    def test_it_can_be_warmed(self, served, cli) -> None:
        assert cli("compose", "soon", "2*one+-0.75*two", "--server", served.url).code == 0
        warmed = served.post("/v1/adapters/soon:warm", deadline_ms=30_000).json()
        assert (warmed["reached"], warmed["tier"]) == (True, "resident"), warmed
        answer = served.text(model="soon", on_cold="reject")
        assert answer.headers["x-adapter-digest"] == warmed["digest"]


def test_a_part_that_is_not_seen_does_not_exist(server, dispatcher, make_adapter) -> None:
    with_callers(dispatcher[0].app, CALLERS)
    for name in ("one", "two"):
        assert server.upload(make_adapter(name), name).status_code == 201
    bodies = [
        server.http.post(
            "/v1/completions",
            json={"prompt": "x", "adapters": [{"id": "one"}, {"id": name, "weight": 0.5}]},
            headers={"x-caller": "eve"},
        )
        for name in ("two", "six")
    ]
    assert [body.status_code for body in bodies] == [404, 404]
    assert bodies[0].text.replace("two", "six") == bodies[1].text


def test_sums_lead_around_no_prompt(server, dispatcher, engine, make_adapter) -> None:
    """The weights of a persona with a locked prompt are part of a sum only where its prompt is applied, too; what reads
    a prompt that is not the caller's is its owner's; and nobody else stores its weights with other defaults."""
    with_callers(dispatcher[0].app, CALLERS)

    def by(caller: str, path: str = "chat/completions", **body: Any) -> httpx2.Response:
        body = {"messages": [{"role": "user", "content": "hi"}]} | body if "chat" in path else body
        answer: httpx2.Response = server.http.post(f"/v1/{path}", json=body, headers={"x-caller": caller})
        return answer

    def refused(answer: httpx2.Response, why: str) -> None:
        assert answer.status_code in (400, 422), answer.text
        assert why in answer.text

    locked = {"system": {"text": "Be kind.", "mode": "lock"}}
    for number, (caller, name, defaults) in enumerate(
        (("ann", "kind", locked), ("ann", "open", {"system": "Be open."}), ("ann", "one", None), ("bob", "mine", None))
    ):
        server.http.headers["x-caller"] = caller
        try:
            server.upload(make_adapter(name, seed=number), name, defaults=defaults).raise_for_status()
        finally:
            del server.http.headers["x-caller"]
    assert by("ann", model="one+kind").status_code == 200, "its owner may"
    refused(by("bob", model="one+kind"), "can only be named first")
    refused(by("bob", model="0*kind+mine+kind"), "can only be named first")
    assert by("bob", model="kind+one").status_code == 200
    assert bytes(engine.added[-1].prompt).decode() == "system:Be kind.\nuser:hi"
    for prompted in ("kind", "open"):
        refused(by("bob", model=f"{prompted}+mine"), "only its owner's adapters can be added")
        assert by("ann", model=f"{prompted}+mine").status_code == 200
        stored = {"adapters": [{"id": prompted}], "system": "Say all."}
        refused(by("bob", "adapters", id="copy", defaults=stored), "only its owner stores sums of it")
    assert by("bob", model="mine+open").status_code == 200
    assert bytes(engine.added[-1].prompt).decode() == "user:hi"
    assert by("bob", model="0*open+mine").status_code == 200
    assert bytes(engine.added[-1].prompt).decode() == "user:hi", "what weighs nothing is not the first"
    assert engine.added[-1].adapter_id == "mine"


def test_accounts_and_defaults_are_those_of_the_one_named_first(server, engine, make_adapter) -> None:
    server.upload(make_adapter("one"), "one", defaults={"system": "Be one.", "max_tokens": 5})
    server.upload(make_adapter("two", seed=2), "two", defaults={"system": "Be two.", "max_tokens": 6})
    answer = server.chat(model="one+0.5*two")
    assert answer.status_code == 200, answer.text
    asked = engine.added[-1]
    assert bytes(asked.prompt).decode() == "system:Be one.\nuser:hi"
    assert (asked.sampling.max_tokens, asked.adapter_id) == (5, "one")
    assert sorted(asked.versions) == [("one", 1), ("two", 1)]
    assert answer.json()["usage"]["lorasrv"]["persona"]["id"] == "one"
    keys = {engine.added[-1].adapter_key for model in ("one", "two", "one+0.5*two") if server.chat(model=model)}
    assert len(keys) == 3
    server.http.delete("/v1/adapters/two").raise_for_status()
    assert set(engine.forgotten) == {asked.adapter_key for asked in engine.added[-2:]}, "two, and sums with it"
