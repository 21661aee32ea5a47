"""Aliases: names of versions inside an id (`mia:prod`), which may be split between two by shares (a canary)."""

import math
import re
from collections.abc import Mapping

from adapter_store.errors import InvalidAlias, show
from adapter_store.references import ALIAS_RULE, is_alias

MAX_VERSIONS = 2
SUM_TOLERANCE = 1e-6

Shares = Mapping[int, float]
"""Version -> its share of the requests, above 0; they add up to 1."""
AliasTarget = int | Shares
"""One version, or two with their shares."""

_VERSION = re.compile(r"[1-9][0-9]{0,17}")


def check_alias(text: str) -> str:
    """Raises: InvalidAlias: the name breaks the rule."""
    if not is_alias(text):
        raise InvalidAlias(text, f"alias {show(text)} is not allowed: use {ALIAS_RULE}")
    return text


def check_shares(alias: str, target: AliasTarget) -> dict[int, float]:
    """A target as shares by version. Whether there are such versions is for the store to say.

    Raises: InvalidAlias: no or too many versions, or shares that do not add up to 1; names the alias.
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


def drawn(shares: Shares, number: float) -> int:
    """The version that a random number in [0, 1) falls to; the last takes what rounding leaves."""
    for version, share in shares.items():
        number -= share
        if number < 0:
            return version
    return list(shares)[-1]


def target_to_json(shares: Shares) -> int | dict[str, float]:
    """As the wire has it: a version, or {"3": 0.9, "4": 0.1}."""
    if len(shares) == 1:
        return next(iter(shares))
    return {str(version): share for version, share in shares.items()}


def target_from_json(alias: str, value: object) -> AliasTarget:
    """Inverse of `target_to_json`, of anything that JSON can hold.

    Raises: InvalidAlias: it is neither a version nor versions with shares.
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
