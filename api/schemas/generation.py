"""Bodies of /v1/chat/completions and /v1/completions: what is served of OpenAI's and vLLM's fields.

Types are strict ("8" is no number); ranges are `SamplingParams`'s to check. Fields that are not here are kept apart by
pydantic (`model_extra`) for `unbuilt.refuse_unbuilt`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from api.schemas.unbuilt import refuse_unbuilt
from lorasrv.errors import InvalidRequest
from lorasrv.request import MAX_CHOICES, OnCold, SamplingParams

MAX_MESSAGES = 2048
MAX_SALT_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
DEFAULT_COMPLETION_TOKENS = 16


class Body(BaseModel):
    """Strictly typed; NaN and infinity are no numbers."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Body):
    """`include_usage`: a last chunk with usage and no choices. `continuous_usage_stats`: usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What both routes share."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    adapter_id: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # A strict enum takes no string.
    on_cold: Annotated[OnCold, Field(strict=False)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None
    # As vLLM has it: lower goes first.
    priority: int | None = None
    timeout_s: float | None = None

    @property
    def num_choices(self) -> int:
        """How many answers are asked for."""
        return 1 if self.n is None else self.n

    def sampling(self, vocab_size: int) -> SamplingParams:
        """How to sample. A `top_k` of -1 means off, as vLLM has it.

        Raises:
            InvalidRequest: a value is out of range, or a field asks for what is not built.
        """
        # The best `n` of `n` is no choice.
        refuse_unbuilt(self.model_extra, {"best_of": self.num_choices})
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        given: dict[str, Any] = {
            "max_tokens": self.wanted_tokens(),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop and tuple(self.stop),
            "stop_token_ids": _token_ids(self.stop_token_ids, vocab_size),
            "ignore_eos": self.ignore_eos,
        }
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def wanted_tokens(self) -> int | None:
        """Most tokens to generate; None is the rest of the context.

        Raises:
            InvalidRequest: the older and the newer name of the limit differ.
        """
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens and max_completion_tokens differ; send one", param="max_tokens")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(GenerationBody):
    """One prompt, as text or as token ids."""

    prompt: str | list[int]

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if isinstance(value, list) and any(isinstance(item, str | list) for item in value):
            raise PydanticCustomError("one_prompt", "lists of prompts are not supported yet; send one prompt a request")
        return value

    def wanted_tokens(self) -> int | None:
        wanted = super().wanted_tokens()
        return DEFAULT_COMPLETION_TOKENS if wanted is None else wanted


class TextPart(Body):
    """A part of a message; text is the only kind served."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn. `developer` is OpenAI's newer word for `system`, which is what chat templates know."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """As a chat template takes it. Parts are joined by line breaks, as vLLM does."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatBody(GenerationBody):
    """A conversation to continue."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]


def _token_ids(ids: Sequence[int] | None, vocab_size: int) -> tuple[int, ...] | None:
    if ids is not None and not all(0 <= token < vocab_size for token in ids):
        raise InvalidRequest(f"stop_token_ids must lie in [0, {vocab_size})", param="stop_token_ids")
    return None if ids is None else tuple(ids)
