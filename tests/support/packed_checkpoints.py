"""Quantized checkpoints, written and read bit by bit according to the layouts, without helpers of the loaders.

A row of packed words is one large integer here, and a field is some bits of it.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from ggml_blocks import kind_of, quantize
from safetensors.torch import load_file, save_file
from tiny_checkpoints import TOKENIZER_CONFIG, tiny_tokenizer_json, write_tiny
from torch import Tensor

Ints = npt.NDArray[np.int64]
Tensors = dict[str, Tensor]
Damage = Callable[[Tensors], object]
DATA = Path(__file__).parents[1] / "lorasrv" / "models" / "loader" / "packed" / "data"
DOWN = "model.layers.1.mlp.down_proj"
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
WORDS = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


def pack_row(fields: Ints, bits: int, word: int = 32) -> Ints:
    """Pack the fields of one row into words, the lowest bits first."""
    joined = sum(int(field) << bits * i for i, field in enumerate(fields))
    raw = joined.to_bytes(-(-len(fields) * bits // word) * word // 8, "little")
    return np.frombuffer(raw, WORDS[word])


def unpack_row(words: Tensor, bits: int, count: int) -> list[int]:
    joined = int.from_bytes(words.contiguous().numpy().tobytes(), "little")
    return [joined >> bits * i & (1 << bits) - 1 for i in range(count)]


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack rows of words to [rows, count] int64."""
    return torch.tensor([unpack_row(row, bits, count) for row in words])


def pack(fields: Ints, bits: int, word: int = 32) -> Tensor:
    return torch.from_numpy(np.stack([pack_row(row, bits, word) for row in fields]))


class Quantized:
    """A rounded weight [O, H]: fields and zeros, unsigned, and scales; and the group of each input."""

    def __init__(
        self, weight: Tensor, bits: int, group: int, *, sym: bool = True, seed: int = 0, act_order: bool = False
    ) -> None:
        out, inputs = weight.shape
        groups_of = np.arange(inputs) // group
        if act_order:
            groups_of = np.random.default_rng(seed).permutation(groups_of)
        self.bits, self.groups_of = bits, groups_of
        values = weight.double().numpy()
        most, count = (1 << bits) - 1, inputs // group
        low, high = (np.zeros((out, count)) for _ in range(2))
        for g in range(count):
            part = values[:, groups_of == g]
            low[:, g], high[:, g] = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if sym:
            self.scales = (np.maximum(-low, high) * 2 / most).astype(np.float16).astype(np.float64)
            self.zeros: Ints = np.full((out, count), 1 << bits - 1)
        else:
            self.scales = ((high - low) / most).astype(np.float16).astype(np.float64)
            self.zeros = np.rint(-low / self.scales).clip(0, most).astype(np.int64)
        by, at = self.scales[:, groups_of], self.zeros[:, groups_of]
        self.fields: Ints = (np.rint(values / by) + at).clip(0, most).astype(np.int64)

    def weight(self) -> Tensor:
        """Return the weight, [O, H] fp32."""
        offsets = self.fields - self.zeros[:, self.groups_of]
        return torch.from_numpy((offsets * self.scales[:, self.groups_of]).astype(np.float32))


