"""Build the OpenAPI description: FastAPI's own, plus an example per route and the actual error formats.

FastAPI would describe its own 422 response. Here every error has OpenAI's or TGI's format.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from fastapi import FastAPI

from api.asgi.json_lines import Json
from api.errors import TGI_PATHS

_TEXT = {"type": "string"}
_MAYBE_TEXT = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "description": "Error in OpenAI's format: `param` names the field, `code` the case.",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _MAYBE_TEXT, "code": _MAYBE_TEXT},
        }
    },
    "example": {
        "error": {
            "message": "the model 'mio' does not exist; did you mean mia?",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    },
}
_TGI_ERROR = {
    "type": "object",
    "description": "Error in the format of TGI and LoRAX.",
    "required": ["error", "error_type"],
    "properties": {
        "error": _TEXT,
        "error_type": {"enum": ["validation", "generation", "overloaded", "incomplete_generation"]},
    },
    "example": {"error": "top_p must be above 0 and at most 1", "error_type": "validation"},
}


@dataclass(frozen=True, slots=True)
class Example:
    """Show one use of a route: the request, and the response with `status`."""

    summary: str
    # JSON, or text if `answer_type` or `body_type` is another type.
    answer: Any = None
    body: Any = None
    status: int = 200
    parameters: Mapping[str, Any] = field(default_factory=dict)
    answer_type: str = "application/json"
    body_type: str = "application/json"
    # The same response as events.
    stream: str | None = None
    # Body of an error in neither of the two formats.
    failure: Json | None = None


class DocumentedApi(FastAPI):
    """Application whose OpenAPI description includes `examples`, which are keyed by method and path."""

    def __init__(self, examples: Mapping[tuple[str, str], Example], **options: Any) -> None:
        super().__init__(**options)
        self._examples = examples

    def openapi(self) -> Json:
        if self.openapi_schema is None:
            self.openapi_schema = _documented(super().openapi(), self._examples)
        return self.openapi_schema


def _documented(schema: Json, examples: Mapping[tuple[str, str], Example]) -> Json:
    shapes = schema.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        shapes.pop(name, None)
    shapes |= {"Error": _ERROR, "TgiError": _TGI_ERROR}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            _add_errors(operation["responses"], "TgiError" if path in TGI_PATHS else "Error")
            if (example := examples.get((method.upper(), path))) is not None:
                _add_example(operation, example)
    return schema


def _add_errors(responses: Json, shape: str) -> None:
    responses.pop("422", None)
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}
    responses["4XX"] = {"description": "The request cannot be served as it is", "content": content}
    responses["5XX"] = {"description": "The server cannot serve it, now or at all", "content": content}


def _add_example(operation: Json, example: Example) -> None:
    operation["summary"] = example.summary
    for parameter in operation.get("parameters", ()):
        if parameter["name"] in example.parameters:
            parameter["example"] = example.parameters[parameter["name"]]
    if example.body is not None:
        sent = operation.setdefault("requestBody", {"required": True, "content": {}})["content"]
        sent.setdefault(example.body_type, {"schema": _schema_of(example.body)})["example"] = example.body
    responses = operation["responses"]
    known = responses.pop("200", None) or responses.pop(str(example.status), None)
    content: Json = {}
    if example.answer is not None:
        content[example.answer_type] = {"schema": _shape_of(example.answer), "example": example.answer}
    if example.stream is not None:
        content["text/event-stream"] = {"schema": _TEXT, "example": example.stream}
    responses[str(example.status)] = {"description": _description(known, example.status)} | (
        {"content": content} if content else {}
    )
    if example.failure is not None:
        shape = {"schema": _schema_of(example.failure), "example": example.failure}
        responses["5XX"] = {"description": "Not now", "content": {"application/json": shape}}


def _description(known: Json | None, status: int) -> str:
    if status >= 400:
        return "Not served"
    return str((known or {}).get("description", "Done"))


def _schema_of(example: Any) -> Json:
    """Return the JSON schema of a body like this one: only its type, because the fields depend on the request."""
    if isinstance(example, dict):
        return {"type": "object"}
    return {"type": "array" if isinstance(example, list) else "string"}


def _shape_of(example: Any) -> Json:
    """Return the JSON schema that an example implies: its fields, which may be null, and their types.

    Fields that depend on the request are optional. The schema of a list's items is what all items have in common.
    """
    if isinstance(example, Mapping):
        fields = {name: _or_null(_shape_of(value)) for name, value in example.items()}
        return {"type": "object", "required": [name for name in fields if name not in _ASKED_FOR], "properties": fields}
    if isinstance(example, list):
        return {"type": "array", "items": reduce(_common, map(_shape_of, example)) if example else {}}
    return next(({"type": name} for kind, name in _TYPES if isinstance(example, kind)), {})


# Optional fields: TGI's details, and keys that are names chosen by users.
_ASKED_FOR = frozenset({"details", "prod"})
_TYPES = ((bool, "boolean"), (int | float, "number"), (str, "string"))


def _or_null(shape: Json) -> Json:
    return {**shape, "type": [shape["type"], "null"]} if "type" in shape else shape


def _common(one: Json, other: Json) -> Json:
    """Return the JSON schema that two schemas have in common."""
    if one.get("type") != other.get("type"):
        return {}
    if "items" in one:
        return {**one, "items": _common(one["items"], other["items"])}
    if "properties" not in one:
        return one
    fields = {name: _common(shape, other["properties"].get(name, {})) for name, shape in one["properties"].items()}
    return {**one, "required": [name for name in one["required"] if name in other["required"]], "properties": fields}
