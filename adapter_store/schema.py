"""The layouts that the store's SQLite file has had, and how a file of an older one becomes one of the newest."""

from collections.abc import Mapping

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
