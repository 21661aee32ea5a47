"""Test grammars in a separate process with hard limits on time and memory before this process compiles them.

llguidance bounds most of its work, but a few expressions take gigabytes, and rules nested thousands deep overflow its
stack. A grammar that exceeds a limit ends the process, which is replaced at once.
"""

import asyncio
import contextlib
import json
import signal
import struct
import sys
from collections.abc import Sequence

from lorasrv.errors import EngineOverloaded

COMMAND = (sys.executable, "-P", "-m", "lorasrv.text.structured_output.sandbox_worker")
WALL_SECONDS = 20.0
"""Longest wait; reached only if the machine is overloaded: the process's own limit is less than a second of CPU
time."""
FOREIGN_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
NO_START = "the grammar compiler does not start; this machine may be short of memory or CPU time"
TOO_COSTLY = "compiling it exceeds the limits of time, memory or depth"


class GrammarSandbox:
    """Own the worker process, which is started on first use. Call from the event loop's thread, one grammar at a
    time.
    """

    def __init__(self, vocabulary: bytes, command: Sequence[str] = COMMAND) -> None:
        self._vocabulary = vocabulary
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        self.num_started = 0

    async def examine(self, text: str) -> str | None:
        """Compile a grammar in the worker process; return why it cannot be used, or None.

        Raises:
            EngineOverloaded: the process does not start, was ended from outside, or got no CPU time for the answer.
        """
        process = await self._running()
        try:
            async with asyncio.timeout(WALL_SECONDS):
                line = await _asked(process, text.encode())
        except TimeoutError:
            await self._end()
            raise EngineOverloaded("this machine is too busy to compile a grammar now", retry_after_s=5.0) from None
        except BaseException:
            await self._end()
            raise
        if line:
            error: str | None = json.loads(line)["error"]
            return error
        ended_by = await _ended(process, patience_s=5.0)
        self._process, self._starting = None, asyncio.create_task(self._started())
        if -ended_by in FOREIGN_SIGNALS:
            raise EngineOverloaded("the grammar compiler was killed by the system", retry_after_s=1.0)
        return TOO_COSTLY

    async def aclose(self) -> None:
        """End the process; another `examine` starts a new one."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            if not starting.cancelled() and starting.exception() is None:
                await _ended(starting.result())
        await self._end()

    async def _running(self) -> asyncio.subprocess.Process:
        starting, self._starting = self._starting, None
        if starting is not None:
            # The last start failed for another request; the cause may be gone.
            with contextlib.suppress(EngineOverloaded):
                self._process = await starting
        if self._process is None or self._process.returncode is not None:
            self._process = await self._started()
        return self._process

    async def _started(self) -> asyncio.subprocess.Process:
        self.num_started += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        except OSError:
            raise EngineOverloaded(NO_START, retry_after_s=5.0) from None
        try:
            async with asyncio.timeout(WALL_SECONDS):
                if await _asked(process, self._vocabulary):
                    return process
        except TimeoutError:
            pass
        except BaseException:
            await _ended(process)
            raise
        await _ended(process)
        raise EngineOverloaded(NO_START, retry_after_s=5.0)

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await _ended(process)


async def _asked(process: asyncio.subprocess.Process, content: bytes) -> bytes:
    """Send a frame and return the answering line; b"" if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(struct.pack("<I", len(content)) + content)
        await process.stdin.drain()
        return await process.stdout.readline()
    except (BrokenPipeError, ConnectionResetError):
        return b""


async def _ended(process: asyncio.subprocess.Process, patience_s: float = 0.0) -> int:
    """Return the exit code as `subprocess` reports it, killing the process if it does not end in time."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(patience_s):
            return await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()
