"""Tool calls: which format a template has, how answers are read whatever pieces they come in, and forced calls."""

import re
import time
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import tool_templates as templates
from compiled_grammars import allows, compiled_grammar, with_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from lorasrv.errors import InvalidRequest
from lorasrv.sampling_params import TextOptions
from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.reasoning import Markers
from lorasrv.text.structured_output.compiler import GrammarCompiler
from lorasrv.text.structured_output.grammar import json_of
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.text.tool_parsers.base import Tool, ToolCall
from lorasrv.text.tool_parsers.formats import (
    GRANITE,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_11,
    MISTRAL_13,
    ToolFormat,
    call_example,
)
from lorasrv.text.tool_parsers.parsers import OPEN

NAMES = frozenset({"get_weather", "clock"})
PARIS = ToolCall("get_weather", '{"city": "Paris"}')
CLOCK = ToolCall("clock", "{}")


def read(form: ToolFormat, pieces: list[str], parallel: bool = True, *, has_ended: bool = True) -> list[Any]:
    """The parts, neighbouring text joined."""
    reader = form.reader(NAMES, parallel)
    parts: list[Any] = []
    for part in [part for piece in pieces for part in reader.push(piece)] + (reader.flush() if has_ended else []):
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        else:
            parts.append(part)
    return parts


def _hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


