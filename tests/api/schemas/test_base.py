"""Bodies are validated on the event loop, so validation ends early, whatever the body."""

import importlib
import json
import pkgutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import api.schemas
from api.asgi.json_body import MAX_VALUES
from api.schemas.adapters import AdapterBody, AdapterPatch, VerifyBody
from api.schemas.base import Items
from api.schemas.batches import BatchBody
from api.schemas.openai import ChatBody, CompletionBody
from api.schemas.tgi import GenerateBody
from api.schemas.tokenize import DetokenizeBody

MANY = 20_000
WRONG = [0.5] * MANY
ENTRIES = {f"key{number}": WRONG[:1] for number in range(MANY)}
# As many as a union has branches, and a few other fields.
FEW = 8


def schemas() -> list[type[BaseModel]]:
    modules = [importlib.import_module(f"api.schemas.{m.name}") for m in pkgutil.iter_modules(api.schemas.__path__)]
    found = {v for m in modules for v in vars(m).values() if isinstance(v, type) and issubclass(v, BaseModel)}
    return sorted(found - {BaseModel}, key=lambda kind: kind.__name__)


def endless(schema: Any, where: str = "", bounded: bool = False) -> Iterator[str]:
    """Where a core schema has lists that are not left at the first error, or objects without a bound."""
    if isinstance(schema, list | tuple):
        for item in schema:
            yield from endless(item, where)
        return
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if kind in ("list", "set", "tuple") and not schema.get("fail_fast"):
        yield where
    if kind == "dict" and schema["values_schema"]["type"] != "any" and not bounded:
        yield where
    forbids = schema.get("config", {}).get("extra_fields_behavior") == "forbid"
    if kind == "model" and forbids and schema["schema"]["type"] != "function-before":
        yield where
    for key, value in schema.items():
        yield from endless(value, f"{where}/{key}" if isinstance(value, dict) else where, kind == "function-before")


@pytest.mark.parametrize("kind", schemas(), ids=lambda kind: kind.__name__)
def test_every_list_and_object_is_left_at_its_first_error(kind: type[BaseModel]) -> None:
    assert list(endless(kind.__pydantic_core_schema__)) == []


def test_that_test_can_fail() -> None:
    class Endless(BaseModel):
        ids: list[int]
        either: str | Items[list[str]]
        named: dict[str, int]

    class Forbidding(BaseModel, extra="forbid"):
        known: int

    assert len(list(endless(Endless.__pydantic_core_schema__))) == 3
    assert len(list(endless(Forbidding.__pydantic_core_schema__))) == 1
    assert len(schemas()) > 20


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionBody, {"prompt": WRONG}),
        (CompletionBody, {"prompt": [WRONG] * 9}),
        (CompletionBody, {"prompt": "x", "stop": WRONG}),
        (CompletionBody, {"prompt": "x", "guided_choice": WRONG}),
        (CompletionBody, {"prompt": "x", "logit_bias": ENTRIES}),
        (CompletionBody, {"prompt": "x", "structured_outputs": {"choice": WRONG}}),
        (ChatBody, {"messages": [{"role": "user", "content": WRONG}]}),
        (ChatBody, {"messages": [{"role": "user", "content": WRONG[:2000]}] * 2000}),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": WRONG}]}),
        (ChatBody, {"messages": [{"role": "user", "content": "x"}], "tools": WRONG[:100]}),
        (GenerateBody, {"inputs": "x", "parameters": {"stop": WRONG}}),
        (DetokenizeBody, {"tokens": WRONG}),
        (BatchBody, {"metadata": ENTRIES}),
        (AdapterBody, ENTRIES),
        (AdapterPatch, {"limits": ENTRIES}),
        (VerifyBody, {"prompts": WRONG[:16]}),
        (VerifyBody, ENTRIES),
    ],
)
def test_few_errors_are_reported_of_many(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() <= FEW


def test_others_are_answered_while_a_million_wrong_values_are_refused(server) -> None:
    body = json.dumps({"model": "tiny-base", "prompt": [0.5] * (MAX_VALUES - 10)})
    headers = {"content-type": "application/json"}
    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(server.http.post, "/v1/completions", content=body, headers=headers) for _ in range(2)]
        while not all(one.done() for one in asked):
            assert server.http.get("/ping").status_code == 200
    for one in asked:
        assert (one.result().status_code, one.result().json()["error"]["param"]) == (400, "prompt")
