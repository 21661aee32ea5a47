"""Files of `lorasrv quantize` with several formats; `tests/lorasrv/offline/test_quantize.py` has those with one."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_engine import GREEDY, offline_engine

from lorasrv.config import ModelOptions
from lorasrv.errors import CorruptModel, ModelNotFound, UnsupportedFormat
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.loader.quantized import linear_names, write_codes
from lorasrv.offline.quantize import Quantized, load_floats, quantize, read_formats
from lorasrv.worker.base_format import choose_format
from lorasrv.worker.weights import load_weights
from sgmv_kernels.ops import Ops

OPS = Ops(torch.device("cpu"))
TEXTS = [[(7 * i + 3 * j) % 380 for i in range(40)] for j in range(3)]
PARTS = "qkv=q3h,o=int4:32,mlp=int8,down=q3h:128"
DOWN, UP = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def made(model: Path) -> Quantized:
    with closing(open_checkpoint(str(model))) as floats:
        weights = load_floats(floats, lambda *_: None)
        formats = dict(read_formats(floats, PARTS, 64))
        # One layer differs.
        formats["o"] = (formats["qkv"][0], *formats["o"][1:])
        return quantize(weights, formats, TEXTS, lambda *_: None)


@pytest.fixture(scope="module")
def file(model: Path, made: Quantized, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("codes") / "mixed.safetensors"
    with closing(open_checkpoint(str(model))) as floats:
        write_codes(path, floats, made.formats, made.codes)
    return path


def test_every_linear_is_served_with_its_own_codes(model: Path, made: Quantized, file: Path) -> None:
    with closing(open_checkpoint(str(model), quantized_weights=file)) as checkpoint:
        fmt = choose_format(ModelOptions(quantized_weights=file), checkpoint, OPS)
        weights = load_weights(checkpoint, fmt, torch.float32)
        assert (fmt.name, checkpoint.packing and checkpoint.packing.bits) == ("mixed", (3.5, 4, 8))
    assert weights.is_recordable
    for name in linear_names(checkpoint.spec):
        assert torch.equal(weights.dequantized(name), made.codes[name].dequantize()), name
    levels = {made.codes[f"model.layers.{layer}.self_attn.o_proj.weight"].levels for layer in range(3)}
    assert len(levels) == 2
    with offline_engine(model, quantization="auto", quantized_weights=file) as llm:
        assert len(llm.generate(TEXTS, GREEDY)[0].token_ids) > 0


def test_its_formats_are_not_overruled(model: Path, file: Path) -> None:
    with closing(open_checkpoint(str(model), quantized_weights=file)) as checkpoint:
        for name in ("int4", "int8", "attn=int4,mlp=q3h"):
            with pytest.raises(UnsupportedFormat, match="--quantized-weights fixes format and group"):
                choose_format(ModelOptions(quantization=name, quantized_weights=file), checkpoint, OPS)
    with closing(open_checkpoint(str(model))) as checkpoint, pytest.raises(UnsupportedFormat, match="no mixed"):
        choose_format(ModelOptions(quantization="mixed"), checkpoint, OPS)


def changed(**of_site: Any) -> Callable[[dict[str, Any]], str]:
    """A header's formats with some of them replaced; None takes a site out."""
    return lambda formats: json.dumps({k: v for k, v in (formats | of_site).items() if v is not None})


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (lambda formats: "{", "has no formats of qkv, o, gate_up, down in its header"),
        (lambda formats: "[]", "has no formats of qkv, o, gate_up, down"),
        (changed(o=None), "has no formats of qkv, o, gate_up, down"),
        (changed(o=["int4:32"]), "has no format of o for each of 3 layers"),
        (changed(o=["int4:32", "int4:32", "int3:32"]), "codes in 'int3:32', which is no format and group"),
        (changed(o=["int4:32", "int4:32", "int4"]), "codes in 'int4', which is no format and group"),
        (
            changed(o=["int4:128"] * 3),
            "groups of 128, which do not divide the inputs of model.layers.0.self",
        ),
        (
            changed(down=["int8:64"] * 3),
            r"down_proj.weight.codes as \[64, 64\], not \[64, 128\]",
        ),
        (changed(gate_up=["int4:64"] * 3), "lacks 6 linears"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(
    model: Path, file: Path, tmp_path: Path, header: Callable[[dict[str, Any]], str], says: str
) -> None:
    with safe_open(file, framework="pt") as reader:
        facts = reader.metadata()
    facts["formats"] = header(json.loads(facts["formats"]))
    save_file(load_file(file), tmp_path / "bad.safetensors", facts)
    bad = tmp_path / "bad.safetensors"
    with pytest.raises(CorruptModel, match=f"^--quantized-weights: {bad} .*{says}"):
        open_checkpoint(str(model), quantized_weights=bad)


def test_a_file_that_is_not_there_is_named_as_given(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=f"there is no file {tmp_path}/none.safetensors$"):
        open_checkpoint(str(model), quantized_weights=tmp_path / "none.safetensors")


def test_codes_of_a_wrong_kind_are_refused(model: Path, file: Path, tmp_path: Path) -> None:
    tensors = load_file(file)
    tensors[f"{UP}.codes"] = tensors[f"{UP}.codes"].to(torch.uint8)
    tensors[f"{DOWN}.codes"].fill_(0xFF)
    with safe_open(file, framework="pt") as reader:
        save_file(tensors, tmp_path / "bad.safetensors", reader.metadata())
    with closing(open_checkpoint(str(model), quantized_weights=tmp_path / "bad.safetensors")) as checkpoint:
        for name, says in ((UP, "int8 for 256 levels"), (DOWN, "codes above 10")):
            with pytest.raises(CorruptModel, match=says):
                checkpoint.codes(name)