P, C = '{"name": "get_weather", "arguments": {"city": "Paris"}}', '{"name": "clock", "arguments": {}}'
PL = P.replace("arguments", "parameters")
TAG = r'{"name": "clock", "arguments": {"a": "x</tool_call>\"</tool_call>"}}'
DEEP = "[" * 64 + "]" * 64
NAMED = '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}'
NAN = '{"name": "clock", "arguments": NaN}'
ANSWERS = [
    (HERMES, "Hello  there \n", ["Hello  there \n"]),
    (HERMES, _hermes(P), [PARIS]),
    (HERMES, f"Let me see.\n{_hermes(P)}\n{_hermes(C)}\n", ["Let me see.", PARIS, CLOCK]),
    (HERMES, f"<tool_call>{P}", [PARIS]),
    (HERMES, "a <tool_call> is not <tool", ["a <tool_call> is not <tool"]),
    (HERMES, _hermes('{"name": "other", "arguments": {}}'), [_hermes('{"name": "other", "arguments": {}}')]),
    (HERMES, _hermes(NAN) + " x", [_hermes(NAN) + " x"]),
    (HERMES, f"{_hermes('{bad')} {_hermes(C)}", [_hermes("{bad"), CLOCK]),
    (HERMES, f"{_hermes(P)} and text", [PARIS, " and text"]),
    # The closing tag in an argument, with quotes around it, and in what is no JSON.
    (HERMES, f"{_hermes(TAG)}\n{_hermes(C)}", [ToolCall("clock", r'{"a": "x</tool_call>\"</tool_call>"}'), CLOCK]),
    (HERMES, _hermes('{bad: "') + _hermes(C), [_hermes('{bad: "'), CLOCK]),
    (HERMES, _hermes('{"name": "x') + " and", [_hermes('{"name": "x') + " and"]),
    (HERMES, _hermes('{"name": "clock", "arguments": "{}"}'), [CLOCK]),
    (HERMES, _hermes('{"name": ["clock"], "arguments": {}}'), [_hermes('{"name": ["clock"], "arguments": {}}')]),
    (LLAMA, '{"name": {"a": 1}, "parameters": {}}', ['{"name": {"a": 1}, "parameters": {}}']),
    (LLAMA, '{"name": "clock", "parameters": {"a": NaN}}', ['{"name": "clock", "parameters": {"a": NaN}}']),
    # Half an emoji is no text, and what a later request could not repeat makes no call.
    (HERMES, _hermes(C.replace("{}", r'{"a": "\ud83d"}')), [ToolCall("clock", '{"a": "\ufffd"}')]),
    (HERMES, _hermes(C.replace("{}", f'{{"a": {DEEP}}}')), [_hermes(C.replace("{}", f'{{"a": {DEEP}}}'))]),
    (HERMES, _hermes(C.replace("{}", r'{"a": "\ud83d\ude00"}')), [ToolCall("clock", '{"a": "😀"}')]),
    (HERMES, _hermes(C.replace("{}", '{"a": 1e999}')), [_hermes(C.replace("{}", '{"a": 1e999}'))]),
    (HERMES, "", []),
    (LLAMA, "Just { text", ["Just { text"]),
    (LLAMA, PL, [PARIS]),
    (LLAMA, f"<|python_tag|>{PL}; {PL}", [PARIS, PARIS]),
    (LLAMA, '{"name": "get_weather"} is JSON', ['{"name": "get_weather"} is JSON']),
    (LLAMA, "<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    (LLAMA, "  ", ["  "]),
    (LLAMA, "<|pyt", ["<|pyt"]),
    (LLAMA, '{"name": "clock", "parameters": NaN}', ['{"name": "clock", "parameters": NaN}']),
    (MISTRAL, f"[TOOL_CALLS] [{P}, {C}]", [PARIS, CLOCK]),
    (MISTRAL, f"Well.\n[TOOL_CALLS][{P}]\n", ["Well.", PARIS]),
    (MISTRAL, "[TOOL_CALLS] {bad", ["[TOOL_CALLS] {bad"]),
    (MISTRAL, "text [TOOL_CAL", ["text [TOOL_CAL"]),
    (MISTRAL, f"[TOOL_CALLS][1, {P}]", [f"[TOOL_CALLS][1, {P}]"]),
    (MISTRAL, "[TOOL_CALLS] []", ["[TOOL_CALLS] []"]),
    (GRANITE, f"Well. <|tool_call|>[{P}, {C}]", ["Well.", PARIS, CLOCK]),
    (GRANITE, f"Well. <tool_call>[{P}, {C}]", ["Well.", PARIS, CLOCK]),
    (GRANITE, f"[TOOL_CALLS][{P}]", [f"[TOOL_CALLS][{P}]"]),
    (GRANITE, f"<|tool_call|>[{P}, {C}]<|/tool_call|>", [PARIS, CLOCK]),
    (MISTRAL, f"[TOOL_CALLS][{P}] and text", [PARIS, " and text"]),
    (
        MISTRAL_13,
        'See.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]clock[ARGS] {}\n',
        ["See.", PARIS, CLOCK],
    ),
    (MISTRAL_11, '[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{"city": "Paris"}', [PARIS]),
    (MISTRAL_13, "[TOOL_CALLS]other[ARGS]{}", ["[TOOL_CALLS]other[ARGS]{}"]),
    (MISTRAL_13, "[TOOL_CALLS]clock[ARGS]{} and text", [CLOCK, " and text"]),
    # Cut behind a whole call, which stays one.
    (MISTRAL, f"[TOOL_CALLS][{P}", [PARIS]),
    (MISTRAL, f"[TOOL_CALLS] [{P}, {C[:-1]}", [PARIS, f", {C[:-1]}"]),
    (MISTRAL_13, f"[TOOL_CALLS]clock[ARGS]{{}}\n{NAMED[:-1]}", [CLOCK, f"\n{NAMED[:-1]}"]),
    (MISTRAL_13, "[TOOL_CALLS]clock[ARGS]{}[TOOL_CAL", [CLOCK, "[TOOL_CAL"]),
    (LLAMA, f"{PL}; {PL[:-1]}", [PARIS, f" {PL[:-1]}"]),
    (LLAMA, f" <|python_tag|>{PL};", [PARIS]),
    (LLAMA, f"{PL} and text", [PARIS, " and text"]),
    (
        MISTRAL_13,
        '[TOOL_CALLS]clock[ARGS]{"a": "[TOOL_CALLS]x[ARGS]"}',
        [ToolCall("clock", '{"a": "[TOOL_CALLS]x[ARGS]"}')],
    ),
    (MISTRAL_13, "[TOOL_CALLS]clock", ["[TOOL_CALLS]clock"]),
    (MISTRAL_13, "[TOOL_CALLS]clock[ARGS]{bad", ["[TOOL_CALLS]clock[ARGS]{bad"]),
]


def call_of(form: ToolFormat, name: str, arguments: str) -> str:
    """A call, without what is around it."""
    if form.between_parts is None:
        return f'{{"name": "{name}", "{form.arguments}": {arguments}}}'
    begin, args = form.between_parts
    return f"{name}{begin and begin + 'a1B2c3D4e'}{args}{arguments}"


@pytest.mark.parametrize(("form", "text", "parts"), ANSWERS)
def test_answers_are_read(form: ToolFormat, text: str, parts: list[Any]) -> None:
    assert read(form, [text]) == parts
    assert read(form, list(text)) == parts


@settings(max_examples=200, deadline=None)
@given(case=st.sampled_from(ANSWERS), data=st.data())
def test_pieces_make_no_difference(case: tuple[ToolFormat, str, list[Any]], data: st.DataObject) -> None:
    form, text, parts = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, pieces) == parts
    for end in cuts:
        piece_by_piece = read(form, [text[at : at + 1] for at in range(end)], has_ended=False)
        assert read(form, [text[:end]], has_ended=False) == piece_by_piece, "what goes on with it has said the same"


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", *'{}x \n[<"\\'])),
    form=st.sampled_from([HERMES, LLAMA, MISTRAL, MISTRAL_13, GRANITE]),
)
def test_what_is_no_call_stays_text(words: list[str], form: ToolFormat) -> None:
    assert "".join(read(form, words)) == "".join(words)


