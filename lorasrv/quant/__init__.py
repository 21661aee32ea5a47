"""Formats in which the base's weights are kept: one module a format, one registry. Packing and description are here,
the arithmetic is in `sgmv_kernels`.
"""

from collections.abc import Mapping

from lorasrv.errors import ConfigError
from lorasrv.quant.format import Embedding, Linear, QuantFormat
from lorasrv.quant.int8 import Int8Format
from lorasrv.quant.none import NoneFormat

__all__ = ["FORMATS", "Embedding", "Linear", "QuantFormat", "get_format"]

FORMATS: Mapping[str, QuantFormat] = {fmt.name: fmt for fmt in (NoneFormat(), Int8Format())}


def get_format(name: str) -> QuantFormat:
    """Raises ConfigError, listing the choices."""
    if name not in FORMATS:
        raise ConfigError(f"--quantization {name!r:.60} is unknown; choose from {', '.join(FORMATS)}")
    return FORMATS[name]
