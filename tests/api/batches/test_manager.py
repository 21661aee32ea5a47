"""Batches over a server's life: killed at any moment, stopped, expired, forgotten."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import fake_serve
import httpx2
import pytest
from clock import Clock

from adapter_store.errors import StoreFull, StoreUnusable
from api.auth.principal import ANYBODY, Caller
from api.batches.files import BatchBounds
from api.batches.input_lines import scan
from api.batches.manager import BatchManager
from api.batches.records import BatchRecord, BatchStatus, FileRecord
from api.batches.results import LineReply
from api.errors import ApiError
from api.observability.access_middleware import RequestInfo
from lorasrv.errors import EngineDead
from lorasrv.metrics.request_stats import REQUEST_LISTENER

pytestmark = pytest.mark.anyio
URL = "/v1/completions"
DAY = ("24h", 86400)
ANN, BOB = Caller("ann", frozenset()), Caller("bob", frozenset())


async def hang(_: int) -> None:
    await asyncio.Event().wait()


class Asked:
    """Answers every body with its number; `before` is awaited with the count before each answer from `start` on."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.before: Callable[[int], Awaitable[object]] | None = None
        self.start = 0

    def hook(self, before: Callable[[int], Awaitable[object]] | None, start: int = 0) -> None:
        self.before, self.start = before, start

    async def __call__(self, url: str, body: Mapping[str, Any]) -> LineReply:
        assert url == URL
        self.numbers.append(body["n"])
        if self.before is not None and len(self.numbers) >= self.start:
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


@pytest.fixture
def manager(root: Path, ask: Asked) -> Callable[..., BatchManager]:
    """manager(...): a server's batches, which `ask` answers; again: those of its next start."""
    return lambda *bounds, **how: BatchManager(root, lambda _: ask, *bounds, **how)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.002)


def content(count: int) -> bytes:
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": URL, "body": {"n": n}} for n in range(count)]
    return "\n".join(map(json.dumps, lines)).encode()


async def put(batches: BatchManager, data: bytes, caller: Caller = ANYBODY) -> FileRecord:
    async with batches.files.receiving(len(data), caller) as place:
        await asyncio.to_thread(place.write, data)
        return await batches.files.keep(place, "in.jsonl", "batch", None, caller.principal)


async def begin(batches: BatchManager, count: int) -> BatchRecord:
    file = await put(batches, content(count))
    return await batches.create(file.id, URL, DAY)


async def over(batches: BatchManager, batch_id: str) -> BatchRecord:
    await until(lambda: batches.records[batch_id].state.is_over)
    return batches.records[batch_id]


async def finish(batches: BatchManager, batch_id: str, count: int) -> None:
    """Wait for its end; every line has one result, in the right file, and the counts say so."""
    record = await over(batches, batch_id)
    found = {}
    for file_id, ok in ((record.output_file, True), (record.error_file, False)):
        path = batches.files.path(file_id)
        assert batches.files.records[file_id].bytes == path.stat().st_size
        for line in path.read_bytes().splitlines():
            one = json.loads(line)
            assert one["custom_id"] not in found
            assert (one["response"]["status_code"] == 200) is ok
            found[one["custom_id"]] = one["response"]["body"]["n"]
    assert found == {f"r{n}": n for n in range(count)}
    failed = sum(n % 10 == 3 for n in range(count))
    counts = (record.status, record.total, record.completed, record.failed)
    assert counts == ("completed", count, count - failed, failed)
    await batches.close()


async def test_killed_at_any_moment(root: Path, ask: Asked, manager, tmp_path: Path) -> None:
    """What a disk holds at any moment is enough to end the batch: each copy is a server that was killed then."""
    count, copies, states = 40, [], set()
    live = manager(concurrency=4)
    write = live._folder.write_batch

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

    live._folder.write_batch = write_and_copy
    ask.hook(copy_some)
    batch_id = (await begin(live, count)).id
    await finish(live, batch_id, count)
    ask.hook(None)
    for number, copy in enumerate(copies):
        for file in (copy / "batches" / "files").glob("*") if number % 2 else ():
            # As a power failure may leave a file that is being written.
            if file.suffix != ".json" and file.read_bytes()[:17] == b'{"id":"batch_req_':
                file.write_bytes(file.read_bytes() + b'{"id":"batch_req_77", "cus')
        batches = BatchManager(copy, lambda _: ask, concurrency=4)
        if before := batches.records.get(batch_id):
            states.add(before.status)
            done = batches._found(before).keys.size
            ask.numbers.clear()
            await batches.start()
            await finish(batches, batch_id, count)
            assert len(ask.numbers) == (0 if before.state.is_over else count - done)
    assert states >= {"validating", "in_progress", "finalizing", "completed"}


