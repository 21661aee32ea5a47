"""Define a persona's defaults, which apply to fields that requests to a version leave out.

Sampling fields have the same names and types as in requests. Texts may contain `{{char}}`, the persona's name, and
`{{user}}`, the request's `user`.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Discriminator, Field, Tag, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from adapter_store.registry.near_names import near_names
from api.errors import field_name
from api.problem_texts import problem_text
from api.schemas.base import ClosedBody, Items
from api.schemas.composition import PinnedAdaptersField
from api.schemas.openai import ContextOverflow, SamplingFields
from api.schemas.speculation import SpeculationField
from api.schemas.structured_output import ResponseFormat
from api.schemas.tools import MAX_TOOLS, NamedChoice, ReasoningFields
from lorasrv.errors import InvalidRequest

MAX_DEFAULTS_BYTES = 256 << 10
MAX_STOPS = 8
"""Half of the 16 that a request may have, which leaves the other half to the client."""
MAX_STOP_TOKEN_IDS = 64
MAX_BIASED_TOKENS = 512
MAX_GREETINGS, MAX_GREETING_CHARS = 16, 16_384
MAX_EXAMPLES, MAX_EXAMPLE_MESSAGES = 64, 64
MAX_NAME_CHARS = 64
MAX_USER_CHARS = 64
CHAR, USER = "{{char}}", "{{user}}"
Value = TypeVar("Value")
_PLACEHOLDER = re.compile(r"\{\{([^{}]*)\}\}")
_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
_Greeting = Annotated[str, Field(min_length=1, max_length=MAX_GREETING_CHARS)]


class SystemPrompt(ClosedBody):
    """Set the system prompt.

    With the mode `default`, the client's system prompt replaces it; with `prepend`, it precedes the client's; with
    `lock`, the client may not send one.
    """

    text: Annotated[str, Field(min_length=1)]
    mode: Literal["default", "prepend", "lock"] = "default"


class ExampleMessage(ClosedBody):
    """Add one turn of an example dialogue."""

    role: Literal["user", "assistant"]
    content: Annotated[str, Field(min_length=1)]


def _kind(value: object) -> str | None:
    if isinstance(value, str):
        return "Text"
    return "Prompt" if isinstance(value, Mapping | SystemPrompt) else None


class Defaults(SamplingFields, ReasoningFields, ClosedBody):
    """Hold the defaults of one version."""

    name: _Name | None = None
    system: (
        Annotated[
            Annotated[str, Field(min_length=1), Tag("Text")] | Annotated[SystemPrompt, Tag("Prompt")],
            Discriminator(
                _kind, custom_error_type="system", custom_error_message="must be a text, or an object with text"
            ),
        ]
        | None
    ) = None
    examples: (
        Annotated[
            Items[Annotated[Items[ExampleMessage], Field(min_length=2, max_length=MAX_EXAMPLE_MESSAGES)]],
            Field(max_length=MAX_EXAMPLES),
        ]
        | None
    ) = None
    greetings: Annotated[Items[_Greeting], Field(max_length=MAX_GREETINGS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[Items[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    speculation: SpeculationField | None = None
    context_overflow: ContextOverflow | None = None
    # Use the sum of these versions as weights. Stored as `{"id": "mia@3", "weight": 1.0, "digest": "sha256:..."}`.
    adapters: PinnedAdaptersField | None = None

    @field_validator("examples")
    @classmethod
    def _take_turns(cls, value: list[list[ExampleMessage]] | None) -> list[list[ExampleMessage]] | None:
        for dialogue in value or ():
            roles = [message.role for message in dialogue]
            if roles != ["user", "assistant"] * (len(roles) // 2):
                raise PydanticCustomError("turns", "each dialogue goes user, assistant, user, …, assistant")
        return value

    @field_validator("stop")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        return _at_most(value, MAX_STOPS)

    @field_validator("stop_token_ids")
    @classmethod
    def _few_ids(cls, value: list[int] | None) -> list[int] | None:
        return _at_most(value, MAX_STOP_TOKEN_IDS)

    @field_validator("logit_bias")
    @classmethod
    def _few_biases(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        return _at_most(value, MAX_BIASED_TOKENS)

    @property
    def system_prompt(self) -> SystemPrompt | None:
        """Return the system prompt with its mode."""
        return SystemPrompt(text=self.system) if isinstance(self.system, str) else self.system

    @property
    def is_locked(self) -> bool:
        """Return whether clients can neither replace nor turn off the system prompt."""
        return self.system_prompt is not None and self.system_prompt.mode == "lock"

    def texts(self) -> list[tuple[str, str]]:
        """Return each text with its place, such as `examples[0][1]`: (place, text)."""
        found = [] if self.system_prompt is None else [("system", self.system_prompt.text)]
        for number, dialogue in enumerate(self.examples or ()):
            found += [(f"examples[{number}][{i}]", message.content) for i, message in enumerate(dialogue)]
        return found + [(f"greetings[{number}]", text) for number, text in enumerate(self.greetings or ())]

    def filled(self, text: str, adapter_id: str, user: str | None) -> str:
        """Return a text with its placeholders replaced; `{{user}}` stays if `user` is None."""
        names = {CHAR: self.name or adapter_id} | ({} if user is None else {USER: user})
        # In one pass, so that a placeholder inside a name is not replaced.
        return _PLACEHOLDER.sub(lambda match: names.get(match[0], match[0]), text)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse defaults as the store keeps them.

        Raises:
            ValueError: they are not valid defaults; the message names the field.
        """
        try:
            return cls.model_validate(json.loads(text))
        except ValidationError as error:
            problem = error.errors()[0]
            place = field_name(("defaults", *problem["loc"])) or ".".join(map(str, problem["loc"]))
            if problem["type"] == "extra_forbidden":
                near = near_names(place, cls.model_fields) if len(problem["loc"]) == 1 else []
                raise ValueError(f"unknown field {place}{f'; did you mean {near[0]}?' if near else ''}") from None
            raise ValueError(f"{place}: {problem_text(problem)}") from None


def _at_most(value: Value, most: int) -> Value:
    if isinstance(value, list | dict) and len(value) > most:
        raise PydanticCustomError("too_many", f"a persona holds at most {most}, so that requests can add to them")
    return value


def to_text(given: Mapping[str, Any]) -> str:
    """Return valid defaults as the store keeps them: JSON with the fields in a fixed order, without null ones.

    The order inside a field is kept, because it is part of a JSON schema's meaning.
    """
    kept = {name: given[name] for name in Defaults.model_fields if given.get(name) is not None}
    return json.dumps(kept, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def placeholders(text: str) -> list[str]:
    """Return all placeholders in a text, with their double braces."""
    return [match[0] for match in _PLACEHOLDER.finditer(text)]


def user_name(user: str | None) -> str:
    """Return the text that replaces `{{user}}`.

    Raises:
        InvalidRequest: the name is empty, too long or not printable; it becomes part of the persona's prompt.
    """
    if user is None:
        return "User"
    if not 0 < len(user) <= MAX_USER_CHARS or not user.isprintable():
        raise InvalidRequest(
            f"user is part of this persona's prompt: 1 to {MAX_USER_CHARS} printable characters", param="user"
        )
    return user
