"""A table of operations on a store for tests with kills, errors and power losses. A new operation is one more entry.

A scenario is a list of steps, each acknowledged when it returns. An undisturbed run finds the state after each step; a
disturbed store must show the state before or after the interrupted step (`Outcome.check`).
"""

import contextlib
import hashlib
import os
import sqlite3
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from adapter_keys import key_of
from safetensors_bytes import tiled, with_header

from adapter_store.errors import AdapterInvalid, DigestMismatch
from adapter_store.maintenance.offline_store import OfflineStore
from adapter_store.quota import Usage
from adapter_store.registry.database import sql_errors
from adapter_store.registry.records import Change
from adapter_store.spec import BaseShapes
from adapter_store.store import AdapterStore

BASE = BaseShapes("llama", 1, {"self_attn.q_proj": (4, 4)})
CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
REFUSED = CONFIG | {"use_bdlora": True}
# Nested, so that a new store must create parent folders and make them durable.
FOLDER = "data/store"
State = dict[str, dict[str, Any]]
"""The visible state of a store, by id."""


def weights(value: int) -> bytes:
    """Return a rank 1 adapter of one module, float32, with equal values."""
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    header = tiled({f"{stem}A.weight": [1, 4], f"{stem}B.weight": [4, 1]})
    return with_header(header, struct.pack("<8f", *[float(value)] * 8))


def digest_of(value: int) -> str:
    """Return the digest of `weights(value)`."""
    return hashlib.sha256(weights(value)).hexdigest()


class _Unplugged(BaseException):
    """An exception that ends an upload in the middle, like a kill: nothing catches it."""


@dataclass
class Hand:
    """Carry out steps on the store below `top`."""

    top: Path
    held: list[object] = field(default_factory=list)
    opened: AdapterStore | None = None

    @property
    def root(self) -> Path:
        return self.top / FOLDER

    @property
    def store(self) -> AdapterStore:
        assert self.opened is not None
        return self.opened

    def open(self) -> None:
        if self.opened is None:
            self.opened = AdapterStore(self.root, BASE)

    def open_after_a_kill(self) -> None:
        """Open a store whose first server created folders and was killed before their names were durable."""
        folder = "adapter_store.storage.root_lock.fsync_directory"
        with contextlib.suppress(_Unplugged), mock.patch(folder, side_effect=_Unplugged):
            AdapterStore(self.root, BASE)
        self.open()

    def close(self) -> None:
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.close()

    def reopen(self) -> None:
        self.held.clear()
        self.close()
        self.open()

    def put(self, value: int, data: bytes | None = None) -> str:
        digest, data = digest_of(value), data or weights(value)
        with self.store.open_blob(digest, len(data)) as upload:
            # In two pieces, as from a socket.
            upload.write(data[:100])
            upload.write(data[100:])
            upload.commit()
        return digest

    def upload(self, name: str, value: int) -> None:
        self.store.register(name, CONFIG, self.put(value))

    def upload_refused(self) -> None:
        with contextlib.suppress(AdapterInvalid):
            self.store.register("bad", REFUSED, self.put(90))

    def upload_damaged(self) -> None:
        with contextlib.suppress(DigestMismatch):
            self.put(91, weights(92))

    def upload_abandoned(self) -> None:
        with self.store.open_blob("0" * 64, 1000) as upload:
            upload.write(b"x" * 10)

    def upload_killed_after_rename(self) -> None:
        """Leave a file whose name is not durable yet."""
        folder = "adapter_store.storage.blobs.fsync_directory"
        with contextlib.suppress(_Unplugged), mock.patch(folder, side_effect=_Unplugged):
            self.put(2)

    def upload_what_is_missing(self) -> None:
        """Upload like a client that first asks whether the weights exist."""
        if not self.store.blob_exists(digest_of(2)):
            self.put(2)
        self.store.register("mia", CONFIG, digest_of(2))

    def hold(self, name: str) -> None:
        self.held.append(self.store.hold(key_of(self.store.resolve(name))))

    def collect_offline(self) -> None:
        """Run `lorasrv store gc`."""
        self.close()
        with OfflineStore(self.root) as closed:
            closed.collect(age_s=-1.0)
        self.open()

    def age_all(self) -> None:
        """Let an hour pass since the last upload."""
        # Not with `iterdir`, whose call may be made to fail: this call belongs to the test.
        with os.scandir(self.root / "blobs" / "sha256") as files:
            for file in files:
                os.utime(file, (time.time() - 3600,) * 2)

    def release(self) -> None:
        self.held.clear()
        self.store.collector.collect()

    def checkpoint_often(self) -> None:
        """Make SQLite checkpoint every few pages instead of every thousand, so that it happens in a scenario."""
        with sql_errors():
            self.store._index._db.execute("PRAGMA wal_autocheckpoint = 3")


