"""Tokenizers of adapters with their own tokens: the base's tokenizer, with more tokens after its last one.

A tokenizer.json is compared with the base's as JSON. It is never given to the tokenizers library, whose regular
expressions and errors could stall or end this process. An adapter's tokenizer is the base's own, to which the library
adds the tokens.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from cachetools import LRUCache

from adapter_store.errors import AdapterInvalid, Problem, show
from adapter_store.formats.adapter_config import MAX_TOKEN_CHARS, TOKEN_FLAGS, read_added_token
from adapter_store.formats.peft_dir import PeftDir
from adapter_store.formats.strict_json import unique_pairs
from adapter_store.spec import AdapterKey, AddedToken
from adapter_store.validation.vocab_rows import MAX_ADDED_TOKENS
from lorasrv.text.gguf_vocabularies import SPACE
from lorasrv.text.tokenizer import Tokenizer

MAX_KNOWN_TOKENS = 1 << 18
"""Most added tokens, including the base's, of all kept tokenizers: some 250 bytes each. An adapter without any counts
as one."""
MAX_TIMES, SPARE_BYTES = 4, 1 << 20
"""Most bytes of a tokenizer.json: `MAX_TIMES` those of the base's, which is written without blanks, and `SPARE_BYTES`
more."""
_TEXT_ALONE = [{"Sequence": {"id": "A", "type_id": 0}}]
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


class OwnTokenizers:
    """Find the tokenizer of an adapter. Safe to use from many threads.

    Args:
        base: the base's tokenizer.
        added: returns an adapter's own tokens, for most adapters none; raises AdapterError.
    """

    def __init__(self, base: Tokenizer, added: Callable[[AdapterKey], Sequence[AddedToken]]) -> None:
        self._base, self._added = base, added
        self._lock = threading.Lock()
        self._known: LRUCache[AdapterKey, Tokenizer | None] = LRUCache(MAX_KNOWN_TOKENS, _num_added)
        # Versions of an adapter often have the same tokens.
        self._shared: WeakValueDictionary[tuple[AddedToken, ...], Tokenizer] = WeakValueDictionary()

    def knows(self, key: AdapterKey | None) -> bool:
        """Return whether `of` needs no disk read."""
        with self._lock:
            return key is None or key in self._known

    def of(self, key: AdapterKey | None) -> Tokenizer | None:
        """Return the tokenizer of an adapter; None if it is the base's.

        Raises:
            AdapterError: the adapter is not in the store any more, or its tokens do not fit the base's.
        """
        if key is None:
            return None
        with self._lock:
            if key in self._known:
                return self._known[key]
        added = tuple(self._added(key))
        with self._lock:
            own = self._shared.get(added)
            if own is None and added:
                own = self._shared[added] = self._base.extended(added)
            self._known[key] = own
        return own


def _num_added(tokenizer: Tokenizer | None) -> int:
    """Return the memory of a tokenizer, counted in added tokens."""
    return 1 if tokenizer is None else min(MAX_KNOWN_TOKENS, 1 + len(tokenizer.added_tokens))


def with_own_tokens(peft: PeftDir, base: Callable[[], Tokenizer]) -> PeftDir:
    """Return a folder's adapter with the tokens that its tokenizer.json adds in its config.

    Args:
        base: returns the base's tokenizer; called only if there is a tokenizer.json.

    Raises:
        AdapterInvalid: it is no extension of the base's tokenizer.
        OSError: it cannot be read.
    """
    if not peft.has_tokenizer:
        return peft
    tokenizer = base()
    found = peft.with_tokenizer(tokenizer.vocab_size)
    if found.tokenizer is None:
        return found
    tokens = added_tokens(found.tokenizer, BaseTokens.of(tokenizer))
    return replace(found, config=found.config | {"added_tokens": tokens})


@dataclass(frozen=True, slots=True)
class BaseTokens:
    """Hold what uploaded tokenizers are compared with."""

    # The base's tokenizer.json.
    text: bytes
    all_special: frozenset[str]
    # Whether the checkpoint has a tokenizer.json. A GGUF file only names its pre-tokenizer.
    is_exact: bool

    @classmethod
    def of(cls, base: Tokenizer) -> "BaseTokens":
        """Describe a tokenizer; takes a moment at the first call."""
        return cls(base.description, base.all_special, base.is_from_json)


def added_tokens(text: bytes, base: BaseTokens) -> list[dict[str, Any]]:
    """Return the tokens that a tokenizer.json has beyond the base's, as it describes them. This may take seconds.

    Raises:
        AdapterInvalid: it is no extension of the base's tokenizer; says what differs.
    """
    own, theirs = _parsed(text, MAX_TIMES * len(base.text) + SPARE_BYTES), json.loads(base.text)
    tokens, model, vocab = own.get("added_tokens") or [], own.get("model"), theirs["model"]["vocab"]
    if not isinstance(model, Mapping) or not all(isinstance(one, Mapping) for one in (model.get("vocab"), vocab)):
        _refuse("has no vocabulary (model.vocab): only tokenizers like the base's are served")
    if not isinstance(tokens, list) or not all(map(_is_token, tokens)):
        what = f"an id or a content of 1 to {MAX_TOKEN_CHARS} characters, or with flags that are not true or false"
        _refuse(f"has added_tokens without {what}")
    ids = dict(model["vocab"]) | {token.get("content"): token.get("id") for token in tokens}
    known = vocab | {token["content"]: token["id"] for token in theirs["added_tokens"]}
    if not known.items() <= ids.items():
        changed = [content for content, token in known.items() if ids.get(content) != token]
        token = known[changed[0]]
        if not base.is_exact and ids.get(changed[0].replace(" ", SPACE)) == token:
            _refuse(
                f"spells the blanks of token {token} as U+2581, and this base's GGUF file as blanks: the two cannot be "
                "compared; serve the base from its Hugging Face directory"
            )
        now = ids.get(changed[0], "missing")
        _refuse(f"changes the base's own tokens: {show(changed[0])} is {token}, and here {show(now)}")
    _check_parts(own, theirs, base.all_special, is_exact=base.is_exact)
    more = [token for token in tokens if token.get("content") not in known]
    return _in_order(more, set(ids) - known.keys(), max(known.values(), default=-1) + 1)


def _parsed(text: bytes, most: int) -> Mapping[str, Any]:
    if len(text) > most:
        _refuse(f"has {len(text)} bytes; {most} are the most for this base")
    try:
        own = json.loads(text.decode("utf-8"), object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        _refuse(f"is not JSON: {'nested too deeply' if isinstance(error, RecursionError) else error}")
    if not isinstance(own, Mapping):
        _refuse("must be a JSON object")
    return own


def _is_token(token: Any) -> bool:
    try:
        read_added_token(token)
    except ValueError:
        return False
    return True


def _check_parts(
    own: Mapping[str, Any], theirs: Mapping[str, Any], all_special: frozenset[str], *, is_exact: bool
) -> None:
    """Check that texts are tokenized as with the base's tokenizer."""
    given, known = own["model"], theirs["model"]
    if given.get("merges") != known.get("merges") and _merges(given) != _merges(known):
        _refuse("has other merges than the base's")
    if not is_exact:
        # This project builds the parts itself, so they may be written differently.
        return
    if wrong := next((part for part in _PARTS if _plain(part, own.get(part)) != _plain(part, theirs.get(part))), None):
        _refuse(f"has another {wrong} than the base's")
    flags = {token["content"]: token for token in theirs["added_tokens"]}
    for token in own.get("added_tokens") or []:
        base = flags.get(token["content"])
        # Named tokens are special, whatever the file says.
        given = token | ({"special": True} if token["content"] in all_special else {})
        if base is not None and any(given.get(name, base[name]) != base[name] for name in TOKEN_FLAGS):
            _refuse(f"finds the base's own token {show(token['content'])} in another way")


