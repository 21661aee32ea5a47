"""The tokenizer of a base model, from its small files alone: no torch, no weights."""

import contextlib
from pathlib import Path

from lorasrv.errors import CorruptModel, ModelNotFound, UnsupportedModel
from lorasrv.loaders.gguf_file import GgufFile
from lorasrv.loaders.gguf_tokenizer import gguf_tokenizer_source
from lorasrv.loaders.hf import hf_tokenizer_source, read_spec
from lorasrv.loaders.model_shape import gguf_family, locate
from lorasrv.tokenizer import Tokenizer
from lorasrv.tokenizer_source import TokenizerSource


def read_tokenizer(model: str) -> Tokenizer:
    """As a server of this model has it; spelled as `open_checkpoint` takes it.

    Raises:
        ModelNotFound, UnsupportedModel, CorruptModel: as `open_checkpoint`.
    """
    try:
        path, _ = locate(model)
        source = hf_tokenizer_source(path, read_spec(path)) if path.is_dir() else _gguf_source(path)
    except ModelNotFound:
        raise
    except OSError as e:
        raise CorruptModel(f"model {model!r} cannot be read: {e.strerror or type(e).__name__}") from None
    return Tokenizer.from_source(source)


def _gguf_source(path: Path) -> TokenizerSource:
    try:
        with contextlib.closing(GgufFile(path)) as file:
            return gguf_tokenizer_source(file.metadata, gguf_family(file)[1])
    except (CorruptModel, UnsupportedModel) as e:
        raise type(e)(f"{path.name}: {e}") from None
