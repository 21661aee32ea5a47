"""Compute the gains and shifts of outputs that an adapter has besides its deltas, from DoRA, own biases and own norms.

DoRA scales each output of a linear: y = g * (W x + s B A x) + b, where g = m / |W + s B A|, row by row, and m is the
trained magnitude. W are the served weights; if they are quantized, the result is the same as PEFT's over a base with
these quantized weights. The vectors are computed when an adapter is read from disk.

An adapter's own norm weight w' is served as a gain w' / w on the output of the base's norm with weight w.

Source: DoRA (Liu et al. 2024).
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from adapter_store.errors import AdapterInvalid, Problem
from adapter_store.formats.int8_codes import CodedTensors
from adapter_store.formats.safetensors_file import widen
from adapter_store.formats.weights import AdapterWeights, Array, LoraTensors
from adapter_store.spec import INT8
from lorasrv.models.spec import SiteShape
from lorasrv.worker.weights import ONE_AT_A_TIME, ModelWeights

Vectors = tuple[Tensor, Tensor]
"""(gain, shift) of an output, each [width] fp32."""


@torch.inference_mode()
def output_vectors(base: ModelWeights, adapter: AdapterWeights, layer: int) -> Iterator[tuple[str, Vectors]]:
    """Yield the places of a layer that the adapter changes (`ModelSpec.places`), each with its gain and shift.

    Raises:
        AdapterInvalid: a norm cannot be expressed as a gain, because a weight of the base's norm is 0 or almost.
    """
    spec = base.spec
    places, at = list(spec.places()), spec.first_layer + layer
    for i, (index, site) in enumerate(zip(spec.site_indices(layer), spec.sites_of(layer), strict=True)):
        if any(_has_vectors(adapter, (at, module)) for module in site.modules):
            with ONE_AT_A_TIME:
                vectors = _of_site(base, adapter, layer, i, site)
            yield places[index], vectors
    norms = {name: path for name, (path, _) in spec.norms(layer).items()} | {"final_norm": spec.names.final_norm}
    gains = {
        name: _norm_gain(base, layer, name, path, adapter.saved[at, path])
        for name, path in norms.items()
        if (at, path) in adapter.saved
    }
    if heads := {name: gains.pop(name) for name in ("q_norm", "k_norm") if name in gains}:
        one = torch.ones(spec.head_dim, device=base.final_norm.device)
        q, k = heads.get("q_norm", one), heads.get("k_norm", one)
        kv_width = spec.kv_width if spec.has_own_kv(layer) else 0
        widths = (q, spec.q_width), (k, kv_width), (one, kv_width)
        gains["qk_norm" if kv_width else "q_norm"] = torch.cat([gain.repeat(w // len(gain)) for gain, w in widths])
    for name, gain in gains.items():
        yield name, (gain, torch.zeros_like(gain))


def _has_vectors(adapter: AdapterWeights, site: tuple[int, str]) -> bool:
    lora = adapter.get(site)
    return site in adapter.saved or (lora is not None and (lora.magnitude is not None or lora.b_bias is not None))


def _of_site(base: ModelWeights, adapter: AdapterWeights, layer: int, index: int, site: SiteShape) -> Vectors:
    width, device = sum(site.out_features), base.final_norm.device
    gain, shift = torch.ones(width, device=device), torch.zeros(width, device=device)
    layer_weights, at = base.layers[layer], base.spec.first_layer + layer
    bias = layer_weights.biases[index]
    loras = [adapter.get((at, module)) for module in site.modules]
    has_magnitude = any(lora is not None and lora.magnitude is not None for lora in loras)
    weights = layer_weights.linears()[index].dequantize() if has_magnitude else None
    start = 0
    place = base.spec.site_indices(layer)[index]
    for i, (module, lora, out) in enumerate(zip(site.modules, loras, site.out_features, strict=True)):
        rows, outputs = slice(start, start + out), base.spec.own_outputs(place, i)
        if weights is not None and lora is not None and lora.magnitude is not None:
            gain[rows] = _magnitude_gain(weights[rows], lora, adapter)
        own = adapter.saved.get((at, module))
        if bias is not None:
            shift[rows] = (bias[rows] if own is None else _tensor(own[outputs], device)) - gain[rows] * bias[rows]
        if lora is not None and lora.b_bias is not None and base.spec.adds_biases(place):
            shift[rows] += _tensor(lora.b_bias[outputs], device)
        start += out
    return gain, shift


def _magnitude_gain(weight: Tensor, lora: LoraTensors, adapter: AdapterWeights) -> Tensor:
    """Return the gain of each output, computed from the matrices as served: weight [out, in] fp32 -> [out]."""
    assert lora.magnitude is not None
    assert isinstance(lora.scaling, float | int), "sums have no magnitudes"
    if adapter.spec.stored == INT8:
        matrices = CodedTensors(lora, adapter.dtype).dequantized()
    else:
        matrices = widen(lora.a, adapter.dtype), widen(lora.b, adapter.dtype)
    a, b = (_tensor(np.ascontiguousarray(matrix), weight.device) for matrix in matrices)
    norm = torch.linalg.norm(torch.addmm(weight, b, a, alpha=lora.scaling), dim=1)
    gain: Tensor = _tensor(lora.magnitude, weight.device) / norm
    return gain


def _norm_gain(base: ModelWeights, layer: int, name: str, path: str, own: Array) -> Tensor:
    served: Tensor = base.final_norm if name == "final_norm" else getattr(base.layers[layer], name)
    weight = _tensor(own, served.device) + (1 if base.spec.norms_add_one else 0)
    gain = torch.where(served == weight, 1.0, weight / served)
    if not bool(gain.isfinite().all()):
        message = "has a weight where the base's is 0 or almost, which a factor cannot express"
        raise AdapterInvalid((Problem("unsupported_modules_to_save", path, message),))
    return gain


def _tensor(array: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
