"""Batches over a server's life: killed at any moment, stopped, expired, forgotten."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import fake_serve
import httpx2
import pytest

from adapter_store.errors import StoreUnusable
from api.auth.principal import Caller
from api.batches.files import BatchBounds
from api.batches.input_lines import scan
from api.batches.manager import BatchManager
from api.batches.records import BatchRecord, BatchStatus, FileRecord
from api.batches.results import LineReply
from api.errors import ApiError
from lorasrv.errors import EngineDead

URL = "/v1/completions"
DAY = 86400
ANN, BOB = Caller("ann", frozenset()), Caller("bob", frozenset())


class Asked:
    """Answers every body with its number; tests hook in before an answer."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.before: Callable[[int], Awaitable[object]] | None = None

    async def __call__(self, url: str, body: Mapping[str, Any]) -> LineReply:
        assert url == URL
        self.numbers.append(body["n"])
        if self.before is not None:
            await self.before(len(self.numbers))
        await asyncio.sleep(0)
        return LineReply(400 if body["n"] % 10 == 3 else 200, {"n": body["n"]}, "req-1")


@pytest.fixture
def ask() -> Asked:
    return Asked()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def content(count: int) -> bytes:
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": URL, "body": {"n": n}} for n in range(count)]
    return "\n".join(map(json.dumps, lines)).encode()


async def put(keeper: BatchManager, data: bytes) -> FileRecord:
    async with keeper.files.receiving(len(data)) as place:
        await asyncio.to_thread(place.write, data)
        return await keeper.files.keep(place, "in.jsonl", "batch")


async def begin(keeper: BatchManager, count: int) -> BatchRecord:
    file = await put(keeper, content(count))
    return await keeper.create(file.id, URL, ("24h", DAY))


async def over(keeper: BatchManager, batch_id: str) -> BatchRecord:
    async with asyncio.timeout(20):
        while not keeper.records[batch_id].state.is_over:
            await asyncio.sleep(0.002)
    return keeper.records[batch_id]


def check_whole(keeper: BatchManager, record: BatchRecord, count: int) -> None:
    """Every line has one result, in the right file, and the counts say so."""
    found = {}
    for file_id, ok in ((record.output_file, True), (record.error_file, False)):
        path = keeper.files.path(file_id)
        assert keeper.files.records[file_id].bytes == path.stat().st_size
        for line in path.read_bytes().splitlines():
            one = json.loads(line)
            assert one["custom_id"] not in found
            assert (one["response"]["status_code"] == 200) is ok
            found[one["custom_id"]] = one["response"]["body"]["n"]
    assert found == {f"r{n}": n for n in range(count)}
    failed = sum(n % 10 == 3 for n in range(count))
    assert (record.status, record.total, record.completed, record.failed) == (
        "completed",
        count,
        count - failed,
        failed,
    )


def test_killed_at_any_moment(root: Path, ask: Asked, tmp_path: Path) -> None:
    """What a disk holds at any moment is enough to end the batch: each copy is a server that was killed then."""
    count = 40

    async def live() -> tuple[str, list[Path]]:
        copies: list[Path] = []
        keeper = BatchManager(root, lambda _: ask, concurrency=4)
        write = keeper._folder.write_batch

        def copied() -> None:
            copies.append(tmp_path / f"copy{len(copies)}")
            shutil.copytree(root, copies[-1])

        def write_and_copy(record: BatchRecord) -> None:
            copied()
            write(record)
            copied()

        async def copy_some(number: int) -> None:
            if number % 9 == 0:
                await asyncio.to_thread(copied)

        keeper._folder.write_batch = write_and_copy
        ask.before = copy_some
        record = await begin(keeper, count)
        check_whole(keeper, await over(keeper, record.id), count)
        await keeper.close()
        return record.id, copies

    batch_id, copies = asyncio.run(live())
    ask.before = None
    states = set()

    async def go_on(copy: Path) -> None:
        keeper = BatchManager(copy, lambda _: ask, concurrency=4)
        if batch_id not in keeper.records:
            return
        before = keeper.records[batch_id]
        states.add(before.status)
        done = keeper._found(before).keys.size
        ask.numbers.clear()
        await keeper.start()
        check_whole(keeper, await over(keeper, batch_id), count)
        assert len(ask.numbers) == (0 if before.state.is_over else count - done)
        await keeper.close()

    for number, copy in enumerate(copies):
        if number % 2:
            for file in (copy / "batches" / "files").glob("*"):
                # As a power failure may leave a file that is being written.
                if file.suffix != ".json" and file.read_bytes()[:17] == b'{"id":"batch_req_':
                    file.write_bytes(file.read_bytes() + b'{"id":"batch_req_77", "cus')
        asyncio.run(go_on(copy))
    assert states >= {"validating", "in_progress", "finalizing", "completed"}


