"""Read a GGUF file as a checkpoint: canonical names, Hugging Face's row order, one tensor at a time in fp32."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lorasrv.errors import CorruptModel, UnsupportedModel, naming_file
from lorasrv.models.families import tensor_shapes
from lorasrv.models.loader.checkpoint import check_none_left, check_shapes
from lorasrv.models.loader.ggml_codes import decode_codes, packing_of
from lorasrv.models.loader.ggml_dequant import decode
from lorasrv.models.loader.gguf_file import GgufFile, gguf_tokenizer_source
from lorasrv.models.loader.locate import gguf_family
from lorasrv.models.rope_config import SHORT_FACTORS, longrope_from_gguf
from lorasrv.models.spec import ModelSpec
from lorasrv.text.tokenizer import TokenizerSource
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight

_LAYERS = "model.layers."
_ROPE_FACTORS = "rope_freqs.weight"
_LONG_FACTORS = "rope_factors_long.weight"
"""Factors for texts beyond the original context, which are not served."""


class GgufCheckpoint:
    """Read a GGUF file; see `Checkpoint`.

    Raises:
        CorruptModel, UnsupportedModel: as for `GgufFile` and `Family`; also if tensors do not fit the metadata.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.name = name or path.stem
        self._path, self._file = path, GgufFile(path)
        self._family, spec = gguf_family(self._file)
        self._prefix = f"{self._file.metadata.get('general.architecture')}."
        self.spec = self._with_rope_factors(spec)
        self._stored = {name: self._family.gguf_name(name) for name in tensor_shapes(self.spec)}
        found = {n: self._file.tensors[s].shape for n, s in self._stored.items() if s in self._file.tensors}
        check_shapes(self.spec, found)
        factors = {SHORT_FACTORS, _LONG_FACTORS} if SHORT_FACTORS in self._file.tensors else {_ROPE_FACTORS}
        check_none_left(self.spec, self._file.tensors.keys() - self._stored.values() - factors)
        self.packing = packing_of(
            {
                name: self._file.tensors[self._stored[name]]
                for name, shape in tensor_shapes(self.spec).items()
                if name.startswith(_LAYERS) and len(shape) == 2
            }
        )

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def tensor(self, name: str) -> Tensor:
        stored = self._stored[name]
        info = self._file.tensors[stored]
        weight = decode(self._file.raw(stored), info.type, info.shape)
        heads = self._family.permuted_heads(name, self.spec)
        return weight if heads is None else _split_halves(weight, heads)

    def codes(self, name: str) -> GroupQuantizedWeight | None:
        stored = self._stored[name]
        info = self._file.tensors[stored]
        codes = decode_codes(stored, self._file.raw(stored), info.type, info.shape)
        heads = self._family.permuted_heads(name, self.spec)
        if codes is None or heads is None:
            return codes
        return codes[_split_halves(torch.arange(info.shape[0]), heads)]

    def tokenizer_source(self) -> TokenizerSource:
        with naming_file(self._path.name):
            return gguf_tokenizer_source(self._file.metadata, self.spec, self._path.name)

    def close(self) -> None:
        self._file.close()

    def _with_rope_factors(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec with the RoPE factors that a file keeps in tensors.

        These are those of llama3's scaling, or LongRoPE's for the original context.
        """
        if SHORT_FACTORS in self._file.tensors:
            short = self._factors(SHORT_FACTORS, spec)
            rope = longrope_from_gguf(spec.rope, self._file.metadata, self._prefix, short)
            return replace(spec, rope=rope, max_position=min(spec.max_position, rope.max_position or spec.max_position))
        if _ROPE_FACTORS in self._file.tensors:
            if spec.rope.kind != "default":
                raise UnsupportedModel(
                    f"tensor {_ROPE_FACTORS} beside RoPE scaling {spec.rope.kind!r} is not supported"
                )
            return replace(spec, rope=replace(spec.rope, kind="factors", factors=self._factors(_ROPE_FACTORS, spec)))
        if spec.rope.kind == "factors":
            raise CorruptModel(f"the GGUF file lacks the tensor {SHORT_FACTORS} that its RoPE scaling needs")
        return spec

    def _factors(self, name: str, spec: ModelSpec) -> tuple[float, ...]:
        info, count = self._file.tensors[name], (spec.rope.dims or spec.head_dim) // 2
        if info.shape != (count,):
            raise CorruptModel(f"tensor {name} is {list(info.shape)}, not [{count}]")
        factors = decode(self._file.raw(name), info.type, info.shape).float().tolist()
        if not all(0 < factor < math.inf for factor in factors):
            raise CorruptModel(f"tensor {name} holds what is no positive number")
        return tuple(factors)


def _split_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows of each head from rotated pairs (x0 y0 x1 y1 ...) to halves (x0 x1 ... y0 y1 ...), Hugging Face's
    order.
    """
    pairs = weight.view(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
