"""Resolve `model`, `adapter_id` and `adapters` of a request to the base, one version of an adapter or a sum of some,
once per request."""

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
    # The adapter's version; None: the base. Of a sum: the version named first, with the sum's key.
    ref: AdapterRef | None = None
    # What the request got of the version's defaults; None without defaults.
    persona: AppliedPersona | None = None
    # The versions of a sum: as they were named, or those of a stored one.
    components: tuple[Component, ...] = ()
    is_stored: bool = False
    # Known to the store while this refers to it.
    composition: Composition | None = None
    # Of an adapter with tokens of its own; None: the base's.
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
        """Return the content that is charged for a sum, `BASE_KEY` for none; None unless it is a sum."""
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
        """Return what `usage.lorasrv.adapters` shows: the adapters that were named; None if it was one, or none."""
        shown = [
            {"id": c.ref.adapter_id, "version": c.ref.version, "digest": digest_text(c.ref.key), "weight": c.weight}
            for c in self.components
        ]
        return None if self.is_stored else shown or None

    def naming(self, error: Exception) -> Exception:
        """Return an error about a sum with the name of the component that it is about; of a stored sum, whose parts the
        caller need not see, without.
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
    """Resolve the names: `adapter_id` wins if `model` is the base's name, empty or absent; both may name the same.

    An empty `model` is the base, as in LoRAX. `adapters` stands alone, or beside the base's name.

    Raises:
        InvalidRequest: the fields contradict each other, or all are missing: the base never answers by default.
        NotComposable: a sum is written wrongly.
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
    """Resolve a sum; the defaults and accounts of the one named first are its own. What weighs nothing comes last."""
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
