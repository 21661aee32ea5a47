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
from api.serving import tgi_responses
from lorasrv.errors import (
    AdapterLoadFailed,
    ContextLengthExceeded,
    DeadlineUnreachable,
    EngineDead,
    EngineOverloaded,
    RequestTimeout,
)
from lorasrv.outputs import FinishReason, RequestId, RequestOutput, RequestTiming, TokenLogprobs
from lorasrv.sampling_params import SamplingParams
from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.structured_output import grammar as source

TEXT = "Hello wörld €"
PROMPT = "a wörd"
STREAM = "/generate_stream"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_GRAMMAR = source.json_of(SCHEMA, "grammar")


@pytest.fixture(autouse=True)
def speaking(engine: Any) -> None:
    engine.tokenizer = tiny_tokenizer()
    engine.script = spelled(engine.tokenizer, TEXT)


def say(server: Any, path: str = "/generate", inputs: str = "hi", stream: bool | None = None, **parameters: Any) -> Any:
    body: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
    return server.http.post(path, json=body if stream is None else {**body, "stream": stream})


def events(response: Any) -> list[dict[str, Any]]:
    *parts, rest = response.text.split("\n\n")
    assert rest == ""
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


def each(tokens: list[dict[str, Any]], name: str) -> list[Any]:
    return [token[name] for token in tokens]


def mean_logprob(tokens: list[dict[str, Any]]) -> float:
    return sum(each(tokens, "logprob")) / len(tokens)


class TestWhole:
    def test_without_parameters(self, server, engine) -> None:
        response = server.http.post("/generate", json={"inputs": "hi"}).raise_for_status()
        assert response.json()["generated_text"] == TEXT
        assert "details" not in response.json()
        assert (engine.added[0].prompt, engine.added[0].count) == (engine.tokenizer.encode("hi"), 1)
        # Greedy, to the end of the context, and no probabilities that nobody reads.
        assert sampling_of(engine) == SamplingParams(temperature=0.0)

    def test_details(self, server, engine) -> None:
        details = say(server, details=True).json()["details"]
        ids, tokens = [*engine.tokenizer.encode(TEXT, add_special_tokens=False), EOS], details["tokens"]
        assert each(tokens, "id") == ids
        assert "".join(each(tokens, "text")) == TEXT
        assert each(tokens, "logprob") == [logprob_of(t, i) for i, t in enumerate(ids)]
        assert each(tokens, "special") == [False] * (len(ids) - 1) + [True]
        figures = {"finish_reason": "eos_token", "generated_tokens": len(ids), "prompt_tokens": 3, "seed": None}
        assert details | figures | {"prefill": []} == details
        assert not {"best_of_sequences", "top_tokens"} & details.keys()
        assert sampling_of(engine).logprobs == 0

    def test_decoder_input_details(self, server) -> None:
        prefill = say(server, inputs="hö", decoder_input_details=True).json()["details"]["prefill"]
        assert (prefill[0]["id"], each(prefill, "text")) == (BOS, ["<s>", "h", "", "ö"])
        assert [logprob is None for logprob in each(prefill, "logprob")] == [True, False, False, False]

    def test_top_tokens_and_alternatives(self, server, engine) -> None:
        details = say(server, details=True, top_n_tokens=2, return_k_alternatives=3).json()["details"]
        assert sampling_of(engine).logprobs == 3
        assert {len(top) for top in details["top_tokens"]} == {2}
        assert {len(alternatives) for alternatives in each(details["tokens"], "alternative_tokens")} == {3}
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
    def test_finish_reasons(self, server, parameters: dict[str, Any], reason: str, text: str) -> None:
        body = say(server, details=True, **parameters).json()
        assert (body["details"]["finish_reason"], body["generated_text"]) == (reason, text)
        assert "".join(each(body["details"]["tokens"], "text")) == text

    def test_text_held_back_for_a_stop_sequence_is_not_special(self, server, engine) -> None:
        engine.script = spelled(engine.tokenizer, "ab")
        body = say(server, details=True, stop=["bx"]).json()
        kept = [token["text"] for token in body["details"]["tokens"] if not token["special"]]
        assert "".join(kept) == body["generated_text"] == "ab"

    def test_the_root_answers_with_a_list(self, server) -> None:
        [body] = say(server, "/", details=True, return_full_text=True).json()
        assert (body["generated_text"], body["details"]["generated_tokens"]) == ("hi" + TEXT, 17)

    def test_best_of(self, server, engine) -> None:
        body = say(server, best_of=3, do_sample=True, details=True, decoder_input_details=True).json()
        first, others = body["details"], body["details"]["best_of_sequences"]
        assert len(others) == 2
        assert mean_logprob(first["tokens"]) >= max(mean_logprob(other["tokens"]) for other in others)
        assert sorted([body["generated_text"], *each(others, "generated_text")], key=len) == [TEXT[2:], TEXT[1:], TEXT]
        seed = sampling_of(engine).seed
        assert {first["seed"], *each(others, "seed")} == {seed, seed + 1, seed + 2}
        assert all(other["prefill"] == first["prefill"] != [] for other in others)
        assert all(set(other) >= {"finish_reason", "generated_tokens", "prefill", "tokens", "seed"} for other in others)
        assert "details" not in say(server, best_of=2, temperature=0.5).json()

    def test_headers_of_lorax(self, server) -> None:
        headers = say(server, details=True).headers
        assert [headers[f"x-{kind}-tokens"] for kind in ("prompt", "generated", "total")] == ["3", "17", "20"]
        times = ("x-total-time", "x-queue-time", "x-inference-time", "x-time-per-token", "x-time-to-first-token")
        assert all(math.isfinite(int(headers[name])) for name in times)
        assert {"x-request-id", "x-queue-ms", "x-load-ms"} <= set(headers)
        streamed = say(server, STREAM).headers
        assert (streamed["x-prompt-tokens"], streamed["x-queue-time"]) == ("3", "1")