@pytest.mark.parametrize("moment", [5, 17, 33])
async def test_stopped_and_started(ask: Asked, manager, moment: int) -> None:
    ask.hook(hang, moment)
    batches = manager()
    record = await begin(batches, 40)
    await until(lambda: len(ask.numbers) >= moment)
    await batches.close()
    assert batches.records[record.id].status == "in_progress"
    ask.hook(None)
    batches = manager()
    await batches.start()
    await finish(batches, record.id, 40)
    assert len(ask.numbers) < 40 + 16 + 1


async def test_expired(ask: Asked, manager) -> None:
    clock = Clock(1_000_000.0)
    ask.hook(hang, 21)
    batches = manager(clock=clock)
    record = await begin(batches, 40)
    await until(lambda: len(ask.numbers) >= 36)
    await batches.close()
    clock.now += DAY[1] + 1
    batches = manager(clock=clock)
    await batches.start()
    ended = await over(batches, record.id)
    assert (ended.status, ended.expired_at, ended.completed + ended.failed) == ("expired", int(clock.now), 40)
    errors = map(json.loads, batches.files.path(ended.error_file).read_bytes().splitlines())
    late = [one["custom_id"] for one in errors if one["error"] and one["error"]["code"] == "batch_expired"]
    assert len(late) == 20
    await batches.close()


async def test_killed_while_it_is_cancelled(ask: Asked, manager) -> None:
    ask.hook(hang, 6)
    batches = manager()
    record = await begin(batches, 40)
    await until(lambda: len(ask.numbers) >= 20)
    batches.files.publish = hang
    await batches.cancel(record.id)
    await batches.close()
    batches = manager()
    assert batches.records[record.id].status == "cancelling"
    await batches.start()
    ended = await over(batches, record.id)
    assert (ended.status, ended.completed + ended.failed) == ("cancelled", 5)
    await batches.close()


@pytest.mark.parametrize("clients", [1, 2])
async def test_cancelled_while_expired_results_are_written(manager, clients: int) -> None:
    """A published file is complete: nothing is written to it any more, though two clients cancel."""
    writing, go_on = threading.Event(), threading.Event()
    batches = manager()
    write = batches._add

    def slowly(*results: Any) -> None:
        writing.set()
        go_on.wait(30)
        write(*results)

    batches._add = slowly
    file = await put(batches, content(20))
    record = await batches.create(file.id, URL, ("0h", 0))
    await asyncio.to_thread(writing.wait, 30)
    cancelling = []
    for _ in range(clients):
        cancelling.append(asyncio.create_task(batches.cancel(record.id)))
        await asyncio.sleep(0.05)
    go_on.set()
    await asyncio.gather(*cancelling)
    ended = await over(batches, record.id)
    assert (ended.status, ended.failed) == ("cancelled", 20)
    path = batches.files.path(ended.error_file)
    assert batches.files.records[ended.error_file].bytes == path.stat().st_size > 0
    await batches.close()


