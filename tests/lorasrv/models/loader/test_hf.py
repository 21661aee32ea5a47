"""Hugging Face directories: shards, tokenizers, and one clear error for every kind of damage."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lorasrv.errors import CorruptModel, ModelNotFound, UnsupportedModel
from lorasrv.models.loader import open_checkpoint, state_dict_fp32
from lorasrv.text.tokenizer import TokenizerSource

Tiny = dict[str, Callable[..., Path]]
Damage = Callable[[Path], object]
WEIGHTS, INDEX, STRAY = "model.safetensors", "model.safetensors.index.json", "model-9-of-9.safetensors"
NORM = "model.norm.weight"


@pytest.fixture
def llama_copy(llama_dir: Path, tmp_path: Path) -> Path:
    """A directory to damage."""
    return Path(shutil.copytree(llama_dir, tmp_path / "tiny-llama"))


def tokenizer_source(path: Path) -> TokenizerSource:
    with closing(open_checkpoint(str(path))) as checkpoint:
        return checkpoint.tokenizer_source()


def test_sharded_weights_equal_one_file(tiny_hf_checkpoints: Tiny) -> None:
    whole, sharded = (tiny_hf_checkpoints["qwen2"](shard_bytes=size) for size in (None, 100_000))
    assert len(list(sharded.glob("*.safetensors"))) > 2
    with closing(open_checkpoint(str(whole))) as one, closing(open_checkpoint(str(sharded))) as other:
        wanted, ours = state_dict_fp32(one), state_dict_fp32(other)
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    assert ours["lm_head.weight"] is ours["model.embed_tokens.weight"]


def test_one_file_wins_over_shards_beside_it(tiny_hf_checkpoints: Tiny, tmp_path: Path) -> None:
    """As in transformers, whose `save_pretrained` leaves the index of an earlier save."""
    make = tiny_hf_checkpoints["qwen2"]
    path = Path(shutil.copytree(make(shard_bytes=100_000), tmp_path / "both"))
    shutil.copy(make(seed=1) / "model.safetensors", path)
    for _ in range(2):
        expected = AutoModelForCausalLM.from_pretrained(path).state_dict()["model.norm.weight"]
        with closing(open_checkpoint(str(path))) as checkpoint:
            assert torch.equal(checkpoint.tensor("model.norm.weight"), expected)
        first_shard(path).unlink()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tensors_come_as_stored(tiny_hf_checkpoints: Tiny, dtype: str) -> None:
    with closing(open_checkpoint(str(tiny_hf_checkpoints["llama"](dtype=dtype)))) as checkpoint:
        assert checkpoint.tensor(NORM).dtype == getattr(torch, dtype)


def test_generation_config_adds_end_tokens(llama_copy: Path) -> None:
    (llama_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2, 5]}))
    with closing(open_checkpoint(str(llama_copy))) as checkpoint:
        assert checkpoint.spec.eos_token_ids == checkpoint.tokenizer_source().eos_token_ids == (2, 0, 5)


def test_chat_templates_by_name_and_in_a_file_of_their_own(llama_copy: Path) -> None:
    assert "im_start" in (tokenizer_source(llama_copy).chat_template or "")
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config = {"chat_template": named, "bos_token": {"content": "<b>"}, "pad_token": None}
    (llama_copy / "tokenizer_config.json").write_text(json.dumps(config))
    source = tokenizer_source(llama_copy)
    assert (source.chat_template, source.special) == ("D", {"bos_token": "<b>"})
    (llama_copy / "chat_template.jinja").write_text("from the file")
    assert tokenizer_source(llama_copy).chat_template == "from the file"


def test_a_directory_without_tokenizer_still_opens(llama_copy: Path) -> None:
    (llama_copy / "tokenizer.json").unlink()
    (llama_copy / "tokenizer_config.json").unlink()
    with (
        closing(open_checkpoint(str(llama_copy))) as checkpoint,
        pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"),
    ):
        checkpoint.tokenizer_source()


# Damage.


def first_shard(path: Path) -> Path:
    return sorted(path.glob("model-*.safetensors"))[0]


def in_index(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Changes where the index says that tensors are."""

    def apply(path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        change(index["weight_map"])
        (path / INDEX).write_text(json.dumps(index))

    return apply


def shard_lacks(path: Path) -> None:
    tensors = load_file(first_shard(path))
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, first_shard(path))


def shard_twice(path: Path) -> None:
    other = sorted(path.glob("model-*.safetensors"))[1]
    save_file(load_file(first_shard(path)) | load_file(other), other)


