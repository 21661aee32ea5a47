"""Utility calls: calls to the engine other than requests, about adapters, limits and the pool. Most are answered at
once; warming and pinning are answered when the adapter is resident."""

import time

from adapter_store.errors import AdapterError
from adapter_store.spec import AdapterKey
from lorasrv.engine.messages import (
    AdapterStatus,
    DescribePool,
    EndLease,
    ForgetAnswers,
    GetAdapterTier,
    ListResidents,
    OfferPages,
    PinAdapter,
    SetLimits,
    SetShare,
    UnpinAdapter,
    UtilityResult,
    WarmAdapter,
)
from lorasrv.engine.pool_map import describe_pool
from lorasrv.errors import InvalidRequest, LorasrvError
from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.outputs import AdapterTier
from lorasrv.scheduler.scheduler import WARM_GRACE_S, Scheduler
from sgmv_kernels.formats.adapter_panels import AdapterLayout

MAX_PINNED_SHARE = 0.5
"""Largest share of the adapter pool that pinned adapters may take."""

AnsweredAtOnce = (
    DescribePool
    | ListResidents
    | GetAdapterTier
    | UnpinAdapter
    | SetLimits
    | SetShare
    | ForgetAnswers
    | OfferPages
    | EndLease
)
Answerable = AnsweredAtOnce | WarmAdapter | PinAdapter


class UtilityCalls:
    """Answer calls under the numbers of their callers. For the engine's thread, between two steps."""

    def __init__(self, memory: MemoryManager, scheduler: Scheduler) -> None:
        self._memory, self._scheduler = memory, scheduler
        # Calls that wait for an adapter to become resident, with their start times.
        self._waiting: dict[int, tuple[AdapterKey, float]] = {}
        self._results: list[UtilityResult] = []

    def take_results(self) -> list[UtilityResult]:
        """Return the results since the last call."""
        results, self._results = self._results, []
        return results

    def complete(self, number: int, content: object) -> None:
        """Give a call its result, or the exception that refuses it."""
        self._results.append(UtilityResult(number, content))

    def cancel(self, number: int) -> None:
        """Drop a call whose caller does not wait any more."""
        self._waiting.pop(number, None)

    def call(self, number: int, request: Answerable) -> None:
        """Answer a call, at once or when its adapter is resident."""
        match request:
            case WarmAdapter():
                self._warm(number, request)
            case PinAdapter():
                self._pin(number, request)
            case _:
                self.complete(number, self._answer(request))

    def on_adapter_ready(self, key: AdapterKey, error: LorasrvError | AdapterError | None = None) -> None:
        """Note that an adapter is resident, or why it cannot be."""
        for number, (wanted, begun) in list(self._waiting.items()):
            if wanted == key:
                del self._waiting[number]
                took_ms = (time.monotonic() - begun) * 1e3
                self.complete(number, error or AdapterStatus(AdapterTier.RESIDENT, took_ms))

    def _answer(self, request: AnsweredAtOnce) -> object:
        memory, scheduler = self._memory, self._scheduler
        match request:
            case DescribePool():
                return describe_pool(memory, scheduler)
            case ListResidents():
                block = memory.layout.block_bytes
                is_resident, placements = memory.adapter_manager.is_resident, memory.adapters.placements()
                return [(key, placed.num_pages * block) for key, placed, _ in placements if is_resident(key)]
            case GetAdapterTier():
                return AdapterStatus(memory.adapter_manager.tier(request.key))
            case UnpinAdapter():
                memory.adapter_manager.unpin(request.key)
                return AdapterStatus(memory.adapter_manager.tier(request.key))
            case SetShare():
                return scheduler.quotas.set_share(request.adapter_id, request.share)
            case OfferPages():
                return memory.peer_pages.offer(request.digests)
            case SetLimits():
                scheduler.quotas.set_limits(request.adapter_id, request.limits)
            case ForgetAnswers():
                scheduler.forget_answers(request.adapter, request.salt)
            case EndLease():
                memory.peer_pages.end(request.lease_id)
        return None

    def _warm(self, number: int, request: WarmAdapter) -> None:
        until_s = self._memory.clock() + request.deadline_s + WARM_GRACE_S
        self._memory.adapter_manager.reserve(request.key, request.layout, until_s)
        self._complete_when_resident(number, request.key)

    def _pin(self, number: int, request: PinAdapter) -> None:
        manager = self._memory.adapter_manager
        error = None if manager.is_pinned(request.key) else self._why_not_pin(request.layout)
        if error is not None:
            self.complete(number, error)
            return
        manager.pin(request.key, request.layout)
        self._complete_when_resident(number, request.key)

    def _why_not_pin(self, layout: AdapterLayout) -> InvalidRequest | None:
        held, pages = self._memory.adapter_manager.num_pinned_pages(), self._memory.adapters.pages_for(layout)
        most = int(MAX_PINNED_SHARE * self._memory.adapter_pool.num_pages)
        if held + pages <= most:
            return None
        return InvalidRequest(
            f"pinned adapters may take {most} pages, half of the pool; {held} are pinned already and this one takes "
            f"{pages}; unpin another, or start the server with a larger --pool-bytes",
            param="pinned",
        )

    def _complete_when_resident(self, number: int, key: AdapterKey) -> None:
        if self._memory.adapter_manager.is_resident(key):
            self.complete(number, AdapterStatus(AdapterTier.RESIDENT))
        else:
            self._waiting[number] = (key, time.monotonic())
