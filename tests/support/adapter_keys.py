"""Keys of adapters that a test has stored."""

from adapter_store.registry.records import AdapterRecord
from adapter_store.spec import AdapterKey, AdapterRef


def key_of(stored: AdapterRef | AdapterRecord) -> AdapterKey:
    """Return the key of what has weights, as not every version has."""
    assert stored.key is not None
    return stored.key
