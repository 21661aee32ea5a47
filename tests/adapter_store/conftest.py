from collections.abc import Iterator
from pathlib import Path

import pytest
from store_kit import BASE, add

from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    with AdapterStore(tmp_path / "store", BASE, max_lora_rank=16, reserved_ids=frozenset({"tiny-llama"})) as opened:
        yield opened


@pytest.fixture
def mia(store: AdapterStore) -> list[AdapterKey]:
    """Return the keys of mia@1, mia@2 and mia@3."""
    return [add(store, "mia", seed).ref.key for seed in range(3)]