async def test_two_cancels_end_it_once(ask: Asked, manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits: what is over is never cancelled again, in memory or on the disk."""
    batches, written = manager(), []
    write = batches._folder.write_batch

    def write_the_second_slowly(record: BatchRecord) -> None:
        written.append(record.status)
        if written[-1] == "cancelling" == written[-2]:
            time.sleep(0.5)
        write(record)

    monkeypatch.setattr(batches._folder, "write_batch", write_the_second_slowly)
    ask.hook(hang, 5)
    record = await begin(batches, 20)
    await until(lambda: len(ask.numbers) > 5)
    await asyncio.gather(batches.cancel(record.id), batches.cancel(record.id))
    ended = await over(batches, record.id)
    assert written[-2:] == ["cancelling", "cancelled"]
    assert manager().records[record.id].status == ended.status == "cancelled"
    await batches.close()


async def test_cancelled_after_a_disk_was_full(
    root: Path, ask: Asked, manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a line that fitted is not published, and what is published is counted."""
    batches, write, torn = manager(concurrency=2), os.write, []

    def full(fd: int, data: memoryview) -> int:
        is_first = os.fstat(fd).st_size == 0
        if is_first or len(ask.numbers) < 30 or not os.readlink(f"/proc/self/fd/{fd}").startswith(str(root)):
            return write(fd, data)
        if torn:
            raise OSError(errno.ENOSPC, "full")
        torn.append(write(fd, data[: len(data) // 2 + 1]))
        return torn[0]

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        record = await begin(batches, 100)
        await until(lambda: torn)
        await asyncio.sleep(0.2)
    await batches.cancel(record.id)
    ended = await over(batches, record.id)
    assert ended.completed > 0
    for name, count in ((ended.output_file, ended.completed), (ended.error_file, ended.failed)):
        lines = batches.files.path(name).read_bytes().splitlines() if name in batches.files.records else []
        assert len(list(map(json.loads, lines))) == count
    await batches.close()


async def test_lines_belong_to_no_http_request(ask: Asked, manager) -> None:
    """The request that made the batch would be told of them, and logged only after them."""
    listeners: list[object] = []

    async def note(_: int) -> None:
        listeners.append(REQUEST_LISTENER.get())

    batches = manager()
    ask.hook(note)
    token = REQUEST_LISTENER.set(RequestInfo({"method": "POST", "headers": []}))
    batch = await begin(batches, 5)
    REQUEST_LISTENER.reset(token)
    await finish(batches, batch.id, 5)
    assert listeners == [None] * 5


async def test_a_file_is_in_use_before_its_batch_is_on_the_disk(manager) -> None:
    batches = manager(BatchBounds(max_open_batches=1))
    file = await put(batches, content(5))
    creating = asyncio.create_task(batches.create(file.id, URL, DAY))
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="needs the file"):
        await batches.delete_file(file.id)
    with pytest.raises(ApiError, match="open already"):
        await batches.create(file.id, URL, DAY)
    await finish(batches, (await creating).id, 5)


async def test_a_key_over_its_limits_delays_no_other(root: Path, ask: Asked) -> None:
    """More batches than may run at a time belong to a key whose lines are refused for hours."""

    async def wait(url: str, body: Mapping[str, Any]) -> LineReply:
        return LineReply(429, {}, "req-1", 5.0)

    batches = BatchManager(root, lambda caller: ask if caller.principal == "bob" else wait)
    file = await put(batches, content(50))
    waiting = [await batches.create(file.id, URL, DAY, caller=ANN) for _ in range(5)]
    await until(lambda: batches.records[waiting[0].id].state is BatchStatus.IN_PROGRESS)
    await asyncio.sleep(0.1)
    record = await batches.create(file.id, URL, DAY, caller=BOB)
    await finish(batches, record.id, 50)
    assert "bob" not in batches._key_bounds, "nothing is kept of a key without batches"


async def test_one_key_leaves_room_for_others(manager) -> None:
    """A key has at most half of files, bytes and open batches, and is not told what others have."""
    batches = manager(BatchBounds(max_files=20, max_total_bytes=1000, max_open_batches=4))
    files = [await put(batches, b"x" * 10, ANN) for _ in range(10)]
    with pytest.raises(ApiError, match="10 files already"):
        await put(batches, b"x", ANN)
    with pytest.raises(ApiError, match="files have 0 bytes, and 500 are allowed"):
        await put(batches, b"x" * 501, BOB)
    await put(batches, b"x" * 490, BOB)
    with pytest.raises(ApiError, match="507: there is no room among the files of all keys; delete"):
        await put(batches, b"x" * 480, Caller("cid", frozenset()))
    for file in files[4:]:
        await batches.delete_file(file.id)
    creating = [asyncio.create_task(batches.create(files[0].id, URL, DAY, caller=ANN)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="2 batches are open already"):
        await batches.create(files[0].id, URL, DAY, caller=ANN)
    await batches.create(files[0].id, URL, DAY, caller=BOB)
    await asyncio.gather(*creating)
    await batches.close()


async def test_results_take_the_room_of_their_key(manager) -> None:
    """Batches of one small file, again and again, leave other keys theirs: files, bytes and finished batches."""
    batches = manager(BatchBounds(max_files=12, max_total_bytes=20_000, max_batches=4))
    bobs = await put(batches, content(1), BOB)
    finished = await over(batches, (await batches.create(bobs.id, URL, DAY, caller=BOB)).id)
    small, large = await put(batches, content(4), ANN), await put(batches, content(1) + b"\n" * 9000, ANN)
    with pytest.raises(ApiError, match=r"507: files have \d+ bytes, and 10000 are allowed; delete"):
        await batches.create(large.id, URL, DAY, caller=ANN)
    await batches.delete_file(large.id)
    last = [await over(batches, (await batches.create(small.id, URL, DAY, caller=ANN)).id) for _ in range(2)][-1]
    with pytest.raises(ApiError, match="507: there are 5 files already, and 6 are allowed"):
        await batches.create(small.id, URL, DAY, caller=ANN)
    await batches.delete_file(last.output_file)
    for _ in range(6):
        # They fail before anything runs, and bring no files.
        await over(batches, (await batches.create(small.id, "/v1/chat/completions", DAY, caller=ANN)).id)
    await batches.tidy()
    assert len(batches.records) == 4
    assert finished.id in batches.records
    await put(batches, b"x", BOB)
    await batches.close()


async def test_a_batch_that_the_disk_refuses_does_not_exist(manager, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: BatchRecord) -> None:
        raise StoreUnusable("no disk")

    batches = manager()
    file = await put(batches, content(5))
    monkeypatch.setattr(batches._folder, "write_batch", refuse)
    with pytest.raises(StoreUnusable):
        await batches.create(file.id, URL, DAY)
    assert not batches.records
    await batches.delete_file(file.id)
    await batches.close()


@pytest.mark.parametrize("ends_by", ["cancel", "close"])
async def test_a_disk_that_fails_meanwhile_holds_up_no_end(
    manager, ask: Asked, ends_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that writes is told to end, and learns that the disk refused: it ends, and does not try again."""
    batches, writes, fails = manager(), threading.Event(), threading.Event()
    file = await put(batches, content(50))
    write = batches._folder.write_batch

    def write_or_fail(record: BatchRecord) -> None:
        if record.status == "in_progress" and not writes.is_set():
            writes.set()
            fails.wait(30)
            raise StoreUnusable("the disk hung for a moment")
        write(record)

    monkeypatch.setattr(batches._folder, "write_batch", write_or_fail)
    record = await batches.create(file.id, URL, DAY)
    await until(writes.is_set)
    ending = asyncio.ensure_future(batches.cancel(record.id) if ends_by == "cancel" else batches.close())
    await asyncio.sleep(0)
    fails.set()
    async with asyncio.timeout(20):
        await ending
    assert ask.numbers == []
    if ends_by == "cancel":
        assert (await over(batches, record.id)).status == "cancelled"
        await batches.close()


async def test_a_file_that_the_disk_refuses_leaves_nothing(
    root: Path, manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: FileRecord) -> None:
        raise StoreFull("no room for the record")

    batches = manager()
    monkeypatch.setattr(batches._folder, "write_file_record", refuse)
    with pytest.raises(StoreFull):
        await put(batches, content(5))
    assert [path for path in root.rglob("*") if path.is_file()] == []


def open_files(folder: Path) -> list[str]:
    """Files of a folder that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(link))
    return sorted(name for name in found if name.startswith(str(folder)))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux shows them")
async def test_cancelled_batches_leave_no_open_file(
    ask: Asked, root: Path, manager, request: pytest.FixtureRequest
) -> None:
    """They do not wait for a collection of garbage, for which a process may have no reason for minutes."""
    gc.collect()
    gc.disable()
    request.addfinalizer(gc.enable)
    ask.hook(hang)
    batches = manager()
    before = open_files(root)
    for number in range(40):
        record = await begin(batches, 3)
        await until(lambda batch=record.id: batches.records[batch].status != "validating")
        for _ in range(number):
            await asyncio.sleep(0.0002)
        await batches.cancel(record.id)
        await over(batches, record.id)

    # A thread that was reading lines when its batch was cancelled closes the file a little later.
    await until(lambda: open_files(root) == before)
    await batches.close()


async def test_a_batch_of_a_dead_engine_continues_at_the_next_start(ask: Asked, manager) -> None:
    async def die(_: int) -> None:
        raise EngineDead("the engine died: Test")

    ask.hook(die, 11)
    batches = manager()
    record = await begin(batches, 30)
    await asyncio.wait(batches._tasks.values())
    assert batches.records[record.id].status == "in_progress"
    await batches.close()
    ask.hook(None)
    batches = manager()
    await batches.start()
    await finish(batches, record.id, 30)


async def test_old_files_and_batches_are_forgotten(root: Path, manager) -> None:
    clock = Clock(1_000_000.0)
    batches = manager(BatchBounds(max_age_s=10, max_batches=2), clock=clock)
    ids = [(await over(batches, (await begin(batches, 20)).id)).id for _ in range(3)]
    await batches.tidy()
    assert list(batches.records) == ids[1:]
    assert len(batches.files.records) == 9
    clock.now += 10
    await batches.tidy()
    assert (batches.files.records, list(batches.records)) == ({}, ids[1:])
    clock.now += 10
    await batches.tidy()
    assert [path for path in root.rglob("*") if path.is_file()] == []


async def test_files_that_change_while_old_ones_are_deleted(manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client deletes one of them itself, and begins a batch of another."""
    clock = Clock(1_000_000.0)
    batches = manager(BatchBounds(max_age_s=10), clock=clock)
    first, second, third = [await put(batches, content(20)) for _ in range(3)]
    clock.now += 10
    begun, goes_on, remove = threading.Event(), threading.Event(), batches._folder.remove_file

    def remove_slowly(file_id: str) -> None:
        if file_id == first.id:
            begun.set()
            goes_on.wait(30)
        remove(file_id)

    monkeypatch.setattr(batches._folder, "remove_file", remove_slowly)
    tidying = asyncio.create_task(batches.tidy())
    await until(begun.is_set)
    await batches.delete_file(second.id)
    record = await batches.create(third.id, URL, DAY)
    goes_on.set()
    await tidying
    assert first.id not in batches.files.records
    await finish(batches, record.id, 20)


async def test_validation_leaves_asyncios_threads_to_others(manager, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow_scan(*arguments: Any) -> Any:
        begun.set()
        go_on.wait(20)
        return scan(*arguments)

    batches = manager()
    monkeypatch.setattr("api.batches.manager.scan", slow_scan)
    records = [await begin(batches, 2) for _ in range(10)]
    try:
        assert await asyncio.to_thread(begun.wait, 20)
        async with asyncio.timeout(10):
            await asyncio.gather(*(asyncio.to_thread(int) for _ in range(20)))
            # There is room for other disk work of batches, too.
            await put(batches, b"x")
    finally:
        go_on.set()
    assert {(await over(batches, record.id)).status for record in records} == {"completed"}
    await batches.close()


async def test_a_damaged_record_is_reported(root: Path, manager) -> None:
    batches = manager()
    record = await begin(batches, 1)
    await over(batches, record.id)
    await batches.close()
    (root / "batches" / f"{record.id}.json").write_text("{")
    with pytest.raises(StoreUnusable, match="is damaged"):
        manager()


def test_files_without_a_record_are_deleted(root: Path, manager) -> None:
    for name in ("files/file-lost", "tmp/upload"):
        path = root / "batches" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    manager()
    assert [path for path in root.rglob("*") if path.is_file()] == []


@pytest.mark.long
def test_a_server_killed_in_the_middle(tmp_path: Path, eventually: Callable[..., None]) -> None:
    """A real process: the engine is the fake one, and kills it at its thirtieth request."""

    def start(most: int) -> "tuple[subprocess.Popen[str], httpx2.Client]":
        place = ("--store", tmp_path / "store", "--json", "--model", most)
        process = fake_serve.serve(*place, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        return process, httpx2.Client(base_url=f"{url}/v1", trust_env=False, timeout=120)

    asked = {"method": "POST", "url": URL, "body": {"model": "tiny-base", "prompt": "hi"}}
    lines = [{"custom_id": f"r{n}", **asked} for n in range(60)]
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
