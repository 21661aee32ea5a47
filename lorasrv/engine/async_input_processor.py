"""Async input processor: requests are processed beside the event loop.

A layout that is not known yet is read from a file's header, which may be slow or never return. These reads have their
own threads, so that requests for other adapters do not wait for them.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial

from adapter_store.spec import AdapterKey
from lorasrv.engine.input_processor import MAX_TIMEOUT_S, InputProcessor
from lorasrv.errors import RequestTimeout
from lorasrv.outputs import RequestId
from lorasrv.request import NO_OPTIONS, EngineCoreRequest, RequestOptions
from lorasrv.sampling_params import SamplingParams
from lorasrv.worker.adapter_source import HostAdapterStore
from lorasrv.worker.disk_threads import DISK, DiskReadStats, DiskThreads
from sgmv_kernels.formats.adapter_panels import AdapterLayout

NUM_READERS = 8
LEAST_S = 1e-3
"""Shortest time left to a request after processing; the engine reports the timeout then."""


class AsyncInputProcessor:
    """Call an input processor in threads. Methods belong to the event loop's thread.

    Args:
        processor: does the work.
        source: the processor's stored adapters.
        queue_timeout_s: the server's bound on the time until the first step; None sets none.
        load_timeout_s: longest time for reading a header; None sets none.
    """

    def __init__(
        self,
        processor: InputProcessor,
        source: HostAdapterStore | None,
        queue_timeout_s: float | None,
        load_timeout_s: float | None,
    ) -> None:
        self.processor = processor
        self._source = source
        self._queue_timeout_s = queue_timeout_s
        # Starts threads on first use.
        self._readers = DiskThreads(
            NUM_READERS, "lorasrv-header", load_timeout_s, place=DISK if source is None else source.place
        )

    async def process_choices(
        self,
        request_ids: Sequence[RequestId],
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        options: RequestOptions = NO_OPTIONS,
    ) -> list[EngineCoreRequest]:
        """Return the messages of several answers to one prompt.

        Raises:
            RequestTimeout: the adapter's header was not read within the request's time.
            AdapterLoadTimeout: the disk did not return the header in time.
            LorasrvError, AdapterError: as `InputProcessor.process`.
        """
        adapter = options.adapter_key
        work = partial(self.processor.process_choices, request_ids, prompt, sampling, options)
        if adapter is None or self._source is None or self._source.knows_layout(adapter):
            return await asyncio.to_thread(work)
        reading = asyncio.wrap_future(self._readers.submit(adapter, work))
        return await self._in_time(reading, options.timeout_s)

    async def layout(self, adapter: AdapterKey) -> AdapterLayout:
        """Return how an adapter lies in the pool.

        Raises:
            AdapterLoadTimeout: the disk did not return the header in time.
            InvalidRequest, AdapterError: as `InputProcessor.layout`.
        """
        return await asyncio.wrap_future(self._readers.submit(adapter, partial(self.processor.layout, adapter)))

    def read_stats(self) -> DiskReadStats:
        """Return the counts of abandoned header reads."""
        return self._readers.stats()

    def close(self) -> None:
        """Accept no more requests; do not wait for header reads in progress."""
        self._readers.close(wait_s=0.0)

    async def _in_time(
        self, reading: Awaitable[list[EngineCoreRequest]], timeout_s: float | None
    ) -> list[EngineCoreRequest]:
        """Return the messages with their remaining time as timeout. The processor refuses a timeout out of range."""
        own_s = timeout_s if timeout_s is not None and 0 < timeout_s <= MAX_TIMEOUT_S else None
        limits = (("timeout_s,", own_s), ("the server's queue timeout of", self._queue_timeout_s))
        bounds = [(seconds, name) for name, seconds in limits if seconds is not None]
        most_s, name = min(bounds, default=(None, ""))
        began_s = time.monotonic()
        try:
            requests = await asyncio.wait_for(reading, most_s)
        except TimeoutError:
            raise RequestTimeout(f"reading the adapter's header took longer than {name} {most_s:g} s") from None
        if own_s is None:
            return requests
        left_s = max(LEAST_S, own_s - (time.monotonic() - began_s))
        return [replace(request, timeout_s=left_s) for request in requests]
