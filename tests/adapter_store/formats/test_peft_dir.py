import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from store_kit import BASE, PREFIX, build, digest_of, problems_of

from adapter_store.errors import AdapterInvalid
from adapter_store.formats.mlx_dir import open_adapter_dir
from adapter_store.formats.peft_dir import digest_file, read_peft_dir
from adapter_store.validation.validate import check_files


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write_adapter(folder: str = ".") -> Path:
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps(build.config()))
        (path / "adapter_model.safetensors").write_bytes(build.file())
        return path

    return write_adapter


def test_a_folder_and_what_else_lies_there(write: Any) -> None:
    path = write()
    for name in ("rng_state.pth", "training_args.bin", "chat_template.jinja"):
        (path / name).write_bytes(b"\x80\x04")
    found = read_peft_dir(path)
    assert found.config == build.config()
    assert found.weights_path == path / "adapter_model.safetensors"
    assert found.ignored_files == ("chat_template.jinja", "rng_state.pth", "training_args.bin")
    assert found.subdirectory is None


def test_one_level_down(write: Any, tmp_path: Path) -> None:
    write("pirate")
    found = read_peft_dir(tmp_path)
    assert found.subdirectory == "pirate"
    assert found.weights_path == tmp_path / "pirate" / "adapter_model.safetensors"
    write("poet")
    message = problems_of(lambda: read_peft_dir(tmp_path))["several_adapters"].message
    assert "'pirate', 'poet'" in message


@pytest.mark.parametrize(
    ("files", "code"),
    [
        ({}, "missing_config"),
        ({"adapter_config.json": b"{}"}, "missing_weights"),
        ({"adapter_config.json": b"{}", "adapter_model.bin": b"\x80"}, "not_safetensors"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors.index.json": b"{}"}, "sharded_weights"),
        ({"adapter_config.json": b"{}", "adapters.safetensors": b""}, "mlx_adapter"),
        ({"adapters.safetensors": b""}, "mlx_adapter"),
        ({"adapter.gguf": b"GGUF"}, "gguf_adapter"),
        ({"adapter_config.json": b'{"r":1,"r":2}', "adapter_model.safetensors": b""}, "malformed_config"),
        ({"adapter_config.json": b" " * (1 << 21), "adapter_model.safetensors": b""}, "config_too_large"),
    ],
)
def test_what_is_no_adapter(files: dict[str, bytes], code: str, tmp_path: Path) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    assert list(problems_of(lambda: read_peft_dir(tmp_path))) == [code]


def test_not_a_folder(tmp_path: Path) -> None:
    assert "not_a_directory" in problems_of(lambda: read_peft_dir(tmp_path / "nothing"))


def test_digest_file_tells_how_far_it_is(tmp_path: Path) -> None:
    data = bytes(range(256)) * 10_000
    path = tmp_path / "f"
    path.write_bytes(data)
    steps: list[tuple[int, int]] = []
    assert digest_file(path, lambda done, total: steps.append((done, total))) == digest_of(data)
    assert steps == [(1 << 20, len(data)), (2 << 20, len(data)), (len(data), len(data))]
    assert digest_file(path) == digest_of(data)


Files = Mapping[str, bytes]
Tensors = dict[str, torch.Tensor]
PREFIX = "base_model.model.model.layers."
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def pickled() -> bytes:
    buffer = io.BytesIO()
    torch.save({"step": 100}, buffer)
    return buffer.getvalue()


def files(config: Mapping[str, Any] | None, weights: Tensors | None, name: str = "adapter_model.safetensors") -> Files:
    written = {} if config is None else {"adapter_config.json": json.dumps(config).encode()}
    return written if weights is None else {**written, name: save(weights, metadata={"format": "pt"})}


def below(folder: str, inside: Files) -> Files:
    return {f"{folder}/{name}": data for name, data in inside.items()}


def renamed(tensors: Tensors, *pairs: tuple[str, str]) -> Tensors:
    result = {}
    for name, tensor in tensors.items():
        for old, new in pairs:
            name = name.replace(old, new)
        result[name] = tensor
    return result


def trl_checkpoint() -> Files:
    pickles = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin")
    texts = ("trainer_state.json", "tokenizer.json", "chat_template.jinja", "README.md")
    return {
        **files(build.config(), build.tensors()),
        **dict.fromkeys(pickles, pickled()),
        **dict.fromkeys(texts, b"{}"),
    }


def unsloth() -> Files:
    config = build.config(
        base_model_name_or_path="unsloth/tiny-llama-unsloth-bnb-4bit",
        target_modules=r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp).*?(?:q_proj|v_proj).*?)|(?:\bmodel\.x)",
        auto_mapping={"base_model_class": "LlamaForCausalLM", "parent_library": "transformers", "unsloth_fixed": True},
    )
    return files(config, build.tensors())


