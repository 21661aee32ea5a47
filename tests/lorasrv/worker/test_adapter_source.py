"""The door to store and host cache: layouts are found once, and alike ones are one."""

import json
from pathlib import Path

import pytest
import torch

from adapter_store.host_cache import HostCache
from adapter_store.spec import AdapterKey, AdapterSpec
from adapter_store.store import AdapterStore
from lorasrv.models.loader.locate import read_model_shape
from lorasrv.worker.adapter_source import HostAdapterStore


def test_adapters_of_the_same_ranks_share_a_layout(
    store: AdapterStore, model: Path, adapter_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HostAdapterStore(store, HostCache(1 << 20), read_model_shape(str(model)).spec, torch.float32)
    keys = [store.resolve("one").key]
    config = json.loads((adapter_dirs["one"] / "adapter_config.json").read_text())
    digest = store.add_blob(adapter_dirs["one"] / "adapter_model.safetensors")
    for alpha in (1, 2, 3):
        keys.append(store.register(f"alpha-{alpha}", {**config, "lora_alpha": alpha}, digest).ref.key)
    assert len(set(keys)) == 4
    assert not any(source.knows_layout(key) for key in keys)
    read, spec = [], store.spec

    def counted(key: AdapterKey) -> AdapterSpec:
        read.append(key)
        return spec(key)

    monkeypatch.setattr(store, "spec", counted)
    layouts = [source.layout(key) for key in [*keys, *keys]]
    assert read == keys
    assert all(layout is layouts[0] for layout in layouts)
    assert source.layout(store.resolve("two").key) != layouts[0]
    assert all(source.knows_layout(key) for key in keys)
