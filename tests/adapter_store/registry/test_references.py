"""References and aliases: what they may be called, what they point to, how they move."""

import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_kit import BASE, add

from adapter_store.errors import (
    AdapterNotFound,
    InvalidAdapterId,
    InvalidAlias,
    InvalidDigest,
    StoreUnusable,
    VersionInUse,
    VersionNotFound,
)
from adapter_store.registry.records import Change
from adapter_store.registry.references import (
    check_adapter_id,
    check_digest,
    draw_version,
    parse_reference,
    suggest_id,
    target_from_json,
    target_to_json,
)
from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore


def aliases(store: AdapterStore) -> dict[str, dict[int, float]]:
    return {alias: dict(shares) for alias, shares in store.get("mia").aliases.items()}


class TestAliases:
    def test_set_move_and_remove(self, store: AdapterStore, mia: list[AdapterKey]) -> None:
        store.change("mia", Change(aliases={"prod": 1, "next": 3}))
        assert store.change("mia", Change(aliases={"prod": 2, "next": None, "never": None})) == store.get("mia")
        assert aliases(store) == {"prod": {2: 1.0}}
        ref = store.resolve("mia:prod")
        assert (ref.adapter_id, ref.version, ref.key) == ("mia", 2, mia[1])
        with pytest.raises(AdapterNotFound, match=r"mia:prodd.*did you mean mia:prod"):
            store.resolve("mia:prodd")
        assert store.resolve("mia").version == 3

    def test_an_upload_moves_one(self, store: AdapterStore, mia: list[AdapterKey]) -> None:
        add(store, "mia", 9, alias="prod")
        assert aliases(store) == {"prod": {4: 1.0}}
        again = add(store, "mia", 1, alias="prod")
        assert (again.created, again.ref.version, aliases(store)) == (False, 2, {"prod": {2: 1.0}})
        with pytest.raises(InvalidAlias):
            add(store, "mia", 9, alias="warm")

    def test_all_or_nothing(self, store: AdapterStore, mia: list[AdapterKey]) -> None:
        before = store.change("mia", Change(aliases={"prod": 1}))
        for wrong in (
            Change(version=1, aliases={"prod": 9}),
            Change(version=9, aliases={"prod": 2}),
            Change(aliases={"prod": 2, "next": {2: 0.5, 9: 0.5}}),
        ):
            with pytest.raises(VersionNotFound, match="no version 9; it has 1, 2, 3"):
                store.change("mia", wrong)
        with pytest.raises(ValueError, match="JSON"):
            store.change("mia", Change(version=1, aliases={"prod": 2}, limits={"weight": float("inf")}))
        assert store.get("mia") == before
        with pytest.raises(AdapterNotFound):
            store.change("mio", Change(version=1))
        store.close()
        with pytest.raises(StoreUnusable):
            store.change("mia", Change(version=1))

    @pytest.mark.parametrize(
        "name", ["", "Prod", "a b", "3", "007", "warm", "verify", "x" * 65, "a:b", "a@1", "é", "²"]
    )
    def test_names_that_are_none(self, store: AdapterStore, mia: list[AdapterKey], name: str) -> None:
        with pytest.raises(InvalidAlias, match="use 1 to 64"):
            store.change("mia", Change(aliases={name: 1}))
        with pytest.raises(AdapterNotFound):
            store.resolve(f"mia:{name}")
        assert aliases(store) == {}

    @pytest.mark.parametrize("reference", ["mia:prod@1", "mia@1:prod", ":prod", "mia::prod", "mia:prod:x"])
    def test_references_that_are_none(self, store: AdapterStore, mia: list[AdapterKey], reference: str) -> None:
        store.change("mia", Change(aliases={"prod": 1}))
        with pytest.raises(AdapterNotFound):
            store.resolve(reference)

    def test_a_version_that_one_names_stays(self, store: AdapterStore, mia: list[AdapterKey]) -> None:
        store.change("mia", Change(aliases={"prod": {1: 0.5, 2: 0.5}, "old": 1, "next": 3}))
        before = store.get("mia")
        for reference in ("mia@1", f"mia@sha256:{mia[0]}"):
            with pytest.raises(VersionInUse, match="mia:old, mia:prod"):
                store.delete(reference)
        with pytest.raises(VersionInUse, match="mia:next, mia:old, mia:prod"):
            store.delete("mia")
        assert store.get("mia") == before
        gone = store.delete("mia@1", force=True)
        assert (gone.aliases, gone.num_versions) == (("old", "prod"), 1)

    def test_an_alias_is_no_version_to_delete(self, store: AdapterStore, mia: list[AdapterKey]) -> None:
        store.change("mia", Change(aliases={"prod": 1}))
        with pytest.raises(InvalidAlias, match="lorasrv alias mia:prod --remove"):
            store.delete("mia:prod", force=True)
        with pytest.raises(AdapterNotFound):
            store.delete("mia:other")
        assert aliases(store) == {"prod": {1: 1.0}}


