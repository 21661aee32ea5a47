"""Factories for adapter store tests: a tiny base, valid and invalid adapters for it, and stores filled with them."""

import hashlib
import io
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_keys import key_of
from safetensors.torch import save
from safetensors_bytes import with_header

from adapter_store.errors import AdapterInvalid, Problem
from adapter_store.quota import ANONYMOUS
from adapter_store.registry.records import Registration
from adapter_store.spec import AdapterKey, AddedToken, BaseShapes
from adapter_store.storage.pending_uploads import Uploader
from adapter_store.store import AdapterStore
from adapter_store.validation.validate import CheckedAdapter, check_adapter

HIDDEN, INNER, KV = 32, 48, 16
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
BASE = BaseShapes(family="llama", num_layers=2, modules=MODULES, name="tiny-llama")
PREFIX = "base_model.model.model.layers."
Q0 = f"{PREFIX}0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]
# What PEFT saves for r=4 on q and v.
CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "someone/tiny-llama", "r": 4,
    "lora_alpha": 8, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}, "bias": "none", "lora_bias": False,
    "lora_dropout": 0.05, "fan_in_fan_out": False, "use_dora": False, "modules_to_save": None,
    "init_lora_weights": True, "target_modules": ["v_proj", "q_proj"], "megatron_core": "megatron.core",
    "loftq_config": {}, "qalora_group_size": 16
}  # fmt: skip


class Builder:
    """Make adapters for the tiny base."""

    def config(self, **changes: object) -> dict[str, Any]:
        return {**CONFIG, **changes}

    def tensors(
        self,
        rank: int | Mapping[str, int] = 4,
        modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.v_proj"),
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        layers: int = BASE.num_layers,
    ) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        result = {}
        for layer in range(layers):
            for module in modules:
                r = rank if isinstance(rank, int) else rank[module]
                n_in, n_out = MODULES[module]
                stem = f"{PREFIX}{layer}.{module}"
                result[f"{stem}.lora_A.weight"] = torch.randn(r, n_in, generator=generator).to(dtype)
                result[f"{stem}.lora_B.weight"] = torch.randn(n_out, r, generator=generator).to(dtype)
        return result

    def file(self, tensors: Tensors | None = None, **kwargs: Any) -> bytes:
        """Return a safetensors file, written by the safetensors library."""
        data: bytes = save(self.tensors(**kwargs) if tensors is None else tensors, metadata={"format": "pt"})
        return data

    raw = staticmethod(with_header)


build = Builder()


def put(store: AdapterStore, data: bytes, principal: str = ANONYMOUS) -> str:
    """Upload bytes and return their digest."""
    digest = digest_of(data)
    with store.open_blob(digest, len(data), Uploader(principal)) as upload:
        upload.write(data)
        upload.commit()
    return digest


def add(store: AdapterStore, name: str, seed: int = 0, **options: Any) -> Registration:
    """Upload the adapter of a seed and register it."""
    return store.register(name, build.config(), put(store, build.file(seed=seed)), **options)


# A base whose embedding and head an adapter may resize, and an adapter that adds two tokens.
RESIZABLE = replace(
    BASE, ends={"lm_head": (HIDDEN, 9), "model.embed_tokens": (9, HIDDEN)}, embedding="model.embed_tokens"
)
OWN_TOKENS = (AddedToken(9, "<mood>"), AddedToken(10, "<|sad|>", special=True, normalized=False))


def add_with_tokens(store: AdapterStore, name: str) -> Registration:
    """Register an adapter with OWN_TOKENS in a store for RESIZABLE."""
    tables = {f"base_model.model.{end}.weight": torch.ones(11, HIDDEN) for end in RESIZABLE.ends}
    config = build.config(added_tokens=[asdict(token) for token in OWN_TOKENS])
    return store.register(name, config, put(store, build.file(build.tensors() | tables)))


def registered(store: AdapterStore) -> tuple[AdapterKey, str]:
    """Register the default adapter as mia; return its key and the digest of its weights."""
    return key_of(add(store, "mia").ref), digest_of(build.file())


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blobs(store_or_root: AdapterStore | Path) -> dict[str, Path]:
    """Return the stored weights by digest."""
    root = store_or_root if isinstance(store_or_root, Path) else store_or_root.root
    return {path.name: path for path in (root / "blobs" / "sha256").iterdir()}


def litter(store: AdapterStore) -> list[Path]:
    """Return the unfinished uploads."""
    return list((store.root / "tmp").iterdir())


def flip(path: Path, position: int = -1, mask: int = 1) -> None:
    """Damage one byte of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)


def problems_of(refused: Callable[[], object]) -> dict[str, Problem]:
    """Call a function that must be refused, and return its problems by code."""
    with pytest.raises(AdapterInvalid) as caught:
        refused()
    return {problem.code: problem for problem in caught.value.problems}


def widen(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return a host array of a dtype as float32."""
    return (array.astype("<u4") << 16).view("<f4") if dtype == "BF16" else array.astype("<f4")


def check(
    config: Mapping[str, object], data: bytes, max_rank: int = 16, base: BaseShapes = BASE, **options: Any
) -> CheckedAdapter:
    """Check an adapter for the tiny base, or for another one."""
    return check_adapter(config, io.BytesIO(data), len(data), base, max_rank, **options)


def warnings(checked: CheckedAdapter) -> str:
    return " | ".join(checked.report.warnings)


def norm_of_b(tensors: Tensors) -> float:
    return float(sum(t.double().norm() for name, t in tensors.items() if "lora_B" in name))
