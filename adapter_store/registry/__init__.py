"""SQLite index: ids, versions, aliases, references, records; name table in memory; reads contents back."""
