"""From the engine's outputs to OpenAI's answers: whole ones, and streams of chunks.

One writer serves both routes; what differs between chat and plain completions is in the two `Wording`s.
"""

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from api.choices import Choices
from api.errors import ApiError, describe
from api.naming import Target
from api.sse import DONE, event
from lorasrv.errors import LorasrvError
from lorasrv.request import RequestOutput, RequestTiming

Json = dict[str, Any]


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


@dataclass(frozen=True)
class AnswerWriter:
    """Writes one request's answer, of one choice or many; `include_usage` and `usage_in_chunks` are stream options."""

    answer_id: str
    target: Target
    wording: Wording
    include_usage: bool = False
    usage_in_chunks: bool = False
    created_s: int = field(default_factory=lambda: int(time.time()))
    started_s: float = field(default_factory=time.monotonic)

    async def collect(self, choices: Choices) -> tuple[Json, dict[str, str]]:
        """The whole answer and its headers. Closes the choices.

        Raises:
            LorasrvError, ApiError: one of them failed; what came before is dropped.
        """
        pieces: defaultdict[int, list[str]] = defaultdict(list)
        try:
            async for index, output in choices:
                pieces[index].append(output.text)
        finally:
            await choices.aclose()
        wholes = [
            self._choice(index, self.wording.whole("".join(pieces[index])), ended)
            for index, ended in sorted(choices.latest.items())
        ]
        body = self._envelope(self.wording.whole_object, wholes)
        return {**body, "usage": self.usage(choices)}, self.headers(choices)

    async def chunks(self, choices: Choices) -> AsyncGenerator[bytes, None]:
        """The events of a stream, whose choices take turns as they come."""
        opened: set[int] = set()
        opening = self.wording.opening()
        try:
            async for index, output in choices:
                if opening is not None and index not in opened:
                    opened.add(index)
                    yield self._chunk(choices, self._choice(index, opening))
                if output.finished or output.text or self.usage_in_chunks:
                    ended = output if output.finished else None
                    yield self._chunk(choices, self._choice(index, self.wording.piece(output.text), ended))
            if self.include_usage:
                body = self._envelope(self.wording.chunk_object, [])
                yield event({**body, "usage": self.usage(choices)})
        except (LorasrvError, ApiError) as error:
            yield event(describe(error).body)
        yield DONE

    def headers(self, choices: Choices) -> dict[str, str]:
        """Who was asked and who answered, where the adapter was found, and how long that took."""
        timing = _first(choices).timing
        known = {
            **self.target.headers,
            "x-queue-ms": f"{timing.queue_ms:.1f}",
            "x-load-ms": f"{timing.load_ms:.1f}",
        }
        if timing.tier is not None:
            known["x-adapter-tier"] = timing.tier.value
        if (fallback := _fallback(choices)) is not None:
            known["x-adapter-fallback"] = fallback
        return known

    def usage(self, choices: Choices) -> Json:
        """OpenAI's counts so far, and under `lorasrv` who answered and where the time went (ms).

        The prompt counts once: the first choice computes it, the others share its pages.
        """
        first = _first(choices)
        prompt = first.num_prompt_tokens
        completion = sum(output.num_generated_tokens for output in choices.latest.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": first.timing.num_cached_tokens},
            "lorasrv": self._figures(choices, first.timing),
        }

    def _figures(self, choices: Choices, timing: RequestTiming) -> Json:
        ref, first_token_s = self.target.ref, choices.first_token_s
        return {
            "adapter_id": ref and ref.adapter_id,
            "adapter_version": ref and ref.version,
            "adapter_digest": ref and f"sha256:{ref.key}",
            "adapter_tier": timing.tier,
            "fallback": _fallback(choices),
            "queue_ms": round(timing.queue_ms, 1),
            "load_ms": round(timing.load_ms, 1),
            "first_token_ms": None if first_token_s is None else round(1000 * (first_token_s - self.started_s), 1),
            "total_ms": round(1000 * (time.monotonic() - self.started_s), 1),
            "preemptions": sum(output.timing.num_preemptions for output in choices.latest.values()),
        }

    def _chunk(self, choices: Choices, choice: Json) -> bytes:
        body = self._envelope(self.wording.chunk_object, [choice])
        if self.usage_in_chunks:
            body["usage"] = self.usage(choices)
        elif self.include_usage:
            body["usage"] = None
        return event(body)

    def _choice(self, index: int, content: Mapping[str, Any], ended: RequestOutput | None = None) -> Json:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": ended and ended.finish_reason}
        return choice if ended is None else {**choice, "stop_reason": ended.stop_reason}

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.target.name,
            "choices": choices,
        }


def _first(choices: Choices) -> RequestOutput:
    """What the first of the choices that have come said last."""
    return choices.latest[min(choices.latest)]


def _fallback(choices: Choices) -> str | None:
    """`base` if that answered in the adapter's place."""
    return "base" if any(output.timing.fell_back for output in choices.latest.values()) else None
