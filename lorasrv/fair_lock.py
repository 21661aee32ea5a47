"""Serialise work among API keys, with fair turns, so that a busy key delays only itself. For the event loop's
thread.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from adapter_store.quota import ANONYMOUS
from lorasrv.errors import EngineOverloaded


def most_of(bound: int, principal: str) -> int:
    """Return how much of a bound one key may use: half of it, or all of it without keys."""
    return bound if principal == ANONYMOUS else max(1, bound // 2)


class FairLock:
    """Lock with a queue per key: a key's waiters keep their order, and after its turn a key goes to the end.

    Args:
        what: plural noun for what waits, for messages.
        max_waiting: bound on waiters; half of it for one key.
    """

    def __init__(self, what: str, max_waiting: int) -> None:
        self._what, self._max_waiting = what, max_waiting
        self._is_taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def turn(self, principal: str) -> AsyncIterator[None]:
        """Hold the lock for the block.

        Raises:
            EngineOverloaded: too many waiters, in total or of this key.
        """
        if self._is_taken:
            await self._wait(principal)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, principal: str) -> None:
        most, waiting = most_of(self._max_waiting, principal), len(self._waiting.get(principal, ()))
        if waiting >= most or sum(map(len, self._waiting.values())) >= self._max_waiting:
            whose = "of this key " if waiting >= most and most < self._max_waiting else ""
            most = most if whose else self._max_waiting
            raise EngineOverloaded(f"{most} {self._what} {whose}wait for their turn; retry in 1 s", retry_after_s=1.0)
        turn = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(principal, deque())
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(principal, turn)
            else:
                # The turn was granted before the cancellation arrived.
                self._pass_on()
            raise

    def _forget(self, principal: str, turn: "asyncio.Future[None]") -> None:
        queue = self._waiting.get(principal)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[principal]

    def _pass_on(self) -> None:
        self._is_taken = False
        while self._waiting:
            principal = next(iter(self._waiting))
            queue = self._waiting.pop(principal)
            turn = queue.popleft()
            if queue:
                self._waiting[principal] = queue
            if not turn.done():
                # Set here, so that no newcomer takes the lock before the waiter's task runs.
                self._is_taken = True
                turn.set_result(None)
                return
