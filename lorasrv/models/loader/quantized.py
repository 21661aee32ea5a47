"""Read and write files of `lorasrv quantize`: a model's linears as codes, used together with their checkpoint.

A safetensors file. NAME.codes [O, H / 2] uint8 holds two codes a byte, the even input in the lower half; NAME.scales
and NAME.minima [O, G] fp16. The header has the format, the group, and a digest of a sample of the rounded weights.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lorasrv.errors import CorruptModel, ModelNotFound
from lorasrv.models.families import tensor_shapes
from lorasrv.models.loader.checkpoint import Checkpoint
from lorasrv.models.spec import ModelSpec
from lorasrv.text.tokenizer import TokenizerSource
from sgmv_kernels.ops import INT4_LEVELS, Q3H_LEVELS, GroupQuantizedWeight, KernelArgumentError

KIND = "lorasrv codes 1"
FEW_LEVELS = {"int4": INT4_LEVELS, "q3h": Q3H_LEVELS}
_PARTS = ("codes", "scales", "minima")
_SAMPLES = 1024


def write_codes(
    path: Path, checkpoint: Checkpoint, quantization: str, codes: Mapping[str, GroupQuantizedWeight]
) -> None:
    """Write a file of codes, completely or not at all.

    Args:
        path: the file to make.
        checkpoint: the model that the codes were made from.
        quantization: name of the codes' format.
        codes: codes [O, H] by the canonical names of weights.
    Raises:
        OSError: the disk refused; no partial file is left.
    """
    tensors: dict[str, Tensor] = {}
    for name, part in codes.items():
        assert part.minima is not None, "codes of 16 or 11 levels have minima"
        tensors[f"{name}.codes"] = part.codes[:, ::2] | (part.codes[:, 1::2] << 4)
        tensors[f"{name}.scales"], tensors[f"{name}.minima"] = part.scales, part.minima
    group = next(iter(codes.values())).group
    facts = {"kind": KIND, "quantization": quantization, "group": str(group), "base": _sample(checkpoint)}
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        save_file(tensors, unfinished, facts)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


class QuantizedCheckpoint:
    """Replace the linears of a checkpoint by the codes of a file; see `Checkpoint`.

    Raises:
        ModelNotFound: the file does not exist.
        CorruptModel: the file is damaged, has no codes, or belongs to another model.
    """

    def __init__(self, base: Checkpoint, path: Path) -> None:
        self._base = base
        self.name, self.spec, self.packing = base.name, base.spec, None
        self._files = ExitStack()
        try:
            self._reader = self._files.enter_context(safe_open(path, framework="pt"))
            self._check(self._reader.metadata() or {}, frozenset(self._reader.keys()), base)
        except BaseException as error:
            self._files.close()
            raise _with_file_name(error, path.name) from None

    def names(self) -> Iterable[str]:
        return self._base.names()

    def tensor(self, name: str) -> Tensor:
        return self._base.tensor(name)

    def codes(self, name: str) -> GroupQuantizedWeight | None:
        if name not in self._held:
            return self._base.codes(name)
        packed, scales, minima = (self._reader.get_tensor(f"{name}.{part}") for part in _PARTS)
        codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        try:
            made = GroupQuantizedWeight(codes, scales, minima, FEW_LEVELS[self.quantization])
        except KernelArgumentError as error:
            raise CorruptModel(f"--quantized-weights: {name}: {error}") from None
        if int(codes.max()) >= made.levels:
            raise CorruptModel(f"--quantized-weights: {name} has codes above {made.levels - 1}")
        return made

    def tokenizer_source(self) -> TokenizerSource:
        return self._base.tokenizer_source()

    def close(self) -> None:
        self._files.close()
        self._base.close()

    def _check(self, facts: Mapping[str, str], found: frozenset[str], base: Checkpoint) -> None:
        if facts.get("kind") != KIND or facts.get("quantization") not in FEW_LEVELS:
            raise CorruptModel("was not written by lorasrv quantize, or by another version of it")
        self.quantization = facts["quantization"]
        self._held = frozenset(linear_names(base.spec))
        lacking = sorted(name for name in self._held if not {f"{name}.{part}" for part in _PARTS} <= found)
        if lacking:
            raise CorruptModel(f"lacks {len(lacking)} linears of {base.name}; the first is {lacking[0]}")
        group = int(facts["group"]) if facts.get("group", "").isdecimal() else 0
        shapes = tensor_shapes(base.spec)
        for name in sorted(self._held):
            self._check_shapes(name, shapes[name], group)
        if facts.get("base") != _sample(base):
            raise CorruptModel(
                f"was made from other weights than those of {base.name}; run lorasrv quantize on this model"
            )

    def _check_shapes(self, name: str, shape: tuple[int, ...], group: int) -> None:
        outputs, inputs = shape
        if not group or inputs % group or inputs % 2:
            raise CorruptModel(f"has groups of {group or 'no size'}, which do not divide the inputs of {name}")
        for part, columns in zip(_PARTS, (inputs // 2, inputs // group, inputs // group), strict=True):
            found = self._reader.get_slice(f"{name}.{part}").get_shape()
            if found != [outputs, columns]:
                raise CorruptModel(f"has {name}.{part} as {found}, not {[outputs, columns]}")


def _with_file_name(error: BaseException, file: str) -> BaseException:
    """Return the error with the flag and the file's name in its message, without the file's folder."""
    match error:
        case FileNotFoundError():
            return ModelNotFound(f"--quantized-weights: there is no file {file}")
        case CorruptModel():
            return CorruptModel(f"--quantized-weights: {file} {error}")
        case OSError():
            return CorruptModel(f"--quantized-weights: {file} cannot be read: {error.strerror}")
        case SafetensorError():
            return CorruptModel(f"--quantized-weights: {file} cannot be read: {error}")
    return error


def linear_names(spec: ModelSpec) -> list[str]:
    """Return the names of the weights that are kept as codes, in the order of layers and sites."""
    modules = [module for site in spec.sites() for module in site.modules]
    return [f"model.layers.{layer}.{module}.weight" for layer in range(spec.num_layers) for module in modules]


def _sample(checkpoint: Checkpoint) -> str:
    """Return a digest of some numbers of the first and the last linear and of the final norm."""
    names = linear_names(checkpoint.spec)
    digest = hashlib.sha256()
    for name in (names[0], names[-1], "model.norm.weight"):
        flat = checkpoint.tensor(name).flatten()
        digest.update(flat[:: max(1, len(flat) // _SAMPLES)].float().numpy().tobytes())
    return digest.hexdigest()
