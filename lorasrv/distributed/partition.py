"""Partition: which process computes which layers, heads and outputs of a model. Imports no torch.

`0&1;2` reads: ranks 0 and 1 compute the first layers together, each a part of the outputs of every linear (*columns*);
rank 2 computes the layers behind them (*stages*). `0&1@0-9;2@10-11` says which layers. `--tp`, `--pp` are short for the
same; `--cp` divides the rows of a step instead, and every rank has the whole model (*rows*).

Source of the notation: Inferflow (Shi et al. 2024).
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lorasrv.config import PartitionOptions
from lorasrv.errors import ConfigError
from lorasrv.models.spec import ModelSpec

SUM_BLOCK = 128
"""Inputs of `down` are cut at multiples of this where only sums over them are exchanged: the largest common groups of
quantized files. Of small models at multiples of `BLOCK`.
"""
TILE = 16
"""Outputs are cut at multiples of this, the tiles that kernels pack weights in."""
BLOCK = 32
"""Outputs of gate and up are cut at multiples of this: blocks in which the inputs of `down` are rounded."""
MAX_RANKS = 64
_STAGE = re.compile(r"(\d{1,3}(?:&\d{1,3})*)(?:@(\d{1,4})-(\d{1,4}))?", re.ASCII)
Span = tuple[int, int]
"""First index, and the one behind the last."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Name the ranks that compute the same layers, each its columns."""

    ranks: tuple[int, ...]
    # None: chosen by bytes.
    layers: Span | None = None


@dataclass(frozen=True, slots=True)
class RankPart:
    """Hold what one rank computes of a model."""

    rank: int
    # Its stage, and its place among the ranks of the stage.
    stage: int
    column: int
    # Ranks of the stage, in order.
    stage_ranks: tuple[int, ...]
    num_stages: int
    layers: Span
    # Key heads, with their query heads.
    kv_heads: Span
    # Outputs of o and down; of gate and up; of the head.
    hidden: Span
    inner: Span
    vocab: Span
    # Ranks that divide the rows of a step, in order; nothing where each computes all rows.
    row_ranks: tuple[int, ...] = ()
    # Whether o and down have a part of the inputs and all outputs, whose sums the ranks of the stage exchange.
    has_sums: bool = False

    @property
    def is_further(self) -> bool:
        """Return whether a rank of a lower number has the same linears, or other parts of them."""
        return self.column > 0 or self.rank > min(self.row_ranks, default=self.rank)

    @property
    def is_first(self) -> bool:
        """Return whether the rank embeds tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Return whether the rank computes logits."""
        return self.stage == self.num_stages - 1


