"""Bases, and stores of adapters for them, of `bench_policies.py`: made once, under build/bench/policies.

The tiny base is a random llama of three layers, so that what is measured is the order of requests and not a model. Its
adapters, and those of the built-in base, are files as PEFT writes them: rank 8 on all linears, seeded by their number.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adapter_store.spec import AdapterKey, BaseShapes
from adapter_store.store import AdapterStore
from lorasrv.config import BUILTIN_MODEL, MemoryOptions, ModelOptions
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes

FOLDER = Path(__file__).parents[2] / "build" / "bench" / "policies"
TINY = "tiny"
RANK = 8
SPREAD = 0.05
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
TINY_CONFIG = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Base:
    """What is served. `page_bytes` of 16 tokens in all layers, `vocabulary` to draw prompts from."""

    name: str
    options: ModelOptions
    page_bytes: int
    vocabulary: range

    def memory(self, pages: int) -> MemoryOptions:
        return MemoryOptions(pool_bytes=pages * self.page_bytes)


def base_of(name: str) -> Base:
    """The tiny llama, which is made if it is not there, or the built-in base."""
    if name == BUILTIN_MODEL:
        return Base(name, ModelOptions(model=name), 2 * 192 * 16 * 2 * 30, range(100, 40_000))
    folder = FOLDER / TINY
    if not (folder / "tokenizer_config.json").exists():
        _make_tiny(folder)
    options = ModelOptions(model=str(folder), quantization="none", dtype="float32")
    return Base(name, options, 2 * 32 * 16 * 4 * 3, range(10, 384))


def _make_tiny(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY_CONFIG)).save_pretrained(folder)
    _make_tokenizer(folder / "tokenizer.json")
    names = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))


def _make_tokenizer(file: Path) -> None:
    """Bytes, and the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([], trainer)
    backend.save(str(file))


def open_store(base: Base, count: int) -> tuple[AdapterStore, list[AdapterKey]]:
    """A store with at least so many adapters for the base, and the keys of the first of them."""
    with closing(open_checkpoint(base.options.model)) as checkpoint:
        shapes = base_shapes(checkpoint.spec, checkpoint.name)
    folder = FOLDER / f"store-{base.name}"
    folder.mkdir(parents=True, exist_ok=True)
    store = AdapterStore(folder, shapes)
    known = {str(record.adapter_id): record.key for record in store.list_adapters()}
    return store, [known.get(name) or _register(store, name, i) for i, name in enumerate(names(count))]


def names(count: int) -> list[str]:
    return [f"p{number:03d}" for number in range(count)]


def _register(store: AdapterStore, name: str, number: int) -> AdapterKey:
    data = _weights_file(store.base, number)
    digest = hashlib.sha256(data).hexdigest()
    with store.open_blob(digest, len(data)) as upload:
        upload.write(data)
        upload.commit()
    targets = sorted({module.rpartition(".")[2] for module in store.base.modules})
    return store.register(name, {**CONFIG, "target_modules": targets}, digest).ref.key


def _weights_file(base: BaseShapes, number: int) -> bytes:
    """The adapter's safetensors file, in float32."""
    rng = np.random.default_rng(number)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    parts, end = [], 0
    for name, shape in _tensors(base):
        parts.append((rng.standard_normal(shape, dtype=np.float32) * np.float32(SPREAD)).tobytes())
        begin, end = end, end + len(parts[-1])
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _tensors(base: BaseShapes) -> Iterator[tuple[str, tuple[int, int]]]:
    for layer in range(base.num_layers):
        for module, (n_in, n_out) in base.modules.items():
            name = f"base_model.model.{base.layer_prefix}{layer}.{module}"
            yield f"{name}.lora_A.weight", (RANK, n_in)
            yield f"{name}.lora_B.weight", (n_out, RANK)
