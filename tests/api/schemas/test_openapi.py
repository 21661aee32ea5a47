"""The OpenAPI description: valid, an example of every route, and the examples are what the server does."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from api_reference import PAGE, ROOT, description, page
from spelled_engine import TEMPLATE, spelled, tiny_tokenizer

from api.errors import ANSWERS
from api.schemas.openapi_examples import EXAMPLES
from lorasrv.text.chat_template import ChatTemplate

METHODS = {"get", "post", "put", "patch", "delete"}
# A process of its own with transformers, and folders that an operator opens: tested in test_verify and test_vllm_loras.
# Files and batches: in test_batches.
ELSEWHERE = {
    *(path for _, path in EXAMPLES if path.startswith(("/v1/files", "/v1/batches"))),
    "/v1/adapters/{reference}:verify",
    "/v1/adapters/{reference}:snapshot",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}


@pytest.fixture(autouse=True)
def speaking(engine: Any) -> None:
    engine.tokenizer = tiny_tokenizer()
    engine.chat_template = ChatTemplate(TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"})
    engine.script = spelled(engine.tokenizer, "Mia")


@pytest.fixture
def schema(server: Any) -> dict[str, Any]:
    described: dict[str, Any] = server.http.get("/openapi.json").json()
    return described


def operations(schema: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    routes = (
        (m.upper(), path, operation) for path, methods in schema["paths"].items() for m, operation in methods.items()
    )
    return {(method, path): operation for method, path, operation in routes if method.lower() in METHODS}


def test_every_route_has_an_example_and_says_how_it_fails(schema) -> None:
    found = operations(schema)
    assert found.keys() == EXAMPLES.keys(), "a new route needs its example in api/schemas/openapi_examples.py"
    for name, operation in found.items():
        assert operation["summary"] == EXAMPLES[name].summary
        assert operation["description"].strip(), name
        assert {"4XX", "5XX"} <= operation["responses"].keys(), name
        assert "422" not in operation["responses"], name
        answer = operation["responses"][str(EXAMPLES[name].status)]
        assert all("example" in media for media in answer["content"].values()), name
        for media in operation.get("requestBody", {}).get("content", {}).values():
            assert "example" in media, name
        for parameter in operation.get("parameters", ()):
            assert "example" in parameter or not parameter["required"], (name, parameter["name"])


def test_the_errors_of_tgi_are_its_own(schema) -> None:
    shape = lambda path: schema["paths"][path]["post"]["responses"]["4XX"]["content"]["application/json"]["schema"]  # noqa: E731
    assert shape("/generate") == {"$ref": "#/components/schemas/TgiError"}
    assert shape("/v1/completions") == {"$ref": "#/components/schemas/Error"}


def test_answers_are_described_by_their_fields(schema) -> None:
    """A bare object would describe any answer."""
    for (method, path), operation in operations(schema).items():
        for status, response in operation["responses"].items():
            for kind, content in response.get("content", {}).items():
                if status.startswith("2") and kind == "application/json" and content.get("example"):
                    shape = content["schema"]
                    assert shape.get("required") or shape.get("items"), f"{method} {path}"
                    assert jsonschema_rs.is_valid(shape, content["example"]), f"{method} {path}"
    chat = schema["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]["application/json"]
    broken = {**chat["example"], "choices": [{**chat["example"]["choices"][0], "index": "0"}]}
    for wrong in ({}, broken, {key: value for key, value in chat["example"].items() if key != "usage"}):
        assert not jsonschema_rs.is_valid(chat["schema"], wrong)


def test_it_is_valid(schema) -> None:
    definitions = pytest.importorskip("schemathesis.specs.openapi.definitions")
    assert schema["openapi"].startswith("3.1")
    assert [str(error) for error in definitions.OPENAPI_31_VALIDATOR.iter_errors(schema)] == []


def request_of(example: Any, path: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """The example's request, with the test's base, and a digest of bytes that there are."""
    weights = (folder / "adapter_model.safetensors").read_bytes()
    digest = hashlib.sha256(weights).hexdigest()
    parameters = {**example.parameters, **({"digest": digest} if "digest" in example.parameters else {})}
    url = path.format(**parameters)
    query = {name: value for name, value in parameters.items() if f"{{{name}}}" not in path and name != "after"}
    if example.body_type != "application/json":
        return url, {"content": weights}
    body = example.body
    if path == "/v1/adapters" and body is not None:
        body = {**body, "id": "new", "weights": f"sha256:{digest}", "config": {**body["config"], "r": 2}}
    return url, {"params": query, **({} if body is None else {"json": body})}


def same_names(example: Any, answer: Any, where: str = "") -> None:
    if isinstance(example, dict) and where.rpartition(".")[2] not in ("aliases", "limits"):
        assert set(example) == set(answer), where
        for name, inner in example.items():
            if inner is not None and answer[name] is not None:
                same_names(inner, answer[name], f"{where}.{name}")
    elif isinstance(example, list) and example and answer:
        same_names(example[-1], answer[-1], where)
    elif isinstance(example, int | float):
        assert isinstance(answer, int | float), where
    else:
        assert type(example) is type(answer), where


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name[1] not in ELSEWHERE], ids=" ".join)
def test_the_server_does_as_its_examples(server, make_adapter, name) -> None:
    method, path = name
    example = EXAMPLES[name]
    folder = make_adapter()
    if not path.startswith("/v1/blobs"):
        server.upload(folder, "mia", alias="prod")
    url, sent = request_of(example, path, folder)
    response = server.http.request(method, url, **sent)
    assert response.status_code == example.status
    kind = response.headers.get("content-type", "")
    if kind.startswith("application/json"):
        same_names(example.answer, response.json(), path)
    elif kind.startswith("text/event-stream"):
        assert example.stream is not None
    else:
        assert kind == example.answer_type or not response.content


def test_it_is_fresh() -> None:
    assert PAGE.read_text("utf-8") == page(), "stale: python tests/support/api_reference.py > docs/api.md"


def test_it_has_every_route_field_and_code() -> None:
    text = PAGE.read_text("utf-8")
    for path, methods in description()["paths"].items():
        assert all(f"`{method.upper()} {path}" in text for method in methods), path
    for name, shape in description()["components"]["schemas"].items():
        if name not in ("Error", "TgiError"):
            assert [field for field in shape.get("properties", ()) if f"| `{field}` |" not in text] == [], name
    refused_early = {"too_many_connections", "header_timeout", "headers_too_large", "body_timeout"}
    codes = refused_early | {answer.code for answer in ANSWERS.values()}
    assert [code for code in codes if f"`{code}`" not in text] == []


def test_links_lead_somewhere() -> None:
    folder = Path(PAGE).parent
    for name in ("api.md", "clients.md"):
        links = re.findall(r"\]\(([^)#:]+)\)", (folder / name).read_text("utf-8"))
        assert [link for link in links if not (folder / link).exists()] == [], name


def test_versions_of_clients_are_those_that_are_installed() -> None:
    pins = {}
    for file in (ROOT / "tests" / "clients" / "requirements").glob("*.txt"):
        pins |= dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", file.read_text("utf-8"), re.M))
    text = (ROOT / "docs" / "clients.md").read_text("utf-8")
    table = text[text.index("<!-- versions") : text.index("<!-- end of versions")]
    assert dict(re.findall(r"^\| ([a-z_-]+) \| ([0-9.]+) \|$", table, re.M)) == pins


def replayed_clients() -> dict[str, str]:
    """Version by client, of the table of replayed ones."""
    text = (ROOT / "docs" / "clients.md").read_text("utf-8")
    table = text[text.index("**Replayed**") : text.index("**Tried**")]
    return dict(re.findall(r"^\| (\S[^|]*) \| (.*?) \| [^|]+ \|$", table, re.M)[1:])


def test_versions_of_replayed_clients_are_those_of_their_bodies() -> None:
    files = (ROOT / "tests" / "api" / "data" / "clients").glob("*.json")
    recorded = [json.loads(file.read_text("utf-8")) for file in files]
    assert replayed_clients() == {one["client"]: one["version"] for one in recorded}


def test_the_readme_names_the_versions_of_the_page() -> None:
    """Of clients that run two numbers, of replayed ones the first number or commit that stands for their bodies."""
    names = {"openai": "openai-python", "litellm": "LiteLLM", "langchain-openai": "LangChain"}
    names |= {"openai-agents": "OpenAI Agents SDK", "pydantic-ai-slim": "Pydantic AI"}
    page_text = (ROOT / "docs" / "clients.md").read_text("utf-8")
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    ran = re.findall(r"^\| ([a-z_-]+) \| (\d+\.\d+)[0-9.]* \|$", page_text, re.M)
    replayed = [(name, re.search(r"\b(\d[\w.]*|[0-9a-f]{7})\b", v)) for name, v in replayed_clients().items()]
    told = [f"{names.get(name, name)} {version}" for name, version in ran]
    told += [f"{name} {found[0]}" for name, found in replayed if found is not None]
    assert len(told) == 14
    assert [one for one in told if one not in readme] == []
