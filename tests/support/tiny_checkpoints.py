"""Fixtures: tiny Hugging Face checkpoints with random weights, GGUF files and adapters of them, the built-in base."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ggml_blocks import kind_of, quantize
from peft_adapters import peft_adapter
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from adapter_store.formats.peft_dir import read_peft_dir
from adapter_store.store import AdapterStore
from lorasrv.models.loader import Checkpoint, open_checkpoint
from lorasrv.models.loader.locate import read_model_shape
from lorasrv.models.lora_sites import base_shapes
from lorasrv.text.tokenizer import Tokenizer, TokenizerSource

DATA = Path(__file__).parents[1] / "lorasrv" / "data"
VOCAB = 384
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']}}"
    "{{'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@lru_cache(maxsize=1)
def corpus_lines() -> list[str]:
    lines = (DATA / "tokenizer_corpus.txt").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    """The committed strings on which tokenizers are compared."""
    return corpus_lines()


@pytest.fixture(scope="session")
def builtin() -> Iterator[Checkpoint]:
    """The built-in base model, opened once."""
    checkpoint = open_checkpoint("smollm2-135m")
    yield checkpoint
    checkpoint.close()


@pytest.fixture(scope="session")
def builtin_source(builtin: Checkpoint) -> TokenizerSource:
    return builtin.tokenizer_source()


@pytest.fixture(scope="session")
def builtin_tokenizer(builtin_source: TokenizerSource) -> Tokenizer:
    return Tokenizer.from_source(builtin_source)


@lru_cache(maxsize=1)
def tiny_tokenizer_json() -> str:
    """A real tokenizer.json: byte-level BPE of Qwen2's kind, trained on the corpus, with ChatML's special tokens."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    backend.train_from_iterator(corpus_lines(), trainers.BpeTrainer(vocab_size=VOCAB, **options))
    return str(backend.to_str(pretty=True))


@pytest.fixture(scope="session")
def tiny_tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_text(tiny_tokenizer_json(), "utf-8")
    return file


@pytest.fixture(scope="session", name="write_gguf")
def gguf_writer() -> Callable[..., Path]:
    """(Hugging Face directory, target file, type such as "Q4_1", or types by parts of names, extra metadata) -> the
    file, as llama.cpp converts it: q and k permuted for llama, 1 added to gemma's norms, norms and biases in fp32, one
    quantized type for the rest.
    """
    return write_gguf


def write_gguf(source: Path, target: Path, kind: str | Mapping[str, str], **extra: object) -> Path:
    import gguf
    from safetensors.torch import load_file

    config = json.loads((source / "config.json").read_text())
    architectures = {"llama": "llama", "mistral": "llama", "ministral3": "mistral3", "gemma3_text": "gemma3"}
    arch = architectures.get(config["model_type"], config["model_type"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(target, arch)
    _add_metadata(writer, config, source)
    for key, value in extra.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(source / "model.safetensors").items():
        values = tensor.float().numpy()
        module = name.split(".")[-2]
        if arch in ("llama", "mistral3", "smollm3", "granite") and module in heads:
            shape = values.shape
            values = values.reshape(heads[module], 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        of_matrix = kind if isinstance(kind, str) else kind_of(name, kind)
        wanted = of_matrix if values.ndim == 2 else "F32"
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None
        writer.add_tensor(stored, quantize(values, wanted), raw_dtype=gguf.GGMLQuantizationType[wanted])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add_metadata(writer: Any, config: dict[str, Any], source: Path) -> None:
    import gguf

    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    whole = rope.get("full_attention", rope)
    writer.add_rope_freq_base(whole["rope_theta"])
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if whole["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(whole["rope_type"]))
        writer.add_rope_scaling_factor(whole["factor"])
    if "original_max_position_embeddings" in whole:
        writer.add_rope_scaling_orig_ctx_len(whole["original_max_position_embeddings"])
    if "llama_4_scaling_beta" in whole:
        writer.add_attn_temperature_scale(whole["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(whole["mscale_all_dim"])
    if whole["rope_type"] == "longrope":
        ratio = config["max_position_embeddings"] / whole["original_max_position_embeddings"]
        scale = (1 + math.log(ratio) / math.log(whole["original_max_position_embeddings"])) ** 0.5
        writer.add_rope_scaling_attn_factors(scale)
        for kind in ("short", "long"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(whole[f"{kind}_factor"], np.float32))
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    if whole.get("partial_rotary_factor", 1.0) != 1.0:
        writer.add_rope_dimension_count(int(head_dim * whole["partial_rotary_factor"]))
    if config["model_type"] in ("gemma2", "gemma3_text", "phi3") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    model = json.loads((source / "tokenizer.json").read_text("utf-8"))["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(sorted(model["vocab"], key=model["vocab"].get))
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(model["vocab"]) - len(SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_chat_template(CHATML)


TinyCheckpoint = Callable[..., Path]
GEMMA: dict[str, object] = {
    "head_dim": 24,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "query_pre_attn_scalar": 40,
    "pad_token_id": 0,
}


COMMON: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}
ROPE_OF_MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"tie_word_embeddings": False, "sliding_window": 8, "head_dim": 24},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 24},
    "gemma": {"head_dim": 24, "num_key_value_heads": 1, "pad_token_id": 0},
    "gemma2": GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 20.0},
    "gemma3": GEMMA | {"sliding_window_pattern": 3},
    "ministral3": {"head_dim": 24, "rope_parameters": ROPE_OF_MINISTRAL, "pad_token_id": 0},
    "mpt": {"no_bias": True, "pad_token_id": 0},
    "phi3": {"pad_token_id": 0, "original_max_position_embeddings": 512},
    "smollm3": {"no_rope_layer_interval": 2, "pad_token_id": 0},
    "granite": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
        "rms_norm_eps": 0.02,
        "tie_word_embeddings": False,
    },
    "olmo2": {"pad_token_id": 0},
}
MPT_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "chat_template": CHATML,
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 512,
}


@pytest.fixture(scope="session")
def tiny_hf_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyCheckpoint]:
    """Family -> factory(arguments of `write_tiny`) -> a Hugging Face directory.

    The same arguments give the same directory: treat it as read-only, copy what you damage.
    """
    built: dict[str, Path] = {}

    def build(family: str, **changes: Any) -> Path:
        key = json.dumps([family, changes], sort_keys=True)
        if key not in built:
            built[key] = write_tiny(tmp_path_factory.mktemp(f"tiny-{family}-"), family, **changes)
        return built[key]

    return {family: partial(build, family) for family in FAMILIES}


