"""Rank the replicas for a request, and count the work sent to each.

A router has one `Placement`. It calls `rank` to learn where a request may go, `on_request_sent` when it has sent the
request, `on_request_ended` when the request is over, and `on_report` with what replicas report about other routers'
work. Work is in seconds (`work.py`) and counted in whole microseconds, so that adding and subtracting leaves no rest.
One thread at a time.
"""

import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from lorasrv.errors import ConfigError, NoReplicaReady
from lorasrv.placement.rendezvous import hash_of, order

RETRY_AFTER_S = 1.0
SESSION_CHARS = 256
"""Number of first characters that identify a conversation, for clients that give it no name."""
CHARS_PER_TOKEN = 4
"""Estimate for routers, which have no tokenizer."""
_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Demand:
    """Describe what a request demands of a replica."""

    # Id of its adapter, without alias or version; None: the base.
    adapter_id: str | None
    # Estimated seconds that it keeps a replica busy.
    work_s: float
    # Conversation whose turns should go to the same replica if no adapter is named.
    session: str | None = None
    # Estimated seconds until a replica without its adapter has read it; 0: not known, as in an edge.
    load_s: float = 0.0
    # Estimated tokens of its prompt, whose computation is part of `work_s`; 0: not known, or computed elsewhere.
    prompt_tokens: float = 0.0

    @property
    def key(self) -> str | None:
        """Return the key that ties it to a replica; None: no key."""
        if self.adapter_id is not None:
            return f"adapter {self.adapter_id}"
        return None if self.session is None else f"session {self.session}"


@dataclass(frozen=True, slots=True)
class Replica:
    """Describe a replica.

    Raises:
        ConfigError: its weight is not a positive number.
    """

    id: str
    # Speed as a multiple of a typical replica's.
    weight: float = 1.0
    is_ready: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ConfigError(f"replica {self.id}: weight must be positive, not {self.weight}")


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """Hold what a replica reports about itself to a router."""

    # Seconds of work of other routers' requests that have not ended.
    others_s: float = 0.0
    # Adapters that it has in memory.
    adapters: Set[str] = frozenset()

    @classmethod
    def beside(cls, own: int, requests: int, seconds_ahead: float, adapters: Set[str] = frozenset()) -> "ReplicaReport":
        """Derive the report for a router that has sent `own` of the replica's requests. These are left out: the
        router's placement counts them more accurately.

        Args:
            requests: requests of all routers that have not ended.
            seconds_ahead: seconds until they end.
        """
        others = max(0, requests - own)
        return cls(seconds_ahead * others / max(1, requests), adapters)


@dataclass(slots=True, eq=False)
class ReplicaAccount:
    """Count the work of one replica, until the replica is removed."""

    replica: Replica
    seed: int
    own_us: int = 0
    others_us: int = 0
    adapters: Set[str] = frozenset()
    # Requests that were sent and have not ended, by adapter.
    in_flight: Counter[str | None] = field(default_factory=Counter)
    # Adapters that it reads for them, as far as known -> microseconds.
    loading: dict[str, int] = field(default_factory=dict)

    @property
    def load(self) -> float:
        """Return the microseconds of work ahead, for a replica of weight 1."""
        return (self.own_us + self.others_us) / self.replica.weight

    def ready_us(self, demand: Demand) -> float:
        """Return the microseconds until it could begin a request, if it computed its requests one after another."""
        is_new = demand.adapter_id is not None and not self.holds(demand.adapter_id)
        return self.load + sum(self.loading.values()) + is_new * demand.load_s * _MICROSECONDS

    def holds(self, adapter_id: str) -> bool:
        """Return whether it has an adapter or is loading it."""
        return adapter_id in self.adapters or adapter_id in self.in_flight

    @property
    def num_adapters(self) -> int:
        """Return how many adapters it has or is loading."""
        return len(self.adapters) + sum(one is not None and one not in self.adapters for one in self.in_flight)


@dataclass(slots=True, eq=False)
class SentRequest:
    """Represent a request that a replica is computing."""

    account: ReplicaAccount
    demand: Demand
    work_us: int
    # How often it was moved before.
    moves: int = 0
    has_ended: bool = False

    @property
    def replica_id(self) -> str:
        return self.account.replica.id


