"""Random weights of a given shape: a configuration is enough to build and to serve."""

import json
from pathlib import Path

import pytest
import torch

from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions
from lorasrv.errors import ModelNotFound
from lorasrv.llm import LLM
from lorasrv.models.families import tensor_shapes
from lorasrv.models.loader import open_checkpoint
from lorasrv.sampling_params import SamplingParams
from lorasrv.text.tokenizer import Tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "eos_token_id": 299,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_weights_have_the_shapes_of_the_configuration(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder), "dummy")
    for name, shape in tensor_shapes(checkpoint.spec).items():
        assert tuple(checkpoint.tensor(name).shape) == shape
    one, other = (f"model.layers.0.mlp.{which}_proj.weight" for which in ("gate", "up"))
    assert torch.equal(checkpoint.tensor(one), checkpoint.tensor(one))
    assert not torch.equal(checkpoint.tensor(one), checkpoint.tensor(other))
    assert 0.015 < float(checkpoint.tensor(one).float().std()) < 0.025
    assert torch.equal(checkpoint.tensor("model.norm.weight"), torch.ones(64, dtype=torch.bfloat16))


def test_a_weight_longer_than_the_random_block_is_filled(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 40_000}))
    weight = open_checkpoint(str(folder), "dummy").tensor("model.embed_tokens.weight")
    assert bool(weight.abs().sum(dim=1).gt(0).all())
    assert len(weight[::1000].unique(dim=0)) == 40


def test_it_answers(folder: Path) -> None:
    config = EngineConfig(ModelOptions(quantization="none", load_format="dummy"), MemoryOptions(pool_bytes=1 << 22))
    with LLM(str(folder), config) as llm:
        answer = llm.generate(["Hello"], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))[0]
    assert len(answer.token_ids) == 4


def test_bytes_are_tokens_where_there_is_no_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_source(open_checkpoint(str(folder / "config.json"), "dummy").tokenizer_source())
    assert tokenizer.decode(tokenizer.encode("Grüße, Żółć\n")) == "Grüße, Żółć\n"
    assert tokenizer.vocab_size == 300


def test_the_built_in_shape() -> None:
    spec = open_checkpoint("llama-3-8b", "dummy").spec
    count = sum(torch.Size(shape).numel() for shape in tensor_shapes(spec).values())
    assert count == 8_030_261_248


def test_what_has_no_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json and is not one of: llama-3-8b"):
        open_checkpoint(str(tmp_path), "dummy")