class TestCanary:
    def test_the_shares_are_kept(self, tmp_path: Path) -> None:
        with AdapterStore(tmp_path / "canary", BASE, draw=random.Random(7).random) as store:
            for seed in range(2):
                add(store, "mia", seed)
            store.change("mia", Change(aliases={"prod": {1: 0.9, 2: 0.1}}))
            counts = Counter(store.resolve("mia:prod").version for _ in range(20_000))
            # 1,800 expected of 2 at most 0.1 +- 5 standard deviations of 0.0021
            assert counts.keys() == {1, 2}
            assert abs(counts[2] / 20_000 - 0.1) < 0.0106

    def test_a_user_keeps_the_version_and_the_shares_are_kept(self, tmp_path: Path) -> None:
        users = [("key", f"user {number}") for number in range(4000)]
        with AdapterStore(tmp_path / "canary", BASE, draw=lambda: pytest.fail("drawn")) as store:
            for seed in range(3):
                add(store, "mia", seed)

            def chosen(share: float, versions: tuple[int, int] = (1, 2), alias: str = "prod") -> list[int]:
                first, second = versions
                store.change("mia", Change(aliases={alias: {first: 1 - share, second: share}}))
                found = [store.resolve(f"mia:{alias}", user).version for user in users]
                # 5 standard deviations at most
                assert abs(found.count(second) - 4000 * share) < 5 * math.sqrt(4000 * share * (1 - share))
                return found

            tenth, third = chosen(0.1), chosen(0.3)
            assert chosen(0.1) == tenth
            # As the share grows, nobody goes back to the old version.
            assert all(later == 2 for earlier, later in zip(tenth, third, strict=True) if earlier == 2)
            # Another canary, of another version or under another alias, falls to others.
            for others in (chosen(0.1, (1, 3)), chosen(0.1, alias="next")):
                both = sum(a != 1 and b != 1 for a, b in zip(tenth, others, strict=True))
                assert both < 80
            assert store.resolve("mia@3", users[0]).version == 3

    @pytest.mark.parametrize(("number", "version"), [(0.0, 1), (0.89, 1), (0.9, 2), (1 - 2**-53, 2)])
    def test_what_a_number_falls_to(self, tmp_path: Path, number: float, version: int) -> None:
        with AdapterStore(tmp_path / "canary", BASE, draw=lambda: number) as store:
            for seed in range(2):
                add(store, "mia", seed)
            store.change("mia", Change(aliases={"prod": {2: 0.1, 1: 0.9}}))
            assert store.resolve("mia:prod").version == version

    def test_rounding_leaves_no_gap(self) -> None:
        assert draw_version({1: 0.1, 2: 0.9 - 1e-9}, 1 - 2**-53) == 2

    @pytest.mark.parametrize(
        "shares", [{}, {1: 0.5}, {1: 0.5, 2: 0.6}, {1: 1.0, 2: 0.0}, {1: 1.5, 2: -0.5}, {1: 0.4, 2: 0.3, 3: 0.3}]
    )
    def test_shares_that_are_none(self, store: AdapterStore, mia: list[AdapterKey], shares: dict[int, float]) -> None:
        with pytest.raises(InvalidAlias, match="'prod'"):
            store.change("mia", Change(aliases={"prod": shares}))
        with pytest.raises(InvalidAlias, match="'prod'"):
            store.change("mia", Change(aliases={"prod": {1: float("nan"), 2: 0.5}}))
        assert aliases(store) == {}

    def test_what_cannot_be_about_two(self, store: AdapterStore, mia: list[AdapterKey]) -> None:
        store.change("mia", Change(aliases={"prod": {1: 0.9, 2: 0.1}, "next": 3}))
        with pytest.raises(InvalidAlias, match="mia@1 and mia@2; name one"):
            store.resolve_one("mia:prod")
        assert store.resolve_one("mia:next") == store.resolve_one("mia@3") == store.resolve_one("mia")

    @pytest.mark.parametrize("target", [3, {3: 1.0}, {3: 0.9, 4: 0.1}])
    def test_on_the_wire(self, target: Any) -> None:
        shares = {target: 1.0} if isinstance(target, int) else target
        wire = target_to_json(shares)
        assert target_from_json("prod", wire) == (3 if len(shares) == 1 else shares)

    @pytest.mark.parametrize(
        "value",
        [True, 0, -1, 2**63, 1.0, "3", [3], {"3": True}, {"3": "1"}, {"x": 1}, {"03": 1}, {3: 1}, {"3": 10**400}],
    )
    def test_not_on_the_wire(self, value: object) -> None:
        with pytest.raises(InvalidAlias, match="'prod' must be a version"):
            target_from_json("prod", value)


