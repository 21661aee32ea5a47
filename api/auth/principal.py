"""A key: its secret, which only its holder has, and what the server keeps of it.

Who asks: what a key says about a request, and all that the code behind it needs to know of keys.
"""

import hashlib
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from fastapi import Depends, Request

PREFIX = "lorasrv-"
"""What every generated secret begins with, so that people and scanners of repositories know one when they see it."""
ANONYMOUS, API_KEY = "anonymous", "api-key"
RESERVED_NAMES = frozenset({ANONYMOUS, API_KEY})
"""Principals that are no key of the book: whoever asks a server without keys, and the holder of `--api-key`."""
_ALPHABET = string.ascii_letters + string.digits
_CHARS = 43  # log2(62 ** 43) = 256 bits
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_PATTERN = re.compile(r"[a-z0-9._*?!\[\]-]{1,64}")
NAME_RULE = "1 to 64 of a-z, 0-9, '.', '_' and '-', the first a letter or digit"
KeyState = Literal["active", "expired", "revoked"]
SecretState = KeyState | Literal["replaced"]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """How much one key may use; None is no limit.

    Args:
        requests_per_min: prompts to be answered in a minute, on average; as many may come at once.
        tokens_per_min: of prompts and answers in a minute, on average; as many may come at once.
        max_concurrent: answers that are being made at a time, each choice to each prompt.
        max_stored_bytes: of the weights of its versions.
    """

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    max_concurrent: int | None = None
    max_stored_bytes: int | None = None


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Key:
    """What is kept of a key. All `_s` are Unix time, in seconds.

    The name is the principal: what the engine's accounts, versions, files and batches know the holder by. So no name is
    ever used twice, not even after the key was revoked. `last_used_s` is up to a minute late.
    """

    name: str
    scopes: frozenset["Scope"]
    adapters: tuple[str, ...]
    limits: KeyLimits
    created_s: float
    expires_s: float | None = None
    revoked_s: float | None = None
    last_used_s: float | None = None

    def state(self, now_s: float) -> KeyState:
        """Whether it opens anything now."""
        if self.revoked_s is not None:
            return "revoked"
        return "expired" if self.expires_s is not None and self.expires_s <= now_s else "active"


def new_secret() -> str:
    """256 random bits in letters and digits, which a double click selects as one word."""
    return PREFIX + "".join(secrets.choice(_ALPHABET) for _ in range(_CHARS))


def new_name() -> str:
    """For a key that nobody named."""
    return f"key-{secrets.token_hex(4)}"


def digest_of(secret: str) -> bytes:
    """What is stored instead of the secret: SHA-256. A slow hash would add nothing to 256 random bits."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def is_name(text: str) -> bool:
    """Whether a key can be called so; see `NAME_RULE`."""
    return _NAME.fullmatch(text) is not None and text not in RESERVED_NAMES


def is_pattern(text: str) -> bool:
    """Whether it can match an adapter id at all: characters of ids, and `*`, `?`, `[abc]`, `[!abc]`."""
    return _PATTERN.fullmatch(text) is not None


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
