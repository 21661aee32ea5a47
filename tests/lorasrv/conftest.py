"""The tiny models and engines of tests/support, as fixtures."""

from tiny_checkpoints import (  # noqa: F401
    VOCAB,
    adapter_dirs,
    builtin,
    builtin_source,
    builtin_tokenizer,
    corpus,
    gguf_writer,
    library,
    llama_dir,
    llama_gguf,
    model,
    store,
    tiny_hf_checkpoints,
    tiny_tokenizer_file,
)
from tiny_engine import alone, engine, keys, observers  # noqa: F401
