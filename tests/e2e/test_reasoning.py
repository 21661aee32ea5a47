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


@pytest.mark.parametrize("base", ["", "<think>\n"], indirect=True, ids=["the model opens it", "the prompt opens it"])
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