def test_tokens_of_one_step_have_a_text_each() -> None:
    """As drafts bring them."""
    found = tuple(TokenLogprobs(token, -0.5) for token in (5, 6, 7))
    output = RequestOutput(
        RequestId("r"), "abc!", (5, 6, 7), 1, 3, RequestTiming(), FinishReason.STOP, "!", logprobs=found,
        token_texts=("ab", "", "c!"),
    )  # fmt: skip
    writer = tgi_responses.TokenWriter(tiny_tokenizer())
    assert [token["text"] for token, _ in writer.entries(output)] == ["ab", "", "c!"]


class TestRequest:
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
    def test_when_it_is_sampled(self, server, engine, parameters: dict[str, Any], sampled: bool) -> None:
        seed = say(server, details=True, **parameters).json()["details"]["seed"]
        assert sampling_of(engine).is_greedy is not sampled
        assert (seed is not None) is sampled
        assert seed == sampling_of(engine).seed

    def test_every_field_arrives(self, server, engine) -> None:
        given = {
            "temperature": 0.5, "top_k": 7, "top_p": 0.8, "typical_p": 0.7, "min_p": 0.1, "repetition_penalty": 1.2,
            "frequency_penalty": 0.3, "presence_penalty": 0.4, "watermark": True, "seed": 2**64 - 1,
        }  # fmt: skip
        options = {"cache_salt": "s", "priority": 3, "timeout_s": 9.0, "on_cold": "reject"}
        say(server, **given, **options, max_new_tokens=4, stop=["x"], ignore_eos_token=True).raise_for_status()
        assert sampling_of(engine) == SamplingParams(**given, max_tokens=4, stop=("x",), ignore_eos=True)
        assert {name: getattr(engine.added[0], name) for name in options} == {**options, "cache_salt": "salt:s"}

    def test_truncated_and_templated_prompts(self, server, engine) -> None:
        say(server, inputs="abcdef", truncate=2)
        assert engine.tokenizer.decode(engine.added[0].prompt) == "ef"
        assert "truncate" in refusal(say(server, truncate=512))
        engine.chat_template = ChatTemplate("<s>{{ messages[0].role }}:{{ messages[0].content }}")
        say(server, inputs="a<s>", apply_chat_template=True)
        prompt = engine.added[1].prompt
        assert (prompt[0], prompt.count(BOS), engine.tokenizer.decode(prompt)) == (BOS, 1, "user:a<s>")
        engine.chat_template = None
        assert "no chat template" in refusal(say(server, apply_chat_template=True))

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"grammar": {"type": "json", "value": SCHEMA}}, SCHEMA_GRAMMAR),
            ({"grammar": {"type": "json", "value": json.dumps(SCHEMA)}}, SCHEMA_GRAMMAR),
            ({"grammar": {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}}, SCHEMA_GRAMMAR),
            ({"grammar": {"type": "regex", "value": "a+"}}, source.regex_of("a+", "grammar")),
            ({"response_format": {"type": "text"}}, None),
        ],
    )
    @pytest.mark.parametrize("path", ["/generate", STREAM])
    def test_grammars(self, server, engine, fields: dict[str, Any], expected: object, path: str) -> None:
        assert say(server, path, apply_chat_template=True, **fields).status_code == 200
        assert engine.added[-1].constraint == expected
        assert engine.added[-1].text.strip_start == (expected is None), "a grammar says how its text begins"

    def test_inert_values(self, server) -> None:
        """As lorax-client and InferenceClient send what was not set."""
        nothing = dict.fromkeys(("adapter_source", "merged_adapters", "response_format", "grammar"))
        values = {"api_token": "hf_secret", "top_n_tokens": 0, "best_of": 1, "stop": [], "watermark": False, "other": 1}
        assert say(server, **nothing, **values).status_code == 200
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

    @pytest.mark.parametrize("name", sorted(Parameters.model_fields))
    def test_a_parameter_beside_the_parameters_is_refused(self, server, engine, name: str) -> None:
        response = server.http.post("/generate", json={"inputs": "hi", name: 1})
        assert (response.status_code, refusal(response)) == (422, f"{name} must be inside parameters")
        assert engine.added == []
        assert server.http.post("/generate", json={"inputs": "hi", name: None}).status_code == 200

    def test_too_long(self, server, engine, monkeypatch: pytest.MonkeyPatch) -> None:
        response = say(server, inputs="x" * 600)
        assert response.status_code == 422
        assert "600" in refusal(response) or "601" in refusal(response)
        engine.add_error = ContextLengthExceeded("5 of the prompt and 600 to generate ({param})", param="max_tokens")
        response = say(server, max_new_tokens=600)
        assert response.status_code == 422
        assert refusal(response) == "5 of the prompt and 600 to generate (max_new_tokens)"
        # Eight million characters would take a minute to be refused if they were tokenized.
        monkeypatch.setattr(type(engine.tokenizer), "encode", lambda *_, **__: pytest.fail("it was tokenized"))
        response = say(server, inputs="x" * 1_000_000)
        assert response.status_code == 422
        assert "the text of inputs has at least" in refusal(response)
        assert engine.added == []

    def test_asked_and_named(self, server, engine, make_adapter) -> None:
        digest = server.upload(make_adapter(), "mia").json()["digest"]
        response = say(server, adapter_id="mia")
        assert (f"sha256:{engine.added[-1].adapter_key}", engine.added[-1].adapter_id) == (digest, "mia")
        assert (response.headers["x-adapter-id"], response.headers["x-adapter-digest"]) == ("mia", digest)
        assert response.json()["usage"]["lorasrv"]["adapter_digest"] == digest
        stream = say(server, STREAM, adapter_id="mia@1")
        assert stream.headers["x-adapter-digest"] == digest
        assert events(stream)[-1]["usage"]["lorasrv"]["adapter_id"] == "mia"
        body = {"inputs": "hi", "model": "mia"}
        assert server.http.post("/", json=body).headers["x-adapter-id"] == "mia"
        assert "x-adapter-id" not in say(server, adapter_id="tiny-base").headers
        assert engine.added[-1].adapter_key is None

    @pytest.mark.parametrize("path", ["/generate", STREAM, "/"])
    def test_unknown_is_never_the_base(self, server, engine, path: str) -> None:
        response = say(server, path, adapter_id="nobody/knows")
        assert response.status_code == 404
        assert "nobody/knows" in refusal(response)
        assert "adapter_id" in refusal(say(server, path, adapter_id=""))
        assert engine.added == []


