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
from lorasrv.text.own_tokenizers import BaseTokens, added_tokens
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
    assert added_tokens(own, BaseTokens.of(ours)) == []


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_named_tokens_that_the_vocabulary_lacks_get_the_ids_of_transformers(
    make: Callable[..., Path], file: str
) -> None:
    mask = {"__type": "AddedToken", **_added("<mask>", special=True, lstrip=True)}
    if file == "special_tokens_map.json":
        del mask["__type"]
    listed = {"mask_token": mask, "image_token": "<image>", "pad_token": "[PAD]"}
    make(file="tokenizer_config.json", extra_special_tokens=["<b>", "<a>"])
    folder = make(file=file, **listed)
    ours, theirs = read_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    text = "hi [PAD]there <mask> <a><b> <image>"
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    assert (dict(ours.named_tokens), ours.vocab_size) == (theirs.special_tokens_map, len(theirs))
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert {i for i in ids if i in ours.special_ids} == {
        theirs.convert_tokens_to_ids(t) for t in theirs.all_special_tokens
    } & {*ids}


def test_settings_of_a_tokenizer_that_tokenizer_json_contradicts(make: Callable[..., Path]) -> None:
    """Classes of transformers that build a tokenizer by themselves follow them; else tokenizer.json alone counts."""
    folder = make(file="tokenizer_config.json", add_prefix_space=True, tokenizer_class="PreTrainedTokenizerFast")
    ours, theirs = read_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("hello x") == theirs("hello x")["input_ids"]
    make(file="tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    assert AutoTokenizer.from_pretrained(folder)("hello x")["input_ids"] != ours.encode("hello x")
    with pytest.raises(UnsupportedModel, match=r"^tokenizer_config\.json: add_prefix_space True is not what tokenizer"):
        read_tokenizer(str(folder))
    make(file="tokenizer_config.json", add_prefix_space=False)
    assert read_tokenizer(str(folder)).encode("hello x") == ours.encode("hello x")
    make(file="tokenizer_config.json", split_special_tokens=True)
    assert AutoTokenizer.from_pretrained(folder)(END)["input_ids"] != ours.encode(END)
    with pytest.raises(UnsupportedModel, match="split_special_tokens is not supported, only false"):
        read_tokenizer(str(folder))


TURN = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}]
NAMED = {
    "default": "D{{ messages[0].content }}",
    "tool_use": "T{{ messages[0].content }}{{ tools | length }}",
    "rag": "R",
}


@pytest.mark.parametrize("where", ["folder", "list", "both"])
def test_named_templates_are_those_of_transformers(make: Callable[..., Path], where: str) -> None:
    """Files of their own win over tokenizer_config.json, and the one for tools is for conversations with tools."""
    folder = make()
    others = {name: text.replace("{", "?{", 1) for name, text in NAMED.items()}
    listed = [{"name": name, "template": text} for name, text in (NAMED if where == "list" else others).items()]
    make(file="tokenizer_config.json", chat_template=[] if where == "folder" else listed)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if where != "list":
        (folder / "additional_chat_templates").mkdir()
        for name, text in NAMED.items():
            (folder / f"additional_chat_templates/{name}.jinja").write_text(text)
    ours, theirs = _template(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    for tools, said in ((None, "Dhi"), (TOOLS, "Thi1")):
        assert ours.render(TURN, tools=tools) == said
        assert theirs.apply_chat_template(TURN, tools=tools, tokenize=False) == said
    assert "tools" in ours.variables


def test_named_templates_without_one_for_conversations_are_none(make: Callable[..., Path]) -> None:
    folder = make(file="tokenizer_config.json", chat_template="{{ messages[0].content }}")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/rag.jinja").write_text("R")
    assert _template(folder) is None
    with pytest.raises(ValueError, match="no default"):
        AutoTokenizer.from_pretrained(folder).apply_chat_template(TURN)


@pytest.mark.parametrize(
    "file", ["chat_template.jinja", "tokenizer_config.json", "additional_chat_templates/tool_use.jinja"]
)
def test_a_broken_template_names_its_file(make: Callable[..., Path], file: str) -> None:
    folder = make()
    if file == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        make(file=file, chat_template="a\n{% if %}")
    else:
        (folder / "chat_template.jinja").write_text("fine")
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text("a\n{% if %}")
    with pytest.raises(CorruptModel, match=rf"^{file}: the chat template is not valid Jinja: .* in line 2"):
        _template(folder)


def _template(folder: Path) -> ChatTemplate | None:
    return ChatTemplate.from_source(hf_tokenizer_source(folder, read_spec(folder)))


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
