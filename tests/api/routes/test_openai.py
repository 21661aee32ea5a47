"""Both completion routes: what goes to the engine, and what comes back, whole and streamed."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from answers import error_of, events
from fake_engine import HANG, cold, say

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


class TestWholeAnswers:
    def test_chat(self, server, engine) -> None:
        response = server.chat("hi")
        body = response.json()
        assert response.status_code == 200
        assert body["object"] == "chat.completion"
        assert body["model"] == "tiny-base"
        [choice] = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": "Hello wörld", "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert body["usage"]["prompt_tokens"] == len("user:hi")
        assert body["usage"]["completion_tokens"] == 11
        assert body["usage"]["total_tokens"] == 18
        assert body["id"] == engine.added[0].id
        assert bytes(engine.added[0].prompt) == b"user:hi"

    def test_completion(self, server, engine) -> None:
        body = server.complete("hey").json()
        assert body["object"] == "text_completion"
        assert body["choices"][0]["text"] == "Hello wörld"
        assert body["choices"][0]["logprobs"] is None
        assert bytes(engine.added[0].prompt) == b"hey"

    def test_prompt_as_token_ids(self, server, engine) -> None:
        assert server.complete([7, 8, 9]).status_code == 200
        assert engine.added[0].prompt == [7, 8, 9]

    def test_finish_reason_is_the_true_one(self, server, engine) -> None:
        assert server.chat(max_tokens=3).json()["choices"][0]["finish_reason"] == "length"
        engine.script = say(reason=FinishReason.ABORT)
        assert server.chat().json()["choices"][0]["finish_reason"] == "abort"

    def test_an_answer_that_broke_off_is_an_error(self, server, engine) -> None:
        engine.script = say(error="reloading the adapter failed")
        response = server.chat()
        assert response.status_code == 500
        assert error_of(response)["message"] == "reloading the adapter failed"

    def test_content_parts_and_developer_role(self, server, engine) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
        body = {"model": "tiny-base", "messages": messages}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        assert bytes(engine.added[0].prompt) == b"system:be kind\nuser:a\nb"

    def test_a_prompt_that_is_too_long_is_told_by_the_field_that_it_came_in(self, server, engine) -> None:
        engine.add_error = ContextLengthExceeded("shorten {param}", param="prompt")
        for response, param in ((server.chat(), "messages"), (server.complete(), "prompt")):
            error = error_of(response)
            assert (error["message"], error["param"]) == (f"shorten {param}", param)

    def test_a_base_without_chat_template(self, server, engine) -> None:
        engine.chat_template = None
        response = server.chat()
        assert (response.status_code, error_of(response)["param"]) == (400, "messages")
        assert server.complete().status_code == 200

    def test_default_maximum(self, server, engine) -> None:
        server.complete()
        server.chat()
        assert [added.sampling.max_tokens for added in engine.added] == [16, None]

    def test_sampling_reaches_the_engine(self, server, engine) -> None:
        fields = {"temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 3, "stop": ["a", "b"]}
        server.chat(**fields, stop_token_ids=[1, 2], ignore_eos=True, max_completion_tokens=9)
        sampling = engine.added[0].sampling
        assert {name: getattr(sampling, name) for name in fields} == {**fields, "stop": ("a", "b")}
        assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.max_tokens) == ((1, 2), True, 9)

    def test_nulls_are_defaults(self, server, engine) -> None:
        names = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "stream")
        assert server.chat(**{**dict.fromkeys(names), "top_k": -1, "stop": "x"}).status_code == 200
        sampling = engine.added[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (1.0, 1.0, 0, ("x",))


class TestStreams:
    def test_chat(self, server) -> None:
        response = server.chat(stream=True)
        chunks = events(response)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello wörld"
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert all("usage" not in chunk for chunk in chunks)

    def test_completion_bytes(self, server, engine) -> None:
        engine.script = say("ö!")
        response = server.complete(stream=True)
        head = json.dumps(events(response)[0]["id"])
        created = events(response)[0]["created"]
        start = f'data: {{"id":{head},"object":"text_completion","created":{created},"model":"tiny-base","choices":'
        assert response.content.decode() == (
            f'{start}[{{"index":0,"text":"ö","logprobs":null,"finish_reason":null}}]}}\n\n'
            f'{start}[{{"index":0,"text":"!","logprobs":null,"finish_reason":"stop","stop_reason":null}}]}}\n\n'
            "data: [DONE]\n\n"
        )

    def test_usage_comes_last_without_choices(self, server) -> None:
        chunks = events(server.chat(stream=True, stream_options={"include_usage": True}))
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 11
        assert chunks[-1]["usage"]["lorasrv"]["queue_ms"] == 1.5

    def test_continuous_usage(self, server) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events(server.complete(stream=True, stream_options=options))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == [*range(1, 12), 11]

    def test_tokens_without_text_make_no_chunk_but_count(self, server, engine) -> None:
        engine.script = say("a\0\0b")
        options = {"include_usage": True}
        *chunks, last = events(server.complete(stream=True, stream_options=options))
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b"]
        assert last["usage"]["completion_tokens"] == 4
        whole = server.complete().json()
        assert (whole["choices"][0]["text"], whole["usage"]["completion_tokens"]) == ("ab", 4)

    def test_continuous_usage_counts_tokens_without_text(self, server, engine) -> None:
        engine.script = say("a\0b")
        options = {"continuous_usage_stats": True}
        chunks = events(server.complete(stream=True, stream_options=options))
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]

    def test_a_failed_load_has_its_true_status(self, server, engine) -> None:
        engine.breaks(0, AdapterLoadFailed("the weights are damaged"))
        for stream in (True, False):
            response = server.chat(stream=stream)
            assert response.status_code == 503
            assert response.headers["content-type"] == "application/json"
            assert response.headers["x-should-retry"] == "false"
            assert error_of(response)["code"] == "adapter_load_failed"

    def test_an_error_after_headers_is_an_event(self, server, engine) -> None:
        engine.breaks(2)
        response = server.chat(stream=True)
        assert response.status_code == 200
        *before, last = events(response)
        assert last == {
            "error": {
                "message": "the engine died: Test",
                "type": "server_error",
                "param": None,
                "code": "engine_dead",
            }
        }
        assert all("choices" in chunk for chunk in before)

    def test_an_answer_that_broke_off_is_an_event(self, server, engine) -> None:
        engine.script = say(error="gone")
        assert events(server.complete(stream=True))[-1]["error"]["message"] == "gone"

    def test_one_token_is_one_chunk_with_its_end(self, server, engine) -> None:
        [chunk] = events(server.complete(stream=True, max_tokens=1))
        assert chunk["choices"][0] | {"text": "H", "finish_reason": "length"} == chunk["choices"][0]


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
    def mia(self, server, make_adapter: Callable[..., Path]) -> str:
        assert server.upload(make_adapter(), "mia").status_code == 201
        assert server.upload(make_adapter("mia2", seed=1), "mia").status_code == 201
        self.keys = [v["digest"] for v in server.http.get("/v1/adapters/mia").json()["versions"]]
        return "mia"

    def answered_by(self, response: Any) -> str | None:
        assert response.status_code == 200, response.text
        return response.headers.get("x-adapter-digest")

    def test_model_takes_id_version_and_digest(self, server) -> None:
        first, second = self.keys
        assert first != second
        assert self.answered_by(server.chat(model="mia")) == second
        assert self.answered_by(server.chat(model="mia@1")) == first
        assert self.answered_by(server.chat(model=f"mia@{first[:19]}")) == first
        assert self.answered_by(server.chat(model="tiny-base")) is None

    def test_adapter_id_wins_over_base_empty_and_absent(self, server) -> None:
        for model in ({"model": "tiny-base"}, {"model": ""}, {"model": None}):
            assert self.answered_by(server.chat(**model, adapter_id="mia")) == self.keys[1]
        body = {"prompt": "x", "adapter_id": "mia@1"}
        assert self.answered_by(server.http.post("/v1/completions", json=body)) == self.keys[0]
        assert self.answered_by(server.chat(model="mia", adapter_id="mia")) == self.keys[1]
        assert self.answered_by(server.chat(adapter_id="tiny-base")) is None

    @pytest.mark.parametrize(("model", "adapter_id"), [("mia", "mia@1"), ("mia", "tiny-base"), ("x", "mia")])
    def test_conflict(self, server, engine, model: str, adapter_id: str) -> None:
        response = server.chat(model=model, adapter_id=adapter_id)
        assert (response.status_code, error_of(response)["param"]) == (400, "adapter_id")
        assert engine.added == []

    def test_an_empty_model_is_the_base_as_in_lorax(self, server) -> None:
        answer = server.chat(model="")
        assert self.answered_by(answer) is None
        assert answer.json()["model"] == "tiny-base"

    @pytest.mark.parametrize("fields", [{"model": None}, {"adapter_id": ""}])
    def test_the_base_never_answers_by_default(self, server, engine, fields: dict[str, Any]) -> None:
        assert server.chat(**fields).status_code == 400
        assert engine.added == []

    def test_unknown_names_the_near_ones(self, server, engine) -> None:
        for fields, param in (({"model": "mio"}, "model"), ({"adapter_id": "mio"}, "adapter_id")):
            for stream in (True, False):
                response = server.chat(**fields, stream=stream)
                error = error_of(response)
                assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", param)
                assert error["message"] == "the model 'mio' does not exist; did you mean mia?"
        assert engine.added == []

    @pytest.mark.parametrize(
        "name", ["mia@9", "mia@", "mia@sha256:00", "../mia", "MIA", "x" * 5000, "a\x00b", "mia:prod"]
    )
    def test_no_name_falls_back(self, server, engine, name: str) -> None:
        response = server.chat(model=name)
        assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")
        assert engine.added == []

    def test_headers_and_usage_say_who_answered(self, server, engine) -> None:
        for stream in (True, False):
            response = server.chat(
                model="mia@1", stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
            )
            assert response.headers["x-adapter-id"] == "mia"
            assert response.headers["x-adapter-version"] == "1"
            assert response.headers["x-adapter-digest"] == self.keys[0]
            assert response.headers["x-adapter-tier"] == "disk"
            assert float(response.headers["x-queue-ms"]) == 1.5
            assert float(response.headers["x-load-ms"]) == 2.5
            body = events(response)[-1] if stream else response.json()
            figures = body["usage"]["lorasrv"]
            assert body["model"] == "mia@1"
            assert (figures["adapter_id"], figures["adapter_version"]) == ("mia", 1)
            assert (figures["adapter_digest"], figures["adapter_tier"]) == (self.keys[0], "disk")
            assert figures["load_ms"] == 2.5
            assert 0 <= figures["first_token_ms"] <= figures["total_ms"]
        assert {f"sha256:{added.adapter}" for added in engine.added} == {self.keys[0]}


class TestRefusals:
    def test_two_maximums_that_agree(self, server) -> None:
        assert server.chat(max_tokens=2, max_completion_tokens=2).status_code == 200

    def test_over_the_context_has_the_numbers(self, server) -> None:
        response = server.complete("x" * 500, max_tokens=13)
        error = error_of(response)
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "500" in error["message"]
        assert "512" in error["message"]
        assert server.complete("x" * 500, max_tokens=12).status_code == 200

    def test_special_tokens_are_added_as_they_always_are(self, server) -> None:
        assert server.complete(add_special_tokens=True).status_code == 200
        assert server.chat(add_special_tokens=False).status_code == 200

    def test_unknown_fields_are_ignored(self, server) -> None:
        assert server.chat(user="u", metadata={"a": 1}, top_a=3, mirostat_mode=0).status_code == 200

    def test_overload_says_when_to_come_back(self, server, engine) -> None:
        engine.add_error = EngineOverloaded("the queue is full", retry_after_s=2.4)
        response = server.chat()
        assert (response.status_code, response.headers["retry-after"]) == (429, "3")

    def test_dead_engine(self, server, engine) -> None:
        engine.add_error = EngineDead("the engine died: OSError")
        response = server.chat(stream=True)
        assert (response.status_code, response.headers["retry-after"]) == (503, "10")


HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=20) as client:
        yield client


def test_chat(client) -> None:
    answer = client.chat.completions.create(model="tiny-base", messages=HELLO)
    assert answer.choices[0].message.content == "Hello wörld"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == 18


def test_completion(client) -> None:
    answer = client.completions.create(model="tiny-base", prompt="hi", max_tokens=4)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hell", "length")


def test_adapter_by_model_and_by_field(client, server, make_adapter) -> None:
    server.upload(make_adapter(), "mia")
    for fields in ({"model": "mia"}, {"model": "tiny-base", "extra_body": {"adapter_id": "mia"}}):
        raw = client.chat.completions.with_raw_response.create(messages=HELLO, **fields)
        assert raw.headers["x-adapter-id"] == "mia"
        assert raw.parse().choices[0].message.content.startswith("I am ")


def test_priority_and_timeout(client, engine) -> None:
    extra = {"priority": -1, "timeout_s": 5}
    client.chat.completions.create(model="tiny-base", messages=HELLO, extra_body=extra)
    client.completions.create(model="tiny-base", prompt="hi", extra_body=extra)
    client.completions.create(model="tiny-base", prompt="hi")
    assert [(added.priority, added.timeout_s) for added in engine.added] == [(-1, 5.0), (-1, 5.0), (0, None)]


@pytest.mark.parametrize("stream", [True, False])
def test_a_timeout_is_not_retried(client, engine, monkeypatch, stream: bool) -> None:
    sent = count_requests(client, monkeypatch)
    engine.breaks(0, RequestTimeout("the request was not done in 5 s"))
    with pytest.raises(openai.InternalServerError, match="not done in 5 s") as caught:
        client.chat.completions.create(model="tiny-base", messages=HELLO, stream=stream, extra_body={"timeout_s": 5})
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (504, "timeout", "timeout_s")
    assert len(sent) == 1


def test_a_timeout_in_a_stream(client, engine) -> None:
    engine.breaks(2, RequestTimeout("the request was not done in 5 s"))
    with pytest.raises(openai.APIError, match="not done in 5 s") as caught:
        list(client.chat.completions.create(model="tiny-base", messages=HELLO, stream=True))
    assert caught.value.code == "timeout"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (LimitExceeded("adapter 'mia' has 2 requests waiting", retry_after_s=1), openai.RateLimitError),
        (DeadlineUnreachable("it would take 9 s", retry_after_s=1), openai.InternalServerError),
    ],
)
def test_what_may_succeed_later_is_tried_again(client, engine, monkeypatch, error: Exception, kind: type) -> None:
    sent = count_requests(client, monkeypatch)
    engine.add_error = error
    with pytest.raises(kind, match=str(error)):
        client.with_options(max_retries=1).chat.completions.create(model="tiny-base", messages=HELLO)
    assert len(sent) == 2


def test_stream_with_usage(client) -> None:
    stream = client.chat.completions.create(
        model="tiny-base", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello wörld"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 11


def test_two_answers(client, engine) -> None:
    engine.script = say("one", "two!")
    answer = client.chat.completions.create(model="tiny-base", messages=HELLO, n=2)
    assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
        (0, "one", "stop"),
        (1, "two!", "stop"),
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 7)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    answer = client.completions.create(model="tiny-base", prompt="hi", n=2, best_of=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "one"), (1, "two!")]


def test_two_answers_streamed(client, engine) -> None:
    engine.script = say("one", "two!")
    stream = client.chat.completions.create(
        model="tiny-base", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, ends = ["", ""], []
    *chunks, last = stream
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends.append((choice.index, choice.finish_reason))
    assert texts == ["one", "two!"]
    assert sorted(ends) == [(0, "stop"), (1, "stop")]
    assert (last.choices, last.usage.completion_tokens) == ([], 7)


def test_a_cold_adapter_is_tried_again(client, server, engine, make_adapter, monkeypatch) -> None:
    server.upload(make_adapter(), "mia")
    engine.script = cold(0.2)
    sent = count_requests(client, monkeypatch)
    with pytest.raises(openai.InternalServerError) as caught:
        client.with_options(max_retries=1).chat.completions.create(
            model="mia", messages=HELLO, extra_body={"on_cold": "reject"}
        )
    assert (caught.value.code, caught.value.response.headers["retry-after"], len(sent)) == ("adapter_cold", "1", 2)


def test_stream_left_early_is_aborted(client, engine, eventually) -> None:
    engine.breaks(3, HANG)
    with client.chat.completions.create(model="tiny-base", messages=HELLO, stream=True) as stream:
        next(iter(stream))
    eventually(lambda: engine.aborted)


def test_error_in_a_stream(client, engine) -> None:
    engine.breaks(2)
    with pytest.raises(openai.APIError, match="the engine died"):
        list(client.chat.completions.create(model="tiny-base", messages=HELLO, stream=True))


def test_models(client, server, make_adapter) -> None:
    server.upload(make_adapter(), "mia")
    assert [model.id for model in client.models.list()] == ["tiny-base", "mia"]
    assert client.models.retrieve("mia").owned_by == "lorasrv"


@pytest.mark.parametrize(
    ("fields", "kind", "tries"),
    [
        ({"temperature": 101}, openai.BadRequestError, 1),
        ({"model": "nobody"}, openai.NotFoundError, 1),
        ({"messages": [{"role": "user", "content": "x" * 600}], "max_tokens": 9}, openai.BadRequestError, 1),
    ],
)
def test_what_will_fail_again_is_not_retried(client, server, monkeypatch, fields, kind, tries: int) -> None:
    sent = count_requests(client, monkeypatch)
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": "tiny-base", "messages": HELLO, **fields})
    assert len(sent) == tries
    assert caught.value.param
    assert caught.value.code


def test_a_bug_is_not_retried(client, engine, monkeypatch) -> None:
    sent = count_requests(client, monkeypatch)
    engine.breaks(0, ZeroDivisionError())
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="tiny-base", messages=HELLO)
    assert len(sent) == 1


def test_a_failed_load_is_not_retried_but_overload_is(client, engine, monkeypatch) -> None:
    sent = count_requests(client, monkeypatch)
    engine.breaks(0, AdapterLoadFailed("damaged"))
    with pytest.raises(openai.InternalServerError, match="damaged"):
        client.chat.completions.create(model="tiny-base", messages=HELLO, stream=True)
    assert len(sent) == 1
    engine.script, engine.add_error = say(), EngineOverloaded("full", retry_after_s=1)
    with pytest.raises(openai.RateLimitError):
        client.with_options(max_retries=1).chat.completions.create(model="tiny-base", messages=HELLO)
    assert len(sent) == 3


def count_requests(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    sent: list[object] = []
    send = client._client.send

    def counting(request, **options):
        sent.append(request)
        return send(request, **options)

    monkeypatch.setattr(client._client, "send", counting)
    return sent
