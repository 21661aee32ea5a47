"""SentencePiece vocabularies of GGUF files: texts become the tokens that the sentencepiece library makes of them."""

import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from adapter_store.spec import AddedToken
from lorasrv.errors import CorruptModel, UnsupportedModel
from lorasrv.models.loader.gguf_file import gguf_tokenizer_source
from lorasrv.models.spec import ModelSpec
from lorasrv.text.detokenizer import Detokenizer
from lorasrv.text.own_tokenizers import BaseTokens, added_tokens
from lorasrv.text.tokenizer import Tokenizer, TokenizerJson, TokenizerSource

SPEC = ModelSpec("llama", 1, 8, 16, 2, 1, 4, 400, 64, 1e-5, eos_token_ids=(2,), bos_token_id=1)
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
DOCS = (Path(__file__), Path(__file__).parents[3] / "README.md")
PIECES = [
    "a",
    " ",
    "  ",
    "▁",
    "the ",
    "<table>",
    "\n",
    "\t",
    "1234",
    "é",
    "日本",
    "🙂",
    "don't",
    "<0x41>",
    "ing",
    "\u0301",
]


def trained(corpus: Iterable[str], **options: Any) -> sentencepiece.SentencePieceProcessor:
    """A model that keeps every character of a text, as those of language models do."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in corpus for line in text.splitlines() if line]),
        model_writer=written,
        model_type="bpe",
        vocab_size=1000,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        character_coverage=0.98,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def metadata(model: sentencepiece.SentencePieceProcessor, adds_space_prefix: bool = True) -> dict[str, Any]:
    """What llama.cpp's converter writes of a model."""

    def type_of(i: int) -> int:
        kinds = {UNKNOWN: model.is_unknown, CONTROL: model.is_control, BYTE: model.is_byte}
        found = next((kind for kind, asks in kinds.items() if asks(i)), 1)
        return USER_DEFINED if model.id_to_piece(i) == "<table>" else found

    ids = range(model.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [type_of(i) for i in ids],
        "tokenizer.ggml.add_space_prefix": adds_space_prefix,
    }


def read(meta: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_source(gguf_tokenizer_source(meta, SPEC))


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no-prefix"])
def pair(request: pytest.FixtureRequest, corpus: list[str]) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    """The library's model and the tokenizer of its GGUF file: with a blank before each text, as Llama 2 and Mistral
    have it, and without, as Gemma."""
    model = trained(
        [*corpus, *map(Path.read_text, DOCS)], add_dummy_prefix=request.param, user_defined_symbols=["<table>"]
    )
    return model, read(metadata(model, request.param))


def check(model: sentencepiece.SentencePieceProcessor, tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token(i) for i in ids] == [model.id_to_piece(i) for i in model.encode(text)], text
    assert tokenizer.decode(ids) == model.decode(ids)
    stream = Detokenizer(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


def test_texts_have_the_tokens_of_sentencepiece(pair: Any, corpus: list[str]) -> None:
    model, tokenizer = pair
    for text in [*corpus, *PIECES, " a", "a  b   c", "x\n\n\ny"]:
        if not any(part in text for part in ("<table>", "<s>", "</s>", "<unk>")):
            check(model, tokenizer, text)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([piece for piece in PIECES if piece != "<table>"]) | st.text(max_size=4), max_size=8))
def test_any_text_has(pair: Any, pieces: list[str]) -> None:
    text = "".join(pieces)
    if text and not any(part in text for part in ("<table>", "<s>", "</s>", "<unk>", "\0")):
        check(*pair, text)


