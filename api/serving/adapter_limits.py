"""Pass limits of adapters from the store, which keeps plain numbers, to the engine, which enforces them."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from adapter_store.errors import StoreUnusable
from adapter_store.store import AdapterStore
from api.replication.share_holder import ShareHolder
from lorasrv.config import Limits
from lorasrv.errors import InvalidLimits


class LimitingEngine(Protocol):
    """Declare the engine's interface for limits; `AsyncEngine` implements it."""

    async def set_limits(self, adapter_id: str, limits: Limits | None) -> None: ...


class AdapterLimits:
    """Apply the store's limits of each id in the engine; unset limits get the server's defaults.

    Args:
        shares: told which adapters have their own limits.
    """

    def __init__(self, engine: LimitingEngine, store: AdapterStore, defaults: Limits, shares: ShareHolder) -> None:
        self._engine = engine
        self.shares = shares
        self._store = store
        self._defaults = defaults

    def check(self) -> None:
        """Check all stored limits.

        Raises:
            StoreUnusable: a stored limit is unknown to this server, so it could not be enforced.
        """
        for record in self._store.list_adapters():
            try:
                self._merged(record.limits)
            except (InvalidLimits, TypeError) as error:
                raise StoreUnusable(
                    f"store {self._store.root} keeps limits of {record.adapter_id!r} that are invalid: {error}"
                ) from None

    async def apply_all(self) -> None:
        """Apply all limits at the start, before the first request.

        Raises: EngineDead.
        """
        limited = [record.adapter_id for record in self._store.list_adapters() if record.limits]
        await asyncio.gather(*map(self.apply, limited))

    async def apply(self, adapter_id: str) -> None:
        """Apply the current limits of an id, which may be deleted.

        Raises: EngineDead.
        """
        # No await between reading and sending: of two changes, the one sent last includes both. The share is set first,
        # so that no request uses the whole limits, which all servers share.
        own = self._store.limits(adapter_id)
        limiting = self._engine.set_limits(adapter_id, self._merged(own))
        await asyncio.gather(self.shares.set_limited(adapter_id, own), limiting)

    def _merged(self, own: Mapping[str, Any]) -> Limits | None:
        """Return the id's limits merged with the defaults; None if it has none."""
        return replace(self._defaults, **own) if own else None
