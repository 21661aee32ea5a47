"""Define API keys as the server stores them, and the caller that a key identifies. Imports no FastAPI."""

import hashlib
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, Literal

from adapter_store.quota import ANONYMOUS
from adapter_store.registry.references import OTHERS

PREFIX = "lorasrv-"
"""Prefix of each generated secret, by which people and secret scanners recognise it."""
API_KEY = "api-key"
CLUSTER = "cluster"
RESERVED_NAMES = frozenset({ANONYMOUS, API_KEY, CLUSTER, OTHERS})
"""Principals without a stored key: any client of a server without keys, the holder of `--api-key`, and other servers of
the same cluster; also the name under which metrics sum keys without their own series."""
_ALPHABET = string.ascii_letters + string.digits
_CHARS = 43  # log2(62 ** 43) = 256 bits
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_PATTERN = re.compile(r"[a-z0-9._*?!\[\]-]{1,64}")
NAME_RULE = "1 to 64 of a-z, 0-9, '.', '_' and '-', the first a letter or digit"
KeyState = Literal["active", "expired", "revoked"]
SecretState = KeyState | Literal["replaced"]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limit what one key may use; None is no limit.

    Args:
        requests_per_min: average rate of prompts, which is also the burst size.
        tokens_per_min: average rate of prompt and answer tokens, which is also the burst size.
        max_concurrent: answers being generated at a time, each choice of each prompt.
        max_stored_bytes: bytes of the weights of its versions.
    """

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    max_concurrent: int | None = None
    max_stored_bytes: int | None = None


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Key:
    """Hold a stored key. All `_s` are Unix time in seconds.

    The name is the principal, which identifies the holder in the engine's accounts, versions, files and batches.
    Therefore a name is never reused, not even after the key was revoked.
    """

    name: str
    scopes: frozenset["Scope"]
    adapters: tuple[str, ...]
    limits: KeyLimits
    created_s: float
    expires_s: float | None = None
    revoked_s: float | None = None
    # Written up to a minute late.
    last_used_s: float | None = None

    def state(self, now_s: float) -> KeyState:
        """Return "active", or why the key is no longer valid."""
        if self.revoked_s is not None:
            return "revoked"
        return "expired" if self.expires_s is not None and self.expires_s <= now_s else "active"


def new_secret() -> str:
    """Generate 256 random bits as letters and digits, which a double click selects as one word."""
    return PREFIX + "".join(secrets.choice(_ALPHABET) for _ in range(_CHARS))


def new_name() -> str:
    """Generate a name for a key created without one."""
    return f"key-{secrets.token_hex(4)}"


def digest_of(secret: str) -> bytes:
    """Return the SHA-256 that is stored instead of the secret. A slow hash would add nothing to 256 random bits."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def is_name(text: str) -> bool:
    """Return whether a key can have this name; see `NAME_RULE`."""
    return _NAME.fullmatch(text) is not None and text not in RESERVED_NAMES


def is_pattern(text: str) -> bool:
    """Return whether the pattern can match an adapter id: characters of ids, and `*`, `?`, `[abc]`, `[!abc]`."""
    return _PATTERN.fullmatch(text) is not None


STATE = "caller"
"""Key of the caller in an ASGI scope's `state`."""


class Scope(StrEnum):
    """Name what a key may do; `ADMIN` includes all others except `REPLICATE`."""

    INFER = "infer"
    UPLOAD = "upload"
    # Metrics for monitoring, which name all adapters.
    METRICS = "metrics"
    ADMIN = "admin"
    # Requests between servers of a cluster. No client may send them, because page digests reveal who sent which prompt.
    REPLICATE = "replicate"


@dataclass(frozen=True, slots=True)
class Caller:
    """Identify the holder of a key, or any client of a server without keys."""

    # Identifies the key below the HTTP layer: in the engine's accounts, as owner of versions, files and batches, and as
    # the salt of prefix pages.
    principal: str
    scopes: frozenset[Scope]
    # Patterns of the ids that the caller may see (`mia*`).
    adapters: tuple[str, ...] = ("*",)
    limits: KeyLimits = NO_LIMITS

    def may(self, scope: Scope) -> bool:
        """Return whether the caller has this scope."""
        return scope in self.scopes or (Scope.ADMIN in self.scopes and scope is not Scope.REPLICATE)

    def may_see(self, adapter_id: str) -> bool:
        """Return whether the caller may see this id."""
        return self.sees_all or any(fnmatchcase(adapter_id, pattern) for pattern in self.adapters)

    @property
    def sees_all(self) -> bool:
        """Return whether the caller may see all adapters."""
        return "*" in self.adapters


ANYBODY = Caller(ANONYMOUS, frozenset(Scope) - {Scope.REPLICATE})
"""Client of a server without keys; may do everything that clients may."""
NOBODY = Caller(ANONYMOUS, frozenset(), ())
"""Client of a server with keys, on a route that needs none; may do and see nothing."""


def caller_of(scope: Mapping[str, Any]) -> Caller:
    """Return the caller that the authentication middleware has put into the scope."""
    caller = scope.get("state", {}).get(STATE, ANYBODY)
    assert isinstance(caller, Caller)
    return caller
