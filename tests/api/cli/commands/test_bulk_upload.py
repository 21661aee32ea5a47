"""upload --all and --slugify: a tree is uploaded, known weights are not sent again, refusals come at the end."""

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli_process
import httpx2
import pytest
from answers import failed
from small_server import Request, answering

from adapter_store.store import AdapterStore
from api.cli.commands import bulk_upload as bulk
from api.client import Refused, _refusal


@pytest.fixture
def tree(make_adapter: Callable[..., Path]) -> Path:
    """Five adapters, one of them with a folder in it."""
    for number in range(5):
        folder = make_adapter(f"bot-{number}", seed=number)
    (folder.parent / "bot-0" / "checkpoint-10").mkdir()
    return folder.parent


@pytest.fixture
def upload_all(run, tree: Path) -> Callable[..., Any]:
    return lambda *options, folder=tree: run("upload", folder, "--all", *options)


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
    def test_a_tree(self, upload_all, store: AdapterStore) -> None:
        done = upload_all("--prefix", "v1-")
        assert done.code == 0, done.err
        assert ids(store) == [f"v1-bot-{number}" for number in range(5)]
        registered = sorted(line.split("  ")[0] for line in done.out.splitlines())
        assert registered == [f"registered v1-bot-{number}@1" for number in range(5)]
        assert "(from 'bot-3')" in done.out
        assert [line for line in done.err.splitlines() if line.startswith("uploading")][-1] == "uploading done"
        assert done.err.splitlines()[-1] == "5 of 5 adapters are in the server"

    def test_known_and_changed_and_damaged(
        self, run, upload_all, tree, make_adapter, store, blobs_sent: list[str], tmp_path: Path
    ) -> None:
        for name in ("bot-1", "bot-3"):
            run("upload", tree / name, "--id", name)
        for unchanged, sent in ((2, 5), (5, 5)):
            assert (upload_all().out.count("unchanged: "), len(blobs_sent)) == (unchanged, sent)
        assert {record.current_version for record in store.list_adapters()} == {1}
        make_adapter("bot-2", seed=2, lora_alpha=8)
        assert upload_all().out.count("unchanged: ") == 4
        assert (store.resolve("bot-2").version, len(blobs_sent)) == (2, 5), "another config of the same weights"
        blob = next((tmp_path / "store" / "blobs" / "sha256").iterdir())
        data = blob.read_bytes()
        blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert (upload_all().code, len(blobs_sent)) == (0, 6)

    def test_accepted_beside_refused(self, upload_all, tree: Path, make_adapter, store: AdapterStore) -> None:
        make_adapter("bot-1", use_bdlora=True, fan_in_fan_out=True)
        (tree / "bot-3" / "adapter_model.safetensors").unlink()
        (tree / "just-notes").mkdir()
        done = upload_all()
        assert (done.code, ids(store)) == (1, ["bot-0", "bot-2", "bot-4"])
        title, *refused = done.err.splitlines()[-3:]
        assert title == "lorasrv: 3 of 5 adapters are in the server; refused:"
        assert sorted(line.split(": ")[0] for line in refused) == ["  bot-1", "  bot-3"]
        reasons = ("use_bdlora", "fan_in_fan_out", "adapter_model.safetensors: is missing")
        assert [reason for reason in reasons if reason not in done.err] == []

    def test_json(self, upload_all, make_adapter) -> None:
        make_adapter("bot-1", use_bdlora=True)
        done = upload_all("--json")
        lines = {line["id"]: line for line in map(json.loads, done.out.splitlines())}
        assert (done.code, len(lines)) == (1, 5)
        assert (lines["bot-1"]["ok"], "use_bdlora" in lines["bot-1"]["reasons"][0]) == (False, True)
        assert lines["bot-2"] | {"ok": True, "version": 1, "folder": "bot-2"} == lines["bot-2"]

    def test_weights_of_a_refused_twin(self, upload_all, make_adapter, monkeypatch, store) -> None:
        """Removed with the refused one while the other is about to register: they are sent again."""
        folder = make_adapter("twin/twin").parent
        post = bulk.Client._json
        registering: list[int] = []

        def lose_it_once(self: bulk.Client, method: str, path: str, **request: Any) -> dict[str, Any]:
            if path == "/v1/adapters":
                registering.append(1)
                if len(registering) == 2:
                    for blob in store._blobs._blobs.iterdir():
                        blob.unlink()
            return post(self, method, path, **request)

        monkeypatch.setattr(bulk.Client, "_json", lose_it_once)
        assert upload_all(folder=folder).code == 0
        assert (ids(store), len(registering)) == (["twin"], 3)

    def test_if_not_exists(self, run, upload_all, tree: Path) -> None:
        run("upload", tree / "bot-1", "--id", "bot-1")
        done = upload_all("--if-not-exists")
        assert (done.code, done.out.count("registered")) == (1, 4)
        assert "bot-1: adapter 'bot-1' exists" in done.err

    def test_partial_ones_where_they_are_allowed(self, upload_all, make_adapter, store, tiny_base) -> None:
        make_adapter("bot-1", seed=9, target_modules=["q_proj", "v_proj", "down_proj"])
        for more in ([], ["--dry-run"]):
            refused = upload_all(*more)
            assert (refused.code, refused.err.count("partial_adapter")) == (1, 1), refused.err
            assert upload_all("--allow-partial", *more).code == 0
        assert store.version_history.report(store.resolve("bot-1")).is_partial

    def test_an_alias_of_each(self, upload_all, store: AdapterStore) -> None:
        assert upload_all("--alias", "prod").code == 0
        assert {dict(record.aliases["prod"]).popitem() for record in store.list_adapters()} == {(1, 1.0)}
        wrong = upload_all("--alias", "Prod!")
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
        self, upload_all, make_adapter, monkeypatch, status: int, headers: dict[str, str], sends: int
    ) -> None:
        """Twice it has no time, as long as it says so."""
        pauses, answers, send = [], [], bulk.Client._json

        def busy(self: bulk.Client, method: str, path: str, **request: Any) -> dict[str, Any]:
            if path == "/v1/adapters":
                answers.append(status)
                if len(answers) <= 2:
                    raise _refusal(httpx2.Response(status, headers=headers, json={"error": {"message": "busy"}}))
            return send(self, method, path, **request)

        monkeypatch.setattr(bulk.Client, "_json", busy)
        monkeypatch.setattr(bulk, "_ends_within", lambda pause, _: pauses.append(pause))
        done = upload_all(folder=make_adapter("one/bot").parent)
        assert (done.code == 0, pauses) == (sends == 3, [1.0] * (sends - 1))
        if sends == 1:
            assert "bot: busy" in done.err

    def test_a_server_that_is_always_busy(self, monkeypatch) -> None:
        pauses: list[float] = []
        monkeypatch.setattr(bulk, "_ends_within", lambda pause, _: pauses.append(pause))

        def work() -> dict[str, Any]:
            raise Refused(429, {"message": "busy"}, 0.0)

        with pytest.raises(Refused):
            bulk._patiently(work, threading.Event())
        assert sum(pauses) == bulk.MAX_PATIENCE_S

    def test_ctrl_c_ends_what_waits(self, server, tree: Path, eventually) -> None:
        """The server is busy, and says that it will be for half a minute."""
        asked: list[str] = []

        def busy(request: Request) -> tuple[int, dict[str, str], bytes]:
            if request.method == "GET":
                answer = server.http.get(request.path)
                return answer.status_code, {"content-type": "application/json"}, answer.content
            asked.append(request.path)
            return 429, {"retry-after": "30"}, b'{"error": {"message": "busy"}}'

        with (
            answering(busy) as url,
            cli_process.started("upload", "--all", tree, "--no-tokenizer", "--server", url) as process,
        ):
            eventually(lambda: asked)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130

    def test_four_at_a_time(self, upload_all, monkeypatch) -> None:
        four = threading.Barrier(bulk.PARALLEL, timeout=60)
        waiting = iter(range(bulk.PARALLEL))
        send = bulk._send

        def meet(*arguments: Any) -> bulk.UploadOutcome:
            if next(waiting, None) is not None:
                four.wait()
            return send(*arguments)

        monkeypatch.setattr(bulk, "_send", meet)
        assert upload_all().code == 0

    def test_a_server_that_goes_away(self, upload_all, monkeypatch) -> None:
        monkeypatch.setattr(bulk, "PARALLEL", 1)
        send, sent = bulk._send, []

        def vanish(*arguments: Any) -> bulk.UploadOutcome:
            sent.append(arguments)
            if len(sent) > 2:
                raise bulk.ServerUnreachable("the server stopped answering")
            return send(*arguments)

        monkeypatch.setattr(bulk, "_send", vanish)
        done = upload_all()
        assert (done.code, "2 of 5 are done; run the same command to resume" in done.err) == (3, True)

    def test_no_server(self, cli, tree: Path) -> None:
        done = cli("upload", tree, "--all", "--server", "http://127.0.0.1:1")
        assert (done.code, done.out, done.err.count("\n")) == (3, "", 1)


