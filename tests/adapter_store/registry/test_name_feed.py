"""A follower shows what the owner shows, and nothing else; `test_store_machine.py` has it follow at random."""

import copy
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from following import NearOrigin, catch_up, shown
from store_kit import BASE, OWN_TOKENS, RESIZABLE, add, add_with_tokens, build, put

from adapter_store.errors import AdapterCorrupt, AdapterNotFound, OriginUnreachable, StoreFollows, StoreUnusable
from adapter_store.maintenance.offline_store import OfflineStore
from adapter_store.registry import feed
from adapter_store.registry.feed_page import FeedPage
from adapter_store.registry.records import Change
from adapter_store.spec import BaseShapes
from adapter_store.store import AdapterStore


@pytest.fixture
def origin(store: AdapterStore) -> NearOrigin:
    return NearOrigin(lambda: store)


@pytest.fixture
def follower(origin: NearOrigin, tmp_path: Path) -> Iterator[AdapterStore]:
    with AdapterStore(tmp_path / "follower", BASE, max_lora_rank=16, origin=origin) as opened:
        yield opened


def test_all_of_a_version_travels(store: AdapterStore, follower: AdapterStore) -> None:
    add(store, "mia")
    config = build.config(target_modules=["q_proj", "v_proj", "o_proj"])
    persona = json.dumps({"system": "be brief"})
    digest = put(store, build.file(seed=1))
    store.register("mia", config, digest, principal="ann", allow_partial=True, defaults=persona, alias="prod")
    store.register_defaults("words", persona, principal="bob")
    store.change("mia", Change(aliases={"next": {1: 0.25, 2: 0.75}}, limits={"max_running": 2}))
    store.version_history.record_verdict(store.resolve("mia@1"), {"verdict": "exact"})
    assert catch_up(follower, store) == {"mia", "words"}
    assert shown(follower) == shown(store)
    assert follower.limits("mia") == {"max_running": 2}
    assert follower.load(follower.resolve("mia").key).spec.weights_digest == digest
    assert catch_up(follower, store) == set()


def test_tokens_of_its_own_travel(tmp_path: Path) -> None:
    """They are known before the weights are there; the tokenizer that named them is not asked for."""
    with AdapterStore(tmp_path / "owner", RESIZABLE) as owner:
        origin = NearOrigin(lambda: owner)
        with AdapterStore(tmp_path / "follower", RESIZABLE, origin=origin) as follower:
            key = add_with_tokens(owner, "moods").ref.key
            add(owner, "plain")
            catch_up(follower, owner)
            assert follower.added_tokens.of(key) == OWN_TOKENS
            assert follower.added_tokens.of(follower.resolve("plain").key) == ()
            assert not origin.fetched
            spec = follower.load(key).spec
            assert (spec.vocab_size, spec.added_tokens) == (11, OWN_TOKENS)
            with pytest.raises(StoreFollows):
                follower.added_tokens.read_upload("0" * 64, 9)
            owner.delete("moods")
            catch_up(follower, owner)
            with pytest.raises(AdapterNotFound):
                follower.added_tokens.of(key)


def test_names_of_a_long_feed_change_at_once(store: AdapterStore, follower: AdapterStore) -> None:
    """A page in the middle holds states that never were together: `b` of now beside `a` of before."""
    for name in ("a", "b", "c"):
        add(store, name)
    catch_up(follower, store)
    before = dict(follower.records())
    add(store, "b", 1)
    store.delete("c")
    add(store, "a", 1)
    for left in (True, True, False):
        page = store.feed.changes(follower.feed.position(), 1)
        follower.follow(page)
        assert page.is_last is not left
        assert (dict(follower.records()) == before) is left
    assert shown(follower) == shown(store)


def test_a_restored_backup_is_followed_from_the_beginning(tmp_path: Path) -> None:
    """Of what came after the backup, nothing stays, though revisions are counted anew."""
    root, backup = tmp_path / "store", tmp_path / "backup"
    with AdapterStore(root, BASE) as store:
        add(store, "old")
    shutil.copytree(root, backup)
    with AdapterStore(root, BASE) as store:
        origin = NearOrigin(lambda: store)
        with AdapterStore(tmp_path / "follower", BASE, origin=origin) as follower:
            add(store, "lost")
            catch_up(follower, store)
    shutil.rmtree(root)
    shutil.copytree(backup, root)
    for number in (1, 2):
        with AdapterStore(root, BASE) as store, AdapterStore(tmp_path / "follower", BASE, origin=origin) as follower:
            add(store, f"new{number}", number)
            page = store.feed.changes(follower.feed.position())
            assert page.is_first is (number == 1)
            catch_up(follower, store, 1)
            assert "lost" not in shown(follower)
            assert shown(follower) == shown(store)


