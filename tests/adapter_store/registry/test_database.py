"""Layouts of the index: files of every earlier one are migrated, as one transaction."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from store_kit import BASE, add, blobs, build, put

from adapter_store.errors import StoreFull, StoreUnusable
from adapter_store.registry.database import SCHEMA_VERSION, sql_errors
from adapter_store.registry.records import Change
from adapter_store.store import AdapterStore

LIMITS = {"max_running": 2, "tokens_per_s": 12.5}
# Layout 1, word for word as it was written: such files exist.
LAYOUT_1 = """
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
"""
TABLES_1 = ("base", "contents", "adapters", "versions", "last_versions")
# Layout 2 is 1 and this, word for word.
LAYOUT_2 = """
CREATE TABLE adapter_limits (adapter_id TEXT PRIMARY KEY REFERENCES adapters, limits TEXT NOT NULL) STRICT;
"""
# Layout 3 is 2 and this, word for word.
LAYOUT_3 = """
CREATE TABLE aliases (
    adapter_id TEXT NOT NULL, alias TEXT NOT NULL, version INTEGER NOT NULL,
    share REAL NOT NULL CHECK (share > 0 AND share <= 1), PRIMARY KEY (adapter_id, alias, version),
    FOREIGN KEY (adapter_id, version) REFERENCES versions
) STRICT;
CREATE TABLE owners (
    adapter_id TEXT NOT NULL, version INTEGER NOT NULL, principal TEXT NOT NULL, PRIMARY KEY (adapter_id, version),
    FOREIGN KEY (adapter_id, version) REFERENCES versions ON DELETE CASCADE
) STRICT;
CREATE TABLE verdicts (
    key TEXT PRIMARY KEY REFERENCES contents ON DELETE CASCADE, verdict TEXT NOT NULL, created_s REAL NOT NULL
) STRICT;
"""
# Layout 4, word for word.
LAYOUT_4 = f"""
CREATE TABLE base (fingerprint TEXT NOT NULL) STRICT;
CREATE TABLE contents (
    key TEXT PRIMARY KEY, weights_digest TEXT NOT NULL, config TEXT NOT NULL, created_s REAL NOT NULL
) STRICT;
{LAYOUT_1[LAYOUT_1.index("CREATE INDEX contents_by_digest") :]}
{LAYOUT_2}
{LAYOUT_3[: LAYOUT_3.index("CREATE TABLE verdicts")]}
CREATE TABLE uploads (
    adapter_id TEXT NOT NULL, version INTEGER NOT NULL, report TEXT NOT NULL, config TEXT NOT NULL,
    PRIMARY KEY (adapter_id, version), FOREIGN KEY (adapter_id, version) REFERENCES versions ON DELETE CASCADE
) STRICT;
CREATE TABLE verdicts (
    adapter_id TEXT NOT NULL, version INTEGER NOT NULL, verdict TEXT NOT NULL, created_s REAL NOT NULL,
    PRIMARY KEY (adapter_id, version), FOREIGN KEY (adapter_id, version) REFERENCES versions ON DELETE CASCADE
) STRICT;
"""
# Layout 5 is 4 and this, word for word.
LAYOUT_5 = """
ALTER TABLE contents ADD COLUMN stored TEXT NOT NULL DEFAULT 'bf16';
"""
# Layout 6 is 5 with keys that may be missing, and this, word for word.
LAYOUT_6 = """
CREATE TABLE personas (
    adapter_id TEXT NOT NULL, version INTEGER NOT NULL, digest TEXT NOT NULL, defaults TEXT NOT NULL,
    PRIMARY KEY (adapter_id, version), FOREIGN KEY (adapter_id, version) REFERENCES versions ON DELETE CASCADE
) STRICT;
CREATE TABLE persona_key (hex TEXT NOT NULL) STRICT;
"""
LAYOUTS = {
    1: LAYOUT_1,
    2: LAYOUT_1 + LAYOUT_2,
    3: LAYOUT_1 + LAYOUT_2 + LAYOUT_3,
    4: LAYOUT_4,
    5: LAYOUT_4 + LAYOUT_5,
    6: (LAYOUT_4 + LAYOUT_5).replace("key TEXT NOT NULL REFERENCES", "key TEXT REFERENCES") + LAYOUT_6,
}
TABLES_3 = (*TABLES_1, "adapter_limits", "aliases", "owners")
TABLES_4 = (*TABLES_3, "uploads")
TABLES_5 = (*TABLES_4, "verdicts")
TABLES = {
    1: TABLES_1,
    2: (*TABLES_1, "adapter_limits"),
    3: TABLES_3,
    4: TABLES_4,
    5: TABLES_5,
    6: (*TABLES_5, "personas", "persona_key"),
}
# A content had the config and the report of its first uploader.
CONTENTS = """
SELECT key, weights_digest, uploads.config, report, contents.created_s FROM contents JOIN versions USING (key)
JOIN uploads USING (adapter_id, version) WHERE versions.created_s = contents.created_s
"""
CONTENTS_4 = "SELECT key, weights_digest, config, created_s FROM contents"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A closed store: `mia` has two versions, `zoe` one."""
    root = tmp_path / "store"
    with AdapterStore(root, BASE) as store:
        for name, seed in (("mia", 1), ("mia", 2), ("zoe", 1)):
            add(store, name, seed)
    return root