def gptqmodel_zeros(zeros: Ints, bits: int, word: int = 32) -> Tensor:
    """Return zeros [G, O] minus 1 as GPTQModel stores them: subtracted from whole words, with borrow."""
    kind = np.dtype(WORDS[word]).str.replace("i", "u")
    words = pack(zeros, bits, word).numpy().view(kind)
    if bits == 3:
        # The three constants of its source, for every three words.
        by = np.array([0x24924924, 0x92492492, 0x49249249], np.uint32)
        less = words - np.tile(by, -(-words.shape[1] // 3))[: words.shape[1]]
    else:
        less = words - np.array(sum(1 << i for i in range(0, word, bits))).astype(kind)
    return torch.from_numpy(less.view(WORDS[word]).copy())


def autogptq_zeros(zeros: Ints, bits: int) -> Tensor:
    """Return zeros minus 1 as AutoGPTQ stores them: ORed, so that a -1 sets all bits from its field on."""
    less = (zeros - 1).astype(np.uint32)
    words = np.zeros((zeros.shape[0], zeros.shape[1] * bits // 32), np.uint32)
    for i in range(zeros.shape[1]):
        word, shift = divmod(bits * i, 32)
        words[:, word] |= less[:, i] << np.uint32(shift)
        if (over := shift + bits - 32) > 0:
            words[:, word + 1] |= less[:, i] >> np.uint32(bits - over) & np.uint32((1 << over) - 1)
    return torch.from_numpy(words.view(np.int32).copy())


def gptq_tensors(made: Quantized, version: str = "gptq", word: int = 32) -> Tensors:
    """Return the tensors of a module; `version`: gptq_v2, gptq (GPTQModel's), or autogptq."""
    zeros = made.zeros.T
    stored = {
        "gptq_v2": lambda: pack(zeros, made.bits, word),
        "gptq": lambda: gptqmodel_zeros(zeros, made.bits, word),
        "autogptq": lambda: autogptq_zeros(zeros, made.bits),
    }[version]()
    return {
        "qweight": pack(made.fields, made.bits, word).T.contiguous(),
        "qzeros": stored,
        "scales": torch.from_numpy(made.scales.T.copy()).half(),
        "g_idx": torch.from_numpy(made.groups_of.astype(np.int32)),
    }


def read_gptq(stored: Mapping[str, Tensor], bits: int, *, v2: bool = False) -> Tensor:
    """Return the weight [O, H] fp32 of a module, whose zeros minus 1 did not wrap."""
    inputs, outputs = len(stored["g_idx"]), stored["scales"].shape[1]
    fields = unpack(stored["qweight"].T, bits, inputs)
    zeros = unpack(stored["qzeros"], bits, outputs).T + (0 if v2 else 1)
    groups_of = stored["g_idx"].long()
    return (fields - zeros[:, groups_of]).float() * stored["scales"].float().T[:, groups_of]


def awq_tensors(made: Quantized, version: str = "gemm") -> Tensors:
    if version == "gemm":
        order = np.arange(made.fields.shape[0]).reshape(-1, 8)[:, AWQ_OUTPUTS].reshape(-1)
        return {
            "qweight": pack(made.fields[order].T, 4),
            "qzeros": pack(made.zeros[order].T, 4),
            "scales": torch.from_numpy(made.scales.T.copy()).half(),
        }
    groups = made.zeros.shape[1]
    group = made.fields.shape[1] // groups
    step = {32: 4, 64: 2}.get(group, 1)
    width = (groups + 8 * step - 1) // (8 * step) * step
    wide = (0, 0), (0, 8 * width - groups)
    zeros, scales = np.pad(made.zeros, wide), np.pad(made.scales, wide)
    return {"qweight": pack(made.fields, 4), "qzeros": pack(zeros, 4), "scales": torch.from_numpy(scales).half()}


def read_awq(stored: Mapping[str, Tensor], group: int, version: str = "gemm") -> Tensor:
    """The weight [O, H] fp32 of a module."""
    words = stored["qweight"]
    if version == "gemv":
        inputs = 8 * words.shape[1]
        fields, count = unpack(words, 4, inputs), inputs // group
        zeros, scales = unpack(stored["qzeros"], 4, count), stored["scales"][:, :count].float()
    else:
        inputs, outputs = words.shape[0], 8 * words.shape[1]
        fields, zeros = (torch.empty((outputs, len(stored[name])), dtype=torch.int64) for name in ("qweight", "qzeros"))
        for name, filled in (("qweight", fields), ("qzeros", zeros)):
            for row, packed in enumerate(unpack(stored[name], 4, outputs)):
                for i, value in enumerate(packed):
                    filled[i // 8 * 8 + AWQ_OUTPUTS[i % 8], row] = value
        scales = stored["scales"].float().T
    groups_of = torch.arange(inputs) // group
    return (fields - zeros[:, groups_of]).float() * scales[:, groups_of]


def read_awq_fast(stored: Mapping[str, Tensor], group: int) -> Tensor:
    """Return the weight [O, H] fp32 of a module of gemv_fast, field by field."""
    words = stored["qweight"].numpy().view(np.uint16)
    outputs, inputs = 4 * words.shape[0], words.shape[1]
    weight = torch.empty(outputs, inputs)
    for o in range(outputs):
        for i in range(inputs):
            # Of 32 inputs, the pair of each eighth at the same place; in eight of these, the first ones come first.
            eighth, place, second = i % 32 // 8, i % 8 // 2, i % 2
            at = i // 32 * 32 + 8 * place + 4 * second + eighth
            field = at // 64 * 256 + o % 4 * 64 + at % 64
            q = int(words[o // 4, field // 4]) >> 4 * (field % 4) & 15
            weight[o, i] = q * stored["scales"][i // group, o].float() + stored["qzeros"][i // group, o].float()
    return weight


EETQ_ROWS = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


def eetq_tensors(weight: Tensor) -> Tensors:
    """Return the tensors of EETQ, by the four steps of its packing, one number at a time."""
    scales = (weight.abs().amax(1) / 128).half()
    codes = (weight / scales.float()[:, None]).round().clamp(-128, 127).to(torch.int8).T.numpy()
    inputs, outputs = codes.shape
    permuted = np.empty_like(codes)
    for row in range(inputs):
        permuted[row] = codes[row // 16 * 16 + EETQ_ROWS[row % 16]]
    flat = np.empty(inputs * outputs, np.int64)
    for o in range(outputs):
        for i in range(inputs):
            flat[o // 2 * 2 * inputs + i // 64 * 128 + o % 2 * 64 + i % 64] = int(permuted[i, o]) + 128
    for start in range(0, len(flat), 4):
        flat[start + 1], flat[start + 2] = flat[start + 2], flat[start + 1]
    stored = torch.from_numpy(flat.astype(np.uint8)).view(torch.int8).view(inputs, outputs)
    return {"qweight": stored, "weight_scales": scales}


def _spread(scales: Tensor, weight: Tensor) -> Tensor:
    """Return the scale of every number of a weight [O, H], from one scale, one per output, or one per block."""
    if scales.dim() < 2:
        return scales.expand_as(weight)
    rows, columns = (-(-n // m) for n, m in zip(weight.shape, scales.shape, strict=True))
    return scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]


def fp8_tensors(weight: Tensor, shape: tuple[int, ...], name: str = "weight_scale") -> Tensors:
    """Return a weight in e4m3 with random scales of a shape, all large enough."""
    scales = weight.abs().max() / 448 * (1 + torch.rand(shape))
    return {"weight": (weight / _spread(scales, weight)).to(torch.float8_e4m3fn), name: scales}


def read_fp8(stored: Mapping[str, Tensor], name: str = "weight_scale") -> Tensor:
    """Return the weight of the tensors of `fp8_tensors`."""
    return stored["weight"].float() * _spread(stored[name], stored["weight"])


def read_hqq(stored: Mapping[str, Tensor]) -> Tensor:
    """Return the weight [O, H] fp32 of a module of HQQ."""
    bits, axis, group = (int(stored[name]) for name in ("nbits", "axis", "group_size"))
    outputs, inputs = (int(n) for n in stored["shape"])
    count = outputs * inputs // group
    rows, columns = (count, group) if axis else (group, count)
    per = 10 if bits == 3 else 8 // bits
    weight = torch.empty(rows, columns)
    height = len(stored["W_q"])
    for row in range(rows):
        words = stored["W_q"][row % height].long()
        weight[row] = (words >> bits * (per - 1 - row // height)) & (1 << bits) - 1
    return ((weight - stored["zero"].float()) * stored["scale"].float()).view(outputs, inputs)


def read_compressed(stored: Mapping[str, Tensor], bits: int) -> Tensor:
    """Return the weight [O, H] fp32 of a module of compressed-tensors, densely packed or int8."""
    scales, middle = stored["weight_scale"].float(), 1 << bits - 1
    if "weight_packed" in stored:
        outputs, inputs = stored["weight_shape"].tolist()
        values = unpack(stored["weight_packed"], bits, inputs) - middle
    else:
        values = stored["weight"].long()
        outputs, inputs = values.shape
    zeros = torch.zeros(scales.shape, dtype=torch.int64)
    if "weight_zero_point" in stored:
        zeros = unpack(stored["weight_zero_point"].T, bits, outputs).T - middle
    groups_of = stored.get("weight_g_idx", torch.arange(inputs) // (inputs // scales.shape[1])).long()
    return (values - zeros[:, groups_of]).float() * scales[:, groups_of]


def read_bitsandbytes(stored: Mapping[str, Tensor]) -> Tensor:
    """Return the weight [O, H] fp32 of a module; its tensors are named by the part after the module's name."""
    weight = stored["weight"]
    if "SCB" in stored:
        return weight.float() * stored["SCB"][:, None] / 127
    state = json.loads(bytes(next(t for name, t in stored.items() if "quant_state" in name).tolist()))
    raw, table = weight.view(-1).view(torch.uint8).tolist(), stored["weight.quant_map"].tolist()
    absmax = stored["weight.absmax"]
    if "nested_blocksize" in state:
        which = torch.arange(len(absmax)) // state["nested_blocksize"]
        absmax = stored["weight.nested_quant_map"][absmax.long()] * stored["weight.nested_absmax"][which]
        absmax = absmax + state["nested_offset"]
    values = []
    for i in range(state["shape"][0] * state["shape"][1]):
        code = raw[i // 2] >> 4 if i % 2 == 0 else raw[i // 2] & 15
        values.append(torch.tensor(table[code]) * absmax[i // state["blocksize"]])
    return torch.stack(values).view(*state["shape"])


def on_the_8_bit_grid(table: Tensor) -> Tensor:
    """Return a table [V, H] near this one that rounding to int8 in groups of 32 does not change."""
    whole = (table.float() * 300).round().clamp(-126, 126)
    whole[:, ::32] = 127
    return whole / 1024


def base(path: Path, **changes: Any) -> Path:
    """Write a tiny llama of two layers, whose embedding and head are on the grid of 8 bits."""
    write_tiny(path, "llama", **({"num_hidden_layers": 2} | changes))
    tensors = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = on_the_8_bit_grid(tensors[name])
    save_file(tensors, path / "model.safetensors")
    return path


def convert(
    source: Path, target: Path, config: Mapping[str, Any], tensors_of: Callable[[str, Tensor], Tensors | None]
) -> Path:
    """Write a checkpoint with other tensors for some linears, and its configuration in config.json.

    Args:
        tensors_of: (module, weight) -> tensors by the ends of their names, or None for an unchanged module.
    """
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, target)
    tensors: Tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        is_linear = tensor.dim() == 2 and "embed" not in name
        made = tensors_of(module, tensor) if is_linear else None
        tensors |= {name: tensor} if made is None else {f"{module}.{end}": t.contiguous() for end, t in made.items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    with_config(target, quantization_config=dict(config))
    return target


def dense_gguf(source: Path, target: Path, kinds: Mapping[str, str]) -> Path:
    """Write the floats that the gguf package reads from blocks of these types (`tiny_checkpoints.write_gguf`)."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            kind = kind_of(name, kinds)
            stored = quantize(tensor.float().numpy(), kind)
            tensors[name] = torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind]).copy())
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def with_config(folder: Path, **changes: Any) -> None:
    """Change config.json; None removes a key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def committed(name: str, target: Path) -> Path:
    """Copy a committed checkpoint, with the tokenizer of the tiny models."""
    shutil.copytree(DATA / name, target)
    (target / "tokenizer.json").write_text(tiny_tokenizer_json(), "utf-8")
    (target / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    return target


def dense(folder: Path, target: Path, read: Callable[[str, Mapping[str, Tensor]], Tensor | None]) -> Path:
    """Write the same model as plain floats.

    Args:
        read: (module, its tensors by the ends of their names) -> its weight; None for a module of floats.
    """
    target.mkdir(parents=True)
    modules: dict[str, Tensors] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        # Tensors of a weight that bitsandbytes packed are named module.weight.END.
        module, _, end = name.rpartition(".") if ".weight." not in name else name.partition(".weight.")
        end = f"weight.{end}" if ".weight." in name else end
        modules.setdefault(module, {})[end] = tensor
    tensors: Tensors = {}
    for module, parts in modules.items():
        weight = read(module, parts)
        if weight is None:
            tensors |= {f"{module}.{end}": tensor.float() for end, tensor in parts.items()}
        else:
            tensors[f"{module}.weight"] = weight
    save_file({name: t.contiguous() for name, t in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / file, target)
    with_config(target, quantization_config=None, dtype="float32")
    return target


def on(kind: str, change: Callable[[Tensor], Tensor | None], module: str = DOWN) -> Damage:
    """Change one tensor of a module, or remove it."""

    def apply(tensors: Tensors) -> None:
        changed = change(tensors.pop(f"{module}.{kind}"))
        if changed is not None:
            tensors[f"{module}.{kind}"] = changed.contiguous()

    return apply
