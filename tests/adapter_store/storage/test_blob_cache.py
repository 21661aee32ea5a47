"""Weights of a follower: whole and verified or not there, continued after breaks, the oldest evicted, held ones not."""

import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from following import NearOrigin, catch_up
from store_kit import BASE, add, blobs

from adapter_store.errors import AdapterCorrupt, CacheFull, CacheTooSmall, OriginUnreachable, StoreFull
from adapter_store.quota import StoreQuota
from adapter_store.spec import AdapterKey
from adapter_store.storage import blob_cache
from adapter_store.store import AdapterStore


@pytest.fixture
def origin(store: AdapterStore) -> NearOrigin:
    return NearOrigin(lambda: store)


@pytest.fixture
def open_follower(
    tmp_path: Path, origin: NearOrigin, store: AdapterStore
) -> Iterator[Callable[[int | None], AdapterStore]]:
    opened: list[AdapterStore] = []

    def start(max_bytes: int | None = None) -> AdapterStore:
        for one in opened:
            one.close()
        quota = StoreQuota(store_bytes=max_bytes)
        opened.append(AdapterStore(tmp_path / "follower", BASE, max_lora_rank=16, quota=quota, origin=origin))
        catch_up(opened[-1], store)
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def digest_of(store: AdapterStore, key: AdapterKey) -> str:
    return store.spec(key).weights_digest


def test_weights_come_once_and_are_there_after_a_restart(
    mia: list[AdapterKey], origin: NearOrigin, open_follower: Callable[..., AdapterStore], store: AdapterStore
) -> None:
    follower = open_follower()
    assert blobs(follower) == {}
    for _ in range(2):
        assert follower.load(mia[0]).spec == store.load(mia[0]).spec
    open_follower().load(mia[0])
    assert origin.fetched == [(digest_of(store, mia[0]), 0)]


def test_a_connection_that_breaks_is_continued(
    mia: list[AdapterKey], origin: NearOrigin, open_follower: Callable[..., AdapterStore]
) -> None:
    origin.breaks = [1000, 1000, 1000, 2000, 2000]
    open_follower().load(mia[0])
    assert [start for _, start in origin.fetched] == [0, 1000, 1000, 1000, 2000, 2000]


def test_one_that_breaks_behind_the_last_byte_has_brought_all(
    mia: list[AdapterKey], origin: NearOrigin, open_follower: Callable[..., AdapterStore]
) -> None:
    origin.ends_badly = True
    origin.breaks = [1000]
    open_follower().load(mia[0])
    assert [start for _, start in origin.fetched] == [0, 1000]


def test_one_that_brings_nothing_more_fails(
    mia: list[AdapterKey], origin: NearOrigin, open_follower: Callable[..., AdapterStore]
) -> None:
    follower = open_follower()
    origin.breaks = [1000] * 4
    with pytest.raises(OriginUnreachable):
        follower.load(mia[0])
    assert (len(origin.fetched), blobs(follower)) == (4, {})
    assert list((follower.root / "tmp").iterdir()) == []
    assert follower.quarantined() == frozenset()
    follower.load(mia[0])


def test_connections_that_bring_hardly_more_fail(
    mia: list[AdapterKey], origin: NearOrigin, open_follower: Callable[..., AdapterStore]
) -> None:
    """A registry that drips would else be asked again and again, for as long as it has bytes."""
    follower = open_follower()
    origin.breaks = [*range(1000, 1100, 10)]
    with pytest.raises(OriginUnreachable):
        follower.load(mia[0])
    assert [start for _, start in origin.fetched] == [0, 1000, 1010, 1020]


def test_a_blob_damaged_on_the_way_is_fetched_again(
    mia: list[AdapterKey], origin: NearOrigin, open_follower: Callable[..., AdapterStore], store: AdapterStore
) -> None:
    follower = open_follower()
    origin.flips = [3000]
    assert follower.load(mia[0]).spec == store.load(mia[0]).spec
    origin.flips = [3000, 3000]
    with pytest.raises(AdapterCorrupt, match="come damaged from the registry"):
        follower.load(mia[1])
    assert len(blobs(follower)) == 1
    assert follower.quarantined() == {mia[1]}
    # The same file, uploaded once more at the registry, is tried again.
    add(store, "mia", 1)
    catch_up(follower, store)
    follower.load(mia[1])


