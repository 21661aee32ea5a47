"""Define the body of /v1/responses, OpenAI's newer form of a chat, and convert it to a chat body."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from api.asgi.json_lines import Json
from api.schemas.base import Body, Items, KnownBody, at_most
from api.schemas.openai import MAX_MESSAGES, ChatBody, DrawingFields, Effort
from api.schemas.request_fields import RequestFields
from api.schemas.structured_output import GuidedFields
from api.schemas.tools import MAX_TOOLS, FunctionFields, Message, ReasoningFields
from api.schemas.unsupported import INERT_IN_GENERATION, INERT_VALUES
from lorasrv.errors import InvalidRequest
from lorasrv.sampling_params import MAX_LOGPROBS

MAX_METADATA = 16
MAX_INCLUDED = 16
LOGPROBS = "message.output_text.logprobs"
REPEATED: Json = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "user": None,
}
"""Values in the response of fields that the request leaves out; `store` always has this value: nothing is stored."""
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""Parts that OpenAI adds to a response on request. Only the first one exists here."""


class InputPart(Body):
    """Add text to a message; other kinds of parts are not supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str


def _form(value: Any) -> str | None:
    return "Text" if isinstance(value, str) else "List" if isinstance(value, list) else None


_TEXT_OR_LIST = Discriminator(_form, custom_error_type="text_or_list", custom_error_message="must be a text or a list")
Text = Annotated[Annotated[str, Tag("Text")] | Annotated[Items[InputPart], Tag("List")], _TEXT_OR_LIST]


class InputMessage(KnownBody):
    """Add one turn, or repeat one of an earlier answer."""

    UNSUPPORTED: ClassVar = {
        **Message.UNSUPPORTED,
        "tool_calls": (None, []),
        "tool_call_id": (None,),
        "name": (None,),
        "reasoning": (None,),
        "reasoning_content": (None,),
    }

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Text


class InputCall(Body):
    """Repeat a call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ReasoningPart(Body):
    """Hold a text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(KnownBody):
    """Repeat the reasoning of an earlier answer. It belongs to the message or call that follows it."""

    UNSUPPORTED: ClassVar = {"encrypted_content": (None,), "summary": (None, [])}

    type: Literal["reasoning"]
    content: Items[ReasoningPart] | None = None


class InputCallOutput(Body):
    """Pass the output of a called function."""

    type: Literal["function_call_output"]
    call_id: str
    output: Text


def _kind(item: Any) -> str | None:
    """Return the tag of an item's kind; messages may leave `type` out."""
    kind = item.get("type") if isinstance(item, dict) else ""
    return _KINDS.get("message" if kind is None else kind) if isinstance(kind, str | None) else None


_KINDS = {
    "message": "Message",
    "reasoning": "Reasoning",
    "function_call": "Call",
    "function_call_output": "Output",
}
Item = Annotated[
    Annotated[InputMessage, Tag("Message")]
    | Annotated[InputReasoning, Tag("Reasoning")]
    | Annotated[InputCall, Tag("Call")]
    | Annotated[InputCallOutput, Tag("Output")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="must be an object whose type is message, reasoning, function_call or "
        "function_call_output",
    ),
]


