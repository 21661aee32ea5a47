"""Describe a model for the decoder; every family's checkpoint is read into a `ModelSpec`.

A new family of known parts is a TOML file under `specs/`, without Python: it maps the checkpoint's configuration keys
and tensor names to the fields below (`lorasrv.models.families`). `operations` counts the arithmetic of one token, with
a multiplication and an addition each as one operation. `SHAPES` has well-known models for random weights
(`--load-format dummy`).
"""

import math
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Describe a rotary embedding."""

    theta: float = 10_000.0
    # default, linear, llama3, yarn or factors.
    kind: str = "default"
    # Read by linear, llama3 and yarn.
    factor: float = 1.0
    # Read by llama3.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # Read by llama3 and yarn.
    original_max_position: int = 8192
    # Divisor of each frequency: LongRoPE, and llama3's scaling as a GGUF file's tensor `rope_freqs.weight` holds it.
    factors: tuple[float, ...] = ()
    # Factor of cosines and sines.
    attention_factor: float = 1.0
    # The next three are read by yarn.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    # How many numbers of a head are rotated, from the first on; 0 for all.
    dims: int = 0
    # Number of positions for which these settings are valid; None for no limit.
    max_position: int | None = None


@dataclass(frozen=True, slots=True)
class SiteShape:
    """Describe a linear site of a layer: modules with the same input, computed as slices of one product."""

    name: str
    in_features: int
    # Hugging Face module paths inside a layer, one per slice.
    modules: tuple[str, ...]
    # Widths of the slices.
    out_features: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of weights."""
        return self.in_features * sum(self.out_features)


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """Name the modules of a checkpoint if they differ from Llama's.

    Canonical names, used outside this class, have Llama's prefix, and inside a layer the modules named here.
    """

    layers: str = "model.layers."
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    # The norms before attention and before the MLP, inside a layer.
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    # The modules of the four sites, inside a layer; empty for Llama's.
    sites: tuple[tuple[str, ...], ...] = ()
    # One of `TEXT_PARTS` for the language part of a multimodal model.
    text_part: tuple[str, str] | None = None

    def in_file(self, name: str) -> str:
        """Return the checkpoint's own name of a canonical tensor name."""
        if self.text_part is not None:
            model, head = self.text_part
            return model + name.removeprefix(_MODEL) if name.startswith(_MODEL) else head + name
        if name.startswith(LLAMA_LAYERS):
            return self.layers + name.removeprefix(LLAMA_LAYERS)
        module, dot, kind = name.rpartition(".")
        return {"model.embed_tokens": self.embedding, "model.norm": self.final_norm}.get(module, module) + dot + kind

    def are_for(self, own: str) -> bool:
        """Return whether a tensor of the checkpoint belongs to the part that is served."""
        if self.text_part is None:
            return True
        model, head = self.text_part
        return own.startswith((model, f"{head}lm_head."))

    def spellings(self, module: str) -> tuple[str, ...]:
        """Return the names of a module of the checkpoint in all versions of transformers."""
        if self.text_part is None:
            return (module,)
        place = 0 if module.startswith(self.text_part[0]) else 1
        return tuple(part[place] + module.removeprefix(self.text_part[place]) for part in TEXT_PARTS)


