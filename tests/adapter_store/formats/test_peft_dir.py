"""Adapter folders as PEFT saves them, and as each trainer leaves them: taken, or refused with the reason."""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from store_kit import BASE, PREFIX, Tensors, build, digest_of, problems_of

from adapter_store.errors import AdapterInvalid
from adapter_store.formats import peft_dir
from adapter_store.formats.adapter_dir import open_adapter_dir
from adapter_store.formats.peft_dir import digest_file, read_peft_dir
from adapter_store.validation.validate import check_files

Files = dict[str, bytes]
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def files(config: Mapping[str, Any] | None, weights: Tensors | None, name: str = WEIGHTS) -> Files:
    written = {} if config is None else {CONFIG: json.dumps(config).encode()}
    return written if weights is None else {**written, name: save(weights, metadata={"format": "pt"})}


def below(folder: str, inside: Files) -> Files:
    return {f"{folder}/{name}": data for name, data in inside.items()}


def write(folder: Path, inside: Files) -> Path:
    for name, data in inside.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return folder


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    result = {}
    for name, tensor in tensors.items():
        for old, new in pairs:
            name = name.replace(old, new)
        result[name] = tensor
    return result


def pickled() -> bytes:
    buffer = io.BytesIO()
    torch.save({"step": 100}, buffer)
    return buffer.getvalue()


OWN = files(build.config(), build.tensors())


def test_a_folder_and_what_else_lies_there(tmp_path: Path) -> None:
    others = ("chat_template.jinja", "rng_state.pth", "training_args.bin")
    found = read_peft_dir(write(tmp_path, OWN | dict.fromkeys(others, b"\x80\x04")))
    assert (found.config, found.weights_path) == (build.config(), tmp_path / WEIGHTS)
    assert (found.ignored_files, found.subdirectory) == (others, None)


def test_one_level_down(tmp_path: Path) -> None:
    found = read_peft_dir(write(tmp_path, below("pirate", OWN)))
    assert (found.subdirectory, found.weights_path) == ("pirate", tmp_path / "pirate" / WEIGHTS)
    write(tmp_path, below("poet", OWN))
    assert "'pirate', 'poet'" in problems_of(lambda: read_peft_dir(tmp_path))["several_adapters"].message


@pytest.mark.parametrize(
    ("inside", "code"),
    [
        ({}, "missing_config"),
        ({CONFIG: b"{}"}, "missing_weights"),
        ({CONFIG: b"{}", "adapter_model.bin": b"\x80"}, "not_safetensors"),
        ({CONFIG: b"{}", f"{WEIGHTS}.index.json": b"{}"}, "sharded_weights"),
        ({CONFIG: b"{}", "adapters.safetensors": b""}, "mlx_adapter"),
        ({"adapters.safetensors": b""}, "mlx_adapter"),
        ({"adapter.gguf": b"GGUF"}, "gguf_adapter"),
        ({CONFIG: b'{"r":1,"r":2}', WEIGHTS: b""}, "malformed_config"),
        ({CONFIG: b" " * (1 << 21), WEIGHTS: b""}, "config_too_large"),
    ],
)
def test_what_is_not_an_adapter(inside: Files, code: str, tmp_path: Path) -> None:
    assert list(problems_of(lambda: read_peft_dir(write(tmp_path, inside)))) == [code]


def test_not_a_folder(tmp_path: Path) -> None:
    assert "not_a_directory" in problems_of(lambda: read_peft_dir(tmp_path / "nothing"))


