"""A checkpoint as one rank reads it: its layers, and its part of the outputs of every linear."""

from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from lorasrv.distributed.rank_spec import RankSpec
from lorasrv.models.families import split_layer
from lorasrv.models.loader import Checkpoint, StoredPacking
from lorasrv.models.spec import LLAMA_LAYERS
from lorasrv.text.tokenizer import TokenizerSource
from sgmv_kernels.ops import GroupQuantizedWeight

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class PartCheckpoint:
    """Read a rank's part of an open checkpoint; see `Checkpoint`. `close` leaves that open.

    Weights are cut along their outputs, where quantized ones have a row of codes and factors each: codes are taken, not
    rounded again.
    """

    def __init__(self, whole: Checkpoint, spec: RankSpec) -> None:
        self._whole, self.spec = whole, spec
        self.name = whole.name

    @property
    def packing(self) -> StoredPacking | None:
        return self._whole.packing

    def names(self) -> Iterable[str]:
        return list(self._rows)

    def tensor(self, name: str) -> Tensor:
        rows = self._rows[name]
        tensor = self._whole.tensor(self._name_in_whole(name))
        return tensor if rows is None else tensor[rows].clone()

    def codes(self, name: str) -> GroupQuantizedWeight | None:
        rows = self._rows[name]
        codes = self._whole.codes(self._name_in_whole(name))
        return codes if codes is None or rows is None else codes[rows]

    def tokenizer_source(self) -> TokenizerSource:
        return self._whole.tokenizer_source()

    def close(self) -> None:
        """Do nothing: the whole checkpoint has its own owner."""

    @cached_property
    def _rows(self) -> dict[str, Tensor | slice | None]:
        """Return the outputs that the rank takes of each tensor that it reads; None for all."""
        spec, share = self.spec, self.spec.share
        vocab = slice(*share.vocab)
        found: dict[str, Tensor | slice | None] = {NORM: None}
        if share.is_first:
            found[EMBEDDING] = None
        if share.is_last and not spec.tied_head:
            found[HEAD] = vocab
        for layer in range(spec.num_layers):
            found |= {f"{LLAMA_LAYERS}{layer}.{name}": rows for name, rows in self._of_layer(layer)}
        return {name: rows for name, rows in found.items() if self._name_in_whole(name) in self._all}

    def _of_layer(self, layer: int) -> Iterator[tuple[str, Tensor | None]]:
        spec = self.spec
        for path, _ in spec.norms(layer).values():
            yield f"{path}.weight", None
        for index, site in zip(spec.site_indices(layer), spec.sites_of(layer), strict=True):
            for i, module in enumerate(site.modules):
                rows = torch.from_numpy(spec.own_outputs(index, i))
                yield f"{module}.weight", rows
                yield f"{module}.bias", rows

    @cached_property
    def _all(self) -> frozenset[str]:
        return frozenset(self._whole.names())

    def _name_in_whole(self, name: str) -> str:
        if name == HEAD and self.spec.whole.tied_head:
            return EMBEDDING
        layer, inner = split_layer(name)
        return name if layer is None else f"{LLAMA_LAYERS}{layer + self.spec.share.layers[0]}.{inner}"
