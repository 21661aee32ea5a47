"""Requests made from the OpenAPI description, and bodies of known fields with any values: a clear answer, never a 5xx.

Behind a real engine with a tiny model, so that what is accepted is also generated; afterwards nothing is held. There
are few examples in everyday use and many under the marker `long`; they are the same ones every time.
"""

import json
import math
import string
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import checks
from schemathesis.specs.openapi import checks as conformance
from server import server
from tiny_checkpoints import VOCAB

from api.app import _ROUTES
from api.schemas.responses import ResponsesBody
from lorasrv.speculation_params import DRAFTERS

CONTEXT = 64
CHECKS = [
    checks.not_a_server_error,
    *(conformance.status_code_conformance, conformance.content_type_conformance),
    *(conformance.response_headers_conformance, conformance.response_schema_conformance),
]


def described_routes() -> list[tuple[str, str]]:
    """Method and path of each, without a server: tests are named after them."""
    bare = FastAPI()
    for module in _ROUTES:
        bare.include_router(module.router)
    return sorted((method.upper(), path) for path, methods in bare.openapi()["paths"].items() for method in methods)


ROUTES = described_routes()


def quickly(examples: int) -> settings:
    return settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )


@pytest.fixture(scope="module")
def served(model, adapter_dirs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("fuzz") / "store"
    adapters = {name: adapter_dirs[name] for name in ("one", "two")}
    with server(model, folder, adapters, served_model_name="tiny", max_model_len=CONTEXT) as served:
        yield served


@pytest.fixture(scope="module")
def described(served: SimpleNamespace) -> dict[tuple[str, str], Any]:
    schema = schemathesis.openapi.from_dict(served.http.get("/openapi.json").json())
    operations = [result.ok() for result in schema.get_all_operations()]
    return {(operation.method.upper(), operation.path): operation for operation in operations}


def test_every_route_is_asked(described: dict[tuple[str, str], Any]) -> None:
    assert described.keys() == set(ROUTES)


@pytest.mark.parametrize("examples", [2, pytest.param(40, marks=pytest.mark.long)])
@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_a_route_keeps_to_its_description(served, described, route: tuple[str, str], examples: int) -> None:
    @quickly(examples)
    @given(case=described[route].as_strategy())
    def ask(case: Any) -> None:
        response = case.call(base_url=served.url, timeout=60)
        streams = response.headers.get("content-type", [""])[0].startswith("text/event-stream")
        # The schema is that of the whole text; schemathesis would have it for each event.
        case.validate_response(response, checks=CHECKS[:-1] if streams else CHECKS)

    ask()
    served.calm_down()


# Values that any field may be given, right or wrong.
WORDS = st.text(string.ascii_letters + " \n\x00é🦜<|>{}[]\\\"'", max_size=8)
FAR = st.sampled_from([2**31, -(2**63), 2**64, 10**30, 1e-40, 1e308])
NUMBERS = st.one_of(st.integers(-2, 9), st.floats(-2, 3), FAR)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=4,
)
IDS = st.integers(0, VOCAB - 1)
SCHEMA = st.sampled_from(
    [
        True,
        {},
        {"type": "integer"},
        {"enum": ["a", 1, None]},
        {"type": "strin"},
        {"$ref": "#"},
        {"anyOf": []},
        "{}",
        "{",
    ]
)


def share(low: float = 0, high: float = 1) -> st.SearchStrategy[float]:
    return st.floats(low, high)


