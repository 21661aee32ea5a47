"""Detect the tool-call format of a chat template, by its markers and by how it writes calls."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lorasrv.text.structured_output.grammar import Grammar, checked_schema, lark_of
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.text.tool_parsers.base import Tool, ToolCall, ToolReader
from lorasrv.text.tool_parsers.parsers import (
    ARGS,
    CALL_ID,
    CLOSE,
    GRANITE_MARKER,
    LLAMA_MARKER,
    MISTRAL_MARKER,
    OPEN,
    GraniteReader,
    LlamaReader,
    MistralNamesReader,
    MistralReader,
    TaggedReader,
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Describe one format of tool calls."""

    name: str
    # Begins a call.
    marker: str
    reader: Callable[[frozenset[str], bool], ToolReader]
    # Key of the arguments in a call's JSON.
    arguments: str
    # Lark rule of an answer in which calls are optional: the beginning of a call (`head`, or `first` at the
    # beginning of the answer) must be followed by a whole call.
    unforced: str
    # Text before and after a call's JSON.
    around: tuple[str, str] = ("", "")
    # Text between calls; None: at most one call.
    between: str | None = None
    # What stands between a call's name and its arguments, where a call is not one object of JSON: the beginning of an
    # id, "" if calls have none, and that of the arguments.
    between_parts: tuple[str, str] | None = None
    # Brackets around the list of calls.
    list_of: tuple[str, str] = ("", "")
    forces_marker: bool = False
    # Another text that models begin calls with where they choose to call.
    other_marker: str = ""
    # Length of call ids in templates that check it; 0: any.
    id_chars: int = 0
    # Whether the template takes messages with more than one call. If not, an answer may have only one.
    takes_several: bool = True

    @property
    def marks_calls(self) -> bool:
        """Return whether every call begins with the marker, so that no answer in JSON can be taken for one."""
        return self.forces_marker or bool(self.around[0])

    def shown(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the special tokens that the reader must see, which are not written as text by default: the marker and
        what ends a call."""
        return special((self.marker, self.other_marker, self.around[1].strip(), *(self.between_parts or ())), tokenizer)

    def grammar(self, tools: Sequence[Tool], parallel: bool, tokenizer: Tokenizer) -> Grammar:
        """Build the grammar of one or more calls of these tools and nothing else, with arguments that match their
        schemas.

        Raises:
            InvalidRequest: a schema is malformed or too large.
        """
        return lark_of("\n".join(["start: calls", *self._only_calls(tools, parallel, tokenizer)]), "tools")

    def grammar_beside(self, answer: Grammar, tools: Sequence[Tool], parallel: bool, tokenizer: Tokenizer) -> Grammar:
        """Build the grammar of either `answer`, which is that of JSON, or calls of these tools, which are marked.

        Arguments of strict tools match their schemas, arguments of others may be any object.

        Raises:
            InvalidRequest: a schema is malformed or too large.
        """
        rules = ["start: answer | calls", f"answer: %json {json.dumps(answer.schema)}"]
        calls = self._only_calls(_unforced(tools), parallel, tokenizer)
        return lark_of("\n".join([*rules, *calls]), answer.param)

    def unforced_grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer) -> Grammar:
        """Build the grammar of any text with optional calls of these tools.

        Arguments of strict tools match their schemas, arguments of others may be any object.

        Raises:
            InvalidRequest: a schema is malformed or too large.
        """
        rules = [
            f"start: {self.unforced}",
            f"marker: {_term(self.marker, tokenizer)}",
            *lark_up_to("head", "TEXT", tokenizer, self.marker, self.other_marker),
            *lark_up_to("marked", "BLANK", tokenizer, self.marker),
            "first: BLANK | marked",
            r"TEXT: /(.|\n)*/",
            f"BLANK: /{WHITE}*/",
            rf"PLAIN: /{WHITE}*([^\s\x1c-\x1f{{](.|\n)*)?/ & ~/{WHITE}*{re.escape(self.marker)}(.|\n)*/",
        ]
        calls = self._calls(_unforced(tools), self.around[0].removeprefix(self.marker), tokenizer)
        return replace(lark_of("\n".join([*rules, *calls]), "tools"), begins_freely=True)

    def in_content(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its calls in its content, as a model writes them, without ids."""
        if not (calls := message.get("tool_calls")):
            return message
        functions = [call["function"] for call in calls]
        begin, end = self.list_of
        written = (self.between or "\n").join(self._written(each["name"], each["arguments"]) for each in functions)
        text = (self.marker if self.forces_marker else "") + begin + written + end
        others = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**others, "content": f"{message['content']}\n{text}" if message.get("content") else text}

    def reads_example(self, text: str) -> bool:
        """Return whether a text contains the call of `call_example(1)` in this format."""
        begins = [found.start() for found in re.finditer(rf"\{{|{re.escape(self.marker)}", text)]
        for begin in reversed(begins):
            reader = self.reader(frozenset({_CALL.name}), False)
            if [*reader.push(text[begin:]), *reader.flush()][:1] == [_CALL]:
                return True
        return False

    def _written(self, name: str, arguments: Any) -> str:
        text = json.dumps(arguments, ensure_ascii=False)
        if self.between_parts is not None:
            return f"{name}{self.between_parts[1]}{text}"
        return f"{self.around[0]}{self._head(name)}{text}}}{self.around[1]}"

    def _head(self, name: str) -> str:
        """Return what precedes the arguments in a call's JSON."""
        return f'{{"name": {_quoted(name)}, "{self.arguments}": '

    def _only_calls(self, tools: Sequence[Tool], parallel: bool, tokenizer: Tokenizer) -> Iterator[str]:
        """Yield the rule `calls`, one or more calls and nothing else, and the rules it uses."""
        many = f" ({_term(self.between, tokenizer)} call)*" if parallel and self.between is not None else ""
        begin, end = (_quoted(bracket) if bracket else "" for bracket in self.list_of)
        marker = _term(self.marker, tokenizer) if self.forces_marker else ""
        yield f"calls: {marker} {begin} call{many} {end}"
        yield from self._calls(tools, self.around[0], tokenizer)

    def _calls(self, tools: Sequence[Tool], before: str, tokenizer: Tokenizer) -> Iterator[str]:
        """Yield the rule `call` and the rules it uses."""
        yield "call: " + " | ".join(f"tool_{number}" for number in range(len(tools)))
        for number, tool in enumerate(tools):
            schema = json.dumps(checked_schema(tool.parameters, "tools"))
            if self.between_parts is None:
                head = _quoted(before + self._head(tool.name))
                yield f"tool_{number}: {head} arguments_{number} {_quoted('}' + self.around[1])}"
            else:
                call_id, begin = self.between_parts
                of_id = f"{_term(call_id, tokenizer)} /[a-zA-Z0-9]{{{self.id_chars}}}/ " if call_id else ""
                head = f"{_quoted(tool.name)} {of_id}{_term(begin, tokenizer)}"
                yield f"tool_{number}: {head} arguments_{number}"
            yield f"arguments_{number}: %json {schema}"


