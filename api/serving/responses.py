"""Serve OpenAI's newer form of a chat: its fields become a chat's, and the chat's answer becomes items and events.

A response consists of items: messages, and calls of functions. Nothing is stored.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from starlette.concurrency import run_in_threadpool

from api.asgi.json_lines import compact_line
from api.asgi.sse import event_of
from api.auth.principal import Caller
from api.errors import describe
from api.schemas.openai import ChatBody
from api.schemas.responses import ResponsesBody
from api.serving.choice_stream import ChoiceStream
from api.serving.generation import Generation, GenerationPlan, generate, plan_conversation
from api.serving.logprobs import PlacedToken, ShownTokens
from api.serving.model_resolver import ResolvedModel
from api.serving.openai_responses import TOOL_CALLS, ResponseBuilder
from api.serving.services import Services
from lorasrv.outputs import FinishReason, RequestOutput

Json = dict[str, Any]
MAX_TOKENS = "max_output_tokens"


async def generate_response(body: ResponsesBody, services: Services, caller: Caller) -> Generation:
    """Plan and admit a body of /v1/responses.

    Raises: as `generate`.
    """

    async def plan(chat: ChatBody, target: ResolvedModel, services: Services, caller: Caller) -> GenerationPlan:
        planned = await plan_conversation(chat, target, services, caller)
        assert isinstance(planned.writer, ResponseBuilder)
        named = planned.writer.continuing(f"resp_{secrets.token_hex(12)}", planned.writer.created_s)
        return replace(planned, writer=ResponsesWriter(named, body), request_id=named.answer_id)

    chat = await run_in_threadpool(body.chat)
    return await generate(plan, chat.model, chat, services, caller)


@dataclass(frozen=True)
class ResponsesWriter:
    """Write the answer to one request.

    Args:
        chat: says what a chat would, and counts.
        asked: fields that the response repeats.
    """

    chat: ResponseBuilder
    asked: ResponsesBody

    # The numbers of its events depend on how many there were.
    is_resumable = False

    @property
    def answer_id(self) -> str:
        """Return what names the response."""
        return self.chat.answer_id

    @property
    def created_s(self) -> int:
        """Return the Unix time of its beginning."""
        return self.chat.created_s

    def continuing(self, answer_id: str, created_s: int) -> "ResponsesWriter":
        """Return a writer with this name and beginning."""
        return replace(self, chat=self.chat.continuing(answer_id, created_s))

    async def collect(self, choices: ChoiceStream) -> tuple[Json, dict[str, str]]:
        """Return the whole response and its headers, and close the choices.

        Raises:
            LorasrvError, AdapterError, ApiError: the request failed.
        """
        outputs: list[RequestOutput] = []
        try:
            async for _, output in choices:
                outputs.append(output)
        finally:
            await choices.aclose()
        items = AnswerItems(self.chat)

        def write() -> None:
            for output in outputs:
                for _ in items.take(output):
                    """The items are what counts."""

        # In a thread: log-probabilities of a long answer take seconds.
        await run_in_threadpool(write)
        return self.ended(choices, items.items), self.headers(choices)

    def event_writer(self, choices: ChoiceStream) -> "ResponseEvents":
        """Return what writes the events of a stream."""
        return ResponseEvents(self, choices)

    def headers(self, choices: ChoiceStream) -> dict[str, str]:
        """Return the headers of a chat."""
        return self.chat.headers(choices)

    def ended(self, choices: ChoiceStream, items: Sequence[Json]) -> Json:
        """Return the response when its last output is there."""
        reason = choices.latest[0].finish_reason
        usage = self.chat.usage(choices)
        told = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "lorasrv": usage["lorasrv"],
        }
        if reason is FinishReason.STOP:
            return self.response("completed", items, completed_at=int(time.time()), usage=told)
        why = MAX_TOKENS if reason is FinishReason.LENGTH else reason
        return self.response("incomplete", items, incomplete_details={"reason": why}, usage=told)

    def response(self, status: str, items: Sequence[Json] = (), **more: Any) -> Json:
        """Return the response with these items."""
        asked = self.asked
        given = asked.model_dump(mode="json", by_alias=True, exclude_none=True, include=_REPEATED)
        return {
            "id": self.answer_id,
            "object": "response",
            "created_at": self.created_s,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.chat.target.name,
            "output": list(items),
            **_DEFAULTS,
            **given,
            "usage": None,
            **more,
        }


_DEFAULTS: Json = {
    "background": False,
    "instructions": None,
    MAX_TOKENS: None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
_REPEATED = (_DEFAULTS.keys() & ResponsesBody.model_fields.keys()) - {"store"}


class AnswerItems:
    """Make items of an answer's outputs, and the events that tell them, yet without their numbers."""

    def __init__(self, chat: ResponseBuilder) -> None:
        self.items: list[Json] = []
        self._chat = chat
        self._name = chat.answer_id.removeprefix("resp_")
        self._shown = ShownTokens(0)
        self._unplaced: list[PlacedToken] = []
        # Texts and log-probabilities of the message that is written; None: there is none.
        self._texts: list[str] | None = None
        self._logprobs: list[Json] = []

    def take(self, output: RequestOutput) -> Iterator[Json]:
        """Yield the events of an output. Take all of them."""
        if self._chat.top is not None:
            self._unplaced += self._shown.take(output)
        for piece in self._chat.protocol_format.deltas(0, output):
            if text := piece["delta"].get("content"):
                yield from self._write(text)
            for call in piece["delta"].get(TOOL_CALLS, ()):
                yield from self._begin_call(call) if "id" in call else self._finish_call(call)
        if output.finished:
            if not self.items:
                yield from self._begin_message()
            yield from self._finish_message("completed" if output.finish_reason is FinishReason.STOP else "incomplete")

    def _write(self, text: str) -> Iterator[Json]:
        if self._texts is None:
            yield from self._begin_message()
        assert self._texts is not None
        known = self._chat.logprobs_formatter and self._chat.logprobs_formatter.chat(self._unplaced)
        logprobs = known["content"] if known else []
        self._unplaced = []
        self._texts.append(text)
        self._logprobs += logprobs
        yield self._of_part("response.output_text.delta", delta=text, logprobs=logprobs)

    def _begin_message(self) -> Iterator[Json]:
        self._texts, self._logprobs = [], []
        item: Json = {"type": "message", "id": self._id("msg"), "role": "assistant"}
        yield from self._begin({**item, "status": "in_progress", "content": []})
        yield self._of_part("response.content_part.added", part=_part(""))

    def _finish_message(self, status: str) -> Iterator[Json]:
        if self._texts is None:
            return
        part = _part("".join(self._texts), self._logprobs)
        yield self._of_part("response.output_text.done", text=part["text"], logprobs=self._logprobs)
        yield self._of_part("response.content_part.done", part=part)
        self._texts = None
        yield from self._finish(content=[part], status=status)

    def _begin_call(self, call: Json) -> Iterator[Json]:
        yield from self._finish_message("completed")
        item = {"type": "function_call", "id": self._id("fc"), "call_id": call["id"], "name": call["function"]["name"]}
        yield from self._begin({**item, "arguments": "", "status": "in_progress"})

    def _finish_call(self, call: Json) -> Iterator[Json]:
        arguments = call["function"]["arguments"]
        yield self._of_item("response.function_call_arguments.delta", delta=arguments)
        yield self._of_item("response.function_call_arguments.done", arguments=arguments)
        yield from self._finish(arguments=arguments, status="completed")

    def _begin(self, item: Json) -> Iterator[Json]:
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": item}

    def _finish(self, **changed: Any) -> Iterator[Json]:
        self.items[-1] = {**self.items[-1], **changed}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": self.items[-1]}

    def _of_item(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _of_part(self, kind: str, **fields: Any) -> Json:
        return self._of_item(kind, content_index=0, **fields)

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._name}_{len(self.items)}"


