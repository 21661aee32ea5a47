"""Any sequence of what may happen to a store, against a model made of plain dictionaries; reopened now and then."""

import hashlib
import json
import shutil
import struct
import tempfile
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adapter_store.errors import (
    AdapterChanged,
    AdapterExists,
    AdapterInvalid,
    AdapterNotFound,
    VersionInUse,
    VersionNotFound,
)
from adapter_store.registry.records import Change
from adapter_store.spec import AdapterId, AdapterKey, AdapterRef, BaseShapes
from adapter_store.storage.refcounts import ContentHold
from adapter_store.store import AdapterStore

BASE = BaseShapes("llama", 1, {"self_attn.q_proj": (4, 4)})
NAMES = ("mia", "zoe")
ALIASES = ("prod", "next")
NUM_FILES = 4

names = st.sampled_from(NAMES)
aliases = st.sampled_from(ALIASES)
files = st.integers(0, NUM_FILES - 1)
places = st.integers(0, 7)
"""Which of an id's versions; 7 is one that it does not have."""
seldom = st.integers(0, 9).map(lambda number: number == 9)
targets = st.one_of(st.none(), places, st.tuples(places, places), st.tuples(places, places))


def weights(value: int) -> bytes:
    """A rank 1 adapter of one module, all values alike."""
    stem = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    header = {
        f"{stem}A.weight": {"dtype": "F32", "shape": [1, 4], "data_offsets": [0, 16]},
        f"{stem}B.weight": {"dtype": "F32", "shape": [4, 1], "data_offsets": [16, 32]},
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + struct.pack("<8f", *[float(value + 1)] * 8)


FILES = [weights(value) for value in range(NUM_FILES)]
DIGESTS = [hashlib.sha256(data).hexdigest() for data in FILES]
CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}


class Model:
    """One id: its current version, its versions as numbers of files, its aliases as versions with shares."""

    def __init__(self) -> None:
        self.current = 0
        self.versions: dict[int, int] = {}
        self.aliases: dict[str, dict[int, float]] = {}


