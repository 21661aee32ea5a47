"""Define the field that names several adapters, whose sum answers."""

from typing import Annotated

from pydantic import Field

from adapter_store.composition import MAX_COMPONENTS, MAX_WEIGHT
from api.schemas.base import ClosedBody, Items

MAX_REFERENCE_CHARS = 160


class AdapterWeight(ClosedBody):
    """Name one adapter of a sum, as `model` would, and what its part is multiplied by."""

    id: Annotated[str, Field(min_length=1, max_length=MAX_REFERENCE_CHARS)]
    weight: Annotated[float, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)] = 1.0


class PinnedAdapter(AdapterWeight):
    """Name one version of a stored sum; the server adds which content that is, and checks it at each request."""

    digest: Annotated[str, Field(max_length=MAX_REFERENCE_CHARS)] | None = None


AdaptersField = Annotated[Items[AdapterWeight], Field(min_length=1, max_length=MAX_COMPONENTS)]
PinnedAdaptersField = Annotated[Items[PinnedAdapter], Field(min_length=1, max_length=MAX_COMPONENTS)]