class Placement(ABC):
    """Rank replicas by one policy. The same calls and the same seed give the same ranks.

    Args:
        replicas: known replicas; `set_replicas` changes them.
        seed: seed of random choices.
    """

    name: str

    def __init__(self, replicas: Iterable[Replica] = (), seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self._accounts: dict[str, ReplicaAccount] = {}
        self.set_replicas(replicas)

    def set_replicas(self, replicas: Iterable[Replica]) -> None:
        """Replace the list of replicas. Replicas that stay keep their accounts."""
        accounts = {}
        for replica in replicas:
            account = self._accounts.get(replica.id) or ReplicaAccount(replica, hash_of(replica.id))
            account.replica = replica
            accounts[replica.id] = account
        self._accounts = accounts

    def rank(self, demand: Demand) -> tuple[str, ...]:
        """Return the ids of all ready replicas, in the order in which to try them.

        Raises:
            NoReplicaReady: no replica is ready; has the number of those that are not.
        """
        ready = [account for account in self._accounts.values() if account.replica.is_ready]
        if not ready:
            raise NoReplicaReady(f"none of {len(self._accounts)} replicas is ready", retry_after_s=RETRY_AFTER_S)
        return tuple(account.replica.id for account in self.ranked(demand, ready))

    def on_request_sent(self, replica_id: str, demand: Demand, moves: int = 0) -> SentRequest:
        """Note that a request was sent to a replica.

        Args:
            moves: how often it was withdrawn from another replica before, as requested by `moves`.
        Raises:
            KeyError: the replica is unknown.
        """
        account = self._accounts[replica_id]
        work_us = round(demand.work_s * _MICROSECONDS)
        account.own_us += work_us
        if demand.load_s and demand.adapter_id is not None and not account.holds(demand.adapter_id):
            account.loading[demand.adapter_id] = round(demand.load_s * _MICROSECONDS)
        account.in_flight[demand.adapter_id] += 1
        return SentRequest(account, demand, work_us, moves)

    def on_request_ended(self, sent: SentRequest) -> None:
        """Note that a request is over, however it ended; a second call changes nothing."""
        if sent.has_ended:
            return
        sent.has_ended = True
        in_flight, adapter_id = sent.account.in_flight, sent.demand.adapter_id
        sent.account.own_us -= sent.work_us
        in_flight[adapter_id] -= 1
        if not in_flight[adapter_id]:
            del in_flight[adapter_id]
            sent.account.loading.pop(adapter_id or "", None)

    def on_report(self, replica_id: str, report: ReplicaReport) -> None:
        """Take a replica's report; a report of an unknown replica is late and ignored."""
        account = self._accounts.get(replica_id)
        if account is not None:
            account.others_us = round(report.others_s * _MICROSECONDS)
            account.adapters = report.adapters
            account.loading = {name: us for name, us in account.loading.items() if name not in report.adapters}

    def moves(self) -> list[tuple[SentRequest, str]]:
        """Return requests that should be withdrawn, if they have not begun, and sent to another replica. Called after
        each round of reports."""
        return []

    def loads_s(self) -> dict[str, float]:
        """Return the seconds of work ahead of every replica."""
        return {name: (a.own_us + a.others_us) / _MICROSECONDS for name, a in self._accounts.items()}

    @abstractmethod
    def ranked(self, demand: Demand, ready: Sequence[ReplicaAccount]) -> Sequence[ReplicaAccount]:
        """Return all of these accounts (at least one) in the order in which to try them."""

    def by_load(self, accounts: Iterable[ReplicaAccount]) -> list[ReplicaAccount]:
        """Return accounts by their load, equal ones in random order."""
        return sorted(accounts, key=lambda account: (account.load, self.rng.random()))

    def by_affinity(self, demand: Demand, accounts: Sequence[ReplicaAccount]) -> list[ReplicaAccount]:
        """Return accounts as the request's key ranks them; without a key, by load."""
        if demand.key is None:
            return self.by_load(accounts)
        by_id = {account.replica.id: account for account in accounts}
        names = order(demand.key, [(name, account.seed, account.replica.weight) for name, account in by_id.items()])
        return [by_id[name] for name in names]
