"""What is wrong with a value is told in plain words."""

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

from api.errors import describe
from api.problem_texts import problem_text
from api.schemas.kv_policy import KvPolicyField
from api.schemas.openai import ChatBody, CompletionBody

ASKED = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            {"prompt": 5},
            "prompt: must be a text, a list of whole numbers, a list of texts, or a list of lists of whole numbers",
        ),
        (ASKED | {"stop": [1]}, "stop[0]: must be a text"),
        (ASKED | {"stop": 5}, "stop: must be a text, or a list of texts"),
        (ASKED | {"adapters": ["x"]}, 'adapters[0]: must be an object such as {"id": "x", "weight": 1}'),
        (ASKED | {"adapters": "x"}, "adapters: must be a list"),
        (ASKED | {"n": 9}, "n: must be at most 8"),
        (ASKED | {"n": 0}, "n: must be at least 1"),
        (ASKED | {"n": "2"}, "n: must be a whole number"),
        (ASKED | {"temperature": "1"}, "temperature: must be a number"),
        (ASKED | {"stream": "yes"}, "stream: must be true or false"),
        (ASKED | {"logit_bias": [5]}, "logit_bias: must be an object"),
        (ASKED | {"response_format": "json"}, 'response_format: must be an object such as {"type": "json_object"}'),
        (ASKED | {"stream_options": 5}, 'stream_options: must be an object such as {"include_usage": true}'),
        (ASKED | {"speculation": "x"}, 'speculation: must be an object such as {"max_draft": 4}, or true or false'),
        (
            ASKED | {"tool_choice": 5},
            "tool_choice: must be 'none', 'auto' or 'required', or an object such as "
            '{"type": "function", "function": {"name": "x"}}',
        ),
        ({"messages": ["x"]}, 'messages[0]: must be an object such as {"role": "user", "content": "Hello"}'),
        ({"messages": []}, "messages: has 0 entries; at least 1 must be given"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(body: dict[str, object], says: str) -> None:
    model = CompletionBody if "prompt" in body else ChatBody
    for as_fastapi_does in (False, True):
        with pytest.raises(ValidationError) as caught:
            model.model_validate(body, from_attributes=as_fastapi_does)
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in caught.value.errors()]
        assert describe(RequestValidationError(problems)).body["error"]["message"] == says


def test_an_object_without_its_kind_is_told_the_field_that_it_lacks() -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(KvPolicyField).validate_python({"recent": 128})
    assert [problem_text(problem) for problem in caught.value.errors()] == ["its field 'kind' is required"]
