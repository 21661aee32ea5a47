"""Quotas: what each adapter and each API key uses now, compared with its `Limits`.

A request counts on two accounts, its adapter's and its key's, and must stay within the limits of both. Rates are token
buckets that may become negative: a prompt chunk is computed whole, and the account then waits until the bucket refills.
Quotas only answer questions; the caller decides what to do with a request that exceeds them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from adapter_store.spec import AdapterKey
from adapter_store.storage.snapshots import SnapshotName
from lorasrv.config import WHOLE, Limits, LimitShare
from lorasrv.memory.memory_manager import MemoryManager
from lorasrv.outputs import RequestId
from lorasrv.request import AdapterTerm, Request
from lorasrv.scheduler.beam_search import BeamGroups
from lorasrv.token_bucket import TokenBucket

BURST_S = 2.0
"""An account that was idle may compute the tokens of this many seconds at once, if it is not shared."""
MIN_SWEEP = 512
_NONE = Limits()


class Blocker(NamedTuple):
    """Name the reason why waiting requests cannot run."""

    kind: str
    name: str

    @classmethod
    def of_key(cls, principal: str) -> "Blocker":
        """Return the limits of a key on running requests and on rate, which block all requests of the key."""
        return cls("key", principal)

    @classmethod
    def limits_of(cls, adapter_id: str, principal: str) -> "tuple[Blocker, ...]":
        """Return all limits of an adapter and a key."""
        accounts = (("adapter", adapter_id), ("key", principal))
        return tuple(cls(kind, name) for of, name in accounts for kind in (of, f"bytes of {of}"))

    @classmethod
    def of_load(cls, key: AdapterKey | None) -> "Blocker":
        """Return the load of an adapter."""
        return cls("load", str(key))

    @classmethod
    def of_prompt(cls, first: RequestId) -> "Blocker":
        """Return the first choice of a prompt, which further choices wait for."""
        return cls("prompt", first)

    @classmethod
    def of_group(cls, beam: Request) -> "Blocker":
        """Return the other beams of a group, which a beam that has offered waits for."""
        return cls("group", beam.message.fork_of or beam.request_id)

    @classmethod
    def of_snapshot(cls, name: SnapshotName) -> "Blocker":
        """Return a snapshot that is being restored, with which requests begin."""
        return cls("snapshot", name.file)

    @property
    def is_of_key(self) -> bool:
        """Return whether all requests of a key are blocked."""
        return self.kind == "key"

    @property
    def is_of_adapter(self) -> bool:
        """Return whether requests wait until an adapter's state changes. A snapshot counts: it gets pages once its
        adapter has pages."""
        return self.kind in ("load", "host memory", "snapshot")


@dataclass(slots=True)
class _QuotaAccount:
    """Count what one adapter or key uses now."""

    kind: str
    name: str
    limits: Limits
    # Tokens it may compute; None if its rate is not limited.
    tokens: TokenBucket | None
    share: LimitShare = WHOLE
    num_running: int = 0
    num_waiting: int = 0
    # Waiting requests that the next step can admit within limits and request slots.
    num_with_slot: int = 0
    # Pages that its running requests may come to hold, including their adapters.
    pages: int = 0
    uses: Counter[AdapterKey] = field(default_factory=Counter)

    @property
    def is_idle(self) -> bool:
        return not self.num_running and not self.num_waiting

    @property
    def num_queued(self) -> int:
        """Return the number of requests that waited through a step or that the next step cannot admit."""
        return self.num_waiting - self.num_with_slot

    def allows(self, num_running: int, resident_bytes: int) -> bool:
        """Return whether so many requests may run at a time and hold so many bytes of the pool, ignoring the share."""
        most, most_bytes = self.limits.max_running, self.limits.resident_bytes
        return (most is None or num_running <= most) and (most_bytes is None or resident_bytes <= most_bytes)

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name!r}" if self.name else "the base"


class Quotas:
    """Keep the accounts of adapters and keys. Mutated by the engine thread only.

    Args:
        of_adapters, of_keys: default limits of adapters and keys.
        memory: page sizes of requests and adapters.
        request_slots: requests that run at a time.
        beams: the groups of beams, which run together.
    """

    def __init__(
        self, of_adapters: Limits, of_keys: Limits, memory: MemoryManager, request_slots: int, beams: BeamGroups
    ) -> None:
        self._of_adapters, self._of_keys = of_adapters, of_keys
        self._beams = beams
        self._memory = memory
        self._page_bytes = memory.layout.block_bytes
        self._clock = memory.clock
        self._own: dict[str, Limits] = {}
        self._shares: dict[str, LimitShare] = {}
        # Adapters with a rate of their own, and whether any account may have one.
        self._rated: set[str] = set()
        self._has_rates = False
        self._count_rates()
        self._adapters: dict[str, _QuotaAccount] = {}
        self._keys: dict[str, _QuotaAccount] = {}
        self._reserved: dict[RequestId, int] = {}
        self._request_slots, self._num_waiting = request_slots, 0
        self._relieved: set[Blocker] = set()
        self._with_slot: list[_QuotaAccount] = []
        self._num_swept = MIN_SWEEP

    def set_limits(self, adapter_id: str, limits: Limits | None) -> None:
        """Set an adapter's own limits; None restores the default limits."""
        if limits is None:
            self._own.pop(adapter_id, None)
        else:
            self._own[adapter_id] = limits
        self._rated.discard(adapter_id)
        if limits is not None and limits.tokens_per_s is not None:
            self._rated.add(adapter_id)
        self._count_rates()
        self._fit(adapter_id)

    def set_share(self, adapter_id: str, share: LimitShare) -> LimitShare:
        """Set what this engine may use of an adapter's limits. Running requests, with all beams of their groups, go on.

        Returns:
            What the engine uses for now: the share, or more while earlier requests still run, or the old rate while
            tokens are owed.
        """
        if share == WHOLE:
            self._shares.pop(adapter_id, None)
        else:
            self._shares[adapter_id] = share
        account = self._fit(adapter_id)
        if account is None:
            return share
        rate = share.tokens_per_s
        if rate is not None and account.tokens is not None:
            rate = max(rate, account.tokens.rate)
        return share.union(LimitShare(self._num_used(account), rate))

    def relieve_shared(self) -> None:
        """Note that adapters with a share may use more of it: groups of beams have ended."""
        for account in map(self._adapters.get, self._shares):
            if account is not None:
                self._relieve(account)

    def _fit(self, adapter_id: str) -> _QuotaAccount | None:
        """Apply the limits and the share of an adapter to its account, if it has one."""
        if (account := self._adapters.get(adapter_id)) is None:
            return None
        account.limits, account.share = self._limits_of(adapter_id), self._shares.get(adapter_id, WHOLE)
        self._relieve(account)
        most = min((n for n in (account.limits.max_running, account.share.max_running) if n is not None), default=None)
        if most is not None:
            account.num_with_slot = min(account.num_with_slot, most)
        rate = _rate(account.limits, account.share)
        if rate is None or account.tokens is None:
            account.tokens = self._bucket(account.limits, account.share)
        elif rate or not (account.num_running or account.tokens.level < 0):
            account.tokens.resize(rate, BURST_S * rate)
        return account

    def weight(self, adapter_id: str) -> float:
        """Return an adapter's weight in fair sharing."""
        return self._limits_of(adapter_id).weight

    def key_weight(self) -> float:
        """Return the weight of every key in fair sharing."""
        return self._of_keys.weight

    # Checks.
    def why_not_queue(self, request: Request) -> str | None:
        """Return which limit forbids one more waiting request; None if none does. Call before `add`. Requests that
        arrive between two steps and find a request slot do not count as queued."""
        accounts = self._accounts(request)
        if self._has_slot(accounts):
            return None
        for account in accounts:
            most = account.limits.max_queued
            if most is not None and account.num_queued >= most:
                return f"{account.label} has {account.num_queued} requests waiting; its max_queued is {most}"
        return None

    def why_unfit(self, request: Request) -> str | None:
        """Return which limit prevents the request, with all beams that must run together, from ever running; None if
        none does."""
        width, needed = self._needs_of_group(request)
        for account in self._accounts(request):
            most = account.limits.max_running
            if most is not None and most < width:
                return f"{width} beams run together, but max_running of {account.label} is {most}; ask for fewer"
            resident = account.limits.resident_bytes
            if resident is not None and needed * self._page_bytes > resident:
                return (
                    f"the request may come to hold {needed * self._page_bytes} bytes of the pool with its adapter, "
                    f"but {account.label} may hold {resident}; ask for fewer tokens or raise the limit"
                )
        return None

    def allow_together(self, groups: Iterable[Request]) -> bool:
        """Return whether groups of beams can all run to their ends at the same time: whether there are enough request
        slots, pages and shares of every account for all of them.

        Args:
            groups: one beam of each.
        """
        accounts: dict[tuple[str, str], _QuotaAccount] = {}
        slots, pages = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for request in groups:
            width, needed = self._needs_of_group(request)
            for account in self._accounts(request):
                name = account.kind, account.name
                accounts[name] = account
                slots[name] += width
                pages[name] += needed
        # Every request counts on one account of a key.
        of_keys = [name for name in accounts if name[0] == "key"]
        if sum(slots[name] for name in of_keys) > self._request_slots:
            return False
        if sum(pages[name] for name in of_keys) > self._memory.kv_pool.num_pages:
            return False
        return all(account.allows(slots[name], pages[name] * self._page_bytes) for name, account in accounts.items())

    def blocker(self, request: Request) -> tuple[Blocker, float | None] | None:
        """Return which limit prevents a waiting request from running now, and when a rate will allow it; None if none
        does. The caller asks again when `take_relieved` names the limit."""
        for account in reversed(self._accounts(request)):
            most, share = account.limits.max_running, account.share.max_running
            if most is not None and account.num_running >= most:
                return Blocker(account.kind, account.name), None
            if share is not None and self._exceeds(account, request, share):
                return Blocker(account.kind, account.name), None
            if not self._has_bytes(account, request):
                return Blocker(f"bytes of {account.kind}", account.name), None
        return self.rate_blocker(request)

    def rate_blocker(self, request: Request) -> tuple[Blocker, float] | None:
        """Return which rate limit denies a request tokens now, and until when; None if none does."""
        if not self._has_rates:
            return None
        accounts = self._accounts(request)
        waits = [(a.tokens.wait_s(0.0), a.kind, a.name) for a in accounts if a.tokens is not None]
        wait_s, kind, name = max(waits, default=(0.0, "", ""))
        return (Blocker(kind, name), self._clock() + wait_s) if wait_s > 0 else None

    def take_relieved(self) -> set[Blocker]:
        """Return the limits that may allow more since the last call."""
        relieved, self._relieved = self._relieved, set()
        return relieved

    def retry_after_s(self, request: Request, answer_s: float, max_running: int) -> float:
        """Estimate the seconds until one more request could wait, if an answer takes `answer_s`."""
        blocker = self.rate_blocker(request)
        owed_s = 0.0 if blocker is None or blocker[1] == math.inf else blocker[1] - self._clock()
        queues = (a.num_waiting / (a.limits.max_running or max_running) for a in self._accounts(request))
        return owed_s + max(queues) * answer_s

    # Transitions of a request.
    def begin_step(self) -> None:
        """Count the requests that are waiting now as queued."""
        for account in self._with_slot:
            account.num_with_slot = 0
        self._with_slot.clear()

    def add(self, request: Request) -> None:
        """Count a new waiting request."""
        accounts = self._open(request)
        if self._has_slot(accounts):
            self._with_slot += accounts
            for account in accounts:
                account.num_with_slot += 1
        self._num_waiting += 1
        for account in accounts:
            account.num_waiting += 1

    def admit(self, request: Request) -> None:
        """Move a request from waiting to running."""
        pages = self._pages_reserved_by(request)
        self._reserved[request.request_id] = pages
        self._num_waiting -= 1
        for account in self._open(request):
            account.num_waiting -= 1
            account.num_running += 1
            account.pages += pages + self._pages_of_new_adapter(account, request)
            account.uses.update(request.term_keys)

    def preempt(self, request: Request) -> None:
        """Move a request from running back to waiting."""
        pages = self._reserved.pop(request.request_id)
        self._num_waiting += 1
        for account in self._accounts(request):
            account.num_waiting += 1
            account.num_running -= 1
            self._relieve(account)
            for key in request.term_keys:
                account.uses[key] -= 1
                if not account.uses[key]:
                    del account.uses[key]
            account.pages -= pages + self._pages_of_new_adapter(account, request)

    def remove(self, request: Request) -> None:
        """Stop counting a waiting request that has finished."""
        self._num_waiting -= 1
        for account in self._accounts(request):
            account.num_waiting -= 1
            # Any of the requests may have left; the next step admits at most those that still wait.
            account.num_with_slot = min(account.num_with_slot, account.num_waiting)
        if len(self._adapters) + len(self._keys) > 2 * self._num_swept:
            self._sweep()

    def charge(self, request: Request, num_tokens: int) -> None:
        """Charge computed tokens to the request's accounts."""
        for account in self._accounts(request) if self._has_rates else ():
            if account.tokens is not None:
                account.tokens.take(num_tokens)

    def check_integrity(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Compare the counts with the live requests.

        Raises:
            AssertionError: they differ.
        """
        for accounts, name in ((self._adapters, "adapter_id"), (self._keys, "principal")):
            runs = Counter(getattr(r.message, name) for r in running)
            waits = Counter(getattr(r.message, name) for r in waiting)
            assert {n: a.num_running for n, a in accounts.items() if a.num_running} == runs, "running requests differ"
            assert {n: a.num_waiting for n, a in accounts.items() if a.num_waiting} == waits, "waiting requests differ"
        assert self._num_waiting == len(waiting), "waiting requests differ"
        assert self._reserved.keys() == {r.request_id for r in running}, "reservations differ from those that run"

    def _has_slot(self, accounts: Sequence[_QuotaAccount]) -> bool:
        """Return whether the next step may admit one more request. It may not if one of these accounts has a request
        that waited through a step."""
        free = self._request_slots - len(self._reserved) - self._num_waiting
        return free > 0 and all(self._has_own_slot(account) and account.num_queued <= 0 for account in accounts)

    def _has_own_slot(self, account: _QuotaAccount) -> bool:
        most, share = account.limits.max_running, account.share.max_running
        return (most is None or account.num_running + account.num_with_slot < most) and (
            share is None or self._num_used(account) + account.num_with_slot < share
        )

    def _exceeds(self, account: _QuotaAccount, request: Request, share: int) -> bool:
        """Return whether a request may not begin because of its adapter's share."""
        more = self._beams.num_more(request, share)
        return more > 0 and self._num_used(account) + more > share

    def _num_used(self, account: _QuotaAccount) -> int:
        """Return how much of an adapter's share is used, by running requests and by the beams that their groups still
        need."""
        return account.num_running + self._beams.num_missing(account.name)

    def _relieve(self, account: _QuotaAccount) -> None:
        self._relieved |= {Blocker(account.kind, account.name), Blocker(f"bytes of {account.kind}", account.name)}

    def _has_bytes(self, account: _QuotaAccount, request: Request) -> bool:
        most = account.limits.resident_bytes
        if most is None:
            return True
        pages = account.pages + self._pages_reserved_by(request) + self._pages_of_new_adapter(account, request)
        return pages * self._page_bytes <= most

    def _pages_of_new_adapter(self, account: _QuotaAccount, request: Request) -> int:
        """Return the pages that the request's adapter needs beyond those that running requests of this account use."""
        return self._pages_for(term for term in request.terms if term.key not in account.uses)

    def _sweep(self) -> None:
        """Drop accounts without requests and without debt."""
        for accounts in (self._adapters, self._keys):
            for account in list(accounts.values()):
                if account.is_idle and (account.tokens is None or account.tokens.is_full):
                    del accounts[account.name]
        self._num_swept = max(MIN_SWEEP, len(self._adapters) + len(self._keys))

    def _pages_reserved_by(self, request: Request) -> int:
        return self._memory.kv.pages_for(request.most_tokens)

    def _needs_of_group(self, request: Request) -> tuple[int, int]:
        """Return how many requests must run together (1 without beam search), and the pages that they may come to
        hold."""
        width = 1 if request.message.beams is None else request.message.beams.width
        return width, width * self._pages_reserved_by(request) + self._pages_for(request.terms)

    def _pages_for(self, terms: Iterable[AdapterTerm]) -> int:
        return sum(self._memory.adapters.pages_for(term.layout) for term in terms)

    def _count_rates(self) -> None:
        of_all = self._of_adapters.tokens_per_s, self._of_keys.tokens_per_s
        self._has_rates = bool(self._rated) or of_all != (None, None)

    def _limits_of(self, adapter_id: str) -> Limits:
        """Return an adapter's limits; the base model is limited by its keys only."""
        return self._own.get(adapter_id, self._of_adapters) if adapter_id else _NONE

    def _accounts(self, request: Request) -> tuple[_QuotaAccount, _QuotaAccount]:
        """Return the accounts of the request's adapter and key, without storing new ones."""
        message = request.message
        name = message.adapter_id
        adapter = self._adapters.get(name) or self._account(
            "adapter", name, self._limits_of(name), self._shares.get(name, WHOLE)
        )
        key = self._keys.get(message.principal) or self._account("key", message.principal, self._of_keys, WHOLE)
        return adapter, key

    def _account(self, kind: str, name: str, limits: Limits, share: LimitShare) -> _QuotaAccount:
        return _QuotaAccount(kind, name, limits, self._bucket(limits, share), share)

    def _bucket(self, limits: Limits, share: LimitShare) -> TokenBucket | None:
        """Return a full bucket, or an empty one for a share, because other engines may have used the burst."""
        rate = _rate(limits, share)
        if rate is None:
            return None
        bucket = TokenBucket(rate, BURST_S * rate, self._clock)
        if share.tokens_per_s is not None:
            bucket.take(bucket.capacity)
        return bucket

    def _open(self, request: Request) -> tuple[_QuotaAccount, _QuotaAccount]:
        adapter, key = self._accounts(request)
        self._adapters[adapter.name], self._keys[key.name] = adapter, key
        return adapter, key


def _rate(limits: Limits, share: LimitShare) -> float | None:
    """Return the tokens per second that may be computed here; None: any number."""
    rates = [rate for rate in (limits.tokens_per_s, share.tokens_per_s) if rate is not None]
    return None if limits.tokens_per_s is None else min(rates)
