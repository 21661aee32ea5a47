"""Every exception of ours has its HTTP answer, and none tells what it should not."""

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from adapter_store.errors import AdapterError, AdapterInvalid, Problem, StoreUnusable
from api.errors import ANSWERS, FIELD_NAMES, TGI_PATHS, answer_for, describe, describe_at, field_name
from api.schemas.adapters import VerifyBody
from api.schemas.openai import ChatBody
from api.schemas.responses import ResponsesBody
from api.schemas.tgi import GenerateBody, Parameters
from lorasrv.errors import ContextLengthExceeded, LorasrvError, ModelNotFound, StepFailed


def family(root: type[Exception]) -> list[type[Exception]]:
    return [root, *(found for child in root.__subclasses__() for found in family(child))]


@pytest.mark.parametrize("kind", [*family(LorasrvError), *family(AdapterError)], ids=lambda kind: kind.__name__)
def test_every_class_has_an_answer_of_its_own(kind: type[Exception]) -> None:
    answer = ANSWERS[kind]
    assert 400 <= answer.status <= 599
    assert answer.code
    assert answer.status != 409 or not answer.retry, "openai-python repeats a 409"
    assert answer.status not in (429, 503) or answer.retry_after_s or not answer.retry
    assert answer.status != 500 or not answer.retry or kind is StepFailed, "the same would fail again"


def test_a_new_subclass_is_answered_as_its_ancestor() -> None:
    class TooManyRanks(AdapterInvalid):
        pass

    assert answer_for(TooManyRanks) is ANSWERS[AdapterInvalid]


@pytest.mark.parametrize(
    ("path", "param", "shown"),
    [
        ("/v1/completions", "prompt", "prompt"),
        ("/v1/completions", "max_tokens", "max_tokens"),
        ("/v1/chat/completions", "prompt", "messages"),
        ("/v1/chat/completions", "top_p", "top_p"),
        *((path, "max_tokens", "max_new_tokens") for path in sorted(TGI_PATHS)),
        *((path, "prompt", "inputs") for path in sorted(TGI_PATHS)),
        *((path, "ignore_eos", "ignore_eos_token") for path in sorted(TGI_PATHS)),
    ],
)
def test_fields_are_called_as_the_paths_bodies_call_them(path: str, param: str, shown: str) -> None:
    body = describe_at(path, ContextLengthExceeded("lower {param} by 3", param=param)).body
    if path in TGI_PATHS:
        assert body == {"error": f"lower {shown} by 3", "error_type": "validation"}
    else:
        error = {"message": f"lower {shown} by 3", "param": shown}
        assert body["error"] == {**error, "type": "invalid_request_error", "code": "context_length_exceeded"}


def test_names_of_fields_are_those_of_bodies() -> None:
    fields = {
        "/v1/chat/completions": ChatBody.model_fields.keys(),
        "/v1/responses": ResponsesBody.model_fields.keys() | {"text.format", "reasoning.effort"},
        **{path: Parameters.model_fields.keys() | GenerateBody.model_fields.keys() for path in sorted(TGI_PATHS)},
    }
    assert FIELD_NAMES.keys() == fields.keys()
    for path, names in FIELD_NAMES.items():
        assert set(names.values()) <= fields[path]
        assert not set(names) & fields[path], "what the path has itself keeps its name"


def test_an_unexpected_exception_is_a_bare_500() -> None:
    failure = describe(ZeroDivisionError("/secret/path"))
    assert failure.status == 500
    assert "/secret" not in str(failure.body)
    assert failure.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("error", [StoreUnusable("store /srv/x cannot be used"), ModelNotFound("/srv/x is missing")])
def test_paths_of_the_operator_are_not_told(error: Exception) -> None:
    assert "/srv" not in str(describe(error).body)


def test_every_problem_of_an_adapter_is_listed() -> None:
    problems = (Problem("bad_rank", "r", "must be positive"), Problem("non_finite", "x.lora_A", "holds NaN"))
    failure = describe(AdapterInvalid(problems))
    error = failure.body["error"]
    assert (failure.status, error["code"], error["param"]) == (422, "invalid_adapter", "r")
    assert error["details"] == [problem.to_dict() for problem in problems]


def test_fields_are_named_as_in_the_body() -> None:
    assert field_name(("body", "messages", 0, "content", "list[TextPart]", 1, "type")) == "messages[0].content[1].type"
    assert field_name(("body", "prompt", "str")) == "prompt"
    assert field_name(("body",)) == ""


def test_what_is_wrong_with_a_field_is_told_with_what_would_be_right() -> None:
    with pytest.raises(ValidationError) as caught:
        VerifyBody.model_validate({"prompt": "Hi", "prompts": ["Hi"] * 17})
    problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in caught.value.errors()]
    message = describe(RequestValidationError(problems)).body["error"]["message"]
    unknown = "prompt: is no field here; correct its name, or leave it out"
    assert message == f"prompts: has 17 entries; at most 16 are allowed; {unknown}"


def test_a_field_of_several_types_is_told_once() -> None:
    problems = [
        {"loc": ("query", "wait", "constrained-float"), "type": "less_than_equal", "ctx": {"le": 60}},
        {"loc": ("query", "wait", "literal['all']"), "type": "literal_error", "ctx": {"expected": "'all'"}},
        {"loc": ("query", "force"), "type": "bool_parsing"},
    ]
    error = describe(RequestValidationError(problems)).body["error"]
    wait = "wait: must be at most 60, or 'all'"
    assert (error["message"], error["param"]) == (f"{wait}; force: must be true or false", "wait")


def test_many_validation_errors_are_counted() -> None:
    problems = [{"loc": ("body", f"field{i}"), "msg": "wrong"} for i in range(9)]
    message = describe(RequestValidationError(problems)).body["error"]["message"]
    assert message == "field0: wrong; field1: wrong; field2: wrong; and 6 more"