def from_json(tokenizer: Tokenizer, scheme: str | None) -> Tokenizer:
    """The tokenizer as a tokenizer.json has it, with Metaspace in place of its normalizer if there is a scheme."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.description.decode())
    if scheme is not None:
        backend.normalizer = None
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    return Tokenizer.from_source(TokenizerSource(TokenizerJson(backend.to_str()), eos_token_ids=(2,)))


def test_texts_behind_others_have_the_tokens_of_sentencepiece(pair: Any, corpus: list[str]) -> None:
    """Whatever puts the blank in front of a whole text: it is not behind another."""
    model, tokenizer = pair
    ways = [None, *(["first", "always"] if tokenizer.decoding.strip_start else ["never"])]
    for each in (tokenizer, *(from_json(tokenizer, way) for way in ways)):
        for text in [*corpus[::5], "", "a", "a b", "\n", "\n\na", '{"name": "clock"}']:
            if not any(part in text for part in ("<table>", "<s>", "</s>", "<unk>")):
                whole, front = (model.encode(behind) for behind in (f"x\t{text}", "x\t"))
                assert each.encode_behind(text) == whole[len(front) :], text
        ids = each.encode_behind("a<table>b")
        assert ids[: ids.index(model.piece_to_id("<table>"))] == [model.piece_to_id("a")]


def test_added_tokens_are_found_in_texts_and_begin_them(pair: Any) -> None:
    model, tokenizer = pair
    table, unknown = model.piece_to_id("<table>"), model.unk_id()
    ids = tokenizer.encode("a<table>b</s>")
    assert (ids[0], ids.count(table), ids[-1]) == (1, 1, 2)
    assert tokenizer.special_ids == {unknown, 1, 2}
    assert tokenizer.added_tokens == {"<unk>": True, "<s>": True, "</s>": True, "<table>": False}


def test_added_tokens_of_phi3_take_the_white_space_behind_them(pair: Any) -> None:
    model, _ = pair
    for architecture, is_taken in (("phi3", True), ("llama", False)):
        tokenizer = read(metadata(model, adds_space_prefix=False) | {"general.architecture": architecture})
        bare = tokenizer.encode("<table>a", add_special_tokens=False)
        assert (tokenizer.encode("<table> \n a", add_special_tokens=False) == bare) is is_taken
        assert tokenizer.encode("<s> a", add_special_tokens=False) != tokenizer.encode("<s>a", add_special_tokens=False)


def test_spare_rows_are_no_tokens(pair: Any) -> None:
    """Those behind the last token, which converters name: an adapter may have its own tokens there."""
    model, tokenizer = pair
    meta, first = metadata(model, tokenizer.decoding.strip_start), model.vocab_size()
    kinds = [5, USER_DEFINED, UNKNOWN]  # of converters of different ages
    spare = {"tokens": [f"[PAD{first + n}]" for n in range(3)], "scores": [-1e4] * 3, "token_type": kinds}
    padded = read({key: value + spare.get(key.rpartition(".")[2], type(value)()) for key, value in meta.items()})
    assert padded.has_ids_of(tokenizer)
    assert padded.encode(f"[PAD{first}]") == tokenizer.encode(f"[PAD{first}]")
    assert (padded.vocab_size, padded.decode([first], skip_special_tokens=False)) == (first, "")
    own = tokenizer.extended([AddedToken(first, "<mood>")]).description
    assert [token["id"] for token in added_tokens(own, BaseTokens.of(padded))] == [first]


@pytest.mark.parametrize("scores", [None, [], [1, 2], ["x"] * 1000, [math.nan] * 1000])
def test_scores_that_do_not_fit(pair: Any, scores: object) -> None:
    model, _ = pair
    with pytest.raises(CorruptModel, match=r"no tokenizer\.ggml\.scores with a number for each token"):
        read(metadata(model) | {"tokenizer.ggml.scores": scores})


def test_vocabularies_that_lose_a_part_of_a_text(pair: Any) -> None:
    model, _ = pair
    meta = metadata(model)
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    with pytest.raises(CorruptModel, match=r"tokens has '<s>' more than once"):
        read(meta | {"tokenizer.ggml.tokens": ["<s>" if token == "</s>" else token for token in tokens]})
    without_bytes = {"tokenizer.ggml.tokens": [token.removeprefix("<0x") or token for token in tokens]}
    assert model.unk_id() in read(meta | without_bytes).encode("\N{FLUSHED FACE}")
    ordinary = [1 if kind == UNKNOWN else kind for kind in types]
    with pytest.raises(CorruptModel, match="neither a token for each byte nor one for unknown characters"):
        read(meta | without_bytes | {"tokenizer.ggml.token_type": ordinary})
    with pytest.raises(UnsupportedModel, match=r"tokenizer model \['llama'\] is not supported"):
        read(meta | {"tokenizer.ggml.model": ["llama"]})
