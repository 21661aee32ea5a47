"""One step as plain data: what the scheduler asks of the model runner. No torch.

Rebuilt for every step, never memoised: adapters move and leave between steps (a memo on the set of requests once
answered with another user's adapter, vllm#47724).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from adapter_store.spec import AdapterKey
from lorasrv.request import RequestId, SamplingParams
from sgmv_kernels.layout import PlacedAdapter


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step: compute `token_ids`, which stand at positions from `start` on."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    start: int
    page_table: tuple[int, ...]
    adapter_key: AdapterKey | None
    samples: bool
    sampling: SamplingParams
    num_generated: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """A whole step. `copies` are adapters to be written into the pool before the step reads them."""

    scheduled: tuple[ScheduledRequest, ...]
    placements: Mapping[AdapterKey, PlacedAdapter]
    copies: tuple[AdapterKey, ...]
    loads: tuple[AdapterKey, ...]
    num_preempted: int
