"""upload --all and --slugify: a tree goes in, what is there is not sent again, what is refused is told at the end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from adapter_store.store import AdapterStore
from api.cli.commands import bulk_upload as bulk
from api.client import Refused, _refusal


@pytest.fixture
def tree(make_adapter: Callable[..., Path]) -> Path:
    """Five adapters, one of them with a folder in it."""
    for number in range(5):
        make_adapter(f"bot-{number}", seed=number)
    (make_adapter("bot-0") / "checkpoint-10").mkdir()
    return make_adapter("bot-0").parent


@pytest.fixture
def blobs_sent(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sent: list[str] = []
    open_blob = store.open_blob
    monkeypatch.setattr(store, "open_blob", lambda digest, *how: sent.append(digest) or open_blob(digest, *how))
    return sent


def ids(store: AdapterStore) -> list[str]:
    return [str(record.adapter_id) for record in store.list_adapters()]


@pytest.fixture
def tiny_base(store: AdapterStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """What --dry-run checks against is the server's base."""
    monkeypatch.setattr("api.cli.commands.check.shapes_of", lambda model: store.base)


class TestUpload:
    def test_a_tree(self, cli, server, tree: Path, store: AdapterStore) -> None:
        done = cli("upload", "--all", tree, "--prefix", "v1-", "--server", server.url)
        assert done.code == 0, done.err
        assert ids(store) == [f"v1-bot-{number}" for number in range(5)]
        assert sorted(line.split("  ")[0] for line in done.out.splitlines()) == [
            f"registered v1-bot-{number}@1" for number in range(5)
        ]
        assert "(from 'bot-3')" in done.out
        assert [line for line in done.err.splitlines() if line.startswith("uploading")][-1] == "uploading done"
        assert done.err.splitlines()[-1] == "5 of 5 adapters are in the server"

    def test_goes_on_where_it_stopped(self, cli, server, tree, store, blobs_sent: list[str]) -> None:
        for name in ("bot-1", "bot-3"):
            cli("upload", tree / name, "--id", name, "--server", server.url)
        assert len(blobs_sent) == 2
        assert cli("upload", tree, "--all", "--server", server.url).out.count("unchanged: ") == 2
        assert len(blobs_sent) == 5
        assert cli("upload", tree, "--all", "--server", server.url).out.count("unchanged: ") == 5
        assert len(blobs_sent) == 5
        assert {record.current_version for record in store.list_adapters()} == {1}

    def test_a_changed_config_is_a_new_version(self, cli, server, tree, make_adapter, store, blobs_sent) -> None:
        cli("upload", tree, "--all", "--server", server.url)
        make_adapter("bot-2", seed=2, lora_alpha=8)
        assert cli("upload", tree, "--all", "--server", server.url).out.count("unchanged: ") == 4
        assert (store.resolve("bot-2").version, len(blobs_sent)) == (2, 5)

    def test_damaged_weights_are_sent_again(self, cli, server, tree, store, blobs_sent, tmp_path: Path) -> None:
        cli("upload", tree, "--all", "--server", server.url)
        blob = next((tmp_path / "store" / "blobs" / "sha256").iterdir())
        data = bytearray(blob.read_bytes())
        data[-1] ^= 1
        blob.write_bytes(data)
        assert cli("upload", tree, "--all", "--server", server.url).code == 0
        assert len(blobs_sent) == 6

    def test_the_rest_goes_in(self, cli, server, tree: Path, make_adapter, store: AdapterStore) -> None:
        make_adapter("bot-1", use_dora=True, lora_bias=True)
        (tree / "bot-3" / "adapter_model.safetensors").unlink()
        (tree / "just-notes").mkdir()
        done = cli("upload", tree, "--all", "--server", server.url)
        assert done.code == 1
        assert ids(store) == ["bot-0", "bot-2", "bot-4"]
        summary = done.err.splitlines()[-3:]
        assert summary[0] == "lorasrv: 3 of 5 adapters are in the server; refused:"
        assert sorted(line.split(": ")[0] for line in summary[1:]) == ["  bot-1", "  bot-3"]
        assert "use_dora" in done.err
        assert "lora_bias" in done.err
        assert "adapter_model.safetensors: is missing" in done.err

    def test_json(self, cli, server, tree: Path, make_adapter) -> None:
        make_adapter("bot-1", use_dora=True)
        done = cli("upload", tree, "--all", "--json", "--server", server.url)
        lines = {line["id"]: line for line in map(json.loads, done.out.splitlines())}
        assert (done.code, len(lines)) == (1, 5)
        assert not lines["bot-1"]["ok"]
        assert "use_dora" in lines["bot-1"]["reasons"][0]
        assert (lines["bot-2"]["ok"], lines["bot-2"]["version"], lines["bot-2"]["folder"]) == (True, 1, "bot-2")

    def test_a_refused_twin_takes_nothing_with_it(self, cli, server, make_adapter, monkeypatch, store) -> None:
        """Weights of two adapters, one of them refused: its end removes them while the other is about to register."""
        folder = make_adapter("twin")
        post = bulk.Client._json
        registering: list[int] = []

        def lose_it_once(self: bulk.Client, method: str, path: str, **request: Any) -> dict[str, Any]:
            if path == "/v1/adapters":
                registering.append(1)
                if len(registering) == 2:
                    for blob in (store._blobs._blobs).iterdir():
                        blob.unlink()
            return post(self, method, path, **request)

        monkeypatch.setattr(bulk.Client, "_json", lose_it_once)
        assert cli("upload", folder.parent, "--all", "--server", server.url).code == 0
        assert (ids(store), len(registering)) == (["twin"], 3)

    def test_if_not_exists(self, cli, server, tree: Path) -> None:
        cli("upload", tree / "bot-1", "--id", "bot-1", "--server", server.url)
        done = cli("upload", tree, "--all", "--if-not-exists", "--server", server.url)
        assert (done.code, done.out.count("registered")) == (1, 4)
        assert "bot-1: adapter 'bot-1' exists" in done.err

    def test_partial_ones_where_they_are_allowed(self, cli, server, tree: Path, make_adapter, store, tiny_base) -> None:
        make_adapter("bot-1", seed=9, target_modules=["q_proj", "v_proj", "down_proj"])
        for more in ([], ["--dry-run"]):
            refused = cli("upload", tree, "--all", "--server", server.url, *more)
            assert (refused.code, refused.err.count("partial_adapter")) == (1, 1), refused.err
            assert cli("upload", tree, "--all", "--allow-partial", "--server", server.url, *more).code == 0
        assert store.version_history.report(store.resolve("bot-1")).is_partial

    def test_an_alias_of_each(self, cli, server, tree: Path, store: AdapterStore) -> None:
        assert cli("upload", tree, "--all", "--alias", "prod", "--server", server.url).code == 0
        assert {dict(record.aliases["prod"]).popitem() for record in store.list_adapters()} == {(1, 1.0)}
        wrong = cli("upload", tree, "--all", "--alias", "Prod!", "--server", server.url)
        assert (wrong.code, wrong.err.count("'Prod!'")) == (1, 5)

    @pytest.mark.parametrize(
        ("status", "headers", "sends"),
        [
            (429, {"retry-after": "1"}, 3),
            (503, {"retry-after": "1"}, 3),
            (503, {"retry-after": "1", "x-should-retry": "false"}, 1),
            (507, {"retry-after": "1"}, 1),
            (503, {}, 1),
            (429, {"retry-after": "9999"}, 1),
        ],
    )
    def test_a_busy_server_is_waited_for(
        self, cli, server, make_adapter, monkeypatch, status: int, headers: dict[str, str], sends: int
    ) -> None:
        """Twice it has no time, as long as it says so."""
        pauses: list[float] = []
        answers: list[int] = []
        send = bulk.Client._json

        def busy(self: bulk.Client, method: str, path: str, **request: Any) -> dict[str, Any]:
            if path == "/v1/adapters":
                answers.append(status)
                if len(answers) <= 2:
                    raise _refusal(httpx2.Response(status, headers=headers, json={"error": {"message": "busy"}}))
            return send(self, method, path, **request)

        monkeypatch.setattr(bulk.Client, "_json", busy)
        monkeypatch.setattr(bulk.time, "sleep", pauses.append)
        done = cli("upload", make_adapter("bot").parent, "--all", "--server", server.url)
        assert (done.code == 0, len(pauses)) == (sends == 3, sends - 1)
        assert set(pauses) <= {1.0}
        if sends == 1:
            assert "bot: busy" in done.err

    def test_a_server_that_is_always_busy(self, monkeypatch) -> None:
        pauses: list[float] = []
        monkeypatch.setattr(bulk.time, "sleep", pauses.append)

        def work() -> dict[str, Any]:
            raise Refused(429, {"message": "busy"}, 0.0)

        with pytest.raises(Refused):
            bulk._patiently(work)
        assert sum(pauses) == bulk.MAX_PATIENCE_S

    def test_four_at_a_time(self, cli, server, tree: Path, monkeypatch) -> None:
        import threading

        four = threading.Barrier(bulk.PARALLEL, timeout=10)
        waiting = iter(range(bulk.PARALLEL))
        send = bulk._send

        def meet(*arguments: Any) -> bulk.UploadOutcome:
            if next(waiting, None) is not None:
                four.wait()
            return send(*arguments)

        monkeypatch.setattr(bulk, "_send", meet)
        assert cli("upload", tree, "--all", "--server", server.url).code == 0

    def test_a_server_that_goes_away(self, cli, server, tree: Path, monkeypatch) -> None:
        monkeypatch.setattr(bulk, "PARALLEL", 1)
        send, sent = bulk._send, []

        def vanish(*arguments: Any) -> bulk.UploadOutcome:
            sent.append(arguments)
            if len(sent) > 2:
                raise bulk.ServerUnreachable("the server stopped answering")
            return send(*arguments)

        monkeypatch.setattr(bulk, "_send", vanish)
        done = cli("upload", tree, "--all", "--server", server.url)
        assert done.code == 3
        assert "2 of 5 are done; run the same command to resume" in done.err

    def test_no_server(self, cli, tree: Path) -> None:
        done = cli("upload", tree, "--all", "--server", "http://127.0.0.1:1")
        assert (done.code, done.out, done.err.count("\n")) == (3, "", 1)


