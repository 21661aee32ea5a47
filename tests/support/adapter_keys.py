"""Keys of adapters that a test has stored."""

from adapter_store.registry.records import AdapterRecord, VersionRecord
from adapter_store.spec import AdapterKey, AdapterRef


def key_of(stored: AdapterRef | AdapterRecord | VersionRecord) -> AdapterKey:
    """Return the key of a version with weights, which not every version has."""
    assert stored.key is not None
    return stored.key
