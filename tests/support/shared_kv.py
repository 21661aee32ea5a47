"""A made-up model whose layers share keys and values, and its reference in plain torch over whole texts.

Its family is a TOML file of the tests: Qwen 3 with a list that says whose keys and values each layer reads. Layers 1
and 4 read those of layer 0 and see all tokens; layers 3 and 5 read those of layer 2 and see a window. Only layers 0 and
2 have k, v and a norm of k.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_checkpoints import tiny_tokenizer_json
from torch import Tensor

from lorasrv.models import families

SOURCES = (0, 0, 2, 2, 0, 2)
WINDOW, HIDDEN, FFN, HEADS, KV_HEADS, DIM, EPS, THETA = 8, 64, 96, 4, 2, 16, 1e-6, 10000.0
CONFIG: dict[str, Any] = {
    "model_type": "shared",
    "architectures": ["SharedForCausalLM"],
    "vocab_size": 384,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": len(SOURCES),
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention" if source == 2 else "full_attention" for source in SOURCES],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "kv_sources": list(SOURCES),
}
FAMILY = """
name = "shared"
extends = "qwen3"
[config]
only = { model_type = ["shared"] }
architectures = ["SharedForCausalLM"]
kv_source_layers = "kv_sources"
[gguf]
architectures = []
"""
MODULES = {
    "self_attn.q_proj": (HIDDEN, HEADS * DIM),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * DIM),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * DIM),
    "self_attn.o_proj": (HEADS * DIM, HIDDEN),
    "mlp.gate_proj": (HIDDEN, FFN),
    "mlp.up_proj": (HIDDEN, FFN),
    "mlp.down_proj": (FFN, HIDDEN),
}
PLACES = [
    (layer, module)
    for layer, source in enumerate(SOURCES)
    for module in MODULES
    if source == layer or module not in ("self_attn.k_proj", "self_attn.v_proj")
]
ALPHA = 8


def know_the_family(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Add the family to the built-in ones, until the patch is undone."""
    (folder / "shared.toml").write_text(FAMILY)
    known = families.load_families([folder])
    patch.setattr(families, "builtin_families", lambda: known)


def write_model(folder: Path, **changes: object) -> Path:
    """Write a Hugging Face directory with random weights; `changes` apply to its config."""
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) * 0.15

    tensors = {"model.embed_tokens.weight": normal(384, HIDDEN), "model.norm.weight": 1 + normal(HIDDEN)}
    tensors |= {f"model.layers.{layer}.{m}.weight": normal(*reversed(MODULES[m])) for layer, m in PLACES}
    for layer, source in enumerate(SOURCES):
        for norm, width in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            tensors[f"model.layers.{layer}.{norm}.weight"] = 1 + normal(width)
        for head in "qk" if source == layer else "q":
            tensors[f"model.layers.{layer}.self_attn.{head}_norm.weight"] = 1 + normal(DIM)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json(), "utf-8")
    return folder


def rank_of(layer: int, module: str, seed: int) -> int:
    """Return a rank of 1 to 6, so that layers differ in their panels."""
    return 1 + (7 * layer + 3 * list(MODULES).index(module) + 5 * seed) % 6


def write_adapter(folder: Path, seed: int, more: tuple[tuple[int, str], ...] = ()) -> Path:
    """Write a PEFT folder with all linears, with different ranks; `more` are linears that the model does not have."""
    folder.mkdir(parents=True)
    random, tensors = torch.Generator().manual_seed(seed), {}
    ranks = {place: rank_of(*place, seed) for place in (*PLACES, *more)}
    for (layer, module), rank in ranks.items():
        stem, (inputs, outputs) = f"base_model.model.model.layers.{layer}.{module}", MODULES[module]
        tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) * 0.2
        tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": ALPHA, "bias": "none"}
    config |= {"rank_pattern": {f"layers.{layer}.{module}": rank for (layer, module), rank in ranks.items()}}
    config["target_modules"] = [f"layers.{layer}.{module}" for layer, module in ranks]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Reference:
    """The model over a whole text. `weights`, by name, replace those of the folder."""

    def __init__(self, folder: Path, adapter: Path | None, weights: Mapping[str, Tensor] | None = None) -> None:
        self._weights: dict[str, Tensor] = load_file(folder / "model.safetensors") | dict(weights or {})
        self._adapter: dict[str, Tensor] = {} if adapter is None else load_file(adapter / "adapter_model.safetensors")

    def logits(self, ids: list[int]) -> Tensor:
        """Return logits [T, V]."""
        x = self._weights["model.embed_tokens.weight"][ids]
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, source in enumerate(SOURCES):
            normed = self._norm(x, f"layers.{layer}.input_layernorm")
            q = self._heads(self._linear(normed, layer, "self_attn.q_proj"), f"layers.{layer}.self_attn.q_norm")
            if source == layer:
                k = self._heads(self._linear(normed, layer, "self_attn.k_proj"), f"layers.{layer}.self_attn.k_norm")
                v = self._linear(normed, layer, "self_attn.v_proj").view(len(ids), KV_HEADS, DIM).transpose(0, 1)
                kept[layer] = k, v
            k, v = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in kept[source])
            at = torch.arange(len(ids))
            seen = at[None] <= at[:, None]
            if CONFIG["layer_types"][layer] == "sliding_attention":
                seen &= at[None] > at[:, None] - WINDOW
            scores = (q @ k.transpose(1, 2) / DIM**0.5).masked_fill(~seen, float("-inf"))
            attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
            x = x + self._linear(attended, layer, "self_attn.o_proj")
            normed = self._norm(x, f"layers.{layer}.post_attention_layernorm")
            gate, up = (self._linear(normed, layer, f"mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self._linear(F.silu(gate) * up, layer, "mlp.down_proj")
        return self._norm(x, "norm") @ self._weights["model.embed_tokens.weight"].T

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """Return the next tokens."""
        said = list(ids)
        for _ in range(count):
            said.append(int(self.logits(said)[-1].argmax()))
        return said[len(ids) :]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weights[f"model.{name}.weight"], EPS)

    def _linear(self, x: Tensor, layer: int, module: str) -> Tensor:
        y = x @ self._weights[f"model.layers.{layer}.{module}.weight"].T
        stem = f"base_model.model.model.layers.{layer}.{module}"
        if f"{stem}.lora_A.weight" in self._adapter:
            a, b = (self._adapter[f"{stem}.lora_{side}.weight"] for side in "AB")
            y = y + ALPHA / len(a) * (x @ a.T @ b.T)
        return y

    def _heads(self, x: Tensor, norm: str) -> Tensor:
        """Normalize heads and rotate them by their positions; return [heads, T, D]."""
        heads = self._norm(x.view(len(x), -1, DIM), norm).transpose(0, 1)
        angle = torch.outer(torch.arange(len(x)), THETA ** (-torch.arange(0, DIM, 2) / DIM)).repeat(1, 2)
        first, second = heads.chunk(2, dim=-1)
        return heads * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin()
