"""Structured output through a real server process and sockets, while another stream goes on."""

import json
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal

import httpx2
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field
from served import serve
from server import eventually

pytestmark = pytest.mark.long

SCHEMA = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["good", "bad"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 10},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["mood", "score"],
    "additionalProperties": False,
}
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
NEVER_ENDS = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
RULES = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(5000)) + '\nr5000: "c"'


def _format(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


BAD = {
    "type": (_format({"type": "strin"}), "response_format"),
    "depth of a text": ({"guided_json": '{"items":' * 100_000 + "{}" + "}" * 100_000}, "guided_json"),
    "reference loop": (_format(LOOP), "response_format"),
    "reference to a URL": (_format({"$ref": "https://example.org/schema.json"}), "response_format"),
    "no end": (_format(NEVER_ENDS), "response_format"),
    "repetitions": ({"guided_regex": "(a{0,500}){0,500}"}, "guided_regex"),
    "repetitions in a schema": (_format({"type": "string", "pattern": "^(a{0,500}){0,500}$"}), "response_format"),
    "enum": (_format({"enum": list(range(100_000))}), "response_format"),
    "choices": ({"guided_choice": [str(i) for i in range(100_000)]}, "guided_choice"),
    "memory": (_format({"type": "integer", "multipleOf": 99_999_989}), "response_format"),
    "stack": ({"guided_grammar": RULES}, "guided_grammar"),
    "explosion": ({"structured_outputs": {"grammar": "start: /(a{0,500}){0,500}/"}}, "structured_outputs"),
    "left recursion": ({"guided_grammar": 'start: start "a"'}, "guided_grammar"),
    "two at once": ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    "ignore_eos": ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    "template": ({"chat_template": "{{ messages }}"}, "chat_template"),
    "tokenize": ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    "template in kwargs": ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve("--pool-bytes", "256MiB") as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def _ask(client: OpenAI, extra: dict[str, Any] | None = None, **more: Any) -> Any:
    messages = [{"role": "user", "content": "How was your day?"}]
    body = {"model": "smollm2-135m", "messages": messages, "max_tokens": 120, "seed": 1, **more}
    return client.chat.completions.create(**body, extra_body=extra or {})


def _body(**fields: Any) -> dict[str, Any]:
    return {"model": "smollm2-135m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, **fields}


class Beside:
    """A stream without an end of its own, read in a thread; counts its chunks."""

    def __init__(self, url: str) -> None:
        self.chunks = 0
        self.stopping = False
        self._url = url
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with httpx2.Client(trust_env=False, timeout=60) as http:
            while not self.stopping:
                body = _body(max_tokens=500, stream=True, ignore_eos=True)
                with http.stream("POST", self._url + "/v1/chat/completions", json=body) as response:
                    assert response.status_code == 200
                    for line in response.iter_lines():
                        self.chunks += line.startswith("data: {")
                        if self.stopping:
                            break

    def stop(self) -> None:
        self.stopping = True
        self._thread.join(60)


@pytest.fixture(scope="module")
def beside(url: str) -> Iterator[Beside]:
    stream = Beside(url)
    yield stream
    stream.stop()


@pytest.mark.parametrize("name", BAD)
def test_bad_grammars_are_400_and_the_next_request_is_fine(url: str, beside: Beside, name: str) -> None:
    fields, param = BAD[name]
    with httpx2.Client(base_url=url, trust_env=False, timeout=60) as http:
        before = beside.chunks
        response = http.post("/v1/chat/completions", json=_body(**fields))
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert len(error["message"]) < 600
        good = http.post("/v1/chat/completions", json=_body(guided_choice=["yes", "no"]))
        assert good.json()["choices"][0]["message"]["content"] in ("yes", "no")
        # The other stream goes on. Its thread reads a step's chunk whenever it gets its turn.
        eventually(lambda: beside.chunks > before)


def test_schemas_by_openais_client(client: OpenAI) -> None:
    whole = _ask(client, **_format(SCHEMA))
    value = json.loads(whole.choices[0].message.content)
    assert value["mood"] in ("good", "bad")
    assert 0 <= value["score"] <= 10
    assert whole.choices[0].finish_reason == "stop"
    pieces = [chunk.choices[0].delta.content or "" for chunk in _ask(client, stream=True, **_format(SCHEMA))]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 2, "forced tokens come together"
    three = _ask(client, n=3, temperature=1.5, **_format(SCHEMA))
    assert all(json.loads(choice.message.content)["mood"] for choice in three.choices)
    assert len({choice.message.content for choice in three.choices}) > 1


class Mood(BaseModel):
    kind: Literal["mood"]
    score: int


class Food(BaseModel):
    kind: Literal["food"]
    dishes: list[Literal["soup", "bread"]] = Field(max_length=2)


class Day(BaseModel):
    weekday: Literal["Monday", "Friday"]
    best: Mood | Food = Field(discriminator="kind")
    other: Mood | None


def test_objects_have_the_keys_of_a_plain_pydantic_model(client: OpenAI) -> None:
    """Without `additionalProperties`, which openai-python's `parse` would add."""
    for seed in range(4):
        answer = _ask(client, temperature=1.5, seed=seed, **_format(Day.model_json_schema()))
        value = json.loads(answer.choices[0].message.content)
        assert Day.model_validate(value).model_dump() == value


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"\d{3}-\d{4}"}, r"\d{3}-\d{4}"),
        ({"guided_choice": ["große Freude", "kleine Freude"]}, "(große|kleine) Freude"),
        ({"guided_grammar": 'start: word ("," word)~2\nword: /[a-z]{2,4}/'}, "[a-z]{2,4}(,[a-z]{2,4}){2}"),
        ({"structured_outputs": {"regex": "[가-힣]{3}"}}, "[가-힣]{3}"),
        ({"guided_json": {"const": [1, None]}}, r"\[\s*1\s*,\s*null\s*\]"),
        ({"response_format": {"type": "json_object", "schema": {"const": 1}}}, "1"),
        ({"response_format": {"type": "json_object", "value": {"const": 1}}}, "1"),
    ],
)
def test_guided_fields(client: OpenAI, fields: dict[str, Any], pattern: str) -> None:
    for answer in (_ask(client, fields), _ask(client, fields, temperature=2.0)):
        assert re.fullmatch(pattern, answer.choices[0].message.content)
        assert answer.choices[0].finish_reason == "stop"


def test_plain_completions_too(client: OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2-135m", prompt="Is water wet?", max_tokens=8, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert answer.choices[0].text in ("yes", "no")


def test_json_objects(client: OpenAI) -> None:
    answer = _ask(client, response_format={"type": "json_object"}, temperature=0, max_tokens=300)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].message.content.startswith("{")


def test_errors_as_openais_client_has_them(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        _ask(client, **_format({"type": "strin"}))
    assert caught.value.param == "response_format"
