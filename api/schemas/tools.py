"""Define the fields of a chat: messages, tools and template variables, as in OpenAI and vLLM."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypedDict

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from api.asgi.json_body import parse_json
from api.errors import ApiError, location_of
from api.problem_texts import problem_text
from api.schemas.base import Body, Items, KnownBody
from lorasrv.errors import InvalidRequest
from lorasrv.text.reasoning import REASONING_NAMES
from lorasrv.text.tool_parsers.base import Tool

MAX_TOOLS = 128
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


class TextPart(Body):
    """Add text to a message; other kinds of parts are not supported."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """Name a called function. `arguments` is JSON text, as in OpenAI's API, or the object itself."""

    name: str
    arguments: str | dict[str, Any] = ""


class MessageToolCall(Body):
    """Repeat a call that an earlier answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """Return the call for templates, with arguments as an object."""
        function = {"name": self.function.name, "arguments": _object(self.function.arguments)}
        return {**({"id": self.id} if self.id else {}), "type": "function", "function": function}


class Message(KnownBody):
    """Add one turn. `developer` is OpenAI's newer word for `system`, which chat templates know."""

    UNSUPPORTED: ClassVar = {
        "audio": (None,),
        "function_call": (None,),
        "refusal": (None, ""),
        "prefix": (None, False),
        "partial": (None, False),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Items[MessageToolCall] | None = None
    content: Annotated[str | Items[TextPart] | None, Field(validate_default=True)] = None
    tool_call_id: str | None = None
    name: str | None = None
    # vLLM's older name and its newer one. Clients send both, and one of them may be null.
    reasoning_content: str | None = None
    reasoning: str | None = None

    @field_validator("content")
    @classmethod
    def _is_there(cls, value: Any, others: ValidationInfo) -> Any:
        if value is None and not (others.data.get("role") == "assistant" and others.data.get("tool_calls")):
            raise PydanticCustomError("missing_content", "a text is required, or tool_calls of an assistant")
        return value

    @property
    def is_about_tools(self) -> bool:
        """Return whether only a template with tools can render the message."""
        return self.role == "tool" or bool(self.tool_calls)

    def plain(self) -> dict[str, Any]:
        """Return the message for a chat template. Text parts are joined by line breaks, as in vLLM.

        Raises:
            InvalidRequest: the arguments of a call are not a JSON object.
        """
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content or ())
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        given = {"tool_call_id": self.tool_call_id, "name": self.name}
        given |= dict.fromkeys(REASONING_NAMES, self.reasoning_content or self.reasoning)
        return plain | {name: value for name, value in given.items() if value is not None}


class FunctionFields(Body):
    """Define the fields that describe a function."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def argument_schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of the arguments, which are an object even if `parameters` has no type.

        Raises:
            InvalidRequest: `parameters` has a type that does not allow objects.
        """
        if self.parameters is None:
            return NO_PARAMETERS
        kinds = self.parameters.get("type", "object")
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            raise InvalidRequest(f"tools: parameters of {self.name} must describe an object", param="tools")
        return {**self.parameters, "type": "object"}


class Function(FunctionFields):
    """Describe a function that the model may call."""


class FunctionTool(Body):
    """Offer a function, the only kind of tool."""

    type: Literal["function"]
    function: Function

    @model_validator(mode="before")
    @classmethod
    def _nothing_beside(cls, value: Any) -> Any:
        """Refuse fields of the function outside `function`, as in the tools of /v1/responses: they would be ignored."""
        if isinstance(value, dict) and isinstance(inside := value.get("function"), dict):
            for name in FunctionFields.model_fields:
                if value.get(name) not in (None, inside.get(name)):
                    raise PydanticCustomError("misplaced", "belongs inside function", {"field": name})
        return value


class ChosenFunction(Body):
    name: str


class NamedChoice(Body):
    """Force a call of one tool. TGI's clients leave out `type`."""

    type: Literal["function"] = "function"
    function: ChosenFunction


