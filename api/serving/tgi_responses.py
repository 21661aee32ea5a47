"""Convert the engine's outputs to TGI's and LoRAX's responses, whole or as streams of tokens.

The texts of tokens concatenate to the whole text: a token's piece is the text that became certain with it, "" for
special tokens. As in TGI, the text includes the stop sequence. Sources of the shapes: TGI's `router/src/lib.rs`,
lorax-client 0.6.3 `types.py`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from starlette.concurrency import run_in_threadpool

from api.asgi.json_lines import Json
from api.asgi.resumption import Resumption
from api.asgi.sse import event
from api.errors import BROKEN_OFF, ApiError, describe_tgi
from api.schemas.tgi import Parameters
from api.serving.choice_stream import ChoiceStream
from api.serving.logprobs import finite, mean_logprob
from api.serving.openai_responses import ResponseBuilder
from lorasrv.outputs import FinishReason, RequestOutput, TokenLogprobs
from lorasrv.sampling_params import EVERY_TOKEN
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.tokenizer import Tokenizer

LORAX_HEADERS = (
    "x-prompt-tokens",
    "x-generated-tokens",
    "x-total-tokens",
    "x-total-time",
    "x-queue-time",
    "x-inference-time",
    "x-time-per-token",
    "x-time-to-first-token",
)


@dataclass(frozen=True)
class TokenWriter:
    """Format tokens as entries of a response, with the requested number of likeliest tokens."""

    tokenizer: Tokenizer
    num_top: int = 0
    num_alternatives: int = 0

    def entries(self, output: RequestOutput) -> list[tuple[Json, list[Json]]]:
        """Return each token of an output, with the likeliest tokens at its position.

        Raises:
            ApiError: a log-probability is missing.
        """
        if len(output.logprobs) != len(output.token_ids):
            raise _no_probability()
        found = zip(output.token_ids, output.logprobs, output.token_texts, strict=True)
        return [self._entry(*one) for one in found]

    def prefill(self, token_ids: Sequence[int], found: Sequence[TokenLogprobs | None] | None) -> list[Json]:
        """Return the prompt's tokens; the text of special tokens is their name.

        Raises:
            ApiError: see `entries`.
        """
        if found is None or [None, *token_ids[1:]] != [None, *(f and f.token_id for f in found[1:])]:
            raise _no_probability()
        pieces = Detokenizer(self.tokenizer, EVERY_TOKEN)
        logprobs = [None, *(f and finite(f.logprob) for f in found[1:])]
        entries: list[Json] = [
            {"id": token_id, "text": pieces.push(token_id), "logprob": logprob}
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        ]
        entries[-1]["text"] += pieces.flush()
        return entries

    def _entry(self, token_id: int, found: TokenLogprobs, piece: str) -> tuple[Json, list[Json]]:
        if found.token_id != token_id or len(found.top) < max(self.num_top, self.num_alternatives):
            raise _no_probability()
        # Clients skip special tokens when they join texts, so a token with text is not marked as special.
        special = token_id in self.tokenizer.special_ids and not piece
        entry: Json = {"id": token_id, "text": piece, "logprob": finite(found.logprob), "special": special}
        if self.num_alternatives:
            entry["alternative_tokens"] = [self._likely(*other) for other in found.top[: self.num_alternatives]]
        special_ids = self.tokenizer.special_ids
        top = [{**self._likely(*other), "special": other[0] in special_ids} for other in found.top[: self.num_top]]
        return entry, top

    def _likely(self, token_id: int, logprob: float) -> Json:
        return {"id": token_id, "text": token_text(self.tokenizer, token_id), "logprob": finite(logprob)}


@dataclass(frozen=True)
class TgiResponseBuilder:
    """Build one request's response."""

    figures: ResponseBuilder
    parameters: Parameters
    inputs: str
    prompt_ids: Sequence[int]
    # Seed of the first choice; None without sampling.
    seed: int | None
    tokens: TokenWriter
    as_list: bool = False

    @property
    def answer_id(self) -> str:
        """Return the answer's id."""
        return self.figures.answer_id

    @property
    def created_s(self) -> int:
        """Return the Unix time at which the answer began."""
        return self.figures.created_s

    @property
    def is_resumable(self) -> bool:
        """Return whether a stream contains only data about its tokens that another replica also knows."""
        return not (self.tokens.num_top or self.tokens.num_alternatives or self.parameters.decoder_input_details)

    def continuing(self, resumption: Resumption) -> "TgiResponseBuilder":
        """Return a builder that continues a stream of another replica."""
        return replace(self, figures=self.figures.continuing(resumption))

    async def collect(self, choices: ChoiceStream) -> tuple[Json | list[Json], dict[str, str]]:
        """Return the whole response and its headers, and close the choices.

        Raises:
            LorasrvError, AdapterError, ApiError: as `ChoiceStream.collect`.
        """
        outputs = await choices.collect()
        # In a thread: formatting a long answer's likeliest tokens takes seconds, which would block all streams.
        body = await run_in_threadpool(self._whole, outputs)
        body["usage"] = self.figures.usage(choices)
        return [body] if self.as_list else body, self.headers(choices, ended=True)

    def _whole(self, outputs: Mapping[int, Sequence[RequestOutput]]) -> Json:
        best = 0 if len(outputs) == 1 else max(outputs, key=lambda index: (_mean_logprob(outputs[index]), -index))
        body: Json = {"generated_text": self._text(outputs[best])}
        finish_reason(outputs[best][-1])
        if self.parameters.details or self.parameters.decoder_input_details:
            prefill = self._prefill(outputs[0])
            body["details"] = self._details(best, outputs[best], prefill)
            if len(outputs) > 1:
                others = [index for index in sorted(outputs) if index != best]
                body["details"]["best_of_sequences"] = [
                    {"generated_text": self._text(outputs[index]), **self._details(index, outputs[index], prefill)}
                    for index in others
                ]
        return body

    def event_writer(self, choices: ChoiceStream) -> "TokenEvents":
        """Return a writer of one event per token."""
        return TokenEvents(self, choices)

    def headers(self, choices: ChoiceStream, *, ended: bool = False) -> dict[str, str]:
        """Return our headers and LoRAX's: token counts, and times in whole milliseconds. For a stream, only those known
        at its start.
        """
        usage = self.figures.usage(choices)
        queue_ms = usage["lorasrv"]["queue_ms"]
        known = {"x-prompt-tokens": usage["prompt_tokens"], "x-queue-time": int(queue_ms)}
        if ended:
            total_ms = 1000 * (time.monotonic() - self.figures.started_s)
            inference_ms = max(0.0, total_ms - queue_ms - usage["lorasrv"]["load_ms"])
            known |= {
                "x-generated-tokens": usage["completion_tokens"],
                "x-total-tokens": usage["total_tokens"],
                "x-total-time": int(total_ms),
                "x-inference-time": int(inference_ms),
                "x-time-per-token": int(inference_ms / max(1, usage["completion_tokens"])),
                "x-time-to-first-token": int(usage["lorasrv"]["first_token_ms"] or total_ms),
            }
        return {**self.figures.headers(choices), **{name: str(value) for name, value in known.items()}}

    def _details(self, index: int, outputs: Sequence[RequestOutput], prefill: list[Json]) -> Json:
        entries = [entry for output in outputs for entry in self.tokens.entries(output)]
        details = {
            "finish_reason": finish_reason(outputs[-1]),
            "prompt_tokens": outputs[-1].num_prompt_tokens,
            "generated_tokens": outputs[-1].num_generated_tokens,
            "seed": None if self.seed is None else (self.seed + index) % 2**64,
            "prefill": prefill,
            "tokens": [token for token, _ in entries],
        }
        return {**details, "top_tokens": [top for _, top in entries]} if self.tokens.num_top else details

    def end(self, text: str, output: RequestOutput) -> Json:
        """Return the part of a stream's last event that describes the whole answer."""
        details: Json = {
            "finish_reason": finish_reason(output),
            "prompt_tokens": output.num_prompt_tokens,
            "input_length": output.num_prompt_tokens,
            "generated_tokens": output.num_generated_tokens,
            "seed": self.seed,
        }
        return {"generated_text": self._full(text), "details": details if self.parameters.details else None}

    def _prefill(self, outputs: Sequence[RequestOutput]) -> list[Json]:
        """Return the prompt's tokens from the first choice, which computes the prompt for all choices."""
        if not self.parameters.decoder_input_details:
            return []
        found = (output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None)
        return self.tokens.prefill(self.prompt_ids, next(found, None))

    def _text(self, outputs: Sequence[RequestOutput]) -> str:
        return self._full("".join(output.text for output in outputs))

    def _full(self, text: str) -> str:
        return self.inputs + text if self.parameters.return_full_text else text


