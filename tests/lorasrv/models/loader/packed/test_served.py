"""Quantized checkpoints as they are served, alone and with adapters on every linear, against transformers and PEFT on
weights that were read bit by bit.

With the torch kernels activations are not rounded, so that logits must agree as floats do: KL below 1e-6, and every
greedy token. With the Numba kernels the activations' rounding stays between.
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_decoder import HandDecoder
from packed_checkpoints import (
    Quantized,
    Tensors,
    base,
    committed,
    convert,
    dense,
    dense_gguf,
    eetq_tensors,
    fp8_tensors,
    gptq_tensors,
    read_awq,
    read_awq_fast,
    read_bitsandbytes,
    read_compressed,
    read_fp8,
    read_gptq,
    read_hqq,
)
from peft_adapters import peft_adapter
from tiny_engine import GREEDY, offline_engine
from torch import Tensor

from lorasrv.config import ModelOptions
from lorasrv.errors import UnsupportedFormat
from lorasrv.models.loader import open_checkpoint
from lorasrv.worker.base_format import choose_format
from sgmv_kernels.ops import Ops

PROMPTS = [[5, 9, 60, 33, 120, 7], [300, 41, 18, 77]]
TABLES = [tuple(range(20 * i, 20 * i + 20)) for i in range(8)]
MAX_KL = {"torch": 1e-6, "numba": 2e-3}
ADAPTERS: dict[str, dict[str, Any]] = {
    "linears": {},
    "head": {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [7, 300, 41]},
    "tables": {"target_modules": ["v_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
}


def read(kind: str, module: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    if kind in MADE:
        return None if len(tensors) == 1 else MADE[kind].read(module, tensors)
    if "SCB" in tensors or "weight.absmax" in tensors:
        return read_bitsandbytes(tensors)
    if "W_q" in tensors:
        return read_hqq(tensors)
    if "weight_scale" in tensors:
        return read_compressed(tensors, 3 if "mlp" in module and "weight_packed" in tensors else READ_BITS[kind])
    if "qweight" not in tensors:
        return None
    if kind == "autoawq-gemv_fast":
        return read_awq_fast(tensors, 32)
    if "awq" in kind:
        return read_awq(tensors, 32, kind.partition("-")[2])
    return read_gptq(tensors, 4)


READ_BITS = {"compressed-tensors-mixed": 4, "compressed-tensors-w8a8": 8}
COMMITTED = ("autogptq", "autoawq-gemm", "autoawq-gemv", "autoawq-gemv_fast", "bitsandbytes-int8", *READ_BITS)
NEARLY = {"bitsandbytes-nf4": 1e-3, "bitsandbytes-fp4": 1e-4, "hqq": 1e-4}
"""Committed ones that are served nearly as the file has them, and the KL that it costs at most."""
GGUF = {
    # As llama.cpp mixes them, but for the finer types of some linears.
    "gguf-Q4_K": {"embed": "Q8_0", "lm_head": "Q8_0", "v_proj": "Q5_K", "": "Q4_K"},
    "gguf-Q4_K_M": {"embed": "Q8_0", "lm_head": "Q8_0", "v_proj": "Q6_K", "down_proj": "Q6_K", "": "Q4_K"},
    "gguf-IQ4": {"embed": "Q8_0", "lm_head": "Q8_0", "v_proj": "IQ4_NL", "k_proj": "MXFP4", "": "IQ4_XS"},
    "gguf-Q5": {"embed": "Q8_0", "lm_head": "Q8_0", "q_proj": "Q5_1", "o_proj": "Q5_0", "": "Q5_K"},
}


@dataclass(frozen=True)
class Made:
    """A checkpoint that is written here: its configuration, and how a module is packed and read, number by number."""

    config: dict[str, Any]
    # (module, weight) -> tensors by the ends of their names; None: stays floats.
    pack: Callable[[str, Tensor], Tensors | None]
    read: Callable[[str, Mapping[str, Tensor]], Tensor]


def gptq_made(bits: int, act_order: bool = False, **config: Any) -> Made:
    """All linears with these inputs have the same order, as GPTQ gives it."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False, "desc_act": act_order} | config

    def pack(module: str, weight: Tensor) -> Tensors | None:
        if module == "lm_head" and "lm_head" not in config:
            return None
        made = Quantized(weight, bits, 32, sym=False, act_order=act_order, seed=weight.shape[1])
        return gptq_tensors(made, "gptq_v2")

    return Made(config | {"checkpoint_format": "gptq_v2"}, pack, lambda _, stored: read_gptq(stored, bits, v2=True))


