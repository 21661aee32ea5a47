"""--lora-modules: its spellings, and what a start registers, refuses and repeats."""

from collections.abc import Callable
from pathlib import Path

import pytest

from adapter_store.registry.records import Change
from adapter_store.store import AdapterStore
from api.cli.common.command_line import rewritten
from api.config.lora_module_path import LoraModulePath, ModulesRefused, parse_modules
from api.config.lora_modules import add_folder, register_modules

MIA, TOM = LoraModulePath("mia", Path("/a/mia")), LoraModulePath("tom", Path("b=c/tom"))


class TestSpelling:
    @pytest.mark.parametrize(
        "value",
        [
            ["mia=/a/mia", "tom=b=c/tom"],
            ['{"name": "mia", "path": "/a/mia"}', ' {"name": "tom", "path": "b=c/tom", "base_model_name": null}'],
            "mia=/a/mia  'tom=b=c/tom'",
            '["mia=/a/mia", {"name": "tom", "path": "b=c/tom"}]',
            [MIA, TOM],
        ],
    )
    def test_known(self, value: object) -> None:
        assert parse_modules(value) == (MIA, TOM)

    def test_of_nothing(self) -> None:
        assert parse_modules("") == parse_modules([]) == parse_modules([""]) == ()

    @pytest.mark.parametrize(
        ("value", "says"),
        [
            (["mia"], "'mia' is neither name=path nor"),
            (["=x"], "neither name=path"),
            (["mia="], "neither name=path"),
            ([3], "neither name=path"),
            (["mia=a", "mia=b"], "'mia' is given twice"),
            (['{"name": "mia"'], "is not JSON"),
            (['{"name": "mia"}'], "path must be a non-empty string, not None"),
            (['{"name": "mia", "path": ""}'], "path must be a non-empty string"),
            (['{"name": "mia", "path": "x", "base_model_name": 3}'], "base_model_name must be a non-empty string"),
            (['{"name": "mia", "path": "x", "rank": 3}'], "'rank' is unknown; known: name, path, base_model_name"),
            ("[" * 100_000, "is not JSON"),
            (3, "expected name=path"),
        ],
    )
    def test_wrong(self, value: object, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            parse_modules(value)

    @pytest.mark.parametrize(
        ("given", "meant"),
        [
            ("serve --lora-modules a=1 b=2 --port 0", "serve --lora-modules a=1 --lora-modules b=2 --port 0"),
            ("serve --lora-modules a=1 --lora-modules b=2", "serve --lora-modules a=1 --lora-modules b=2"),
            ("serve --port 0 --lora-modules a=1", "serve --port 0 --lora-modules a=1"),
            ("serve --lora-modules --port 0", "serve --lora-modules --port 0"),
            ("list --server x", "list --server x"),
            ("generate -", "generate -"),
        ],
    )
    def test_a_list_behind_one_flag(self, given: str, meant: str) -> None:
        assert rewritten(given.split()) == meant.split()

    def test_through_the_command(self, cli, monkeypatch) -> None:
        seen = []
        monkeypatch.setattr("api.server.run", lambda settings, *_: seen.append(settings))
        assert cli("serve", "--lora-modules", "mia=/a/mia", "tom=b=c/tom").code == 0
        assert seen[0].lora_modules == (MIA, TOM)

    @pytest.mark.parametrize(
        ("option", "value", "says"),
        [
            ("modules", "mia", "'mia' is neither name=path"),
            ("import-root", "nowhere", "is not a folder"),
            ("import-root", "/", "is the root of the file system"),
        ],
    )
    def test_a_wrong_flag_is_one_line(self, cli, option: str, value: str, says: str) -> None:
        done = cli("serve", f"--lora-{option}", value)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert done.err.startswith(f"lorasrv: --lora-{option}: ")
        assert says in done.err


class TestRegistering:
    @pytest.fixture
    def register(self, store: AdapterStore) -> Callable[..., list[float]]:
        """register(name=folder, ...) -> the progress that was told."""

        def run(**modules: Path) -> list[float]:
            told: list[float] = []
            paths = [LoraModulePath(name, path) for name, path in modules.items()]
            register_modules(store, paths, lambda _, share: told.append(share))
            return told

        return run

    def test_the_same_again_is_the_same_version(self, store, register, make_adapter) -> None:
        folders = {"mia": make_adapter("mia"), "tom": make_adapter("tom", seed=1)}
        for _ in range(2):
            assert register(**folders) == [0.0, 0.5, 1.0]
            assert [store.resolve(name).version for name in ("mia", "tom")] == [1, 1]
        make_adapter("mia", seed=2)
        register(mia=folders["mia"])
        assert store.resolve("mia").version == 2
        assert register() == []

    def test_a_restart_undoes_nothing(self, store, register, make_adapter, caplog) -> None:
        """A later upload or rollback stays the current version; a folder that changed becomes a new one."""
        mia, other = make_adapter("mia"), make_adapter("other", seed=2)
        register(mia=mia)
        add_folder(store, other, "mia")
        register(mia=mia)
        assert store.resolve("mia").version == 2
        assert "the folder is mia@1; mia@2, which is newer or was selected, stays the current version" in caplog.text
        store.change("mia", Change(version=1))
        register(mia=other)
        assert store.resolve("mia").version == 1
        assert "the folder is mia@2; mia@1, which is newer or was selected, stays" in caplog.text
        caplog.clear()
        register(mia=mia)
        assert caplog.text == ""
        make_adapter("mia", lora_alpha=9)
        register(mia=mia)
        assert store.resolve("mia").version == 3
        assert add_folder(store, other, "mia").ref.version == store.resolve("mia").version == 2, "at run time it is"

    def test_a_restart_keeps_defaults(self, store, register, make_adapter) -> None:
        folder = make_adapter()
        register(mia=folder)
        kind = store.register_defaults("mia", '{"system":"Be kind."}', store.resolve("mia")).ref
        register(mia=folder)
        assert store.resolve("mia") == kind

    def test_folders_of_peft_and_mlx_and_one_level_below(self, store, register, make_adapter, as_mlx) -> None:
        mia, nested = make_adapter("mia"), make_adapter("outer/poet", seed=1).parent
        mlx = as_mlx(mia)
        for _ in range(2):
            register(mia=mia, mlx=mlx, nested=nested)
            assert [store.resolve(name).version for name in ("mia", "mlx", "nested")] == [1, 1, 1]
        ours, theirs = (store.load(store.resolve(name).key) for name in ("mia", "mlx"))
        assert all((ours[site].a == theirs[site].a).all() for site in ours)
        assert {ours[site].scaling for site in ours} == {theirs[site].scaling for site in theirs}

    def test_known_weights_are_not_copied_but_repaired(self, store, register, make_adapter, monkeypatch) -> None:
        mia = make_adapter()
        register(mia=mia)
        opened = []
        open_blob = store.open_blob
        monkeypatch.setattr(store, "open_blob", lambda *a: opened.append(a) or open_blob(*a))
        register(mia=mia, zoe=mia)
        assert opened == []
        [blob] = (store.root / "blobs" / "sha256").iterdir()
        for count, place in enumerate((-1, 0, 20), 1):
            data = bytearray(blob.read_bytes())
            data[place] ^= 1
            blob.write_bytes(data)
            register(mia=mia)
            assert len(opened) == count
            assert blob.read_bytes() == (mia / "adapter_model.safetensors").read_bytes()

    def test_every_refused_module_is_named_with_its_reason(self, store, register, make_adapter, tmp_path) -> None:
        good, bdlora = make_adapter("good"), make_adapter("bdlora", use_bdlora=True, seed=1)
        with pytest.raises(ModulesRefused, match="--lora-modules: refused: bdlora, Big, gone, tiny-base") as caught:
            register(**{"bdlora": bdlora, "good": good, "Big": good, "gone": tmp_path / "gone", "tiny-base": good})
        first, *others = caught.value.reasons
        assert first.startswith("bdlora: use_bdlora: ")
        assert [line.split(": ")[0] for line in others] == ["Big", "gone", "tiny-base"]
        assert "try 'big'" in others[0]
        assert [record.adapter_id for record in store.list_adapters()] == ["good"]

    @pytest.mark.parametrize("base", ["someone/else", "tiny-base"])
    def test_another_base_is_warned_of(self, store, make_adapter, caplog, base: str) -> None:
        register_modules(store, [LoraModulePath("mia", make_adapter(), base)], lambda *_: None)
        warning = "base_model_name 'someone/else' is not the served base model, 'tiny-base'"
        assert (warning in caplog.text) if base == "someone/else" else (caplog.text == "")
