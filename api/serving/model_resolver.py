"""Resolve `model`, `adapter_id` and `adapters` of a request, once, to the base, a version of an adapter or a sum of
versions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from adapter_store.composition import Component, Composition, check_weights, is_sum, parse_sum
from adapter_store.errors import AdapterCorrupt, AdapterNotFound, NotComposable, show
from adapter_store.spec import AdapterKey, AdapterRef
from api.errors import ModelNotFound
from api.schemas.composition import AdapterWeight
from api.serving.model_list import digest_text
from api.serving.personas import AppliedPersona, part_is_gone
from api.serving.store_view import ScopedStore
from lorasrv.errors import AdapterDeleted, InvalidRequest
from lorasrv.metrics.usage_ledger import BASE_KEY
from lorasrv.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Identify the model that answers."""

    # The client's name for it.
    name: str
    # The adapter's version; None: the base. For a sum: the version named first, with the sum's key.
    ref: AdapterRef | None = None
    # The version's defaults as applied to the request; None without defaults.
    persona: AppliedPersona | None = None
    # The versions of a sum, as the request named them, or of a stored sum.
    components: tuple[Component, ...] = ()
    is_stored: bool = False
    # Kept here because the store knows a composition only while it is referenced.
    composition: Composition | None = None
    # Tokenizer of an adapter with its own tokens; None: the base's.
    own_tokenizer: Tokenizer | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that name the adapter; none for the base."""
        if self.ref is None:
            return {}
        named = {"x-adapter-id": self.ref.adapter_id, "x-adapter-version": str(self.ref.version)}
        return named if self.ref.key is None else named | {"x-adapter-digest": f"sha256:{self.ref.key}"}

    @property
    def versions(self) -> list[tuple[str, int]]:
        """Return the id and version of each adapter whose deletion may end the request."""
        refs = [*([] if self.ref is None else [self.ref]), *(component.ref for component in self.components)]
        return list(dict.fromkeys((ref.adapter_id, ref.version) for ref in refs))

    @property
    def charged_key(self) -> AdapterKey | None:
        """Return the content that a sum's usage is charged to, `BASE_KEY` if it has none; None if this is not a sum."""
        if not self.components:
            return None
        return BASE_KEY if self.is_stored else self.components[0].ref.key or BASE_KEY

    def summed(self, parts: tuple[Component, ...], view: ScopedStore) -> "ResolvedModel":
        """Return this version with the weights of its stored sum."""
        assert self.ref is not None
        composition = view.compose(parts, is_stored=True)
        ref = replace(self.ref, key=composition.key)
        return replace(self, ref=ref, components=parts, composition=composition, is_stored=True)

    def usage(self) -> list[dict[str, Any]] | None:
        """Return the value of `usage.lorasrv.adapters`: the adapters of a sum that the request named; else None."""
        shown = [
            {"id": c.ref.adapter_id, "version": c.ref.version, "digest": digest_text(c.ref.key), "weight": c.weight}
            for c in self.components
        ]
        return None if self.is_stored else shown or None

    def naming(self, error: Exception) -> Exception:
        """Return an error about a sum with the name of the component that caused it. For a stored sum, leave out the
        name, because the caller may not be allowed to see the parts.
        """
        if self.is_stored and isinstance(error, AdapterNotFound):
            return part_is_gone(self.name)
        if self.is_stored and isinstance(error, AdapterCorrupt):
            return AdapterCorrupt(f"an adapter of the sum {show(self.name)} is damaged on the disk")
        if self.is_stored and isinstance(error, AdapterDeleted):
            return AdapterDeleted(
                f"{show(self.name)}, or an adapter of it, was deleted, and this request ended with it"
            )
        if not isinstance(error, NotComposable):
            return error
        guilty = None if self.is_stored else next((c.ref for c in self.components if c.ref.key == error.key), None)
        if guilty is None:
            return NotComposable(f"{show(self.name)} cannot be served: {error}")
        return NotComposable(f"{guilty.adapter_id}@{guilty.version} cannot be part of a sum: {error}", error.key)


def resolve_target(
    model: str | None,
    adapter_id: str | None,
    adapters: Sequence[AdapterWeight] | None,
    base_name: str,
    view: ScopedStore,
) -> ResolvedModel:
    """Resolve the names.

    `adapter_id` counts if `model` is the base's name, empty or absent; both may name the same adapter. An empty `model`
    means the base, as in LoRAX. `adapters` may be combined with the base's name only.

    Raises:
        InvalidRequest: the fields contradict each other, or all are missing: the base never answers by default.
        NotComposable: a sum is malformed.
        ModelNotFound: there is no such model; the message has up to three similar names.
    """
    if adapter_id == "":
        raise InvalidRequest("adapter_id is empty; leave it out to ask the base", param="adapter_id")
    if adapters is not None:
        if adapter_id or model not in (None, "", base_name):
            raise InvalidRequest("adapters names all that answer; leave out model and adapter_id", param="adapters")
        return _sum([(each.id, each.weight) for each in adapters], "adapters", base_name, view)
    if adapter_id and model and model not in (base_name, adapter_id):
        raise InvalidRequest("model and adapter_id name two different adapters; send one", param="adapter_id")
    name = adapter_id or (base_name if model == "" else model)
    if not name:
        raise InvalidRequest(f"model is missing: send {base_name!r} for the base, or an adapter id", param="model")
    if name == base_name:
        return ResolvedModel(name)
    param = "adapter_id" if adapter_id else "model"
    if is_sum(name):
        return _sum(parse_sum(name), param, base_name, view)
    return ResolvedModel(name, _resolve(name, param, view))


def _sum(parts: Sequence[tuple[str, float]], param: str, base_name: str, view: ScopedStore) -> ResolvedModel:
    """Resolve a sum. It uses the defaults and the accounts of its first version; versions of weight 0 come last."""
    check_weights([weight for _, weight in parts])
    if any(name == base_name for name, _ in parts):
        raise InvalidRequest(f"{base_name!r} is the base, which every sum has; leave it out", param=param)
    found = [Component(_resolve(name, param, view), weight) for name, weight in parts]
    components = tuple(sorted(found, key=lambda component: not component.weight))
    composition = view.compose(components)
    first = components[0].ref
    ref = AdapterRef(first.adapter_id, first.version, composition.key, first.persona)
    name = "+".join(text if weight == 1 else f"{weight:g}*{text}" for text, weight in parts)
    return ResolvedModel(name, ref, components=components, composition=composition)


def _resolve(name: str, param: str, view: ScopedStore) -> AdapterRef:
    try:
        return view.resolve(name)
    except AdapterNotFound as error:
        raise model_not_found(error, param) from None


def model_not_found(error: AdapterNotFound, param: str) -> ModelNotFound:
    """Build the 404 of an unknown name."""
    hint = f"; did you mean {', '.join(error.near)}?" if error.near else ""
    return ModelNotFound(f"the model {show(error.reference)} does not exist{hint}", param=param)
