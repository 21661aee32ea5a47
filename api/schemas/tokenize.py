"""Bodies of /tokenize and /detokenize, as vLLM has them."""

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
    """A `prompt`, or `messages` to put through the chat template. `model` is checked, and changes nothing.

    `add_special_tokens` None: for a prompt what the tokenizer adds of its own, for messages nothing, which is the
    template's to write.
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
        """Raises: InvalidRequest: a field that would change the tokens and is not served."""
        if self.messages is not None and self.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens is not supported with messages: the chat template writes them",
                param="add_special_tokens",
            )
        refuse_unless_inert(self.model_extra, _INERT_VALUES)


class DetokenizeBody(Body):
    """Token ids to read back as text."""

    model: str | None = None
    tokens: Items[int]
