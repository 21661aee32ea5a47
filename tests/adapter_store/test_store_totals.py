"""What the store counts as it changes equals a count of everything, whatever was done to it before."""

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from store_scenarios import BASE, CONFIG, REFUSED, check_totals, digest_of, weights

from adapter_store.errors import AdapterError, StoreUnusable
from adapter_store.maintenance.offline_store import OfflineStore
from adapter_store.quota import StoreQuota
from adapter_store.store import AdapterStore

ids = st.sampled_from(("mia", "zoe", "eva"))
principals = st.sampled_from(("anonymous", "ann", "bob"))
files = st.integers(1, 4)
# Two configs of one file are two contents that share their weights.
configs = st.sampled_from((CONFIG, CONFIG | {"lora_alpha": 2}))
references = st.tuples(ids, st.none() | st.integers(1, 4)).map(
    lambda at: at[0] if at[1] is None else f"{at[0]}@{at[1]}"
)
QUOTA = StoreQuota(max_adapters=9, max_adapters_per_key=5, store_bytes=3 * 32, store_bytes_per_key=2 * 32)


class Totals(RuleBasedStateMachine):
    """Uploads and what removes them, by several principals, some refused by quotas or by the disk."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.holds: list[Any] = []
        self.open(StoreQuota())

    def open(self, quota: StoreQuota) -> None:
        self.store = AdapterStore(self.root, BASE, quota=quota)

    def teardown(self) -> None:
        self.holds.clear()
        self.store.close()
        shutil.rmtree(self.root)

    @contextlib.contextmanager
    def disk(self, fails: bool) -> Iterator[None]:
        """Refuse the commit if it is to fail; what the store refuses for reasons of its own is part of the game."""
        error = StoreUnusable("the disk refused")
        commit = mock.patch.object(self.store._index, "_commit", side_effect=error)
        with contextlib.suppress(AdapterError), commit if fails else contextlib.nullcontext():
            yield

    @rule(file=files, is_whole=st.booleans())
    def upload(self, file: int, is_whole: bool) -> None:
        data = weights(file)
        with contextlib.suppress(AdapterError), self.store.open_blob(digest_of(file), len(data)) as upload:
            upload.write(data if is_whole else data[:9])
            upload.commit()

    @rule(name=ids, file=files, config=configs | st.just(REFUSED), principal=principals, fails=st.booleans())
    def register(self, name: str, file: int, config: dict[str, Any], principal: str, fails: bool) -> None:
        self.upload(file, True)
        with self.disk(fails):
            self.store.register(name, config, digest_of(file), principal=principal)

    @rule(name=ids, defaults=st.sampled_from(('{"seed": 1}', '{"seed": 2}')), principal=principals)
    def register_defaults(self, name: str, defaults: str, principal: str) -> None:
        with self.disk(False):
            self.store.register_defaults(name, defaults, principal=principal)

    @rule(name=ids, principal=principals)
    def share_weights(self, name: str, principal: str) -> None:
        with self.disk(False):
            self.store.register_defaults(name, '{"seed": 3}', self.store.resolve(name), principal=principal)

    @rule(reference=references, fails=st.booleans(), is_held=st.booleans())
    def delete(self, reference: str, fails: bool, is_held: bool) -> None:
        with self.disk(fails):
            if is_held:
                self.holds.append(self.store.hold(self.store.resolve(reference).key))
            self.store.delete(reference)

    @rule(age_s=st.sampled_from((-1.0, 1e6)), max_bytes=st.sampled_from((0, 1 << 20)))
    def clean(self, age_s: float, max_bytes: int) -> None:
        self.holds.clear()
        self.store.collector.collect()
        self.store.collector.remove_orphans(age_s, max_bytes)

    @rule(quota=st.sampled_from((StoreQuota(), QUOTA)), offline=st.booleans())
    def reopen(self, quota: StoreQuota, offline: bool) -> None:
        self.holds.clear()
        self.store.close()
        if offline:
            with OfflineStore(self.root) as closed:
                closed.collect(age_s=-1.0)
        self.open(quota)

    @invariant()
    def totals_equal_a_count(self) -> None:
        check_totals(self.store)


TestTotals = Totals.TestCase
TestTotals.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_an_upload_costs_the_same_however_many_versions_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AdapterStore(tmp_path, BASE, quota=replace(QUOTA, max_adapters=999, store_bytes=1 << 20)) as store:
        for listing in ("sizes", "oldest_first", "names"):
            monkeypatch.setattr(store._blobs, listing, None)

        def instructions(number: int) -> int:
            """Return what SQLite does for an upload."""
            counted = itertools.count()
            store._index._db.set_progress_handler(lambda: next(counted) < 0, 1)
            with store.open_blob(digest_of(number), len(weights(number))) as upload:
                upload.write(weights(number))
                upload.commit()
            store.register(f"a{number}", CONFIG, digest_of(number), principal=f"p{number}")
            store._index._db.set_progress_handler(None, 1)
            return next(counted)

        spent = [instructions(number) for number in range(200)]
    assert max(spent[-20:]) < max(spent[:20]) + 100
