"""Tokenizers of adapters: what extends the base's is read, and all else is refused by name."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tiny_checkpoints import tiny_tokenizer_json
from tokenizers import AddedToken as Added
from tokenizers import Tokenizer as Backend

from adapter_store.errors import AdapterInvalid
from adapter_store.spec import AdapterKey, AddedToken
from adapter_store.validation.vocab_rows import MAX_ADDED_TOKENS
from lorasrv.text import own_tokenizers
from lorasrv.text.gguf_vocabularies import BpeVocabulary, SentencePieceVocabulary
from lorasrv.text.own_tokenizers import BaseTokens, OwnTokenizers, added_tokens
from lorasrv.text.tokenizer import Tokenizer, TokenizerJson, TokenizerSource

MIA, BOB, PLAIN = AdapterKey("a" * 64), AdapterKey("b" * 64), AdapterKey("c" * 64)
MOOD, SAD = AddedToken(384, "<mood>"), AddedToken(385, "<|sad|>", special=True, normalized=False)


@pytest.fixture(scope="module")
def base() -> Tokenizer:
    return Tokenizer.from_source(TokenizerSource(TokenizerJson(tiny_tokenizer_json())))


def extended() -> Backend:
    backend = Backend.from_str(tiny_tokenizer_json())
    backend.add_tokens([Added("<mood>"), Added("<|sad|>", special=True, normalized=False)])
    return backend


def test_added_tokens_are_read_and_texts_are_written_as_the_library_does(base: Tokenizer) -> None:
    backend = extended()
    found = added_tokens(backend.to_str().encode(), BaseTokens.of(base))
    assert [AddedToken(**token) for token in found] == [MOOD, SAD]
    own = base.extended([MOOD, SAD])
    for text in ("a <mood><|sad|>of\u00e9 <mood", "<|im_start|><mood>", ""):
        ids = backend.encode(text, add_special_tokens=False).ids
        assert own.encode(text, add_special_tokens=False) == ids
        assert own.decode(ids) == backend.decode(ids)
        assert base.encode(text, add_special_tokens=False) != ids or "mood>" not in text
    assert own.special_ids == base.special_ids | {385}
    assert own.vocab_size == base.vocab_size + 2


def test_own_tokens_of_one_number_are_spelled_apart(base: Tokenizer) -> None:
    """What the base spells is remembered once for all: thousands of adapters may have a tokenizer."""
    first, second = (base.extended([replace(MOOD, content=content)]) for content in ("<mood>", "<tone>"))
    for _ in range(2):
        assert (first.token(MOOD.id), second.token(MOOD.id), base.token(MOOD.id)) == ("<mood>", "<tone>", None)
        assert first.token(40) == second.token(40) == base.token(40) is not None
    assert first._spelled is second._spelled is base._spelled
    assert set(base._spelled) == {40}


def test_a_tokenizer_without_tokens_of_its_own_adds_none(base: Tokenizer) -> None:
    assert added_tokens(tiny_tokenizer_json().encode(), BaseTokens.of(base)) == []


def _change(change: Callable[[dict[str, Any]], object]) -> bytes:
    described = json.loads(extended().to_str())
    change(described)
    return json.dumps(described).encode()


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "moved": (lambda d: d["model"]["vocab"].update(a=5), "changes the base's own tokens: 'a' is"),
    "missing": (lambda d: d["model"]["vocab"].pop("a"), "'a' is .*here 'missing'"),
    "a longer vocabulary": (lambda d: d["model"]["vocab"].update(neu=384), "in its vocabulary that the base lacks"),
    "other merges": (lambda d: d["model"]["merges"].pop(), "other merges"),
    "no merges": (lambda d: d["model"].update(merges=[3, None]), "other merges"),
    "merges that are no list": (lambda d: d["model"].update(merges=7), "other merges"),
    "another normalizer": (lambda d: d.update(normalizer={"type": "NFD"}), "another normalizer"),
    "another decoder": (lambda d: d.update(decoder=None), "another decoder"),
    "an end token": (lambda d: d.update(post_processor={"type": "ByteLevel"}), "another post_processor"),
    "a gap": (lambda d: d["added_tokens"][-1].update(id=390), "as token 390; 385 follows"),
    "twice": (lambda d: d["added_tokens"].append(dict(d["added_tokens"][-1], id=386)), "the base lacks"),
    "found otherwise": (lambda d: d["added_tokens"][0].update(lstrip=True), "in another way"),
    "no vocabulary": (lambda d: d["model"].pop("vocab"), "has no vocabulary"),
    "an id of another type": (lambda d: d["added_tokens"][-1].update(id="385"), "without an id or a content"),
    "too long": (lambda d: d["added_tokens"][-1].update(content="x" * 129), "a content of 1 to 128 characters"),
    "half a character": (lambda d: d["added_tokens"][-1].update(content="\ud800"), "without an id or a content"),
    "a flag of another type": (lambda d: d["added_tokens"][-1].update(special="yes"), "flags that are not true"),
    "no list": (lambda d: d.update(added_tokens=3), "without an id or a content"),
    "too many": (
        lambda d: d["added_tokens"].extend({"id": 386 + i, "content": f"t{i}"} for i in range(MAX_ADDED_TOKENS)),
        f"names {MAX_ADDED_TOKENS + 2} tokens that the base lacks; {MAX_ADDED_TOKENS} are the most",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_extension_is_refused(base: Tokenizer, name: str) -> None:
    change, why = REFUSED[name]
    with pytest.raises(AdapterInvalid, match=why):
        added_tokens(_change(change), BaseTokens.of(base))


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b'{"a": 1, "a": 2}', b"[" * 100_000, b" " * (1 << 23)])
def test_what_is_no_tokenizer_is_refused(base: Tokenizer, text: bytes) -> None:
    with pytest.raises(AdapterInvalid):
        added_tokens(text, BaseTokens.of(base))


def test_a_base_from_gguf_knows_tokens_and_merges_only() -> None:
    """Its other parts follow from the name of its pre-tokenizer."""
    described = json.loads(tiny_tokenizer_json())
    vocab = described["model"]["vocab"]
    spelled = sorted(vocab, key=lambda token: vocab[token])
    merges = tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"])
    control = tuple(token["id"] for token in described["added_tokens"])
    base = Tokenizer.from_source(TokenizerSource(BpeVocabulary(tuple(spelled), merges, "qwen2", control)))
    found = added_tokens(extended().to_str().encode(), BaseTokens.of(base))
    assert [AddedToken(**token) for token in found] == [MOOD, SAD]
    with pytest.raises(AdapterInvalid, match="other merges"):
        added_tokens(_change(lambda d: d["model"]["merges"].pop()), BaseTokens.of(base))


def test_blanks_that_a_gguf_file_spells_otherwise_are_named() -> None:
    """As those of Gemma."""
    tokens = ("<unk>", "<s>", "a", "▁", "  ", *(f"<0x{byte:02X}>" for byte in range(256)))
    words = SentencePieceVocabulary(tokens, (0.0,) * len(tokens), (2, 3, 4), (0, 1), (4,), 0, adds_space_prefix=False)
    base = Tokenizer.from_source(TokenizerSource(words))
    as_published = base.description.decode().replace('"  "', '"▁▁"')
    with pytest.raises(
        AdapterInvalid, match=r"blanks of token 4 as U\+2581.* serve the base from its Hugging Face dir"
    ):
        added_tokens(as_published.encode(), BaseTokens.of(base))
    with pytest.raises(AdapterInvalid, match=r"own tokens: '  ' is 4, and here 'missing'"):
        added_tokens(as_published.replace("▁▁", "bb").encode(), BaseTokens.of(base))


def test_one_is_built_for_all_adapters_with_the_same_tokens(base: Tokenizer) -> None:
    asked: list[AdapterKey] = []

    def added(key: AdapterKey) -> list[AddedToken]:
        asked.append(key)
        return [] if key == PLAIN else [MOOD]

    own = OwnTokenizers(base, added)
    assert own.of(None) is None
    assert own.knows(None)
    assert not own.knows(PLAIN)
    assert (own.of(PLAIN), own.knows(PLAIN)) == (None, True)
    found: list[Tokenizer | None] = []
    threads = [threading.Thread(target=lambda: found.append(own.of(MIA))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(tokenizer) for tokenizer in [*found, own.of(BOB)]}) == 1
    assert set(asked) == {PLAIN, MIA, BOB}


def test_those_used_last_are_kept(base: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as have so many added tokens together, the base's counted with each."""
    monkeypatch.setattr(own_tokenizers, "MAX_KNOWN_TOKENS", 3 * (2 + len(base.added_tokens)) + 1)
    own = OwnTokenizers(base, lambda key: [AddedToken(384, f"<{key}>")])
    keys = [AdapterKey(f"{i:064}") for i in range(4)]
    for key in keys:
        own.of(key)
    assert [own.knows(key) for key in keys] == [False, True, True, True]


def test_vocabulary_and_merges_are_the_bases_own() -> None:
    """Not a copy, whose making would take as long as reading the base's file, for each adapter."""
    base = Tokenizer.from_source(TokenizerSource(TokenizerJson(tiny_tokenizer_json())))
    own = base.extended([MOOD, SAD])
    assert json.loads(own.description) == json.loads(extended().to_str())
    assert json.loads(base.description) == json.loads(tiny_tokenizer_json())
    own._backend.model.unk_token = "a"
    assert base._backend.model.unk_token == "a"
    longest = AddedToken(384, "<" + "a" * 198 + ">")
    text = longest.content * 9
    own = base.extended([longest])
    assert own.least_tokens(text) <= len(own.encode(text)) == 9 < base.least_tokens(text)


def test_tokens_that_are_not_the_next_ones_are_refused(base: Tokenizer) -> None:
    """Of a store that was imported."""
    for wrong in (AddedToken(400, "<x>"), AddedToken(384, "a")):
        with pytest.raises(AdapterInvalid, match="cannot be token"):
            base.extended([wrong])
