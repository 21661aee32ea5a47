"""Ids, references to an adapter, and aliases.

A reference names an id, an alias, a version or a content. An alias names a version inside an id (`mia:prod`) and may
be split between two versions by shares (a canary).
"""

import hashlib
import json
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from adapter_store.errors import AdapterNotFound, InvalidAdapterId, InvalidAlias, InvalidDigest, show
from adapter_store.spec import AdapterId

MAX_ID_CHARS = 64
MIN_KEY_DIGITS = 12
VERBS = frozenset({"warm", "verify", "snapshot"})
BASE_ID = "base"
"""Name of the base in statistics."""
OTHERS = "other"
"""Name in metrics of all adapters, and all keys, without their own series."""
RESERVED_IDS = VERBS | {BASE_ID, OTHERS}
"""Ids that new adapters cannot have. A store of an earlier lorasrv keeps its adapters `base` and `other`."""
ID_RULE = "1 to 64 of a-z, 0-9, '.', '_' and '-', starting with a letter or digit"
ALIAS_RULE = f"{ID_RULE}, not only digits, neither {' nor '.join(sorted(VERBS))}"

# No overlapping alternatives, so matching is linear in the length of the text.
_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEY_PREFIX = re.compile(rf"[0-9a-f]{{{MIN_KEY_DIGITS},64}}")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_NOT_ID = re.compile(r"[^a-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Reference:
    """Hold the parts of `mia`, `mia:prod`, `mia@3` or `mia@sha256:<12 to 64 hex digits of the AdapterKey>`."""

    adapter_id: AdapterId
    alias: str | None = None
    version: int | None = None
    key_prefix: str | None = None


def parse_reference(text: str) -> Reference:
    """Parse a reference.

    Raises:
        AdapterNotFound: it has no form that could name an adapter.
    """
    name, at, pin = text.partition("@")
    name, colon, alias = name.partition(":")
    if not _ID.fullmatch(name) or (colon and (at or not is_alias(alias))):
        raise AdapterNotFound(text)
    adapter_id = AdapterId(name)
    if not at:
        return Reference(adapter_id, alias if colon else None)
    if _VERSION.fullmatch(pin):
        return Reference(adapter_id, version=int(pin))
    if pin.startswith("sha256:") and _KEY_PREFIX.fullmatch(pin.removeprefix("sha256:")):
        return Reference(adapter_id, key_prefix=pin.removeprefix("sha256:"))
    raise AdapterNotFound(text)


def is_alias(text: str) -> bool:
    """Return whether an alias may have this name: not digits, which look like a version, nor a verb that is a route."""
    return _ID.fullmatch(text) is not None and not text.isdigit() and text not in VERBS


def check_adapter_id(text: str, reserved: frozenset[str]) -> AdapterId:
    """Return the id if it is allowed.

    Raises:
        InvalidAdapterId: it breaks the rule, or is one of `reserved`.
    """
    if not _ID.fullmatch(text):
        raise InvalidAdapterId(f"adapter id {show(text)} is not allowed: use {ID_RULE}", suggest_id(text, reserved))
    if text in reserved:
        raise InvalidAdapterId(f"adapter id {text!r} is taken by the server", suggest_id(text, reserved))
    return AdapterId(text)


def suggest_id(text: str, reserved: frozenset[str]) -> str | None:
    """Return a valid id made from `text`, or None if nothing of it can be kept."""
    ascii_text = unicodedata.normalize("NFKD", text[:256]).encode("ascii", "ignore").decode()
    slug = _NOT_ID.sub("-", ascii_text.lower()).strip("-._")[:MAX_ID_CHARS].rstrip("-._")
    if slug in reserved:
        slug = f"{slug[: MAX_ID_CHARS - 8]}-adapter"
    return slug if slug and slug not in reserved else None


def check_digest(text: str) -> str:
    """Return the 64 hex digits of a digest, given with or without the prefix `sha256:`.

    Raises:
        InvalidDigest: it is something else.
    """
    digest = text.removeprefix("sha256:")
    if not _DIGEST.fullmatch(digest):
        raise InvalidDigest(text)
    return digest


MAX_VERSIONS = 2
SUM_TOLERANCE = 1e-6
Shares = Mapping[int, float]
"""Version -> its share of the requests, above 0; the shares add up to 1."""
AliasTarget = int | Shares
"""One version, or two with their shares."""


def check_alias(text: str) -> str:
    """Return the alias if its name is allowed.

    Raises:
        InvalidAlias: the name breaks the rule.
    """
    if not is_alias(text):
        raise InvalidAlias(text, f"alias {show(text)} is not allowed: use {ALIAS_RULE}")
    return text


def check_shares(alias: str, target: AliasTarget) -> dict[int, float]:
    """Return a target as shares by version; whether the versions exist is not checked.

    Raises:
        InvalidAlias: no or too many versions, or shares that do not add up to 1; the message names the alias.
    """
    if isinstance(target, int):
        return {target: 1.0}
    if not 1 <= len(target) <= MAX_VERSIONS:
        raise InvalidAlias(alias, f"alias {alias!r} names {len(target)} versions; it can name one, or two with shares")
    for version, share in target.items():
        if not (math.isfinite(share) and 0 < share <= 1):
            raise InvalidAlias(
                alias, f"alias {alias!r}: the share of version {version} must be above 0 and at most 1, not {share:g}"
            )
    if abs(math.fsum(target.values()) - 1) > SUM_TOLERANCE:
        total = math.fsum(target.values())
        raise InvalidAlias(alias, f"alias {alias!r}: the shares must add up to 1, not {total:g}")
    return dict(sorted(target.items()))


def draw_version(shares: Shares, number: float) -> int:
    """Return the version that a random number in [0, 1) selects; rounding errors go to the last."""
    for version, share in shares.items():
        number -= share
        if number < 0:
            return version
    return list(shares)[-1]


def sticky_number(*facts: object) -> float:
    """Return a number in [0, 1) that depends only on the facts, evenly distributed over different facts."""
    digest = hashlib.sha256(json.dumps(facts).encode()).digest()
    return (int.from_bytes(digest[:8]) >> 11) / 2**53


def target_to_json(shares: Shares) -> int | dict[str, float]:
    """Return shares in JSON form: a version, or {"3": 0.9, "4": 0.1}."""
    if len(shares) == 1:
        return next(iter(shares))
    return {str(version): share for version, share in shares.items()}


def target_from_json(alias: str, value: object) -> AliasTarget:
    """Parse the output of `target_to_json` from an untrusted JSON value.

    Raises:
        InvalidAlias: it is neither a version nor versions with shares.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63:
        return value
    if isinstance(value, Mapping) and all(map(_is_share, value.keys(), value.values())):
        return {int(version): float(share) for version, share in value.items()}
    raise InvalidAlias(
        alias, f'alias {alias!r} must be a version (3), versions with shares ({{"3": 0.9, "4": 0.1}}) or null'
    )


def _is_share(version: object, share: object) -> bool:
    is_number = isinstance(share, int | float) and not isinstance(share, bool) and abs(share) <= 1e9
    return is_number and isinstance(version, str) and _VERSION.fullmatch(version) is not None
