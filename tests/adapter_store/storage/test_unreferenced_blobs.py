"""Bytes that no version refers to are counted, also where the index refused to say what it refers to."""

import pytest
from store_kit import build, put
from store_scenarios import check_totals

from adapter_store.store import AdapterStore


def refuse(store: AdapterStore, refuses: bool) -> None:
    """Interrupt every statement of SQLite, or none."""
    store._index._db.set_progress_handler((lambda: True) if refuses else None, 1)


@pytest.mark.parametrize("heals", ["clean", "upload"])
def test_what_the_index_refused_is_counted_when_it_answers(store: AdapterStore, heals: str) -> None:
    files = [build.file(seed=seed) for seed in range(3)]
    digest = put(store, files[0])
    refuse(store, True)
    put(store, files[1])
    refuse(store, False)
    assert store._unreferenced.num_bytes == len(files[0])
    if heals == "clean":
        store.collector.remove_orphans()
    else:
        put(store, files[2])
    check_totals(store)
    store.register("mia", build.config(), digest)
    check_totals(store)
