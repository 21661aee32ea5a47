"""Fair shares: of keys, and within a key of its adapters, by virtual token counters (VTC, Sheng et al., OSDI 2024).

Each account counts the service that its requests have had, over its weight; the one with the least goes first. Whoever
comes back after a pause is lifted to the least of those that wait: nobody saves up. For two accounts of a key that both
have requests waiting all the time, and two keys likewise, the weighted services differ by at most

    2 · max(Wp · longest prompt, Wq · M) / smallest weight + SHARING_TOKENS

with M the most tokens that one account's running requests can still generate (theorem 4.4 there; the last term is
ours).

A step that serves fewer distinct adapters is shorter. Where the gap between two accounts is worth less than that, the
one whose adapter is in the batch already goes first.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from adapter_store.spec import AdapterKey
from lorasrv.length_predictor import LengthPredictor
from lorasrv.policies.policy import Policy, SortedQueue, set_back_first
from lorasrv.quotas import Quotas
from lorasrv.request import Request
from lorasrv.step_costs import StepCosts

PROMPT_WEIGHT = 1.0
ANSWER_WEIGHT = 2.0
SHARING_TOKENS = 256.0
"""No gap above this is given up to share an adapter."""
MAX_COMPARED = 8
MEDIAN = 0.5
MIN_SWEEP = 1024


@dataclass(slots=True)
class _Account:
    """`served`: weighted tokens. Waits while its queue has requests, or, of a key, while one of its adapters waits."""

    name: str
    served: float = 0.0
    queue: SortedQueue = field(default_factory=SortedQueue)


class _Ledger:
    """Accounts that are compared with one another."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._waiting: dict[str, _Account] = {}
        self._floor = 0.0
        self._next_sweep = MIN_SWEEP

    def __len__(self) -> int:
        return len(self._waiting)

    def account(self, name: str) -> _Account:
        if name not in self._accounts:
            self._accounts[name] = _Account(name)
        return self._accounts[name]

    def waiting(self) -> Iterator[_Account]:
        return iter(self._waiting.values())

    def enter(self, name: str) -> None:
        """It has something that waits; what it had saved up is gone."""
        if name in self._waiting:
            return
        account = self.account(name)
        if self._waiting:
            self._floor = min(other.served for other in self._waiting.values())
        account.served = max(account.served, self._floor)
        self._waiting[name] = account

    def leave(self, name: str) -> None:
        """Nothing of it waits any more."""
        account = self._waiting.pop(name)
        if not self._waiting:
            self._floor = account.served
        if len(self._accounts) >= self._next_sweep:
            self._sweep()

    def charge(self, name: str, tokens: float) -> None:
        if name in self._accounts:
            self._accounts[name].served += tokens

    def _sweep(self) -> None:
        """An account that would be lifted when it comes back need not be remembered."""
        floor = min((a.served for a in self._waiting.values()), default=self._floor)
        gone = [name for name, a in self._accounts.items() if name not in self._waiting and a.served <= floor]
        for name in gone:
            del self._accounts[name]
        self._next_sweep = max(MIN_SWEEP, 2 * len(self._accounts))


_Entry = tuple[int, int, float, int, str]
"""Of a heap of accounts: priority of its first request and whether that was set back, the service it has had, and in
which order that request arrived."""


