"""The key book, the server's view of it, and the commands that write it."""

import asyncio
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from adapter_store.errors import StoreUnusable
from api.auth import key_cache as ring_module
from api.auth.key_cache import KeyCache, KeyRefused, KeysUnreadable
from api.auth.key_store import InvalidKey, KeyStore, has_keys
from api.auth.principal import KeyLimits, Scope, digest_of, is_name, new_secret
from api.config.settings import ServerSettings
from api.server import check_guarded

INFER = frozenset({Scope.INFER})


@pytest.fixture
def book(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path)


def opens(ring: KeyCache, secret: str) -> bool:
    try:
        ring.caller(secret)
    except KeyRefused:
        return False
    return True


class TestBook:
    def test_what_is_made_comes_back(self, book, tmp_path: Path) -> None:
        limits = KeyLimits(requests_per_min=6, max_stored_bytes=2**31)
        scopes = frozenset({Scope.INFER, Scope.UPLOAD})
        key, secret = book.create("alice", scopes, ("mia*", "bob"), limits, expires_s=5e9)
        assert KeyStore(tmp_path).all() == [key]
        assert (key.scopes, key.adapters, key.limits, key.expires_s) == (scopes, ("mia*", "bob"), limits, 5e9)
        assert list(book.by_digest()) == [digest_of(secret)]

    def test_another_secret_for_the_same_key(self, book, tmp_path: Path) -> None:
        key, first = book.create("alice", INFER)
        ring = KeyCache(tmp_path)
        for grace_s, goes_on in ((60.0, True), (0.0, False)):
            rotated, second = book.rotate("alice", grace_s)
            assert rotated == key
            assert [opens(ring, secret) for secret in (first, second)] == [goes_on, True]
        assert ring.caller(second).principal == "alice"
        with pytest.raises(KeyRefused) as caught:
            ring.caller(first)
        assert caught.value.state == "replaced"
        _, third = book.rotate("alice", 60.0)
        assert not opens(ring, first), "no grace brings back what has ended"
        assert opens(ring, second)
        assert book.all() == [replace(key, last_used_s=book.all()[0].last_used_s)]
        book.revoke("alice")
        assert not any(opens(ring, secret) for secret in (first, second, third))
        with pytest.raises(InvalidKey, match="key alice is revoked; create another"):
            book.rotate("alice")
        ring.close()

    def test_the_secret_is_nowhere_on_the_disk(self, book, tmp_path: Path) -> None:
        _, secret = book.create("alice", INFER)
        assert len(secret) == len("lorasrv-") + 43
        stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert b"alice" in stored
        assert secret.encode() not in stored
        assert secret.removeprefix("lorasrv-").encode() not in stored

    def test_secrets_differ(self) -> None:
        assert len({new_secret() for _ in range(1000)}) == 1000

    def test_files_are_the_owners_alone(self, book, tmp_path: Path, caplog) -> None:
        book.create("alice", INFER)
        assert caplog.text == "", "and never were others'"
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"keys.db", "keys.db-wal", "keys.db-shm"}
        assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}

    def test_the_file_alone_has_all_of_it(self, book, tmp_path: Path) -> None:
        """Whoever copies the store of a running server may miss SQLite's other files."""
        ring = KeyCache(tmp_path)
        book.create("alice", INFER)
        book.revoke("alice")
        assert not ring.is_open()
        copy = tmp_path / "copy"
        copy.mkdir()
        (copy / "keys.db").write_bytes((tmp_path / "keys.db").read_bytes())
        assert KeyStore(copy).all() == book.all()

    def test_files_that_were_open_to_others_are_not_any_more(self, tmp_path: Path, caplog) -> None:
        KeyStore(tmp_path).close()
        (tmp_path / "keys.db").chmod(0o644)
        KeyStore(tmp_path)
        assert (tmp_path / "keys.db").stat().st_mode & 0o777 == 0o600
        assert "was accessible to other users" in caplog.text

    def test_a_name_is_used_once(self, book) -> None:
        book.create("alice", INFER)
        assert book.revoke("alice")
        assert not book.revoke("alice"), "it was before"
        with pytest.raises(InvalidKey, match="there is or was a key named alice"):
            book.create("alice", INFER)
        assert len(book.all()) == 1

    @pytest.mark.parametrize("name", ["", "Alice", "a/b", "a b", "-a", "a" * 65, "é", "anonymous", "api-key", "a\n"])
    def test_wrong_names(self, book, name: str) -> None:
        assert not is_name(name)
        with pytest.raises(InvalidKey):
            book.create(name, INFER)

    @pytest.mark.parametrize("adapters", [(), ("",), ("../x",), ("Mia",), ("a b",), ("a", "b\n")])
    def test_wrong_patterns(self, book, adapters: tuple[str, ...]) -> None:
        with pytest.raises(InvalidKey, match="pattern of adapter ids"):
            book.create("alice", INFER, adapters)

    def test_a_key_that_may_do_nothing_is_none(self, book) -> None:
        with pytest.raises(InvalidKey, match="one of the scopes infer, upload, admin"):
            book.create("alice", frozenset())

    def test_no_such_key(self, book) -> None:
        with pytest.raises(InvalidKey, match="no key named 'bob'"):
            book.revoke("bob")

    def test_looking_makes_no_book(self, tmp_path: Path) -> None:
        assert not has_keys(tmp_path)
        assert list(tmp_path.iterdir()) == []
        book = KeyStore(tmp_path)
        assert not has_keys(tmp_path)
        book.create("alice", INFER)
        book.revoke("alice")
        assert has_keys(tmp_path), "those that are revoked count"

    def test_what_is_no_book(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.db"
        path.write_bytes(b"not a database" * 1000)
        with pytest.raises(StoreUnusable, match=r"keys\.db cannot be used"):
            has_keys(tmp_path)
        path.unlink()
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StoreUnusable, match="is not a regular file"):
            KeyStore(tmp_path)

    def test_a_later_layout_is_not_touched(self, book, tmp_path: Path) -> None:
        book._db.execute("PRAGMA user_version = 7")
        with pytest.raises(StoreUnusable, match="written by another version of lorasrv"):
            KeyStore(tmp_path)

    def test_all_who_write_at_once(self, tmp_path: Path) -> None:
        def make(number: int) -> None:
            KeyStore(tmp_path).create(f"k{number}", INFER)

        threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(KeyStore(tmp_path).all()) == 8


