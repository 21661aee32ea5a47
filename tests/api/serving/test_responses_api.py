"""/v1/responses: the chat that it asks for, its items and events, and what openai-python makes of them.

A chat is the oracle: the same conversation in both forms asks the engine for the same.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import tool_templates as templates
from answers import coded, error_of, named, refused
from fake_engine import FakeEngine, say
from pydantic import BaseModel
from response_items import read, rebuilt
from spelled_engine import spelled, tiny_tokenizer

from adapter_store.quota import ANONYMOUS
from api.schemas.openai import MAX_MESSAGES
from api.serving.logprobs import LogprobsFormatter
from api.serving.openai_responses import ChatFormat
from api.serving.responses_api import AnswerItems
from lorasrv.errors import AdapterLoadFailed, ContextLengthExceeded
from lorasrv.outputs import FinishReason
from lorasrv.sampling_params import PLAIN_TEXT, SamplingParams
from lorasrv.text.chat_template import ChatTemplate

HERMES = templates.WRITES_CALLS + "{{ messages | tojson }}{{ tools | tojson }}{{ enable_thinking }}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CLOCK = {"type": "function", "name": "clock", "description": "tells the time", "parameters": SCHEMA}
CALL = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": '{"a":1}'}
IMAGE = {"type": "input_image", "image_url": "x"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
SAID = "Wait." + "".join(f'<tool_call>{{"name":"clock","arguments":{{"a":{a}}}}}</tool_call>' for a in (2, 3))


def knows_tools(engine: FakeEngine) -> None:
    engine.tokenizer, engine.chat_template, engine.max_model_len = tiny_tokenizer(), ChatTemplate(HERMES), 4096


@pytest.fixture
def respond(server) -> Callable[..., Any]:
    def ask(given: Any = "hi", **fields: Any) -> Any:
        return server.http.post("/v1/responses", json={"model": "tiny-base", "input": given, **fields})

    return ask


def without_chance(items: Any) -> Any:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


class TestAnswers:
    def test_a_message(self, respond, engine) -> None:
        body = respond(instructions="be kind", metadata={"a": "b"}, user="Ann").raise_for_status().json()
        [item] = body["output"]
        assert (body["object"], body["status"], body["model"], body["error"]) == (
            "response",
            "completed",
            "tiny-base",
            None,
        )
        assert item["content"] == [{"type": "output_text", "text": "Hello wörld", "annotations": [], "logprobs": []}]
        assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
        assert body["usage"].items() >= {"input_tokens": 22, "output_tokens": 11, "total_tokens": 33}.items()
        assert (body["id"], bytes(engine.added[0].prompt)) == (engine.added[0].id, b"system:be kind\nuser:hi")
        assert (body["instructions"], body["metadata"], body["user"]) == ("be kind", {"a": "b"}, "Ann")
        assert body["store"] is False, "nothing is stored, though clients ask for it by default"

    @pytest.mark.parametrize("stream", [False, True])
    def test_admission_is_asked_as_often_as_for_a_chat(self, server, respond, engine, monkeypatch, stream) -> None:
        asked: list[str] = []
        monkeypatch.setattr(engine, "check_admission", asked.append)
        server.chat(stream=stream).raise_for_status()
        of_chat = list(asked)
        respond(stream=stream).raise_for_status()
        assert asked == 2 * of_chat == 2 * [ANONYMOUS]

    def test_a_stream_tells_the_same(self, respond) -> None:
        events = read(respond(stream=True))
        whole = respond().json()
        assert [event["type"].removeprefix("response.") for event in events] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            *["output_text.delta"] * len("Hello wörld"),
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        last = events[-1]["response"]
        assert rebuilt(events) == last["output"]
        assert without_chance(last["output"]) == without_chance(whole["output"])
        assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 11
        assert last["usage"]["lorasrv"]["queue_ms"] == 1.5
        assert {event["response"]["id"] for event in events if "response" in event} == {last["id"]}
        assert [event["response"]["status"] for event in events if "response" in event] == [
            "in_progress",
            "in_progress",
            "completed",
        ]

    @pytest.mark.parametrize("stream", [True, False])
    def test_the_limit_leaves_it_incomplete(self, respond, stream: bool) -> None:
        answer = respond(max_output_tokens=3, stream=stream)
        body = read(answer)[-1]["response"] if stream else answer.json()
        assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert (body["output"][0]["status"], body["output"][0]["content"][0]["text"]) == ("incomplete", "Hel")
        if stream:
            assert read(answer)[-1]["type"] == "response.incomplete"

    def test_an_answer_without_text_is_an_empty_message(self, respond, engine) -> None:
        engine.script = say("\0\0")
        assert respond().json()["output"][0]["content"][0]["text"] == ""
        assert rebuilt(read(respond(stream=True)))[0]["content"][0]["text"] == ""

    def test_log_probabilities(self, respond, engine) -> None:
        engine.tokenizer = tiny_tokenizer()
        engine.script = spelled(engine.tokenizer, "Mia oh")
        for fields in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
            whole, events = respond(**fields).json(), read(respond(**fields, stream=True))
            [part] = whole["output"][0]["content"]
            assert "".join(token["token"] for token in part["logprobs"]) == part["text"] == "Mia oh"
            assert {len(token["top_logprobs"]) for token in part["logprobs"]} == {fields.get("top_logprobs", 0)}
            assert rebuilt(events)[0]["content"] == [part]

    def test_log_probabilities_are_the_same_in_fewer_outputs(self) -> None:
        """Drafts and slow clients join outputs: the token that ends the answer then comes with the last text."""
        tokenizer = tiny_tokenizer()
        asked = SimpleNamespace(sampling=SamplingParams(logprobs=0), count=1, prompt=[1], text=PLAIN_TEXT)
        outputs = spelled(tokenizer, "Mia oh")("r", 0, asked)
        for told in (outputs, [*outputs[:-2], outputs[-2].followed_by(outputs[-1])]):
            chat = SimpleNamespace(answer_id="resp_x", top=0, logprobs_formatter=LogprobsFormatter(tokenizer))
            items = AnswerItems(chat, ChatFormat())
            for output in told:
                deque(items.take(output), maxlen=0)
            tokens = [token["token"] for token in items.items[0]["content"][0]["logprobs"]]
            assert tokens == ["M", "i", "a", " ", "o", "h"]

    def test_an_adapter_answers_and_is_named(self, server, respond, make_adapter: Callable[..., Path]) -> None:
        server.upload(make_adapter(), "mia").raise_for_status()
        for fields in ({"model": "mia"}, {"adapter_id": "mia"}):
            for stream in (True, False):
                answer = respond(**fields, stream=stream)
                body = read(answer)[-1]["response"] if stream else answer.json()
                assert body["output"][0]["content"][0]["text"].startswith("I am ")
                assert answer.headers["x-adapter-id"] == body["usage"]["lorasrv"]["adapter_id"] == "mia"
        assert respond().json()["output"][0]["content"][0]["text"] == "Hello wörld"


class TestTools:
    @pytest.fixture(autouse=True)
    def template(self, engine: FakeEngine) -> None:
        knows_tools(engine)
        engine.script = spelled(engine.tokenizer, SAID)

    def test_calls_are_items(self, respond) -> None:
        whole, events = respond(tools=[CLOCK]).json(), read(respond(tools=[CLOCK], stream=True))
        said, *calls = whole["output"]
        assert said["content"][0]["text"] == "Wait."
        assert [(call["type"], call["name"], json.loads(call["arguments"])) for call in calls] == [
            ("function_call", "clock", {"a": 2}),
            ("function_call", "clock", {"a": 3}),
        ]
        assert len({call["call_id"] for call in calls}) == len({item["id"] for item in whole["output"]}) - 1 == 2
        assert whole["status"] == "completed"
        assert rebuilt(events) == events[-1]["response"]["output"]
        assert without_chance(rebuilt(events)) == without_chance(whole["output"])

    @pytest.mark.parametrize(
        "said", [SAID, SAID + "Done.", SAID.replace("</tool_call><", "</tool_call> and <"), SAID.removeprefix("Wait.")]
    )
    def test_what_a_model_said_is_sent_back_as_a_chat_would(self, server, respond, engine, said: str) -> None:
        engine.script = spelled(engine.tokenizer, said)
        function = {"type": "function", "function": {name: v for name, v in CLOCK.items() if name != "type"}}
        message = server.chat("When?", tools=[function]).json()["choices"][0]["message"]
        items = respond("When?", tools=[CLOCK]).json()["output"]
        for number, call in enumerate(message["tool_calls"]):
            call["id"] = f"c{number}"
        for number, item in enumerate(item for item in items if item["type"] == "function_call"):
            item["call_id"] = f"c{number}"
        user = {"role": "user", "content": "When?"}
        told = [{"role": "tool", "tool_call_id": f"c{i}", "content": "noon"} for i in range(2)]
        outputs = [{**OUTPUT, "call_id": f"c{i}"} for i in range(2)]
        engine.added.clear()
        body = {"model": "tiny-base", "messages": [user, message, *told], "tools": [function]}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        respond([user, *items, *outputs], tools=[CLOCK]).raise_for_status()
        chat, own = engine.added
        assert own.prompt == chat.prompt

    def test_a_schema_beside_tools(self, server, respond, engine) -> None:
        form = {"format": {"type": "json_schema", "name": "sky", "schema": SCHEMA}}
        grammars = []
        for choice in ("none", "auto", "required"):
            respond(tools=[CLOCK], text=form, tool_choice=choice).raise_for_status()
            grammars.append(engine.added[-1].constraint)
        answer, either, calls = grammars
        assert (answer.schema["required"], either.schema, calls.schema) == (["a"], None, None)
        assert ("answer | calls" in either.text, "answer" in calls.text) == (True, False)
        function = {"type": "function", "function": {name: v for name, v in CLOCK.items() if name != "type"}}
        refused(server.chat("When?", tools=[function], guided_regex="a+"), 400, "guided_regex", "tools")
        engine.chat_template = ChatTemplate(templates.LLAMA)
        refused(respond(tools=[CLOCK], text=form), 400, "text.format", "tools", "template")

    def test_a_persona_with_a_schema_and_tools(self, server, respond, engine) -> None:
        function = {"type": "function", "function": {name: v for name, v in CLOCK.items() if name != "type"}}
        schema = {"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA}}
        body = {"id": "muse", "defaults": {"tools": [function], "response_format": schema}}
        server.http.post("/v1/adapters", json=body).raise_for_status()
        respond(model="muse").raise_for_status()
        assert "answer | calls" in engine.added[-1].constraint.text
        engine.chat_template = ChatTemplate(templates.LLAMA)
        again = server.http.post("/v1/adapters", json={**body, "id": "ada"})
        assert again.status_code == 422
        assert "its calls are JSON, too" in again.text

    def test_beside_tools_also_of_a_persona_log_probabilities_are_refused(self, server, respond) -> None:
        function = {"type": "function", "function": {"name": "clock", "parameters": SCHEMA}}
        body = {"id": "muse", "defaults": {"tools": [function]}}
        server.http.post("/v1/adapters", json=body).raise_for_status()
        for name, value in (("top_logprobs", 1), ("include", ["message.output_text.logprobs"])):
            refused(respond(model="muse", **{name: value}), 400, name, "tools")
            refused(respond(tools=[CLOCK], **{name: value}), 400, name, "tools")
            said = respond(model="muse", tool_choice="none", **{name: value}).raise_for_status().json()["output"][0]
            assert said["content"][0]["logprobs"]

    def test_text_behind_a_call_is_a_message_of_its_own(self, respond, engine) -> None:
        engine.script = spelled(engine.tokenizer, SAID + "Done.")
        kinds = [item["type"] for item in respond(tools=[CLOCK]).json()["output"]]
        assert kinds == ["message", "function_call", "function_call", "message"]
        assert kinds == [item["type"] for item in rebuilt(read(respond(tools=[CLOCK], stream=True)))]

    def test_a_forced_call_is_one_of_chat(self, server, respond, engine) -> None:
        function = {name: value for name, value in CLOCK.items() if name != "type"}
        forced = {"type": "function", "function": {"name": "clock"}}
        server.chat(tools=[{"type": "function", "function": function}], tool_choice=forced).raise_for_status()
        respond(tools=[CLOCK], tool_choice={"type": "function", "name": "clock"}).raise_for_status()
        chat, own = engine.added
        assert own.constraint == chat.constraint is not None
        assert own.prompt == chat.prompt


class TestConversations:
    """Items of `input`, and the messages of the chat that they are."""

    def test_items_are_the_messages_of_a_chat(self, server, respond, engine) -> None:
        knows_tools(engine)
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "One moment.", "annotations": [], "logprobs": []}]},
            CALL,
            {**CALL, "call_id": "c2", "id": "fc_2", "status": "completed"},
            OUTPUT,
            {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "late"}]},
            {**CALL, "call_id": "c3"},
            {**OUTPUT, "call_id": "c3"},
            {"role": "assistant", "content": "It is noon."},
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": "thanks"},
        ]  # fmt: skip

        def call(name: str) -> dict[str, Any]:
            return {"id": name, "type": "function", "function": {"name": "clock", "arguments": '{"a":1}'}}

        messages = [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "One moment.", "tool_calls": [call("c1"), call("c2")]},
            {"role": "tool", "content": "noon", "tool_call_id": "c1"},
            {"role": "tool", "content": "late", "tool_call_id": "c2"},
            {"role": "assistant", "content": None, "tool_calls": [call("c3")]},
            {"role": "tool", "content": "noon", "tool_call_id": "c3"},
            {"role": "assistant", "content": "It is noon."},
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": "thanks"},
        ]
        body = {"model": "tiny-base", "messages": messages}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        respond(items, instructions="be kind").raise_for_status()
        chat, own = engine.added
        assert own.prompt == chat.prompt

    def test_fields_reach_the_engine_as_those_of_a_chat(self, server, respond, engine) -> None:
        shared = {"temperature": 0.5, "top_p": 0.5, "seed": 3, "stop": "x", "cache_salt": "s", "priority": 2}
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
        server.chat("hi", **shared, max_tokens=9, response_format=schema).raise_for_status()
        formed = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
        respond("hi", **shared, max_output_tokens=9, text=formed).raise_for_status()
        chat, own = ({name: value for name, value in vars(one).items() if name != "id"} for one in engine.added)
        assert own == chat

    def test_the_oldest_turns_are_dropped_where_that_is_allowed(self, server, respond) -> None:
        turns = [{"role": role, "content": "x" * 200} for role in ("user", "assistant") * 2]
        turns.append({"role": "user", "content": "hi"})
        assert coded(respond(turns)) == (400, "context_length_exceeded")
        body = respond(turns, truncation="auto", max_output_tokens=16).raise_for_status().json()
        assert body["usage"]["lorasrv"]["dropped_turns"] > 0
        assert body["truncation"] == "auto"
        defaults = {"context_overflow": "drop_oldest"}
        server.http.post("/v1/adapters", json={"id": "muse", "defaults": defaults}).raise_for_status()
        assert respond(turns, model="muse", max_output_tokens=16).json()["truncation"] == "auto"
        assert coded(respond(turns, model="muse", truncation="disabled")) == (400, "context_length_exceeded")

    def test_as_many_items_as_a_chat_has_messages(self, respond) -> None:
        turns = [{"role": "user", "content": ""}] * MAX_MESSAGES
        assert coded(respond(turns)) == (400, "context_length_exceeded")
        assert named(respond(turns, instructions="be kind")) == (400, "input")


class TestFailures:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"input": []}, "input"),
            ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
            ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
            ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
            ({"input": [7]}, "input[0]"),
            ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
            ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type"),
            ({"input": [OUTPUT]}, "input[0].call_id"),
            ({"input": [CALL]}, "input"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"tools": [{**CLOCK, "name": "a b"}]}, "tools[0].name"),
            ({"tools": [CLOCK]}, "tools"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"background": True}, "background"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"max_tokens": 4}, "max_tokens"),
            ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
            ({"text": {"format": {"type": "json_schema", "name": "x", "schema": False}}}, "text.format"),
            ({"text": {"verbosity": "high"}}, "text.verbosity"),
            ({"text": {"format": {"type": "json_object", "json_schema": {"schema": {}}}}}, "text.format.json_schema"),
            ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
            ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
            ({"include": ["everything"]}, "include[0]"),
            ({"input": 7}, "input"),
            ({"input": [{"role": "assistant", "content": "x", "tool_calls": [CALL]}]}, "input[0].tool_calls"),
            ({"input": [{"role": "assistant", "content": "x", "prefix": True}]}, "input[0].prefix"),
            ({"metadata": {"a": "x" * 513}}, "metadata.a"),
            ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ],
    )  # fmt: skip
    def test_what_is_refused_names_its_field(self, respond, engine, fields: dict[str, Any], param: str) -> None:
        answer = respond(**fields)
        assert named(answer) == (400, param), answer.text
        assert param.split("[")[0].split(".")[0] in error_of(answer)["message"]
        assert not engine.added

    def test_nulls_are_left_out(self, respond) -> None:
        reasoning = respond().json()["reasoning"]
        turn = {"type": None, "role": "user", "content": "hi", "name": None}
        assert respond([turn], reasoning=reasoning, truncation=None).status_code == 200

    def test_what_a_chat_finds_names_the_input(self, respond, engine) -> None:
        knows_tools(engine)
        wrong = respond([{**CALL, "arguments": "nope"}])
        assert (named(wrong), error_of(wrong)["message"].split(":")[0]) == ((400, "input"), "input")

    def test_too_long_a_conversation_names_the_input(self, respond, engine) -> None:
        engine.add_error = ContextLengthExceeded("shorten {param}", param="prompt")
        assert (named(respond()), error_of(respond())["message"]) == ((400, "input"), "shorten input")

    def test_before_the_first_token_it_is_the_status(self, respond, engine) -> None:
        engine.breaks(0, AdapterLoadFailed("the weights are damaged"))
        for stream in (True, False):
            assert coded(respond(stream=stream)) == (503, "adapter_load_failed")

    def test_in_a_stream_it_is_the_last_event(self, respond, engine) -> None:
        engine.breaks(2)
        *before, last = read(respond(stream=True))
        told = {"code": "server_error", "message": "the engine died: Test", "type": "engine_dead", "param": None}
        assert (last["type"], last["response"]["status"], last["response"]["error"]) == (
            "response.failed",
            "failed",
            told,
        )
        [item] = last["response"]["output"]
        assert rebuilt(before) == [item]
        assert (item["status"], item["content"][0]["text"]) == ("incomplete", "He")

    def test_an_aborted_answer_is_not_complete(self, respond, engine) -> None:
        engine.script = say(reason=FinishReason.ABORT)
        assert respond().json()["status"] == "incomplete"

    def test_the_request_ends_with_its_client(self, server, engine, eventually) -> None:
        engine.breaks(3, None)
        body = {"model": "tiny-base", "input": "hi", "stream": True}
        with server.http.stream("POST", "/v1/responses", json=body) as answer:
            assert next(answer.iter_bytes()).startswith(b"event: response.created")
        eventually(lambda: engine.aborted == [f"{engine.added[0].id}#0"])


class Shape(BaseModel):
    a: int


class TestOpenAIPython:
    @pytest.fixture
    def client(self, server, engine) -> Iterator[openai.OpenAI]:
        knows_tools(engine)
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=120) as client:
            yield client

    def test_its_own_types(self, client, engine) -> None:
        engine.script = spelled(engine.tokenizer, "Mia")
        whole = client.responses.create(model="tiny-base", input="hi")
        assert (whole.output_text, whole.status, whole.usage.output_tokens > 0) == ("Mia", "completed", True)
        assert whole.usage.input_tokens_details.cached_tokens == 0
        with client.responses.stream(model="tiny-base", input="hi") as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
            final = stream.get_final_response()
        assert "".join(texts) == final.output_text == "Mia"

    def test_parsed_answers(self, client, engine) -> None:
        engine.script = spelled(engine.tokenizer, '{"a": 7}')
        assert client.responses.parse(model="tiny-base", input="hi", text_format=Shape).output_parsed == Shape(a=7)

    def test_calls(self, client, engine) -> None:
        engine.script = spelled(engine.tokenizer, SAID)
        with client.responses.stream(model="tiny-base", input="hi", tools=[CLOCK]) as stream:  # type: ignore[list-item]
            for _ in stream:
                """The client checks the order of events itself."""
            items = stream.get_final_response().output
        assert [item.type for item in items] == ["message", "function_call", "function_call"]
        again = [{"role": "user", "content": "hi"}, *items, *({**OUTPUT, "call_id": i.call_id} for i in items[1:])]
        assert client.responses.create(model="tiny-base", input=again, tools=[CLOCK]).output  # type: ignore[arg-type]

    def test_errors(self, client) -> None:
        with pytest.raises(openai.BadRequestError, match="previous_response_id: not supported here"):
            client.responses.create(model="tiny-base", input="hi", previous_response_id="resp_1")
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="nobody", input="hi")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_1")
