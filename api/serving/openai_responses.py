"""Convert the engine's outputs to OpenAI's responses, whole or as streams of chunks.

One builder serves chat and plain completions; a `ProtocolFormat` contains the differences. `ParsedChatFormat` adds
reasoning and tool calls to chat, whole and as deltas.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol

from starlette.concurrency import run_in_threadpool

from api.asgi.json_lines import Json, compact_line
from api.asgi.resumption import Resumption
from api.asgi.sse import DONE, event, event_of
from api.errors import describe
from api.serving.choice_stream import ChoiceStream
from api.serving.logprobs import LogprobsFormatter, PlacedToken, PromptEcho, ShownTokens, mean_logprob
from api.serving.model_list import digest_text
from api.serving.model_resolver import ResolvedModel
from lorasrv import __version__
from lorasrv.outputs import FinishReason, RequestOutput, RequestTiming
from lorasrv.text.reasoning import ReasoningFormat, ReasoningReader
from lorasrv.text.tool_parsers.base import Part, Reasoning, TextReader, ToolCall, ToolReader
from lorasrv.text.tool_parsers.formats import ToolFormat

SYSTEM_FINGERPRINT = f"lorasrv-{__version__}"
"""`system_fingerprint` of an engine whose answers may depend on their batch."""


class ProtocolFormat(Protocol):
    """Format the choices of one route."""

    whole_object: str
    chunk_object: str
    # Whether the text must be parsed to form the chunks.
    is_parsed: bool
    # Whether each choice holds its prompt's token ids; otherwise the response does.
    has_prompt_in_choices: bool

    def first_delta(self) -> Json | None:
        """Return the content of the first chunk, before any text; None if there is none."""

    def logprobs(self, logprobs_formatter: LogprobsFormatter, tokens: Sequence[PlacedToken], top: int) -> Json:
        """Format log-probabilities."""

    def delta(self, text: str) -> Json:
        """Format a piece of text in a chunk."""

    def full_content(self, index: int, outputs: Sequence[RequestOutput], before: str) -> Json:
        """Format all outputs of a choice, after the text `before`."""

    def usage_details(self) -> Json:
        """Return additional fields of the usage, for the outputs so far."""

    def deltas(self, index: int, output: RequestOutput) -> list[Json]:
        """Format one output of a choice as one or more chunks."""

    def finish_reason(self, index: int, content: Mapping[str, Any], ended: RequestOutput) -> str | None:
        """Return the finish reason of a choice whose last content is `content`."""


class _PlainText(ABC):
    """Format answers without parsing them."""

    is_parsed = False

    @abstractmethod
    def delta(self, text: str) -> Json: ...

    def usage_details(self) -> Json:
        return {}

    def deltas(self, index: int, output: RequestOutput) -> list[Json]:
        return [self.delta(output.text)]

    def finish_reason(self, index: int, content: Mapping[str, Any], ended: RequestOutput) -> str | None:
        return ended.finish_reason


class ChatFormat(_PlainText):
    """Format messages and deltas."""

    has_prompt_in_choices = False
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def first_delta(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def logprobs(self, logprobs_formatter: LogprobsFormatter, tokens: Sequence[PlacedToken], top: int) -> Json:
        return logprobs_formatter.chat(tokens)

    def delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def parts(self, index: int, output: RequestOutput) -> list[Part]:
        """Return the parts that an output adds to a choice: pieces of text, of reasoning, and complete calls."""
        del index
        return [output.text] if output.text else []

    def content_at(self, index: int) -> int | None:
        """Return the number of characters before a choice's content; None while it is unknown."""
        del index
        return 0

    def full_content(self, index: int, outputs: Sequence[RequestOutput], before: str) -> Json:
        return {"message": {"role": "assistant", "content": _joined(outputs, before), "refusal": None}}


