"""The model build: stacking, sizes, live bytes, and the same weights under their own names."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorasrv.models.loader import Checkpoint, WeightMeter, open_checkpoint
from lorasrv.models.quantization import get_format
from lorasrv.worker.weights import ModelWeights, load_weights
from sgmv_kernels.ops import INT4_LEVELS, INT8_LEVELS, GroupQuantizedWeight, Ops, stack_codes

OPS = Ops(torch.device("cpu"), "torch")
Tiny = dict[str, Callable[..., Path]]


@pytest.fixture(params=["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def checkpoint(request: pytest.FixtureRequest, tiny_hf_checkpoints: Tiny) -> Iterator[Checkpoint]:
    opened = open_checkpoint(str(tiny_hf_checkpoints[request.param]()))
    yield opened
    opened.close()


def load(checkpoint: Checkpoint, name: str, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(checkpoint, get_format(name, OPS), dtype)


def test_every_weight_is_found_under_its_own_name(checkpoint: Checkpoint) -> None:
    weights = load(checkpoint, "none")
    names = [name for name in checkpoint.names() if not name.endswith(".bias")]
    for name in names:
        less_one = checkpoint.spec.norms_less_one and "norm" in name
        assert torch.equal(weights.dequantized(name), checkpoint.tensor(name) + less_one), name
    head = "model.embed_tokens.weight" if checkpoint.spec.tied_head else "lm_head.weight"
    assert torch.equal(weights.dequantized("lm_head.weight"), checkpoint.tensor(head))


@pytest.mark.parametrize("name", ["model.layers.0.mlp.nothing.weight", "nothing"])
def test_unknown_names(tiny_hf_checkpoints: Tiny, name: str) -> None:
    opened = open_checkpoint(str(tiny_hf_checkpoints["llama"]()))
    weights = load(opened, "none")
    opened.close()
    with pytest.raises(KeyError):
        weights.dequantized(name)


def test_int8_weights_are_near_the_originals(checkpoint: Checkpoint) -> None:
    weights = load(checkpoint, "int8")
    for name in checkpoint.names():
        if not name.endswith(".bias"):
            original = checkpoint.tensor(name) + (checkpoint.spec.norms_less_one and "norm" in name)
            assert (weights.dequantized(name) - original).norm() <= 0.01 * original.norm(), name


def test_stacked_linears_are_the_slices_beside_each_other(checkpoint: Checkpoint) -> None:
    spec, weights = checkpoint.spec, load(checkpoint, "none")
    x = torch.randn(3, spec.hidden_size, generator=torch.Generator().manual_seed(0))

    def expected(modules: tuple[str, ...]) -> Tensor:
        parts = []
        for module in modules:
            name = f"model.layers.1.{module}"
            bias = checkpoint.tensor(f"{name}.bias") if f"{name}.bias" in set(checkpoint.names()) else None
            parts.append(torch.nn.functional.linear(x, checkpoint.tensor(f"{name}.weight"), bias))
        return torch.cat(parts, dim=1)

    qkv, _, gate_up, _ = (site.modules for site in spec.sites())
    torch.testing.assert_close(weights.layers[1].qkv(x), expected(qkv))
    torch.testing.assert_close(weights.layers[1].gate_up(x), expected(gate_up))


def test_sizes_are_those_of_the_format(checkpoint: Checkpoint) -> None:
    elements = sum(checkpoint.tensor(name).numel() for name in checkpoint.names())
    assert load(checkpoint, "none").nbytes == 4 * elements
    assert load(checkpoint, "none", torch.bfloat16).nbytes < 2.2 * elements
    assert load(checkpoint, "int8").nbytes < 1.9 * elements


LONG = pytest.mark.long


@pytest.mark.parametrize("name", ["int4", pytest.param("int8", marks=LONG), pytest.param("none", marks=LONG)])
def test_live_bytes_stay_below_twice_the_result_and_a_tensor(builtin: Checkpoint, name: str) -> None:
    meter = WeightMeter()
    weights = load_weights(builtin, get_format(name, OPS), torch.bfloat16, meter)
    stacked = 4 * max(
        builtin.spec.vocab_size * builtin.spec.hidden_size,
        *(site.in_features * sum(site.out_features) for site in builtin.spec.sites()),
    )
    assert meter.live_bytes == weights.nbytes
    assert weights.nbytes <= meter.peak_bytes < 2 * weights.nbytes + stacked
    full_fp32 = 4 * sum(site.in_features * sum(site.out_features) for site in builtin.spec.sites()) * 30 + stacked
    assert meter.peak_bytes < full_fp32 * 0.6


class Watched:
    """A checkpoint that counts how many of its tensors are alive at once, to check the meter's own claim."""

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner
        self.name, self.spec = inner.name, inner.spec
        self.codes = inner.codes
        self.names, self.tokenizer_source, self.close = inner.names, inner.tokenizer_source, inner.close
        self.live_bytes = self.peak_bytes = 0

    def tensor(self, name: str) -> Tensor:
        import weakref

        tensor = self._inner.tensor(name).clone()
        size = tensor.nbytes
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(tensor, self._gone, size)
        return tensor

    def _gone(self, size: int) -> None:
        self.live_bytes -= size


