"""Random weights of a given shape: a configuration is enough to build and to serve."""

import json
from pathlib import Path

import pytest
import torch
from tiny_engine import GREEDY, offline_engine

from lorasrv.errors import ModelNotFound
from lorasrv.models.families import tensor_shapes
from lorasrv.models.loader import open_checkpoint
from lorasrv.text.tokenizer import Tokenizer

CONFIG = json.loads("""{
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128,
    "eos_token_id": 299}""")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_weights_have_the_shapes_of_the_configuration(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder), "dummy")
    for name, shape in tensor_shapes(checkpoint.spec).items():
        assert tuple(checkpoint.tensor(name).shape) == shape
    one, again, other = (checkpoint.tensor(f"model.layers.0.mlp.{x}_proj.weight") for x in ("gate", "gate", "up"))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert 0.015 < float(one.float().std()) < 0.025
    assert torch.equal(checkpoint.tensor("model.norm.weight"), torch.ones(64, dtype=torch.bfloat16))


def test_a_weight_longer_than_the_random_block_is_filled(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 40_000}))
    weight = open_checkpoint(str(folder), "dummy").tensor("model.embed_tokens.weight")
    assert bool(weight.abs().sum(dim=1).gt(0).all())
    assert len(weight[::1000].unique(dim=0)) == 40


def test_it_answers(folder: Path) -> None:
    with offline_engine(folder, load_format="dummy") as llm:
        assert len(llm.generate(["Hello"], GREEDY)[0].token_ids) == GREEDY.max_tokens


def test_bytes_are_tokens_where_there_is_no_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_source(open_checkpoint(str(folder / "config.json"), "dummy").tokenizer_source())
    assert tokenizer.decode(tokenizer.encode("Grüße, Żółć\n")) == "Grüße, Żółć\n"
    assert tokenizer.vocab_size == 300


def test_the_built_in_shape_and_what_has_none(tmp_path: Path) -> None:
    shapes = tensor_shapes(open_checkpoint("llama-3-8b", "dummy").spec)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 8_030_261_248
    with pytest.raises(ModelNotFound, match=r"has no config\.json and is not one of: llama-3-8b"):
        open_checkpoint(str(tmp_path), "dummy")
