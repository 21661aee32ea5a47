"""Fields of a request that reach the engine beside its prompt, and what the answer says of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
from fake_engine import cold, say

from adapter_store.store import AdapterStore
from api.auth.principal import ANYBODY, Caller, Scope
from api.config.settings import ServerSettings
from api.replication.share_holder import ShareHolder
from api.schemas.openai import CompletionBody
from api.serving.adapter_limits import AdapterLimits
from api.serving.generation import collect, generate_openai
from api.serving.services import Services
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.errors import DeadlineUnreachable, InvalidRequest, LimitExceeded, RequestTimeout
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes
from lorasrv.offline.planner.random_adapters import write_random_adapter
from lorasrv.offline.verify.verifier import Verifier
from lorasrv.request import OnCold

pytestmark = pytest.mark.anyio
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(params=["chat", "complete"])
def ask(request, server) -> Any:
    return getattr(server, request.param)


def usage_of(response: Any) -> dict[str, Any]:
    """The usage of a whole answer, or of a stream's last chunk."""
    if response.headers["content-type"] == "application/json":
        return response.json()["usage"]
    return json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))["usage"]


class TestOnCold:
    @pytest.fixture(autouse=True)
    def digest(self, server, make_adapter) -> str:
        return str(server.upload(make_adapter(), "mia").json()["digest"])

    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("n", [1, 2])
    @pytest.mark.parametrize(("seconds", "header"), [(0.01, "1"), (1.0, "1"), (1.2, "2"), (7.0, "7")])
    def test_reject_says_when_to_retry(self, server, engine, stream: bool, n: int, seconds: float, header: str) -> None:
        engine.script = cold(seconds)
        response = server.chat(model="mia", on_cold="reject", stream=stream, n=n)
        assert (response.status_code, response.headers["retry-after"]) == (503, header)
        assert response.headers["content-type"] == "application/json"
        assert "x-should-retry" not in response.headers
        error = response.json()["error"]
        assert (error["code"], error["type"], error["param"]) == ("adapter_cold", "server_error", "on_cold")

    @pytest.mark.parametrize("fields", [{}, {"n": 2}, USAGE])
    def test_fallback_is_in_the_answer(self, server, engine, digest: str, fields: dict[str, Any]) -> None:
        engine.script = cold(1.0)
        response = server.chat(model="mia", on_cold="fallback_base", **fields)
        told = ("base", "mia", digest)
        assert tuple(response.headers[f"x-adapter-{name}"] for name in ("fallback", "id", "digest")) == told
        assert response.headers["x-adapter-tier"] == "disk"
        figures = usage_of(response)["lorasrv"]
        assert (figures["fallback"], figures["adapter_id"], figures["adapter_digest"]) == told

    @pytest.mark.parametrize("fields", [{}, USAGE])
    @pytest.mark.parametrize("on_cold", ["reject", "fallback_base"])
    def test_a_resident_adapter_answers(self, server, engine, digest: str, on_cold: str, fields) -> None:
        response = server.chat(model="mia", on_cold=on_cold, **fields)
        assert (response.status_code, response.headers["x-adapter-digest"]) == (200, digest)
        assert "x-adapter-fallback" not in response.headers
        assert usage_of(response)["lorasrv"]["fallback"] is None
        assert engine.added[0].on_cold is OnCold(on_cold)

    @pytest.mark.parametrize("given", [{}, {"on_cold": None}, {"on_cold": "wait"}])
    def test_waiting_is_the_default(self, server, engine, given: dict[str, Any]) -> None:
        engine.script = cold(1.0)
        assert server.complete(model="mia", **given).json()["choices"][0]["text"].startswith("I am ")
        assert engine.added[0].on_cold is OnCold.WAIT

    @pytest.mark.parametrize("on_cold", list(OnCold))
    def test_the_base_is_never_cold(self, server, engine, on_cold: str) -> None:
        engine.script = cold(1.0)
        response = server.chat(on_cold=on_cold)
        assert response.status_code == 200
        assert "x-adapter-fallback" not in response.headers
        assert response.json()["usage"]["lorasrv"]["fallback"] is None


@pytest.mark.parametrize("fields", [{}, USAGE])
def test_cached_tokens_are_always_in_the_usage(server, engine, fields: dict[str, Any]) -> None:
    for cached in (0, 5):
        engine.script = say(cached=cached)
        assert usage_of(server.chat(**fields))["prompt_tokens_details"] == {"cached_tokens": cached}


@pytest.mark.parametrize(
    ("fields", "reached"),
    [
        ({}, {"priority": 0, "timeout_s": None, "cache_salt": ""}),
        ({"priority": None, "timeout_s": None}, {"priority": 0, "timeout_s": None}),
        ({"priority": 0, "cache_salt": None}, {"priority": 0, "cache_salt": ""}),
        ({"cache_salt": ""}, {"cache_salt": ""}),
        ({"priority": -7, "timeout_s": 2.5}, {"priority": -7, "timeout_s": 2.5}),
        ({"priority": -7, "timeout_s": 3, "stream": True}, {"priority": -7, "timeout_s": 3}),
        ({"cache_salt": "tenant 1"}, {"cache_salt": "salt:tenant 1"}),
        ({"cache_salt": "ö" * 256}, {"cache_salt": f"salt:{'ö' * 256}"}),
    ],
)
def test_fields_that_reach_the_engine(ask, engine, fields: dict[str, Any], reached: dict[str, Any]) -> None:
    assert ask(**fields).status_code == 200
    [added] = engine.added
    assert {name: getattr(added, name) for name in reached} == reached