def gptq_mixed() -> Made:
    """Projections of q and k share an order, v has eight bits and an order of its own; the head is quantized."""
    numbers: dict[str, int] = {}

    def pack(module: str, weight: Tensor) -> Tensors:
        is_v = "v_proj" in module
        seed = numbers.setdefault(module, len(numbers)) if is_v or "mlp.down" in module else 99
        made = Quantized(weight, 8 if is_v else 4, 32, sym=False, act_order=True, seed=seed)
        return gptq_tensors(made, "gptq_v2")

    usual = gptq_made(4, True, lm_head=True, dynamic={"+:.*v_proj": {"bits": 8}})
    return Made(usual.config, pack, lambda m, stored: read_gptq(stored, 8 if "v_proj" in m else 4, v2=True))


def fp8_made(config: dict[str, Any], shape: Callable[[int, int], tuple[int, ...]], name: str = "weight_scale") -> Made:
    """`shape`: (outputs, inputs) -> the shape of the scales."""

    def pack(module: str, weight: Tensor) -> Tensors | None:
        return None if module == "lm_head" else fp8_tensors(weight, shape(*weight.shape), name)

    return Made(config, pack, lambda _, stored: read_fp8(stored, name))


def eetq_made() -> Made:
    weights: dict[str, Tensor] = {}

    def pack(module: str, weight: Tensor) -> Tensors | None:
        if module == "lm_head":
            return None
        scales = (weight.abs().amax(1) / 128).half().float()[:, None]
        weights[module] = (weight / scales).round().clamp(-128, 127) * scales
        return eetq_tensors(weight)

    return Made({"quant_method": "eetq", "weights": "int8"}, pack, lambda module, _: weights[module])


MADE = {
    "gptq-act-order": gptq_made(4, True, lm_head=True),
    "gptq-mixed": gptq_mixed(),
    **{f"gptq-{bits}-bit": gptq_made(bits) for bits in (2, 3, 8)},
    "fp8-tensor": fp8_made({"quant_method": "fp8"}, lambda o, h: ()),
    "fp8-output": fp8_made({"quant_method": "fbgemm_fp8"}, lambda o, h: (o, 1)),
    "fp8-block": fp8_made(
        {"quant_method": "fp8", "weight_block_size": [32, 32]}, lambda o, h: (-(-o // 32), h // 32), "weight_scale_inv"
    ),
    "compressed-tensors-fp8": fp8_made(
        {"quant_method": "compressed-tensors", "format": "float-quantized"}, lambda o, h: (o, 1)
    ),
    "eetq": eetq_made(),
}
ROUNDED = NEARLY | {kind: 1e-3 for kind in ("gguf-Q4_K_M", *MADE) if "fp8" in kind or "gguf" in kind}
OF_KNOWN_CODES = ("gptq-2-bit", "gptq-8-bit", "fp8-tensor", "fp8-output", "compressed-tensors-fp8")
"""Kinds whose codes in memory are of a kind that another one has."""
KINDS = tuple(kind for kind in (*COMMITTED, *NEARLY, *GGUF, *MADE) if kind not in OF_KNOWN_CODES)
METHODS = {"autogptq": "gptq", "autoawq": "awq", "compressed": "compressed-tensors", "fp8": "int8"}


def method_of(kind: str) -> str:
    first = kind.partition("-")[0]
    return METHODS.get(first, first)


@pytest.fixture(scope="module")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory, write_gguf: Callable[..., Path]
) -> Callable[[str], tuple[Path, Path, Path]]:
    """Name -> the checkpoint, the same weights as floats, and the folder of `ADAPTERS`; made once."""
    made: dict[str, tuple[Path, Path, Path]] = {}

    def make(kind: str) -> tuple[Path, Path, Path]:
        if kind not in made:
            root = tmp_path_factory.mktemp(kind)
            if kind in GGUF:
                source = base(root / "floats", hidden_size=256, intermediate_size=512)
                folder = write_gguf(source, root / "model.gguf", GGUF[kind])
                floats = dense_gguf(source, root / "dense", GGUF[kind])
            elif kind in MADE:
                folder = convert(base(root / "floats"), root / "packed", MADE[kind].config, MADE[kind].pack)
                floats = dense(folder, root / "dense", partial(read, kind))
            else:
                folder = committed(kind, root / "packed")
                floats = dense(folder, root / "dense", partial(read, kind))
            for name, config in ADAPTERS.items():
                peft_adapter(floats, root / "adapters" / name, r=6, **config)
            made[kind] = folder, floats, root / "adapters"
        return made[kind]

    return make


def oracle(floats: Path, adapter: Path | None) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32, attn_implementation="eager")
    return (model if adapter is None else PeftModel.from_pretrained(model, adapter)).eval()


