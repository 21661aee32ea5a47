"""Build a model's weights: read tensors one at a time, pack them into the runtime format, and free them."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorasrv.errors import UnsupportedFormat
from lorasrv.models.families import split_layer
from lorasrv.models.loader.checkpoint import Checkpoint, WeightMeter, check_finite
from lorasrv.models.lora_sites import HEAD
from lorasrv.models.quantization.base import Embedding, Linear, QuantFormat
from lorasrv.models.quantization.unquantized import FloatEmbedding, FloatLinear
from lorasrv.models.spec import ModelSpec, SiteShape
from sgmv_kernels.formats.group_quant import GroupQuantizedWeight, stack_codes

Progress = Callable[[str, float], None]
"""Called with the current activity and the overall progress from 0 to 1."""
ONE_AT_A_TIME = threading.Lock()
"""Held while loading an adapter dequantizes base weights, so that only one load at a time needs memory for them."""
_SAMPLE = 64
_PRINTED_ROWS = 1024
_LOADING = "loading the model"
_SAME = 1e-6
"""Relative difference that a different order of fp32 operations can make."""
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Hold the weights of one layer.

    q/k/v and gate/up are stacked along their outputs, as are their biases. A layer without its own keys and values has
    only q. Norms are fp32 [H]; those of q and k are [D], or as wide as all their heads. Norms that the family lacks are
    None. If the checkpoint holds norm weights minus 1, the 1 has been added. `biases` are fp32 copies of the linears'
    biases, None for a linear without one.
    """

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    input_norm: Tensor | None = None
    post_attn_norm: Tensor | None = None
    attn_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    biases: tuple[Tensor | None, ...] = (None,) * 4

    def norms(self) -> tuple[Tensor, ...]:
        """Return the norms that the family has."""
        norms = self.input_norm, self.post_attn_norm, self.attn_out_norm, self.mlp_out_norm, self.q_norm, self.k_norm
        return tuple(norm for norm in norms if norm is not None)

    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """Return the linears in the order of `ModelSpec.sites_of`."""
        return self.qkv, self.o, self.gate_up, self.down


_ELSEWHERE = "another rank has these weights"


class AbsentEmbedding:
    """Stand in for the embedding if another rank has it; see `Embedding`."""

    nbytes = 0
    can_be_recorded = False

    def __call__(self, ids: Tensor) -> Tensor:
        raise AssertionError(_ELSEWHERE)

    def dequantize(self) -> Tensor:
        raise KeyError(_ELSEWHERE)


class AbsentHead:
    """Stand in for the head if another rank has it; see `Linear`."""

    in_features = out_features = nbytes = 0
    can_be_recorded = True

    def __call__(self, x: Tensor) -> Tensor:
        raise AssertionError(_ELSEWHERE)

    def dequantize(self) -> Tensor:
        raise KeyError(_ELSEWHERE)

    def rows(self, ids: Tensor) -> Tensor:
        raise KeyError(_ELSEWHERE)