Step = Callable[[Hand], object]


def up(name: str, *values: int) -> tuple[Step, ...]:
    return tuple(lambda h, value=value: h.upload(name, value) for value in values)


def put(value: int) -> Step:
    return lambda h: h.put(value)


def delete(reference: str, **options: Any) -> Step:
    return lambda h: h.store.delete(reference, **options)


def change(name: str, **changes: Any) -> Step:
    return lambda h: h.store.change(name, Change(**changes))


@dataclass(frozen=True)
class Scenario:
    """A scenario, which begins with the results of `before`, all safe; None: there is no store yet. `open` is the first
    step."""

    before: tuple[Step, ...] | None
    steps: tuple[Step, ...]
    open: Step = Hand.open


SCENARIOS: dict[str, Scenario] = {
    "first upload": Scenario(None, (*up("mia", 1), *up("zoe", 1))),
    "first upload after a kill": Scenario(None, up("mia", 1), Hand.open_after_a_kill),
    # Back to version 1; then the same weights again, which repairs damaged files.
    "replace": Scenario((*up("mia", 1, 2), *up("zoe", 2)), (*up("mia", 3, 1), put(2))),
    "delete": Scenario(
        (*up("mia", 1, 2, 3), *up("zoe", 1), *up("gone", 4), change("gone", limits={"weight": 2.0})),
        # zoe shares the weights of mia@1; the second upload of gone is version 2.
        (delete("mia@1"), delete("mia@3"), delete("gone"), *up("gone", 5), delete("zoe"))
    ),
    "hold and collect": Scenario(
        (*up("mia", 1), *up("zoe", 2)),
        (lambda h: h.hold("mia"), lambda h: h.hold("zoe"), delete("mia"), delete("zoe"), *up("zoe", 2), Hand.release)
    ),
    "aliases and rollback": Scenario(
        up("mia", 1, 2, 3),
        (
            change("mia", aliases={"prod": 3, "old": 1}),
            change("mia", version=2, aliases={"prod": {2: 0.5, 3: 0.5}, "old": None}),
            delete("mia@3", force=True)
        )
    ),
    "gc": Scenario(
        (*up("mia", 1), put(2), put(3)),
        (lambda h: h.store.collector.remove_orphans(age_s=-1.0), put(4), Hand.collect_offline)
    ),
    "gc above the bound of bytes": Scenario(
        (*up("mia", 1), put(2), put(3), Hand.reopen, *up("zoe", 4)),
        (Hand.age_all, lambda h: h.store.collector.remove_orphans(max_bytes=0), put(5))
    ),
    "limits": Scenario(
        up("mia", 1), tuple(change("mia", limits=of) for of in ({"max_running": 2}, {"tokens_per_s": 1.5}, {}))
    ),
    "refused": Scenario(
        up("mia", 1), (Hand.upload_refused, Hand.upload_damaged, Hand.upload_abandoned, *up("mia", 2))
    ),
    "restart": Scenario(
        up("mia", 1),
        (
            Hand.checkpoint_often, *up("mia", 2), *up("zoe", 3), Hand.reopen, delete("mia"), Hand.reopen, *up("mia", 4)
        )
    ),
    "found by the next server": Scenario(
        up("mia", 1), (Hand.upload_killed_after_rename, Hand.reopen, Hand.upload_what_is_missing)
    )
}  # fmt: skip


