"""docs/api.md, written from the OpenAPI description: `python -m tests.helpers.api_reference > docs/api.md`."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from api.app import _ROUTES
from api.errors import _HTTP_CODES, ANSWERS
from api.schemas.openai import DEFAULT_COMPLETION_TOKENS
from api.schemas.openapi import DocumentedApi
from api.schemas.openapi_examples import EXAMPLES
from api.schemas.unsupported import INERT_VALUES
from lorasrv.request import SamplingParams

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
INTRO = """# The HTTP interface

Written by `tests/helpers/api_reference.py` from the server's own description; a test fails when it is stale. The whole
of it, with an example of every route, is `GET /openapi.json` of a running server.

What fields mean: [sampling.md](sampling.md), [logprobs.md](logprobs.md),
[structured-output.md](structured-output.md), [scheduling.md](scheduling.md) (`priority`, `timeout_s`, limits),
[batch.md](batch.md), [tgi.md](tgi.md), [versions.md](versions.md) (names, aliases). Clients: [clients.md](clients.md).
The command line: [cli.md](cli.md).

- Bodies are JSON with a JSON content type, strict (`"8"` is no number, NaN is none, no key twice), and at most 8 MiB
  unless the route says otherwise. `null` is the same as leaving a field out.
- A known field is honoured, or refused by name with 400; fields that nobody knows are ignored.
- Streams: `data: {json}`, an empty line, at the end `data: [DONE]`. With `stream_options.include_usage` the last chunk
  has usage and no choices. A failure after the beginning is an event with `error`.
- Answers of models have `x-request-id`, `x-queue-ms`, `x-load-ms`, and the final figures in `usage.lorasrv`; those of
  adapters, but not the base's, also `x-adapter-id`, `x-adapter-version`, `x-adapter-digest` and `x-adapter-tier`
  (`resident`, `host`, `disk`: where it was found).
