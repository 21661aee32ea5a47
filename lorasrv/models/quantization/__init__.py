"""Register the formats of the base's weights, one class each.

This room packs and describes weights; the arithmetic is in `sgmv_kernels`.
"""

from lorasrv.errors import UnsupportedFormat
from lorasrv.models.code_format import names_parts
from lorasrv.models.quantization.base import Acceptance, Embedding, Fit, Linear, QuantFormat, StoredWeights
from lorasrv.models.quantization.fp8 import Fp8Format
from lorasrv.models.quantization.grouped import INT8_GROUP, Int4Format, Int8Format, Q3hFormat
from lorasrv.models.quantization.parts import parts_format
from lorasrv.models.quantization.stored import (
    AwqFormat,
    BitsAndBytesFormat,
    CompressedTensorsFormat,
    EetqFormat,
    GgufFormat,
    GptqFormat,
    HqqFormat,
    MixedFormat,
)
from lorasrv.models.quantization.tables import Fp4Format, Nf4Format
from lorasrv.models.quantization.unquantized import NoneFormat
from sgmv_kernels.ops import Ops

__all__ = [
    "FORMATS",
    "INT8_GROUP",
    "Acceptance",
    "Embedding",
    "Fit",
    "Linear",
    "QuantFormat",
    "StoredWeights",
    "find_format",
    "get_format",
    "select_format",
]
_STORED = (
    GptqFormat,
    AwqFormat,
    CompressedTensorsFormat,
    BitsAndBytesFormat,
    HqqFormat,
    EetqFormat,
    GgufFormat,
    MixedFormat,
)
_ROUNDING = (NoneFormat, Int8Format, Int4Format, Q3hFormat, Nf4Format, Fp4Format, Fp8Format)
_ALL: tuple[type[QuantFormat], ...] = (*_ROUNDING, *_STORED)
FORMATS: dict[str, type[QuantFormat]] = {fmt.name: fmt for fmt in _ALL}
"""Every format by its name, which `--quantization` takes."""
_OF_FLOATS = {"bitsandbytes": "int8", "eetq": "int8", "bitsandbytes-nf4": "nf4", "bitsandbytes-fp4": "fp4"}
"""Formats for TGI's names of methods that round floats at the start. int8 has a scale for every 32 inputs, theirs has
one for every output.
"""


def select_format(stored: StoredWeights, name: str = "auto", group: int | None = None) -> tuple[str, Acceptance]:
    """Return the format to serve a checkpoint in, and that format's assessment of the checkpoint.

    Args:
        stored: facts of the checkpoint.
        name: --quantization, which may give formats by part; "auto" takes the best format for the checkpoint.
        group: --quantization-group; None lets the format choose.
    Raises:
        UnsupportedFormat: an unknown format or group, with the choices.
    """
    if name == "auto":
        name = max(FORMATS, key=lambda known: FORMATS[known].accepts(stored).fit)
    name = _meant(name, stored)
    return name, find_format(name, group).accepts(stored, group)


def _meant(name: str, stored: StoredWeights) -> str:
    """Return the format that a name stands for. The names of bitsandbytes and EETQ mean another format for a checkpoint
    of floats than for one of theirs.
    """
    if stored.packing is None:
        return _OF_FLOATS.get(name, name)
    return "bitsandbytes" if name in ("bitsandbytes-nf4", "bitsandbytes-fp4") else name


def get_format(name: str, ops: Ops, group: int | None = None, *, keep_int8_codes: bool = True) -> QuantFormat:
    """Return a format, ready to pack weights.

    Args:
        name: one of `FORMATS`, or formats by part.
        ops: kernels that will compute with the weights.
        group: inputs that share a scale; None takes the format's default.
        keep_int8_codes: whether 8-bit codes of a file stay unchanged in a format of fewer bits.
    Raises:
        UnsupportedFormat: an unknown format or group, with the choices.
    """
    return find_format(name, group).make(ops, group, keep_int8_codes=keep_int8_codes)


def find_format(name: str, group: int | None = None) -> type[QuantFormat]:
    """Return the class of a format: one of `FORMATS`, or of formats by part such as `attn=int4,mlp=q3h`.

    Raises:
        UnsupportedFormat: an unknown format or group, with the choices.
    """
    if names_parts(name):
        return parts_format(name, group)
    if name not in FORMATS:
        # "mixed" cannot be chosen: it only describes checkpoints.
        choices = ", ".join(known for known in FORMATS if known != MixedFormat.name)
        raise UnsupportedFormat(
            f"--quantization {name!r:.60} is unknown; choose from auto, {choices}, "
            "or give formats by part: attn=int4,mlp=q3h"
        )
    found = FORMATS[name]
    if group is None or group in found.groups:
        return found
    if not found.groups:
        raise UnsupportedFormat(f"--quantization-group {group}: --quantization {name} has no groups; leave it out")
    choices = ", ".join(map(str, found.groups))
    raise UnsupportedFormat(f"--quantization-group {group} does not go with {name}; choose from {choices}")
