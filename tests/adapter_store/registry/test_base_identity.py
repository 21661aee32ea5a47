"""Which changes of the base a store notices, and what a start with `accept_base_change` does about them."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from store_kit import BASE, add

from adapter_store.errors import StoreUnusable
from adapter_store.registry.base_identity import MAX_SAMPLES, BaseIdentity
from adapter_store.store import AdapterStore

Put = Callable[[AdapterStore, bytes], str]
NORM = [float(x) for x in np.random.default_rng(0).uniform(0.2, 9, 1000).astype(np.float32)]


def bfloat16(values: list[float], units: int = 0) -> list[float]:
    """Rounded to the nearest bfloat16, and moved by so many units of it."""
    bits = np.array(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return [float(x) for x in ((rounded + units) << 16).astype(np.uint32).view(np.float32)]


class TestSample:
    def test_text_and_back(self) -> None:
        whole, bare = BaseIdentity.of(BASE, NORM), BaseIdentity.of(BASE)
        assert BaseIdentity.from_text(whole.to_text()) == whole
        assert BaseIdentity.from_text(bare.to_text()) == bare
        assert len(whole.sample) <= MAX_SAMPLES

    def test_an_index_that_says_something_else(self, tmp_path: Path) -> None:
        with AdapterStore(tmp_path / "store", BASE, base_sample=NORM):
            pass
        with closing(sqlite3.connect(tmp_path / "store" / "index.sqlite3")) as db, db:
            db.execute("UPDATE BASE SET fingerprint = fingerprint || ?", ("x",))
        with pytest.raises(StoreUnusable, match="record of its base is damaged"):
            AdapterStore(tmp_path / "store", BASE, base_sample=NORM)

    @pytest.mark.parametrize(
        "file",
        [
            NORM,
            bfloat16(NORM),
            [float(np.float16(x)) for x in NORM],
            bfloat16([float(np.float16(x)) for x in NORM]),
            [],
        ],
        ids=["same", "bfloat16", "float16", "both", "none taken"],
    )
    def test_another_file_of_the_same_weights(self, file: list[float]) -> None:
        ours, theirs = BaseIdentity.of(BASE, NORM), BaseIdentity.of(BASE, file)
        assert ours.has_weights_of(theirs)
        assert theirs.has_weights_of(ours)

    @pytest.mark.parametrize(
        "trained",
        [bfloat16(NORM, units=1), [1.02 * x for x in NORM], [-x for x in NORM], NORM[:-2], [0.0] * len(NORM)],
        ids=["one unit", "2 %", "sign", "width", "zero"],
    )
    def test_other_weights(self, trained: list[float]) -> None:
        assert not BaseIdentity.of(BASE, bfloat16(NORM)).has_weights_of(BaseIdentity.of(BASE, trained))

    def test_one_number_is_enough(self) -> None:
        changed = [*NORM]
        changed[2] *= 1.01
        assert not BaseIdentity.of(BASE, NORM).has_weights_of(BaseIdentity.of(BASE, changed))


class TestStore:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        with AdapterStore(tmp_path / "store", BASE, base_sample=NORM) as store:
            add(store, "mia")
        return tmp_path / "store"

    def test_another_quantization_is_no_change(self, root: Path) -> None:
        for sample in (bfloat16(NORM), [], NORM):
            AdapterStore(root, BASE, base_sample=sample).close()
        # A start that took no sample has not forgotten the one before.
        with pytest.raises(StoreUnusable, match="other weights"):
            AdapterStore(root, BASE, base_sample=[1.0, 2.0])

    def test_other_weights_need_the_flag_once(self, root: Path) -> None:
        trained = [1.1 * x for x in NORM]
        with pytest.raises(StoreUnusable, match=r"other weights, in the same shapes.*--accept-base-change"):
            AdapterStore(root, BASE, base_sample=trained)
        AdapterStore(root, BASE, base_sample=NORM).close()
        AdapterStore(root, BASE, base_sample=trained, accept_base_change=True).close()
        with AdapterStore(root, BASE, base_sample=trained) as store:
            assert store.resolve("mia").version == 1
        with pytest.raises(StoreUnusable, match="other weights"):
            AdapterStore(root, BASE, base_sample=NORM)

    def test_a_store_of_an_older_version_learns_them(self, tmp_path: Path) -> None:
        with AdapterStore(tmp_path, BASE) as store:
            add(store, "mia")
        AdapterStore(tmp_path, BASE, base_sample=NORM).close()
        with pytest.raises(StoreUnusable, match="other weights"):
            AdapterStore(tmp_path, BASE, base_sample=[2 * x for x in NORM])

    def test_an_empty_store_takes_any_base(self, tmp_path: Path) -> None:
        AdapterStore(tmp_path, BASE, base_sample=NORM).close()
        AdapterStore(tmp_path, replace(BASE, num_layers=7), base_sample=[1.0]).close()

    def test_shapes_that_every_adapter_fits(self, root: Path) -> None:
        deeper = replace(BASE, num_layers=BASE.num_layers + 1)
        with pytest.raises(StoreUnusable, match="--accept-base-change"):
            AdapterStore(root, deeper)
        with AdapterStore(root, deeper, accept_base_change=True) as store:
            assert len(store.spec(store.resolve("mia").key).modules) > 0

    def test_shapes_that_one_adapter_does_not_fit(self, root: Path) -> None:
        with AdapterStore(root, BASE) as store:
            add(store, "zoe", 1)
            store.delete("zoe")  # what is gone need not fit
        shallower = replace(BASE, num_layers=1)
        with pytest.raises(StoreUnusable, match=r"1 adapters do not fit this base.*mia.*layer"):
            AdapterStore(root, shallower, accept_base_change=True)
        AdapterStore(root, BASE, base_sample=NORM).close()


def test_another_base_is_refused_unless_the_store_is_empty(tmp_path: Path) -> None:
    root = tmp_path / "store"
    deeper = replace(BASE, num_layers=3)
    AdapterStore(root, deeper).close()
    with AdapterStore(root, BASE) as store:
        add(store, "mia")
    with pytest.raises(StoreUnusable, match=r"other shapes.*--store"):
        AdapterStore(root, deeper)
    with pytest.raises(StoreUnusable, match=r"'mia'.*--served-model-name"):
        AdapterStore(root, BASE, reserved_ids=frozenset({"mia"}))
    AdapterStore(root, replace(BASE, name="renamed")).close()
