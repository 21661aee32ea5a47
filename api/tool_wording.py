"""Chat answers that may hold tool calls: as OpenAI words them, whole and in deltas."""

import secrets
from collections.abc import Mapping
from typing import Any

from api.answers import ChatWording, Json
from lorasrv.request import FinishReason, RequestOutput
from lorasrv.tools.calls import Part, ToolCall, ToolReader
from lorasrv.tools.formats import ToolFormat

TOOL_CALLS = "tool_calls"


class ToolWording(ChatWording):
    """One request's answers. Each choice has a reader of its own.

    Args:
        names: the tools that may be called.
        parallel: whether there may be more than one call.
    """

    def __init__(self, form: ToolFormat, names: frozenset[str], parallel: bool) -> None:
        self._form = form
        self._names = names
        self._parallel = parallel
        self._readers: dict[int, ToolReader] = {}
        self._num_calls: dict[int, int] = {}

    def pieces(self, index: int, output: RequestOutput) -> list[Json]:
        """A call takes two deltas: its id and name, then its arguments. The last output has at least one delta."""
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = self._reader()
        parts = reader.push(output.text)
        if output.finished:
            parts += reader.flush()
        deltas = [{"delta": delta} for part in parts for delta in self._deltas(index, part)]
        return deltas or ([{"delta": {}}] if output.finished or not output.text else [])

    def whole(self, text: str) -> Json:
        reader = self._reader()
        parts = [*reader.push(text), *reader.flush()]
        content = "".join(part for part in parts if isinstance(part, str))
        calls = [self._call(part) for part in parts if isinstance(part, ToolCall)]
        message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        return {"message": {**message, TOOL_CALLS: calls} if calls else message}

    def reason(self, index: int, content: Mapping[str, Any], ended: RequestOutput) -> str | None:
        called = self._num_calls.get(index) or content.get("message", {}).get(TOOL_CALLS)
        return TOOL_CALLS if called and ended.finish_reason is FinishReason.STOP else ended.finish_reason

    def _reader(self) -> ToolReader:
        return self._form.reader(self._names, self._parallel)

    def _deltas(self, index: int, part: Part) -> list[Json]:
        if isinstance(part, str):
            return [{"content": part}]
        number = self._num_calls.get(index, 0)
        self._num_calls[index] = number + 1
        call = self._call(part)
        arguments = call["function"].pop("arguments")
        opened = {"index": number, **call, "function": {**call["function"], "arguments": ""}}
        return [
            {TOOL_CALLS: [opened]},
            {TOOL_CALLS: [{"index": number, "function": {"arguments": arguments}}]},
        ]

    def _call(self, call: ToolCall) -> Json:
        chars = self._form.id_chars
        call_id = secrets.token_hex(chars)[:chars] if chars else f"call_{secrets.token_hex(12)}"
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