# What a client would send; each may be replaced by anything.
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "temperature": share(0, 2),
    "top_p": share(0.01),
    "top_k": st.integers(-1, 50),
    "min_p": share(),
    "typical_p": share(0.01),
    "presence_penalty": share(-2, 2),
    "frequency_penalty": share(-2, 2),
    "repetition_penalty": share(0.5, 2),
    "seed": st.integers(0, 2**63),
    "watermark": st.booleans(),
    "priority": st.integers(-9, 9),
    "timeout_s": st.sampled_from([60, 1e9]),
    "cache_salt": WORDS,
    "speculation": st.booleans()
    | st.fixed_dictionaries(
        {},
        optional={
            "max_draft": st.integers(0, 16),
            "drafters": st.lists(st.sampled_from(DRAFTERS), max_size=2),
            "remember": st.booleans(),
        },
    ),
    "prediction": st.fixed_dictionaries({"type": st.just("content"), "content": WORDS}),
    "kv_policy": st.fixed_dictionaries(
        {"kind": st.just("window"), "recent": st.integers(60, 200)}, optional={"sink": st.integers(0, 40)}
    )
    | st.fixed_dictionaries(
        {"kind": st.just("select"), "budget": st.integers(100, 300)}, optional={"every": st.integers(30, 90)}
    ),
    "on_cold": st.sampled_from(["wait", "fallback_base"]),
    "adapters": st.lists(
        st.fixed_dictionaries({"id": st.sampled_from(["one", "two@1", "nobody"])}, optional={"weight": share(-5, 5)}),
        max_size=5,
    ),
}
OPENAI = SAMPLING | {
    "stop": WORDS.filter(bool) | st.lists(WORDS.filter(bool), max_size=3),
    "adapter_id": st.sampled_from(["one", "two", "one@1", "nobody", "one+0.5*two"]),
    "max_tokens": st.integers(1, 8),
    "max_completion_tokens": st.integers(1, 8),
    "logit_bias": st.dictionaries(IDS.map(str), st.integers(-100, 100), max_size=3),
    "min_tokens": st.integers(0, 3),
    "allowed_token_ids": st.lists(IDS, max_size=3),
    "bad_words": st.lists(WORDS, max_size=3),
    "no_repeat_ngram_size": st.integers(0, 3),
    "return_token_ids": st.booleans(),
    "truncate_prompt_tokens": st.sampled_from([-1, 1, 5]),
    "fsd_alpha": share(),
    "fsd_ngram": st.integers(1, 4),
    "stop_token_ids": st.lists(IDS, max_size=3),
    "ignore_eos": st.booleans(),
    "n": st.integers(1, 3),
    "best_of": st.integers(1, 3),
    "prompt_logprobs": st.integers(0, 3),
    "return_tokens_as_token_ids": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}]),
    "guided_json": SCHEMA,
    "guided_regex": st.sampled_from(["a+", "(", "(a{0,500}){0,500}"]),
    "guided_choice": st.lists(WORDS, max_size=3),
    "guided_grammar": st.sampled_from(['start: "a"', "start: ]"]),
    "structured_outputs": st.sampled_from([{"regex": "b"}, {"json": {}, "regex": "b"}, {}]),
    "use_beam_search": st.booleans(),
    "length_penalty": share(),
    "suffix": WORDS,
}
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": WORDS | ANYTHING}), min_size=1, max_size=3)
BODIES: dict[str, tuple[dict[str, st.SearchStrategy[Any]], dict[str, st.SearchStrategy[Any]]]] = {
    "/v1/completions": (
        {"prompt": WORDS.filter(bool) | st.lists(IDS, min_size=1, max_size=4) | st.just(["a", "b"])},
        OPENAI | {"echo": st.booleans(), "logprobs": st.integers(0, 5)},
    ),
    "/v1/chat/completions": (
        {"messages": MESSAGES},
        OPENAI
        | {
            "logprobs": st.booleans(),
            "top_logprobs": st.integers(0, 5),
            "tools": st.just([]),
            "tool_choice": st.sampled_from(["none", "auto", "required"]),
            "chat_template_kwargs": st.dictionaries(WORDS, ANYTHING, max_size=2),
            "add_generation_prompt": st.booleans(),
        },
    ),
    "/v1/responses": (
        {"input": WORDS.filter(bool) | MESSAGES},
        {name: value for name, value in OPENAI.items() if name in ResponsesBody.model_fields}
        | {
            "instructions": WORDS,
            "max_output_tokens": st.integers(1, 8),
            "text": st.sampled_from([{}, {"format": {"type": "json_object"}}, {"format": {"type": "json_schema"}}]),
            "tools": st.just([]),
            "tool_choice": st.sampled_from(["none", "auto", "required"]),
            "truncation": st.sampled_from(["auto", "disabled"]),
            "include": st.just(["message.output_text.logprobs"]),
            "top_logprobs": st.integers(0, 5),
            "metadata": st.dictionaries(WORDS, WORDS, max_size=2),
            "store": st.booleans(),
        },
    ),
    "/generate": (
        {"inputs": WORDS.filter(bool)},
        SAMPLING
        | {
            "adapter_id": st.sampled_from(["one", "two", "nobody"]),
            "max_new_tokens": st.integers(1, 8),
            "best_of": st.integers(1, 3),
            "do_sample": st.booleans(),
            "stop": st.lists(WORDS, max_size=3),
            "details": st.booleans(),
            "decoder_input_details": st.booleans(),
            "top_n_tokens": st.integers(0, 5),
            "truncate": st.integers(1, 9),
            "return_full_text": st.booleans(),
            "ignore_eos_token": st.booleans(),
        },
    ),
}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """What the route needs, some of its fields, mostly with values that make sense."""
    needed, optional = BODIES[path]
    names = draw(st.lists(st.sampled_from(sorted(optional)), max_size=5, unique=True))
    wild = draw(st.sampled_from([None, None, *needed, *names]))
    fields = {name: draw(ANYTHING if name == wild else optional[name]) for name in names}
    body = {name: draw(ANYTHING if name == wild else value) for name, value in needed.items()}
    limit = {{"/generate": "max_new_tokens", "/v1/responses": "max_output_tokens"}.get(path, "max_tokens"): 6}
    if not {"max_tokens", "max_completion_tokens"} & fields.keys():
        fields = limit | fields
    return {**body, "parameters": fields} if path == "/generate" else {**body, "model": "tiny", **fields}


