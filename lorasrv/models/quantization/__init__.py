"""Formats in which the base's weights are kept: one module a format, one registry. Packing and description are here,
the arithmetic is in `sgmv_kernels`.
"""

from collections.abc import Mapping

from lorasrv.errors import UnsupportedFormat
from lorasrv.models.quantization.base import Embedding, Linear, QuantFormat
from lorasrv.models.quantization.fp8 import Fp8Format
from lorasrv.models.quantization.grouped import INT8_GROUP, GroupQuantFormat, Int4Format, Int8Format, Q3hFormat
from lorasrv.models.quantization.unquantized import NoneFormat
from sgmv_kernels.ops import Ops

__all__ = ["FORMATS", "INT8_GROUP", "LEVELS", "Embedding", "Linear", "QuantFormat", "get_format"]
_CODED: Mapping[str, type[GroupQuantFormat]] = {fmt.name: fmt for fmt in (Int8Format, Int4Format, Q3hFormat)}
LEVELS: Mapping[str, int] = {name: fmt.levels for name, fmt in _CODED.items()}
"""How many codes a weight may have, of the formats of codes."""
_FLOATS: Mapping[str, type[NoneFormat] | type[Fp8Format]] = {fmt.name: fmt for fmt in (NoneFormat, Fp8Format)}
FORMATS = (NoneFormat.name, *_CODED, Fp8Format.name)


def get_format(name: str, ops: Ops, group: int | None = None, *, keeps_finer: bool = True) -> QuantFormat:
    """A format, with the kernels that will compute with it; `group` None takes the format's own.

    `keeps_finer`: whether 8-bit codes of a file stay as they are in a format of fewer bits.

    Raises:
        UnsupportedFormat: an unknown format or group, with the choices.
    """
    if name not in FORMATS:
        raise UnsupportedFormat(f"--quantization {name!r:.60} is unknown; choose from auto, {', '.join(FORMATS)}")
    coded = _CODED.get(name)
    if coded is None:
        if group is not None:
            raise UnsupportedFormat(f"--quantization-group {group}: --quantization {name} has no groups; leave it out")
        return _FLOATS[name]()
    if group is not None and group not in coded.groups:
        choices = ", ".join(map(str, coded.groups))
        raise UnsupportedFormat(f"--quantization-group {group} does not go with {name}; choose from {choices}")
    return coded(ops, group or coded.default_group, keeps_finer=keeps_finer)
