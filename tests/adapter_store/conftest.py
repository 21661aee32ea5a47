"""Builders of small adapters, good and bad, as fixtures: test modules cannot import each other."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from adapter_store.errors import AdapterInvalid, Problem
from adapter_store.quota import ANONYMOUS
from adapter_store.spec import BaseShapes
from adapter_store.storage.pending_uploads import Uploader
from adapter_store.store import AdapterStore

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
PREFIX = "base_model.model.model.layers."

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


@dataclass
class Builder:
    """Makes adapters for the tiny base."""

    base: BaseShapes

    def config(self, **changes: object) -> Config:
        """What PEFT saves for r=4 on q and v, with changes."""
        config: Config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "someone/tiny-llama",
            "r": 4,
            "lora_alpha": 8,
            "use_rslora": False,
            "rank_pattern": {},
            "alpha_pattern": {},
            "bias": "none",
            "lora_bias": False,
            "lora_dropout": 0.05,
            "fan_in_fan_out": False,
            "use_dora": False,
            "modules_to_save": None,
            "init_lora_weights": True,
            "target_modules": ["v_proj", "q_proj"],
            "megatron_core": "megatron.core",
            "loftq_config": {},
            "qalora_group_size": 16,
        }
        return config | changes

    def tensors(
        self,
        rank: int | Mapping[str, int] = 4,
        modules: tuple[str, ...] = ("self_attn.q_proj", "self_attn.v_proj"),
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        layers: int | None = None,
    ) -> Tensors:
        generator = torch.Generator().manual_seed(seed)
        result = {}
        for layer in range(self.base.num_layers if layers is None else layers):
            for module in modules:
                r = rank if isinstance(rank, int) else rank[module]
                n_in, n_out = MODULES[module]
                stem = f"{PREFIX}{layer}.{module}"
                result[f"{stem}.lora_A.weight"] = torch.randn(r, n_in, generator=generator).to(dtype)
                result[f"{stem}.lora_B.weight"] = torch.randn(n_out, r, generator=generator).to(dtype)
        return result

    def file(self, tensors: Tensors | None = None, **kwargs: Any) -> bytes:
        """A safetensors file, written by the safetensors library."""
        data: bytes = save(self.tensors(**kwargs) if tensors is None else tensors, metadata={"format": "pt"})
        return data

    def raw(self, header: object, data: bytes = b"") -> bytes:
        """A file with any header: bytes as they are, anything else as JSON."""
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data


@pytest.fixture(scope="session")
def base() -> BaseShapes:
    return BaseShapes(family="llama", num_layers=2, modules=MODULES, name="tiny-llama")


@pytest.fixture(scope="session")
def build(base: BaseShapes) -> Builder:
    return Builder(base)


@pytest.fixture
def store(tmp_path: Path, base: BaseShapes) -> Iterator[AdapterStore]:
    with AdapterStore(tmp_path / "store", base, max_lora_rank=16, reserved_ids=frozenset({"tiny-llama"})) as opened:
        yield opened


@pytest.fixture
def put() -> Callable[..., str]:
    """Upload bytes; returns their digest."""

    def put_bytes(store: AdapterStore, data: bytes, principal: str = ANONYMOUS) -> str:
        digest = hashlib.sha256(data).hexdigest()
        with store.open_blob(digest, len(data), Uploader(principal)) as upload:
            upload.write(data)
            upload.commit()
        return digest

    return put_bytes


@pytest.fixture
def problems_of() -> Callable[[Callable[[], object]], dict[str, Problem]]:
    """Run something that must be refused: its problems by code."""

    def run(refused: Callable[[], object]) -> dict[str, Problem]:
        with pytest.raises(AdapterInvalid) as caught:
            refused()
        return {problem.code: problem for problem in caught.value.problems}

    return run


@pytest.fixture
def widen() -> Callable[[np.ndarray, str], np.ndarray]:
    """Host array of a dtype, as float32."""

    def to_float32(array: np.ndarray, dtype: str) -> np.ndarray:
        return (array.astype("<u4") << 16).view("<f4") if dtype == "BF16" else array.astype("<f4")

    return to_float32