class TokenEvents:
    """Write one event per token. The last has the whole text, and the details if requested; there is no [DONE]."""

    def __init__(self, builder: TgiResponseBuilder, choices: ChoiceStream) -> None:
        self._builder, self._choices = builder, choices
        self._text: list[str] = []
        self._count = 0

    def write(self, index: int, output: RequestOutput) -> bytes:
        """Return the events of an output.

        Raises:
            ApiError: a log-probability is missing, or the answer ends early.
        """
        self._text.append(output.text)
        entries = self._builder.tokens.entries(output)
        if output.finished and not entries:
            raise _broken_off()
        events = [self._event(*entry) for entry in entries[: len(entries) - output.finished]]
        if output.finished:
            whole = self._builder.end("".join(self._text), output)
            events.append(self._event(*entries[-1], whole, self._builder.figures.usage(self._choices)))
        return b"".join(events) + (self._choices.mark() if entries else b"")

    def end(self) -> bytes:
        """Return the closing events: none."""
        return b""

    def fail(self, error: Exception) -> bytes:
        """Return the closing event of a failed answer."""
        return event(describe_tgi(error).body)

    def _event(self, token: Json, top: list[Json], whole: Json | None = None, usage: Json | None = None) -> bytes:
        self._count += 1
        body: Json = {"index": self._count, "token": token, **({"top_tokens": top} if top else {})}
        body |= whole or {"generated_text": None, "details": None}
        return event(body if usage is None else {**body, "usage": usage})


