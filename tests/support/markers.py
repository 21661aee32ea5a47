"""A tiny llama whose adapters each force their own token, so that any mix-up causes a wrong token.

The weights are hand-made: the hidden state is a row of named coordinates, and every path through the model is known.

    ONE      a constant from the embedding, from which base and adapters write their codes
    P        code i, 0..32: written by v_proj into every position's *value*, so it is in the KV cache
    D        code j, 0..32: written by the MLP (down_proj, in some adapters up_proj or gate_proj) into the current row
    TOPIC    one of 7, from the embedding: the base's v_proj writes it into the value beside code i
    ANSWER   topic of the positions that were attended to
    NOISE    the token's own random part, from which queries and keys are made

A token stands for a triple (topic, i, j), and its row of lm_head is the sum of three unit vectors, so that the argmax
over all tokens is three independent ones. Adapter number a, 0..1023, is the pair (a // 32, a % 32); the base outputs
(32, 32) through small weights, which every adapter overrides. Attention is sharp: nearly all of a token's i and topic
come from one position of the context, a different one at each step. Mix-ups therefore have these effects:

    a wrong segment, panel or page of weights   another j, mostly another i
    keys and values of another adapter          another i as soon as one of its positions is attended to
    those of another prompt, same adapter       a topic that is not in the request's prompt

Not detected are keys and values of another prompt of the same adapter and the same topics.

Adapters are written as PEFT directories without peft, so that a thousand take only seconds. `VARIETIES` differ in rank,
scaling, layers and modules, and in noise beside the marker.
"""

import contextlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from adapter_keys import key_of
from safetensors.numpy import save_file

from adapter_store.errors import AdapterNotFound
from adapter_store.formats.peft_dir import read_peft_dir
from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore

LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 2, 4, 2, 40, 80
CODES, TOPICS = 33, 7
BASE_CODE = CODES - 1
NUM_ADAPTERS = BASE_CODE * BASE_CODE
OFFSET = 384
"""Lower ids are the tokenizer's own; their topic is the id modulo 7."""
VOCAB = OFFSET + TOPICS * CODES * CODES

ONE, P, D, TOPIC, ANSWER, NOISE = 0, 1, 1 + CODES, 1 + 2 * CODES, 1 + 2 * CODES + TOPICS, 1 + 2 * CODES + 2 * TOPICS
HIDDEN = 96
UNIT, UP_UNITS, GATE_UNITS, NOISE_UNITS = 0, 1, 1 + CODES, 1 + 2 * CODES
"""Units of the MLP: a constant one, one per code for `up_proj` to open, one per code for `gate_proj`, random ones."""

ADAPTER_GAIN, BASE_GAIN, TOPIC_GAIN = 1.0, 0.06, 0.5
VALUE_MODULE = "self_attn.v_proj"
WIDTHS = {
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD_DIM),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.o_proj": (HEADS * HEAD_DIM, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
"""Module -> (in, out)."""

Matrix = npt.NDArray[np.float32]


class Marker(NamedTuple):
    """The codes that an adapter forces."""

    i: int
    j: int


class Said(NamedTuple):
    """The topic and codes that a token stands for."""

    topic: int
    marker: Marker


BASE = Marker(BASE_CODE, BASE_CODE)


def marker(number: int | None) -> Marker:
    """Return the marker of an adapter by its number; None is the base."""
    return BASE if number is None else Marker(*divmod(number, BASE_CODE))


def token_of(topic: int, mark: Marker) -> int:
    return OFFSET + (topic * CODES + mark.i) * CODES + mark.j


def said_by(token: int) -> Said | None:
    """Return what a token stands for; None for a token that no adapter forces."""
    if not OFFSET <= token < VOCAB:
        return None
    rest, j = divmod(token - OFFSET, CODES)
    topic, i = divmod(rest, CODES)
    return Said(topic, Marker(i, j))


def topic_of(token: int) -> int:
    said = said_by(token)
    return token % TOPICS if said is None else said.topic


def zipf_odds(count: int, exponent: float = 1.1) -> list[float]:
    """Return cumulative weights of ranks 1 to count, for `random.choices`."""
    return list(itertools.accumulate(rank**-exponent for rank in range(1, count + 1)))


# The model.


