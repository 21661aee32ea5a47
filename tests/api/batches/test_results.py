"""Results of batches on a disk that fails."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from api.batches import results
from api.batches.results import Result, ResultSink, Tally


def test_nothing_follows_half_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has room again a moment later, and results that have come meanwhile would stand right behind it."""
    path, real, turns = tmp_path / "out.jsonl", os.write, [0]

    def write(fd: int, data: Any) -> int:
        turns[0] += 1
        if turns[0] == 2:
            return real(fd, bytes(data)[:5])
        if turns[0] == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(results.os, "write", write)
    sink = ResultSink(path, path, Tally())
    for number in range(4):
        sink.add(Result(f'{{"number": {number}}}\n'.encode(), ok=True))
        if number == 1:
            with pytest.raises(OSError, match="No space"):
                sink.flush()
        else:
            sink.flush()
    assert path.read_bytes() == b'{"number": 0}\n{"num'


def test_a_file_of_another_tool_is_told(tmp_path: Path) -> None:
    """Half a surrogate is JSON, and no text that has a key."""
    path = tmp_path / "out.jsonl"
    path.write_text('{"custom_id": "\\ud800", "response": {"status_code": 200}, "error": null}\n')
    with pytest.raises(results.ResultsUnreadable, match="is not a result of a batch"):
        results.recovered(path, tmp_path / "errors.jsonl")
