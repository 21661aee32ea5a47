"""Resolve `model` and `adapter_id` of a request to the base or one version of an adapter, once per request."""

from collections.abc import Callable
from dataclasses import dataclass

from adapter_store.errors import AdapterNotFound, show
from adapter_store.spec import AdapterRef
from api.errors import ApiError
from api.serving.personas import AppliedPersona
from lorasrv.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Identify the model that answers."""

    # The client's name for it.
    name: str
    # The adapter's version; None: the base.
    ref: AdapterRef | None = None
    # What the request got of the version's defaults; None without defaults.
    persona: AppliedPersona | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that name the adapter; none for the base."""
        if self.ref is None:
            return {}
        named = {"x-adapter-id": self.ref.adapter_id, "x-adapter-version": str(self.ref.version)}
        return named if self.ref.key is None else named | {"x-adapter-digest": f"sha256:{self.ref.key}"}


def resolve_target(
    model: str | None, adapter_id: str | None, base_name: str, resolve: Callable[[str], AdapterRef]
) -> ResolvedModel:
    """Resolve the names: `adapter_id` wins if `model` is the base's name, empty or absent; both may name the same.

    An empty `model` is the base, as in LoRAX.

    Raises:
        InvalidRequest: the two contradict each other, or both are missing: the base never answers by default.
        ApiError: 404, there is no such model; the message has up to three similar names.
    """
    if adapter_id == "":
        raise InvalidRequest("adapter_id is empty; leave it out to ask the base", param="adapter_id")
    if adapter_id and model and model not in (base_name, adapter_id):
        raise InvalidRequest("model and adapter_id name two different adapters; send one", param="adapter_id")
    if name := adapter_id or (base_name if model == "" else model):
        return ResolvedModel(name, _resolve(name, "adapter_id" if adapter_id else "model", base_name, resolve))
    raise InvalidRequest(f"model is missing: send {base_name!r} for the base, or an adapter id", param="model")


def _resolve(name: str, param: str, base_name: str, resolve: Callable[[str], AdapterRef]) -> AdapterRef | None:
    if name == base_name:
        return None
    try:
        return resolve(name)
    except AdapterNotFound as error:
        raise model_not_found(error, param) from None


def model_not_found(error: AdapterNotFound, param: str) -> ApiError:
    """Build the 404 of an unknown name."""
    hint = f"; did you mean {', '.join(error.near)}?" if error.near else ""
    return ApiError(404, f"the model {show(error.reference)} does not exist{hint}", code="model_not_found", param=param)