RESERVED = frozenset({"warm", "verify", "smollm2"})
RULE = re.compile(r"^[a-z0-9][a-z0-9._-]{0,63}\Z")


@pytest.mark.parametrize("text", ["mia", "a", "0", "mia-2.b_c", "a" * 64, "a.."])
def test_good_ids(text: str) -> None:
    assert check_adapter_id(text, RESERVED) == text


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("../../etc/x", "etc-x"),
        ("a/../b", "a-..-b"),
        ("C:\\x", "c-x"),
        (".", None),
        ("", None),
        ("mia\x00", "mia"),
        ("mia\n", "mia"),
        ("Mia", "mia"),
        ("org/Name", "org-name"),
        ("x" * 300, "x" * 64),
        ("\u202eaim", "aim"),
        ("base:mia", "base-mia"),
        ("mia@3", "mia-3"),
        ("Zoë", "zoe"),
        ("미아", None),
        ("smollm2", "smollm2-adapter"),
        ("warm", "warm-adapter"),
        ("Verify", "verify-adapter"),
        ("\ud800x", "x"),
    ],
)
def test_bad_ids_come_with_the_id_they_could_be(text: str, suggestion: str | None) -> None:
    with pytest.raises(InvalidAdapterId) as caught:
        check_adapter_id(text, RESERVED)
    assert caught.value.suggestion == suggestion
    str(caught.value).encode()
    assert "\u202e" not in str(caught.value)
    assert len(str(caught.value)) < 400


@given(st.text(max_size=80))
def test_suggestions_are_valid(text: str) -> None:
    suggestion = suggest_id(text, RESERVED)
    assert suggestion is None or check_adapter_id(suggestion, RESERVED) == suggestion


@given(st.text(alphabet="aB0._-/\n", max_size=70))
def test_ids_are_what_the_rule_says(text: str) -> None:
    try:
        accepted = check_adapter_id(text, RESERVED)
    except InvalidAdapterId:
        accepted = None
    assert (accepted is not None) == bool(RULE.match(text))


def test_references() -> None:
    assert parse_reference("mia").version is None
    assert parse_reference("mia@3").version == 3
    assert parse_reference("mia@sha256:" + "a" * 12).key_prefix == "a" * 12


@pytest.mark.parametrize(
    "text",
    ["mia@", "mia@0", "mia@-1", "mia@03", "mia@x", "mia@3@4", "mia@sha256:abc", "mia@sha256:" + "g" * 12, "Mia", "",
     "@3", "mia@" + "9" * 5000, "mia@sha256:" + "a" * 65, "mia@٣"]
)  # fmt: skip
def test_bad_references_name_nothing(text: str) -> None:
    with pytest.raises(AdapterNotFound):
        parse_reference(text)


def test_digests() -> None:
    assert check_digest("sha256:" + "0" * 64) == check_digest("0" * 64) == "0" * 64
    for bad in ("", "0" * 63, "0" * 65, "A" * 64, "../" + "0" * 61, "0" * 64 + "\n", "sha256:sha256:" + "0" * 64):
        with pytest.raises(InvalidDigest):
            check_digest(bad)
