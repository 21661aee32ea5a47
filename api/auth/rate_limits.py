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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.principal import Caller, KeyLimits, caller_of
from api.auth.scopes import is_counted
from api.errors import describe_at
from lorasrv.errors import AdapterCold, InvalidRequest, LimitExceeded, RequestTimeout
from lorasrv.outputs import OutputStream, RequestOutput

if TYPE_CHECKING:
    from lorasrv.engine.output_processor import RequestStream

    """Asks the engine for the answers to one prompt."""

P = TypeVar("P")
if TYPE_CHECKING:
    Add = Callable[[P], Awaitable[Sequence[RequestStream]]]

HEADERS = tuple(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset"))
"""What answers tell a key of its rates, as OpenAI's do."""
USUAL_ANSWER_S = 1.0
RECENT = 0.2
"""The weight of the newest answer in what is taken for the usual time of one."""
MAX_ACCOUNTS = 4096
# What floating point loses while a bucket fills.
_SPECK = 1e-6


@dataclass(slots=True)
class _Bucket:
    """One rate. `level`: what may be used now; below 0 it is a debt."""

    per_min: int
    level: float
    filled_s: float

    def fill(self, now_s: float) -> None:
        self.level = min(self.per_min, self.level + (now_s - self.filled_s) * self.per_min / 60)
        self.filled_s = now_s

    def wait_s(self, amount: float) -> float:
        """Until there is so much, if nobody takes any; 0: there is."""
        missing = amount - self.level
        return 0.0 if missing <= _SPECK else missing * 60 / self.per_min

    def headers(self, of: str) -> dict[str, str]:
        return {
            f"x-ratelimit-limit-{of}": str(self.per_min),
            f"x-ratelimit-remaining-{of}": str(max(0, math.floor(self.level + _SPECK))),
            f"x-ratelimit-reset-{of}": duration(self.wait_s(self.per_min)),
        }


@dataclass(slots=True)
class _KeyAccount:
    """Of one key. `begun_s`: when each answer began that has not ended, oldest first."""

    requests: _Bucket | None = None
    tokens: _Bucket | None = None
    begun_s: list[float] = field(default_factory=list)
    answer_s: float = USUAL_ANSWER_S

    def settle(self, limits: KeyLimits, now_s: float) -> None:
        """Bring it up to date, also with limits that have changed."""
        self.requests = _filled(self.requests, limits.requests_per_min, now_s)
        self.tokens = _filled(self.tokens, limits.tokens_per_min, now_s)

    def check(self, limits: KeyLimits, prompts: int, answers: int, now_s: float) -> None:
        """Raises: LimitExceeded: not now. InvalidRequest: never."""
        if self.requests is not None:
            _refuse_never(prompts, "prompts", self.requests.per_min, "requests_per_min", "prompt")
            self.check_requests(prompts)
        if self.tokens is not None:
            _refuse(self.tokens.wait_s(1), f"{self.tokens.per_min} tokens a minute (tokens_per_min)")
        most = limits.max_concurrent
        if most is not None:
            param = "prompt" if prompts == answers else "n"
            _refuse_never(answers, "answers at a time", most, "max_concurrent", param)
            over = len(self.begun_s) + answers - most
            if over > 0:
                ends_s = self.begun_s[over - 1] + self.answer_s
                _refuse(max(USUAL_ANSWER_S, ends_s - now_s), f"{most} answers at a time (max_concurrent)")

    def check_requests(self, number: int) -> None:
        """Raises: LimitExceeded: not now."""
        if self.requests is not None:
            per_min = self.requests.per_min
            _refuse(self.requests.wait_s(number), f"{per_min} requests a minute (requests_per_min)")

    def is_forgettable(self) -> bool:
        buckets = (bucket for bucket in (self.requests, self.tokens) if bucket is not None)
        return not self.begun_s and all(bucket.level >= bucket.per_min for bucket in buckets)


class _Use:
    """What one request has taken, until the last of its answers has ended."""

    def __init__(self, account: _KeyAccount, prompts: int, answers: int, clock: Callable[[], float]) -> None:
        self.account = account
        self._clock = clock
        self._begun_s = clock()
        self._num_requests, self._num_open = prompts, answers
        self._num_prompt_tokens = 0
        self.is_answered = self._is_refused = self._has_warmed = False
        account.begun_s += [self._begun_s] * answers
        if account.requests is not None:
            account.requests.level -= prompts

    def prompt(self, num_tokens: int) -> None:
        self._num_prompt_tokens += num_tokens
        self.charge(num_tokens)

    def charge(self, num_tokens: int) -> None:
        if self.account.tokens is not None:
            self.account.tokens.level -= num_tokens

    def end(self, count: int = 1, *, refused: bool = False, warmed: bool = False) -> None:
        """So many answers have ended. If none was begun, because of a refusal, nothing was used, but for the request
        where that has `warmed` an adapter."""
        count = min(count, self._num_open)
        for _ in range(count):
            self.account.begun_s.remove(self._begun_s)
        self._num_open -= count
        self._is_refused |= refused
        self._has_warmed |= warmed
        if not count or self._num_open:
            return
        if not self.is_answered and self._is_refused:
            self.charge(-self._num_prompt_tokens)
            if self.account.requests is not None and not self._has_warmed:
                self.account.requests.level += self._num_requests
        elif self.is_answered:
            self.account.answer_s += RECENT * (self._clock() - self._begun_s - self.account.answer_s)

    def refused(self) -> None:
        """All of it is."""
        self.is_answered = False
        self.end(self._num_open, refused=True)


class _Counted(AsyncIterator[RequestOutput]):
    """A stream of which every token is counted, and how it ends."""

    def __init__(self, stream: "RequestStream", use: _Use) -> None:
        self.request_id = stream.request_id
        self._stream = stream
        self._use: _Use | None = use

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
        tell: who counts what is refused here.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, tell: Callable[[Exception], object] = lambda _: None
    ) -> None:
        self._clock = clock
        self._tell = tell
        self._accounts: dict[str, _KeyAccount] = {}

    def check(self, caller: Caller) -> None:
        """Whether one more request could be accepted now, before anything is done for it. Raises: LimitExceeded."""
        if (account := self._account(caller)) is not None:
            self._check(account, caller.limits, 1, 1)

    def spend(self, caller: Caller) -> None:
        """One request that no tokens come of, and that a debt of tokens is not in the way of. Raises: LimitExceeded."""
        if (account := self._account(caller)) is not None and account.requests is not None:
            try:
                account.check_requests(1)
            except LimitExceeded as error:
                self._tell(error)
                raise
            account.requests.level -= 1

    async def admit(
        self,
        caller: Caller,
        prompts: Sequence[P],
        width: int,
        begin: "Callable[[], Awaitable[Add[P]]]",
    ) -> list[OutputStream]:
        """The answers, `width` to each prompt, that the engine gives; they count until they end or are closed. If one
        is refused all are, and none counts.

        `begin` does what has to be done once for all prompts, such as compiling a grammar, when they count already, and
        returns what asks the engine for the answers to one.

        Raises:
            LimitExceeded: the key has used what it may, for now; says which limit.
            InvalidRequest: it is more at once than the key may ever have.
            Whatever `begin` and what it returns raise.
        """
        account, use = self._account(caller), None
        if account is not None:
            self._check(account, caller.limits, len(prompts), len(prompts) * width)
            use = _Use(account, len(prompts), len(prompts) * width, self._clock)
        streams: list[OutputStream] = []
        try:
            add = await begin()
            for prompt in prompts:
                added = await add(prompt)
                if use is not None:
                    use.prompt(added[0].num_prompt_tokens)
                streams += added if use is None else [_Counted(stream, use) for stream in added]
        except BaseException:
            if use is not None:
                use.refused()
            for stream in streams:
                await stream.aclose()
            raise
        return streams

    def headers(self, caller: Caller) -> dict[str, str]:
        """What is left of the key's rates; nothing if it has none."""
        account = self._account(caller)
        found: dict[str, str] = {}
        if account is not None and account.requests is not None:
            found |= account.requests.headers("requests")
        if account is not None and account.tokens is not None:
            found |= account.tokens.headers("tokens")
        return found

    def _check(self, account: _KeyAccount, limits: KeyLimits, prompts: int, answers: int) -> None:
        try:
            account.check(limits, prompts, answers, self._clock())
        except (LimitExceeded, InvalidRequest) as error:
            self._tell(error)
            raise

    def _account(self, caller: Caller) -> _KeyAccount | None:
        """The key's, as it is now; None if nothing limits it."""
        limits = caller.limits
        if limits.requests_per_min is None and limits.tokens_per_min is None and limits.max_concurrent is None:
            return None
        account = self._accounts.get(caller.principal)
        if account is None:
            if len(self._accounts) >= MAX_ACCOUNTS:
                self._accounts = {name: kept for name, kept in self._accounts.items() if not kept.is_forgettable()}
            account = self._accounts[caller.principal] = _KeyAccount()
        account.settle(limits, self._clock())
        return account


class RateLimitMiddleware:
    """Counts every request that changes or computes something, but for those whose routes do so themselves, and tells
    every key that has a rate what is left of it, with each answer. Goes behind who finds out the caller."""

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


def _filled(bucket: _Bucket | None, per_min: int | None, now_s: float) -> _Bucket | None:
    if per_min is None:
        return None
    if bucket is None:
        return _Bucket(per_min, per_min, now_s)
    bucket.per_min = per_min
    bucket.fill(now_s)
    return bucket


def _refuse(wait_s: float, limit: str) -> None:
    if wait_s > 0:
        raise LimitExceeded(f"this key may have {limit}; try again in {duration(wait_s)}", retry_after_s=wait_s)


def _refuse_never(wanted: int, what: str, most: int, limit: str, param: str) -> None:
    if wanted > most:
        raise InvalidRequest(
            f"these are {wanted} {what}, and this key may have {most} ({limit}); send less", param=param
        )
