"""Ways to remove a safeguard, so that a test can show that the storm detects this. The list is in `test_storm.py`."""

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from adapter_keys import key_of

from adapter_store.errors import AdapterNotFound
from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.engine.core import EngineCore
from lorasrv.memory import kv_cache_manager, prefix_cache
from lorasrv.memory.adapter_cache import AdapterCache
from lorasrv.memory.adapter_manager import AdapterManager
from lorasrv.memory.page_pool import PagePool
from lorasrv.outputs import FinishReason, TokenLogprobs
from lorasrv.request import Request
from lorasrv.sampling.draft_verification import _Path
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.scheduler.step_planner import StepPlanner
from lorasrv.scheduler_output import CopyPages, PageOp, ScheduledRequest, SchedulerOutput, SwapIn
from lorasrv.worker import forward_batch as batch
from lorasrv.worker import model_runner
from lorasrv.worker.adapter_packing import PackedAdapter
from lorasrv.worker.adapter_source import HostAdapterStore
from lorasrv.worker.device_pool import DevicePool
from sgmv_kernels.formats.adapter_panels import PlacedAdapter
from sgmv_kernels.metadata.segments import Segments, build_segments


def _evict_pinned(patch: pytest.MonkeyPatch) -> None:
    def evict_lowest(self: AdapterManager, *_rest: object) -> bool:
        for key, _, pins in self.cache.placements():
            if self.is_resident(key):
                for _turn in range(pins):
                    self.cache.unpin(key)
                self.evict(key)
                return True
        return False

    patch.setattr(AdapterManager, "evict_lowest", evict_lowest)


def _share_a_page(patch: pytest.MonkeyPatch) -> None:
    """Make every tenth page that a request takes one that already has an owner."""
    allocate, count = PagePool.allocate_singles, itertools.count()

    def allocate_singles(self: PagePool, wanted: int) -> list[int] | None:
        pages = allocate(self, wanted)
        used = [page for page, held in enumerate(self._refcounts) if held and page not in (pages or ())]
        if pages and used and next(count) % 10 == 9:
            self.release(pages[-1:])
            self.share(used[:1])
            pages[-1] = used[0]
        return pages

    patch.setattr(PagePool, "allocate_singles", allocate_singles)


def _leak(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagePool, "release", lambda self, pages: None)


def _skip_recomputing(patch: pytest.MonkeyPatch) -> None:
    preempt = StepPlanner.preempt

    def keep(self: StepPlanner, request: Request) -> None:
        computed = request.num_computed_tokens
        preempt(self, request)
        request.num_computed_tokens = computed

    patch.setattr(StepPlanner, "preempt", keep)


def _remember_places(patch: pytest.MonkeyPatch) -> None:
    placed = AdapterCache.placed
    known: dict[AdapterKey, PlacedAdapter | None] = {}
    patch.setattr(AdapterCache, "placed", lambda self, key: known.setdefault(key, placed(self, key)))


def _fill_once(patch: pytest.MonkeyPatch) -> None:
    write, written = DevicePool.write_adapter, set()

    def write_adapter(self: DevicePool, packed: PackedAdapter, placed: PlacedAdapter) -> None:
        if id(packed) not in written:
            written.add(id(packed))
            write(self, packed, placed)

    patch.setattr(DevicePool, "write_adapter", write_adapter)


def _remember_segments(patch: pytest.MonkeyPatch) -> None:
    known: dict[int, Segments] = {}
    patch.setattr(batch, "build_segments", lambda rows: known.setdefault(len(rows), build_segments(rows)))


def _mix_up_rows(patch: pytest.MonkeyPatch) -> None:
    def in_order_of_arrival(step: SchedulerOutput, *rest: Any) -> batch.ForwardBatch:
        return replace(batch.build_batch(step, *rest), sampled=tuple(s for s in step.requests if s.samples))

    patch.setattr(model_runner, "build_batch", in_order_of_arrival)


def _cache_by_name(patch: pytest.MonkeyPatch) -> None:
    name_of = _names_of_keys()
    patch.setattr(HostAdapterStore, "_cache_key", lambda self, key: name_of(self._store, key))


def _load_by_name(patch: pytest.MonkeyPatch) -> None:
    content, name_of = AdapterStore._content, _names_of_keys()

    def what_it_means_now(self: AdapterStore, key: AdapterKey) -> Any:
        try:
            return content(self, key_of(self.resolve(name_of(self, key))))
        except AdapterNotFound:
            return content(self, key)

    patch.setattr(AdapterStore, "_content", what_it_means_now)


def _names_of_keys() -> Callable[[AdapterStore, AdapterKey], str]:
    """Return a function that returns a name that has, or had, a content."""
    known: dict[AdapterKey, str] = {}

    def name_of(store: AdapterStore, key: AdapterKey) -> str:
        if key not in known:
            known.update({key_of(v): record.adapter_id for record in store.list_adapters() for v in record.versions})
        return known.get(key, "")

    return name_of


