"""What the edge asks the engine beside requests, and the answers: frozen, so that any transport can carry them.

What the event loop tells the engine's thread: frozen messages without tensors.
"""

from dataclasses import dataclass

from adapter_store.spec import AdapterKey
from lorasrv.config import Limits
from lorasrv.outputs import AdapterTier, RequestId
from lorasrv.request import EngineCoreRequest
from sgmv_kernels.formats.adapter_panels import AdapterLayout


@dataclass(frozen=True, slots=True)
class DescribePool:
    """Who holds which pages? Answered by a `PoolMap`."""


@dataclass(frozen=True, slots=True)
class ListResidents:
    """Which adapters are in the pool? Answered by (key, bytes of their pages) of each that a step may read."""


@dataclass(frozen=True, slots=True)
class GetAdapterTier:
    """Where is an adapter now? Answered by `AdapterStatus`."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class WarmAdapter:
    """Bring an adapter to the pool, and spare it until `deadline_s` and a grace from now. Answered when it is there."""

    key: AdapterKey
    layout: AdapterLayout
    deadline_s: float


@dataclass(frozen=True, slots=True)
class PinAdapter:
    """Bring an adapter to the pool and keep it there. Answered by `AdapterStatus` when it is there."""

    key: AdapterKey
    layout: AdapterLayout


@dataclass(frozen=True, slots=True)
class UnpinAdapter:
    """Keep it there no longer. Answered by `AdapterStatus`."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class SetLimits:
    """From now on an adapter has these limits; None: those of every adapter. Answered by None."""

    adapter_id: str
    limits: Limits | None


UtilityRequest = DescribePool | ListResidents | GetAdapterTier | WarmAdapter | PinAdapter | UnpinAdapter | SetLimits


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """Where an adapter is, and how long it took to get there."""

    tier: AdapterTier
    load_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class UtilityResult:
    """`content` is what the question says, or the exception that refuses it."""

    number: int
    content: object


@dataclass(frozen=True, slots=True)
class AddRequests:
    """The choices of one request: together, so that all of them find the same adapters in the pool."""

    messages: tuple[EngineCoreRequest, ...]


@dataclass(frozen=True, slots=True)
class UtilityCall:
    """A question, whose answer comes back under this number; None: nobody waits for it any more."""

    number: int
    request: UtilityRequest | None


@dataclass(frozen=True, slots=True)
class EndRequest:
    """A stream has ended before its request: the client left, or a stop string was met."""

    request_id: RequestId
    stopped: bool


class Wake:
    """An adapter has arrived."""


class Shutdown:
    """The server ends."""


Message = AddRequests | UtilityCall | EndRequest | Wake | Shutdown
