"""How a checkpoint describes its tokenizer: plain data, read by the loaders, built by `lorasrv.tokenizer`. No torch."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenizerJson:
    """The text of a tokenizer.json."""

    text: str


@dataclass(frozen=True, slots=True)
class BpeVocabulary:
    """A byte-level BPE as GGUF metadata holds it. `merges` are pairs joined by a space, in order of rank.

    `pre` names the pre-tokenizer (tokenizer.ggml.pre); `control` and `user_defined` are ids of added tokens.
    """

    tokens: tuple[str, ...]
    merges: tuple[str, ...]
    pre: str
    control: tuple[int, ...] = ()
    user_defined: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """A vocabulary and what goes around it. `special` maps bos_token, eos_token... to their text, for templates."""

    vocabulary: TokenizerJson | BpeVocabulary
    chat_template: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    special: dict[str, str] = field(default_factory=dict)