@dataclass(frozen=True, slots=True)
class Partition:
    """Divide a model among ranks. Rank 0 runs the engine and is the first of the first stage.

    Args:
        stages: in the order of their layers.
        rows: ranks that divide the rows of a step among them; then there is one stage of one column.
        text: as it was given, for messages.
        has_sums: whether columns exchange sums.
    """

    stages: tuple[Stage, ...]
    rows: int = 1
    text: str = "0"
    has_sums: bool = False

    @classmethod
    def of(cls, options: PartitionOptions) -> "Partition":
        """Return the partition that the options describe.

        Raises:
            ConfigError: they describe none; the message names the option and the numbers.
        """
        divided = cls._divided(options)
        if options.tp_exchange != "sums":
            return divided
        if not divided.has_columns:
            raise ConfigError(f"--tp-exchange sums needs ranks side by side: --tp, or & in --partition; {divided.text}")
        return replace(divided, has_sums=True, text=f"{divided.text} --tp-exchange sums")

    @classmethod
    def _divided(cls, options: PartitionOptions) -> "Partition":
        if options.partition is not None:
            if other := next((name for name in ("tp", "pp", "cp") if getattr(options, name) != 1), None):
                raise ConfigError(f"--partition and --{other} exclude each other: give one of them")
            return cls(_parse(options.partition), 1, f"--partition {options.partition}")
        counts = {name: getattr(options, name) for name in ("tp", "pp", "cp")}
        given = " ".join(f"--{name} {count}" for name, count in counts.items() if count > 1) or "--tp 1"
        if options.cp > 1 and options.tp * options.pp > 1:
            raise ConfigError(
                f"{given}: --cp divides the rows of a step among ranks that have the whole model, so it goes with "
                "neither --tp nor --pp; leave them out"
            )
        _check_count(options.tp * options.pp * options.cp, given)
        ranks = iter(range(options.tp * options.pp))
        stages = tuple(Stage(tuple(itertools.islice(ranks, options.tp))) for _ in range(options.pp))
        return cls(stages, options.cp, given)

    @property
    def num_ranks(self) -> int:
        """Return the number of processes."""
        return self.rows * sum(len(stage.ranks) for stage in self.stages)

    @property
    def has_columns(self) -> bool:
        """Return whether ranks have parts of linears."""
        return any(len(stage.ranks) > 1 for stage in self.stages)

    @property
    def kind(self) -> str:
        """Return what the ranks divide, in a word or two."""
        kinds = {"stages": len(self.stages) > 1, "columns": self.has_columns, "rows": self.rows > 1}
        return " and ".join(name for name, is_there in kinds.items() if is_there) or "nothing"

    def parts(self, spec: ModelSpec) -> tuple[RankPart, ...]:
        """Return what each rank computes of a model, by rank.

        Raises:
            ConfigError: the model cannot be divided so; the message has the numbers.
        """
        if self.rows > 1:
            whole = self._parts_of(spec, Stage((0,)), 0, (0, spec.num_layers))[0]
            ranks = tuple(range(self.rows))
            return tuple(replace(whole, rank=rank, stage_ranks=(rank,), row_ranks=ranks) for rank in ranks)
        spans = self._layers(spec)
        found = [
            part
            for i, (stage, span) in enumerate(zip(self.stages, spans, strict=True))
            for part in self._parts_of(spec, stage, i, span)
        ]
        return tuple(sorted(found, key=lambda part: part.rank))

    def _parts_of(self, spec: ModelSpec, stage: Stage, index: int, layers: Span) -> list[RankPart]:
        count, where = len(stage.ranks), f"{self.text}: {len(stage.ranks)} ranks side by side"
        if count > spec.num_kv_heads:
            raise ConfigError(
                f"{where}, but the model has {spec.num_kv_heads} key head{'s' * (spec.num_kv_heads > 1)}, and a rank "
                "needs one of its own; use fewer columns, or stages (--pp) or rows (--cp)"
            )
        if count > 1 and spec.wide_qk_norm:
            raise ConfigError(
                f"{where}, but {spec.family} models norm queries and keys over all heads together, which no rank would "
                "have; use stages (--pp) or rows (--cp)"
            )
        heads, hidden, inner, vocab = (
            _cut(spec.num_kv_heads, count, 1, f"{where}: key heads"),
            _cut(spec.hidden_size, count, TILE, f"{where}: hidden size"),
            _cut(spec.intermediate_size, count, self._inner_step(spec, count), f"{where}: intermediate size"),
            _cut(spec.vocab_size, count, TILE, f"{where}: vocabulary"),
        )
        return [
            RankPart(
                *(rank, index, column, stage.ranks, len(self.stages), layers),
                *(heads[column], hidden[column], inner[column], vocab[column]),
                has_sums=self.has_sums and count > 1,
            )
            for column, rank in enumerate(stage.ranks)
        ]

    def _inner_step(self, spec: ModelSpec, count: int) -> int:
        return SUM_BLOCK if self.has_sums and spec.intermediate_size >= count * SUM_BLOCK else BLOCK

    def _layers(self, spec: ModelSpec) -> list[Span]:
        """Return the layers of each stage."""
        if len(self.stages) > spec.num_layers:
            raise ConfigError(f"{self.text}: {len(self.stages)} stages, but the model has {spec.num_layers} layers")
        given = [stage.layers for stage in self.stages]
        if all(span is None for span in given):
            return _layers_by_bytes(spec, [len(stage.ranks) for stage in self.stages], self.text)
        spans = [span for span in given if span is not None]
        if len(spans) < len(given):
            raise ConfigError(f"{self.text}: give the layers of every stage, or of none")
        follows = [first == before for (first, _), before in zip(spans, [0, *(end for _, end in spans)], strict=False)]
        if not all(follows) or spans[-1][1] != spec.num_layers:
            raise ConfigError(
                f"{self.text}: stages must have layers 0 to {spec.num_layers - 1} in order, each once, as in "
                f"0@0-{max(0, spec.num_layers // 2 - 1)};1@{spec.num_layers // 2}-{spec.num_layers - 1}"
            )
        for first, _ in spans[1:]:
            if first not in _boundaries(spec):
                raise ConfigError(
                    f"{self.text}: layer {first} or one behind it reads the keys and values of a layer before it, so "
                    "no stage can begin there"
                )
        return spans


