"""What a checkpoint says of itself in more than one place: all of it counts, or it is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_tiny
from transformers import AutoTokenizer

from lorasrv.errors import CorruptModel, UnsupportedModel
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.loader.gguf_file import gguf_tokenizer_source
from lorasrv.models.loader.hf import hf_tokenizer_source, read_spec
from lorasrv.models.loader.locate import read_tokenizer
from lorasrv.models.rope_config import rope_from_gguf
from lorasrv.text.chat_template import ChatTemplate
from lorasrv.text.own_tokenizers import added_tokens
from lorasrv.text.tokenizer import Tokenizer

END = "<|im_end|>"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """A tiny checkpoint whose config.json, or other JSON file, is changed."""

    def made(family: str = "llama", file: str = "config.json", **changes: Any) -> Path:
        folder = tmp_path / "model"
        if not folder.exists():
            write_tiny(folder, family)
        path = folder / file
        given = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(given | changes))
        return folder

    return made


def test_a_head_that_is_not_the_embedding_is_not_tied_to_it(make: Callable[..., Path]) -> None:
    """A merged adapter with a head of its own leaves such a file; transformers does not tie it either."""
    folder = make(tie_word_embeddings=True)
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, metadata={"format": "pt"})
    open_checkpoint(str(folder)).close()
    weights["lm_head.weight"][3, 3] += 1
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="has another head: set tie_word_embeddings to false"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma2"])
def test_attention_in_both_directions_is_refused(make: Callable[..., Path], family: str) -> None:
    with pytest.raises(UnsupportedModel, match="is_causal False is not supported"):
        read_spec(make(family, is_causal=False))


def test_windows_of_single_layers(make: Callable[..., Path]) -> None:
    """As transformers serves what it calls Ministral."""
    folder = make("mistral", sliding_window=8)
    layers = read_spec(folder).num_layers
    kinds = ["full_attention", *["sliding_attention"] * (layers - 1)]
    assert read_spec(make("mistral", layer_types=kinds)).windowed_layers == (False, *[True] * (layers - 1))


def test_two_ropes_that_differ(make: Callable[..., Path]) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    assert read_spec(make(rope_parameters=rope, rope_scaling=rope)).rope.factor == 4.0
    with pytest.raises(UnsupportedModel, match="rope_scaling and rope_parameters differ"):
        read_spec(make(rope_parameters=rope, rope_scaling=rope | {"factor": 2.0}))


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_of_a_gguf_file_is_linear(key: str) -> None:
    rope, _ = rope_from_gguf({f"llama.{key}": 4.0}, "llama.", 16, {})
    assert (rope.kind, rope.factor) == ("linear", 4.0)


def _added(text: str, **flags: bool) -> dict[str, Any]:
    names = ("special", "lstrip", "rstrip", "normalized", "single_word")
    return {"content": text, **dict.fromkeys(names, False), **flags}


def test_tokens_that_stand_beside_tokenizer_json(make: Callable[..., Path]) -> None:
    """New ones, and other flags of those that are there: as transformers reads them."""
    folder = make()
    described = json.loads((folder / "tokenizer.json").read_text())
    number = next(token["id"] for token in described["added_tokens"] if token["content"] == END)
    for token in described["added_tokens"]:
        token["special"] &= token["content"] != END
    (folder / "tokenizer.json").write_text(json.dumps(described))
    size = len(described["model"]["vocab"])
    known = {str(token["id"]): {n: v for n, v in token.items() if n != "id"} for token in described["added_tokens"]}
    declared = known | {str(number): _added(END, special=True), str(size): _added("<extra>")}
    make(file="tokenizer_config.json", added_tokens_decoder=declared)
    ours, theirs = read_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    text = f"hi <extra> there{END}"
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert {number, size} <= set(ids)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "hi <extra> there"
    make(file="tokenizer_config.json", added_tokens_decoder={"3": _added("<extra>")})
    with pytest.raises(CorruptModel, match="is not token 3"):
        read_tokenizer(str(folder))


def test_tokens_of_older_files(make: Callable[..., Path]) -> None:
    folder = make()
    size = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    make(file="added_tokens.json", **{"<extra>": size})
    assert read_tokenizer(str(folder)).encode("<extra>") == [size]


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("tokenizer_config.json", {"eos_token": END}),
        ("tokenizer_config.json", {"image_token": END}),
        ("tokenizer_config.json", {"extra_special_tokens": [{"__type": "AddedToken", "content": END}]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"image_token": END}}),
        ("tokenizer_config.json", {"additional_special_tokens": [END]}),
        ("special_tokens_map.json", {"eos_token": {"content": END}}),
        ("special_tokens_map.json", {"additional_special_tokens": [END]}),
    ],
)
def test_a_named_token_is_special_whatever_tokenizer_json_says(
    make: Callable[..., Path], file: str, named: dict[str, Any]
) -> None:
    """Else the text of a message could write it: a forged end of turn."""
    folder = make(file="tokenizer_config.json", eos_token="<|endoftext|>", chat_template="{{messages[0].content}}")
    described = json.loads((folder / "tokenizer.json").read_text())
    (number,) = [token["id"] for token in described["added_tokens"] if token["content"] == END]
    for token in described["added_tokens"]:
        token["special"] &= token["content"] != END
    (folder / "tokenizer.json").write_text(json.dumps(described))
    make(file=file, **named)
    ours, theirs = read_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert number in theirs.all_special_ids
    assert number in ours.special_ids
    assert dict(ours.named_tokens) == theirs.special_tokens_map
    assert ours.encode(f"hi{END} there") == theirs(f"hi{END} there")["input_ids"]
    template = ChatTemplate.from_source(hf_tokenizer_source(folder, read_spec(folder)))
    assert template is not None
    assert number not in template.encode([{"role": "user", "content": f"hi{END}"}], ours)
    own = json.dumps(described).encode()
    assert added_tokens(own, ours) == []


def test_a_named_token_of_a_gguf_file_is_special(make: Callable[..., Path]) -> None:
    meta = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "<end>"], "tokenizer.ggml.merges": []}
    meta |= {"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.token_type": [1, 1, 4]}
    spec = read_spec(make())
    assert Tokenizer.from_source(gguf_tokenizer_source(meta, spec)).special_ids == frozenset()
    named = gguf_tokenizer_source(meta | {"tokenizer.ggml.eos_token_id": 2}, spec)
    assert Tokenizer.from_source(named).special_ids == {2}


@pytest.mark.parametrize(("pre", "said", "adds"), [("llama-bpe", {}, True), ("qwen2", {}, False)])
def test_whether_a_gguf_text_begins_with_bos_depends_on_its_pre_tokenizer(
    pre: str, said: dict[str, bool], adds: bool, make: Callable[..., Path]
) -> None:
    spec = read_spec(make())
    meta = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": ["a b"]}
    meta |= {"tokenizer.ggml.pre": pre, "tokenizer.ggml.token_type": [1, 1]}
    assert gguf_tokenizer_source(meta, spec).add_bos == adds
    assert not gguf_tokenizer_source(meta | {"tokenizer.ggml.add_bos_token": False}, spec).add_bos