WHITE = r"[\s\x1c-\x1f]"
"""The white space that Python's `strip` removes, as a regular expression."""
HERMES = ToolFormat(
    "hermes",
    OPEN,
    TaggedReader,
    "arguments",
    "(head call)* TEXT",
    around=(f"{OPEN}\n", f"\n{CLOSE}"),
    between="\n",
)
MISTRAL = ToolFormat(
    "mistral",
    MISTRAL_MARKER,
    MistralReader,
    "arguments",
    'TEXT | head " "? "[" call (", " call)* "]"',
    between=", ",
    list_of=("[", "]"),
    forces_marker=True,
    id_chars=9,
)
MISTRAL_13 = ToolFormat(
    "mistral-13",
    MISTRAL_MARKER,
    MistralNamesReader,
    "arguments",
    "TEXT | head call (marker call)*",
    between=MISTRAL_MARKER,
    between_parts=("", ARGS),
    forces_marker=True,
    id_chars=9,
)
MISTRAL_11 = replace(MISTRAL_13, name="mistral-11", between_parts=(CALL_ID, ARGS))
GRANITE = replace(MISTRAL, name="granite", marker=GRANITE_MARKER, other_marker=OPEN, reader=GraniteReader, id_chars=0)
LLAMA = ToolFormat("llama", LLAMA_MARKER, LlamaReader, "parameters", "PLAIN | first call")

