from pathlib import Path

import pytest
from store_kit import BASE, add, build, put

from adapter_store.registry.records import Change
from adapter_store.store import AdapterStore

LIMITS = {"max_running": 2, "tokens_per_s": 12.5}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A closed store: mia@1, mia@3 (by ann), aliases, limits; zoe@1 with mia@1's weights; one orphan."""
    root = tmp_path / "store"
    with AdapterStore(root, BASE) as store:
        for seed, whose in enumerate(("bob", "ann", "ann")):
            store.register("mia", build.config(), put(store, build.file(seed=seed), whose), principal=whose)
        store.register("zoe", build.config(alpha_pattern={"q_proj": 3, "v": 5}), put(store, build.file(seed=0)))
        store.delete("mia@2")
        store.change("mia", Change(version=1, aliases={"prod": {1: 0.9, 3: 0.1}, "next": 3}, limits=LIMITS))
        add(store, "gone", 0)
        store.delete("gone")
        put(store, build.file(seed=8))
    return root
