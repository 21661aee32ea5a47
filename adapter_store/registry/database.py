"""The store's SQLite connection: durable, strict, migrated to the newest layout, every change a transaction.

This module also has the earlier layouts of the file and the migrations from them.
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

from adapter_store.errors import StoreFull, StoreUnusable
from adapter_store.storage.full_disk import is_full
from adapter_store.storage.private_file import make_private

SCHEMA_VERSION = 7
_FULL = "no room on the store's disk for its index; nothing changed. Free some and retry"

# The tables that each layout added. A layout is never changed: files of it exist.
_LIMITS = """
CREATE TABLE adapter_limits (adapter_id TEXT PRIMARY KEY REFERENCES adapters, limits TEXT NOT NULL) STRICT;
"""
# `owners` has a row only for versions of principals other than "anonymous".
_ALIASES_OWNERS = """
CREATE TABLE aliases (
    adapter_id TEXT NOT NULL, alias TEXT NOT NULL, version INTEGER NOT NULL,
    share REAL NOT NULL CHECK (share > 0 AND share <= 1), PRIMARY KEY (adapter_id, alias, version),
    FOREIGN KEY (adapter_id, version) REFERENCES versions
) STRICT;
CREATE TABLE owners (
    adapter_id TEXT NOT NULL, version INTEGER NOT NULL, principal TEXT NOT NULL, PRIMARY KEY (adapter_id, version),
    FOREIGN KEY (adapter_id, version) REFERENCES versions ON DELETE CASCADE
) STRICT;
"""
_VERDICTS_OF_CONTENTS = """
CREATE TABLE verdicts (
    key TEXT PRIMARY KEY REFERENCES contents ON DELETE CASCADE, verdict TEXT NOT NULL, created_s REAL NOT NULL
) STRICT;
"""
# `config` is the last column because it may be long: SQLite reads through it to reach later columns.
# Config, report and verdict belong to one version: versions of other uploaders may share the content.
_UPLOADS_VERDICTS = """
CREATE TABLE uploads (
    adapter_id TEXT NOT NULL, version INTEGER NOT NULL, report TEXT NOT NULL, config TEXT NOT NULL,
    PRIMARY KEY (adapter_id, version), FOREIGN KEY (adapter_id, version) REFERENCES versions ON DELETE CASCADE
) STRICT;
CREATE TABLE verdicts (
    adapter_id TEXT NOT NULL, version INTEGER NOT NULL, verdict TEXT NOT NULL, created_s REAL NOT NULL,
    PRIMARY KEY (adapter_id, version), FOREIGN KEY (adapter_id, version) REFERENCES versions ON DELETE CASCADE
) STRICT;
"""
# Up to layout 3, a content had the config and report of its first uploader, whose version has the content's creation
# time. Every other version gets a copy without the name of that uploader's base. A verdict names its version.
_SHARE_OUT = f"""
ALTER TABLE verdicts RENAME TO verdicts_of_contents;
{_UPLOADS_VERDICTS}
INSERT INTO uploads SELECT adapter_id, version, report, config FROM versions JOIN contents USING (key)
    WHERE versions.created_s = contents.created_s;
INSERT INTO uploads SELECT adapter_id, version,
    json_set(report, '$.warnings', json((SELECT json_group_array(value) FROM json_each(report, '$.warnings')
        WHERE value NOT LIKE 'trained on %, served on %'))),
    json_remove(config, '$.base_model_name_or_path', '$.revision')
    FROM versions JOIN contents USING (key) WHERE versions.created_s <> contents.created_s;
INSERT INTO verdicts SELECT adapter_id, version, verdict, verdicts_of_contents.created_s
    FROM verdicts_of_contents JOIN versions USING (key)
    WHERE adapter_id = verdict ->> '$.id' AND version = verdict ->> '$.version';
