"""The store's SQLite file: which id has which versions, what each version is, and which limits an id has.

A content (one AdapterKey) is written once and shared by every version that names it. Version numbers are never used
twice, not even after an id was deleted, so `mia@3` means one thing for ever. Not thread-safe: the store's lock is.
"""

import contextlib
import json
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from adapter_store.errors import StoreFull, StoreUnusable
from adapter_store.manifest import canonical_json
from adapter_store.records import AdapterRecord, VersionRecord
from adapter_store.report import UploadReport
from adapter_store.spec import AdapterId, AdapterKey

SCHEMA_VERSION = 2
BUSY_TIMEOUT_MS = 5000
_SCHEMA = """
CREATE TABLE base (fingerprint TEXT NOT NULL) STRICT;
CREATE TABLE contents (
    key TEXT PRIMARY KEY, weights_digest TEXT NOT NULL, config TEXT NOT NULL, report TEXT NOT NULL,
    created_s REAL NOT NULL
) STRICT;
CREATE INDEX contents_by_digest ON contents (weights_digest);
CREATE TABLE adapters (adapter_id TEXT PRIMARY KEY, current_version INTEGER NOT NULL, created_s REAL NOT NULL) STRICT;
CREATE TABLE versions (
    adapter_id TEXT NOT NULL REFERENCES adapters, version INTEGER NOT NULL, key TEXT NOT NULL REFERENCES contents,
    created_s REAL NOT NULL, PRIMARY KEY (adapter_id, version)
) STRICT;
CREATE INDEX versions_by_key ON versions (key);
CREATE TABLE last_versions (adapter_id TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT;
CREATE TABLE adapter_limits (adapter_id TEXT PRIMARY KEY REFERENCES adapters, limits TEXT NOT NULL) STRICT;
"""
# What makes the next layout of the one that is named; a layout is never changed, as there are files that have it.
_MIGRATIONS: Mapping[int, str] = {
    1: "CREATE TABLE adapter_limits (adapter_id TEXT PRIMARY KEY REFERENCES adapters, limits TEXT NOT NULL) STRICT;",
}


@dataclass(frozen=True, slots=True)
class Content:
    """One immutable content: the config as uploaded, the weights' digest, the report of its first upload."""

    key: AdapterKey
    weights_digest: str
    config: Mapping[str, object]
    report: UploadReport


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


