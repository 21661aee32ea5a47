"""Store the linears of a layer in different formats: `--quantization attn=int4,mlp=q3h`.

Sites that the option leaves out get 8 bits, like embedding and head.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from lorasrv.models.code_format import LEVELS, CodeFormat, parse_parts
from lorasrv.models.quantization.base import Acceptance, Embedding, Fit, Linear, QuantFormat, StoredWeights
from lorasrv.models.quantization.grouped import (
    INT8_GROUP,
    GroupQuantFormat,
    Int4Format,
    Int8Format,
    Q3hFormat,
)
from lorasrv.models.quantization.rounding import indivisible_reason
from lorasrv.models.spec import ModelSpec
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight
from sgmv_kernels.ops import Ops

_REST = CodeFormat(Int8Format.name, INT8_GROUP)
_FORMATS: dict[str, type[GroupQuantFormat]] = {fmt.name: fmt for fmt in (Int8Format, Int4Format, Q3hFormat)}


class PartsFormat(QuantFormat):
    """Pack each site in its own format; `parts_format` creates a subclass for a value of the option."""

    is_batch_invariant = True
    table_bits = 8.5
    # By site; sites that are left out are `_REST`.
    formats: ClassVar[Mapping[str, CodeFormat]]

    def __init__(self, ops: Ops) -> None:
        def made(form: CodeFormat) -> GroupQuantFormat:
            return _FORMATS[form.name](ops, form.group, keep_int8_codes=False)

        self._rest = made(_REST)
        self._sites = {site: made(form) for site, form in self.formats.items()}

    @classmethod
    def accepts(cls, stored: StoredWeights, group: int | None = None) -> Acceptance:
        for site in stored.spec.sites():
            wanted = cls.formats.get(site.name, _REST).group
            if site.in_features % wanted:
                return Acceptance(Fit.REFUSED, indivisible_reason(site.in_features, wanted), group)
        return Acceptance(Fit.ON_REQUEST, "weights are rounded by part", group)

    @classmethod
    def make(cls, ops: Ops, group: int | None, *, keep_int8_codes: bool) -> Self:
        del group, keep_int8_codes
        return cls(ops)

    @classmethod
    def bits_of_linears(cls, spec: ModelSpec) -> float | None:
        sites = [site for layer in range(spec.num_layers) for site in spec.sites_of(layer)]
        return sum(cls.formats.get(site.name, _REST).bits * site.size for site in sites) / spec.linear_weights

    def of_site(self, site: str) -> QuantFormat:
        return self._sites.get(site, self._rest)

    def linear(self, weight: Tensor | GroupQuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        return self._rest.linear(weight, bias, dtype)

    def linear_of_parts(
        self, parts: Sequence[Tensor | GroupQuantizedWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> Linear:
        return self._rest.linear_of_parts(parts, bias, dtype)

    def embedding(self, weight: Tensor | GroupQuantizedWeight, dtype: torch.dtype) -> Embedding:
        return self._rest.embedding(weight, dtype)

    def head(self, weight: Tensor | GroupQuantizedWeight, dtype: torch.dtype) -> Linear:
        return self._rest.head(weight, dtype)

    def tied_head(self, embedding: Embedding, dtype: torch.dtype) -> Linear:
        return self._rest.tied_head(embedding, dtype)


def parts_format(text: str, group: int | None) -> type[PartsFormat]:
    """Return the format that a value such as `attn=int4,mlp=q3h` describes.

    Args:
        group: --quantization-group, for formats without a group of their own; None takes each format's default.
    Raises:
        UnsupportedFormat: an unknown part, format or group, with the choices.
    """
    groups = {name: group or fmt.default_group for name, fmt in _FORMATS.items()}
    assert groups.keys() == LEVELS.keys()
    return type("PartsOption", (PartsFormat,), {"name": text, "formats": parse_parts(text, groups)})