def swapped(names: dict[str, str]) -> None:
    first, other = next(iter(names)), next(name for name in names if names[name] != next(iter(names.values())))
    names[first], names[other] = names[other], names[first]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shard_lacks, r"model-00001-of-\d+\.safetensors lacks '.*', which model\.safetensors\.index\.json says"),
        (in_index(lambda n: n.update(x=next(iter(n.values())))), "lacks 'x', which model"),
        (in_index(lambda n: n.update(x=STRAY)), "lacks model-9-of-9.safetensors"),
        (in_index(lambda n: n.update(x=7)), "no weight_map of file names"),
        (lambda path: shutil.copy(first_shard(path), path / STRAY), "does not name model-9-of-9.safet"),
        (shard_twice, r"tensor '.*' is in two files: model-00001-of-\d+\.safetensors and model-00002-of"),
        (in_index(swapped), r"'.*' is in model-.*, but model\.safetensors\.index\.json says model"),
        (lambda path: first_shard(path).unlink(), "the model directory sharded lacks model-00001-of-"),
    ],
)
def test_damaged_shards(tiny_hf_checkpoints: Tiny, tmp_path: Path, damage: Damage, message: str) -> None:
    path = Path(shutil.copytree(tiny_hf_checkpoints["qwen2"](shard_bytes=100_000), tmp_path / "sharded"))
    damage(path)
    with pytest.raises(CorruptModel, match=message):
        open_checkpoint(str(path))


def remove(name: str) -> Damage:
    return lambda path: (path / name).unlink()


def write(name: str, text: str) -> Damage:
    return lambda path: (path / name).write_text(text)


def sharded_as(index: str) -> Damage:
    """Leaves an index in place of the weights."""

    def apply(path: Path) -> None:
        (path / WEIGHTS).rename(path / INDEX)
        (path / INDEX).write_text(index)

    return apply


def truncate(keep: int) -> Damage:
    return lambda path: (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:keep])


def norm_is(tensor: torch.Tensor | None) -> Damage:
    def apply(path: Path) -> None:
        tensors = load_file(path / WEIGHTS) | {NORM: tensor}
        save_file({name: t for name, t in tensors.items() if t is not None}, path / WEIGHTS)

    return apply


def more_layers(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 99}))


def test_what_nothing_reads_may_be_of_any_type(llama_copy: Path) -> None:
    weights = load_file(llama_copy / WEIGHTS)
    save_file(weights | {"model.masked_bias": torch.ones(3, dtype=torch.bool)}, llama_copy / WEIGHTS)
    open_checkpoint(str(llama_copy)).close()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (remove("config.json"), ModelNotFound, r"lacks config\.json"),
        (write("config.json", "{"), CorruptModel, r"config\.json is not valid JSON"),
        (write("config.json", "[]"), CorruptModel, r"config\.json is not a JSON object"),
        (write("config.json", "{}"), CorruptModel, "names no architectures"),
        (write("config.json", '{"architectures": ["XForCausalLM"]}'), UnsupportedModel, "'XForCausalLM'"),
        (write("generation_config.json", "nul"), CorruptModel, r"generation_config\.json is not valid JSON"),
        (remove(WEIGHTS), CorruptModel, r"lacks model\.safetensors"),
        (more_layers, CorruptModel, "claims 99 layers, but has 30 tensors"),
        (lambda path: (path / WEIGHTS).rename(path / "pytorch_model.bin"), UnsupportedModel, "convert them to safe"),
        (truncate(5), CorruptModel, r"model\.safetensors cannot be read"),
        (truncate(60_000), CorruptModel, r"model\.safetensors cannot be read"),
        (norm_is(None), CorruptModel, r"1 of 30 tensors are missing: model\.norm\.weight"),
        (norm_is(torch.ones(3)), CorruptModel, r"model\.norm\.weight is \[3\], not \[64\]"),
        (norm_is(torch.ones(64).long()), UnsupportedModel, "I64.*known: F32, F16, BF16"),
        (sharded_as("{}"), CorruptModel, "no weight_map"),
        (sharded_as('{"weight_map": {"a": "../x"}}'), CorruptModel, "no weight_map of file"),
        (sharded_as('{"weight_map": {"a": "b.safetensors"}}'), CorruptModel, "lacks b.safe"),
    ],
)
def test_damaged_directories(llama_copy: Path, damage: Damage, error: type[Exception], message: str) -> None:
    damage(llama_copy)
    with pytest.raises(error, match=message) as caught:
        open_checkpoint(str(llama_copy))
    assert str(llama_copy.parent) not in str(caught.value)
