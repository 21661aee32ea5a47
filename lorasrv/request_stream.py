"""The outputs of one request as its caller sees them: an asynchronous iterator that may be closed at any time."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from lorasrv.errors import AdapterLoadFailed
from lorasrv.output import OutputProcessor
from lorasrv.refusals import refused
from lorasrv.request import EngineOutput, RequestId, RequestOutput


class StreamOwner(Protocol):
    """Who feeds a stream; `AsyncEngine` does."""

    def forget(self, request_id: RequestId) -> None:
        """The stream takes no more outputs."""

    def end(self, request_id: RequestId, *, stopped: bool) -> None:
        """The request is to end before the next step."""


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of one accepted request. Closing it early aborts the request within one step.

    Raises (from iteration):
        AdapterLoadFailed: the adapter could not be brought in; nothing was generated.
        AdapterCold: it is not in the pool and the request would not wait.
        LimitExceeded: its adapter or key has as many requests waiting as it may.
        RequestTimeout: it was not done in time. DeadlineUnreachable: it would not be.
        EngineDead: the engine thread ended before the request did.
    """

    def __init__(self, engine: StreamOwner, request_id: RequestId, processor: OutputProcessor, prompt: int) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = prompt
        self._engine = engine
        self._processor = processor
        self._outputs: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue()
        self._finished = False

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished and self._outputs.empty():
            raise StopAsyncIteration
        output = await self._outputs.get()
        if output is None:
            raise StopAsyncIteration
        if isinstance(output, Exception):
            raise output
        return output

    async def aclose(self) -> None:
        """End the request if it has not ended."""
        if not self._finished:
            self._finished = True
            self._engine.forget(self.request_id)
            self._engine.end(self.request_id, stopped=False)
            self._outputs.put_nowait(None)

    def deliver(self, output: EngineOutput) -> RequestOutput:
        """Take one step's output, in the event loop; returns what the caller will see."""
        result = self._processor.process(output)
        if result.finished:
            self._finished = True
            self._engine.forget(self.request_id)
            if output.finish_reason is None:
                self._engine.end(self.request_id, stopped=True)
        if (refusal := refused(result)) is not None:
            self._outputs.put_nowait(refusal)
        elif result.error is not None and not result.num_generated_tokens:
            self._outputs.put_nowait(AdapterLoadFailed(result.error))
        else:
            self._outputs.put_nowait(result)
        return result

    def fail(self, error: Exception) -> None:
        """No more outputs will come."""
        self._finished = True
        self._outputs.put_nowait(error)
