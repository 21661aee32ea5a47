"""The outputs of one request as its caller sees them: an asynchronous iterator that may be closed at any time."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from lorasrv.adapter_uses import AdapterUse
from lorasrv.ended_request import name_of
from lorasrv.errors import AdapterLoadFailed
from lorasrv.output import OutputProcessor
from lorasrv.refusals import refused
from lorasrv.request import EngineOutput, RequestId, RequestOutput

MAX_SINGLE = 64
"""So many outputs wait one by one for a reader who is late; further ones are joined, up to `JOINED_TOKENS` in one."""
JOINED_TOKENS = 64


class StreamOwner(Protocol):
    """Who feeds a stream; `AsyncEngine` does."""

    def forget(self, request_id: RequestId) -> None:
        """The stream takes no more outputs."""

    def end(self, request_id: RequestId, *, stopped: bool, why: str = "client") -> None:
        """The request is to end before the next step; `why`, if its answer is not whole."""


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of one accepted request, a choice of what `use` stands for. Closing it early aborts the request
    within one step. For one reader; what waits for it is as long as the answer at most.

    Raises (from iteration):
        AdapterLoadFailed: the adapter could not be brought in; nothing was generated.
        AdapterCorrupt: its weights are damaged on the disk.
        AdapterCold: it is not in the pool and the request would not wait.
        LimitExceeded: its adapter or key has as many requests waiting as it may.
        RequestTimeout: it was not done in time. DeadlineUnreachable: it would not be.
        AdapterDeleted: somebody has deleted it, and would not wait.
        EngineDead: the engine thread ended before the request did.
    """

    def __init__(
        self, engine: StreamOwner, request_id: RequestId, processor: OutputProcessor, prompt: int, use: AdapterUse
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = prompt
        self.use = use
        use.choices.add(self)
        self._engine = engine
        self._processor = processor
        self._unread: deque[RequestOutput | Exception] = deque()
        self._arrived = asyncio.Event()
        self._finished = False

    @property
    def num_generated_tokens(self) -> int:
        """How many there are so far, read or not."""
        return self._processor.num_generated_tokens

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._unread:
            if self._finished:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        output = self._unread.popleft()
        if isinstance(output, Exception):
            raise output
        return output

    async def aclose(self) -> None:
        """End the request if it has not ended."""
        if not self._finished:
            self._finished = True
            self._engine.forget(self.request_id)
            self._engine.end(self.request_id, stopped=False)
            self._arrived.set()

    def break_off(self, error: Exception) -> None:
        """End the request, and tell its reader why."""
        self._engine.forget(self.request_id)
        self._engine.end(self.request_id, stopped=False, why=name_of(type(error)))
        self.fail(error)

    def deliver(self, output: EngineOutput) -> RequestOutput:
        """Take one step's output, in the event loop; returns what the caller will see."""
        result = self._processor.process(output)
        if result.finished:
            self._finished = True
            self._engine.forget(self.request_id)
            if output.finish_reason is None:
                self._engine.end(self.request_id, stopped=True)
        if (refusal := refused(result)) is not None:
            self._put(refusal)
        elif result.error is not None and not result.num_generated_tokens:
            self._put(AdapterLoadFailed(result.error))
        else:
            self._put(result)
        return result

    def fail(self, error: Exception) -> None:
        """No more outputs will come."""
        self._finished = True
        self._put(error)

    def _put(self, output: RequestOutput | Exception) -> None:
        last = self._unread[-1] if len(self._unread) >= MAX_SINGLE else None
        if (
            isinstance(output, RequestOutput)
            and isinstance(last, RequestOutput)
            and not output.finished
            and len(last.token_ids) < JOINED_TOKENS
        ):
            self._unread[-1] = last.followed_by(output)
        else:
            self._unread.append(output)
        self._arrived.set()
