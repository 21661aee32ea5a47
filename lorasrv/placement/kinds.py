"""Placements by name: the default `bounded`, and those that it is compared with."""

import math
from collections.abc import Iterable, Mapping, Sequence

from lorasrv.errors import ConfigError
from lorasrv.placement.placement import Demand, Placement, Replica, ReplicaAccount, SentRequest

FACTOR = 1.25
FREE_BELOW_S = 1.0


class Bounded(Placement):
    """Take the first replica of the key's order that is not full (consistent hashing with bounded loads, Mirrokni,
    Thorup and Zadimoghaddam 2018).

    A replica is full if this request would raise its load above `FACTOR` times the mean; below `FREE_BELOW_S` none is
    full. If all are full, the one with the least work is taken. So a hot adapter spreads over as many replicas as its
    load needs, always the same ones.
    """

    name = "bounded"

    def ranked(self, demand: Demand, ready: Sequence[ReplicaAccount]) -> Sequence[ReplicaAccount]:
        work_us = demand.work_s * 1e6
        ahead_us = {account: account.load + work_us / account.replica.weight for account in ready}
        mean_us = (sum(a.own_us + a.others_us for a in ready) + work_us) / sum(a.replica.weight for a in ready)
        most_us = max(FACTOR * mean_us, FREE_BELOW_S * 1e6)
        free = [account for account in self.by_affinity(demand, ready) if ahead_us[account] <= most_us]
        chosen = set(free)
        full = [account for account in ready if account not in chosen]
        return [*free, *sorted(full, key=lambda account: (ahead_us[account], self.rng.random()))]


class Least(Placement):
    """Take the replica with the least work ahead."""

    name = "least"

    def ranked(self, demand: Demand, ready: Sequence[ReplicaAccount]) -> Sequence[ReplicaAccount]:
        return self.by_load(ready)


class RandomReplica(Placement):
    """Take a random replica, with a probability in proportion to its weight."""

    name = "random"

    def ranked(self, demand: Demand, ready: Sequence[ReplicaAccount]) -> Sequence[ReplicaAccount]:
        return sorted(ready, key=lambda account: -math.log(1.0 - self.rng.random()) / account.replica.weight)


class HashOnly(Placement):
    """Take the first replica of the key's order, whatever its load."""

    name = "hash"

    def ranked(self, demand: Demand, ready: Sequence[ReplicaAccount]) -> Sequence[ReplicaAccount]:
        return self.by_affinity(demand, ready)


class PowerOfTwo(Placement):
    """Take the less loaded of two replicas chosen at random (Mitzenmacher 2001)."""

    name = "p2c"

    def ranked(self, demand: Demand, ready: Sequence[ReplicaAccount]) -> Sequence[ReplicaAccount]:
        shuffled = self.rng.sample(ready, len(ready))
        return [*self.by_load(shuffled[:2]), *shuffled[2:]]


class Holders(Placement):
    """Take the least loaded replica that has the adapter; else the one with the fewest adapters, as Ray Serve's model
    multiplexing does."""

    name = "holders"

    def ranked(self, demand: Demand, ready: Sequence[ReplicaAccount]) -> Sequence[ReplicaAccount]:
        by_load = self.by_load(ready)
        if demand.adapter_id is None:
            return by_load
        holders = [account for account in by_load if account.holds(demand.adapter_id)]
        others = [account for account in by_load if not account.holds(demand.adapter_id)]
        return [*holders, *sorted(others, key=lambda account: account.num_adapters)]


class Migrating(Placement):
    """Take the replica that is ready soonest, including the time to read the adapter. Move the newest requests of the
    busiest replicas to the idlest ones, as dLoRA (OSDI 2024) moves requests with their adapters.

    A request is moved at most once, and only if that makes it ready sooner by at least its own work.
    """

    name = "migrate"

    def __init__(self, replicas: Iterable[Replica] = (), seed: int = 0) -> None:
        # Requests that have not ended, oldest first.
        self._open: dict[SentRequest, None] = {}
        super().__init__(replicas, seed)

    def ranked(self, demand: Demand, ready: Sequence[ReplicaAccount]) -> Sequence[ReplicaAccount]:
        return sorted(ready, key=lambda account: (account.ready_us(demand), self.rng.random()))

    def on_request_sent(self, replica_id: str, demand: Demand, moves: int = 0) -> SentRequest:
        sent = super().on_request_sent(replica_id, demand, moves)
        self._open[sent] = None
        return sent

    def on_request_ended(self, sent: SentRequest) -> None:
        self._open.pop(sent, None)
        super().on_request_ended(sent)

    def moves(self) -> list[tuple[SentRequest, str]]:
        loads = {account: account.load for account in self._accounts.values() if account.replica.is_ready}
        limit = FACTOR * sum(loads.values()) / max(1, len(loads))
        moved = []
        for sent in reversed(self._open):
            source = sent.account
            if sent.moves or not limit < loads.get(source, 0.0):
                continue
            added = {a: us - a.load for a, us in loads.items()}
            target = min(loads, key=lambda account: account.ready_us(sent.demand) + added[account])
            ahead = target.ready_us(sent.demand) + added[target]
            if ahead + sent.work_us / target.replica.weight < loads[source] - sent.work_us / source.replica.weight:
                loads[source] -= sent.work_us / source.replica.weight
                loads[target] += sent.work_us / target.replica.weight
                moved.append((sent, target.replica.id))
        return moved


_KINDS: Mapping[str, type[Placement]] = {
    kind.name: kind for kind in (Bounded, Least, RandomReplica, HashOnly, PowerOfTwo, Holders, Migrating)
}
PLACEMENTS = tuple(_KINDS)


def make_placement(name: str, replicas: Iterable[Replica] = (), seed: int = 0) -> Placement:
    """Return a placement by its name.

    Raises:
        ConfigError: the name is unknown; the message lists the names.
    """
    if name not in _KINDS:
        raise ConfigError(f"placement {name!r} is unknown; there are {', '.join(PLACEMENTS)}")
    return _KINDS[name](replicas, seed)
