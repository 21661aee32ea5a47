"""Placements by name: the default `bounded`, and those that it is compared with."""

import math
from collections.abc import Iterable, Mapping, Sequence

from lorasrv.errors import ConfigError
from lorasrv.placement.placement import Account, Ask, Placement, Replica

FACTOR = 1.25
FREE_BELOW_S = 1.0


class Bounded(Placement):
    """Take the first replica of the key's order that is not full (consistent hashing with bounded loads, Mirrokni,
    Thorup and Zadimoghaddam 2018).

    A replica is full where this request would take it above `FACTOR` times the mean load; below `FREE_BELOW_S` none
    is. If all are full, the least loaded is taken. So a hot adapter spreads over as many replicas as its load needs,
    always the same ones.
    """

    name = "bounded"

    def ranked(self, ask: Ask, ready: Sequence[Account]) -> Sequence[Account]:
        work_us = ask.work_s * 1e6
        mean_us = (sum(a.own_us + a.others_us for a in ready) + work_us) / sum(a.replica.weight for a in ready)
        most_us = max(FACTOR * mean_us, FREE_BELOW_S * 1e6)
        free = [a for a in self.by_affinity(ask, ready) if a.load + work_us / a.replica.weight <= most_us]
        chosen = set(map(id, free))
        return [*free, *self.by_load(a for a in ready if id(a) not in chosen)]


class Least(Placement):
    """Take the replica with the least work ahead."""

    name = "least"

    def ranked(self, ask: Ask, ready: Sequence[Account]) -> Sequence[Account]:
        return self.by_load(ready)


class RandomReplica(Placement):
    """Take any replica, as often as its weight says."""

    name = "random"

    def ranked(self, ask: Ask, ready: Sequence[Account]) -> Sequence[Account]:
        return sorted(ready, key=lambda account: -math.log(1.0 - self.rng.random()) / account.replica.weight)


class HashOnly(Placement):
    """Take the first replica of the key's order, however loaded it is."""

    name = "hash"

    def ranked(self, ask: Ask, ready: Sequence[Account]) -> Sequence[Account]:
        return self.by_affinity(ask, ready)


class PowerOfTwo(Placement):
    """Take the less loaded of two replicas chosen at random (Mitzenmacher 2001)."""

    name = "p2c"

    def ranked(self, ask: Ask, ready: Sequence[Account]) -> Sequence[Account]:
        shuffled = self.rng.sample(ready, len(ready))
        return [*self.by_load(shuffled[:2]), *shuffled[2:]]


class Holders(Placement):
    """Take the least loaded replica that has the adapter; else the one with the fewest adapters, as Ray Serve's model
    multiplexing does."""

    name = "holders"

    def ranked(self, ask: Ask, ready: Sequence[Account]) -> Sequence[Account]:
        by_load = self.by_load(ready)
        if ask.adapter_id is None:
            return by_load
        holders = [account for account in by_load if account.holds(ask.adapter_id)]
        others = [account for account in by_load if not account.holds(ask.adapter_id)]
        return [*holders, *sorted(others, key=lambda account: account.num_adapters)]


_KINDS: Mapping[str, type[Placement]] = {
    kind.name: kind for kind in (Bounded, Least, RandomReplica, HashOnly, PowerOfTwo, Holders)
}
PLACEMENTS = tuple(_KINDS)


def make_placement(name: str, replicas: Iterable[Replica] = (), seed: int = 0) -> Placement:
    """Return a placement by its name.

    Raises:
        ConfigError: there is none of that name; lists them.
    """
    if name not in _KINDS:
        raise ConfigError(f"placement {name!r} is unknown; there are {', '.join(PLACEMENTS)}")
    return _KINDS[name](replicas, seed)
