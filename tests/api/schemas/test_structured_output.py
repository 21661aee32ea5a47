"""Fields of structured output and tools on their way to the engine, and tool calls on their way back."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import openai
import pydantic
import pytest
import tool_templates as templates
from answers import events, refused
from fake_engine import say
from spelled_engine import tiny_tokenizer

from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.structured_output import grammar as source
from lorasrv.text.structured_output.grammar import Grammar
from lorasrv.text.tokenizer import Decoding

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class Bytes:
    """One token a byte; the marker of Mistral's calls is a special one."""

    special_ids = frozenset({255})
    added_tokens: dict[str, bool] = {}  # noqa: RUF012 - never written
    decoding = Decoding("byte_level")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [byte % 255 for byte in text.encode()]

    def encode_behind(self, text: str) -> list[int]:
        return self.encode(text)

    def has_forged(self, token_ids: Sequence[int], text: str) -> bool:
        return False

    def token(self, token_id: int) -> str | None:
        return chr(token_id) if 32 < token_id < 127 else None

    def token_id(self, token: str) -> int | None:
        return 255 if token == "[TOOL_CALLS]" else None


@pytest.fixture
def with_template(engine):
    def use(template: str) -> None:
        engine.tokenizer, engine.chat_template = Bytes(), ChatTemplate(template)
        engine.max_model_len = 4096

    return use


def formats(*given: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"response_format": one} for one in given]


FIELDS: dict[Callable[[str], Grammar], list[dict[str, Any]]] = {
    source.any_json_object: [*formats({"type": "json_object"}), {"structured_outputs": {"json_object": True}}],
    partial(source.json_of, SCHEMA): [
        *formats({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}),
        *formats({"type": "json_object", "schema": SCHEMA}, {"type": "json_object", "value": SCHEMA}),
        *formats({"type": "json", "value": SCHEMA}, {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}),
        *({"guided_json": SCHEMA}, {"guided_json": json.dumps(SCHEMA)}, {"structured_outputs": {"json": SCHEMA}}),
    ],
    partial(source.regex_of, "a+"): [
        *formats({"type": "regex", "value": "a+"}),
        *({"guided_regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
    ],
    partial(source.choice_of, ["yes"]): [{"guided_choice": ["yes"]}, {"structured_outputs": {"choice": ["yes"]}}],
    partial(source.grammar_of, 'start: "a"'): [
        *({"guided_grammar": 'start: "a"'}, {"structured_outputs": {"grammar": 'start: "a"'}}),
        # As guidance sends it.
        {"guided_grammar": 'start: "a"', "structured_outputs": {"grammar": 'start: "a"'}},
    ],
}


class TestStructuredFields:
    @pytest.mark.parametrize(("wanted", "fields"), [(wanted, one) for wanted, all_ in FIELDS.items() for one in all_])
    def test_reach_the_engine_on_every_route(self, server, engine, wanted, fields: dict[str, Any]) -> None:
        assert server.chat(**fields).status_code == server.complete(**fields).status_code == 200
        if "response_format" in fields:
            engine.tokenizer = tiny_tokenizer()
            server.http.post("/generate", json={"inputs": "hi", "parameters": fields}).raise_for_status()
        assert {added.constraint for added in engine.added} == {wanted(next(iter(fields)))}

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"response_format": {"type": "text"}},
            {"response_format": None, "guided_json": None, "structured_outputs": None},
            {"structured_outputs": {"json_object": False}},
            {"tools": [], "tool_choice": "auto"},
        ],
    )
    def test_nothing_is_asked_for(self, server, engine, fields: dict[str, Any]) -> None:
        assert server.chat(**fields).status_code == 200
        assert engine.added[0].constraint is None