def test_a_copy_damaged_on_this_disk_is_fetched_again(
    mia: list[AdapterKey], origin: NearOrigin, open_follower: Callable[..., AdapterStore], store: AdapterStore
) -> None:
    follower = open_follower()
    follower.load(mia[0])
    path = follower._blobs.path(digest_of(store, mia[0]))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    follower.load(mia[0])
    assert len(origin.fetched) == 2
    assert follower.quarantined() == frozenset()


def test_many_threads_fetch_a_blob_once(
    mia: list[AdapterKey], origin: NearOrigin, open_follower: Callable[..., AdapterStore]
) -> None:
    follower, failures = open_follower(), list[Exception]()

    def load(key: AdapterKey) -> None:
        try:
            follower.load(key)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=load, args=(key,)) for key in mia * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(start for _, start in origin.fetched) == [0, 0, 0]


def test_the_least_recently_opened_go_first_and_held_ones_stay(
    mia: list[AdapterKey], open_follower: Callable[..., AdapterStore], store: AdapterStore
) -> None:
    size = max(path.stat().st_size for path in blobs(store).values())
    follower = open_follower(2 * size)
    digests = [digest_of(store, key) for key in mia]
    hold = follower.hold(mia[0])
    for number, key in enumerate(mia[:2]):
        follower.load(key)
        os.utime(follower._blobs.path(digests[number]), (number, number))
    follower.load(mia[2])
    assert set(blobs(follower)) == {digests[0], digests[2]}
    also = follower.hold(mia[2])
    with pytest.raises(CacheFull, match=f"{2 * size} bytes are kept"):
        follower.load(mia[1])
    assert set(blobs(follower)) == {digests[0], digests[2]}
    del hold, also
    os.utime(follower._blobs.path(digests[0]), (5, 5))
    # Opened last although it came first.
    follower.load(mia[0])
    os.utime(follower._blobs.path(digests[2]), (6, 6))
    follower.load(mia[1])
    assert set(blobs(follower)) == {digests[0], digests[1]}


def test_weights_that_are_more_than_the_whole_cache(
    mia: list[AdapterKey], open_follower: Callable[..., AdapterStore]
) -> None:
    with pytest.raises(CacheTooSmall, match="1000 bytes: it needs a larger --store-bytes"):
        open_follower(1000).load(mia[0])


def test_weights_longer_than_any_adapter_take_no_room(
    mia: list[AdapterKey], origin: NearOrigin, open_follower: Callable[..., AdapterStore], store: AdapterStore
) -> None:
    """They are damaged, or something else: nothing that is here goes for them."""
    follower = open_follower(store.max_blob_bytes + 2)
    follower.load(mia[0])
    origin.announced = store.max_blob_bytes + 1
    with pytest.raises(AdapterCorrupt, match=f"come with {origin.announced} bytes from the registry"):
        follower.load(mia[1])
    assert follower.blob_exists(digest_of(store, mia[0]))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk with room for so many bytes of the follower's weights, beside those that have to stay free."""
    found = SimpleNamespace(room=1 << 30)
    folder = tmp_path / "follower" / "blobs" / "sha256"

    def usage(_: Path) -> SimpleNamespace:
        used = sum(path.stat().st_size for path in folder.iterdir())
        return SimpleNamespace(free=blob_cache.SPARE_BYTES + found.room - used)

    monkeypatch.setattr(blob_cache.shutil, "disk_usage", usage)
    return found


def test_a_disk_that_the_cache_would_fill(
    mia: list[AdapterKey], open_follower: Callable[..., AdapterStore], store: AdapterStore, disk: SimpleNamespace
) -> None:
    """The least recently opened make room, and what must stay free stays; nothing goes for what has no room even so."""
    size = max(path.stat().st_size for path in blobs(store).values())
    follower, digests = open_follower(), [digest_of(store, key) for key in mia]
    disk.room = 2 * size
    for number, key in enumerate(mia):
        follower.load(key)
        os.utime(follower._blobs.path(digests[number]), (number, number))
    assert set(blobs(follower)) == set(digests[1:])
    holds = [follower.hold(mia[1])]
    follower.load(mia[0])
    assert set(blobs(follower)) == set(digests[:2])
    holds.append(follower.hold(mia[0]))
    with pytest.raises(CacheFull, match=r"no room on this replica's disk: \d+ bytes more must be free"):
        follower.load(mia[2])
    assert set(blobs(follower)) == set(digests[:2])


