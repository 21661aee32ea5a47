"""Host adapter store: the layouts of adapters, and their packed weights from the host cache or the store."""

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from cachetools import LRUCache

from adapter_store.formats.weights import AdapterWeights, HeadArrays
from adapter_store.host_cache import HostCache, HostCacheStats
from adapter_store.spec import AdapterKey, AdapterSpec
from adapter_store.storage.refcounts import CompositionHold, ContentHold
from adapter_store.store import AdapterStore
from lorasrv.models.lora_sites import adapter_layout
from lorasrv.worker.adapter_packing import PackedAdapter, pack_adapter
from lorasrv.worker.adapter_rows import own_tokens
from lorasrv.worker.disk_threads import DISK
from lorasrv.worker.weights import ModelWeights
from sgmv_kernels.formats.adapter_panels import LAYOUT_VERSION, AdapterLayout

NUM_CACHED_LAYOUTS = 1024
NUM_KINDS = 64
"""Most distinct layouts kept. Thousands of adapters have the same ranks and share one layout of tens of KB."""


class _Facts(NamedTuple):
    """Hold what requests need to know of an adapter beside its layout; see the methods of `HostAdapterStore`."""

    num_draft_heads: int
    vocab_size: int
    invocation_tokens: tuple[int, ...]

    @classmethod
    def of(cls, spec: AdapterSpec) -> "_Facts":
        return cls(len(spec.heads), spec.vocab_size, spec.invocation_tokens)


LoadKernels = Callable[[AdapterLayout], None]
"""Loads the kernels that only adapters of this layout need."""


