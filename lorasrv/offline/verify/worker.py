"""Verify an adapter in a worker process: `python -m lorasrv.offline.verify.worker`.

Reads a job from stdin and writes one event per line to stdout. Runs at the lowest priority with one thread, and ends
when its stdin is closed, so it does not outlive a server that was killed.
"""

import json
import os
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from lorasrv.offline.verify.job import CannotVerify, VerifyJob
from lorasrv.worker.host_memory import peak_bytes

NICENESS = 19
CHUNK_BYTES = 1 << 12


def main() -> None:
    """Answer one job with `progress` events and one `result` or `error`."""
    os.nice(NICENESS)
    # Libraries print to stdout: redirect that to stderr, so that the parent reads only events.
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = VerifyJob.from_line(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    _Events(events).tell_all(job)


class _Events:
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._last = ("", -1)

    def tell_all(self, job: VerifyJob) -> None:
        started = time.monotonic()
        self.progress("importing transformers and PEFT", 0.0)
        try:
            facts = self._verified(job)
        except Exception as error:
            self._tell({"error": _shown(error)})
            raise
        self._tell({"result": {**facts, "seconds": round(time.monotonic() - started, 2), **_used()}})

    def progress(self, what: str, done: float) -> None:
        """Report progress in steps of a hundredth."""
        step = (what, int(100 * done))
        if step != self._last:
            self._last = step
            self._tell({"progress": [what, round(done, 2)]})

    def _verified(self, job: VerifyJob) -> dict[str, Any]:
        _check_temporary_folder()
        import torch

        torch.set_num_threads(1)
        # Takes seconds; code that only needs the job's fields does not pay for it.
        from lorasrv.offline.verify.compare import verify

        self.progress("importing transformers and PEFT", 1.0)
        done = verify(job, self.progress)
        base = {
            "model": Path(job.model.model).name,
            "quantization": done.quantization,
            "dtype": job.model.dtype,
            "stored": job.stored,
            "kernels": done.kernels,
        }
        prompts = {"prompts": len(job.prompts), "new_tokens": job.new_tokens}
        return {**done.verdict.to_dict(), "computed_with": base, **prompts}

    def _tell(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event, allow_nan=False) + "\n")
        self._file.flush()


def _check_temporary_folder() -> None:
    """Check that temporary files can be written, as the reference needs, and libraries when they are imported.

    Raises:
        CannotVerify: they cannot.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise CannotVerify(
            "the server has no folder for temporary files that can be written: mount one at /tmp, or set TMPDIR"
        ) from None


def _used() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_seconds": round(used.ru_utime + used.ru_stime, 2), "peak_bytes": peak_bytes()}


def _shown(error: Exception) -> str:
    """Return the part of an error that the client may read; the server's log has the rest."""
    from adapter_store.errors import AdapterError

    if isinstance(error, CannotVerify | AdapterError):
        return str(error)
    if isinstance(error, MemoryError):
        return "memory ran out"
    return f"it failed unexpectedly ({type(error).__name__}); the server's log says where"


def _end_with_stdin() -> None:
    # Not through sys.stdin, whose lock a waiting thread would hold at exit.
    while os.read(0, CHUNK_BYTES):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
