"""What adapters were asked and cost: added up, kept over restarts, forgotten with the adapter, and of bounded size."""

import asyncio
import sqlite3
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from tiny_engine import client

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


class Engine:
    def __init__(self) -> None:
        self.request_stats = RequestStats()
        self.step_stats = StepStats()
        self.resident: list[tuple[AdapterKey, int]] = []
        self.is_dead = False

    async def residents(self) -> list[tuple[AdapterKey, int]]:
        if self.is_dead:
            raise EngineDead("dead")
        return self.resident


class Store:
    """Knows `mia` (two contents) and `tom`."""

    def __init__(self) -> None:
        self.known = {AdapterId("mia"): record("mia", OLD, MIA), AdapterId("tom"): record("tom", TOM)}

    def records(self) -> dict[AdapterId, AdapterRecord]:
        return dict(self.known)


def record(name: str, *keys: AdapterKey) -> AdapterRecord:
    versions = [VersionRecord(number, key, 0.0, 8, 100) for number, key in enumerate(keys, 1)]
    return AdapterRecord.of(AdapterId(name), len(keys), 0.0, versions)


def ended(adapter_id: str = "mia", key: AdapterKey | None = MIA, **fields: Any) -> FinishedRequestStats:
    known: dict[str, Any] = {
        "request_id": "r",
        "adapter_id": adapter_id,
        "adapter_key": key,
        "principal": "p",
        "reason": FinishReason.STOP,
        "why": "",
        "arrived_s": 0.0,
        "total_s": 2.0,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "generated_tokens": 5,
        "first_token_s": 0.03,
        "tier": AdapterTier.RESIDENT if key else None,
    }
    return FinishedRequestStats(**{**known, **fields})


@pytest.fixture
def world(tmp_path: Path) -> SimpleNamespace:
    engine, store = Engine(), Store()
    return SimpleNamespace(engine=engine, store=store, folder=tmp_path, ledger=Ledger(engine, store, tmp_path))


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def stats(world: SimpleNamespace, name: str = "mia", *keys: AdapterKey) -> Usage:
    usages = run(world.ledger.stats(name, keys or (OLD, MIA)))
    return total(usages.values())


def again(world: SimpleNamespace) -> SimpleNamespace:
    """A server that was restarted on the same folder."""
    engine = Engine()
    return SimpleNamespace(
        engine=engine, store=world.store, folder=world.folder, ledger=Ledger(engine, world.store, world.folder)
    )


