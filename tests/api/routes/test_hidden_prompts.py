"""A prompt that a caller may not read comes out of no route: every route of the application is asked for it.

Looked for: the text as it is, as tokens' pieces one after another, and as token ids; in answers, headers, logs, and the
files that the server writes beside its index.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from spelled_engine import TEMPLATE, spelled, tiny_tokenizer

from api.auth.key_store import KeyStore
from api.auth.principal import Scope
from api.schemas.openapi_examples import EXAMPLES
from lorasrv.text.chat_template import ChatTemplate

SECRET, EXAMPLE = "plover42", "grackle77"
DEFAULTS = {
    "system": {"text": f"Never say {SECRET}.", "mode": "prepend"},
    "examples": [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": EXAMPLE}]],
    "temperature": 0.5,
}
USER = {"role": "user", "content": "x"}
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = "/v1/chat/completions"
ASKS: list[tuple[str, dict[str, Any]]] = [
    *(
        (CHAT, {"messages": [USER], **fields})
        for fields in (
            {"prompt_logprobs": 3},
            {"return_token_ids": True},
            {"return_token_ids": True, "stream": True},
            {"truncate_prompt_tokens": 9},
            {"prompt_logprobs": 0, "return_tokens_as_token_ids": True},
            {"logprobs": True, "top_logprobs": 20},
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            {"messages": [SYSTEM, USER]},
            {"messages": [SYSTEM, USER, SYSTEM]},
            {"messages": [USER] * 400},
            {"max_tokens": 100_000},
            {"add_generation_prompt": False, "n": 2},
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"tools": [{"type": "function", "function": {"name": "clock"}}]},
            {"user": "Bo\n"},
            {"echo": True},
        )
    ),
    *(
        ("/v1/responses", {"input": "x", **fields})
        for fields in (
            {"include": ["message.output_text.logprobs"], "top_logprobs": 20},
            {"stream": True, "instructions": "Be brief."},
            {"input": [USER] * 400, "truncation": "auto"},
            {"max_output_tokens": 100_000},
            {"tools": [{"type": "function", "name": "clock"}]},
        )
    ),
    *(
        ("/v1/completions", {"prompt": "x", **fields})
        for fields in ({"echo": True, "logprobs": 5}, {"prompt_logprobs": 5}, {"echo": True, "max_tokens": 0})
    ),
    *(
        (path, {"inputs": "x", "parameters": {"adapter_id": "muse", "apply_chat_template": True, **fields}})
        for path in ("/generate", "/generate_stream", "/")
        for fields in (
            {"details": True, "decoder_input_details": True, "return_full_text": True},
            {"details": True, "return_full_text": True, "top_n_tokens": 5},
            {"truncate": 3},
        )
    ),
    ("/tokenize", {"messages": [USER], "return_token_strs": True}),
    ("/tokenize", {"prompt": "x"}),
    ("/detokenize", {"tokens": [60]}),
]


def leaves(value: Any) -> Iterator[Any]:
    """Yield what a JSON value holds, in order."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def told(text: str) -> str:
    """The text, and all short strings and all numbers that its JSON holds, one after another."""
    found = [text]
    for line in text.splitlines():
        try:
            inner = list(leaves(json.loads(line.removeprefix("data: "))))
        except ValueError:
            continue
        found += ["".join(v for v in inner if isinstance(v, str) and len(v) <= 4), str(inner)]
        found.append(str([v for v in inner if isinstance(v, int) and not isinstance(v, bool)]))
    return "\n".join(found)


class Walker:
    """Asks as somebody who may use the persona, and upload, but did not make it."""

    def __init__(self, server: Any, key: str, owner: str, hidden: list[str]) -> None:
        self._server, self._headers = server, {"authorization": f"Bearer {key}"}
        self.url, self.owner = server.url, {"authorization": f"Bearer {owner}"}
        self.hidden = hidden
        self.statuses: list[int] = []

    def ask(self, method: str, path: str, **sent: Any) -> httpx2.Response:
        response: httpx2.Response = self._server.http.request(method, path, headers=self._headers, **sent)
        shown = told(response.text) + str(response.headers)
        assert [text for text in self.hidden if text in shown] == [], (method, path, sent)
        self.statuses.append(response.status_code)
        return response


@pytest.fixture
def hidden() -> list[str]:
    tokenizer = tiny_tokenizer()
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (SECRET, EXAMPLE)]
    return [SECRET, EXAMPLE, *(str(found)[1:-1] for found in ids)]


