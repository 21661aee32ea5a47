"""Parse and name the code formats of linears: a format with its group size, and the formats of a layer's sites.

Options write a format as `int4` or `int4:128`, and formats by part as `attn=int4,mlp=q3h`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from lorasrv.errors import UnsupportedFormat
from sgmv_kernels.formats.weight_codes import INT4_LEVELS, INT8_LEVELS, Q3H_LEVELS

LEVELS = {"int8": INT8_LEVELS, "int4": INT4_LEVELS, "q3h": Q3H_LEVELS}
GROUPS = {"int8": (32, 64, 128), "int4": (32, 64, 128), "q3h": (64, 128)}
CODE_BITS = {"int8": 8.0, "int4": 4.0, "q3h": 3.5}
"""Bits of a code by format, without scales."""
PARTS = {
    "attn": ("qkv", "o"),
    "mlp": ("gate_up", "down"),
    "qkv": ("qkv",),
    "o": ("o",),
    "gate_up": ("gate_up",),
    "down": ("down",),
}
"""Maps the name of a layer's part in options to its sites. Parts with one site take precedence over those with two."""
_FACTOR_BITS = 16


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """Hold a format of codes and the number of inputs that share a scale."""

    name: str
    group: int

    @property
    def levels(self) -> int:
        """Return the number of values of a code."""
        return LEVELS[self.name]

    @property
    def bits(self) -> float:
        """Return the bits per weight, including its share of the scale and the minimum."""
        factors = 1 if self.name == "int8" else 2
        return CODE_BITS[self.name] + factors * _FACTOR_BITS / self.group

    def __str__(self) -> str:
        return f"{self.name}:{self.group}"

    @classmethod
    def parse(cls, text: str, groups: Mapping[str, int]) -> Self:
        """Read `int4` or `int4:128`.

        Args:
            groups: the group of each format, used if the text has none.
        Raises:
            UnsupportedFormat: the format or group is unknown; the message lists the choices.
        """
        name, colon, group = text.partition(":")
        if name not in LEVELS:
            raise UnsupportedFormat(f"{name!r:.60} is no format of a part; choose from {', '.join(LEVELS)}")
        chosen = group if colon else str(groups[name])
        if chosen not in map(str, GROUPS[name]):
            choices = ", ".join(map(str, GROUPS[name]))
            raise UnsupportedFormat(f"{name} has no groups of {chosen!r:.60}; choose from {choices}")
        return cls(name, int(chosen))


def names_parts(text: str) -> bool:
    """Return whether a value of --quantization gives formats by part."""
    return "=" in text


def parse_parts(text: str, groups: Mapping[str, int]) -> dict[str, CodeFormat]:
    """Read `attn=int4,mlp=q3h:128,down=int8` as formats by site; a site's own name takes precedence over `attn` and
    `mlp`.

    Args:
        groups: the group of each format, used if the text has none.
    Raises:
        UnsupportedFormat: a part, format or group is unknown (the message lists the choices), or a part is named twice.
    """
    by_part: dict[str, CodeFormat] = {}
    for entry in text.split(","):
        part, equals, form = (piece.strip() for piece in entry.partition("="))
        said = f"--quantization {text!r:.200}"
        if part not in PARTS:
            raise UnsupportedFormat(f"{said}: {part!r:.60} is no part of a layer; choose from {', '.join(PARTS)}")
        if part in by_part:
            raise UnsupportedFormat(f"{said} names {part} twice")
        if not equals:
            raise UnsupportedFormat(f"{said}: {part} has no format; write {part}=int4")
        try:
            by_part[part] = CodeFormat.parse(form, groups)
        except UnsupportedFormat as error:
            raise UnsupportedFormat(f"{said}: {error}") from None
    wide_first = sorted(by_part, key=lambda part: -len(PARTS[part]))
    return {site: by_part[part] for part in wide_first for site in PARTS[part]}
