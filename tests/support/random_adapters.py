"""Random adapters as PEFT saves them, with any options together, and what may have happened to a folder since."""

import json
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
VARIANTS = {"use_dora": [True]}, {"velora_config": [{"num_groups": 2}]}, {"monteclora_config": [{"num_samples": 2}]}
"""PEFT accepts one of them."""
Json = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def plain_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@dataclass(frozen=True)
class RandomAdapters:
    """Make adapters of a Hugging Face folder from a random generator."""

    directory: Path
    linears: tuple[str, ...]
    norms: tuple[str, ...]
    embedding: str

    @classmethod
    def of(cls, directory: Path) -> "RandomAdapters":
        named = list(plain_model(directory).named_modules())
        linears = tuple(name for name, own in named if isinstance(own, torch.nn.Linear) and name != "lm_head")
        [embedding] = (name for name, own in named if isinstance(own, torch.nn.Embedding))
        return cls(directory, linears, tuple(name for name, own in named if "Norm" in type(own).__name__), embedding)

    @property
    def short(self) -> list[str]:
        return list(dict.fromkeys(map(_last, self.linears)))

    def fields(self, rng: random.Random) -> Json:
        """Return options of LoraConfig, some of which PEFT may refuse together."""
        some = [rng.sample(self.short, rng.randint(1, len(self.short))), rng.sample(self.linears, 3)]
        ends = [_last(self.embedding), "lm_head"]
        a, b = rng.choice(self.short), rng.choice(self.short)
        targets: Any = rng.choice([*some, *some, "all-linear", rf".*\.[01]\..*({a}|{b})", rf"^(?!x).*\.(?:{a}|{b})$"])
        if isinstance(targets, list) and rng.random() < 0.4:
            targets = [*targets, rng.choice([*ends, self.embedding])]
        ids, others = rng.sample(range(384), rng.randint(1, 9)), rng.sample(range(384), 3)
        norm = rng.choice(self.norms)
        may: dict[str, Sequence[Any]] = {
            "use_rslora": [True],
            **rng.choice(VARIANTS),
            "lora_bias": [True],
            "bias": ["all", "lora_only"],
            "rank_pattern": [{self._pattern(rng): rng.choice([1, 6, 18]) for _ in range(3)}],
            "alpha_pattern": [{self._pattern(rng): rng.choice([1, 30, 2.5]) for _ in range(3)}],
            "exclude_modules": [[a], r".*\.1\..*", rf".*{b}"],
            "modules_to_save": [["norm"], [norm], ends, ends[:1], ends[1:], [_last(norm), "lm_head"], [self.embedding]],
            "trainable_token_indices": [
                ids,
                {ends[0]: ids},
                {"lm_head": ids},
                dict(zip(ends, (ids, others), strict=True)),
            ],
            "ensure_weight_tying": [True],
            "use_qalora": [True],
        }
        if isinstance(targets, list):
            may |= {"layers_to_transform": [0, [1], [0, 99]]}
        chosen = {name: rng.choice(values) for name, values in may.items() if rng.random() < 0.25}
        if "modules_to_save" in chosen:
            # Under another spelling of the same table, PEFT wraps one in the other.
            chosen.pop("trainable_token_indices", None)
        rank, alpha = rng.choice([1, 3, 4, 16, 17]), rng.choice([1, 7, 0.5, 32])
        return {"r": rank, "lora_alpha": alpha, "target_modules": targets} | chosen

    def _pattern(self, rng: random.Random) -> str:
        full, a, b = rng.choice(self.linears), rng.choice(self.short), rng.choice(self.short)
        return rng.choice(
            [a, full, f"^{full}", f"{a}|{b}", rf".*\.1\..*{a}", "lm_head", a[1:], full.replace(".", r"\.")]
        )

    def save(self, rng: random.Random, folder: Path) -> bool:
        """Write a random adapter; return whether PEFT accepts its options."""
        from peft import LoraConfig, get_peft_model

        fields = {"init_lora_weights": False, "task_type": "CAUSAL_LM"} | self.fields(rng)
        generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
        try:
            model = get_peft_model(plain_model(self.directory), LoraConfig(**fields))
        except (ValueError, TypeError):
            return False
        with torch.no_grad():
            for parameter in (own for own in model.parameters() if own.requires_grad):
                parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder, save_embedding_layers=rng.choice(["auto", "auto", True, False]))
        return True

    def damage(self, rng: random.Random, folder: Path) -> None:
        """Change the config or the tensors of a saved adapter."""
        changed: Callable[[Json], Json] = rng.choice(
            [
                lambda c: c | {"r": c["r"] + 1},
                lambda c: c | {name: not c[name] for name in [rng.choice(["use_rslora", "use_dora", "lora_bias"])]},
                lambda c: c | {"target_modules": rng.choice(["all-linear", self.short, self.short[:1]])},
                lambda c: c | {"alpha_pattern": {self._pattern(rng): 3}},
                lambda c: c | {rng.choice(["use_rslora", "modules_to_save", "trainable_token_indices"]): None},
                lambda c: c | {"modules_to_save": rng.choice([["norm"], ["lm_head"], []])},
                lambda c: c | {"bias": rng.choice(["all", "none"]), "layers_to_transform": [1]},
            ]
        )
        tensors = load_file(folder / WEIGHTS)
        name = rng.choice(sorted(tensors))
        table = plain_model(self.directory).get_output_embeddings().weight.detach().clone()
        others: Callable[[Tensors], Tensors] = rng.choice(
            [
                lambda t: t,
                lambda t: {own: tensor.to(torch.bfloat16) for own, tensor in t.items()},
                lambda t: {own: tensor.half() if "lora_B" in own else tensor for own, tensor in t.items()},
                lambda t: {own: tensor for own, tensor in t.items() if own != name},
                lambda t: {
                    own: tensor
                    for own, tensor in t.items()
                    if own.rpartition(".lora_")[0] != name.rpartition(".lora_")[0]
                },
                lambda t: t | {name: torch.zeros_like(t[name])},
                lambda t: t | {"base_model.model.lm_head.weight": table * 1.1},
                lambda t: t | {f"base_model.model.{self.embedding}.weight": table * 1.1},
                lambda t: t | {"base_model.model.lm_head.base_layer.weight": table * 1.1},
            ]
        )
        if rng.random() < 0.6:
            file = folder / CONFIG
            file.write_text(json.dumps(changed(json.loads(file.read_text()))))
        else:
            save_file(others(tensors) or {"x": torch.zeros(1)}, folder / WEIGHTS)


