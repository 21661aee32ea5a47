"""Write and read back the results of batch lines, in OpenAI's format, in append-only files.

Only the command may remove results: those of lines to retry. A result is durable before it is counted. A crash may
leave half a line at the end of a file: it is cut off, and its request is sent again.
"""

import contextlib
import json
import os
import secrets
import threading
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from adapter_store.storage.blobs import fsync_directory
from api.asgi.json_lines import compact_line
from api.batches.input_lines import Line, MalformedLine, line_key

ID_PREFIX = "batch_req_"
# Beginning of each line that we write. Half a line that begins otherwise is not ours, and is not cut off.
LINE_START = f'{{"id":"{ID_PREFIX}'.encode()
CHUNK_BYTES = 1 << 20


class ResultsUnreadable(Exception):
    """Report a file with lines that are not results of a batch. Names the line."""


@dataclass(frozen=True, slots=True)
class LineReply:
    """Hold the reply to a line's body: an HTTP status and a JSON body."""

    status: int
    body: Any
    request_id: str | None = None
    # Seconds until the next try, if the line could not be taken now.
    retry_after_s: float | None = None

    @property
    def ok(self) -> bool:
        return self.status == 200


@dataclass(frozen=True, slots=True)
class Result:
    """Hold one line of a result file."""

    data: bytes
    # Whether the line is an answer rather than a failure.
    ok: bool
    # Usage.
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class Tally:
    """Count results, and the tokens of this run."""

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def done(self) -> int:
        return self.completed + self.failed


@dataclass(frozen=True, slots=True)
class ScannedResults:
    """Hold the results that files already contain."""

    # Unique keys of the lines.
    keys: "np.ndarray[Any, np.dtype[np.uint64]]"
    # Whether each result is an answer.
    oks: "np.ndarray[Any, np.dtype[np.bool_]]"

    @staticmethod
    def nothing() -> "ScannedResults":
        return ScannedResults(np.empty(0, np.uint64), np.empty(0, np.bool_))

    def of(self, keys: "np.ndarray[Any, np.dtype[np.uint64]]") -> "ScannedResults":
        """Return the results with one of these keys."""
        wanted = np.isin(self.keys, keys)
        return ScannedResults(self.keys[wanted], self.oks[wanted])

    def parted(self) -> "tuple[ScannedResults, ScannedResults]":
        """Return answers and failures separately."""
        return ScannedResults(self.keys[self.oks], self.oks[self.oks]), ScannedResults(
            self.keys[~self.oks], self.oks[~self.oks]
        )

    def tally(self) -> Tally:
        completed = int(self.oks.sum())
        return Tally(completed, len(self.oks) - completed)


def answered(line: Line, reply: LineReply) -> Result:
    """Build the result of a line that was sent."""
    response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
    usage = reply.body.get("usage") if reply.ok and isinstance(reply.body, dict) else None
    tokens = [_count(usage, name) for name in ("prompt_tokens", "completion_tokens")]
    return Result(_result_line(line.custom_id, response, None), reply.ok, *tokens)


def refused(line: Line, code: str, message: str) -> Result:
    """Build the result of a line that was not sent, with its number."""
    problem: dict[str, Any] = {"code": code, "message": message, "line": line.number}
    if isinstance(line, MalformedLine):
        problem |= {"message": f"line {line.number}: {message}", "param": line.param}
    return Result(_result_line(line.custom_id, None, problem), False)


def _result_line(custom_id: str | None, response: Mapping[str, Any] | None, problem: Mapping[str, Any] | None) -> bytes:
    fields = {
        "id": f"{ID_PREFIX}{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": response,
        "error": problem,
    }
    try:
        return compact_line(fields).encode() + b"\n"
    except UnicodeEncodeError:
        # A lone surrogate from another server.
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _count(usage: object, name: str) -> int:
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) else 0


def recovered(*paths: Path) -> ScannedResults:
    """Read the results in these files, which may be missing, and cut off half a line at the end of each.

    Raises:
        ResultsUnreadable: a line is not a result, or a half line is not the beginning of one; that file is unchanged.
        OSError.
    """
    found = _read_results(paths)
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            _cut_torn_line(path)
    return found


def _read_results(paths: Sequence[Path]) -> ScannedResults:
    """Read the results of whole lines; of several with the same key, the first counts."""
    keys, oks = array("Q"), bytearray()
    for path in paths:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    break
                key, ok = _read_result(data, f"{path.name} line {number}")
                keys.append(key)
                oks.append(ok)
    if not keys:
        return ScannedResults.nothing()
    unique, first = np.unique(np.frombuffer(keys, np.uint64), return_index=True)
    return ScannedResults(unique, np.frombuffer(oks, np.bool_)[first])


def _read_result(data: bytes, where: str) -> tuple[int, bool]:
    try:
        fields = json.loads(data)
        custom_id, response, problem = fields["custom_id"], fields["response"], fields["error"]
        number = problem["line"] if custom_id is None else 0
        ok = response is not None and problem is None and response["status_code"] == 200
        if not isinstance(custom_id, str | None) or not isinstance(number, int):
            raise ValueError
        return line_key(custom_id, number), ok
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ResultsUnreadable(f"{where} is not a result of a batch") from None


