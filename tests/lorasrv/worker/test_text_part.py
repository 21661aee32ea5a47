"""The language part of multimodal checkpoints: served as transformers and PEFT compute it for a text without images."""

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_decoder import HandDecoder
from multimodal import LANGUAGE, WHOLE, multimodal_adapter, write_multimodal
from packed_checkpoints import (
    Quantized,
    Tensors,
    awq_tensors,
    convert,
    dense,
    fp8_tensors,
    gptq_tensors,
    on_the_8_bit_grid,
    pack,
    read_awq,
    read_compressed,
    read_fp8,
    read_gptq,
    with_config,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from adapter_store.errors import AdapterInvalid
from lorasrv.errors import CorruptModel
from lorasrv.models.loader import open_checkpoint

FILES = [*((kind, False) for kind in WHOLE), ("gemma3", True), ("mistral3", True)]
"""By language part; whether tensors have the names of modules, as newer checkpoints have them."""
IDS = [f"{kind}-as-{'modules' if as_modules else 'published'}" for kind, as_modules in FILES]


@pytest.fixture(scope="module", params=FILES, ids=IDS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, as_modules = request.param
    folder = write_multimodal(tmp_path_factory.mktemp(kind), kind, as_modules=as_modules)
    own = "model.language_model.norm.weight" if as_modules else "language_model.model.norm.weight"
    assert own in load_file(folder / "model.safetensors")
    return folder


def compare(directory: Path, oracle: Any, adapter: Path, store: Path, weights: str = "none") -> HandDecoder:
    """Compare logits with transformers and PEFT, with the adapter and without."""
    served = HandDecoder(directory, {"mia": adapter}, store, "torch", weights=weights)
    ids = torch.randint(3, 384, (21,), generator=torch.Generator().manual_seed(7)).tolist()
    tables = tuple(range(6)), tuple(range(6, 12))
    served.logits([(name, ids[:-1], 0, table) for name, table in zip((None, "mia"), tables, strict=True)])
    got = served.logits([(name, ids[-1:], 20, table) for name, table in zip((None, "mia"), tables, strict=True)])
    with torch.inference_mode():
        adapted = oracle(torch.tensor([ids])).logits[0, -1]
        with oracle.disable_adapter():
            plain = oracle(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(got[0], plain, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got[1], adapted, rtol=1e-3, atol=1e-3)
    assert (adapted - plain).abs().max() > 0.1
    return served


def test_text_equals_transformers_and_peft(directory: Path, tmp_path: Path) -> None:
    oracle = multimodal_adapter(directory, tmp_path / "mia", LANGUAGE)
    compare(directory, oracle, tmp_path / "mia", tmp_path / "store")


def test_an_adapter_of_the_vision_tower_is_refused(directory: Path, tmp_path: Path) -> None:
    multimodal_adapter(directory, tmp_path / "sees", ["q_proj", "v_proj"])
    with pytest.raises(AdapterInvalid) as refused:
        HandDecoder(directory, {"sees": tmp_path / "sees"}, tmp_path / "store", "torch")
    assert {problem.code for problem in refused.value.problems} == {"unsupported_vision"}


def test_tensors_with_names_of_a_model_without_vision_are_missing(directory: Path, tmp_path: Path) -> None:
    for file in directory.glob("*.json"):
        (tmp_path / file.name).symlink_to(file)
    tensors = load_file(directory / "model.safetensors")
    own = {name.replace("language_model.", ""): t for name, t in tensors.items() if "language_model." in name}
    save_file(own, tmp_path / "model.safetensors")
    with pytest.raises(CorruptModel, match=r"missing: language_model\.model\.embed_tokens\.weight, "):
        open_checkpoint(str(tmp_path))


# Quantized.

Read = Callable[[str, Mapping[str, Tensor]], Tensor]
IGNORED = ["re:.*lm_head", "re:vision_tower.*", "re:multi_modal_projector.*"]
"""As llm-compressor has them."""


def grouped(bits: int, targets: list[str], **fields: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | fields
    return {"targets": targets, "weights": weights}


def w4a16(module: str, weight: Tensor) -> Tensors:
    """Linears of down have eight bits."""
    made = Quantized(weight, 8 if "down" in module else 4, 32)
    scales = torch.from_numpy(made.scales).bfloat16()
    return {
        "weight_packed": pack(made.fields, made.bits),
        "weight_shape": torch.tensor(made.fields.shape),
        "weight_scale": scales,
    }


def w8a8(module: str, weight: Tensor) -> Tensors:
    made = Quantized(weight, 8, weight.shape[1])
    codes = torch.from_numpy(made.fields - 128).to(torch.int8)
    return {"weight": codes, "weight_scale": torch.from_numpy(made.scales).bfloat16()}


def gptq(module: str, weight: Tensor) -> Tensors:
    """Linears of v have eight bits."""
    return gptq_tensors(Quantized(weight, 8 if "v_proj" in module else 4, 32, sym=False), "gptq_v2")


PACKED: dict[str, tuple[dict[str, Any], Callable[[str, Tensor], Tensors], Read, str]] = {
    # Patterns are for the other names of modules than the file has.
    "w4a16": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": IGNORED,
            "config_groups": {
                "group_0": grouped(4, ["Linear"]),
                "group_1": grouped(8, [r"re:model\.language_model\.layers\.\d+\.mlp\.down_proj$"]),
            },
        },
        w4a16,
        lambda module, stored: read_compressed(stored, 8 if "down" in module else 4),
        "compressed-tensors",
    ),
    "w8a8": (
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "ignore": IGNORED,
            "config_groups": {"group_0": grouped(8, ["Linear"], strategy="channel", group_size=None)},
        },
        w8a8,
        lambda module, stored: read_compressed(stored, 8),
        "compressed-tensors",
    ),
    "gptq": (
        {
            "quant_method": "gptq",
            "checkpoint_format": "gptq_v2",
            "bits": 4,
            "group_size": 32,
            "sym": False,
            "desc_act": False,
            "dynamic": {r"-:.*vision_tower": {}, r"+:model\.language_model\..*v_proj": {"bits": 8}},
        },
        gptq,
        lambda module, stored: read_gptq(stored, 8 if "v_proj" in module else 4, v2=True),
        "gptq",
    ),
    "awq": (
        {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "modules_to_not_convert": ["vision_tower", "multi_modal_projector", "lm_head"],
        },
        lambda module, weight: awq_tensors(Quantized(weight, 4, 32, sym=False)),
        lambda module, stored: read_awq(stored, 32),
        "awq",
    ),
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["vision_tower", "lm_head"]},
        lambda module, weight: fp8_tensors(weight, ()),
        lambda module, stored: read_fp8(stored),
        "none",
    ),
}
"""The configuration, how a linear of the language part is packed and read, and the format that serves it."""
UNREAD = "fc1"
"""Linears of the vision tower that have tensors of codes, which are none."""