def test_a_long_answer_of_closing_tags_is_looked_through_once() -> None:
    """In the event loop, again with each token: 2000 of them took it 40 s."""
    begun_s = time.process_time()
    text = '{"name": "clock", "arguments": {"x": "' + "</tool_call>" * 4000 + '"}}'
    [call] = read(HERMES, ["<tool_call>", *re.split("(?<=>)", text), "</tool_call>"])
    assert call == ToolCall("clock", f'{{"x": "{"</tool_call>" * 4000}"}}')
    assert time.process_time() - begun_s < 10


def test_a_long_answer_of_calls_that_seem_to_stand_in_strings_is_looked_through_once() -> None:
    """At its end, again for each of them: 128,000 characters took the event loop 18 s."""
    begun_s = time.process_time()
    text = '<tool_call>"</tool_call> "' * 10_000
    assert read(HERMES, [text]) == [text]
    assert time.process_time() - begun_s < 10


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, f"{_hermes(P)}\n{_hermes(C)} tail"),
        (LLAMA, f"{PL}; {PL}"),
        (MISTRAL, f"[TOOL_CALLS] [{P}, {C}]"),
        (MISTRAL_13, '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]clock[ARGS]{}'),
        (MISTRAL_13, f"{NAMED}{NAMED[:-1]}"),
        (MISTRAL, f"[TOOL_CALLS] [{P}, {C[:-1]}"),
        (LLAMA, f"{PL}; {PL[:-1]}"),
    ],
)
def test_without_parallel_calls_there_is_one(form: ToolFormat, text: str) -> None:
    assert read(form, [text], parallel=False) == [PARIS]
    assert read(form, list(text), parallel=False) == [PARIS]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (templates.HERMES, HERMES),
        (templates.HERMES_TEXT, HERMES),
        (templates.LLAMA, replace(LLAMA, takes_several=False)),
        (templates.LLAMA.replace("length != 1", "length < 1"), replace(LLAMA, takes_several=False)),
        (templates.MISTRAL, MISTRAL),
        (templates.XML, None),
        (templates.MISTRAL_NAMES, MISTRAL_13),
        (templates.MISTRAL_IDS, MISTRAL_11),
        (templates.GRANITE, GRANITE),
        (templates.LISTS, None),
        (templates.HERMES + "{{ raise_exception('no calls') if messages[1].tool_calls }}", None),
        (templates.PLAIN, None),
    ],
)
def test_the_template_tells_the_format(builtin_source: Any, template: str, form: ToolFormat | None) -> None:
    assert ChatTemplate(template).tool_format == form
    assert ("tools" in ChatTemplate(template).variables) == (template != templates.PLAIN)
    built_in = ChatTemplate.from_source(builtin_source)
    assert built_in is not None
    assert "tools" not in built_in.variables


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL, MISTRAL_13, MISTRAL_11, GRANITE], ids=lambda form: form.name)
def test_calls_in_content_are_as_a_model_writes_them(form: ToolFormat) -> None:
    user, assistant = call_example(1)
    assert form.in_content(user) is user
    calls = [{"function": {"name": "clock", "arguments": arguments}} for arguments in ({}, {"a": "é"})]
    written = form.in_content({**assistant, "content": "See.", "tool_calls": calls})
    assert written.keys() == {"role", "content"}
    told = read(form, [written["content"].removeprefix("See.\n")])
    assert told == [CLOCK, ToolCall("clock", '{"a": "é"}')]


