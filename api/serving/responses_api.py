"""Serve /v1/responses, OpenAI's newer form of a chat: convert requests to chats, and answers to items and events.

A response consists of items: reasoning, messages, and calls of functions. Nothing is stored.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from typing import Any

from starlette.concurrency import run_in_threadpool

from api.asgi.json_lines import Json
from api.asgi.resumption import Resumption
from api.asgi.sse import named_event
from api.auth.principal import Caller
from api.errors import describe
from api.schemas.responses import REPEATED, ResponsesBody
from api.serving.choice_stream import ChoiceStream
from api.serving.generation import Generation, generate, plan_conversation
from api.serving.logprobs import PlacedToken, ShownTokens
from api.serving.openai_responses import ChatFormat, ParsedChatFormat, ResponseBuilder
from api.serving.services import Services
from lorasrv.errors import InvalidRequest
from lorasrv.outputs import FinishReason, RequestOutput
from lorasrv.text.tool_parsers.base import Reasoning, ToolCall

ID_PREFIX = "resp_"
TEXT, REASONING = "output_text", "reasoning_text"
"""Types of text parts in items."""
_TOLD = ("text", "logprobs")
"""Fields of a part that the event at the end of its text repeats."""


async def generate_response(
    body: ResponsesBody, services: Services, caller: Caller, resumption: Resumption | None
) -> Generation:
    """Plan and admit a body of /v1/responses; arguments and errors are those of `generate`."""
    chat, asked = await run_in_threadpool(lambda: (body.chat(), _repeated(body)))

    def write(form: ChatFormat, builder: ResponseBuilder) -> ResponsesWriter:
        # Checked here, because a persona may add tools. Tokens of calls would be among those of the texts.
        if isinstance(form, ParsedChatFormat) and form.has_tools and chat.logprobs:
            name = "include" if body.top_logprobs is None else "top_logprobs"
            why = "{param}: there are no log-probabilities beside tools; leave it out, or set tool_choice: none"
            raise InvalidRequest(why, param=name)
        return ResponsesWriter(builder, form, asked)

    plan = partial(plan_conversation, write=write, id_prefix=ID_PREFIX)
    try:
        return await generate(plan, chat.model, chat, services, caller, resumption=resumption)
    except InvalidRequest as error:
        raise error.renamed({} if body.instructions is None else {"messages[0]": "instructions"}) from None


def _repeated(body: ResponsesBody) -> Json:
    """Return the request's fields that the response repeats, as they were sent."""
    return body.model_dump(
        mode="json",
        by_alias=True,
        exclude_none=True,
        include=REPEATED.keys() & ResponsesBody.model_fields.keys() - {"store"},
    )


@dataclass(frozen=True)
class ResponsesWriter:
    """Write the answer to one request.

    Args:
        chat: returns the usage, the headers and the model's name.
        form: separates reasoning, text and calls.
        asked: the request's fields that the response repeats.
        num_told: number of events that the client has received from another replica.
    """

    chat: ResponseBuilder
    form: ChatFormat
    asked: Json
    num_told: int = 0

    @property
    def is_resumable(self) -> bool:
        """Return whether a stream shows only the text of its tokens."""
        return self.chat.is_resumable

    @property
    def answer_id(self) -> str:
        """Return the response's id."""
        return self.chat.answer_id

    @property
    def created_s(self) -> int:
        """Return the response's Unix time of creation."""
        return self.chat.created_s

    def continuing(self, resumption: Resumption) -> "ResponsesWriter":
        """Return a writer that continues a stream which another replica began."""
        return replace(self, chat=self.chat.continuing(resumption), num_told=resumption.num_events)

    async def collect(self, choices: ChoiceStream) -> tuple[Json, dict[str, str]]:
        """Return the whole response and its headers, and close the choices.

        Raises:
            LorasrvError, AdapterError, ApiError: the request failed.
        """
        outputs = await choices.collect()
        items = AnswerItems(self.chat, self.form)
        events = chain.from_iterable(map(items.take, outputs[0]))
        # Discard the events, as only the items are needed. In a thread, because log-probabilities of a long answer take
        # seconds.
        await run_in_threadpool(lambda: deque(events, maxlen=0))
        return self.ended(choices, items.items), self.headers(choices)

    def event_writer(self, choices: ChoiceStream) -> "ResponseEvents":
        """Return the writer of a stream's events."""
        return ResponseEvents(self, choices)

    def headers(self, choices: ChoiceStream) -> dict[str, str]:
        """Return the headers, which are those of a chat."""
        return self.chat.headers(choices)

    def ended(self, choices: ChoiceStream, items: Sequence[Json]) -> Json:
        """Return the response after the last output: completed or incomplete, with these items and the usage."""
        reason = choices.latest[0].finish_reason
        usage = self.chat.usage(choices)
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": usage["total_tokens"],
            "lorasrv": usage["lorasrv"],
        }
        if reason is FinishReason.STOP:
            return self.response("completed", items, completed_at=int(time.time()), usage=counts)
        why = "max_output_tokens" if reason is FinishReason.LENGTH else reason
        return self.response("incomplete", items, incomplete_details={"reason": why}, usage=counts)

    def response(self, status: str, items: Sequence[Json] = (), **more: Any) -> Json:
        """Return the response with these items."""
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
            **REPEATED,
            **self.asked,
            "truncation": "disabled" if self.chat.dropped_turns is None else "auto",
            "usage": None,
            **more,
        }


