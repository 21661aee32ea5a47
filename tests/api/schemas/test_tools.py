"""Tools and their calls in messages: what is an object is taken, anything else is refused by its field."""

import json
from typing import Any

import pytest

from api.schemas.openai import ChatBody
from api.schemas.tools import NO_PARAMETERS
from lorasrv.errors import InvalidRequest

TURN = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [TURN], **fields})


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ({}, NO_PARAMETERS),
        ({"parameters": None}, NO_PARAMETERS),
        ({"parameters": {}}, {"type": "object"}),
        ({"parameters": {"required": ["a"]}}, {"type": "object", "required": ["a"]}),
        ({"parameters": {"type": ["object", "null"]}}, {"type": "object"}),
    ],
)
def test_arguments_are_an_object_even_where_the_schema_does_not_say_so(
    given: dict[str, Any], schema: dict[str, Any]
) -> None:
    """Else a forced call could be one of a list, which no client takes for a call."""
    [offered] = chat(tools=[tool(**given)], tool_choice="required").offered_tools()
    assert offered.parameters == schema


@pytest.mark.parametrize("kind", ["array", "string", ["null"], 7])
def test_arguments_that_cannot_be_an_object(kind: Any) -> None:
    with pytest.raises(InvalidRequest, match="parameters of f must describe an object"):
        chat(tools=[tool(parameters={"type": kind})]).offered_tools()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (r'{"utc": "\ud83d"}', "lone surrogate"),
        (json.dumps({"a": 1}).replace("1", "[" * 700 + "]" * 700), "nested more than 64 levels"),
        ('{"a": 1e999}', "too large"),
        ('{"a": NaN}', "not a JSON number"),
        ('{"a": 1, "a": 2}', "appears more than once"),
        ("[1]", "not a JSON object"),
        ("{", "not JSON"),
    ],
)
def test_arguments_of_an_earlier_call_are_as_strict_as_the_body(arguments: str, says: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    [message] = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    with pytest.raises(InvalidRequest, match=says) as refused:
        message.plain()
    assert refused.value.param == "messages"
