"""One connection to the store's SQLite file: durable, strict, of the newest layout, every change a transaction."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from adapter_store.errors import StoreFull, StoreUnusable
from adapter_store.schema import MIGRATIONS, SCHEMA, SCHEMA_VERSION

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
