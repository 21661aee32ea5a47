"""Request stream: the outputs of one request as an asynchronous iterator, which may be closed at any time.

Streams belong to the event loop's thread.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Protocol

from lorasrv.engine.output_processor import OutputProcessor
from lorasrv.errors import AdapterLoadFailed, name_of
from lorasrv.outputs import CLIENT, EngineOutput, RequestId, RequestOutput, refused
from lorasrv.request import EngineCoreRequest

_LOG = logging.getLogger(__name__)
MAX_SINGLE = 64
"""Most unread outputs that wait one by one for a slow reader; further ones are joined, up to `JOINED_TOKENS` each."""
JOINED_TOKENS = 64


class StreamOwner(Protocol):
    """Feed streams; implemented by `AsyncEngine`."""

    def abort(self, request_id: RequestId) -> None:
        """Have the engine finish the request before its next step."""


class RequestStream(AsyncIterator[RequestOutput]):
    """Iterate over the outputs of one accepted request, for one reader. Closing it early aborts the request within
    one step. Unread outputs are bounded by the length of the answer. The first output of a resumed request repeats its
    earlier tokens.

    Attributes:
        abort_reason: why the request was aborted: `client`, or an error's name; "" if it was not. The engine may have
            finished the request all the same, before it was told.

    Raises (from iteration):
        AdapterLoadFailed: the adapter could not be loaded; nothing was generated.
        AdapterCorrupt: its weights are damaged on disk.
        AdapterCold: it is not in the pool and the request does not wait.
        LimitExceeded: its adapter or key has as many waiting requests as allowed.
        RequestTimeout: it was not finished in time.
        DeadlineUnreachable: it was predicted not to finish in time.
        AdapterDeleted: the adapter was deleted by force.
        EngineDead: the engine ended before the request did.
    """

    def __init__(self, engine: StreamOwner, request: EngineCoreRequest, processor: OutputProcessor) -> None:
        # Drop the hold on the adapter: a stream may live longer than the request.
        self.request = replace(request, hold=None)
        self.request_id = request.request_id
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.abort_reason = ""
        self._engine = engine
        self._processor = processor
        self._unread: deque[RequestOutput | Exception] = deque()
        if request.resumed_token_ids:
            self._unread.append(processor.repeat(request))
        self._reader: asyncio.Future[None] | None = None
        self._take: Callable[[RequestOutput], bool] | None = None
        self._finished = False

    @property
    def num_generated_tokens(self) -> int:
        """Return the number of tokens so far, read or not."""
        return self._processor.num_generated_tokens

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._unread:
            if self._finished:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        output = self._unread.popleft()
        if isinstance(output, Exception):
            raise output
        return output

    def pass_to(self, take: Callable[[RequestOutput], bool]) -> None:
        self._take = take

    async def aclose(self, why: str = CLIENT) -> None:
        """Abort the request if it has not finished; `why` names the reason."""
        if not self._finished:
            self._abort(why)
            self._wake_reader()

    def abort(self, error: Exception) -> None:
        """Abort the request if it has not finished, and raise `error` to its reader after the outputs so far."""
        if not self._finished:
            self._abort(name_of(type(error)))
            self._put(error)

    def deliver(self, output: EngineOutput) -> RequestOutput:
        """Take one step's output, in the event loop. An output that cannot be passed on aborts the request.

        Returns:
            What the reader will see. After an abort it sees nothing, and the tokens are only counted.
        """
        if self._finished:
            return self._processor.count(output)
        result = None
        try:
            result = self._processor.process(output)
            self._pass_on(result)
        except Exception as error:
            # An error in one stream's text must not cost the others of this step their outputs.
            _LOG.exception("request %s failed", self.request_id)
            self.abort(error)
        return self._processor.count(output) if result is None else result

    def _pass_on(self, result: RequestOutput) -> None:
        if result.finished:
            self._end()
        if (refusal := refused(result)) is not None:
            self._put(refusal)
        elif result.error is not None and not result.num_generated_tokens:
            self._put(AdapterLoadFailed(result.error))
        elif self._take is None or self._waiting_reader is None or not self._take(result):
            self._put(result)

    def _abort(self, why: str) -> None:
        self._end()
        self.abort_reason = why
        self._engine.abort(self.request_id)

    def _end(self) -> None:
        self._finished = True
        # `_take` refers to this stream; the cycle would keep it alive until garbage collection.
        self._take = None

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
        self._wake_reader()

    @property
    def _waiting_reader(self) -> asyncio.Future[None] | None:
        """Return the future that wakes the reader; None unless it has read everything and waits for more."""
        return None if self._reader is None or self._reader.done() else self._reader

    def _wake_reader(self) -> None:
        if (reader := self._waiting_reader) is not None:
            reader.set_result(None)