class Index:
    """One connection. Every writing method is one transaction: done when it returns, undone when it raises."""

    def __init__(self, path: Path) -> None:
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
            self._change_layout(_SCHEMA)
        elif version in _MIGRATIONS:
            self._change_layout("".join(_MIGRATIONS[old] for old in range(version, SCHEMA_VERSION)))
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
                self._db.execute("COMMIT")
            except BaseException:
                # After some errors (disk full) SQLite has rolled back by itself; another ROLLBACK would hide the first.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        with sql_errors():
            self._db.close()

    def bind_base(self, fingerprint: str) -> bool:
        """Remember which base the adapters were checked for; False if there are adapters of another one."""
        with self._transaction():
            row = self._db.execute("SELECT fingerprint FROM base").fetchone()
            if row == (fingerprint,):
                return True
            if self._db.execute("SELECT 1 FROM adapters").fetchone():
                return False
            self._db.execute("DELETE FROM base")
            self._db.execute("INSERT INTO base VALUES (?)", (fingerprint,))
            return True

    def records(self, adapter_id: AdapterId | None = None) -> dict[AdapterId, AdapterRecord]:
        """Every id with its versions, or the one asked for."""
        where, values = ("WHERE adapter_id = ?", (adapter_id,)) if adapter_id is not None else ("", ())
        versions: dict[AdapterId, list[VersionRecord]] = {}
        with sql_errors():
            rows = self._db.execute(
                "SELECT adapter_id, version, key, versions.created_s, report FROM versions JOIN contents USING (key) "
                f"{where} ORDER BY adapter_id, version",
                values,
            )
            for name, version, key, created_s, report in rows:
                facts = json.loads(report)
                record = VersionRecord(version, key, created_s, facts["rank_max"], facts["weights_bytes"])
                versions.setdefault(name, []).append(record)
            rows = self._db.execute(f"SELECT adapter_id, limits FROM adapter_limits {where}", values)
            limits = {name: json.loads(text) for name, text in rows}
            heads = self._db.execute(f"SELECT adapter_id, current_version, created_s FROM adapters {where}", values)
            return {
                name: AdapterRecord.of(name, current, created_s, versions[name], limits.get(name))
                for name, current, created_s in heads
            }

    def content(self, key: AdapterKey) -> Content | None:
        with sql_errors():
            row = self._db.execute(
                "SELECT weights_digest, config, report FROM contents WHERE key = ?", (key,)
            ).fetchone()
        if row is None:
            return None
        return Content(key, row[0], json.loads(row[1]), UploadReport.from_dict(json.loads(row[2])))

    def referenced_digests(self) -> set[str]:
        with sql_errors():
            return {row[0] for row in self._db.execute("SELECT weights_digest FROM contents")}

    def is_referenced(self, digest: str) -> bool:
        with sql_errors():
            return self._db.execute("SELECT 1 FROM contents WHERE weights_digest = ?", (digest,)).fetchone() is not None

    def add_version(self, adapter_id: AdapterId, content: Content, now_s: float) -> tuple[int, bool]:
        """Move the id to this content: (version, whether it is a new one). A content that the id has had before gets
        its old version back."""
        with self._transaction():
            self._insert_content(content, now_s)
            version = self._find_version(adapter_id, content.key)
            created = version is None
            if version is None:
                version = self._next_version(adapter_id)
            self._db.execute(
                "INSERT INTO adapters VALUES (?, ?, ?) "
                "ON CONFLICT (adapter_id) DO UPDATE SET current_version = excluded.current_version",
                (adapter_id, version, now_s),
            )
            if created:
                row = (adapter_id, version, content.key, now_s)
                self._db.execute("INSERT INTO versions VALUES (?, ?, ?, ?)", row)
            return version, created

    def _insert_content(self, content: Content, now_s: float) -> None:
        # Insertion order is kept: the first pattern that matches counts, so sorting would change what a config means.
        config = json.dumps(content.config, separators=(",", ":"), allow_nan=False, default=dict)
        report = canonical_json(content.report.to_dict())
        row = (content.key, content.weights_digest, config, report, now_s)
        self._db.execute("INSERT INTO contents VALUES (?, ?, ?, ?, ?) ON CONFLICT (key) DO NOTHING", row)

    def _find_version(self, adapter_id: AdapterId, key: AdapterKey) -> int | None:
        query = "SELECT max(version) FROM versions WHERE adapter_id = ? AND key = ?"
        found: int | None = self._db.execute(query, (adapter_id, key)).fetchone()[0]
        return found

    def _next_version(self, adapter_id: AdapterId) -> int:
        row = self._db.execute(
            "INSERT INTO last_versions VALUES (?, 1) ON CONFLICT (adapter_id) DO UPDATE SET version = version + 1 "
            "RETURNING version",
            (adapter_id,),
        ).fetchone()
        return int(row[0])

    def set_limits(self, adapter_id: AdapterId, limits: Mapping[str, float]) -> None:
        """Replace the limits of an id that there is; none at all leave no row."""
        with self._transaction():
            if not limits:
                self._db.execute("DELETE FROM adapter_limits WHERE adapter_id = ?", (adapter_id,))
                return
            self._db.execute(
                "INSERT INTO adapter_limits VALUES (?, ?) "
                "ON CONFLICT (adapter_id) DO UPDATE SET limits = excluded.limits",
                (adapter_id, json.dumps(dict(limits), allow_nan=False)),
            )

    def delete_versions(self, record: AdapterRecord, doomed: frozenset[int]) -> None:
        """Remove versions; the id moves to the highest that is left, or goes. Contents stay until they are dropped."""
        adapter_id, kept = record.adapter_id, [v.version for v in record.versions if v.version not in doomed]
        with self._transaction():
            rows = [(adapter_id, version) for version in sorted(doomed)]
            self._db.executemany("DELETE FROM versions WHERE adapter_id = ? AND version = ?", rows)
            if not kept:
                self._db.execute("DELETE FROM adapter_limits WHERE adapter_id = ?", (adapter_id,))
                self._db.execute("DELETE FROM adapters WHERE adapter_id = ?", (adapter_id,))
            elif record.current_version in doomed:
                query = "UPDATE adapters SET current_version = ? WHERE adapter_id = ?"
                self._db.execute(query, (max(kept), adapter_id))

    def is_named(self, key: AdapterKey) -> bool:
        """Whether any version names this content."""
        with sql_errors():
            return self._db.execute("SELECT 1 FROM versions WHERE key = ?", (key,)).fetchone() is not None

    def unnamed(self) -> set[AdapterKey]:
        """Contents that no version names."""
        with sql_errors():
            rows = self._db.execute("SELECT key FROM contents WHERE key NOT IN (SELECT key FROM versions)")
            return {key for (key,) in rows}

    def drop(self, keys: Collection[AdapterKey]) -> set[str]:
        """Remove contents that no version names; returns the digests that no content names now."""
        query = "DELETE FROM contents WHERE key = ? RETURNING weights_digest"
        with self._transaction():
            dropped = [row for key in sorted(keys) for row in self._db.execute(query, (key,)).fetchall()]
            return {digest for (digest,) in dropped if not self.is_referenced(digest)}
