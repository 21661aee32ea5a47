"""Define the bodies of /tokenize and /detokenize, as in vLLM."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from api.schemas.base import Body, Items
from api.schemas.openai import MAX_MESSAGES
from api.schemas.tools import Message
from api.schemas.unsupported import refuse_unless_inert
from lorasrv.errors import InvalidRequest

_INERT_VALUES: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "tools": (None, []),
    "documents": (None, []),
    "continue_final_message": (None, False),
    "mm_processor_kwargs": (None, {}),
    "truncate_prompt_tokens": (None,),
}


class TokenizeBody(Body):
    """Tokenize a `prompt`, or `messages` rendered with the chat template. `model` is checked, and changes nothing.

    `add_special_tokens` defaults to the tokenizer's own tokens for a prompt, and to none for messages, whose template
    writes them.
    """

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("one_text", "send either prompt or messages")
        return self

    def refuse_unbuilt(self) -> None:
        """Refuse unsupported fields.

        Raises:
            InvalidRequest: a field that would change the tokens is not supported.
        """
        if self.messages is not None and self.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens is not supported with messages: the chat template writes them",
                param="add_special_tokens",
            )
        refuse_unless_inert(self.model_extra, _INERT_VALUES)


class DetokenizeBody(Body):
    """Convert token ids to text."""

    model: str | None = None
    tokens: Items[int]