@pytest.mark.parametrize("moment", [5, 17, 33])
def test_stopped_and_started(root: Path, ask: Asked, moment: int) -> None:
    async def first() -> str:
        reached = asyncio.Event()

        async def hang(number: int) -> None:
            if number >= moment:
                reached.set()
                await asyncio.Event().wait()

        ask.before = hang
        keeper = BatchManager(root, lambda _: ask)
        record = await begin(keeper, 40)
        await reached.wait()
        await keeper.close()
        assert keeper.records[record.id].status == "in_progress"
        return record.id

    async def second(batch_id: str) -> None:
        ask.before = None
        keeper = BatchManager(root, lambda _: ask)
        await keeper.start()
        check_whole(keeper, await over(keeper, batch_id), 40)
        await keeper.close()

    asyncio.run(second(asyncio.run(first())))
    assert len(ask.numbers) < 40 + 16 + 1


def test_expired(root: Path, ask: Asked) -> None:
    now = [1_000_000.0]

    async def scenario() -> None:
        async def hang(number: int) -> None:
            if number > 20:
                await asyncio.Event().wait()

        ask.before = hang
        keeper = BatchManager(root, lambda _: ask, clock=lambda: now[0])
        record = await begin(keeper, 40)
        while len(ask.numbers) < 36:
            await asyncio.sleep(0.002)
        await keeper.close()
        now[0] += DAY + 1
        keeper = BatchManager(root, lambda _: ask, clock=lambda: now[0])
        await keeper.start()
        ended = await over(keeper, record.id)
        assert (ended.status, ended.expired_at, ended.completed + ended.failed) == ("expired", int(now[0]), 40)
        errors = map(json.loads, keeper.files.path(ended.error_file).read_bytes().splitlines())
        late = [one["custom_id"] for one in errors if one["error"] and one["error"]["code"] == "batch_expired"]
        assert len(late) == 20
        await keeper.close()

    asyncio.run(scenario())


def test_a_cancelled_one_that_was_killed(root: Path, ask: Asked) -> None:
    async def scenario() -> None:
        async def hang(number: int) -> None:
            if number > 5:
                await asyncio.Event().wait()

        ask.before = hang
        keeper = BatchManager(root, lambda _: ask)
        record = await begin(keeper, 40)
        while len(ask.numbers) < 20:
            await asyncio.sleep(0.002)
        publish = keeper.files.publish

        async def killed(*_: object) -> None:
            await asyncio.Event().wait()

        keeper.files.publish = killed
        await keeper.cancel(record.id)
        await keeper.close()
        keeper.files.publish = publish
        keeper = BatchManager(root, lambda _: ask)
        assert keeper.records[record.id].status == "cancelling"
        await keeper.start()
        ended = await over(keeper, record.id)
        assert (ended.status, ended.completed + ended.failed) == ("cancelled", 5)
        await keeper.close()

    asyncio.run(scenario())


def test_cancelled_while_results_of_what_is_late_are_written(root: Path, ask: Asked) -> None:
    """What is published is whole: nobody writes to it any more."""

    async def scenario() -> None:
        writing, go_on = threading.Event(), threading.Event()
        keeper = BatchManager(root, lambda _: ask)
        write = keeper._write_expired

        def slowly(record: BatchRecord) -> None:
            writing.set()
            go_on.wait(10)
            write(record)

        keeper._write_expired = slowly  # type: ignore[method-assign]
        file = await put(keeper, content(20))
        record = await keeper.create(file.id, URL, ("0h", 0))
        await asyncio.to_thread(writing.wait, 10)
        cancelling = asyncio.create_task(keeper.cancel(record.id))
        await asyncio.sleep(0.05)
        go_on.set()
        await cancelling
        ended = await over(keeper, record.id)
        assert (ended.status, ended.failed) == ("cancelled", 20)
        path = keeper.files.path(ended.error_file)
        assert keeper.files.records[ended.error_file].bytes == path.stat().st_size > 0
        await keeper.close()

    asyncio.run(scenario())


