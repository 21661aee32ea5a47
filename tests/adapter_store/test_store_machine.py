"""Random sequences of operations on a store, compared with a model made of plain dictionaries; reopened at times."""

import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis.strategies as st
import pytest
from following import NearOrigin, catch_up, shown
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_scenarios import BASE, CONFIG, REFUSED, blobs, digest_of, weights

from adapter_store.errors import (
    AdapterChanged,
    AdapterExists,
    AdapterInvalid,
    AdapterNotFound,
    VersionInUse,
    VersionNotFound,
)  # fmt: skip
from adapter_store.registry.records import Change
from adapter_store.spec import AdapterId, AdapterKey, AdapterRef
from adapter_store.storage.refcounts import ContentHold
from adapter_store.store import AdapterStore

MISSING = 7
NUM_FILES = 4
FILES = [weights(value + 1) for value in range(NUM_FILES)]
DIGESTS = [digest_of(value + 1) for value in range(NUM_FILES)]

names = st.sampled_from(("mia", "zoe"))
aliases = st.sampled_from(("prod", "next"))
files = st.integers(0, NUM_FILES - 1)
places = st.integers(0, MISSING)
"""Index of one of an id's versions; `MISSING` is one that it does not have."""
seldom = st.integers(0, 9).map(lambda number: number == 9)
targets = st.one_of(st.none(), places, st.tuples(places, places), st.tuples(places, places))


