"""Validated adapters as plain frozen data, without torch or peft.

Orientation is PEFT's: `lora_a [rank, in]`, `lora_b [out, rank]`, delta = scaling * lora_b @ lora_a.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NewType

AdapterId = NewType("AdapterId", str)
"""A name chosen by a person; it points to a current version that can change."""
AdapterKey = NewType("AdapterKey", str)
"""64 hex digits that identify one immutable content: SHA-256 over the config fields that change the result, the
weights' digest and the form. Keys residency, host copies and KV reuse."""
Form = Literal["bf16", "int8"]
"""In which form an adapter is kept in memory: "bf16" is the server's adapter dtype, "int8" codes with scales
(`formats/int8_codes.py`)."""
BF16: Form = "bf16"
INT8: Form = "int8"
FORMS: tuple[Form, ...] = (BF16, INT8)


@dataclass(frozen=True, slots=True)
class BaseShapes:
    """Describe what an adapter must fit: the linear modules of every decoder layer, by their Hugging Face names.

    `modules` maps a module's path inside its layer (`self_attn.q_proj`) to (in_features, out_features); those of
    `biased` have a bias. `norms` maps paths inside a layer to widths, `final_norm` is a full name; `lacking` holds
    linears and norms that single layers do not have. `name` is what clients call the base, `checkpoint` the name of its
    file or folder; both serve warnings only. `ends` maps full names of linears outside the layers to (in_features,
    out_features); that of `embedding`, if it is among them, has a token for each input. `tied` says that the head's
    weights are the embedding's.
    """

    family: str
    num_layers: int
    modules: Mapping[str, tuple[int, int]]
    layer_prefix: str = "model.layers."
    name: str = ""
    checkpoint: str = ""
    lacking: frozenset[tuple[int, str]] = frozenset()
    biased: frozenset[str] = frozenset()
    norms: Mapping[str, int] = field(default_factory=dict)
    final_norm: str = ""
    ends: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    embedding: str = ""
    tied: bool = False

    @property
    def vocab_size(self) -> int:
        """Return how many tokens the base has; 0 if its embedding is unknown."""
        return self.ends[self.embedding][0] if self.embedding in self.ends else 0

    @property
    def hidden_size(self) -> int:
        """Return the numbers of a hidden state: what a layer's first module reads; 0 without modules."""
        return next(iter(self.modules.values()), (0, 0))[0]

    def widths(self, module: str) -> tuple[int, int]:
        """Return the inputs and outputs of a linear, in the layers or outside them."""
        return self.ends[module] if module in self.ends else self.modules[module]

    def places(self) -> Iterator[tuple[int, str]]:
        """Yield (layer, module) of every linear of the layers, in order."""
        for layer in range(self.num_layers):
            yield from ((layer, module) for module in self.modules if (layer, module) not in self.lacking)


@dataclass(frozen=True, slots=True)
class LoraModule:
    """Describe one adapted linear: its place, rank, scaling and the tensors of the file that hold it.

    `module` is the path inside the layer; outside the layers the full name, and `layer` their number.
    `magnitude` is DoRA's, [out]; `b_bias` a bias [out] beside lora_B.
    """

    layer: int
    module: str
    rank: int
    scaling: float
    a_name: str
    b_name: str
    magnitude: str | None = None
    b_bias: str | None = None


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Name a tensor of the file that replaces one of the base's: a linear's bias, or a norm's weight.

    `module` is the path inside the layer; the final norm has its full name, and the last layer. `parameter` is the
    full name of what PEFT replaces.
    """

    layer: int
    module: str
    name: str
    parameter: str


@dataclass(frozen=True, slots=True)
class VocabRows:
    """Name a tensor [N, H] whose rows stand for tokens in the embedding or in the head, instead of the base's.

    `module` is one of `BaseShapes.ends`; `name` is the tensor's. Its rows are those of `token_ids`, or of all tokens in
    order if that is None: a copy of the whole table. A `frozen` copy was saved beside what was trained: it is the base
    that the adapter was trained on. `parameter` is the full name of what PEFT replaces.
    """

    module: str
    name: str
    parameter: str
    token_ids: tuple[int, ...] | None = None
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class AddedToken:
    """Describe a token that an adapter's tokenizer has beyond the base's, as its tokenizer.json does."""

    id: int
    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True


@dataclass(frozen=True, slots=True)
class HeadBlock:
    """Name the tensors of one block of a Medusa head."""

    weight: str
    bias: str | None


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Describe a validated adapter.

    `modules` and `saved` are sorted by (layer, module); `heads` are Medusa's. Of `rows` that stand for the same token
    of a module, the last ones count. `vocab_size` is the number of tokens that it was trained with, 0 for as many as
    the base has; `added_tokens` are those of its own that texts are written with.
    """

    key: AdapterKey
    weights_digest: str
    modules: tuple[LoraModule, ...]
    dtype: str
    weights_bytes: int
    stored: Form = BF16
    heads: tuple[tuple[HeadBlock, ...], ...] = ()
    saved: tuple[SavedTensor, ...] = ()
    rows: tuple[VocabRows, ...] = ()
    vocab_size: int = 0
    added_tokens: tuple[AddedToken, ...] = ()

    @property
    def max_rank(self) -> int:
        """Return the highest rank of any module."""
        return max(m.rank for m in self.modules)


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """Name the version that a reference was resolved to, once, at admission.

    `key` is None if the version has no weights: the base answers. `persona` is the digest of its defaults, "" without.
    """

    adapter_id: AdapterId
    version: int
    key: AdapterKey | None
    persona: str = ""