class TestIds:
    @pytest.fixture
    def lorax(self, make_adapter: Callable[..., Path]) -> Path:
        for seed, name in enumerate(("Org/My-Adapter_v2", "Org/plain", "zoe")):
            make_adapter(f"lorax/{name}", seed=seed)
        return make_adapter("lorax/zoe", seed=2).parent

    def test_refused_with_what_they_could_be(self, cli, server, lorax: Path, blobs_sent: list[str]) -> None:
        done = cli("upload", lorax, "--all", "--server", server.url)
        assert (done.code, done.out, blobs_sent) == (2, "", [])
        assert "--slugify" in done.err
        assert "'Org/My-Adapter_v2' is not allowed" in done.err
        assert "try 'org-my-adapter_v2'" in done.err
        assert "try 'org-plain'" in done.err
        assert "zoe" not in done.err

    def test_slugified(self, cli, server, lorax: Path, store: AdapterStore) -> None:
        done = cli("upload", lorax, "--all", "--slugify", "--server", server.url)
        assert (done.code, ids(store)) == (0, ["org-my-adapter_v2", "org-plain", "zoe"])
        assert "registered org-my-adapter_v2@1" in done.out
        assert "(from 'Org/My-Adapter_v2')" in done.out

    def test_collisions_before_anything_is_sent(self, cli, server, lorax: Path, make_adapter, blobs_sent) -> None:
        make_adapter("lorax/org-plain", seed=7)
        done = cli("upload", lorax, "--all", "--slugify", "--server", server.url)
        assert (done.code, done.out, blobs_sent) == (2, "", [])
        assert "several folders would have the same id" in done.err
        assert "org-plain: 'Org/plain', 'org-plain'" in done.err

    def test_of_nothing_that_can_stay(self, cli, server, lorax: Path, make_adapter) -> None:
        make_adapter("lorax/♥", seed=7)
        done = cli("upload", lorax, "--all", "--slugify", "--server", server.url)
        assert (done.code, done.out) == (2, "")
        assert "'♥' is not allowed" in done.err

    def test_single(self, cli, server, lorax: Path, store: AdapterStore) -> None:
        command = ("upload", lorax / "zoe", "--id", "Org/Zoë V2", "--server", server.url)
        assert cli(*command).code == 1
        done = cli(*command, "--slugify")
        assert (done.code, ids(store)) == (0, ["org-zoe-v2"])
        assert "'Org/Zoë V2' becomes 'org-zoe-v2'" in done.err
        assert cli("upload", lorax / "zoe", "--id", "♥", "--slugify", "--server", server.url).code == 2

    def test_long_ids_are_cut(self, cli, server, make_adapter, store: AdapterStore) -> None:
        make_adapter(f"long/{'a' * 80}")
        assert (
            cli("upload", make_adapter(f"long/{'a' * 80}").parent, "--all", "--slugify", "--server", server.url).code
            == 0
        )
        assert ids(store) == ["a" * 64]


