"""Read the GGUF container: metadata and tensor positions in one bounded pass over a memory map, and the tokenizer.

The gguf package's reader takes 2.6 s for the 100,000 strings of a tokenizer, this one 0.1 s. Format: the GGUF
specification of ggml, versions 2 and 3, little-endian. Imports no torch, so that a file's shapes can be read without
it.
"""

import math
import mmap
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lorasrv.errors import CorruptModel, ModelError, UnsupportedModel
from lorasrv.models.spec import ModelSpec
from lorasrv.text.gguf_vocabularies import BpeVocabulary, SentencePieceVocabulary
from lorasrv.text.tokenizer import TokenizerSource

BLOCK = 32


@dataclass(frozen=True, slots=True)
class GgmlType:
    """Describe a tensor type: `block_size` neighbours of a row are stored in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


_LEFT_TO_GGUF = {
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
_TYPES = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", BLOCK, 18),
    3: GgmlType("Q4_1", BLOCK, 20),
    8: GgmlType("Q8_0", BLOCK, 34),
    30: GgmlType("BF16", 1, 2),
    **{number: GgmlType(*facts) for number, facts in _LEFT_TO_GGUF.items()},
}
_OTHER_NAMES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4"}


def ggml_type(number: int, tensor: str) -> GgmlType:
    """Return the type with a number of the GGUF format.

    Raises:
        UnsupportedModel: unknown; the message names the type, the tensor and the known types.
    """
    if number not in _TYPES:
        name = _OTHER_NAMES.get(number, f"number {number}")
        known = ", ".join(kind.name for kind in _TYPES.values())
        raise UnsupportedModel(f"tensor {tensor!r:.80} has GGUF type {name}, which is not supported; known: {known}")
    return _TYPES[number]


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_LEAST_TENSOR_BYTES, _LEAST_KEY_BYTES = 8 + 4 + 4 + 8, 8 + 4 + 1


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Hold the position of one tensor."""

    # Row-major (GGUF stores it reversed).
    shape: tuple[int, ...]
    type: GgmlType
    # Bytes from the file's start.
    offset: int
    nbytes: int


