"""The tokenizer that the metadata of a GGUF file describes. No torch."""

from collections.abc import Mapping
from typing import Any

from lorasrv.errors import CorruptModel, UnsupportedModel
from lorasrv.models.spec import ModelSpec
from lorasrv.tokenizer_source import BpeVocabulary, TokenizerSource

_CONTROL, _USER_DEFINED = 3, 4


def gguf_tokenizer_source(meta: Mapping[str, Any], spec: ModelSpec) -> TokenizerSource:
    """Raises: UnsupportedModel, CorruptModel: it is no byte-level BPE, or what describes it is damaged."""
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
        eos_token_ids=spec.eos_token_ids,
        bos_token_id=spec.bos_token_id,
        add_bos=bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        add_eos=bool(meta.get("tokenizer.ggml.add_eos_token", False)),
        special=_special_tokens(meta, tokens),
    )


def _strings(meta: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = meta.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(type(item) is str for item in value):
        raise CorruptModel(f"the GGUF metadata has no list of strings tokenizer.ggml.{key}")
    return tuple(value)


def _special_tokens(meta: Mapping[str, Any], tokens: tuple[str, ...]) -> dict[str, str]:
    """bos_token, eos_token... -> text, as chat templates call them."""
    keys = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {short: meta.get(f"tokenizer.ggml.{key}_token_id") for key, short in keys.items()}
    return {f"{short}_token": tokens[i] for short, i in ids.items() if type(i) is int and 0 <= i < len(tokens)}
