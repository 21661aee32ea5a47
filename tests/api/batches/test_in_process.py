"""Batches on the real engine with a tiny model: right answers of every adapter, and online requests first."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints

from adapter_store.store import AdapterStore
from api.batches.in_process import in_process_client
from api.batches.manager import BatchManager
from api.batches.results import LineReply
from api.config.settings import ServerSettings
from api.serving.adapter_limits import AdapterLimits
from api.serving.services import Services
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions, SchedulerOptions
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


def config(model: Path, max_num_seqs: int = 16) -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(model=str(model), quantization="none", dtype="float32"),
        memory=MemoryOptions(pool_bytes=4 << 20),
        scheduler=SchedulerOptions(max_num_seqs=max_num_seqs),
    )


@pytest.fixture
def expected(model: Path, tiny_store: AdapterStore) -> Iterator[dict[str | None, str]]:
    """Greedy texts by adapter, each computed alone; then the store is free."""
    root = tiny_store.root
    tiny_store.close()
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(str(model), config(model), root) as llm:
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


def test_online_requests_go_first(model: Path, tiny_store: AdapterStore, tmp_path: Path) -> None:
    """Two seats, sixteen batch lines that want them. An online request comes and is over after those that run and
    what fits beside it: were it one of them, all that wait would be before it."""
    ended: list[str] = []

    async def scenario() -> None:
        engine = AsyncEngine.build(config(model, max_num_seqs=2), tiny_store)
        settings = ServerSettings()
        limits = AdapterLimits(engine, tiny_store, settings.limits("adapter"))
        services = Services.create(engine, tiny_store, settings, limits, Verifier())
        ask, begun = in_process_client(services), asyncio.Event()

        async def counted(url: str, body: Mapping[str, Any]) -> LineReply:
            reply = await ask(url, body)
            assert reply.status == 200, reply
            ended.append("batch")
            if len(ended) == 4:
                begun.set()
            return reply

        await engine.start()
        keeper = BatchManager(tmp_path, lambda _: counted)
        try:
            data = "\n".join(line(f"r{i}", engine.model_name, 8) for i in range(60)).encode()
            async with keeper.files.receiving(len(data)) as place:
                place.write(data)
                file = await keeper.files.keep(place, "in.jsonl", "batch")
            batch = await keeper.create(file.id, URL, ("24h", 86400))
            await begun.wait()
            at = len(ended)
            sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
            async for _ in engine.generate(PROMPT, sampling):
                pass
            assert len(ended) - at <= 6
            while not keeper.records[batch.id].state.is_over:
                await asyncio.sleep(0.01)
            assert keeper.records[batch.id].completed == 60
        finally:
            await keeper.close()
            await engine.shutdown()

    asyncio.run(scenario())