def test_the_adapter_id_that_limits_apply_to(ask, server, engine, make_adapter) -> None:
    for seed in (1, 2):
        server.upload(make_adapter(str(seed), seed=seed), "mia")
    for fields in ({"model": "mia"}, {"model": "mia@1"}, {}, {"adapter_id": "mia@2"}):
        assert ask(**fields).status_code == 200
    assert [added.adapter_id for added in engine.added] == ["mia", "mia", "", "mia"]


@pytest.mark.parametrize(
    ("error", "status", "code", "param", "retry_after", "retry"),
    [
        (LimitExceeded("'mia' has 2 waiting", retry_after_s=2.4), 429, "limit_exceeded", None, "3", None),
        (DeadlineUnreachable("9 s", retry_after_s=0.1), 503, "deadline_unreachable", "timeout_s", "1", None),
        (RequestTimeout("5 s are over"), 504, "timeout", "timeout_s", None, "false"),
        (InvalidRequest("out of range", param="priority"), 400, "invalid_value", "priority", None, None),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("queued", [True, False])
def test_refusals_at_admission_and_in_the_queue_have_their_status(
    ask, engine, error: Exception, status: int, code: str, param: str, retry_after, retry, stream, queued
) -> None:
    if queued:
        engine.breaks(0, error)
    else:
        engine.add_error = error
    response = ask(stream=stream, timeout_s=5)
    told = response.json()["error"]
    assert (response.status_code, told["code"], told["param"], told["message"]) == (status, code, param, str(error))
    assert told["type"] == {429: "rate_limit_error", 400: "invalid_request_error"}.get(status, "server_error")
    assert response.headers.get("retry-after") == retry_after
    assert response.headers.get("x-should-retry") == retry


@pytest.fixture
def tiny_model(tmp_path: Path) -> ModelOptions:
    tiny_llama.write_config(tmp_path / "tiny")
    return ModelOptions(model=str(tmp_path / "tiny"), load_format="dummy", quantization="none", kernels="torch")


@pytest.fixture
def tiny_store(tiny_model: ModelOptions, tmp_path: Path) -> Iterator[AdapterStore]:
    checkpoint = open_checkpoint(tiny_model.model, tiny_model.load_format)
    with AdapterStore(tmp_path / "tiny-store", base_shapes(checkpoint.spec)) as store:
        for seed, name in enumerate(("one", "two")):
            write_random_adapter(store, name, 4, seed)
        yield store
    checkpoint.close()


async def test_no_prefix_is_shared_across_adapters_and_keys(tiny_model: ModelOptions, tiny_store: AdapterStore) -> None:
    """On the real engine: a prompt's pages are found by the same adapter and key, or by an agreed salt, alone.

    What `cached_tokens` says is what was not computed, so there is nothing else to time.
    """
    engine = AsyncEngine.build(EngineConfig(model=tiny_model, memory=MemoryOptions(pool_bytes=4 << 20)), tiny_store)
    settings = ServerSettings()
    limits = AdapterLimits(engine, tiny_store, settings.limits("adapter"), ShareHolder(engine))
    services = Services.create(engine, tiny_store, settings, limits, Verifier())
    scopes = frozenset({Scope.INFER})
    ann, bob = Caller("ann", scopes, ("one", "two")), Caller("bob", scopes, ("one",))
    prompt = [10 + (7 * i) % 300 for i in range(45)]
    texts: dict[str, str] = {}

    async def cached(caller: Caller, name: str | None = None, salt: str | None = None) -> int:
        asked = name or engine.model_name
        fields = {"model": asked, "prompt": prompt, "max_tokens": 4, "temperature": 0, "cache_salt": salt}
        content, _ = await collect(generate_openai(CompletionBody.model_validate(fields), services, caller))
        assert texts.setdefault(asked, content["choices"][0]["text"]) == content["choices"][0]["text"]
        found: int = content["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    await engine.start()
    try:
        hit = len(prompt) // engine.page_size_tokens * engine.page_size_tokens
        for caller, name in ((ann, None), (bob, None), (ANYBODY, None), (ann, "one"), (ann, "two"), (bob, "one")):
            assert [await cached(caller, name) for _ in range(2)] == [0, hit], (caller.principal, name)
        # By agreement, and by nothing that looks like a key's own salt.
        assert [await cached(caller, salt="ours") for caller in (ann, bob)] == [0, hit]
        assert [await cached(ann, salt=salt) for salt in ("bob", "key:bob", "theirs")] == [0, 0, 0]
        assert [await cached(caller) for caller in (ann, bob, ANYBODY)] == [hit] * 3
        assert [await cached(caller, "one") for caller in (ann, bob)] == [hit] * 2
    finally:
        await engine.shutdown()
