"""Ask each replica periodically for its model, load and speed. No request waits for the answers.

Each replica is asked separately, at its own address, so that one that does not answer delays no other's figures.
"""

import asyncio
import json
import logging
import math
from collections.abc import Collection, Mapping
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from api.cluster.chooser import Chooser, ReplicaAddress, ReplicaFigures
from api.cluster.edge_stats import EdgeStats
from api.cluster.upstream import Broken, Unreachable, UpstreamRequest, Upstreams
from api.replication.headers import REPLICA
from lorasrv.placement.speed import speed_weights
from lorasrv.placement.work import WorkRates

_LOG = logging.getLogger(__name__)
PERIOD_S = 0.5
ANSWER_S = 2.0


class Survey:
    """Keep the newest figures of the replicas.

    Args:
        secret: the cluster's; replicas refuse to answer without it.
    """

    def __init__(self, chooser: Chooser, upstreams: Upstreams, stats: EdgeStats, secret: str) -> None:
        self._chooser, self._upstreams, self._stats = chooser, upstreams, stats
        self._secret = f"Bearer {secret}".encode()
        self.figures: dict[str, ReplicaFigures] = {}
        # Ids of replicas that are being asked.
        self._asked: set[str] = set()

    @property
    def base_names(self) -> Collection[str]:
        """Return the base model's names."""
        return {one.model for one in self.figures.values()}

    async def run(self) -> None:
        """Ask periodically, until cancelled."""
        async with asyncio.TaskGroup() as asking:
            while True:
                replicas = {one.id: one for one in self._chooser.replicas()}
                self.figures = {name: said for name, said in self.figures.items() if name in replicas}
                for name in replicas.keys() - self._asked:
                    self._asked.add(name)
                    asking.create_task(self._hear(replicas[name]))
                await asyncio.sleep(PERIOD_S)
                self._weigh()

    async def _hear(self, replica: ReplicaAddress) -> None:
        """Ask a replica and keep its figures; if it gives none, forget its previous ones."""
        try:
            async with asyncio.timeout(ANSWER_S):
                status, body = await self._upstreams.fetch(replica.url, self._question(replica))
            figures = _figures(json.loads(body)) if status == 200 else None
        except (Unreachable, Broken, TimeoutError):
            self.figures.pop(replica.id, None)
            if replica.id not in self._chooser.silent:
                _LOG.warning("replica %s at %s does not answer, so it is not ready", replica.id, replica.url)
                self._chooser.on_silence(replica.id)
            return
        except (ValueError, KeyError, TypeError):
            figures = None
        finally:
            self._asked.remove(replica.id)
        if replica.id in self._chooser.silent:
            _LOG.info("replica %s at %s answers again", replica.id, replica.url)
        if figures is None:
            self.figures.pop(replica.id, None)
            self._chooser.on_no_figures(replica.id)
        else:
            self.figures[replica.id] = figures
            self._chooser.on_figures(replica.id, figures)

    def _weigh(self) -> None:
        rates = {name: one.rates for name, one in self.figures.items()}
        if rates:
            self._stats.estimator.rates = WorkRates(
                median(one.prompt_token_s for one in rates.values()),
                median(one.answer_token_s for one in rates.values()),
            )
        self._chooser.weigh(speed_weights(rates))

    def _question(self, replica: ReplicaAddress) -> UpstreamRequest:
        # A replica without API keys accepts only its own address as Host.
        host = urlsplit(replica.url).netloc.encode()
        return UpstreamRequest("GET", REPLICA.encode(), [(b"host", host), (b"authorization", self._secret)])


def _figures(said: Mapping[str, Any]) -> ReplicaFigures:
    return ReplicaFigures(
        said["model"],
        WorkRates.of_steps({part: _finite(seconds) for part, seconds in dict(said["step_costs"]).items()}),
        is_ready=bool(said["is_ready"]),
        requests=int(_finite(said["requests"])),
        seconds_ahead=_finite(said["seconds_ahead"]),
        adapters=int(_finite(said["adapters"])),
    )


def _finite(said: Any) -> float:
    """Convert to float. Raises: TypeError, ValueError: not a finite number."""
    if not math.isfinite(number := float(said)):
        raise ValueError(f"{said} is not finite")
    return number