Conversation = Annotated[Items[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
Input = Annotated[Annotated[str, Tag("Text")] | Annotated[Conversation, Tag("List")], _TEXT_OR_LIST]


class OfferedFunction(FunctionFields):
    """Offer a function, the only kind of tool."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, value: Any) -> Any:
        """Refuse other kinds of tools first, so that the error is not about the missing fields of a function."""
        if isinstance(value, dict) and value.get("type") != "function":
            raise PydanticCustomError("unknown_tool", "must be 'function', the only kind of tool", {"field": "type"})
        return value

    def of_chat(self) -> Json:
        """Return the tool in a chat's form."""
        return {"type": "function", "function": _given(self, FunctionFields.model_fields)}


class ForcedFunction(Body):
    """Force a call of one function."""

    type: Literal["function"]
    name: str


class TextFormat(KnownBody):
    """Select the output format. Unlike in a chat, the schema is not inside `json_schema`."""

    UNSUPPORTED: ClassVar = {"json_schema": (None,), "value": (None,)}

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None

    def of_chat(self) -> Json:
        """Return the format in a chat's form.

        Raises:
            InvalidRequest: the schema is missing.
        """
        if self.type != "json_schema":
            return {"type": self.type, "schema": self.schema_}
        if self.schema_ is None:
            raise InvalidRequest("{param} is missing", param="text.format.schema")
        return {"type": self.type, "json_schema": {"schema": self.schema_}}


class TextConfig(KnownBody):
    """Configure the text of the answer."""

    UNSUPPORTED: ClassVar = {"verbosity": (None, "medium")}

    format: TextFormat | None = None


class ReasoningConfig(KnownBody):
    """Configure the reasoning before the answer. Summaries of it are not supported."""

    UNSUPPORTED: ClassVar = {"summary": (None,), "generate_summary": (None,)}

    effort: Effort | None = None


class ResponseStreamOptions(KnownBody):
    """Refuse the stream options of other servers. Usage is always in the last event."""

    UNSUPPORTED: ClassVar = {"include_obfuscation": (None, False), "continuous_usage_stats": (None, False)}


_Name = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class ResponsesBody(RequestFields, DrawingFields, GuidedFields, ReasoningFields, KnownBody):
    """Answer a conversation. Nothing is stored: every request sends the whole conversation in `input`."""

    UNSUPPORTED: ClassVar = {**INERT_VALUES, **INERT_IN_GENERATION}

    model: str | None = None
    input: Input
    # A system message before those of `input`.
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[Items[OfferedFunction], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ForcedFunction | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # `auto` drops the oldest turns of a conversation that does not fit the context.
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[Items[Included], Field(max_length=MAX_INCLUDED)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    # Repeated in the response.
    metadata: Annotated[dict[_Name, _Value], Field(max_length=MAX_METADATA), at_most(MAX_METADATA)] | None = None
    # Limits tools that the server calls itself; there are none here.
    max_tool_calls: int | None = None
    # Accepted, because clients leave it at true, but nothing is stored.
    store: bool | None = None
    user: str | None = None

    def chat(self) -> ChatBody:
        """Return the body as a chat body.

        Raises:
            InvalidRequest: a function's output has no preceding call, a schema is missing, fields exclude each other,
                or there are no messages or too many.
        """
        fields = _given(self, _SHARED)
        if self.top_logprobs is not None or LOGPROBS in (self.include or ()):
            fields["logprobs"] = True
        if self.tools is not None:
            fields["tools"] = [tool.of_chat() for tool in self.tools]
        if isinstance(self.tool_choice, ForcedFunction):
            fields["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        if self.max_output_tokens is not None:
            fields["max_tokens"] = self.max_output_tokens
        if self.reasoning is not None and self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            if other := next(iter(fields.keys() & GuidedFields.model_fields.keys()), None):
                raise InvalidRequest("{param} and text.format exclude each other; send one", param=other)
            fields["response_format"] = self.text.format.of_chat()
        if self.truncation is not None:
            fields["context_overflow"] = "drop_oldest" if self.truncation == "auto" else "error"
        messages = list(self._messages())
        if not messages:
            raise InvalidRequest("{param} holds no message", param="input")
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest(f"{{param}} and instructions are more than {MAX_MESSAGES} messages", param="input")
        return ChatBody.model_validate({**fields, "messages": messages})

    def _messages(self) -> Iterator[Json]:
        if self.instructions is not None:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        called: set[str] = set()
        # The assistant's current turn: reasoning, a text, calls, or several of these.
        said: Json | None = None
        for number, item in enumerate(self.input):
            if isinstance(item, InputCall):
                said = said or {"role": "assistant", "content": None}
                said.setdefault("tool_calls", []).append(_call(item))
                called.add(item.call_id)
                continue
            if isinstance(item, InputMessage) and item.role == "assistant" and said and said.keys() & _JOINED:
                said["content"] = (said["content"] or "") + _content(item.content)
                continue
            if said is not None:
                yield said
                said = None
            if isinstance(item, InputReasoning):
                if text := "".join(part.text for part in item.content or ()):
                    said = {"role": "assistant", "content": "", "reasoning_content": text}
                continue
            if isinstance(item, InputCallOutput):
                if item.call_id not in called:
                    raise InvalidRequest("{param} is that of no function_call before", param=f"input[{number}].call_id")
                yield {"role": "tool", "content": _content(item.output), "tool_call_id": item.call_id}
            elif item.role == "assistant":
                said = {"role": "assistant", "content": _content(item.content)}
            else:
                yield {"role": item.role, "content": _content(item.content)}
        if said is not None:
            yield said


_JOINED = frozenset({"tool_calls", "reasoning_content"})
"""Fields of an assistant's turn that make the next assistant message continue the same turn."""
_SHARED = (ResponsesBody.model_fields.keys() & ChatBody.model_fields.keys()) - {"tools", "stream_options"}
"""Fields that mean the same in a chat."""


def _given(body: Body, names: Iterable[str]) -> Json:
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def _call(item: InputCall) -> Json:
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}


def _content(text: Text) -> str:
    """Return a text; its parts are joined by line breaks, as in a chat."""
    return text if isinstance(text, str) else "\n".join(part.text for part in text)