class TestIds:
    @pytest.fixture
    def lorax(self, make_adapter: Callable[..., Path]) -> Path:
        for seed, name in enumerate(("Org/My-Adapter_v2", "Org/plain", "zoe")):
            folder = make_adapter(f"lorax/{name}", seed=seed)
        return folder.parent

    def test_refused_with_what_they_could_be(self, upload_all, lorax: Path, blobs_sent: list[str]) -> None:
        done = upload_all(folder=lorax)
        failed(done, 2, "--slugify", "'Org/My-Adapter_v2' is not allowed", "try 'org-my-adapter_v2'", "try 'org-plain'")
        assert ("zoe" in done.err, blobs_sent) == (False, [])

    def test_slugified(self, upload_all, lorax: Path, store: AdapterStore, make_adapter) -> None:
        make_adapter(f"lorax/{'a' * 80}")
        done = upload_all("--slugify", folder=lorax)
        assert (done.code, ids(store)) == (0, ["a" * 64, "org-my-adapter_v2", "org-plain", "zoe"])
        assert all(words in done.out for words in ("registered org-my-adapter_v2@1", "(from 'Org/My-Adapter_v2')"))

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("org-plain", ("several folders would have the same id", "org-plain: 'Org/plain', 'org-plain'")),
            ("♥", ("'♥' is not allowed",)),
        ],
    )
    def test_collisions_and_empty_ids_before_anything_is_sent(
        self, upload_all, lorax: Path, make_adapter, blobs_sent, name: str, says: tuple[str, ...]
    ) -> None:
        make_adapter(f"lorax/{name}", seed=7)
        failed(upload_all("--slugify", folder=lorax), 2, *says)
        assert blobs_sent == []

    def test_single(self, run, lorax: Path, store: AdapterStore, blobs_sent: list[str]) -> None:
        command = ("upload", lorax / "zoe", "--id", "Org/Zoë V2")
        failed(run(*command), 2, "'Org/Zoë V2' is not allowed", "try 'org-zoe-v2', or --slugify")
        assert blobs_sent == []
        done = run(*command, "--slugify")
        assert (done.code, ids(store)) == (0, ["org-zoe-v2"])
        assert "'Org/Zoë V2' becomes 'org-zoe-v2'" in done.err
        assert run("upload", lorax / "zoe", "--id", "♥", "--slugify").code == 2


