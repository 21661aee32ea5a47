"""Reasoning: which markers a template has, what a prompt leaves to its answer, and how answers are split."""

import json
from itertools import pairwise
from typing import Any

import pytest
import tool_templates as templates
from compiled_grammars import allows, compiled_grammar, with_tokens
from hypothesis import example, given
from hypothesis import strategies as st
from spelled_engine import tiny_tokenizer

from lorasrv.errors import InvalidRequest
from lorasrv.sampling_params import TextOptions
from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.reasoning import Markers, PromptEnd, ReasoningReader, detect_markers
from lorasrv.text.structured_output.grammar import Grammar, choice_of, grammar_of, json_of, regex_of
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.text.tool_parsers.base import Reasoning, TextReader, ToolCall
from lorasrv.text.tool_parsers.formats import HERMES

THINK = Markers("<think>", "</think>")
TOKENIZER = tiny_tokenizer()
USER = {"role": "user", "content": "What does <think> mean?"}
BIT = st.sampled_from(["<think>", "</think>", "<", "</", "think>", "\n", " ", "a", "<tool_call>", "é"])
PIECES = st.lists(st.lists(BIT, max_size=4).map("".join), max_size=12)


def reader(
    markers: Markers = THINK, *, is_open: bool = False, content: Any = None, tokenizer: Tokenizer = TOKENIZER
) -> ReasoningReader:
    return ReasoningReader(markers, content or TextReader(), Detokenizer(tokenizer), is_open=is_open)


def joined(parts: list[Any]) -> tuple[str, str]:
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return reasoning, "".join(part for part in parts if isinstance(part, str))


def split(text: str, *, is_open: bool) -> tuple[str, str, int]:
    """Of a whole text: its reasoning, its content, and where the tokens of the content begin."""
    if text.lstrip().startswith(THINK.begin):
        rest = text.lstrip().removeprefix(THINK.begin)
    elif is_open:
        rest = text
    else:
        return "", text, 0
    reasoning, _, content = rest.partition(THINK.end)
    content = content.lstrip("\n")
    return reasoning.strip("\n"), content, len(text) - len(content)


@given(pieces=PIECES, is_open=st.booleans())
@example(pieces=["<thi", "nk>\n", "\na\n</thin", "k>", "\n\n", "b <think>c</think>"], is_open=False)
@example(pieces=["\n", "a</thi"], is_open=True)
def test_any_pieces_of_any_text_are_split_as_the_whole(pieces: list[str], is_open: bool) -> None:
    whole = "".join(pieces)
    read = reader(is_open=is_open)
    parts = [part for piece in pieces for part in read.push(piece)] + read.flush()
    assert not {"", Reasoning("")} & set(parts)
    reasoning, content, at = split(whole, is_open=is_open)
    assert joined(parts) == (reasoning, content)
    assert all(isinstance(part, str) <= isinstance(later, str) for part, later in pairwise(parts))
    has_reasoned = is_open or whole.lstrip().startswith(THINK.begin)
    assert read.content_at == (at if content or not has_reasoned else None)


@given(pieces=PIECES, is_open=st.booleans())
def test_what_is_certain_depends_on_the_text_alone(pieces: list[str], is_open: bool) -> None:
    """Another replica reads as one piece what the first one has read in many, and goes on."""
    read, parts, text = reader(is_open=is_open), [], ""
    for piece in pieces:
        parts += read.push(piece)
        text += piece
        assert joined(parts) == joined(reader(is_open=is_open).push(text))


