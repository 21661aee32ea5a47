"""Store the ledger in one SQLite file, one row per content and id. Calls open the file and block.

It is deliberately less durable than the store's index: a crash of the machine loses some seconds of statistics.

A server that follows a registry also keeps the usage that the registry has not counted yet: in `unsent`, and in
`sending` the batches on their way, oldest first. A batch that the registry refuses although it counts later ones is
moved to `refused` for good. A batch has a sequence number under its source, which is one start of a server. The
registry stores the last number of each source in the same transaction as the counts, so a batch may arrive any number
of times. Sources, of some 60 bytes, are kept for ever, because a batch may be repeated after any time.
"""

import contextlib
import json
import logging
import secrets
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from adapter_store.spec import AdapterKey
from adapter_store.storage.private_file import make_private
from lorasrv.metrics.histogram import SECONDS, Histogram
from lorasrv.metrics.usage import SUMS, TIMES, Usage
from lorasrv.metrics.usage_batch import UsageBatch, to_rows
from lorasrv.request import Account

_LOG = logging.getLogger(__name__)
LAYOUT = 4
BUSY_TIMEOUT_S = 5.0
BATCH_ACCOUNTS = 1000
"""Most accounts in a batch: some 500 KB of JSON."""
_COLUMNS = (*SUMS, *TIMES, "hot", "cold")
_TYPES = {name: "REAL" if isinstance(getattr(Usage(), name), float) else "INTEGER" for name in (*SUMS, *TIMES)}
_ACCOUNTS = f"""(
    adapter_id TEXT NOT NULL, digest TEXT NOT NULL,
    {", ".join(f"{name} {kind} NOT NULL" for name, kind in _TYPES.items())},
    hot TEXT NOT NULL, cold TEXT NOT NULL,
    PRIMARY KEY (adapter_id, digest)
) STRICT, WITHOUT ROWID"""
_BATCH = "source TEXT NOT NULL, sequence INTEGER NOT NULL, body TEXT NOT NULL"
_SENDING = f"CREATE TABLE sending ({_BATCH}) STRICT"
_REFUSED = f"CREATE TABLE refused ({_BATCH}, why TEXT NOT NULL) STRICT"
_SOURCES = "CREATE TABLE sources (source TEXT PRIMARY KEY, sequence INTEGER NOT NULL) STRICT, WITHOUT ROWID"


class LedgerFile:
    """Access `ledger.db` in a store's folder, from one thread at a time.

    An unreadable file is renamed and logged: statistics must not prevent a server from starting.

    Args:
        sends: whether added usage is also kept for a registry.

    Raises (all methods):
        sqlite3.Error, OSError: the disk failed; the call changed nothing.
    """

    def __init__(self, path: Path, *, sends: bool = False) -> None:
        self.path = path
        self._tables = ("usage", "unsent") if sends else ("usage",)
        self._source, self._sequence = secrets.token_hex(16), 0

    def add(self, usages: Mapping[Account, Usage]) -> None:
        """Add to the stored usage, in one transaction."""
        if usages:
            with self._open() as db:
                _add(db, usages, self._tables)

    def next_batch(self, behind: UsageBatch | None = None) -> UsageBatch | None:
        """Return the batch to send now: the same one until `on_batch_counted`. None: everything was counted.

        Args:
            behind: a batch that waits; the next one after it is returned.
        """
        with self._open(is_lasting=True) as db:
            rows = db.execute("SELECT source, sequence, body FROM sending ORDER BY rowid").fetchall()
            if waiting := [batch for row in rows if (batch := UsageBatch(*row)) != behind]:
                return waiting[0]
            found: dict[Account, Usage] = {
                (name, key): usage for name, key, usage in _accounts(db, "unsent", BATCH_ACCOUNTS)
            }
            if not found:
                return None
            self._sequence += 1
            batch = UsageBatch(self._source, self._sequence, json.dumps(to_rows(found), separators=(",", ":")))
            db.execute("INSERT INTO sending VALUES (?, ?, ?)", (batch.source, batch.sequence, batch.body))
            _drop(db, "unsent", found)
            return batch

    def on_batch_counted(self, batch: UsageBatch) -> None:
        """Note that the registry has counted a batch."""
        with self._open() as db:
            db.execute("DELETE FROM sending WHERE source = ? AND sequence = ?", (batch.source, batch.sequence))

    def on_batch_refused(self, batch: UsageBatch, why: str) -> None:
        """Set a batch aside that the registry will never count."""
        with self._open(is_lasting=True) as db:
            db.execute("DELETE FROM sending WHERE source = ? AND sequence = ?", (batch.source, batch.sequence))
            db.execute("INSERT INTO refused VALUES (?, ?, ?, ?)", (batch.source, batch.sequence, batch.body, why))

    def receive(self, source: str, sequence: int, usages: Mapping[Account, Usage]) -> bool:
        """Add a follower's batch, unless it was added before; return whether it was added now."""
        with self._open(is_lasting=True) as db:
            last = db.execute("SELECT sequence FROM sources WHERE source = ?", (source,)).fetchone()
            if last is not None and sequence <= last[0]:
                return False
            _add(db, usages, ("usage",))
            db.execute("REPLACE INTO sources VALUES (?, ?)", (source, sequence))
            return True

    def read(self, adapter_id: str) -> dict[AdapterKey, Usage]:
        """Return the usage of an id by content; the base's id and key are ""."""
        with self._open() as db:
            return {AdapterKey(digest): usage for digest, usage in _find(db, adapter_id).items()}

    def drop(self, adapter_id: str, keys: Collection[AdapterKey]) -> None:
        """Delete the usage of these contents of an id."""
        with self._open() as db:
            for table in ("usage", "unsent"):
                _drop(db, table, [(adapter_id, key) for key in keys])

    def accounts(self, adapter_ids: Collection[str] | None = None) -> list[tuple[str, AdapterKey]]:
        """Return each id and content that has a row; only of the given ids, if any are given."""
        text = "SELECT adapter_id, digest FROM usage"
        with self._open() as db:
            if adapter_ids is None:
                rows = db.execute(text).fetchall()
            else:
                rows = [row for name in adapter_ids for row in db.execute(f"{text} WHERE adapter_id = ?", (name,))]
        return [(name, AdapterKey(key)) for name, key in rows]

    @contextlib.contextmanager
    def _open(self, *, is_lasting: bool = False) -> Iterator[sqlite3.Connection]:
        """Open a connection with a transaction around the block.

        Args:
            is_lasting: whether it must survive a power failure, because another machine relies on it.
        """
        with contextlib.closing(self._connect()) as db:
            db.execute(f"PRAGMA synchronous = {'EXTRA' if is_lasting else 'NORMAL'}")
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                # After some errors (disk full) SQLite has already rolled back.
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def _connect(self) -> sqlite3.Connection:
        try:
            return self._connect_to()
        except (sqlite3.DatabaseError, _OtherLayout) as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            aside = self.path.with_name(f"{self.path.name}.unreadable")
            _LOG.error(
                "cannot read the ledger %s (%s); renamed it to %s and started a new one", self.path, error, aside
            )
            self.path.replace(aside)
            return self._connect_to()

    def _connect_to(self) -> sqlite3.Connection:
        make_private(self.path)
        db = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            layout = db.execute("PRAGMA user_version").fetchone()[0]
            if layout < LAYOUT:
                db.execute("BEGIN IMMEDIATE")
                _migrate(db, layout)
                db.execute(f"PRAGMA user_version = {LAYOUT}")
                db.execute("COMMIT")
            elif layout > LAYOUT:
                raise _OtherLayout(f"layout {layout}, this server writes {LAYOUT}")
        except BaseException:
            db.close()
            raise
        return db


