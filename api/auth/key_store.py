"""Store the keys of an adapter store, in a separate SQLite file beside the adapters.

Commands write it with or without a running server, and the server reads it again after a change. It contains only the
SHA-256 of each secret. Keys are never deleted, so no name is reused, and a store that once had keys never becomes open
again by accident.
"""

import contextlib
import json
import sqlite3
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adapter_store.errors import StoreFull, StoreUnusable
from adapter_store.storage.full_disk import is_full
from adapter_store.storage.private_file import make_private
from adapter_store.storage.root_lock import opening_errors
from api.auth.principal import (
    NAME_RULE,
    NO_LIMITS,
    RESERVED_NAMES,
    Key,
    KeyLimits,
    Scope,
    digest_of,
    is_name,
    is_pattern,
    new_secret,
)

FILE = "keys.db"
BUSY_MS = 5000
VERSION = 1
_SCHEMA = (
    """CREATE TABLE keys (
        name TEXT PRIMARY KEY, scopes TEXT NOT NULL, adapters TEXT NOT NULL, limits TEXT NOT NULL,
        created_s REAL NOT NULL, expires_s REAL, revoked_s REAL, last_used_s REAL
    ) STRICT""",
    """CREATE TABLE secrets (
        sha256 BLOB PRIMARY KEY, name TEXT NOT NULL REFERENCES keys, ends_s REAL
    ) STRICT, WITHOUT ROWID""",
)
_NOTED = {
    "keys": {"INSERT": "new", "DELETE": "old", "UPDATE OF name, scopes, adapters, limits, expires_s, revoked_s": "new"},
    "secrets": {"INSERT": "new", "DELETE": "old", "UPDATE": "new"},
}
_NOTES = (
    "CREATE TABLE key_changes (number INTEGER PRIMARY KEY, name TEXT NOT NULL) STRICT",
    "CREATE INDEX notes_by_name ON key_changes (name)",
    "CREATE INDEX IF NOT EXISTS secrets_by_name ON secrets (name)",
    *(
        f"CREATE TRIGGER note_{table}_change_{number} AFTER {change} ON {table} "
        f"BEGIN INSERT INTO key_changes (name) VALUES ({row}.name); "
        f"DELETE FROM key_changes WHERE name = {row}.name AND number < (SELECT max(number) FROM key_changes); END"
        for table, kinds in _NOTED.items()
        for number, (change, row) in enumerate(kinds.items())
    ),
)
"""Numbers every change except those of `last_used_s`, by any connection, and keeps the latest number of each key. The
earlier ones go last, so that no number comes twice."""
_NAMED = "name IN (SELECT value FROM json_each(?))"
_COLUMNS = "name, scopes, adapters, limits, created_s, expires_s, revoked_s, last_used_s"
_EXPORTED = ("name", "scopes", "adapters", "limits", "created_s", "expires_s", "revoked_s")