@pytest.mark.parametrize("as_modules", [False, True], ids=["published", "modules"])
@pytest.mark.parametrize(
    ("kind", "packed"),
    [("gemma3", "w4a16"), ("gemma3", "awq"), ("mistral3", "w8a8"), ("mistral3", "gptq"), ("ministral3", "fp8")],
)
def test_a_quantized_language_part(tmp_path: Path, kind: str, packed: str, as_modules: bool) -> None:
    """Its linears are those of the file to the bit; how the vision tower is quantized does not matter."""
    config, made, read, fmt = PACKED[packed]
    source = write_multimodal(tmp_path / "source", kind, as_modules=as_modules)
    tensors = load_file(source / "model.safetensors")
    ends = "embed_tokens.weight", "lm_head.weight"
    save_file(
        {n: on_the_8_bit_grid(t) if n.endswith(ends) else t for n, t in tensors.items()}, source / "model.safetensors"
    )

    def packing(module: str, weight: Tensor) -> Tensors | None:
        if "vision_tower" in module and module.endswith(UNREAD):
            return {"weight": weight, "weight_packed": torch.zeros(1), "qweight": torch.zeros(1)}
        return made(module, weight) if "layers." in module and "language_model" in module else None

    def reading(module: str, stored: Mapping[str, Tensor]) -> Tensor | None:
        is_packed = "language_model" in module and len(stored) > 1
        return read(module, stored) if is_packed else stored.get("weight") if "qweight" in stored else None

    folder = convert(source, tmp_path / "packed", config, packing)
    floats = dense(folder, tmp_path / "dense", reading)
    oracle = multimodal_adapter(floats, tmp_path / "mia", LANGUAGE)
    served = compare(folder, oracle, tmp_path / "mia", tmp_path / "store", fmt)
    with closing(open_checkpoint(str(folder))) as opened, closing(open_checkpoint(str(floats))) as wanted:
        assert opened.packing is not None
        assert opened.packing.method == config["quant_method"]
        linears = [name for name in wanted.names() if name.endswith("proj.weight")]
        assert len(linears) == 7 * opened.spec.num_layers
        for name in linears:
            exact = wanted.tensor(name)
            assert opened.codes(name) is not None
            assert torch.equal(opened.tensor(name), exact), name
            assert torch.equal(served.weights.dequantized(name), exact), name


def test_a_configuration_of_quantization_may_be_that_of_the_language_part(tmp_path: Path) -> None:
    source = write_multimodal(tmp_path / "source", "gemma3")
    config, made, _, _ = PACKED["awq"]
    is_packed = "language_model.model.layers.0.mlp.down_proj".__eq__
    folder = convert(source, tmp_path / "packed", {}, lambda m, weight: made(m, weight) if is_packed(m) else None)
    text = json.loads((folder / "config.json").read_text("utf-8"))["text_config"]
    with_config(folder, quantization_config=None, text_config=text | {"quantization_config": config})
    with closing(open_checkpoint(str(folder))) as opened:
        assert opened.codes("model.layers.0.mlp.down_proj.weight") is not None
        assert opened.codes("model.layers.1.mlp.down_proj.weight") is None
