"""Store the ledger in one SQLite file, a row for each content under each id. Calls open the file and block.

Less durable than the store's index on purpose: a crash of the machine loses some seconds of statistics.
"""

import contextlib
import json
import logging
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from adapter_store.spec import AdapterKey
from lorasrv.metrics.histogram import SECONDS, Histogram
from lorasrv.metrics.usage import SUMS, Usage
from lorasrv.request import Account

_LOG = logging.getLogger(__name__)
LAYOUT = 2
BUSY_TIMEOUT_S = 5.0
_TIMES = ("first_used_s", "last_used_s")
_COLUMNS = (*SUMS, *_TIMES, "hot", "cold")
_TYPES = {name: "REAL" if isinstance(getattr(Usage(), name), float) else "INTEGER" for name in (*SUMS, *_TIMES)}
_SCHEMA = f"""CREATE TABLE usage (
    adapter_id TEXT NOT NULL, digest TEXT NOT NULL,
    {", ".join(f"{name} {kind} NOT NULL" for name, kind in _TYPES.items())},
    hot TEXT NOT NULL, cold TEXT NOT NULL,
    PRIMARY KEY (adapter_id, digest)
) STRICT, WITHOUT ROWID"""


class LedgerFile:
    """Access `ledger.db` in a store's folder, from one thread at a time.

    An unreadable file is renamed and logged: statistics must not keep a server from starting.

    Raises (all methods):
        sqlite3.Error, OSError: the disk failed; nothing of the call was done.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, usages: Mapping[Account, Usage]) -> None:
        """Add to the stored usage, in one transaction."""
        if not usages:
            return
        marks = ", ".join("?" * (2 + len(_COLUMNS)))
        with self._open() as db:
            for (adapter_id, key), usage in usages.items():
                whole = _find(db, adapter_id, key or "").get(key or "", Usage())
                whole.merge(usage)
                db.execute(f"REPLACE INTO usage VALUES ({marks})", (adapter_id, key or "", *_row(whole)))

    def read(self, adapter_id: str) -> dict[AdapterKey, Usage]:
        """Return the usage of an id by content; the base's id and key are ""."""
        with self._open() as db:
            return {AdapterKey(digest): usage for digest, usage in _find(db, adapter_id).items()}

    def drop(self, adapter_id: str, keys: Collection[AdapterKey]) -> None:
        """Delete the usage of these contents of an id."""
        with self._open() as db:
            db.executemany("DELETE FROM usage WHERE adapter_id = ? AND digest = ?", [(adapter_id, key) for key in keys])

    def accounts(self) -> list[tuple[str, AdapterKey]]:
        """Return each id and content that has a row."""
        with self._open() as db:
            return [(name, AdapterKey(key)) for name, key in db.execute("SELECT adapter_id, digest FROM usage")]

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open a connection with a transaction around the block."""
        with contextlib.closing(self._connect()) as db:
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
        db = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            layout = db.execute("PRAGMA user_version").fetchone()[0]
            db.execute("PRAGMA synchronous = NORMAL")
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
    """Create the table, with the rows of the older layout, which lacks the columns that have come since."""
    if layout == 0:
        db.execute(_SCHEMA)
        return
    db.execute("ALTER TABLE usage RENAME TO old_usage")
    db.execute(_SCHEMA)
    known = [name for _, name, *_ in db.execute("PRAGMA table_info(old_usage)")]
    added = [name for name in _COLUMNS if name not in known]
    names, values = ", ".join([*known, *added]), ", ".join([*known, *("0" for _ in added)])
    db.execute(f"INSERT INTO usage ({names}) SELECT {values} FROM old_usage")
    db.execute("DROP TABLE old_usage")


class _OtherLayout(Exception):
    """Signal a file written by another version of lorasrv."""


def _find(db: sqlite3.Connection, adapter_id: str, digest: str | None = None) -> dict[str, Usage]:
    text = f"SELECT digest, {', '.join(_COLUMNS)} FROM usage WHERE adapter_id = ?"
    where, values = ("", [adapter_id]) if digest is None else (" AND digest = ?", [adapter_id, digest])
    return {row[0]: _usage(row[1:]) for row in db.execute(text + where, values)}


def _row(usage: Usage) -> list[object]:
    histograms = [json.dumps([histogram.counts, histogram.sum]) for histogram in (usage.hot, usage.cold)]
    return [*(getattr(usage, name) for name in (*SUMS, *_TIMES)), *histograms]


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
