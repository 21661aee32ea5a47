"""Merge the output streams of several choices into one, in order of arrival."""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from adapter_store.errors import AdapterError
from api.errors import ApiError, cause_of
from lorasrv.errors import EngineDead, LorasrvError
from lorasrv.outputs import CLIENT, FinishReason, OutputStream, RequestOutput


class ChoiceStream:
    """Iterate over (choice index, output), with `width` choices per prompt, until the last choice ends.

    If one choice fails, all fail.

    With `is_marked`, `mark` reports the tokens of the outputs taken so far, and whether the server is draining. With
    `is_resumed`, the first output repeats what another replica has answered. `named` turns an error of a choice into
    the error that the client gets.

    A single stream is read directly. Of several streams, each has a task that reads one output and waits until it is
    taken, so little is buffered for a slow client. Must be closed, even after the end.

    Raises (from iteration):
        LorasrvError, AdapterError, ApiError: a choice failed; earlier outputs are not an answer.
    """

    def __init__(
        self,
        streams: Sequence[OutputStream],
        width: int | None = None,
        *,
        is_marked: bool = False,
        is_resumed: bool = False,
        is_draining: Callable[[], bool] = lambda: False,
        named: Callable[[Exception], Exception] = lambda error: error,
    ) -> None:
        self.width = width or len(streams)
        self.is_resumed = is_resumed
        self.num_taken = 0
        self._is_marked = is_marked
        self._is_draining = is_draining
        self._named = named
        self._unmarked: list[int] = []
        self.latest: dict[int, RequestOutput] = {}
        self.first_token_s: float | None = None
        self._streams = streams
        self._num_unfinished = len(streams)
        self._closed_for = CLIENT
        self._ahead: deque[tuple[int, RequestOutput]] = deque()
        self._arrived: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(len(streams))
        self._pumps = [
            asyncio.create_task(self._pump(*numbered)) for numbered in enumerate(streams) if len(streams) > 1
        ]

    def first_outputs(self) -> list[RequestOutput]:
        """Return, for each prompt, the latest output of the first of its choices that has one."""
        indices = {index // self.width: index for index in sorted(self.latest, reverse=True)}
        return [self.latest[indices[prompt]] for prompt in sorted(indices)]

    @property
    def is_repeated(self) -> bool:
        """Return whether the client already has the last output that was read, from another replica: a resumed answer's
        first output, which holds all earlier tokens."""
        return self.is_resumed and self.num_taken == 1

    def __aiter__(self) -> "ChoiceStream":
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if not self._ahead:
            if not self._num_unfinished:
                raise StopAsyncIteration
            self._ahead.append(await self._take())
        index, output = self._ahead.popleft()
        self._on_taken(output)
        return index, output

    def pass_to(self, write: Callable[[int, RequestOutput], None], can_write: Callable[[], bool]) -> None:
        """Write the outputs of a single choice, except the last, as they come while the reader waits. Call it after the
        first output has been read.

        Args:
            can_write: asked before each output; if it returns False, the reader gets the output.
        """
        if len(self._streams) > 1:
            return

        def take(output: RequestOutput) -> bool:
            if not can_write():
                return False
            self._on_arrived(0, output)
            self._on_taken(output)
            write(0, output)
            return True

        self._streams[0].pass_to(take)

    def mark(self) -> bytes:
        """Return the comments to write after an output's events, so that the stream can be resumed from there: the
        tokens since the last mark, and `: draining` if another replica should continue. After the end: nothing.
        """
        if not self._is_marked or not (self._num_unfinished or self._ahead):
            return b""
        tokens, self._unmarked = self._unmarked, []
        leaving = ": draining\n\n" if self._is_draining() else ""
        return f": tokens {' '.join(map(str, tokens))}\n\n{leaving}".encode()

    def mark_failure(self, error: Exception) -> bytes:
        """Return the comment to write before the error event if the engine, not the answer, has failed: another replica
        then continues the stream without that event."""
        return b": stopping\n\n" if self._is_marked and isinstance(error, EngineDead) else b""

    def mark_nothing(self) -> None:
        """Stop writing marks: this answer cannot be resumed."""
        self._is_marked = False

    async def wait_for_first(self) -> None:
        """Wait for the first output of this engine, and keep it in the stream.

        Raises: as iteration, after closing the stream.
        """
        try:
            self._ahead.append(await self._take())
            if self.is_resumed:
                self._ahead.append(await self._take())
        except BaseException:
            await self.aclose()
            raise

    async def collect(self) -> Mapping[int, Sequence[RequestOutput]]:
        """Return all outputs by choice, and close the choices.

        Raises: as iteration; partial outputs are dropped.
        """
        outputs: defaultdict[int, list[RequestOutput]] = defaultdict(list)
        try:
            async for index, output in self:
                outputs[index].append(output)
        finally:
            await self.aclose()
        return outputs

    async def aclose(self) -> None:
        """Abort the unfinished choices, with the cause of the failure, or else because the client has left."""
        for pump in self._pumps:
            pump.cancel()
        # First, before anything slow is awaited: even a cancelled close then aborts every request.
        for stream in self._streams:
            await stream.aclose(self._closed_for)
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _take(self) -> tuple[int, RequestOutput]:
        try:
            index, output = (await self._arrived.get()) if self._pumps else (0, await anext(self._streams[0]))
        except (LorasrvError, AdapterError) as error:
            index, output = 0, error
        if isinstance(output, RequestOutput) and output.finish_reason is FinishReason.ERROR:
            # The same request would fail again: tell clients not to retry.
            never = {"x-should-retry": "false"}
            output = ApiError(500, output.error or "the generation failed", code="generation_failed", headers=never)
        if isinstance(output, Exception):
            self._closed_for = cause_of(output)
            raise self._named(output)
        self._num_unfinished -= output.finished
        self._on_arrived(index, output)
        return index, output

    def _on_arrived(self, index: int, output: RequestOutput) -> None:
        if self.first_token_s is None and output.num_generated_tokens:
            self.first_token_s = time.monotonic()
        self.latest[index] = output

    def _on_taken(self, output: RequestOutput) -> None:
        self.num_taken += 1
        if self._is_marked and not self.is_repeated:
            self._unmarked += output.token_ids

    async def _pump(self, index: int, stream: OutputStream) -> None:
        try:
            finished = False
            while not finished:
                output = await anext(stream)
                finished = output.finished
                await self._arrived.put((index, output))
        except Exception as error:
            await self._arrived.put((index, error))
