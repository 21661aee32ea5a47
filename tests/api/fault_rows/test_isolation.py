"""Rows 25 and 26 of the list of faults: what one tenant could learn of another."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
from callers import with_callers

from adapter_store.registry import names
from adapter_store.store import AdapterStore
from api.auth.principal import ANYBODY, Caller, Scope
from api.config.settings import ServerSettings
from api.schemas.openai import CompletionBody
from api.serving.adapter_limits import AdapterLimits
from api.serving.generation import collect, generate_openai
from api.serving.services import Services
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes
from lorasrv.offline.planner.random_adapters import write_random_adapter
from lorasrv.offline.verify.verifier import Verifier

ANN = Caller("ann", frozenset({Scope.INFER, Scope.UPLOAD}), ("mia*", "one", "two"))
BOB = Caller("bob", frozenset({Scope.INFER, Scope.UPLOAD}), ("bob*", "one"))
PROMPT = [10 + (7 * i) % 300 for i in range(45)]
PAGE = 16


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


def test_row_25_no_hit_across_adapters_and_tenants(tiny_model: ModelOptions, tiny_store: AdapterStore) -> None:
    """On the real engine: a prompt's pages are found again by the same adapter and the same key alone, or by those who
    have agreed on a salt. What `cached_tokens` says is what was not computed, so there is nothing else to time."""
    config = EngineConfig(model=tiny_model, memory=MemoryOptions(pool_bytes=4 << 20))

    async def scenario() -> None:
        engine = AsyncEngine.build(config, tiny_store)
        settings = ServerSettings()
        limits = AdapterLimits(engine, tiny_store, settings.limits("adapter"))
        services = Services.create(engine, tiny_store, settings, limits, Verifier())
        texts: dict[str, str] = {}

        async def cached(caller: Caller, name: str | None = None, salt: str | None = None) -> int:
            asked = name or engine.model_name
            fields = {"model": asked, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "cache_salt": salt}
            body = CompletionBody.model_validate(fields)
            content, _ = await collect(generate_openai(body, services, caller))
            assert texts.setdefault(asked, content["choices"][0]["text"]) == content["choices"][0]["text"]
            found: int = content["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        await engine.start()
        try:
            hit = len(PROMPT) // PAGE * PAGE
            for caller in (ANN, BOB, ANYBODY):
                assert [await cached(caller) for _ in range(2)] == [0, hit], caller.principal
            for name in ("one", "two"):
                assert [await cached(ANN, name) for _ in range(2)] == [0, hit], name
            assert [await cached(BOB, "one") for _ in range(2)] == [0, hit]
            # By agreement, and by nothing that looks like a key's own salt.
            assert [await cached(caller, salt="ours") for caller in (ANN, BOB)] == [0, hit]
            assert [await cached(ANN, salt=salt) for salt in ("bob", "key:bob", "theirs")] == [0, 0, 0]
            assert [await cached(caller) for caller in (ANN, BOB, ANYBODY)] == [hit] * 3
            assert [await cached(caller, "one") for caller in (ANN, BOB)] == [hit] * 2
        finally:
            await engine.shutdown()

    asyncio.run(scenario())


GENERATING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/generate": {"inputs": "hi"},
    "/generate_stream": {"inputs": "hi"},
    "/": {"inputs": "hi"},
}


@pytest.mark.parametrize("path", GENERATING)
def test_row_26_an_unknown_id_and_anothers(
    path: str, make_server, dispatcher, make_adapter, engine, monkeypatch
) -> None:
    """The same 404, made by the same steps: both are looked up, and compared, among what the caller may see. The base
    answers neither."""
    server = make_server()
    with_callers(dispatcher[0].app, {"ann": ANN})
    server.upload(make_adapter("bob", seed=2), "bob-secret").raise_for_status()
    server.upload(make_adapter("mia", seed=1), "mia").raise_for_status()
    compared: list[list[str]] = []
    near = names.near_names
    monkeypatch.setattr(names, "near_names", lambda name, known: compared.append(sorted(known)) or near(name, known))

    def ask(name: str, **more: Any) -> tuple[int, str, Any]:
        in_parameters = "inputs" in GENERATING[path]
        naming = {"parameters": {"adapter_id": name}} if in_parameters else {"model": name}
        answer = server.http.post(path, json={**GENERATING[path], **naming, **more}, headers={"x-caller": "ann"})
        text = answer.text.replace(name, "NAME")
        return answer.status_code, text, {k: v for k, v in answer.headers.items() if k.startswith("x-adapter")}

    for suffix in ("", "@1", ":prod"):
        for more in ({}, {"stream": True}):
            if more and path.startswith("/generate"):
                continue
            theirs, nobodys = (ask(name + suffix, **more) for name in ("bob-secret", "zob-absent"))
            assert theirs == nobodys
            assert (theirs[0], theirs[2]) == (404, {})
            assert "'NAME" in theirs[1]
            assert "does not exist" in theirs[1]
    assert compared
    assert all(known == ["mia"] for known in compared)
    assert len(compared) % 2 == 0
    assert engine.added == []
    assert ask("mia")[0] in (200, 500), "hers is hers"