@given(pieces=PIECES, is_open=st.booleans())
def test_tokens_in_front_of_the_content_are_counted(pieces: list[str], is_open: bool) -> None:
    """Of the tiny tokenizer a token is a byte; an output has any number of them, and text that was held back."""
    read, detokenizer, held = reader(is_open=is_open), Detokenizer(TOKENIZER), ""
    for piece in pieces:
        ids = TOKENIZER.encode(piece, add_special_tokens=False)
        text = held + "".join(map(detokenizer.push, ids))
        text, held = text[: len(text) // 2], text[len(text) // 2 :]
        read.count(ids)
        read.push(text)
    read.push(held)
    read.flush()
    whole = "".join(pieces)
    _, content, at = split(whole, is_open=is_open)
    assert read.num_tokens == len(whole[:at].encode()) == len(whole.encode()) - len(content.encode())


TAGGED = Markers("<think>", "</think>", ("<response>", "</response>"))
ANSWERS = {
    "<think>a</think><response>b</response>": ("a", "b"),
    "<think>a</think>\n\n<response>\nb\n\nc\n</response> \n": ("a", "b\n\nc"),
    # Cut, or without reasoning, or with tags that are text.
    "<think>a</think><response>b</respo": ("a", "b</respo"),
    "<think>a</think><respo": ("a", "<respo"),
    "<think>a</think><response>": ("a", ""),
    "<think>a</think>b</response>": ("a", "b</response>"),
    "<think>a</think><response><response>b</response> c</response>": ("a", "<response>b</response> c"),
    "<response>b</response>": ("", "<response>b</response>"),
}


@pytest.mark.parametrize("text", ANSWERS)
def test_tags_around_an_answer_behind_reasoning_are_dropped(text: str) -> None:
    """Granite 3.3 writes them. What is certain depends on the text alone."""
    for size in (1, 5, len(text)):
        read, parts = reader(TAGGED), list[Any]()
        for at in range(0, len(text), size):
            parts += read.push(text[at : at + size])
            assert joined(parts) == joined(reader(TAGGED).push(text[: at + size]))
        assert joined(parts + read.flush()) == ANSWERS[text]
        assert not {"", Reasoning("")} & set(parts)


def test_calls_behind_reasoning_are_read_and_those_within_are_not() -> None:
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    read = reader(content=HERMES.reader(frozenset({"clock"}), True))
    parts = [part for char in f"<think>\nTo call {call}?\n</think>\n\nSee: {call}" for part in read.push(char)]
    parts += read.flush()
    assert joined(parts) == (f"To call {call}?", "See:")
    assert [part for part in parts if isinstance(part, ToolCall)] == [ToolCall("clock", "{}")]


# Templates ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("template", "markers"),
    [
        (templates.QWEN3, THINK),
        (templates.QWEN3_THINKING, THINK),
        (templates.SMOLLM3, THINK),
        (templates.R1, THINK),
        (templates.MAGISTRAL, Markers("[THINK]", "[/THINK]")),
        ("Think between <think></think>, and write your response between <response></response>.", TAGGED),
        ("<response>{{ messages }}</response>", None),
        (templates.QWEN3 + "<response>{{ messages }}</response>", THINK),
        (templates.LLAMA, None),
        (templates.MISTRAL, None),
        (templates.PLAIN, None),
    ],
)
def test_markers_are_those_that_the_template_writes(template: str, markers: Markers | None) -> None:
    assert detect_markers(template) == markers


@pytest.mark.parametrize(
    ("template", "variables", "end"),
    [
        (templates.QWEN3, {}, PromptEnd.FREE),
        (templates.QWEN3, {"enable_thinking": True}, PromptEnd.FREE),
        (templates.QWEN3, {"enable_thinking": False}, PromptEnd.CLOSED),
        (templates.QWEN3_THINKING, {}, PromptEnd.OPEN),
        (templates.SMOLLM3, {}, PromptEnd.FREE),
        (templates.SMOLLM3, {"enable_thinking": False}, PromptEnd.CLOSED),
        (templates.R1, {}, PromptEnd.OPEN),
    ],
)
def test_a_prompt_leaves_to_its_answer_what_its_template_has_not_written(
    template: str, variables: dict[str, Any], end: PromptEnd
) -> None:
    earlier = [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA mark."}, USER]
    for messages in ([USER], earlier):
        prompt = ChatTemplate(template).encode(messages, TOKENIZER, **variables)
        assert THINK.end_of_prompt(prompt, TOKENIZER) is end


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("", PromptEnd.CLOSED),
        ("Well,", PromptEnd.CLOSED),
        ("<think>\nWell,", PromptEnd.OPEN),
        ("<think>\nWell,\n</think>\n\nIt", PromptEnd.CLOSED),
        ("Well,\n</think>\n\nIt", PromptEnd.CLOSED),
        ("\n<think>", PromptEnd.OPEN),
        ("<think>\nHow is <think> written?", PromptEnd.OPEN),
        ("Write `<think>`", PromptEnd.CLOSED),
        ("<think>\nWell,\n</think>\n\nWrite `<think>`", PromptEnd.CLOSED),
    ],
)
def test_a_message_that_is_continued_is_within_its_reasoning_or_behind(text: str, end: PromptEnd) -> None:
    assert THINK.end_of_message(text) is end


