"""GPTQ checkpoints against a reading bit by bit: formats, zeros, orders of inputs, bits, words; one line for damage."""

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_checkpoints import (
    DOWN,
    Damage,
    Quantized,
    Tensors,
    base,
    committed,
    convert,
    gptq_tensors,
    on,
    pack,
    read_gptq,
    with_config,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorasrv.errors import CorruptModel, ModelError, UnsupportedModel
from lorasrv.models.loader import open_checkpoint
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
GPTQMODEL = {"meta": {"quantizer": ["gptqmodel:4.2.5"]}}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base(tmp_path_factory.mktemp("packed") / "floats")


def write(
    floats: Path,
    target: Path,
    *,
    config: Mapping[str, Any] = CONFIG,
    version: str = "gptq",
    word: int = 32,
    **made: Any,
) -> dict[str, Tensor]:
    """Write a checkpoint; returns what its weights are."""
    weights = {}
    fields = {"bits": 4, "group": 32} | made

    def tensors_of(module: str, weight: Tensor) -> Tensors | None:
        if module == "lm_head":
            return None
        rounded = Quantized(weight, seed=len(weights), **fields)
        weights[f"{module}.weight"] = rounded.weight()
        return gptq_tensors(rounded, version, word)

    convert(floats, target, config, tensors_of)
    return weights


def expect(folder: Path, weights: Mapping[str, Tensor]) -> dict[str, GroupQuantizedWeight]:
    """Every weight is read to the bit; returns the codes."""
    found = {}
    with closing(open_checkpoint(str(folder))) as checkpoint:
        assert checkpoint.packing is not None
        for name, weight in weights.items():
            codes = checkpoint.codes(name)
            assert codes is not None
            assert torch.equal(codes.dequantize(), weight), name
            assert torch.equal(checkpoint.tensor(name), weight), name
            found[name] = codes
    return found


def test_a_file_packed_by_autogptq(tmp_path: Path) -> None:
    folder = committed("autogptq", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    assert len(modules) == 2 * 7
    kinds = ("qweight", "qzeros", "scales", "g_idx")
    codes = expect(folder, {f"{m}.weight": read_gptq({k: tensors[f"{m}.{k}"] for k in kinds}, 4) for m in modules})
    assert {(c.levels, c.group, c.order) for c in codes.values()} == {(INT4_LEVELS, 32, None)}


@pytest.mark.parametrize("by", [{}, GPTQMODEL])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(("bits", "levels"), [(2, Q3H_LEVELS), (3, Q3H_LEVELS), (4, INT4_LEVELS), (8, INT8_LEVELS)])
def test_bits(floats: Path, tmp_path: Path, bits: int, levels: int, sym: bool, by: dict[str, Any]) -> None:
    version = "gptq" if bits != 3 or by else "gptq_v2"
    stored = {"checkpoint_format": version} | by
    config = CONFIG | {"bits": bits, "sym": sym, "group_size": 64} | stored
    weights = write(floats, tmp_path / "m", config=config, version=version, bits=bits, group=64, sym=sym)
    codes = expect(tmp_path / "m", weights)
    assert {c.levels for c in codes.values()} == {levels}


def test_two_and_three_bits_in_small_groups_take_four(floats: Path, tmp_path: Path) -> None:
    weights = write(floats, tmp_path / "m", config=CONFIG | {"bits": 2}, bits=2)
    assert {c.levels for c in expect(tmp_path / "m", weights).values()} == {INT4_LEVELS}


@pytest.mark.parametrize("says", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("has", ["gptq", "gptq_v2"])
def test_symmetric_zeros_prove_the_format(floats: Path, tmp_path: Path, says: str, has: str) -> None:
    """Files exist that name the other format than they have."""
    config = CONFIG | {"checkpoint_format": says}
    expect(tmp_path / "m", write(floats, tmp_path / "m", config=config, version=has))


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_asymmetric_zeros_of_zero(floats: Path, tmp_path: Path, version: str) -> None:
    """GPTQModel's borrow is undone, wherever a zero is 0."""
    made = Quantized(load_file(floats / "model.safetensors")[f"{DOWN}.weight"], 4, 32, sym=False)
    made.zeros[3], made.zeros[7:9], made.zeros[21, 1] = 0, 0, 0
    config = CONFIG | GPTQMODEL | {"sym": False, "checkpoint_format": version}
    convert(floats, tmp_path / "m", config, lambda m, w: gptq_tensors(made, version) if m == DOWN else None)
    expect(tmp_path / "m", {f"{DOWN}.weight": made.weight()})


def test_zeros_that_autogptq_has_lost_are_refused(floats: Path, tmp_path: Path) -> None:
    made = Quantized(load_file(floats / "model.safetensors")[f"{DOWN}.weight"], 4, 32, sym=False)
    made.zeros[:8, 0] = torch.tensor([7, 8, 8, 0, 7, 8, 7, 7]).numpy()
    tensors = gptq_tensors(made, "autogptq")
    assert int(tensors["qzeros"][0, 0]) & 0xFFFFFFFF == 0xFFFFF776
    convert(floats, tmp_path / "m", CONFIG | {"sym": False}, lambda m, w: tensors if m == DOWN else None)
    with (
        closing(open_checkpoint(str(tmp_path / "m"))) as checkpoint,
        pytest.raises(UnsupportedModel, match=r"down_proj\.qzeros: AutoGPTQ has lost the zeros behind a zero of 0"),
    ):
        checkpoint.codes(f"{DOWN}.weight")


@pytest.mark.parametrize("zero", [0, 1])
def test_lost_zeros_of_three_bits(floats: Path, tmp_path: Path, zero: int) -> None:
    made = Quantized(load_file(floats / "model.safetensors")[f"{DOWN}.weight"], 3, 32, sym=False)
    made.zeros[made.zeros == 0] = 1
    made.zeros[9, 1] = zero
    tensors = gptq_tensors(made, "autogptq")
    config = CONFIG | {"sym": False, "bits": 3}
    convert(floats, tmp_path / "m", config, lambda m, w: tensors if m == DOWN else None)
    with closing(open_checkpoint(str(tmp_path / "m"))) as checkpoint:
        if zero:
            checkpoint.codes(f"{DOWN}.weight")
        else:
            with pytest.raises(UnsupportedModel, match=r"down_proj\.qzeros: AutoGPTQ has lost the zeros"):
                checkpoint.codes(f"{DOWN}.weight")


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_an_order_of_activations(floats: Path, tmp_path: Path, bits: int) -> None:
    config = CONFIG | {"bits": bits, "desc_act": True, "checkpoint_format": "gptq_v2"}
    weights = write(floats, tmp_path / "m", config=config, version="gptq_v2", bits=bits, act_order=True)
    codes = expect(tmp_path / "m", weights)
    assert all(c.order is not None for c in codes.values())


def test_a_g_idx_of_zeros_is_none(floats: Path, tmp_path: Path) -> None:
    weights = write(floats, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    without = {n: t * 0 if n.endswith("g_idx") else t for n, t in tensors.items() if n != f"{DOWN}.g_idx"}
    save_file(without, tmp_path / "m" / "model.safetensors")
    expect(tmp_path / "m", weights)


@pytest.mark.parametrize("word", [8, 16, 64])
@pytest.mark.parametrize("sym", [True, False])
def test_words_of_other_sizes(floats: Path, tmp_path: Path, word: int, sym: bool) -> None:
    config = CONFIG | GPTQMODEL | {"pack_dtype": f"int{word}", "sym": sym}
    expect(tmp_path / "m", write(floats, tmp_path / "m", config=config, word=word, sym=sym))


def test_one_group_for_a_row(floats: Path, tmp_path: Path) -> None:
    """The factors are repeated for groups that every backend reads."""

    def tensors_of(module: str, weight: Tensor) -> Tensors | None:
        return None if module == "lm_head" else gptq_tensors(Quantized(weight, 4, weight.shape[1]))

    folder = convert(floats, tmp_path / "m", CONFIG | {"group_size": -1}, tensors_of)
    tensors = load_file(folder / "model.safetensors")
    kinds = ("qweight", "qzeros", "scales", "g_idx")
    want = read_gptq({k: tensors[f"{DOWN}.{k}"] for k in kinds}, 4)
    assert expect(folder, {f"{DOWN}.weight": want})[f"{DOWN}.weight"].group == 128


def test_modules_with_settings_of_their_own_and_a_quantized_head(floats: Path, tmp_path: Path) -> None:
    """`dynamic` gives the MLP eight bits and leaves one projection as floats; the configuration is AutoGPTQ's file."""
    weights = {}

    def tensors_of(module: str, weight: Tensor) -> Tensors | None:
        if module.endswith("0.self_attn.v_proj"):
            return None
        made = Quantized(weight, 8 if "mlp" in module else 4, 32)
        weights[f"{module}.weight"] = made.weight()
        return gptq_tensors(made)

    folder = convert(floats, tmp_path / "m", {}, tensors_of)
    with_config(folder, quantization_config=None)
    dynamic = {r"-:.*0\.self_attn\.v_proj": {}, r"+:.*\.mlp\..*": {"bits": 8}}
    config = {"bits": 4, "group_size": 32, "sym": True, "lm_head": True, "dynamic": dynamic}
    (folder / "quantize_config.json").write_text(json.dumps(config))
    codes = expect(folder, weights)
    assert {name: c.levels for name, c in codes.items() if "1.mlp" in name} == {
        f"model.layers.1.mlp.{part}_proj.weight": INT8_LEVELS for part in ("gate", "up", "down")
    }
    assert codes["lm_head.weight"].levels == INT4_LEVELS
    with closing(open_checkpoint(str(folder))) as checkpoint:
        assert checkpoint.codes("model.layers.0.self_attn.v_proj.weight") is None
        packing = checkpoint.packing
    assert packing is not None
    assert (packing.method, packing.bits) == ("gptq", (4, 8))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm"}, "quantized by 'aqlm' .*supported: gptq, awq, compressed-tensors, bitsandbytes, fp8"),
        ({"quant_method": None}, "quantized by None"),
        ({"checkpoint_format": "marlin"}, "GPTQ in format 'marlin' is not supported, only gptq and gptq_v2"),
        ({"is_marlin_format": True}, "GPTQ in format 'marlin'"),
        ({"checkpoint_format": "gptq_p"}, "GPTQ in format 'gptq_p'"),
        ({"bits": 5}, "GPTQ of 5 bits"),
        ({"bits": "4"}, "bits must be a whole number, not '4'"),
        ({"bits": None}, "bits must be a whole number, not None"),
        ({"group_size": 48}, "groups of 48 do not divide its"),
        ({"dynamic": {"+:(": {"bits": 8}}}, r"'\(' is no regular expression"),
        ({"dynamic": {"+:.*": 8}}, "must be a table, not 8"),
        ({"dynamic": [1]}, "dynamic must be a table"),
        ({"meta": {"quantizer": "x"}, "sym": "yes"}, "sym must be true or false, not 'yes'"),
    ],
)
def test_configurations_that_are_refused(floats: Path, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write(floats, tmp_path / "m", config=CONFIG | config)
    with pytest.raises(ModelError, match=message), closing(open_checkpoint(str(tmp_path / "m"))) as checkpoint:
        checkpoint.codes(f"{DOWN}.weight")


def one(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[5] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (on("qweight", lambda t: t[:-1]), CorruptModel, r"down_proj\.weight is \[64, 120\], not \[64, 128\]"),
        (on("qweight", lambda t: t[:, :-1]), CorruptModel, r"down_proj\.weight is \[63, 128\]"),
        (on("qweight", lambda t: t.float()), CorruptModel, r"qweight is F32, not I8 or I16"),
        (on("qweight", lambda t: t.view(-1)), CorruptModel, "which are not 2 dimensions"),
        (on("qzeros", lambda t: t[:, :-1]), CorruptModel, r"qzeros is \[4, 7\], not \[4, 8\]"),
        (on("qzeros", lambda t: t.to(torch.int64)), CorruptModel, "another dtype than"),
        (on("qzeros", one(0)), UnsupportedModel, "says sym, but its zeros are not all 8"),
        (on("qzeros", lambda t: None), CorruptModel, r"lacks .*down_proj\.qzeros"),
        (on("scales", lambda t: None), CorruptModel, r"lacks .*down_proj\.scales"),
        (on("scales", one(torch.nan)), CorruptModel, "scales holds NaN or infinity"),
        (on("scales", one(torch.inf)), CorruptModel, "scales holds NaN or infinity"),
        (on("scales", lambda t: t.int()), CorruptModel, "scales is I32, not F16"),
        (on("scales", lambda t: t[:3]), UnsupportedModel, "128 inputs in 3 groups"),
        (on("g_idx", one(4)), CorruptModel, "g_idx names groups outside 0 to 3"),
        (on("g_idx", one(-1)), CorruptModel, "g_idx names groups outside 0 to 3"),
        (on("g_idx", one(2)), UnsupportedModel, "g_idx has groups of 31 to 33 inputs"),
        (on("g_idx", lambda t: t[:-1]), CorruptModel, r"g_idx is \[127\], not \[128\]"),
        (lambda t: t.update({f"{DOWN}.bias": torch.ones(64)}), UnsupportedModel, "bias is not 0, but llama models"),
    ],
)
def test_damaged_modules(floats: Path, tmp_path: Path, damage: Damage, error: type[ModelError], message: str) -> None:
    write(floats, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file)
    with pytest.raises(error, match=message) as raised, closing(open_checkpoint(str(tmp_path / "m"))) as checkpoint:
        checkpoint.codes(f"{DOWN}.weight")
    assert "\n" not in str(raised.value)


def test_a_bias_of_zeros_is_ignored(floats: Path, tmp_path: Path) -> None:
    weights = write(floats, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    save_file(load_file(file) | {f"{DOWN}.bias": torch.zeros(64)}, file)
    expect(tmp_path / "m", weights)


def test_scales_that_fp16_cannot_hold_stay_exact(floats: Path, tmp_path: Path) -> None:
    write(floats, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    kinds = ("qweight", "qzeros", "g_idx")
    for kind, dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float16)):
        scales = (tensors[f"{DOWN}.scales"].float() * 1.01).to(kind)
        save_file(tensors | {f"{DOWN}.scales": scales}, file)
        want = read_gptq({k: tensors[f"{DOWN}.{k}"] for k in kinds} | {"scales": scales}, 4)
        assert expect(tmp_path / "m", {f"{DOWN}.weight": want})[f"{DOWN}.weight"].scales.dtype == dtype


def test_a_field_is_where_it_should_be() -> None:
    """The packing of these tests, against a word that is written out."""
    assert pack(torch.arange(8)[None].numpy(), 4).tolist() == [[0x76543210]]