def _merges(model: Mapping[str, Any]) -> Any:
    """Return the merges as pairs; older files have one string for each."""
    merges = model.get("merges") or []
    if not isinstance(merges, list):
        return merges
    return [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]


def _plain(part: str, value: Any) -> Any:
    """Return a part of a tokenizer; None for a post-processor that adds nothing."""
    adds_nothing = part == "post_processor" and isinstance(value, Mapping) and value.get("single") == _TEXT_ALONE
    return None if adds_nothing else value


def _in_order(tokens: Sequence[Mapping[str, Any]], named: set[str], first: int) -> list[dict[str, Any]]:
    """Return the new tokens, after checking that they are added tokens that follow the base's last one without a
    gap."""
    if len(tokens) != len(named):
        other = sorted(named - {token["content"] for token in tokens})
        _refuse(f"has tokens in its vocabulary that the base lacks, such as {show(other[0]) if other else 'one twice'}")
    if len(tokens) > MAX_ADDED_TOKENS:
        what = f"names {len(tokens)} tokens that the base lacks; {MAX_ADDED_TOKENS} are the most"
        raise AdapterInvalid((Problem("too_many_added_tokens", "tokenizer", what),))
    ordered = sorted(tokens, key=lambda token: token["id"])
    for number, token in enumerate(ordered, first):
        if token["id"] != number:
            _refuse(f"has {show(token['content'])} as token {show(token['id'])}; {number} follows the base's")
    return [{name: token[name] for name in ("id", "content", *TOKEN_FLAGS) if name in token} for token in ordered]


def _refuse(what: str) -> NoReturn:
    raise AdapterInvalid((Problem("unsupported_tokenizer", "tokenizer.json", what),))
