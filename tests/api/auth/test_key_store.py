"""The key store, the server's view of it, and the commands that write it."""

import json
import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from answers import failed
from following import NearOrigin
from pydantic import SecretStr
from tiny_adapter import SHAPES

from adapter_store.errors import StoreUnusable
from adapter_store.store import AdapterStore
from api.auth import key_cache
from api.auth.key_cache import KeyCache, KeyRefused, KeysUnreadable
from api.auth.key_store import InvalidKey, KeyStore, has_keys
from api.auth.principal import KeyLimits, Scope, digest_of, is_name, new_secret
from api.config.settings import ServerSettings
from api.server import check_guarded

pytestmark = pytest.mark.anyio
INFER = frozenset({Scope.INFER})


@pytest.fixture
def keys(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path)


@pytest.fixture
def cache(tmp_path: Path) -> KeyCache:
    return KeyCache(tmp_path)


def state(cache: KeyCache, secret: str) -> str | None:
    """The state "active", or why the secret is refused: None for one that is unknown."""
    try:
        cache.caller(secret)
    except KeyRefused as error:
        return error.state
    return "active"


class TestKeyStore:
    def test_a_key_as_it_was_created(self, keys, tmp_path: Path) -> None:
        limits = KeyLimits(requests_per_min=6, max_stored_bytes=2**31)
        scopes = frozenset({Scope.INFER, Scope.UPLOAD})
        key, secret = keys.create("alice", scopes, ("mia*", "bob"), limits, expires_s=5e9)
        assert KeyStore(tmp_path).all() == [key]
        assert (key.scopes, key.adapters, key.limits, key.expires_s) == (scopes, ("mia*", "bob"), limits, 5e9)
        assert keys.find(digest_of(secret)) == (key, None)

    def test_another_secret_for_the_same_key(self, keys, cache) -> None:
        key, first = keys.create("alice", INFER)
        for grace_s, then in ((60.0, "active"), (0.0, "replaced")):
            rotated, second = keys.rotate("alice", grace_s)
            assert rotated == key
            assert [state(cache, secret) for secret in (first, second)] == [then, "active"]
        assert cache.caller(second).principal == "alice"
        _, third = keys.rotate("alice", 60.0)
        assert state(cache, first) == "replaced", "no grace restores what has ended"
        assert state(cache, second) == "active"
        assert keys.all() == [replace(key, last_used_s=keys.all()[0].last_used_s)]
        keys.revoke("alice")
        assert "active" not in {state(cache, secret) for secret in (first, second, third)}
        with pytest.raises(InvalidKey, match="key alice is revoked; create another"):
            keys.rotate("alice")

    def test_secrets_differ_and_are_not_on_the_disk(self, keys, tmp_path: Path) -> None:
        _, secret = keys.create("alice", INFER)
        assert len(secret) == len("lorasrv-") + 43
        stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert b"alice" in stored
        assert secret.removeprefix("lorasrv-").encode() not in stored
        assert len({new_secret() for _ in range(1000)}) == 1000

    def test_files_are_the_owners_alone(self, keys, tmp_path: Path, caplog) -> None:
        keys.create("alice", INFER)
        assert caplog.text == "", "and never were others'"
        assert {path.name for path in tmp_path.iterdir()} == {"keys.db", "keys.db-wal", "keys.db-shm"}
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
        keys.close()
        (tmp_path / "keys.db").chmod(0o644)
        KeyStore(tmp_path)
        assert (tmp_path / "keys.db").stat().st_mode & 0o777 == 0o600
        assert "was accessible to other users" in caplog.text

    def test_the_file_alone_has_every_key(self, keys, cache, tmp_path: Path) -> None:
        """A copy of a running server's store may lack SQLite's other files."""
        keys.create("alice", INFER)
        keys.revoke("alice")
        assert not cache.is_open()
        copy = tmp_path / "copy"
        copy.mkdir()
        (copy / "keys.db").write_bytes((tmp_path / "keys.db").read_bytes())
        assert KeyStore(copy).all() == keys.all()

    def test_a_name_is_used_once(self, keys) -> None:
        keys.create("alice", INFER)
        assert keys.revoke("alice")
        assert not keys.revoke("alice"), "it was before"
        with pytest.raises(InvalidKey, match="there is or was a key named alice"):
            keys.create("alice", INFER)
        assert len(keys.all()) == 1
        with pytest.raises(InvalidKey, match="no key named 'bob'"):
            keys.revoke("bob")

    @pytest.mark.parametrize("name", ["", "Alice", "a/b", "a b", "-a", "a" * 65, "é", "anonymous", "api-key", "a\n"])
    def test_wrong_names(self, keys, name: str) -> None:
        assert not is_name(name)
        with pytest.raises(InvalidKey):
            keys.create(name, INFER)

    @pytest.mark.parametrize("adapters", [(), ("",), ("../x",), ("Mia",), ("a b",), ("a", "b\n")])
    def test_wrong_patterns(self, keys, adapters: tuple[str, ...]) -> None:
        with pytest.raises(InvalidKey, match="pattern of adapter ids"):
            keys.create("alice", INFER, adapters)

    def test_a_key_needs_a_scope(self, keys) -> None:
        with pytest.raises(InvalidKey, match="one of the scopes infer, upload, metrics, admin"):
            keys.create("alice", frozenset())

    def test_looking_for_keys_creates_nothing(self, tmp_path: Path) -> None:
        assert not has_keys(tmp_path)
        assert list(tmp_path.iterdir()) == []
        keys = KeyStore(tmp_path)
        assert not has_keys(tmp_path)
        keys.create("alice", INFER)
        keys.revoke("alice")
        assert has_keys(tmp_path), "revoked ones count"

    def test_files_that_are_no_key_store(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.db"
        path.write_bytes(b"not a database" * 1000)
        with pytest.raises(StoreUnusable, match=rf"store {tmp_path} .*keys\.db is damaged .*put back a copy"):
            has_keys(tmp_path)
        path.unlink()
        (tmp_path / "keys.db-journal").mkdir()  # SQLite cannot create it, as in a read-only folder
        with pytest.raises(StoreUnusable, match=r"keys\.db cannot be used: unable to open .*; can its folder and"):
            KeyStore(tmp_path)
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StoreUnusable, match="not a regular file"):
            KeyStore(tmp_path)

    def test_a_later_layout_is_not_touched(self, keys, tmp_path: Path) -> None:
        keys._db.execute("PRAGMA user_version = 7")
        with pytest.raises(StoreUnusable, match=r"another lorasrv wrote keys\.db"):
            KeyStore(tmp_path)
        with pytest.raises(StoreUnusable, match=r"another lorasrv wrote keys\.db"):  # before a model is loaded
            check_guarded(ServerSettings(store=tmp_path))

    def test_concurrent_writers(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda number: KeyStore(tmp_path, busy_ms=60_000).create(f"k{number}", INFER), range(8)))
        assert len(KeyStore(tmp_path).all()) == 8


