"""Which requests have an adapter, from before they are admitted until their last choice has ended.

For whoever deletes it. Everything belongs to the event loop's thread. The engine knows contents only; here it is also
known by which id a request came, as another id may stand for the same content.
"""

import asyncio
from collections.abc import Collection
from typing import Protocol

from adapter_store.spec import AdapterKey
from lorasrv.errors import AdapterDeleted


class Breakable(Protocol):
    """One choice of a request; `RequestStream` is."""

    def break_off(self, error: Exception) -> None:
        """It is to end now, and its reader to get this."""


class AdapterUse:
    """One request on an adapter (`key` None: on the base), and its choices that have not ended."""

    def __init__(self, adapter_id: str, key: AdapterKey | None) -> None:
        self.adapter_id = adapter_id
        self.key = key
        self.choices: set[Breakable] = set()
        self.ended_by: Exception | None = None

    def check(self) -> None:
        """Raises: AdapterDeleted: it was ended before it was admitted."""
        if self.ended_by is not None:
            raise self.ended_by


class AdapterUses:
    """Every request that has not ended."""

    def __init__(self) -> None:
        self._uses: set[AdapterUse] = set()
        self._has_ended = asyncio.Event()

    def begin(self, adapter_id: str, key: AdapterKey | None) -> AdapterUse:
        """A request has come."""
        use = AdapterUse(adapter_id, key)
        self._uses.add(use)
        return use

    def leave(self, use: AdapterUse, choice: Breakable) -> None:
        """A choice has ended."""
        use.choices.discard(choice)
        if not use.choices:
            self.end(use)

    def end(self, use: AdapterUse) -> None:
        """All of it has ended, or it was never admitted."""
        self._uses.discard(use)
        has_ended, self._has_ended = self._has_ended, asyncio.Event()
        has_ended.set()

    async def until_unused(self, adapter_id: str, keys: Collection[AdapterKey], timeout_s: float) -> int:
        """Wait until no request by this id is on one of these contents, at most so long; returns how many are still."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._of(adapter_id, keys):
                    await self._has_ended.wait()
        except TimeoutError:
            pass
        return len(self._of(adapter_id, keys))

    def break_off(self, adapter_id: str, keys: Collection[AdapterKey]) -> int:
        """End those requests before the next step; returns how many. Their readers get AdapterDeleted."""
        doomed = self._of(adapter_id, keys)
        for use in doomed:
            use.ended_by = AdapterDeleted(f"adapter {adapter_id!r} was deleted, and this request ended with it")
            for choice in list(use.choices):
                choice.break_off(use.ended_by)
        return len(doomed)

    def _of(self, adapter_id: str, keys: Collection[AdapterKey]) -> list[AdapterUse]:
        return [use for use in self._uses if use.adapter_id == adapter_id and use.key in keys]