def _parse(text: str) -> tuple[Stage, ...]:
    """Return the stages of a text such as `0&1@0-9;2@10-11`."""
    found = [_STAGE.fullmatch(part.strip()) for part in text.split(";")]
    stages = []
    for match in found:
        if match is None:
            raise ConfigError(
                f"--partition {text!r:.80} must be ranks, joined by & for columns and ; for stages, as in 0&1;2 or "
                "0@0-9;1@10-11"
            )
        first, last = match[2], match[3]
        layers = None if first is None else (int(first), int(last) + 1)
        if layers is not None and layers[0] >= layers[1]:
            raise ConfigError(f"--partition {text}: layers {first}-{last} of a stage are none")
        stages.append(Stage(tuple(map(int, match[1].split("&"))), layers))
    ranks = [rank for stage in stages for rank in stage.ranks]
    _check_count(len(ranks), f"--partition {text}")
    if sorted(ranks) != list(range(len(ranks))) or ranks[0] != 0:
        raise ConfigError(
            f"--partition {text}: {len(ranks)} ranks must be numbered 0 to {len(ranks) - 1}, each once, and 0, which "
            "runs the engine, comes first"
        )
    return tuple(stages)


def _check_count(count: int, text: str) -> None:
    if count > MAX_RANKS:
        raise ConfigError(f"{text}: {count} ranks are more than the {MAX_RANKS} that one replica may have")


def _cut(total: int, count: int, step: int, what: str) -> list[Span]:
    """Cut `total` outputs into `count` spans that begin at multiples of `step`, the larger ones first."""
    units = -(-total // step)
    if units < count:
        raise ConfigError(f"{what} {total} gives {units} pieces of {step}, fewer than {count}; use fewer columns")
    sizes = [units // count + (i < units % count) for i in range(count)]
    ends = [min(total, step * end) for end in itertools.accumulate(sizes)]
    return list(itertools.pairwise([0, *ends]))


def _boundaries(spec: ModelSpec) -> set[int]:
    """Return the layers at which a stage may begin: none behind them reads keys and values of one before."""
    sources = spec.kv_source_layers or tuple(range(spec.num_layers))
    return {first for first in range(spec.num_layers) if min(sources[first:]) >= first}


def _layers_by_bytes(spec: ModelSpec, columns: Sequence[int], text: str) -> list[Span]:
    """Return the layers of each stage, so that the most weights of a rank are as few as can be.

    A stage of more columns gets more layers; embedding and head count where they are.
    """
    layer = [sum(site.size for site in spec.sites_of(i)) for i in range(spec.num_layers)]
    sums, table = [0, *itertools.accumulate(layer)], spec.vocab_size * spec.hidden_size
    allowed, last = _boundaries(spec), len(columns) - 1

    def most(stage: int, first: int, end: int) -> float:
        held = (sums[end] - sums[first] + (table if stage == last else 0)) / columns[stage]
        return held + (table if stage == 0 else 0)

    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for stage in range(len(columns)):
        ends = [spec.num_layers] if stage == last else sorted(allowed - {0})
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in ends:
            tried = [(max(cost, most(stage, at, end)), (*cut, end)) for at, (cost, cut) in best.items() if at < end]
            if tried:
                following[end] = min(tried)
        best = following
    if spec.num_layers not in best:
        raise ConfigError(
            f"{text}: {len(columns)} stages, but layers that read the keys and values of others leave only "
            f"{len(allowed)} places where a stage can begin"
        )
    return list(itertools.pairwise(best[spec.num_layers][1]))
