"""The validated command line of `bench`. Imports nothing that runs the benchmark."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lorasrv.metrics.trace import TraceRequest

DEFAULT_ADAPTERS = 8


@dataclass(frozen=True)
class BenchOptions:
    """Hold the validated command line."""

    url: str | None
    key: str | None
    flags: tuple[str, ...]
    rank: int
    # None: the adapters of the server.
    names: tuple[str, ...] | None
    adapters: tuple[int, ...] | None
    loads: tuple[dict[str, Any], ...]
    requests: dict[str, Any]
    trace: "tuple[TraceRequest, ...] | None"
    chat: bool
    timeout_s: float
    slo: dict[str, float]
    model_bytes: float
    model_ops: float
    measure: bool
    label: str
    as_json: bool

    @property
    def made_names(self) -> tuple[str, ...]:
        """Return the names of the adapters to generate for a server that bench starts."""
        from api.cli.bench.server import adapter_names
        from api.cli.bench.sweep import trace_names

        if self.names is not None:
            return self.names
        if self.trace is not None and self.adapters is None:
            return tuple(trace_names(self.trace))
        return adapter_names(max(self.adapters or (DEFAULT_ADAPTERS,)))
