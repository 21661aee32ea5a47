"""Decode token ids to text incrementally: only whole characters are returned, and the total equals decoding at once."""

import codecs
from dataclasses import replace
from functools import cache, lru_cache
from typing import Protocol

from lorasrv.sampling_params import PLAIN_TEXT, TextOptions
from lorasrv.text.tokenizer import Decoding, Tokenizer


class Detokenizer:
    """Decode one growing sequence with constant work per token."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions = PLAIN_TEXT) -> None:
        self.options = options
        self._tokenizer = tokenizer
        self._skipped = options.hidden(tokenizer.special_ids)
        decoding = tokenizer.decoding
        self._stream = _stream(decoding if options.strip_start else replace(decoding, strip_start=False))

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now certain. Ids outside the vocabulary have no text."""
        if token_id in self._skipped or (token := self._tokenizer.token(token_id)) is None:
            return ""
        return self._stream.push(token)

    def flush(self) -> str:
        """Return the remaining text; an unfinished character becomes U+FFFD."""
        return self._stream.flush()

    def num_owed(self, token_id: int) -> int:
        """Return how many characters of earlier tokens are still to be returned before those of the next token.

        If bytes turn out not to be text, earlier results were too small for the tokens among them, and it grows.
        """
        return self._stream.num_owed(None if token_id in self._skipped else self._tokenizer.token(token_id))


def token_id_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes of a token, possibly part of a character; b"" outside the vocabulary.

    Includes the space that some tokenizers strip from the beginning of a text.
    """
    token = tokenizer.token(token_id)
    return b"" if token is None else token_bytes(token, tokenizer.decoding)


def token_bytes(token: str, decoding: Decoding) -> bytes:
    """Return the bytes that a token, as the vocabulary spells it, adds to a text."""
    if decoding.kind == "byte_level":
        return _token_bytes(token)
    text = token.replace(decoding.space, " ")
    byte = _fallback_byte(text)
    return text.encode() if byte is None else bytes([byte])


class _Stream(Protocol):
    def push(self, token: str) -> str: ...

    def flush(self) -> str: ...

    def num_owed(self, token: str | None) -> int: ...


def _stream(decoding: Decoding) -> _Stream:
    if decoding.kind == "byte_level":
        return _ByteLevelStream()
    return _ByteFallbackStream(decoding)


class _ByteLevelStream:
    """Decode tokens whose characters stand for bytes (GPT-2); UTF-8 may be cut anywhere between tokens."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> str:
        return self._utf8.decode(_token_bytes(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def num_owed(self, token: str | None) -> int:
        unfinished, _ = self._utf8.getstate()
        if not unfinished or not token:
            return 0
        # If the token does not continue the character, one U+FFFD is left of it.
        return 0 if _token_bytes(token)[0] & 0xC0 == 0x80 else 1


@lru_cache(1 << 16)
def _token_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; a token with characters outside the alphabet (an added token) is its
    own text.
    """
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """Build GPT-2's characters for the 256 bytes: printable ones stand for themselves, the others are U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class _ByteFallbackStream:
    """Decode SentencePiece tokens, which are text, except that `<0xE2>` stands for a byte.

    A run of bytes is returned when it ends: as text if the whole run is UTF-8, otherwise as one U+FFFD per byte. The
    library decodes in this way, so a run cannot be returned earlier.
    """

    def __init__(self, decoding: Decoding) -> None:
        self._space = decoding.space
        self._strip_next = decoding.strip_start
        self._run = bytearray()

    def push(self, token: str) -> str:
        text = token.replace(self._space, " ")
        byte = _fallback_byte(text)
        if byte is not None:
            self._run.append(byte)
            return ""
        return self.flush() + self._stripped(text)

    def flush(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        return self._stripped(_run_text(run))

    def num_owed(self, token: str | None) -> int:
        byte = None if token is None else _fallback_byte(token)
        run = bytes(self._run)
        if token is not None and byte is None:
            text = _run_text(run)
        else:
            text = _characters_before(run, b"" if byte is None else bytes([byte]))
        return len(text) - int(self._strip_next and text.startswith(" "))

    def _stripped(self, text: str) -> str:
        if not self._strip_next or not text:
            return text
        self._strip_next = False
        return text.removeprefix(" ")


def _run_text(run: bytes) -> str:
    """Return the text of a run of bytes that has ended."""
    try:
        return run.decode()
    except UnicodeDecodeError:
        return "\ufffd" * len(run)


def _characters_before(run: bytes, more: bytes) -> str:
    """Return the whole characters of a run of bytes that continues with `more`, as long as it may become text."""
    utf8 = codecs.getincrementaldecoder("utf-8")()
    try:
        text = utf8.decode(run)
        utf8.decode(more)
    except UnicodeDecodeError:
        return "\ufffd" * len(run)
    return text


def _fallback_byte(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None