@pytest.mark.parametrize("template", [templates.HERMES_TEXT, templates.HERMES_TEXT.replace(" + '}", " ~ '}")])
def test_arguments_are_text_for_a_template_that_needs_it(template: str) -> None:
    """With an object, the one cannot be rendered, and the other writes a dict of Python."""
    function = {"name": "clock", "arguments": {"zone": "é <b>", "at": [1, None, True]}}
    chat = [*call_example(2), {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]
    ours, expected = (ChatTemplate(each).render(chat, tools=[templates.CLOCK]) for each in (template, templates.HERMES))
    assert ours == expected


def test_special_tokens_around_calls_are_shown(builtin_tokenizer: Tokenizer) -> None:
    first = builtin_tokenizer.vocab_size
    tokenizer = with_tokens(builtin_tokenizer, "<tool_call>", "</tool_call>", special=True)
    assert HERMES.shown(tokenizer) == {first, first + 1}
    said = f"{_hermes(P)}\n{_hermes(C)}"
    written = Detokenizer(tokenizer, TextOptions(shown_token_ids=HERMES.shown(tokenizer)))
    pieces = [*map(written.push, tokenizer.encode(said, add_special_tokens=False)), written.flush()]
    assert read(HERMES, pieces) == [PARIS, CLOCK]


async def test_a_strict_tool_may_be_called_behind_a_special_token_of_an_adapter(builtin_tokenizer: Tokenizer) -> None:
    tokenizer = with_tokens(builtin_tokenizer, "<tool_call>", special=True)
    grammar = HERMES.unforced_grammar([Tool("clock", {"type": "object"}, is_strict=True)], tokenizer)
    compiler = GrammarCompiler(builtin_tokenizer, builtin_tokenizer.vocab_size, builtin_tokenizer.eos_token_ids)
    async with aclosing(compiler):
        state = (await compiler.compile(grammar, own=tokenizer)).begin()
        with pytest.raises(InvalidRequest, match="tools cannot be used"):
            await compiler.compile(grammar)
    right, wrong = (tokenizer.encode_behind(f'So <tool_call>\n{{"name": "{name}", ') for name in ("clock", "watch"))
    tag = builtin_tokenizer.vocab_size
    assert tag in right
    assert state.num_allowed(right) == len(right)
    assert right.index(tag) < state.num_allowed(wrong) < len(wrong)


def test_variables_are_the_templates_own() -> None:
    hermes, llama = ChatTemplate(templates.HERMES), ChatTemplate(templates.LLAMA, {"bos_token": "<s>"})
    assert hermes.checked_variables({"enable_thinking": False}) == {"enable_thinking": False}
    assert llama.checked_variables({"date_string": "today", "enable_thinking": True})
    refused: list[dict[str, Any]] = [{"tokenize": True}, {"chat_template": "x"}, {"bos_token": "x"}, {"tools": "x"}]
    refused += [{"messages": "x"}, {"raise_exception": 1}, {"date_string": ["x"]}, {"unknown": 1}, {"tokenizer": "x"}]
    for given_ in refused:
        with pytest.raises(InvalidRequest, match=next(iter(given_))) as caught:
            llama.checked_variables(given_)
        assert caught.value.param == "chat_template_kwargs"


def long(*values: object) -> Any:
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


@pytest.mark.parametrize(
    "form", [HERMES, MISTRAL_13, *long(LLAMA, MISTRAL, MISTRAL_11, GRANITE)], ids=lambda form: form.name
)
@pytest.mark.parametrize("parallel", [True, *long(False)])
async def test_forced_calls_are_read_back(form: ToolFormat, parallel: bool, builtin_tokenizer: Tokenizer) -> None:
    """What the grammar allows is what the reader reads: tokens are chosen by chance, and two calls are tried."""
    function = templates.WEATHER["function"]
    tools = [Tool("get_weather", function["parameters"]), Tool("clock", {"type": "object", "properties": {}})]  # type: ignore[index]
    grammar = form.grammar(tools, parallel, builtin_tokenizer)
    call = call_of(form, "get_weather", '{"city": "Köln"}')
    before, after = form.around
    call = before + call + after
    two = form.list_of[0] + (form.between or "; ").join([call, call]) + form.list_of[1]
    one = form.list_of[0] + call + form.list_of[1]
    if form.forces_marker:
        one, two = form.marker + one, form.marker + two
    expected = [ToolCall("get_weather", '{"city": "Köln"}')]
    compiled = await compiled_grammar(builtin_tokenizer, grammar)
    with pytest.raises(InvalidRequest) as caught:
        await compiled_grammar(builtin_tokenizer, form.grammar([Tool("x", {"type": "strin"})], True, builtin_tokenizer))
    assert caught.value.param == "tools"
    assert allows(compiled, builtin_tokenizer, one)
    assert not allows(compiled, builtin_tokenizer, one.replace("Köln", "Rome"))
    assert not allows(compiled, builtin_tokenizer, one.replace("get_weather", "get_time"))
    assert allows(compiled, builtin_tokenizer, two) == (parallel and form.between is not None)
    assert read(form, [one]) == expected
    assert read(form, [two]) == expected * 2


SPECIAL = replace(HERMES, marker="<|im_start|>", around=("<|im_start|>\n", "\n</tool_call>"))


# Markers and what is between the parts of a call as tokens that no text spells.
NAMES_AFTER_TOKENS = replace(
    MISTRAL_11, marker="<|im_start|>", between="<|im_start|>", between_parts=("<jupyter_code>", "<jupyter_output>")
)
FREE = [HERMES, LLAMA, MISTRAL, SPECIAL, MISTRAL_13, NAMES_AFTER_TOKENS, GRANITE]


@pytest.mark.parametrize("form", FREE, ids=["hermes", "llama", "mistral", "special", "mistral-13", "tokens", "granite"])
async def test_calls_of_strict_tools_follow_their_schema_where_text_is_free(
    form: ToolFormat, builtin_tokenizer: Tokenizer
) -> None:
    parameters: dict[str, Any] = templates.WEATHER["function"]["parameters"]  # type: ignore[index]
    tools = [Tool("get_weather", parameters, is_strict=True), Tool("clock", {"type": "strin"})]

    def written(name: str, arguments: str) -> str:
        call = call_of(form, name, arguments)
        marker = form.marker if form.forces_marker else ""
        return marker + form.list_of[0] + form.around[0] + call + form.around[1] + form.list_of[1]

    good, other = written("get_weather", '{"city": "Köln"}'), written("clock", '{"any": [1]}')
    bad = [
        *(written("get_weather", arguments) for arguments in ('{"city": "Rome"}', "{}", '{"city": "Köln", "x": 1}')),
        *(good.replace("get_weather", "nobody"), good[: -len("}}")]),
    ]
    texts = ["", "no call", " \n", "a {b} <tool [TOOL <", "한국 😀", good, other]

    compiled = await compiled_grammar(builtin_tokenizer, form.unforced_grammar(tools, builtin_tokenizer))
    if form is LLAMA:
        texts += [f" {good}", f"<|python_tag|>{good}", f"text {bad[0]}", f"text <|python_tag|>{bad[0]}"]
        bad += [f"{blank}{marker}{bad[0]}" for blank in ("", " ", "\n\x1c\x85") for marker in ("", "<|python_tag|>")]
    else:
        texts += [f"Hm.\n{good}"]
        bad += [f"Hm. {text}" for text in bad]
    if form in (MISTRAL_13, NAMES_AFTER_TOKENS):
        texts += [f"Well.{good}{other}"]
        bad += [f"{good}{bad[0]}"]
    if form in (HERMES, SPECIAL):
        texts += [f"{good}\n{other} and {good} so"]
        bad += [f"{good} and {bad[0]}"]
    if form is GRANITE:
        texts, bad = ([*given, *(text.replace(form.marker, OPEN) for text in given)] for given in (texts, bad))
    assert [text for text in texts if not allows(compiled, builtin_tokenizer, text)] == []
    assert [text for text in bad if allows(compiled, builtin_tokenizer, text)] == []


@pytest.mark.parametrize("form", [HERMES, MISTRAL, MISTRAL_13, LLAMA], ids=lambda form: form.name)
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("is_special", [False, True])
async def test_reasoning_precedes_text_and_strict_calls(
    form: ToolFormat, is_open: bool, is_special: bool, builtin_tokenizer: Tokenizer
) -> None:
    """What looks like a call in the reasoning is none; what follows the reasoning is text or a whole call. Calls are
    read everywhere if the reasoning is part of the text."""
    tokenizer = with_tokens(builtin_tokenizer, "[THINK]", "[/THINK]", special=True) if is_special else builtin_tokenizer
    tools = [Tool("clock", {"type": "object"}, is_strict=True)]
    markers, grammar = Markers("[THINK]", "[/THINK]"), form.unforced_grammar(tools, tokenizer)
    compiled = await compiled_grammar(tokenizer, markers.in_front_of(grammar, tokenizer, is_open=is_open))
    before, after = form.list_of[0] + form.around[0], form.around[1] + form.list_of[1]
    good = (form.marker if form.forces_marker else "") + before + call_of(form, "clock", "{}") + after
    bad, reasoning = good.replace("clock", "nobody"), f"\n[THINK]Hm {form.marker}.[/THINK]"
    assert [rest for rest in ("Noon.", good, "\n\nNoon.") if not allows(compiled, tokenizer, reasoning + rest)] == []
    assert [rest for rest in ("[THINK]Hm.", reasoning + bad) if allows(compiled, tokenizer, rest)] == []
    assert [allows(compiled, tokenizer, rest) for rest in ("Noon.", good, bad)] == [not is_open, not is_open, False]
    if is_open:
        assert allows(compiled, tokenizer, f"Hm {form.marker}.[/THINK]{good}")
    if is_special:
        for text in ("No.[THINK]Hm.[/THINK]Noon.", "[THINK]a[/THINK]b[/THINK]"):
            assert not allows(compiled, tokenizer, text), "no text has these tokens"
    together, thought = await compiled_grammar(tokenizer, markers.with_markers(grammar, tokenizer)), "Hm.[/THINK]"
    for text in (thought, f"[THINK]{thought}Noon.", f"{thought}{good}"):
        assert allows(together, tokenizer, text)
    assert allows(together, tokenizer, f"[THINK]Hm.{bad}[/THINK]Noon.") == (form is LLAMA), "its calls begin answers"


@pytest.mark.parametrize("form", [HERMES, MISTRAL, MISTRAL_13], ids=["hermes", "mistral", "mistral-13"])
@pytest.mark.parametrize("parallel", [True, False])
async def test_an_answer_is_json_by_a_schema_or_calls(
    form: ToolFormat, parallel: bool, builtin_tokenizer: Tokenizer
) -> None:
    parameters: dict[str, Any] = templates.WEATHER["function"]["parameters"]  # type: ignore[index]
    tools = [Tool("get_weather", parameters, is_strict=True), Tool("clock", {"type": "object", "required": ["zone"]})]
    schema = {"type": "object", "properties": {"sky": {"enum": ["blue"]}}, "required": ["sky"]}

    def written(*calls: str) -> str:
        inside = (form.between or "").join(form.around[0] + call + form.around[1] for call in calls)
        return (form.marker if form.forces_marker else "") + form.list_of[0] + inside + form.list_of[1]

    good, other = (
        call_of(form, name, arguments)
        for name, arguments in (("get_weather", '{"city": "Köln"}'), ("clock", '{"any": [1]}'))
    )
    grammar = form.grammar_beside(json_of(schema, "response_format"), tools, parallel, builtin_tokenizer)
    compiled = await compiled_grammar(builtin_tokenizer, grammar)
    texts = ['{"sky": "blue"}', written(good), written(other)]
    bad = ["", "It is blue.", "{}", '{"sky": "red"}', '{"sky": "blue"} ' + written(good), "So: " + written(good)]
    bad += [written(good.replace("Köln", "Rome")), written(other.replace("clock", "nobody")), written(good)[:-1]]
    (texts if parallel and form.between is not None else bad).append(written(good, other))
    assert [text for text in texts if not allows(compiled, builtin_tokenizer, text)] == []
    assert [text for text in bad if allows(compiled, builtin_tokenizer, text)] == []
    names = [part.name for text in texts for part in read(form, [text]) if isinstance(part, ToolCall)]
    assert names[:2] == ["get_weather", "clock"]
    assert grammar.param == "response_format"