def _part(text: str, logprobs: Sequence[Json] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


class ResponseEvents:
    """Write one stream's events, which have names and numbers."""

    def __init__(self, writer: ResponsesWriter, choices: ChoiceStream) -> None:
        self._writer, self._choices = writer, choices
        self._items = AnswerItems(writer.chat)
        self._numbers = count()
        self._has_begun = False

    def write(self, index: int, output: RequestOutput) -> bytes:
        """Return the events of an output."""
        del index
        return self._begun() + b"".join(map(self._event, self._items.take(output)))

    def end(self) -> bytes:
        """Return the last event, with the whole response."""
        response = self._writer.ended(self._choices, self._items.items)
        return self._event({"type": f"response.{response['status']}", "response": response})

    def fail(self, error: Exception) -> bytes:
        """Return the last event of an answer that has failed."""
        known = describe(error).body["error"]
        told = {"code": "server_error", "message": known["message"], "type": known["code"], "param": known["param"]}
        response = self._writer.response("failed", self._items.items, error=told)
        return self._begun() + self._event({"type": "response.failed", "response": response})

    def _begun(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        response = self._writer.response("in_progress")
        kinds = "response.created", "response.in_progress"
        return b"".join(self._event({"type": kind, "response": response}) for kind in kinds)

    def _event(self, event: Json) -> bytes:
        line = compact_line({**event, "sequence_number": next(self._numbers)})
        return f"event: {event['type']}\n".encode() + event_of(line)
