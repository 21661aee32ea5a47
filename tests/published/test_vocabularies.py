"""Published vocabularies in GGUF files: the ids of llama.cpp's test vectors, which Hugging Face's tokenizers made."""

import contextlib
import random
import re
from functools import cache
from pathlib import Path

import pytest

from lorasrv.errors import UnsupportedModel
from lorasrv.models.loader.gguf_file import GgufFile, gguf_tokenizer_source
from lorasrv.models.spec import ModelSpec
from lorasrv.sampling_params import TextOptions
from lorasrv.text.detokenizer import Detokenizer, token_id_bytes
from lorasrv.text.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[2] / "build" / "published" / "models"
# Baichuan's has no vectors.
BUILT = ("baichuan", "gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2", "refact")
# Refused by the name of their pre-tokenizer, but llama.cpp has one rule for it and for this one.
BUILT_AS = {"command-r": "smollm", "mpt": "gpt-2", "starcoder": "refact"}
# What the message about a refused one names: the pre-tokenizer, or a kind of tokenizer that has none.
PRE = ("command-r", "deepseek-coder", "deepseek-llm", "falcon", "mpt", "qwen35", "starcoder")
OTHERS = {"aquila": "default", "bert-bge": "bert", "gemma-4": "gemma4", "gpt-neox": "default", "nomic-bert-moe": "t5"}
REFUSED = {**dict(zip(PRE, PRE, strict=True)), **OTHERS}


def opened(name: str, pre: str | None = None) -> Tokenizer:
    with contextlib.closing(GgufFile(FOLDER / f"ggml-vocab-{name}.gguf")) as file:
        meta = {**file.metadata, **({"tokenizer.ggml.pre": pre} if pre else {})}
    bos, eos = (meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos"))
    num_tokens = len(meta["tokenizer.ggml.tokens"])
    spec = ModelSpec("llama", 1, 8, 16, 2, 1, 4, num_tokens, 64, 1e-5, eos_token_ids=(eos or 0,), bos_token_id=bos)
    return Tokenizer.from_source(gguf_tokenizer_source(meta, spec, name))


built = cache(lambda name: opened(name, BUILT_AS.get(name)))


def test_each_published_vocabulary_is_built_or_refused() -> None:
    published = [path.stem.removeprefix("ggml-vocab-") for path in FOLDER.glob("*.gguf")]
    assert sorted([*BUILT, *REFUSED]) == sorted(published)


@pytest.mark.parametrize(("name", "named"), REFUSED.items())
def test_others_are_refused_by_name(name: str, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"GGUF (pre-tokenizer|tokenizer model) '{re.escape(named)}' is not"):
        opened(name)


@pytest.mark.parametrize("name", [*BUILT[1:], *BUILT_AS])
def test_texts_have_the_ids_of_the_vectors(name: str) -> None:
    texts, ids = ((FOLDER / f"ggml-vocab-{name}.gguf.{kind}").read_bytes().decode() for kind in ("inp", "out"))
    pairs = list(zip(texts.split("\n__ggml_vocab_test__\n"), ids.split("\n"), strict=True))
    assert len(pairs) > 1
    for text, wanted in pairs:
        assert built(name).encode(text, add_special_tokens=False) == [*map(int, wanted.split())], repr(text)


@pytest.mark.parametrize("name", [*BUILT, *BUILT_AS])
def test_any_ids_stream_to_their_decoding(name: str) -> None:
    """Draw from all tokens, from those with a part of a character, and from added ones."""
    tokenizer, rng = built(name), random.Random(0)
    every = range(tokenizer.vocab_size)
    parts = [i for i in every if token_id_bytes(tokenizer, i).decode(errors="replace").count("\ufffd")]
    groups = (every, parts or every, [i for i in map(tokenizer.token_id, tokenizer.added_tokens) if i is not None])
    for _ in range(3000):
        ids = [rng.choice(rng.choice(groups)) for _ in range(rng.randrange(1, 14))]
        for skip in (True, False):
            detokenizer = Detokenizer(tokenizer, TextOptions(skip_special_tokens=skip))
            streamed = [*map(detokenizer.push, ids), detokenizer.flush()]
            assert "".join(streamed) == tokenizer.decode(ids, skip), ids
