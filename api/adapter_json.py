"""An adapter as JSON: the same from the server and from a store that is read without one."""

from collections.abc import Collection
from typing import Any

from adapter_store.aliases import target_to_json
from adapter_store.records import AdapterRecord
from adapter_store.spec import AdapterKey


def adapter_json(record: AdapterRecord, corrupt: Collection[AdapterKey]) -> dict[str, Any]:
    """An id, its versions, aliases and limits; `corrupt` are contents that are known to be damaged."""
    versions = [
        {
            "version": v.version,
            "digest": f"sha256:{v.key}",
            "created": int(v.created_s),
            "rank": v.rank_max,
            "bytes": v.bytes,
            "corrupt": v.key in corrupt,
        }
        for v in record.versions
    ]
    return {
        "object": "adapter",
        "id": record.adapter_id,
        "version": record.current_version,
        "digest": f"sha256:{record.key}",
        "created": int(record.created_s),
        "corrupt": record.key in corrupt,
        "etag": record.etag,
        "limits": dict(record.limits),
        "aliases": aliases_json(record),
        "versions": versions,
    }


def aliases_json(record: AdapterRecord) -> dict[str, int | dict[str, float]]:
    """What each alias of the id points to."""
    return {alias: target_to_json(shares) for alias, shares in record.aliases.items()}
