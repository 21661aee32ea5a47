"""Names and records: SQLite index of ids, versions and aliases, name table in memory, reader of contents."""
