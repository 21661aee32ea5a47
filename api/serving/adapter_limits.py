"""Limits of adapters on their way from the store, which keeps plain numbers, to the engine, which obeys them."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from adapter_store.errors import StoreUnusable
from adapter_store.store import AdapterStore
from lorasrv.config import Limits
from lorasrv.errors import InvalidLimits

if TYPE_CHECKING:
    from lorasrv.engine.async_engine import AsyncEngine


class AdapterLimits:
    """Has the engine hold each id to what the store says of it; what it does not say is as for every adapter."""

    def __init__(self, engine: "AsyncEngine", store: AdapterStore, defaults: Limits) -> None:
        self._engine = engine
        self._store = store
        self._defaults = defaults

    def check(self) -> None:
        """Raises: StoreUnusable: it keeps limits that this server does not understand, so it could not keep to them."""
        for record in self._store.list_adapters():
            try:
                self._merged(record.limits)
            except (InvalidLimits, TypeError) as error:
                raise StoreUnusable(f"the store keeps limits of {record.adapter_id!r} that are none: {error}") from None

    async def tell_all(self) -> None:
        """For a start, before the first request. Raises: EngineDead."""
        limited = [record.adapter_id for record in self._store.list_adapters() if record.limits]
        await asyncio.gather(*map(self.tell, limited))

    async def tell(self, adapter_id: str) -> None:
        """Pass on what the store says now of an id, which may be gone.

        Raises: EngineDead.
        """
        # No await between reading and asking: of two changes, whichever is passed on last has seen both.
        await self._engine.set_limits(adapter_id, self._merged(self._store.limits(adapter_id)))

    def _merged(self, own: Mapping[str, Any]) -> Limits | None:
        """None: nothing of its own."""
        return replace(self._defaults, **own) if own else None
