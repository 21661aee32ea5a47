"""Keep the list of replicas as Ray Serve has them, and choose among them by the placement.

No request passes through Ray's router: its `choose_replica` costs a call to the replica for each, knows no second
choice once an answer fails, and waits where no replica is ready. One call to all replicas now and then brings their
addresses instead, at which each says what it has to do (`survey.py`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from api.cluster.chooser import ReplicaAddress, StaticChooser
from lorasrv.placement.placement import Placement

_LOG = logging.getLogger(__name__)
PERIOD_S = 0.5
"""Time between two looks: how late a new replica is noticed. One that is gone is noticed by the next request for it."""


class ReplicaWatch(StaticChooser):
    """Choose among the replicas that `look` returns.

    Args:
        look: returns all replicas that run, and an error for each that does not answer.
        placement: of which only this chooser sets the replicas.
    """

    def __init__(
        self, look: Callable[[], Awaitable[Sequence[ReplicaAddress | BaseException]]], placement: Placement
    ) -> None:
        self._look = look
        # Set since a replica was ready for the first time.
        self.was_ready = asyncio.Event()
        super().__init__((), placement)

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception as error:
                # A replica died meanwhile, or all of Ray's own did: what is known goes on serving.
                _LOG.debug("replicas do not answer: %s", error)
            await asyncio.sleep(PERIOD_S)

    async def refresh(self) -> None:
        """Look once. While some do not answer, none is removed: which of them they are is not known.

        Raises:
            Exception: whatever the look raises; nothing has changed.
        """
        said = await self._look()
        addresses = {one.id: one for one in said if isinstance(one, ReplicaAddress)}
        if len(addresses) < len(said):
            addresses = {one.id: one for one in self.replicas()} | addresses
        self.set_addresses([addresses[name] for name in sorted(addresses)])

    def set_addresses(self, addresses: Sequence[ReplicaAddress]) -> None:
        super().set_addresses(addresses)
        if any(address.is_ready for address in addresses):
            self.was_ready.set()
