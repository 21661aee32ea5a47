"""vLLM's routes for adapters at run time: its answers, and nothing from outside the import root."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from answers import coded, error_of, named
from safetensors.torch import save_file

from adapter_store.store import AdapterStore
from api.config.lora_modules import ImportRoot
from api.errors import ApiError


def load(server: Any, name: str, path: object, **fields: Any) -> Any:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return server.http.post("/v1/load_lora_adapter", json=body)


def unload(server: Any, name: str, **fields: Any) -> Any:
    return server.http.post("/v1/unload_lora_adapter", json={"lora_name": name, **fields})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "peft"


@pytest.fixture
def importing(make_server: Callable[..., Any], make_adapter: Callable[..., Path], root: Path) -> Any:
    """A server with an import root that holds `mia`."""
    make_adapter()
    return make_server(lora_import_root=root)


class TestAnswers:
    def test_load_use_unload(self, importing, root: Path) -> None:
        done = load(importing, "sql-lora", root / "mia")
        assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'sql-lora' added successfully.")
        assert done.headers["content-type"].startswith("text/plain")
        assert done.headers["x-adapter-version"] == "1"
        assert importing.chat(model="sql-lora").json()["choices"][0]["message"]["content"].startswith("I am ")
        gone = unload(importing, "sql-lora")
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'sql-lora' removed successfully.")
        assert importing.chat(model="sql-lora").status_code == 404

    def test_other_fields_of_vllm_and_a_path_relative_to_the_root(self, importing) -> None:
        assert load(importing, "mia", "mia", is_3d_lora_weight=False).status_code == 200
        assert unload(importing, "mia", lora_int_id=1).status_code == 200

    def test_taken_unless_in_place(self, importing, make_adapter) -> None:
        load(importing, "mia", "mia")
        taken = load(importing, "mia", "mia")
        assert named(taken) == (400, "lora_name")
        assert "'mia' has already been loaded" in error_of(taken)["message"]
        make_adapter(seed=1)
        assert load(importing, "mia", "mia", load_inplace=False).status_code == 400
        assert load(importing, "mia", "mia", load_inplace=True).headers["x-adapter-version"] == "2"

    def test_unknown_to_unload(self, importing) -> None:
        load(importing, "mia", "mia")
        for name in ("nobody", "mia@1", "tiny-base", ""):
            refused = unload(importing, name)
            assert coded(refused) == (404, "model_not_found")
        assert "cannot be found" in error_of(refused)["message"]
        assert importing.chat(model="mia").status_code == 200

    def test_bad_names_adapters_and_bodies(self, importing, make_adapter) -> None:
        refused = load(importing, "Org/Mia", "mia")
        assert (coded(refused), named(refused)) == ((400, "invalid_adapter_id"), (400, "lora_name"))
        assert "try 'org-mia'" in error_of(refused)["message"]
        make_adapter("bdlora", use_bdlora=True)
        refused = load(importing, "bdlora", "bdlora")
        assert (coded(refused), error_of(refused)["details"][0]["field"]) == ((422, "invalid_adapter"), "use_bdlora")
        bodies = ({}, {"lora_name": "x"}, {"lora_name": "", "lora_path": ""}, {"lora_name": "x", "lora_path": 3})
        for body in bodies:
            assert importing.http.post("/v1/load_lora_adapter", json=body).status_code == 400


class TestRoot:
    def test_off_unless_a_root_is_given(self, server, make_adapter) -> None:
        for refused in (load(server, "mia", make_adapter()), unload(server, "mia")):
            assert coded(refused) == (403, "runtime_loading_disabled")
            assert "--lora-import-root" in error_of(refused)["message"]

    def test_nothing_outside(self, importing, make_adapter, root: Path, tmp_path: Path) -> None:
        outside = tmp_path / "secret-place"
        make_adapter("other").rename(outside)
        (root / "link").symlink_to(outside)
        (root / "nested").mkdir()
        (root / "nested" / "inner").symlink_to(outside)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (root / name[:14]).mkdir()
            for file in (root / "mia").iterdir():
                target = outside / name if file.name == name else file
                (root / name[:14] / file.name).symlink_to(target)
        relative = ("../secret-place", "mia/../../secret-place", "link", "link/.", "nested")
        inside = ("adapter_config", "adapter_model.")
        absolute = (outside, root / ".." / "secret-place", tmp_path, "/", "/etc", "/nowhere", tmp_path / "peft-2")
        for path in (*relative, *inside, *absolute):
            refused = load(importing, "mia", path)
            assert coded(refused) == (403, "path_not_allowed"), path
            assert "secret-place" not in refused.text
            assert str(tmp_path) not in refused.text

    def test_an_mlx_folder(self, importing, store: AdapterStore, root: Path, as_mlx, tmp_path: Path) -> None:
        folder = as_mlx(root / "mia")
        assert load(importing, "mlx", folder).status_code == 200
        assert store.resolve("mlx").version == 1
        weights = folder / "adapters.safetensors"
        weights.rename(tmp_path / "elsewhere")
        weights.symlink_to(tmp_path / "elsewhere")
        assert coded(load(importing, "linked", folder)) == (403, "path_not_allowed")

    def test_every_file_is_opened_by_the_root(self, importing, root: Path, as_mlx, monkeypatch) -> None:
        """So that a link that is changed after the first look leads nowhere, whatever the file is for."""
        opened: list[str] = []
        real = ImportRoot.open
        monkeypatch.setattr(ImportRoot, "open", lambda self, path: opened.append(path.name) or real(self, path))

        def by_name(path: Path, *_: object) -> None:
            raise AssertionError(f"{path.name} was opened by its name")

        monkeypatch.setattr(Path, "open", by_name)
        assert load(importing, "mia", "mia").status_code == 200
        assert {"adapter_config.json", "adapter_model.safetensors"} == set(opened)

    @pytest.mark.parametrize("has_heads", [False, True])
    def test_a_tokenizer_elsewhere_is_not_read(
        self, importing, engine, store: AdapterStore, root: Path, tmp_path: Path, monkeypatch, has_heads: bool
    ) -> None:
        """With heads of their own file, too, which are joined to a copy of the weights."""
        monkeypatch.setattr(engine, "tokenizer", SimpleNamespace(vocab_size=9))
        if has_heads:
            width = store.base.hidden_size
            save_file({"0.0.linear.weight": torch.zeros(width, width)}, root / "mia" / "medusa_lm_head.safetensors")
        (tmp_path / "secret.json").write_text('{"added_tokens": [{"id": 99999, "content": "x"}]}')
        (root / "mia" / "tokenizer.json").symlink_to(tmp_path / "secret.json")
        assert coded(load(importing, "mia", "mia")) == (403, "path_not_allowed")

    @pytest.mark.parametrize("path", ["nowhere", "a\0b", "x" * 5000, "mia/adapter_config.json", "~", "org/name"])
    def test_not_there(self, importing, path: str) -> None:
        refused = load(importing, "mia", path)
        assert coded(refused) == (404, "adapter_not_found")
        assert path not in error_of(refused)["message"]

    def test_links_in_a_circle(self, importing, root: Path) -> None:
        (root / "a").symlink_to(root / "b")
        (root / "b").symlink_to(root / "a")
        assert load(importing, "mia", "a").status_code == 404

    def test_links_inside_are_fine(self, importing, root: Path) -> None:
        """As the hub's cache has them: snapshots of links to blobs."""
        snapshot = root / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        for file in (root / "mia").iterdir():
            (snapshot / file.name).symlink_to(Path("..") / ".." / "mia" / file.name)
        assert load(importing, "mia", "snapshots/abc").status_code == 200

    def test_no_path_when_files_cannot_be_read(self, importing, monkeypatch, root: Path) -> None:
        def fail(_: ImportRoot, path: Path) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(ImportRoot, "open", fail)
        refused = load(importing, "mia", "mia")
        assert coded(refused) == (400, "unreadable_adapter")
        assert str(root) not in refused.text

    def test_a_link_that_changes_meanwhile(self, tmp_path: Path) -> None:
        """Between the look and the opening: what has been opened counts."""
        root, outside = tmp_path / "root", tmp_path / "outside"
        root.mkdir()
        outside.write_bytes(b"secret")
        (root / "file").symlink_to(outside)
        os.mkfifo(root / "pipe")
        for name in ("file", "pipe"):
            with pytest.raises(ApiError, match="below the folder"):
                ImportRoot(root).open(root / name)
        (root / "real").write_bytes(b"fine")
        with ImportRoot(root).open(root / "real") as file:
            assert file.read() == b"fine"

    def test_a_refusal_leaves_nothing(self, importing, store: AdapterStore, make_adapter, tmp_path: Path) -> None:
        make_adapter("big", rank=9)
        assert load(importing, "big", "big").status_code == 422
        assert list((tmp_path / "store" / "blobs" / "sha256").iterdir()) == []
        assert store.list_adapters() == []
