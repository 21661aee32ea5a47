"""The layouts that the store's SQLite file has had, and how a file of an older one becomes one of the newest."""

from collections.abc import Mapping

SCHEMA_VERSION = 3

# What came with a layout. A layout is never changed, as there are files that have it.
_LIMITS = """
CREATE TABLE adapter_limits (adapter_id TEXT PRIMARY KEY REFERENCES adapters, limits TEXT NOT NULL) STRICT;
"""
# `owners` has a row only for a version that somebody other than "anonymous" made.
_ALIASES_OWNERS_VERDICTS = """
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
SCHEMA = f"""
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
{_LIMITS}
{_ALIASES_OWNERS_VERDICTS}
"""
MIGRATIONS: Mapping[int, str] = {1: _LIMITS, 2: _ALIASES_OWNERS_VERDICTS}
"""What makes the next layout of the one that is named."""
