"""Who is to answer: `model` and `adapter_id` of a request, resolved once and for all."""

from collections.abc import Callable
from dataclasses import dataclass

from adapter_store.errors import AdapterNotFound, show
from adapter_store.spec import AdapterRef
from api.errors import ApiError
from lorasrv.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The base (`ref` None) or one version of an adapter. `name` is what the client called it."""

    name: str
    ref: AdapterRef | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Which adapter answers; the base has none of these headers."""
        if self.ref is None:
            return {}
        return {
            "x-adapter-id": self.ref.adapter_id,
            "x-adapter-version": str(self.ref.version),
            "x-adapter-digest": f"sha256:{self.ref.key}",
        }


def resolve_target(
    model: str | None, adapter_id: str | None, base_name: str, resolve: Callable[[str], AdapterRef]
) -> ResolvedModel:
    """The one rule: `adapter_id` wins where `model` is the base's name, empty or absent; both may name the same.

    Raises:
        InvalidRequest: the two contradict each other, or nothing is named: the base never answers by default.
        ApiError: 404, there is no such model; up to three near names.
    """
    if adapter_id == "":
        raise InvalidRequest("adapter_id is empty; leave it out to ask the base", param="adapter_id")
    if adapter_id and model and model not in (base_name, adapter_id):
        raise InvalidRequest("model and adapter_id name two different adapters; send one", param="adapter_id")
    if name := adapter_id or model:
        return ResolvedModel(name, _resolve(name, "adapter_id" if adapter_id else "model", base_name, resolve))
    raise InvalidRequest(f"name a model: {base_name!r} is the base, an adapter id is an adapter", param="model")


def _resolve(name: str, param: str, base_name: str, resolve: Callable[[str], AdapterRef]) -> AdapterRef | None:
    if name == base_name:
        return None
    try:
        return resolve(name)
    except AdapterNotFound as error:
        raise model_not_found(error, param) from None


def model_not_found(error: AdapterNotFound, param: str) -> ApiError:
    """The 404 of a name that means nothing here."""
    hint = f"; did you mean {', '.join(error.near)}?" if error.near else ""
    return ApiError(404, f"the model {show(error.reference)} does not exist{hint}", code="model_not_found", param=param)