def _migrate(db: sqlite3.Connection, layout: int) -> None:
    """Create the tables, and copy the rows of the older layout, which lacks the newer columns."""
    db.execute(_REFUSED)
    if layout == 3:
        return
    if layout:
        db.execute("ALTER TABLE usage RENAME TO old_usage")
    for text in (f"CREATE TABLE usage {_ACCOUNTS}", f"CREATE TABLE unsent {_ACCOUNTS}", _SENDING, _SOURCES):
        db.execute(text)
    if not layout:
        return
    known = [name for _, name, *_ in db.execute("PRAGMA table_info(old_usage)")]
    added = [name for name in _COLUMNS if name not in known]
    names, values = ", ".join([*known, *added]), ", ".join([*known, *("0" for _ in added)])
    db.execute(f"INSERT INTO usage ({names}) SELECT {values} FROM old_usage")
    db.execute("DROP TABLE old_usage")


class _OtherLayout(Exception):
    """Signal a file written by another version of lorasrv."""


def _add(db: sqlite3.Connection, usages: Mapping[Account, Usage], tables: Iterable[str]) -> None:
    marks = ", ".join("?" * (2 + len(_COLUMNS)))
    for table in tables:
        for (adapter_id, key), usage in usages.items():
            whole = _find(db, adapter_id, key or "", table).get(key or "", Usage())
            whole.merge(usage)
            db.execute(f"REPLACE INTO {table} VALUES ({marks})", (adapter_id, key or "", *_row(whole)))


def _drop(db: sqlite3.Connection, table: str, accounts: Iterable[Account]) -> None:
    db.executemany(
        f"DELETE FROM {table} WHERE adapter_id = ? AND digest = ?", [(name, key or "") for name, key in accounts]
    )


def _accounts(db: sqlite3.Connection, table: str, limit: int) -> list[tuple[str, AdapterKey, Usage]]:
    rows = db.execute(f"SELECT adapter_id, digest, {', '.join(_COLUMNS)} FROM {table} LIMIT ?", (limit,))
    return [(row[0], AdapterKey(row[1]), _usage(row[2:])) for row in rows]


def _find(db: sqlite3.Connection, adapter_id: str, digest: str | None = None, table: str = "usage") -> dict[str, Usage]:
    text = f"SELECT digest, {', '.join(_COLUMNS)} FROM {table} WHERE adapter_id = ?"
    where, values = ("", [adapter_id]) if digest is None else (" AND digest = ?", [adapter_id, digest])
    return {row[0]: _usage(row[1:]) for row in db.execute(text + where, values)}


def _row(usage: Usage) -> list[object]:
    histograms = [json.dumps([histogram.counts, histogram.sum]) for histogram in (usage.hot, usage.cold)]
    return [*(getattr(usage, name) for name in (*SUMS, *TIMES)), *histograms]


def _usage(row: tuple[object, ...]) -> Usage:
    values = dict(zip(_COLUMNS, row, strict=True))
    histograms = {name: _histogram(str(values.pop(name))) for name in ("hot", "cold")}
    return Usage(**values, **histograms)  # type: ignore[arg-type]


def _histogram(text: str) -> Histogram:
    """Parse a histogram; a damaged one starts again from zero, so that it does not block further writes."""
    try:
        counts, total = json.loads(text)
        found = Histogram(SECONDS, [int(count) for count in counts], float(total))
        if len(found.counts) == len(SECONDS) + 1:
            return found
    except (TypeError, ValueError):
        pass
    _LOG.error("a histogram in the ledger is damaged and restarts from zero: %.80r", text)
    return Histogram()
