"""Who asks: what a key says about a request, and all that the code behind it needs to know of keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Any

from fastapi import Depends, Request

from api.keys.key import ANONYMOUS, NO_LIMITS, KeyLimits

STATE = "caller"
"""Where in an ASGI scope's `state` the caller lies."""


class Scope(StrEnum):
    """What a key may do. `ADMIN` may do all of it."""

    INFER = "infer"
    UPLOAD = "upload"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a key, or whoever asks a server without keys.

    `principal` names the key everywhere behind the HTTP layer: in the engine's accounts, as owner of versions, files
    and batches, and as the salt of prefix pages. `adapters` are patterns of the ids that it may see (`mia*`).
    """

    principal: str
    scopes: frozenset[Scope]
    adapters: tuple[str, ...] = ("*",)
    limits: KeyLimits = NO_LIMITS

    def may(self, scope: Scope) -> bool:
        """Whether it may do what needs this scope."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def may_see(self, adapter_id: str) -> bool:
        """Whether an adapter exists as far as this caller is to know."""
        return self.sees_all or any(fnmatchcase(adapter_id, pattern) for pattern in self.adapters)

    @property
    def sees_all(self) -> bool:
        """Whether no adapter is hidden from it."""
        return "*" in self.adapters


ANYBODY = Caller(ANONYMOUS, frozenset(Scope))
"""Whoever asks a server that has no keys; may do everything."""
NOBODY = Caller(ANONYMOUS, frozenset(), ())
"""Whoever asks a server with keys for what needs none; may do and see nothing."""


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """Who sent this request; the guard in front of the routes has put it there."""
    caller = scope.get("state", {}).get(STATE, ANYBODY)
    assert isinstance(caller, Caller)
    return caller


async def get_caller(request: Request) -> Caller:
    return caller_of(request.scope)


CallerDep = Annotated[Caller, Depends(get_caller)]
