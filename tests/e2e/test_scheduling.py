"""Limits, priorities and deadlines from the outside: flags, the command line and requests against a real server."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from served import Served, serve

pytestmark = pytest.mark.long

BASE = "smollm2-135m"
FLAGS = ("--pool-bytes", "512MiB", "--max-num-seqs", "4", "--max-running-per-adapter", "1")


@pytest.fixture(scope="module")
def name(personas: dict[str, Path]) -> str:
    return next(iter(personas))


@pytest.fixture(scope="module")
def server(cli, personas: dict[str, Path], name: str, tmp_path_factory) -> Iterator[Served]:
    """Limited by flags, and by what was said of one adapter before a restart."""
    store = tmp_path_factory.mktemp("limits") / "store"
    with serve(*FLAGS, adapters={name: personas[name]}, store=store) as first:
        done = cli("limit", name, "--max-queued", "1", "--weight", "2", "--server", first.url)
        assert done.stdout == f"{name}: max_queued 1, weight 2\n", done.stderr
    with serve(*FLAGS, store=store) as second:
        yield second


def ask(client: httpx2.AsyncClient, model: str, max_tokens: int, **fields: object) -> Any:
    body = {"model": model, "prompt": "Once", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}
    return client.post("/v1/completions", json=body)


def run(server: Any, work: Callable[[httpx2.AsyncClient], Any]) -> Any:
    async def main() -> Any:
        async with httpx2.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as client:
            return await work(client)

    return asyncio.run(main())


def test_limits_hold_after_a_restart(server, cli, name: str) -> None:
    """One runs (a flag), one waits (of its own), two are refused; the base has no limits."""
    shown = json.loads(cli("limit", name, "--json", "--server", server.url).stdout)
    assert shown == {"id": name, "limits": {"max_queued": 1, "weight": 2.0}}

    async def work(client: httpx2.AsyncClient) -> tuple[list[Any], list[Any]]:
        await ask(client, name, 1)
        tasks = [asyncio.ensure_future(ask(client, name, 300)) for _ in range(4)]
        bases = await asyncio.gather(*(ask(client, BASE, 2) for _ in range(4)))
        return await asyncio.gather(*tasks), bases

    answers, bases = run(server, work)
    refused = [answer for answer in answers if answer.status_code != 200]
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
    for answer in refused:
        assert answer.json()["error"]["code"] == "limit_exceeded"
        assert name in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
    assert {answer.status_code for answer in bases} == {200}


def test_what_is_changed_holds_at_once(server, cli, name: str) -> None:
    assert cli("limit", name, "--none", "--max-running", "4", "--server", server.url).returncode == 0

    async def work(client: httpx2.AsyncClient) -> list[Any]:
        return await asyncio.gather(*(ask(client, name, 4) for _ in range(4)))

    assert [answer.status_code for answer in run(server, work)] == [200] * 4


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline(server, name: str, stream: bool) -> None:
    async def work(client: httpx2.AsyncClient) -> Any:
        return await ask(client, name, 2000, timeout_s=4, stream=stream)

    answer = run(server, work)
    if stream:
        assert answer.status_code == 200
        *pieces, last, done = answer.text.strip().split("\n\n")
        assert (len(pieces) > 1, done) == (True, "data: [DONE]")
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 504
        assert answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("timeout", "timeout_s")


def test_lower_goes_first(server) -> None:
    """All slots are taken while others come; when they are free, those of higher rank begin, though they came last."""

    async def work(client: httpx2.AsyncClient) -> list[str]:
        ended: list[str] = []

        async def note(who: str, **fields: object) -> None:
            assert (await ask(client, BASE, 3, **fields)).status_code == 200
            ended.append(who)

        slots = [asyncio.ensure_future(ask(client, BASE, 1000, priority=-9)) for _ in range(4)]
        await until(client, "running", 4)
        usual = [asyncio.ensure_future(note("usual")) for _ in range(4)]
        await until(client, "waiting", 4)
        urgent = [asyncio.ensure_future(note("urgent", priority=-5)) for _ in range(4)]
        await until(client, "waiting", 8)
        for slot in slots:
            slot.cancel()
        await asyncio.gather(*slots, return_exceptions=True)
        await asyncio.gather(*usual, *urgent)
        return ended

    assert run(server, work) == ["urgent"] * 4 + ["usual"] * 4


async def until(client: httpx2.AsyncClient, state: str, count: int) -> None:
    line = f"lorasrv_requests_{state} {count}.0\n"
    async with asyncio.timeout(60):
        while line not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