class TestStream:
    @pytest.mark.parametrize("path", [STREAM, "/"])
    def test_one_event_a_token(self, server, engine, path: str) -> None:
        response = say(server, path, details=True, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        told = events(response)
        ids, tokens = [*engine.tokenizer.encode(TEXT, add_special_tokens=False), EOS], each(told, "token")
        assert each(tokens, "id") == ids
        assert each(tokens, "logprob") == [logprob_of(t, i) for i, t in enumerate(ids)]
        assert each(told, "index") == list(range(1, len(ids) + 1))
        assert "".join(each(tokens, "text")) == TEXT
        assert {(e["generated_text"], e["details"]) for e in told[:-1]} == {(None, None)}
        assert told[-1]["generated_text"] == TEXT
        details = {"finish_reason": "eos_token", "prompt_tokens": 3, "input_length": 3, "generated_tokens": len(ids)}
        assert told[-1]["details"] == {**details, "seed": None}
        assert told[-1]["usage"]["completion_tokens"] == len(ids)
        assert "top_tokens" not in told[0]

    def test_without_details(self, server) -> None:
        last = events(say(server, STREAM, return_full_text=True, top_n_tokens=2))[-1]
        assert (last["details"], last["generated_text"], len(last["top_tokens"])) == (None, "hi" + TEXT, 2)

    @pytest.mark.parametrize("stop", ["rld", "ö", "l", "lo w", "nowhere"])
    def test_stop_sequences(self, server, stop: str) -> None:
        told = events(say(server, STREAM, details=True, stop=[stop]))
        text = TEXT[: TEXT.index(stop) + len(stop)] if stop in TEXT else TEXT
        assert told[-1]["generated_text"] == text == "".join(each(each(told, "token"), "text"))
        assert each(told, "token") == say(server, details=True, stop=[stop]).json()["details"]["tokens"]

    def test_a_client_that_disconnects(self, server, engine, eventually) -> None:
        engine.breaks(2, HANG)
        with server.http.stream("POST", STREAM, json={"inputs": "hi"}) as response:
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
    @pytest.mark.parametrize("path", ["/generate", STREAM, "/"])
    def test_before_the_answer(self, server, engine, error: Exception, status: int, kind: str, path: str) -> None:
        engine.add_error = error
        response = say(server, path)
        assert response.status_code == status
        assert refusal(response, kind)
        assert ("retry-after" in response.headers) is (status in (429, 503))

    @pytest.mark.parametrize(
        ("ending", "says"),
        [
            ({"finish_reason": FinishReason.ERROR, "error": "reloading failed"}, "reloading failed"),
            ({"finish_reason": FinishReason.ABORT}, ""),
        ],
    )
    def test_an_answer_that_is_not_finished(self, server, engine, ending: dict[str, Any], says: str) -> None:
        spell = engine.script
        engine.script = lambda *args: [*spell(*args)[:3], replace(spell(*args)[3], **ending)]
        for details in (False, True):
            response = say(server, details=details)
            assert response.status_code == 500
            assert says in refusal(response, "incomplete_generation")
        last = events(say(server, STREAM))[-1]
        assert last == {"error": refusal(response, "incomplete_generation"), "error_type": "incomplete_generation"}

    @pytest.mark.parametrize("error", [EngineDead("the engine died: Test"), AdapterCorrupt("damaged")])
    def test_in_a_stream(self, server, engine, error: Exception) -> None:
        engine.breaks(3, error)
        *tokens, last = events(say(server, STREAM))
        assert (len(tokens), last) == (3, {"error": str(error), "error_type": "generation"})

    def test_a_bug_of_ours(self, server, engine) -> None:
        engine.breaks(1, ZeroDivisionError())
        response = say(server)
        assert (response.status_code, "x-request-id" in refusal(response, "generation")) == (500, True)

    @pytest.mark.parametrize("lost", [lambda o: (), lambda o: tuple(replace(x, token_id=9) for x in o.logprobs)])
    def test_a_missing_probability_is_an_error(self, server, engine, lost: Callable[[Any], Any]) -> None:
        spell = engine.script
        engine.script = lambda *a: [replace(out, logprobs=lost(out)) for out in spell(*a)]
        assert say(server).status_code == 200
        assert say(server, details=True).status_code == 424
        assert events(say(server, STREAM))[-1]["error_type"] == "generation"
        engine.script = lambda *a: [replace(out, prompt_logprobs=None) for out in spell(*a)]
        assert say(server, decoder_input_details=True).status_code == 424

    def test_tokens_are_spelled_beside_the_event_loop(self, server, engine, monkeypatch) -> None:
        """Of a long answer that takes seconds."""
        loop, spelling, spell = set(), set(), tgi_responses.token_text

        async def on_the_loop(_: int) -> None:
            loop.add(threading.get_ident())

        def token_text(*arguments: Any) -> str:
            spelling.add(threading.get_ident())
            return spell(*arguments)

        engine.before_add = on_the_loop
        monkeypatch.setattr(tgi_responses, "token_text", token_text)
        assert say(server, details=True, top_n_tokens=2).status_code == 200
        assert (len(loop), len(spelling), loop & spelling) == (1, 1, set())

    def test_other_routes_keep_their_shape(self, server) -> None:
        assert "code" in server.http.get("/generated").json()["error"]
        assert "web pages" in refusal(server.http.post("/generate", headers={"origin": "https://evil.example"}))


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama.write_config(folder)
    kind = {"load_format": "dummy", "quantization": "none", "dtype": "float32", "pool_bytes": "4MiB"}
    kind["speculation"] = "off"  # the last bits depend on the number of rows
    with server(folder, folder / "store", served_model_name="tiny", **kind) as served:
        yield served.http


class TestOfARealEngine:
    """A tiny model: the probabilities of this route and of OpenAI's are the same numbers."""

    def post(self, http: httpx2.Client, path: str = "/generate", **parameters: Any) -> httpx2.Response:
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 24, "details": True, **parameters}}
        return http.post(path, json=body).raise_for_status()

    def generate(self, http: httpx2.Client, **parameters: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.post(http, **parameters).json()
        return answer

    def complete(self, http: httpx2.Client, **fields: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        choice: dict[str, Any] = http.post("/v1/completions", json=body | fields).json()["choices"][0]
        return choice

    def test_text_and_probabilities_are_those_of_the_openai_route(self, http) -> None:
        expected = self.complete(http, logprobs=0)
        answer = self.generate(http, decoder_input_details=True, top_n_tokens=3)
        tokens = answer["details"]["tokens"]
        assert answer["generated_text"] == "".join(each(tokens, "text")) == expected["text"]
        assert each(tokens, "logprob") == expected["logprobs"]["token_logprobs"]
        # Greedy: what was chosen is the likeliest, with the very same probability.
        for token, top in zip(tokens, answer["details"]["top_tokens"], strict=True):
            assert (token["id"], token["logprob"], len(top)) == (top[0]["id"], top[0]["logprob"], 3)

    def test_the_prompts_probabilities(self, http) -> None:
        prefill = self.generate(http, decoder_input_details=True)["details"]["prefill"]
        echoed = self.complete(http, logprobs=0, echo=True, max_tokens=1)["logprobs"]["token_logprobs"]
        assert each(prefill, "logprob") == echoed[: len(prefill)]
        tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
        assert each(prefill, "id") == tokens
        shown = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert "".join(each(prefill, "text")) == shown

    def test_a_stream_is_the_whole_answer_in_tokens(self, http) -> None:
        parameters = {"do_sample": True, "seed": 5, "stop": ["\x00never"]}
        whole = self.generate(http, **parameters)
        told = events(self.post(http, STREAM, **parameters))
        assert each(told, "token") == whole["details"]["tokens"]
        assert told[-1]["generated_text"] == whole["generated_text"]
        assert told[-1]["details"]["seed"] == whole["details"]["seed"] == 5

    def test_a_seed_that_was_returned_gives_the_same_answer(self, http) -> None:
        first = self.generate(http, do_sample=True)
        again = self.generate(http, do_sample=True, seed=first["details"]["seed"])
        assert again["generated_text"] == first["generated_text"]

    def test_best_of(self, http) -> None:
        details = self.generate(http, do_sample=True, best_of=4, decoder_input_details=True)["details"]
        means = [mean_logprob(tokens) for tokens in each([details, *details["best_of_sequences"]], "tokens")]
        assert means[0] == max(means)
        assert len(details["prefill"]) == details["prompt_tokens"]
