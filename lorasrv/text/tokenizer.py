"""Convert text to token ids and back with the `tokenizers` library, from a tokenizer.json or from GGUF metadata.

A text is encoded as a batch of one: among the library's functions that take texts, only the batch functions release
the GIL, and a long text takes a second. Loaders describe a checkpoint's tokenizer as plain data (`TokenizerSource`).
Torch-free.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import tokenizers

from adapter_store.errors import AdapterInvalid, Problem, show
from adapter_store.spec import AddedToken
from lorasrv.errors import ContextLengthExceeded, CorruptModel, InvalidRequest, UnsupportedModel, naming_file
from lorasrv.text.gguf_vocabularies import BpeVocabulary, SentencePieceVocabulary, build

SOME_TOKEN_CHARS = 8
"""Every vocabulary has a token of this length."""
_WHITE_SPACE = "".join(filter(str.isspace, map(chr, range(0x3001))))


@dataclass(frozen=True, slots=True)
class TokenizerJson:
    """Hold the text of a tokenizer.json."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Describe a vocabulary with its chat template and special tokens."""

    vocabulary: TokenizerJson | BpeVocabulary | SentencePieceVocabulary
    chat_template: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    # bos_token, eos_token... -> their text, for templates. Those that the vocabulary lacks are added in this order.
    special: dict[str, str] = field(default_factory=dict)
    # Texts of special tokens that have no name.
    extra_special: tuple[str, ...] = ()
    # Text -> flags (lstrip, rstrip...) of special tokens that the vocabulary may lack.
    special_flags: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    # Whether a space is added at the beginning of a text; tokenizer.json must agree. None: tokenizer.json decides.
    adds_prefix_space: bool | None = None
    # Tokens that other files than tokenizer.json declare, or whose flags they change.
    added: tuple[AddedToken, ...] = ()
    # The beginning of error messages: the file, unless it is in a folder, whose files the messages name themselves.
    file: str = ""
    # The chat template of conversations with tools, if it differs.
    tool_template: str | None = None
    # Files of the folder that have the chat templates.
    template_file: str = ""
    tool_template_file: str = ""

    @property
    def all_special(self) -> frozenset[str]:
        """Return the texts that are special tokens whatever their flags say, as in transformers."""
        return frozenset((*self.special.values(), *self.extra_special))