@pytest.fixture(params=[TEMPLATE, TEMPLATE + "{{ raise_exception('not this: ' + messages[0].content) }}"])
def walker(request, server, engine, store, hidden) -> Walker:
    """The server has the persona `muse` of ann's; with the second template, every conversation is refused."""
    engine.tokenizer = tiny_tokenizer()
    engine.chat_template = ChatTemplate(TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"})
    engine.script = spelled(engine.tokenizer, "Mia")
    keys = KeyStore(store.root)
    scopes = frozenset({Scope.UPLOAD, Scope.INFER})
    (_, ann), (_, bob) = (keys.create(name, scopes) for name in ("ann", "bob"))
    made = server.http.post(
        "/v1/adapters", json={"id": "muse", "defaults": DEFAULTS}, headers={"authorization": f"Bearer {ann}"}
    )
    assert made.status_code == 201, made.text
    engine.chat_template = ChatTemplate(request.param, {"bos_token": "<s>", "eos_token": "</s>"})
    return Walker(server, bob, ann, hidden)


def files_with(folder: Path, text: str) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.name.partition("-")[0] for path in files if text.encode() in path.read_bytes()}


def test_no_route_tells(
    walker: Walker, store, engine, eventually, caplog: pytest.LogCaptureFixture, hidden: list[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    for (method, path), example in EXAMPLES.items():
        if method == "DELETE":
            continue
        parameters = {name: "muse" if value == "mia" else value for name, value in example.parameters.items()}
        body = json.loads(json.dumps(example.body).replace('"mia"', '"muse"'))
        if path == "/v1/adapters" or path.endswith("/defaults"):
            # What bob makes himself is his to read.
            body = None
        sent = {} if body is None or example.body_type != "application/json" else {"json": body}
        walker.ask(method, path.format(**parameters), **sent)
    for path, body in ASKS:
        walker.ask("POST", path, json={"model": "muse", **body})
    assert walker.statuses.count(200) > 20
    prompts = [bytes(token + 8 for token in asked.prompt if token < 248) for asked in engine.added]
    assert any(SECRET.encode() in prompt for prompt in prompts) == (engine.chat_template.source == TEMPLATE)
    lines = "".join(
        json.dumps({"custom_id": str(n), "method": "POST", "url": CHAT, "body": {"model": "muse", **body}}) + "\n"
        for n, (path, body) in enumerate(ASKS)
        if path == CHAT
    )
    file = walker.ask("POST", "/v1/files", data={"purpose": "batch"}, files={"file": lines.encode()}).json()["id"]
    batch = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    made = walker.ask("POST", "/v1/batches", json=batch).json()["id"]
    eventually(lambda: walker.ask("GET", f"/v1/batches/{made}").json()["status"] == "completed")
    done = walker.ask("GET", f"/v1/batches/{made}").json()
    for name in ("output_file_id", "error_file_id"):
        if done.get(name):
            walker.ask("GET", f"/v1/files/{done[name]}/content")
    assert [text for text in hidden if text in caplog.text] == []
    assert set().union(*(files_with(store.root, text) for text in hidden)) <= {"index.sqlite3"}


def test_what_is_wrong_with_the_body_is_told(walker: Walker) -> None:
    """It cannot quote the prompt, and nobody mends what is told as something else."""
    both = {"add_generation_prompt": True, "continue_final_message": True}
    tools = {"tools": [{"type": "function", "function": {"name": "clock"}}]}
    for fields, says in ((both, "excludes"), (tools, "does not support tools")):
        asked = {"model": "muse", "messages": [USER], **fields}
        answers = (
            httpx2.post(f"{walker.url}{CHAT}", json=asked, headers=walker.owner),
            walker.ask("POST", CHAT, json=asked),
        )
        own, other = (answer.json()["error"]["message"] for answer in answers)
        assert own == other
        assert says in own


def test_what_is_looked_for_would_be_found(walker: Walker, engine) -> None:
    """The same question of the owner shows the prompt, in pieces."""
    engine.chat_template = ChatTemplate(TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"})
    for body in ({}, {"return_tokens_as_token_ids": True}):
        asked = {"model": "muse", "messages": [USER], "prompt_logprobs": 0, **body}
        response = httpx2.post(f"{walker.url}{CHAT}", json=asked, headers=walker.owner)
        shown = told(response.text)
        assert any(text in shown for text in walker.hidden), response.text[:500]