def test_a_file_is_in_use_before_its_batch_is_on_the_disk(root: Path, ask: Asked) -> None:
    async def scenario() -> None:
        bounds = BatchBounds(max_open_batches=1)
        keeper = BatchManager(root, lambda _: ask, bounds)
        file = await put(keeper, content(5))
        creating = asyncio.create_task(keeper.create(file.id, URL, ("24h", DAY)))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="needs the file"):
            await keeper.delete_file(file.id)
        with pytest.raises(ApiError, match="open already"):
            await keeper.create(file.id, URL, ("24h", DAY))
        check_whole(keeper, await over(keeper, (await creating).id), 5)
        await keeper.close()

    asyncio.run(scenario())


def test_a_key_that_must_wait_holds_up_no_other(root: Path, ask: Asked) -> None:
    """Lines that a key's limits refuse wait for hours; more batches than may run at a time are all of one key."""

    async def wait(url: str, body: Mapping[str, Any]) -> LineReply:
        return LineReply(429, {}, "req-1", 5.0)

    async def scenario() -> None:
        keeper = BatchManager(root, lambda caller: ask if caller.principal == "bob" else wait)
        file = await put(keeper, content(50))
        waiting = [await keeper.create(file.id, URL, ("24h", DAY), caller=ANN) for _ in range(5)]
        async with asyncio.timeout(20):
            while keeper.records[waiting[0].id].state is not BatchStatus.IN_PROGRESS:
                await asyncio.sleep(0.002)
        await asyncio.sleep(0.1)
        record = await keeper.create(file.id, URL, ("24h", DAY), caller=BOB)
        check_whole(keeper, await over(keeper, record.id), 50)
        await keeper.close()

    asyncio.run(scenario())


