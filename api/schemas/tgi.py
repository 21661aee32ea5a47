"""Define the bodies of /generate, /generate_stream and POST /: the supported fields of TGI 3 and LoRAX.

`SamplingParams` checks ranges.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from api.schemas.base import Items, KnownBody
from api.schemas.openai import GenerationBody
from api.schemas.request_fields import RequestFields
from api.schemas.structured_output import ResponseFormat
from api.schemas.unsupported import INERT_IN_GENERATION, INERT_VALUES
from lorasrv.errors import InvalidRequest
from lorasrv.sampling_params import MAX_CHOICES, SamplingParams
from lorasrv.text.structured_output.grammar import Grammar

MAX_TOP_TOKENS = 20
# OpenAI's field names (such as `max_tokens`) are not supported on these routes.
_INERT_VALUES: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys((*GenerationBody.model_fields, *INERT_IN_GENERATION), (None,)),
    **INERT_VALUES,
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "schema": (None,),
    "num_return_sequences": (None, 1),
    "length_penalty": (None, 1),
    "max_time": (None,),
    "logit_bias": (None, [], {}),
}
# The source of an uploaded adapter has no meaning here. These values only say that the adapter is given by name.
_INERT_SOURCES = (None, "", "hub", "local")
_Count = Annotated[int, Field(ge=1, lt=2**31)]
_Top = Annotated[int, Field(ge=0, le=MAX_TOP_TOKENS)]


class Parameters(RequestFields, KnownBody):
    """Set generation options.

    `api_token`, which gives access to private adapters on a hub, is ignored, because adapters are only uploaded.
    """

    UNSUPPORTED: ClassVar = _INERT_VALUES

    adapter_source: str | None = None
    api_token: str | None = None
    max_new_tokens: _Count | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    stop: Items[str] | None = None
    stop_sequences: Items[str] | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    ignore_eos_token: bool | None = None
    watermark: bool | None = None
    return_full_text: bool | None = None
    grammar: ResponseFormat | None = None
    response_format: ResponseFormat | None = None
    truncate: _Count | None = None
    apply_chat_template: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: _Top | None = None
    return_k_alternatives: _Top | None = None

    @property
    def num_choices(self) -> int:
        """Return the number of answers to generate; the best one is returned."""
        return self.best_of or 1

    @property
    def is_sampled(self) -> bool:
        """Return whether tokens are sampled: `do_sample`, a temperature or a filter requests it, as in TGI.

        Temperature 0 is greedy, as in LoRAX. Temperature 1 has no effect, so it does not request sampling by itself.
        """
        if self.temperature == 0:
            return False
        filters = self.top_k, 1.0 - (self.top_p or 1.0), 1.0 - (self.typical_p or 1.0), self.min_p
        return bool(self.do_sample) or self.temperature not in (None, 1.0) or any(filters)

    @property
    def is_constrained(self) -> bool:
        """Return whether the answer gets a grammar, without checking that the grammar is valid."""
        return any(one is not None and one.has_grammar for one in (self.grammar, self.response_format))

    @property
    def excludes_grammar(self) -> bool:
        """Return whether a field is set that cannot be combined with a grammar."""
        return bool(self.ignore_eos_token)

    @property
    def num_likeliest(self) -> int:
        """Return how many of the likeliest tokens to report at each position."""
        return max(self.top_n_tokens or 0, self.return_k_alternatives or 0)

    def wanted_grammar(self) -> Grammar | None:
        """Build the grammar of the answer; None if it has none. Call in a thread.

        Raises:
            InvalidRequest: it is malformed or too large, or there are two.
        """
        if self.grammar is not None and self.response_format is not None:
            raise InvalidRequest("grammar and response_format exclude each other; send one", param="grammar")
        param = "response_format" if self.grammar is None else "grammar"
        wanted: ResponseFormat | None = getattr(self, param)
        return None if wanted is None else wanted.grammar(param)

    def check(self, stream: bool) -> None:
        """Check combinations of fields.

        Raises:
            InvalidRequest: fields contradict each other, or one is not supported; the message names it.
        """
        if self.adapter_source not in _INERT_SOURCES:
            raise InvalidRequest(
                "adapter_source is not supported: only adapters uploaded to this server are served; leave it out",
                param="adapter_source",
            )
        if self.num_choices > 1:
            self._check_best_of(stream)
        if not (stream or self.details or self.decoder_input_details):
            self._check_no_details()
        if stream and self.decoder_input_details:
            raise InvalidRequest(
                "decoder_input_details cannot be streamed; leave out stream", param="decoder_input_details"
            )

    def _check_no_details(self) -> None:
        for name in ("top_n_tokens", "return_k_alternatives"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is part of the details; set details: true", param=name)

    def _check_best_of(self, stream: bool) -> None:
        if stream:
            raise InvalidRequest("best_of above 1 cannot be streamed", param="best_of")
        if not self.is_sampled:
            raise InvalidRequest("best_of above 1 needs sampling; set do_sample or temperature", param="best_of")
        if self.seed is not None:
            raise InvalidRequest("seed cannot be set with best_of above 1", param="seed")

    def sampling(self, seed: int | None, with_tokens: bool) -> SamplingParams:
        """Build the sampling options; without `max_new_tokens`, the answer may fill the rest of the context.

        Args:
            with_tokens: whether to report each token.

        Raises:
            InvalidRequest: a value is out of range.
        """
        given: dict[str, Any] = {
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature if self.is_sampled else 0.0,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "seed": seed,
            "stop": tuple(dict.fromkeys((*(self.stop or ()), *(self.stop_sequences or ())))),
            "ignore_eos": self.ignore_eos_token,
            "repetition_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "watermark": self.watermark,
            "logprobs": self.num_likeliest if with_tokens else None,
            "prompt_logprobs": 0 if self.decoder_input_details else None,
        }
        if self.temperature is not None and self.temperature < 0:
            raise InvalidRequest("temperature must be between 0 and 100", param="temperature")
        try:
            return SamplingParams(**{name: value for name, value in given.items() if value is not None})
        except InvalidRequest as error:
            # LoRAX's clients know only this name.
            raise error.renamed({} if self.stop else {"stop": "stop_sequences"}) from None


class GenerateBody(KnownBody):
    """Continue a text. `model` may name an adapter, as on OpenAI's routes; most clients do not send it."""

    UNSUPPORTED: ClassVar = {
        name: values for name, values in Parameters.UNSUPPORTED.items() if name not in Parameters.model_fields
    }
    model_config = ConfigDict(extra="allow")

    inputs: Annotated[str, Field(min_length=1)]
    parameters: Parameters | None = None
    stream: bool | None = None
    model: str | None = None

    def wanted(self, stream: bool) -> Parameters:
        """Return the checked parameters.

        Raises: InvalidRequest.
        """
        for name, value in (self.model_extra or {}).items():
            if value is not None and name in Parameters.model_fields:
                # Ignoring the field could let the base answer instead of an adapter, or drop the length limit.
                raise InvalidRequest(f"{name} must be inside parameters", param=name)
        parameters = self.parameters or Parameters()
        parameters.check(stream)
        return parameters
