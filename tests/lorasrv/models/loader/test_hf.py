"""Hugging Face directories: shards, tokenizers, and one clear error for every kind of damage."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorasrv.errors import CorruptModel, ModelNotFound, UnsupportedModel
from lorasrv.models.loader import open_checkpoint, state_dict_fp32

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
GgufWriter = Callable[..., Path]
Tiny = dict[str, Callable[..., Path]]
Damage = Callable[[Path], object]


@pytest.fixture
def llama_copy(llama_dir: Path, tmp_path: Path) -> Path:
    """A directory to damage."""
    return Path(shutil.copytree(llama_dir, tmp_path / "tiny-llama"))


def test_sharded_weights_equal_one_file(tiny_hf_checkpoints: Tiny) -> None:
    whole = tiny_hf_checkpoints["qwen2"]()
    sharded = tiny_hf_checkpoints["qwen2"](shard_bytes=100_000)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    a, b = open_checkpoint(str(whole)), open_checkpoint(str(sharded))
    ours, wanted = state_dict_fp32(b), state_dict_fp32(a)
    a.close()
    b.close()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    assert ours["lm_head.weight"] is ours["model.embed_tokens.weight"]


def _first_shard(path: Path) -> Path:
    return sorted(path.glob("model-*.safetensors"))[0]


def _change_index(path: Path, change: Callable[[dict[str, str]], object]) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def _shard_lacks(path: Path) -> None:
    tensors = load_file(_first_shard(path))
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, _first_shard(path))


def _shard_twice(path: Path) -> None:
    tensors = load_file(_first_shard(path))
    other = sorted(path.glob("model-*.safetensors"))[1]
    save_file(tensors | load_file(other), other)


def _swapped(names: dict[str, str]) -> None:
    first, other = next(iter(names)), next(name for name in names if names[name] != next(iter(names.values())))
    names[first], names[other] = names[other], names[first]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_shard_lacks, r"model-00001-of-\d+\.safetensors lacks '.*', which model\.safetensors\.index\.json says"),
        (lambda p: _change_index(p, lambda n: n.update(x=next(iter(n.values())))), "lacks 'x', which model"),
        (
            lambda p: _change_index(p, lambda n: n.update(x="model-9-of-9.safetensors")),
            "lacks model-9-of-9.safetensors",
        ),
        (lambda p: _change_index(p, lambda n: n.update(x=7)), "no weight_map of file names"),
        (lambda p: shutil.copy(_first_shard(p), p / "model-9-of-9.safetensors"), "does not name model-9-of-9.safet"),
        (_shard_twice, r"tensor '.*' is in two files: model-00001-of-\d+\.safetensors and model-00002-of"),
        (lambda p: _change_index(p, _swapped), r"'.*' is in model-.*, but model\.safetensors\.index\.json says model"),
        (lambda p: _first_shard(p).unlink(), "the model directory lacks model-00001-of-"),
    ],
)
def test_damaged_shards(tiny_hf_checkpoints: Tiny, tmp_path: Path, damage: Damage, message: str) -> None:
    path = Path(shutil.copytree(tiny_hf_checkpoints["qwen2"](shard_bytes=100_000), tmp_path / "sharded"))
    damage(path)
    with pytest.raises(CorruptModel, match=message):
        open_checkpoint(str(path))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tensors_come_as_stored(tiny_hf_checkpoints: Tiny, dtype: str) -> None:
    checkpoint = open_checkpoint(str(tiny_hf_checkpoints["llama"](dtype=dtype)))
    assert checkpoint.tensor("model.norm.weight").dtype == getattr(torch, dtype)
    checkpoint.close()


def test_generation_config_adds_end_tokens(llama_copy: Path) -> None:
    (llama_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2, 5]}))
    checkpoint = open_checkpoint(str(llama_copy))
    checkpoint.close()
    assert checkpoint.spec.eos_token_ids == (2, 0, 5)
    assert checkpoint.tokenizer_source().eos_token_ids == (2, 0, 5)


def test_chat_template_file_wins(llama_copy: Path) -> None:
    checkpoint = open_checkpoint(str(llama_copy))
    assert "im_start" in (checkpoint.tokenizer_source().chat_template or "")
    (llama_copy / "chat_template.jinja").write_text("from the file")
    assert checkpoint.tokenizer_source().chat_template == "from the file"
    checkpoint.close()


def test_named_chat_templates_use_the_default(llama_copy: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (llama_copy / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": named, "bos_token": {"content": "<b>"}, "pad_token": None})
    )
    checkpoint = open_checkpoint(str(llama_copy))
    source = checkpoint.tokenizer_source()
    checkpoint.close()
    assert (source.chat_template, source.special) == ("D", {"bos_token": "<b>"})


def test_a_directory_without_tokenizer_still_opens(llama_copy: Path) -> None:
    (llama_copy / "tokenizer.json").unlink()
    (llama_copy / "tokenizer_config.json").unlink()
    checkpoint = open_checkpoint(str(llama_copy))
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        checkpoint.tokenizer_source()
    checkpoint.close()


def remove(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def write(name: str, text: str) -> Damage:
    return lambda path: (path / name).write_text(text)


def truncate(name: str, keep: int) -> Damage:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:keep])


def resave(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def apply(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return apply


def pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def more_layers(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 99}))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (remove("config.json"), ModelNotFound, r"lacks config\.json"),
        (write("config.json", "{"), CorruptModel, r"config\.json is not valid JSON"),
        (write("config.json", "[]"), CorruptModel, r"config\.json is not a JSON object"),
        (write("config.json", "{}"), CorruptModel, "names no architectures"),
        (write("config.json", '{"architectures": ["XForCausalLM"]}'), UnsupportedModel, "'XForCausalLM'"),
        (write("generation_config.json", "nul"), CorruptModel, r"generation_config\.json is not valid JSON"),
        (remove("model.safetensors"), CorruptModel, r"lacks model\.safetensors"),
        (more_layers, CorruptModel, "claims 99 layers, but has 30 tensors"),
        (pickled, UnsupportedModel, "convert them to safetensors"),
        (truncate("model.safetensors", 5), CorruptModel, r"model\.safetensors cannot be read"),
        (truncate("model.safetensors", 60_000), CorruptModel, r"model\.safetensors cannot be read"),
        (resave(lambda t: t.pop(NORM)), CorruptModel, r"1 of 30 tensors are missing: model\.norm\.weight"),
        (resave(lambda t: t.update({NORM: torch.ones(3)})), CorruptModel, r"model\.norm\.weight is \[3\], not \[64\]"),
        (resave(lambda t: t.update({NORM: torch.ones(64).long()})), UnsupportedModel, "I64.*known: F32, F16, BF16"),
        (write("model.safetensors.index.json", "{}"), CorruptModel, "no weight_map"),
        (write("model.safetensors.index.json", '{"weight_map": {"a": "../x"}}'), CorruptModel, "no weight_map of file"),
        (write("model.safetensors.index.json", '{"weight_map": {"a": "b.safetensors"}}'), CorruptModel, "lacks b.safe"),
    ],
)
def test_damaged_directories(llama_copy: Path, damage: Damage, error: type[Exception], message: str) -> None:
    damage(llama_copy)
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(str(llama_copy))
    assert str(llama_copy.parent) not in str(caught.value)