def test_tensors_really_are_let_go(tiny_hf_checkpoints: Tiny) -> None:
    inner = open_checkpoint(str(tiny_hf_checkpoints["llama"](num_hidden_layers=12)))
    watched = Watched(inner)
    weights = load_weights(watched, get_format("int8", OPS), torch.float32)
    inner.close()
    spec = watched.spec
    norms = 4 * spec.hidden_size * (2 * spec.num_layers + 1)
    assert watched.live_bytes <= norms
    assert watched.peak_bytes <= norms + 1.2 * 4 * spec.vocab_size * spec.hidden_size
    assert weights.nbytes > watched.peak_bytes


def test_progress_rises_to_one(checkpoint: Checkpoint) -> None:
    seen: list[tuple[str, float]] = []
    load_weights(
        checkpoint, get_format("none", OPS), torch.float32, progress=lambda what, done: seen.append((what, done))
    )
    shares = [done for _, done in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert f"loading layer 2 of {checkpoint.spec.num_layers}" in [what for what, _ in seen]


def test_fingerprint_tells_checkpoints_apart(tiny_hf_checkpoints: Tiny) -> None:
    prints = []
    for path in (tiny_hf_checkpoints["llama"](), tiny_hf_checkpoints["llama"](seed=1)):
        opened = open_checkpoint(str(path))
        prints.append({load(opened, name).fingerprint for name in ("none", "int8")})
        opened.close()
    assert [len(p) for p in prints] == [1, 1]
    assert prints[0] != prints[1]


def test_a_gguf_file_is_taken_as_it_is(builtin: Checkpoint, codes_only: None) -> None:
    """Packed codes, scales and minima equal the file's; its 8-bit embedding keeps 8 bits, which are the head's."""
    weights = load_weights(builtin, get_format("int4", Ops(torch.device("cpu"), "numba")), torch.bfloat16)
    for site, linear in zip(builtin.spec.sites(), weights.layers[7].linears(), strict=True):
        parts = [builtin.codes(f"model.layers.7.{module}.weight") for module in site.modules]
        held = stack_codes([part for part in parts if part is not None])
        packed = linear._packed.tiles.unpack()  # type: ignore[attr-defined]
        assert held is not None
        assert (held.levels, held.group) == (packed.levels, packed.group) == (INT4_LEVELS, 32)
        for name in ("codes", "scales", "minima"):
            assert torch.equal(getattr(packed, name), getattr(held, name)), (site, name)
    embedding = builtin.codes("model.embed_tokens.weight")
    assert embedding is not None
    assert embedding.levels == INT8_LEVELS
    assert torch.equal(weights.embed.dequantize(), embedding.dequantize())
    assert weights.head.nbytes == 0
    assert weights.nbytes < 100e6


@pytest.mark.parametrize("module", ["self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"])
def test_codes_are_the_tensors(builtin: Checkpoint, module: str) -> None:
    name = f"model.layers.3.{module}.weight"
    codes = builtin.codes(name)
    assert isinstance(codes, GroupQuantizedWeight)
    assert torch.equal(codes.dequantize(), builtin.tensor(name))
    assert builtin.codes("model.norm.weight") is None


def test_meter_keeps_the_peak() -> None:
    meter = WeightMeter()
    meter.add(10)
    meter.add(5)
    meter.release(12)
    meter.add(1)
    assert (meter.live_bytes, meter.peak_bytes) == (4, 15)