class CompletionFormat(_PlainText):
    """Format bare text."""

    has_prompt_in_choices = True
    whole_object = chunk_object = "text_completion"

    def first_delta(self) -> Json | None:
        return None

    def logprobs(self, logprobs_formatter: LogprobsFormatter, tokens: Sequence[PlacedToken], top: int) -> Json:
        return logprobs_formatter.completion(tokens, top)

    def delta(self, text: str) -> Json:
        return {"text": text}

    def full_content(self, index: int, outputs: Sequence[RequestOutput], before: str) -> Json:
        return {"text": _joined(outputs, before)}


def _whole(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Return all outputs of a choice as one. Readers return the same parts for it, and need less time."""
    tokens = tuple(token for output in outputs for token in output.token_ids)
    return replace(outputs[-1], text=_joined(outputs, ""), token_ids=tokens)


def _joined(outputs: Sequence[RequestOutput], before: str) -> str:
    return before + "".join(output.text for output in outputs)


def system_fingerprint(engine: str) -> str:
    """Return OpenAI's `system_fingerprint` for the fingerprint of an engine: while it stays the same, a request with a
    seed and the same prompt tokens gets the same answer from the same version of an adapter.
    """
    return f"{SYSTEM_FINGERPRINT}-{engine[:12]}" if engine else SYSTEM_FINGERPRINT


@dataclass(frozen=True)
class ResponseBuilder:
    """Build one request's response, with one choice or many."""

    answer_id: str
    target: ResolvedModel
    protocol_format: ProtocolFormat
    # Stream options.
    include_usage: bool = False
    usage_in_chunks: bool = False
    # Number of choices to return per prompt, best mean log-probability first; None: all.
    shown: int | None = None
    # None: log-probabilities are not returned.
    logprobs_formatter: LogprobsFormatter | None = None
    # Number of likeliest tokens to return with each token of the answer, and of the prompt.
    top: int | None = None
    prompt_top: int | None = None
    # The prompts, if the response repeats them.
    echoes: Sequence[PromptEcho] = ()
    # Number of turns dropped from the conversation; None: turns may not be dropped.
    dropped_turns: int | None = None
    # Token ids of the prompts; None: token ids of prompts and answers are not returned.
    prompt_ids: Sequence[list[int]] | None = None
    system_fingerprint: str = SYSTEM_FINGERPRINT
    created_s: int = field(default_factory=lambda: int(time.time()))
    started_s: float = field(default_factory=time.monotonic)

    @property
    def is_resumable(self) -> bool:
        """Return whether a stream shows only the text of its tokens."""
        return self.logprobs_formatter is None and not self.echoes and self.prompt_ids is None

    def continuing(self, resumption: Resumption) -> "ResponseBuilder":
        """Return a builder that continues a stream which another replica began."""
        return replace(self, answer_id=resumption.answer_id, created_s=resumption.created_s)

    async def collect(self, choices: ChoiceStream) -> tuple[Json, dict[str, str]]:
        """Return the whole response and its headers, and close the choices.

        Raises:
            LorasrvError, AdapterError, ApiError: as `ChoiceStream.collect`.
        """
        outputs = await choices.collect()
        if self.logprobs_formatter is None and not self.protocol_format.is_parsed:
            body = self._full_body(outputs, choices.width)
        else:
            # In a thread: log-probabilities and reasoning of a long answer take long, and would block all streams.
            body = await run_in_threadpool(self._full_body, outputs, choices.width)
        return {**body, "usage": self.usage(choices)}, self.headers(choices)

    def _full_body(self, outputs: Mapping[int, Sequence[RequestOutput]], width: int) -> Json:
        best = self._best(outputs, width)
        for index in outputs.keys() - set(best):
            # These choices are not returned, but the usage counts their tokens.
            self.protocol_format.full_content(index, outputs[index], "")
        wholes = [self._full_choice(number, index, width, outputs) for number, index in enumerate(best)]
        body = self.envelope(self.protocol_format.whole_object, wholes)
        return body if self.protocol_format.has_prompt_in_choices else body | self._prompt_facts(0, outputs[0][0])

    def _prompt_facts(self, number: int, first: RequestOutput) -> Json:
        """Return what was asked about a prompt: its log-probabilities, from `first` of its outputs, and token ids."""
        facts: Json = {}
        if self.prompt_top is not None and self.logprobs_formatter is not None:
            facts["prompt_logprobs"] = self.logprobs_formatter.prompt(first.prompt_logprobs or (), self.prompt_top)
        if self.prompt_ids is not None:
            facts["prompt_token_ids"] = self.prompt_ids[number]
        return facts

    def _best(self, outputs: Mapping[int, Sequence[RequestOutput]], width: int) -> list[int]:
        """Return the indices of the returned choices, prompt by prompt."""
        shown = self.shown or width
        best: list[int] = []
        for first in range(0, len(outputs), width):
            tried = range(first, first + width)
            best += tried if shown == width else sorted(tried, key=lambda i: -mean_logprob(outputs[i]))[:shown]
        return best

    def _full_choice(self, number: int, index: int, width: int, outputs: Mapping[int, Sequence[RequestOutput]]) -> Json:
        """Format a whole choice. The prompt's log-probabilities are in the outputs of the prompt's first choice."""
        own, first = outputs[index], outputs[index - index % width][0]
        echo = self.echoes[index // width] if self.echoes else None
        content = self.protocol_format.full_content(index, own, echo.text if echo else "")
        tokens: list[PlacedToken] | None = None
        if self.top is not None:
            shown = ShownTokens(len(echo.text) if echo else 0)
            tokens = list(echo.placed(first.prompt_logprobs or ())) if echo else []
            tokens += [placed for output in own for placed in shown.take(output)]
        choice = self.choice(number, content, own[-1], tokens)
        if self.prompt_ids is not None:
            choice["token_ids"] = [token for output in own for token in output.token_ids]
        if self.protocol_format.has_prompt_in_choices:
            choice |= self._prompt_facts(index // width, first)
        return choice

    def event_writer(self, choices: ChoiceStream) -> "ChunkEvents":
        """Return a writer of chunks."""
        return ChunkEvents(self, choices)

    def headers(self, choices: ChoiceStream) -> dict[str, str]:
        """Return headers with the requested and the answering model, the adapter's tier and the times."""
        timing = choices.first_outputs()[0].timing
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

    def usage(self, choices: ChoiceStream) -> Json:
        """Return OpenAI's counts so far, and under `lorasrv` the answering model and times in ms.

        A prompt counts once, because the first choice computes it and the others share its pages. Choices that are not
        returned count too.
        """
        firsts = choices.first_outputs()
        prompt = sum(first.num_prompt_tokens for first in firsts)
        completion = sum(output.num_generated_tokens for output in choices.latest.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(first.timing.num_cached_tokens for first in firsts)},
            **self.protocol_format.usage_details(),
            "lorasrv": self._figures(choices, firsts[0].timing),
        }

    def _figures(self, choices: ChoiceStream, timing: RequestTiming) -> Json:
        ref, first_token_s, persona = self.target.ref, choices.first_token_s, self.target.persona
        figures = {
            "adapter_id": ref and ref.adapter_id,
            "adapter_version": ref and ref.version,
            "adapter_digest": ref and digest_text(ref.key),
            "adapter_tier": timing.tier,
            "fallback": _fallback(choices),
            "queue_ms": round(timing.queue_ms, 1),
            "load_ms": round(timing.load_ms, 1),
            "first_token_ms": None if first_token_s is None else round(1000 * (first_token_s - self.started_s), 1),
            "total_ms": round(1000 * (time.monotonic() - self.started_s), 1),
            "preemptions": sum(output.timing.num_preemptions for output in choices.latest.values()),
            "speculation": _speculation(choices),
            **_kv(choices),
        }
        sent = sum(first.timing.num_peer_tokens for first in choices.first_outputs())
        optional = {
            # Number of prompt tokens whose keys and values another replica has sent.
            "kv_transfer": {"tokens": sent} if timing.has_peer else None,
            "adapters": self.target.usage(),
            "dropped_turns": self.dropped_turns,
            "persona": persona and persona.usage(),
        }
        return figures | {name: fact for name, fact in optional.items() if fact is not None}

    def choice(
        self,
        index: int,
        content: Mapping[str, Any],
        ended: RequestOutput | None = None,
        tokens: Sequence[PlacedToken] | None = None,
    ) -> Json:
        """Return a choice for a response: its content, log-probabilities, and finish reason if it has ended."""
        known = None
        if self.logprobs_formatter is not None and tokens is not None:
            known = self.protocol_format.logprobs(self.logprobs_formatter, tokens, self.top or 0)
        reason = ended and self.protocol_format.finish_reason(index, content, ended)
        choice = {"index": index, **content, "logprobs": known, "finish_reason": reason}
        return choice if ended is None else {**choice, "stop_reason": ended.stop_reason}

    def envelope(self, kind: str, choices: list[Json]) -> Json:
        """Return a response with these choices."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created_s,
            "model": self.target.name,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


class ChunkEvents:
    """Write one stream's chunks, with choices interleaved as they arrive."""

    def __init__(self, builder: ResponseBuilder, choices: ChoiceStream) -> None:
        self._builder, self._choices = builder, choices
        self._format = builder.protocol_format
        self._opened: dict[int, ShownTokens] = {}
        self._waiting: defaultdict[int, list[PlacedToken]] = defaultdict(list)
        # By choice, token ids that no chunk has sent yet, if token ids are returned.
        self._untold: defaultdict[int, list[int]] = defaultdict(list)
        # Choices whose prompt's token ids have been sent.
        self._with_prompt: set[int] = set()
        # The JSON of a chunk before its choice, which all chunks share: encoded once, not for every token.
        self._head = compact_line(builder.envelope(self._format.chunk_object, [])).removesuffix("]}")
        # The JSON around the text, for chunks that differ only in their text; by choice and the text's field names.
        self._around: dict[tuple[int, tuple[str, ...]], list[str]] = {}
        # The same by choice, if all its chunks differ only in their text.
        self._around_all: dict[int, list[str]] = {}
        self._tells_more = bool(builder.usage_in_chunks or builder.logprobs_formatter or builder.prompt_ids is not None)

    def write(self, index: int, output: RequestOutput) -> bytes:
        """Return the events of an output; b"" if it shows nothing."""
        if index in self._around_all and output.text and not output.finished:
            return event_of(compact_line(output.text).join(self._around_all[index])) + self._choices.mark()
        events: list[bytes] = []
        if index not in self._opened:
            events += self._open(index, output)
        tokens = self._opened[index].take(output) if self._builder.top is not None else ()
        self._untold[index] += output.token_ids if self._builder.prompt_ids is not None else ()
        if output.finished or output.text or self._builder.usage_in_chunks:
            self._waiting[index] += tokens
            pieces = self._format.deltas(index, output)
            for left, piece in zip(range(len(pieces) - 1, -1, -1), pieces, strict=True):
                ended = output if output.finished and not left else None
                names = tuple(piece.get("delta", ()))
                if ended is None and names in TEXTS and not self._tells_more:
                    text = compact_line(piece["delta"][names[0]])
                    events.append(event_of(text.join(self._around_text(index, names))))
                    continue
                choice = self._builder.choice(index, piece, ended, self._waiting.pop(index, None) or None)
                if self._builder.prompt_ids is not None:
                    choice |= {"token_ids": self._untold.pop(index, []), **self._prompt_ids(index, in_choice=True)}
                events.append(event_of(self._chunk(choice)))
            events += [self._choices.mark()] if pieces else []
        elif self._format.is_parsed:
            # The output shows nothing, but the usage counts its tokens.
            self._format.deltas(index, output)
        return b"".join(events)

    def end(self) -> bytes:
        """Return the closing events: the usage if requested, and `[DONE]`."""
        if not self._builder.include_usage:
            return DONE
        body = self._builder.envelope(self._format.chunk_object, [])
        return event({**body, "usage": self._builder.usage(self._choices)}) + DONE

    def fail(self, error: Exception) -> bytes:
        """Return the closing events of an answer that has failed."""
        return event(describe(error).body) + DONE

    def _open(self, index: int, output: RequestOutput) -> list[bytes]:
        """Return the chunk that precedes a choice's text: the repeated prompt or the format's first delta, if any."""
        builder = self._builder
        echo = builder.echoes[index // self._choices.width] if builder.echoes else None
        self._opened[index] = ShownTokens(len(echo.text) if echo else 0)
        if not (self._format.is_parsed or self._tells_more):
            self._around_all[index] = self._around_any(index, self._format.delta(_ANY_TEXT), 1)
        if echo is not None:
            tokens = echo.placed(output.prompt_logprobs or ()) if builder.top is not None else ()
            choice = builder.choice(index, self._format.delta(echo.text), None, tokens or None)
            return [event_of(self._chunk(choice | self._prompt_ids(index, in_choice=True)))]
        if (opening := self._format.first_delta()) is None:
            return []
        return [event_of(self._chunk(builder.choice(index, opening), self._prompt_ids(index, in_choice=False)))]

    def _around_text(self, index: int, names: tuple[str, ...]) -> list[str]:
        """Return the JSON before, between and after the texts of these fields, which all have the same text."""
        if (index, names) not in self._around:
            content = {"delta": dict.fromkeys(names, _ANY_TEXT)}
            self._around[index, names] = self._around_any(index, content, len(names))
        return self._around[index, names]

    def _around_any(self, index: int, content: Json, times: int) -> list[str]:
        return self._chunk(self._builder.choice(index, content)).rsplit(compact_line(_ANY_TEXT), times)

    def _prompt_ids(self, index: int, *, in_choice: bool) -> Json:
        """Return the field with the prompt's token ids for the first chunk of a choice, or for the choice in it."""
        if (
            self._builder.prompt_ids is None
            or self._format.has_prompt_in_choices != in_choice
            or index in self._with_prompt
        ):
            return {}
        self._with_prompt.add(index)
        return {"prompt_token_ids": self._builder.prompt_ids[index // self._choices.width]}

    def _chunk(self, choice: Json, more: Json | None = None) -> str:
        usage = f",{compact_line(more)[1:-1]}" if more else ""
        if self._builder.usage_in_chunks:
            usage += f',"usage":{compact_line(self._builder.usage(self._choices))}'
        elif self._builder.include_usage:
            usage += ',"usage":null'
        return f"{self._head}{compact_line(choice)}]{usage}}}"


_ANY_TEXT = "\0"
"""Placeholder for finding the position of the text in a chunk; its JSON occurs nowhere else in a choice."""


def _speculation(choices: ChoiceStream) -> Json:
    """Return the number of steps of all choices, and of draft tokens that the steps verified and accepted."""
    outputs = choices.latest.values()
    counts = {
        "steps": sum(output.num_steps for output in outputs),
        "drafted": sum(output.num_draft_tokens for output in outputs),
        "accepted": sum(output.num_accepted_tokens for output in outputs),
    }
    timings = [output.timing for output in outputs]
    facts = {
        "accept": next((timing.accept for timing in timings if timing.accept is not None), None),
        "not_drafted": next((timing.not_drafted for timing in timings if timing.not_drafted is not None), None),
    }
    return counts | {name: fact for name, fact in facts.items() if fact is not None}


def _kv(choices: ChoiceStream) -> Json:
    """Return the numbers of tokens that the KV policy has kept and dropped, summed over choices; {} without a policy.

    `exact_tokens` is the minimum over the choices.
    """
    found = [output.timing.kv for output in choices.latest.values() if output.timing.kv is not None]
    if not found:
        return {}
    kept, dropped = (sum(values) for values in zip(*((kv.kept_tokens, kv.dropped_tokens) for kv in found), strict=True))
    policy, exact = found[0].policy, min(kv.exact_tokens for kv in found)
    counts = {"kept_tokens": kept, "dropped_tokens": dropped, "exact_tokens": exact}
    return {"kv": {"kind": policy.kind, **policy.as_dict(), **counts}}


def _fallback(choices: ChoiceStream) -> str | None:
    """Return `base` if the base answered instead of the adapter."""
    return "base" if any(output.timing.fell_back for output in choices.latest.values()) else None


TOOL_CALLS = "tool_calls"
REASONING_FIELDS = ("reasoning", "reasoning_content")
"""The name of the reasoning in vLLM, and in SGLang and older clients. Each client reads its own."""
TEXTS = frozenset({("content",), REASONING_FIELDS})
"""Fields of the deltas that consist of one text."""


class ParsedChatFormat(ChatFormat):
    """Format one request's answers of reasoning, text and tool calls, with a reader per choice.

    Args:
        form: format of the calls; None: there are no tools.
        names: names of the tools that may be called.
        parallel: whether there may be more than one call.
        reasoning: format of the reasoning; None: there is none.
    """

    is_parsed = True

    def __init__(
        self,
        form: ToolFormat | None,
        names: frozenset[str] = frozenset(),
        *,
        parallel: bool = True,
        reasoning: ReasoningFormat | None = None,
    ) -> None:
        self._form = form
        self._names = names
        self._parallel = parallel
        self._reasoning = reasoning
        self._readers: dict[int, ToolReader] = {}
        self._num_calls: dict[int, int] = {}

    @property
    def has_tools(self) -> bool:
        """Return whether answers may contain calls."""
        return self._form is not None

    def parts(self, index: int, output: RequestOutput) -> list[Part]:
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = self._reader()
        if isinstance(reader, ReasoningReader):
            reader.count(output.token_ids)
        parts = reader.push(output.text)
        if output.finished:
            parts += reader.flush()
        if self._reasoning is None or self._reasoning.is_shown:
            return parts
        return [part for part in parts if not isinstance(part, Reasoning)]

    def content_at(self, index: int) -> int | None:
        reader = self._readers[index]
        return reader.content_at if isinstance(reader, ReasoningReader) else 0

    def usage_details(self) -> Json:
        if self._reasoning is None:
            return {}
        readers = [reader for reader in self._readers.values() if isinstance(reader, ReasoningReader)]
        return {"completion_tokens_details": {"reasoning_tokens": sum(reader.num_tokens for reader in readers)}}

    def call_id(self, name: str) -> str:
        """Return the id of the call of this name, in the form that the format's templates accept."""
        digest = blake2b(name.encode(), digest_size=12).hexdigest()
        length = 0 if self._form is None else self._form.id_chars
        return digest[:length] if length else f"call_{digest}"

    def deltas(self, index: int, output: RequestOutput) -> list[Json]:
        """Format an output. A call becomes two deltas: its id and name, then its arguments.

        The last output becomes at least one delta.
        """
        deltas = [{"delta": delta} for part in self.parts(index, output) for delta in self._part_deltas(index, part)]
        return deltas or ([{"delta": {}}] if output.finished or not output.text else [])

    def full_content(self, index: int, outputs: Sequence[RequestOutput], before: str) -> Json:
        parts = self.parts(index, _whole(outputs))
        content = "".join(part for part in parts if isinstance(part, str))
        calls = [self._call(part) for part in parts if isinstance(part, ToolCall)]
        message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if self._reasoning is not None and self._reasoning.is_shown:
            reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
            message |= dict.fromkeys(REASONING_FIELDS, reasoning or None)
        return {"message": {**message, TOOL_CALLS: calls} if calls else message}

    def finish_reason(self, index: int, content: Mapping[str, Any], ended: RequestOutput) -> str | None:
        """Return `tool_calls` if at least one call is complete, even if the length limit cut the text after it."""
        called = self._num_calls.get(index) or content.get("message", {}).get(TOOL_CALLS)
        is_whole = ended.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        return TOOL_CALLS if called and is_whole else ended.finish_reason

    def _reader(self) -> ToolReader:
        content = TextReader() if self._form is None else self._form.reader(self._names, self._parallel)
        return content if self._reasoning is None else self._reasoning.reader(content)

    def _part_deltas(self, index: int, part: Part) -> list[Json]:
        if isinstance(part, str):
            return [{"content": part}]
        if isinstance(part, Reasoning):
            return [dict.fromkeys(REASONING_FIELDS, part.text)]
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
        call_id = self.call_id(secrets.token_hex(12))
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
