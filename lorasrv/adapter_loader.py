"""Adapters from the store to host memory, packed on the way: inline for offline use, in threads for a server.

The engine submits and polls; it never waits. A load that fails is a result like any other, with the reason.
"""

import logging
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from adapter_store.errors import AdapterError
from adapter_store.host_cache import HostCache
from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.adapter_pack import PackedAdapter, pack_adapter
from lorasrv.base_shapes import adapter_layout
from lorasrv.models.spec import ModelSpec
from lorasrv.threads import compute_alone
from sgmv_kernels.layout import LAYOUT_VERSION, AdapterLayout

_LOG = logging.getLogger(__name__)
NUM_LOADER_THREADS = 2
NUM_CACHED_LAYOUTS = 1024


class AdapterSource:
    """Store and host cache behind one door. Called from loader threads and from the event loop's workers at once."""

    def __init__(
        self, store: AdapterStore, host_cache: HostCache[PackedAdapter], spec: ModelSpec, dtype: torch.dtype
    ) -> None:
        self._store = store
        self._host_cache = host_cache
        self._spec = spec
        self._dtype = dtype
        self.layout = lru_cache(maxsize=NUM_CACHED_LAYOUTS)(self._layout)

    @property
    def host_cache_bytes(self) -> int:
        return self._host_cache.stats().bytes_used

    def cached(self, key: AdapterKey) -> PackedAdapter | None:
        """The packed adapter if it is in host memory; never waits for a disk."""
        return self._host_cache.get(self._cache_key(key))

    def fetch(self, key: AdapterKey) -> PackedAdapter:
        """The packed adapter, from host memory if it is there.

        Raises:
            AdapterError: it is not in the store any more, or damaged.
            OSError: the disk failed.
        """
        cached = self.cached(key)
        if cached is not None:
            return cached
        packed = pack_adapter(self._spec, self.layout(key), self._store.load(key), self._dtype)
        if packed.nbytes <= self._host_cache.max_bytes:
            self._host_cache.put(self._cache_key(key), packed, packed.nbytes)
        return packed

    def _layout(self, key: AdapterKey) -> AdapterLayout:
        """How an adapter lies in pages; known from its ranks, without reading its weights."""
        return adapter_layout(self._spec, self._store.spec(key), self._dtype.itemsize)

    def _cache_key(self, key: AdapterKey) -> tuple[AdapterKey, int, str]:
        return (key, LAYOUT_VERSION, str(self._dtype))


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A finished load: the packed adapter, or why there is none."""

    key: AdapterKey
    packed: PackedAdapter | None
    error: str | None = None


class Loader(Protocol):
    """Brings adapters to host memory."""

    def submit(self, key: AdapterKey) -> None:
        """Begin a load. Its result comes from `poll`, once."""

    def poll(self) -> list[LoadResult]:
        """Loads that have finished since the last call; never waits."""

    def close(self) -> None:
        """Begin no more loads and forget the queued ones."""


class InlineLoader:
    """Loads at once, in the caller's thread."""

    def __init__(self, source: AdapterSource) -> None:
        self._source = source
        self._results: list[LoadResult] = []

    def submit(self, key: AdapterKey) -> None:
        self._results.append(_load(self._source, key))

    def poll(self) -> list[LoadResult]:
        results, self._results = self._results, []
        return results

    def close(self) -> None:
        self._results.clear()


class ThreadedLoader:
    """Loads in a few threads; calls `on_ready` (from them) whenever a result can be polled."""

    def __init__(self, source: AdapterSource, on_ready: Callable[[], None]) -> None:
        self._source = source
        self._on_ready = on_ready
        self._results: queue.SimpleQueue[LoadResult] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(NUM_LOADER_THREADS, "adapter-loader", initializer=compute_alone)

    def submit(self, key: AdapterKey) -> None:
        self._threads.submit(self._run, key)

    def poll(self) -> list[LoadResult]:
        return [self._results.get_nowait() for _ in range(self._results.qsize())]

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, key: AdapterKey) -> None:
        self._results.put(_load(self._source, key))
        self._on_ready()


def _load(source: AdapterSource, key: AdapterKey) -> LoadResult:
    try:
        return LoadResult(key, source.fetch(key))
    except AdapterError as error:
        return LoadResult(key, None, str(error))
    except OSError as error:
        _LOG.exception("reading adapter %s failed", key)
        return LoadResult(key, None, f"reading the adapter failed: {error.strerror}")
    except Exception:
        # A bad adapter must not take a loader thread and every later load with it; the log has the trace.
        _LOG.exception("loading adapter %s failed", key)
        return LoadResult(key, None, "loading the adapter failed; the server's log says why")
