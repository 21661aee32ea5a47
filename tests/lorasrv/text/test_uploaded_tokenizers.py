"""Uploaded tokenizers are read in a process of their own, which says the same as this one would."""

import asyncio
import json
import sys
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
    backend = Backend.from_str(base.description.decode())
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
    assert await read.added_tokens(lambda: good, base, "ann") == tokens
    with pytest.raises(AdapterInvalid) as told:
        await read.added_tokens(lambda: bad, base, "ann")
    assert told.value.problems == refused.value.problems


@pytest.mark.parametrize("command", [("false",), ("sh", "-c", "kill -9 $$"), ("no-such-program",)])
async def test_a_process_that_says_nothing(
    base: Tokenizer, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(uploaded_tokenizers, "COMMAND", command)
    with pytest.raises(EngineOverloaded, match=r"cannot be read now: .*; upload it and register again"):
        await UploadedTokenizers().added_tokens(lambda: b"x" * (1 << 20), base, "ann")


async def test_a_fault_in_the_process_is_logged(
    base: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uploaded_tokenizers, "COMMAND", (sys.executable, "-c", "raise LookupError('a fault')"))
    with pytest.raises(EngineOverloaded):
        await UploadedTokenizers().added_tokens(lambda: b"{}", base, "ann")
    assert "exit code 1" in caplog.text
    assert "LookupError: a fault" in caplog.text


async def test_a_signal_to_the_servers_terminal_does_not_end_the_process(
    base: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C lets the server answer its requests first."""
    says_session = "import json, os; print(json.dumps({'problems': None, 'tokens': os.getsid(0) == os.getpid()}))"
    monkeypatch.setattr(uploaded_tokenizers, "COMMAND", (sys.executable, "-c", says_session))
    assert await UploadedTokenizers().added_tokens(lambda: b"{}", base, "ann")


async def test_one_tokenizer_at_a_time_is_in_memory(base: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    in_memory: list[int] = []
    num_read = 0

    def read() -> bytes:
        nonlocal num_read
        num_read += 1
        return b"{}"

    async def asked(*_: bytes) -> dict[str, Any]:
        in_memory.append(num_read)
        await asyncio.sleep(0)
        return {"problems": None, "tokens": []}

    monkeypatch.setattr(uploaded_tokenizers, "_asked", asked)
    tokenizers = UploadedTokenizers()
    await asyncio.gather(*(tokenizers.added_tokens(read, base, "ann") for _ in range(3)))
    assert in_memory == [1, 2, 3]
