"""Sums of adapters as one adapter: ranks are summed, matrices are concatenated (`composition.Composition`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from adapter_store.composition import Composition
from adapter_store.errors import NotComposable
from adapter_store.formats.safetensors_file import widen
from adapter_store.formats.weights import AdapterWeights, LoraTensors
from adapter_store.spec import AdapterKey, AdapterSpec, LoraModule


def compose_specs(composition: Composition, spec_of: Callable[[AdapterKey], AdapterSpec], max_rank: int) -> AdapterSpec:
    """Return the spec of a sum, whose ranks are summed module by module.

    Raises:
        NotComposable: a content cannot be summed, the forms differ, or a rank exceeds `max_rank`.
        AdapterError: as `spec_of`.
    """
    assert composition.key is not None
    specs = [spec_of(key) for key, _ in composition.weights]
    for spec in specs:
        if why := _why_not_composable(spec):
            raise NotComposable(why, spec.key)
    if len({spec.stored for spec in specs}) > 1:
        raise NotComposable("they are kept in different forms (bf16, int8); upload all in one")
    modules: dict[tuple[int, str], LoraModule] = {}
    for module in (module for spec in specs for module in spec.modules):
        place = module.layer, module.module
        known = modules.get(place)
        if known is None:
            modules[place] = replace(module, a_name="", b_name="")
        else:
            rank, bias = known.rank + module.rank, known.b_bias or module.b_bias
            modules[place] = replace(known, rank=rank, b_bias=bias)
    if (rank := max(module.rank for module in modules.values())) > max_rank:
        raise NotComposable(f"their ranks add up to {rank}, and this server takes {max_rank} at most")
    return AdapterSpec(
        key=composition.key,
        weights_digest="",
        modules=tuple(modules[place] for place in sorted(modules)),
        dtype=_dtype(specs),
        weights_bytes=sum(spec.weights_bytes for spec in specs),
        stored=specs[0].stored,
    )


def compose_weights(
    composition: Composition, spec: AdapterSpec, load: Callable[[AdapterKey], AdapterWeights]
) -> AdapterWeights:
    """Return the weights of a sum whose spec is known, with concatenated matrices.

    Raises:
        AdapterError: as `load`.
    """
    parts: dict[tuple[int, str], list[tuple[LoraTensors, float]]] = {}
    for key, weight in composition.weights:
        weights = load(key)
        for place, tensors in weights.items():
            parts.setdefault(place, []).append((_converted(tensors, weights.dtype, spec.dtype), weight))
    return AdapterWeights(spec, {(m.layer, m.module): _side_by_side(parts[m.layer, m.module]) for m in spec.modules})


def _why_not_composable(spec: AdapterSpec) -> str:
    if any(module.magnitude for module in spec.modules):
        return "DoRA scales the base's own outputs, so it cannot be added to another adapter"
    if spec.saved:
        return (
            "it has biases or norms of its own (bias, modules_to_save), and PEFT activates one such adapter at a time"
        )
    if spec.invocation_tokens:
        return "it acts only after its invocation tokens (alora_invocation_tokens), and the others act everywhere"
    if spec.added_tokens:
        return "it has tokens of its own (its tokenizer.json), and a sum is written with the base's"
    if spec.rows:
        return (
            "it has rows of the vocabulary of its own (modules_to_save, trainable_token_indices, or a copy that "
            "save_embedding_layers=False leaves out), and PEFT activates one such adapter at a time"
        )
    return ""


def _dtype(specs: Sequence[AdapterSpec]) -> str:
    """Return a type that represents the values of all specs exactly."""
    return specs[0].dtype if len({spec.dtype for spec in specs}) == 1 else "F32"


def _converted(tensors: LoraTensors, dtype: str, wanted: str) -> LoraTensors:
    if dtype == wanted:
        return tensors
    return replace(tensors, a=widen(tensors.a, dtype), b=widen(tensors.b, dtype))


def _side_by_side(parts: Sequence[tuple[LoraTensors, float]]) -> LoraTensors:
    biases = [np.float32(weight) * tensors.b_bias for tensors, weight in parts if tensors.b_bias is not None]
    return LoraTensors(
        rank=sum(tensors.rank for tensors, _ in parts),
        scaling=np.concatenate([np.full(tensors.rank, weight * tensors.scaling) for tensors, weight in parts]),
        a=np.concatenate([tensors.a for tensors, _ in parts]),
        b=np.concatenate([tensors.b for tensors, _ in parts], axis=1),
        b_bias=np.sum(biases, axis=0) if biases else None,
    )
