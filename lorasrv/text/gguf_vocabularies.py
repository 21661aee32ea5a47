"""Build tokenizers from the vocabularies in GGUF metadata, with the `tokenizers` library. Torch-free."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lorasrv.errors import CorruptModel, UnsupportedModel

SPACE = "▁"
"""SentencePiece\'s character for a space."""


@dataclass(frozen=True, slots=True)
class BpeVocabulary:
    """Hold a byte-level BPE as GGUF metadata describes it."""

    tokens: tuple[str, ...]
    # Pairs joined by a space, in order of rank.
    merges: tuple[str, ...]
    # Name of the pre-tokenizer (tokenizer.ggml.pre).
    pre: str
    # Ids of added tokens: control tokens and user-defined ones.
    control: tuple[int, ...] = ()
    user_defined: tuple[int, ...] = ()

    @property
    def adds_bos(self) -> bool:
        """Return whether a text begins with the bos token if the file does not say, as in llama.cpp."""
        return self.pre in _PRE_KINDS and _PRE_KINDS[self.pre].adds_bos


@dataclass(frozen=True, slots=True)
class SentencePieceVocabulary:
    """Hold a SentencePiece model of the BPE kind as GGUF metadata describes it."""

    tokens: tuple[str, ...]
    # One per token; the neighbours whose union has the highest score are joined first.
    scores: tuple[float, ...]
    # Ids of pieces to which neighbours may be joined, without bytes and control tokens.
    joined: tuple[int, ...]
    control: tuple[int, ...] = ()
    user_defined: tuple[int, ...] = ()
    unknown_id: int | None = None
    # Ids of added tokens that absorb the white space after them.
    stripping: tuple[int, ...] = ()
    # Whether a space is added at the beginning of a text.
    adds_space_prefix: bool = True
    adds_bos: bool = True


_LETTERS_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LETTERS_QWEN2 = _LETTERS_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_LETTERS_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), _byte_level(use_regex=False)]
    )


@dataclass(frozen=True, slots=True)
class _PreKind:
    """Define one value of tokenizer.ggml.pre as the published tokenizer.json of its model does."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    # Whether a text begins with the bos token if the file does not say, as in llama.cpp.
    adds_bos: bool = False


_SINGLE_DIGITS = _PreKind(
    lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)])
)
_QWEN2 = _PreKind(lambda: _split(_LETTERS_QWEN2), normalizers.NFC)
_PRE_KINDS = {
    "gpt-2": _PreKind(lambda: _byte_level(use_regex=True)),
    "llama-bpe": _PreKind(lambda: _split(_LETTERS_LLAMA3), ignore_merges=True, adds_bos=True),
    "smaug-bpe": _PreKind(lambda: _split(_LETTERS_LLAMA3), ignore_merges=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _PreKind(lambda: _split(_LETTERS_TEKKEN), ignore_merges=True, adds_bos=True),
    "dbrx": _PreKind(lambda: _split(_LETTERS_LLAMA3)),
    "smollm": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
}


def build(vocabulary: BpeVocabulary | SentencePieceVocabulary, begin: int | None, end: int | None) -> Tokenizer:
    """Build the library's tokenizer.

    Args:
        begin, end: ids of the tokens that every text begins and ends with; None for none.
    Raises:
        UnsupportedModel: an unknown pre-tokenizer; names it.
        CorruptModel: the description is invalid.
    """
    if isinstance(vocabulary, BpeVocabulary):
        backend, stripping = _byte_level_bpe(vocabulary), frozenset[int]()
    else:
        backend, stripping = _sentence_piece(vocabulary), frozenset(vocabulary.stripping)
    for ids, special in ((vocabulary.control, True), (vocabulary.user_defined, False)):
        added = [(vocabulary.tokens[i], i in stripping) for i in ids]
        backend.add_tokens([AddedToken(text, special=special, rstrip=s, normalized=False) for text, s in added])
    backend.post_processor = _around(vocabulary.tokens, begin, end)
    return backend


def _byte_level_bpe(vocabulary: BpeVocabulary) -> Tokenizer:
    if vocabulary.pre not in _PRE_KINDS:
        known = ", ".join(_PRE_KINDS)
        raise UnsupportedModel(f"GGUF pre-tokenizer {vocabulary.pre!r:.60} is not supported; known: {known}")
    kind = _PRE_KINDS[vocabulary.pre]
    backend = Tokenizer(_bpe(vocabulary, kind.ignore_merges))
    backend.pre_tokenizer = kind.pre_tokenizer()
    if kind.normalizer is not None:
        backend.normalizer = kind.normalizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(vocabulary: SentencePieceVocabulary) -> Tokenizer:
    """Build the tokenizer that converters of SentencePiece models to tokenizer.json build."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    unknown = None if vocabulary.unknown_id is None else vocabulary.tokens[vocabulary.unknown_id]
    if unknown is None and not all(f"<0x{byte:02X}>" in ids for byte in range(256)):
        raise CorruptModel("tokenizer.ggml.tokens have neither a token for each byte nor one for unknown characters")
    merges = _merges(vocabulary, ids)
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    blank: normalizers.Normalizer = normalizers.Replace(" ", SPACE)
    start = [normalizers.Prepend(SPACE), blank]
    backend.normalizer = normalizers.Sequence(start) if vocabulary.adds_space_prefix else blank
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * vocabulary.adds_space_prefix)
    return backend


def _merges(vocabulary: SentencePieceVocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the pairs of pieces that form a piece, highest score first.

    SentencePiece joins any two neighbours that form a piece; the library needs the list of pairs. Equal scores are in
    the order of published tokenizer.json files.
    """
    found = [
        (vocabulary.scores[i], at, len(piece) - at, piece)
        for i in vocabulary.joined
        for piece in (vocabulary.tokens[i],)
        for at in range(1, len(piece))
        if piece[:at] in ids and piece[at:] in ids
    ]
    found.sort(key=lambda pair: pair[:3], reverse=True)
    return [(piece[:at], piece[at:]) for _, at, _, piece in found]


def _bpe(vocabulary: BpeVocabulary, ignore_merges: bool) -> models.BPE:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges: list[Any] = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    try:
        return models.BPE(vocab=ids, merges=merges, ignore_merges=ignore_merges)
    except Exception:  # the library raises bare Exception for a merge of unknown tokens
        wrong = next((i for i, merge in enumerate(merges) if not _joins_tokens(merge, ids)), None)
        which = (
            "" if wrong is None else f"; number {wrong}, {vocabulary.merges[wrong]!r:.60}, is not two that make a third"
        )
        raise CorruptModel(f"tokenizer.ggml.merges are no pairs of tokenizer.ggml.tokens{which}") from None


def _joins_tokens(merge: tuple[str, ...], ids: Mapping[str, int]) -> bool:
    """Return whether a merge joins two tokens into a third."""
    return len(merge) == 2 and {*merge, "".join(merge)} <= ids.keys()


def _around(tokens: Sequence[str], begin: int | None, end: int | None) -> processors.PostProcessor:
    """Build the post-processor that adds the begin and end tokens requested by the metadata."""
    if any(i is not None and i >= len(tokens) for i in (begin, end)):
        raise CorruptModel("the GGUF metadata names a begin or end token outside the vocabulary")
    used = [(tokens[i], i) for i in dict.fromkeys((begin, end)) if i is not None]
    parts = [
        *([tokens[begin]] if begin is not None else []),
        "$A",
        *([tokens[end]] if end is not None else []),
    ]
    return processors.TemplateProcessing(single=parts, special_tokens=used)