def kl(want: Tensor, got: Tensor) -> float:
    want, got = want.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((want.exp() * (want - got)).sum(-1).max())


@pytest.mark.parametrize("kernels", MAX_KL)
@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in OF_KNOWN_CODES)])
@pytest.mark.filterwarnings("ignore:.*ensure_weight_tying")
def test_logits_are_those_of_transformers_and_peft(checkpoint, tmp_path: Path, kind: str, kernels: str) -> None:
    folder, floats, adapters = checkpoint(kind)
    folders = {name: adapters / name for name in ADAPTERS}
    served = HandDecoder(folder, folders, tmp_path / "store", kernels, weights=method_of(kind))
    most = max(MAX_KL[kernels], ROUNDED.get(kind, 0))
    asked = [(name, prompt) for prompt in (PROMPTS[0] * 3, PROMPTS[1] * 4) for name in (None, *ADAPTERS)]
    got = served.logits([(name, prompt, 0, table) for (name, prompt), table in zip(asked, TABLES, strict=True)])
    models = {name: oracle(floats, folders.get(name)) for name in (None, *ADAPTERS)}
    with torch.inference_mode():
        for i, (name, prompt) in enumerate(asked):
            want = models[name](torch.tensor([prompt])).logits[0, -1]
            assert kl(want, got[i]) < most, (kind, name)
            assert name is None or kl(models[None](torch.tensor([prompt])).logits[0, -1], got[i]) > 1e-2, "no change"


@pytest.mark.parametrize("kind", ["autogptq", "autoawq-gemm", "gptq-mixed", "compressed-tensors-mixed", "gguf-Q4_K"])
def test_greedy_tokens_are_those_of_transformers_and_peft(checkpoint, kind: str) -> None:
    folder, floats, adapters = checkpoint(kind)
    names = [None, "mia"]
    with offline_engine(folder, {"mia": adapters / "linears"}, quantization="auto", kernels="torch") as llm:
        done = {name: llm.generate(PROMPTS, GREEDY, [name] * len(PROMPTS)) for name in names}
    for name in names:
        model = oracle(floats, adapters / "linears" if name else None)
        for prompt, answer in zip(PROMPTS, done[name], strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + list(answer.token_ids)])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == list(answer.token_ids)
    assert [a.token_ids for a in done[None]] != [a.token_ids for a in done["mia"]]


@pytest.mark.parametrize("kind", ["gptq-mixed", "gptq-act-order", "autoawq-gemm", "bitsandbytes-nf4", "gguf-IQ4"])
def test_a_recorded_pass_is_the_pass(checkpoint, tmp_path: Path, kind: str) -> None:
    folder, _, adapters = checkpoint(kind)
    recorded, called = (
        HandDecoder(folder, {"mia": adapters / "linears"}, tmp_path / name, "numba", weights=method_of(kind))
        for name in ("r", "c")
    )
    assert recorded.decoder._program is not None
    called.decoder._program = None
    for shares in (
        [("mia", PROMPTS[0] * 2, 0, TABLES[0]), (None, PROMPTS[1], 0, TABLES[1])],
        [(None, [7], 4, TABLES[1])],
    ):
        got, want = recorded.logits(shares), called.logits(shares)
        assert all(torch.equal(got[i], want[i]) for i in want)


