"""From the engine's outputs to OpenAI's answers: whole ones, and streams of chunks.

One writer serves both routes; what differs between chat and plain completions is in the two `Wording`s.
"""

import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from api.errors import ApiError, describe
from api.naming import Target
from api.sse import DONE, event
from lorasrv.errors import LorasrvError
from lorasrv.request import FinishReason, RequestOutput, RequestTiming

Json = dict[str, Any]


class OutputStream(Protocol):
    """What `AsyncEngine.add` returns: outputs, the last of which is finished."""

    async def __anext__(self) -> RequestOutput: ...

    async def aclose(self) -> None: ...


class Wording(Protocol):
    """How one route words its choices."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self) -> Json | None:
        """What the first chunk says before any text, None if nothing."""

    def piece(self, text: str) -> Json:
        """A piece of text, in a chunk."""

    def whole(self, text: str) -> Json:
        """All of the text."""


class ChatWording:
    """Messages and deltas."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def whole(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


class CompletionWording:
    """Bare text."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def opening(self) -> Json | None:
        return None

    def piece(self, text: str) -> Json:
        return {"text": text}

    def whole(self, text: str) -> Json:
        return {"text": text}


@dataclass
class AnswerWriter:
    """Writes one request's answer. `include_usage` and `usage_in_chunks` are the two stream options."""

    answer_id: str
    target: Target
    wording: Wording
    include_usage: bool = False
    usage_in_chunks: bool = False
    created_s: int = field(default_factory=lambda: int(time.time()))
    started_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None

    async def collect(self, stream: OutputStream) -> tuple[Json, dict[str, str]]:
        """The whole answer and its headers. Closes the stream.

        Raises:
            LorasrvError, ApiError: it failed; what came before is dropped.
        """
        parts = []
        try:
            output = await self.next(stream)
            while not output.finished:
                parts.append(output.text)
                output = await self.next(stream)
        finally:
            await stream.aclose()
        if output.finish_reason is FinishReason.ERROR:
            raise generation_failed(output)
        choice = self._choice(self.wording.whole("".join(parts) + output.text), output)
        body = self._envelope(self.wording.whole_object, [choice])
        return {**body, "usage": self.usage(output)}, self.headers(output.timing)

    async def chunks(self, first: RequestOutput, stream: OutputStream) -> AsyncGenerator[bytes, None]:
        """The events of a stream whose first output is here already."""
        try:
            if (opening := self.wording.opening()) is not None:
                yield self._chunk(opening, None, first)
            output = first
            while not output.finished:
                if output.text or self.usage_in_chunks:
                    yield self._chunk(self.wording.piece(output.text), None, output)
                output = await self.next(stream)
            if output.finish_reason is FinishReason.ERROR:
                raise generation_failed(output)
            yield self._chunk(self.wording.piece(output.text), output, output)
            if self.include_usage:
                body = self._envelope(self.wording.chunk_object, [])
                yield event({**body, "usage": self.usage(output)})
        except (LorasrvError, ApiError) as error:
            yield event(describe(error).body)
        yield DONE

    async def next(self, stream: OutputStream) -> RequestOutput:
        """The next output, noting when the first text came."""
        output = await anext(stream)
        if self.first_token_s is None and output.num_generated_tokens:
            self.first_token_s = time.monotonic()
        return output

    def headers(self, timing: RequestTiming) -> dict[str, str]:
        """Who answered, where the adapter was found, and how long that took."""
        known = {
            **self.target.headers,
            "x-queue-ms": f"{timing.queue_ms:.1f}",
            "x-load-ms": f"{timing.load_ms:.1f}",
        }
        return known if timing.tier is None else {**known, "x-adapter-tier": timing.tier.value}

    def usage(self, output: RequestOutput) -> Json:
        """OpenAI's counts, and under `lorasrv` who answered and where the time went (ms)."""
        prompt, completion = output.num_prompt_tokens, output.num_generated_tokens
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        ref, timing, first = self.target.ref, output.timing, self.first_token_s
        return {
            **counts,
            "lorasrv": {
                "adapter_id": ref and ref.adapter_id,
                "adapter_version": ref and ref.version,
                "adapter_digest": ref and f"sha256:{ref.key}",
                "adapter_tier": timing.tier,
                "queue_ms": round(timing.queue_ms, 1),
                "load_ms": round(timing.load_ms, 1),
                "first_token_ms": None if first is None else round(1000 * (first - self.started_s), 1),
                "total_ms": round(1000 * (time.monotonic() - self.started_s), 1),
                "preemptions": timing.num_preemptions,
            },
        }

    def _chunk(self, content: Mapping[str, Any], ended: RequestOutput | None, output: RequestOutput) -> bytes:
        body = self._envelope(self.wording.chunk_object, [self._choice(content, ended)])
        if self.usage_in_chunks:
            body["usage"] = self.usage(output)
        elif self.include_usage:
            body["usage"] = None
        return event(body)

    def _choice(self, content: Mapping[str, Any], ended: RequestOutput | None) -> Json:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": ended and ended.finish_reason}
        return choice if ended is None else {**choice, "stop_reason": ended.stop_reason}

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.target.name,
            "choices": choices,
        }


def generation_failed(output: RequestOutput) -> ApiError:
    """The answer broke off; what was generated is no answer."""
    return ApiError(500, output.error or "the generation failed", code="generation_failed")
