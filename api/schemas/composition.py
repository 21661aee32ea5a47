"""Define the field that names several adapters whose weighted sum answers."""

from typing import Annotated

from pydantic import Field

from adapter_store.composition import MAX_COMPONENTS, MAX_WEIGHT
from api.schemas.base import ClosedBody, Items

MAX_REFERENCE_CHARS = 160


class AdapterWeight(ClosedBody):
    """Name one adapter of a sum, with a name that `model` accepts, and its factor."""

    id: Annotated[str, Field(min_length=1, max_length=MAX_REFERENCE_CHARS)]
    weight: Annotated[float, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)] = 1.0


class PinnedAdapter(AdapterWeight):
    """Name one version in a stored sum. The server adds the digest of its content, and checks it at each request."""

    digest: Annotated[str, Field(max_length=MAX_REFERENCE_CHARS)] | None = None


AdaptersField = Annotated[Items[AdapterWeight], Field(min_length=1, max_length=MAX_COMPONENTS)]
PinnedAdaptersField = Annotated[Items[PinnedAdapter], Field(min_length=1, max_length=MAX_COMPONENTS)]
