"""Messages between event loop and engine thread: requests, utility calls and their results. Frozen, without tensors,
so that any transport can carry them."""

from dataclasses import dataclass

from adapter_store.spec import AdapterKey
from lorasrv.config import Limits, LimitShare
from lorasrv.outputs import AdapterTier, RequestId
from lorasrv.request import EngineCoreRequest, FixedPrefix
from sgmv_kernels.formats.adapter_panels import AdapterLayout


@dataclass(frozen=True, slots=True)
class DescribePool:
    """Ask which pages are used for what. The result is a `PoolMap`."""


@dataclass(frozen=True, slots=True)
class ListResidents:
    """Ask which adapters a step may read. The result is a list of (key, bytes of its pages)."""


@dataclass(frozen=True, slots=True)
class GetAdapterTier:
    """Ask where an adapter is now. The result is an `AdapterStatus`."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class WarmAdapter:
    """Load an adapter into the pool and reserve it for `deadline_s` plus a grace period. The result is an
    `AdapterStatus` once it is resident."""

    key: AdapterKey
    layout: AdapterLayout
    deadline_s: float


@dataclass(frozen=True, slots=True)
class PinAdapter:
    """Load an adapter into the pool and keep it there. The result is an `AdapterStatus` once it is resident."""

    key: AdapterKey
    layout: AdapterLayout


@dataclass(frozen=True, slots=True)
class UnpinAdapter:
    """Let an adapter be evicted again. The result is an `AdapterStatus`."""

    key: AdapterKey


@dataclass(frozen=True, slots=True)
class SetLimits:
    """Set an adapter's limits; None restores the default limits. The result is None."""

    adapter_id: str
    limits: Limits | None


@dataclass(frozen=True, slots=True)
class SetShare:
    """Set what this engine may use of an adapter's limits. The result is the `LimitShare` that is in use, which is
    larger while earlier requests still run."""

    adapter_id: str
    share: LimitShare


@dataclass(frozen=True, slots=True)
class ForgetAnswers:
    """Drop the past answers of an adapter, or under a salt, which serve as drafts. The result is None."""

    adapter: AdapterKey | None = None
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class MakeSnapshot:
    """Keep the pages of a prefix on the disk. The result is a `SnapshotStatus` once they are written."""

    adapter: AdapterKey | None
    prefix: FixedPrefix
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FindSnapshot:
    """Ask for the snapshot of a prefix. The result is a `SnapshotStatus`; None if there is none."""

    adapter: AdapterKey | None
    prefix: FixedPrefix
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OfferPages:
    """Lease the first cached pages of these hashes to a peer. The result is a `PageLease`."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EndLease:
    """End a lease of pages; do nothing if it has ended. The result is None."""

    lease_id: str


UtilityRequest = (
    DescribePool
    | ListResidents
    | GetAdapterTier
    | WarmAdapter
    | PinAdapter
    | UnpinAdapter
    | SetLimits
    | SetShare
    | ForgetAnswers
    | MakeSnapshot
    | FindSnapshot
    | OfferPages
    | EndLease
)


@dataclass(frozen=True, slots=True)
class SnapshotStatus:
    """Describe a snapshot on the disk."""

    tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """Say where an adapter is, and how long it took to get there."""

    tier: AdapterTier
    load_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class UtilityResult:
    """Carry the result of a utility call, or the exception that refuses it."""

    number: int
    content: object


@dataclass(frozen=True, slots=True)
class AddRequests:
    """Add the choices of one request together, so that all of them find the same adapters in the pool."""

    messages: tuple[EngineCoreRequest, ...]


@dataclass(frozen=True, slots=True)
class UtilityCall:
    """Call the engine; the result comes back under the same number."""

    number: int
    # None cancels the call.
    request: UtilityRequest | None


@dataclass(frozen=True, slots=True)
class EndRequest:
    """Finish a request whose stream has ended: the client left, or a stop string was found."""

    request_id: RequestId
    stopped: bool


class Wake:
    """Wake the engine thread: a loader report can be polled."""


class Shutdown:
    """Stop the engine thread."""


Message = AddRequests | UtilityCall | EndRequest | Wake | Shutdown
