"""Define the records of files and batches: frozen dataclasses, JSON on disk, OpenAI's objects on the wire."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from adapter_store.errors import AdapterError, StoreFull, StoreUnusable
from adapter_store.quota import ANONYMOUS
from adapter_store.storage.full_disk import is_full
from api.auth.principal import Caller, KeyLimits, Scope


class BatchStatus(StrEnum):
    """Name the states of a batch as OpenAI does."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_over(self) -> bool:
        """Return whether the state is final."""
        return self in (BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.CANCELLED, BatchStatus.EXPIRED)


class _Record:
    """Base of frozen dataclasses of JSON values that can be read back."""

    @classmethod
    def from_dict(cls, value: Any) -> Self:
        """Read a record.

        Raises:
            StoreUnusable: it was not written by this version or an older one.
        """
        names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        try:
            return cls(**{name: content for name, content in value.items() if name in names})
        except (TypeError, AttributeError, ValueError):
            raise StoreUnusable("a record of a batch or of its files is damaged") from None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, slots=True)
class FileRecord(_Record):
    """Describe a complete file that belongs to `principal`. Times are Unix seconds."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    principal: str = ANONYMOUS

    def shown(self) -> dict[str, Any]:
        own = self.to_dict()
        own.pop("principal")
        return {"object": "file", **own, "status": "processed"}


@dataclass(frozen=True, slots=True)
class BatchRecord(_Record):
    """Describe a batch. Its lines run with the principal, adapters and limits that its key had at creation."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    # File ids of the results, assigned before the files become visible.
    output_file: str
    error_file: str
    status: str = BatchStatus.VALIDATING.value
    metadata: Mapping[str, str] | None = None
    errors: tuple[Mapping[str, Any], ...] = ()
    result_age_s: int | None = None
    total: int = 0
    # While the batch runs: counts when the record was last written.
    completed: int = 0
    failed: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    principal: str = ANONYMOUS
    adapters: Sequence[str] = ("*",)
    limits: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def caller(self) -> Caller:
        """Return the caller under which the lines run.

        Raises:
            StoreUnusable: the record was not written by this version or an older one.
        """
        try:
            limits = KeyLimits(**self.limits)
        except TypeError:
            raise StoreUnusable("the record of a batch has unknown limits") from None
        return Caller(self.principal, frozenset({Scope.INFER}), tuple(self.adapters), limits)

    @property
    def state(self) -> BatchStatus:
        return BatchStatus(self.status)

    def shown(self, is_there: Mapping[str, object]) -> dict[str, Any]:
        """Return the batch object, with the ids of result files that `is_there` contains."""
        own = self.to_dict()
        counts = {name: own.pop(name) for name in ("total", "completed", "failed")}
        output, failures = own.pop("output_file"), own.pop("error_file")
        problems = own.pop("errors")
        for hidden in ("result_age_s", "principal", "adapters", "limits"):
            own.pop(hidden)
        return {
            **own,
            "object": "batch",
            "errors": {"object": "list", "data": list(problems)} if problems else None,
            "output_file_id": output if output in is_there else None,
            "error_file_id": failures if failures in is_there else None,
            "request_counts": counts,
        }


def waiting(error: OSError | AdapterError, retry_at: int) -> dict[str, Any]:
    """Build a batch's `waiting`, which OpenAI's object lacks: why nothing happens until `retry_at`, in Unix seconds.
    The log has the error itself, which may name paths."""
    is_full_disk = is_full(error) if isinstance(error, OSError) else isinstance(error, StoreFull)
    code, why = ("store_full", "is full") if is_full_disk else ("store_unusable", "fails")
    return {"code": code, "message": f"the server's disk {why}; the batch tries again", "retry_at": retry_at}


def problem(message: str, code: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """Build one entry of a batch's `errors`."""
    return {"code": code, "message": message, "line": line, "param": param}
