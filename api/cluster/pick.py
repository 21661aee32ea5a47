"""Keep Ray Serve's list of replicas, and choose among them by the placement.

No request passes through Ray's router: its `choose_replica` costs a call to the replica for each request, offers no
second choice after a failure, and waits if no replica is ready. Instead, a periodic broadcast returns the replicas'
addresses; each replica is then asked for its load at its own address (`survey.py`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from api.cluster.chooser import ReplicaAddress, StaticChooser
from lorasrv.placement.placement import Placement

_LOG = logging.getLogger(__name__)
PERIOD_S = 0.5
"""Time between two broadcasts: how late a new replica is noticed. A lost one is noticed by the next request to it."""


class ReplicaWatch(StaticChooser):
    """Choose among the replicas that `look` returns.

    Args:
        look: returns all running replicas, and an error for each that does not answer.
        placement: used by this chooser only, which sets its replicas.
    """

    def __init__(
        self, look: Callable[[], Awaitable[Sequence[ReplicaAddress | BaseException]]], placement: Placement
    ) -> None:
        self._look = look
        # Set once a replica has been ready for the first time.
        self.was_ready = asyncio.Event()
        super().__init__((), placement)

    async def run(self) -> None:
        """Refresh the list periodically, until cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception as error:
                # A replica died meanwhile, or all of Ray's processes did: keep serving with the known replicas.
                _LOG.debug("replicas do not answer: %s", error)
            await asyncio.sleep(PERIOD_S)

    async def refresh(self) -> None:
        """Refresh the list. While some replicas do not answer, none is removed: errors do not say whose they are.

        Raises:
            Exception: whatever `look` raises; nothing has changed.
        """
        said = await self._look()
        addresses = {one.id: one for one in said if isinstance(one, ReplicaAddress)}
        if len(addresses) < len(said):
            addresses = {one.id: one for one in self.replicas()} | addresses
        self.set_addresses([addresses[name] for name in sorted(addresses)])

    def set_addresses(self, addresses: Sequence[ReplicaAddress]) -> None:
        super().set_addresses(addresses)
        if any(address.is_ready for address in self.replicas()):
            self.was_ready.set()