class TableHead:
    """Compute the head with its own copy of the embedding, in models whose head is tied to it; see `Linear`."""

    def __init__(self, fmt: QuantFormat, weight: Tensor | GroupQuantizedWeight, dtype: torch.dtype) -> None:
        table = fmt.embedding(weight, dtype)
        self._head = fmt.tied_head(table, dtype)
        self.in_features, self.out_features = self._head.in_features, self._head.out_features
        self.can_be_recorded, self.nbytes = self._head.can_be_recorded, table.nbytes + self._head.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._head(x)

    def dequantize(self) -> Tensor:
        return self._head.dequantize()

    def rows(self, ids: Tensor) -> Tensor:
        return self._head.rows(ids)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Hold a model in its runtime format, or the part of it that one rank computes."""

    spec: ModelSpec
    # `AbsentEmbedding` if another rank has the embedding; likewise, `head` may be `AbsentHead`.
    embed: Embedding
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Linear
    # SHA-256 over names, shapes and a sample of every tensor.
    fingerprint: str
    # Numbers of linears in layers that the file has as codes: kept as they are, and quantized again.
    kept_codes: int = 0
    remade_codes: int = 0
    # `row_prints` of the embedding and the head, by module, if the file holds floats and they are served rounded.
    row_prints: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def has_float_tables(self) -> bool:
        """Return whether the embedding and the head are served as floats."""
        return isinstance(self.embed, FloatEmbedding) and isinstance(self.head, FloatLinear)

    @property
    def nbytes(self) -> int:
        """Return the stored bytes of all weights, shared ones counted once."""
        linears = [linear for layer in self.layers for linear in layer.linears()]
        norms = [self.final_norm] + [norm for layer in self.layers for norm in layer.norms()]
        return self.embed.nbytes + self.head.nbytes + sum(x.nbytes for x in linears) + sum(n.nbytes for n in norms)

    @property
    def bits_per_weight(self) -> float:
        """Return the mean bits per weight of the layers' linears, including scales."""
        stored = sum(linear.nbytes for layer in self.layers for linear in layer.linears())
        return 8 * stored / self.spec.linear_weights

    @property
    def is_recordable(self) -> bool:
        """Return whether all linears compute with `Ops` alone."""
        linears = [linear for layer in self.layers for linear in layer.linears()]
        return all(linear.can_be_recorded for linear in (*linears, self.head))

    def dequantized(self, name: str) -> Tensor:
        """Return one weight (not a bias) by its canonical name, fp32: the exact values that are computed with.

        Raises:
            KeyError: the model has no such weight.
        """
        outside = {_EMBEDDING: self.embed.dequantize, _HEAD: self.head.dequantize}
        if name in outside:
            return outside[name]()
        if name == "model.norm.weight":
            return self.final_norm
        layer, inner = split_layer(name.removesuffix(".weight"))
        if layer is None:
            raise KeyError(name)
        return _slice(self.spec, layer, self.layers[layer], inner)


def row_prints(weight: Tensor) -> Tensor:
    """Return a 64-bit hash of each row's floats: [N, H] of any kind -> int64 [N]; equal values have equal hashes."""
    factors = torch.randint(-(2**63), 2**63 - 1, (weight.shape[1],), generator=torch.Generator().manual_seed(0))
    odd = (factors | 1).to(weight.device)
    chunks = (weight[start : start + _PRINTED_ROWS] for start in range(0, len(weight), _PRINTED_ROWS))
    return torch.cat([(chunk.float().view(torch.int32).long() * odd).sum(1) for chunk in chunks])


def _slice(spec: ModelSpec, layer: int, weights: LayerWeights, module: str) -> Tensor:
    for name, (path, _) in spec.norms(layer).items():
        if module == path:
            norm: Tensor = getattr(weights, name)
            return norm
    for site, linear in zip(spec.sites_of(layer), weights.linears(), strict=True):
        if module in site.modules:
            i = site.modules.index(module)
            start = sum(site.out_features[:i])
            return linear.dequantize()[start : start + site.out_features[i]]
    raise KeyError(module)


