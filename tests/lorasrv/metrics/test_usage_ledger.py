"""What adapters were asked and cost: added up, kept over restarts, forgotten with the adapter, and of bounded size."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from clock import Clock
from tiny_engine import client, until

from adapter_store.registry.records import AdapterRecord, VersionRecord
from adapter_store.spec import AdapterId, AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.errors import EngineDead
from lorasrv.metrics import usage_ledger as module
from lorasrv.metrics.request_stats import FinishedRequestStats, RequestStats
from lorasrv.metrics.step_stats import StepStats
from lorasrv.metrics.usage import Usage, total
from lorasrv.metrics.usage_ledger import BASE_KEY, Ledger
from lorasrv.outputs import AdapterTier, FinishReason

MIA, OLD, TOM = AdapterKey("a" * 64), AdapterKey("b" * 64), AdapterKey("c" * 64)
ENDED = {
    "request_id": "r",
    "principal": "p",
    "reason": FinishReason.STOP,
    "why": "",
    "arrived_s": 0.0,
    "total_s": 2.0,
    "prompt_tokens": 10,
    "cached_tokens": 4,
    "generated_tokens": 5,
    "first_token_s": 0.03,
}


class World:
    """A ledger beside an engine and a store, which knows `mia` (two contents) and `tom`."""

    def __init__(self, folder: Path, known: dict[AdapterId, AdapterRecord] | None = None) -> None:
        self.folder, self.clock = folder, Clock()
        self.known = {} if known is None else known
        if known is None:
            self.register("mia", OLD, MIA)
            self.register("tom", TOM)
        self.resident: list[tuple[AdapterKey, int]] = []
        self.request_stats, self.step_stats = RequestStats(), StepStats()
        self.ledger = Ledger(self, SimpleNamespace(records=lambda: dict(self.known)), folder, self.clock)

    async def residents(self) -> list[tuple[AdapterKey, int]]:
        return self.resident

    def register(self, name: str, *keys: AdapterKey) -> None:
        versions = [VersionRecord(number, key, 0.0, 8, 100) for number, key in enumerate(keys, 1)]
        self.known[AdapterId(name)] = AdapterRecord.of(AdapterId(name), len(keys), 0.0, versions)

    def ended(self, adapter_id: str = "mia", key: AdapterKey | None = MIA, **fields: Any) -> None:
        tier = AdapterTier.RESIDENT if key else None
        self.ledger.on_request_finished(
            FinishedRequestStats(
                **{**ENDED, "tier": tier, **fields}, adapter_id=adapter_id, adapter_key=key, account=(adapter_id, key)
            )
        )

    async def usage(self, name: str = "mia", *keys: AdapterKey) -> Usage:
        return total((await self.ledger.stats(name, keys or (OLD, MIA))).values())

    async def requests(self, name: str = "mia", *keys: AdapterKey) -> int:
        return (await self.usage(name, *keys)).requests

    def restarted(self) -> "World":
        """Return a server that was restarted on the same folder."""
        return World(self.folder, self.known)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# What is counted.


async def test_a_prompt_counts_once_and_without_an_answer(world: World) -> None:
    for is_further in (False, True, True):
        world.ended(is_further=is_further)
    usage = await world.usage()
    assert (usage.requests, usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens) == (3, 10, 4, 15)
    # `echo` with `max_tokens: 0` is answered by the prompt.
    world.ended(reason=FinishReason.LENGTH, first_token_s=None, generated_tokens=0)
    usage = await world.usage()
    assert (usage.requests, usage.prompt_tokens, usage.to_dict()["ttft"]["hot"]["count"]) == (4, 20, 3)


async def test_requests_by_how_they_ended(world: World) -> None:
    none = {"first_token_s": None, "generated_tokens": 0}
    for fields in (
        {},
        {"tier": AdapterTier.DISK, "first_token_s": 3.0},
        {"reason": FinishReason.ERROR, "why": "adapter_load_failed", "tier": AdapterTier.HOST, **none},
        {"reason": FinishReason.REFUSED, "why": "adapter_cold", "tier": AdapterTier.DISK, **none},
        {"reason": FinishReason.TIMEOUT, "why": "request_timeout", **none},
        {"reason": FinishReason.ABORT, "why": "client"},
    ):
        world.ended(**fields)
    usage = await world.usage()
    assert (usage.requests, usage.errors, usage.refused, usage.aborted) == (6, 1, 2, 1)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens) == (30, 12, 15), "of what was computed"
    assert (usage.hits_resident, usage.hits_host, usage.hits_disk) == (3, 1, 2)
    shown = usage.to_dict()
    assert shown["hit_ratio"] == {"resident": 0.5, "host": 0.1667, "disk": 0.3333}
    assert (shown["ttft"]["hot"]["count"], shown["ttft"]["hot"]["mean_ms"]) == (2, 30.0)
    assert (shown["ttft"]["cold"]["count"], shown["ttft"]["cold"]["p95_ms"]) == (1, 4850.0)
    assert 0 < shown["first_used"] <= shown["last_used"]


async def test_versions_are_apart(world: World) -> None:
    for key in (OLD, MIA, MIA):
        world.ended(key=key)
    assert [await world.requests("mia", key) for key in (OLD, MIA)] == [1, 2]
    assert await world.requests("tom", TOM) == 0


async def test_a_fallback_is_asked_for_here_and_computed_by_the_base(world: World) -> None:
    world.ended(fell_back=True, tier=AdapterTier.DISK)
    mia, base = await world.usage(), await world.usage("", BASE_KEY)
    assert (mia.requests, mia.fallbacks, mia.generated_tokens, mia.hits_disk) == (1, 1, 0, 1)
    assert (base.requests, base.generated_tokens, base.hot.count, base.cold.count) == (0, 5, 1, 0)


async def test_time_bytes_and_residence(world: World) -> None:
    world.step_stats._spent.seconds = {("mia", MIA): 1.5, ("", None): 2.0}
    world.step_stats.on_adapter_loaded(MIA, 0.1, 1000)
    world.step_stats.on_adapter_copied(MIA, 0.1, 1000)
    world.request_stats.askers[MIA] = ("mia", MIA)
    world.resident = [(MIA, 4096), (TOM, 100)]  # nobody has asked for tom: it was pinned, say
    world.clock.now += 3600
    usage = await world.usage()
    world.clock.now += 1800
    assert (usage.compute_s, usage.load_bytes, usage.copy_bytes) == (1.5, 1000, 1000)
    assert usage.to_dict()["resident_byte_hours"] == pytest.approx(4096)
    assert (await world.usage()).to_dict()["resident_byte_hours"] == pytest.approx(1.5 * 4096)
    assert (await world.usage("tom", TOM)).to_dict()["resident_byte_hours"] == pytest.approx(150)
    assert (await world.usage("", BASE_KEY)).compute_s == 2.0


async def test_a_content_of_two_ids_counts_for_the_one_asked_last(world: World) -> None:
    world.register("twin", MIA)
    world.request_stats.askers[MIA] = ("twin", MIA)
    world.step_stats.on_adapter_loaded(MIA, 0.1, 1000)
    assert (await world.usage()).load_bytes == 0
    assert (await world.usage("twin", MIA)).load_bytes == 1000


async def test_a_content_whose_asker_is_gone_counts_for_another_of_its_ids(world: World) -> None:
    """The same weights again, under another id that nobody has asked yet."""
    world.request_stats.askers[MIA] = ("mia", MIA)
    world.step_stats.on_adapter_loaded(MIA, 0.1, 1000)
    assert (await world.usage()).load_bytes == 1000
    del world.known[AdapterId("mia")]
    world.step_stats.on_adapter_loaded(MIA, 0.1, 1000)
    await world.ledger._settle()
    world.register("eva", MIA)
    world.step_stats.on_adapter_loaded(MIA, 0.1, 10)
    assert (await world.usage("eva", MIA)).load_bytes == 10


@pytest.mark.parametrize("fault", ["dead", "hangs"])
async def test_an_engine_that_does_not_answer_costs_no_count(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    async def residents() -> None:
        if fault == "dead":
            raise EngineDead("dead")
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "MAX_ASKING_S", 0.01)
    monkeypatch.setattr(world, "residents", residents)
    world.ended()
    assert await world.requests() == 1


# What is kept.


async def test_usage_is_kept_over_a_restart(world: World) -> None:
    for tier, seconds in ((AdapterTier.RESIDENT, 0.01), (AdapterTier.DISK, 7.0)):
        world.ended(tier=tier, first_token_s=seconds)
    await world.ledger.close()
    before, later = (await world.usage()).to_dict(), world.restarted()
    assert (await later.usage()).to_dict() == before
    later.ended(first_token_s=0.02)
    await later.ledger.close()
    usage = await later.restarted().usage()
    assert (usage.requests, usage.hot.count, usage.hot.sum) == (3, 2, pytest.approx(0.03))


async def test_a_crash_takes_only_what_was_not_written(world: World) -> None:
    world.ended()
    await world.ledger._settle()
    world.ended()
    assert await world.restarted().requests() == 1


@contextlib.asynccontextmanager
async def running(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[asyncio.Task[None]]:
    """Have a ledger write by itself all the time."""
    monkeypatch.setattr(module, "WRITE_EVERY_S", 0.01)
    task = asyncio.create_task(ledger.run())
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_it_is_written_by_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ended()
    async with running(world.ledger, monkeypatch):
        await until(lambda: bool(world.ledger._file.read("mia")))
    assert await world.restarted().requests() == 1


async def test_a_deleted_id_leaves_nothing_to_the_next_of_its_name(world: World) -> None:
    world.ended()
    await world.ledger._settle()
    world.ended()  # not written yet
    del world.known[AdapterId("mia")]
    await world.ledger.forget("mia", (OLD, MIA))
    world.ended()  # was still running
    await world.ledger._settle()
    world.register("mia", MIA)
    assert await world.requests() == 0
    world.ended()
    await world.ledger.forget("mia", (OLD, MIA))
    assert await world.requests() == 0, "the same weights were uploaded again at once"


async def test_a_deleted_version_leaves_the_others(world: World) -> None:
    for key in (OLD, MIA):
        world.ended(key=key)
    await world.ledger._settle()
    await world.ledger.forget("mia", (OLD,))
    assert [await world.requests("mia", key) for key in (OLD, MIA)] == [0, 1]


async def test_an_adapter_deleted_meanwhile_goes_at_the_start(world: World) -> None:
    for name, key in (("mia", MIA), ("tom", TOM), ("", None)):
        world.ended(name, key)
    await world.ledger.close()
    del world.known[AdapterId("mia")]
    later = world.restarted()
    await later.ledger.prune()
    assert sorted(later.ledger._file.accounts()) == [("", ""), ("tom", TOM)]


# What goes wrong.


async def test_a_disk_that_refuses_costs_nothing_but_memory(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(module, "MAX_UNWRITTEN", 2)
    with monkeypatch.context() as patch:
        patch.setattr(world.ledger._file, "add", refuse)
        for requests in (("mia", OLD),), (("mia", MIA), ("mia", MIA)), (("", None),):
            for name, key in requests:
                world.ended(name, key)
            await world.ledger._settle()
    assert len(world.ledger._unwritten) == 2
    assert caplog.text.count("cannot write the ledger") == 1
    assert await world.requests("mia", MIA) == 2, "kept until the disk took it"
    assert await world.requests("mia", OLD) == 0, "one too many"


@pytest.mark.parametrize("damaged", ["", "nothing", "[[1, 2], 3.0]", "[7]", "7", '[["x"], null]', "[null, 1]"])
async def test_a_damaged_row_stops_nothing(world: World, caplog: pytest.LogCaptureFixture, damaged: str) -> None:
    for key in (OLD, MIA):
        world.ended(key=key)
    await world.ledger.close()
    with contextlib.closing(sqlite3.connect(world.folder / "ledger.db")) as db, db:
        db.execute("UPDATE usage SET hot = ? WHERE digest = ?", (damaged, MIA))
    for key in (OLD, MIA):
        world.ended(key=key)
    await world.ledger._settle()
    assert not world.ledger._unwritten
    assert "damaged" in caplog.text
    mia, old = await world.usage("mia", MIA), await world.usage("mia", OLD)
    assert (mia.requests, mia.hot.count, old.hot.count) == (2, 1, 2)


async def test_after_a_surprise_it_is_written_the_next_time(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def surprise(*_: object) -> None:
        raise OverflowError("a surprise")

    def requests_written() -> int:
        return world.ledger._file.read("mia").get(MIA, Usage()).requests

    async with running(world.ledger, monkeypatch) as task:
        for written, (name, owner) in enumerate((("add", world.ledger._file), ("take", world.step_stats)), 1):
            monkeypatch.setattr(owner, name, surprise)
            caplog.clear()
            world.ended()
            await until(lambda: "a surprise" in caplog.text or task.done())
            assert not task.done(), "the ledger was not updated"
            monkeypatch.delattr(owner, name)
            world.ended()
            await until(lambda so_far=2 * written: requests_written() == so_far or task.done())
    assert await world.restarted().requests() == 4


@pytest.mark.parametrize("layout", [1, 2, 3])
async def test_a_ledger_of_an_older_layout_goes_on(world: World, layout: int) -> None:
    """The first lacks the columns of speculation, the second what is sent and received, the third what was refused."""
    world.ended(steps=3, draft_tokens=4, accepted_draft_tokens=2)
    before = await world.usage()
    with contextlib.closing(sqlite3.connect(world.folder / "ledger.db")) as db:
        for name in ("unsent", "sending", "sources", "refused") if layout < 3 else ("refused",):
            db.execute(f"DROP TABLE {name}")
        for name in ("answer_steps", "draft_tokens", "accepted_draft_tokens") if layout == 1 else ():
            db.execute(f"ALTER TABLE usage DROP COLUMN {name}")
        db.execute(f"PRAGMA user_version = {layout}")
        db.commit()
    kept = before if layout > 1 else replace(before, answer_steps=0, draft_tokens=0, accepted_draft_tokens=0)
    later = world.restarted()
    assert (await later.usage()).to_dict() == kept.to_dict()
    later.ended(steps=3, draft_tokens=4, accepted_draft_tokens=2)
    shown = (await later.usage()).to_dict()
    assert (shown["requests"], shown["speculation"]["drafted"]) == (2, 4 if layout == 1 else 8)
    assert await later.ledger.receive("0" * 32, 1, {("mia", MIA): Usage(requests=5)})
    assert await later.requests() == 7
    assert not (world.folder / "ledger.db.unreadable").exists()


@pytest.mark.parametrize("content", [b"no database" * 999, "layout 7"])
async def test_an_unreadable_file_is_put_aside(
    world: World, content: bytes | str, caplog: pytest.LogCaptureFixture
) -> None:
    path = world.folder / "ledger.db"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA user_version = 7")
    world.ended()
    assert await world.requests() == 1
    assert (world.folder / "ledger.db.unreadable").exists()
    assert caplog.text.count("cannot read the ledger") == 1


async def test_thousands_of_adapters_are_in_the_file_and_not_in_memory(world: World) -> None:
    for number in range(2_000):
        key = AdapterKey(f"{number:064x}")
        world.register(f"a{number}", key)
        world.ended(f"a{number}", key)
    await world.ledger._settle()
    assert not world.ledger._unwritten
    assert await world.requests("a1999", AdapterKey(f"{1999:064x}")) == 1
    assert (world.folder / "ledger.db").stat().st_size < 2_000 * 1024


# Around a real engine, with its /metrics.


async def ask(http: httpx2.AsyncClient, name: str, **fields: Any) -> dict[str, Any]:
    body = {"model": name, "prompt": list(range(10, 40)), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = await http.post("/v1/completions", json={**body, **fields})
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


async def shown_stats(http: httpx2.AsyncClient, name: str) -> dict[str, Any]:
    shown: dict[str, Any] = (await http.get(f"/v1/adapters/{name}/stats")).json()
    return shown


async def metrics(http: httpx2.AsyncClient) -> dict[str, float]:
    lines = (await http.get("/metrics")).text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


async def test_everything_adds_up_and_is_kept(model: Path, store: AdapterStore) -> None:
    async with client(model, store, kernels="torch") as (engine, http):
        base = (await http.get("/v1/models")).json()["data"][0]["id"]
        one, again = await ask(http, "one"), await ask(http, "one", n=2)
        two, plain = await ask(http, "two"), await ask(http, base)
        shown = {name: await shown_stats(http, name) for name in ("one", "two", "three", "base")}
        by_name, steps = await metrics(http), engine.step_stats.step_seconds
        layout = await engine.input_processor.layout(store.resolve("one").key)
        kept = await shown_stats(http, "one")

    assert (shown["one"]["requests"], shown["two"]["requests"], shown["base"]["requests"]) == (3, 1, 1)
    tokens = one["completion_tokens"] + again["completion_tokens"]
    assert shown["one"]["generated_tokens"] == tokens == 18
    assert shown["two"]["generated_tokens"] == two["completion_tokens"]
    assert shown["base"]["prompt_tokens"] == plain["prompt_tokens"]
    assert shown["one"]["cached_tokens"] > 0, "the second request and its second choice share the first's pages"
    computed = sum(each["compute_seconds"] for each in shown.values())
    assert computed == pytest.approx(steps.sum, abs=1e-4), "every step's time is somebody's"
    assert min(shown["one"]["compute_seconds"], shown["two"]["compute_seconds"]) > 0
    assert (shown["one"]["disk_loads"], shown["one"]["pool_copies"]) == (1, 1)
    assert shown["one"]["disk_bytes"] == shown["one"]["pool_bytes"] == layout.nbytes
    assert shown["one"]["found"] == {"resident": 2, "host": 0, "disk": 1}
    assert (shown["one"]["ttft"]["cold"]["count"], shown["one"]["ttft"]["hot"]["count"]) == (1, 2)
    assert kept["resident_byte_hours"] >= shown["one"]["resident_byte_hours"] >= 0
    assert shown["three"]["requests"] == shown["three"]["disk_bytes"] == shown["three"]["compute_seconds"] == 0

    assert by_name["lorasrv_step_seconds_count"] == by_name["lorasrv_steps_total"] == steps.count
    assert by_name['lorasrv_adapter_requests_total{adapter="one"}'] == 3
    assert by_name['lorasrv_adapter_load_seconds_count{tier="disk"}'] == 2
    assert by_name['lorasrv_adapter_load_seconds_count{tier="host"}'] == 2
    assert by_name['lorasrv_adapters_resident{tier="pool"}'] == 2
    assert by_name['lorasrv_adapters_resident{tier="host"}'] == 2
    assert by_name["lorasrv_batch_distinct_adapters_sum"] < by_name["lorasrv_batch_distinct_adapters_count"]
    assert by_name["lorasrv_time_to_first_token_seconds_count"] == 5
    assert by_name["lorasrv_kv_cache_usage_ratio"] == by_name["lorasrv_tokens_waiting"] == 0

    async with client(model, store, kernels="torch") as (_, http):
        figures = ("requests", "generated_tokens", "compute_seconds", "disk_bytes", "found", "ttft", "last_used")
        after = await shown_stats(http, "one")
        assert {name: after[name] for name in figures} == {name: kept[name] for name in figures}
        await ask(http, "one")
        assert (await shown_stats(http, "one"))["requests"] == 4
