"""Keys of a store as its followers get them: digests of secrets, scopes, patterns and limits; never a secret.

Keys are few, so that all of them travel when one changes. A digest over them says which state one has.
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
    """Return the digest of a state of all keys; `NO_KEYS` if there are none."""
    text = json.dumps(list(keys), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32] if keys else NO_KEYS


class KeyFeed:
    """Read the keys of a store when they have changed. For one thread at a time.

    Raises (all methods): StoreUnusable, StoreFull.
    """

    def __init__(self, root: Path) -> None:
        self._book = KeyStore(root)
        self._changes = self._num_changes = -1
        self._keys: list[dict[str, Any]] = []
        self._tag = NO_KEYS

    def current(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the digest of the keys, and the keys."""
        # The number first: changes made in between are read again.
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
    """Make the keys of a follower's folder those of its registry, in one transaction; return their digest.

    Raises:
        StoreUnusable, StoreFull: they are malformed, or the disk refused; nothing changed.
    """
    with closing(KeyStore(root)) as key_store:
        try:
            if not isinstance(keys, list):
                # Nothing, as another type, would be no keys: a server without any asks for none.
                raise TypeError("no list")
            key_store.replace_all(keys)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise StoreUnusable(f"the registry's keys are not what this version writes: {error!r}") from None
        return tag_of(key_store.exported())
