"""Run verifications for the server: one worker process at a time, supervised and always ended. Torch-free.

All computing happens in the worker, at the lowest priority. The memory that it needs beside the server is checked
first.
"""

import asyncio
import importlib.util
import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lorasrv.errors import (
    RequestTimeout,
    VerificationBusy,
    VerificationFailed,
    VerificationUnavailable,
    to_install,
)
from lorasrv.models.families import tensor_shapes
from lorasrv.models.spec import ModelSpec
from lorasrv.offline.verify.job import Progress, VerifyJob
from lorasrv.worker.host_memory import free_bytes

_LOG = logging.getLogger(__name__)
DEFAULT_TIMEOUT_S = 300.0
COMMAND = (sys.executable, "-P", "-m", "lorasrv.offline.verify.worker")
ORACLES = ("peft", "transformers")
MAX_LINE_BYTES = 1 << 20
LAST_LINES = 40
RETRY_S = 30.0
SHUTTING_DOWN = "the server is shutting down"
_ENVIRONMENT = {
    # One thread, no GPU, no network.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Verifier:
    """Run verifications. For the event loop's thread.

    Args:
        command: the worker's command line; tests replace it.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = tuple(command)
        self._running: str | None = None
        self._since_s = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False

    def check_ready(self, may_see: Callable[[str], bool]) -> None:
        """Check that a verification can start, before anything is prepared.

        Args:
            may_see: whether the caller may see an adapter id.

        Raises:
            VerificationUnavailable: a package is not installed, or the server is shutting down.
            VerificationBusy: another verification runs.
        """
        if self._closed:
            raise VerificationUnavailable(SHUTTING_DOWN)
        missing = [name for name in ORACLES if importlib.util.find_spec(name) is None]
        if missing:
            raise VerificationUnavailable(
                f"verify compares with PEFT, and {' and '.join(missing)} is not installed where the server runs: "
                + to_install("train")
            )
        if self._running is not None:
            seconds = time.monotonic() - self._since_s
            running = self._running if may_see(self._running.partition("@")[0]) else "another adapter"
            raise VerificationBusy(
                f"{running} is being verified, for {seconds:.0f} s now; one at a time: try again when it is done",
                retry_after_s=RETRY_S,
            )

    async def run(
        self,
        name: str,
        job: VerifyJob,
        timeout_s: float,
        on_progress: Callable[[Progress], None],
        may_see: Callable[[str], bool] = lambda _: True,
    ) -> dict[str, Any]:
        """Verify and return the worker's verdict. Cancelling kills the worker and returns when it is gone.

        Args:
            name: what is verified, for the message to concurrent callers.
            on_progress: called with each progress event.

        Raises:
            VerificationUnavailable, VerificationBusy: see `check_ready`.
            RequestTimeout: it was not done in time, and was stopped.
            VerificationFailed: there is no verdict; the message says why.
        """
        self.check_ready(may_see)
        self._running, self._since_s = name, time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._listen(job, on_progress)
        except TimeoutError:
            raise RequestTimeout(
                f"the verification was not done within {timeout_s:g} s and was stopped; allow more, or send fewer or "
                "shorter prompts"
            ) from None
        finally:
            self._running = None

    async def close(self) -> None:
        """Kill the running worker and start no more; its caller is told that the server is shutting down."""
        self._closed = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _listen(self, job: VerifyJob, on_progress: Callable[[Progress], None]) -> dict[str, Any]:
        process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        last_words: deque[str] = deque(maxlen=LAST_LINES)
        relay = asyncio.create_task(_keep_last(process.stderr, last_words))
        try:
            process.stdin.write(job.to_line())
            why = ""
            async for line in process.stdout:
                event = json.loads(line)
                if "result" in event:
                    result: dict[str, Any] = event["result"]
                    return result
                if "progress" in event:
                    on_progress(Progress(*event["progress"]))
                else:
                    why = event["error"]
            code = await process.wait()
            await relay
            if self._closed:
                raise VerificationFailed(SHUTTING_DOWN)
            why = why or _how(code)
            _LOG.warning("verifying failed: %s; the last words of its process:\n%s", why, "\n".join(last_words))
            raise VerificationFailed(f"the verification failed: {why}")
        finally:
            # Also on cancellation: the process must be gone before another may start.
            if process.returncode is None:
                process.kill()
            process.stdin.close()
            await process.wait()
            await relay
            self._process = None

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            env={**os.environ, **_ENVIRONMENT},
            # Ctrl-C in the server's terminal is handled by the server, which ends this process itself.
            start_new_session=True,
        )
        return self._process


async def _keep_last(stderr: asyncio.StreamReader, last_words: deque[str]) -> None:
    """Drain stderr, so that the worker never blocks on it, keeping its last lines."""
    while chunk := await stderr.read(MAX_LINE_BYTES):
        last_words.extend(chunk.decode(errors="replace").splitlines())


def _how(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}; the server's log has its last output"
    return f"its process was ended by signal {-code}, as the system does when memory runs out"


LIBRARY_BYTES = 1280 << 20
"""torch, transformers and PEFT, the kernels, their compiler on a first start, and logits."""
FLOAT_BYTES = 4


def needed_bytes(spec: ModelSpec, weight_bytes: int, adapter_bytes: int) -> int:
    """Estimate the memory of a verification.

    The base as served and in float32, one stack of weights in transit, and the adapter five times: the file twice, its
    panels, and in float32, which takes twice the bytes of bf16.
    """
    sizes = [math.prod(shape) for shape in tensor_shapes(spec).values()]
    stacked = max(sum(site.out_features) * site.in_features for site in spec.sites())
    passing = FLOAT_BYTES * max(*sizes, stacked)
    return FLOAT_BYTES * sum(sizes) + weight_bytes + 2 * passing + 5 * adapter_bytes + LIBRARY_BYTES


def check_memory(needed: int) -> None:
    """Check the free memory.

    Raises:
        VerificationUnavailable: less is free than a verification takes.
    """
    free = free_bytes()
    if needed > free:
        raise VerificationUnavailable(
            f"verifying takes about {_gib(needed)} beside the server, most of it the base in float32; {_gib(free)} are "
            "free. Verify on a machine with more, or override this check with ignore_memory (--ignore-memory)"
        )


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"
