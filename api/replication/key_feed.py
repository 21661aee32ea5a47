"""Keys of a store in the form that followers get: digests of secrets, scopes, patterns and limits; never a secret.

A digest over all keys identifies their state. A follower names the state that it has, and gets the keys that have
changed since. The digest is the sum of one number per key, so a change costs as much as the keys that it changes.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from adapter_store.errors import StoreUnusable
from api.auth.key_store import KeyStore, limits_of
from api.auth.principal import KeyLimits

NO_KEYS = ""
MAX_STATES = 1000
"""States since which the changes can be told; a follower with an older one gets all keys."""
_MODULUS = 1 << 128


def tag_after(tag: str, removed: Iterable[Mapping[str, Any]], added: Iterable[Mapping[str, Any]]) -> str:
    """Return the digest of all keys after a change; `NO_KEYS` if there are none."""
    total = (int(tag or "0", 16) - sum(map(_number_of, removed)) + sum(map(_number_of, added))) % _MODULUS
    return f"{total:032x}" if total else NO_KEYS


def _number_of(key: Mapping[str, Any]) -> int:
    text = json.dumps(key, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16])


class KeyFeed:
    """Read the keys of a store, and after a change only those that changed. For one thread, except `since`.

    Raises (all methods): StoreUnusable, StoreFull.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._book = KeyStore(root)
        self._changes = -1
        self._number: int | None = None
        self._tag = NO_KEYS
        self._keys: dict[str, dict[str, Any]] = {}
        self._limits: dict[str, KeyLimits] = {}
        # Digest of each of the latest states -> number of the store's last change before it.
        self._states: OrderedDict[str, int] = OrderedDict()

    def tag(self) -> str:
        """Return the digest of the keys."""
        # The number of changes first: changes made in between are then read next time.
        changes = self._book.changes()
        if changes != self._changes:
            self._read()
            self._changes = changes
        return self._tag

    def limits(self) -> Mapping[str, KeyLimits]:
        """Return the limits of all keys, by name."""
        self.tag()
        return self._limits

    def number_of(self, tag: str) -> int | None:
        """Return the number of the store's last change before a state; None: the state is unknown or too old."""
        return self._states.get(tag)

    def since(self, number: int | None) -> dict[str, Any]:
        """Return the keys that changed after the change of this number (None: all keys) as JSON; for any thread."""
        with closing(KeyStore(self._root)) as key_store:
            exported = key_store.exported(number)
        return {"names": exported.names, "keys": exported.keys}

    def close(self) -> None:
        self._book.close()

    def _read(self) -> None:
        said = self._book.exported(self._number)
        limits = {key["name"]: limits_of(key) for key in said.keys}
        gone = [self._keys.pop(name) for name in said.names or () if name in self._keys]
        for key in gone:
            del self._limits[key["name"]]
        self._keys |= {key["name"]: key for key in said.keys}
        self._limits |= limits
        self._tag, self._number = tag_after(self._tag, gone, said.keys), said.number
        self._states[self._tag] = said.number
        self._states.move_to_end(self._tag)
        if len(self._states) > MAX_STATES:
            self._states.popitem(last=False)


def take_over(root: Path, said: Any, tag: str) -> str:
    """Replace keys in a follower's folder by what `KeyFeed.since` of its registry said, in one transaction.

    Args:
        tag: digest of the keys that are there.

    Returns:
        The digest of the keys that are there then.

    Raises:
        StoreUnusable, StoreFull: the keys are malformed, or the disk failed; nothing changed.
    """
    with closing(KeyStore(root)) as key_store:
        try:
            keys, names = said["keys"], said["names"]
            if not isinstance(keys, list) or not isinstance(names, list | None):
                # An empty value of another type would store no keys, and a server without keys accepts every client.
                raise TypeError("no list")
            removed, added = key_store.replace(keys, names)
            if names is None:
                # Whatever was here: a digest that is wrong once would be wrong after every change.
                tag, removed, added = NO_KEYS, [], key_store.exported().keys
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise StoreUnusable(f"the registry's keys are not what this version writes: {error!r}") from None
    return tag_after(tag, removed, added)
