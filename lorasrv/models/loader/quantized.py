"""Read and write files of `lorasrv quantize`: a model's linears as codes, used together with their checkpoint.

A file is in safetensors format. NAME.codes [O, H / 2] uint8 holds two codes per byte, the even input in the lower half;
NAME.scales and NAME.minima are [O, G] fp16. Codes of 8 bits are int8 [O, H], without minima. The header has a digest of
a sample of the rounded weights, and either one format and group or, if linears differ, the format of every site of
every layer.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lorasrv.errors import CorruptModel, ModelNotFound, UnsupportedFormat
from lorasrv.models.code_format import CODE_BITS, CodeFormat
from lorasrv.models.families import tensor_shapes
from lorasrv.models.loader.checkpoint import Checkpoint, StoredPacking
from lorasrv.models.spec import ModelSpec
from lorasrv.text.tokenizer import TokenizerSource
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight

KIND, MIXED_KIND = "lorasrv codes 1", "lorasrv codes 2"
FEW_BITS = ("int4", "q3h")
_SAMPLES = 1024
SiteFormats = Mapping[str, Sequence[CodeFormat]]
"""Maps a site to its format in each layer."""


def write_codes(
    path: Path, checkpoint: Checkpoint, formats: SiteFormats, codes: Mapping[str, GroupQuantizedWeight]
) -> None:
    """Write a file of codes, completely or not at all.

    Args:
        path: the file to make.
        checkpoint: the model that the codes were made from.
        formats: formats of the codes.
        codes: codes [O, H] by the canonical names of weights.
    Raises:
        OSError: the disk refused; no partial file is left.
    """
    tensors: dict[str, Tensor] = {}
    for name, part in codes.items():
        tensors[f"{name}.scales"] = part.scales
        if part.minima is None:
            tensors[f"{name}.codes"] = part.codes
            continue
        tensors[f"{name}.codes"] = part.codes[:, ::2] | (part.codes[:, 1::2] << 4)
        tensors[f"{name}.minima"] = part.minima
    facts = _header(formats) | {"base": _sample(checkpoint)}
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        # Created here with default permissions, because files created by the library are readable by the owner only.
        unfinished.touch()
        mode = unfinished.stat().st_mode
        save_file(tensors, unfinished, facts)
        unfinished.chmod(mode)
        os.replace(unfinished, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _header(formats: SiteFormats) -> dict[str, str]:
    found = {form for forms in formats.values() for form in forms}
    if len(found) == 1:
        one = found.pop()
        return {"kind": KIND, "quantization": one.name, "group": str(one.group)}
    return {
        "kind": MIXED_KIND,
        "formats": json.dumps({site: [str(f) for f in forms] for site, forms in formats.items()}),
    }


def _formats(facts: Mapping[str, str], spec: ModelSpec) -> SiteFormats:
    """Return the formats in a header.

    Raises:
        CorruptModel: the header has no formats that fit this model.
    """
    sites = [site.name for site in spec.sites_of(0)]
    if facts.get("kind") == KIND:
        form = _format(f"{facts.get('quantization')}:{facts.get('group')}")
        return dict.fromkeys(sites, (form,) * spec.num_layers)
    if facts.get("kind") != MIXED_KIND:
        raise CorruptModel("was not written by lorasrv quantize, or by another version of it")
    try:
        listed = json.loads(facts.get("formats", ""))
    except json.JSONDecodeError:
        listed = None
    if not isinstance(listed, dict) or listed.keys() != set(sites):
        raise CorruptModel(f"has no formats of {', '.join(sites)} in its header")
    for site, forms in listed.items():
        if not isinstance(forms, list) or len(forms) != spec.num_layers:
            raise CorruptModel(f"has no format of {site} for each of {spec.num_layers} layers in its header")
    return {site: tuple(_format(str(form)) for form in listed[site]) for site in sites}


def _format(text: str) -> CodeFormat:
    try:
        return CodeFormat.parse(text, {})
    except (UnsupportedFormat, KeyError):
        raise CorruptModel(f"has codes in {text!r:.60}, which is no format and group of this version") from None


class QuantizedCheckpoint:
    """Replace the linears of a checkpoint by the codes of a file; see `Checkpoint`.

    Raises:
        ModelNotFound: the file does not exist.
        CorruptModel: the file is damaged, has no codes, or belongs to another model.
    """

    def __init__(self, base: Checkpoint, path: Path) -> None:
        self._base = base
        self.name, self.spec = base.name, base.spec
        self._files = ExitStack()
        try:
            self._reader = self._files.enter_context(safe_open(path, framework="pt"))
            facts = self._reader.metadata() or {}
            self.formats = _formats(facts, base.spec)
            self._held = _by_weight(self.formats, base.spec)
            self._check(facts, frozenset(self._reader.keys()), base)
            self.packing = _packing(self.formats, base.spec)
        except BaseException as error:
            self._files.close()
            raise _with_path(error, path) from None

    def names(self) -> Iterable[str]:
        return self._base.names()

    def tensor(self, name: str) -> Tensor:
        return self._base.tensor(name)

    def codes(self, name: str) -> GroupQuantizedWeight | None:
        if name not in self._held:
            return self._base.codes(name)
        form = self._held[name]
        read = {part: self._reader.get_tensor(f"{name}.{part}") for part in _parts(form)}
        codes = read["codes"]
        if "minima" in read:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        try:
            made = GroupQuantizedWeight(codes, read["scales"], read.get("minima"), form.levels)
        except KernelArgumentError as error:
            raise CorruptModel(f"--quantized-weights: {name}: {error}") from None
        if "minima" in read and int(codes.max()) >= made.levels:
            raise CorruptModel(f"--quantized-weights: {name} has codes above {made.levels - 1}")
        return made

    def tokenizer_source(self) -> TokenizerSource:
        return self._base.tokenizer_source()

    def close(self) -> None:
        self._files.close()
        self._base.close()

    def _check(self, facts: Mapping[str, str], found: frozenset[str], base: Checkpoint) -> None:
        lacking = sorted(
            name for name, form in self._held.items() if not {f"{name}.{part}" for part in _parts(form)} <= found
        )
        if lacking:
            raise CorruptModel(f"lacks {len(lacking)} linears of {base.name}; the first is {lacking[0]}")
        shapes = tensor_shapes(base.spec)
        for name in sorted(self._held):
            self._check_shapes(name, shapes[name], self._held[name])
        if facts.get("base") != _sample(base):
            raise CorruptModel(
                f"was made from other weights than those of {base.name}; run lorasrv quantize on this model"
            )

    def _check_shapes(self, name: str, shape: tuple[int, ...], form: CodeFormat) -> None:
        outputs, inputs = shape
        if inputs % form.group:
            raise CorruptModel(f"has groups of {form.group}, which do not divide the inputs of {name}")
        widths = dict.fromkeys(_parts(form), inputs // form.group)
        widths["codes"] = inputs // 2 if "minima" in widths else inputs
        for part, columns in widths.items():
            found = self._reader.get_slice(f"{name}.{part}").get_shape()
            if found != [outputs, columns]:
                raise CorruptModel(f"has {name}.{part} as {found}, not {[outputs, columns]}")


def _with_path(error: BaseException, file: Path) -> BaseException:
    """Return the error with the flag and the path, as it was given, in its message."""
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
    return [
        f"model.layers.{layer}.{module}.weight"
        for layer in range(spec.num_layers)
        for site in spec.sites_of(layer)
        for module in site.modules
    ]


def _by_weight(formats: SiteFormats, spec: ModelSpec) -> dict[str, CodeFormat]:
    """Return the formats by the names of weights."""
    return {
        f"model.layers.{layer}.{module}.weight": formats[site.name][layer]
        for layer in range(spec.num_layers)
        for site in spec.sites_of(layer)
        for module in site.modules
    }


def _parts(form: CodeFormat) -> tuple[str, ...]:
    """Return the kinds of tensors that a linear has."""
    return ("codes", "scales", "minima") if form.name in FEW_BITS else ("codes", "scales")


def _packing(formats: SiteFormats, spec: ModelSpec) -> StoredPacking | None:
    """Describe codes of several formats; None if all have the same format, which `--quantization` can keep."""
    if len({form for forms in formats.values() for form in forms}) == 1:
        return None
    layers = range(spec.num_layers)
    bits = [(CODE_BITS[formats[s.name][layer].name], s.size) for layer in layers for s in spec.sites_of(layer)]
    mean = sum(each * size for each, size in bits) / sum(size for _, size in bits)
    return StoredPacking("mixed", tuple(sorted({each for each, _ in bits})), mean)


def _sample(checkpoint: Checkpoint) -> str:
    """Return a digest of some numbers of the first and the last linear and of the final norm."""
    names = linear_names(checkpoint.spec)
    digest = hashlib.sha256()
    for name in (names[0], names[-1], "model.norm.weight"):
        flat = checkpoint.tensor(name).flatten()
        digest.update(flat[:: max(1, len(flat) // _SAMPLES)].float().numpy().tobytes())
    return digest.hexdigest()