DROP TABLE verdicts_of_contents;
UPDATE contents SET config = json_remove(config, '$.base_model_name_or_path', '$.revision');
ALTER TABLE contents DROP COLUMN report;
"""
_FORMS = """
ALTER TABLE contents ADD COLUMN stored TEXT NOT NULL DEFAULT 'bf16';
"""
# A version may have defaults, and then needs no weights. Principals other than the owner see only the digest of the
# defaults. It is keyed, so that a guess cannot be compared with it.
_PERSONAS = """
CREATE TABLE personas (
    adapter_id TEXT NOT NULL, version INTEGER NOT NULL, digest TEXT NOT NULL, defaults TEXT NOT NULL,
    PRIMARY KEY (adapter_id, version), FOREIGN KEY (adapter_id, version) REFERENCES versions ON DELETE CASCADE
) STRICT;
CREATE TABLE persona_key (hex TEXT NOT NULL) STRICT;
INSERT INTO persona_key VALUES (lower(hex(randomblob(32))));
"""
_VERSIONS = """
CREATE TABLE versions (
    adapter_id TEXT NOT NULL REFERENCES adapters, version INTEGER NOT NULL, key TEXT REFERENCES contents,
    created_s REAL NOT NULL, PRIMARY KEY (adapter_id, version)
) STRICT;
CREATE INDEX versions_by_key ON versions (key);
"""
# The new table is created under the old one's name, so that other tables' references point to it.
_KEYS_OPTIONAL = f"""
CREATE TEMP TABLE old_versions AS SELECT * FROM versions;
DROP TABLE versions;
{_VERSIONS}
INSERT INTO versions SELECT * FROM old_versions;
DROP TABLE old_versions;
{_PERSONAS}
"""
# Each transaction that changes ids gives them the next revisions, and a deleted id keeps its row. `feed` gets a row
# with a random name each time that the file is opened and then changed: after a backup was restored, equal revisions
# have different names. `followed` has one row in a follower's index: the history and revision that it has reached.
_FEED = """
ALTER TABLE last_versions ADD COLUMN revision INTEGER NOT NULL DEFAULT 0;
UPDATE last_versions SET revision = rowid;
CREATE INDEX last_versions_by_revision ON last_versions (revision);
CREATE TABLE feed (revision INTEGER PRIMARY KEY, history TEXT NOT NULL) STRICT;
INSERT INTO feed VALUES (0, lower(hex(randomblob(16))));
CREATE TABLE followed (history TEXT NOT NULL, revision INTEGER NOT NULL) STRICT;
"""
SCHEMA = f"""
CREATE TABLE base (fingerprint TEXT NOT NULL) STRICT;
CREATE TABLE contents (
    key TEXT PRIMARY KEY, weights_digest TEXT NOT NULL, config TEXT NOT NULL, created_s REAL NOT NULL
) STRICT;
CREATE INDEX contents_by_digest ON contents (weights_digest);
CREATE TABLE adapters (adapter_id TEXT PRIMARY KEY, current_version INTEGER NOT NULL, created_s REAL NOT NULL) STRICT;
{_VERSIONS}
CREATE TABLE last_versions (adapter_id TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT;
{_LIMITS}
{_ALIASES_OWNERS}
{_UPLOADS_VERDICTS}
{_FORMS}
{_PERSONAS}
{_FEED}
"""
MIGRATIONS: Mapping[int, str] = {
    1: _LIMITS,
    2: _ALIASES_OWNERS + _VERDICTS_OF_CONTENTS,
    3: _SHARE_OUT,
    4: _FORMS,
    5: _KEYS_OPTIONAL,
    6: _FEED,
}
"""Statements that turn a layout into the next one."""
BUSY_TIMEOUT_MS = 5000


@contextlib.contextmanager
def sql_errors() -> Iterator[None]:
    """Turn SQLite's errors into StoreFull or StoreUnusable."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if is_full(error):
            raise StoreFull(_FULL) from error
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise StoreUnusable(f"the store's index is damaged ({error}): put back a copy of the folder") from error
        raise StoreUnusable(f"the store's index failed: {error}") from error
    except OSError as error:
        if is_full(error):
            raise StoreFull(_FULL) from error
        raise StoreUnusable(f"the store's index {error.filename} cannot be used: {error.strerror}") from error


def check_index(path: Path) -> None:
    """Check, without changing it, that a store could open this index. A missing one is fine: opening creates it.

    Raises:
        StoreUnusable: it is no database, or has an unknown layout.
    """
    if not path.exists():
        return
    # Without a log, only the file needs to be read; "immutable" keeps SQLite from creating a log.
    how = "mode=ro" if path.with_name(f"{path.name}-wal").exists() else "immutable=1"
    with sql_errors(), contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True)) as db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
    _check_layout(version)


def _check_layout(version: int) -> None:
    if version not in (0, SCHEMA_VERSION) and version not in MIGRATIONS:
        raise StoreUnusable(
            f"another lorasrv wrote it (layout {version}, this one reads up to {SCHEMA_VERSION}); start that one, or "
            "put back a copy of the folder"
        )


class Database:
    """Open the file, creating or migrating it as needed. Not thread-safe: the caller holds the store's lock.

    Raises:
        StoreFull, StoreUnusable: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._commit_failed = False
        with sql_errors():
            make_private(path)
            # Threads are serialized by the store's lock, so check_same_thread is not needed.
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self._open()
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> None:
        with sql_errors():
            self._db.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
        _check_layout(version)
        if version == 0:
            self._change_layout(SCHEMA)
        elif version in MIGRATIONS:
            self._change_layout("".join(MIGRATIONS[old] for old in range(version, SCHEMA_VERSION)))
        with sql_errors():
            # After the migrations: dropping a table, to create it again, would delete the rows that refer to it.
            self._db.execute("PRAGMA foreign_keys = ON")

    def _change_layout(self, statements: str) -> None:
        """Apply statements that lead to the newest layout, all or none."""
        with self._transaction():
            for statement in statements.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with sql_errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._commit()
            except BaseException:
                # After some errors (disk full) SQLite has rolled back by itself; another ROLLBACK would hide the cause.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _commit(self) -> None:
        try:
            self._db.execute("COMMIT")
        except BaseException:
            self._commit_failed = True
            raise

    def discard_failed_commit(self) -> None:
        """Make sure that a failed transaction stays undone, before anything it referred to is removed.

        If the disk failed to make a COMMIT durable, the complete transaction may be in the log, and a crash would
        restore it; the next transaction overwrites it.
        """
        if self._commit_failed:
            with self._transaction():
                # Two changes that cancel out: an UPDATE to the same value would write nothing.
                self._db.execute("INSERT INTO base VALUES ('')")
                self._db.execute("DELETE FROM base WHERE fingerprint = ''")
            self._commit_failed = False

    def problems(self) -> list[str]:
        """Return what SQLite finds wrong with the file, one line each."""
        with sql_errors():
            lines = [str(row[0]) for row in self._db.execute("PRAGMA integrity_check")]
            rows = self._db.execute("PRAGMA foreign_key_check").fetchall()
        broken = [f"{table} names a {parent} row that is not there" for table, _, parent, _ in rows]
        return [line for line in lines if line != "ok"] + broken

    def close(self) -> None:
        """Close the connection."""
        with sql_errors():
            self._db.close()