def database(root: Path) -> "closing[sqlite3.Connection]":
    return closing(sqlite3.connect(root / "index.sqlite3", isolation_level=None))


def make_layout(version: int, root: Path) -> None:
    """The same adapters, in a file of an old layout."""
    path = root / "index.sqlite3"
    with database(root) as db:
        rows = {table: db.execute(f"SELECT * FROM {table}").fetchall() for table in TABLES[version]}
        rows["last_versions"] = db.execute("SELECT adapter_id, version FROM last_versions").fetchall()
        if version < 5:
            rows["contents"] = db.execute(CONTENTS if version < 4 else CONTENTS_4).fetchall()
    for file in root.glob("index.sqlite3*"):
        file.unlink()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(LAYOUTS[version])
        for table, values in rows.items():
            if not values:
                continue
            db.executemany(f"INSERT INTO {table} VALUES ({','.join('?' * len(values[0]))})", values)
        db.execute(f"PRAGMA user_version = {version}")


@pytest.mark.parametrize("layout", [1, 2, 3, 4, 5, 6])
def test_a_file_of_an_old_layout_keeps_its_adapters(root: Path, layout: int) -> None:
    with AdapterStore(root, BASE) as store:
        if layout >= 2:
            store.change("zoe", Change(limits=LIMITS))
        before = store.list_adapters()
    make_layout(layout, root)
    for _ in range(2):
        with AdapterStore(root, BASE) as store:
            assert store.list_adapters() == before
            for record in before:
                for version in record.versions:
                    assert store.load(version.key).spec == store.spec(version.key)
    with AdapterStore(root, BASE) as store:
        store.change("mia", Change(limits={"weight": 2.0}))
        store.change("mia", Change(version=1, aliases={"prod": 2}))
    with AdapterStore(root, BASE) as store:
        assert (store.limits("mia"), store.limits("zoe")) == ({"weight": 2.0}, LIMITS if layout >= 2 else {})
        assert (store.resolve("mia").version, store.resolve("mia:prod").version) == (1, 2)
    with database(root) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)


def test_facts_kept_with_a_content_move_to_the_versions_that_own_them(tmp_path: Path) -> None:
    """Up to layout 3, all versions of a content showed its first uploader's report, and the newest verdict."""
    root, trained_on = tmp_path / "store", {"base_model_name_or_path": "acme/secret-13b", "revision": "secret-1"}
    config = build.config(**trained_on, target_modules=["q_proj", "v_proj", "o_proj"], rank_pattern={"v_proj": 4})
    with AdapterStore(root, BASE) as store:
        refs = [
            store.register(who, config, put(store, build.file()), principal=who, allow_partial=True).ref
            for who in ("ann", "bob")
        ]
        anns = store.version_history.report(refs[0])
    make_layout(3, root)
    with database(root) as db:
        verdict = {"id": "bob", "version": 1, "verdict": "exact"}
        db.execute("INSERT INTO verdicts VALUES (?, ?, ?)", (refs[0].key, json.dumps(verdict), 1.0))
    with AdapterStore(root, BASE) as store:
        assert [store.version_history.verdict(ref) for ref in refs] == [None, verdict]
        assert store.version_history.report(refs[0]) == anns
        assert "secret-13b" in " ".join(anns.warnings)
        assert store.version_history.peft_dir(refs[0]).config == config
        bobs = store.version_history.report(refs[1])
        assert bobs == replace(anns, warnings=anns.warnings[:1])
        assert bobs.is_partial
        assert store.version_history.peft_dir(refs[1]).config == {
            k: v for k, v in config.items() if k not in trained_on
        }
        store.load(refs[1].key)
    with database(root) as db:
        assert "secret" not in db.execute("SELECT config FROM contents").fetchone()[0]