def prepare(scenario: Scenario, top: Path) -> None:
    """Create the state before the scenario."""
    top.mkdir(parents=True, exist_ok=True)
    if scenario.before is not None:
        hand = Hand(top)
        hand.open()
        for step in scenario.before:
            step(hand)
        hand.close()


def observe(store: AdapterStore) -> State:
    """Return everything that a store shows, except times. Extend it when records get new fields."""
    return {
        str(record.adapter_id): {
            "current": record.current_version,
            "versions": [(version.version, str(version.key)) for version in record.versions],
            "reports": [store.version_history.report(record.ref(v.version)).digest for v in record.versions],
            "limits": dict(record.limits),
            "aliases": {alias: dict(shares) for alias, shares in record.aliases.items()},
        }
        for record in store.list_adapters()
    }


def check_totals(store: AdapterStore) -> None:
    """Compare the running totals of the store with a complete count."""
    referenced = store._index.referenced_digests()
    unreferenced = {name: size for name, size in store._blobs.sizes().items() if name not in referenced}
    assert (store._unreferenced.num_bytes, store._unreferenced._sizes) == (sum(unreferenced.values()), unreferenced)
    query = (
        "SELECT coalesce(principal, 'anonymous'), weights_digest, json_extract(report, '$.weights_bytes') "
        "FROM versions LEFT JOIN owners USING (adapter_id, version) LEFT JOIN contents USING (key) "
        "LEFT JOIN uploads USING (adapter_id, version)"
    )
    rows = store._index._db.execute(query).fetchall()
    for principal in {None, "anonymous", *store._usage._used}:
        own = [(digest, size) for owner, digest, size in rows if principal in (None, owner)]
        sizes = {digest: size for digest, size in own if digest is not None}
        assert store._usage.of(principal) == Usage(len(own), sum(sizes.values())), principal


def blobs(root: Path) -> frozenset[str]:
    """Return the weights on the disk, by digest."""
    folder = root / "blobs" / "sha256"
    return frozenset(path.name for path in folder.iterdir()) if folder.is_dir() else frozenset()


@dataclass
class Outcome:
    """Record the visible state and the stored weights after each step of an undisturbed run."""

    states: list[State] = field(default_factory=list)
    blobs: list[frozenset[str]] = field(default_factory=list)

    def note(self, hand: Hand) -> None:
        self.states.append(observe(hand.store))
        self.blobs.append(blobs(hand.root))

    def check(self, top: Path, done: int, *, litter: bool = False) -> int:
        """Open the store that remains after `done` acknowledged steps and check everything; return the number of steps
        that it shows.

        `litter`: the disk refused to remove a file, which may stay until it is old enough to be swept.

        Raises:
            AssertionError, AdapterError: something was lost, is half done or does not work.
        """
        root = top / FOLDER
        with AdapterStore(root, BASE) as store:
            state = observe(store)
            assert state in self.states[done : done + 2], f"after {done} steps: {state}"
            keys = [key_of(version) for record in store.list_adapters() for version in record.versions]
            named = frozenset(store.load(key).spec.weights_digest for key in keys)
            assert not list((root / "tmp").iterdir()), "an unfinished upload is left"
            gone = frozenset().union(*self.blobs[: done + 1]).difference(*self.blobs[done : done + 2])
            assert litter or not blobs(root) & gone, "deleted weights are back"
            check_totals(store)
            store.collector.remove_orphans(age_s=-1.0)
            assert blobs(root) == named, "an orphan survived"
            check_totals(store)
            hand = Hand(Path(), opened=store)
            for name, last in self._last_versions(done).items():
                hand.upload(name, 70)
                assert store.resolve(name).version > last, "a version number was reused"
                store.load(key_of(store.resolve(name)))
        with contextlib.closing(sqlite3.connect(root / "index.sqlite3")) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        return done if state == self.states[done] else done + 1

    def _last_versions(self, done: int) -> dict[str, int]:
        last = {"new": 0}
        for state in self.states[: done + 1]:
            for name, shown in state.items():
                last[name] = max(last.get(name, 0), *(version for version, _ in shown["versions"]))
        return last
