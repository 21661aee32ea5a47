"""Write a server's traffic to a file while it serves: one line per answer that ends, and per choice.

Belongs to the event loop's thread; no torch. A line has some 300 bytes and is written within microseconds when an
answer ends. If the disk fails, recording ends with a line in the log, and serving continues.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType

from lorasrv.metrics.request_observer import ENGINE_ENDED, RequestObserver
from lorasrv.metrics.trace import TraceRequest, parse_line
from lorasrv.outputs import FinishReason, RequestId, RequestOutput
from lorasrv.request import EngineCoreRequest

_LOG = logging.getLogger(__name__)
MAX_LINE_BYTES = 1 << 16


@dataclass(slots=True)
class _Open:
    """Hold a request that has not ended."""

    message: EngineCoreRequest
    arrived_s: float
    first_token_s: float | None = None
    latest: RequestOutput | None = None


class TraceRecorder(RequestObserver):
    """Append to a file. If it has lines already, its times continue from its last line.

    Args:
        clock: monotonic seconds.
    Raises:
        OSError: the file cannot be written.
        InvalidTrace: the file is not a trace.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Unbuffered: every line goes to the kernel at once, and `close` has nothing left to write that could fail.
        self._file: FileIO | None = path.open("a+b", buffering=0)
        try:
            _cut_torn_line(self._file, path.name)
            self._start_s = clock() - _seconds_recorded(self._file, path.name)
        except BaseException:
            self._file.close()
            raise
        self._open: dict[RequestId, _Open] = {}

    def __enter__(self) -> "TraceRecorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Requests that have not ended are left out."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def on_accepted(self, requests: Sequence[EngineCoreRequest], arrived_s: float) -> None:
        for request in (request for request in requests if not request.is_for_peer):
            self._open[request.request_id] = _Open(request, arrived_s)

    def on_output(self, request_id: RequestId, output: RequestOutput) -> None:
        request = self._open.get(request_id)
        if request is None:
            return
        request.latest = output
        if request.first_token_s is None and output.num_generated_tokens > len(request.message.resumed_token_ids):
            request.first_token_s = self._clock()

    def on_finished(self, request_id: RequestId, why: str = "") -> None:
        """Record an answer, also one that failed, or for which its client did not wait: it was load, too. Answers that
        the end of the engine cuts off are left out."""
        request = self._open.pop(request_id, None)
        if request is None or why in ENGINE_ENDED:
            return
        if request.latest is None or request.first_token_s is None:
            return  # nothing was generated: no answer, and hardly any load
        reason = request.latest.finish_reason or FinishReason.ABORT
        self._write(_line(request, request.latest, reason, self._start_s, self._clock()))

    def _write(self, line: TraceRequest) -> None:
        if self._file is None:
            return
        try:
            data = line.line().encode() + b"\n"
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            why = error.strerror or error
            _LOG.error("the trace cannot be written (%s); recording ends here, until the server is restarted", why)
            self.close()


def _line(request: _Open, output: RequestOutput, reason: FinishReason, start_s: float, now_s: float) -> TraceRequest:
    message, timing = request.message, output.timing
    assert request.first_token_s is not None
    return TraceRequest(
        arrival_s=round(max(0.0, request.arrived_s - start_s), 6),
        prompt_tokens=output.num_prompt_tokens,
        output_tokens=output.num_generated_tokens - len(message.resumed_token_ids),
        adapter=None if timing.fell_back else message.adapter_id or None,
        max_tokens=message.max_tokens,
        cached_tokens=timing.num_cached_tokens,
        priority=message.priority,
        timeout_s=message.timeout_s,
        key=message.principal,
        adapter_bytes=None if timing.fell_back else message.adapter_bytes,
        ttft_ms=round(1e3 * (request.first_token_s - request.arrived_s), 3),
        total_ms=round(1e3 * (now_s - request.arrived_s), 3),
        queue_ms=round(timing.queue_ms, 3),
        load_ms=round(timing.load_ms, 3),
        tier=timing.tier,
        steps=output.num_steps,
        drafted_tokens=output.num_draft_tokens,
        accepted_tokens=output.num_accepted_tokens,
        finish=reason.value,
    )


def _cut_torn_line(file: FileIO, name: str) -> None:
    """Cut off an incomplete last line, which a full disk or a power failure leaves.

    Raises:
        InvalidTrace: the line before is not one of a trace.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_LINE_BYTES))
    read = file.read(MAX_LINE_BYTES) or b""
    whole, _, torn = read.rpartition(b"\n")
    if whole and torn:
        parse_line(whole.splitlines()[-1], f"{name}, last whole line")
        file.truncate(size - len(torn))
        _LOG.warning("the last line of %s had no end, and was cut off", name)


def _seconds_recorded(file: FileIO, name: str) -> float:
    """Return how many seconds ago the trace began, by its last line: that request ended when the file was last
    written."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - MAX_LINE_BYTES))
    lines = (file.read(MAX_LINE_BYTES) or b"").splitlines() if size else []
    if not lines:
        return 0.0
    last = parse_line(lines[-1], f"{name}, last line")
    ended_s = last.arrival_s + (last.total_ms or 0.0) / 1e3
    return ended_s + max(0.0, time.time() - os.fstat(file.fileno()).st_mtime)
