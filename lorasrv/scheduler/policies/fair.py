"""Fair sharing between API keys, and within a key between its adapters, by virtual token counters (VTC, Sheng et al.,
OSDI 2024).

Each account counts the service of its requests, divided by its weight; the account with the least goes first. An
account that returns after a pause is lifted to the least service of the waiting accounts, so no credit is saved up. For
two keys, or two accounts of one key, that always have waiting requests, the weighted services differ by at most

    2 · max(Wp · longest prompt, Wq · M) / smallest weight + SHARING_TOKENS

where M is the most tokens that one account's running requests can still generate (theorem 4.4 of the paper; the last
term is added here).

Admission in this order alone would become fair only slowly, because an answer keeps its request slot to its end. So an
account below its share of the slots takes one from an account that is above its share and has hardly less service: a
running request of that account is paused, and keeps its pages. Paused requests continue in the order of service as soon
as a slot is free. A request that takes a slot pauses at most one other, and accounts at their share pause none.

A step with fewer distinct adapters is shorter. If this gain exceeds the gap between two accounts, the account whose
adapter is already in the batch goes first.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from adapter_store.spec import AdapterKey
from lorasrv.memory.cost_model import StepCosts
from lorasrv.memory.sorted_items import Rank, SortedItems
from lorasrv.outputs import RequestId
from lorasrv.request import Request
from lorasrv.scheduler.length_predictor import MEDIAN, LengthPredictor
from lorasrv.scheduler.policies.base import Policy, preempted_first
from lorasrv.scheduler.policies.lane import Lane
from lorasrv.scheduler.quotas import Quotas

PROMPT_WEIGHT = 1.0
ANSWER_WEIGHT = 2.0
SHARING_TOKENS = 256.0
"""Largest gap in service that is accepted for sharing an adapter, or when an account takes a slot of its share."""
RESUMED_TOKENS = 16
"""A request that has generated fewer tokens than this since a pause is paused again only if no other can be."""
MAX_COMPARED = 8
MIN_SWEEP = 1024


@dataclass(slots=True)
class _FairAccount:
    """Count the service of one key or one adapter of a key."""

    name: str
    # Weighted tokens.
    served: float = 0.0
    num_running: int = 0
    # Running requests without a slot.
    num_paused: int = 0
    num_waiting: int = 0
    # Its summand in the total weight of the accounts with requests; 0 without requests.
    weight: float = 0.0
    # Whether its limits forbade admission at the last attempt.
    is_throttled: bool = False

    @property
    def num_slots(self) -> int:
        """Return the number of request slots that the account has."""
        return self.num_running - self.num_paused


class _Ledger:
    """Compare accounts with one another.

    Args:
        weigh: returns the weight of an account.
        on_dropped: called with the name of an account that is forgotten.
    """

    def __init__(self, weigh: Callable[[str], float], on_dropped: Callable[[str], object] = lambda _: None) -> None:
        self._weigh, self._on_dropped = weigh, on_dropped
        self._weight = 0.0
        self._accounts: dict[str, _FairAccount] = {}
        # (service, name) of accounts with waiting requests; an entry is outdated if the account has more service now.
        self._least: list[tuple[float, str]] = []
        self._floor = 0.0
        self._num_waiting = 0
        self._next_sweep = MIN_SWEEP

    def account(self, name: str) -> _FairAccount:
        """Return the account of this name; a new one starts with the floor as its service."""
        if name not in self._accounts:
            self._accounts[name] = _FairAccount(name, self._floor)
        return self._accounts[name]

    def add_waiting(self, name: str) -> None:
        """Count one more waiting request of an account."""
        account = self.account(name)
        if not account.num_waiting:
            self.lift(account)
            self._num_waiting += 1
        account.num_waiting += 1
        self._count(account)

    def lift(self, account: _FairAccount) -> None:
        """Raise an account's service to the floor: time without requests, or throttled, earns no credit."""
        account.is_throttled = True  # excludes it from `_least_served`
        self._floor = self._least_served()
        account.served = max(account.served, self._floor)
        account.is_throttled = False
        heapq.heappush(self._least, (account.served, account.name))
        if len(self._least) > 2 * self._num_waiting + MIN_SWEEP:
            # Outdated entries are dropped only at the top: they would stay while another account waits there.
            waiting = (a for a in self._accounts.values() if a is account or a.num_waiting)
            self._least = [(a.served, a.name) for a in waiting if not a.is_throttled]
            heapq.heapify(self._least)

    def remove_waiting(self, name: str) -> None:
        """Count one waiting request less."""
        account = self._accounts[name]
        account.num_waiting -= 1
        self._count(account)
        if account.num_waiting:
            return
        self._num_waiting -= 1
        self._floor = self._least_served() if self._num_waiting else account.served
        if len(self._accounts) >= self._next_sweep:
            self._sweep(account)

    def add_running(self, account: _FairAccount, change: int) -> None:
        """Count one more, or one less, running request of an account."""
        account.num_running += change
        self._count(account)

    def share(self, account: _FairAccount, slots: float) -> float:
        """Return an account's share of `slots` request slots by its weight, at least one."""
        return max(1.0, slots * account.weight / self._weight)

    def _count(self, account: _FairAccount) -> None:
        """Include the weight of an account in the total while it has requests."""
        weight = self._weigh(account.name) if account.num_waiting or account.num_running else 0.0
        self._weight += weight - account.weight
        account.weight = weight

    def _least_served(self) -> float:
        """Return the least service of the waiting accounts that are not throttled; the old floor if there are none."""
        while self._least:
            served, name = self._least[0]
            account = self._accounts.get(name)
            if account is None or not account.num_waiting or account.is_throttled:
                heapq.heappop(self._least)
            elif account.served > served:
                heapq.heapreplace(self._least, (account.served, name))
            else:
                return served
        return self._floor

    def _sweep(self, taken: _FairAccount) -> None:
        """Drop the idle accounts that would be lifted on their return, and all others but those with the most service.

        Args:
            taken: account to keep: its request no longer waits and does not run yet.
        """
        idle = [a for a in self._accounts.values() if not (a.num_waiting or a.num_running or a is taken)]
        idle.sort(key=lambda account: account.served)
        num_lifted = sum(account.served <= self._floor for account in idle)
        for account in idle[: max(num_lifted, len(idle) - MIN_SWEEP // 2)]:
            del self._accounts[account.name]
            self._on_dropped(account.name)
        self._next_sweep = max(MIN_SWEEP, 2 * len(self._accounts))


class Fair(Policy):
    """Serve the account with the least weighted service.

    Args:
        slots: request slots of a step.
    """

    pauses = True

    def __init__(self, slots: int, quotas: Quotas, costs: StepCosts, predictor: LengthPredictor) -> None:
        self._slots = slots
        self._quotas = quotas
        self._costs = costs
        self._predictor = predictor
        self._adapters: dict[str, _Ledger] = {}
        self._keys = _Ledger(lambda _: quotas.key_weight(), self._adapters.pop)
        self._in_batch: Counter[AdapterKey | None] = Counter()
        # (key's account, adapter's account) of running requests; these accounts are not dropped.
        self._running: dict[RequestId, tuple[_FairAccount, _FairAccount]] = {}

    def rank(self, request: Request) -> Rank:
        return request.message.priority, preempted_first(request)

    def lane_rank(self, lane: Lane) -> Rank:
        priority, preempted, number = lane.rank
        return priority, preempted, self._adapter_account(lane).served, number

    def key_rank(self, lane: Lane) -> Rank:
        priority, preempted, number = lane.rank
        return priority, preempted, self._keys.account(lane.name.principal).served, number

    def choose(self, lanes: SortedItems[Lane]) -> Lane:
        """Return the lane with the least service, or one with slightly more whose adapter is already in the batch."""
        best = lanes.first
        gap = self._sharing_gain(best.first)
        if gap <= 0:
            return best
        *urgency, least, _ = self.lane_rank(best)
        for lane in lanes.first_of(MAX_COMPARED):
            *others, served, _ = self.lane_rank(lane)
            if lane.name.adapter_key in self._in_batch and others == urgency and served <= least + gap:
                return lane
        return best

    def in_order(
        self, running: Sequence[Request], waiting: Iterator[Request], first: Callable[[int], Sequence[Request]]
    ) -> Iterator[Request]:
        """Yield the requests with slots, then the others, beginning with those of accounts below their share. If no
        slot is left for these, they go before running requests of accounts above their share."""
        seated = [request for request in running if not request.is_paused]
        paused = sorted((request for request in running if request.is_paused), key=self._rank_of)
        num_free = self._slots - len(seated)
        best = first(MAX_COMPARED) if num_free < MAX_COMPARED else ()
        best = sorted((*paused, *best), key=self._rank_of)[:MAX_COMPARED] if paused else best
        takers, lost = self._takers(best, seated, num_free) if len(best) > num_free else ([], [])
        yield from (request for request in seated if request not in lost)
        yield from takers
        yield from reversed(lost)  # if a taker is not admitted, the last loser keeps its slot
        others = heapq.merge(paused, waiting, key=self._rank_of) if paused else waiting
        yield from (request for request in others if request not in takers)

    def _takers(
        self, first: Sequence[Request], seated: Sequence[Request], num_free: int
    ) -> tuple[list[Request], list[Request]]:
        """Return which of the first requests take slots, and which running requests lose theirs."""
        takers: list[Request] = []
        lost: list[Request] = []
        losers: list[Request] | None = None
        for request in first:
            if request.message.priority > first[0].message.priority or not self._is_below_share(request, first[0]):
                continue
            if len(takers) < num_free:
                if self._may_share_adapter(first[0], request):
                    continue
            else:
                losers = self._above_share(seated) if losers is None else losers
                if (loser := self._find_loser(request, losers)) is None:
                    continue
                losers.remove(loser)
                lost.append(loser)
            takers.append(request)
            self._count_slots(takers[-1:], 1)
            self._count_slots(lost[-1:] if len(takers) > num_free else (), -1)
        self._count_slots(takers, -1)  # undo: they get their slots when the planner agrees
        self._count_slots(lost, 1)
        return takers, lost

    def select_victim(self, running: Iterable[Request]) -> Request | None:
        """Return a paused request among the least urgent ones, or else the newest of these."""
        by_seniority = enumerate(running)
        return max(by_seniority, key=lambda at: (at[1].message.priority, at[1].is_paused, at[0]), default=(0, None))[1]

    def on_waiting(self, request: Request) -> None:
        principal, adapter_id = _names(request)
        if principal not in self._adapters:
            self._adapters[principal] = _Ledger(self._quotas.weight)
        self._adapters[principal].add_waiting(adapter_id)
        self._keys.add_waiting(principal)

    def on_taken(self, request: Request) -> None:
        principal, adapter_id = _names(request)
        self._adapters[principal].remove_waiting(adapter_id)
        self._keys.remove_waiting(principal)

    def on_admitted(self, request: Request) -> None:
        self._in_batch[request.adapter_key] += 1
        key, adapter = self._running[request.request_id] = self._accounts(request)
        self._keys.add_running(key, 1)
        self._adapters[key.name].add_running(adapter, 1)
        if adapter.is_throttled:
            self._adapters[key.name].lift(adapter)
        if not request.num_preemptions:
            self._charge(request, PROMPT_WEIGHT * (request.num_prompt_tokens - request.num_cached_tokens))

    def on_left_batch(self, request: Request) -> None:
        key, adapter = self._running.pop(request.request_id)
        self._keys.add_running(key, -1)
        self._adapters[key.name].add_running(adapter, -1)
        self._in_batch[request.adapter_key] -= 1
        if not self._in_batch[request.adapter_key]:
            del self._in_batch[request.adapter_key]

    def on_paused(self, request: Request) -> None:
        for account in self._accounts(request):
            account.num_paused += 1

    def on_resumed(self, request: Request) -> None:
        for account in self._accounts(request):
            account.num_paused -= 1

    def on_throttled(self, request: Request) -> None:
        principal, adapter_id = _names(request)
        self._adapters[principal].account(adapter_id).is_throttled = True

    def num_ahead(self, request: Request, waiting: Iterable[Request]) -> int:
        """Count the other requests of its account, and those of each other account that go first."""
        urgent = Counter(_names(r) for r in waiting if r.message.priority <= request.message.priority)
        own = urgent.pop(_names(request), 0)
        return own + sum(min(count, own + 1) for count in urgent.values())

    def on_computed(self, request: Request, num_generated: int) -> None:
        self._charge(request, ANSWER_WEIGHT * num_generated)

    def _above_share(self, seated: Sequence[Request]) -> list[Request]:
        """Return the requests whose slots may go to others: those of keys, or adapters of a key, above their share."""
        found = []
        for request in seated:
            if not request.is_protected and request.message.beams is None:
                key, adapter = self._accounts(request)
                is_above = key.num_slots - 1 >= self._keys.share(key, self._slots)
                if is_above or adapter.num_slots - 1 >= self._adapter_share(key, adapter):
                    found.append(request)
        return found

    def _adapter_share(self, key: _FairAccount, adapter: _FairAccount) -> float:
        slots = max(key.num_slots, self._keys.share(key, self._slots))
        return self._adapters[key.name].share(adapter, slots)

    def _is_below_share(self, request: Request, best: Request) -> bool:
        """Return whether the account of a waiting or paused request would stay within its share with one more slot, and
        has hardly more service than the account of the best request."""
        if request.message.beams is not None:
            return False
        key, adapter = self._accounts(request)
        best_key, best_adapter = self._accounts(best)
        if key is not best_key:
            share, mine, other = self._keys.share(key, self._slots), key, best_key
        else:
            share, mine, other = self._adapter_share(key, adapter), adapter, best_adapter
        return mine.num_slots + 1 <= share and mine.served <= other.served + SHARING_TOKENS

    def _find_loser(self, request: Request, losers: Sequence[Request]) -> Request | None:
        """Return the running request whose slot `request` may take: the newest of the account with the most slots. One
        that has just been paused is chosen only if there is no other."""
        return max((r for r in losers if self._may_take_from(request, r)), key=self._readiness, default=None)

    def _readiness(self, loser: Request) -> tuple[int, bool, int, int]:
        was_resumed = loser.resumed_at is not None and loser.num_generated_tokens < loser.resumed_at + RESUMED_TOKENS
        return loser.message.priority, not was_resumed, self._accounts(loser)[1].num_slots, loser.number

    def _may_take_from(self, request: Request, loser: Request) -> bool:
        """Return whether a request's account is below its share, and the loser's account has hardly less service and is
        not below its share afterwards; otherwise slots would go back and forth. Requests of two keys are compared by
        key."""
        if loser.message.priority < request.message.priority or not self._is_below_share(request, loser):
            return False
        key, adapter = self._accounts(request)
        other_key, other_adapter = self._accounts(loser)
        if key is not other_key:
            return other_key.num_slots - 1 >= self._keys.share(other_key, self._slots)
        is_above = other_adapter.num_slots - 1 >= self._adapter_share(key, other_adapter)
        return is_above and adapter is not other_adapter

    def _may_share_adapter(self, best: Request, other: Request) -> bool:
        """Return whether the best request goes before the other, which may have had less service, because only the
        best one's adapter is in the batch."""
        is_shared = best.adapter_key in self._in_batch and other.adapter_key not in self._in_batch
        gap = self._accounts(best)[1].served - self._accounts(other)[1].served
        return is_shared and gap <= self._sharing_gain(other)

    def _count_slots(self, requests: Iterable[Request], change: int) -> None:
        """Adjust the accounts for slots that requests would get or lose."""
        for account in (account for request in requests for account in self._accounts(request)):
            account.num_paused -= change

    def _rank_of(self, request: Request) -> Rank:
        """Return the rank of a waiting or paused request among all requests."""
        key, adapter = self._accounts(request)
        return request.message.priority, preempted_first(request), key.served, adapter.served, request.number

    def _charge(self, request: Request, tokens: float) -> None:
        key, adapter = self._accounts(request)
        key.served += tokens / self._quotas.key_weight()
        adapter.served += tokens / self._quotas.weight(adapter.name)

    def _accounts(self, request: Request) -> tuple[_FairAccount, _FairAccount]:
        if (found := self._running.get(request.request_id)) is not None:
            return found
        principal, adapter_id = _names(request)
        return self._keys.account(principal), self._adapters[principal].account(adapter_id)

    def _adapter_account(self, lane: Lane) -> _FairAccount:
        return self._adapters[lane.name.principal].account(lane.name.adapter_id)

    def _sharing_gain(self, request: Request) -> float:
        """Return the cost, in weighted tokens, that the request's adapter adds to all its steps; 0 if the adapter is
        already in the batch."""
        if request.adapter_key in self._in_batch or not request.terms:
            return 0.0
        nbytes = sum(term.layout.nbytes for term in request.terms)
        seconds = self._costs.adapter_s(nbytes) * self._predictor.remaining(request, MEDIAN)
        return min(SHARING_TOKENS, ANSWER_WEIGHT * seconds / max(self._costs.token_s, 1e-9))


def _names(request: Request) -> tuple[str, str]:
    return request.message.principal, request.message.adapter_id