class StoreMachine(RuleBasedStateMachine):
    """What the store must be like after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.number = 0.0
        self.model: dict[str, Model] = {}
        self.last: dict[str, int] = {}
        self.keys: dict[int, AdapterKey] = {}
        self.uploaded: set[int] = set()
        self.present: set[int] = set()
        self.awaited: Counter[int] = Counter()
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
            self.upload(file)
            done = self.store.register(name, CONFIG, DIGESTS[file])
            self.awaited[file] -= 1
            self.keys[file] = done.ref.key
            model = self.model.setdefault(name, Model())
            model.current = self.last[name] = done.ref.version
            model.versions[done.ref.version] = file
            self.present.add(file)

    def named(self) -> set[int]:
        return {file for model in self.model.values() for file in model.versions.values()}

    def collected(self) -> None:
        """Contents that are neither named nor held are gone, with their weights unless those were sent once more."""
        kept = self.named() | {file for file, _ in self.holds}
        self.uploaded -= {file for file in self.present - kept if not self.awaited[file]}
        self.present &= kept

    @rule(file=files)
    def upload(self, file: int) -> None:
        with self.store.open_blob(DIGESTS[file], len(FILES[file])) as upload:
            upload.write(FILES[file])
            upload.commit()
        self.uploaded.add(file)
        self.awaited[file] += 1

    @rule(name=names, file=files)
    def register_what_does_not_fit(self, name: str, file: int) -> None:
        """Ends one upload of the weights: they go if it was the last and nothing names them."""
        self.upload(file)
        with pytest.raises(AdapterInvalid):
            self.store.register(name, CONFIG | {"use_dora": True}, DIGESTS[file])
        self.awaited[file] -= 1
        if not self.awaited[file] and file not in self.present:
            self.uploaded.discard(file)

    @rule(name=names, file=files, alias=st.none() | aliases, if_not_exists=st.booleans())
    def register(self, name: str, file: int, alias: str | None, if_not_exists: bool) -> None:
        self.upload(file)
        if if_not_exists and name in self.model:
            with pytest.raises(AdapterExists):
                self.store.register(name, CONFIG, DIGESTS[file], if_not_exists=True)
            return
        done = self.store.register(name, CONFIG, DIGESTS[file], alias=alias, if_not_exists=if_not_exists)
        self.awaited[file] -= 1
        model = self.model.setdefault(name, Model())
        known = [version for version, of in model.versions.items() if of == file]
        if not known:
            self.last[name] = self.last.get(name, 0) + 1
            model.versions[self.last[name]] = file
        model.current = known[-1] if known else self.last[name]
        if alias is not None:
            model.aliases[alias] = {model.current: 1.0}
        self.present.add(file)
        assert (done.ref.version, done.ref.key, done.created) == (model.current, self.keys[file], not known)

    def at(self, name: str, place: int) -> int:
        """The number of the version at a place, or one that the id does not have."""
        model = self.model.get(name)
        if model is None or place == 7:
            return self.last.get(name, 0) + 1
        return sorted(model.versions)[place % len(model.versions)]

    def shares(self, name: str, target: object) -> dict[int, float] | None:
        if target is None:
            return None
        pair = target if isinstance(target, tuple) else (target, target)
        first, second = sorted(self.at(name, place) for place in pair)
        return {first: 1.0} if first == second else {first: 0.25, second: 0.75}

    @rule(name=names, to=st.none() | places, flips=st.dictionaries(aliases, targets, max_size=2), is_stale=seldom)
    def change(self, name: str, to: int | None, flips: dict[str, object], is_stale: bool) -> None:
        """Rollback and flips in one."""
        version = None if to is None else self.at(name, to)
        shares = {alias: self.shares(name, target) for alias, target in flips.items()}
        change = Change(version, shares)
        model = self.model.get(name)
        if model is None:
            with pytest.raises(AdapterNotFound):
                self.store.change(name, change)
            return
        wanted = {v for of in shares.values() for v in of or ()} | ({version} - {None})
        if is_stale:
            with pytest.raises(AdapterChanged):
                self.store.change(name, change, if_match={"0" * 32})
        elif not wanted <= model.versions.keys():
            with pytest.raises(VersionNotFound):
                self.store.change(name, change, if_match={self.store.get(name).etag})
        else:
            self.store.change(name, change, if_match={self.store.get(name).etag})
            model.current = version or model.current
            model.aliases |= {alias: of for alias, of in shares.items() if of is not None}
            for alias, of in shares.items():
                if of is None:
                    model.aliases.pop(alias, None)

    @rule(name=names, place=places, whole=seldom, force=st.booleans())
    def delete(self, name: str, place: int, whole: bool, force: bool) -> None:
        model = self.model.get(name)
        if model is None:
            with pytest.raises(AdapterNotFound):
                self.store.delete(name)
            return
        number = None if whole else self.at(name, place)
        reference = name if number is None else f"{name}@{number}"
        doomed = {v for v in model.versions if number in (None, v)}
        if not doomed:
            with pytest.raises(AdapterNotFound):
                self.store.delete(reference, force=force)
            return
        in_use = {alias for alias, of in model.aliases.items() if of.keys() & doomed}
        if in_use and not force:
            with pytest.raises(VersionInUse):
                self.store.delete(reference)
            return
        gone = self.store.delete(reference, force=force)
        assert (gone.num_versions, set(gone.aliases)) == (len(doomed), in_use)
        for alias in in_use:
            del model.aliases[alias]
        for v in doomed:
            del model.versions[v]
            self.verdicts.pop((name, v), None)
        if not model.versions:
            del self.model[name]
        elif model.current in doomed:
            model.current = max(model.versions)
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
        """What happens to a request's version while it runs."""
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
        count = self.store.collect()
        self.collected()
        assert count == before - len(self.present)

    @rule()
    def remove_orphans(self) -> None:
        self.store.remove_orphans(-1.0)
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
        self.awaited.clear()
        self.open()
        self.collected()

    @rule(number=st.floats(0, 1, exclude_max=True))
    def draw(self, number: float) -> None:
        self.number = number

    @invariant()
    def it_is_what_the_model_says(self) -> None:
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

    @invariant()
    def everything_needed_is_on_the_disk(self) -> None:
        stored = {path.name for path in (self.folder / "store" / "blobs" / "sha256").iterdir()}
        assert stored == {DIGESTS[file] for file in self.uploaded}
        assert self.present <= self.uploaded
        for file in self.present:
            assert self.store.load(self.keys[file]).spec.weights_digest == DIGESTS[file]
        for record in self.store.list_adapters():
            for v in record.versions:
                at = str(record.adapter_id), v.version
                verdict = self.store.version_history.verdict(record.ref(v.version))
                assert verdict == ({"value": self.verdicts[at]} if at in self.verdicts else None)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