def unsloth_new_words() -> Files:
    """embed_tokens and lm_head among the targets are moved to modules_to_save: whole copies in the file."""
    config = build.config(modules_to_save=["embed_tokens", "lm_head"])
    full = {
        "base_model.model.lm_head.weight": torch.ones(8, 32),
        "base_model.model.model.embed_tokens.weight": torch.ones(8, 32),
    }
    return files(config, build.tensors() | full)


def unsloth_vlm() -> Files:
    tensors = renamed(build.tensors(), ("model.model.layers", "model.model.language_model.layers"))
    return files(build.config(target_modules=r".*language_model.*\.(q_proj|v_proj)"), tensors)


def unsloth_vlm_sees() -> Files:
    stem = "base_model.model.model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"
    seeing = {f"{stem}.lora_A.weight": torch.ones(4, 32), f"{stem}.lora_B.weight": torch.ones(32, 4)}
    return files(build.config(), build.tensors() | seeing)


def axolotl() -> Files:
    config = build.config(
        r=4,
        target_modules=ATTENTION,
        rank_pattern={"k_proj": 2},
        alpha_pattern={"k_proj": 3},
        peft_version="0.21.2",
        use_rslora=True,
    )
    modules = tuple(f"self_attn.{name}" for name in ATTENTION)
    return files(config, build.tensors(rank=dict.fromkeys(modules, 4) | {"self_attn.k_proj": 2}, modules=modules))


def axolotl_added_tokens() -> Files:
    config = build.config(modules_to_save=["embed_tokens", "lm_head"])
    full = {"base_model.model.model.embed_tokens.weight": torch.ones(8, 32)}
    return {**files(config, build.tensors() | full), "added_tokens.json": b'{"<|im_start|>": 32000}'}


def llama_factory() -> Files:
    """The last state beside its checkpoints, each an adapter of its own."""
    own = files(build.config(), build.tensors())
    return {**own, **below("checkpoint-100", own), **below("checkpoint-200", own), "train_results.json": b"{}"}


def llama_factory_interrupted() -> Files:
    own = files(build.config(), build.tensors())
    return {**below("checkpoint-100", own), **below("checkpoint-200", own)}


def llama_factory_switches() -> Files:
    return files(build.config(use_dora=True, init_lora_weights="pissa_niter_16"), build.tensors())


def peft_named() -> Files:
    return below("pirate", files(build.config(), build.tensors()))


def fsdp_by_hand() -> Files:
    """A state dict gathered from FSDP around a compiled model, saved by hand."""
    tensors = renamed(
        build.tensors(),
        ("base_model.model.", "_orig_mod.base_model.model."),
        (".self_attn.", "._fsdp_wrapped_module.self_attn."),
        (".weight", ".default.weight"),
    )
    return files(build.config(), tensors)


def mlx() -> Files:
    halves = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b", "base_model.model.": ""}
    tensors = renamed({n: t.T.contiguous() for n, t in build.tensors().items()}, *halves.items())
    config = {
        "fine_tune_type": "lora",
        "lora_parameters": {"rank": 4, "scale": 2.0},
        "num_layers": 2,
        "model": "x/tiny-llama",
    }
    return {**files(config, tensors, "adapters.safetensors"), "0000100_adapters.safetensors": b""}


def mlx_without_config() -> Files:
    return files(None, build.tensors(), "adapters.safetensors")


def torchtune() -> Files:
    """Its Hugging Face checkpointer writes PEFT's names and a short config without the base."""
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA"}
    return {**files(config, build.tensors()), "adapter_model.pt": pickled(), "recipe_state.pt": pickled()}


def torchtune_own_names() -> Files:
    tensors = renamed(
        build.tensors(), (PREFIX, "layers."), ("self_attn", "attn"), ("lora_A", "lora_a"), ("lora_B", "lora_b")
    )
    return files(build.config(), tensors)


def mistral_finetune() -> Files:
    weights = {"layers.0.attention.wq.lora_A.weight": torch.ones(4, 32), "norm.weight": torch.ones(32)}
    return {**files(None, weights, "lora.safetensors"), "params.json": b"{}", "tokenizer.model.v3": b""}


def mistral_finetune_renamed() -> Files:
    halves = {"lora_A.weight": torch.ones(4, 32), "lora_B.weight": torch.ones(32, 4)}
    return files(build.config(), {f"layers.0.attention.wq.{half}": t for half, t in halves.items()})


def gguf() -> Files:
    return {"Mia-F16-LoRA.gguf": b"GGUF"}


def gguf_renamed() -> Files:
    return {**files(build.config(), None), "adapter_model.safetensors": b"GGUF\3\0\0\0" + bytes(64)}


def kohya() -> Files:
    stem = "lora_unet_down_blocks_0_attentions_0_proj_in"
    weights = {f"{stem}.lora_down.weight": torch.ones(4, 32), f"{stem}.alpha": torch.ones(1)}
    return files(build.config(), weights)


def diffusers() -> Files:
    weights = {"unet.down_blocks.0.attentions.0.to_q.lora_A.weight": torch.ones(4, 32)}
    return files(None, weights, "pytorch_lora_weights.safetensors")