def loaded_whole(directory: Path, folder: Path) -> Any:
    """Return PEFT's model of an adapter; None if PEFT does not load it, or not all of it."""
    from peft import PeftConfig, get_peft_model
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    try:
        config = PeftConfig.from_pretrained(folder)
        model: Any = get_peft_model(plain_model(directory), config)
        tensors = load_peft_weights(str(folder), device="cpu")
        own = model.state_dict().keys()
        told = set_peft_model_state_dict(model, tensors)
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError):
        return None
    # PEFT saves these beside those that it reads.
    second = (".modules_to_save.weight", *([".trainable_tokens_delta"] if config.trainable_token_indices else []))
    is_whole = all(key.endswith(second) or _is_of_training(key) for key in told.unexpected_keys)
    is_whole &= not any(".lora_" in key and not _is_of_training(key) for key in told.missing_keys)
    # PEFT writes norms and biases over the base's, for all adapters, although the config does not name them.
    unnamed = ("norm.weight", "layernorm.weight", *([".bias"] if config.bias == "none" else []))
    is_whole &= not any(key in own and key.endswith(unnamed) for key in tensors)
    return model.eval() if is_whole else None


def quietly(call: Callable[..., Any], *args: Any) -> Any:
    """Call without PEFT's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args)


def _is_of_training(key: str) -> bool:
    return "velora" in key or "monteclora" in key


def _last(name: str) -> str:
    return name.rpartition(".")[2]
