"""How much each key uses of the server, against its `KeyLimits`: requests and tokens in a minute, answers at a time.

Rates are token buckets that hold a minute's worth and fill steadily, so a key that was idle may send that much at once.
How long an answer will be is not known before: a prompt counts when it is accepted and an answer when it has ended, and
the bucket of tokens may go into debt, which must be paid before the next request. What was generated counts, whether
or not it was read. What is refused, here or by the engine, costs nothing; what ran out of time does, as it may have
been computed for long, and what was refused because its adapter is cold is the request that warming is. Whatever else
changes or computes something is a request that no tokens come of, also if it fails. In memory: a restart forgives. For
the event loop's thread.
"""

import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.principal import Caller, KeyLimits, caller_of
from api.auth.scopes import is_counted
from api.errors import describe_at
from lorasrv.errors import AdapterCold, InvalidRequest, LimitExceeded, RequestTimeout
from lorasrv.outputs import RequestOutput
from lorasrv.token_bucket import TokenBucket

if TYPE_CHECKING:
    from lorasrv.engine.output_processor import RequestStream


HEADERS = tuple(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset"))
"""What answers tell a key of its rates, as OpenAI's do."""
USUAL_ANSWER_S = 1.0
RECENT = 0.2
"""The weight of the newest answer in what is taken for the usual time of one."""
MAX_ACCOUNTS = 4096
# What floating point loses while a bucket fills, or in a sum of seconds.
_SPECK = 1e-6


@dataclass(slots=True)
class _KeyAccount:
    """What one key has used."""

    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    # When each answer began that has not ended, oldest first.
    begun_s: list[float] = field(default_factory=list)
    answer_s: float = USUAL_ANSWER_S

    def set_limits(self, limits: KeyLimits, clock: Callable[[], float]) -> None:
        """Follow limits that have changed."""
        self.requests = _bucket(self.requests, limits.requests_per_min, clock)
        self.tokens = _bucket(self.tokens, limits.tokens_per_min, clock)

    def check(self, limits: KeyLimits, prompts: int, answers: int, now_s: float) -> None:
        """Check that so much may be taken. Raises: LimitExceeded: not now. InvalidRequest: never."""
        if self.requests is not None:
            _refuse_never(prompts, "prompts", self.requests.capacity, "requests_per_min", "prompt")
            self.check_requests(prompts)
        if self.tokens is not None:
            _refuse(self.tokens.wait_s(1), f"{self.tokens.capacity:.0f} tokens a minute (tokens_per_min)")
        most = limits.max_concurrent
        if most is not None:
            param = "prompt" if prompts == answers else "n"
            _refuse_never(answers, "answers at a time", most, "max_concurrent", param)
            over = len(self.begun_s) + answers - most
            if over > 0:
                ends_s = self.begun_s[over - 1] + self.answer_s
                _refuse(max(USUAL_ANSWER_S, ends_s - now_s), f"{most} answers at a time (max_concurrent)")

    def check_requests(self, number: int) -> None:
        """Check that so many requests may be taken. Raises: LimitExceeded: not now."""
        if self.requests is not None:
            _refuse(self.requests.wait_s(number), f"{self.requests.capacity:.0f} requests a minute (requests_per_min)")

    def is_forgettable(self) -> bool:
        buckets = (bucket for bucket in (self.requests, self.tokens) if bucket is not None)
        return not self.begun_s and all(bucket.is_full for bucket in buckets)


class Reservation:
    """What one request has taken of its key's limits, until the last of its answers has ended."""

    def __init__(self, account: _KeyAccount, prompts: int, answers: int, clock: Callable[[], float]) -> None:
        self.account = account
        self._clock = clock
        self._begun_s = clock()
        self._num_requests, self._num_open = prompts, answers
        self._num_prompt_tokens = 0
        self.is_answered = self._is_refused = self._has_warmed = False
        account.begun_s += [self._begun_s] * answers
        if account.requests is not None:
            account.requests.take(prompts)

    def count(self, streams: "Sequence[RequestStream]") -> "list[CountedStream]":
        """Charge a prompt that was accepted, and return its answers so that they are charged as they end."""
        self._num_prompt_tokens += streams[0].num_prompt_tokens
        self.charge(streams[0].num_prompt_tokens)
        return [CountedStream(stream, self) for stream in streams]

    def charge(self, num_tokens: int) -> None:
        if self.account.tokens is not None:
            self.account.tokens.take(num_tokens)

    def end(self, count: int = 1, *, refused: bool = False, warmed: bool = False) -> None:
        """Note that so many answers have ended. If none was begun, because of a refusal, nothing was used, but for the
        request where that has `warmed` an adapter."""
        count = min(count, self._num_open)
        for _ in range(count):
            self.account.begun_s.remove(self._begun_s)
        self._num_open -= count
        self._is_refused |= refused
        self._has_warmed |= warmed
        if not count or self._num_open:
            return
        if not self.is_answered and self._is_refused:
            if self.account.tokens is not None:
                self.account.tokens.give_back(self._num_prompt_tokens)
            if self.account.requests is not None and not self._has_warmed:
                self.account.requests.give_back(self._num_requests)
        elif self.is_answered:
            self.account.answer_s += RECENT * (self._clock() - self._begun_s - self.account.answer_s)

    def refuse(self) -> None:
        """Give all of it back: the request was not accepted."""
        self.is_answered = False
        self.end(self._num_open, refused=True)


class CountedStream(AsyncIterator[RequestOutput]):
    """A stream of which every token is counted, and how it ends."""

    def __init__(self, stream: "RequestStream", use: Reservation) -> None:
        self.request_id = stream.request_id
        self._stream = stream
        self._use: Reservation | None = use

    async def __anext__(self) -> RequestOutput:
        try:
            output = await anext(self._stream)
        except Exception as error:
            self._end(refused=not isinstance(error, RequestTimeout), warmed=isinstance(error, AdapterCold))
            raise
        if self._use is not None:
            self._use.is_answered = True
        if output.finished:
            self._end()
        return output

    async def aclose(self) -> None:
        self._end()
        await self._stream.aclose()

    def _end(self, *, refused: bool = False, warmed: bool = False) -> None:
        use, self._use = self._use, None
        if use is not None:
            # Also of what its reader has not taken: who stops reading has had it computed.
            use.charge(self._stream.num_generated_tokens)
            use.end(refused=refused, warmed=warmed)


class RateLimiter:
    """The accounts of keys that have limits.

    Args:
        clock: monotonic seconds.
        on_refused: told of every request that is refused here.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, on_refused: Callable[[Exception], object] = lambda _: None
    ) -> None:
        self._clock = clock
        self._on_refused = on_refused
        self._accounts: dict[str, _KeyAccount] = {}

    def check(self, caller: Caller) -> None:
        """Check that one more request could be accepted now, before anything is done for it. Raises: LimitExceeded."""
        if (account := self._account(caller)) is not None:
            self._check(account, caller.limits, 1, 1)

    def spend(self, caller: Caller) -> None:
        """Take one request that no tokens come of; a debt of tokens does not keep it back. Raises: LimitExceeded."""
        if (account := self._account(caller)) is not None and account.requests is not None:
            try:
                account.check_requests(1)
            except LimitExceeded as error:
                self._on_refused(error)
                raise
            account.requests.take(1)

    def reserve(self, caller: Caller, prompts: int, answers: int) -> Reservation | None:
        """Take so many requests and answers of a key at once; None: nothing limits it.

        Raises:
            LimitExceeded: the key has used what it may, for now; says which limit.
            InvalidRequest: it is more at once than the key may ever have.
        """
        account = self._account(caller)
        if account is None:
            return None
        self._check(account, caller.limits, prompts, answers)
        return Reservation(account, prompts, answers, self._clock)

    def headers(self, caller: Caller) -> dict[str, str]:
        """Return what is left of the key's rates; nothing if it has none."""
        account = self._account(caller)
        found: dict[str, str] = {}
        if account is not None and account.requests is not None:
            found |= _headers(account.requests, "requests")
        if account is not None and account.tokens is not None:
            found |= _headers(account.tokens, "tokens")
        return found

    def _check(self, account: _KeyAccount, limits: KeyLimits, prompts: int, answers: int) -> None:
        try:
            account.check(limits, prompts, answers, self._clock())
        except (LimitExceeded, InvalidRequest) as error:
            self._on_refused(error)
            raise

    def _account(self, caller: Caller) -> _KeyAccount | None:
        """Return the account of the key with its limits as they are now; None if nothing limits it."""
        limits = caller.limits
        if limits.requests_per_min is None and limits.tokens_per_min is None and limits.max_concurrent is None:
            return None
        account = self._accounts.get(caller.principal)
        if account is None:
            if len(self._accounts) >= MAX_ACCOUNTS:
                self._accounts = {name: kept for name, kept in self._accounts.items() if not kept.is_forgettable()}
            account = self._accounts[caller.principal] = _KeyAccount()
        account.set_limits(limits, self._clock)
        return account


class RateLimitMiddleware:
    """Count every request that changes or computes something, but for those whose routes do so themselves, and tell
    every key that has a rate what is left of it, with each answer. Goes behind the middleware that finds the caller."""

    def __init__(self, app: ASGIApp, allowances: RateLimiter) -> None:
        self._app = app
        self._allowances = allowances

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._allowances.headers(caller := caller_of(scope)):
            await self._app(scope, receive, send)
            return
        refusal: LimitExceeded | None = None
        if is_counted(scope["method"], scope["path"]):
            try:
                self._allowances.spend(caller)
            except LimitExceeded as error:
                refusal = error

        async def send_with_rates(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._allowances.headers(caller))
            await send(message)

        app = self._app if refusal is None else describe_at(scope["path"], refusal).response()
        await app(scope, receive, send_with_rates)


def duration(seconds: float) -> str:
    """As OpenAI writes one: `6m0s`, `1.5s`, `20ms`."""
    ms = math.ceil(1000 * seconds - _SPECK)
    if ms < 1000:
        return f"{max(0, ms)}ms"
    minutes, rest = divmod(ms / 1000, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"


def _bucket(bucket: TokenBucket | None, per_min: int | None, clock: Callable[[], float]) -> TokenBucket | None:
    if per_min is None:
        return None
    if bucket is None:
        return TokenBucket(per_min / 60, per_min, clock)
    if bucket.capacity != per_min:
        bucket.resize(per_min / 60, per_min)
    return bucket


def _headers(bucket: TokenBucket, of: str) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{of}": f"{bucket.capacity:.0f}",
        f"x-ratelimit-remaining-{of}": str(max(0, math.floor(bucket.level + _SPECK))),
        f"x-ratelimit-reset-{of}": duration(bucket.wait_s(bucket.capacity)),
    }


def _refuse(wait_s: float, limit: str) -> None:
    if wait_s > 0:
        raise LimitExceeded(f"this key may have {limit}; try again in {duration(wait_s)}", retry_after_s=wait_s)


def _refuse_never(wanted: int, what: str, most: float, limit: str, param: str) -> None:
    if wanted > most:
        raise InvalidRequest(
            f"these are {wanted} {what}, and this key may have {most:.0f} ({limit}); send less", param=param
        )