@pytest.mark.parametrize(
    ("path", "examples"),
    [
        *((path, 16) for path in BODIES),
        pytest.param("/generate", 150, marks=pytest.mark.long),
        *(pytest.param(path, 150, marks=pytest.mark.exhaustive) for path in BODIES if path != "/generate"),
    ],
)
def test_any_values_of_known_fields(served, path: str, examples: int) -> None:
    statuses: Counter[int] = Counter()

    @quickly(examples)
    @given(bodies(path))
    def ask(body: dict[str, Any]) -> None:
        answer = served.http.post(path, json=body)
        statuses[answer.status_code] += 1
        check_answer(answer, path)

    ask()
    assert statuses[200] >= examples // 10, f"few of the bodies are any good: {statuses}"
    assert statuses.total() > statuses[200], "none of the bodies is bad"
    assert served.engine.is_alive
    served.calm_down()
    assert served.http.get("/health").status_code == 200
    plain = {"model": "one", "prompt": "hi", "max_tokens": 3, "temperature": 0}
    assert served.http.post("/v1/completions", json=plain).status_code == 200


def check_answer(answer: httpx2.Response, path: str) -> None:
    if answer.status_code == 200:
        if not answer.headers["content-type"].startswith("text/event-stream"):
            assert all(math.isfinite(number) for number in _numbers(answer.json()))
            return
        if path == "/v1/responses":
            assert answer.text.rpartition("event: ")[2].startswith(("response.completed", "response.incomplete"))
        else:
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in answer.text
        return
    assert answer.status_code in ((404, 422) if path == "/generate" else (400, 404)), answer.text[:500]
    error = answer.json()["error"]
    message = error if path == "/generate" else error["message"]
    assert message
    assert "Traceback" not in message
    assert len(message) < 2000


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)
    elif isinstance(value, int | float):
        yield value


@pytest.mark.parametrize("path", BODIES)
def test_any_json(served, path: str) -> None:
    @quickly(25)
    @given(ANYTHING)
    def ask(body: Any) -> None:
        answer = served.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        check_answer(answer, path)

    ask()
    assert served.engine.is_alive