def test_markers_that_are_special_tokens_are_shown() -> None:
    assert THINK.shown(TOKENIZER) == frozenset()
    turn = Markers("<s>", "<turn>")
    shown = turn.shown(TOKENIZER)
    assert shown == {TOKENIZER.token_id("<s>"), TOKENIZER.token_id("<turn>")}
    ids = [TOKENIZER.token_id("<s>"), *TOKENIZER.encode("a", add_special_tokens=False), TOKENIZER.token_id("<turn>")]
    detokenizer = Detokenizer(TOKENIZER, TextOptions(shown_token_ids=shown))
    read = ReasoningReader(turn, TextReader(), Detokenizer(TOKENIZER, detokenizer.options), is_open=False)
    read.count(ids)
    assert joined(read.push("".join(map(detokenizer.push, ids)))) == ("a", "")
    assert read.num_tokens == 3


def parts_of(*parts: dict[str, Any]) -> Grammar:
    return grammar_of(json.dumps({"grammars": parts}), "p")


X = {"name": "b", "lark_grammar": 'start: "x"'}
GRAMMARS = {
    "json": (json_of({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, "p"), '{"a": 1}'),
    "regex": (regex_of("[<a-z>]+", "p"), "yes"),
    "choice": (choice_of(["yes", "yes, sir"], "p"), "yes, sir"),
    "lark": (grammar_of('start: "x" y+\n%ignore / /\ny: "y"', "p"), "x y y"),
    "parts": (parts_of({"name": None, "lark_grammar": "start: @b"}, X), "x"),
    "named parts": (parts_of({"name": "in", "lark_grammar": 'start: @b | "(" @in ")"'}, X), "((x))"),
    "a name with a blank": (parts_of({"name": "my own", "lark_grammar": "start: @b"}, X), "x"),
}


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("is_special", [None, False, True])
async def test_an_answer_is_reasoning_and_what_a_grammar_allows(
    builtin_tokenizer: Tokenizer, name: str, is_open: bool, is_special: bool | None
) -> None:
    """Markers are text, tokens of their own, or special tokens."""
    grammar, answer = GRAMMARS[name]
    tokenizer = builtin_tokenizer
    if is_special is not None:
        tokenizer = with_tokens(tokenizer, THINK.begin, THINK.end, special=is_special)
    whole = THINK.in_front_of(grammar, tokenizer, is_open=is_open)
    compiled = await compiled_grammar(tokenizer, whole)

    def is_allowed(text: str) -> bool:
        # A reader takes a marker that is spelled for one that is a token.
        [allowed] = {allows(compiled, spelling, text) for spelling in (tokenizer, builtin_tokenizer)}
        return allowed

    for reasoning in (
        f"<think>\nSo: {answer} <tool_call>\n</think>\n\n",
        "<think></think>",
        "\n\x1c<think>é</think>\n",
    ):
        assert is_allowed(reasoning + answer)
        assert not is_allowed(reasoning), "the answer is missing"
        assert not is_allowed(reasoning + "No!")
        assert not is_allowed(reasoning + answer + "</think>")
        assert is_allowed(reasoning.lstrip().removeprefix("<think>") + answer) == is_open
    assert is_allowed(answer) != is_open
    assert not is_allowed("<think>" + answer)


@pytest.mark.parametrize("text", ['{"grammars": []}', '{"grammars": [5]}'])
async def test_a_malformed_grammar_is_refused_before_reasoning_precedes_it(
    builtin_tokenizer: Tokenizer, text: str
) -> None:
    grammar = THINK.in_front_of(grammar_of(text, "p"), builtin_tokenizer, is_open=False)
    with pytest.raises(InvalidRequest, match="p cannot be used"):
        await compiled_grammar(builtin_tokenizer, grammar)
