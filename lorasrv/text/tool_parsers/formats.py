"""Which way of writing tool calls a chat template teaches, told by the markers that it writes itself."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lorasrv.text.structured_output.grammar import Grammar, checked_schema, lark_of
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.text.tool_parsers.base import Tool, ToolReader
from lorasrv.text.tool_parsers.parsers import (
    CLOSE,
    LLAMA_MARKER,
    MISTRAL_MARKER,
    OPEN,
    LlamaReader,
    MistralReader,
    TaggedReader,
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls.

    `marker` begins a call; where it is a special token, it is shown to the reader. `around` a call's JSON stands
    before and after it, `between` calls; None: there is one call at most. `list_of`: brackets around all calls.
    `unforced` is the Lark rule of an answer in which the model may call tools, or not: where the reader would see the
    beginning of a call (`head`, or `first` at the answer's beginning), a whole call follows.
    `id_chars`: how long ids of calls are, in templates that check it; 0: any.
    """

    name: str
    marker: str
    reader: Callable[[frozenset[str], bool], ToolReader]
    arguments: str
    unforced: str
    around: tuple[str, str] = ("", "")
    between: str | None = None
    list_of: tuple[str, str] = ("", "")
    forces_marker: bool = False
    id_chars: int = 0

    def shown(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The marker's token, if it is one that is not written as text otherwise."""
        token = tokenizer.token_id(self.marker)
        return frozenset({token} if token is not None and token in tokenizer.special_ids else ())

    def grammar(self, tools: Sequence[Tool], parallel: bool, tokenizer: Tokenizer) -> Grammar:
        """Nothing but a call, or some, of these tools, with arguments of their schemas.

        Raises:
            InvalidRequest: a schema is malformed or too large.
        """
        many = f" ({_quoted(self.between)} call)*" if parallel and self.between is not None else ""
        begin, end = (_quoted(bracket) if bracket else "" for bracket in self.list_of)
        rules = [f"start: {self._forced_marker(tokenizer)} {begin} call{many} {end}"]
        return lark_of("\n".join([*rules, *self._calls(tools, self.around[0])]), "tools")

    def unforced_grammar(self, tools: Sequence[Tool], tokenizer: Tokenizer) -> Grammar:
        """Any text, and calls of these tools: of those that are strict with arguments of their schemas, of others with
        any object.

        Raises:
            InvalidRequest: a schema is malformed or too large.
        """
        shown = "".join(f" | TEXT <[{token}]>" for token in self.shown(tokenizer))
        shown_first = shown.replace("TEXT", "BLANK")
        rules = [
            f"start: {self.unforced}",
            f"head: written{shown}",
            f"written[lazy]: TEXT {_quoted(self.marker)}",
            f"first: BLANK | BLANK {_quoted(self.marker)}{shown_first}",
            r"TEXT: /(.|\n)*/",
            # What Python's `strip` takes away.
            r"BLANK: /[\s\x1c-\x1f]*/",
            r"PLAIN: /[\s\x1c-\x1f]*([^\s\x1c-\x1f{](.|\n)*)?/ & ~/[\s\x1c-\x1f]*"
            + re.escape(self.marker)
            + r"(.|\n)*/",
        ]
        kept = [tool if tool.is_strict else Tool(tool.name, {"type": "object"}) for tool in tools]
        return lark_of("\n".join([*rules, *self._calls(kept, self.around[0].removeprefix(self.marker))]), "tools")

    def _calls(self, tools: Sequence[Tool], before: str) -> Iterator[str]:
        """The rule `call`, and what it needs."""
        yield "call: " + " | ".join(f"tool_{number}" for number in range(len(tools)))
        for number, tool in enumerate(tools):
            head = f'{before}{{"name": {json.dumps(tool.name)}, "{self.arguments}": '
            schema = json.dumps(checked_schema(tool.parameters, "tools"))
            yield f"tool_{number}: {_quoted(head)} arguments_{number} {_quoted('}' + self.around[1])}"
            yield f"arguments_{number}: %json {schema}"

    def _forced_marker(self, tokenizer: Tokenizer) -> str:
        if not self.forces_marker:
            return ""
        shown = self.shown(tokenizer)
        return f"<[{next(iter(shown))}]>" if shown else _quoted(self.marker)


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
LLAMA = ToolFormat("llama", LLAMA_MARKER, LlamaReader, "parameters", "PLAIN | first call")


def detect_format(template: str) -> ToolFormat | None:
    """The format of a template that has a place for tools; None: it writes calls in a way that is not known here."""
    if OPEN in template:
        # Qwen3-Coder and others put XML, not JSON, between the same tags.
        return None if "<function=" in template or "<arg_key>" in template else HERMES
    if MISTRAL_MARKER in template:
        return None if "[ARGS]" in template or "[CALL_ID]" in template else MISTRAL
    if '"parameters": ' in template and ("python_tag" in template or "ipython" in template):
        return LLAMA
    return None


def _quoted(text: str) -> str:
    """As a string of Lark."""
    return json.dumps(text, ensure_ascii=False)
