"""Reasoning before structured output, by a real base whose template asks for it, in a real server process."""

import json
from pathlib import Path
from typing import Any

import pytest
from answers import events
from served import serve

from lorasrv.models.loader import open_checkpoint
from lorasrv.models.loader.locate import builtin_file

pytestmark = pytest.mark.long

TEMPLATE = (
    "{%for m in messages%}{{'<|im_start|>'+m.role+'\n'+m.content+'<|im_end|>\n'}}{%endfor%}"
    "{%if add_generation_prompt%}{{'<|im_start|>assistant\nBEGIN'}}{%endif%}{#<think>#}"
)
BEGIN, END = ["<", "think", ">"], ["</", "think", ">"]
"""The tokens of the markers, which are text."""
SUMS = ((2, 3), (1, 7), (4, 4))
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}


@pytest.fixture
def base(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The built-in base with another template, padded to the length of its own."""
    checkpoint = open_checkpoint("smollm2-135m")
    template = checkpoint.tokenizer_source().chat_template
    checkpoint.close()
    assert template is not None
    own, given = (text.encode() for text in (template, TEMPLATE.replace("BEGIN", request.param)))
    path, content = tmp_path / "base.gguf", builtin_file().read_bytes()
    assert content.count(own) == 1
    path.write_bytes(content.replace(own, given + b"{#" + b"-" * (len(own) - len(given) - 4) + b"#}"))
    return path


def conversation() -> list[dict[str, str]]:
    """Sums, answered in the form of a model that reasons; the base imitates it."""
    turns = []
    for a, b in SUMS:
        answer = f'<think>\nThe user asks for a sum. {a} and {b} is {a + b}.\n</think>\n\n{{"answer": {a + b}}}'
        turns += [{"role": "user", "content": f"How much is {a} and {b}?"}, {"role": "assistant", "content": answer}]
    return [*turns, {"role": "user", "content": "How much is 2 and 6?"}]


opened = pytest.mark.parametrize(
    "base", ["", "<think>\n"], indirect=True, ids=["the model opens it", "the prompt opens it"]
)


@opened
def test_reasoning_is_free_and_the_content_is_json(base: Path) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    body = {"model": "base", "messages": conversation(), "temperature": 0, "max_tokens": 120, "response_format": wanted}
    with serve("--model", base) as server:

        def choice_of(**fields: Any) -> Any:
            answer = server.post("/v1/chat/completions", **body, **fields)
            return answer.raise_for_status().json()["choices"][0]

        whole = choice_of()
        reasoning, content = whole["message"]["reasoning"], whole["message"]["content"]
        assert reasoning.startswith("The user asks for a sum.")
        assert list(json.loads(content)) == ["answer"]
        assert whole["finish_reason"] == "stop"
        chunks = events(server.post("/v1/chat/completions", **body, stream=True))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == reasoning
        assert "".join(delta.get("content", "") for delta in deltas) == content
        cut = choice_of(stop=[" user"])
        assert cut["message"]["reasoning"] == "The"
        assert not cut["message"]["content"]
        together = choice_of(separate_reasoning=False)["message"]
        assert "reasoning" not in together
        assert list(json.loads(together["content"])) == ["answer"]


@opened
def test_a_budget_ends_the_reasoning_after_its_tokens(base: Path) -> None:
    """With drafts and without, with a grammar and without, whole and streamed."""
    wanted = {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}}
    body = {"model": "base", "messages": conversation(), "temperature": 0, "max_tokens": 60}
    with serve("--model", base) as server:

        def answer(**fields: Any) -> Any:
            return server.post("/v1/chat/completions", **body, **fields).raise_for_status().json()

        for form in ({}, wanted):
            free = answer(logprobs=True, **form)
            said = [token["token"] for token in free["choices"][0]["logprobs"]["content"]]
            begun = len(BEGIN) if "".join(said).startswith("<think>") else 0
            for budget in (0, 7):
                asked = {**form, "thinking_token_budget": budget}
                whole = answer(logprobs=True, **asked)
                choice, counted = whole["choices"][0], whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
                tokens = [token["token"] for token in choice["logprobs"]["content"]]
                front, rest = tokens[: begun + budget], tokens[begun + budget :]
                assert front == said[: begun + budget]
                assert rest[: len(END)] == END
                assert counted - len(front) - len(END) in (0, 1, 2), "line breaks"
                if form:
                    assert list(json.loads(choice["message"]["content"])) == ["answer"]
                plain = answer(**asked, speculation=False)
                assert plain["choices"][0]["message"] == choice["message"]
                assert plain["usage"]["completion_tokens"] == len(tokens)
                chunks = events(server.post("/v1/chat/completions", **body, **asked, stream=True))
                deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
                assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]
            assert answer(**form, thinking_token_budget=1000)["choices"][0]["message"] == free["choices"][0]["message"]
        least = {"min_tokens": 60, "ignore_eos": True, "n": 2, "thinking_token_budget": 3}
        several = answer(**least, seed=5)
        assert several["usage"]["completion_tokens"] == 120
        assert all(choice["message"]["content"] for choice in several["choices"])