def write_tiny(
    path: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shard_bytes: int | None = None,
    **changes: object,
) -> Path:
    """Write a Hugging Face directory: seeded random weights and the tokenizer; `changes` are of its config.

    llama has grouped heads and an untied head; mistral a sliding window of 8 tokens and a head_dim of its own; qwen2
    qkv biases and a tied head; qwen3 norms of heads; gemma one key head; gemma2 and gemma3 windows on some of 4 layers,
    gemma3 two thetas; ministral3 YaRN from 64 tokens on; mpt ALiBi, LayerNorm and no gate; phi3 fused modules; smollm3
    a layer without rotation; granite its four factors; olmo2 norms behind attention and MLP. `shard_bytes` splits the
    weights, `dtype` casts them.
    """
    import transformers

    stem = {"gemma3": "Gemma3Text", "smollm3": "SmolLM3"}.get(family, family.capitalize())
    common = {MPT_NAMES.get(key, key): value for key, value in COMMON.items()} if family == "mpt" else COMMON
    config = getattr(transformers, f"{stem}Config")(**{**common, **FAMILIES[family], **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{stem.removesuffix('Text')}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5).sub_(1.0 if family.startswith("gemma") else 0.0)
    size = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.to(getattr(torch, dtype)).save_pretrained(path, **size)
    # transformers would write what it took null for.
    nulls = {key: None for key, value in changes.items() if value is None}
    said = json.loads((path / "config.json").read_text("utf-8"))
    (path / "config.json").write_text(json.dumps(said | nulls, indent=2) + "\n", "utf-8")
    (path / "tokenizer.json").write_text(tiny_tokenizer_json(), "utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    return path


@pytest.fixture(scope="session")
def llama_dir(tiny_hf_checkpoints: dict[str, TinyCheckpoint]) -> Path:
    return tiny_hf_checkpoints["llama"](intermediate_size=96)


@pytest.fixture(scope="session")
def llama_gguf(llama_dir: Path, write_gguf: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(llama_dir, tmp_path_factory.mktemp("gguf") / "tiny.gguf", "F32")


@pytest.fixture(scope="session")
def model(tiny_hf_checkpoints: dict[str, TinyCheckpoint]) -> Path:
    """The tiny llama."""
    return tiny_hf_checkpoints["llama"]()


@pytest.fixture(scope="session")
def adapter_dirs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """PEFT's own adapters for it: `one`, `two`, `three`, of ranks 2, 5 and 8 on all linears."""
    folders = {name: tmp_path_factory.mktemp("adapters") / name for name in ("one", "two", "three")}
    for i, folder in enumerate(folders.values()):
        peft_adapter(model, folder, seed=i, r=2 + 3 * i)
    return folders


def filled_store(path: Path, model: Path, adapters: dict[str, Path]) -> Iterator[AdapterStore]:
    """Yield a store of a model that holds these adapters."""
    with AdapterStore(path, base_shapes(read_model_shape(str(model)).spec)) as store:
        for name, folder in adapters.items():
            peft = read_peft_dir(folder)
            store.register(name, peft.config, store.add_blob(peft.weights_path))
        yield store


@pytest.fixture
def store(model: Path, adapter_dirs: dict[str, Path], tmp_path: Path) -> Iterator[AdapterStore]:
    """A store of the tiny llama that holds them."""
    yield from filled_store(tmp_path / "store", model, adapter_dirs)


@pytest.fixture(scope="module")
def library(
    model: Path, adapter_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AdapterStore]:
    """The same for all tests of a module, which do not change it."""
    yield from filled_store(tmp_path_factory.mktemp("library") / "store", model, adapter_dirs)
