"""What the edge asks the engine beside requests, and the answers: frozen, so that any transport can carry them."""

from dataclasses import dataclass

from adapter_store.spec import AdapterKey
from lorasrv.limits import Limits
from lorasrv.request import AdapterTier
from sgmv_kernels.layout import AdapterLayout


@dataclass(frozen=True, slots=True)
class DescribePool:
    """Who holds which pages? Answered by a `PoolMap`."""


@dataclass(frozen=True, slots=True)
class ListResidents:
    """Which adapters are in the pool? Answered by (key, bytes of their pages) of each that a step may read."""


@dataclass(frozen=True, slots=True)
class AskTier:
    """Where is an adapter now? Answered by `Reached`."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class WarmAdapter:
    """Bring an adapter to the pool, and spare it until `deadline_s` and a grace from now. Answered when it is there."""

    key: AdapterKey
    layout: AdapterLayout
    deadline_s: float


@dataclass(frozen=True, slots=True)
class PinAdapter:
    """Bring an adapter to the pool and keep it there. Answered by `Reached` when it is there."""

    key: AdapterKey
    layout: AdapterLayout


@dataclass(frozen=True, slots=True)
class UnpinAdapter:
    """Keep it there no longer. Answered by `Reached`."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class SetLimits:
    """From now on an adapter has these limits; None: those of every adapter. Answered by None."""

    adapter_id: str
    limits: Limits | None


Question = DescribePool | ListResidents | AskTier | WarmAdapter | PinAdapter | UnpinAdapter | SetLimits


@dataclass(frozen=True, slots=True)
class Reached:
    """Where an adapter is, and how long it took to get there."""

    tier: AdapterTier
    load_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """`content` is what the question says, or the exception that refuses it."""

    number: int
    content: object