class GgufFile:
    """Read an open GGUF file: `metadata`, `tensors`, and the raw bytes of each tensor.

    Raises:
        CorruptModel: not a GGUF file, truncated, counts or lengths that point outside the file, repeated names, or
            overlapping tensors.
        UnsupportedModel: an old version, big-endian numbers, or an unknown tensor type.
    """

    def __init__(self, path: Path) -> None:
        self._bytes = _map(path)
        cursor = _Cursor(self._bytes)
        num_tensors, num_keys = _read_header(cursor, len(self._bytes))
        self.metadata = _read_metadata(cursor, num_keys)
        infos = [_read_info(cursor) for _ in range(num_tensors)]
        align = self.metadata.get("general.alignment", 32)
        if type(align) is not int or align <= 0 or align & (align - 1):
            raise CorruptModel(f"general.alignment must be a power of two, not {align!r:.60}")
        start = -(-cursor.at // align) * align
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, at in infos:
            if name in self.tensors:
                raise CorruptModel(f"tensor {name!r:.80} appears twice")
            if at % align:
                raise CorruptModel(f"tensor {name!r:.80} begins at {at}, which is no multiple of {align}")
            self.tensors[name] = self._placed(name, shape, kind, start + at)
        _check_apart(self.tensors)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the stored bytes of a tensor, as a view of the memory map; writing makes a private copy."""
        info = self.tensors[name]
        return np.frombuffer(self._bytes, np.uint8, info.nbytes, info.offset)

    def close(self) -> None:
        """Close the map; views of it keep the memory valid until they are freed."""
        self._bytes = mmap.mmap(-1, 1)

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        known = ggml_type(kind, name)
        elements = math.prod(shape)
        if not elements:
            raise CorruptModel(f"tensor {name!r:.80} is {list(shape)}, which is empty")
        if elements % known.block_size or (shape and shape[-1] % known.block_size):
            raise CorruptModel(f"tensor {name!r:.80}: {list(shape)} is not a multiple of {known.name} blocks")
        nbytes = elements // known.block_size * known.block_bytes
        if offset + nbytes > len(self._bytes):
            raise CorruptModel(
                f"the GGUF file is truncated: tensor {name!r:.80} ends at byte {offset + nbytes} of {len(self._bytes)}"
            )
        return TensorInfo(shape, known, offset, nbytes)


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        try:
            # Copy-on-write, because torch warns about views of read-only memory. Nothing ever writes.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError:
            raise CorruptModel("the GGUF file is empty") from None


def _read_header(cursor: "_Cursor", size: int) -> tuple[int, int]:
    """Return (number of tensors, number of keys), both checked against the length of the file."""
    if cursor.take(4) != b"GGUF":
        raise CorruptModel("not a GGUF file: it does not begin with GGUF")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise UnsupportedModel(f"GGUF version {version} (or byte order) is not supported; known: 2, 3, little-endian")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    if num_tensors * _LEAST_TENSOR_BYTES + num_keys * _LEAST_KEY_BYTES > size - cursor.at:
        raise CorruptModel(
            f"the GGUF file is damaged or truncated: {num_tensors} tensors and {num_keys} keys claimed in {size} bytes"
        )
    return num_tensors, num_keys


def _read_metadata(cursor: "_Cursor", num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise CorruptModel(f"key {key!r:.80} appears twice")
        try:
            metadata[key] = cursor.value(cursor.scalar("I"))
        except ModelError as e:
            raise type(e)(f"{e} (in key {key!r:.80})") from None
    return metadata


def _check_apart(tensors: dict[str, TensorInfo]) -> None:
    """Check that no two tensors share bytes."""
    placed = sorted(tensors.items(), key=lambda item: item[1].offset)
    for (name, info), (other, following) in pairwise(placed):
        if info.offset + info.nbytes > following.offset:
            raise CorruptModel(f"tensors {name!r:.80} and {other!r:.80} overlap in the file")


def _read_info(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    """Read (name, shape, type, offset from the start of the data) of one tensor."""
    name, num_dims = cursor.string(), cursor.scalar("I")
    if num_dims > _MAX_DIMS:
        raise CorruptModel(f"tensor {name!r:.80} claims {num_dims} dimensions, more than {_MAX_DIMS}")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


class _Cursor:
    """Read at a position; reads past the end raise CorruptModel before memory is allocated for them."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self._data):
            raise CorruptModel(f"the GGUF file is truncated in its header, at byte {self.at} of {len(self._data)}")
        self.at += count
        return self._data[self.at - count : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return _text(self.take(self.scalar("Q")))

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        return self.scalar(_scalar_code(kind))

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            raise UnsupportedModel("GGUF metadata with arrays of arrays is not supported")
        code = np.dtype("<" + _scalar_code(kind))
        return list(np.frombuffer(self.take(count * code.itemsize), code).tolist())

    def _strings(self, count: int) -> list[str]:
        """Read strings. This is the hot loop of start-up with 100,000 strings, so each takes one call: decode."""
        data, at, end = self._data, self.at, len(self._data)
        if count * 8 > end - at:
            raise CorruptModel(f"the GGUF file is truncated: an array claims {count} strings")
        unpack: Callable[[mmap.mmap, int], tuple[Any, ...]] = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                stop = at + 8 + unpack(data, at)[0]
                if stop > end:
                    raise CorruptModel("the GGUF file is truncated inside an array of strings")
                strings.append(data[at + 8 : stop].decode())
                at = stop
        except (struct.error, UnicodeDecodeError):
            raise CorruptModel("the GGUF file is damaged inside an array of strings") from None
        self.at = at
        return strings


def _scalar_code(kind: int) -> str:
    if kind not in _SCALARS:
        raise CorruptModel(f"the GGUF file is damaged: metadata of unknown kind {kind}")
    return _SCALARS[kind]


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise CorruptModel("the GGUF file is damaged: a name is not UTF-8") from None


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
"""Added tokens of Phi-3 that do not absorb the white space after them. GGUF files do not tell; llama.cpp has a list."""


def gguf_tokenizer_source(meta: Mapping[str, Any], spec: ModelSpec, file: str = "") -> TokenizerSource:
    """Return the description of a file's tokenizer, as far as the file has one.

    Args:
        meta: the file's metadata.
        spec: the model's spec from the metadata.
        file: the file's name, for messages.
    Raises:
        UnsupportedModel, CorruptModel: it is neither a byte-level BPE nor SentencePiece, or its description is damaged.
    """
    model = meta.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in _VOCABULARIES:
        raise UnsupportedModel(
            f"GGUF tokenizer model {model!r:.60} is not supported; known: gpt2 (byte-level BPE) and llama "
            "(SentencePiece); serve the model from its Hugging Face directory"
        )
    tokens = _strings(meta, "tokens")
    if len(set(tokens)) < len(tokens) and (twice := [t for t, count in Counter(tokens).items() if t and count > 1]):
        raise CorruptModel(f"tokenizer.ggml.tokens has {twice[0]!r:.60} more than once")
    template, tool_template = (meta.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use"))
    if not (isinstance(template, str | None) and isinstance(tool_template, str | None)):
        raise CorruptModel("the GGUF metadata has a chat_template that is no text")
    types = _token_types(meta, len(tokens))
    tokens = tokens[: _num_tokens(tokens)]
    vocabulary = _VOCABULARIES[model](meta, tokens, types[: len(tokens)])
    return TokenizerSource(
        vocabulary=vocabulary,
        chat_template=template,
        tool_template=tool_template,
        eos_token_ids=spec.eos_token_ids,
        bos_token_id=spec.bos_token_id,
        add_bos=bool(meta.get("tokenizer.ggml.add_bos_token", vocabulary.adds_bos)),
        add_eos=bool(meta.get("tokenizer.ggml.add_eos_token", False)),
        special=_special_tokens(meta, tokens),
        file=file,
    )


def _bpe(meta: Mapping[str, Any], tokens: tuple[str, ...], types: list[int]) -> BpeVocabulary:
    pre = str(meta.get("tokenizer.ggml.pre", "default"))
    added = _of_type(types, _CONTROL), _of_type(types, _USER_DEFINED)
    return BpeVocabulary(tokens, _strings(meta, "merges"), pre, *added)


def _sentence_piece(meta: Mapping[str, Any], tokens: tuple[str, ...], types: list[int]) -> SentencePieceVocabulary:
    scores = meta.get("tokenizer.ggml.scores")
    if (
        not isinstance(scores, list)
        or len(scores) != len(meta["tokenizer.ggml.tokens"])
        or not all(type(score) is float and math.isfinite(score) for score in scores)
    ):
        raise CorruptModel("the GGUF metadata has no tokenizer.ggml.scores with a number for each token")
    unknown, added = _of_type(types, _UNKNOWN), _of_type(types, _UNKNOWN, _CONTROL, _USER_DEFINED)
    is_phi3 = meta.get("general.architecture") == "phi3"
    return SentencePieceVocabulary(
        tokens,
        tuple(scores[: len(tokens)]),
        joined=_of_type(types, _NORMAL, _USER_DEFINED),
        control=(*unknown, *_of_type(types, _CONTROL)),
        user_defined=_of_type(types, _USER_DEFINED),
        unknown_id=next(iter(unknown), None),
        stripping=tuple(i for i in added if is_phi3 and tokens[i] not in _PHI3_PLAIN),
        adds_space_prefix=bool(meta.get("tokenizer.ggml.add_space_prefix", True)),
    )


_VOCABULARIES: Mapping[Any, Callable[..., BpeVocabulary | SentencePieceVocabulary]] = {
    "gpt2": _bpe,
    "llama": _sentence_piece,
}
"""By tokenizer.ggml.model."""


def _of_type(types: list[int], *wanted: int) -> tuple[int, ...]:
    return tuple(i for i, kind in enumerate(types) if kind in wanted)


def _token_types(meta: Mapping[str, Any], num_tokens: int) -> list[int]:
    """Return the kind of each token. Without kinds, control tokens cannot be told from text."""
    types = meta.get("tokenizer.ggml.token_type")
    if types is None:
        raise UnsupportedModel(
            "the GGUF metadata lacks tokenizer.ggml.token_type, which tells control tokens from text; convert the "
            "model with a newer llama.cpp"
        )
    if not isinstance(types, list) or not all(type(kind) is int for kind in types):
        raise CorruptModel("the GGUF metadata has a token_type that is no list of numbers")
    if len(types) != num_tokens:
        raise CorruptModel(f"tokenizer.ggml.token_type has {len(types)} entries for {num_tokens} tokens")
    return types


def _num_tokens(tokens: Sequence[str]) -> int:
    """Return the number of tokens without the spare rows behind the last one, which converters name."""
    return next((i for i in range(len(tokens), 0, -1) if tokens[i - 1] != f"[PAD{i - 1}]"), 0)


def _strings(meta: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = meta.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(type(item) is str for item in value):
        raise CorruptModel(f"the GGUF metadata has no list of strings tokenizer.ggml.{key}")
    return tuple(value)


def _special_tokens(meta: Mapping[str, Any], tokens: tuple[str, ...]) -> dict[str, str]:
    """Return the special tokens' texts by the names that chat templates use: bos_token, eos_token, ..."""
    keys = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {short: meta.get(f"tokenizer.ggml.{key}_token_id") for key, short in keys.items()}
    return {f"{short}_token": tokens[i] for short, i in ids.items() if type(i) is int and 0 <= i < len(tokens)}
