"""openai-python as it is against a running server."""

from collections.abc import Iterator

import openai
import pytest

from lorasrv.errors import DeadlineUnreachable, EngineOverloaded, LimitExceeded, RequestTimeout

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
    engine.die_after, engine.death = 0, RequestTimeout("the request was not done in 5 s")
    with pytest.raises(openai.InternalServerError, match="not done in 5 s") as caught:
        client.chat.completions.create(model="tiny-base", messages=HELLO, stream=stream, extra_body={"timeout_s": 5})
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (504, "timeout", "timeout_s")
    assert len(sent) == 1


def test_a_timeout_in_a_stream(client, engine) -> None:
    engine.die_after, engine.death = 2, RequestTimeout("the request was not done in 5 s")
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
    engine.texts = ("one", "two!")
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
    engine.texts = ("one", "two!")
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
    engine.cold_for_s = 0.2
    sent = count_requests(client, monkeypatch)
    with pytest.raises(openai.InternalServerError) as caught:
        client.with_options(max_retries=1).chat.completions.create(
            model="mia", messages=HELLO, extra_body={"on_cold": "reject"}
        )
    assert (caught.value.code, caught.value.response.headers["retry-after"], len(sent)) == ("adapter_cold", "1", 2)


def test_stream_left_early_is_aborted(client, engine, eventually) -> None:
    engine.hang_after = 3
    with client.chat.completions.create(model="tiny-base", messages=HELLO, stream=True) as stream:
        next(iter(stream))
    eventually(lambda: engine.aborted)


def test_error_in_a_stream(client, engine) -> None:
    engine.die_after = 2
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
    engine.bug_after = 0
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="tiny-base", messages=HELLO)
    assert len(sent) == 1


def test_a_failed_load_is_not_retried_but_overload_is(client, engine, monkeypatch) -> None:
    sent = count_requests(client, monkeypatch)
    engine.load_error = "damaged"
    with pytest.raises(openai.InternalServerError, match="damaged"):
        client.chat.completions.create(model="tiny-base", messages=HELLO, stream=True)
    assert len(sent) == 1
    engine.load_error, engine.add_error = None, EngineOverloaded("full", retry_after_s=1)
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
