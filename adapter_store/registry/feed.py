"""Feed of an index: the rows of ids that changed after a revision, and how a follower applies them.

A change gives its ids the next revisions, in the same transaction. A page holds the current state of ids, in the order
of their last change. An id that changed twice is in it once; a deleted id has only its last version number. A follower
may therefore miss earlier states, but never the last one, and it may receive a page twice. Its position is the history
and revision of its last page. A history ends when a store is restored from a backup. A follower with another history,
or with none, gets pages from the first id again.
"""

import contextlib
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from adapter_store.registry.database import SCHEMA_VERSION, Database, sql_errors
from adapter_store.registry.feed_page import CONTENTS, TABLES, FeedPage, Position
from adapter_store.spec import AdapterId

PAGE_IDS = 1000
PAGE_CHARS = 32 << 20
"""Characters of text after which a page ends: both sides hold a page in memory."""
_CHARS_OF = """
    (SELECT coalesce(sum(length(report) + 2 * length(config)), 0) FROM uploads WHERE adapter_id = changed.adapter_id)
    + (SELECT coalesce(sum(length(defaults)), 0) FROM personas WHERE adapter_id = changed.adapter_id)
"""
_OF_IDS = "FROM last_versions JOIN {table} AS row USING (adapter_id) WHERE revision > ? AND revision <= ?"
_FORGOTTEN = -1
"""Revision, in a follower, of the ids that the feed has not named since it began again."""


def is_followed(path: Path) -> bool:
    """Return whether the index in this file follows another; False if there is no file. A server may be using it.

    Raises:
        StoreUnusable: it cannot be read.
    """
    if not path.exists():
        return False
    with sql_errors(), contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
        is_older = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'followed'").fetchone() is None
        return not is_older and db.execute("SELECT 1 FROM followed").fetchone() is not None


class ChangeFeed(Database):
    """Number the changes of an index, list them, and apply those of another."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._own_history = secrets.token_hex(16)
        self._listeners: list[Callable[[], object]] = []
        self._last = self._read_revision()

    @property
    def revision(self) -> int:
        """Return the revision of the last change. Any thread may call, without the store's lock."""
        return self._last

    def _read_revision(self) -> int:
        with sql_errors():
            found: int = self._db.execute("SELECT coalesce(max(revision), 0) FROM last_versions").fetchone()[0]
        return found

    def listen(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call a function after every change, in the thread that made it; return a function that stops this."""
        self._listeners = [*self._listeners, listener]

        def stop() -> None:
            self._listeners = [one for one in self._listeners if one is not listener]

        return stop

    @contextlib.contextmanager
    def _changing(self, *adapter_ids: AdapterId) -> Iterator[None]:
        """Wrap a change of these ids in one transaction, which also gives them the next revisions."""
        with self._transaction():
            yield
            last = self._read_revision()
            rows = [(last + number, adapter_id) for number, adapter_id in enumerate(adapter_ids, 1)]
            self._db.executemany("UPDATE last_versions SET revision = ? WHERE adapter_id = ?", rows)
            if rows and self._history_at(last + 1) != self._own_history:
                self._db.execute("INSERT INTO feed VALUES (?, ?)", (last + 1, self._own_history))
        self._changed(last + len(adapter_ids))

    def _changed(self, revision: int) -> None:
        self._last = revision
        for listener in self._listeners:
            listener()

    def _history_at(self, revision: int) -> str:
        query = "SELECT history FROM feed WHERE revision <= ? ORDER BY revision DESC LIMIT 1"
        return str(self._db.execute(query, (revision,)).fetchone()[0])

    def head(self) -> Position:
        """Return the position of the last change."""
        with sql_errors():
            last = self._read_revision()
            return Position(self._history_at(last), last)

    def changes(self, after: Position | None, limit: int = PAGE_IDS) -> FeedPage:
        """Return the next page after a position, or the first page if the position is not in this index's history.

        Args:
            limit: most ids in the page.
        """
        with sql_errors():
            last = self._read_revision()
            is_known = after is not None and after.revision <= last
            if after is None or not is_known or self._history_at(after.revision) != after.history:
                after, is_first = Position("", 0), True
            else:
                is_first = False
            ids = self._next_ids(after.revision, limit)
            upto = ids[-1][2] if ids else last
            position = Position(self._history_at(upto), upto)
            rows = self._rows(after.revision, upto)
        return FeedPage(position, SCHEMA_VERSION, self.base() or "", is_first, upto == last, ids, rows)

    def _next_ids(self, after: int, limit: int) -> list[tuple[AdapterId, int, int]]:
        query = (
            f"SELECT adapter_id, version, revision, {_CHARS_OF} FROM last_versions AS changed WHERE revision > ? "
            "ORDER BY revision LIMIT ?"
        )
        found: list[tuple[AdapterId, int, int]] = []
        chars = 0
        for adapter_id, version, revision, more in self._db.execute(query, (after, limit)):
            chars += more
            if found and chars > PAGE_CHARS:
                break
            found.append((adapter_id, version, revision))
        return found

    def _rows(self, after: int, upto: int) -> dict[str, list[list[Any]]]:
        def read(select: str) -> list[list[Any]]:
            return [list(row) for row in self._db.execute(select, (after, upto))]

        versions = _OF_IDS.format(table="versions")
        contents = read(f"SELECT * FROM {CONTENTS} WHERE key IN (SELECT key {versions})")
        return {CONTENTS: contents, **{of: read(f"SELECT row.* {_OF_IDS.format(table=of)}") for of in TABLES}}

    def base(self) -> str | None:
        """Return the base that adapters were checked for, as given to `bind_base`; None if there is none."""
        with sql_errors():
            row = self._db.execute("SELECT fingerprint FROM base").fetchone()
        return row[0] if row is not None else None

    # The follower's side.

    def position(self) -> Position | None:
        """Return how far this index has followed another; None if it never has."""
        with sql_errors():
            row = self._db.execute("SELECT history, revision FROM followed").fetchone()
        return Position(*row) if row is not None else None

    @contextlib.contextmanager
    def following(self, page: FeedPage) -> Iterator[None]:
        """Apply a page, in one transaction that is committed at the end of the `with` block."""
        with self._transaction():
            if page.is_first:
                self._db.execute("UPDATE last_versions SET revision = ?", (_FORGOTTEN,))
            self._delete_ids([name for name, _, _ in page.ids])
            self._insert("OR IGNORE", CONTENTS, page.rows[CONTENTS])
            for table in TABLES:
                self._insert("", table, page.rows[table])
            self._insert("OR REPLACE", "last_versions", page.ids)
            if page.is_last:
                query = "SELECT adapter_id FROM last_versions WHERE revision = ?"
                gone = [name for (name,) in self._db.execute(query, (_FORGOTTEN,))]
                self._delete_ids(gone)
                self._db.executemany("DELETE FROM last_versions WHERE adapter_id = ?", [(name,) for name in gone])
            self._db.execute("DELETE FROM followed")
            self._insert("", "followed", [(page.position.history, page.position.revision)])
            yield

    def mark_followed(self) -> None:
        """Make this index a follower that has received no page yet."""
        with self._transaction():
            self._db.execute("INSERT INTO followed VALUES ('', 0)")

    def _insert(self, how: str, table: str, rows: list[Any]) -> None:
        if rows:
            self._db.executemany(f"INSERT {how} INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)

    def _delete_ids(self, names: list[AdapterId]) -> None:
        for table in ("aliases", "adapter_limits", "versions", "adapters"):
            self._db.executemany(f"DELETE FROM {table} WHERE adapter_id = ?", [(name,) for name in names])
