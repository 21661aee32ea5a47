"""Calls that are the rest of an answer: Mistral's `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and Llama's, whose
answers are nothing but `{"name": ..., "parameters": {...}}`, with `<|python_tag|>` in front or not."""

import json

from lorasrv.tools.calls import Part, ToolCall, parse_json, possible_beginning, read_call, refuse_constant

MISTRAL_MARKER = "[TOOL_CALLS]"
LLAMA_MARKER = "<|python_tag|>"


class MistralReader:
    """Text comes at once until the marker; what follows it when the answer has ended."""

    def __init__(self, names: frozenset[str], parallel: bool) -> None:
        self._names = names
        self._most = None if parallel else 1
        self._text = ""
        self._is_calling = False

    def push(self, text: str) -> list[Part]:
        self._text += text
        if self._is_calling:
            return []
        at = self._text.find(MISTRAL_MARKER)
        self._is_calling = at >= 0
        if not self._is_calling:
            at = len(self._text) - possible_beginning(self._text, MISTRAL_MARKER)
        certain = self._text[:at].rstrip()
        self._text = self._text[len(certain) :]
        return [certain] if certain else []

    def flush(self) -> list[Part]:
        text, self._text = self._text, ""
        values = parse_json(text.strip().removeprefix(MISTRAL_MARKER)) if self._is_calling else None
        calls = [read_call(value, self._names, ("arguments",)) for value in values] if isinstance(values, list) else []
        found: list[Part] = [call for call in calls if call is not None]
        if found and len(found) == len(calls):
            return found[: self._most]
        return [text] if text else []


class LlamaReader:
    """An answer that begins like a call comes when it has ended, any other at once."""

    def __init__(self, names: frozenset[str], parallel: bool) -> None:
        self._names = names
        self._most = None if parallel else 1
        self._text = ""
        self._is_text = False

    def push(self, text: str) -> list[Part]:
        self._text += text
        begun = self._text.lstrip()
        self._is_text |= bool(begun) and not (begun.startswith(("{", LLAMA_MARKER)) or LLAMA_MARKER.startswith(begun))
        if not self._is_text:
            return []
        text, self._text = self._text, ""
        return [text]

    def flush(self) -> list[Part]:
        text, self._text = self._text, ""
        found: list[Part] = [] if self._is_text else [*self._calls(text.strip().removeprefix(LLAMA_MARKER))]
        if found:
            return found[: self._most]
        return [text] if text else []

    def _calls(self, text: str) -> list[ToolCall]:
        """One or more, separated by semicolons; [] if anything else stands there."""
        calls, decoder, at = [], json.JSONDecoder(parse_constant=refuse_constant), 0
        text = text.strip()
        while at < len(text):
            try:
                value, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                return []
            call = read_call(value, self._names, ("parameters", "arguments"))
            if call is None:
                return []
            calls.append(call)
            while at < len(text) and text[at] in "; \n\t":
                at += 1
        return calls
