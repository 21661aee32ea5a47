"""Fair sharing of keys, and within a key of its adapters, by virtual token counters (VTC, Sheng et al., OSDI 2024).

Each account counts the service of its requests over its weight; the one with the least goes first. An account that
returns after a pause is lifted to the least service of those that wait, so no credit is saved up. For two accounts of a
key that both have waiting requests all the time, and likewise two keys, the weighted services differ by at most

    2 · max(Wp · longest prompt, Wq · M) / smallest weight + SHARING_TOKENS

with M the most tokens that one account's running requests can still generate (theorem 4.4 there; the last term is added
here).

A step that serves fewer distinct adapters is shorter. Where the gap between two accounts is worth less than that, the
account whose adapter is in the batch already goes first.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from adapter_store.spec import AdapterKey
from lorasrv.memory.cost_model import StepCosts
from lorasrv.request import Request
from lorasrv.scheduler.length_predictor import MEDIAN, LengthPredictor
from lorasrv.scheduler.policies.base import Policy, preempted_first
from lorasrv.scheduler.policies.lane import Lane
from lorasrv.scheduler.quotas import Quotas
from lorasrv.sorted_items import Rank, SortedItems

PROMPT_WEIGHT = 1.0
ANSWER_WEIGHT = 2.0
SHARING_TOKENS = 256.0
"""Largest gap in service that is accepted to share an adapter."""
MAX_COMPARED = 8
MIN_SWEEP = 1024


@dataclass(slots=True)
class _FairAccount:
    """Count the service of one key or one adapter of a key."""

    name: str
    # Weighted tokens.
    served: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    # Whether its limits forbade admission at the last attempt.
    is_throttled: bool = False


class _Ledger:
    """Compare accounts with one another."""

    def __init__(self) -> None:
        self._accounts: dict[str, _FairAccount] = {}
        # (service, name) of accounts with waiting requests; an entry is outdated if the account has more service now.
        self._least: list[tuple[float, str]] = []
        self._floor = 0.0
        self._num_waiting = 0
        self._next_sweep = MIN_SWEEP

    def account(self, name: str) -> _FairAccount:
        """Return the account of this name, a new one with the floor as its service."""
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

    def lift(self, account: _FairAccount) -> None:
        """Raise an account's service to the floor: time without requests, or throttled, earns no credit."""
        account.is_throttled = True  # compared with others only
        self._floor = self._least_served()
        account.served = max(account.served, self._floor)
        account.is_throttled = False
        heapq.heappush(self._least, (account.served, account.name))

    def remove_waiting(self, name: str) -> None:
        """Count one waiting request less."""
        account = self._accounts[name]
        account.num_waiting -= 1
        if account.num_waiting:
            return
        self._num_waiting -= 1
        self._floor = self._least_served() if self._num_waiting else account.served
        if len(self._accounts) >= self._next_sweep:
            self._sweep()

    def charge(self, name: str, tokens: float) -> None:
        """Add weighted tokens to an account."""
        self._accounts[name].served += tokens

    def _least_served(self) -> float:
        """Return the least service of the accounts that wait and are not throttled; the floor as it was without any."""
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

    def _sweep(self) -> None:
        """Drop idle accounts that would be lifted on their return."""
        idle = (a for a in self._accounts.values() if not a.num_waiting and not a.num_running)
        gone = [account.name for account in idle if account.served <= self._floor]
        for name in gone:
            del self._accounts[name]
        self._next_sweep = max(MIN_SWEEP, 2 * len(self._accounts))


class Fair(Policy):
    """Serve the account with the least weighted service."""

    def __init__(self, quotas: Quotas, costs: StepCosts, predictor: LengthPredictor) -> None:
        self._quotas = quotas
        self._costs = costs
        self._predictor = predictor
        self._keys = _Ledger()
        self._adapters: dict[str, _Ledger] = {}
        self._in_batch: Counter[AdapterKey | None] = Counter()

    def rank(self, request: Request) -> Rank:
        return request.message.priority, preempted_first(request)

    def lane_rank(self, lane: Lane) -> Rank:
        priority, preempted, number = lane.rank
        return priority, preempted, self._adapter_account(lane).served, number

    def key_rank(self, lane: Lane) -> Rank:
        priority, preempted, number = lane.rank
        return priority, preempted, self._keys.account(lane.name.principal).served, number

    def choose(self, lanes: SortedItems[Lane]) -> Lane:
        """Return the lane with the least service, or one slightly above whose adapter is in the batch already."""
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

    def on_waiting(self, request: Request) -> None:
        principal, adapter_id = _names(request)
        self._adapters.setdefault(principal, _Ledger()).add_waiting(adapter_id)
        self._keys.add_waiting(principal)

    def on_taken(self, request: Request) -> None:
        principal, adapter_id = _names(request)
        self._adapters[principal].remove_waiting(adapter_id)
        self._keys.remove_waiting(principal)

    def on_admitted(self, request: Request) -> None:
        self._in_batch[request.adapter_key] += 1
        key, adapter = self._accounts(request)
        key.num_running += 1
        adapter.num_running += 1
        if adapter.is_throttled:
            self._adapters[key.name].lift(adapter)
        if not request.num_preemptions:
            self._charge(request, PROMPT_WEIGHT * (request.num_prompt_tokens - request.num_cached_tokens))

    def on_left_batch(self, request: Request) -> None:
        for account in self._accounts(request):
            account.num_running -= 1
        self._in_batch[request.adapter_key] -= 1
        if not self._in_batch[request.adapter_key]:
            del self._in_batch[request.adapter_key]

    def on_throttled(self, request: Request) -> None:
        principal, adapter_id = _names(request)
        self._adapters[principal].account(adapter_id).is_throttled = True

    def num_ahead(self, request: Request, waiting: Iterable[Request]) -> int:
        """Count the other requests of its account, and of each other account as many as go before."""
        urgent = Counter(_names(r) for r in waiting if r.message.priority <= request.message.priority)
        own = urgent.pop(_names(request), 0)
        return own + sum(min(count, own + 1) for count in urgent.values())

    def on_computed(self, request: Request, num_prompt: int, num_generated: int) -> None:
        self._charge(request, ANSWER_WEIGHT * num_generated)

    def _charge(self, request: Request, tokens: float) -> None:
        principal, adapter_id = _names(request)
        self._keys.charge(principal, tokens / self._quotas.key_weight())
        self._adapters[principal].charge(adapter_id, tokens / self._quotas.weight(adapter_id))

    def _accounts(self, request: Request) -> tuple[_FairAccount, _FairAccount]:
        principal, adapter_id = _names(request)
        return self._keys.account(principal), self._adapters[principal].account(adapter_id)

    def _adapter_account(self, lane: Lane) -> _FairAccount:
        return self._adapters[lane.name.principal].account(lane.name.adapter_id)

    def _sharing_gain(self, request: Request) -> float:
        """Return, in weighted tokens, what the request's adapter adds to all its steps; 0 if the adapter is in the
        batch already."""
        layout = request.message.layout
        if request.adapter_key is None or layout is None or request.adapter_key in self._in_batch:
            return 0.0
        seconds = self._costs.adapter_s(layout.nbytes) * self._predictor.remaining(request, MEDIAN)
        return min(SHARING_TOKENS, ANSWER_WEIGHT * seconds / max(self._costs.token_s, 1e-9))


def _names(request: Request) -> tuple[str, str]:
    return request.message.principal, request.message.adapter_id