class Fair(Policy):
    """Least weighted service."""

    def __init__(self, quotas: Quotas, costs: StepCosts, predictor: LengthPredictor) -> None:
        self._quotas = quotas
        self._costs = costs
        self._predictor = predictor
        self._keys = _Ledger()
        self._adapters: dict[str, _Ledger] = {}
        self._in_batch: Counter[AdapterKey | None] = Counter()

    def served_by_adapter(self, principal: str, adapter_id: str) -> float:
        """Weighted tokens on this account, lifts included."""
        return self._adapters[principal].account(adapter_id).served

    def waiting(self) -> Iterator[Request]:
        """One account's turn ends with a request that does not start: its others stand behind that."""
        heaps = {key.name: self._heap_of(key.name) for key in self._keys.waiting()}
        keys = [self._entry_of_key(name, heap) for name, heap in heaps.items()]
        heapq.heapify(keys)
        while keys:
            *_, name = heapq.heappop(keys)
            heap = heaps[name]
            account = self._take(name, heap)
            request = account.queue.first
            yield request
            if len(account.queue) and account.queue.first is not request:
                heapq.heappush(heap, _entry(account))
            if heap:
                heapq.heappush(keys, self._entry_of_key(name, heap))

    def arrives(self, request: Request) -> None:
        principal, adapter_id = _names(request)
        ledger = self._adapters.setdefault(principal, _Ledger())
        ledger.enter(adapter_id)
        self._keys.enter(principal)
        rank = (request.message.priority, set_back_first(request), request.number)
        ledger.account(adapter_id).queue.add(request, rank)

    def leaves(self, request: Request) -> None:
        principal, adapter_id = _names(request)
        ledger = self._adapters[principal]
        queue = ledger.account(adapter_id).queue
        queue.remove(request)
        if not len(queue):
            ledger.leave(adapter_id)
        if not len(ledger):
            self._keys.leave(principal)

    def starts(self, request: Request) -> None:
        self._in_batch[request.adapter_key] += 1
        if not request.num_preemptions:
            self._charge(request, PROMPT_WEIGHT * (request.num_prompt_tokens - request.num_cached_tokens))

    def stops(self, request: Request) -> None:
        self._in_batch[request.adapter_key] -= 1
        if not self._in_batch[request.adapter_key]:
            del self._in_batch[request.adapter_key]

    def served(self, request: Request, num_prompt: int, num_generated: int) -> None:
        self._charge(request, ANSWER_WEIGHT * num_generated)

    def _charge(self, request: Request, tokens: float) -> None:
        principal, adapter_id = _names(request)
        self._keys.charge(principal, tokens / self._quotas.key_weight())
        self._adapters[principal].charge(adapter_id, tokens / self._quotas.weight(adapter_id))

    def _entry_of_key(self, name: str, heap: list[_Entry]) -> _Entry:
        priority, set_back, _, number, _ = heap[0]
        return priority, set_back, self._keys.account(name).served, number, name

    def _heap_of(self, principal: str) -> list[_Entry]:
        heap = [_entry(account) for account in self._adapters[principal].waiting()]
        heapq.heapify(heap)
        return heap

    def _take(self, principal: str, heap: list[_Entry]) -> _Account:
        """The account with the least service, or one little above it whose adapter costs the step nothing more."""
        ledger = self._adapters[principal]
        best = heapq.heappop(heap)
        account = ledger.account(best[-1])
        gap = self._worth_of_sharing(account.queue.first)
        if gap <= 0:
            return account
        passed: list[_Entry] = []
        while heap and len(passed) < MAX_COMPARED and heap[0][:2] == best[:2] and heap[0][2] <= best[2] + gap:
            entry = heapq.heappop(heap)
            other = ledger.account(entry[-1])
            if other.queue.first.adapter_key in self._in_batch:
                account, entry = other, best
            passed.append(entry)
            if account is other:
                break
        for entry in passed:
            heapq.heappush(heap, entry)
        return account

    def _worth_of_sharing(self, request: Request) -> float:
        """In weighted tokens: what the request's adapter adds to all the steps that it will be in; 0 if it is in the
        batch already."""
        layout = request.message.layout
        if request.adapter_key is None or layout is None or request.adapter_key in self._in_batch:
            return 0.0
        seconds = self._costs.adapter_s(layout.nbytes) * self._predictor.remaining(request, MEDIAN)
        return min(SHARING_TOKENS, ANSWER_WEIGHT * seconds / max(self._costs.token_s, 1e-9))


def _names(request: Request) -> tuple[str, str]:
    return request.message.principal, request.message.adapter_id


def _entry(account: _Account) -> _Entry:
    first = account.queue.first
    return first.message.priority, set_back_first(first), account.served, first.number, account.name