class InvalidKey(Exception):
    """Report a key that cannot be created, or does not exist; `option` names the option to correct."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


def has_keys(root: Path) -> bool:
    """Return whether the store in this folder has ever had a key, without creating anything.

    Raises:
        StoreUnusable: the key store exists and cannot be read.
    """
    if not (root / FILE).exists():
        return False
    with opening_errors(root), contextlib.closing(KeyStore(root)) as key_store:
        return not key_store.is_empty()


@dataclass(frozen=True, slots=True)
class ExportedKeys:
    """Hold keys for the followers of a store, as plain JSON values with the digests of their secrets."""

    # Number of the store's last change.
    number: int
    # Names of the keys that changed, removed ones included; None: all keys are here.
    names: list[str] | None
    keys: list[dict[str, Any]]


class KeyStore:
    """Connect to the key store in a store's folder. It is created if missing, and readable by its owner only.

    Each change is one transaction, durable when the method returns. Threads may take turns.

    Raises (all methods): StoreUnusable, StoreFull.
    """

    def __init__(self, root: Path, *, busy_ms: int = BUSY_MS) -> None:
        self.path = root / FILE
        with _errors():
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_private(self.path)
            # Autocommit: transactions are started explicitly.
            self._db = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            self._opened = self._identity()
        self._close = weakref.finalize(self, self._db.close)
        try:
            self._open(busy_ms)
        except BaseException:
            self.close()
            raise

    def _open(self, busy_ms: int) -> None:
        with _errors():
            self._db.execute(f"PRAGMA busy_timeout = {busy_ms}")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            if self._version() == 0:
                with self._transaction():
                    if self._version() == 0:
                        for table in _SCHEMA:
                            self._db.execute(table)
                        self._db.execute(f"PRAGMA user_version = {VERSION}")
            if (found := self._version()) != VERSION:
                raise StoreUnusable(
                    f"another lorasrv wrote {FILE} (layout {found}, this one reads {VERSION}); start that one, or put "
                    "back a copy of the folder"
                )
            if not self._notes_changes():
                with self._transaction():
                    # Stores of earlier versions do not note changes.
                    for statement in () if self._notes_changes() else _NOTES:
                        self._db.execute(statement)

    def _version(self) -> int:
        return int(self._db.execute("PRAGMA user_version").fetchone()[0])

    def close(self) -> None:
        self._close()

    def changes(self) -> int:
        """Return a number that changes when another connection changes the store; reads no data (some 10 microseconds).

        Raises:
            StoreUnusable: the file was removed or replaced, so changes made by commands would not be seen here.
        """
        with _errors():
            number = int(self._db.execute("PRAGMA data_version").fetchone()[0])
            if self._identity() != self._opened:
                raise StoreUnusable(f"the key store {FILE} was replaced; stop the server before, or start it again now")
            return number

    def num_changes(self) -> int:
        """Return the number of changes to keys and secrets so far; times of last use do not count."""
        with _errors():
            return self._num_changes()

    def _num_changes(self) -> int:
        return int(self._db.execute("SELECT coalesce(max(number), 0) FROM key_changes").fetchone()[0])

    def _notes_changes(self) -> bool:
        return self._db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'key_changes'").fetchone() is not None

    def _identity(self) -> tuple[int, int]:
        file = self.path.stat()
        return file.st_dev, file.st_ino

    def all(self) -> list[Key]:
        """Return all keys ever created, oldest first."""
        with _errors():
            return [_key(row) for row in self._db.execute(f"SELECT {_COLUMNS} FROM keys ORDER BY created_s, name")]

    def find(self, digest: bytes) -> tuple[Key, float | None] | None:
        """Return the key of a secret by its SHA-256, and the secret's own end if there is one; None if unknown."""
        query = f"SELECT ends_s, {_COLUMNS} FROM secrets JOIN keys USING (name) WHERE sha256 = ?"
        with _errors():
            row = self._db.execute(query, (digest,)).fetchone()
            return None if row is None else (_key(row[1:]), row[0])

    def get(self, name: str) -> Key | None:
        """Return the key of this name, or None."""
        with _errors():
            row = self._db.execute(f"SELECT {_COLUMNS} FROM keys WHERE name = ?", (name,)).fetchone()
            return None if row is None else _key(row)

    def ended(self, names: Iterable[str], now_s: float) -> set[str]:
        """Return the names among these whose keys are revoked or, at time `now_s`, expired."""
        query = "SELECT name FROM json_each(?) JOIN keys ON name = value WHERE revoked_s IS NOT NULL OR expires_s <= ?"
        with _errors():
            return {name for (name,) in self._db.execute(query, (json.dumps(list(names)), now_s))}

    def is_empty(self) -> bool:
        """Return whether there has never been a key."""
        with _errors():
            return self._db.execute("SELECT 1 FROM keys").fetchone() is None

    def create(
        self,
        name: str,
        scopes: frozenset[Scope],
        adapters: tuple[str, ...] = ("*",),
        limits: KeyLimits = NO_LIMITS,
        expires_s: float | None = None,
    ) -> tuple[Key, str]:
        """Create a key and return it with its secret, which is not stored.

        Raises:
            InvalidKey: the name is invalid or in use, or the key would have no permissions or be expired.
        """
        _check(name, scopes, adapters)
        key, secret = Key(name, scopes, adapters, limits, time.time(), expires_s), new_secret()
        if key.state(key.created_s) != "active":
            raise InvalidKey("--expires-in", "the key would have expired already")
        row = (
            *(name, json.dumps(sorted(scopes)), json.dumps(adapters), json.dumps(asdict(limits))),
            *(key.created_s, key.expires_s),
        )
        with _errors(), self._transaction():
            if self._db.execute("SELECT 1 FROM keys WHERE name = ?", (name,)).fetchone() is not None:
                raise InvalidKey(
                    "--name", f"there is or was a key named {name}; names are not reused, so choose another"
                )
            self._db.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, NULL, NULL)", row)
            self._db.execute("INSERT INTO secrets VALUES (?, ?, NULL)", (digest_of(secret), name))
        return key, secret

    def rotate(self, name: str, grace_s: float = 0.0) -> tuple[Key, str]:
        """Create a new secret for a key; its earlier ones end after `grace_s` seconds.

        Raises:
            InvalidKey: there is no such key, or it is no longer valid.
        """
        secret, now_s = new_secret(), time.time()
        with _errors(), self._transaction():
            key = self.get(name)
            if key is None:
                raise InvalidKey("NAME", f"there is no key named {name!r}")
            if (state := key.state(now_s)) != "active":
                raise InvalidKey("NAME", f"key {name} is {state}; create another: lorasrv key create")
            query = "UPDATE secrets SET ends_s = min(coalesce(ends_s, ?1), ?1) WHERE name = ?2"
            self._db.execute(query, (now_s + grace_s, name))
            self._db.execute("INSERT INTO secrets VALUES (?, ?, NULL)", (digest_of(secret), name))
        return key, secret

    def revoke(self, name: str) -> bool:
        """Revoke a key permanently; return False if it was already revoked.

        Raises:
            InvalidKey: there is no key of that name.
        """
        with _errors(), self._transaction():
            row = self._db.execute("SELECT revoked_s FROM keys WHERE name = ?", (name,)).fetchone()
            if row is None:
                raise InvalidKey("NAME", f"there is no key named {name!r}")
            self._db.execute("UPDATE keys SET revoked_s = ? WHERE name = ?", (row[0] or time.time(), name))
            return row[0] is None

    def exported(self, after: int | None = None) -> ExportedKeys:
        """Return the keys that changed after the change of this number; None: all keys."""
        with _errors(), self._reading():
            number = self._num_changes()
            if after is None:
                return ExportedKeys(number, None, self._exported())
            query = "SELECT name FROM key_changes WHERE number > ?"
            names = [name for (name,) in self._db.execute(query, (after,))]
            return ExportedKeys(number, names, self._exported(names))

    def _exported(self, names: Iterable[str] | None = None) -> list[dict[str, Any]]:
        chosen, values = ("true", ()) if names is None else (_NAMED, (json.dumps(list(names)),))
        secrets: dict[str, list[tuple[str, float | None]]] = {}
        query = f"SELECT name, hex(sha256), ends_s FROM secrets WHERE {chosen} ORDER BY 2"
        for name, digest, ends_s in self._db.execute(query, values):
            secrets.setdefault(name, []).append((digest, ends_s))
        query = f"SELECT {', '.join(_EXPORTED)} FROM keys WHERE {chosen} ORDER BY name"
        named = (dict(zip(_EXPORTED, row, strict=True)) for row in self._db.execute(query, values).fetchall())
        return [{**key, "secrets": [list(one) for one in secrets.get(key["name"], [])]} for key in named]

    def replace(
        self, keys: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Replace the keys of these names (None: all keys) with others, in the form of `exported`, by writing only
        those that differ; keep the times of their last use here.

        Returns:
            The keys that were removed or changed, as they were, and those that are new or changed, as they are now.

        Raises:
            KeyError, TypeError, ValueError, ArithmeticError, StoreUnusable: a key is malformed; nothing changed.
        """
        with _errors(), self._transaction():
            gone = {key["name"]: key for key in self._exported(names)}
            changed, old = [], []
            for key in keys:
                known = gone.pop(key["name"], None)
                if known != key:
                    changed.append(key)
                    old += [] if known is None else [known]
            digests = [(bytes.fromhex(digest),) for key in (*gone.values(), *old) for digest, _ in key["secrets"]]
            self._db.executemany("DELETE FROM secrets WHERE sha256 = ?", digests)
            self._db.executemany("DELETE FROM keys WHERE name = ?", [(name,) for name in gone])
            marks, named = ", ".join("?" * len(_EXPORTED)), ", ".join(f"{name} = excluded.{name}" for name in _EXPORTED)
            self._db.executemany(
                f"INSERT INTO keys ({', '.join(_EXPORTED)}) VALUES ({marks}) ON CONFLICT (name) DO UPDATE SET {named}",
                [[key[column] for column in _EXPORTED] for key in changed],
            )
            secrets = ((bytes.fromhex(hexed), key["name"], end) for key in changed for hexed, end in key["secrets"])
            self._db.executemany("INSERT INTO secrets VALUES (?, ?, ?)", secrets)
            # Check that they can be read: one malformed key would make all of them unreadable.
            for key in changed:
                self.get(key["name"])
            return [*gone.values(), *old], self._exported([key["name"] for key in changed])

    def note_uses(self, used_s: Mapping[str, float]) -> None:
        """Store the times of last use by key name."""
        with _errors(), self._transaction():
            query = "UPDATE keys SET last_used_s = max(coalesce(last_used_s, 0), ?) WHERE name = ?"
            self._db.executemany(query, [(when, name) for name, when in used_s.items()])

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Read a consistent state, even if other connections make changes."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        # Checkpoint into the file itself, so that a copy of it alone is complete.
        with contextlib.suppress(sqlite3.Error):
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)")


def _key(row: Sequence[Any]) -> Key:
    """Return the key of a row of `_COLUMNS`."""
    name, scopes, adapters, limits, *times = row
    known = frozenset(map(Scope, json.loads(scopes)))
    return Key(name, known, tuple(json.loads(adapters)), KeyLimits(**json.loads(limits)), *times)


def _check(name: str, scopes: frozenset[Scope], adapters: tuple[str, ...]) -> None:
    if not is_name(name):
        raise InvalidKey(
            "--name", f"{name!r} is not a valid name of a key: {NAME_RULE}; taken: {', '.join(sorted(RESERVED_NAMES))}"
        )
    if not scopes:
        raise InvalidKey("--scope", f"a key needs one of the scopes {', '.join(Scope)}")
    if not adapters:
        raise InvalidKey("--adapters", "a key needs a pattern of adapter ids, such as 'mia*' or '*'")
    for pattern in adapters:
        if not is_pattern(pattern):
            raise InvalidKey(
                "--adapters", f"{pattern!r} is not a pattern of adapter ids; expected a pattern such as 'mia*' or '*'"
            )


def limits_of(exported: Mapping[str, Any]) -> KeyLimits:
    """Return the limits of a key in the form of `exported`. Raises: StoreUnusable."""
    with _errors():
        return KeyLimits(**json.loads(exported["limits"]))


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Convert errors of SQLite and the disk to StoreFull or StoreUnusable."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        if is_full(error):
            raise StoreFull(f"no room on the store's disk for {FILE}; nothing changed. Free some and retry") from error
        if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            raise StoreUnusable(f"the key store {FILE} is damaged ({error}): put back a copy of it") from error
        name, why = (error.filename, error.strerror) if isinstance(error, OSError) else (FILE, error)
        is_shut = getattr(error, "sqlite_errorname", "").startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY"))
        hint = "; can its folder and the file be written?" if is_shut else ""
        raise StoreUnusable(f"the key store {name} cannot be used: {why}{hint}") from error
    except (ValueError, TypeError) as error:
        raise StoreUnusable(f"the key store {FILE} contains data that this version did not write") from error
