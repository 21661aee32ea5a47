"""Define the bodies of /tokenize and /detokenize, as in vLLM."""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from api.schemas.base import Body, Items, KnownBody
from api.schemas.openai import MAX_MESSAGES
from api.schemas.tools import Message, PromptEndFields
from api.schemas.unsupported import INERT_VALUES


class TokenizeBody(PromptEndFields, KnownBody):
    """Tokenize a `prompt`, or `messages` rendered with the chat template, with the tokenizer of `model`.

    `add_special_tokens` is true by default for a prompt. For messages it can only be false, because the template
    writes special tokens.
    """

    UNSUPPORTED: ClassVar = INERT_VALUES

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_text", "send either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            why = "not supported with messages: the chat template writes them"
            raise PydanticCustomError("unsupported", why, {"field": "add_special_tokens"})
        return self


class DetokenizeBody(Body):
    """Convert token ids to text."""

    model: str | None = None
    tokens: Items[int]