class TestWhatIsCounted:
    def test_requests_by_how_they_ended(self, world: SimpleNamespace) -> None:
        none = {"first_token_s": None, "generated_tokens": 0}
        for request in (
            ended(),
            ended(tier=AdapterTier.DISK, first_token_s=3.0),
            ended(reason=FinishReason.ERROR, why="adapter_load_failed", tier=AdapterTier.HOST, **none),
            ended(reason=FinishReason.REFUSED, why="adapter_cold", tier=AdapterTier.DISK, **none),
            ended(reason=FinishReason.TIMEOUT, why="request_timeout", **none),
            ended(reason=FinishReason.ABORT, why="client"),
        ):
            world.ledger.ended(request)
        usage = stats(world)
        assert (usage.requests, usage.errors, usage.refused, usage.aborted) == (6, 1, 2, 1)
        assert (usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens) == (30, 12, 15), (
            "of what was computed"
        )
        assert (usage.hits_resident, usage.hits_host, usage.hits_disk) == (3, 1, 2)
        shown = usage.to_dict()
        assert shown["hit_ratio"] == {"resident": 0.5, "host": 0.1667, "disk": 0.3333}
        assert (shown["ttft"]["hot"]["count"], shown["ttft"]["hot"]["mean_ms"]) == (2, 30.0)
        assert (shown["ttft"]["cold"]["count"], shown["ttft"]["cold"]["p95_ms"]) == (1, 4850.0)
        assert 0 < shown["first_used"] <= shown["last_used"]

    def test_versions_are_apart(self, world: SimpleNamespace) -> None:
        world.ledger.ended(ended(key=OLD))
        world.ledger.ended(ended(key=MIA))
        world.ledger.ended(ended(key=MIA))
        assert stats(world, "mia", OLD).requests == 1
        assert stats(world, "mia", MIA).requests == 2
        assert stats(world, "tom", TOM).requests == 0

    def test_a_fallback_is_asked_for_here_and_computed_by_the_base(self, world: SimpleNamespace) -> None:
        world.ledger.ended(ended(fell_back=True, tier=AdapterTier.DISK))
        mia, base = stats(world), stats(world, "", BASE_KEY)
        assert (mia.requests, mia.fallbacks, mia.generated_tokens, mia.hits_disk) == (1, 1, 0, 1)
        assert (base.requests, base.generated_tokens, base.hot.count, base.cold.count) == (0, 5, 1, 0)

    def test_time_bytes_and_residence(self, world: SimpleNamespace) -> None:
        now = SimpleNamespace(s=world.ledger._sampled_s)
        world.ledger._clock = lambda: now.s
        world.engine.step_stats._spent.seconds = {("mia", MIA): 1.5, ("", None): 2.0}
        world.engine.step_stats.loaded(MIA, 0.1, 1000)
        world.engine.step_stats.copied(MIA, 0.1, 1000)
        world.engine.request_stats.askers[MIA] = "mia"
        world.engine.resident = [(MIA, 4096), (TOM, 100)]  # nobody has asked for tom: it was pinned, say
        now.s += 3600
        usage = stats(world)
        now.s += 1800
        assert (usage.compute_s, usage.load_bytes, usage.copy_bytes) == (1.5, 1000, 1000)
        assert usage.to_dict()["resident_byte_hours"] == pytest.approx(4096)
        assert stats(world).to_dict()["resident_byte_hours"] == pytest.approx(1.5 * 4096)
        assert stats(world, "tom", TOM).to_dict()["resident_byte_hours"] == pytest.approx(150)
        assert stats(world, "", BASE_KEY).compute_s == 2.0

    def test_a_content_of_two_ids_counts_for_who_asked_last(self, world: SimpleNamespace) -> None:
        world.store.known[AdapterId("twin")] = record("twin", MIA)
        world.engine.request_stats.askers[MIA] = "twin"
        world.engine.step_stats.loaded(MIA, 0.1, 1000)
        assert stats(world).load_bytes == 0
        assert stats(world, "twin", MIA).load_bytes == 1000

    def test_a_content_whose_asker_is_gone_counts_for_who_has_it(self, world: SimpleNamespace) -> None:
        """The same weights again, under another id that nobody has asked yet."""
        world.engine.request_stats.askers[MIA] = "mia"
        world.engine.step_stats.loaded(MIA, 0.1, 1000)
        assert stats(world).load_bytes == 1000
        del world.store.known[AdapterId("mia")]
        world.engine.step_stats.loaded(MIA, 0.1, 1000)
        run(world.ledger._settle())
        world.store.known[AdapterId("eva")] = record("eva", MIA)
        world.engine.step_stats.loaded(MIA, 0.1, 10)
        assert stats(world, "eva", MIA).load_bytes == 10

    def test_a_dead_engine_has_a_ledger_all_the_same(self, world: SimpleNamespace) -> None:
        world.engine.is_dead = True
        world.ledger.ended(ended())
        assert stats(world).requests == 1

    def test_an_engine_that_hangs_delays_nothing_for_long(
        self, world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def hang() -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(module, "MAX_ASKING_S", 0.01)
        monkeypatch.setattr(world.engine, "residents", hang)
        world.ledger.ended(ended())
        assert stats(world).requests == 1


class TestWhatIsKept:
    def test_over_a_restart(self, world: SimpleNamespace) -> None:
        for tier, seconds in ((AdapterTier.RESIDENT, 0.01), (AdapterTier.DISK, 7.0)):
            world.ledger.ended(ended(tier=tier, first_token_s=seconds))
        run(world.ledger.close())
        before = stats(world).to_dict()
        later = again(world)
        assert stats(later).to_dict() == before
        later.ledger.ended(ended(first_token_s=0.02))
        usage = stats(again(later) if run(later.ledger.close()) else later)
        assert (usage.requests, usage.hot.count, usage.hot.sum) == (3, 2, pytest.approx(0.03))

    def test_what_was_not_written_is_all_that_a_crash_takes(self, world: SimpleNamespace) -> None:
        world.ledger.ended(ended())
        run(world.ledger._settle())
        world.ledger.ended(ended())
        assert stats(again(world)).requests == 1

    def test_it_is_written_by_itself(self, world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "WRITE_EVERY_S", 0.01)

        async def serve() -> None:
            world.ledger.ended(ended())
            task = asyncio.create_task(world.ledger.run())
            while not world.ledger._file.read("mia"):
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        run(asyncio.wait_for(serve(), 20))
        assert stats(again(world)).requests == 1

    def test_a_deleted_id_leaves_nothing_to_the_next_of_its_name(self, world: SimpleNamespace) -> None:
        world.ledger.ended(ended())
        run(world.ledger._settle())
        world.ledger.ended(ended())  # not written yet
        del world.store.known[AdapterId("mia")]
        run(world.ledger.forget("mia", (OLD, MIA)))
        world.ledger.ended(ended())  # was still running
        run(world.ledger._settle())
        world.store.known[AdapterId("mia")] = record("mia", MIA)
        assert stats(world).requests == 0
        assert stats(world, "tom", TOM).requests == 0

    def test_nor_does_what_was_not_written_yet(self, world: SimpleNamespace) -> None:
        world.ledger.ended(ended())
        run(world.ledger.forget("mia", (OLD, MIA)))
        assert stats(world).requests == 0, "the same weights were uploaded again at once"

    def test_a_deleted_version_leaves_the_others(self, world: SimpleNamespace) -> None:
        for key in (OLD, MIA):
            world.ledger.ended(ended(key=key))
        run(world.ledger._settle())
        run(world.ledger.forget("mia", (OLD,)))
        assert (stats(world, "mia", OLD).requests, stats(world, "mia", MIA).requests) == (0, 1)

    def test_what_was_deleted_meanwhile_goes_at_the_start(self, world: SimpleNamespace) -> None:
        for name, key in (("mia", MIA), ("tom", TOM), ("", None)):
            world.ledger.ended(ended(name, key))
        run(world.ledger.close())
        del world.store.known[AdapterId("mia")]
        later = again(world)
        run(later.ledger._prune())
        assert sorted(later.ledger._file.accounts()) == [("", ""), ("tom", TOM)]


class TestWhatGoesWrong:
    def test_a_disk_that_refuses_costs_nothing_but_memory(
        self, world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(world.ledger._file, "add", refuse)
        monkeypatch.setattr(module, "MAX_UNWRITTEN", 2)
        world.ledger.ended(ended(key=OLD))
        run(world.ledger._settle())
        world.ledger.ended(ended())
        world.ledger.ended(ended())
        run(world.ledger._settle())
        world.ledger.ended(ended("", None))
        run(world.ledger._settle())
        assert len(world.ledger._unwritten) == 2
        assert caplog.text.count("cannot write the ledger") == 1
        monkeypatch.undo()
        assert stats(world, "mia", MIA).requests == 2, "kept until the disk took it"
        assert stats(world, "mia", OLD).requests == 0, "one too many"

    @pytest.mark.parametrize("damaged", ["", "nothing", "[[1, 2], 3.0]", "[7]", "7", '[["x"], null]', "[null, 1]"])
    def test_a_damaged_row_stops_nothing(
        self, world: SimpleNamespace, caplog: pytest.LogCaptureFixture, damaged: str
    ) -> None:
        for key in (OLD, MIA):
            world.ledger.ended(ended(key=key))
        run(world.ledger.close())
        with sqlite3.connect(world.folder / "ledger.db") as db:
            db.execute("UPDATE usage SET hot = ? WHERE digest = ?", (damaged, MIA))
        db.close()
        for key in (OLD, MIA):
            world.ledger.ended(ended(key=key))
        run(world.ledger._settle())
        assert not world.ledger._unwritten
        assert "damaged" in caplog.text
        mia = stats(world, "mia", MIA)
        assert (mia.requests, mia.hot.count, stats(world, "mia", OLD).hot.count) == (2, 1, 2)

    def test_a_surprise_is_told_and_the_next_time_may_be_better(
        self, world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(module, "WRITE_EVERY_S", 0.01)

        def surprise(*_: object) -> None:
            raise OverflowError("a surprise")

        async def until(done: Any) -> None:
            while not done():
                await asyncio.sleep(0.005)

        def requests_written() -> int:
            return world.ledger._file.read("mia").get(MIA, Usage()).requests

        async def serve() -> None:
            task = asyncio.create_task(world.ledger.run())
            faults = (("add", world.ledger._file), ("take", world.engine.step_stats))
            for written, (broken, owner) in enumerate(faults, 1):
                monkeypatch.setattr(owner, broken, surprise)
                caplog.clear()
                world.ledger.ended(ended())
                await until(lambda: "a surprise" in caplog.text or task.done())
                assert not task.done(), "the ledger was not updated"
                monkeypatch.delattr(owner, broken)
                world.ledger.ended(ended())
                await until(lambda so_far=2 * written: requests_written() == so_far or task.done())
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        run(asyncio.wait_for(serve(), 20))
        assert stats(again(world)).requests == 4

    @pytest.mark.parametrize("content", [b"no database" * 999, "layout 7"])
    def test_a_file_that_is_none_is_put_aside(
        self, world: SimpleNamespace, content: bytes | str, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = world.folder / "ledger.db"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            db = sqlite3.connect(path)
            db.execute("PRAGMA user_version = 7")
            db.close()
        world.ledger.ended(ended())
        assert stats(world).requests == 1
        assert (world.folder / "ledger.db.unreadable").exists()
        assert caplog.text.count("cannot read the ledger") == 1

    def test_thousands_of_adapters_are_in_the_file_and_not_in_memory(self, world: SimpleNamespace) -> None:
        for number in range(2_000):
            key = AdapterKey(f"{number:064x}")
            world.store.known[AdapterId(f"a{number}")] = record(f"a{number}", key)
            world.ledger.ended(ended(f"a{number}", key))
        run(world.ledger._settle())
        assert not world.ledger._unwritten
        assert stats(world, "a1999", AdapterKey(f"{1999:064x}")).requests == 1
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


def test_everything_adds_up_and_is_kept(model: Path, store: AdapterStore) -> None:
    kept: dict[str, Any] = {}

    async def first() -> None:
        async with client(model, store, kernels="torch") as (engine, http):
            base = (await http.get("/v1/models")).json()["data"][0]["id"]
            one, again, two, plain = (
                await ask(http, "one"),
                await ask(http, "one", n=2),
                await ask(http, "two"),
                await ask(http, base),
            )
            shown = {name: await shown_stats(http, name) for name in ("one", "two", "three", "base")}
            by_name, steps = await metrics(http), engine.step_stats.step_seconds
            layout = engine.input_processor.layout(store.resolve("one").key)
            kept.update(await shown_stats(http, "one"))

        assert (shown["one"]["requests"], shown["two"]["requests"], shown["base"]["requests"]) == (3, 1, 1)
        tokens = one["completion_tokens"] + again["completion_tokens"]
        assert shown["one"]["generated_tokens"] == tokens == 18
        assert shown["two"]["generated_tokens"] == two["completion_tokens"]
        assert shown["base"]["prompt_tokens"] == plain["prompt_tokens"]
        assert shown["one"]["cached_tokens"] > 0, "the second request and its second choice share the first's pages"
        computed = sum(each["compute_seconds"] for each in shown.values())
        assert computed == pytest.approx(steps.sum, abs=1e-4), "every step's time is somebody's"
        assert shown["one"]["compute_seconds"] > shown["two"]["compute_seconds"] > 0
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

    async def second() -> None:
        async with client(model, store, kernels="torch") as (_, http):
            figures = ("requests", "generated_tokens", "compute_seconds", "disk_bytes", "found", "ttft", "last_used")
            after = await shown_stats(http, "one")
            assert {name: after[name] for name in figures} == {name: kept[name] for name in figures}
            await ask(http, "one")
            assert (await shown_stats(http, "one"))["requests"] == 4

    asyncio.run(first())
    asyncio.run(second())
