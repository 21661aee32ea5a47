"""Split answers into reasoning and content, by the markers that the chat template of their base writes.

Qwen 3, SmolLM3 and the models distilled from DeepSeek-R1 begin an answer with `<think>…</think>`, Mistral's with
`[THINK]…[/THINK]`. A template may open the reasoning itself, at the end of the prompt, or close it at once: the model
then writes the rest of it, or none.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from lorasrv.sampling_params import EVERY_TOKEN
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.tokenizer import Tokenizer
from lorasrv.text.tool_parsers.base import Part, Reasoning, ToolReader, possible_beginning
from lorasrv.text.tool_parsers.formats import ReasoningTokens, special

_TAIL_TOKENS = 64
"""So many tokens at the end of a prompt hold the last marker that its template writes, however it is spelled."""


class PromptEnd(Enum):
    """Say what a prompt leaves to its answer."""

    # The answer may begin with reasoning.
    FREE = auto()
    # The answer begins within it.
    OPEN = auto()
    # The answer begins behind it.
    CLOSED = auto()


@dataclass(frozen=True, slots=True)
class Markers:
    """Hold what begins reasoning, and what ends it."""

    begin: str
    end: str

    def shown(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the special tokens that a reader must see, which are not written as text by default."""
        return special((self.begin, self.end), tokenizer)

    def special_tokens(self, tokenizer: Tokenizer, *, is_open: bool) -> ReasoningTokens | None:
        """Return the tokens that a grammar must name; None if the markers are text.

        Args:
            is_open: whether the prompt has begun the reasoning.
        """
        begin, end = tokenizer.token_id(self.begin), tokenizer.token_id(self.end)
        if begin is None or end is None or not {begin, end} <= tokenizer.special_ids:
            return None
        return ReasoningTokens(begin, end, is_open)

    def end_of_prompt(self, token_ids: Sequence[int], tokenizer: Tokenizer) -> PromptEnd:
        """Return what a prompt leaves to its answer, by the marker that it ends with."""
        detokenizer = Detokenizer(tokenizer, EVERY_TOKEN)
        tail = "".join(map(detokenizer.push, token_ids[-_TAIL_TOKENS:])).rstrip()
        if tail.endswith(self.begin):
            return PromptEnd.OPEN
        return PromptEnd.CLOSED if tail.endswith(self.end) else PromptEnd.FREE

    def end_of_message(self, text: str) -> PromptEnd:
        """Return what a message leaves to the answer that continues it: what is no reasoning is content."""
        is_open = text.lstrip().startswith(self.begin) and self.end not in text
        return PromptEnd.OPEN if is_open else PromptEnd.CLOSED


_KNOWN = (Markers("<think>", "</think>"), Markers("[THINK]", "[/THINK]"))
REASONING_SWITCHES = frozenset({"enable_thinking", "thinking"})
"""Variables that turn reasoning off in chat templates if they are false; `thinking` is DeepSeek's and Granite's."""


def detect_markers(template: str) -> Markers | None:
    """Return the markers that a chat template writes or looks for; None: its model does not reason."""
    return next((known for known in _KNOWN if known.begin in template or known.end in template), None)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Say how reasoning is read from the answers to one request."""

    markers: Markers
    # Whether the prompt has opened it.
    is_open: bool
    # Whether it is part of the response.
    is_shown: bool
    # Makes what decodes the tokens of an answer as its text was decoded.
    detokenizer: Callable[[], Detokenizer]

    def reader(self, content: ToolReader) -> "ReasoningReader":
        """Return the reader of one answer; `content` reads what follows the reasoning."""
        return ReasoningReader(self.markers, content, self.detokenizer(), is_open=self.is_open)


class ReasoningReader:
    """Return the reasoning of one answer as it streams, and pass the rest to a reader of content.

    Reasoning begins with the answer, if the prompt has opened it, or with a marker that nothing but white space
    precedes. It ends with the next closing marker, or with the answer. Line breaks beside the markers are left out.

    What was returned depends on the text so far alone, not on the pieces in which it came.
    """

    def __init__(self, markers: Markers, content: ToolReader, detokenizer: Detokenizer, *, is_open: bool) -> None:
        self._markers, self._content, self._is_open = markers, content, is_open
        # Number of characters in front of the content; None while there is no end of the reasoning.
        self.content_at = None if is_open else 0
        # Text of which nothing was returned, and what reads it; None: the content's reader.
        self._held = ""
        self._read: Callable[[], list[Part]] | None = self._begin
        self._num_chars = 0
        # Of the tokens counted, and the text that they have.
        self._detokenizer = detokenizer
        self._starts, self._num_decoded = list[int](), 0

    @property
    def num_tokens(self) -> int:
        """Return how many of the counted tokens begin in front of the content, those of the markers included."""
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
        if self.content_at is not None:
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
        """Leave out line breaks behind the first marker."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._read = self._reason
        return []

    def _reason(self) -> list[Part]:
        """Return reasoning, but for what may belong to its end."""
        before, marker, behind = self._held.partition(self._markers.end)
        if marker:
            text, self._held, self._read = before.rstrip("\n"), behind, self._skip_last_breaks
        else:
            text = before[: len(before) - possible_beginning(before, self._markers.end)].rstrip("\n")
            self._held = before[len(text) :]
        return [Reasoning(text)] if text else []

    def _skip_last_breaks(self) -> list[Part]:
        """Leave out line breaks behind the last marker."""
        self._held = self._held.lstrip("\n")
        return self._begin_content() if self._held else []

    def _begin_content(self) -> list[Part]:
        text, self._held, self._read = self._held, "", None
        self.content_at = self._num_chars - len(text)
        return self._content.push(text)
