"""Calls between tags, as Hermes and Qwen write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from lorasrv.tools.calls import Part, ToolCall, parse_json, possible_beginning, read_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class TaggedReader:
    """Text outside of tags comes at once, but for white space, which goes if a call follows it; a call when its tag is
    closed, or the answer ends. With `parallel` False nothing comes after the first."""

    def __init__(self, names: frozenset[str], parallel: bool) -> None:
        self._names = names
        self._parallel = parallel
        self._outside = ""
        self._inside: str | None = None
        self._has_called = False

    def push(self, text: str) -> list[Part]:
        if self._inside is not None:
            self._inside += text
        else:
            self._outside += text
        parts: list[Part] = []
        while self._inside is not None or OPEN in self._outside:
            if self._inside is None:
                self._outside, _, self._inside = self._outside.partition(OPEN)
            if CLOSE not in self._inside:
                break
            inside, _, rest = self._inside.partition(CLOSE)
            parts += self._ended(inside, CLOSE)
            self._outside, self._inside = rest, None
        if self._inside is None:
            held = possible_beginning(self._outside, OPEN)
            certain = self._outside[: len(self._outside) - held].rstrip()
            parts += self._text(certain)
            self._outside = self._outside[len(certain) :]
        return parts

    def flush(self) -> list[Part]:
        if self._inside is not None:
            parts = self._ended(self._inside, "")
            self._inside, self._outside = None, ""
            return parts
        text, self._outside = self._outside, ""
        return [] if self._has_called and not text.strip() else self._text(text)

    def _ended(self, inside: str, close: str) -> list[Part]:
        """A tag's content, after what stood before it."""
        before, self._outside = self._outside, ""
        call = read_call(parse_json(inside.strip()), self._names, ("arguments", "parameters"))
        if call is None:
            return self._text(before + OPEN + inside + close)
        return [*self._text(before.rstrip()), *self._called(call)]

    def _called(self, call: ToolCall) -> list[Part]:
        if self._has_called and not self._parallel:
            return []
        self._has_called = True
        return [call]

    def _text(self, text: str) -> list[Part]:
        if not text or (self._has_called and (not self._parallel or not text.strip())):
            return []
        return [text]