def write_model(folder: Path, tokenizer_json: bytes) -> Path:
    """Write a Hugging Face directory. The tokenizer may have fewer tokens than the model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer_json)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    save_file(_weights(np.random.default_rng(0)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def _weights(rng: np.random.Generator) -> dict[str, Matrix]:
    weights = {"model.embed_tokens.weight": _embedding(rng), "lm_head.weight": _head(), "model.norm.weight": _norm()}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        modules = {module: np.zeros(WIDTHS[module][::-1], np.float32) for module in WIDTHS}
        _fill_attention(modules, layer, rng)
        _fill_mlp(modules, rng)
        weights |= {f"{stem}.{module}.weight": weight for module, weight in modules.items()}
        weights |= {f"{stem}.{norm}.weight": _norm() for norm in ("input_layernorm", "post_attention_layernorm")}
    return weights


def _norm() -> Matrix:
    return np.ones(HIDDEN, np.float32)


def _embedding(rng: np.random.Generator) -> Matrix:
    """Return an embedding in which every token has the same norm, so that the constant is also 1 after RMSNorm."""
    table = np.zeros((VOCAB, HIDDEN), np.float32)
    noise = rng.standard_normal((VOCAB, HIDDEN - NOISE))
    table[:, NOISE:] = 4 * noise / np.linalg.norm(noise, axis=1, keepdims=True)
    table[:, ONE] = 4
    table[np.arange(VOCAB), [TOPIC + topic_of(token) for token in range(VOCAB)]] = 4
    return table


def _head() -> Matrix:
    head = np.zeros((VOCAB, HIDDEN), np.float32)
    for token in range(OFFSET, VOCAB):
        said = said_by(token)
        assert said is not None
        head[token, [P + said.marker.i, D + said.marker.j, ANSWER + said.topic]] = 1
    return head


def _fill_attention(modules: dict[str, Matrix], layer: int, rng: np.random.Generator) -> None:
    """Make all heads attend to the same position: otherwise, correct pages could outvote a wrong one."""
    sharpness = 0.5 * (layer + 1)  # the additions of layer 0 to the hidden state make the noise relatively smaller
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        one = sharpness * rng.standard_normal((HEAD_DIM, HIDDEN - NOISE))
        modules[f"self_attn.{name}_proj"][:, NOISE:] = np.tile(one, (heads, 1))
    value, out = modules["self_attn.v_proj"], modules["self_attn.o_proj"]
    for head in range(KV_HEADS):
        value[head * HEAD_DIM + BASE_CODE, ONE] = BASE_GAIN
        for topic in range(TOPICS):
            value[head * HEAD_DIM + CODES + topic, TOPIC + topic] = TOPIC_GAIN
    for head in range(HEADS):
        for code in range(CODES):
            out[P + code, head * HEAD_DIM + code] = 1 / HEADS
        for topic in range(TOPICS):
            out[ANSWER + topic, head * HEAD_DIM + CODES + topic] = 1 / HEADS


def _fill_mlp(modules: dict[str, Matrix], rng: np.random.Generator) -> None:
    gate, up, down = (modules[f"mlp.{name}_proj"] for name in ("gate", "up", "down"))
    gate[UNIT:GATE_UNITS, ONE] = 0.5
    up[[UNIT, *range(GATE_UNITS, NOISE_UNITS)], ONE] = 0.25
    down[D + BASE_CODE, UNIT] = BASE_GAIN
    for code in range(CODES):
        down[D + code, [UP_UNITS + code, GATE_UNITS + code]] = 1
    for weight in (gate, up):
        weight[NOISE_UNITS:, NOISE:] = 0.2 * rng.standard_normal((INNER - NOISE_UNITS, HIDDEN - NOISE))
    down[NOISE:, NOISE_UNITS:] = 0.05 * rng.standard_normal((HIDDEN - NOISE, INNER - NOISE_UNITS))


# Adapters.


@dataclass(frozen=True)
class Variety:
    """The way in which an adapter writes its marker: `i_layers` of v_proj, `j_layers` of `j_module`; `noise` modules in
    all layers change queries, keys and the random units, never a marker. `ranks` and `alphas` are PEFT's patterns."""

    rank: int
    alpha: float
    i_layers: tuple[int, ...] = (0, 1)
    j_layers: tuple[int, ...] = (0, 1)
    j_module: str = "mlp.down_proj"
    noise: tuple[str, ...] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False

    def rank_of(self, module: str) -> int:
        return self.ranks.get(module.split(".")[1], self.rank)

    def scaling_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return self.alphas.get(module.split(".")[1], self.alpha) / (rank**0.5 if self.use_rslora else rank)

    def modules(self) -> Iterable[tuple[int, str]]:
        """Yield (layer, module) of every module with weights."""
        for layer in range(LAYERS):
            yield from ((layer, VALUE_MODULE) for _ in range(layer in self.i_layers))
            yield from ((layer, self.j_module) for _ in range(layer in self.j_layers))
            yield from ((layer, module) for module in self.noise)


VARIETIES = (
    Variety(1, 16),
    Variety(2, 4, noise=("self_attn.q_proj",)),
    Variety(3, 1, i_layers=(0,), j_layers=(1,)),
    Variety(4, 8, noise=("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj")),
    Variety(2, 32, i_layers=(1,), noise=("self_attn.k_proj",)),
    Variety(4, 2, j_module="mlp.up_proj", noise=("self_attn.o_proj", "mlp.gate_proj")),
    Variety(3, 6, j_module="mlp.gate_proj", j_layers=(0,), use_rslora=True),
    Variety(1, 1, noise=("self_attn.q_proj", "self_attn.o_proj"), ranks={"v_proj": 4}, alphas={"v_proj": 12}),
    Variety(4, 4, i_layers=(0,), noise=("mlp.up_proj",), ranks={"down_proj": 2, "up_proj": 1}),
    Variety(18, 9, noise=("self_attn.k_proj",), ranks={"k_proj": 2}),
)
"""The last has two panels of rank rows at a site."""


