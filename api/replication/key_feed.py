"""Keys of a store in the form that followers get: digests of secrets, scopes, patterns and limits; never a secret.

Keys are few, so all of them are sent when one changes. A digest over all keys identifies their state.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from adapter_store.errors import StoreUnusable
from api.auth.key_store import KeyStore

NO_KEYS = ""


def tag_of(keys: Sequence[Mapping[str, Any]]) -> str:
    """Return the digest of all keys; `NO_KEYS` if there are none."""
    text = json.dumps(list(keys), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32] if keys else NO_KEYS


class KeyFeed:
    """Read the keys of a store, again only if they have changed. For one thread at a time.

    Raises (all methods): StoreUnusable, StoreFull.
    """

    def __init__(self, root: Path) -> None:
        self._book = KeyStore(root)
        self._changes = self._num_changes = -1
        self._keys: list[dict[str, Any]] = []
        self._tag = NO_KEYS

    def current(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the digest of the keys, and the keys."""
        # The number of changes first: changes made in between are then read next time.
        changes = self._book.changes()
        if changes != self._changes:
            if (number := self._book.num_changes()) != self._num_changes:
                self._keys = self._book.exported()
                self._tag, self._num_changes = tag_of(self._keys), number
            self._changes = changes
        return self._tag, self._keys

    def close(self) -> None:
        self._book.close()


def take_over(root: Path, keys: Any) -> str:
    """Replace the keys in a follower's folder with its registry's, in one transaction; return their digest.

    Raises:
        StoreUnusable, StoreFull: the keys are malformed, or the disk failed; nothing changed.
    """
    with closing(KeyStore(root)) as key_store:
        try:
            if not isinstance(keys, list):
                # An empty value of another type would store no keys, and a server without keys accepts every client.
                raise TypeError("no list")
            key_store.replace_all(keys)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise StoreUnusable(f"the registry's keys are not what this version writes: {error!r}") from None
        return tag_of(key_store.exported())
