"""Enforce the `KeyLimits` of each key: requests and tokens per minute, and concurrent answers.

Rates are token buckets with a capacity of one minute, so a key that was idle may use a minute's worth at once. The
length of an answer is not known in advance: a prompt is charged when it is accepted, an answer when it ends. The bucket
of tokens may therefore become negative, and must be refilled before the next request. Generated tokens are charged even
if they were not read. Refused requests cost nothing, with two exceptions: a timeout, because much may have been
computed, and a refusal because of a cold adapter, because that request started its load. Other requests that change or
compute something are charged as requests without tokens, even if they fail. All state is in memory, and lost at a
restart. For the event loop's thread.
"""

import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.principal import Caller, KeyLimits, caller_of
from api.auth.scopes import is_counted
from api.errors import describe_at
from lorasrv.errors import AdapterCold, InvalidRequest, LimitExceeded, RequestTimeout
from lorasrv.outputs import CLIENT, RequestOutput
from lorasrv.token_bucket import TokenBucket

if TYPE_CHECKING:
    from lorasrv.engine.request_stream import RequestStream


HEADERS = tuple(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset"))
"""Response headers with a key's rates, named as OpenAI's."""
Kind = Literal["requests", "tokens", "answers"]
"""What a limit of a key counts."""
USUAL_ANSWER_S = 1.0
NEWEST_WEIGHT = 0.2
"""Weight of the newest answer in the moving average of their durations."""
MAX_ACCOUNTS = 4096
# Rounding error of a bucket, or of a sum of seconds.
_EPSILON = 1e-6


class Bucket(Protocol):
    """Declare the part of `TokenBucket` that accounts use."""

    rate: float
    capacity: float

    @property
    def level(self) -> float: ...
    @property
    def is_full(self) -> bool: ...
    def take(self, amount: float) -> None: ...
    def give_back(self, amount: float) -> None: ...
    def wait_s(self, amount: float) -> float: ...
    def resize(self, rate: float, capacity: float) -> None: ...


@dataclass(slots=True)
class KeyAccount:
    """Hold the usage of one key."""

    clock: Callable[[], float]
    requests: Bucket | None = None
    tokens: Bucket | None = None
    # Start of each unfinished answer, oldest first.
    begun_s: list[float] = field(default_factory=list)
    answer_s: float = USUAL_ANSWER_S

    def set_limits(self, limits: KeyLimits) -> None:
        """Apply limits that may have changed."""
        self.requests = self._adjusted(self.requests, "requests", limits.requests_per_min)
        self.tokens = self._adjusted(self.tokens, "tokens", limits.tokens_per_min)

    def new_bucket(self, kind: Kind, per_min: int) -> Bucket:
        """Create the bucket of a rate, `requests` or `tokens`, that the account does not have yet."""
        return TokenBucket(per_min / 60, per_min, self.clock)

    def slots(self, most: int) -> int:
        """Return how many answers may run here at a time, if all servers together may have `most`."""
        return most

    def _adjusted(self, bucket: Bucket | None, kind: Kind, per_min: int | None) -> Bucket | None:
        if per_min is None:
            return None
        if bucket is None:
            return self.new_bucket(kind, per_min)
        if bucket.capacity != per_min:
            bucket.resize(per_min / 60, per_min)
        return bucket

    def check(self, limits: KeyLimits, prompts: int, answers: int, now_s: float) -> None:
        """Check that `prompts` prompts and `answers` answers fit the limits.

        Raises:
            LimitExceeded: they do not fit now.
            InvalidRequest: they never fit.
        """
        if self.requests is not None:
            _refuse_impossible(prompts, "prompts", self.requests.capacity, "requests_per_min", "prompt")
            self.check_requests(prompts)
        if self.tokens is not None:
            _refuse(self.tokens.wait_s(1), f"{self.tokens.capacity:.0f} tokens per minute (tokens_per_min)")
        most = limits.max_concurrent
        if most is not None:
            param = "prompt" if prompts == answers else "n"
            _refuse_impossible(answers, "concurrent answers", most, "max_concurrent", param)
            over = len(self.begun_s) + answers - self.slots(most)
            if over > 0:
                ends_s = self.begun_s[over - 1] + self.answer_s if over <= len(self.begun_s) else now_s
                _refuse(max(USUAL_ANSWER_S, ends_s - now_s), f"{most} concurrent answers (max_concurrent)")

    def check_requests(self, number: int) -> None:
        """Check that `number` requests fit the rate.

        Raises: LimitExceeded.
        """
        if self.requests is not None:
            _refuse(
                self.requests.wait_s(number), f"{self.requests.capacity:.0f} requests per minute (requests_per_min)"
            )

    def is_idle(self) -> bool:
        """Return whether the account can be dropped without affecting limits."""
        buckets = (bucket for bucket in (self.requests, self.tokens) if bucket is not None)
        return not self.begun_s and all(bucket.is_full for bucket in buckets)


class Reservation:
    """Hold what one request uses of its key's limits, until its last answer ends."""

    def __init__(self, account: KeyAccount, prompts: int, answers: int, clock: Callable[[], float]) -> None:
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
        """Charge an accepted prompt, and wrap its answers so that they are charged when they end."""
        self._num_prompt_tokens += streams[0].num_prompt_tokens
        self.charge(streams[0].num_prompt_tokens)
        return [CountedStream(stream, self) for stream in streams]

    def charge(self, num_tokens: int) -> None:
        """Charge tokens, if the key has a rate of tokens."""
        if self.account.tokens is not None:
            self.account.tokens.take(num_tokens)

    def end(self, count: int = 1, *, refused: bool = False, warmed: bool = False) -> None:
        """Record that `count` answers have ended, and refund the request if it was refused before any output.

        Args:
            count: number of ended answers.
            refused: whether a refusal ended them.
            warmed: whether the refused request started the load of an adapter, and therefore counts as a request.
        """
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
            self.account.answer_s += NEWEST_WEIGHT * (self._clock() - self._begun_s - self.account.answer_s)

    def refuse(self) -> None:
        """Refund everything: the request was not accepted."""
        self.is_answered = False
        self.end(self._num_open, refused=True)


class CountedStream(AsyncIterator[RequestOutput]):
    """Wrap a stream to charge its tokens and to record its end."""

    def __init__(self, stream: "RequestStream", reservation: Reservation) -> None:
        self.request_id = stream.request_id
        self._stream = stream
        self._reservation: Reservation | None = reservation

    async def __anext__(self) -> RequestOutput:
        try:
            output = await anext(self._stream)
        except Exception as error:
            self._end(refused=not isinstance(error, RequestTimeout), warmed=isinstance(error, AdapterCold))
            raise
        if self._reservation is not None:
            self._reservation.is_answered = True
        if output.finished:
            self._end()
        return output

    def pass_to(self, take: Callable[[RequestOutput], bool]) -> None:
        # Accounting is not affected: the first output has been read here, and the last one is not passed on.
        self._stream.pass_to(take)

    async def aclose(self, why: str = CLIENT) -> None:
        self._end()
        await self._stream.aclose(why)

    def _end(self, *, refused: bool = False, warmed: bool = False) -> None:
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            # Includes tokens that were computed but not read.
            reservation.charge(self._stream.num_generated_tokens)
            reservation.end(refused=refused, warmed=warmed)


class RateLimiter:
    """Enforce the limits of keys that have any.

    Args:
        clock: monotonic seconds.
        on_refused: called with the error of every request that is refused here.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, on_refused: Callable[[Exception], object] = lambda _: None
    ) -> None:
        self._clock = clock
        self._on_refused = on_refused
        self._accounts: dict[str, KeyAccount] = {}
        # When there are this many accounts, idle ones are dropped.
        self._most_accounts = MAX_ACCOUNTS

    async def prepare(self, caller: Caller, prompts: int = 1, answers: int = 1) -> None:
        """Get what is needed to decide about a request; here nothing, but a follower asks its registry for permits.

        Args:
            prompts, answers: as for `reserve`; 0 answers: as for `spend`.
        """

    def check(self, caller: Caller) -> None:
        """Check that one more request could be accepted now, before any work is done for it.

        Raises: LimitExceeded, InvalidRequest.
        """
        if (account := self._account(caller)) is not None:
            self._check(account, caller.limits, 1, 1)

    def spend(self, caller: Caller) -> None:
        """Charge one request without tokens; a negative bucket of tokens does not refuse it.

        Raises: LimitExceeded.
        """
        if (account := self._account(caller)) is not None and account.requests is not None:
            try:
                account.check_requests(1)
            except LimitExceeded as error:
                self._on_refused(error)
                raise
            account.requests.take(1)

    def reserve(self, caller: Caller, prompts: int, answers: int) -> Reservation | None:
        """Charge the prompts, and count the answers as concurrent.

        Returns: None for a key without limits.
        Raises:
            LimitExceeded: a limit is reached for now; the error names it.
            InvalidRequest: the request exceeds a limit on its own, so it can never be accepted.
        """
        account = self._account(caller)
        if account is None:
            return None
        self._check(account, caller.limits, prompts, answers)
        return Reservation(account, prompts, answers, self._clock)

    def headers(self, caller: Caller) -> dict[str, str]:
        """Return the response headers with the key's rates, empty without rates."""
        account = self._account(caller)
        found: dict[str, str] = {}
        if account is not None and account.requests is not None:
            found |= _headers(account.requests, "requests")
        if account is not None and account.tokens is not None:
            found |= _headers(account.tokens, "tokens")
        return found

    def _check(self, account: KeyAccount, limits: KeyLimits, prompts: int, answers: int) -> None:
        try:
            account.check(limits, prompts, answers, self._clock())
        except (LimitExceeded, InvalidRequest) as error:
            self._on_refused(error)
            raise

    def _new_account(self, principal: str) -> KeyAccount:
        return KeyAccount(self._clock)

    def _account(self, caller: Caller) -> KeyAccount | None:
        """Return the account of the key with its current limits; None without limits."""
        limits = caller.limits
        if limits.requests_per_min is None and limits.tokens_per_min is None and limits.max_concurrent is None:
            return None
        account = self._accounts.get(caller.principal)
        if account is None:
            if len(self._accounts) >= self._most_accounts:
                self._accounts = {name: kept for name, kept in self._accounts.items() if not kept.is_idle()}
                # Next time only when there are twice as many, because each time all accounts are checked.
                self._most_accounts = max(MAX_ACCOUNTS, 2 * len(self._accounts))
            account = self._accounts[caller.principal] = self._new_account(caller.principal)
        account.set_limits(limits)
        return account


class RateLimitMiddleware:
    """Charge requests that change or compute something, and add headers with the key's rates to all responses.

    Routes that charge requests themselves are exempt. Must be inside the middleware that authenticates the caller.
    """

    def __init__(self, app: ASGIApp, rate_limiter: RateLimiter) -> None:
        self._app = app
        self._rate_limiter = rate_limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._rate_limiter.headers(caller := caller_of(scope)):
            await self._app(scope, receive, send)
            return
        refusal: LimitExceeded | None = None
        if is_counted(scope["method"], scope["path"]):
            await self._rate_limiter.prepare(caller, 1, 0)
            try:
                self._rate_limiter.spend(caller)
            except LimitExceeded as error:
                refusal = error

        async def send_with_rates(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._rate_limiter.headers(caller))
            await send(message)

        app = self._app if refusal is None else describe_at(scope["path"], refusal).response()
        await app(scope, receive, send_with_rates)


def duration(seconds: float) -> str:
    """Format seconds as OpenAI does: `6m0s`, `1.5s`, `20ms`."""
    ms = math.ceil(1000 * seconds - _EPSILON)
    if ms < 1000:
        return f"{max(0, ms)}ms"
    minutes, rest = divmod(ms / 1000, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"


def _headers(bucket: Bucket, of: str) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{of}": f"{bucket.capacity:.0f}",
        f"x-ratelimit-remaining-{of}": str(max(0, math.floor(bucket.level + _EPSILON))),
        f"x-ratelimit-reset-{of}": duration((bucket.capacity - bucket.level) / bucket.rate),
    }


def _refuse(wait_s: float, limit: str) -> None:
    if wait_s > 0:
        raise LimitExceeded(f"this key is limited to {limit}; try again in {duration(wait_s)}", retry_after_s=wait_s)


def _refuse_impossible(wanted: int, what: str, most: float, limit: str, param: str) -> None:
    if wanted > most:
        raise InvalidRequest(
            f"the request has {wanted} {what}, but this key is limited to {most:.0f} ({limit}); send fewer", param=param
        )
