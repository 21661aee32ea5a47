"""Both completion routes: what goes to the engine, and what comes back, whole, streamed, and to openai-python."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from answers import coded, error_of, events, named
from fake_engine import HANG, cold, say

from lorasrv import __version__
from lorasrv.errors import (
    AdapterLoadFailed,
    ContextLengthExceeded,
    DeadlineUnreachable,
    EngineDead,
    EngineOverloaded,
    LimitExceeded,
    RequestTimeout,
)
from lorasrv.outputs import FinishReason

USAGE = {"stream_options": {"include_usage": True}}


class TestWholeAnswers:
    def test_chat(self, server, engine) -> None:
        body = server.chat("hi").raise_for_status().json()
        [choice] = body["choices"]
        assert (body["object"], body["model"]) == ("chat.completion", "tiny-base")
        assert choice["message"] == {"role": "assistant", "content": "Hello wörld", "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert {"prompt_tokens": 7, "completion_tokens": 11, "total_tokens": 18}.items() <= body["usage"].items()
        assert (body["id"], bytes(engine.added[0].prompt)) == (engine.added[0].id, b"user:hi")

    def test_completion_of_text_and_of_token_ids(self, server, engine) -> None:
        body = server.complete("hey").json()
        assert body["object"] == "text_completion"
        assert (body["choices"][0]["text"], body["choices"][0]["logprobs"]) == ("Hello wörld", None)
        assert server.complete([7, 8, 9]).status_code == 200
        assert [added.prompt for added in engine.added] == [list(b"hey"), [7, 8, 9]]

    def test_finish_reason_is_the_true_one(self, server, engine) -> None:
        assert server.chat(max_tokens=3).json()["choices"][0]["finish_reason"] == "length"
        engine.script = say(reason=FinishReason.ABORT)
        assert server.chat().json()["choices"][0]["finish_reason"] == "abort"

    def test_content_parts_developer_role_and_no_template(self, server, engine) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
        body = {"model": "tiny-base", "messages": messages}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        assert bytes(engine.added[0].prompt) == b"system:be kind\nuser:a\nb"
        engine.chat_template = None
        assert (named(server.chat()), server.complete().status_code) == ((400, "messages"), 200)

    def test_sampling_reaches_the_engine(self, server, engine) -> None:
        fields = {"temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 3, "stop": ["a", "b"]}
        server.chat(**fields, stop_token_ids=[1, 2], ignore_eos=True, max_completion_tokens=9)
        sampling = engine.added[0].sampling
        assert {name: getattr(sampling, name) for name in fields} == {**fields, "stop": ("a", "b")}
        assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.max_tokens) == ((1, 2), True, 9)

    def test_system_fingerprint_tells_engines_apart(self, server, engine) -> None:
        """Except those whose answers may depend on their batch, which have no fingerprint."""
        shown = []
        for engine.fingerprint in ("0123456789abcdef", "fedcba9876543210", ""):
            one, other = server.chat().json(), server.complete().json()
            assert one["system_fingerprint"] == other["system_fingerprint"]
            shown.append(one["system_fingerprint"].removeprefix(f"lorasrv-{__version__}"))
        assert shown == ["-0123456789ab", "-fedcba987654", ""]

    def test_defaults_and_nulls(self, server, engine) -> None:
        server.complete()
        server.chat()
        assert [added.sampling.max_tokens for added in engine.added] == [16, None]
        names = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "stream")
        assert server.chat(**{**dict.fromkeys(names), "top_k": -1, "stop": "x"}).status_code == 200
        sampling = engine.added[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (1.0, 1.0, 0, ("x",))


class TestStreams:
    def test_chat(self, server) -> None:
        response = server.chat(stream=True)
        chunks = events(response)
        choices = [chunk["choices"][0] for chunk in chunks]
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        assert headers.items() | {("x-accel-buffering", "no")} <= set(response.headers.items())
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello wörld"
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(chunks) - 1) + ["stop"]
        assert all("usage" not in chunk for chunk in chunks)

    def test_completion_bytes(self, server, engine) -> None:
        engine.script = say("ö!")
        response = server.complete(stream=True)
        head = json.dumps(events(response)[0]["id"])
        created = events(response)[0]["created"]
        model = f'"model":"tiny-base","system_fingerprint":"lorasrv-{__version__}-double"'
        start = f'data: {{"id":{head},"object":"text_completion","created":{created},{model},"choices":'
        assert response.content.decode() == (
            f'{start}[{{"index":0,"text":"ö","logprobs":null,"finish_reason":null}}]}}\n\n'
            f'{start}[{{"index":0,"text":"!","logprobs":null,"finish_reason":"stop","stop_reason":null}}]}}\n\n'
            "data: [DONE]\n\n"
        )

    def test_usage_comes_last_without_choices(self, server) -> None:
        *chunks, last = events(server.chat(stream=True, **USAGE))
        assert all(chunk["usage"] is None for chunk in chunks)
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 11)
        assert last["usage"]["lorasrv"]["queue_ms"] == 1.5

    @pytest.mark.parametrize(("text", "counts"), [("Hello wörld", [*range(1, 12)]), ("a\0b", [1, 2, 3])])
    def test_continuous_usage_counts_every_token(self, server, engine, text: str, counts: list[int]) -> None:
        engine.script = say(text)
        for last, options in (([], {}), (counts[-1:], {"include_usage": True})):
            chunks = events(server.complete(stream=True, stream_options={"continuous_usage_stats": True} | options))
            assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == counts + last

    def test_tokens_without_text_make_no_chunk_but_count(self, server, engine) -> None:
        engine.script = say("a\0\0b")
        *chunks, last = events(server.complete(stream=True, **USAGE))
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b"]
        whole = server.complete().json()
        assert whole["choices"][0]["text"] == "ab"
        assert whole["usage"]["completion_tokens"] == last["usage"]["completion_tokens"] == 4

    def test_one_token_is_one_chunk_with_its_end(self, server) -> None:
        [chunk] = events(server.complete(stream=True, max_tokens=1))
        assert chunk["choices"][0] | {"text": "H", "finish_reason": "length"} == chunk["choices"][0]


class TestFailures:
    def test_before_the_first_token_it_is_the_status(self, server, engine) -> None:
        engine.breaks(0, AdapterLoadFailed("the weights are damaged"))
        for stream in (True, False):
            response = server.chat(stream=stream)
            assert coded(response) == (503, "adapter_load_failed")
            assert response.headers["content-type"] == "application/json"
            assert response.headers["x-should-retry"] == "false"

    def test_in_a_stream_it_is_an_event(self, server, engine) -> None:
        engine.breaks(2)
        *before, last = events(server.chat(stream=True))
        told = {"message": "the engine died: Test", "type": "server_error", "param": None, "code": "engine_dead"}
        assert last == {"error": told}
        assert all("choices" in chunk for chunk in before)

    def test_an_answer_that_ends_with_an_error(self, server, engine) -> None:
        engine.script = say(error="reloading the adapter failed")
        response = server.chat()
        assert (response.status_code, error_of(response)["message"]) == (500, "reloading the adapter failed")
        assert events(server.complete(stream=True))[-1]["error"]["message"] == "reloading the adapter failed"

    @pytest.mark.parametrize(
        ("error", "status", "retry_after"),
        [
            (EngineOverloaded("the queue is full", retry_after_s=2.4), 429, "3"),
            (EngineDead("the engine died: OSError"), 503, "10"),
        ],
    )
    def test_what_may_pass_says_when_to_retry(self, server, engine, error, status: int, retry_after: str) -> None:
        engine.add_error = error
        response = server.chat(stream=True)
        assert (response.status_code, response.headers["retry-after"]) == (status, retry_after)


class TestDisconnects:
    @pytest.mark.parametrize("hang_after", [0, 3])
    @pytest.mark.parametrize("stream", [True, False])
    def test_the_request_is_aborted(self, server, engine, eventually, stream: bool, hang_after: int) -> None:
        engine.breaks(hang_after, HANG)
        with server.leaving(stream=stream) as connection:
            eventually(lambda: engine.added)
            if stream and hang_after:
                assert b"200 OK" in connection.read_until(b"\r\n")
            assert engine.aborted == []
        eventually(lambda: engine.aborted == [f"{engine.added[0].id}#0"])

    def test_a_finished_answer_is_not_aborted(self, server, engine) -> None:
        server.complete(stream=True)
        server.complete()
        assert engine.aborted == []


class TestNaming:
    @pytest.fixture(autouse=True)
    def mia(self, server, make_adapter: Callable[..., Path]) -> None:
        for seed in (0, 1):
            server.upload(make_adapter(f"mia{seed}", seed=seed), "mia").raise_for_status()
        self.keys = [v["digest"] for v in server.http.get("/v1/adapters/mia").json()["versions"]]

    def answered_by(self, response: Any) -> str | None:
        return response.raise_for_status().headers.get("x-adapter-digest")

    def test_model_takes_id_version_and_digest(self, server) -> None:
        first, second = self.keys
        assert first != second
        names = {"mia": second, "mia@1": first, f"mia@{first[:19]}": first, "tiny-base": None}
        assert {name: self.answered_by(server.chat(model=name)) for name in names} == names

    def test_an_empty_model_is_the_base_as_in_lorax(self, server) -> None:
        answer = server.chat(model="")
        assert (self.answered_by(answer), answer.json()["model"]) == (None, "tiny-base")

    def test_adapter_id_wins_over_base_empty_and_absent(self, server) -> None:
        for model in ("tiny-base", "", None, "mia"):
            assert self.answered_by(server.chat(model=model, adapter_id="mia")) == self.keys[1]
        body = {"prompt": "x", "adapter_id": "mia@1"}
        assert self.answered_by(server.http.post("/v1/completions", json=body)) == self.keys[0]
        assert self.answered_by(server.chat(adapter_id="tiny-base")) is None

    NAMES_OF_NOTHING = ("mia@9", "mia@", "mia@sha256:00", "../mia", "MIA", "x" * 5000, "a\x00b", "mia:prod")

    @pytest.mark.parametrize(
        ("fields", "status", "error"),
        [
            *(({"model": name}, 404, {"code": "model_not_found"}) for name in NAMES_OF_NOTHING),
            *(
                ({"model": model, "adapter_id": other}, 400, {"param": "adapter_id"})
                for model, other in (("mia", "mia@1"), ("mia", "tiny-base"), ("x", "mia"))
            ),
            *((nothing, 400, {}) for nothing in ({"model": None}, {"adapter_id": ""})),
        ],
    )
    def test_the_base_never_answers_instead(self, server, engine, fields: Any, status: int, error: Any) -> None:
        response = server.chat(**fields)
        assert response.status_code == status
        assert error.items() <= error_of(response).items()
        assert engine.added == []

    @pytest.mark.parametrize("path", ["/chat/completions", "/v1/nothing", "/v1/models/"])
    def test_a_route_that_is_none_says_where_they_are(self, server, path: str) -> None:
        response = server.http.get(path)
        assert coded(response) == (404, "not_found")
        assert (
            error_of(response)["message"]
            == "there is no such route; all are listed at /openapi.json, OpenAI's below /v1"
        )

    def test_unknown_names_the_near_ones(self, server, engine) -> None:
        for param in ("model", "adapter_id"):
            for stream in (True, False):
                response = server.chat(**{param: "mio"}, stream=stream)
                assert (coded(response), named(response)) == ((404, "model_not_found"), (404, param))
                assert error_of(response)["message"] == "the model 'mio' does not exist; did you mean mia?"
        assert engine.added == []

    def test_headers_and_usage_say_what_answered(self, server, engine) -> None:
        headers = {"id": "mia", "version": "1", "digest": self.keys[0], "tier": "disk"}
        wanted = {"x-queue-ms": "1.5", "x-load-ms": "2.5"} | {f"x-adapter-{name}": v for name, v in headers.items()}
        for stream in (True, False):
            response = server.chat(model="mia@1", stream=stream, **(USAGE if stream else {}))
            assert {name: response.headers[name] for name in wanted} == wanted
            body = events(response)[-1] if stream else response.json()
            figures = body["usage"]["lorasrv"]
            assert body["model"] == "mia@1"
            assert {
                f"adapter_{name}": value for name, value in {**headers, "version": 1}.items()
            }.items() <= figures.items()
            assert figures["load_ms"] == 2.5
            assert 0 <= figures["first_token_ms"] <= figures["total_ms"]
        assert {f"sha256:{added.adapter_key}" for added in engine.added} == {self.keys[0]}


class TestFields:
    def test_over_the_context(self, server, engine) -> None:
        response = server.complete("x" * 500, max_tokens=13)
        assert coded(response) == (400, "context_length_exceeded")
        assert [n for n in ("500", "512") if n not in error_of(response)["message"]] == []
        assert server.complete("x" * 500, max_tokens=12).status_code == 200
        engine.add_error = ContextLengthExceeded("shorten {param}", param="prompt")
        for response, param in ((server.chat(), "messages"), (server.complete(), "prompt")):
            assert (named(response), error_of(response)["message"]) == ((400, param), f"shorten {param}")

    @pytest.mark.parametrize(
        "fields",
        [
            pytest.param({"max_tokens": 2, "max_completion_tokens": 2}, id="two maximums that agree"),
            pytest.param({"add_special_tokens": False}, id="special tokens as they are always added"),
            pytest.param({"user": "u", "metadata": {"a": 1}, "top_a": 3, "mirostat_mode": 0}, id="unknown fields"),
        ],
    )
    def test_accepted(self, server, fields: dict[str, Any]) -> None:
        assert server.chat(**fields).status_code == 200
        assert server.complete(add_special_tokens=True).status_code == 200


class TestOpenAIPython:
    """What its users see: parsed answers, exceptions, and which requests it sends again."""

    @pytest.fixture
    def client(self, server, monkeypatch) -> Iterator[openai.OpenAI]:
        self.num_sent = 0
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=120) as client:
            send = client._client.send

            def counting(request: Any, **options: Any) -> Any:
                self.num_sent += 1
                return send(request, **options)

            monkeypatch.setattr(client._client, "send", counting)
            yield client

    def chat(self, client: openai.OpenAI, *, retries: int = 2, **fields: Any) -> Any:
        body = {"model": "tiny-base", "messages": [{"role": "user", "content": "hi"}], **fields}
        return client.with_options(max_retries=retries).chat.completions.create(**body)

    def test_adapter_by_model_and_by_field(self, client, server, make_adapter) -> None:
        server.upload(make_adapter(), "mia")
        for fields in ({"model": "mia"}, {"extra_body": {"adapter_id": "mia"}}):
            assert self.chat(client, **fields).choices[0].message.content.startswith("I am ")
        assert [model.id for model in client.models.list()] == ["tiny-base", "mia"]
        assert client.models.retrieve("mia").owned_by == "lorasrv"

    def test_priority_and_timeout(self, client, engine) -> None:
        extra = {"priority": -1, "timeout_s": 5}
        self.chat(client, extra_body=extra)
        client.completions.create(model="tiny-base", prompt="hi", extra_body=extra)
        client.completions.create(model="tiny-base", prompt="hi")
        assert [(added.priority, added.timeout_s) for added in engine.added] == [(-1, 5.0), (-1, 5.0), (0, None)]

    def test_two_answers(self, client, engine) -> None:
        engine.script = say("one", "two!")
        answer = self.chat(client, n=2)
        wanted = [(0, "one", "stop"), (1, "two!", "stop")]
        assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == wanted
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (7, 7, 0)
        answer = client.completions.create(model="tiny-base", prompt="hi", n=2, best_of=2)
        assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == wanted

    def test_two_answers_streamed(self, client, engine) -> None:
        engine.script = say("one", "two!")
        *chunks, last = self.chat(client, n=2, stream=True, **USAGE)
        choices = [choice for chunk in chunks for choice in chunk.choices]
        texts = ["".join(c.delta.content or "" for c in choices if c.index == index) for index in (0, 1)]
        assert texts == ["one", "two!"]
        assert sorted((c.index, c.finish_reason) for c in choices if c.finish_reason) == [(0, "stop"), (1, "stop")]
        assert (last.choices, last.usage.completion_tokens) == ([], 7)

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_timeout_is_not_sent_again(self, client, engine, stream: bool) -> None:
        engine.breaks(0, RequestTimeout("the request was not done in 5 s"))
        with pytest.raises(openai.InternalServerError, match="not done in 5 s") as caught:
            self.chat(client, stream=stream, extra_body={"timeout_s": 5})
        assert (caught.value.status_code, caught.value.code, caught.value.param) == (504, "timeout", "timeout_s")
        assert self.num_sent == 1

    def test_a_timeout_in_a_stream(self, client, engine) -> None:
        engine.breaks(2, RequestTimeout("the request was not done in 5 s"))
        with pytest.raises(openai.APIError, match="not done in 5 s") as caught:
            list(self.chat(client, stream=True))
        assert caught.value.code == "timeout"

    @pytest.mark.parametrize(
        ("error", "kind", "says", "sent"),
        [
            (
                LimitExceeded("adapter 'mia' has 2 requests waiting", retry_after_s=1),
                openai.RateLimitError,
                "2 requests waiting",
                2,
            ),
            (DeadlineUnreachable("it would take 9 s", retry_after_s=1), openai.InternalServerError, "take 9 s", 2),
            (EngineOverloaded("full", retry_after_s=1), openai.RateLimitError, "full", 2),
            (AdapterLoadFailed("damaged"), openai.InternalServerError, "damaged", 1),
            (ZeroDivisionError("a bug"), openai.InternalServerError, "x-request-id", 1),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
    )
    def test_what_may_pass_is_sent_again(self, client, engine, error, kind, says: str, sent: int) -> None:
        if sent == 2:
            engine.add_error = error
        else:
            engine.breaks(0, error)
        with pytest.raises(kind, match=says):
            self.chat(client, retries=1)
        assert self.num_sent == sent

    def test_a_cold_adapter_is_asked_again(self, client, server, engine, make_adapter) -> None:
        server.upload(make_adapter(), "mia")
        engine.script = cold(0.2)
        with pytest.raises(openai.InternalServerError) as caught:
            self.chat(client, retries=1, model="mia", extra_body={"on_cold": "reject"})
        assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("adapter_cold", "1")
        assert self.num_sent == 2

    @pytest.mark.parametrize(
        ("fields", "kind"),
        [
            ({"temperature": 101}, openai.BadRequestError),
            ({"model": "nobody"}, openai.NotFoundError),
            ({"messages": [{"role": "user", "content": "x" * 600}], "max_tokens": 9}, openai.BadRequestError),
        ],
    )
    def test_a_refusal_is_not_sent_again(self, client, fields: dict[str, Any], kind: Any) -> None:
        with pytest.raises(kind) as caught:
            self.chat(client, **fields)
        assert self.num_sent == 1
        assert caught.value.param
        assert caught.value.code