class AnswerItems:
    """Convert an answer's outputs to items, and to events that report them, still without sequence numbers."""

    def __init__(self, chat: ResponseBuilder, form: ChatFormat) -> None:
        self.items: list[Json] = []
        self._chat, self._form = chat, form
        self._name = chat.answer_id.removeprefix(ID_PREFIX)
        self._shown = ShownTokens(0)
        self._unplaced: list[PlacedToken] = []
        self._num_chars = 0
        # Kind, texts and log-probabilities of the open message or reasoning; the kind "" means that none is open.
        self._kind = ""
        self._texts: list[str] = []
        self._logprobs: list[Json] = []

    def take(self, output: RequestOutput) -> Iterator[Json]:
        """Yield the events of an output. The caller must consume all of them, which completes the items."""
        if self._chat.top is not None:
            self._num_chars += len(output.text)
            self._unplaced += self._shown.take(output)
            if output.finished:
                # The tokens must join to the text, so drop the one that ends the answer: it has no text.
                self._unplaced = [token for token in self._unplaced if token.offset < self._num_chars]
        for part in self._form.parts(0, output):
            if isinstance(part, ToolCall):
                yield from self._call(part)
            elif isinstance(part, Reasoning):
                yield from self._write(REASONING, part.text)
            else:
                yield from self._write(TEXT, part)
        if output.finished:
            if not self.items:
                yield from self._begin_text(TEXT)
            yield from self.end("completed" if output.finish_reason is FinishReason.STOP else "incomplete")

    def end(self, status: str) -> Iterator[Json]:
        """Yield the events that end the open message or reasoning, if there is one."""
        if not self._kind:
            return
        kind, part = self._kind, _part(self._kind, "".join(self._texts), self._logprobs)
        yield self._of_part(f"response.{kind}.done", **{name: part[name] for name in _TOLD if name in part})
        yield self._of_part("response.content_part.done", part=part)
        self._kind = ""
        yield from self._finish(content=[part], status=status)

    def _write(self, kind: str, text: str) -> Iterator[Json]:
        if self._kind != kind:
            yield from self.end("completed")
            yield from self._begin_text(kind)
        self._texts.append(text)
        logprobs = {} if kind == REASONING else self._take_logprobs()
        yield self._of_part(f"response.{kind}.delta", delta=text, **logprobs)

    def _take_logprobs(self) -> Json:
        """Return the log-probabilities of the message's tokens that no event has sent yet."""
        formatter, begin = self._chat.logprobs_formatter, self._form.content_at(0) or 0
        tokens = [token for token in self._unplaced if token.offset >= begin]
        logprobs = [] if formatter is None else formatter.chat(tokens)["content"]
        self._unplaced = []
        self._logprobs += logprobs
        return {"logprobs": logprobs}

    def _begin_text(self, kind: str) -> Iterator[Json]:
        self._kind, self._texts, self._logprobs = kind, [], []
        if kind == REASONING:
            item: Json = {"type": "reasoning", "id": self._id("rs"), "summary": []}
        else:
            item = {"type": "message", "id": self._id("msg"), "role": "assistant"}
        yield from self._begin({**item, "status": "in_progress", "content": []})
        yield self._of_part("response.content_part.added", part=_part(kind, ""))

    def _call(self, call: ToolCall) -> Iterator[Json]:
        assert isinstance(self._form, ParsedChatFormat)
        yield from self.end("completed")
        item_id = self._id("fc")
        # Derive the call's id from the item's: if two replicas write one answer, they must give it the same id.
        item = {"type": "function_call", "id": item_id, "call_id": self._form.call_id(item_id), "name": call.name}
        yield from self._begin({**item, "arguments": "", "status": "in_progress"})
        yield self._of_item("response.function_call_arguments.delta", delta=call.arguments)
        yield self._of_item("response.function_call_arguments.done", arguments=call.arguments)
        yield from self._finish(arguments=call.arguments, status="completed")

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


def _part(kind: str, text: str, logprobs: Sequence[Json] = ()) -> Json:
    part: Json = {"type": kind, "text": text}
    return part if kind == REASONING else {**part, "annotations": [], "logprobs": list(logprobs)}


class ResponseEvents:
    """Write one stream's events, with their names and sequence numbers."""

    def __init__(self, writer: ResponsesWriter, choices: ChoiceStream) -> None:
        self._writer, self._choices = writer, choices
        self._items = AnswerItems(writer.chat, writer.form)
        self._numbers = count()
        self._has_begun = False

    def write(self, index: int, output: RequestOutput) -> bytes:
        """Return the events of an output; b"" if it shows nothing."""
        del index
        events = self._begun() + b"".join(map(self._event, self._items.take(output)))
        if self._choices.is_repeated:
            # The other replica may have sent the same content in more events.
            self._numbers = count(self._writer.num_told)
        return events and events + self._choices.mark()

    def end(self) -> bytes:
        """Return the last event, with the whole response."""
        response = self._writer.ended(self._choices, self._items.items)
        return self._event({"type": f"response.{response['status']}", "response": response})

    def fail(self, error: Exception) -> bytes:
        """Return the closing events of an answer that has failed; its open item is incomplete."""
        said = self._begun() + b"".join(map(self._event, self._items.end("incomplete")))
        known = describe(error).body["error"]
        failure = {"code": "server_error", "message": known["message"], "type": known["code"], "param": known["param"]}
        response = self._writer.response("failed", self._items.items, error=failure)
        return said + self._event({"type": "response.failed", "response": response})

    def _begun(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        response = self._writer.response("in_progress")
        kinds = "response.created", "response.in_progress"
        return b"".join(self._event({"type": kind, "response": response}) for kind in kinds)

    def _event(self, event: Json) -> bytes:
        return named_event(event["type"], {**event, "sequence_number": next(self._numbers)})
