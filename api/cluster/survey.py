"""Ask the replicas now and then what they are and how fast; nothing that a request needs waits for it."""

import asyncio
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from api.cluster.chooser import Chooser, ReplicaAddress
from api.cluster.edge_stats import EdgeStats
from api.cluster.upstream import Broken, Unreachable, UpstreamRequest, Upstreams
from api.replication.headers import REPLICA
from lorasrv.placement.speed import speed_weights
from lorasrv.placement.work import WorkRates

PERIOD_S = 2.0
ANSWER_S = 2.0


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """Hold what a replica said of itself."""

    model: str
    rates: WorkRates
    # Requests that run or wait.
    requests: int
    # Adapters in its pool.
    adapters: int


class Survey:
    """Keep the newest figures of the replicas.

    Args:
        secret: the cluster's, without which replicas say nothing.
    """

    def __init__(self, chooser: Chooser, upstreams: Upstreams, stats: EdgeStats, secret: str) -> None:
        self._chooser, self._upstreams, self._stats = chooser, upstreams, stats
        self._secret = f"Bearer {secret}".encode()
        self.figures: Mapping[str, ReplicaFigures] = {}

    @property
    def base_names(self) -> Collection[str]:
        """Return what the base is called."""
        return {one.model for one in self.figures.values()}

    async def run(self) -> None:
        """Ask again and again, until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(PERIOD_S)

    async def refresh(self) -> None:
        """Ask all replicas once; the figures of one that does not answer are forgotten."""
        replicas = self._chooser.replicas()
        found = await asyncio.gather(*map(self._ask, replicas))
        self.figures = {one.id: said for one, said in zip(replicas, found, strict=True) if said is not None}
        rates = {name: one.rates for name, one in self.figures.items()}
        if rates:
            self._stats.estimator.rates = WorkRates(
                median(one.prompt_token_s for one in rates.values()),
                median(one.answer_token_s for one in rates.values()),
            )
        self._chooser.weigh(speed_weights(rates))

    def _question(self, replica: ReplicaAddress) -> UpstreamRequest:
        # A replica without keys answers to its own address alone.
        host = urlsplit(replica.url).netloc.encode()
        return UpstreamRequest("GET", REPLICA.encode(), [(b"host", host), (b"authorization", self._secret)])

    async def _ask(self, replica: ReplicaAddress) -> ReplicaFigures | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                status, body = await self._upstreams.fetch(replica.url, self._question(replica))
            return _figures(json.loads(body)) if status == 200 else None
        except (Unreachable, Broken, TimeoutError, ValueError, KeyError, TypeError):
            return None


def _figures(said: Mapping[str, Any]) -> ReplicaFigures:
    return ReplicaFigures(
        said["model"], WorkRates.of_steps(said["step_costs"]), int(said["requests"]), int(said["adapters"])
    )
