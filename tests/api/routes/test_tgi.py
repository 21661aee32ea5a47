"""TGI's and LoRAX's routes: what goes to the engine, what comes back, whole and streamed, and how failure is told."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest
import tiny_llama
from fake_engine import HANG
from server import server
from spelled_engine import BOS, EOS, logprob_of, spelled, tiny_tokenizer

from adapter_store.errors import AdapterCorrupt
from api.schemas.tgi import Parameters
from api.serving import tgi_responses as tgi_answers
from lorasrv.errors import (
    AdapterLoadFailed,
    ContextLengthExceeded,
    DeadlineUnreachable,
    EngineDead,
    EngineOverloaded,
    RequestTimeout,
)
from lorasrv.outputs import FinishReason
from lorasrv.sampling_params import SamplingParams
from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.structured_output import grammar as source

TEXT = "Hello wörld €"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(autouse=True)
def speaking(engine: Any) -> Any:
    engine.tokenizer = tiny_tokenizer()
    engine.script = spelled(engine.tokenizer, TEXT)
    return engine


def say(server: Any, path: str = "/generate", inputs: str = "hi", stream: bool | None = None, **parameters: Any) -> Any:
    body: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
    return server.http.post(path, json=body if stream is None else {**body, "stream": stream})


def events(response: Any) -> list[dict[str, Any]]:
    parts = response.text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def refusal(response: Any, kind: str = "validation") -> str:
    body = response.json()
    assert set(body) == {"error", "error_type"}
    assert body["error_type"] == kind
    return str(body["error"])


def sampling_of(engine: Any) -> SamplingParams:
    sampling: SamplingParams = engine.added[-1].sampling
    return sampling


class TestWhole:
    def test_plain(self, server, engine) -> None:
        response = say(server)
        assert response.status_code == 200
        assert response.json()["generated_text"] == TEXT
        assert "details" not in response.json()
        assert engine.added[0].prompt == engine.tokenizer.encode("hi")
        assert engine.added[0].count == 1

    def test_without_parameters(self, server, engine) -> None:
        body = server.http.post("/generate", json={"inputs": "hi"}).json()
        assert body["generated_text"] == TEXT
        # Greedy, to the end of the context, and no probabilities that nobody reads.
        assert sampling_of(engine) == SamplingParams(temperature=0.0)

    def test_details(self, server, engine) -> None:
        details = say(server, details=True).json()["details"]
        ids = [*engine.tokenizer.encode(TEXT, add_special_tokens=False), EOS]
        assert [token["id"] for token in details["tokens"]] == ids
        assert "".join(token["text"] for token in details["tokens"]) == TEXT
        assert [token["logprob"] for token in details["tokens"]] == [logprob_of(t, i) for i, t in enumerate(ids)]
        assert [token["special"] for token in details["tokens"]] == [False] * (len(ids) - 1) + [True]
        told = {name: details[name] for name in ("finish_reason", "generated_tokens", "prompt_tokens", "seed")}
        assert told == {"finish_reason": "eos_token", "generated_tokens": len(ids), "prompt_tokens": 3, "seed": None}
        assert details["prefill"] == []
        assert "best_of_sequences" not in details
        assert "top_tokens" not in details
        assert sampling_of(engine).logprobs == 0

    def test_decoder_input_details(self, server) -> None:
        details = say(server, inputs="hö", decoder_input_details=True).json()["details"]
        assert [token["text"] for token in details["prefill"]] == ["<s>", "h", "", "ö"]
        assert details["prefill"][0]["id"] == BOS
        assert [token["logprob"] is None for token in details["prefill"]] == [True, False, False, False]

    def test_top_tokens_and_alternatives(self, server, engine) -> None:
        details = say(server, details=True, top_n_tokens=2, return_k_alternatives=3).json()["details"]
        assert sampling_of(engine).logprobs == 3
        assert {len(top) for top in details["top_tokens"]} == {2}
        assert {len(token["alternative_tokens"]) for token in details["tokens"]} == {3}
        first = details["top_tokens"][0][0]
        assert set(first) == {"id", "text", "logprob", "special"}
        assert first["text"] == engine.tokenizer.decode([first["id"]])
        assert details["tokens"][0]["alternative_tokens"][0] == {k: first[k] for k in ("id", "text", "logprob")}

    @pytest.mark.parametrize(
        ("parameters", "reason", "text"),
        [
            ({"max_new_tokens": 5}, "length", "Hello"),
            ({"stop": ["wö"]}, "stop_sequence", "Hello wö"),
            ({"stop_sequences": ["o"], "stop": ["€"]}, "stop_sequence", "Hello"),
            ({"stop": ["wx"]}, "eos_token", TEXT),
        ],
    )
    def test_finish_reasons(self, server, parameters, reason, text) -> None:
        body = say(server, details=True, **parameters).json()
        assert (body["details"]["finish_reason"], body["generated_text"]) == (reason, text)
        assert "".join(token["text"] for token in body["details"]["tokens"]) == text

    def test_text_held_back_for_a_stop_sequence_is_not_special(self, server, engine) -> None:
        engine.script = spelled(engine.tokenizer, "ab")
        body = say(server, details=True, stop=["bx"]).json()
        kept = [token["text"] for token in body["details"]["tokens"] if not token["special"]]
        assert "".join(kept) == body["generated_text"] == "ab"

    def test_return_full_text(self, server) -> None:
        assert say(server, return_full_text=True).json()["generated_text"] == "hi" + TEXT

    def test_root_answers_with_a_list(self, server) -> None:
        [body] = say(server, "/", details=True).json()
        assert body["generated_text"] == TEXT
        assert body["details"]["generated_tokens"] == 17

    def test_best_of(self, server, engine) -> None:
        details = say(server, best_of=3, do_sample=True, details=True, decoder_input_details=True).json()
        first, others = details["details"], details["details"]["best_of_sequences"]
        mean = lambda tokens: sum(t["logprob"] for t in tokens) / len(tokens)  # noqa: E731
        assert len(others) == 2
        assert mean(first["tokens"]) >= max(mean(other["tokens"]) for other in others)
        texts = sorted([details["generated_text"], *(other["generated_text"] for other in others)], key=len)
        assert texts == [TEXT[2:], TEXT[1:], TEXT]
        seed = sampling_of(engine).seed
        assert {first["seed"], *(o["seed"] for o in others)} == {seed, seed + 1, seed + 2}
        assert all(other["prefill"] == first["prefill"] != [] for other in others)
        assert all(set(other) >= {"finish_reason", "generated_tokens", "prefill", "tokens", "seed"} for other in others)

    def test_best_of_needs_no_details(self, server) -> None:
        assert "details" not in say(server, best_of=2, temperature=0.5).json()


class TestSampling:
    @pytest.mark.parametrize(
        ("parameters", "sampled"),
        [
            ({}, False),
            ({"temperature": 1.0}, False),
            ({"temperature": 0.7}, True),
            ({"temperature": 0, "do_sample": True}, False),
            ({"do_sample": True}, True),
            ({"top_k": 5}, True),
            ({"top_k": 0, "top_p": 1.0, "typical_p": 1.0}, False),
            ({"top_p": 0.9}, True),
            ({"typical_p": 0.9}, True),
        ],
    )
    def test_when_it_is_drawn(self, server, engine, parameters, sampled) -> None:
        details = say(server, details=True, **parameters).json()["details"]
        assert sampling_of(engine).is_greedy is not sampled
        assert (details["seed"] is not None) is sampled
        assert details["seed"] == sampling_of(engine).seed

    def test_every_field_arrives(self, server, engine) -> None:
        given = {
            "temperature": 0.5,
            "top_k": 7,
            "top_p": 0.8,
            "typical_p": 0.7,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.3,
            "presence_penalty": 0.4,
            "watermark": True,
            "seed": 2**64 - 1,
        }
        options = {"cache_salt": "s", "priority": 3, "timeout_s": 9.0, "on_cold": "reject"}
        response = say(server, **given, **options, max_new_tokens=4, stop=["x"], ignore_eos_token=True)
        assert response.status_code == 200
        expected = SamplingParams(**given, max_tokens=4, stop=("x",), ignore_eos=True)
        assert sampling_of(engine) == expected
        assert {name: getattr(engine.added[0], name) for name in options} == {**options, "cache_salt": "salt:s"}

    def test_truncate_keeps_the_end(self, server, engine) -> None:
        say(server, inputs="abcdef", truncate=2)
        assert engine.tokenizer.decode(engine.added[0].prompt) == "ef"
        assert "truncate" in refusal(say(server, truncate=512))

    def test_chat_template(self, server, engine) -> None:
        engine.chat_template = ChatTemplate("<s>{{ messages[0].role }}:{{ messages[0].content }}")
        say(server, inputs="a<s>", apply_chat_template=True)
        prompt = engine.added[0].prompt
        assert prompt[0] == BOS
        assert prompt.count(BOS) == 1
        assert engine.tokenizer.decode(prompt) == "user:a<s>"
        engine.chat_template = None
        assert "no chat template" in refusal(say(server, apply_chat_template=True))

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"grammar": {"type": "json", "value": SCHEMA}}, source.json_of(SCHEMA, "grammar")),
            ({"grammar": {"type": "json", "value": json.dumps(SCHEMA)}}, source.json_of(SCHEMA, "grammar")),
            (
                {"grammar": {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}},
                source.json_of(SCHEMA, "grammar"),
            ),
            ({"grammar": {"type": "regex", "value": "a+"}}, source.regex_of("a+", "grammar")),
            ({"response_format": {"type": "text"}}, None),
        ],
    )
    @pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
    def test_grammars(self, server, engine, fields, expected, path) -> None:
        assert say(server, path, **fields).status_code == 200
        assert engine.added[-1].constraint == expected

    def test_inert_values(self, server) -> None:
        """As lorax-client and InferenceClient send what was not set."""
        nothing = {
            "adapter_source": None,
            "api_token": "hf_secret",
            "merged_adapters": None,
            "response_format": None,
            "grammar": None,
            "top_n_tokens": 0,
            "best_of": 1,
            "stop": [],
            "watermark": False,
            "nobody_knows": 1,
        }
        assert say(server, **nothing).status_code == 200
        assert say(server, adapter_source="hub").status_code == 200

    def test_bodies(self, server) -> None:
        post = server.http.post
        assert "inputs" in refusal(post("/generate", json={"inputs": ""}))
        assert "inputs" in refusal(post("/generate", json={"parameters": {}}))
        assert "parameters" in refusal(post("/generate", json={"inputs": "a", "adapter_id": "mia"}))
        assert "generate_stream" in refusal(say(server, stream=True))
        assert post("/generate", content=b"{", headers={"content-type": "application/json"}).status_code == 422
        assert post("/generate", content=b"{}").status_code == 415
        assert refusal(server.http.get("/generate")) == "Method Not Allowed"


class TestStream:
    @pytest.mark.parametrize("path", ["/generate_stream", "/"])
    def test_one_event_a_token(self, server, engine, path) -> None:
        response = say(server, path, details=True, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        told = events(response)
        ids = [*engine.tokenizer.encode(TEXT, add_special_tokens=False), EOS]
        assert [e["token"]["id"] for e in told] == ids
        assert [e["token"]["logprob"] for e in told] == [logprob_of(t, i) for i, t in enumerate(ids)]
        assert [e["index"] for e in told] == list(range(1, len(ids) + 1))
        assert "".join(e["token"]["text"] for e in told) == TEXT
        assert {(e["generated_text"], e["details"]) for e in told[:-1]} == {(None, None)}
        assert told[-1]["generated_text"] == TEXT
        details = {"finish_reason": "eos_token", "prompt_tokens": 3, "input_length": 3, "generated_tokens": len(ids)}
        assert told[-1]["details"] == {**details, "seed": None}
        assert told[-1]["usage"]["completion_tokens"] == len(ids)
        assert "top_tokens" not in told[0]

    def test_without_details(self, server) -> None:
        last = events(say(server, "/generate_stream", return_full_text=True, top_n_tokens=2))[-1]
        assert last["details"] is None
        assert last["generated_text"] == "hi" + TEXT
        assert len(last["top_tokens"]) == 2

    @pytest.mark.parametrize("stop", ["rld", "ö", "l", "lo w", "nowhere"])
    def test_stop_sequences(self, server, stop) -> None:
        told = events(say(server, "/generate_stream", details=True, stop=[stop]))
        text = TEXT[: TEXT.index(stop) + len(stop)] if stop in TEXT else TEXT
        assert told[-1]["generated_text"] == text == "".join(e["token"]["text"] for e in told)
        whole = say(server, details=True, stop=[stop]).json()
        assert [e["token"] for e in told] == whole["details"]["tokens"]

    def test_client_that_leaves(self, server, engine, eventually) -> None:
        engine.breaks(2, HANG)
        with server.http.stream("POST", "/generate_stream", json={"inputs": "hi"}) as response:
            assert next(response.iter_lines()).startswith("data: ")
        eventually(lambda: engine.aborted)


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "status", "kind"),
        [
            (EngineOverloaded("full", retry_after_s=3.0), 429, "overloaded"),
            (EngineDead("dead"), 503, "generation"),
            (AdapterLoadFailed("unreadable"), 424, "generation"),
            (RequestTimeout("late"), 504, "generation"),
            (DeadlineUnreachable("late", retry_after_s=2.0), 503, "generation"),
        ],
    )
    @pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
    def test_before_the_answer(self, server, engine, error, status, kind, path) -> None:
        engine.add_error = error
        response = say(server, path)
        assert response.status_code == status
        assert refusal(response, kind)
        assert ("retry-after" in response.headers) is (status in (429, 503))

    def test_too_long(self, server, engine) -> None:
        response = say(server, inputs="x" * 600)
        assert response.status_code == 422
        assert "600" in refusal(response) or "601" in refusal(response)

    def test_broken_off(self, server, engine) -> None:
        spell = engine.script

        def broken(*args: Any) -> Any:
            *outputs, last = spell(*args)
            return [*outputs, replace(last, finish_reason=FinishReason.ERROR, error="reloading failed")]

        engine.script = broken
        response = say(server)
        assert (response.status_code, refusal(response, "incomplete_generation")) == (500, "reloading failed")
        last = events(say(server, "/generate_stream"))[-1]
        assert last == {"error": "reloading failed", "error_type": "incomplete_generation"}

    def test_aborted(self, server, engine) -> None:
        spell = engine.script
        engine.script = lambda *a: [replace(spell(*a)[0], finish_reason=FinishReason.ABORT)]
        assert say(server).status_code == 500
        assert refusal(say(server, details=True), "incomplete_generation")
        assert events(say(server, "/generate_stream"))[-1]["error_type"] == "incomplete_generation"

    def test_the_engine_dies_in_a_stream(self, server, engine) -> None:
        engine.breaks(3)
        *tokens, last = events(say(server, "/generate_stream"))
        assert len(tokens) == 3
        assert last == {"error": "the engine died: Test", "error_type": "generation"}

    @pytest.mark.parametrize("lost", [lambda o: (), lambda o: tuple(replace(x, token_id=9) for x in o.logprobs)])
    def test_a_missing_probability_is_an_error(self, server, engine, lost: Callable[[Any], Any]) -> None:
        spell = engine.script
        engine.script = lambda *a: [replace(out, logprobs=lost(out)) for out in spell(*a)]
        assert say(server).status_code == 200
        assert say(server, details=True).status_code == 424
        assert events(say(server, "/generate_stream"))[-1]["error_type"] == "generation"

    def test_a_damaged_adapter_in_a_stream(self, server, engine) -> None:
        engine.breaks(1, AdapterCorrupt("the stored weights are damaged"))
        last = events(say(server, "/generate_stream"))[-1]
        assert last == {"error": "the stored weights are damaged", "error_type": "generation"}

    def test_tokens_are_spelled_beside_the_event_loop(self, server, engine, monkeypatch) -> None:
        """Of a long answer that takes seconds."""
        loop, spelling = set(), set()
        add, spell = engine.add_choices, tgi_answers.token_text

        async def add_choices(*arguments: Any, **options: Any) -> Any:
            loop.add(threading.get_ident())
            return await add(*arguments, **options)

        def token_text(*arguments: Any) -> str:
            spelling.add(threading.get_ident())
            return spell(*arguments)

        monkeypatch.setattr(engine, "add_choices", add_choices)
        monkeypatch.setattr(tgi_answers, "token_text", token_text)
        assert say(server, details=True, top_n_tokens=2).status_code == 200
        assert loop
        assert spelling
        assert not loop & spelling

    @pytest.mark.parametrize("name", sorted(Parameters.model_fields))
    def test_a_parameter_beside_the_parameters_is_refused(self, server, engine, name: str) -> None:
        response = server.http.post("/generate", json={"inputs": "hi", name: 1})
        assert (response.status_code, refusal(response)) == (422, f"{name} must be inside parameters")
        assert engine.added == []
        assert server.http.post("/generate", json={"inputs": "hi", name: None}).status_code == 200

    def test_too_long_is_told_by_the_name_of_the_field(self, server, engine) -> None:
        engine.add_error = ContextLengthExceeded("5 of the prompt and 600 to generate ({param})", param="max_tokens")
        response = say(server, max_new_tokens=600)
        assert response.status_code == 422
        assert refusal(response) == "5 of the prompt and 600 to generate (max_new_tokens)"

    def test_a_missing_prompt_probability_is_an_error(self, server, engine) -> None:
        spell = engine.script
        engine.script = lambda *a: [replace(out, prompt_logprobs=None) for out in spell(*a)]
        assert say(server, decoder_input_details=True).status_code == 424

    def test_a_bug_of_ours(self, server, engine) -> None:
        engine.breaks(1, ZeroDivisionError())
        response = say(server)
        assert response.status_code == 500
        assert "x-request-id" in refusal(response, "generation")

    def test_other_routes_keep_their_shape(self, server) -> None:
        assert "code" in server.http.get("/generated").json()["error"]
        assert "web pages" in refusal(server.http.post("/generate", headers={"origin": "https://evil.example"}))


class TestAdapters:
    def test_asked_and_named(self, server, engine, make_adapter) -> None:
        server.upload(make_adapter(), "mia")
        digest = server.http.get("/v1/adapters/mia").json()["digest"]
        response = say(server, adapter_id="mia")
        assert f"sha256:{engine.added[-1].adapter}" == digest
        assert engine.added[-1].adapter_id == "mia"
        assert response.headers["x-adapter-id"] == "mia"
        assert response.headers["x-adapter-digest"] == digest
        assert response.json()["usage"]["lorasrv"]["adapter_digest"] == digest
        stream = say(server, "/generate_stream", adapter_id="mia@1")
        assert stream.headers["x-adapter-digest"] == digest
        assert events(stream)[-1]["usage"]["lorasrv"]["adapter_id"] == "mia"
        body = {"inputs": "hi", "model": "mia"}
        assert server.http.post("/", json=body).headers["x-adapter-id"] == "mia"

    @pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
    def test_unknown_is_never_the_base(self, server, engine, path) -> None:
        response = say(server, path, adapter_id="nobody/knows")
        assert response.status_code == 404
        assert "nobody/knows" in refusal(response)
        assert "adapter_id" in refusal(say(server, path, adapter_id=""))
        assert engine.added == []

    def test_the_base_by_its_name(self, server, engine) -> None:
        response = say(server, adapter_id="tiny-base")
        assert engine.added[-1].adapter is None
        assert "x-adapter-id" not in response.headers


def test_headers_of_lorax(server) -> None:
    headers = say(server, details=True).headers
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"], headers["x-total-tokens"]) == ("3", "17", "20")
    times = ("x-total-time", "x-queue-time", "x-inference-time", "x-time-per-token", "x-time-to-first-token")
    assert all(math.isfinite(int(headers[name])) for name in times)
    assert {"x-request-id", "x-queue-ms", "x-load-ms"} <= set(headers)
    streamed = say(server, "/generate_stream").headers
    assert (streamed["x-prompt-tokens"], streamed["x-queue-time"]) == ("3", "1")


def test_what_cannot_fit_is_not_tokenized(server, engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight million characters would take a minute to be refused."""
    monkeypatch.setattr(type(engine.tokenizer), "encode", lambda *_, **__: pytest.fail("it was"))
    refused = say(server, inputs="x" * 1_000_000)
    assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")
    assert "the text has at least" in refused.json()["error"]
    assert engine.added == []