@dataclass
class Model:
    """One id: its current version, its versions as numbers of files, its aliases as versions with shares."""

    current: int = 0
    versions: dict[int, int] = field(default_factory=dict)
    aliases: dict[str, dict[int, float]] = field(default_factory=dict)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.number = 0.0
        self.model: dict[str, Model] = {}
        self.last: dict[str, int] = {}
        self.keys: dict[int, AdapterKey] = {}
        self.uploaded: set[int] = set()
        self.present: set[int] = set()
        self.pending: Counter[int] = Counter()
        self.holds: list[tuple[int, ContentHold]] = []
        self.verdicts: dict[tuple[str, int], int] = {}
        self.open()

    def open(self) -> None:
        self.store = AdapterStore(self.folder / "store", BASE, draw=lambda: self.number)

    def teardown(self) -> None:
        self.holds.clear()
        self.store.close()
        shutil.rmtree(self.folder)

    @initialize()
    def fill(self) -> None:
        for name, file in (("mia", 3), ("mia", 0), ("mia", 1), ("zoe", 2)):
            self.register(name, file, None, False)

    def collected(self) -> None:
        """Drop contents that are neither named nor held, with their weights unless those were sent once more."""
        kept = {file for model in self.model.values() for file in model.versions.values()}
        kept |= {file for file, _ in self.holds}
        self.uploaded -= {file for file in self.present - kept if not self.pending[file]}
        self.present &= kept

    @rule(file=files)
    def upload(self, file: int) -> None:
        with self.store.open_blob(DIGESTS[file], len(FILES[file])) as upload:
            upload.write(FILES[file])
            upload.commit()
        self.uploaded.add(file)
        self.pending[file] += 1

    @rule(name=names, file=files)
    def register_what_does_not_fit(self, name: str, file: int) -> None:
        """End one upload of the weights: they go if it was the last and nothing refers to them."""
        self.upload(file)
        with pytest.raises(AdapterInvalid):
            self.store.register(name, REFUSED, DIGESTS[file])
        self.pending[file] -= 1
        if not self.pending[file] and file not in self.present:
            self.uploaded.discard(file)

    @rule(name=names, file=files, alias=st.none() | aliases, if_not_exists=st.booleans())
    def register(self, name: str, file: int, alias: str | None, if_not_exists: bool) -> None:
        self.upload(file)
        if if_not_exists and name in self.model:
            with pytest.raises(AdapterExists):
                self.store.register(name, CONFIG, DIGESTS[file], if_not_exists=True)
            return
        done = self.store.register(name, CONFIG, DIGESTS[file], alias=alias, if_not_exists=if_not_exists)
        self.pending[file] -= 1
        model = self.model.setdefault(name, Model())
        known = [version for version, of in model.versions.items() if of == file]
        if not known:
            self.last[name] = self.last.get(name, 0) + 1
            model.versions[self.last[name]] = file
        model.current = known[-1] if known else self.last[name]
        if alias is not None:
            model.aliases[alias] = {model.current: 1.0}
        self.present.add(file)
        key = self.keys.setdefault(file, done.ref.key)
        assert (done.ref.version, done.ref.key, done.created) == (model.current, key, not known)

    def at(self, name: str, place: int) -> int:
        """Return the number of the version at a place, or one that the id does not have."""
        model = self.model.get(name)
        if model is None or place == MISSING:
            return self.last.get(name, 0) + 1
        return sorted(model.versions)[place % len(model.versions)]

    def shares(self, name: str, target: object) -> dict[int, float] | None:
        if target is None:
            return None
        first, second = sorted(self.at(name, p) for p in (target if isinstance(target, tuple) else (target, target)))
        return {first: 1.0} if first == second else {first: 0.25, second: 0.75}

    @rule(name=names, to=st.none() | places, flips=st.dictionaries(aliases, targets, max_size=2), is_stale=seldom)
    def change(self, name: str, to: int | None, flips: dict[str, object], is_stale: bool) -> None:
        """Roll back and flip aliases in one change."""
        version = None if to is None else self.at(name, to)
        shares = {alias: self.shares(name, target) for alias, target in flips.items()}
        wanted = {v for of in shares.values() for v in of or ()} | ({version} - {None})
        model = self.model.get(name)
        tag = self.store.get(name).etag if model and not is_stale else "0" * 32
        expected: type[Exception] | None = None
        if model is None:
            expected = AdapterNotFound
        elif is_stale:
            expected = AdapterChanged
        elif not wanted <= model.versions.keys():
            expected = VersionNotFound
        if expected is not None:
            with pytest.raises(expected):
                self.store.change(name, Change(version, shares), if_match={tag} if model else None)
            return
        assert model is not None
        self.store.change(name, Change(version, shares), if_match={tag})
        model.current = version or model.current
        model.aliases |= {alias: of for alias, of in shares.items() if of is not None}
        for alias in [alias for alias, of in shares.items() if of is None]:
            model.aliases.pop(alias, None)

    @rule(name=names, place=places, whole=seldom, force=st.booleans())
    def delete(self, name: str, place: int, whole: bool, force: bool) -> None:
        model = self.model.get(name, Model())
        number = None if whole or not model.versions else self.at(name, place)
        reference = name if number is None else f"{name}@{number}"
        deleted = {v for v in model.versions if number in (None, v)}
        in_use = {alias for alias, of in model.aliases.items() if of.keys() & deleted}
        if not deleted or (in_use and not force):
            with pytest.raises(VersionInUse if deleted else AdapterNotFound):
                self.store.delete(reference, force=force)
            return
        gone = self.store.delete(reference, force=force)
        assert (gone.num_versions, set(gone.aliases)) == (len(deleted), in_use)
        for alias in in_use:
            del model.aliases[alias]
        for v in deleted:
            del model.versions[v]
            self.verdicts.pop((name, v), None)
        if not model.versions:
            del self.model[name]
        elif model.current in deleted:
            model.current = max(model.versions)
        named = {self.keys[file] for model in self.model.values() for file in model.versions.values()}
        assert set(gone.unnamed) == set(gone.contents) - named
        assert all(self.store.is_named(key) == (key in named) for key in gone.contents)
        self.collected()

    @rule(file=files)
    def hold(self, file: int) -> None:
        if file in self.present:
            self.holds.append((file, self.store.hold(self.keys[file])))
        else:
            with pytest.raises(AdapterNotFound):
                self.store.hold(self.keys[file])

    @rule(place=places)
    def hold_and_delete(self, place: int) -> None:
        """Delete a version while a request uses it."""
        if "mia" in self.model and (version := self.at("mia", place)) in self.model["mia"].versions:
            self.hold(self.model["mia"].versions[version])
            self.delete("mia", place, False, True)

    @precondition(lambda self: self.holds)
    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        del self.holds[which % len(self.holds)]

    @rule()
    def collect(self) -> None:
        before = len(self.present)
        count = self.store.collector.collect()
        self.collected()
        assert count == before - len(self.present)

    @rule()
    def remove_orphans(self) -> None:
        self.store.collector.remove_orphans(-1.0)
        self.uploaded &= self.present

    @rule(name=names, place=places, value=st.integers(0, 9))
    def record_verdict(self, name: str, place: int, value: int) -> None:
        version, model = self.at(name, place), self.model.get(name, Model())
        ref = AdapterRef(AdapterId(name), version, self.keys[model.versions.get(version, 0)])
        if version not in model.versions:
            with pytest.raises(AdapterNotFound):
                self.store.version_history.record_verdict(ref, {"value": value})
            return
        self.store.version_history.record_verdict(ref, {"value": value})
        self.verdicts[name, version] = value

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.holds.clear()
        self.pending.clear()
        self.open()
        self.collected()

    @rule(number=st.floats(0, 1, exclude_max=True))
    def draw(self, number: float) -> None:
        self.number = number

    @invariant()
    def shows_what_the_model_says(self) -> None:
        shown = {str(r.adapter_id): r for r in self.store.list_adapters()}
        assert shown.keys() == self.model.keys()
        for name, model in self.model.items():
            record = shown[name]
            assert {v.version: v.key for v in record.versions} == {v: self.keys[f] for v, f in model.versions.items()}
            assert record.current_version == model.current
            assert {alias: dict(of) for alias, of in record.aliases.items()} == model.aliases
            assert self.store.resolve(name).key == self.keys[model.versions[model.current]]
            for alias, shares in model.aliases.items():
                first = min(shares)
                expected = first if len(shares) == 1 or self.number < shares[first] else max(shares)
                assert self.store.resolve(f"{name}:{alias}").version == expected
            for v in record.versions:
                value = self.verdicts.get((name, v.version))
                verdict = self.store.version_history.verdict(record.ref(v.version))
                assert verdict == (None if value is None else {"value": value})

    @invariant()
    def everything_needed_is_on_the_disk(self) -> None:
        assert blobs(self.store.root) == {DIGESTS[file] for file in self.uploaded}
        assert self.present <= self.uploaded
        for file in self.present:
            assert self.store.load(self.keys[file]).spec.weights_digest == DIGESTS[file]


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class FollowedMachine(StoreMachine):
    """The store's own machine, with a follower that sees pages late, twice and cut off between two."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, str]] = {}
        super().__init__()
        self.origin = NearOrigin(lambda: self.store)
        self.follow_from_disk()

    def follow_from_disk(self) -> None:
        self.follower = AdapterStore(self.folder / "follower", BASE, origin=self.origin)

    def teardown(self) -> None:
        self.follower.close()
        super().teardown()

    @rule(limit=st.integers(1, 3), times=st.integers(1, 2))
    def take_a_page(self, limit: int, times: int) -> None:
        page = self.store.feed.changes(self.follower.feed.position(), limit)
        for _ in range(times):
            self.follower.follow(page)

    @rule()
    def follow_to_the_end(self) -> None:
        catch_up(self.follower, self.store, 1)
        assert self.follower.feed.revision == self.store.feed.revision
        assert shown(self.follower) == shown(self.store)

    @rule()
    def reopen_follower(self) -> None:
        self.follower.close()
        self.follow_from_disk()

    @invariant()
    def shows_a_state_that_the_owner_had(self) -> None:
        names = {name: record.etag for name, record in self.store.records().items()}
        assert self.states.setdefault(self.store.feed.revision, names) == names, "a change without a revision"
        if (revision := self.follower.feed.revision) >= 0:
            assert {n: r.etag for n, r in self.follower.records().items()} == self.states[revision]


TestFollowed = FollowedMachine.TestCase
TestFollowed.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