class TestTree:
    def test_what_is_found(self, tree: Path) -> None:
        (tree / "linked").symlink_to(tree / "bot-1")
        (tree / "circle").symlink_to(tree)
        (tree / "bot-0" / "checkpoint-10" / "adapter_config.json").write_text("{}")
        found = [one.place for one in bulk.Tree(tree).adapters()]
        assert found == [*(f"bot-{number}" for number in range(5)), "linked"]

    def test_pickles_are_found_and_refused(self, cli, server, tree: Path) -> None:
        (tree / "old").mkdir()
        (tree / "old" / "adapter_model.bin").write_bytes(b"x")
        done = cli("upload", tree, "--all", "--server", server.url)
        assert (done.code, done.out.count("registered")) == (1, 5)
        assert "  old: adapter_config.json: is missing" in done.err

    @pytest.mark.parametrize(
        ("arguments", "code", "says"),
        [
            (["--all", "--id", "x"], 2, "--id and --all exclude each other"),
            (["--id", "x", "--dry-run"], 2, "--prefix and --dry-run need --all"),
            (["--id", "x", "--prefix", "y"], 2, "need --all"),
            (["--all"], 2, "is an adapter itself"),
        ],
    )
    def test_usage(self, cli, make_adapter, arguments: list[str], code: int, says: str) -> None:
        done = cli("upload", make_adapter(), *arguments)
        assert (done.code, done.out) == (code, "")
        assert says in done.err

    def test_nothing_there(self, cli, tmp_path: Path) -> None:
        for folder in (tmp_path, tmp_path / "gone"):
            done = cli("upload", folder, "--all")
            assert (done.code, done.err.count("\n")) == (1, 1)
            assert "holds adapter_config.json" in done.err


@pytest.mark.usefixtures("tiny_base")
class TestDryRun:
    def test_lists_and_checks(self, cli, tree: Path, make_adapter, store: AdapterStore) -> None:
        make_adapter("bot-1", use_dora=True)
        done = cli("upload", tree, "--all", "--dry-run", "--prefix", "x-", "--server", "http://127.0.0.1:1")
        assert done.code == 1
        assert done.out.splitlines() == [f"ok x-bot-{number}  (from 'bot-{number}')" for number in (0, 2, 3, 4)]
        assert "4 of 5 adapters would be accepted; nothing was sent; refused:" in done.err
        assert "x-bot-1  (from 'bot-1'): use_dora" in done.err
        assert ids(store) == []

    def test_json(self, cli, tree: Path) -> None:
        done = cli("upload", tree, "--all", "--dry-run", "--json")
        lines = [json.loads(line) for line in done.out.splitlines()]
        assert (done.code, [line["id"] for line in lines]) == (0, [f"bot-{number}" for number in range(5)])
        assert {line["report"]["modules_matched"] for line in lines} == {4}