class TestRing:
    def test_the_first_key_closes_and_the_last_leaves_it_closed(self, book, tmp_path: Path) -> None:
        ring = KeyCache(tmp_path)
        assert ring.is_open()
        _, secret = book.create("alice", INFER, ("mia*",), KeyLimits(tokens_per_min=9))
        assert not ring.is_open()
        caller = ring.caller(secret)
        assert (caller.principal, caller.scopes, caller.adapters) == ("alice", INFER, ("mia*",))
        assert caller.limits.tokens_per_min == 9
        book.revoke("alice")
        assert not ring.is_open()
        with pytest.raises(KeyRefused) as refused:
            ring.caller(secret)
        assert refused.value.state == "revoked"

    def test_only_the_whole_secret_opens(self, book, tmp_path: Path) -> None:
        ring = KeyCache(tmp_path)
        _, secret = book.create("alice", INFER)
        wrong = [secret[:-1], secret + "x", secret.lower(), secret.removeprefix("lorasrv-"), "", "alice"]
        assert opens(ring, secret)
        assert not any(opens(ring, text) for text in [*wrong, digest_of(secret).hex(), "\ud800"])

    def test_a_key_expires(self, book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ring = KeyCache(tmp_path)
        _, secret = book.create("alice", INFER, expires_s=2e9)
        monkeypatch.setattr("api.auth.key_cache.time.time", lambda: 2e9 - 1)
        assert opens(ring, secret)
        monkeypatch.setattr("api.auth.key_cache.time.time", lambda: 2e9)
        with pytest.raises(KeyRefused) as refused:
            ring.caller(secret)
        assert refused.value.state == "expired"
        assert not ring.is_open()

    def test_the_operators_own(self, tmp_path: Path) -> None:
        ring = KeyCache(tmp_path, "s3cret-key")
        assert not ring.is_open()
        caller = ring.caller("s3cret-key")
        assert caller.principal == "api-key"
        assert all(caller.may(scope) for scope in Scope)
        assert caller.sees_all
        assert not opens(ring, "s3cret-kez")

    def test_nobody_is_served_without_keys_where_that_is_not_wanted(self, tmp_path: Path) -> None:
        assert not KeyCache(tmp_path, open_without_keys=False).is_open()

    def test_last_used_is_not_a_write_a_request(self, book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ring = KeyCache(tmp_path)
        _, secret = book.create("alice", INFER)
        book.create("bob", INFER)
        before = book.changes()
        for now_s in (2e9, 2e9 + 1, 2e9 + 2):
            monkeypatch.setattr("api.auth.key_cache.time.time", lambda now_s=now_s: now_s)
            ring.caller(secret)
        assert book.changes() == before
        asyncio.run(ring.write_uses())
        assert [key.last_used_s for key in book.all()] == [2e9 + 2, None]
        after = book.changes()
        asyncio.run(ring.write_uses())
        assert book.changes() == after, "nobody asked since"
        assert opens(ring, secret), "its own write is no change of keys"

    def test_a_book_that_cannot_be_read_closes(self, book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ring = KeyCache(tmp_path)
        assert ring.is_open()
        _, secret = book.create("alice", INFER)
        assert opens(ring, secret)

        def fail() -> int:
            raise StoreUnusable("the key store keys.db cannot be used: disk I/O error")

        monkeypatch.setattr(ring._book, "changes", fail)
        assert opens(ring, secret), "for a moment those hold that are known"
        monkeypatch.setattr(ring_module, "STALE_S", -1.0)
        with pytest.raises(KeysUnreadable):
            ring.caller(secret)
        assert not ring.is_open()

    def test_a_closed_ring_serves_nobody(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ring = KeyCache(tmp_path)
        ring.close()
        monkeypatch.setattr(ring_module, "STALE_S", -1.0)
        assert not ring.is_open()


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
        assert key.limits == KeyLimits(6, 7, 2, 2 * 2**30)
        assert key.adapters == ("mia*", "bob", "x-?")
        assert key.expires_s is not None
        assert round(key.expires_s - key.created_s) == 30 * 86_400
        assert list(KeyStore(store).by_digest()) == [digest_of(secret)]

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

    def test_another_secret(self, cli, tmp_path: Path) -> None:
        first = cli("key", "create", "--name", "alice", "--rpm", 6, "--store", tmp_path).out.strip()
        done = cli("key", "rotate", "alice", "--store", tmp_path)
        second = done.out.removesuffix("\n")
        assert (done.code, len(second)) == (0, len(first))
        assert "earlier ones are invalid now" in done.err
        as_json = json.loads(cli("key", "rotate", "alice", "--grace", "24h", "--store", tmp_path, "--json").out)
        assert (as_json["name"], as_json["limits"]) == ("alice", {"requests_per_min": 6})
        assert 86_000 < as_json["old_ends_s"] - time.time() < 87_000
        ring = KeyCache(tmp_path)
        assert [opens(ring, secret) for secret in (first, second, as_json["key"])] == [False, True, True]
        ring.close()
        assert cli("key", "rotate", "alic", "--store", tmp_path).err.endswith("; did you mean alice?\n")
        assert cli("key", "rotate", "alice", "--grace", "soon", "--store", tmp_path).code == 2

    def test_defaults_and_json(self, cli, tmp_path: Path) -> None:
        made = json.loads(cli("key", "create", "--store", tmp_path, "--json").out)
        assert made["name"].startswith("key-")
        assert (made["scopes"], made["adapters"], made["limits"], made["expires_s"]) == (["infer"], ["*"], {}, None)
        assert digest_of(made["key"]) in KeyStore(tmp_path).by_digest()
        again = cli("key", "create", "--store", tmp_path)
        assert "without a key" not in again.err, "that is news once"

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (["--scope", "root"], "--scope: 'root' is none of infer, upload, admin"),
            (["--name", "A/b"], "--name: 'A/b' is not a valid name of a key"),
            (["--adapters", "../x"], "--adapters: '../x' is not a pattern"),
            (["--adapters", ","], "--adapters: a key needs a pattern"),
            (["--stored-bytes", "lots"], "--stored-bytes 'lots' is not a size"),
            (["--stored-bytes", "-1"], "--stored-bytes '-1' is not a size"),
            (["--expires-in", "soon"], "--expires-in 'soon' is no age"),
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
        (tmp_path / "keys.db").write_bytes(b"x" * 9999)
        broken = cli("key", "list", "--store", tmp_path)
        assert broken.code == 1
        assert broken.err.startswith("lorasrv: the key store keys.db cannot be used")

    def test_the_store_is_that_of_serve(self, cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "c.toml"
        path.write_text(f'store = "{tmp_path}/said"\n')
        monkeypatch.setenv("LORASRV_CONFIG", str(path))
        cli("key", "create")
        assert has_keys(tmp_path / "said")
        monkeypatch.setenv("LORASRV_STORE", str(tmp_path / "environment"))
        cli("key", "create")
        assert has_keys(tmp_path / "environment")


class TestServe:
    @pytest.mark.parametrize("where", ["flag", "file"])
    def test_other_machines_need_keys(self, cli, tmp_path: Path, where: str) -> None:
        path = tmp_path / "c.toml"
        path.write_text('host = "0.0.0.0"\n' if where == "file" else "")
        flags = ["--host", "0.0.0.0"] if where == "flag" else []
        done = cli("serve", *flags, "--store", tmp_path / "store", "--config", path)
        spelled = "--host" if where == "flag" else f"{path}: host"
        assert done.code == 2
        assert done.err.startswith(f"lorasrv: {spelled} 0.0.0.0 opens the server to other machines without a key; ")
        assert "lorasrv key create" in done.err
        assert not (tmp_path / "store").exists(), "nothing is made before"

    @pytest.mark.parametrize("guard", ["book", "--api-key", "--insecure"])
    def test_with_keys_they_are_served(self, tmp_path: Path, guard: str) -> None:
        options: dict[str, Any] = {"host": "0.0.0.0", "store": tmp_path}
        if guard == "book":
            KeyStore(tmp_path).create("alice", INFER)
        else:
            options |= {"insecure": True} if guard == "--insecure" else {"api_key": SecretStr("s3cret-key")}
        check_guarded(ServerSettings(**options))

    def test_the_environment_is_enough(self, cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LORASRV_API_KEY", "s3cret-key")
        shown = cli("config", "show", "--origin")
        assert "api_key\t********\tenvironment LORASRV_API_KEY\n" in shown.out
        assert "s3cret" not in shown.out + shown.err + cli("serve", "--help").out + cli("list", "--help").out
        refused = cli("serve", "--api-key", "s3cret", "--store", tmp_path)
        assert refused.code == 2
        assert refused.err.startswith("lorasrv: --api-key: takes 8 or more")
        assert "s3cret" not in refused.err