def finish_reason(output: RequestOutput) -> str:
    """Return the finish reason in TGI's words.

    Raises:
        ApiError: the answer is incomplete.
    """
    if output.finish_reason is FinishReason.LENGTH:
        return "length"
    if output.finish_reason is FinishReason.STOP:
        return "stop_sequence" if isinstance(output.stop_reason, str) else "eos_token"
    raise _broken_off()


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of one token inside a text: U+FFFD for part of a character, the name for a special token."""
    alone = Detokenizer(tokenizer, EVERY_TOKEN)
    # Some decoders strip a space from the beginning of a text: decode the token a second time.
    alone.push(token_id)
    alone.flush()
    return alone.push(token_id) + alone.flush()


def _mean_logprob(outputs: Sequence[RequestOutput]) -> float:
    """Return the mean log-probability, by which TGI chooses the best sequence.

    Raises:
        ApiError: a log-probability is missing.
    """
    if any(len(output.logprobs) != len(output.token_ids) for output in outputs):
        raise _no_probability()
    return mean_logprob(outputs)


def _no_probability() -> ApiError:
    return ApiError(500, "a token has no log-probability, which this response needs", code="logprobs_missing")


def _broken_off() -> ApiError:
    return ApiError(500, "the generation ended early", code=BROKEN_OFF)
