"""Store and host cache behind one door: an adapter's layout, and its packed weights from the nearest tier."""

import threading
from collections.abc import Callable

import torch
from cachetools import LRUCache

from adapter_store.host_cache import HostCache, HostCacheStats
from adapter_store.spec import AdapterKey
from adapter_store.storage.refcounts import ContentHold
from adapter_store.store import AdapterStore
from lorasrv.models.lora_sites import adapter_layout
from lorasrv.models.spec import ModelSpec
from lorasrv.worker.adapter_packing import PackedAdapter, pack_adapter
from sgmv_kernels.formats.adapter_panels import LAYOUT_VERSION, AdapterLayout

NUM_CACHED_LAYOUTS = 1024
NUM_KINDS = 64
"""Layouts that differ. Thousands of adapters have the same ranks: they share one, which is tens of KB."""


class HostAdapterStore:
    """Called from loader threads, the engine's and the event loop's workers at once."""

    def __init__(
        self, store: AdapterStore, host_cache: HostCache[PackedAdapter], spec: ModelSpec, dtype: torch.dtype
    ) -> None:
        self._store = store
        self._host_cache = host_cache
        self._spec = spec
        self._dtype = dtype
        self._layouts: LRUCache[AdapterKey, AdapterLayout] = LRUCache(NUM_CACHED_LAYOUTS)
        self._kinds: LRUCache[AdapterLayout, AdapterLayout] = LRUCache(NUM_KINDS)
        self._lock = threading.Lock()

    @property
    def max_host_bytes(self) -> int:
        return self._host_cache.max_bytes

    def host_stats(self) -> HostCacheStats:
        return self._host_cache.stats()

    def hold(self, key: AdapterKey) -> ContentHold:
        """Keep an adapter in the store while the returned object lives. Raises: AdapterNotFound, AdapterCorrupt."""
        return self._store.hold(key)

    def layout(self, key: AdapterKey) -> AdapterLayout:
        """How an adapter lies in pages; known from its ranks, without reading its weights. At first it may wait for a
        disk. Raises: AdapterError."""
        with self._lock:
            known = self._layouts.get(key)
        if known is None:
            known = adapter_layout(self._spec, self._store.spec(key), self._dtype.itemsize)
            with self._lock:
                known = self._layouts[key] = self._kinds.setdefault(known, known)
        return known

    def knows_layout(self, key: AdapterKey) -> bool:
        """Whether `layout` waits for no disk."""
        with self._lock:
            return key in self._layouts

    def is_on_host(self, key: AdapterKey) -> bool:
        """Whether the packed adapter is in host memory; never waits for a disk."""
        return self._cache_key(key) in self._host_cache

    def fetch_pinned(
        self, key: AdapterKey, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[PackedAdapter, bool]:
        """The packed adapter, kept in host memory until `unpin`, and whether it had to be read from disk.

        Raises:
            AdapterError: it is not in the store any more, or damaged.
            LoadCancelled: `should_stop` said so.
            OSError: the disk failed.
        """
        cached = self._host_cache.get_pinned(self._cache_key(key))
        if cached is not None:
            return cached, False
        weights = self._store.load(key, should_stop)
        packed = pack_adapter(self._spec, self.layout(key), weights, self._dtype)
        return self._host_cache.put_pinned(self._cache_key(key), packed, packed.nbytes), True

    def pinned(self, key: AdapterKey) -> PackedAdapter:
        """Return the packed adapter that `fetch_pinned` has pinned."""
        return self._host_cache.pinned(self._cache_key(key))

    def unpin(self, key: AdapterKey) -> None:
        """Undo one `fetch_pinned`."""
        self._host_cache.unpin(self._cache_key(key))

    def _cache_key(self, key: AdapterKey) -> tuple[AdapterKey, int, str]:
        return (key, LAYOUT_VERSION, str(self._dtype))
