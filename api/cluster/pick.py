"""Keep the list of replicas as Ray Serve has them, and choose among them by the placement.

No request passes through Ray's router: its `choose_replica` costs a call to the replica for each, knows no second
choice once an answer fails, and waits where no replica is ready. One call to all replicas now and then brings their
addresses and their work instead.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from api.cluster.chooser import ReplicaAddress, StaticChooser
from api.cluster.load import ReplicaStatus
from lorasrv.placement.placement import Ask, Placement, ReplicaReport

_LOG = logging.getLogger(__name__)
PERIOD_S = 0.5
"""Time between two looks: how late a new replica is noticed. One that is gone is noticed by the next request for it."""


class ReplicaWatch(StaticChooser):
    """Choose among the replicas that `look` returns.

    Args:
        look: returns the state of all replicas that run, and an error for each that does not answer.
        placement: of which only this chooser sets the replicas.
    """

    def __init__(
        self, look: Callable[[], Awaitable[Sequence[ReplicaStatus | BaseException]]], placement: Placement
    ) -> None:
        super().__init__((), placement)
        self._look = look
        # Set since a replica was ready for the first time.
        self.was_ready = asyncio.Event()
        self._sent: Counter[str] = Counter()

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
        seen = [one for one in said if isinstance(one, ReplicaStatus)]
        addresses = {one.address.id: one.address for one in seen}
        if len(seen) < len(said):
            addresses = {one.id: one for one in self.replicas()} | addresses
        self.set_addresses([addresses[name] for name in sorted(addresses)])
        if any(address.is_ready for address in addresses.values()):
            self.was_ready.set()
        for status in seen:
            # What this edge sent, the placement counts itself, and knows better.
            others = max(0, status.load.requests - self._sent[status.address.id])
            others_s = status.load.seconds_ahead * others / max(1, status.load.requests)
            for placement in (self._placement, self._prompts):
                placement.on_report(status.address.id, ReplicaReport(others_s))

    @contextmanager
    def sent_to(self, placement: Placement, chosen: str, ask: Ask) -> Iterator[ReplicaAddress]:
        with super().sent_to(placement, chosen, ask) as replica:
            self._sent[chosen] += 1
            try:
                yield replica
            finally:
                self._sent[chosen] -= 1
                if not self._sent[chosen]:
                    del self._sent[chosen]
