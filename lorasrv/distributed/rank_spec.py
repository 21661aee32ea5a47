"""The model of one rank: the spec that its decoder, pool and adapters are built from. Imports no torch.

A rank's layers count from 0. Linears have all inputs and a part of the outputs; if ranks exchange sums, o and down have
a part of the inputs and all outputs. Norms and everything sized by the hidden size are whole.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

from lorasrv.distributed.partition import Partition, RankPart, Span
from lorasrv.models.spec import ModelSpec, SiteShape

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RankSpec(ModelSpec):
    """Describe the part of a model that a rank computes."""

    whole: ModelSpec = field(kw_only=True)
    part: RankPart = field(kw_only=True)

    @classmethod
    def of(cls, whole: ModelSpec, part: RankPart) -> "RankSpec":
        """Return the spec of a rank."""
        first, end = part.layers
        heads = part.kv_heads[1] - part.kv_heads[0]
        own = {
            "num_layers": end - first,
            "num_kv_heads": heads,
            "num_heads": heads * (whole.num_heads // whole.num_kv_heads),
            "intermediate_size": part.inner[1] - part.inner[0],
            "windowed_layers": whole.windowed_layers[first:end],
            "unrotated_layers": whole.unrotated_layers[first:end],
            "kv_source_layers": tuple(source - first for source in whole.kv_source_layers[first:end]),
            "tied_head": whole.tied_head and part.is_first and part.is_last and len(part.stage_ranks) == 1,
        }
        known = {each.name: getattr(whole, each.name) for each in fields(ModelSpec)}
        return cls(**(known | own), whole=whole, part=part)

    @classmethod
    def all_of(cls, whole: ModelSpec, partition: Partition) -> "tuple[RankSpec, ...]":
        """Return the specs of all ranks.

        Raises:
            ConfigError: the model cannot be divided this way.
        """
        return tuple(cls.of(whole, part) for part in partition.parts(whole))

    @property
    def table_weights(self) -> int:
        part, row = self.part, self.hidden_size
        head = part.is_last and not self.tied_head
        return (self.vocab_size * row if part.is_first else 0) + (width(part.vocab) * row if head else 0)

    @property
    def query_heads(self) -> Span:
        """Return the rank's query heads among those of the model."""
        return _scaled(self.part.kv_heads, self.whole.num_heads // self.whole.num_kv_heads)

    @property
    def adapts_ends(self) -> bool:
        return bool(self.part.row_ranks)

    @property
    def has_table_head(self) -> bool:
        return self.whole.tied_head

    @property
    def first_layer(self) -> int:
        return self.part.layers[0]

    def alibi_slopes(self) -> tuple[float, ...]:
        first, end = self.query_heads
        return self.whole.alibi_slopes()[first:end]

    def sites(self) -> tuple[SiteShape, ...]:
        found = []
        for index, site in enumerate(self.whole.sites()):
            widths = tuple(len(self.own_outputs(index, i)) for i in range(len(site.modules)))
            inputs = range(site.in_features)[self.own_inputs(index)]
            found.append(replace(site, in_features=len(inputs), out_features=widths))
        return tuple(found)

    def own_inputs(self, site: int) -> slice:
        if not self._is_summed(site):
            return slice(None)
        is_out = self.whole.sites()[site].name == "o"
        return slice(*(_scaled(self.query_heads, self.head_dim) if is_out else self.part.inner))

    def adds_biases(self, site: int) -> bool:
        return self.part.column == 0 or not self._is_summed(site)

    def _is_summed(self, site: int) -> bool:
        """Return whether the rank has a part of a site's inputs, and so of its sums, instead of a part of its
        outputs."""
        return self.part.has_sums and self.whole.sites()[site].name in ("o", "down")

    def own_outputs(self, site: int, module: int) -> Rows:
        inner, kv = self.part.inner, _scaled(self.part.kv_heads, self.head_dim)
        q = _scaled(self.query_heads, self.head_dim)
        shape = self.whole.sites()[site]
        if shape.name in ("o", "down"):
            return _rows([(0, (0, self.hidden_size) if self.part.has_sums else self.part.hidden)])
        if shape.name == "qkv":
            spans = [(0, q), (self.whole.q_width, kv), (self.whole.q_width + self.whole.kv_width, kv)]
        else:
            spans = [(0, inner), (self.whole.intermediate_size, inner)][: 1 + self.gated]
        if len(shape.modules) == 1 < len(spans) and shape.out_features[0] > spans[1][0]:
            # A fused module has all these outputs.
            return _rows(spans)
        return _rows([(0, spans[module][1])])


def width(span: Span) -> int:
    """Return the number of outputs of a span."""
    return span[1] - span[0]


def pool_widths(specs: Sequence[RankSpec]) -> ModelSpec:
    """Return the spec by which pages are planned: all layers, with the widest outputs of any rank.

    Every rank's panels of an adapter then fit, in the same order, into the pages planned for it.
    """
    first = specs[0].part
    widest = RankPart(
        first.rank,
        stage=0,
        column=0,
        stage_ranks=(0,),
        num_stages=1,
        layers=(0, specs[0].whole.num_layers),
        kv_heads=_widest(spec.part.kv_heads for spec in specs),
        hidden=_widest(spec.part.hidden for spec in specs),
        inner=_widest(spec.part.inner for spec in specs),
        vocab=(0, specs[0].whole.vocab_size),
        has_sums=any(spec.part.has_sums for spec in specs),
    )
    return RankSpec.of(specs[0].whole, widest)


def _widest(spans: Iterator[Span]) -> Span:
    return 0, max(map(width, spans))


def _scaled(span: Span, times: int) -> Span:
    return span[0] * times, span[1] * times


def _rows(spans: list[tuple[int, Span]]) -> Rows:
    """Return the indices in spans, each shifted by its offset."""
    return np.array(list(itertools.chain(*(range(at + first, at + end) for at, (first, end) in spans))), dtype=np.int64)
