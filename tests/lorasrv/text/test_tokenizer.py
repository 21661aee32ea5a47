"""Ids equal the published definitions, for the built-in GGUF file and for tokenizer.json directories."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tiny_checkpoints import tiny_tokenizer_json
from tiny_tokenizers import sentencepiece
from tokenizers import decoders, models, normalizers, pre_tokenizers

from lorasrv.errors import CorruptModel, InvalidRequest, UnsupportedModel
from lorasrv.models.loader import Checkpoint
from lorasrv.models.loader.locate import builtin_file, read_tokenizer
from lorasrv.text.gguf_vocabularies import BpeVocabulary
from lorasrv.text.tokenizer import Tokenizer, TokenizerJson, TokenizerSource

Tiny = dict[str, Callable[..., Path]]
ALPHABET = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))


@pytest.fixture(scope="module")
def oracle(builtin: Checkpoint, pytestconfig: pytest.Config) -> tokenizers.Tokenizer:
    """SmolLM2's published definition over the file's vocabulary, as the gguf package reads it."""
    fields = gguf.GGUFReader(builtin_file()).fields
    tokens, merges, types = (fields[f"tokenizer.ggml.{k}"].contents() for k in ("tokens", "merges", "token_type"))
    ids = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=[tuple(merge.split(" ")) for merge in merges]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == 3])
    return backend


def test_corpus_is_large_and_varied(corpus: list[str]) -> None:
    assert len(set(corpus)) == len(corpus) >= 200
    assert any("안녕" in text for text in corpus)
    assert any("😀" in text for text in corpus)


def test_builtin_ids_equal_the_published_definition(
    builtin_tokenizer: Tokenizer, oracle: tokenizers.Tokenizer, corpus: list[str]
) -> None:
    for text in corpus:
        ids = builtin_tokenizer.encode(text)
        assert ids == oracle.encode(text).ids, text
        assert builtin_tokenizer.decode(ids, False) == text
        for skip in (False, True):
            assert builtin_tokenizer.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_builtin_facts(builtin_tokenizer: Tokenizer) -> None:
    assert builtin_tokenizer.vocab_size == 49152
    assert (builtin_tokenizer.eos_token_ids, builtin_tokenizer.bos_token_id) == (frozenset({2}), 1)
    assert builtin_tokenizer.special_ids == set(range(17))
    assert builtin_tokenizer.token_id("<|im_end|>") == 2
    assert (builtin_tokenizer.token(2), builtin_tokenizer.token(49152)) == ("<|im_end|>", None)
    assert builtin_tokenizer.encode("<|im_end|>") == [2]
    assert builtin_tokenizer.decode([2, 49152, 60000]) == ""


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_directories_equal_transformers(tiny_hf_checkpoints: Tiny, corpus: list[str], family: str) -> None:
    from transformers import AutoTokenizer

    path = tiny_hf_checkpoints[family]()
    ours, theirs = read_tokenizer(str(path)), AutoTokenizer.from_pretrained(path)
    for text in corpus:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


BLANKS = normalizers.Replace(" ", "▁")
PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), BLANKS])


@pytest.mark.parametrize(
    ("normalizer", "longest"),
    [
        (None, 6),
        (BLANKS, 6),
        (PREPENDED, 6),
        (normalizers.Sequence([*PREPENDED, normalizers.NFC()]), 24),
        (normalizers.NFC(), 24),
        (normalizers.Replace("  ", "▁"), None),
        (normalizers.Replace(tokenizers.Regex(" +"), "▁"), None),
        (normalizers.Replace(" ", ""), None),
        (normalizers.Strip(), None),
    ],
)
def test_the_most_characters_of_one_token(normalizer: Any, longest: int | None) -> None:
    """A text of too many is not tokenized."""
    backend = tokenizers.Tokenizer.from_str(sentencepiece("ab").description.decode())
    backend.normalizer = normalizer
    tokenizer = Tokenizer.from_source(TokenizerSource(TokenizerJson(backend.to_str())))
    text = "a <0x41>é" * 100
    assert tokenizer.least_tokens(text) == (0 if longest is None else -(-len(text) // longest))
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


def test_white_space_that_tokens_take_is_none_of_a_text() -> None:
    described = json.loads(sentencepiece("ab").description)
    described["added_tokens"][-1]["rstrip"] = True
    tokenizer = Tokenizer.from_source(TokenizerSource(TokenizerJson(json.dumps(described))))
    text = "</s>" + " \u3000\n" * 1000 + "ab" * 3
    assert 1 < tokenizer.least_tokens(text) <= len(tokenizer.encode(text)) == 7


def test_unknown_characters_may_be_one_token() -> None:
    described = json.loads(sentencepiece("ab").description)
    described["normalizer"] = None
    described["model"] |= {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": False}
    tokenizer = Tokenizer.from_source(TokenizerSource(TokenizerJson(json.dumps(described))))
    assert len(tokenizer.encode("x" * 1000)) == 1
    assert tokenizer.least_tokens("x" * 1000) == 0


def vocabulary(pre: str, *extra: str, merges: tuple[str, ...] = (), control: tuple[int, ...] = ()) -> BpeVocabulary:
    return BpeVocabulary((*ALPHABET, *extra), merges, pre, control)


DIGIT_MERGES = ("1 2", "12 3", "123 4", "4 5")
DIGIT_TOKENS = ("12", "123", "1234", "45")


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["1234", "5"]),
        ("llama-bpe", ["123", "45"]),
        ("smaug-bpe", ["123", "45"]),
        ("qwen2", list("12345")),
        ("deepseek-r1-qwen", list("12345")),
        ("dbrx", ["123", "45"]),
        ("smollm", list("12345")),
        ("refact", list("12345")),
        ("tekken", list("12345")),
    ],
)
def test_pre_tokenizer_kinds_split_digits_in_their_own_ways(pre: str, pieces: list[str]) -> None:
    tokenizer = Tokenizer.from_source(TokenizerSource(vocabulary(pre, *DIGIT_TOKENS, merges=DIGIT_MERGES)))
    assert [tokenizer.token(i) for i in tokenizer.encode("12345")] == pieces


@pytest.mark.parametrize("pre", ["llama-bpe", "smaug-bpe"])
def test_llama3_takes_whole_words_before_merging(pre: str) -> None:
    """ignore_merges: a word that is a token is that token, even if no merge leads to it."""
    whole, plain = (Tokenizer.from_source(TokenizerSource(vocabulary(kind, "xyz"))) for kind in (pre, "gpt-2"))
    assert [whole.token(i) for i in whole.encode("xyz")] == ["xyz"]
    assert len(plain.encode("xyz")) == 3
    assert vocabulary(pre).adds_bos == (pre == "llama-bpe")


def test_tekken_begins_words_at_capitals() -> None:
    tokenizer = Tokenizer.from_source(
        TokenizerSource(vocabulary("tekken", "aB", "Ba", "BB", merges=("a B", "B a", "B B")))
    )
    assert [tokenizer.token(i) for i in tokenizer.encode("aBBaB")] == ["a", "B", "Ba", "B"]


@pytest.mark.parametrize("pre", ["qwen2", "deepseek-r1-qwen"])
def test_qwen2_composes_characters(pre: str) -> None:
    tokenizer = Tokenizer.from_source(TokenizerSource(vocabulary(pre)))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


@pytest.mark.parametrize("add_bos", [False, True])
@pytest.mark.parametrize("add_eos", [False, True])
def test_begin_and_end_tokens_as_the_metadata_asks(add_bos: bool, add_eos: bool) -> None:
    words = vocabulary("gpt-2", "<s>", "</s>", control=(256, 257))
    source = TokenizerSource(words, eos_token_ids=(257,), bos_token_id=256, add_bos=add_bos, add_eos=add_eos)
    tokenizer = Tokenizer.from_source(source)
    bare = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("a") == [256] * add_bos + bare + [257] * add_eos
    assert len(bare) == 1


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (
            vocabulary("viking"),
            UnsupportedModel,
            "pre-tokenizer 'viking' .*known: gpt-2, llama-bpe, smaug-bpe, qwen2, deepseek-r1-qwen, tekken, dbrx, "
            "smollm, refact",
        ),
        *(
            (vocabulary("gpt-2", "ab", merges=("a b", merge)), CorruptModel, rf"tokens; number 1, '{merge}', is")
            for merge in ("zz yy", "b", "a b ab", "b a")
        ),
        (vocabulary("gpt-2"), CorruptModel, "outside the vocabulary"),
        *(
            (TokenizerJson(text), CorruptModel, r"tokenizer\.json is not valid")
            for text in ("", "{", "[]", '{"model": {}}')
        ),
    ],
)
def test_what_makes_no_tokenizer(source: BpeVocabulary | TokenizerJson, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Tokenizer.from_source(TokenizerSource(source, bos_token_id=999, add_bos=True))
    with pytest.raises(error, match=rf"^some\.gguf: [^\n]*{message}[^\n]*\Z"):
        Tokenizer.from_source(TokenizerSource(source, bos_token_id=999, add_bos=True, file="some.gguf"))


@pytest.mark.parametrize("decoder", [{"type": "WordPiece", "prefix": "##", "cleanup": True}, None])
def test_unknown_decoder_is_refused_by_name(tiny_tokenizer_file: Path, decoder: dict[str, object] | None) -> None:
    content = json.dumps(json.loads(tiny_tokenizer_file.read_text("utf-8")) | {"decoder": decoder})
    name = decoder["type"] if decoder else "none"
    with pytest.raises(UnsupportedModel, match=f"decoder {name} is not supported; known: ByteLevel"):
        Tokenizer.from_source(TokenizerSource(TokenizerJson(content)))


def test_lone_surrogates_are_refused(builtin_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        builtin_tokenizer.encode("a\ud800b")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("encode", [Tokenizer.encode, Tokenizer.encode_with_offsets])
def test_others_run_while_a_long_text_is_encoded(builtin_tokenizer: Tokenizer, encode: Callable[..., object]) -> None:
    """Text from a request takes a second a megabyte: no stream could go on."""
    ticks, is_over = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not is_over.is_set():
            ticks += 1
            time.sleep(0.001)

    text = "Whatever the weather in Bergen, 1905 or today. " * 15_000
    other = threading.Thread(target=tick)
    other.start()
    before = ticks
    encode(builtin_tokenizer, text)
    during = ticks - before
    is_over.set()
    other.join()
    assert during > 20


def test_encoding_starts_no_threads_and_minds_no_fork(tiny_tokenizer_file: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from lorasrv.text.tokenizer import Tokenizer, TokenizerJson, TokenizerSource

tokenizer = Tokenizer.from_source(TokenizerSource(TokenizerJson(Path(sys.argv[1]).read_text("utf-8"))))
tokenizer.encode("a text")
tokenizer.encode_with_offsets("a text")
if (child := os.fork()) == 0:
    tokenizer.encode("a text")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(len(os.listdir("/proc/self/task")))
"""
    env = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    command = [sys.executable, "-c", script, str(tiny_tokenizer_file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_what_trainers_leave_in_the_file_cuts_and_fills_no_prompt() -> None:
    """As in transformers, which asks for each text anew."""
    plain = tokenizers.Tokenizer.from_str(tiny_tokenizer_json())
    trained = tokenizers.Tokenizer.from_str(tiny_tokenizer_json())
    trained.enable_truncation(4)
    trained.enable_padding(length=64)
    read = Tokenizer.from_source(TokenizerSource(TokenizerJson(trained.to_str())))
    text = "a text of more than four tokens"
    assert read.encode(text) == plain.encode(text).ids
    assert read.encode_with_offsets(text)[0] == plain.encode(text).ids