def mergekit() -> Files:
    config = build.config(r=16, lora_alpha=16, target_modules=["q_proj", "v_proj", "embed_tokens", "lm_head"])
    stem = "base_model.model.model.embed_tokens.lora_embedding_"
    embedding = {f"{stem}A": torch.ones(16, 64), f"{stem}B": torch.ones(32, 16)}
    return files(config, build.tensors(rank=16) | embedding)


def old_peft() -> Files:
    """Before safetensors were the default."""
    return {**files(build.config(), None), "adapter_model.bin": pickled()}


@dataclass(frozen=True)
class Taken:
    """What is said about a folder that is taken: in `found` where it lay and what was done, the rest in the report."""

    modules: int = 4
    rank_max: int = 4
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    converted: bool = False
    subdirectory: str | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    codes: frozenset[str]
    words: str


def refused(words: str, *codes: str) -> Refused:
    return Refused(frozenset(codes), words)


CASES: dict[Callable[[Any], Files], Taken | Refused] = {
    trl_checkpoint: Taken(
        ignored=(
            "README.md",
            "chat_template.jinja",
            "optimizer.pt",
            "rng_state.pth",
            "scheduler.pt",
            "tokenizer.json",
            "trainer_state.json",
            "training_args.bin",
        )
    ),
    unsloth: Taken(warnings=("trained on 'tiny-llama-unsloth-bnb-4bit', served on 'tiny-llama': another",)),
    unsloth_new_words: refused("train again with modules_to_save=null", "unsupported_modules_to_save"),
    unsloth_vlm: Taken(
        notices=("names had language_model. removed (the language part of a multimodal model)",),
        warnings=("trained on the language part of a multimodal model",),
    ),
    unsloth_vlm_sees: refused("finetune_vision_layers=False", "unsupported_vision"),
    axolotl: Taken(modules=8),
    axolotl_added_tokens: refused("Merge it into the base", "unsupported_modules_to_save"),
    llama_factory: Taken(ignored=("checkpoint-100", "checkpoint-200", "train_results.json")),
    llama_factory_interrupted: refused("'checkpoint-100', 'checkpoint-200'; give one of them", "several_adapters"),
    llama_factory_switches: refused(
        "path_initial_model_for_weight_conversion", "unsupported_use_dora", "unsupported_init"
    ),
    peft_named: Taken(subdirectory="pirate"),
    fsdp_by_hand: Taken(
        notices=(
            "names had _orig_mod. removed (torch.compile)",
            "names had _fsdp_wrapped_module. removed (FSDP)",
            "names had the adapter's own name 'default' removed (a state dict as in memory)",
        )
    ),
    mlx: Taken(converted=True, ignored=("0000100_adapters.safetensors",)),
    mlx_without_config: refused("without it the scale is not known", "mlx_adapter"),
    torchtune: Taken(ignored=("adapter_model.pt", "recipe_state.pt")),
    torchtune_own_names: refused("exporter to Hugging Face", "trainer_names", "no_modules"),
    mistral_finetune: refused("mistral-finetune saved under its own names", "trainer_names"),
    mistral_finetune_renamed: refused("exporter to Hugging Face", "trainer_names", "no_modules"),
    gguf: refused("upload the PEFT folder it was made from", "gguf_adapter"),
    gguf_renamed: refused("is a GGUF file, not safetensors", "not_safetensors"),
    kohya: refused("image model's adapter", "not_a_language_model", "no_modules"),
    diffusers: refused("adapter of an image model", "not_a_language_model"),
    mergekit: refused("train again without embed_tokens and lm_head", "unsupported_embedding", "partial_adapter"),
    old_peft: refused("Pickles are never opened here", "not_safetensors"),
}


@pytest.mark.parametrize("made_by", CASES, ids=lambda maker: maker.__name__)
def test_what_a_trainer_leaves_behind(made_by: Callable[[Any], Files], tmp_path: Path) -> None:
    for name, data in made_by(build).items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    expected = CASES[made_by]
    if isinstance(expected, Refused):
        with pytest.raises(AdapterInvalid) as caught, open_adapter_dir(tmp_path) as found:
            check_files(found.config, found.weights_path, BASE, 16)
        assert {problem.code for problem in caught.value.problems} == expected.codes
        assert expected.words in str(caught.value)
        return
    with open_adapter_dir(tmp_path) as found:
        report = check_files(found.config, found.weights_path, BASE, 16).report
    assert (report.modules_matched, report.modules_expected) == (expected.modules, expected.modules)
    assert report.rank_max == expected.rank_max
    assert report.notices == expected.notices
    assert len(report.warnings) == len(expected.warnings), report.warnings
    assert all(text.startswith(start) for text, start in zip(report.warnings, expected.warnings, strict=True))
    assert bool(found.notices) == expected.converted
    assert (found.subdirectory, found.ignored_files) == (expected.subdirectory, expected.ignored)
