"""What each adapter and each key has of the server now, against its `Limits`. Says no; who asks decides what then.

A request stands on two accounts, its adapter's and its key's, and must be within the limits of both. Rates are token
buckets that may go into debt: a chunk of a prompt is computed whole, and the account then waits until it is paid.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from adapter_store.spec import AdapterKey
from lorasrv.config import Limits
from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.outputs import RequestId
from lorasrv.request import Request
from lorasrv.token_bucket import TokenBucket

BURST_S = 2.0
"""An account that was idle may compute as much at once as in so many seconds."""
MIN_SWEEP = 512
_NONE = Limits()


@dataclass(slots=True)
class _QuotaAccount:
    """What one adapter or key has now."""

    kind: str
    name: str
    limits: Limits
    # Tokens to compute; None: its rate is not limited.
    tokens: TokenBucket | None
    num_running: int = 0
    num_waiting: int = 0
    # Of those that wait, those with a place in the next step, as far as limits and seats go.
    num_with_slot: int = 0
    # Pages that its running requests may come to hold, with the adapters that they use.
    pages: int = 0
    uses: Counter[AdapterKey] = field(default_factory=Counter)

    @property
    def is_idle(self) -> bool:
        return not self.num_running and not self.num_waiting

    @property
    def num_queued(self) -> int:
        """Those that wait though a step could have taken them, or has no place for them."""
        return self.num_waiting - self.num_with_slot

    @property
    def has_slot(self) -> bool:
        most = self.limits.max_running
        return most is None or self.num_running + self.num_with_slot < most

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name!r}" if self.name else "the base"


class Quotas:
    """The accounts of adapters and keys. Mutated by the engine thread only.

    Args:
        of_adapters, of_keys: limits of whoever has none of its own.
        books: what requests and adapters take of the pool.
        seats: requests that run at a time.
    """

    def __init__(self, of_adapters: Limits, of_keys: Limits, memory: MemoryManager, request_slots: int) -> None:
        self._of_adapters, self._of_keys = of_adapters, of_keys
        self._memory = memory
        self._page_bytes = memory.layout.block_bytes
        self._clock = memory.clock
        self._own: dict[str, Limits] = {}
        self._adapters: dict[str, _QuotaAccount] = {}
        self._keys: dict[str, _QuotaAccount] = {}
        self._reserved: dict[RequestId, int] = {}
        self._request_slots, self._num_waiting = request_slots, 0
        self._with_slot: list[_QuotaAccount] = []
        self._num_swept = MIN_SWEEP

    def set_limits(self, adapter_id: str, limits: Limits | None) -> None:
        """An adapter has these limits from now on; None: those of every adapter."""
        if limits is None:
            self._own.pop(adapter_id, None)
        else:
            self._own[adapter_id] = limits
        if (account := self._adapters.get(adapter_id)) is not None:
            account.limits = self._limits_of(adapter_id)
            rate = account.limits.tokens_per_s
            if rate is None or account.tokens is None:
                account.tokens = self._bucket(account.limits)
            else:
                account.tokens.resize(rate, BURST_S * rate)
            account.num_with_slot = min(account.num_with_slot, account.limits.max_running or account.num_with_slot)

    def weight(self, adapter_id: str) -> float:
        """An adapter's share of the service among those that wait."""
        return self._limits_of(adapter_id).weight

    def key_weight(self) -> float:
        return self._of_keys.weight

    # What a request may.

    def why_not_queue(self, request: Request) -> str | None:
        """Which limit forbids one more waiting request, if one does. Asked before `arrives`. Those that come between
        two steps and find a seat are not queued."""
        accounts = self._accounts(request)
        if self._has_slot(accounts):
            return None
        for account in accounts:
            most = account.limits.max_queued
            if most is not None and account.num_queued >= most:
                return f"{account.label} has {account.num_queued} requests waiting, and may have {most}"
        return None

    def why_unfit(self, request: Request) -> str | None:
        """Which limit forbids that it ever runs, with all the beams that must run together, if one does."""
        width = 1 if request.message.beams is None else request.message.beams.width
        needed = width * self._pages_reserved_by(request) + self._pages_for_adapter(request)
        for account in self._accounts(request):
            if account.limits.max_running is not None and account.limits.max_running < width:
                return f"{width} beams run together, but {account.label} may have {account.limits.max_running} running"
            most = account.limits.resident_bytes
            if most is not None and needed * self._page_bytes > most:
                return (
                    f"the request may come to hold {needed * self._page_bytes} bytes of the pool with its adapter, "
                    f"but {account.label} may hold {most}; lower max_tokens or raise the limit"
                )
        return None

    def may_admit(self, request: Request) -> bool:
        """Whether it may join the batch now, as far as limits go."""
        return all(self._has_capacity(account, request) for account in self._accounts(request))

    def throttled_until_s(self, request: Request) -> float | None:
        """When its adapter and its key will both have paid what they owe to their rates; None if neither owes."""
        buckets = [account.tokens for account in self._accounts(request) if account.tokens is not None]
        wait_s = max((bucket.wait_s(0.0) for bucket in buckets), default=0.0)
        return self._clock() + wait_s if wait_s > 0 else None

    def may_run(self, request: Request) -> bool:
        """Whether limits would let a request that waits join the batch now."""
        return self.may_admit(request) and self.throttled_until_s(request) is None

    def retry_after_s(self, request: Request, answer_s: float, max_running: int) -> float:
        """About when one more could wait, if an answer takes so long and nobody else is in the way."""
        owed_s = (self.throttled_until_s(request) or self._clock()) - self._clock()
        queues = (a.num_waiting / (a.limits.max_running or max_running) for a in self._accounts(request))
        return owed_s + max(queues) * answer_s

    # What becomes of it.

    def begin_step(self) -> None:
        """From now on, who waits waits."""
        for account in self._with_slot:
            account.num_with_slot = 0
        self._with_slot.clear()

    def add(self, request: Request) -> None:
        accounts = self._open(request)
        if self._has_slot(accounts):
            self._with_slot += accounts
            for account in accounts:
                account.num_with_slot += 1
        self._num_waiting += 1
        for account in accounts:
            account.num_waiting += 1

    def admit(self, request: Request) -> None:
        """A waiting request runs."""
        pages = self._pages_reserved_by(request)
        self._reserved[request.request_id] = pages
        self._num_waiting -= 1
        for account in self._open(request):
            account.num_waiting -= 1
            account.num_running += 1
            account.pages += pages + self._pages_of_new_adapter(account, request)
            if request.adapter_key is not None:
                account.uses[request.adapter_key] += 1

    def preempt(self, request: Request) -> None:
        """A running request waits again."""
        pages = self._reserved.pop(request.request_id)
        self._num_waiting += 1
        for account in self._accounts(request):
            account.num_waiting += 1
            account.num_running -= 1
            if request.adapter_key is not None:
                account.uses[request.adapter_key] -= 1
                if not account.uses[request.adapter_key]:
                    del account.uses[request.adapter_key]
            account.pages -= pages + self._pages_of_new_adapter(account, request)

    def remove(self, request: Request) -> None:
        """A waiting request is gone."""
        self._num_waiting -= 1
        for account in self._accounts(request):
            account.num_waiting -= 1
            # Whoever left, the next step will start no more than these.
            account.num_with_slot = min(account.num_with_slot, account.num_waiting)
        if len(self._adapters) + len(self._keys) > 2 * self._num_swept:
            self._sweep()

    def charge(self, request: Request, num_tokens: int) -> None:
        """So many tokens were computed for it."""
        for account in self._accounts(request):
            if account.tokens is not None:
                account.tokens.take(num_tokens)

    def check_integrity(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Raises: AssertionError: counts differ from the requests that there are."""
        for accounts, name in ((self._adapters, "adapter_id"), (self._keys, "principal")):
            runs = Counter(getattr(r.message, name) for r in running)
            waits = Counter(getattr(r.message, name) for r in waiting)
            assert {n: a.num_running for n, a in accounts.items() if a.num_running} == runs, "running requests differ"
            assert {n: a.num_waiting for n, a in accounts.items() if a.num_waiting} == waits, "waiting requests differ"
        assert self._num_waiting == len(waiting), "waiting requests differ"
        assert self._reserved.keys() == {r.request_id for r in running}, "reservations differ from those that run"

    def _has_slot(self, accounts: Sequence[_QuotaAccount]) -> bool:
        """Whether the next step may have a place for one more: no step has left anybody of these accounts waiting."""
        free = self._request_slots - len(self._reserved) - self._num_waiting
        return free > 0 and all(account.has_slot and account.num_queued <= 0 for account in accounts)

    def _has_capacity(self, account: _QuotaAccount, request: Request) -> bool:
        limits = account.limits
        if limits.max_running is not None and account.num_running >= limits.max_running:
            return False
        if limits.resident_bytes is None:
            return True
        pages = account.pages + self._pages_reserved_by(request) + self._pages_of_new_adapter(account, request)
        return pages * self._page_bytes <= limits.resident_bytes

    def _pages_of_new_adapter(self, account: _QuotaAccount, request: Request) -> int:
        """Of the request's adapter, if nobody of this account uses it."""
        key = request.adapter_key
        return 0 if key is None or key in account.uses else self._pages_for_adapter(request)

    def _sweep(self) -> None:
        """Forget accounts that have nothing and owe nothing."""
        for accounts in (self._adapters, self._keys):
            for account in list(accounts.values()):
                if account.is_idle and (account.tokens is None or account.tokens.is_full):
                    del accounts[account.name]
        self._num_swept = max(MIN_SWEEP, len(self._adapters) + len(self._keys))

    def _pages_reserved_by(self, request: Request) -> int:
        return self._memory.kv.pages_for(request.num_prompt_tokens + request.message.max_tokens)

    def _pages_for_adapter(self, request: Request) -> int:
        layout = request.message.layout
        return 0 if request.adapter_key is None or layout is None else self._memory.adapters.pages_for(layout)

    def _limits_of(self, adapter_id: str) -> Limits:
        """The base has none but its keys'."""
        return self._own.get(adapter_id, self._of_adapters) if adapter_id else _NONE

    def _accounts(self, request: Request) -> tuple[_QuotaAccount, _QuotaAccount]:
        """Its adapter's and its key's; not kept if they are new."""
        message = request.message
        adapter = self._adapters.get(message.adapter_id) or self._account(
            "adapter", message.adapter_id, self._limits_of(message.adapter_id)
        )
        key = self._keys.get(message.principal) or self._account("key", message.principal, self._of_keys)
        return adapter, key

    def _account(self, kind: str, name: str, limits: Limits) -> _QuotaAccount:
        return _QuotaAccount(kind, name, limits, self._bucket(limits))

    def _bucket(self, limits: Limits) -> TokenBucket | None:
        rate = limits.tokens_per_s
        return None if rate is None else TokenBucket(rate, BURST_S * rate, self._clock)

    def _open(self, request: Request) -> tuple[_QuotaAccount, _QuotaAccount]:
        adapter, key = self._accounts(request)
        self._adapters[adapter.name], self._keys[key.name] = adapter, key
        return adapter, key
