"""Asks the lines of a batch, some at a time, and writes what comes of them: for the command and for the server."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from api.batches.files import in_thread
from api.batches.input_lines import Line, MalformedLine
from api.batches.results import LineReply, Result, ResultSink, answered, refused
from api.errors import ANSWERS, INVALID, error_body
from lorasrv.errors import DeadlineUnreachable

BATCH_PRIORITY = 100
"""Online requests have 0 unless they say otherwise, and lower goes first."""
DEFAULT_CONCURRENCY = 16
# How far an ordered run may be ahead of its oldest open line: what is answered already waits in memory.
AHEAD = 8
MAX_PAUSE_S = 30.0
USUAL_PAUSE_S = 1.0
MAX_PUT_OFF_S = {429: 24 * 3600.0, 503: 3600.0}
"""How long a line is asked again and again, by what it is told: 429, others come first; 503, something is the matter
with the server. Then that is its result."""
Ask = Callable[[str, Mapping[str, Any]], Awaitable[LineReply]]
"""Asks a url with a body. Raises only what ends the whole batch."""
Sleep = Callable[[float], Awaitable[object]]

# To ask again in vain: the same line with the same deadline would only wait longer.
_FINAL_CODES = frozenset({ANSWERS[DeadlineUnreachable].code})
_STREAM = LineReply(
    400, error_body("stream is not possible in a batch; leave it out", INVALID, "stream", "invalid_value")
)


class LineRunner:
    """One run through the lines of a batch.

    Args:
        slots: how many lines are asked at a time; several runs may share it.
        ordered: write results in the order of the lines, not as they come.
        tell: called when results have been written.
    """

    def __init__(
        self,
        ask: Ask,
        sink: ResultSink,
        *,
        slots: asyncio.Semaphore,
        concurrency: int = DEFAULT_CONCURRENCY,
        ordered: bool = False,
        tell: Callable[[], object] = lambda: None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._ask = ask
        self._sink = sink
        self._slots = slots
        self._concurrency = concurrency
        self._ahead = AHEAD * concurrency if ordered else None
        self._tell = tell
        self._sleep = sleep
        self._reading = asyncio.Lock()
        self._moved = asyncio.Condition()
        self._waiting: dict[int, Result] = {}
        self._num_taken = self._num_passed = 0
        self._arrived = asyncio.Event()
        self._all_asked = False

    async def run(self, lines: Iterator[Line]) -> None:
        """Until every line has its result. However it ends, results that have come are written.

        Raises:
            OSError: results cannot be written, or lines cannot be read.
            Whatever `ask` raises.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write())
                workers = [group.create_task(self._work(lines)) for _ in range(self._concurrency)]
                await asyncio.gather(*workers)
                self._all_asked = True
                self._arrived.set()
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            self._sink.flush()
            self._tell()

    async def _work(self, lines: Iterator[Line]) -> None:
        while True:
            async with self._slots:
                taken = await self._take(lines)
                if taken is None:
                    return
                number, line = taken
                result = await self._result(line)
            await self._pass_on(number, result)

    async def _take(self, lines: Iterator[Line]) -> tuple[int, Line] | None:
        async with self._reading:
            if self._ahead is not None:
                most = self._ahead
                async with self._moved:
                    await self._moved.wait_for(lambda: self._num_taken - self._num_passed < most)
            # In a thread: a line may have megabytes, and many may be left out before the next one is found.
            line = await in_thread(next, lines, None)
            if line is None:
                return None
            self._num_taken += 1
            return self._num_taken - 1, line

    async def _result(self, line: Line) -> Result:
        if isinstance(line, MalformedLine):
            return refused(line, line.code, line.message)
        if line.body.get("stream"):
            return answered(line, _STREAM)
        reply = await self._ask(line.url, line.body)
        pause_s, waited_s = USUAL_PAUSE_S, 0.0
        while reply.retry_after_s is not None and waited_s < MAX_PUT_OFF_S.get(reply.status, 0.0):
            # Not all at once again: those who were refused together would be refused together.
            pause_s = min(MAX_PAUSE_S, max(reply.retry_after_s, pause_s))
            await self._sleep(pause_s * random.uniform(0.8, 1.2))
            waited_s += pause_s
            pause_s *= 1.5
            reply = await self._ask(line.url, line.body)
        return answered(line, reply)

    async def _pass_on(self, number: int, result: Result) -> None:
        if self._ahead is None:
            self._sink.add(result)
        else:
            async with self._moved:
                self._waiting[number] = result
                while self._num_passed in self._waiting:
                    self._sink.add(self._waiting.pop(self._num_passed))
                    self._num_passed += 1
                self._moved.notify_all()
        self._arrived.set()

    async def _write(self) -> None:
        finished = False
        while not finished:
            await self._arrived.wait()
            self._arrived.clear()
            finished = self._all_asked
            await in_thread(self._sink.flush)
            self._tell()


def put_off_s(status: int, headers: Mapping[str, str], body: Any) -> float | None:
    """After how many seconds a line that was answered so may be asked again; None: this is its answer."""
    if status not in MAX_PUT_OFF_S or headers.get("x-should-retry") == "false":
        return None
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict) and error.get("code") in _FINAL_CODES:
        return None
    text = headers.get("retry-after", "")
    if text.isascii() and text.isdigit():
        return float(text[:6])
    return USUAL_PAUSE_S if status == 429 else None


def at_priority(body: Mapping[str, Any], priority: int) -> dict[str, Any]:
    """The body with this priority, unless its own is lower still (a higher number). What is no number stays, to be
    refused."""
    own = body.get("priority")
    if own is not None and type(own) is not int:
        return dict(body)
    return {**body, "priority": priority if own is None else max(priority, own)}
