"""Results of batches stay within the room of their key, however long they are."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from api.auth.principal import Caller, KeyLimits
from api.batches.files import BatchBounds
from api.batches.manager import BatchManager
from api.batches.records import BatchRecord, FileRecord
from api.batches.result_room import STEP_BYTES, ResultRoom
from api.batches.results import LineReply
from api.errors import ApiError

pytestmark = pytest.mark.anyio
URL = "/v1/completions"
ANN = Caller("ann", frozenset())
ANSWER = "x" * 2000


async def answer(url: str, body: Mapping[str, Any]) -> LineReply:
    await asyncio.sleep(0)
    return LineReply(200, {"text": ANSWER}, "req-1")


def open_batches(root: Path, **bounds: int) -> BatchManager:
    return BatchManager(root, lambda _: answer, BatchBounds(**bounds), concurrency=2)


async def put(batches: BatchManager, count: int, caller: Caller = ANN) -> FileRecord:
    lines = [{"custom_id": f"r{n}", "method": "POST", "url": URL, "body": {}} for n in range(count)]
    data = "\n".join(map(json.dumps, lines)).encode()
    async with batches.files.receiving(len(data), caller) as place:
        place.write(data)
        return await batches.files.keep(place, "in.jsonl", "batch", None, caller.principal)


async def over(batches: BatchManager, batch_id: str) -> BatchRecord:
    async with asyncio.timeout(20):
        while not batches.records[batch_id].state.is_over:
            await asyncio.sleep(0.002)
    return batches.records[batch_id]


def bytes_on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "batches" / "files").glob("file-*") if not path.suffix)


@pytest.mark.parametrize("limit", ["half of all", "max_stored_bytes", "all keys"])
async def test_a_batch_ends_when_its_results_have_no_more_room(tmp_path: Path, limit: str) -> None:
    """Those so far can be read, the bound holds, and after a deletion the other lines find room."""
    most, caller = 50_000, ANN
    if limit == "max_stored_bytes":
        caller = Caller("ann", frozenset(), limits=KeyLimits(max_stored_bytes=most))
    batches = open_batches(tmp_path, max_total_bytes=most if limit == "all keys" else 2 * most)
    if limit == "all keys":
        caller = Caller("anonymous", frozenset())
    file = await put(batches, 100, caller)
    ended = await over(batches, (await batches.create(file.id, URL, ("24h", 86400), caller=caller)).id)
    assert (ended.status, 15 < ended.completed < 30) == ("failed", True)
    [why] = ended.errors
    assert why["code"] == "quota_exceeded"
    assert f"{most} are allowed" in why["message"]
    assert why["message"].endswith("then send the lines without a result as a new batch")
    results = batches.files.path(ended.output_file).read_bytes().splitlines()
    assert [json.loads(one)["response"]["body"]["text"] for one in results] == [ANSWER] * ended.completed
    assert most - 3 * len(ANSWER) < bytes_on_disk(tmp_path) <= most
    assert batches.shown(ended)["output_file_id"] == ended.output_file
    await batches.delete_file(ended.output_file)
    small = await put(batches, 15, caller)
    again = await over(batches, (await batches.create(small.id, URL, ("24h", 86400), caller=caller)).id)
    assert (again.status, again.completed) == ("completed", 15)
    await batches.close()


async def test_expired_lines_take_room_too(tmp_path: Path) -> None:
    batches = open_batches(tmp_path, max_total_bytes=60_000)
    file = await put(batches, 150)
    ended = await over(batches, (await batches.create(file.id, URL, ("0h", 0), caller=ANN)).id)
    assert (ended.status, ended.errors[0]["code"]) == ("failed", "quota_exceeded")
    assert bytes_on_disk(tmp_path) == file.bytes
    await batches.close()


async def test_results_before_a_restart_count(tmp_path: Path) -> None:
    """Another file finds as much room as if the server had not been stopped."""
    batches = open_batches(tmp_path, max_total_bytes=100_000)
    file = await put(batches, 15)
    record = await batches.create(file.id, URL, ("24h", 86400), caller=ANN)
    async with asyncio.timeout(20):
        while batches.shown(record)["request_counts"]["completed"] < 5:
            await asyncio.sleep(0)
    await batches.close()
    assert not batches.records[record.id].state.is_over
    written = bytes_on_disk(tmp_path)
    batches = open_batches(tmp_path, max_total_bytes=100_000)
    with pytest.raises(ApiError, match=f"files have {written} bytes"):
        batches.files.check_room(1, 50_000 - written + 1, ANN)
    batches.files.check_room(1, 50_000 - written, ANN)
    await batches.start()
    assert (await over(batches, record.id)).completed == 15
    await batches.close()


async def test_all_files_are_counted_once_for_many_results() -> None:
    asked = []
    room = ResultRoom(100)
    for _ in range(STEP_BYTES // 1000):
        room.take(1000, asked.append)
    assert (asked, room.used) == ([STEP_BYTES], STEP_BYTES // 1000 * 1000)
