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
"""The form of an adapter in memory: "bf16" is the server's adapter dtype, "int8" codes with scales
(`formats/int8_codes.py`)."""
BF16: Form = "bf16"
INT8: Form = "int8"
FORMS: tuple[Form, ...] = (BF16, INT8)
MAX_LORA_RANK = 256
"""Highest rank that the kernels compute (`sgmv_kernels.formats.adapter_panels.MAX_RANK`)."""


@dataclass(frozen=True, slots=True)
class BaseShapes:
    """Describe the base that an adapter must fit: the linears of every decoder layer, by their Hugging Face names.

    `modules` maps a module's path inside its layer (`self_attn.q_proj`) to (in_features, out_features); the modules in
    `biased` have a bias. `norms` maps paths inside a layer to widths; `final_norm` is a full name. `lacking` holds
    (layer, path) of linears and norms that this layer does not have. `name` is the base's name for clients,
    `checkpoint` the name of its file or folder; both are used only in warnings. `ends` maps full names of linears
    outside the layers to (in_features, out_features); the in_features of `embedding`, if it is among them, are tokens.
    `tied` means that the head has the embedding's weights.
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
        """Return the number of tokens of the base; 0 if its embedding is unknown."""
        return self.ends[self.embedding][0] if self.embedding in self.ends else 0

    @property
    def hidden_size(self) -> int:
        """Return the hidden size, the inputs of a layer's first module; 0 without modules."""
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

    `module` is the path inside the layer; outside the layers it is the full name, and `layer` the number of layers.
    `magnitude` is DoRA's, [out]; `b_bias` a bias [out] beside lora_B. A column of the file's lora_A is for `group_size`
    inputs, which QALoRA pools.
    """

    layer: int
    module: str
    rank: int
    scaling: float
    a_name: str
    b_name: str
    magnitude: str | None = None
    b_bias: str | None = None
    group_size: int = 1


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Name a tensor of the file that replaces one of the base's: a linear's bias, or a norm's weight.

    `module` is the path inside the layer; the final norm has its full name, and the last layer. `parameter` is the
    full name of the parameter that PEFT replaces.
    """

    layer: int
    module: str
    name: str
    parameter: str


@dataclass(frozen=True, slots=True)
class VocabRows:
    """Name a tensor [N, H] whose rows replace the base's rows of tokens in the embedding or in the head.

    `module` is one of `BaseShapes.ends`; `name` is the tensor's. Its rows are those of `token_ids`, or of all tokens in
    order (a copy of the whole table) if that is None. A `frozen` copy was not trained: it is the table of the base that
    the adapter was trained on. `parameter` is the full name of the parameter that PEFT replaces.
    """

    module: str
    name: str
    parameter: str
    token_ids: tuple[int, ...] | None = None
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class AddedToken:
    """Describe a token that an adapter's tokenizer adds to the base's, as its tokenizer.json does."""

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

    `modules` and `saved` are sorted by (layer, module); `heads` are Medusa's. Among `rows` for the same token of a
    module, the last ones apply. `vocab_size` is the number of tokens that it was trained with, 0 for as many as the
    base has; `added_tokens` are the tokens that its tokenizer adds. With `invocation_tokens` it is an aLoRA: it acts
    only from the last place in the prompt that has these tokens.
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
    invocation_tokens: tuple[int, ...] = ()

    @property
    def max_rank(self) -> int:
        """Return the highest rank of any module."""
        return max(m.rank for m in self.modules)


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """Name the version that a reference was resolved to, once, at admission.

    `key` is None if the version has no weights: the base answers. `persona` is the digest of its defaults, or "".
    """

    adapter_id: AdapterId
    version: int
    key: AdapterKey | None
    persona: str = ""