@pytest.mark.parametrize("version", [1, 2, 3, 5, 6])
def test_every_way_to_the_newest_layout_leads_to_the_same(root: Path, version: int) -> None:
    query = "SELECT type, name, sql FROM sqlite_schema ORDER BY name"
    with database(root) as db:
        fresh = db.execute(query).fetchall()
    make_layout(version, root)
    AdapterStore(root, BASE).close()
    with database(root) as db:
        assert db.execute(query).fetchall() == fresh


@pytest.mark.parametrize(
    ("version", "table"),
    [
        (1, "adapter_limits"),
        (1, "verdicts"),
        (2, "aliases"),
        (2, "verdicts"),
        (3, "uploads"),
        (5, "personas"),
        (6, "feed"),
    ],
)
def test_a_migration_that_fails_leaves_the_old_layout(root: Path, version: int, table: str) -> None:
    make_layout(version, root)
    with database(root) as db:
        db.execute(f"CREATE TABLE {table} (of_somebody_else TEXT) STRICT")
        tables = db.execute("SELECT name FROM sqlite_schema ORDER BY 1").fetchall()
    with pytest.raises(StoreUnusable, match=table):
        AdapterStore(root, BASE)
    with database(root) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (version,)
        assert db.execute("SELECT name FROM sqlite_schema ORDER BY 1").fetchall() == tables
        db.execute(f"DROP TABLE {table}")
    with AdapterStore(root, BASE) as store:
        assert len(store.list_adapters()) == 2


def test_ids_of_an_old_layout_are_followed_from_the_first(root: Path) -> None:
    make_layout(6, root)
    with AdapterStore(root, BASE) as store:
        pages = [store.feed.changes(None, 1)]
        while not pages[-1].is_last:
            pages.append(store.feed.changes(pages[-1].position, 1))
        found = [one for page in pages for one in page.ids]
        assert [(name, version) for name, version, _ in found] == [("mia", 2), ("zoe", 1)]
        assert store.feed.revision == pages[-1].position.revision == 2


def test_making_the_versions_anew_removes_nothing_that_refers_to_them(root: Path) -> None:
    with AdapterStore(root, BASE) as store:
        ref = store.resolve("mia@1")
        store.change("mia", Change(aliases={"prod": {1: 0.5, 2: 0.5}}))
        store.version_history.record_verdict(ref, {"verdict": "exact"})
        report = store.version_history.report(ref)
    make_layout(5, root)
    with AdapterStore(root, BASE) as store:
        assert store.get("mia").aliases == {"prod": {1: 0.5, 2: 0.5}}
        assert store.version_history.verdict(ref) == {"verdict": "exact"}
        assert store.version_history.report(ref) == report
        assert store._index.problems() == []


@pytest.mark.parametrize("version", [-1, SCHEMA_VERSION + 1, 99])
def test_unknown_layouts_are_refused(root: Path, version: int) -> None:
    with database(root) as db:
        db.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(StoreUnusable, match=f"layout {version}, this one reads up to {SCHEMA_VERSION}"):
        AdapterStore(root, BASE)


def test_a_full_disk_while_registering_changes_nothing(store: AdapterStore) -> None:
    add(store, "mia")
    before = store.list_adapters()
    digest = put(store, build.file(seed=1))
    pages = store._index._db.execute("PRAGMA page_count").fetchone()[0]
    store._index._db.execute(f"PRAGMA max_page_count = {pages}")
    big = build.config(revision="x" * 100_000)
    with pytest.raises(StoreFull, match="nothing changed"):
        store.register("mia", big, digest)
    assert store.list_adapters() == before
    assert digest not in set(blobs(store))
    store._index._db.execute("PRAGMA max_page_count = 1000000")
    assert store.register("mia", big, put(store, build.file(seed=1))).ref.version == 2


def test_a_store_on_a_full_disk_is_told_so_when_it_is_opened() -> None:
    """SQLite's own words there are "disk I/O error": the file beside the index cannot grow."""
    refused = sqlite3.OperationalError("disk I/O error")
    refused.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    with pytest.raises(StoreFull, match="Free some and retry"), sql_errors():
        raise refused


def test_the_index_is_durable_and_strict(store: AdapterStore) -> None:
    db = store._index._db
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert db.execute("PRAGMA synchronous").fetchone() == (2,)
    schema = db.execute("SELECT sql FROM sqlite_schema WHERE type = 'table'").fetchall()
    assert len(schema) == 14
    assert all(sql.endswith("STRICT") for (sql,) in schema)
