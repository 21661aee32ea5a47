"""Uploaded tokenizers are read in a process of their own, which says the same as this one would."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tiny_checkpoints import tiny_tokenizer_json
from tokenizers import AddedToken as Added
from tokenizers import Tokenizer as Backend

from adapter_store.errors import AdapterInvalid
from lorasrv.errors import EngineOverloaded
from lorasrv.text import own_tokenizers, uploaded_tokenizers
from lorasrv.text.own_tokenizers import BaseTokens
from lorasrv.text.tokenizer import Tokenizer, TokenizerJson, TokenizerSource
from lorasrv.text.uploaded_tokenizers import UploadedTokenizers


@pytest.fixture(scope="module")
def base() -> Tokenizer:
    source = TokenizerSource(TokenizerJson(tiny_tokenizer_json()), special={"pad_token": "<|pad é|>"})
    return Tokenizer.from_source(source)


def uploaded(base: Tokenizer, change: Callable[[dict[str, Any]], object] = lambda _: None) -> bytes:
    backend = Backend.from_str(json.dumps(base.described()))
    backend.add_tokens([Added("<mood>"), Added("<|sad é|>", special=True, normalized=False)])
    described = json.loads(backend.to_str())
    change(described)
    return json.dumps(described).encode()


async def test_the_process_says_what_this_one_would(base: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    read, here = UploadedTokenizers(), BaseTokens.of(base)
    good, bad = uploaded(base), uploaded(base, lambda d: d.update(normalizer={"type": "NFD"}))
    tokens = own_tokenizers.added_tokens(good, here)
    assert [token["content"] for token in tokens] == ["<mood>", "<|sad é|>"]
    with pytest.raises(AdapterInvalid) as refused:
        own_tokenizers.added_tokens(bad, here)
    monkeypatch.setattr(uploaded_tokenizers, "added_tokens", lambda *_: pytest.fail("streams would pause meanwhile"))
    assert await read.added_tokens(good, base, "ann") == tokens
    with pytest.raises(AdapterInvalid) as told:
        await read.added_tokens(bad, base, "ann")
    assert told.value.problems == refused.value.problems


@pytest.mark.parametrize("command", [("false",), ("no-such-program",)])
async def test_a_process_that_says_nothing(
    base: Tokenizer, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(uploaded_tokenizers, "COMMAND", command)
    with pytest.raises(EngineOverloaded, match="cannot be read now"):
        await UploadedTokenizers().added_tokens(b"x" * (1 << 20), base, "ann")