_MODEL = "model."
LLAMA_LAYERS = "model.layers."
"""Prefix of layers in canonical names."""
TEXT_PARTS = (("language_model.model.", "language_model."), ("model.language_model.", ""))
"""Prefixes in multimodal checkpoints: the one for `model.` of the language part, and the one before `lm_head`.

First those of most published checkpoints, then those of transformers since version 4.52.
"""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Describe a decoder-only transformer.

    Norms come before or after attention and MLP; key heads are grouped; positions are rotary or ALiBi; the MLP may have
    a gate.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    # rms or layer.
    norm: str = "rms"
    activation: str = "silu"
    # The MLP multiplies by a gate.
    gated: bool = True
    # Exponent of ALiBi's last slope; 0 for a rotary embedding.
    alibi_max: float = 0.0
    rope: RopeSpec = RopeSpec()
    qkv_bias: bool = False
    attn_out_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False
    sliding_window: int | None = None
    # For each layer, whether it has the window; empty if all have it.
    windowed_layers: tuple[bool, ...] = ()
    # For each layer, the layer whose keys and values it reads: itself or an earlier one; empty if all read their own.
    kv_source_layers: tuple[int, ...] = ()
    # Rotary embedding of layers with a window, if it differs from `rope`.
    rope_local: RopeSpec | None = None
    # For each layer, whether its heads have no rotary embedding (NoPE); empty if all have one.
    unrotated_layers: tuple[bool, ...] = ()
    # q and k have their own norms: of each head, or of all heads together.
    qk_norm: bool = False
    wide_qk_norm: bool = False
    # The inputs of attention and MLP are normed.
    pre_norms: bool = True
    # The outputs of attention and MLP are normed before they are added.
    post_norms: bool = False
    # The checkpoint holds norm weights minus 1.
    norms_less_one: bool = False
    # The modules of transformers add 1 to norm weights, so adapters hold them minus 1, regardless of the checkpoint.
    norms_add_one: bool = False
    # Factor of embedded tokens.
    embedding_scale: float = 1.0
    # Factor of the outputs of attention and MLP, before they are added.
    residual_scale: float = 1.0
    # Divisor of logits.
    logit_divisor: float = 1.0
    # q, k and v are one module of the checkpoint and of adapters; gate and up are another one.
    fused: bool = False
    # Scores are divided by the square root of this; 0 for head_dim.
    query_scalar: float = 0.0
    # Softcaps (bounds by tanh) of the scores and of the logits; None for no bound.
    attn_softcap: float | None = None
    final_softcap: float | None = None
    names: ModuleNames = ModuleNames()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def q_width(self) -> int:
        """Return the width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Return the width of all key heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        """Return the factor of attention scores."""
        return 1 / math.sqrt(self.query_scalar or self.head_dim)

    @property
    def adapts_ends(self) -> bool:
        """Return whether adapters may change the embedding and the head: only where a rank has all of both."""
        return True

    @property
    def has_table_head(self) -> bool:
        """Return whether the head is tied to the embedding, even if another rank has the embedding."""
        return self.tied_head

    @property
    def first_layer(self) -> int:
        """Return the index in the whole model of this part's layer 0."""
        return 0

    def own_outputs(self, site: int, module: int) -> "slice | npt.NDArray[np.int64]":
        """Return which outputs of a module this rank has, as an index; `site` and `module` index `sites()`."""
        del site, module
        return slice(None)

    def own_inputs(self, site: int) -> slice:
        """Return which inputs of a site this rank has."""
        del site
        return slice(None)

    def adds_biases(self, site: int) -> bool:
        """Return whether this rank adds the biases of a site's outputs; of ranks that share a sum, only one does."""
        del site
        return True

    def alibi_slopes(self) -> tuple[float, ...]:
        """Return each head's ALiBi slope, which is subtracted from scores per token of distance, as in MPT.

        Empty without ALiBi.
        """
        if not self.alibi_max:
            return ()
        count = 1 << (self.num_heads - 1).bit_length()
        slopes = [2.0 ** (-self.alibi_max * (i + 1) / count) for i in range(count)]
        return tuple(slopes if count == self.num_heads else (slopes[1::2] + slopes[::2])[: self.num_heads])

    def has_own_kv(self, layer: int) -> bool:
        """Return whether a layer computes its own keys and values; other layers read those of their source."""
        return not self.kv_source_layers or self.kv_source_layers[layer] == layer

    @property
    def kv_slabs(self) -> tuple[int, ...]:
        """Return for each layer the pool's slab with its keys and values; only layers with their own have a slab."""
        sources = self.kv_source_layers or range(self.num_layers)
        slabs = {source: slab for slab, source in enumerate(sorted(set(sources)))}
        return tuple(slabs[source] for source in sources)

    @property
    def num_slabs(self) -> int:
        """Return the number of layers that have keys and values of their own."""
        return len(set(self.kv_source_layers)) or self.num_layers

    def norms(self, layer: int) -> dict[str, tuple[str, int]]:
        """Return the norms of a layer: the decoder's name -> (Hugging Face module path inside the layer, width)."""
        h = self.hidden_size
        before, after = self.names.norms
        norms = {}
        if self.pre_norms:
            before_mlp = "pre_feedforward_layernorm" if self.post_norms else after
            norms = {"input_norm": (before, h), "post_attn_norm": (before_mlp, h)}
        if self.post_norms:
            norms |= {"attn_out_norm": (after, h), "mlp_out_norm": ("post_feedforward_layernorm", h)}
        if self.qk_norm:
            heads = {"q": self.q_width, "k": self.kv_width} if self.has_own_kv(layer) else {"q": self.q_width}
            widths = heads if self.wide_qk_norm else dict.fromkeys(heads, self.head_dim)
            norms |= {f"{x}_norm": (f"self_attn.{x}_norm", width) for x, width in widths.items()}
        return norms

    def places(self) -> dict[str, int]:
        """Return the outputs of a layer that an adapter may scale and shift, with their widths.

        The sites' outputs come first, in the order of `sites()`, then the norms' outputs. `qk_norm` is all heads of q,
        k and v after their norms, or `q_norm` in layers that have only q. Only the last layer has `final_norm`.
        """
        names = ("qkv", "o", "gate_up", "down", "q")
        widths = {name: sum(site.out_features) for name, site in zip(names, self.sites(), strict=False)}
        norms = {name: width for name, (_, width) in self.norms(0).items() if name not in ("q_norm", "k_norm")}
        heads = {"qk_norm": self.q_width + 2 * self.kv_width, "q_norm": self.q_width} if self.qk_norm else {}
        return widths | norms | heads | {"final_norm": self.hidden_size}

    def has_bias(self, site: str) -> bool:
        """Return whether the linears of a site have a bias."""
        biases = {"qkv": self.qkv_bias, "o": self.attn_out_bias, "gate_up": self.mlp_bias, "down": self.mlp_bias}
        return biases[site]

    @property
    def why_no_kv_policy(self) -> str | None:
        """Return why requests to this model cannot have a KV policy; None if they can."""
        if self.sliding_window is not None:
            return "layers of this model have windows of their own"
        return "this model knows distances from the keys that it sees (ALiBi)" if self.alibi_slopes() else None

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens; None if attention is full."""
        if self.sliding_window is None or (self.windowed_layers and not self.windowed_layers[layer]):
            return None
        return self.sliding_window

    def rope_of(self, layer: int) -> RopeSpec | None:
        """Return the rotary embedding of a layer; None if it has none."""
        if self.alibi_max or (self.unrotated_layers and self.unrotated_layers[layer]):
            return None
        return self.rope_local if self.rope_local is not None and self.window(layer) else self.rope

    def sites(self) -> tuple[SiteShape, ...]:
        """Return all kinds of linear sites: qkv, o, gate_up, down; then qkv of layers without keys and values of their
        own, if there are any.
        """
        h, f, q, kv = self.hidden_size, self.intermediate_size, self.q_width, self.kv_width
        attn, mlp = "self_attn.", "mlp."
        qkv = SiteShape("qkv", h, (attn + "q_proj", attn + "k_proj", attn + "v_proj"), (q, kv, kv))
        gate_up = SiteShape("gate_up", h, (mlp + "gate_proj", mlp + "up_proj"), (f, f))
        if self.fused:
            qkv = SiteShape("qkv", h, (attn + "qkv_proj",), (q + 2 * kv,))
            gate_up = SiteShape("gate_up", h, (mlp + "gate_up_proj",), (2 * f,))
        if not self.gated:
            gate_up = SiteShape("gate_up", h, (mlp + "up_proj",), (f,))
        o, down = SiteShape("o", q, (attn + "o_proj",), (h,)), SiteShape("down", f, (mlp + "down_proj",), (h,))
        sites = [qkv, o, gate_up, down]
        if self.names.sites:
            named = zip(sites, self.names.sites, strict=True)
            sites = [replace(site, modules=modules) for site, modules in named]
        if self.num_slabs < self.num_layers:
            sites.append(replace(sites[0], modules=sites[0].modules[:1], out_features=(q,)))
        return tuple(sites)

    def site_indices(self, layer: int) -> tuple[int, int, int, int]:
        """Return the indices in `sites()` of a layer's four sites, in the order of the forward pass."""
        return 0 if self.has_own_kv(layer) else 4, 1, 2, 3

    def sites_of(self, layer: int) -> tuple[SiteShape, ...]:
        """Return the four sites of a layer in the order of the forward pass."""
        sites = self.sites()
        return tuple(sites[index] for index in self.site_indices(layer))

    @property
    def linear_weights(self) -> int:
        """Return the number of weights of all layers' linears."""
        return sum(site.size for layer in range(self.num_layers) for site in self.sites_of(layer))

    @property
    def table_weights(self) -> int:
        """Return the number of weights of the embedding, and of the head if it is separate."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)


@dataclass(frozen=True, slots=True)
class Operations:
    """Count the operations of all layers, ignoring sliding windows."""

    # Linears of all layers, per token.
    token: int
    # Head, per sampled token.
    sampled_token: int
    # Attention, per attended token.
    context_token: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def operations(spec: ModelSpec) -> Operations:
    """Return the operations of one token of the base, without adapters."""
    return Operations(
        token=2 * spec.linear_weights,
        sampled_token=2 * spec.hidden_size * spec.vocab_size,
        context_token=4 * spec.num_layers * spec.q_width,
    )


SHAPES = {
    "llama-3-8b": ModelSpec(
        family="llama",
        num_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position=8192,
        norm_eps=1e-5,
        rope=RopeSpec(theta=500_000.0),
        eos_token_ids=(128001,),
        bos_token_id=128000,
    )
}
"""Built-in shapes, by their name for `--model`."""
