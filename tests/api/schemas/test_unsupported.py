"""Every field of every object in a body does something, or is refused by name: none is accepted and ignored."""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_engine import FakeEngine
from pydantic import BaseModel
from spelled_engine import spelled, tiny_tokenizer
from tool_templates import WRITES_CALLS

import api.schemas
from api.schemas.base import KnownBody
from api.schemas.openai import ChatBody, CompletionBody
from api.schemas.responses import ResponsesBody
from api.schemas.tgi import GenerateBody, Parameters
from api.schemas.unsupported import WITHOUT_EFFECT
from lorasrv.text.chat_template import ChatTemplate

TEMPLATE = (
    WRITES_CALLS + "{{ messages | tojson }}{{ tools | tojson }}{{ enable_thinking }}{{ add_generation_prompt }}"
    "{% if '</think>' in messages %}{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": SCHEMA}}
CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
USER = {"role": "user", "content": "x"}
CHAT, PLAIN, TGI, RESPONSES = "/v1/chat/completions", "/v1/completions", "/", "/v1/responses"
# What differs between two answers to the same body.
CHANCE = re.compile(
    r'(cmpl|gen|file|batch|resp|rs|msg|fc|call)[-_][0-9a-f]+|"(created|[a-z_]+_at|[a-z_]+_ms|seed)":\s*[0-9.e-]+'
)


@dataclass
class Beside:
    """A value that needs others in the same object."""

    value: Any
    others: dict[str, Any]


def beside(value: Any, **others: Any) -> Beside:
    return Beside(value, others)


@dataclass
class Place:
    """An object of a body: where it is sent, an example, and for each of its fields a value that does something."""

    path: str
    base: dict[str, Any]
    fields: dict[str, Any]
    # Puts the object into a body.
    inside: Callable[[dict[str, Any]], dict[str, Any]] = lambda one: one
    # Fields that change neither the engine's request nor this answer.
    idle: frozenset[str] = field(default_factory=frozenset)