PROMPT = "a wörd"


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    """Of a real engine with a tiny model."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama.write_config(folder)
    kind = {"load_format": "dummy", "quantization": "none", "dtype": "float32", "pool_bytes": "4MiB"}
    with server(folder, folder / "store", served_model_name="tiny", **kind) as served:
        yield served.http


def generate(http: httpx2.Client, **parameters: Any) -> dict[str, Any]:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 24, "details": True, **parameters}}
    response = http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def complete(http: httpx2.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **fields}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def test_text_and_probabilities_are_those_of_the_openai_route(http) -> None:
    expected = complete(http, logprobs=0)
    answer = generate(http, decoder_input_details=True)
    assert answer["generated_text"] == expected["text"]
    tokens = answer["details"]["tokens"]
    assert [token["logprob"] for token in tokens] == expected["logprobs"]["token_logprobs"]
    assert "".join(token["text"] for token in tokens) == expected["text"]


def test_prompt_s_probabilities(http) -> None:
    prefill = generate(http, decoder_input_details=True)["details"]["prefill"]
    echoed = complete(http, logprobs=0, echo=True, max_tokens=1)["logprobs"]["token_logprobs"]
    assert [token["logprob"] for token in prefill] == echoed[: len(prefill)]
    tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert [token["id"] for token in prefill] == tokens
    assert (
        "".join(token["text"] for token in prefill)
        == http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    )


def test_top_tokens(http) -> None:
    details = generate(http, top_n_tokens=3)["details"]
    # Greedy: what was chosen is the likeliest, with the very same probability.
    for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
        assert len(top) == 3
        assert (token["id"], token["logprob"]) == (top[0]["id"], top[0]["logprob"])


def test_stream_is_the_whole_answer_in_tokens(http) -> None:
    parameters = {"do_sample": True, "seed": 5, "stop": ["\x00never"]}
    whole = generate(http, **parameters)
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 24, "details": True, **parameters}}
    parts = http.post("/generate_stream", json=body).text.split("\n\n")[:-1]
    events = [json.loads(part.removeprefix("data: ")) for part in parts]
    assert [event["token"] for event in events] == whole["details"]["tokens"]
    assert events[-1]["generated_text"] == whole["generated_text"]
    assert events[-1]["details"]["seed"] == whole["details"]["seed"] == 5


def test_a_seed_that_was_told_gives_the_same_answer(http) -> None:
    first = generate(http, do_sample=True)
    assert generate(http, do_sample=True, seed=first["details"]["seed"])["generated_text"] == first["generated_text"]


def test_best_of(http) -> None:
    details = generate(http, do_sample=True, best_of=4, decoder_input_details=True)["details"]
    mean = lambda tokens: sum(token["logprob"] for token in tokens) / len(tokens)  # noqa: E731
    others = details["best_of_sequences"]
    assert mean(details["tokens"]) == max(
        mean(tokens) for tokens in (details["tokens"], *(o["tokens"] for o in others))
    )
    assert len(details["prefill"]) == details["prompt_tokens"]
