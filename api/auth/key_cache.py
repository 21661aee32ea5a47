"""Cache the keys of a running server in memory, always as current as the key store.

SQLite's `data_version` (in shared memory) shows at each request whether another connection has changed the store, so a
created or revoked key takes effect with the next request. Each key is read when it is first used, and again after any
key has changed; not all are read at once, because a backend may create a key per session. Once a minute, the server
itself writes when keys were last used.
"""

import asyncio
import hmac
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from adapter_store.errors import AdapterError
from api.auth.key_store import KeyStore
from api.auth.principal import API_KEY, CLUSTER, Caller, Key, Scope, SecretState, digest_of

BUSY_MS = 50
"""Readers wait only while the log of a crashed writer is recovered."""
STALE_S = 2.0
"""Time for which cached keys stay valid while the store cannot be read."""
NOTE_EVERY_S = 60.0
_UNREADABLE = (AdapterError, sqlite3.ProgrammingError)
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    """Hold the key and the caller that a secret belongs to."""

    digest: bytes
    key: Key | None
    caller: Caller
    # Unix time at which the secret ends because the key has a newer one; None: it does not.
    ends_s: float | None = None


class KeyRefused(Exception):
    """Report that a secret is not valid; `state` says why if it once was."""

    def __init__(self, state: SecretState | None) -> None:
        super().__init__(state)
        self.state = state


class KeysUnreadable(Exception):
    """Report that the store cannot be read and the cached keys are too old."""


class KeyCache:
    """Authenticate by the keys of the store and `--api-key`. Use from the event loop.

    Args:
        open_without_keys: whether all clients are served until there is a key, or refused.
        cluster_secret: secret that servers of a cluster send to each other; not a client's key.
        now: returns the seconds since the epoch by which keys expire.

    Raises:
        StoreUnusable, StoreFull: the folder cannot have a key store.
    """

    def __init__(
        self,
        root: Path,
        api_key: str | None = None,
        *,
        open_without_keys: bool = True,
        cluster_secret: str | None = None,
        now: Callable[[], float] = lambda: time.time(),
    ) -> None:
        self._root, self._now = root, now
        self._book = KeyStore(root, busy_ms=BUSY_MS)
        self._own = _own_key(api_key, API_KEY, Scope.ADMIN)
        self._cluster = _own_key(cluster_secret, CLUSTER, Scope.REPLICATE)
        self._open_without_keys = open_without_keys
        self._used_s: dict[str, float] = {}
        # Names of keys that were used, until `take_ended` returns them.
        self._active: set[str] = set()
        self._is_told = False
        # The number of changes first: changes made in between are then read next time.
        self._changes = self._book.changes()
        self._read()
        self._read_s = time.monotonic()

    def is_open(self) -> bool:
        """Return whether all clients are served because there has never been a key; False if keys cannot be read."""
        try:
            self._refresh()
        except KeysUnreadable:
            return False
        return self._open_without_keys and self._is_empty and not self._own

    def is_cluster(self, secret: str) -> bool:
        """Return whether this is the secret by which the cluster's servers authenticate each other."""
        digest = digest_of(secret)
        return any(hmac.compare_digest(own, digest) for own in self._cluster)

    def caller(self, secret: str) -> Caller:
        """Return the holder of this secret.

        Raises:
            KeyRefused: the secret is unknown or no longer valid.
            KeysUnreadable.
        """
        self._refresh()
        digest = digest_of(secret)
        held = self._own.get(digest) or self._held.get(digest) or self._cluster.get(digest) or self._find(digest)
        if held is None or not hmac.compare_digest(held.digest, digest):
            raise KeyRefused(None)
        if held.key is not None:
            now_s = self._now()
            if (state := held.key.state(now_s)) != "active":
                raise KeyRefused(state)
            if held.ends_s is not None and held.ends_s <= now_s:
                raise KeyRefused("replaced")
            self._used_s[held.key.name] = now_s
            self._active.add(held.key.name)
        return held.caller

    def check(self, principal: str) -> None:
        """Check that the key of this name is still valid; principals without a stored key always pass.

        Raises:
            KeyRefused: the key is no longer valid.
            KeysUnreadable.
        """
        self._refresh()
        with _unreadable():
            key = self._book.get(principal)
        if key is None:
            return
        if (state := key.state(self._now())) != "active":
            raise KeyRefused(state)
        self._active.add(principal)

    def take_ended(self) -> list[str]:
        """Return the names of keys that were used here and have ended since the last call; none while the store cannot
        be read.
        """
        with suppress(KeysUnreadable), _unreadable():
            ended = self._book.ended(self._active, self._now())
            self._active -= ended
            return sorted(ended)
        return []

    async def keep_uses(self) -> None:
        """Write the times of keys' last use periodically, until cancelled."""
        while True:
            await asyncio.sleep(NOTE_EVERY_S)
            await self.write_uses()

    async def write_uses(self) -> None:
        """Write the times of keys' last use; if the disk fails, only these times are lost."""
        used, self._used_s = self._used_s, {}
        if used:
            await run_in_threadpool(self._write, used)

    def _write(self, used_s: Mapping[str, float]) -> None:
        try:
            with closing(KeyStore(self._root)) as key_store:
                key_store.note_uses(used_s)
        except AdapterError as error:
            _LOG.warning("cannot write when keys were last used: %s", error)

    def close(self) -> None:
        """Close the store; afterwards all keys are refused."""
        self._book.close()

    def _refresh(self) -> None:
        now_s = time.monotonic()
        try:
            if (changes := self._book.changes()) != self._changes:
                if self._book.num_changes() != self._num_changes:
                    self._read()
                self._changes = changes
        except _UNREADABLE as error:
            if now_s - self._read_s > STALE_S:
                if not self._is_told:
                    _LOG.error("keys cannot be checked, so that every request gets 503: %s", error)
                self._is_told = True
                raise KeysUnreadable(str(error)) from error
            return
        self._read_s, self._is_told = now_s, False

    def _read(self) -> None:
        self._num_changes = self._book.num_changes()
        self._is_empty = self._book.is_empty()
        self._held: dict[bytes, _Held] = {}

    def _find(self, digest: bytes) -> _Held | None:
        with _unreadable():
            found = self._book.find(digest)
        if found is None:
            return None
        key, ends_s = found
        caller = Caller(key.name, key.scopes, key.adapters, key.limits)
        held = self._held[digest] = _Held(digest, key, caller, ends_s)
        return held


@contextmanager
def _unreadable() -> Iterator[None]:
    """Convert errors of the store. Raises: KeysUnreadable: the store cannot be read."""
    try:
        yield
    except _UNREADABLE as error:
        raise KeysUnreadable(str(error)) from error


def _own_key(secret: str | None, principal: str, scope: Scope) -> Mapping[bytes, _Held]:
    if secret is None:
        return {}
    digest = digest_of(secret)
    return {digest: _Held(digest, None, Caller(principal, frozenset({scope})))}
