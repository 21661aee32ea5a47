from collections.abc import Iterator
from pathlib import Path

import pytest
from store_kit import BASE

from adapter_store.store import AdapterStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    with AdapterStore(tmp_path / "store", BASE, max_lora_rank=16, reserved_ids=frozenset({"tiny-llama"})) as opened:
        yield opened
