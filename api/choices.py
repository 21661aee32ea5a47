"""Several answers to one prompt as one stream: each output with the index of its choice, in the order they come."""

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from api.errors import ApiError
from lorasrv.request import FinishReason, RequestOutput


class OutputStream(Protocol):
    """One of what `AsyncEngine.add_choices` returns: outputs, the last of which is finished."""

    async def __anext__(self) -> RequestOutput: ...

    async def aclose(self) -> None: ...


class Choices:
    """The outputs of all streams of one request. Ends when the last choice has ended; one that fails fails them all.

    A task for each stream waits for its next output, and then until somebody has room for it: for a client that reads
    slowly little is kept here. Must be closed, also when it has ended.

    Raises (from iteration):
        LorasrvError, ApiError: a choice has failed; what came before is no answer.
    """

    def __init__(self, streams: Sequence[OutputStream]) -> None:
        self.latest: dict[int, RequestOutput] = {}
        self.first_token_s: float | None = None
        self._streams = streams
        self._num_unfinished = len(streams)
        self._ahead: tuple[int, RequestOutput] | None = None
        self._arrived: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(len(streams))
        self._pumps = [asyncio.create_task(self._pump(*numbered)) for numbered in enumerate(streams)]

    def __aiter__(self) -> "Choices":
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if self._ahead is not None:
            taken, self._ahead = self._ahead, None
            return taken
        if not self._num_unfinished:
            raise StopAsyncIteration
        return await self._take()

    async def wait_for_first(self) -> None:
        """Until something has come, which stays in the stream. Raises: as iteration."""
        self._ahead = await self._take()

    async def aclose(self) -> None:
        """End the choices that have not ended."""
        for pump in self._pumps:
            pump.cancel()
        # Before anything is awaited that takes time: whoever is cancelled meanwhile has still ended every request.
        for stream in self._streams:
            await stream.aclose()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _take(self) -> tuple[int, RequestOutput]:
        index, output = await self._arrived.get()
        if isinstance(output, Exception):
            raise output
        if output.finish_reason is FinishReason.ERROR:
            raise ApiError(500, output.error or "the generation failed", code="generation_failed")
        if self.first_token_s is None and output.num_generated_tokens:
            self.first_token_s = time.monotonic()
        self.latest[index] = output
        self._num_unfinished -= output.finished
        return index, output

    async def _pump(self, index: int, stream: OutputStream) -> None:
        try:
            finished = False
            while not finished:
                output = await anext(stream)
                finished = output.finished
                await self._arrived.put((index, output))
        except Exception as error:
            await self._arrived.put((index, error))
