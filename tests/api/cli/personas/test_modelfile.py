"""Ollama Modelfiles: instructions, quotes, and parameters with another name here."""

import pytest

from api.cli.common.terminal import CliError
from api.cli.personas.modelfile import read_modelfile

MARIO = '''# a comment
FROM smollm2:135m
PARAMETER temperature 1
parameter top_k 40
PARAMETER repeat_penalty 1.1
PARAMETER num_predict -1
PARAMETER num_ctx 4096
PARAMETER stop "User:"
PARAMETER stop </s>
SYSTEM """
You are Mario.
You say "mamma mia".
"""
MESSAGE user Who are you?
MESSAGE assistant """It's-a me.
Mario!"""
TEMPLATE """{{ .Prompt }}"""
ADAPTER ./mario
LICENSE "MIT"
'''


@pytest.mark.parametrize("text", [MARIO, MARIO.replace("\n", "\r\n"), MARIO.rstrip()])
def test_a_whole_file(text: str) -> None:
    found = read_modelfile(text)
    assert found.defaults == {
        "temperature": 1.0,
        "top_k": 40,
        "repetition_penalty": 1.1,
        "stop": ["User:", "</s>"],
        "system": 'You are Mario.\nYou say "mamma mia".',
        "examples": [
            [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "It's-a me.\nMario!"}]
        ],
    }
    assert [notice.partition(";")[0].partition(":")[0] for notice in found.notices] == [
        "left out", "left out", "ADAPTER ./mario", "left out",
    ]  # fmt: skip
    assert "left out: PARAMETER num_ctx" in found.notices


@pytest.mark.parametrize(
    ("base", "served", "fits"),
    [
        ("smollm2:135m", "smollm2-135m", True),
        ("SmolLM2-135M", "smollm2-135m", True),
        ("hf.co/x/SmolLM2-135M-GGUF", "smollm2-135m", True),
        ("smollm2:135m-instruct", "smollm2-135m", False),
        ("llama3.2", "smollm2-135m", False),
    ],
)
def test_the_base_is_compared_by_name(base: str, served: str, fits: bool) -> None:
    assert read_modelfile(f"FROM {base}").is_for(served) == fits


def test_messages_of_the_system_follow_its_prompt() -> None:
    found = read_modelfile("FROM x\nSYSTEM One.\nMESSAGE system Two.\n")
    assert found.defaults == {"system": "One.\n\nTwo."}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no FROM"),
        ("SYSTEM x", "no FROM"),
        ("FROM x\nPARAMETER temperature warm", "'warm' is not a number"),
        ("FROM x\nPARAMETER seed 1.5", "is not a number"),
        ("FROM x\nPARAMETER top_p nan", "is not a number"),
        ("FROM x\nJUMP high", "JUMP is not an instruction"),
        ("FROM x\nwhat?", "is not a line"),
        ('FROM x\nSYSTEM """open', "not closed"),
        ("FROM x\nMESSAGE tool x", "expected system, user or assistant"),
    ],
)
def test_what_is_no_modelfile(text: str, says: str) -> None:
    with pytest.raises(CliError, match=says):
        read_modelfile(text)