# The library would start a thread on each core even for a batch of one, and warn on stderr when the process forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """Wrap a tokenizer with the ids that begin or end a text. Its results never change, so it is thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, source: TokenizerSource) -> None:
        self._backend, self._source = backend, source
        self.eos_token_ids = frozenset(source.eos_token_ids)
        self.bos_token_id = source.bos_token_id
        self.named_tokens: Mapping[str, str] = dict(source.special)
        self.all_special = source.all_special
        added = backend.get_added_tokens_decoder()
        self.added_tokens: Mapping[str, bool] = {token.content: token.special for token in added.values()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # Those that are looked for in the normalized text.
        self._normalized = {
            i: added[i].content for i in self.special_ids if added[i].normalized and backend.normalizer is not None
        }
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.decoding = _decoding(backend)
        # Requested tokens below `_num_spelled`: the library would create a new string each time.
        self._spelled: dict[int, str] = {}
        self._num_spelled = self.vocab_size

    @classmethod
    def from_source(cls, source: TokenizerSource) -> "Tokenizer":
        """Build the tokenizer that a checkpoint describes.

        Raises:
            UnsupportedModel: an unknown pre-tokenizer or decoder; names it.
            CorruptModel: the description is invalid.
        """
        vocabulary = source.vocabulary
        with naming_file(source.file):
            if isinstance(vocabulary, TokenizerJson):
                backend = _with_declared(_parse(vocabulary.text), source)
            else:
                end = source.eos_token_ids[0] if source.add_eos and source.eos_token_ids else None
                backend = build(vocabulary, source.bos_token_id if source.add_bos else None, end)
            return cls(_with_flags(backend, source.all_special), source)

    def extended(self, added: Sequence[AddedToken]) -> "Tokenizer":
        """Return a tokenizer that also has these tokens. It shares vocabulary and merges with this one, so it takes no
        time.

        Raises:
            AdapterInvalid: a token would not have the id that it names.
        """
        backend = _with_parts_of(self._backend)
        backend.add_tokens(list(map(_as_library, added)))
        ids = {token.content: token_id for token_id, token in self._backend.get_added_tokens_decoder().items()}
        ids |= {token.content: token.id for token in added}
        if wrong := next((content for content, token in ids.items() if backend.token_to_id(content) != token), None):
            what = f"{show(wrong)} cannot be token {ids[wrong]} of this base's tokenizer"
            raise AdapterInvalid((Problem("unsupported_tokenizer", "tokenizer", what),))
        own = Tokenizer(backend, self._source)
        own._spelled, own._num_spelled = self._spelled, self._num_spelled
        own._longest_spelled = max([self._longest_spelled, *(len(token.content) for token in added)])
        return own

    @cached_property
    def description(self) -> bytes:
        """Return the tokenizer as a tokenizer.json."""
        return str(self._backend.to_str()).encode()

    @property
    def is_from_json(self) -> bool:
        """Return whether the checkpoint has a tokenizer.json."""
        return isinstance(self._source.vocabulary, TokenizerJson)

    def ids(self) -> dict[str, int]:
        """Return the id of every token; tokens are as the vocabulary spells them."""
        return self._backend.get_vocab(with_added_tokens=True)

    def has_ids_of(self, other: "Tokenizer") -> bool:
        """Return whether both tokenizers have the same ids for the same tokens."""
        return self.ids() == other.ids()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, with special tokens in it recognised.

        Raises:
            InvalidRequest: the text has lone surrogates.
        """
        return self._encode(self._backend.encode_batch_fast, text, add_special_tokens).ids

    def encode_behind(self, text: str) -> list[int]:
        """Return the ids of a text that follows another text: without the space that some tokenizers add in front of
        a text. Special tokens that begin or end a text are not added.

        Raises: see `encode`.
        """
        front, front_ids = self._front
        ids = self.encode(front + text, add_special_tokens=False)
        if ids[: len(front_ids)] == front_ids:
            return ids[len(front_ids) :]
        return self.encode(text, add_special_tokens=False)

    def has_forged(self, token_ids: Sequence[int], text: str) -> bool:
        """Return whether a special token among the ids of a text is not in the text itself, but in what the tokenizer
        normalizes it to."""
        if self._normalized.keys().isdisjoint(token_ids):
            return False
        encoding = self._encode(self._backend.encode_batch, text, add_special_tokens=False)
        found = zip(encoding.ids, encoding.offsets, strict=True)
        return any(i in self._normalized and self._normalized[i] not in text[begin:end] for i, (begin, end) in found)

    @cached_property
    def _front(self) -> tuple[str, list[int]]:
        """Return a text with its tokens that rarely merges with the text after it; ("", []) if none is needed."""
        front = "\n" if _adds_prefix_space(self._backend) else ""
        return front, self.encode(front, add_special_tokens=False)

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of a text's tokens by its length alone; 0 if the tokenizer may drop part of the text."""
        longest, size = self._longest_token, len(text)
        if self._strips:
            size -= sum(map(text.count, _WHITE_SPACE))
        return -(-size // longest) if longest else 0

    @cached_property
    def _strips(self) -> bool:
        """Return whether there are tokens that absorb the white space next to them."""
        return any(token.lstrip or token.rstrip for token in self._backend.get_added_tokens_decoder().values())

    @cached_property
    def _longest_token(self) -> int | None:
        """Return the most characters that one token can stand for (each at least one byte), not counting white space
        that it absorbs; None: no bound.
        """
        joined = list(map(_most_joined, _steps(self._backend.normalizer)))
        if None in joined or not self._has_every_byte:
            return None
        return math.prod(filter(None, joined)) * self._longest_spelled

    @property
    def _has_every_byte(self) -> bool:
        """Return whether no text has unknown characters; any number of them could be a single token."""
        if self.decoding.kind == "byte_level":
            return True
        falls_back = getattr(self._backend.model, "byte_fallback", False)
        return falls_back and all(self.token_id(f"<0x{byte:02X}>") is not None for byte in range(256))

    @cached_property
    def _longest_spelled(self) -> int:
        """Return the characters of the longest token, as the vocabulary spells it."""
        # `ids` is one call, which holds Python's lock for most of a second with a large vocabulary.
        spell, numbers = self._backend.id_to_token, range(self.vocab_size)
        lengths = [len(token) for token in (spell(number) for number in numbers) if token is not None]
        has_gaps = len(lengths) < self.vocab_size
        return max(map(len, self.ids()) if has_gaps else lengths, default=1)

    def encode_with_offsets(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[int]]:
        """Return the ids of a text and the character offset at which each begins.

        A token that the tokenizer adds itself begins where the next one does.

        Raises: see `encode`.
        """
        encoding = self._encode(self._backend.encode_batch, text, add_special_tokens)
        offsets: list[int] = []
        begin = len(text)
        for (first, last), special in zip(encoding.offsets[::-1], encoding.special_tokens_mask[::-1], strict=True):
            begin = begin if special and first == last else first
            offsets.append(begin)
        return encoding.ids, offsets[::-1]

    @staticmethod
    def _encode(
        encode: Callable[..., list[tokenizers.Encoding]], text: str, add_special_tokens: bool
    ) -> tokenizers.Encoding:
        try:
            return encode([text], add_special_tokens=add_special_tokens)[0]
        except (TypeError, UnicodeEncodeError):  # depending on the version of the library
            raise InvalidRequest("prompt has a lone surrogate (U+D800 to U+DFFF): not text", param="prompt") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD, ids outside the vocabulary are skipped."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary spells it; None outside the vocabulary."""
        token = self._spelled.get(token_id)
        if token is None:
            token = self._backend.id_to_token(token_id)
            if token is not None and token_id < self._num_spelled:
                self._spelled[token_id] = token
        return token

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)


def check_could_fit(texts: Sequence[str], tokenizer: Tokenizer, max_model_len: int, param: str = "prompt") -> None:
    """Check texts by their length only, before they are tokenized.

    Raises:
        ContextLengthExceeded: no tokenization of them fits the context.
    """
    # Most texts pass this quick check.
    if sum(map(len, texts)) <= SOME_TOKEN_CHARS * max_model_len:
        return
    least = sum(map(tokenizer.least_tokens, texts))
    if least > max_model_len:
        raise ContextLengthExceeded(
            f"the context holds {max_model_len} tokens, but the text of {{param}} has at least {least}", param=param
        )


@dataclass(frozen=True, slots=True)
class Decoding:
    """Describe how tokens become text."""

    # byte_level or byte_fallback.
    kind: str
    # Character that stands for a space (byte_fallback only).
    space: str = ""
    # Whether one space is removed from the beginning of the text.
    strip_start: bool = False


def _decoding(backend: tokenizers.Tokenizer) -> Decoding:
    """Recognise the library's decoder, so that `Detokenizer` can decode token by token in the same way."""
    steps = _steps(backend.decoder)
    kinds = [step["type"] for step in steps] or ["none"]
    if kinds == ["ByteLevel"]:
        return Decoding("byte_level")
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        replace, strip = steps[0], steps[3:]
        plain_strip = all((s["content"], s["start"], s["stop"]) == (" ", 1, 0) for s in strip)
        if replace["content"] == " " and "String" in replace["pattern"] and plain_strip:
            return Decoding("byte_fallback", replace["pattern"]["String"], bool(strip))
    raise UnsupportedModel(
        f"tokenizer.json: decoder {'+'.join(kinds)} is not supported; known: ByteLevel, "
        "Replace+ByteFallback+Fuse(+Strip)"
    )


def _with_parts_of(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a tokenizer that refers to the parts of another, with the same added tokens."""
    other = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (shared := getattr(backend, part)) is not None:
            setattr(other, part, shared)
    added = backend.get_added_tokens_decoder()
    other.add_tokens([added[token_id] for token_id in sorted(added)])
    return other


def _as_library(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(**{name: value for name, value in asdict(token).items() if name != "id"})


def _with_declared(backend: tokenizers.Tokenizer, source: TokenizerSource) -> tokenizers.Tokenizer:
    """Add the tokens that other files than tokenizer.json declare, with their flags, and those that they name as
    special. Tokens that the vocabulary lacks get new ids, as in transformers.

    Raises:
        CorruptModel: a token would not have its declared id.
        UnsupportedModel: the files differ in whether a space is added at the beginning of texts.
    """
    _check_prefix_space(backend, source)
    backend.add_tokens([_as_library(token) for token in sorted(source.added, key=lambda token: token.id)])
    for token in source.added:
        if backend.token_to_id(token.content) != token.id:
            raise CorruptModel(f"tokenizer_config.json: {show(token.content)} is not token {token.id} here")
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    named = dict.fromkeys(text for text in (*source.special.values(), *source.extra_special) if text not in added)
    backend.add_tokens(
        [
            tokenizers.AddedToken(text, **{"normalized": False, **source.special_flags.get(text, {}), "special": True})
            for text in named
        ]
    )
    return backend


def _steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, pre-tokenizer or decoder as tokenizer.json describes them; [] for None."""
    if part is None:
        return []
    state: dict[str, Any] = json.loads(part.__getstate__())
    found = (state.get(name) for name in ("normalizers", "pretokenizers", "decoders"))
    return next((steps for steps in found if steps is not None), [state])


def _most_joined(step: Mapping[str, Any]) -> int | None:
    """Return how many characters a step of a normalizer joins into one at most; None: no bound, or it drops some."""
    is_of_one = step["type"] == "Replace" and len(step["pattern"].get("String", "")) == len(step["content"]) == 1
    return 1 if is_of_one else {"NFC": 4, "Prepend": 1}.get(step["type"])


def _adds_prefix_space(backend: tokenizers.Tokenizer) -> bool:
    """Return whether the tokenizer adds a space at the beginning of a text."""
    return any(
        step["type"] == "Prepend"
        or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
        or (step["type"] == "ByteLevel" and step.get("add_prefix_space"))
        for step in _steps(backend.normalizer) + _steps(backend.pre_tokenizer)
    )


def _check_prefix_space(backend: tokenizers.Tokenizer, source: TokenizerSource) -> None:
    if source.adds_prefix_space not in (None, _adds_prefix_space(backend)):
        raise UnsupportedModel(
            f"tokenizer_config.json: add_prefix_space {source.adds_prefix_space} is not what tokenizer.json does; save "
            "the tokenizer anew, so that both say the same"
        )


def _with_flags(backend: tokenizers.Tokenizer, special: frozenset[str]) -> tokenizers.Tokenizer:
    """Flag these added tokens as special. If tokenizer.json has them as ordinary tokens, the guard of messages would
    let a text contain them.
    """
    ordinary = [token for token in backend.get_added_tokens_decoder().values() if not token.special]
    named = [token for token in ordinary if token.content in special]
    for token in named:
        token.special = True
    backend.add_tokens(named)
    return backend


def _parse(text: str) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as e:  # the library raises bare Exception for any invalid file
        raise CorruptModel(f"tokenizer.json is not valid: {e}") from None
    # Trainers leave their truncation and padding in the file.
    backend.no_truncation()
    backend.no_padding()
    return backend