def test_what_is_served_is_said(checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    folder, *_ = checkpoint("autoawq-gemm")

    def served(quantization: str) -> tuple[dict[str, Any], str]:
        caplog.clear()
        with caplog.at_level("INFO", "lorasrv"), offline_engine(folder, quantization=quantization) as llm:
            lines = [record.message for record in caplog.records if record.message.startswith("weights:")]
            return llm.weights.to_dict(), "\n".join(lines)

    exact = {"format": "awq", "method": "awq", "bits": [4], "bits_per_weight": 5.0, "error": 0.0, "exact": True}
    line = "weights: awq, 4 bits, 14 linears: kept exactly as the file has them (--quantization awq)"
    assert served("auto") == served("awq") == (exact, line)
    again, line = served("int8")
    error = again["error"]
    assert 0.003 < error < 0.008
    assert again == exact | {"format": "int8", "bits_per_weight": 8.5, "error": error, "exact": False}
    assert line.startswith("weights: awq, 4 bits, 14 linears: 14 of them dequantized and stored as int8, which adds")


@pytest.mark.parametrize(
    ("kind", "bits", "said"),
    [
        (
            "bitsandbytes-nf4",
            "4",
            "the 16 values of a code are held in 8 bits, which changes weights by 0.5 % at most (rms)",
        ),
        (
            "gguf-Q6_K",
            "4 and 6",
            "Q6_K stored in 8 bits, with a scale for every 32 inputs, which changes weights by about 0.6 % (rms)",
        ),
    ],
)
def test_what_is_rounded_is_said(
    tmp_path: Path, write_gguf: Callable[..., Path], caplog: pytest.LogCaptureFixture, kind: str, bits: str, said: str
) -> None:
    method = method_of(kind)
    if method == "gguf":
        source = base(tmp_path / "floats", hidden_size=256, intermediate_size=512)
        path = write_gguf(source, tmp_path / "m.gguf", {"down_proj": "Q6_K", "": "Q4_K"})
    else:
        path = committed(kind, tmp_path / "m")
    with caplog.at_level("INFO", "lorasrv"), offline_engine(path, quantization="auto") as llm:
        held = {"format": method, "method": method, "bits": [int(n) for n in bits.split(" and ")], "exact": False}
        told = llm.weights.to_dict()
        assert held.items() <= told.items()
        assert 0.0005 < told["error"] < 0.007
    (line,) = [record.message for record in caplog.records if record.message.startswith("weights:")]
    assert line == f"weights: {method}, {bits} bits, 14 linears: {said} (--quantization {method})"


def test_a_format_of_files_wants_such_a_file(checkpoint, model: Path) -> None:
    for folder, asked, title in ((checkpoint("autoawq-gemm")[0], "gptq", "GPTQ"), (model, "awq", "AWQ")):
        with (
            closing(open_checkpoint(str(folder))) as opened,
            pytest.raises(UnsupportedFormat, match=f"--quantization {asked}: this is no {title} checkpoint; choose"),
        ):
            choose_format(ModelOptions(quantization=asked), opened, Ops(torch.device("cpu"), "torch"))


def test_linears_that_stay_floats_end_recording(checkpoint, tmp_path: Path) -> None:
    """One projection of a site is floats: its answers may then depend on the batch, and the server says so."""
    folder, *_ = checkpoint("compressed-tensors-mixed")
    served = HandDecoder(folder, {}, tmp_path / "s", "numba", weights="compressed-tensors")
    assert served.decoder._program is None
    assert not served.weights.is_recordable
    with closing(open_checkpoint(str(folder))) as opened:
        name = "model.layers.1.self_attn.v_proj.weight"
        assert torch.equal(served.weights.dequantized(name), opened.tensor(name).float())
