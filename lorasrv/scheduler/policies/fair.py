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
from collections.abc import Iterator
from dataclasses import dataclass, field

from adapter_store.spec import AdapterKey
from lorasrv.memory.cost_model import StepCosts
from lorasrv.request import Request
from lorasrv.scheduler.length_predictor import MEDIAN, LengthPredictor
from lorasrv.scheduler.policies.base import Policy, SortedQueue, preempted_first
from lorasrv.scheduler.quotas import Quotas

PROMPT_WEIGHT = 1.0
ANSWER_WEIGHT = 2.0
SHARING_TOKENS = 256.0
"""Largest gap in service that is accepted to share an adapter."""
MAX_COMPARED = 8
MIN_SWEEP = 1024


@dataclass(slots=True)
class _FairAccount:
    """Count the service of one key or one adapter of a key. An adapter's account waits while its queue has requests,
    a key's while one of its adapters waits."""

    name: str
    # Weighted tokens.
    served: float = 0.0
    num_running: int = 0
    # Whether its limits forbade admission at the last attempt.
    is_throttled: bool = False
    queue: SortedQueue = field(default_factory=SortedQueue)

    def candidates(self) -> Iterator[Request]:
        """Yield the account's requests in order. After one that was not admitted, others on the same content are
        skipped."""
        stuck: set[AdapterKey | None] = set()
        for request in self.queue:
            if request.adapter_key not in stuck:
                yield request
                # A further choice waits for the first one of its own prompt, which does not hold others back.
                # Beams wait for an older group, whatever they run on.
                own = request.message.fork_of is not None or request.message.beams is not None
                if request in self.queue and not own:
                    stuck.add(request.adapter_key)


class _Ledger:
    """Compare accounts with one another."""

    def __init__(self) -> None:
        self._accounts: dict[str, _FairAccount] = {}
        self._waiting: dict[str, _FairAccount] = {}
        self._floor = 0.0
        self._next_sweep = MIN_SWEEP

    def __len__(self) -> int:
        return len(self._waiting)

    def account(self, name: str) -> _FairAccount:
        """Return the account of this name, a new one with the floor as its service."""
        if name not in self._accounts:
            self._accounts[name] = _FairAccount(name, self._floor)
        return self._accounts[name]

    def waiting(self) -> Iterator[_FairAccount]:
        """Yield the accounts with waiting requests."""
        return iter(self._waiting.values())

    def add_waiting(self, name: str) -> None:
        """Note that an account has waiting requests."""
        if name in self._waiting:
            return
        account = self.account(name)
        self.lift(account)
        self._waiting[name] = account

    def lift(self, account: _FairAccount) -> None:
        """Raise an account's service to the floor: time without requests, or throttled, earns no credit."""
        competing = [a.served for a in self._waiting.values() if a is not account and not a.is_throttled]
        if competing:
            self._floor = min(competing)
        account.served = max(account.served, self._floor)
        account.is_throttled = False

    def remove_waiting(self, name: str) -> None:
        """Note that an account has no waiting requests any more."""
        account = self._waiting.pop(name)
        if not self._waiting:
            self._floor = account.served
        if len(self._accounts) >= self._next_sweep:
            self._sweep()

    def charge(self, name: str, tokens: float) -> None:
        """Add weighted tokens to an account."""
        self._accounts[name].served += tokens

    def _sweep(self) -> None:
        """Drop idle accounts that would be lifted on their return."""
        floor = min((a.served for a in self._waiting.values()), default=self._floor)
        idle = (a for a in self._accounts.values() if a.name not in self._waiting and not a.num_running)
        gone = [account.name for account in idle if account.served <= floor]
        for name in gone:
            del self._accounts[name]
        self._next_sweep = max(MIN_SWEEP, 2 * len(self._accounts))


@dataclass(slots=True)
class _Candidate:
    """Hold an account's next request in this round, and those after it."""

    account: _FairAccount
    request: Request
    rest: Iterator[Request]

    @property
    def entry(self) -> "_Entry":
        """Return the heap entry; no two are equal, as request numbers are unique."""
        urgency = self.request.message.priority, preempted_first(self.request)
        return *urgency, self.account.served, self.request.number, self


_Entry = tuple[int, int, float, int, _Candidate]
"""(priority, preempted first, service of the account, number of the request, candidate)."""


