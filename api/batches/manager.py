"""Manage the server's batches: a task per batch moves its record from state to state, on disk first.

After a crash each batch continues from the state in its record; lines whose results are in its files are not sent
again (`results.py`). No other progress is kept.

Callers use `ScopedBatches`, which shows them their own files and batches, and administrators all of them.
"""

import asyncio
import logging
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import Context
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from adapter_store.errors import AdapterError
from api.auth.principal import ANYBODY, Caller
from api.batches.files import BatchBounds, FileManager, KeyBounds, in_thread, new_file_id, unbroken
from api.batches.input_lines import MAX_SHOWN_PROBLEMS, TooManyLines, duplicates, pending_lines, scan
from api.batches.records import BatchRecord, BatchStatus, problem, waiting
from api.batches.result_room import ResultRoom
from api.batches.results import (
    LineReply,
    Result,
    ResultSink,
    ResultsUnreadable,
    ScannedResults,
    Tally,
    recovered,
    refused,
)
from api.batches.runner import DEFAULT_CONCURRENCY, Ask, LineRunner, Sleep
from api.batches.storage import BatchFolder
from api.errors import ApiError
from lorasrv.errors import EngineDead
from lorasrv.fair_lock import most_of

_LOG = logging.getLogger(__name__)
FOLDER = "batches"
RETRY_DISK_S = 60.0
TIDY_EVERY_S = 60.0
EXPIRED = "the completion window ended before this request was answered"


