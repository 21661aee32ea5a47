"""Pool map: the pool's pages as an operator sees them, free or in use."""

from collections.abc import Iterable
from dataclasses import dataclass

from adapter_store.quota import ANONYMOUS
from adapter_store.spec import AdapterKey
from lorasrv.memory.adapter_manager import AdapterState
from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.outputs import RequestId
from lorasrv.scheduler.scheduler import Scheduler
from sgmv_kernels.formats.adapter_panels import Run

_STATE_NAMES = {AdapterState.RESIDENT: "ready", AdapterState.ON_DISK: "waiting"}
"""Names that differ from the enum's: a reserved adapter that is on disk waits for room."""


@dataclass(frozen=True, slots=True)
class RequestPages:
    """Describe a running request's keys and values."""

    request_id: RequestId
    adapter: AdapterKey | None
    pages: int
    # How many of the pages are also in other tables or in the prefix cache.
    shared: int
    page_ids: tuple[int, ...] = ()
    # Principal of the API key that the request belongs to.
    principal: str = ANONYMOUS


@dataclass(frozen=True, slots=True)
class AdapterPages:
    """Describe an adapter with pages."""

    key: AdapterKey
    # Ready or copying.
    state: str
    pages: int
    runs: tuple[Run, ...]
    bytes_used: int
    bytes_held: int
    # Running requests that use it.
    requests: int
    pinned: bool


@dataclass(frozen=True, slots=True)
class ReservedAdapter:
    """Describe an adapter that is pinned or warmed."""

    key: AdapterKey
    pinned: bool
    # Ready, copying, on host, loading or waiting (for room).
    state: str


@dataclass(frozen=True, slots=True)
class PoolMap:
    """Describe the pool between two steps. Free, KV, prefix and adapter pages add up to the total."""

    pages_total: int
    pages_free: int
    pages_kv: int
    pages_prefix: int
    pages_adapters: int
    page_tokens: int
    block_bytes: int
    free_runs: int
    longest_free_run: int
    moved_pages: int
    requests: tuple[RequestPages, ...]
    adapters: tuple[AdapterPages, ...]
    swap_bytes: int
    promised: tuple[ReservedAdapter, ...] = ()
    # Pages that only the prefix cache holds.
    prefix_page_ids: tuple[int, ...] = ()


def runs_of(page_ids: Iterable[int]) -> list[Run]:
    """Return the pages in order as (first, count) runs of neighbours."""
    runs: list[Run] = []
    for page in sorted(page_ids):
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


def describe_pool(memory: MemoryManager, scheduler: Scheduler) -> PoolMap:
    """Return the current map of the pool."""
    fragmentation = memory.adapter_pool.fragmentation
    return PoolMap(
        pages_total=memory.layout.num_pages,
        pages_free=memory.num_free,
        pages_kv=memory.num_kv_pages,
        pages_prefix=memory.num_unused_prefix_pages,
        pages_adapters=memory.adapters.num_pages,
        page_tokens=memory.layout.page_size,
        block_bytes=memory.layout.block_bytes,
        free_runs=fragmentation.free_runs,
        longest_free_run=fragmentation.longest_free_run,
        moved_pages=memory.evictor.num_moved_pages,
        requests=_requests(memory, scheduler),
        adapters=_adapters(memory),
        promised=tuple(
            ReservedAdapter(key, pinned, _state(memory, key)) for key, pinned in memory.adapter_manager.reservations()
        ),
        swap_bytes=memory.swap.nbytes,
        prefix_page_ids=tuple(memory.prefixes.unused()) if memory.prefixes is not None else (),
    )


def _state(memory: MemoryManager, key: AdapterKey) -> str:
    state = memory.adapter_manager.state(key)
    return _STATE_NAMES.get(state, state.value)


def _requests(memory: MemoryManager, scheduler: Scheduler) -> tuple[RequestPages, ...]:
    requests = {request.request_id: request for request in (*scheduler.requests(), *scheduler.leaving())}
    return tuple(
        RequestPages(
            request_id=rid,
            adapter=requests[rid].adapter_key,
            pages=len(pages),
            shared=sum(memory.kv_pool.refcount(page) > 1 for page in pages),
            principal=requests[rid].message.principal,
            page_ids=pages,
        )
        for rid, pages in memory.kv.holders().items()
    )


def _adapters(memory: MemoryManager) -> tuple[AdapterPages, ...]:
    return tuple(
        AdapterPages(
            key=key,
            state=_state(memory, key),
            pages=placed.num_pages,
            runs=placed.runs,
            bytes_used=placed.layout.nbytes,
            bytes_held=placed.num_pages * memory.layout.block_bytes,
            requests=pins,
            pinned=memory.adapter_manager.is_pinned(key),
        )
        for key, placed, pins in memory.adapters.placements()
    )