class TestTools:
    TOOLS = (templates.WEATHER, templates.CLOCK)

    @pytest.fixture(autouse=True)
    def _hermes(self, with_template) -> None:
        with_template(templates.HERMES)

    def ask(self, server: Any, **fields: Any) -> Any:
        return server.chat(**{"tools": self.TOOLS, "max_tokens": 400, **fields})

    def test_a_named_tool_of_huggingface_hub_has_no_type(self, server) -> None:
        name = self.TOOLS[0]["function"]["name"]
        assert self.ask(server, tool_choice={"function": {"name": name}}).status_code == 200

    def test_tools_are_in_the_prompt_unless_the_choice_is_none(self, server, engine) -> None:
        for choice in (None, "auto", "none"):
            assert self.ask(server, tool_choice=choice).status_code == 200
        prompts = [bytes(added.prompt).decode() for added in engine.added]
        assert ["get_weather" in prompt for prompt in prompts] == [True, True, False]
        assert '"$ref": "#/$defs/city"' in prompts[0]
        assert [added.constraint for added in engine.added] == [None] * 3

    def test_calls_of_a_whole_answer(self, server, engine) -> None:
        engine.script = say(f"Let me see.\n{CALL}", "no call", CALL)
        choices = self.ask(server, n=3).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "tool_calls"]
        assert [choice["message"]["content"] for choice in choices] == ["Let me see.", "no call", None]
        assert "tool_calls" not in choices[1]["message"]
        (call,) = choices[0]["message"]["tool_calls"]
        assert call["id"].startswith("call_")
        assert call["id"] != choices[2]["message"]["tool_calls"][0]["id"]
        assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}

    def test_calls_of_a_stream(self, server, engine) -> None:
        engine.script = say(f"Hm.\n{CALL}\n{CALL}")
        chunks = events(self.ask(server, stream=True))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Hm."
        calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        assert [call["index"] for call in calls] == [0, 0, 1, 1]
        assert [call["function"].get("name") for call in calls] == ["get_weather", None, "get_weather", None]
        assert ["id" in call for call in calls] == [True, False, True, False]
        assert [call["function"]["arguments"] for call in calls] == ["", '{"city": "Paris"}'] * 2
        ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert ends == [None] * (len(chunks) - 1) + ["tool_calls"]

    def test_a_call_that_is_cut_stays_content(self, server, engine) -> None:
        engine.script = say(CALL)
        whole = self.ask(server, max_tokens=30).json()["choices"][0]
        assert (whole["message"]["content"], whole["finish_reason"]) == (CALL[:30], "length")
        chunks = events(self.ask(server, max_tokens=30, stream=True))
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == CALL[:30]

    def test_a_complete_call_is_the_reason_whatever_is_cut_behind_it(self, server, engine) -> None:
        engine.script = say(f"{CALL} and {CALL}")
        for most in (len(CALL), len(CALL) + 8, 2 * len(CALL)):
            choice = self.ask(server, max_tokens=most).json()["choices"][0]
            assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls")
            chunks = events(self.ask(server, max_tokens=most, stream=True))
            assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    def test_without_tools_nothing_is_read(self, server, engine) -> None:
        engine.script = say(CALL)
        assert server.chat().json()["choices"][0]["message"]["content"] == CALL
        assert self.ask(server, tool_choice="none").json()["choices"][0]["message"]["content"] == CALL

    def test_one_call_if_they_may_not_be_parallel(self, server, engine) -> None:
        engine.script = say(CALL + CALL)
        [choice] = self.ask(server, parallel_tool_calls=False).json()["choices"]
        assert len(choice["message"]["tool_calls"]) == 1

    def test_an_answer_has_one_call_where_the_template_takes_one(self, server, engine, with_template) -> None:
        """With two, Llama 3's template refuses an agent's next request."""
        with_template(templates.LLAMA)
        engine.script = say('{"name": "clock", "parameters": {}}; {"name": "clock", "parameters": {}}')
        message = self.ask(server).json()["choices"][0]["message"]
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "12:00"}
        assert self.ask(server, messages=[{"role": "user", "content": "time?"}, message, result]).status_code == 200

    @pytest.mark.parametrize(
        ("choice", "rules"), [("required", 2), ({"type": "function", "function": {"name": "clock"}}, 1)]
    )
    def test_forced_calls_have_a_grammar(self, server, engine, choice: object, rules: int) -> None:
        strict = {**templates.CLOCK, "function": {"name": "clock", "strict": True}}
        assert self.ask(server, tools=[templates.WEATHER, strict], tool_choice=choice).status_code == 200
        grammar = engine.added[0].constraint
        assert grammar.param == "tools"
        assert grammar.text.count("%json") == rules

    @pytest.mark.parametrize(
        ("parameters", "is_closed"),
        [
            ({"properties": {"zone": {"type": "string"}}, "required": ["zone"]}, True),
            ({"properties": {}}, True),
            ({}, False),
            ({"properties": {}, "additionalProperties": {"type": "string"}}, False),
        ],
    )
    def test_a_function_is_called_with_the_arguments_that_it_lists(
        self, server, engine, parameters: dict[str, Any], is_closed: bool
    ) -> None:
        tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", **parameters}}}
        assert self.ask(server, tools=[tool], tool_choice="required").status_code == 200
        schema = json.loads(engine.added[0].constraint.text.partition("arguments_0: %json ")[2].partition("\n")[0])
        assert (schema.get("additionalProperties") is False) == is_closed
        assert "additionalProperties" not in bytes(engine.added[0].prompt).decode() or not is_closed

    def test_strict_tools_have_a_grammar_also_where_no_call_is_forced(self, server, engine) -> None:
        """As openai-python's own helpers for tools ask: `pydantic_function_tool`, `chat.completions.parse`."""

        class Weather(pydantic.BaseModel):
            city: str

        engine.script = say('<tool_call>\n{"name": "Weather", "arguments": {"city": "Paris"}}\n</tool_call>')
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=20, max_retries=0) as client:
            asked = {"messages": [{"role": "user", "content": "x"}], "tools": [openai.pydantic_function_tool(Weather)]}
            answer = client.chat.completions.parse(model="tiny-base", **asked)
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.function.parsed_arguments == Weather(city="Paris")
        assert engine.added[0].constraint.param == "tools"
        assert '"city"' in engine.added[0].constraint.text
        assert self.ask(server, tools=[templates.CLOCK]).status_code == 200
        assert engine.added[1].constraint is None

    def test_a_blank_that_a_tokenizer_puts_in_front_is_text_where_a_grammar_says_how_it_begins(
        self, server, engine
    ) -> None:
        strict = {"type": "function", "function": {"name": "clock", "strict": True}}
        schema = {"guided_json": {"type": "object"}}
        asks: list[dict[str, Any]] = [{}, {"tools": [strict]}, {"tool_choice": "required"}, schema]
        for fields in asks:
            assert self.ask(server, **fields).status_code == 200
        assert [added.constraint is None for added in engine.added] == [True, False, False, False]
        assert [added.text.strip_start for added in engine.added] == [True, True, False, False]

    def test_special_markers_are_shown(self, server, engine, with_template) -> None:
        with_template(templates.MISTRAL)
        engine.script = say('[TOOL_CALLS] [{"name": "clock", "arguments": {}}]')
        call = self.ask(server).json()["choices"][0]["message"]["tool_calls"][0]
        assert engine.added[0].text.shown_token_ids == {255}
        assert len(call["id"]) == 9, "Mistral's template refuses any other id"
        server.chat()
        assert engine.added[1].text.shown_token_ids == frozenset()

    def test_a_conversation_with_calls(self, server, engine) -> None:
        called = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"utc": true}'}}
        messages = [
            {"role": "user", "content": "time?"},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
        ]
        assert server.chat(messages=messages, max_tokens=5).status_code == 200
        prompt = bytes(engine.added[0].prompt).decode()
        assert '<tool_call>\n{"name": "clock", "arguments": {"utc": true}}\n</tool_call>' in prompt
        assert "<tool_response>\n12:00\n</tool_response>" in prompt

    @pytest.mark.parametrize(
        ("fields", "param", "why"),
        [
            ({"tools": None, "tool_choice": "required"}, "tool_choice", "no tools"),
            ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
            ({"tool_choice": "any"}, "tool_choice", "required"),
            ({"tools": [{"type": "retrieval"}]}, "tools", "tools[0].type"),
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[0].function.name"),
            ({"tools": [templates.CLOCK] * 2}, "tools", "same name"),
            ({"guided_regex": "a"}, "guided_regex", "exclude"),
            ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
            ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "chat_template"),
            ({"chat_template": "x"}, "chat_template", "chat_template"),
        ],
    )
    def test_refusals(self, server, engine, fields: dict[str, Any], param: str, why: str) -> None:
        refused(self.ask(server, **fields), 400, param, why)
        assert engine.added == []

    @pytest.mark.parametrize("template", [templates.PLAIN, templates.XML])
    def test_templates_without_tools(self, server, with_template, template: str) -> None:
        with_template(template)
        refused(self.ask(server), 400, "tools")
        messages = [{"role": "user", "content": "x"}, {"role": "tool", "content": "x"}]
        refused(server.chat(messages=messages), 400, "messages[1].role")

    def test_variables_and_generation_prompt(self, server, engine) -> None:
        server.chat(chat_template_kwargs={"enable_thinking": False}, max_tokens=5)
        server.chat(add_generation_prompt=False, max_tokens=5)
        prompts = [bytes(added.prompt).decode() for added in engine.added]
        assert prompts[0].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert prompts[1].endswith("<|im_end|>\n")