class PromptEnd(TypedDict, total=False):
    """Hold arguments of `ChatTemplate.encode`."""

    add_generation_prompt: bool
    continue_final_message: bool


class PromptEndFields(Body):
    """Define how a conversation's prompt ends.

    It ends with the header of an answer (the default), after the last message (`add_generation_prompt` is false), or
    inside the last message, which the answer continues (`continue_final_message`).
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def prompt_end(self, last: Message) -> PromptEnd:
        """Return the arguments of `ChatTemplate.encode`, given the last message.

        Raises:
            InvalidRequest: the fields contradict each other, or the message is about tools.
        """
        if not self.continue_final_message:
            return {"add_generation_prompt": self.add_generation_prompt is not False}
        if self.add_generation_prompt:
            raise _no_end("excludes add_generation_prompt: true; leave that out")
        if last.is_about_tools:
            raise _no_end("needs a last message of text alone")
        return {"add_generation_prompt": False, "continue_final_message": True}


def _no_end(why: str) -> InvalidRequest:
    return InvalidRequest(f"continue_final_message {why}", param="continue_final_message")


class ReasoningFields(Body):
    """Define how much reasoning precedes an answer, and how the response shows it."""

    # As in vLLM: whether the response has the reasoning. False omits it, but it is still generated and counted.
    include_reasoning: bool | None = None
    # As in SGLang: whether reasoning has its own fields. False leaves it in the text, with its markers.
    separate_reasoning: bool | None = None
    # As in vLLM: most tokens of reasoning, after which it is closed. -1: no limit.
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None


class ToolFields(PromptEndFields):
    """Define the tool and template fields of a chat. Templates get the tools as the client wrote them."""

    tools: Annotated[Items[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def uses_tools(self) -> bool:
        """Return whether the prompt contains the tools, which is not the case with tool_choice `none`."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forces_call(self) -> bool:
        return self.uses_tools and self.tool_choice not in (None, "auto")

    @property
    def allows_parallel_calls(self) -> bool:
        """Return whether an answer may contain more than one call."""
        return self.parallel_tool_calls is not False

    @property
    def constrains_calls(self) -> bool:
        """Return whether a grammar constrains calls, because `tool_choice` forces one or a tool is strict."""
        is_forced = self.tool_choice not in (None, "none", "auto")
        return is_forced or (self.uses_tools and any(_is_strict(tool) for tool in self.tools or ()))

    def offered_tools(self) -> list[Tool]:
        """Return the tools that may be called: all, or only the one that `tool_choice` names.

        Raises:
            InvalidRequest: a tool is malformed, two have the same name, or the named one is missing.
        """
        if not self.tools:
            if self.tool_choice not in (None, "none", "auto"):
                raise InvalidRequest("tool_choice asks for a call, but there are no tools", param="tool_choice")
            return []
        functions = [_function(number, tool) for number, tool in enumerate(self.tools)]
        if len({function.name for function in functions}) < len(functions):
            raise InvalidRequest("tools: two of them have the same name", param="tools")
        offered = [Tool(f.name, f.argument_schema(), bool(f.strict)) for f in functions]
        if not isinstance(self.tool_choice, NamedChoice):
            return offered
        named = [tool for tool in offered if tool.name == self.tool_choice.function.name]
        if not named:
            name = self.tool_choice.function.name
            raise InvalidRequest(f"tool_choice names {name[:64]!r}, which is not among the tools", param="tool_choice")
        return named


def _function(number: int, tool: dict[str, Any]) -> Function:
    try:
        return FunctionTool.model_validate(tool).function
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, location_of(problem)))
        raise InvalidRequest(f"tools[{number}].{where}: {problem_text(problem)}", param="tools") from None


def _is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and function.get("strict") is True


def _object(arguments: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        value = parse_json((arguments or "{}").encode(), "the text")
    except ApiError as error:
        raise InvalidRequest(f"{{param}}: arguments of a tool call: {error.detail}", param="messages") from None
    if not isinstance(value, dict):
        raise InvalidRequest("{param}: arguments of a tool call are not a JSON object", param="messages")
    return value
