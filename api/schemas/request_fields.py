"""Define the fields that requests of every protocol share: the adapter that answers, and how the engine runs it."""

from typing import Annotated

from pydantic import Field

from api.schemas.base import Body
from api.schemas.composition import AdaptersField
from api.schemas.kv_policy import KvPolicyField
from api.schemas.speculation import Prediction, SpeculationField
from lorasrv.request import OnCold

MAX_SALT_CHARS = 256


class RequestFields(Body):
    """Define our own fields and vLLM's."""

    adapter_id: str | None = None
    # Answer with the sum of these adapters.
    adapters: AdaptersField | None = None
    # A strict enum would not accept a string.
    on_cold: Annotated[OnCold, Field(strict=False)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None
    # As in vLLM, lower values go first.
    priority: int | None = None
    timeout_s: float | None = None
    speculation: SpeculationField | None = None
    prediction: Prediction | None = None
    kv_policy: KvPolicyField | None = None
    # Whether the persona's defaults apply to fields that the request leaves out.
    use_defaults: bool | None = None