def test_a_number_that_a_restored_origin_gives_again_is_another_version(tmp_path: Path) -> None:
    """What had it before is gone: who holds it by its content must hear of that."""
    root, backup = tmp_path / "store", tmp_path / "backup"
    with AdapterStore(root, BASE) as store:
        add(store, "mia")
    shutil.copytree(root, backup)
    with AdapterStore(root, BASE) as store:
        origin = NearOrigin(lambda: store)
        with AdapterStore(tmp_path / "follower", BASE, origin=origin) as follower:
            lost = add(store, "mia", 1).ref
            catch_up(follower, store)
    with AdapterStore(backup, BASE) as store, AdapterStore(tmp_path / "follower", BASE, origin=origin) as follower:
        assert add(store, "mia", 2).ref.version == lost.version
        changed = follower.follow(store.feed.changes(follower.feed.position()))
    assert dict(changed.gone) == {"mia": {lost.version}}
    assert changed.unnamed == {lost.key}


def test_a_crash_between_pages_of_a_new_beginning(tmp_path: Path, store: AdapterStore) -> None:
    with AdapterStore(tmp_path / "other", BASE) as other:
        origin = NearOrigin(lambda: other)
        for number in range(3):
            add(other, f"other{number}", number)
        with AdapterStore(tmp_path / "follower", BASE, origin=origin) as follower:
            catch_up(follower, other)
    for number in range(3):
        add(store, f"mia{number}", number)
    origin.of = lambda: store
    for _ in range(2):
        with AdapterStore(tmp_path / "follower", BASE, origin=origin) as follower:
            assert follower.feed.revision == -1
            follower.follow(store.feed.changes(follower.feed.position(), 1))
    with AdapterStore(tmp_path / "follower", BASE, origin=origin) as follower:
        catch_up(follower, store, 1)
        assert shown(follower) == shown(store)


def test_a_held_content_outlives_its_deletion_at_the_owner(store: AdapterStore, follower: AdapterStore) -> None:
    ref = add(store, "mia").ref
    catch_up(follower, store)
    hold = follower.hold(ref.key)
    follower.load(ref.key)
    store.delete("mia")
    catch_up(follower, store)
    with pytest.raises(AdapterNotFound):
        follower.resolve("mia")
    assert follower.load(ref.key).spec.key == ref.key
    del hold
    follower.collector.collect()
    with pytest.raises(AdapterNotFound):
        follower.hold(ref.key)


def test_changes_are_refused(store: AdapterStore, follower: AdapterStore, origin: NearOrigin) -> None:
    ref = add(store, "mia").ref
    catch_up(follower, store)
    attempts = (
        lambda: follower.open_blob("0" * 64, 10),
        lambda: follower.register("mia", build.config(), "0" * 64),
        lambda: follower.register_defaults("mia", "{}"),
        lambda: follower.change("mia", Change(version=1)),
        lambda: follower.delete("mia"),
        lambda: follower.version_history.record_verdict(ref, {}),
    )
    for attempt in attempts:
        with pytest.raises(StoreFollows, match=r"registry\.test:8000; send changes there"):
            attempt()
    origin.is_reachable = False
    for attempt in attempts:
        with pytest.raises(OriginUnreachable):
            attempt()
    assert follower.list_adapters() == store.list_adapters()


def test_owners_and_followers_keep_to_their_folders(tmp_path: Path, store: AdapterStore, origin: NearOrigin) -> None:
    """A follower drops what its registry does not have: opened as one, a store would be emptied."""
    with AdapterStore(tmp_path / "own", BASE) as own:
        add(own, "mia")
    with pytest.raises(StoreUnusable, match="holds adapters of its own"):
        AdapterStore(tmp_path / "own", BASE, origin=origin)
    AdapterStore(tmp_path / "follower", BASE, origin=origin).close()
    with pytest.raises(StoreUnusable, match="cache of a server that follows"):
        AdapterStore(tmp_path / "follower", BASE)
    with AdapterStore(tmp_path / "own", BASE) as own:
        assert own.resolve("mia").version == 1


