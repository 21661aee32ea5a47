"""One connection to the store's SQLite file: durable, strict, of the newest layout, every change a transaction.

The layouts that the store's SQLite file has had, and how a file of an older one becomes one of the newest.
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

from adapter_store.errors import StoreFull, StoreUnusable

SCHEMA_VERSION = 4

# What came with a layout. A layout is never changed, as there are files that have it.
_LIMITS = """
CREATE TABLE adapter_limits (adapter_id TEXT PRIMARY KEY REFERENCES adapters, limits TEXT NOT NULL) STRICT;
"""
# `owners` has a row only for a version that somebody other than "anonymous" made.
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
# A config may be long: behind it, SQLite would have to read through it on the way to every report.
# What one uploader has sent, was told and has found out is of its version alone: others may have the same content.
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
# Before, config and report were the first uploader's, whose version is as old as the content. For every other version
# they are what is left without the name of that one's base. A verdict names the version that it was found for.
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
SCHEMA = f"""
CREATE TABLE base (fingerprint TEXT NOT NULL) STRICT;
CREATE TABLE contents (
    key TEXT PRIMARY KEY, weights_digest TEXT NOT NULL, config TEXT NOT NULL, created_s REAL NOT NULL
) STRICT;
CREATE INDEX contents_by_digest ON contents (weights_digest);
CREATE TABLE adapters (adapter_id TEXT PRIMARY KEY, current_version INTEGER NOT NULL, created_s REAL NOT NULL) STRICT;
CREATE TABLE versions (
    adapter_id TEXT NOT NULL REFERENCES adapters, version INTEGER NOT NULL, key TEXT NOT NULL REFERENCES contents,
    created_s REAL NOT NULL, PRIMARY KEY (adapter_id, version)
) STRICT;
CREATE INDEX versions_by_key ON versions (key);
CREATE TABLE last_versions (adapter_id TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT;
{_LIMITS}
{_ALIASES_OWNERS}
{_UPLOADS_VERDICTS}
"""
MIGRATIONS: Mapping[int, str] = {1: _LIMITS, 2: _ALIASES_OWNERS + _VERDICTS_OF_CONTENTS, 3: _SHARE_OUT}
"""What makes the next layout of the one that is named."""
BUSY_TIMEOUT_MS = 5000


@contextlib.contextmanager
def sql_errors() -> Iterator[None]:
    """Turn what SQLite says into StoreFull or StoreUnusable."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            raise StoreFull(
                "no room on the store's disk for its index; nothing changed. Free some and retry"
            ) from error
        raise StoreUnusable(f"the store's index failed: {error}") from error


class Database:
    """The file, opened; made, or brought to the newest layout, if need be. Not thread-safe: the store's lock is.

    Raises: StoreFull, StoreUnusable.
    """

    def __init__(self, path: Path) -> None:
        self._commit_failed = False
        with sql_errors():
            # Threads take turns under the store's lock, which is what check_same_thread would guard against.
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
            self._db.execute("PRAGMA foreign_keys = ON")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            self._change_layout(SCHEMA)
        elif version in MIGRATIONS:
            self._change_layout("".join(MIGRATIONS[old] for old in range(version, SCHEMA_VERSION)))
        elif version != SCHEMA_VERSION:
            raise StoreUnusable(f"was written by another lorasrv (layout {version}, this one reads {SCHEMA_VERSION})")

    def _change_layout(self, statements: str) -> None:
        """Make a file of any layout one of the newest: wholly, or not at all."""
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
                # After some errors (disk full) SQLite has rolled back by itself; another ROLLBACK would hide the first.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _commit(self) -> None:
        try:
            self._db.execute("COMMIT")
        except BaseException:
            self._commit_failed = True
            raise

    def settle(self) -> None:
        """Make sure that a transaction that failed stays undone, before anything is removed that it named.

        Where the disk refused to make a COMMIT durable, all of it may be in the log, and a crash would bring it back;
        the next transaction is written over it.
        """
        if self._commit_failed:
            with self._transaction():
                # An UPDATE to what is there already would write nothing.
                self._db.execute("INSERT INTO base VALUES ('')")
                self._db.execute("DELETE FROM base WHERE fingerprint = ''")
            self._commit_failed = False

    def problems(self) -> list[str]:
        """What SQLite finds wrong with the file, a line each."""
        with sql_errors():
            lines = [str(row[0]) for row in self._db.execute("PRAGMA integrity_check")]
            rows = self._db.execute("PRAGMA foreign_key_check").fetchall()
        broken = [f"{table} names a {parent} row that is not there" for table, _, parent, _ in rows]
        return [line for line in lines if line != "ok"] + broken

    def close(self) -> None:
        with sql_errors():
            self._db.close()
