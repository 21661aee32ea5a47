"""Send the lines of a batch concurrently and write their results, for the command and for the server."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any

from api.batches.files import in_thread
from api.batches.input_lines import Line, MalformedLine
from api.batches.results import LineReply, Result, ResultSink, answered, refused
from api.errors import ANSWERS, INVALID, error_body
from lorasrv.errors import DeadlineUnreachable

BATCH_PRIORITY = 100
"""Online requests have priority 0 by default; lower values go first."""
DEFAULT_CONCURRENCY = 16
# An ordered run may be `AHEAD * concurrency` lines ahead of its oldest open one; until then, results wait in memory.
AHEAD = 8
MAX_PAUSE_S = 30.0
USUAL_PAUSE_S = 1.0
MAX_PUT_OFF_S = {429: 24 * 3600.0, 503: 3600.0}
"""Time for which a line is retried, by status: 429, other requests go first; 503, the server has a problem. After that,
the last reply is its result."""
Ask = Callable[[str, Mapping[str, Any]], Awaitable[LineReply]]
"""Sends a body to a URL. Raises only errors that end the whole batch."""
Sleep = Callable[[float], Awaitable[object]]

# No retry: the same line with the same deadline would fail again.
_FINAL_CODES = frozenset({ANSWERS[DeadlineUnreachable].code})
_STREAM = LineReply(
    400, error_body("stream is not possible in a batch; leave it out", INVALID, "stream", "invalid_value")
)


class LineRunner:
    """Run the lines of a batch once.

    Args:
        slots: semaphore of concurrent lines; several runs may share it.
        ordered: write results in the order of the lines, not of their completion.
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
        self._in_thread = threading.Lock()
        self._moved = asyncio.Condition()
        self._waiting: dict[int, Result] = {}
        self._num_taken = self._num_passed = 0
        self._arrived = asyncio.Event()
        self._all_asked = False

    async def run(self, lines: Generator[Line, None, None]) -> None:
        """Run until every line has its result. However the run ends, results that have arrived are written, and the
        lines are closed.

        Raises:
            OSError: results cannot be written, or lines cannot be read.
            Exception: raised by `ask`.
        """
        try:
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(self._write())
                workers = [group.create_task(self._work(lines)) for _ in range(self._concurrency)]
                await asyncio.gather(*workers)
                self._all_asked = True
                self._arrived.set()
                # Awaited here: at the end of the block, its failure leaves this task marked as cancelled (Python 3.11).
                await writing
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            # Not awaited: a thread may be reading a line, and a cancellation must not wait for it.
            in_thread(self._close, lines)
            self._sink.flush()
            self._tell()

    def _close(self, lines: Generator[Line, None, None]) -> None:
        with self._in_thread:
            lines.close()

    def _next(self, lines: Generator[Line, None, None]) -> Line | None:
        with self._in_thread:
            return next(lines, None)

    async def _work(self, lines: Generator[Line, None, None]) -> None:
        while True:
            async with self._slots:
                taken = await self._take(lines)
                if taken is None:
                    return
                number, line = taken
                result = await self._result(line)
            await self._pass_on(number, result)

    async def _take(self, lines: Generator[Line, None, None]) -> tuple[int, Line] | None:
        async with self._reading:
            if self._ahead is not None:
                most = self._ahead
                async with self._moved:
                    await self._moved.wait_for(lambda: self._num_taken - self._num_passed < most)
            # In a thread: a line may have megabytes, and many may be skipped before the next one is found.
            line = await in_thread(self._next, lines)
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
            # Spread the retries: lines that were refused together would be refused together again.
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
    """Return the seconds after which a line with this reply may be retried; None if the reply is final."""
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
    """Return the body with this priority, unless its own is a higher number (goes later).

    An invalid priority is left as it is, to be refused by validation.
    """
    own = body.get("priority")
    if own is not None and type(own) is not int:
        return dict(body)
    return {**body, "priority": priority if own is None else max(priority, own)}
