"""Reasoning on its way back, whole and streamed, in chats and responses; and what requests say of it.

A split of the whole text is the oracle: what the engine says, the text between its markers, and what follows.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
import tool_templates as templates
from answers import events, refused
from fake_engine import FakeEngine
from response_items import read, rebuilt
from spelled_engine import spelled, tiny_tokenizer
from tiny_tokenizers import sentencepiece

from adapter_store.spec import AddedToken
from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.reasoning import ReasoningReader
from lorasrv.text.structured_output.grammar import Grammar
from lorasrv.text.tool_parsers.base import Part

THOUGHT, ANSWER = "So: a </b> — <think> hm.", "Hi, wörld. <think>no</think>"
SAID = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
IN_FRONT = len(f"<think>\n{THOUGHT}\n</think>\n\n".encode())
CALL = '<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>'
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "x"}
CALLS = templates.WRITES_CALLS + "{{ tools | tojson }}{{ messages | tojson }}"
EFFORT = "{{ messages | tojson }}<think>{{ reasoning_effort }}"


@pytest.fixture
def thinks(engine: FakeEngine) -> Callable[..., None]:
    """Gives the base a template, and an answer."""

    def use(template: str = templates.QWEN3, said: str = SAID) -> None:
        engine.tokenizer, engine.chat_template, engine.max_model_len = tiny_tokenizer(), ChatTemplate(template), 4096
        engine.script = spelled(engine.tokenizer, said)

    use()
    return use


@pytest.fixture
def has_special_markers(engine: FakeEngine, thinks: Callable[..., None]) -> None:
    """The markers `[THINK]` and `[/THINK]` are special tokens, which are not written as text by default."""
    thinks(templates.MAGISTRAL)
    first = engine.tokenizer.vocab_size
    added = [AddedToken(first + n, text, special=True) for n, text in enumerate(("[THINK]", "[/THINK]"))]
    engine.tokenizer = engine.tokenizer.extended(added)
    engine.script = spelled(engine.tokenizer, "[THINK]hm[/THINK]Hi.")


@pytest.fixture
def respond(server) -> Callable[..., Any]:
    def ask(given: Any = "hi", **fields: Any) -> Any:
        return server.http.post("/v1/responses", json={"model": "tiny-base", "input": given, **fields})

    return ask


def prompt_of(engine: FakeEngine) -> str:
    return "".join(engine.tokenizer.token(token) or "" for token in engine.added[-1].prompt)


def told(answer: Any, index: int = 0) -> tuple[Any, ...]:
    """Of a whole answer: reasoning, content, why it ended, tokens of the reasoning."""
    body = answer.raise_for_status().json()
    choice = body["choices"][index]
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content"), "vLLM's name and SGLang's"
    counted = body["usage"].get("completion_tokens_details", {}).get("reasoning_tokens")
    return message.get("reasoning"), message["content"], choice["finish_reason"], counted


def streamed(server: Any, index: int = 0, **fields: Any) -> tuple[Any, ...]:
    """The same of a stream."""
    chunks = events(server.chat(stream=True, stream_options={"include_usage": True}, **fields))
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    names = [name for delta in deltas[1:] for name in ("reasoning", "content") if name in delta]
    assert names == sorted(names, reverse=True), "reasoning, then content"
    reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
    content = "".join(delta.get("content", "") for delta in deltas)
    counted = chunks[-1]["usage"].get("completion_tokens_details", {}).get("reasoning_tokens")
    return reasoning or None, content, choices[-1]["finish_reason"], counted


def both(server: Any, **fields: Any) -> tuple[Any, ...]:
    whole = told(server.chat(**fields))
    assert streamed(server, **fields) == whole
    return whole


pytestmark = pytest.mark.usefixtures("thinks")


class TestAnswers:
    def test_reasoning_has_fields_of_its_own(self, server) -> None:
        assert both(server) == (THOUGHT, ANSWER, "stop", IN_FRONT)

    @pytest.mark.parametrize("template", [templates.QWEN3_THINKING, templates.R1])
    @pytest.mark.parametrize("begin", ["", "<think>", "\n<think>\n"])
    def test_the_prompt_may_have_opened_it(self, server, thinks, template: str, begin: str) -> None:
        thinks(template, said := f"{begin}{THOUGHT}\n</think>\n\n{ANSWER}")
        assert both(server) == (THOUGHT, ANSWER, "stop", len(said.removesuffix(ANSWER).encode()))

    def test_the_prompt_may_have_closed_it(self, server) -> None:
        fields = {"chat_template_kwargs": {"enable_thinking": False}}
        assert both(server, **fields) == (None, SAID, "stop", None)
        chunk = events(server.chat(stream=True, **fields))[1]
        assert chunk["choices"][0]["delta"] == {"content": "<"}, "the short way: nothing is held back"

    @pytest.mark.parametrize("said", ["Hi.", " Hi <think>no</think>", "<thin", "\n", "Hm.</think>Hi."])
    def test_an_answer_without_it(self, server, thinks, said: str) -> None:
        thinks(said=said)
        assert both(server) == (None, said, "stop", 0)

    def test_none_is_null(self, server, thinks) -> None:
        thinks(said="<think>\n\n</think>\n\nHi.")
        assert server.chat().json()["choices"][0]["message"].items() >= {"reasoning": None, "content": "Hi."}.items()
        assert both(server)[:2] == (None, "Hi.")

    def test_bases_that_do_not_reason_have_no_such_fields(self, server, thinks) -> None:
        thinks(templates.PLAIN)
        assert server.chat().json()["choices"][0]["message"].keys() == {"role", "content", "refusal"}
        assert both(server) == (None, SAID, "stop", None)

    def test_what_is_cut_before_its_end_is_reasoning(self, server) -> None:
        for most in (20, IN_FRONT - 4, IN_FRONT - 6):
            reasoning, content, why, counted = both(server, max_tokens=most)
            assert (content, why, counted) == ("", "length", most)
            assert SAID.encode()[8:most].decode(errors="ignore").strip("\n").startswith(reasoning.rstrip("\ufffd"))
        assert both(server, max_tokens=4) == (None, "<thi", "length", 0)

    def test_stop_strings_count_in_reasoning_too(self, server) -> None:
        counted = IN_FRONT - len(".\n</think>\n\n")
        assert both(server, stop="hm") == (THOUGHT.removesuffix("hm."), "", "stop", counted)
        assert both(server, stop="</think>")[:3] == (THOUGHT, "", "stop")
        assert both(server, stop="nk>\n\nH", include_stop_str_in_output=True)[:3] == (THOUGHT, "H", "stop")
        assert both(server, stop=">\n\nHX")[:3] == (THOUGHT, ANSWER, "stop"), "held back, and then not"

    def test_every_choice_is_split_by_itself(self, server) -> None:
        """The second one begins with `think>`."""
        answer = server.chat(n=2)
        assert told(answer) == (THOUGHT, ANSWER, "stop", IN_FRONT)
        assert told(answer, 1) == (None, SAID[1:], "stop", IN_FRONT)
        assert streamed(server, 1, n=2) == (None, SAID[1:], "stop", IN_FRONT)

    def test_choices_that_are_not_returned_are_counted(self, server, thinks) -> None:
        thinks(said="  " + SAID)
        counts = {told(server.chat(n=n, best_of=2))[3] for n in (1, 2)}
        assert counts == {2 * IN_FRONT + 2 + 1}

    @pytest.mark.parametrize("n", [1, 2])
    def test_a_whole_answer_is_read_at_once_and_outside_the_event_loop(self, server, monkeypatch, n: int) -> None:
        push, texts = ReasoningReader.push, []

        def watched(read: ReasoningReader, text: str) -> list[Part]:
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            texts.append(text)
            return push(read, text)

        monkeypatch.setattr(ReasoningReader, "push", watched)
        assert told(server.chat(n=n)) == (THOUGHT, ANSWER, "stop", IN_FRONT)
        assert texts == [SAID[index:] for index in range(n)]

    def test_usage_in_chunks(self, server) -> None:
        asked = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events(server.chat(stream=True, stream_options=asked))
        done = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        counted = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
        assert counted == [min(num, IN_FRONT) if num >= len("<think>") else 0 for num in done]

    def test_log_probabilities_are_those_of_all_tokens(self, server, engine) -> None:
        whole = server.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(token["bytes"]) for token in whole[:-1]) == SAID.encode()
        chunks = events(server.chat(logprobs=True, stream=True))
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [token for part in parts if part for token in part["content"]] == whole

    def test_openai_python_reads_both_names(self, server) -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=20, max_retries=0) as client:
            asked: dict[str, Any] = {"model": "tiny-base", "messages": [{"role": "user", "content": "x"}]}
            answer = client.chat.completions.create(**asked)
            message = answer.choices[0].message
            assert (message.reasoning, message.reasoning_content, message.content) == (THOUGHT, THOUGHT, ANSWER)
            assert answer.usage.completion_tokens_details.reasoning_tokens == IN_FRONT
            deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
            assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == THOUGHT
            assert "".join(delta.content or "" for delta in deltas) == ANSWER
            # As clients send an answer back.
            turn = {"role": "assistant", "content": ANSWER, "reasoning": THOUGHT, "reasoning_content": THOUGHT}
            client.chat.completions.create(**asked | {"messages": [*asked["messages"], turn, *asked["messages"]]})


class TestBesides:
    def test_calls_follow_it(self, server, engine, thinks) -> None:
        thinks(templates.HERMES, f"<think>\nI {CALL}?\n</think>\n\nSee:\n{CALL}")
        for strict in (False, True):
            tool = {**CLOCK, "function": {**CLOCK["function"], "strict": strict}}
            assert both(server, tools=[tool])[:3] == (f"I {CALL}?", "See:", "tool_calls")
            [call] = server.chat(tools=[tool]).json()["choices"][0]["message"]["tool_calls"]
            assert call["function"] == {"name": "clock", "arguments": '{"a": 1}'}
        assert both(server, tools=[tool], separate_reasoning=False)[2] == "tool_calls"
        assert not engine.added[-1].constraint.preamble, "a call in the reasoning is one, and has to match its schema"
        assert both(server, tools=[CLOCK], tool_choice="none")[:3] == (f"I {CALL}?", f"See:\n{CALL}", "stop")

    @pytest.mark.parametrize(
        "fields",
        [
            {"response_format": {"type": "json_object"}},
            {"guided_choice": ["a"]},
            {"tools": [CLOCK], "tool_choice": "required"},
            {"tools": [CLOCK], "response_format": {"type": "json_object"}},
        ],
    )
    @pytest.mark.parametrize(("ending", "begin"), [("", "<think>"), ("<think>\n", "")])
    def test_a_grammar_holds_for_what_follows_it(
        self, server, engine, thinks, ending: str, begin: str, fields: dict[str, Any]
    ) -> None:
        thinks(templates.HERMES + ending, f'{begin}\nSo: {{}}\n</think>\n\n{{"a": 1}}')
        assert both(server, **fields)[:3] == ("So: {}", '{"a": 1}', "stop")
        preamble = engine.added[-1].constraint.preamble
        assert preamble.startswith("start: reasoning") == (not begin), "what the prompt has opened must be closed"
        assert '[lazy]: TEXT "</think>"' in preamble
        thinks(templates.HERMES + ending, '{"a": 1}')
        assert both(server, **fields, separate_reasoning=False)[:2] == (None, '{"a": 1}')
        assert not engine.added[-1].constraint.preamble, "the content is the whole answer"

    def test_tokens_are_counted_with_the_blank_that_a_grammar_keeps(self, server, engine, respond) -> None:
        engine.tokenizer = sentencepiece("\n<think>/m{}", prepends=True)
        engine.script = spelled(engine.tokenizer, "<think>hm</think>{}", eos=False)
        wanted = {"response_format": {"type": "json_object"}}
        assert both(server, **wanted) == ("hm", "{}", "length", len(" <think>hm</think>"))
        body = respond(top_logprobs=1, text={"format": {"type": "json_object"}}).json()
        assert [token["token"] for token in body["output"][1]["content"][0]["logprobs"]] == ["{", "}"]

    def test_a_grammar_without_reasoning_begins_with_the_first_token(self, server, engine, thinks) -> None:
        thinks(templates.HERMES + "<think>\n\n</think>\n\n", '{"a": 1}')
        assert both(server, response_format={"type": "json_object"}) == (None, '{"a": 1}', "stop", None)
        assert not engine.added[-1].constraint.preamble

    @pytest.mark.parametrize(
        ("template", "text", "reasoning", "content"),
        [
            (templates.SMOLLM3, "<think>\nSo", " a", "Hi"),
            (templates.SMOLLM3, "<think>\nSo\n</think>\n\nWell", None, " a\n</think>\n\nHi"),
            (templates.SMOLLM3, "Well", None, " a\n</think>\n\nHi"),
            (templates.QWEN3, "<think>\nSo", " a", "Hi"),
            (templates.QWEN3, "Well", None, " a\n</think>\n\nHi"),
            (templates.R1, "<think>\nSo", " a", "Hi"),
            (templates.R1, "Well", None, " a\n</think>\n\nHi"),
        ],
    )
    def test_an_answer_that_continues_a_message(
        self, server, thinks, template: str, text: str, reasoning: str | None, content: str
    ) -> None:
        thinks(template, " a\n</think>\n\nHi")
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
        assert both(server, messages=messages, continue_final_message=True)[:2] == (reasoning, content)

    def test_turns_that_were_dropped_change_nothing(self, server) -> None:
        turns = [{"role": role, "content": "x" * 1500} for role in ("user", "assistant") * 3]
        turns.append({"role": "user", "content": "</think>"})
        answer = server.chat(messages=turns, context_overflow="drop_oldest")
        assert told(answer) == (THOUGHT, ANSWER, "stop", IN_FRONT)
        assert answer.json()["usage"]["lorasrv"]["dropped_turns"] > 0

    def test_plain_completions_and_tgi_leave_it_in_the_text(self, server) -> None:
        assert server.complete().json()["choices"][0]["text"] == SAID[:16]
        parameters = {"apply_chat_template": True, "max_new_tokens": 99}
        answer = server.http.post("/generate", json={"inputs": "hi", "parameters": parameters})
        assert answer.json()["generated_text"] == SAID


class TestRequests:
    def test_it_may_stay_in_the_text(self, server) -> None:
        assert both(server, separate_reasoning=False) == (None, SAID, "stop", None)
        assert both(server, separate_reasoning=True)[0] == THOUGHT

    @pytest.mark.usefixtures("has_special_markers")
    def test_markers_that_are_special_tokens_stay_in_the_text_too(self, server, engine) -> None:
        assert both(server) == ("hm", "Hi.", "stop", 4)
        assert both(server, separate_reasoning=False) == (None, "[THINK]hm[/THINK]Hi.", "stop", None)
        parameters = {"apply_chat_template": True, "max_new_tokens": 99}
        answer = server.http.post("/generate", json={"inputs": "hi", "parameters": parameters})
        assert answer.json()["generated_text"] == "[THINK]hm[/THINK]Hi."

    @pytest.mark.usefixtures("has_special_markers")
    @pytest.mark.parametrize("separate", [True, False])
    def test_a_strict_tool_leaves_room_for_special_tokens(self, server, engine, separate: bool) -> None:
        tool = {**CLOCK, "function": {**CLOCK["function"], "strict": True}}
        begin, end = (f"<[{engine.tokenizer.token_id(text)}]>" for text in ("[THINK]", "[/THINK]"))
        for ending, has_both in (("{# [THINK] #}", True), ("[THINK]", True), ("[THINK][/THINK]", False)):
            engine.chat_template = ChatTemplate(templates.MISTRAL + ending)
            server.chat(tools=[tool], separate_reasoning=separate).raise_for_status()
            assert [token in engine.added[-1].constraint.full_text for token in (begin, end)] == [has_both] * 2

    def test_it_may_be_left_out_and_is_counted(self, server) -> None:
        assert both(server, include_reasoning=False) == (None, ANSWER, "stop", IN_FRONT)
        assert "reasoning" not in server.chat(include_reasoning=False).json()["choices"][0]["message"]
        assert both(server, include_reasoning=True)[0] == THOUGHT

    def test_no_effort_is_no_reasoning(self, server, engine, thinks) -> None:
        for template in (templates.QWEN3, templates.SMOLLM3):
            thinks(template)
            assert told(server.chat(reasoning_effort="none"))[0] is None
            assert prompt_of(engine).rstrip("Ċ").endswith("</think>")
            assert told(server.chat(reasoning_effort=None))[0] == THOUGHT
        thinks(templates.PLAIN)
        assert server.chat(reasoning_effort="none").status_code == 200

    @pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
    def test_no_effort_sets_every_variable_that_the_template_reads(self, server, engine, thinks, switch: str) -> None:
        thinks(f"{EFFORT}{{% if {switch} is false %}}</think>{{% endif %}}")
        assert told(server.chat(reasoning_effort="none"))[0] is None
        assert prompt_of(engine).endswith("<think>none</think>")
        both_said = {"chat_template_kwargs": {switch: True}, "reasoning_effort": "none"}
        refused(server.chat(**both_said), 400, "reasoning_effort", "chat_template_kwargs")

    def test_no_effort_of_a_template_that_reasons_on_request(self, server, engine, thinks) -> None:
        thinks("{% if thinking %}Use <think>.{% endif %}{{ messages | tojson }}", ANSWER)
        prompts = []
        for fields in ({}, {"reasoning_effort": "none"}):
            assert told(server.chat(**fields))[:2] == (None, ANSWER)
            prompts.append(engine.added[-1].prompt)
        assert prompts[0] == prompts[1]

    def test_other_efforts_are_those_that_the_template_knows(self, server, engine, thinks) -> None:
        for effort in ("low", "medium", "high"):
            refused(server.chat(reasoning_effort=effort), 400, "reasoning_effort", "none", "leave it out")
        refused(server.chat(reasoning_effort="much"), 400, "reasoning_effort")
        both_said = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}
        refused(server.chat(**both_said), 400, "reasoning_effort", "chat_template_kwargs")
        for template in (templates.R1, templates.QWEN3_THINKING):
            thinks(template)
            refused(server.chat(reasoning_effort="none"), 400, "reasoning_effort", "without reasoning")
        thinks(EFFORT)
        server.chat(reasoning_effort="high").raise_for_status()
        assert prompt_of(engine).endswith("<think>high")

    @pytest.mark.parametrize(
        ("path", "fields"),
        [
            ("/v1/responses", {"input": "x", "reasoning_effort": "none"}),
            ("/v1/chat/completions", {"messages": [USER], "reasoning": {"effort": "none"}}),
            ("/tokenize", {"messages": [USER], "reasoning_effort": "none"}),
            ("/", {"inputs": "x", "parameters": {"reasoning_effort": "none"}}),
        ],
    )
    def test_names_of_other_routes_are_refused(self, server, path: str, fields: dict[str, Any]) -> None:
        assert server.http.post(path, json={"model": "tiny-base", **fields}).status_code in (400, 422)
        server.complete(reasoning_effort="none", reasoning={"effort": "none"}).raise_for_status()

    @pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
    def test_either_name_of_a_message_is_read(self, server, engine, thinks, read: str) -> None:
        thinks(templates.QWEN3.replace("message.reasoning_content", f"message.{read}"))
        prompts = []
        for named in (("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")):
            said = {"reasoning": None, "reasoning_content": None} | dict.fromkeys(named, THOUGHT)
            messages = [USER, {"role": "assistant", "content": ANSWER, **said}]
            server.chat(messages=messages, add_generation_prompt=False).raise_for_status()
            prompts.append(prompt_of(engine))
        assert prompts == prompts[:1] * 3
        assert THOUGHT.split()[0] in prompts[0]

    def test_personas(self, server, engine) -> None:
        defaults = {"chat_template_kwargs": {"enable_thinking": True}, "include_reasoning": False}
        server.http.post("/v1/adapters", json={"id": "muse", "defaults": defaults}).raise_for_status()
        assert both(server, model="muse") == (None, ANSWER, "stop", IN_FRONT)
        assert both(server, model="muse", include_reasoning=True)[0] == THOUGHT
        # The request's word wins.
        answer = server.chat(model="muse", reasoning_effort="none")
        assert told(answer)[1] == SAID
        assert answer.json()["usage"]["lorasrv"]["persona"]["applied"] == ["include_reasoning"]


class TestBudget:
    @pytest.mark.parametrize(("template", "is_open"), [(templates.QWEN3, False), (templates.R1, True)])
    @pytest.mark.parametrize("num_tokens", [0, 7, 2**40])
    def test_it_goes_to_the_engine(
        self, server, engine, respond, thinks, template: str, is_open: bool, num_tokens: int
    ) -> None:
        thinks(template)
        for answer in (server.chat(thinking_token_budget=num_tokens), respond(thinking_token_budget=num_tokens)):
            answer.raise_for_status()
            budget = engine.added[-1].constraint
            assert (budget.num_tokens, budget.is_open, budget.grammar) == (num_tokens, is_open, None)
            assert budget.text == engine.added[-1].text

    def test_no_reasoning_and_no_limit_need_none(self, server, engine) -> None:
        closed = {"chat_template_kwargs": {"enable_thinking": False}, "thinking_token_budget": 5}
        for fields in ({"thinking_token_budget": -1}, {"thinking_token_budget": None}, closed):
            server.chat(**fields).raise_for_status()
            assert engine.added[-1].constraint is None

    def test_a_grammar_holds_beside_it(self, server, engine) -> None:
        wanted = {"response_format": {"type": "json_object"}, "thinking_token_budget": 5}
        server.chat(**wanted).raise_for_status()
        assert engine.added[-1].constraint.grammar.preamble
        # The whole content is JSON, and no part of it is reasoning.
        server.chat(**wanted, separate_reasoning=False).raise_for_status()
        assert isinstance(engine.added[-1].constraint, Grammar)

    def test_it_holds_for_reasoning_in_the_text(self, server, engine, thinks) -> None:
        thinks(templates.HERMES + "{# <think> #}")
        tool = {**CLOCK, "function": {**CLOCK["function"], "strict": True}}
        for fields in ({}, {"tools": [tool]}):
            server.chat(**fields, separate_reasoning=False, thinking_token_budget=5).raise_for_status()
            budget = engine.added[-1].constraint
            assert (budget.num_tokens, budget.grammar is None) == (5, not fields)

    def test_bases_that_do_not_reason_refuse_it(self, server, respond, thinks) -> None:
        thinks(templates.PLAIN)
        for ask in (server.chat, respond):
            refused(ask(thinking_token_budget=0), 400, "thinking_token_budget", "does not reason")
            ask(thinking_token_budget=-1).raise_for_status()

    def test_of_a_persona(self, server, engine, thinks) -> None:
        muse = {"id": "muse", "defaults": {"thinking_token_budget": 9}}
        server.http.post("/v1/adapters", json=muse).raise_for_status()
        for fields, num_tokens in (({}, 9), ({"thinking_token_budget": 3}, 3), ({"thinking_token_budget": -1}, None)):
            server.chat(model="muse", **fields).raise_for_status()
            constraint = engine.added[-1].constraint
            assert (None if constraint is None else constraint.num_tokens) == num_tokens
        server.chat(model="muse", use_beam_search=True, best_of=2).raise_for_status()
        assert engine.added[-1].constraint is None, "beams have none"
        engine.chat_template = ChatTemplate(templates.QWEN3, tool_template=CALLS)
        server.chat(model="muse", tools=[CLOCK]).raise_for_status()
        assert engine.added[-1].constraint is None, "with tools, this base does not reason"
        thinks(templates.PLAIN)
        said = server.http.post("/v1/adapters", json={**muse, "id": "ann"}).json()["error"]
        assert "thinking_token_budget" in said["message"]


class TestResponses:
    def test_it_is_an_item_in_front_of_the_message(self, respond) -> None:
        body = respond().raise_for_status().json()
        reasoning, message = body["output"]
        assert reasoning.pop("id").startswith("rs_")
        texts = [{"type": "reasoning_text", "text": THOUGHT}]
        assert reasoning == {"type": "reasoning", "summary": [], "content": texts, "status": "completed"}
        assert message["content"][0]["text"] == ANSWER
        assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": IN_FRONT}
        found = read(respond(stream=True))
        for items in (rebuilt(found), found[-1]["response"]["output"]):
            assert [item["content"] for item in items] == [texts, message["content"]]

    def test_what_is_cut_before_its_end(self, respond) -> None:
        for fields in ({"stream": True}, {}):
            answer = respond(max_output_tokens=20, **fields)
            body = read(answer)[-1]["response"] if fields else answer.json()
            [item] = body["output"]
            assert (body["status"], item["type"], item["status"]) == ("incomplete", "reasoning", "incomplete")
            assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 20}

    def test_calls_follow_it(self, respond, thinks) -> None:
        thinks(templates.HERMES, f"<think>\nHm.\n</think>\n\n{CALL}")
        tool = {"type": "function", "name": "clock", "parameters": {"type": "object"}}
        for items in (respond(tools=[tool]).json()["output"], rebuilt(read(respond(tools=[tool], stream=True)))):
            assert [item["type"] for item in items] == ["reasoning", "function_call"]

    def test_tokens_with_log_probabilities_join_to_the_message(self, respond) -> None:
        whole, stream = respond(top_logprobs=1).json(), read(respond(top_logprobs=1, stream=True))
        for items in (whole["output"], rebuilt(stream)):
            [part] = items[1]["content"]
            assert b"".join(bytes(token["bytes"]) for token in part["logprobs"]).decode() == part["text"] == ANSWER

    def test_what_it_says_can_be_sent_back(self, server, respond, engine, thinks) -> None:
        thinks(templates.HERMES.replace("message.content }}", "(message.reasoning_content or '') + message.content }}"))
        said = respond().json()["output"]
        called = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"}
        returned = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
        user = {"role": "user", "content": "hi"}
        respond([user, *said, user]).raise_for_status()
        in_items = engine.added[-1].prompt
        answered = {"role": "assistant", "content": ANSWER, "reasoning": THOUGHT}
        server.chat(messages=[user, answered, user]).raise_for_status()
        assert in_items == engine.added[-1].prompt
        respond([user, said[0], called, returned]).raise_for_status()
        assert THOUGHT.replace(" ", "Ġ")[:4] in prompt_of(engine)
        respond([user, said[0], user, {"type": "reasoning", "id": "rs_1", "summary": []}]).raise_for_status()

    def test_effort(self, respond, engine, thinks) -> None:
        body = respond(reasoning={"effort": "none"}).raise_for_status().json()
        assert [item["type"] for item in body["output"]] == ["message"]
        assert body["reasoning"] == {"effort": "none"}
        refused(respond(reasoning={"effort": "high"}), 400, "reasoning.effort", "leave it out")
        refused(respond(reasoning={"summary": "auto"}), 400, "reasoning.summary")
        assert respond(separate_reasoning=False).json()["output"][0]["content"][0]["text"] == SAID
        assert [item["type"] for item in respond(include_reasoning=False).json()["output"]] == ["message"]

    def test_openai_python_reads_its_items(self, server) -> None:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=20, max_retries=0) as client:
            answer = client.responses.create(model="tiny-base", input="hi")
            assert (answer.output[0].content[0].text, answer.output_text) == (THOUGHT, ANSWER)
            with client.responses.stream(model="tiny-base", input="hi") as stream:
                texts = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
                assert ("".join(texts), stream.get_final_response().output_text) == (THOUGHT, ANSWER)
            again = client.responses.create(model="tiny-base", input=[*answer.output, {"role": "user", "content": "x"}])
            assert again.output_text == ANSWER