class HostAdapterStore:
    """Read adapters. Loader threads, the engine's thread and workers of the event loop may call it concurrently.

    Args:
        load_kernels: called in the loader's thread with the layout of every adapter that is read.
    """

    def __init__(
        self,
        store: AdapterStore,
        host_cache: HostCache[PackedAdapter],
        base: ModelWeights,
        dtype: torch.dtype,
        load_kernels: LoadKernels = lambda layout: None,
    ) -> None:
        self._store = store
        self._host_cache = host_cache
        self._base = base
        self._dtype = dtype
        self._load_kernels = load_kernels
        self._layouts: LRUCache[AdapterKey, AdapterLayout] = LRUCache(NUM_CACHED_LAYOUTS)
        self._facts: LRUCache[AdapterKey, _Facts] = LRUCache(NUM_CACHED_LAYOUTS)
        self._kinds: LRUCache[AdapterLayout, AdapterLayout] = LRUCache(NUM_KINDS)
        self._lock = threading.Lock()

    @property
    def place(self) -> str:
        """Return where adapters missing from the host cache are read, for messages."""
        registry = self._store.feed.follows
        return DISK if registry is None else f"the registry at {registry} or {DISK}"

    @property
    def max_host_bytes(self) -> int:
        """Return the size of the host cache."""
        return self._host_cache.max_bytes

    def host_stats(self) -> HostCacheStats:
        """Return the host cache's statistics."""
        return self._host_cache.stats()

    def hold(self, key: AdapterKey) -> ContentHold | CompositionHold:
        """Keep an adapter in the store while the returned object lives.

        Raises:
            AdapterNotFound, AdapterCorrupt: it cannot be held.
        """
        return self._store.hold(key)

    def terms(self, key: AdapterKey) -> tuple[tuple[AdapterKey, float], ...]:
        """Return the keys that are loaded for an adapter, with weights: its own, or those of the contents of a sum that
        is not stored. The first call may read the disk.

        Raises:
            NotComposable: the sum cannot be served.
            AdapterError: a content is not in the store any more, or damaged.
        """
        composition = self._store.compositions.find(key)
        if composition is None or composition.is_stored:
            return ((key, 1.0),)
        self._facts_of(key)
        return composition.terms

    def layout(self, key: AdapterKey) -> AdapterLayout:
        """Return how an adapter lies in pages, from its ranks and own rows. The first call may read the disk.

        Raises:
            AdapterError: the adapter is not in the store any more, or damaged.
        """
        return self._layout(key, None)

    def _layout(self, key: AdapterKey, weights: AdapterWeights | None) -> AdapterLayout:
        """Return a layout. For an adapter with rows of the vocabulary this needs the weights, which are read if
        None."""
        with self._lock:
            known = self._layouts.get(key)
        if known is None:
            spec = self._store.spec(key)
            known = self._layout_of(spec, weights or self._store.load(key) if spec.rows else None)
            with self._lock:
                self._facts[key] = _Facts.of(spec)
                known = self._layouts[key] = self._kinds.setdefault(known, known)
        return known

    def knows_layout(self, key: AdapterKey) -> bool:
        """Return whether `layout` needs no disk read for the adapter or for any term of a sum."""
        composition = self._store.compositions.find(key)
        terms = ((key, 1.0),) if composition is None else composition.terms
        with self._lock:
            return key in self._facts and all(term in self._layouts for term, _ in terms)

    def num_draft_heads(self, key: AdapterKey) -> int:
        """Return how many Medusa heads an adapter has. May read the disk, like `layout`."""
        return self._facts_of(key).num_draft_heads

    def vocab_size(self, key: AdapterKey) -> int:
        """Return how many tokens an adapter has; 0 if as many as the base. May read the disk, like `layout`."""
        return self._facts_of(key).vocab_size

    def invocation_tokens(self, key: AdapterKey) -> tuple[int, ...]:
        """Return the tokens after which an aLoRA acts; () for other adapters. May read the disk, like `layout`."""
        return self._facts_of(key).invocation_tokens

    def _facts_of(self, key: AdapterKey) -> "_Facts":
        with self._lock:
            known = self._facts.get(key)
        if known is None:
            known = _Facts.of(self._store.spec(key))
            with self._lock:
                self._facts[key] = known
        return known

    def draft_heads(self, key: AdapterKey) -> HeadArrays:
        """Read an adapter's Medusa heads.

        Raises:
            AdapterError: it is not in the store any more, or damaged.
            OSError: the disk failed.
        """
        return self._store.load(key).heads

    def is_on_host(self, key: AdapterKey) -> bool:
        """Return whether the packed adapter is in host memory; never reads the disk."""
        return self._cache_key(key) in self._host_cache

    def fetch_pinned(
        self, key: AdapterKey, should_stop: Callable[[], bool] = lambda: False
    ) -> tuple[PackedAdapter, bool]:
        """Return the packed adapter, kept in host memory until `unpin`, and whether it was read from disk.

        Raises:
            AdapterError: it is not in the store any more, or damaged.
            LoadCancelled: `should_stop` returned True.
            OSError: the disk failed.
        """
        cached = self._host_cache.get_pinned(self._cache_key(key))
        if cached is not None:
            return cached, False
        weights = self._store.load(key, should_stop)
        layout = self._layout(key, weights)
        self._load_kernels(layout)
        packed = self._pack(layout, weights)
        return self._host_cache.put_pinned(self._cache_key(key), packed, packed.nbytes), True

    def pinned(self, key: AdapterKey) -> PackedAdapter:
        """Return the packed adapter that `fetch_pinned` has pinned."""
        return self._host_cache.pinned(self._cache_key(key))

    def unpin(self, key: AdapterKey) -> None:
        """Undo one `fetch_pinned`."""
        self._host_cache.unpin(self._cache_key(key))

    def _layout_of(self, spec: AdapterSpec, weights: AdapterWeights | None) -> AdapterLayout:
        """Return a layout; `weights` must be given if the adapter has rows of the vocabulary."""
        tokens = None if weights is None else own_tokens(self._base, weights, self._dtype)
        return adapter_layout(self._base.spec, spec, self._dtype.itemsize, tokens)

    def _pack(self, layout: AdapterLayout, weights: AdapterWeights) -> PackedAdapter:
        return pack_adapter(self._base, layout, weights, self._dtype)

    def _cache_key(self, key: AdapterKey) -> tuple[AdapterKey, int, str]:
        return (key, LAYOUT_VERSION, str(self._dtype))
