"""A checkpoint as one rank reads it: its layers, and its part of the outputs or inputs of every linear."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lorasrv.distributed.rank_spec import RankSpec
from lorasrv.errors import ConfigError
from lorasrv.models.families import split_layer
from lorasrv.models.loader import Checkpoint, StoredPacking
from lorasrv.models.spec import LLAMA_LAYERS
from lorasrv.text.tokenizer import TokenizerSource
from sgmv_kernels.errors import KernelArgumentError
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class _Cut(NamedTuple):
    """Select outputs of a tensor and, for a weight, inputs."""

    outputs: Tensor | slice
    inputs: slice = slice(None)

    def of(self, tensor: Tensor) -> Tensor:
        rows = tensor[self.outputs]
        return (rows if rows.dim() == 1 else rows[:, self.inputs]).clone(memory_format=torch.contiguous_format)


class PartCheckpoint:
    """Read a rank's part of an open checkpoint; see `Checkpoint`. `close` leaves the checkpoint open.

    Codes of quantized weights are taken without rounding again: each output has its own row of codes and factors, and
    inputs are split only between groups.
    """

    def __init__(self, whole: Checkpoint, spec: RankSpec) -> None:
        self._whole, self.spec = whole, spec
        self.name = whole.name

    @property
    def packing(self) -> StoredPacking | None:
        return self._whole.packing

    def names(self) -> Iterable[str]:
        return list(self._cuts)

    def tensor(self, name: str) -> Tensor:
        cut = self._cuts[name]
        tensor = self._whole.tensor(self._name_in_whole(name))
        return tensor if cut is None else cut.of(tensor)

    def codes(self, name: str) -> GroupQuantizedWeight | None:
        cut = self._cuts[name]
        codes = self._whole.codes(self._name_in_whole(name))
        if codes is None or cut is None:
            return codes
        try:
            return codes[cut.outputs].of_inputs(cut.inputs)
        except KernelArgumentError as error:
            raise ConfigError(f"--tp-exchange sums: {name}: {error}; use --tp-exchange columns") from error

    def tokenizer_source(self) -> TokenizerSource:
        return self._whole.tokenizer_source()

    def close(self) -> None:
        """Do nothing: the whole checkpoint has its own owner."""

    @cached_property
    def _cuts(self) -> dict[str, _Cut | None]:
        """Return the part of each tensor that the rank reads; None: the whole tensor."""
        spec, part = self.spec, self.spec.part
        found: dict[str, _Cut | None] = {NORM: None}
        if part.is_first:
            found[EMBEDDING] = None
        if part.is_last and not spec.tied_head:
            found[HEAD] = _Cut(slice(*part.vocab))
        for layer in range(spec.num_layers):
            found |= {f"{LLAMA_LAYERS}{layer}.{name}": cut for name, cut in self._of_layer(layer)}
        return {name: cut for name, cut in found.items() if self._name_in_whole(name) in self._all}

    def _of_layer(self, layer: int) -> Iterator[tuple[str, _Cut | None]]:
        spec = self.spec
        for path, _ in spec.norms(layer).values():
            yield f"{path}.weight", None
        for index, site in zip(spec.site_indices(layer), spec.sites_of(layer), strict=True):
            for i, module in enumerate(site.modules):
                rows = torch.from_numpy(spec.own_outputs(index, i))
                yield f"{module}.weight", _Cut(rows, spec.own_inputs(index))
                if spec.adds_biases(index):
                    yield f"{module}.bias", _Cut(rows)

    @cached_property
    def _all(self) -> frozenset[str]:
        return frozenset(self._whole.names())

    def _name_in_whole(self, name: str) -> str:
        if name == HEAD and self.spec.whole.tied_head:
            return EMBEDDING
        layer, inner = split_layer(name)
        return name if layer is None else f"{LLAMA_LAYERS}{layer + self.spec.part.layers[0]}.{inner}"