@pytest.mark.parametrize(
    ("base", "sample", "why"),
    [(BaseShapes("llama", 3, BASE.modules), (), "for a base of shapes"), (BASE, (1.0, 2.0), "other weights")],
)
def test_a_registry_of_another_base_is_refused(
    base: BaseShapes, sample: tuple[float, ...], why: str, tmp_path: Path
) -> None:
    with AdapterStore(tmp_path / "store", BASE, base_sample=(1.0, 1.0)) as store:
        add(store, "mia")
        root = tmp_path / "follower"
        with AdapterStore(root, base, base_sample=sample, origin=NearOrigin(lambda: store)) as follower:
            with pytest.raises(StoreUnusable, match=why):
                catch_up(follower, store)
            assert follower.list_adapters() == []


def test_an_adapter_named_like_the_base_here_is_not_shown(
    store: AdapterStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All others are, at a start too; the log says it once."""
    origin, root = NearOrigin(lambda: store), tmp_path / "follower"
    add(store, "zoe")
    for expected in (["zoe"], ["tom", "zoe"]):
        caplog.clear()
        with AdapterStore(root, BASE, max_lora_rank=16, reserved_ids=frozenset({"mia"}), origin=origin) as follower:
            assert "mia" not in shown(follower)
            for number in range(2):
                add(store, "mia", number)
                assert "mia" not in catch_up(follower, store)
            assert [record.adapter_id for record in follower.list_adapters()] == expected
            assert follower.feed.revision == store.feed.revision
        assert caplog.text.count("adapter named 'mia', which is the base's name here (--served-model-name)") == 1
        add(store, "tom")
    # Under another name of the base the same folder shows it.
    with AdapterStore(root, BASE, max_lora_rank=16, origin=origin) as follower:
        catch_up(follower, store)
        assert shown(follower) == shown(store)


def test_a_page_of_another_layout_is_refused(store: AdapterStore) -> None:
    page = store.feed.changes(None).to_dict()
    with pytest.raises(StoreUnusable, match="layout 99"):
        FeedPage.from_dict(page | {"layout": 99})
    for broken in ({}, page | {"ids": [1]}, page | {"rows": {}}, page | {"position": None}):
        with pytest.raises(StoreUnusable):
            FeedPage.from_dict(broken)


def test_a_page_that_fails_changes_nothing(store: AdapterStore, follower: AdapterStore) -> None:
    add(store, "mia")
    catch_up(follower, store)
    before = shown(follower), follower.feed.position()
    add(store, "zoe")
    page = store.feed.changes(follower.feed.position()).to_dict()
    page["rows"]["aliases"] = [["zoe", "prod", 9, 1.0]]
    with pytest.raises(StoreUnusable):
        follower.follow(FeedPage.from_dict(page))
    assert (shown(follower), follower.feed.position()) == before


WRONG_VALUES = [
    None,
    True,
    -1,
    2**63,
    2**80,
    float("nan"),
    "",
    "{}",
    "[]",
    '{"a":',
    '{"a": "b"}',
    "../x",
    "\ud800",
    [],
    {},
]
ROWS = {"contents": 5, "adapters": 3, "versions": 4, "uploads": 4, "personas": 4, "aliases": 4, "adapter_limits": 2}


@pytest.mark.parametrize(("table", "column"), [(table, at) for table, width in ROWS.items() for at in range(width)])
def test_a_row_with_a_wrong_value_changes_nothing(
    store: AdapterStore, origin: NearOrigin, tmp_path: Path, table: str, column: int
) -> None:
    """Or is taken: whatever comes, a folder of names can be read, now and by the next start."""
    store.register("mia", build.config(), put(store, build.file()), defaults='{"system": "be brief"}', alias="prod")
    store.change("mia", Change(limits={"max_running": 2}))
    good = json.loads(json.dumps(store.feed.changes(None).to_dict()))
    root = tmp_path / "follower"
    for value in WRONG_VALUES:
        shutil.rmtree(root, ignore_errors=True)
        page = copy.deepcopy(good)
        page["rows"][table][0][column] = value
        with AdapterStore(root, BASE, max_lora_rank=16, origin=origin) as follower:
            before = follower.feed.position()
            try:
                follower.follow(FeedPage.from_dict(page))
            except StoreUnusable:
                assert (follower.list_adapters(), follower.feed.position()) == ([], before)
        with AdapterStore(root, BASE, max_lora_rank=16, origin=origin) as follower:
            catch_up(follower, store)
            assert [record.adapter_id for record in follower.list_adapters()] == ["mia"]


@pytest.mark.parametrize(
    ("table", "row"),
    [
        ("adapters", ["mia", 2, 1.0]),
        ("adapters", ["mia", 1]),
        ("adapters", ["zoe", 1, 1.0]),
        ("adapters", None),
        ("uploads", ["mia", 1, "{}", "{}"]),
        ("uploads", ["mia", 1, '{"rank_max": 4, "weights_bytes": "many"}', "{}"]),
        ("adapter_limits", ["mia", '{"max_running": "two"}']),
        ("contents", ["0" * 64, "sha256:" + "0" * 64, "{}", 1.0, "bf16"]),
        ("contents", ["0" * 64, "0" * 64, "{}", 1.0, "int4"]),
    ],
)
def test_a_row_that_is_no_index_changes_nothing(
    store: AdapterStore, follower: AdapterStore, table: str, row: list[Any] | None
) -> None:
    """It would not open again: what is read of a page is read before it is kept."""
    add(store, "mia")
    page = store.feed.changes(None).to_dict()
    page["rows"][table] = [row]
    before = follower.feed.position()
    with pytest.raises(StoreUnusable):
        follower.follow(FeedPage.from_dict(page))
    assert (follower.list_adapters(), follower.feed.position()) == ([], before)
    catch_up(follower, store)
    assert shown(follower) == shown(store)


@pytest.mark.parametrize(
    "change",
    [
        "adapters SET current_version = 9",
        "adapter_limits SET limits = '{'",
        "contents SET weights_digest = '../../../mine'",
        "uploads SET report = '{}'",
        "versions SET adapter_id = 'zoe'",
    ],
)
def test_an_index_with_a_row_that_cannot_be_read(
    store: AdapterStore, follower: AdapterStore, origin: NearOrigin, change: str
) -> None:
    """Earlier versions have taken over more than this one does. All comes again into an empty folder."""
    add(store, "mia")
    store.change("mia", Change(limits={"max_running": 2}))
    catch_up(follower, store)
    for one in (store, follower):
        one.close()
        with closing(sqlite3.connect(one.root / "index.sqlite3")) as index, index:
            index.execute(f"UPDATE {change}")
    says = "store {} cannot be used: its index has a row that cannot be read .*: {}"
    copy, again = "put back a copy of the folder", "delete the folder, and everything comes again from the registry"
    with pytest.raises(StoreUnusable, match=says.format(store.root, copy)):
        AdapterStore(store.root, BASE)
    with pytest.raises(StoreUnusable, match=says.format(store.root, copy)):
        OfflineStore(store.root)
    with pytest.raises(StoreUnusable, match=says.format(follower.root, again)):
        AdapterStore(follower.root, BASE, origin=origin)


@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_digest_that_is_a_path_leads_nowhere(store: AdapterStore, follower: AdapterStore, is_absolute: bool) -> None:
    """A copy that does not match its digest is removed: that was any file of this user's."""
    add(store, "mia")
    mine = follower.root.parent / "mine"
    mine.write_text("mine")
    page = store.feed.changes(None).to_dict()
    page["rows"]["contents"][0][1] = str(mine) if is_absolute else "../../../mine"
    with suppress(StoreUnusable):
        follower.follow(FeedPage.from_dict(page))
    with pytest.raises((AdapterNotFound, AdapterCorrupt)):
        follower.load(follower.resolve("mia").key)
    assert mine.read_text() == "mine"


def test_pages_end_where_their_texts_are_long(
    store: AdapterStore, follower: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides hold a page in memory. One id is never cut."""
    for number in range(4):
        store.register_defaults(f"mia{number}", json.dumps({"system": "a" * (400 if number == 2 else 100)}))
    monkeypatch.setattr(feed, "PAGE_CHARS", 300)
    found = []
    while True:
        page = store.feed.changes(follower.feed.position())
        follower.follow(FeedPage.from_dict(page.to_dict()))
        found.append([name for name, _, _ in page.ids])
        if page.is_last:
            break
    assert found == [["mia0", "mia1"], ["mia2"], ["mia3"]]
    assert shown(follower) == shown(store)


def test_listeners_hear_of_every_change_once_it_is_durable(store: AdapterStore) -> None:
    heard: list[int] = []
    with closing(sqlite3.connect(store.root / "index.sqlite3")) as other:
        query = "SELECT max(revision) FROM last_versions"
        stop = store.feed.listen(lambda: heard.append(other.execute(query).fetchone()[0]))
        add(store, "mia")
        store.change("mia", Change(limits={"weight": 2.0}))
        store.version_history.record_verdict(store.resolve("mia"), {})
        store.delete("mia")
        stop()
        add(store, "mia")
    assert heard == [1, 2, 3, 4]