def _end_twice(patch: pytest.MonkeyPatch) -> None:
    emit = Scheduler._emit

    def again(
        self: Scheduler, request: Request, new_tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> None:
        emit(self, request, new_tokens, logprobs)
        if request.finish_reason is FinishReason.ABORT:
            emit(self, request, (), ())

    patch.setattr(Scheduler, "_emit", again)


def _forget_the_others(patch: pytest.MonkeyPatch) -> None:
    release = PagePool.release

    def free_at_once(self: PagePool, pages: Iterable[int]) -> None:
        pages = list(pages)
        for page in pages:
            self._refcounts[page] = min(self._refcounts[page], 1)
        release(self, [page for page in pages if self._refcounts[page]])

    patch.setattr(PagePool, "release", free_at_once)


def _prefixes_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_cache, "root_hash", lambda adapter, salt, active_from=0: b"root")


def _prefixes_by_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix_cache, "page_hash", lambda parent, token_ids: hashlib.sha256(parent).digest())


def _lose_swapped_pages(patch: pytest.MonkeyPatch) -> None:
    _leave_out(patch, SwapIn)


def _move_without_copying(patch: pytest.MonkeyPatch) -> None:
    _leave_out(patch, CopyPages)


def _leave_out(patch: pytest.MonkeyPatch, kind: type[PageOp]) -> None:
    apply = DevicePool.apply
    patch.setattr(DevicePool, "apply", lambda self, ops: apply(self, [op for op in ops if not isinstance(op, kind)]))


def _stay_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kv_cache_manager.KVCacheManager, "move", lambda self, moves: None)


def _fill_before_arranging(patch: pytest.MonkeyPatch) -> None:
    arrange, give_orders = EngineCore._apply_page_ops, EngineCore._send_orders

    def orders_first(self: EngineCore, step: SchedulerOutput) -> SchedulerOutput:
        give_orders(self, step.orders)
        return arrange(self, step)

    patch.setattr(EngineCore, "_apply_page_ops", orders_first)
    patch.setattr(EngineCore, "_send_orders", lambda self, orders: None)


def _read_while_filling(patch: pytest.MonkeyPatch) -> None:
    place, write = AdapterManager.place, DevicePool.write_adapter

    def ready_at_once(self: AdapterManager, key: AdapterKey, *, keep_free: int = 0) -> PlacedAdapter | None:
        placed = place(self, key, keep_free=keep_free)
        if placed is not None:
            on_copied(self, key)
        return placed

    def slowly(self: DevicePool, packed: PackedAdapter, placed: PlacedAdapter) -> None:
        time.sleep(0.01)
        write(self, packed, placed)

    on_copied = AdapterManager.on_copied
    patch.setattr(AdapterManager, "place", ready_at_once)
    patch.setattr(AdapterManager, "on_copied", lambda self, key: None)
    patch.setattr(DevicePool, "write_adapter", slowly)


def _hold_nothing(patch: pytest.MonkeyPatch) -> None:
    fetch = HostAdapterStore.fetch_pinned

    def late(self: HostAdapterStore, *args: Any) -> Any:
        time.sleep(0.2)
        return fetch(self, *args)

    patch.setattr(HostAdapterStore, "fetch_pinned", late)
    patch.setattr(HostAdapterStore, "hold", lambda self, key: None)


def _accept_anything(patch: pytest.MonkeyPatch) -> None:
    goes_on = _Path.goes_on_with

    def blind(self: _Path, token: int | None) -> bool:
        drafts, at = self.scheduled.draft_token_ids, len(self.tokens)
        return goes_on(self, drafts[at] if at < len(drafts) else token)

    patch.setattr(_Path, "goes_on_with", blind)


def _keep_rejected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ScheduledRequest, "num_known_tokens", property(lambda scheduled: len(scheduled.token_ids)))


@dataclass(frozen=True)
class Guard:
    """A safeguard: how to remove it, and the storm that detects this."""

    take_away: Callable[[pytest.MonkeyPatch], None]
    threaded: bool = False
    preemption: str = "recompute"
    drafts: bool = False
    caught_by: type[Exception] | tuple[type[Exception], ...] = AssertionError


GUARDS: dict[str, Guard] = {
    "pinned adapters stay": Guard(_evict_pinned),
    "a page has one writer": Guard(_share_a_page),
    "pages come back": Guard(_leak),
    "shared pages have counts": Guard(_forget_the_others),
    "prefixes by adapter": Guard(_prefixes_for_all),
    "prefixes by tokens": Guard(_prefixes_by_place),
    "recomputed from the start": Guard(_skip_recomputing, caught_by=Exception),
    "swapped pages come back": Guard(_lose_swapped_pages, preemption="swap"),
    "pages are arranged first": Guard(_fill_before_arranging, threaded=True, preemption="swap"),
    "tables follow moves": Guard(_stay_behind),
    "what moves is copied": Guard(_move_without_copying),
    "what is being filled is not read": Guard(_read_while_filling, threaded=True),
    "placements are asked every step": Guard(_remember_places),
    "pages are filled at every return": Guard(_fill_once),
    "segments are built every step": Guard(_remember_segments),
    "tokens go to their own rows": Guard(_mix_up_rows),
    # Or two versions of a name share the pins of one host copy, and the second release finds none.
    "host copies by key": Guard(_cache_by_name, caught_by=(AssertionError, KeyError)),
    "loads by key": Guard(_load_by_name),
    "what is asked for stays stored": Guard(_hold_nothing, threaded=True),
    "one end for each request": Guard(_end_twice),
    "drafts are compared": Guard(_accept_anything, drafts=True),
    "rejected drafts are not computed": Guard(_keep_rejected, drafts=True),
}