class Fair(Policy):
    """Serve the account with the least weighted service."""

    def __init__(self, quotas: Quotas, costs: StepCosts, predictor: LengthPredictor) -> None:
        self._quotas = quotas
        self._costs = costs
        self._predictor = predictor
        self._keys = _Ledger()
        self._adapters: dict[str, _Ledger] = {}
        self._in_batch: Counter[AdapterKey | None] = Counter()

    def served_by_adapter(self, principal: str, adapter_id: str) -> float:
        """Return the weighted tokens of an account, including lifts."""
        return self._adapters[principal].account(adapter_id).served

    def waiting(self) -> Iterator[Request]:
        heaps = {key.name: self._candidates(key.name) for key in self._keys.waiting()}
        keys = [self._entry_of_key(name, heap) for name, heap in heaps.items()]
        heapq.heapify(keys)
        while keys:
            name = heapq.heappop(keys)[-1]
            heap = heaps[name]
            candidate = self._pop_best(heap)
            yield candidate.request
            following = next(candidate.rest, None)
            if following is not None:
                candidate.request = following
                heapq.heappush(heap, candidate.entry)
            if heap:
                heapq.heappush(keys, self._entry_of_key(name, heap))

    def add(self, request: Request) -> None:
        principal, adapter_id = _names(request)
        ledger = self._adapters.setdefault(principal, _Ledger())
        ledger.add_waiting(adapter_id)
        self._keys.add_waiting(principal)
        rank = (request.message.priority, preempted_first(request), request.number)
        ledger.account(adapter_id).queue.add(request, rank)

    def remove(self, request: Request) -> None:
        principal, adapter_id = _names(request)
        ledger = self._adapters[principal]
        queue = ledger.account(adapter_id).queue
        queue.remove(request)
        if not len(queue):
            ledger.remove_waiting(adapter_id)
        if not len(ledger):
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

    def num_ahead(self, request: Request) -> int:
        """Count the other requests of its account, and of each other account as many as go before."""
        own, others = 0, []
        for key in self._keys.waiting():
            for account in self._adapters[key.name].waiting():
                urgent = sum(r.message.priority <= request.message.priority for r in account.queue)
                if (key.name, account.name) == _names(request):
                    own = urgent
                else:
                    others.append(urgent)
        return own + sum(min(urgent, own + 1) for urgent in others)

    def on_computed(self, request: Request, num_prompt: int, num_generated: int) -> None:
        self._charge(request, ANSWER_WEIGHT * num_generated)

    def _charge(self, request: Request, tokens: float) -> None:
        principal, adapter_id = _names(request)
        self._keys.charge(principal, tokens / self._quotas.key_weight())
        self._adapters[principal].charge(adapter_id, tokens / self._quotas.weight(adapter_id))

    def _accounts(self, request: Request) -> tuple[_FairAccount, _FairAccount]:
        principal, adapter_id = _names(request)
        return self._keys.account(principal), self._adapters[principal].account(adapter_id)

    def _entry_of_key(self, name: str, heap: list[_Entry]) -> tuple[int, int, float, int, str]:
        priority, preempted, _, number, _ = heap[0]
        return priority, preempted, self._keys.account(name).served, number, name

    def _candidates(self, principal: str) -> list[_Entry]:
        """Return a heap of the waiting accounts of a key."""
        heap = []
        for account in self._adapters[principal].waiting():
            rest = account.candidates()
            heap.append(_Candidate(account, next(rest), rest).entry)
        heapq.heapify(heap)
        return heap

    def _pop_best(self, heap: list[_Entry]) -> _Candidate:
        """Pop the account with the least service, or one slightly above whose adapter is in the batch already."""
        best = heapq.heappop(heap)
        gap = self._sharing_gain(best[-1].request)
        if gap <= 0:
            return best[-1]
        passed: list[_Entry] = []
        chosen = best
        while heap and len(passed) < MAX_COMPARED and heap[0][:2] == best[:2] and heap[0][2] <= best[2] + gap:
            entry = heapq.heappop(heap)
            if entry[-1].request.adapter_key in self._in_batch:
                chosen = entry
                passed.append(best)
                break
            passed.append(entry)
        for entry in passed:
            heapq.heappush(heap, entry)
        return chosen[-1]

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