class TestTree:
    def test_what_is_found(self, tree: Path) -> None:
        (tree / "linked").symlink_to(tree / "bot-1")
        (tree / "circle").symlink_to(tree)
        (tree / "bot-0" / "checkpoint-10" / "adapter_config.json").write_text("{}")
        found = [one.place for one in bulk.Tree(tree).adapters()]
        assert found == [*(f"bot-{number}" for number in range(5)), "linked"]

    def test_pickles_are_found_and_refused(self, upload_all, tree: Path) -> None:
        (tree / "old").mkdir()
        (tree / "old" / "adapter_model.bin").write_bytes(b"x")
        done = upload_all()
        assert (done.code, done.out.count("registered")) == (1, 5)
        assert "  old: adapter_config.json: is missing" in done.err

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--all", "--id", "x"], "--id and --all exclude each other"),
            (["--id", "x", "--dry-run"], "--prefix and --dry-run need --all"),
            (["--id", "x", "--prefix", "y"], "need --all"),
            (["--all"], "is an adapter itself"),
        ],
    )
    def test_usage(self, cli, make_adapter, arguments: list[str], says: str) -> None:
        failed(cli("upload", make_adapter(), *arguments), 2, says)

    def test_nothing_there(self, cli, tmp_path: Path) -> None:
        done = cli("upload", tmp_path, "--all")
        assert (done.code, done.err.count("\n")) == (1, 1)
        assert "holds adapter_config.json" in done.err
        failed(cli("upload", tmp_path / "gone", "--all"), 2, "does not exist")


@pytest.mark.usefixtures("tiny_base")
class TestDryRun:
    def test_lists_and_checks(self, cli, tree: Path, make_adapter, store: AdapterStore) -> None:
        make_adapter("bot-1", use_bdlora=True)
        done = cli("upload", tree, "--all", "--dry-run", "--prefix", "x-", "--server", "http://127.0.0.1:1")
        assert done.code == 1
        assert done.out.splitlines() == [f"ok x-bot-{number}  (from 'bot-{number}')" for number in (0, 2, 3, 4)]
        assert "4 of 5 adapters would be accepted; nothing was sent; refused:" in done.err
        assert "x-bot-1  (from 'bot-1'): use_bdlora" in done.err
        assert ids(store) == []

    def test_json(self, cli, tree: Path) -> None:
        done = cli("upload", tree, "--all", "--dry-run", "--json")
        lines = [json.loads(line) for line in done.out.splitlines()]
        assert (done.code, [line["id"] for line in lines]) == (0, [f"bot-{number}" for number in range(5)])
        assert {line["report"]["modules_matched"] for line in lines} == {4}