_VALUES = "Ex4mple", "Sec0nd"
_CALL = ToolCall("example", json.dumps({"of": _VALUES[0]}))
_OF = {"type": "object", "properties": {"of": {"type": "string", "description": "What."}}, "required": ["of"]}
EXAMPLE_TOOL = {"type": "function", "function": {"name": _CALL.name, "description": "Try.", "parameters": _OF}}


def call_example(num_calls: int) -> list[dict[str, Any]]:
    """Return a conversation that shows how a template writes one or two calls of `EXAMPLE_TOOL`."""
    calls = [
        {"id": f"a1B2c3D4{number}", "type": "function", "function": {"name": _CALL.name, "arguments": {"of": value}}}
        for number, value in enumerate(_VALUES[:num_calls])
    ]
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]


def with_text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose calls have their arguments as JSON text."""
    if not (calls := message.get("tool_calls")):
        return message
    functions = [call["function"] for call in calls]
    texts = [{**each, "arguments": json.dumps(each["arguments"], ensure_ascii=False)} for each in functions]
    return {**message, "tool_calls": [{**call, "function": text} for call, text in zip(calls, texts, strict=True)]}


@dataclass(frozen=True, slots=True)
class CallsTaken:
    """Say how a template takes the calls of earlier answers."""

    # The template leaves them out.
    left_out: bool
    # The template needs the arguments as JSON text, not as an object.
    as_text: bool
    # The template takes several in one message.
    several: bool


def find_calls_taken(
    form: ToolFormat | None, render: Callable[[Sequence[Mapping[str, Any]]], str | None]
) -> CallsTaken | None:
    """Find out by examples how a template takes calls; None: it refuses them, or does not write them in the format.

    Args:
        form: the format by the template's markers. The template may still write calls in another one: Qwen3-Coder's and
            others put XML, not JSON, between Hermes' tags.
        render: returns what the template writes for a conversation; None if the template refuses it.
    """
    for as_text in (False, True):
        one, two = (
            render([with_text_arguments(message) if as_text else message for message in call_example(num_calls)])
            for num_calls in (1, 2)
        )
        left_out = one is not None and _VALUES[0] not in one
        if one is not None and (left_out or (form is not None and form.reads_example(one))):
            return CallsTaken(left_out, as_text, left_out or (two is not None and _VALUES[1] in two))
    return None


def marked_format(template: str) -> ToolFormat | None:
    """Return the format that the markers in a template's source tell; None: unknown."""
    if OPEN in template:
        return HERMES
    if MISTRAL_MARKER in template:
        with_names = MISTRAL_11 if CALL_ID in template else MISTRAL_13
        return with_names if ARGS in template else MISTRAL
    if GRANITE_MARKER in template:
        return GRANITE
    if '"parameters": ' in template and ("python_tag" in template or "ipython" in template):
        return LLAMA
    return None


def special(texts: Sequence[str], tokenizer: Tokenizer) -> frozenset[int]:
    """Return the texts that are special tokens, as ids. By default, special tokens have no text."""
    tokens = (tokenizer.token_id(text) for text in texts if text)
    return frozenset(token for token in tokens if token is not None and token in tokenizer.special_ids)


def _unforced(tools: Sequence[Tool]) -> list[Tool]:
    """Return the tools with the schemas that are enforced where the model decides whether to call them."""
    return [tool if tool.is_strict else Tool(tool.name, {"type": "object"}) for tool in tools]


def _term(text: str, tokenizer: Tokenizer) -> str:
    """Return the text as a term of Lark: the token, if it is a special one, which no text spells."""
    shown = special((text,), tokenizer)
    return f"<[{next(iter(shown))}]>" if shown else _quoted(text)


def lark_up_to(name: str, before: str, tokenizer: Tokenizer, *markers: str) -> Iterator[str]:
    """Yield the Lark rules of the text `before` a marker and the marker, as a special token or spelled by text. A
    marker that is spelled ends the text at once, as for a reader. Empty markers are left out.
    """
    tokens = "".join(f" | {before} <[{token}]>" for token in sorted(special(markers, tokenizer)))
    yield f"{name}: {name}_spelled{tokens}"
    yield f"{name}_spelled[lazy]: " + " | ".join(f"{before} {_quoted(marker)}" for marker in markers if marker)


def _quoted(text: str) -> str:
    """Return the text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)