def test_one_key_leaves_room_for_others(root: Path, ask: Asked) -> None:
    """Of files, their bytes and open batches a key has half at most, and is not told what others have."""

    async def keep(keeper: BatchManager, size: int, caller: Caller) -> FileRecord:
        async with keeper.files.receiving(size, caller) as place:
            await asyncio.to_thread(place.write, b"x" * size)
            return await keeper.files.keep(place, "in.jsonl", "batch", None, caller.principal)

    async def scenario() -> None:
        bounds = BatchBounds(max_files=6, max_total_bytes=1000, max_open_batches=4)
        keeper = BatchManager(root, lambda _: ask, bounds)
        files = [await keep(keeper, 10, ANN) for _ in range(3)]
        with pytest.raises(ApiError, match="3 files already"):
            await keep(keeper, 1, ANN)
        with pytest.raises(ApiError, match="files have 0 bytes, and 500 are allowed"):
            await keep(keeper, 501, BOB)
        await keep(keeper, 500, BOB)
        with pytest.raises(ApiError, match="507: there is no room among the files of all keys; delete"):
            await keep(keeper, 480, Caller("cid", frozenset()))
        creating = [asyncio.create_task(keeper.create(files[0].id, URL, ("24h", DAY), caller=ANN)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 batches are open already"):
            await keeper.create(files[0].id, URL, ("24h", DAY), caller=ANN)
        await keeper.create(files[0].id, URL, ("24h", DAY), caller=BOB)
        await asyncio.gather(*creating)
        await keeper.close()

    asyncio.run(scenario())


def test_one_that_the_disk_refuses_is_not_there(root: Path, ask: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        keeper = BatchManager(root, lambda _: ask)
        file = await put(keeper, content(5))

        def refuse(_: BatchRecord) -> None:
            raise StoreUnusable("no disk")

        monkeypatch.setattr(keeper._folder, "write_batch", refuse)
        with pytest.raises(StoreUnusable):
            await keeper.create(file.id, URL, ("24h", DAY))
        assert not keeper.records
        await keeper.delete_file(file.id)
        await keeper.close()

    asyncio.run(scenario())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux shows them")
def test_cancelled_ones_leave_no_open_file(root: Path, ask: Asked) -> None:
    async def scenario() -> None:
        async def hang(_: int) -> None:
            await asyncio.Event().wait()

        ask.before = hang
        keeper = BatchManager(root, lambda _: ask)
        before = None
        for number in range(40):
            record = await begin(keeper, 3)
            while keeper.records[record.id].status == "validating":
                await asyncio.sleep(0)
            for _ in range(number):
                await asyncio.sleep(0.0002)
            await keeper.cancel(record.id)
            await over(keeper, record.id)
            before = before or len(os.listdir("/proc/self/fd"))
        assert len(os.listdir("/proc/self/fd")) <= before + 1
        await keeper.close()

    asyncio.run(scenario())


def test_a_dead_engine_leaves_it_for_the_next_start(root: Path, ask: Asked) -> None:
    async def scenario() -> None:
        async def die(number: int) -> None:
            if number > 10:
                raise EngineDead("the engine died: Test")

        ask.before = die
        keeper = BatchManager(root, lambda _: ask)
        record = await begin(keeper, 30)
        await asyncio.wait(keeper._tasks.values())
        assert keeper.records[record.id].status == "in_progress"
        await keeper.close()
        ask.before = None
        keeper = BatchManager(root, lambda _: ask)
        await keeper.start()
        check_whole(keeper, await over(keeper, record.id), 30)
        await keeper.close()

    asyncio.run(scenario())


def test_old_files_and_batches_are_forgotten(root: Path, ask: Asked) -> None:
    now = [1_000_000.0]

    async def scenario() -> None:
        keeper = BatchManager(root, lambda _: ask, BatchBounds(max_age_s=10, max_batches=2), clock=lambda: now[0])
        ids = [(await over(keeper, (await begin(keeper, 20)).id)).id for _ in range(3)]
        await keeper.tidy()
        assert list(keeper.records) == ids[1:]
        assert len(keeper.files.records) == 9
        now[0] += 10
        await keeper.tidy()
        assert (keeper.files.records, list(keeper.records)) == ({}, ids[1:])
        now[0] += 10
        await keeper.tidy()
        assert [path for path in root.rglob("*") if path.is_file()] == []

    asyncio.run(scenario())


def test_files_that_are_looked_through_keep_nobody_else_waiting(root: Path, ask: Asked, monkeypatch) -> None:
    """Online requests are admitted in asyncio's own threads."""
    begun, go_on = threading.Event(), threading.Event()

    def slow_scan(*arguments: Any) -> Any:
        begun.set()
        go_on.wait(20)
        return scan(*arguments)

    async def scenario() -> None:
        keeper = BatchManager(root, lambda _: ask)
        monkeypatch.setattr("api.batches.manager.scan", slow_scan)
        batches = [await begin(keeper, 2) for _ in range(10)]
        try:
            assert await asyncio.to_thread(begun.wait, 20)
            async with asyncio.timeout(10):
                await asyncio.gather(*(asyncio.to_thread(int) for _ in range(20)))
                # There is room for other disk work of batches, too.
                await put(keeper, b"x")
        finally:
            go_on.set()
        for batch in batches:
            await over(keeper, batch.id)
        assert {record.status for record in keeper.records.values()} == {"completed"}
        await keeper.close()

    asyncio.run(scenario())


def test_a_damaged_record_is_told(root: Path, ask: Asked) -> None:
    async def scenario() -> None:
        keeper = BatchManager(root, lambda _: ask)
        record = await begin(keeper, 1)
        await over(keeper, record.id)
        await keeper.close()
        (root / "batches" / f"{record.id}.json").write_text("{")

    asyncio.run(scenario())
    with pytest.raises(StoreUnusable, match="is damaged"):
        BatchManager(root, lambda _: ask)


def test_what_no_record_names_goes(root: Path, ask: Asked) -> None:
    for name in ("files/file-lost", "tmp/upload"):
        path = root / "batches" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    BatchManager(root, lambda _: ask)
    assert [path for path in root.rglob("*") if path.is_file()] == []


@pytest.mark.long
def test_a_server_killed_in_the_middle(tmp_path: Path, eventually: Callable[..., None]) -> None:
    """A real process: the engine is the fake one, and kills it at its thirtieth request."""

    def start(most: int) -> "tuple[subprocess.Popen[str], httpx2.Client]":
        place = ("--store", tmp_path / "store", "--json", "--model", most)
        process = fake_serve.serve(*place, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        return process, httpx2.Client(base_url=f"{url}/v1", trust_env=False, timeout=20)

    lines = [
        {"custom_id": f"r{n}", "method": "POST", "url": URL, "body": {"model": "tiny-base", "prompt": "hi"}}
        for n in range(60)
    ]
    process, http = start(30)
    try:
        data = "\n".join(map(json.dumps, lines)).encode()
        file = http.post("/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)}).json()
        body = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
        batch = http.post("/batches", json=body).json()
        assert process.wait(20) == -signal.SIGKILL
        process.communicate()
        http.close()
        process, http = start(1000)
        eventually(lambda: http.get(f"/batches/{batch['id']}").json()["status"] == "completed")
        batch = http.get(f"/batches/{batch['id']}").json()
        assert batch["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
        output = http.get(f"/files/{batch['output_file_id']}/content").text
        assert sorted(json.loads(one)["custom_id"] for one in output.splitlines()) == sorted(f"r{n}" for n in range(60))
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
        http.close()