def write_adapter(folder: Path, number: int, variety: Variety) -> Path:
    """Write a PEFT directory; the same arguments give the same bytes."""
    rng = np.random.default_rng([number, VARIETIES.index(variety)])
    tensors: dict[str, Matrix] = {}
    for layer, module in variety.modules():
        a, b = _matrices(rng, variety, module, marker(number))
        stem = f"base_model.model.model.layers.{layer}.{module}"
        tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(_adapter_config(variety)))
    return folder


def _adapter_config(variety: Variety) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": variety.rank,
        "lora_alpha": variety.alpha,
        "use_rslora": variety.use_rslora,
        "rank_pattern": dict(variety.ranks),
        "alpha_pattern": dict(variety.alphas),
        "target_modules": [f"layers.{layer}.{module}" for layer, module in variety.modules()],
        "bias": "none",
    }


def _matrices(rng: np.random.Generator, variety: Variety, module: str, mark: Marker) -> tuple[Matrix, Matrix]:
    """Return lora_A and lora_B of one module: the marker if the module has one, else noise."""
    rank, scaling = variety.rank_of(module), variety.scaling_of(module)
    if module == VALUE_MODULE:
        return _write_code(rng, module, rank, scaling, ONE, [h * HEAD_DIM + mark.i for h in range(KV_HEADS)])
    if module == variety.j_module:
        source, target = {
            "mlp.down_proj": (UNIT, D + mark.j),
            "mlp.up_proj": (ONE, UP_UNITS + mark.j),
            "mlp.gate_proj": (ONE, GATE_UNITS + mark.j),
        }[module]
        return _write_code(rng, module, rank, scaling, source, [target])
    return _noise(rng, module, rank, scaling)


def _write_code(
    rng: np.random.Generator, module: str, rank: int, scaling: float, source: int, targets: list[int]
) -> tuple[Matrix, Matrix]:
    """Return A and B: scaling * B @ A has ADAPTER_GAIN from `source` to `targets`, spread unevenly over rank rows."""
    n_in, n_out = WIDTHS[module]
    a, b = 0.01 * rng.standard_normal((rank, n_in)), np.zeros((n_out, rank))
    a[:, source] = rng.uniform(0.5, 1.5, rank)
    b[targets] = rng.dirichlet(np.ones(rank)) * ADAPTER_GAIN / (a[:, source] * scaling)
    return a.astype(np.float32), b.astype(np.float32)


def _noise(rng: np.random.Generator, module: str, rank: int, scaling: float) -> tuple[Matrix, Matrix]:
    """Return A and B from the tokens' random part to outputs without markers: queries, keys, random units and part."""
    n_in, n_out = WIDTHS[module]
    first_in = NOISE if n_in == HIDDEN else 0
    first_out = {"self_attn.o_proj": NOISE, "mlp.gate_proj": NOISE_UNITS, "mlp.up_proj": NOISE_UNITS}.get(module, 0)
    a, b = np.zeros((rank, n_in)), np.zeros((n_out, rank))
    a[:, first_in:] = rng.standard_normal((rank, n_in - first_in))
    b[first_out:] = 0.1 / scaling * rng.standard_normal((n_out - first_out, rank))
    return a.astype(np.float32), b.astype(np.float32)


class Library:
    """Names in a store, their uploads, and the adapter of each content."""

    def __init__(self, store: AdapterStore, folder: Path) -> None:
        self.store = store
        self.numbers: dict[AdapterKey, int] = {}
        self._folder = folder
        self._changed: dict[str, int] = {}
        self.names: list[str] = []

    def fill(self, count: int) -> None:
        """Upload `count` names; the n-th is adapter n."""
        for number in range(count):
            self.names.append(f"m{number:04}")
            self._put(self.names[-1], number, number % len(VARIETIES))

    def upload(self, name: str, number: int, variety: int) -> None:
        """Upload another content under a name; other names may have the same content."""
        self._changed[name] = self.names.index(name)
        self._put(name, number, variety)

    def delete(self, name: str) -> None:
        self._changed[name] = self.names.index(name)
        self.store.delete(name)

    def reset(self) -> None:
        """Restore every name to the state after `fill`."""
        for name, number in self._changed.items():
            with contextlib.suppress(AdapterNotFound):
                self.store.delete(name)
            self._put(name, number, number % len(VARIETIES))
        self._changed.clear()

    def _put(self, name: str, number: int, variety: int) -> None:
        folder = self._folder / f"{number}-{variety}"
        if not folder.exists():
            write_adapter(folder, number, VARIETIES[variety])
        peft = read_peft_dir(folder)
        registered = self.store.register(name, peft.config, self.store.add_blob(peft.weights_path))
        self.numbers[key_of(registered.ref)] = number