class TestKeyCache:
    def test_only_the_whole_secret_is_accepted(self, keys, cache) -> None:
        _, secret = keys.create("alice", INFER)
        assert state(cache, secret) == "active"
        wrong = [secret[:-1], secret + "x", secret.lower(), secret.removeprefix("lorasrv-"), "", "alice"]
        assert {state(cache, text) for text in [*wrong, digest_of(secret).hex(), "\ud800"]} == {None}

    def test_a_key_expires(self, keys, cache, monkeypatch: pytest.MonkeyPatch) -> None:
        _, secret = keys.create("alice", INFER, expires_s=2e9)
        for now_s, expected in ((2e9 - 1, "active"), (2e9, "expired")):
            monkeypatch.setattr("api.auth.key_cache.time.time", lambda now_s=now_s: now_s)
            assert state(cache, secret) == expected
        assert not cache.is_open()

    def test_the_operators_own_key(self, tmp_path: Path) -> None:
        cache = KeyCache(tmp_path, "s3cret-key")
        assert not cache.is_open()
        caller = cache.caller("s3cret-key")
        assert caller.principal == "api-key"
        assert all(caller.may(scope) for scope in Scope if scope is not Scope.REPLICATE)
        assert caller.sees_all
        assert state(cache, "s3cret-kez") is None

    def test_a_server_that_needs_keys_is_closed_without_any(self, tmp_path: Path) -> None:
        assert not KeyCache(tmp_path, open_without_keys=False).is_open()

    async def test_last_used_is_not_written_at_each_request(self, keys, cache, monkeypatch) -> None:
        _, secret = keys.create("alice", INFER)
        keys.create("bob", INFER)
        before = keys.changes()
        for now_s in (2e9, 2e9 + 1, 2e9 + 2):
            monkeypatch.setattr("api.auth.key_cache.time.time", lambda now_s=now_s: now_s)
            cache.caller(secret)
        assert keys.changes() == before
        await cache.write_uses()
        assert [key.last_used_s for key in keys.all()] == [2e9 + 2, None]
        after = keys.changes()
        await cache.write_uses()
        assert keys.changes() == after, "no request came since"
        assert state(cache, secret) == "active", "its own write is no change of keys"

    def test_a_key_for_each_session_costs_the_same_however_many_there_were(self, keys, cache) -> None:
        """Of those that have ended, nothing is kept."""
        spent: list[int] = []
        cache._book._db.set_progress_handler(lambda: spent.append(1), 1)
        for number in range(50):
            before = len(spent)
            _, secret = keys.create(f"session-{number}", INFER)
            assert state(cache, secret) == "active"
            keys.revoke(f"session-{number}")
            assert state(cache, secret) == "revoked"
            assert len(spent) - before < 500, "SQLite's instructions"
            if number % 5 == 4:
                ended = cache.take_ended()
                assert ended == sorted(f"session-{n}" for n in range(number - 4, number + 1))
        assert (len(cache._held), cache._active) == (1, set())

    def test_those_that_have_ended_are_told_once_and_only_if_they_were_used(self, keys, cache, monkeypatch) -> None:
        keys.create("unused", INFER, expires_s=2e9)
        _, secret = keys.create("alice", INFER, expires_s=2e9)
        keys.create("batch", INFER)
        cache.check("batch")
        state(cache, secret)
        assert cache.take_ended() == []
        monkeypatch.setattr("api.auth.key_cache.time.time", lambda: 2e9)
        keys.revoke("batch")
        assert cache.take_ended() == ["alice", "batch"]
        with pytest.raises(KeyRefused):
            cache.check("batch")
        assert state(cache, secret) == "expired"
        assert cache.take_ended() == []

    async def test_keys_are_read_again_only_if_one_has_changed(self, keys, cache, monkeypatch) -> None:
        reads = []
        read = KeyStore.find
        monkeypatch.setattr(KeyStore, "find", lambda self, digest: reads.append(1) or read(self, digest))
        _, secret = keys.create("mia", INFER)
        assert (state(cache, secret), len(reads)) == ("active", 1)
        await cache.write_uses()
        assert keys.all()[0].last_used_s is not None
        assert (state(cache, secret), len(reads)) == ("active", 1)
        _, second = keys.rotate("mia", grace_s=60)
        assert (state(cache, second), len(reads)) == ("active", 2)
        exported = keys.exported().keys
        keys.revoke("mia")
        assert (state(cache, second), len(reads)) == ("revoked", 3)
        keys.replace(exported)
        assert (state(cache, second), len(reads)) == ("active", 4)
        number = keys.num_changes()
        assert keys.replace(exported) == ([], [])
        assert keys.num_changes() == number, "only keys that differ are written"
        keys.replace([])
        assert (state(cache, second), len(reads)) == (None, 5)

    @pytest.mark.parametrize(
        ("field", "value"),
        [("limits", "{"), ("limits", '{"of_another": 1}'), ("limits", "[]"), ("adapters", "1"), ("scopes", '["all"]')],
    )
    def test_a_key_that_cannot_be_read_replaces_none(self, keys, cache, field: str, value: str) -> None:
        """It would make all of them unreadable, for good."""
        _, secret = keys.create("mia", INFER)
        keys.create("zoe", INFER)
        exported = keys.exported().keys
        exported[1][field] = value
        with pytest.raises(StoreUnusable):
            keys.replace(exported)
        assert state(cache, secret) == "active"

    def test_one_change_of_each_key_is_kept(self, keys, tmp_path: Path) -> None:
        """Each rotation changes all secrets of its key, whose number grows."""
        for name in ("mia", "zoe"):
            keys.create(name, INFER)
        for _ in range(3):
            before = keys.num_changes()
            keys.rotate("mia")
            assert keys.num_changes() > before
            assert keys.exported(before).names == ["mia"]
        with closing(sqlite3.connect(tmp_path / "keys.db")) as file:
            names = file.execute("SELECT name FROM key_changes ORDER BY number").fetchall()
        assert names == [("zoe",), ("mia",)]

    def test_a_store_of_an_earlier_version_counts_its_changes(self, keys, tmp_path: Path) -> None:
        _, secret = keys.create("mia", INFER)
        with closing(sqlite3.connect(tmp_path / "keys.db")) as old:
            names = old.execute("SELECT type, name FROM sqlite_schema WHERE name LIKE '%change%'").fetchall()
            for kind, name in sorted(names, reverse=True):
                old.execute(f"DROP {kind} {name}")
            old.commit()
            cache = KeyCache(tmp_path)
            assert state(cache, secret) == "active"
            # Its own commands go on without knowing of it.
            old.execute("UPDATE keys SET revoked_s = 1.0")
            old.commit()
            assert state(cache, secret) == "revoked"

    def test_a_key_store_that_cannot_be_read_closes(self, keys, cache, monkeypatch: pytest.MonkeyPatch) -> None:
        assert cache.is_open()
        _, secret = keys.create("alice", INFER)
        assert state(cache, secret) == "active"

        def fail(_: KeyStore) -> int:
            raise StoreUnusable("the key store keys.db cannot be used: disk I/O error")

        monkeypatch.setattr(KeyStore, "changes", fail)
        monkeypatch.setattr(key_cache, "STALE_S", 600.0)
        assert state(cache, secret) == "active", "known keys stay valid for a moment"
        monkeypatch.setattr(key_cache, "STALE_S", -1.0)
        with pytest.raises(KeysUnreadable):
            cache.caller(secret)
        assert not cache.is_open()

    def test_a_key_store_that_is_replaced_closes(self, keys, cache, monkeypatch, caplog) -> None:
        """What commands write to the new file, a revocation above all, would never be seen."""
        _, secret = keys.create("alice", INFER)
        monkeypatch.setattr(key_cache, "STALE_S", -1.0)
        assert state(cache, secret) == "active"
        kept = keys.path.with_suffix(".kept")
        keys.path.rename(kept)
        for why in ("No such file", "was replaced"):
            with pytest.raises(KeysUnreadable, match=why):
                cache.caller(secret)
            assert not cache.is_open()
            keys.path.write_bytes(kept.read_bytes())
        keys.path.unlink()
        kept.rename(keys.path)
        assert state(cache, secret) == "active"
        assert len(caplog.records) == 1, "told once"

    def test_after_close_nothing_is_served(self, cache, monkeypatch: pytest.MonkeyPatch) -> None:
        cache.close()
        monkeypatch.setattr(key_cache, "STALE_S", -1.0)
        assert not cache.is_open()