GENERATION: dict[str, Any] = {
    "model": "mia",
    "adapter_id": "mia",
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "max_new_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.5,
    "typical_p": 0.5,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 2,
    "logit_bias": {"7": 1},
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "no_repeat_ngram_size": 3,
    "min_tokens": 1,
    "watermark": True,
    "fsd_alpha": 0.5,
    "fsd_ngram": beside(2, fsd_alpha=0.5),
    "seed": 3,
    "stop": "i",
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "ignore_eos": True,
    "return_token_ids": True,
    "truncate_prompt_tokens": 1,
    "n": 2,
    "best_of": 2,
    "use_beam_search": True,
    "length_penalty": beside(2, use_beam_search=True),
    "early_stopping": beside(True, use_beam_search=True),
    "prompt_logprobs": 1,
    "stream": True,
    "stream_options": beside({"include_usage": True}, stream=True),
    "on_cold": "reject",
    "cache_salt": "s",
    "priority": 1,
    "timeout_s": 5,
    "speculation": False,
    "prediction": {"type": "content", "content": "Mia"},
    "kv_policy": {"kind": "window", "recent": 64},
    "adapters": [{"id": "mia", "weight": 0.5}],
    "use_defaults": beside(False, model="muse"),
    "user": beside("Bo", model="muse"),
    "response_format": {"type": "json_object"},
    "guided_json": SCHEMA,
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
    "structured_outputs": {"regex": "a"},
}
PARAMETERS: dict[str, Any] = {
    "adapter_id": "mia",
    "adapter_source": "s3",
    "api_token": "x",
    "max_new_tokens": 2,
    "do_sample": True,
    "best_of": beside(2, do_sample=True),
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "typical_p": 0.5,
    "min_p": 0.5,
    "seed": beside(3, do_sample=True),
    "stop": ["i"],
    "stop_sequences": ["i"],
    "repetition_penalty": 2,
    "frequency_penalty": 1,
    "presence_penalty": 1,
    "ignore_eos_token": True,
    "watermark": True,
    "return_full_text": True,
    "grammar": {"type": "regex", "value": "a"},
    "truncate": 1,
    "response_format": {"type": "json_object"},
    "apply_chat_template": True,
    "details": True,
    "decoder_input_details": True,
    "top_n_tokens": beside(2, details=True),
    "return_k_alternatives": beside(2, details=True),
    "on_cold": "reject",
    "cache_salt": "s",
    "priority": 1,
    "timeout_s": 5,
    "speculation": False,
    "prediction": {"type": "content", "content": "Mia"},
    "kv_policy": {"kind": "window", "recent": 64},
    "adapters": [{"id": "mia", "weight": 0.5}],
    "use_defaults": beside(False, adapter_id="muse"),
}
BASE = {"model": "tiny-base"}
OFFERED = {"type": "function", "name": "clock", "parameters": SCHEMA}
INPUT_CALL = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"}
INPUT_USER = {"type": "message", "role": "user", "content": "x"}
REASONED = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]}
FORMED = {"format": {"type": "json_object"}}
ASSISTANT = {"role": "assistant", "tool_calls": [CALL]}
PLACES: dict[str, Place] = {
    "CompletionBody": Place(
        PLAIN,
        {**BASE, "prompt": "hi"},
        {
            **GENERATION,
            "prompt": "ho",
            "echo": True,
            "logprobs": 1,
            "add_special_tokens": False,
            "return_tokens_as_token_ids": beside(True, logprobs=1),
        },
        # A plain continuation has none of a persona's texts.
        idle=frozenset({"user"}),
    ),
    "ChatBody": Place(
        CHAT,
        {**BASE, "messages": [USER]},
        {
            **GENERATION,
            "messages": [USER, USER],
            "add_special_tokens": True,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "logprobs": True,
            "top_logprobs": beside(2, logprobs=True),
            "tools": [CLOCK],
            "return_tokens_as_token_ids": beside(True, logprobs=True),
            "tool_choice": beside("none", tools=[CLOCK]),
            "parallel_tool_calls": beside(False, tools=[CLOCK], tool_choice="required"),
            "chat_template_kwargs": {"enable_thinking": True},
            "context_overflow": "drop_oldest",
            "reasoning_effort": "none",
            "include_reasoning": False,
            "separate_reasoning": False,
            "thinking_token_budget": 5,
        },
    ),
    "StreamOptions": Place(
        PLAIN,
        {},
        {"include_usage": True, "continuous_usage_stats": True},
        lambda one: {**BASE, "prompt": "hi", "stream": True, "stream_options": one},
    ),
    "Prediction": Place(
        PLAIN,
        {"type": "content", "content": "a"},
        {"type": "text", "content": [{"type": "text", "text": "Mia"}]},
        lambda one: {**BASE, "prompt": "hi", "prediction": one},
    ),
    "ResponseFormat": Place(
        PLAIN,
        {"type": "json_object"},
        {"type": "text", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA, "value": SCHEMA},
        lambda one: {**BASE, "prompt": "hi", "response_format": one},
    ),
    "JsonSchemaFormat": Place(
        PLAIN,
        {"schema": {"type": "integer"}},
        {"name": "x", "description": "x", "schema": SCHEMA, "strict": True},
        lambda one: {**BASE, "prompt": "hi", "response_format": {"type": "json_schema", "json_schema": one}},
        frozenset({"name", "description", "strict"}),
    ),
    "StructuredOutputs": Place(
        PLAIN,
        {"json_object": False},
        {"json": SCHEMA, "regex": "a", "choice": ["a"], "grammar": 'start: "a"', "json_object": True},
        lambda one: {**BASE, "prompt": "hi", "structured_outputs": one},
    ),
    "Message": Place(
        CHAT,
        USER,
        {
            "role": "system",
            "content": "y",
            "tool_calls": [CALL],
            "tool_call_id": "c1",
            "name": "Ann",
            "reasoning_content": "why",
            "reasoning": "why",
        },
        lambda one: {**BASE, "messages": [one]},
    ),
    "TextPart": Place(
        CHAT,
        {"type": "text", "text": "x"},
        {"type": "image", "text": "y"},
        lambda one: {**BASE, "messages": [{"role": "user", "content": [one]}]},
    ),
    "MessageToolCall": Place(
        CHAT,
        CALL,
        {"id": "c2", "type": "custom", "function": {"name": "watch"}},
        lambda one: {**BASE, "messages": [{**ASSISTANT, "tool_calls": [one]}]},
    ),
    "CalledFunction": Place(
        CHAT,
        {"name": "clock"},
        {"name": "watch", "arguments": {"a": 1}},
        lambda one: {**BASE, "messages": [{**ASSISTANT, "tool_calls": [{"function": one}]}]},
    ),
    "FunctionTool": Place(
        CHAT,
        CLOCK,
        {"type": "custom", "function": {"name": "watch"}},
        lambda one: {**BASE, "messages": [USER], "tools": [one]},
    ),
    "Function": Place(
        CHAT,
        {"name": "clock"},
        {"name": "watch", "description": "x", "parameters": SCHEMA, "strict": True},
        lambda one: {**BASE, "messages": [USER], "tools": [{"type": "function", "function": one}]},
    ),
    "NamedChoice": Place(
        CHAT,
        {"type": "function", "function": {"name": "clock"}},
        {"type": "custom", "function": {"name": "watch"}},
        lambda one: {**BASE, "messages": [USER], "tools": [CLOCK], "tool_choice": one},
    ),
    "ChosenFunction": Place(
        CHAT,
        {"name": "clock"},
        {"name": "watch"},
        lambda one: {
            **BASE,
            "messages": [USER],
            "tools": [CLOCK],
            "tool_choice": {"type": "function", "function": one},
        },
    ),
    "ResponsesBody": Place(
        RESPONSES,
        {**BASE, "input": "hi"},
        {
            **{name: value for name, value in GENERATION.items() if name in ResponsesBody.model_fields},
            "input": [INPUT_USER],
            "instructions": "be kind",
            "max_output_tokens": 5,
            "stream_options": beside({}, stream=True),
            "text": FORMED,
            "reasoning": {"effort": "none"},
            "include_reasoning": False,
            "separate_reasoning": False,
            "thinking_token_budget": 5,
            "tools": [OFFERED],
            "tool_choice": beside("none", tools=[OFFERED]),
            "parallel_tool_calls": beside(False, tools=[OFFERED], tool_choice="required"),
            "chat_template_kwargs": {"enable_thinking": True},
            "truncation": "auto",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "metadata": {"a": "b"},
            "max_tool_calls": 3,
            "store": True,
        },
        idle=frozenset({"stream_options", "store"}),
    ),
    "ResponseStreamOptions": Place(
        RESPONSES, {}, {}, lambda one: {**BASE, "input": "hi", "stream": True, "stream_options": one}
    ),
    "ReasoningConfig": Place(RESPONSES, {}, {"effort": "none"}, lambda one: {**BASE, "input": "hi", "reasoning": one}),
    "TextConfig": Place(RESPONSES, {}, FORMED, lambda one: {**BASE, "input": "hi", "text": one}),
    "TextFormat": Place(
        RESPONSES,
        {"type": "json_schema", "schema": {"type": "integer"}},
        {"type": "text", "name": "x", "description": "x", "schema": SCHEMA, "strict": True},
        lambda one: {**BASE, "input": "hi", "text": {"format": one}},
    ),
    "InputMessage": Place(
        RESPONSES,
        INPUT_USER,
        {"type": "message", "role": "system", "content": "y"},
        lambda one: {**BASE, "input": [one]},
        # The one that it may be.
        frozenset({"type"}),
    ),
    "InputPart": Place(
        RESPONSES,
        {"type": "input_text", "text": "x"},
        {"type": "input_image", "text": "y"},
        lambda one: {**BASE, "input": [{"role": "user", "content": [one]}]},
    ),
    "InputCall": Place(
        RESPONSES,
        INPUT_CALL,
        {"type": "custom_tool_call", "call_id": "c2", "name": "watch", "arguments": '{"a": 1}'},
        lambda one: {**BASE, "input": [one]},
    ),
    "InputReasoning": Place(
        RESPONSES,
        REASONED,
        {"type": "thought", "content": [{"type": "reasoning_text", "text": "y"}]},
        lambda one: {**BASE, "input": [INPUT_USER, one]},
    ),
    "ReasoningPart": Place(
        RESPONSES,
        {"type": "reasoning_text", "text": "x"},
        {"type": "summary_text", "text": "y"},
        lambda one: {**BASE, "input": [INPUT_USER, {**REASONED, "content": [one]}]},
    ),
    "InputCallOutput": Place(
        RESPONSES,
        {"type": "function_call_output", "call_id": "c1", "output": "x"},
        {"type": "local_shell_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "y"}]},
        lambda one: {**BASE, "input": [INPUT_CALL, one]},
    ),
    "OfferedFunction": Place(
        RESPONSES,
        {"type": "function", "name": "clock"},
        {"type": "custom", "name": "watch", "description": "x", "parameters": SCHEMA, "strict": True},
        lambda one: {**BASE, "input": "hi", "tools": [one]},
    ),
    "ForcedFunction": Place(
        RESPONSES,
        {"type": "function", "name": "clock"},
        {"type": "custom", "name": "watch"},
        lambda one: {**BASE, "input": "hi", "tools": [OFFERED], "tool_choice": one},
    ),
    "GenerateBody": Place(
        TGI,
        {"inputs": "hi"},
        {"inputs": "ho", "parameters": {"max_new_tokens": 2}, "stream": True, "model": "mia"},
    ),
    "Parameters": Place(TGI, {}, PARAMETERS, lambda one: {"inputs": "hi", "parameters": one}, frozenset({"api_token"})),
    "TokenizeBody": Place(
        "/tokenize",
        {"messages": [USER]},
        {
            "model": "nobody",
            "prompt": "x",
            "messages": [USER, USER],
            "add_special_tokens": True,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "return_token_strs": True,
        },
    ),
    "DetokenizeBody": Place("/detokenize", {"tokens": [60]}, {"model": "nobody", "tokens": [61]}),
    "BatchBody": Place(
        "/v1/batches",
        {"input_file_id": "$FILE", "endpoint": PLAIN, "completion_window": "24h"},
        {
            "input_file_id": "file-0",
            "endpoint": CHAT,
            "completion_window": "1h",
            "metadata": {"a": "b"},
            "output_expires_after": {"anchor": "created_at", "seconds": 3600},
        },
        # A property of the files that follow.
        idle=frozenset({"output_expires_after"}),
    ),
    "LoadBody": Place(
        "/v1/load_lora_adapter",
        {"lora_name": "ann", "lora_path": "mia", "load_inplace": True},
        {"lora_name": "bob", "lora_path": "none", "load_inplace": False},
    ),
    "UnloadBody": Place("/v1/unload_lora_adapter", {"lora_name": "nobody"}, {"lora_name": "none"}),
    # Of the sums, policies and drafts of requests; unknown fields are refused.
    "AdapterWeight": Place(
        PLAIN, {"id": "mia"}, {"id": "ann", "weight": 0.5}, lambda one: {**BASE, "prompt": "hi", "adapters": [one]}
    ),
    "WindowBody": Place(
        PLAIN,
        {"kind": "window", "recent": 64},
        {"kind": "select", "recent": 128, "sink": 32},
        lambda one: {**BASE, "prompt": "hi", "kv_policy": one},
    ),
    "SelectBody": Place(
        PLAIN,
        {"kind": "select", "budget": 512},
        {"kind": "window", "budget": 1024, "recent": 64, "every": 64, "sink": 32},
        lambda one: {**BASE, "prompt": "hi", "kv_policy": one},
    ),
    "SpeculationBody": Place(
        PLAIN,
        {},
        {"max_draft": 2, "drafters": ["prompt"], "remember": False},
        lambda one: {**BASE, "prompt": "hi", "speculation": one},
    ),
}
# Checked field by field in test_refused_fields, test_adapters, test_personas and test_batches; an unknown field is
# refused.
ELSEWHERE = {
    *("Age", "AdapterBody", "AdapterPatch", "LimitsBody", "WarmBody", "VerifyBody"),
    *("Defaults", "SystemPrompt", "ExampleMessage", "PinnedAdapter"),
}


def schemas() -> Iterator[type[BaseModel]]:
    """Yield the schemas that bodies and their objects have; not their bases."""
    modules = [importlib.import_module(f"api.schemas.{m.name}") for m in pkgutil.iter_modules(api.schemas.__path__)]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    for kind in sorted(found, key=lambda kind: kind.__name__):
        is_used = issubclass(kind, BaseModel) and kind is not BaseModel
        is_leaf = not kind.__subclasses__() or kind.__name__ in PLACES
        if is_used and is_leaf and kind.__name__ not in ELSEWHERE:
            yield kind


def names(kind: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


GENERATING = (CompletionBody, ChatBody, ResponsesBody, Parameters)
KINDS = {kind.__name__: kind for kind in schemas()}


@pytest.fixture
def ask(make_server, engine: FakeEngine, make_adapter) -> Callable[[Place, dict[str, Any]], Any]:
    """Sends an object in its body: what comes of it, in the engine and in the answer."""
    engine.tokenizer = tiny_tokenizer()
    engine.chat_template = ChatTemplate(TEMPLATE)
    engine.script = spelled(engine.tokenizer, "<think>O</think>Mia")
    folder = make_adapter()
    server = make_server(lora_import_root=folder.parent)
    server.upload(folder, "mia").raise_for_status()
    muse = {"system": "For {{user}}.", "temperature": 0.5}
    server.http.post("/v1/adapters", json={"id": "muse", "defaults": muse}).raise_for_status()
    file = server.http.post("/v1/files", data={"purpose": "batch"}, files={"file": b"x"}).json()["id"]

    def send(place: Place, one: dict[str, Any]) -> tuple[int, str, list[dict[str, Any]]]:
        engine.added.clear()
        body = {key: file if value == "$FILE" else value for key, value in place.inside(one).items()}
        answer = server.http.post(place.path, json=body)
        assert answer.status_code < 500, answer.text
        added = [{key: value for key, value in vars(asked).items() if key != "id"} for asked in engine.added]
        return answer.status_code, CHANCE.sub("", answer.text), added

    return send


def test_every_field_has_a_row() -> None:
    assert {name: names(kind) for name, kind in KINDS.items()} == {name: set(p.fields) for name, p in PLACES.items()}


@pytest.mark.parametrize("kind", GENERATING)
def test_every_route_knows_the_fields_of_the_others(kind: type[KnownBody]) -> None:
    of_any = {name for other in (*GENERATING, GenerateBody) for name in other.model_fields}
    assert of_any - kind.model_fields.keys() - kind.UNSUPPORTED.keys() <= WITHOUT_EFFECT.keys()


@pytest.mark.parametrize("name", ["CompletionBody", "ChatBody", "ResponsesBody", "Parameters"])
def test_fields_without_effect_are_told_and_have_none(ask, name: str) -> None:
    place = PLACES[name]
    sent = {"metadata": {"a": "b"}, "max_tool_calls": 1, "api_token": "x"}
    assert sent.keys() == WITHOUT_EFFECT.keys()
    # Which `/v1/responses` repeats.
    repeated = KINDS[name].model_fields.keys() & {"metadata", "max_tool_calls"}
    for key in sent.keys() - repeated:
        assert ask(place, {**place.base, key: sent[key]}) == ask(place, place.base)


@pytest.mark.parametrize("name", KINDS)
def test_every_field_does_something(ask, name: str) -> None:
    place = PLACES[name]
    ask(place, place.base)
    idle = set()
    for key, value in place.fields.items():
        told = value if isinstance(value, Beside) else Beside(value, {})
        without = {**place.base, **told.others}
        if ask(place, without) == ask(place, {**without, key: told.value}):
            idle.add(key)
    assert idle == place.idle


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if issubclass(kind, KnownBody)])
def test_what_only_other_servers_know_is_refused_unless_inert(ask, name: str) -> None:
    place, kind = PLACES[name], KINDS[name]
    plain = ask(place, place.base)
    assert plain[0] == 200
    unknown = kind.UNSUPPORTED.keys() - kind.model_fields.keys()
    assert unknown
    for key in unknown:
        for value in kind.UNSUPPORTED[key]:
            assert ask(place, {**place.base, key: value}) == plain, (key, value)
        status, text, added = ask(place, {**place.base, key: {"asks": "for something"}})
        assert (status, added) == (422 if place.path == TGI else 400, [])
        assert re.search(rf"\b{key}: not supported", text), text
