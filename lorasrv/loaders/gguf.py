"""A GGUF file as a checkpoint: canonical names, Hugging Face's row order, dequantized to fp32 a tensor at a time."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorasrv.errors import CorruptModel, UnsupportedModel
from lorasrv.loaders.checkpoint import check_shapes
from lorasrv.loaders.ggml_types import decode, decode_codes
from lorasrv.loaders.gguf_file import GgufFile
from lorasrv.loaders.model_shape import gguf_family
from lorasrv.models.family import tensor_shapes
from lorasrv.models.rope_config import longrope_from_gguf
from lorasrv.models.spec import ModelSpec
from lorasrv.tokenizer_source import BpeVocabulary, TokenizerSource
from sgmv_kernels.ops import GroupCodes

_CONTROL, _USER_DEFINED = 3, 4
_ROPE_FACTORS, _SHORT_FACTORS = "rope_freqs.weight", "rope_factors_short.weight"


class GgufCheckpoint:
    """See `Checkpoint`.

    Raises:
        CorruptModel, UnsupportedModel: what `GgufFile` and `Family` raise, or tensors that do not fit the metadata.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = name or path.stem
        self._file = GgufFile(path)
        self._family, spec = gguf_family(self._file)
        self._prefix = f"{self._file.metadata.get('general.architecture')}."
        self.spec = self._with_rope_factors(spec)
        self._stored = {name: self._family.gguf_name(name) for name in tensor_shapes(self.spec)}
        found = {n: self._file.tensors[s].shape for n, s in self._stored.items() if s in self._file.tensors}
        check_shapes(self.spec, found)

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def tensor(self, name: str) -> Tensor:
        stored = self._stored[name]
        info = self._file.tensors[stored]
        weight = decode(self._file.raw(stored), info.type, info.shape)
        heads = self._family.permuted_heads(name, self.spec)
        return weight if heads is None else _split_halves(weight, heads)

    def codes(self, name: str) -> GroupCodes | None:
        stored = self._stored[name]
        info = self._file.tensors[stored]
        codes = decode_codes(self._file.raw(stored), info.type, info.shape)
        heads = self._family.permuted_heads(name, self.spec)
        if codes is None or heads is None:
            return codes
        return codes[_split_halves(torch.arange(info.shape[0]), heads)]

    def tokenizer_source(self) -> TokenizerSource:
        meta = self._file.metadata
        model = meta.get("tokenizer.ggml.model")
        if model != "gpt2":
            raise UnsupportedModel(
                f"GGUF tokenizer model {model!r:.60} is not supported; known: gpt2 (byte-level BPE); "
                "serve the model from its Hugging Face directory"
            )
        tokens = _strings(meta, "tokens")
        types = meta.get("tokenizer.ggml.token_type", [])
        template = meta.get("tokenizer.chat_template")
        if not isinstance(types, list) or not isinstance(template, str | None):
            raise CorruptModel("the GGUF metadata has a token_type that is no list, or a chat_template that is no text")
        return TokenizerSource(
            vocabulary=BpeVocabulary(
                tokens=tokens,
                merges=_strings(meta, "merges"),
                pre=str(meta.get("tokenizer.ggml.pre", "default")),
                control=tuple(i for i, kind in enumerate(types) if kind == _CONTROL),
                user_defined=tuple(i for i, kind in enumerate(types) if kind == _USER_DEFINED),
            ),
            chat_template=template,
            eos_token_ids=self.spec.eos_token_ids,
            bos_token_id=self.spec.bos_token_id,
            add_bos=bool(meta.get("tokenizer.ggml.add_bos_token", False)),
            add_eos=bool(meta.get("tokenizer.ggml.add_eos_token", False)),
            special=_special_tokens(meta, tokens),
        )

    def close(self) -> None:
        self._file.close()

    def _with_rope_factors(self, spec: ModelSpec) -> ModelSpec:
        """With what a file says about RoPE in tensors: llama3's scaling, or LongRoPE's within the original context."""
        if _SHORT_FACTORS in self._file.tensors:
            short = self._factors(_SHORT_FACTORS, spec)
            rope = longrope_from_gguf(spec.rope, self._file.metadata, self._prefix, short)
            return replace(spec, rope=rope, max_position=min(spec.max_position, rope.max_position or spec.max_position))
        if _ROPE_FACTORS in self._file.tensors:
            if spec.rope.kind != "default":
                raise UnsupportedModel(
                    f"tensor {_ROPE_FACTORS} beside RoPE scaling {spec.rope.kind!r} is not supported"
                )
            return replace(spec, rope=replace(spec.rope, kind="factors", factors=self._factors(_ROPE_FACTORS, spec)))
        if spec.rope.kind == "factors":
            raise CorruptModel(f"the GGUF file lacks the tensor {_SHORT_FACTORS} that its RoPE scaling needs")
        return spec

    def _factors(self, name: str, spec: ModelSpec) -> tuple[float, ...]:
        info, count = self._file.tensors[name], (spec.rope.dims or spec.head_dim) // 2
        if info.shape != (count,):
            raise CorruptModel(f"tensor {name} is {list(info.shape)}, not [{count}]")
        factors = decode(self._file.raw(name), info.type, info.shape).float().tolist()
        if not all(0 < factor < math.inf for factor in factors):
            raise CorruptModel(f"tensor {name} holds what is no positive number")
        return tuple(factors)


def _split_halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from rotated pairs (x0 y0 x1 y1...) to halves (x0 x1... y0 y1...), as Hugging Face rotates."""
    pairs = weight.view(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _strings(meta: dict[str, Any], key: str) -> tuple[str, ...]:
    value = meta.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(type(item) is str for item in value):
        raise CorruptModel(f"the GGUF metadata has no list of strings tokenizer.ggml.{key}")
    return tuple(value)


def _special_tokens(meta: dict[str, Any], tokens: tuple[str, ...]) -> dict[str, str]:
    """bos_token, eos_token... -> text, as chat templates call them."""
    keys = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {short: meta.get(f"tokenizer.ggml.{key}_token_id") for key, short in keys.items()}
    return {f"{short}_token": tokens[i] for short, i in ids.items() if type(i) is int and 0 <= i < len(tokens)}