@torch.inference_mode()
def served_error(checkpoint: Checkpoint, weights: ModelWeights) -> float:
    """Return how much serving changes the weights of linears, sampled from the first, a middle and the last layer.

    Returns:
        Root mean square of the change divided by that of the weights; 0.0 if all codes of the file are kept unchanged.
    Raises:
        CorruptModel: a tensor cannot be read.
    """
    spec, packing = weights.spec, checkpoint.packing
    if weights.kept_codes == _num_modules(spec) and (packing is None or not packing.rounding):
        return 0.0
    changed = total = 0.0
    for layer in sorted({0, spec.num_layers // 2, spec.num_layers - 1}):
        for site in spec.sites_of(layer):
            for module in site.modules:
                name = f"model.layers.{layer}.{module}.weight"
                exact = checkpoint.tensor(name).float()
                total += float(exact.square().sum())
                changed += float((weights.dequantized(name).to(exact.device) - exact).square().sum())
    error: float = (changed / total) ** 0.5 if total else 0.0
    return 0.0 if error <= _SAME else error


def _num_modules(spec: ModelSpec) -> int:
    return sum(len(site.modules) for layer in range(spec.num_layers) for site in spec.sites_of(layer))


def load_weights(
    checkpoint: Checkpoint,
    fmt: QuantFormat,
    dtype: torch.dtype,
    meter: WeightMeter | None = None,
    progress: Progress | None = None,
    device: torch.device = CPU,
) -> ModelWeights:
    """Build a model.

    Memory for weights, as `meter` counts it, stays below twice the size of the result plus one stacked tensor.

    Args:
        checkpoint: where tensors are read from.
        fmt: format of linears, embedding and head.
        dtype: dtype of weights that stay floats.
        meter: counts bytes, for tests.
        progress: called with the progress of the build.
        device: device of the weights.
    Raises:
        CorruptModel: a tensor cannot be read, or holds NaN or infinity.
        UnsupportedFormat: the format cannot hold a weight.
    """
    return _Builder(checkpoint, fmt, dtype, meter or WeightMeter(), progress or silent, device).build()


class _Builder:
    def __init__(
        self,
        checkpoint: Checkpoint,
        fmt: QuantFormat,
        dtype: torch.dtype,
        meter: WeightMeter,
        progress: Progress,
        device: torch.device,
    ) -> None:
        self._checkpoint, self._spec = checkpoint, checkpoint.spec
        self._names = frozenset(checkpoint.names())
        self._format, self._dtype, self._device = fmt, dtype, device
        self._meter, self._progress = meter, progress
        self._hash = hashlib.sha256()
        self._kept = self._remade = 0
        self._prints: dict[str, Tensor] = {}

    @torch.inference_mode()
    def build(self) -> ModelWeights:
        # The embedding is the largest tensor: build it first, while little else is in memory.
        self._progress(_LOADING, 0.0)
        embed, head = self._ends()
        layers = tuple(self._layer(i) for i in range(self._spec.num_layers))
        final_norm = self._norm("model.norm")
        self._progress(_LOADING, 1.0)
        fingerprint = self._hash.hexdigest()
        return ModelWeights(
            self._spec, embed, layers, final_norm, head, fingerprint, self._kept, self._remade, self._prints
        )

    def _layer(self, i: int) -> LayerWeights:
        self._progress(_LOADING, (i + 1) / (self._spec.num_layers + 1))
        prefix = f"model.layers.{i}."
        (qkv, o, gate_up, down), biases = zip(*(self._site(prefix, s) for s in self._spec.sites_of(i)), strict=True)
        norms = {name: self._norm(prefix + module) for name, (module, _) in self._spec.norms(i).items()}
        return LayerWeights(qkv=qkv, o=o, gate_up=gate_up, down=down, biases=biases, **norms)

    def _site(self, prefix: str, site: SiteShape) -> tuple[Linear, Tensor | None]:
        return self._linear([prefix + module for module in site.modules], self._format.of_site(site.name))

    def _linear(self, modules: Sequence[str], fmt: QuantFormat) -> tuple[Linear, Tensor | None]:
        biases = [f"{module}.bias" for module in modules]
        bias = self._stacked([self._read(name) for name in biases]) if biases[0] in self._names else None
        parts = self._parts([f"{module}.weight" for module in modules], fmt)
        with _naming(*modules):
            if len(parts) == 1:
                linear = fmt.linear(parts[0], bias, self._dtype)
            else:
                linear = fmt.linear_of_parts(parts, bias, self._dtype)
        self._count_packed(parts, bias, linear.nbytes)
        return linear, None if bias is None else bias.float()

    def _ends(self) -> tuple[Embedding, Linear]:
        """Return the embedding and the head, which may be tied to it."""
        embedding: Embedding = AbsentEmbedding()
        if _EMBEDDING in self._names:
            weight = self._weight(_EMBEDDING, self._format)
            with _naming(_EMBEDDING):
                embedding = self._format.embedding(weight, self._dtype)
            self._print(self._spec.names.embedding, weight, embedding)
            self._count_packed([weight], None, embedding.nbytes)
            del weight
        if self._spec.tied_head:
            return embedding, self._format.tied_head(embedding, self._dtype)
        if _HEAD not in self._names:
            return embedding, AbsentHead()
        weight = self._weight(_HEAD, self._format)
        fmt, dtype = self._format, self._dtype
        with _naming(_HEAD):
            head = TableHead(fmt, weight, dtype) if self._spec.has_table_head else fmt.head(weight, dtype)
        self._print(HEAD, weight, head)
        self._count_packed([weight], None, head.nbytes)
        return embedding, head

    def _print(self, module: str, weight: Tensor | GroupQuantizedWeight, table: Embedding | Linear) -> None:
        """Keep hashes of a table's floats if they are served rounded."""
        if isinstance(weight, Tensor) and not isinstance(table, FloatEmbedding | FloatLinear):
            self._prints[module] = row_prints(weight)

    def _weight(self, name: str, fmt: QuantFormat, *, counted: bool = False) -> Tensor | GroupQuantizedWeight:
        """Return a weight: the file's codes if the format keeps them, otherwise floats."""
        codes = self._checkpoint.codes(name)
        is_kept = codes is not None and fmt.keeps(codes)
        self._kept += counted and is_kept
        self._remade += counted and codes is not None and not is_kept
        if codes is None or not is_kept:
            return self._read(name)
        self._meter.add(codes.nbytes)
        for tensor in codes.tensors():
            self._sample(f"{name} {codes.levels}", tensor)
            self._check_finite(name, tensor)
        return codes.to(self._device)

    def _parts(self, names: Sequence[str], fmt: QuantFormat) -> list[Tensor | GroupQuantizedWeight]:
        """Return weights to be stacked along their outputs: one entry if all are floats or the same kind of codes."""
        parts = [self._weight(name, fmt, counted=True) for name in names]
        floats = [part for part in parts if isinstance(part, Tensor)]
        if len(floats) == len(parts):
            return [self._stacked(floats)]
        codes = [part for part in parts if not isinstance(part, Tensor)]
        stacked = stack_codes(codes) if len(codes) == len(parts) else None
        return parts if stacked is None else [stacked]

    def _norm(self, module: str) -> Tensor:
        weight = self._read(f"{module}.weight").float()
        return weight + 1 if self._spec.norms_less_one else weight

    def _stacked(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate tensors along their first dimension."""
        if len(parts) == 1:
            return parts[0]
        stacked = torch.cat([part.float() for part in parts] if len({p.dtype for p in parts}) > 1 else list(parts))
        self._meter.add(stacked.nbytes)
        self._meter.release(sum(part.nbytes for part in parts))
        return stacked

    def _read(self, name: str) -> Tensor:
        tensor = self._checkpoint.tensor(name)
        self._meter.add(tensor.nbytes)
        self._sample(name, tensor)
        moved = tensor.to(self._device)
        self._check_finite(name, moved)
        return moved

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            check_finite(f"{self._checkpoint.name}: tensor {self._spec.names.in_file(name)!r:.80}", tensor)

    def _sample(self, name: str, tensor: Tensor) -> None:
        """Add a sample of a tensor to the fingerprint."""
        flat = tensor.view(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLE)].float()
        self._hash.update(f"{name}{list(tensor.shape)}".encode() + sample.numpy().tobytes())

    def _count_packed(
        self, parts: Sequence[Tensor | GroupQuantizedWeight], bias: Tensor | None, packed_bytes: int
    ) -> None:
        """Add the packed form to the count of bytes, and remove the tensors that it was made from."""
        self._meter.add(packed_bytes)
        self._meter.release(sum(part.nbytes for part in parts) + (0 if bias is None else bias.nbytes))


@contextmanager
def _naming(*names: str) -> Iterator[None]:
    """Add the names of the packed modules to the error if the format refuses them."""
    try:
        yield
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"{error} (in {', '.join(names)})") from None


def silent(what: str, done: float) -> None:
    """Show no progress."""