def test_digest_file_tells_how_far_it_is(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    path = write(tmp_path, {"f": data}) / "f"
    steps: list[tuple[int, int]] = []
    assert digest_file(path, lambda done, total: steps.append((done, total))) == digest_of(data) == digest_file(path)
    assert steps == [(1 << 20, len(data)), (2 << 20, len(data)), (len(data), len(data))]


@dataclass(frozen=True)
class Taken:
    """What is said about a folder that is taken: in `found` where it lay and what was done, the rest in the report."""

    modules: int = 4
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    converted: bool = False
    subdirectory: str | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    words: str
    codes: frozenset[str]


def refused(words: str, *codes: str) -> Refused:
    return Refused(words, frozenset(codes))


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ATTENTION_MODULES = tuple(f"self_attn.{name}" for name in ATTENTION)
TRL_OTHERS = (
    "README.md", "chat_template.jinja", "optimizer.pt", "rng_state.pth", "scheduler.pt", "tokenizer.json",
    "trainer_state.json", "training_args.bin"
)  # fmt: skip
WITH_ENDS = replace(BASE, ends={"lm_head": (32, 8), "model.embed_tokens": (8, 32)}, embedding="model.embed_tokens")
FULL_COPIES = build.config(modules_to_save=["embed_tokens", "lm_head"])
EMBEDDING = {"base_model.model.model.embed_tokens.weight": torch.ones(8, 32)}
HEAD = {"base_model.model.lm_head.weight": torch.ones(8, 32)}
PAIR = {"lora_A.weight": torch.ones(4, 32), "lora_B.weight": torch.ones(32, 4)}
MLX_TENSORS = renamed(
    {n: t.T.contiguous() for n, t in build.tensors().items()},
    ("lora_A.weight", "lora_a"), ("lora_B.weight", "lora_b"), ("base_model.model.", "")
)  # fmt: skip
MLX_CONFIG = {
    "fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 2.0}, "num_layers": 2, "model": "x/tiny-llama"
}  # fmt: skip


def of(weights: Tensors, **changes: Any) -> Files:
    return files(build.config(**changes), weights)


def with_stem(stem: str) -> Tensors:
    return {f"{stem}.{half}": tensor for half, tensor in PAIR.items()}


TRAINERS: dict[str, tuple[Files, Taken | Refused]] = {
    "trl checkpoint": (OWN | dict.fromkeys(TRL_OTHERS, pickled()), Taken(ignored=TRL_OTHERS)),
    "unsloth": (
        of(
            build.tensors(),
            base_model_name_or_path="unsloth/tiny-llama-unsloth-bnb-4bit",
            target_modules=r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp).*?(?:q_proj|v_proj).*?)"
            r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|mlp)\.(?:(?:q_proj|v_proj)))",
            auto_mapping={"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True}
        ),
        Taken(warnings=("trained on 'tiny-llama-unsloth-bnb-4bit', served on 'tiny-llama': another",))
    ),
    # embed_tokens and lm_head among the targets are moved to modules_to_save: whole copies in the file.
    "unsloth, new words": (
        files(FULL_COPIES, build.tensors() | HEAD | EMBEDDING),
        Taken(
            notices=(
                "holds a trained copy of model.embed_tokens: rows that differ from the base's are served",
                "holds a trained copy of lm_head: rows that differ from the base's are served",
            )
        )
    ),
    "unsloth, vlm": (
        of(
            renamed(build.tensors(), ("model.model.layers", "model.model.language_model.layers")),
            target_modules=r".*language_model.*\.(q_proj|v_proj)"
        ),
        Taken(
            notices=("names had language_model. removed (the language part of a multimodal model)",),
            warnings=("trained on the language part of a multimodal model",)
        )
    ),
    "unsloth, vlm with vision": (
        of(
            build.tensors()
            | with_stem("base_model.model.model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj")
        ),
        refused("finetune_vision_layers=False", "unsupported_vision")
    ),
    "axolotl": (
        of(
            build.tensors(dict.fromkeys(ATTENTION_MODULES, 4) | {"self_attn.k_proj": 2}, ATTENTION_MODULES),
            target_modules=ATTENTION, rank_pattern={"k_proj": 2}, alpha_pattern={"k_proj": 3}, use_rslora=True,
            peft_version="0.21.2"
        ),
        Taken(modules=8)
    ),
    "axolotl, added tokens": (
        files(FULL_COPIES, build.tensors() | EMBEDDING) | {"added_tokens.json": b'{"<|im_start|>": 32000}'},
        refused("names lm_head, and 1 such modules have no tensors", "missing_saved_modules")
    ),
    # The last state beside its checkpoints, each an adapter of its own.
    "llama factory": (
        {**OWN, **below("checkpoint-100", OWN), **below("checkpoint-200", OWN), "train_results.json": b"{}"},
        Taken(ignored=("checkpoint-100", "checkpoint-200", "train_results.json"))
    ),
    "llama factory, interrupted": (
        below("checkpoint-100", OWN) | below("checkpoint-200", OWN),
        refused("'checkpoint-100', 'checkpoint-200'; give one of them", "several_adapters")
    ),
    "llama factory, switches": (
        of(build.tensors(), use_dora=True, init_lora_weights="pissa_niter_16"),
        refused("path_initial_model_for_weight_conversion", "unsupported_init")
    ),
    "peft, named": (below("pirate", OWN), Taken(subdirectory="pirate")),
    "peft, LoHa": (
        files(
            {"peft_type": "LOHA", "r": 4, "alpha": 8, "rank_dropout": 0.1, "target_modules": ["q_proj"]},
            {f"{PREFIX}0.self_attn.q_proj.hada_w1_a": torch.ones(32, 4)}
        ),
        refused("save_as_lora() turns some other types into LoRA", "unsupported_peft_type")
    ),
    "peft, wrapped twice": (
        of({f"base_model.model.{name}": tensor for name, tensor in build.tensors().items()}),
        refused("call get_peft_model once", "wrapped_twice", "no_modules")
    ),
    "trl, shards of ZeRO-3": (
        of({name: torch.zeros(0) for name in build.tensors()}), refused("gather them and save it again", "empty_tensor")
    ),
    "trl, ZeRO-3 without any": (of({}), refused("gather them and save it again", "no_tensors")),
    # A state dict gathered from FSDP around a compiled model, saved by hand.
    "fsdp by hand": (
        of(
            renamed(
                build.tensors(),
                ("base_model.model.", "_orig_mod.base_model.model."),
                (".self_attn.", "._fsdp_wrapped_module.self_attn."),
                (".weight", ".default.weight")
            )
        ),
        Taken(
            notices=(
                "names had _orig_mod. removed (torch.compile)",
                "names had _fsdp_wrapped_module. removed (FSDP)",
                "names had the adapter's own name 'default' removed (a state dict as in memory)"
            )
        )
    ),
    "mlx": (
        files(MLX_CONFIG, MLX_TENSORS, "adapters.safetensors") | {"0000100_adapters.safetensors": b""},
        Taken(converted=True, ignored=("0000100_adapters.safetensors",))
    ),
    "mlx without config": (
        files(None, build.tensors(), "adapters.safetensors"),
        refused("without it the scale is not known", "mlx_adapter")
    ),
    # Its Hugging Face checkpointer writes PEFT's names and a short config without the base.
    "torchtune": (
        files({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA"}, build.tensors())
        | {"adapter_model.pt": pickled(), "recipe_state.pt": pickled()},
        Taken(ignored=("adapter_model.pt", "recipe_state.pt"))
    ),
    "torchtune, own names": (
        of(
            renamed(
                build.tensors(),
                (PREFIX, "layers."), ("self_attn", "attn"), ("lora_A", "lora_a"), ("lora_B", "lora_b")
            )
        ),
        refused("exporter to Hugging Face", "trainer_names", "no_modules")
    ),
    "mistral-finetune": (
        files(None, {"norm.weight": torch.ones(32)}, "lora.safetensors") | {"params.json": b"{}"},
        refused("mistral-finetune saved under its own names", "trainer_names")
    ),
    "mistral-finetune, renamed": (
        of(with_stem("layers.0.attention.wq")), refused("exporter to Hugging Face", "trainer_names", "no_modules")
    ),
    "gguf": ({"Mia-F16-LoRA.gguf": b"GGUF"}, refused("upload the PEFT folder it was made from", "gguf_adapter")),
    "gguf, renamed": (
        files(build.config(), None) | {WEIGHTS: b"GGUF\3\0\0\0" + bytes(64)},
        refused("is a GGUF file, not safetensors", "not_safetensors")
    ),
    "kohya": (
        of({f"lora_unet_down_blocks_0_proj_in.{part}": torch.ones(4) for part in ("lora_down.weight", "alpha")}),
        refused("image model's adapter", "not_a_language_model", "no_modules")
    ),
    "diffusers": (
        files(None, {"unet.x.to_q.lora_A.weight": torch.ones(4, 32)}, "pytorch_lora_weights.safetensors"),
        refused("adapter of an image model", "not_a_language_model")
    ),
    "mergekit": (
        of(
            build.tensors(rank=16)
            | {f"base_model.model.model.embed_tokens.lora_embedding_{half}": torch.ones(16, 16) for half in "BC"},
            r=16, lora_alpha=16, target_modules=["q_proj", "v_proj", "embed_tokens", "lm_head"]
        ),
        refused("train again without embed_tokens", "unsupported_embedding", "missing_half", "partial_adapter")
    ),
    # Before safetensors were the default.
    "old peft": (
        files(build.config(), None) | {"adapter_model.bin": pickled()},
        refused("Pickles are never opened here", "not_safetensors")
    )
}  # fmt: skip


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_a_trainer_leaves_behind(trainer: str, tmp_path: Path) -> None:
    inside, expected = TRAINERS[trainer]
    write(tmp_path, inside)
    if isinstance(expected, Refused):
        with pytest.raises(AdapterInvalid) as caught, open_adapter_dir(tmp_path) as found:
            check_files(found.config, found.weights_path, WITH_ENDS, 16)
        assert {problem.code for problem in caught.value.problems} == expected.codes
        assert expected.words in str(caught.value)
        return
    with open_adapter_dir(tmp_path) as found:
        report = check_files(found.config, found.weights_path, WITH_ENDS, 16).report
    assert (report.modules_matched, report.modules_expected) == (expected.modules, expected.modules)
    assert (report.rank_max, report.notices) == (4, expected.notices)
    assert len(report.warnings) == len(expected.warnings), report.warnings
    assert all(text.startswith(start) for text, start in zip(report.warnings, expected.warnings, strict=True))
    assert bool(found.notices) == expected.converted
    assert (found.subdirectory, found.ignored_files) == (expected.subdirectory, expected.ignored)


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        (b'{"added_tokens": [{"id": 9}]}', True),
        (b'{"added_tokens": [{"id": 8}]}', False),
        *((text, False) for text in (b"{}", b"[]", b"not JSON", b"[" * 9999, b'{"added_tokens": [7, {}]}')),
    ],
)
def test_a_tokenizer_is_taken_if_it_adds_tokens(tmp_path: Path, text: bytes, is_taken: bool) -> None:
    """To a base that has nine; trainers save one in any case."""
    found = read_peft_dir(write(tmp_path, files(build.config(), build.tensors()) | {"tokenizer.json": text}))
    taken = found.with_tokenizer(9)
    assert taken.tokenizer == (text if is_taken else None)
    assert taken.ignored_files == (() if is_taken else ("tokenizer.json",))


def test_a_tokenizer_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_dir, "MAX_TOKENIZER_BYTES", 8)
    found = read_peft_dir(write(tmp_path, files(build.config(), build.tensors()) | {"tokenizer.json": b"[1, 2, 3]"}))
    assert "more than 8 bytes" in problems_of(lambda: found.with_tokenizer(9))["unsupported_tokenizer"].message
