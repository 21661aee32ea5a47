"""The model build: stacking, sizes, live bytes, and the same weights under their own names."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lorasrv.errors import CorruptModel, UnsupportedFormat
from lorasrv.models.loader import Checkpoint, WeightMeter, open_checkpoint
from lorasrv.models.loader.gguf_file import GgufFile
from lorasrv.models.quantization import get_format
from lorasrv.worker.weights import ModelWeights, load_weights
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight, stack_codes
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS
from sgmv_kernels.ops import Ops

OPS = Ops(torch.device("cpu"), "torch")
Tiny = dict[str, Callable[..., Path]]
NORM = "model.norm.weight"


@pytest.fixture(params=["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "smollm3", "olmo2"])
def checkpoint(request: pytest.FixtureRequest, tiny_hf_checkpoints: Tiny) -> Iterator[Checkpoint]:
    with closing(open_checkpoint(str(tiny_hf_checkpoints[request.param]()))) as opened:
        yield opened


def load(checkpoint: Checkpoint, name: str, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(checkpoint, get_format(name, OPS), dtype)


def test_every_weight_is_found_under_its_own_name(checkpoint: Checkpoint) -> None:
    weights = load(checkpoint, "none")
    for name in (name for name in checkpoint.names() if not name.endswith(".bias")):
        less_one = checkpoint.spec.norms_less_one and "norm" in name
        assert torch.equal(weights.dequantized(name), checkpoint.tensor(name) + less_one), name
    head = "model.embed_tokens.weight" if checkpoint.spec.tied_head else "lm_head.weight"
    assert torch.equal(weights.dequantized("lm_head.weight"), checkpoint.tensor(head))
    for unknown in ("model.layers.0.mlp.nothing.weight", "nothing"):
        with pytest.raises(KeyError):
            weights.dequantized(unknown)


def test_sizes_are_those_of_the_format(checkpoint: Checkpoint) -> None:
    elements = sum(checkpoint.tensor(name).numel() for name in checkpoint.names())
    assert load(checkpoint, "none").nbytes == 4 * elements
    assert load(checkpoint, "none", torch.bfloat16).nbytes < 2.2 * elements
    assert load(checkpoint, "int8").nbytes < 1.9 * elements


@pytest.mark.parametrize("name", ["int4", *(pytest.param(name, marks=pytest.mark.long) for name in ("int8", "none"))])
def test_live_bytes_stay_below_twice_the_result_and_a_tensor(builtin: Checkpoint, name: str) -> None:
    meter = WeightMeter()
    weights = load_weights(builtin, get_format(name, OPS), torch.bfloat16, meter)
    sites = [4 * site.in_features * sum(site.out_features) for site in builtin.spec.sites()]
    stacked = max(4 * builtin.spec.vocab_size * builtin.spec.hidden_size, *sites)
    assert meter.live_bytes == weights.nbytes
    assert weights.nbytes <= meter.peak_bytes < 2 * weights.nbytes + stacked
    assert meter.peak_bytes < (30 * sum(sites) + stacked) * 0.6, "of all weights in fp32"


class Watched:
    """A checkpoint that counts the bytes of its tensors that are alive at once, to check the meter's own claim."""

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner
        self.live_bytes = self.peak_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def tensor(self, name: str) -> Tensor:
        tensor = self._inner.tensor(name).clone()
        weakref.finalize(tensor, self._count, -tensor.nbytes)
        self._count(tensor.nbytes)
        return tensor

    def _count(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def test_tensors_really_are_let_go(tiny_hf_checkpoints: Tiny) -> None:
    with closing(open_checkpoint(str(tiny_hf_checkpoints["llama"](num_hidden_layers=12)))) as checkpoint:
        watched, spec = Watched(checkpoint), checkpoint.spec
        weights = load_weights(watched, get_format("int8", OPS), torch.float32)
    norms = 4 * spec.hidden_size * (2 * spec.num_layers + 1)
    assert watched.live_bytes <= norms
    assert watched.peak_bytes <= norms + 1.2 * 4 * spec.vocab_size * spec.hidden_size
    assert weights.nbytes > watched.peak_bytes


def test_progress_rises_to_one(checkpoint: Checkpoint) -> None:
    seen: list[tuple[str, float]] = []
    load_weights(checkpoint, get_format("none", OPS), torch.float32, progress=lambda *told: seen.append(told))
    what, shares = zip(*seen, strict=True)
    assert list(shares) == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert set(what) == {"loading the model"}


def test_fingerprint_tells_checkpoints_apart(tiny_hf_checkpoints: Tiny) -> None:
    prints = []
    for seed in (0, 1):
        with closing(open_checkpoint(str(tiny_hf_checkpoints["llama"](seed=seed)))) as opened:
            prints.append({load(opened, name).fingerprint for name in ("none", "int8")})
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
    assert torch.equal(weights.embed.dequantize(), embedding.dequantize())
    assert (embedding.levels, weights.head.nbytes) == (INT8_LEVELS, 0)
    assert weights.nbytes < 100e6


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("fmt", ["int8", "int4", "q3h", "nf4", "none"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight", NORM])
def test_what_is_no_number_is_refused_by_name(
    tiny_hf_checkpoints: Tiny, monkeypatch: pytest.MonkeyPatch, fmt: str, value: float, name: str
) -> None:
    """int4 and q3h swallow an infinity and answer, the first token of NaN in the embedding waits for its prompt."""
    with closing(open_checkpoint(str(tiny_hf_checkpoints["llama"]()))) as checkpoint:
        read = checkpoint.tensor

        def damaged(asked: str) -> Tensor:
            tensor = read(asked)
            if asked == name:
                tensor.view(-1)[3] = value
            return tensor

        monkeypatch.setattr(checkpoint, "tensor", damaged)
        with pytest.raises(CorruptModel, match=f"{checkpoint.name}: tensor '{name}' holds NaN or infinity"):
            load(checkpoint, fmt)


def test_the_refused_tensor_has_its_name_in_the_file(tiny_hf_checkpoints: Tiny, monkeypatch) -> None:
    with closing(open_checkpoint(str(tiny_hf_checkpoints["mpt"]()))) as checkpoint:
        read = checkpoint.tensor
        monkeypatch.setattr(checkpoint, "tensor", lambda name: read(name) / (0 if "2.ffn.down" in name else 1))
        with pytest.raises(CorruptModel, match=r"tensor 'transformer\.blocks\.2\.ffn\.down_proj\.weight' holds NaN"):
            load(checkpoint, "none")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_a_scale_of_a_file_that_is_no_number_is_refused_by_name(
    tiny_hf_checkpoints: Tiny, write_gguf: Callable[..., Path], tmp_path: Path, kind: str, fmt: str
) -> None:
    folder = tiny_hf_checkpoints["llama"](hidden_size=256, intermediate_size=256)
    file = write_gguf(folder, tmp_path / "base.gguf", kind)
    with closing(GgufFile(file)) as opened:
        info = opened.tensors["blk.1.ffn_down.weight"]
    assert info.type.name == kind
    data = bytearray(file.read_bytes())
    place = info.offset + info.type.block_bytes - 2 if kind == "Q6_K" else info.offset
    data[place : place + 2] = b"\x00\x7c"
    file.write_bytes(data)
    named = r"'(model\.layers\.1\.mlp\.down_proj|blk\.1\.ffn_down)\.weight' holds NaN or infinity"
    with closing(open_checkpoint(str(file))) as checkpoint, pytest.raises(CorruptModel, match=named):
        load(checkpoint, fmt)


@pytest.mark.parametrize(("fmt", "value"), [("int8", 9e6), ("int4", 7e4), ("q3h", -7e4)])
def test_a_weight_that_fp16_scales_do_not_reach_is_refused_by_name(
    tiny_hf_checkpoints: Tiny, monkeypatch: pytest.MonkeyPatch, fmt: str, value: float
) -> None:
    with closing(open_checkpoint(str(tiny_hf_checkpoints["llama"]()))) as checkpoint:
        read = checkpoint.tensor

        def large(asked: str) -> Tensor:
            return read(asked).index_fill_(0, torch.tensor([3]), value) if "layers.1.mlp.down" in asked else read(asked)

        monkeypatch.setattr(checkpoint, "tensor", large)
        with pytest.raises(UnsupportedFormat, match=r"--quantization none \(in model\.layers\.1\.mlp\.down_proj\)"):
            load(checkpoint, fmt)
        load(checkpoint, "none")


@pytest.mark.parametrize("module", ["self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"])
def test_codes_are_the_tensors(builtin: Checkpoint, module: str) -> None:
    name = f"model.layers.3.{module}.weight"
    codes = builtin.codes(name)
    assert isinstance(codes, GroupQuantizedWeight)
    assert torch.equal(codes.dequantize(), builtin.tensor(name))
    assert builtin.codes("model.norm.weight") is None
