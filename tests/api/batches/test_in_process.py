"""Batches on the real engine with a tiny model: right answers of every adapter, and online requests first."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
from tiny_engine import engine_config

from adapter_store.store import AdapterStore
from api.batches.in_process import in_process_client
from api.batches.manager import BatchManager
from api.batches.results import LineReply
from api.config.settings import ServerSettings
from api.replication.share_holder import ShareHolder
from api.serving.adapter_limits import AdapterLimits
from api.serving.services import Services
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.llm import LLM
from lorasrv.offline.verify.verifier import Verifier
from lorasrv.sampling_params import SamplingParams

tiny_store = tiny_checkpoints.store
URL = "/v1/completions"
PROMPT = list(range(10, 30))


def line(custom_id: str, model: str, max_tokens: int) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body})


@pytest.fixture
def expected(model: Path, tiny_store: AdapterStore) -> dict[str | None, str]:
    """Greedy texts by adapter, each computed alone; then the store is free."""
    root = tiny_store.root
    tiny_store.close()
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(str(model), engine_config(model), root) as llm:
        names = (None, "one", "two", "three")
        texts = {name: llm.generate([PROMPT], greedy, [name])[0].text for name in names}
    assert len(set(texts.values())) == 4, "each adapter says something else"
    return texts


@pytest.mark.long
def test_the_command_with_an_engine_of_its_own(cli, model, tiny_store, expected, tmp_path, monkeypatch) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = [model.name, "one", "two", "three", "nobody"] * 4
    source.write_text("\n".join(line(f"r{i}", name, 12) for i, name in enumerate(names)))
    monkeypatch.setenv("LORASRV_DTYPE", "float32")
    own = ("--model", model, "--store", tiny_store.root, "--quantization", "none", "--pool-bytes", "4MiB")
    done = cli("batch", source, target, *own, "--json")
    assert done.code == 1, done.err
    assert [json.loads(done.out)[name] for name in ("total", "completed", "failed")] == [20, 16, 4]
    for one in map(json.loads, target.read_text().splitlines()):
        name = names[int(one["custom_id"][1:])]
        if name == "nobody":
            assert one["response"]["status_code"] == 404
        else:
            text = one["response"]["body"]["choices"][0]["text"]
            assert text == expected[None if name == model.name else name]
    done = cli("batch", source, target, *own, "--json")
    assert json.loads(done.out)["already"] == 20


@pytest.mark.anyio
async def test_online_requests_go_first(model: Path, tiny_store: AdapterStore, tmp_path: Path) -> None:
    """Two request slots and sixteen waiting batch lines: an online request waits for those that run only."""
    ended, begun = 0, asyncio.Event()
    engine = AsyncEngine.build(engine_config(model, max_num_seqs=2), tiny_store)
    settings = ServerSettings()
    limits = AdapterLimits(engine, tiny_store, settings.limits("adapter"), ShareHolder(engine))
    ask = in_process_client(Services.create(engine, tiny_store, settings, limits, Verifier()))

    async def counted(url: str, body: Mapping[str, Any]) -> LineReply:
        nonlocal ended
        reply = await ask(url, body)
        assert reply.status == 200, reply
        ended += 1
        if ended == 4:
            begun.set()
        return reply

    await engine.start()
    batches = BatchManager(tmp_path, lambda _: counted)
    try:
        data = "\n".join(line(f"r{i}", engine.model_name, 8) for i in range(60)).encode()
        async with batches.files.receiving(len(data)) as place:
            place.write(data)
            file = await batches.files.keep(place, "in.jsonl", "batch")
        batch = await batches.create(file.id, URL, ("24h", 86400))
        await begun.wait()
        before = ended
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        async for _ in engine.generate(PROMPT, sampling):
            pass
        assert ended - before <= 6
        while not batches.records[batch.id].state.is_over:
            await asyncio.sleep(0.01)
        assert batches.records[batch.id].completed == 60
    finally:
        await batches.close()
        await engine.shutdown()
