"""Which way of writing tool calls a chat template teaches, told by the markers that it writes itself."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lorasrv.grammars.source import Grammar, checked_schema, lark_of
from lorasrv.tokenizer import Tokenizer
from lorasrv.tools.calls import Tool, ToolReader
from lorasrv.tools.tagged import CLOSE, OPEN, TaggedReader
from lorasrv.tools.trailing import LLAMA_MARKER, MISTRAL_MARKER, LlamaReader, MistralReader


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing calls.

    `marker` begins a call; where it is a special token, it is shown to the reader. `around` a call's JSON stands
    before and after it, `between` calls; None: there is one call at most. `list_of`: brackets around all calls.
    `id_chars`: how long ids of calls are, in templates that check it; 0: any.
    """

    name: str
    marker: str
    reader: Callable[[frozenset[str], bool], ToolReader]
    arguments: str
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
        rules.append("call: " + " | ".join(f"tool_{number}" for number in range(len(tools))))
        before, after = self.around
        for number, tool in enumerate(tools):
            head = f'{before}{{"name": {json.dumps(tool.name)}, "{self.arguments}": '
            schema = json.dumps(checked_schema(tool.parameters, "tools"))
            rules.append(f"tool_{number}: {_quoted(head)} arguments_{number} {_quoted('}' + after)}")
            rules.append(f"arguments_{number}: %json {schema}")
        return lark_of("\n".join(rules), "tools")

    def _forced_marker(self, tokenizer: Tokenizer) -> str:
        if not self.forces_marker:
            return ""
        shown = self.shown(tokenizer)
        return f"<[{next(iter(shown))}]>" if shown else _quoted(self.marker)


HERMES = ToolFormat("hermes", OPEN, TaggedReader, "arguments", around=(f"{OPEN}\n", f"\n{CLOSE}"), between="\n")
MISTRAL = ToolFormat(
    "mistral",
    MISTRAL_MARKER,
    MistralReader,
    "arguments",
    between=", ",
    list_of=("[", "]"),
    forces_marker=True,
    id_chars=9,
)
LLAMA = ToolFormat("llama", LLAMA_MARKER, LlamaReader, "parameters")


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