def test_a_disk_that_others_fill(
    mia: list[AdapterKey], open_follower: Callable[..., AdapterStore], store: AdapterStore, disk: SimpleNamespace
) -> None:
    """Weights that nothing holds make room while the server runs, and before it starts."""
    follower, digests = open_follower(), [digest_of(store, key) for key in mia]
    for number, key in enumerate(mia):
        follower.load(key)
        os.utime(follower._blobs.path(digests[number]), (number, number))
    hold = follower.hold(mia[0])
    disk.room = sum(blobs(follower)[digest].stat().st_size for digest in digests) - 1
    catch_up(follower, store)
    assert set(blobs(follower)) == {digests[0], digests[2]}
    disk.room = 0
    catch_up(follower, store)
    assert set(blobs(follower)) == {digests[0]}
    del hold
    assert blobs(open_follower()) == {}


def test_a_full_disk_is_no_end(
    mia: list[AdapterKey], open_follower: Callable[..., AdapterStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = open_follower()
    with monkeypatch.context() as patch:
        patch.setattr("adapter_store.storage.blob_cache.BlobUpload.write", _full)
        with pytest.raises(CacheFull, match="no room on this replica's disk"):
            follower.load(mia[0])
    assert blobs(follower) == {}
    follower.load(mia[0])


def _full(*_: object) -> None:
    raise StoreFull("no room")


def test_a_registry_that_is_away(
    mia: list[AdapterKey], origin: NearOrigin, open_follower: Callable[..., AdapterStore]
) -> None:
    """What was fetched is served on, names too; the rest says why not."""
    follower = open_follower()
    follower.load(mia[0])
    origin.is_reachable = False
    follower.load(mia[0])
    assert follower.resolve("mia").key == mia[2]
    with pytest.raises(OriginUnreachable):
        follower.load(mia[2])
    origin.is_reachable = True
    follower.load(mia[2])


def test_weights_that_the_registry_lost(
    mia: list[AdapterKey], open_follower: Callable[..., AdapterStore], store: AdapterStore
) -> None:
    follower = open_follower()
    os.unlink(store._blobs.path(digest_of(store, mia[0])))
    with pytest.raises(AdapterCorrupt, match="are gone; upload the same file again"):
        follower.load(mia[0])


class Killed(BaseException):
    """End the process, as far as the code can tell: nothing catches it."""


class Kill:
    """Let a number of calls that change the disk pass, and none after them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        for name in ("open", "write", "fsync", "replace", "unlink"):
            patch.setattr(os, name, partial(self._call, getattr(os, name)))

    def _call(self, real: Callable[..., object], *arguments: object, **options: object) -> object:
        if self.left is not None:
            if self.left == 0:
                raise Killed
            self.left -= 1
        return real(*arguments, **options)


def test_a_kill_at_any_change_of_the_disk(
    mia: list[AdapterKey],
    open_follower: Callable[..., AdapterStore],
    store: AdapterStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While one blob is evicted and another comes: the next server has whole blobs only, and fetches the others."""
    size = max(path.stat().st_size for path in blobs(store).values())
    kill = Kill(monkeypatch)
    for point in itertools.count():
        follower = open_follower(2 * size)
        for path in blobs(follower).values():
            path.unlink()
        follower.load(mia[0])
        follower.load(mia[1])
        kill.left = point
        try:
            follower.load(mia[2])
            break
        except Killed:
            pass
        finally:
            kill.left = None
        reopened = open_follower(2 * size)
        assert list((reopened.root / "tmp").iterdir()) == []
        for digest, path in blobs(reopened).items():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
        for key in mia:
            assert reopened.load(key).spec.key == key
    assert point > 8
