"""Split answers into reasoning and content, by the markers in the base's chat template.

Qwen 3, SmolLM3 and models distilled from DeepSeek-R1 begin an answer with `<think>…</think>`, Mistral's with
`[THINK]…[/THINK]`. A template may write the opening marker at the end of the prompt, so the model writes the
rest of the reasoning, or both markers, so the model writes no reasoning. Granite 3.3's asks for an answer between
`<response>` and `</response>` behind the reasoning; these tags are dropped.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from lorasrv.sampling_params import EVERY_TOKEN
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.structured_output.grammar import ANSWER, Grammar
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.text.tool_parsers.base import Part, Reasoning, ToolReader, possible_beginning
from lorasrv.text.tool_parsers.formats import WHITE, lark_up_to, special

_TAIL_TOKENS = 64
"""Number of tokens at the end of a prompt that contain its last marker, in any tokenization."""


class PromptEnd(Enum):
    """Say how the answer to a prompt may begin."""

    # The answer may begin with reasoning.
    FREE = auto()
    # The answer begins inside the reasoning.
    OPEN = auto()
    # The answer begins after the reasoning.
    CLOSED = auto()


@dataclass(frozen=True, slots=True)
class Markers:
    """Hold the texts that begin and end reasoning."""

    begin: str
    end: str
    # The tags around an answer behind reasoning.
    tags: tuple[str, str] | None = None

    def shown(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the markers that are special tokens. A reader must see them, but they have no text by default."""
        return special((self.begin, self.end), tokenizer)

    def in_front_of(self, grammar: Grammar, tokenizer: Tokenizer, *, is_open: bool) -> Grammar:
        """Return the grammar of an answer that may have reasoning in front of what `grammar` allows.

        Args:
            is_open: whether the prompt has begun the reasoning. Then the answer must end it.
        """
        start = f"reasoning BREAKS? {ANSWER}"
        rules = (
            f"start: {start}" if is_open else f"start: {ANSWER} | {start}",
            f"reasoning: opening{'?' if is_open else ''} thought",
            *lark_up_to("opening", "BLANK", tokenizer, self.begin),
            *lark_up_to("thought", "TEXT", tokenizer, self.end),
            f"BLANK: /{WHITE}{{0,2}}/",
            r"BREAKS: /\n{1,2}/",
            r"TEXT: /(.|\n)*/",
        )
        return replace(grammar, preamble="\n".join(rules), begins_freely=is_open or grammar.begins_freely)

    def with_markers(self, grammar: Grammar, tokenizer: Tokenizer) -> Grammar:
        """Return the grammar of an answer that may have markers anywhere in its text, if `grammar` leaves text free."""
        # Markers that are text need no rule.
        tokens = " | ".join(f"<[{token}]>" for token in sorted(self.shown(tokenizer)))
        if not tokens or not grammar.begins_freely:
            return grammar
        return replace(grammar, preamble=f"start: {ANSWER} (marker {ANSWER})*\nmarker: {tokens}")

    def end_of_prompt(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> PromptEnd:
        """Return how the answer may begin, by the marker at the end of the prompt."""
        detokenizer = Detokenizer(tokenizer, EVERY_TOKEN)
        tail = "".join(map(detokenizer.push, token_ids[-_TAIL_TOKENS:])).rstrip()
        if tail.endswith(self.begin):
            return PromptEnd.OPEN
        return PromptEnd.CLOSED if tail.endswith(self.end) else PromptEnd.FREE

    def end_of_message(self, text: str) -> PromptEnd:
        """Return how the continuation of a message begins: inside its reasoning, or else in its content."""
        is_open = text.lstrip().startswith(self.begin) and self.end not in text
        return PromptEnd.OPEN if is_open else PromptEnd.CLOSED


_KNOWN = (Markers("<think>", "</think>"), Markers("[THINK]", "[/THINK]"))
_TAGS = "<response>", "</response>"
REASONING_SWITCHES = frozenset({"enable_thinking", "thinking"})
"""Variables that turn reasoning off in chat templates if they are false; `thinking` is DeepSeek's and Granite's."""


def detect_markers(template: str) -> Markers | None:
    """Return the markers in a chat template; None if there are none, because the model does not reason."""
    found = next((known for known in _KNOWN if known.begin in template or known.end in template), None)
    return replace(found, tags=_TAGS) if found is not None and "".join(_TAGS) in template else found


REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names under which chat templates read the reasoning of an earlier message."""
_THOUGHT = "Th1nk"
REASONING_EXAMPLE: Sequence[Mapping[str, Any]] = (
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": "!"}]},
)
"""A conversation that shows whether a template takes reasoning as a part of the content, as Mistral's do."""


def reads_parts(template: str, written: str) -> bool:
    """Return whether a template has written the reasoning of `REASONING_EXAMPLE` between its markers."""
    markers = detect_markers(template)
    return markers is not None and f"{markers.begin}{_THOUGHT}{markers.end}" in written


def in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its reasoning as a part of its content, where alone templates then write it."""
    if not (reasoning := message.get("reasoning_content")):
        return message
    parts = [{"type": "thinking", "thinking": reasoning}, {"type": "text", "text": message.get("content") or ""}]
    others = {name: value for name, value in message.items() if name not in REASONING_NAMES}
    return {**others, "content": parts}


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Configure how reasoning is read from the answers to one request."""

    markers: Markers
    # Whether the prompt has begun the reasoning.
    is_open: bool
    # Whether the response includes the reasoning.
    is_shown: bool
    # Creates a detokenizer that decodes tokens as the answer's text was decoded.
    detokenizer: Callable[[], Detokenizer]

    def reader(self, content: ToolReader) -> "ReasoningReader":
        """Return a reader of one answer; `content` reads the text after the reasoning."""
        return ReasoningReader(self.markers, content, self.detokenizer(), is_open=self.is_open)


class ReasoningReader:
    """Return the reasoning of one answer as it streams, and pass the rest to a reader of content.

    Reasoning begins at the start of the answer if the prompt has begun it, or with an opening marker after white space
    at most. It ends at the next closing marker or with the answer. Line breaks next to the markers, and tags around the
    answer behind the reasoning, are dropped.

    The parts returned so far depend only on the text so far, not on how it was split into pieces.
    """

    def __init__(self, markers: Markers, content: ToolReader, detokenizer: Detokenizer, *, is_open: bool) -> None:
        self._markers, self._content, self._is_open = markers, content, is_open
        # Number of characters before the content; None until the reasoning ends.
        self.content_at = None if is_open else 0
        # Text not yet returned, and the method that reads it; None: the content's reader does.
        self._held = ""
        self._read: Callable[[], list[Part]] | None = self._begin
        self._num_chars = 0
        # For counting tokens: the position of each token in the text, and the length of the decoded text.
        self._detokenizer = detokenizer
        self._starts, self._num_decoded = list[int](), 0

    @property
    def num_tokens(self) -> int:
        """Return how many of the counted tokens begin before the content, including tokens of the markers."""
        return len(self._starts) if self.content_at is None else bisect_left(self._starts, self.content_at)

    def count(self, token_ids: Sequence[int]) -> None:
        """Count tokens of the answer, before their text is pushed."""
        if self._read is None:
            return
        for token in token_ids:
            self._starts.append(self._num_decoded + self._detokenizer.num_owed(token))
            self._num_decoded += len(self._detokenizer.push(token))

    def push(self, text: str) -> list[Part]:
        """Add text of the answer and return the parts that are now certain."""
        if self._read is None:
            return self._content.push(text)
        self._num_chars += len(text)
        self._held += text
        parts, read = list[Part](), None
        while self._read is not None and read != self._read:
            read = self._read
            parts += read()
        return parts

    def flush(self) -> list[Part]:
        """Return the remaining parts after the end of the answer."""
        if self._read is None:
            return self._content.flush()
        if self.content_at is not None or (self._held and self._read == self._skip_last_breaks):
            return [*self._begin_content(), *self._content.flush()]
        text = self._held.strip("\n") if self._read == self._begin else self._held.rstrip("\n")
        return [Reasoning(text)] if text else []

    def _begin(self) -> list[Part]:
        """Find whether the answer begins with reasoning."""
        begun, marker = self._held.lstrip(), self._markers.begin
        if begun.startswith(marker):
            self.content_at, self._held, self._read = None, begun.removeprefix(marker), self._skip_breaks
        elif not marker.startswith(begun):
            if not self._is_open:
                return self._begin_content()
            self._read = self._skip_breaks
        return []

    def _skip_breaks(self) -> list[Part]:
        """Drop line breaks after the opening marker."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._read = self._reason
        return []

    def _reason(self) -> list[Part]:
        """Return reasoning, except text that may be the beginning of its end."""
        before, marker, behind = self._held.partition(self._markers.end)
        if marker:
            text, self._held, self._read = before.rstrip("\n"), behind, self._skip_last_breaks
        else:
            text = before[: len(before) - possible_beginning(before, self._markers.end)].rstrip("\n")
            self._held = before[len(text) :]
        return [Reasoning(text)] if text else []

    def _skip_last_breaks(self) -> list[Part]:
        """Drop line breaks after the closing marker, and the tag that begins the answer."""
        self._held = self._held.lstrip("\n")
        if self._markers.tags is not None:
            begin, end = self._markers.tags
            if begin != self._held and begin.startswith(self._held):
                return []
            if self._held.startswith(begin):
                self._held, self._content = self._held.removeprefix(begin), _UntaggedReader(self._content, end)
                return self._begin_content()
        return self._begin_content() if self._held else []

    def _begin_content(self) -> list[Part]:
        text, self._held, self._read = self._held, "", None
        self.content_at = self._num_chars - len(text)
        return self._content.push(text)


class _UntaggedReader:
    """Drop the tag that ends an answer and line breaks within the tags, and pass the rest to a reader of content."""

    def __init__(self, content: ToolReader, tag: str) -> None:
        self._content, self._tag, self._held = content, tag, ""
        self._has_begun = False

    def push(self, text: str) -> list[Part]:
        """Add text of the answer and return the parts that are now certain."""
        self._held += text
        if not self._has_begun:
            self._held = self._held.lstrip("\n")
            self._has_begun = bool(self._held)
        before, tag, behind = self._held.rpartition(self._tag)
        if not tag or behind.strip():
            before = self._held[: len(self._held) - possible_beginning(self._held, self._tag)]
        certain = before.rstrip("\n")
        self._held = self._held[len(certain) :]
        return self._content.push(certain)

    def flush(self) -> list[Part]:
        """Return the remaining parts after the end of the answer."""
        _, tag, behind = self._held.rpartition(self._tag)
        rest = self._held if not tag or behind.strip() else ""
        return [*self._content.push(rest), *self._content.flush()]