"""
FIELDS_OF = {
    "ChatBody": "Chat: `POST /v1/chat/completions`",
    "CompletionBody": "Plain completions: `POST /v1/completions`",
    "GenerateBody": "TGI and LoRAX: `POST /generate`, `/generate_stream`, `/`",
    "Parameters": "`parameters` of those",
}


def description() -> Json:
    """/openapi.json without a server."""
    app = DocumentedApi(EXAMPLES, title="lorasrv")
    for module in _ROUTES:
        app.include_router(module.router)
    return app.openapi()


def page() -> str:
    """The whole page."""
    schema = description()
    shapes = schema["components"]["schemas"]
    lines = [INTRO, "## Routes", "", "| route | does | body |", "|---|---|---|", *_routes(schema["paths"])]
    lines += ["", "## Fields of a request", ""]
    lines += [
        f"What has no default is off. Without `max_tokens` a plain completion has {DEFAULT_COMPLETION_TOKENS} tokens,"
    ]
    lines += ["a chat, and what TGI's routes generate, the rest of the context."]
    for name, title in FIELDS_OF.items():
        lines += ["", f"### {title}", "", "| field | type | default |", "|---|---|---|", *_fields(shapes[name], shapes)]
    for name in sorted(shapes.keys() - FIELDS_OF.keys() - {"Error", "TgiError", "OnCold"}):
        if shapes[name].get("properties"):
            lines += [
                "",
                f"### {name}",
                "",
                "| field | type | default |",
                "|---|---|---|",
                *_fields(shapes[name], shapes),
            ]
    lines += ["", "### Refused unless they ask for nothing", ""]
    lines += ["These are known and not served; each is accepted with the values beside it.", ""]
    lines += ["| field | accepted |", "|---|---|"]
    lines += [f"| `{name}` | {_values(values)} |" for name, values in sorted(INERT_VALUES.items())]
    return "\n".join([*lines, "", *_errors()]).rstrip() + "\n"


def _routes(paths: Mapping[str, Json]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            query = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"]
            shown = f"{path}?{'&'.join(query)}" if query else path
            yield f"| `{method.upper()} {shown}` | {operation['summary']} | {_body(operation)} |"


def _body(operation: Json) -> str:
    for kind, media in operation.get("requestBody", {}).get("content", {}).items():
        reference = media.get("schema", {}).get("$ref", "")
        return f"`{reference.rpartition('/')[2]}`" if reference else f"`{kind}`"
    return ""


def _fields(shape: Json, shapes: Mapping[str, Json]) -> Iterator[str]:
    required = shape.get("required", ())
    for name, field in shape["properties"].items():
        default = "required" if name in required else _default(name, field)
        yield f"| `{name}` | {_type(field, shapes)} | {default} |"


def _default(name: str, field: Json) -> str:
    if field.get("default") is not None:
        return f"`{field['default']}`"
    known = getattr(SamplingParams(), name, None)
    return f"`{known}`" if isinstance(known, int | float) and not isinstance(known, bool) else ""


def _type(field: Json, shapes: Mapping[str, Json]) -> str:
    if reference := field.get("$ref", "").rpartition("/")[2]:
        values = shapes[reference].get("enum")
        return " ".join(f"`{value}`" for value in values) if values else f"`{reference}`"
    if "anyOf" in field:
        return " or ".join(_type(one, shapes) for one in field["anyOf"] if one.get("type") != "null")
    if "enum" in field or "const" in field:
        return " ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}), shapes)}{_bounds(field, 'Items')}"
    return f"{field.get('type', 'any')}{_bounds(field, 'imum')}{_bounds(field, 'Length')}"


def _bounds(field: Json, kind: str) -> str:
    least, most = (field.get(f"{side}{kind}") for side in ("min", "max"))
    if least is None and most is None:
        return ""
    unit = {"Items": " items", "Length": " characters", "imum": ""}[kind]
    if least is None or most is None:
        return f", {'at most' if least is None else 'at least'} {_number(most if least is None else least)}{unit}"
    return f", {_number(least)} to {_number(most)}{unit}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else str(value)


def _values(values: tuple[Any, ...]) -> str:
    words = {None: "null", True: "true", False: "false"}
    shown = [words[v] if v is None or isinstance(v, bool) else str(v).replace("'", '"') for v in values]
    return " ".join(f"`{one}`" for one in shown)


def _errors() -> Iterator[str]:
    yield "## Errors"
    yield ""
    yield '`{"error": {"message", "type", "param", "code"}}`, where `param` is the field; on the routes of TGI theirs'
    yield "([tgi.md](tgi.md)). What has `Retry-After` may succeed later; what never will is no 5xx, or has"
    yield "`x-should-retry: false`."
    yield ""
    yield "| status | code | asked again by openai-python |"
    yield "|---|---|---|"
    rows = raised_codes() | {(answer.status, answer.code): answer.retry for answer in ANSWERS.values()}
    for status, code in sorted(rows):
        again = (status in (408, 409, 429) or status >= 500) and rows[status, code]
        yield f"| {status} | `{code}` | {'yes' if again else 'no'} |"


def raised_codes() -> dict[tuple[int, str], bool]:
    """(status, code) of what the HTTP layer itself decides on, read off its source -> whether it may succeed later."""
    found = dict.fromkeys(_HTTP_CODES.items(), True)
    for path in (ROOT / "api").rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ApiError" and node.args:
                named = {keyword.arg: keyword.value for keyword in node.keywords}
                status, code = node.args[0], named.get("code")
                if isinstance(status, ast.Constant) and isinstance(code, ast.Constant):
                    found[status.value, code.value] = not _says_never(named.get("headers"), tree)
    return found


def _says_never(headers: ast.expr | None, tree: ast.Module) -> bool:
    """Whether these headers are, or are a name for, some with x-should-retry."""
    if headers is None:
        return False
    name = ast.unparse(headers)
    return "x-should-retry" in name or f"{name} = {{'x-should-retry'" in ast.unparse(tree)


if __name__ == "__main__":
    print(page(), end="")
