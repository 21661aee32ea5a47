"""What a decoder is built from: one frozen description that every family's checkpoint is read into.

A family of known parts is a TOML file under `specs/` and no Python: it maps the checkpoint's configuration keys and
tensor names to the fields below (`lorasrv.models.family`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. `kind` is default, linear, llama3 or factors.

    `factor` is read by linear and llama3, the three after it by llama3; `factors` divides each of the head_dim / 2
    frequencies (a GGUF file holds llama3's scaling in this form, as the tensor `rope_freqs.weight`).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()


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
    """A decoder-only transformer: pre-norm, RMSNorm, rotary attention with grouped heads, gated MLP."""

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
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, None where attention is full."""
        if self.sliding_window is None or (self.windowed_layers and not self.windowed_layers[layer]):
            return None
        return self.sliding_window

    def sites(self) -> tuple[SiteShape, ...]:
        """The four linear sites of a layer, in the order of the forward pass: qkv, o, gate_up, down."""
        h, f, q, kv = self.hidden_size, self.intermediate_size, self.q_width, self.kv_width
        attn, mlp = "self_attn.", "mlp."
        return (
            SiteShape("qkv", h, (attn + "q_proj", attn + "k_proj", attn + "v_proj"), (q, kv, kv)),
            SiteShape("o", q, (attn + "o_proj",), (h,)),
            SiteShape("gate_up", h, (mlp + "gate_proj", mlp + "up_proj"), (f, f)),
            SiteShape("down", f, (mlp + "down_proj",), (h,)),
        )
