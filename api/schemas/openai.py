"""Define the bodies of /v1/chat/completions and /v1/completions: the supported fields of OpenAI and vLLM.

Types are strict ("8" is not a number); `SamplingParams` checks ranges.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from api.schemas.base import Body, Items, KnownBody, at_most
from api.schemas.request_fields import RequestFields
from api.schemas.structured_output import StructuredFields
from api.schemas.tools import Message, ReasoningFields, ToolFields
from api.schemas.unsupported import INERT_IN_COMPLETIONS, INERT_IN_GENERATION, INERT_VALUES
from lorasrv.errors import InvalidRequest
from lorasrv.sampling_params import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    BeamOptions,
    SamplingParams,
    TextOptions,
)

MAX_MESSAGES = 2048
MAX_STOP_TOKEN_IDS = 128
MAX_ID_DIGITS = 10
DEFAULT_COMPLETION_TOKENS = 16
_AS_GIVEN = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "typical_p",
    "no_repeat_ngram_size",
    "min_tokens",
    "watermark",
    "fsd_alpha",
    "fsd_ngram",
)
LIMIT_NAMES = ("max_tokens", "max_completion_tokens", "max_new_tokens")
"""Names of the field that limits the length of an answer, in tokens."""
MAX_PROMPTS = 256
MAX_COMPLETION_LOGPROBS = 5


class StreamOptions(KnownBody):
    """Configure usage in streams.

    `include_usage` sends it in a last chunk without choices, `continuous_usage_stats` in every chunk.
    """

    UNSUPPORTED: ClassVar = {"include_obfuscation": (None, False)}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class DrawingFields(Body):
    """Define how tokens are sampled, and what ends an answer, except for its length."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_BIASED_TOKENS), at_most(MAX_BIASED_TOKENS)] | None = (
        None
    )
    allowed_token_ids: Annotated[Items[int], Field(max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[Items[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    no_repeat_ngram_size: int | None = None
    min_tokens: int | None = None
    watermark: bool | None = None
    fsd_alpha: float | None = None
    fsd_ngram: int | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Annotated[Items[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None


class LengthFields(Body):
    """Define how long an answer may be."""

    max_tokens: int | None = None


class SamplingFields(DrawingFields, LengthFields):
    """Define how an answer is sampled and where it ends, for chats, completions and a persona's defaults."""


class GenerationBody(RequestFields, SamplingFields, StructuredFields, KnownBody):
    """Define the fields that chats and plain completions share."""

    UNSUPPORTED: ClassVar = {**INERT_VALUES, **INERT_IN_GENERATION}

    model: str | None = None
    max_completion_tokens: int | None = None
    # TGI's name of the limit. Clients of several servers send it together with the other names.
    max_new_tokens: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    # Keep only this many tokens at the end of the prompt; -1: as many as fit.
    truncate_prompt_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Replaces {{user}} in a persona's texts. In a canary, the same user always gets the same version.
    user: str | None = None

    @property
    def num_choices(self) -> int:
        """Return the number of answers returned for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_tried(self) -> int:
        """Return the number of answers generated for each prompt; the best `num_choices` are returned."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def is_constrained(self) -> bool:
        """Return whether the answer gets a grammar, without checking that the grammar is valid."""
        return self.has_grammar

    @property
    def excludes_grammar(self) -> bool:
        """Return whether a field is set that cannot be combined with a grammar."""
        return bool(self.min_tokens or self.ignore_eos) or self.allowed_token_ids is not None

    @property
    def beams(self) -> BeamOptions | None:
        """Build the beam search options; None without beam search.

        Raises:
            InvalidRequest: a value is out of range.
        """
        if not self.use_beam_search:
            return None
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        return BeamOptions(self.num_tried, penalty, self.early_stopping or False)

    @property
    def top_shown(self) -> int | None:
        """Return how many of the likeliest tokens to report with each token; None: no log-probabilities."""
        return None

    @property
    def echoes(self) -> bool:
        """Return whether the response repeats the prompt."""
        return False

    def sampling(self, vocab_size: int) -> SamplingParams:
        """Build the sampling options. A `top_k` of -1 means off, as in vLLM.

        Raises:
            InvalidRequest: a value is out of range, or cannot be combined with another field.
        """
        self._check_choices()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        prompt_only = self.echoes and self.wanted_tokens() == 0
        given: dict[str, Any] = {
            # The engine must generate at least one token, even if only the prompt is wanted.
            "max_tokens": 1 if prompt_only else self.wanted_tokens(),
            "prompt_only": prompt_only,
            "temperature": self._wanted_temperature(),
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": (self.stop,) if isinstance(self.stop, str) else None if self.stop is None else tuple(self.stop),
            "stop_token_ids": _token_ids(self.stop_token_ids, vocab_size),
            "ignore_eos": self.ignore_eos,
            # The best answers are selected by log-probabilities.
            "logprobs": 0 if self._is_ranked else self.top_shown,
            "prompt_logprobs": self._prompt_top(),
            "logit_bias": bias_of_tokens(self.logit_bias),
            "allowed_token_ids": None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            "bad_words": None if self.bad_words is None else tuple(self.bad_words),
            **{name: getattr(self, name) for name in _AS_GIVEN},
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def text_options(self, shown_token_ids: frozenset[int] = frozenset(), *, strip_start: bool) -> TextOptions:
        """Build the options of the answer's text."""
        skip, keep_stop = self.skip_special_tokens is not False, bool(self.include_stop_str_in_output)
        return TextOptions(skip, shown_token_ids, strip_start, keep_stop)

    def _wanted_temperature(self) -> float | None:
        """Return the temperature; FSD is deterministic, so it implies 0 unless one is given."""
        return 0.0 if self.temperature is None and self.fsd_alpha else self.temperature

    @property
    def _is_ranked(self) -> bool:
        return self.top_shown is None and self.num_tried > self.num_choices and not self.use_beam_search

    def _prompt_top(self) -> int | None:
        echoed = self.top_shown if self.echoes else None
        return max((top for top in (self.prompt_logprobs, echoed) if top is not None), default=None)

    def _check_choices(self) -> None:
        if self.use_beam_search:
            self._check_beams()
        elif self.length_penalty not in (None, 1.0) or self.early_stopping:
            name = "early_stopping" if self.early_stopping else "length_penalty"
            raise InvalidRequest(f"{name} needs use_beam_search: true", param=name)
        if self.return_tokens_as_token_ids and self.top_shown is None and self.prompt_logprobs is None:
            why = "return_tokens_as_token_ids is about log-probabilities; set logprobs or prompt_logprobs"
            raise InvalidRequest(why, param="return_tokens_as_token_ids")
        if self.num_tried < self.num_choices:
            raise InvalidRequest(f"best_of must be at least n, which is {self.num_choices}", param="best_of")
        if self.stream and self.use_beam_search:
            raise InvalidRequest("beam search cannot be streamed; leave out stream", param="stream")
        if self.stream and self.num_tried > self.num_choices:
            raise InvalidRequest("best_of above n cannot be streamed; leave out stream or best_of", param="best_of")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs cannot be streamed; leave out stream", param="prompt_logprobs")
        if self.stream and self.echoes and self.top_shown is not None and self.num_choices > 1:
            raise InvalidRequest("echo with logprobs streams one choice; leave out stream, echo or n", param="echo")

    def _check_beams(self) -> None:
        """Check the fields that `SamplingParams` does not contain; admission checks the others."""
        if self.temperature not in (None, 0.0, 1.0):
            raise InvalidRequest("temperature cannot be used with beam search; leave it out", param="temperature")
        if self.top_shown is not None:
            raise InvalidRequest("logprobs cannot be used with beam search; leave it out", param="logprobs")

    @property
    def limit_name(self) -> str:
        """Return the body's name of the limit on generated tokens."""
        return next((name for name in LIMIT_NAMES if getattr(self, name) is not None), "max_tokens")

    def wanted_tokens(self) -> int | None:
        """Return the maximum number of tokens to generate; None: the rest of the context.

        Raises:
            InvalidRequest: two names of the limit differ.
        """
        given = {name: limit for name in LIMIT_NAMES if (limit := getattr(self, name)) is not None}
        if len(set(given.values())) > 1:
            raise InvalidRequest(f"{' and '.join(given)} differ; send one", param=next(iter(given)))
        return next(iter(given.values()), None)


ContextOverflow = Literal["error", "drop_oldest"]
"""What to do with a conversation that does not fit the context."""


class CompletionBody(GenerationBody):
    """Continue one prompt or several, each given as text or as token ids."""

    UNSUPPORTED: ClassVar = {**GenerationBody.UNSUPPORTED, **INERT_IN_COMPLETIONS}

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    echo: bool | None = None
    # The tokenizer always adds its own special tokens.
    add_special_tokens: Literal[True] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> Any:
        if not isinstance(value, list) or not any(isinstance(item, str | list) for item in value):
            return value
        if len(value) > MAX_PROMPTS:
            raise PydanticCustomError(
                "too_many_prompts", f"at most {MAX_PROMPTS} prompts a request; send the rest later"
            )
        if not (all(isinstance(item, str) for item in value) or all(isinstance(item, list) for item in value)):
            raise PydanticCustomError("mixed_prompts", "prompts must be all texts or all lists of token ids")
        return value

    @field_validator("logprobs", mode="before")
    @classmethod
    def _no_logprobs(cls, value: Any) -> Any:
        return None if value is False else value

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list."""
        if isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], str | list):
            return self.prompt  # type: ignore[return-value]
        return [self.prompt]  # type: ignore[list-item]

    @property
    def top_shown(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    def wanted_tokens(self) -> int | None:
        wanted = super().wanted_tokens()
        return DEFAULT_COMPLETION_TOKENS if wanted is None else wanted


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model should reason: the values of OpenAI and vLLM."""


class ChatBody(ToolFields, ReasoningFields, GenerationBody):
    """Continue a conversation."""

    messages: Annotated[Items[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    # The template writes special tokens.
    add_special_tokens: Literal[False] | None = None
    context_overflow: ContextOverflow | None = None
    reasoning_effort: Effort | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def is_constrained(self) -> bool:
        return super().is_constrained or self.constrains_calls

    @property
    def top_shown(self) -> int | None:
        if not self.logprobs and self.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def bias_of_tokens(bias: Mapping[str, float] | None) -> tuple[tuple[int, float], ...] | None:
    """Convert `logit_bias`, whose keys are text in JSON.

    Raises:
        InvalidRequest: a key is not a token id.
    """
    if bias is None:
        return None
    for token in bias:
        if not (token.isascii() and token.isdigit() and len(token) < MAX_ID_DIGITS):
            shown = f"{token[:MAX_ID_DIGITS]!r}"
            raise InvalidRequest(
                f'logit_bias must have token ids as its keys, such as "42"; {shown} is not one', param="logit_bias"
            )
    return tuple((int(token), value) for token, value in bias.items())


def _token_ids(ids: Sequence[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if ids is not None and not all(0 <= token < vocab_size for token in ids):
        raise InvalidRequest(f"stop_token_ids must lie in [0, {vocab_size})", param="stop_token_ids")
    return None if ids is None else tuple(ids)