def _cut_torn_line(path: Path) -> None:
    """Truncate the file after its last whole line."""
    with path.open("r+b") as file:
        end = size = file.seek(0, os.SEEK_END)
        torn = b""
        while end and b"\n" not in torn:
            begin = max(0, end - CHUNK_BYTES)
            file.seek(begin)
            torn, end = file.read(end - begin), begin
        whole = end + torn.rfind(b"\n") + 1
        if whole == size:
            return
        file.seek(whole)
        start = file.read(len(LINE_START))
        if start != LINE_START[: len(start)]:
            raise ResultsUnreadable(f"the end of {path.name} is not a result of a batch")
        file.truncate(whole)
        os.fsync(file.fileno())


def copy_without(path: Path, keys: "np.ndarray[Any, np.dtype[np.uint64]]", into: int) -> None:
    """Copy the results with other keys to another file, durably.

    Raises: OSError.
    """
    dropped = frozenset(keys.tolist())
    with path.open("rb") as file, os.fdopen(into, "wb", closefd=False) as kept:
        kept.writelines(data for data in file if _read_result(data, path.name)[0] not in dropped)
        kept.flush()
        os.fsync(into)


def results_in_order(
    path: Path, keys: "np.ndarray[Any, np.dtype[np.uint64]]"
) -> "np.ndarray[Any, np.dtype[np.uint64]] | None":
    """Return the byte offsets of a file's results in the order of `keys`, followed by results with other keys; None if
    the file has this order.

    Raises: OSError.
    """
    found, begins, at = array("Q"), array("Q"), 0
    with path.open("rb") as file:
        for data in file:
            found.append(_read_result(data, path.name)[0])
            begins.append(at)
            at += len(data)
    if not found:
        return None
    by_key = np.argsort(keys)
    held = np.frombuffer(found, np.uint64)
    near = np.searchsorted(keys, held, sorter=by_key).clip(max=len(keys) - 1)
    lines = np.where(keys[by_key[near]] == held, by_key[near], len(keys))
    if (np.diff(lines) >= 0).all():
        return None
    return np.frombuffer(begins, np.uint64)[np.argsort(lines, kind="stable")]


def copy_places(path: Path, begins: "np.ndarray[Any, np.dtype[np.uint64]]", into: int) -> None:
    """Copy the results that begin at these byte offsets to another file, durably.

    Raises: OSError.
    """
    with path.open("rb") as file, os.fdopen(into, "wb", closefd=False) as copied:
        for begin in begins.tolist():
            file.seek(begin)
            copied.write(file.readline())
        copied.flush()
        os.fsync(into)


@dataclass
class ResultFile:
    """Append results to a file, which is opened for the first result. Not thread-safe."""

    path: Path
    _fd: int | None = field(default=None, init=False)

    def append(self, data: bytes) -> None:
        """Write data durably.

        Raises:
            OSError: part of the data may be written.
        """
        if self._fd is None:
            is_new = not self.path.exists()
            self._fd = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if is_new:
                fsync_directory(self.path.absolute().parent)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        os.fsync(self._fd)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class ResultSink:
    """Write answers to one file and failures to another, or to the same one. Thread-safe.

    `add` buffers a result; `flush` writes and counts the buffered ones, with one fsync for many.

    Args:
        admit: called with the size of a result before it is added; if it raises, the result is not added.
    """

    def __init__(
        self, output: Path, errors: Path, tally: Tally, admit: Callable[[int], object] = lambda num_bytes: None
    ) -> None:
        self.tally = tally
        self._admit = admit
        self._kept: deque[Result] = deque()
        self._lock = threading.Lock()
        self._is_torn = False
        self._output = ResultFile(output)
        self._errors = self._output if errors == output else ResultFile(errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        finally:
            with self._lock:
                for file in {id(file): file for file in (self._output, self._errors)}.values():
                    file.close()

    def add(self, result: Result) -> None:
        self._admit(len(result.data))
        self._kept.append(result)

    def flush(self) -> None:
        """Write the buffered results.

        Raises:
            OSError: writing failed.
        """
        with self._lock:
            if self._is_torn:
                return
            # True until all is written: a line after half a line would be unreadable. The next sink cuts off the half.
            self._is_torn = True
            taken = [self._kept.popleft() for _ in range(len(self._kept))]
            for file in (self._output, self._errors):
                is_shared = self._errors is self._output
                data = b"".join(r.data for r in taken if is_shared or r.ok == (file is self._output))
                if data:
                    file.append(data)
                if is_shared:
                    break
            self._count(taken)
            self._is_torn = False

    def _count(self, written: list[Result]) -> None:
        for result in written:
            self.tally.completed += result.ok
            self.tally.failed += not result.ok
            self.tally.prompt_tokens += result.prompt_tokens
            self.tally.completion_tokens += result.completion_tokens