class TestCommands:
    def test_a_secret_is_shown_once(self, cli, tmp_path: Path) -> None:
        store = tmp_path / "new" / "store"
        options = ["--scope", "infer", "--scope", "upload", "--adapters", "mia*,bob", "--adapters", "x-?"]
        limits = ["--rpm", 6, "--tpm", 7, "--concurrent", 2, "--stored-bytes", "2GiB", "--expires-in", "30d"]
        made = cli("key", "create", "--name", "alice", *options, *limits, "--store", store)
        assert made.code == 0
        secret = made.out.removesuffix("\n")
        assert secret.startswith("lorasrv-")
        assert "\n" not in secret
        assert secret not in made.err
        assert "now require a key" in made.err
        (key,) = KeyStore(store).all()
        assert (key.limits, key.adapters) == (KeyLimits(6, 7, 2, 2 * 2**30), ("mia*", "bob", "x-?"))
        assert key.expires_s is not None
        assert round(key.expires_s - key.created_s) == 30 * 86_400
        assert KeyStore(store).find(digest_of(secret)) == (key, None)

        listed = cli("key", "list", "--store", store)
        assert listed.out.splitlines()[1].split("\t")[:5] == [
            *("alice", "active", "infer, upload", "mia*, bob, x-?"),
            "6 requests/min, 7 tokens/min, 2 at a time, 2.0 GiB stored",
        ]
        as_json = cli("key", "list", "--store", store, "--json")
        assert json.loads(as_json.out)["limits"]["requests_per_min"] == 6
        revoked = cli("key", "revoke", "alice", "--store", store)
        assert (revoked.code, revoked.out) == (0, "key alice is revoked\n")
        assert cli("key", "revoke", "alice", "--store", store).out == "key alice was revoked before\n"
        assert json.loads(cli("key", "list", "--store", store, "--json").out)["state"] == "revoked"
        assert secret not in listed.out + listed.err + as_json.out + revoked.out + revoked.err

    def test_rotate(self, cli, cache, tmp_path: Path) -> None:
        first = cli("key", "create", "--name", "alice", "--rpm", 6, "--store", tmp_path).out.strip()
        done = cli("key", "rotate", "alice", "--store", tmp_path)
        second = done.out.removesuffix("\n")
        assert (done.code, len(second)) == (0, len(first))
        assert "earlier ones are invalid now" in done.err
        as_json = json.loads(cli("key", "rotate", "alice", "--grace", "24h", "--store", tmp_path, "--json").out)
        assert (as_json["name"], as_json["limits"]) == ("alice", {"requests_per_min": 6})
        assert 86_000 < as_json["old_ends_s"] - time.time() < 87_000
        assert [state(cache, one) for one in (first, second, as_json["key"])] == ["replaced", "active", "active"]
        assert cli("key", "rotate", "alic", "--store", tmp_path).err.endswith("; did you mean alice?\n")
        assert cli("key", "rotate", "alice", "--grace", "soon", "--store", tmp_path).code == 2

    def test_defaults_and_json(self, cli, tmp_path: Path) -> None:
        made = json.loads(cli("key", "create", "--store", tmp_path, "--json").out)
        assert made["name"].startswith("key-")
        assert (made["scopes"], made["adapters"], made["limits"], made["expires_s"]) == (["infer"], ["*"], {}, None)
        assert KeyStore(tmp_path).find(digest_of(made["key"])) is not None
        assert "require a key" not in cli("key", "create", "--store", tmp_path).err, "that is news once"

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (["--scope", "root"], "--scope: 'root' is none of infer, upload, metrics, admin"),
            (["--name", "A/b"], "--name: 'A/b' is not a valid name of a key"),
            (["--name", "cluster"], "; taken: anonymous, api-key, cluster, other"),
            (["--adapters", "../x"], "--adapters: '../x' is not a pattern"),
            (["--adapters", ","], "--adapters: a key needs a pattern"),
            (["--stored-bytes", "lots"], "--stored-bytes 'lots' is not a size"),
            (["--stored-bytes", "-1"], "--stored-bytes '-1' is not a size"),
            (["--expires-in", "soon"], "--expires-in 'soon' is not a duration"),
            (["--expires-in", "5"], "--expires-in '5' is not a duration; expected 90s, 30m, 12h or 7d"),
            (["--expires-in", "0d"], "--expires-in: the key would have expired already"),
            (["--rpm", "0"], "--rpm"),
        ],
    )
    def test_wrong_usage(self, cli, tmp_path: Path, options: list[str], says: str) -> None:
        done = cli("key", "create", "--store", tmp_path, *options)
        assert (done.code, done.out) == (2, "")
        assert says in done.err
        assert not has_keys(tmp_path)

    def test_refusals(self, cli, tmp_path: Path) -> None:
        nothing = cli("key", "list", "--store", tmp_path)
        assert (nothing.code, nothing.err) == (1, f"lorasrv: {tmp_path} has no keys: lorasrv key create makes one\n")
        assert not (tmp_path / "keys.db").exists()
        cli("key", "create", "--name", "alice", "--store", tmp_path)
        near = cli("key", "revoke", "alic", "--store", tmp_path)
        assert (near.code, near.err) == (1, "lorasrv: there is no key named 'alic'; did you mean alice?\n")
        other = cli("key", "rotate", "zoe", "--store", tmp_path)
        assert (other.code, other.err) == (1, "lorasrv: there is no key named 'zoe'; lorasrv key list names all\n")
        (tmp_path / "keys.db").write_bytes(b"x" * 9999)
        broken = cli("key", "list", "--store", tmp_path)
        assert broken.code == 1
        assert broken.err.startswith(f"lorasrv: store {tmp_path} cannot be used: the key store keys.db is damaged")
        assert broken.err.endswith(": put back a copy of it\n")

    def test_times_have_a_zone(self, cli, keys, tmp_path: Path) -> None:
        keys.create("alice", INFER, expires_s=4e9)
        assert "\t2096-10-02 07:06 UTC\t-\n" in cli("key", "list", "--store", tmp_path).out

    def test_a_folder_that_cannot_be_written(
        self, cli, store: AdapterStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("os.access", lambda _, mode: not mode & os.W_OK)
        failed(
            cli("key", "create", "--store", tmp_path), 1, f"--store {tmp_path}: its keys (keys.db) cannot be changed"
        )

    def test_a_followers_keys_are_changed_at_its_registry(self, cli, keys, tmp_path: Path) -> None:
        """Its registry's keys replace them: a revocation would undo itself. Listing them changes nothing."""
        keys.create("alice", INFER)
        before = keys.all()
        for command in (("create",), ("rotate", "alice"), ("revoke", "alice")):
            with AdapterStore(tmp_path, SHAPES, origin=NearOrigin(lambda: None)):
                running = cli("key", *command, "--store", tmp_path)
            for done in (running, cli("key", *command, "--store", tmp_path)):
                failed(done, 1, f"--store {tmp_path}: it is the cache of a server that follows a registry")
        assert keys.all() == before
        assert cli("key", "list", "--store", tmp_path).code == 0

    def test_the_store_is_that_of_serve(self, cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "c.toml").write_text(f'store = "{tmp_path}/file"\n')
        monkeypatch.setenv("LORASRV_CONFIG", str(tmp_path / "c.toml"))
        cli("key", "create")
        assert has_keys(tmp_path / "file")
        monkeypatch.setenv("LORASRV_STORE", str(tmp_path / "environment"))
        cli("key", "create")
        assert has_keys(tmp_path / "environment")


class TestServe:
    @pytest.mark.parametrize("where", ["flag", "file"])
    def test_other_addresses_need_keys(self, cli, tmp_path: Path, where: str) -> None:
        path = tmp_path / "c.toml"
        path.write_text('host = "0.0.0.0"\n' if where == "file" else "")
        flags = ["--host", "0.0.0.0"] if where == "flag" else []
        done = cli("serve", *flags, "--store", tmp_path / "store", "--config", path)
        spelled = "--host" if where == "flag" else f"{path}: host"
        assert done.code == 2
        assert done.err.startswith(f"lorasrv: {spelled} 0.0.0.0 opens the server to other machines without a key; ")
        assert f"`lorasrv key create --store {tmp_path}/store` or" in done.err
        assert not (tmp_path / "store").exists(), "nothing is made before"

    def test_the_command_is_not_spelled_as_a_variable(self, cli, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setenv("LORASRV_STORE", str(tmp_path / "a b"))
        done = cli("serve", "--host", "0.0.0.0")
        assert f"create one with `lorasrv key create --store '{tmp_path}/a b'` or --api-key" in done.err
        monkeypatch.delenv("LORASRV_STORE")
        assert "create one with `lorasrv key create` or --api-key" in cli("serve", "--host", "0.0.0.0").err

    @pytest.mark.parametrize("more", [(), ("--replicas", 2)])
    def test_a_first_start_as_a_follower_drops_no_keys(
        self, cli, tmp_path: Path, more: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its registry's keys replace those of its folder, which until then has none of them."""
        monkeypatch.setattr("api.cluster.local.find_spec", lambda name: object())
        cli("key", "create", "--name", "alice", "--store", tmp_path)
        registry = "http://127.0.0.1:1"
        follows = ("--model", tmp_path / "none", "--registry", registry, "--cluster-secret", "s" * 16)
        done = cli("serve", *follows, "--store", tmp_path, *more)
        failed(done, 1, f"store {tmp_path} has keys of its own", "in the registry's folder", "another --store")
        assert has_keys(tmp_path)
        AdapterStore(tmp_path / "cache", SHAPES, origin=NearOrigin(lambda: None)).close()
        cache = KeyStore(tmp_path / "cache")
        cache.create("of-the-registry", INFER)
        cache.close()
        check_guarded(ServerSettings(store=tmp_path / "cache", registry=registry))

    @pytest.mark.parametrize("guard", [None, {"api_key": SecretStr("s3cret-key")}, {"insecure": True}])
    def test_other_addresses_with_keys_are_served(self, keys, tmp_path: Path, guard: dict[str, object] | None) -> None:
        if guard is None:
            keys.create("alice", INFER)
        check_guarded(ServerSettings(host="0.0.0.0", store=tmp_path, **guard or {}))

    def test_an_api_key_of_the_environment_is_shown_nowhere(self, cli, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setenv("LORASRV_API_KEY", "s3cret-key")
        shown = cli("config", "show", "--origin")
        assert "api_key\t********\tenvironment LORASRV_API_KEY\n" in shown.out
        assert "s3cret" not in shown.out + shown.err + cli("serve", "--help").out + cli("list", "--help").out
        refused = cli("serve", "--api-key", "s3cret", "--store", tmp_path)
        assert refused.code == 2
        assert refused.err.startswith("lorasrv: --api-key: must be 8 to 512")
        assert "s3cret" not in refused.err
