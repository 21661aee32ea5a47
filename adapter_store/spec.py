"""What an adapter is, once validated: plain frozen facts. No torch, no peft.

Orientation is PEFT's: `lora_a [rank, in]`, `lora_b [out, rank]`, delta = scaling * lora_b @ lora_a.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

AdapterId = NewType("AdapterId", str)
"""A name that a person gave; moves from version to version."""
AdapterKey = NewType("AdapterKey", str)
"""64 hex digits of one immutable content: sha256 over the canonical config fields that change the mathematics and the
weights' digest. Keys residency, host copies and KV reuse."""


@dataclass(frozen=True, slots=True)
class BaseShapes:
    """What an adapter must fit: the linear modules of every decoder layer, by their Hugging Face names.

    `modules` maps a module's path inside its layer (`self_attn.q_proj`) to (in_features, out_features).
    `name` is what clients call the base, `checkpoint` what its file or folder is called; for warnings only.
    """

    family: str
    num_layers: int
    modules: Mapping[str, tuple[int, int]]
    layer_prefix: str = "model.layers."
    name: str = ""
    checkpoint: str = ""


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One adapted linear: where it is, how strong, and which tensors of the file hold it."""

    layer: int
    module: str
    rank: int
    scaling: float
    a_name: str
    b_name: str


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A validated adapter. `modules` is sorted by (layer, module)."""

    key: AdapterKey
    weights_digest: str
    modules: tuple[LoraModule, ...]
    dtype: str
    weights_bytes: int

    @property
    def max_rank(self) -> int:
        return max(m.rank for m in self.modules)


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """What a reference resolved to, once, at admission."""

    adapter_id: AdapterId
    version: int
    key: AdapterKey
