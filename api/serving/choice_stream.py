"""Merge the output streams of several choices into one, in order of arrival."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from api.errors import ApiError
from lorasrv.outputs import FinishReason, OutputStream, RequestOutput


class ChoiceStream:
    """Iterate over (choice index, output), with `width` choices per prompt, until the last choice ends.

    A choice that fails fails all of them. With `unanswered`, outputs contain only the prompt, as if nothing was
    generated.

    A single stream is read as it is. Of several, each has a task that waits for its next output, and then until it is
    taken: for a slow client little is buffered. Must be closed, also at the end.

    Raises (from iteration):
        LorasrvError, AdapterError, ApiError: a choice failed; earlier outputs are not an answer.
    """

    def __init__(self, streams: Sequence[OutputStream], width: int | None = None, *, unanswered: bool = False) -> None:
        self.width = width or len(streams)
        self._unanswered = unanswered
        self.latest: dict[int, RequestOutput] = {}
        self.first_token_s: float | None = None
        self._streams = streams
        self._num_unfinished = len(streams)
        self._ahead: tuple[int, RequestOutput] | None = None
        self._arrived: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(len(streams))
        self._pumps = [
            asyncio.create_task(self._pump(*numbered)) for numbered in enumerate(streams) if len(streams) > 1
        ]

    def first_outputs(self) -> list[RequestOutput]:
        """Return, for each prompt, the latest output of its first choice that has any."""
        indices = {index // self.width: index for index in sorted(self.latest, reverse=True)}
        return [self.latest[indices[prompt]] for prompt in sorted(indices)]

    def __aiter__(self) -> "ChoiceStream":
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        if self._ahead is not None:
            taken, self._ahead = self._ahead, None
            return taken
        if not self._num_unfinished:
            raise StopAsyncIteration
        return await self._take()

    async def wait_for_first(self) -> None:
        """Wait for the first output, which stays in the stream.

        Raises: as iteration, after closing the stream.
        """
        try:
            self._ahead = await self._take()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Abort the unfinished choices."""
        for pump in self._pumps:
            pump.cancel()
        # Before anything slow is awaited, so that a cancelled close has still aborted every request.
        for stream in self._streams:
            await stream.aclose()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _take(self) -> tuple[int, RequestOutput]:
        index, output = (await self._arrived.get()) if self._pumps else (0, await anext(self._streams[0]))
        if isinstance(output, Exception):
            raise output
        if output.finish_reason is FinishReason.ERROR:
            # The same request would fail again: tell clients not to retry.
            never = {"x-should-retry": "false"}
            raise ApiError(500, output.error or "the generation failed", code="generation_failed", headers=never)
        if self._unanswered:
            output = _without_answer(output)
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


def _without_answer(output: RequestOutput) -> RequestOutput:
    """Remove the answer: the engine generates at least one token, which was not requested."""
    reason = FinishReason.LENGTH if output.finished else None
    return replace(
        output,
        text="",
        token_ids=(),
        num_generated_tokens=0,
        finish_reason=reason,
        stop_reason=None,
        logprobs=(),
        text_offsets=(),
    )
