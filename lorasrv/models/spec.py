"""What a decoder is built from: one frozen description that every family's checkpoint is read into.

A family of known parts is a TOML file under `specs/` and no Python: it maps the checkpoint's configuration keys and
tensor names to the fields below (`lorasrv.models.families`).

What a token costs in arithmetic, by the shapes alone: multiplications and additions, each counted as one.

Shapes of well-known models, to be measured with random weights (`--load-format dummy`).
"""

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. `kind` is default, linear, llama3, yarn or factors.

    `factor` is read by linear, llama3 and yarn, `original_max_position` by llama3 and yarn, the two before it by
    llama3, `beta_fast`, `beta_slow` and `truncate` by yarn; `factors` divides each of the frequencies (LongRoPE, and
    llama3's scaling as a GGUF file holds it, in the tensor `rope_freqs.weight`). Cosines and sines are multiplied by
    `attention_factor`. Only the first `dims` numbers of a head are turned, all where it is 0. `max_position`: positions
    for which this is what the model was made with; None for all.
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    dims: int = 0
    max_position: int | None = None


@dataclass(frozen=True, slots=True)
class SiteShape:
    """One place where a linear is applied and adapters add their deltas: slices that share an input, as one product.

    `modules` are the Hugging Face module paths inside a layer, one a slice, `out_features` their widths.
    """

    name: str
    in_features: int
    modules: tuple[str, ...]
    out_features: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer: pre-norm, RMSNorm, rotary attention with grouped heads, gated MLP.

    `rope_local`: what layers with a window turn by, where it is not `rope`. `qk_norm`: heads of q and k have norms of
    their own. `post_norms`: what attention and MLP give is normed too, before it is added. `norms_less_one`: the
    checkpoint holds norm weights less 1. `scaled_embedding`: embeddings times sqrt(hidden_size). `fused`: q, k, v are
    one module of the checkpoint, which adapters name, gate and up another. `query_scalar`: scores are divided by its
    root, head_dim where it is 0. `attn_softcap`, `final_softcap`: how far from 0 scores and logits go.
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
    activation: str = "silu"
    rope: RopeSpec = RopeSpec()
    qkv_bias: bool = False
    attn_out_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False
    sliding_window: int | None = None
    windowed_layers: tuple[bool, ...] = ()
    rope_local: RopeSpec | None = None
    qk_norm: bool = False
    post_norms: bool = False
    norms_less_one: bool = False
    scaled_embedding: bool = False
    fused: bool = False
    query_scalar: float = 0.0
    attn_softcap: float | None = None
    final_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        return 1 / math.sqrt(self.query_scalar or self.head_dim)

    def norms(self) -> dict[str, tuple[str, int]]:
        """Norms of a layer: the decoder's name -> (Hugging Face module path inside the layer, width)."""
        h, after = self.hidden_size, "post_attention_layernorm"
        norms = {"input_norm": ("input_layernorm", h), "post_attn_norm": (after, h)}
        if self.post_norms:
            norms["post_attn_norm"] = ("pre_feedforward_layernorm", h)
            norms |= {"attn_out_norm": (after, h), "mlp_out_norm": ("post_feedforward_layernorm", h)}
        if self.qk_norm:
            norms |= {f"{x}_norm": (f"self_attn.{x}_norm", self.head_dim) for x in "qk"}
        return norms

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, None where attention is full."""
        if self.sliding_window is None or (self.windowed_layers and not self.windowed_layers[layer]):
            return None
        return self.sliding_window

    def sites(self) -> tuple[SiteShape, ...]:
        """The four linear sites of a layer, in the order of the forward pass: qkv, o, gate_up, down."""
        h, f, q, kv = self.hidden_size, self.intermediate_size, self.q_width, self.kv_width
        attn, mlp = "self_attn.", "mlp."
        qkv = SiteShape("qkv", h, (attn + "q_proj", attn + "k_proj", attn + "v_proj"), (q, kv, kv))
        gate_up = SiteShape("gate_up", h, (mlp + "gate_proj", mlp + "up_proj"), (f, f))
        if self.fused:
            qkv = SiteShape("qkv", h, (attn + "qkv_proj",), (q + 2 * kv,))
            gate_up = SiteShape("gate_up", h, (mlp + "gate_up_proj",), (2 * f,))
        return (
            qkv,
            SiteShape("o", q, (attn + "o_proj",), (h,)),
            gate_up,
            SiteShape("down", f, (mlp + "down_proj",), (h,)),
        )


@dataclass(frozen=True, slots=True)
class Operations:
    """Of the linears of all layers for a token of prompt or answer; of the head for a token that is sampled; of
    attention for each token that a token looks back at, windows not regarded.
    """

    token: int
    sampled_token: int
    context_token: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def operations(spec: ModelSpec) -> Operations:
    """For one token of the base, without adapters."""
    weights = sum(site.in_features * sum(site.out_features) for site in spec.sites())
    return Operations(
        token=2 * spec.num_layers * weights,
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
"""Built-in shapes, by the name that `--model` takes."""