class BatchManager:
    """Own the batches and their files. Use from the event loop, except for the constructor.

    Args:
        ask_as: returns the function that sends lines as a caller.

    Raises (the constructor):
        StoreUnusable: the stored records cannot be read.
    """

    def __init__(
        self,
        root: Path,
        ask_as: Callable[[Caller], Ask],
        bounds: BatchBounds | None = None,
        *,
        concurrency: int = DEFAULT_CONCURRENCY,
        clock: Callable[[], float] = time.time,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.bounds = bounds or BatchBounds()
        self._folder = BatchFolder(root / FOLDER)
        files, self.records = self._folder.read()
        self.files = FileManager(self._folder, files, self.bounds, clock, self._awaited)
        self._ask_as = ask_as
        self._clock = clock
        self._sleep = sleep
        self._concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        # By principal; kept while batches of the key run.
        self._key_bounds: WeakValueDictionary[str, KeyBounds] = WeakValueDictionary()
        # One file is checked at a time: a check may take seconds, and there are few threads.
        self._looking = asyncio.Semaphore(1)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tallies: dict[str, Tally] = {}
        # Why each batch that waits for the disk does so.
        self._waiting: dict[str, Mapping[str, Any]] = {}
        self._rooms = {record.id: ResultRoom(self._least_room(record)) for record in self._open()}
        self._tidying: asyncio.Task[None] | None = None
        # One cancellation of a batch at a time: otherwise a second one could set back its state after it has ended.
        self._cancelling: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._steps = {
            BatchStatus.VALIDATING: self._validate,
            BatchStatus.IN_PROGRESS: self._ask_all,
            BatchStatus.FINALIZING: self._finish,
            BatchStatus.CANCELLING: self._finish,
        }

    async def start(self) -> None:
        """Resume unfinished batches."""
        for batch_id in self.records:
            self._start(batch_id)
        self._tidying = asyncio.create_task(self._tidy())

    async def close(self) -> None:
        """Pause every batch until the next start."""
        tasks = [*self._tasks.values(), *([self._tidying] if self._tidying is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def get(self, batch_id: str) -> BatchRecord:
        """Return a batch.

        Raises:
            ApiError: 404.
        """
        record = self.records.get(batch_id)
        if record is None:
            message = "there is no such batch; it may have expired"
            raise ApiError(404, message, code="batch_not_found", param="batch_id")
        return record

    def shown(self, record: BatchRecord) -> dict[str, Any]:
        """Return the batch object with current counts."""
        tally = self._tallies.get(record.id)
        if tally is not None:
            record = replace(record, completed=tally.completed, failed=tally.failed)
        return {**record.shown(self.files.records), "waiting": self._waiting.get(record.id)}

    async def create(
        self,
        input_file_id: str,
        endpoint: str,
        window: tuple[str, int],
        metadata: Mapping[str, str] | None = None,
        result_age_s: int | None = None,
        caller: Caller = ANYBODY,
    ) -> BatchRecord:
        """Create and start a batch of the caller.

        Args:
            window: completion window as written, and in seconds.

        Raises:
            ApiError: the file does not exist or is not for batches, too many batches are open, or there is no room for
                the results.
            StoreFull, StoreUnusable.
        """
        file = self.files.get(input_file_id, "input_file_id")
        if file.purpose != "batch":
            message = f"the file's purpose is {file.purpose}, and must be batch"
            raise ApiError(400, message, code="invalid_value", param="input_file_id")
        self._check_open(caller.principal)
        self.files.check_room(2, file.bytes, caller, "input_file_id")
        now = int(self._clock())
        batch_id = f"batch_{secrets.token_hex(12)}"
        results = (new_file_id(), new_file_id())
        record = BatchRecord(batch_id, endpoint, input_file_id, window[0], now, now + window[1], *results)
        limits = {name: most for name, most in asdict(caller.limits).items() if most is not None}
        record = replace(record, metadata=metadata, result_age_s=result_age_s, limits=limits)
        record = replace(record, principal=caller.principal, adapters=caller.adapters)
        # Registered before it is on disk, so that concurrent requests count it and keep its file.
        self.records[batch_id] = record
        self._rooms[batch_id] = ResultRoom(file.bytes)
        try:
            await unbroken(in_thread(self._folder.write_batch, record))
        except Exception:
            del self.records[batch_id], self._rooms[batch_id]
            raise
        self._start(batch_id)
        return self.records[batch_id]

    def _check_open(self, principal: str) -> None:
        most = self.bounds.max_open_batches
        owners = [record.principal for record in self._open()]
        if owners.count(principal) >= (own := most_of(most, principal)):
            message = f"{own} batches are open already; wait until one is over"
        elif len(owners) >= most:
            message = "too many batches of all keys are open already; wait until one is over"
        else:
            return
        raise ApiError(429, message, code="too_many_batches", headers={"retry-after": "60"})

    async def cancel(self, batch_id: str) -> BatchRecord:
        """Stop sending lines and publish the results so far; no effect if already cancelled.

        Raises:
            ApiError: 404; 400, the batch is over.
            StoreFull, StoreUnusable.
        """
        record = self.get(batch_id)
        if record.state.is_over and record.state is not BatchStatus.CANCELLED:
            message = f"the batch is {record.status} and cannot be cancelled any more"
            raise ApiError(400, message, code="batch_over", param="batch_id")
        async with self._cancelling.setdefault(batch_id, asyncio.Lock()):
            try:
                if self._can_stop(batch_id):
                    await self._stop(batch_id)
                if self._can_stop(batch_id):
                    await self._change(batch_id, BatchStatus.CANCELLING)
            finally:
                self._start(batch_id)
        return self.records[batch_id]

    def _can_stop(self, batch_id: str) -> bool:
        return self.records[batch_id].state in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)

    async def delete_file(self, file_id: str) -> None:
        """Delete a file.

        Raises:
            ApiError: 404; 409, an open batch needs it.
            StoreUnusable.
        """
        self.files.get(file_id)
        if file_id in self._needed():
            message = "an open batch needs the file; cancel the batch first, or wait"
            never = {"x-should-retry": "false"}
            raise ApiError(409, message, code="file_in_use", param="file_id", headers=never)
        await self.files.delete(file_id)

    async def tidy(self) -> None:
        """Delete files that are too old, and batches that are too old or too many, except for open ones.

        Raises: StoreUnusable.
        """
        for file_id in self.files.expired():
            # Checked for each file: while one is deleted, a client may delete another, or create a batch from it.
            if file_id in self.files.records and file_id not in self._needed():
                await self.files.delete(file_id)
        for record in self._forgettable():
            del self.records[record.id]
            self._tasks.pop(record.id, None)
            await in_thread(self._folder.remove_batch, record.id)

    def _forgettable(self) -> list[BatchRecord]:
        """Return the ended batches to forget: those that are too old and, while there are too many batches, the oldest
        of the key that has the most.
        """
        over: defaultdict[str, deque[BatchRecord]] = defaultdict(deque)
        found: list[BatchRecord] = []
        oldest = self._clock() - 2 * self.bounds.max_age_s
        for record in self.records.values():
            if record.state.is_over:
                (found if record.created_at <= oldest else over[record.principal]).append(record)
        for _ in range(len(self.records) - len(found) - self.bounds.max_batches):
            if most := max(over.values(), key=len, default=None):
                found.append(most.popleft())
        return found

    def _open(self) -> list[BatchRecord]:
        return [record for record in self.records.values() if not record.state.is_over]

    def _needed(self) -> set[str]:
        return {name for r in self._open() for name in (r.input_file_id, *_results_of(r))}

    def _awaited(self) -> Iterator[tuple[str, int]]:
        """Yield the principal and the reserved bytes of each file that an open batch may still create."""
        for record in self._open():
            there = [self.files.records[name].bytes for name in _results_of(record) if name in self.files.records]
            left = max(0, self._rooms[record.id].reserved - sum(there))
            yield from ((record.principal, size) for size in (left, 0)[: 2 - len(there)])

    def _least_room(self, record: BatchRecord) -> int:
        """Return the bytes to reserve for a batch's results when the server starts."""
        file = self.files.records.get(record.input_file_id)
        return max(0 if file is None else file.bytes, self._written(record))

    def _written(self, record: BatchRecord) -> int:
        """Return the bytes of results on the disk."""
        paths = map(self.files.path, _results_of(record))
        return sum(path.stat().st_size for path in paths if path.exists())

    async def _tidy(self) -> None:
        while True:
            try:
                await self.tidy()
            except AdapterError as error:
                _LOG.warning("old files of batches stay on the disk for now: %s", error)
            await asyncio.sleep(TIDY_EVERY_S)

    def _start(self, batch_id: str) -> None:
        task = self._tasks.get(batch_id)
        if (task is None or task.done()) and not self.records[batch_id].state.is_over:
            # In a context of its own: its lines belong to no HTTP request.
            self._tasks[batch_id] = asyncio.create_task(self._live(batch_id), context=Context())

    async def _stop(self, batch_id: str) -> None:
        task = self._tasks.get(batch_id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _live(self, batch_id: str) -> None:
        while not (record := self.records[batch_id]).state.is_over:
            try:
                await self._steps[record.state](record)
            except ApiError as full:
                why = f"results have no room: {full.detail}; then send the lines without a result as a new batch"
                await self._fail(batch_id, [problem(why, full.code)])
            except EngineDead:
                _LOG.warning("batch %s is paused: the engine has ended", batch_id)
                return
            except (OSError, AdapterError) as error:
                if _is_cancelled():
                    raise asyncio.CancelledError from error
                await self._wait_for_disk(batch_id, error)
            except Exception:
                _LOG.exception("batch %s failed", batch_id)
                await self._fail(batch_id, [problem("internal error; see the server's log", "internal_error")])

    async def _wait_for_disk(self, batch_id: str, error: OSError | AdapterError) -> None:
        """Wait until the next try. Meanwhile the batch object says why."""
        _LOG.warning("batch %s waits for the disk, %.0f s: %s", batch_id, RETRY_DISK_S, error)
        self._waiting[batch_id] = waiting(error, int(self._clock() + RETRY_DISK_S))
        try:
            await asyncio.sleep(RETRY_DISK_S)
        finally:
            del self._waiting[batch_id]

    async def _validate(self, record: BatchRecord) -> None:
        path = self.files.path(record.input_file_id)
        problems: list[Mapping[str, Any]] = []
        total = 0
        try:
            async with self._looking:
                found = await in_thread(scan, path, record.endpoint, self.bounds.max_lines)
                repeats = await in_thread(duplicates, path, found)
            shown = sorted(found.problems + repeats, key=lambda line: line.number)[:MAX_SHOWN_PROBLEMS]
            problems = [problem(one.message, one.code, one.number, one.param) for one in shown]
            if (more := found.num_malformed + len(repeats) - len(shown)) > 0:
                problems.append(problem(f"and {more} more lines are malformed", "invalid_line"))
            total = found.total
            if not total:
                problems = [problem("the file has no lines", "empty_file")]
        except TooManyLines:
            problems = [problem(f"the file has more than {self.bounds.max_lines} lines", "too_many_lines")]
        except FileNotFoundError:
            problems = [problem("the input file is gone", "file_not_found")]
        if problems:
            await self._fail(record.id, problems)
        else:
            await self._change(record.id, BatchStatus.IN_PROGRESS, total=total)

    async def _ask_all(self, record: BatchRecord) -> None:
        window = asyncio.timeout(max(0.0, record.expires_at - self._clock()))
        bounds = self._key_bounds.setdefault(record.principal, KeyBounds(asyncio.Semaphore(self._concurrency)))
        try:
            async with window, bounds.turns:
                await self._ask_lines(record, bounds.places)
        except FileNotFoundError:
            await self._fail(record.id, [problem("the input file is gone", "file_not_found")])
            return
        except TimeoutError:
            if not window.expired():
                raise
            await self._expire(record)
            return
        await self._change(record.id, BatchStatus.FINALIZING)

    async def _ask_lines(self, record: BatchRecord, places: asyncio.Semaphore) -> None:
        found = await in_thread(self._found, record)
        path = self.files.path(record.input_file_id)
        async with self._looking:
            lines = await in_thread(scan, path, record.endpoint)
        tally = self._tallies[record.id] = found.tally()
        self._rooms[record.id].used = await in_thread(self._written, record)
        with self._sink(record, tally, partial(self._take_room, record)) as sink:
            ask = self._ask_as(record.caller)

            async def ask_in_turn(url: str, body: Mapping[str, Any]) -> LineReply:
                async with self._slots:
                    return await ask(url, body)

            runner = LineRunner(ask_in_turn, sink, slots=places, concurrency=self._concurrency, sleep=self._sleep)
            await runner.run(pending_lines(path, record.endpoint, lines, found.keys))

    def _take_room(self, record: BatchRecord, num_bytes: int) -> None:
        """Count results that are about to be written.

        Raises:
            ApiError: 507, the key has no room for these results.
        """
        self._rooms[record.id].take(num_bytes, lambda more: self.files.check_room(0, more, record.caller))

    async def _expire(self, record: BatchRecord) -> None:
        # Not cancellable: a concurrent cancel of the batch publishes the files.
        await unbroken(self._write_expired(record))
        await self._publish(record)
        await self._change(record.id, BatchStatus.EXPIRED)

    async def _write_expired(self, record: BatchRecord) -> None:
        """Write an expiry result for each line without a result.

        Raises:
            ApiError: 507, the key has no room for these results.
        """
        late = await in_thread(self._late, record)
        self._take_room(record, sum(len(result.data) for result in late))
        await in_thread(self._add, record, late)

    def _late(self, record: BatchRecord) -> list[Result]:
        """Count the results on disk, and return an expiry result for each line without one."""
        found = self._found(record)
        self._tallies[record.id], self._rooms[record.id].used = found.tally(), self._written(record)
        path = self.files.path(record.input_file_id)
        lines = pending_lines(path, record.endpoint, scan(path, record.endpoint), found.keys)
        return [refused(line, "batch_expired", EXPIRED) for line in lines]

    def _add(self, record: BatchRecord, results: list[Result]) -> None:
        with self._sink(record, self._tallies[record.id]) as sink:
            for result in results:
                sink.add(result)

    async def _finish(self, record: BatchRecord) -> None:
        # Of results that the disk refused to write, some may be on it, and half a line.
        found = await in_thread(self._found, record)
        self._tallies[record.id] = found.tally()
        await self._publish(record)
        is_cancelled = record.state is BatchStatus.CANCELLING
        await self._change(record.id, BatchStatus.CANCELLED if is_cancelled else BatchStatus.COMPLETED)

    async def _fail(self, batch_id: str, problems: list[Mapping[str, Any]]) -> None:
        record = self.records[batch_id]
        with suppress(AdapterError, OSError):
            await self._publish(record)
        try:
            await self._change(batch_id, BatchStatus.FAILED, errors=tuple(problems))
        except AdapterError:
            # Not retried before the next start; until then, memory shows the batch as failed.
            _LOG.exception("batch %s failed, and its state cannot be written to disk", batch_id)
            self.records[batch_id] = replace(record, status=BatchStatus.FAILED.value, errors=tuple(problems))

    async def _publish(self, record: BatchRecord) -> None:
        for file_id, what in zip(_results_of(record), ("output", "error"), strict=True):
            await self.files.publish(file_id, f"{record.id}_{what}.jsonl", record.result_age_s, record.principal)

    def _found(self, record: BatchRecord) -> ScannedResults:
        try:
            return recovered(*map(self.files.path, _results_of(record)))
        except ResultsUnreadable as error:
            raise RuntimeError(f"results of batch {record.id} are damaged: {error}") from None

    def _sink(self, record: BatchRecord, tally: Tally, admit: Callable[[int], None] = lambda _: None) -> ResultSink:
        output, errors = map(self.files.path, _results_of(record))
        return ResultSink(output, errors, tally, admit)

    async def _change(self, batch_id: str, status: BatchStatus, **changes: Any) -> None:
        """Write the record's next state to disk and then to memory, with its counts and time."""
        tally = self._tallies.get(batch_id)
        if tally is not None:
            changes |= {"completed": tally.completed, "failed": tally.failed}
        changes |= {"status": status.value, f"{status.value}_at": int(self._clock())}
        await unbroken(self._write(replace(self.records[batch_id], **changes)))
        if status.is_over:
            self._tallies.pop(batch_id, None)
            self._rooms.pop(batch_id, None)

    async def _write(self, record: BatchRecord) -> None:
        await in_thread(self._folder.write_batch, record)
        self.records[record.id] = record


def _results_of(record: BatchRecord) -> tuple[str, str]:
    return record.output_file, record.error_file


def _is_cancelled() -> bool:
    """Return whether this task was cancelled: a disk error at the same moment hides the cancellation."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
