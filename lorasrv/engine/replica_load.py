"""Estimate from the counts of an engine how much work is ahead of it."""

from dataclasses import dataclass

from lorasrv.metrics.engine_stats import EngineStats
from lorasrv.placement.work import FIRST_ANSWER, WorkRates

BEGUN = 0.5
"""Average share of a running request's work that is still ahead."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Hold the work of a replica, and the memory of the adapters in use."""

    # Requests that have not ended.
    requests: int
    # Seconds until they end, if no further ones arrive.
    seconds_ahead: float
    # Bytes in the pool of adapters that requests use now.
    adapter_bytes: int
    pool_bytes: int

    @classmethod
    def of(cls, stats: EngineStats) -> "ReplicaLoad":
        """Estimate the load from the mean prompt and answer so far."""
        waiting = stats.requests_waiting + stats.requests_waiting_for_adapter
        pages = stats.pages_adapters - stats.pages_adapters_idle
        return cls(
            stats.requests_running + waiting,
            (waiting + BEGUN * stats.requests_running) * _request_s(stats),
            pages * stats.pool_bytes // max(1, stats.pages_total),
            stats.pool_bytes,
        )


def _request_s(stats: EngineStats) -> float:
    """Return the seconds that a request takes of the replica's time."""
    rates = WorkRates.of_steps(stats.step_costs)
    ended = sum(stats.requests_finished_total.values())
    prompt = stats.prompt_tokens_total / max(1, stats.requests_arrived_total)
    answer = stats.generated_tokens_total / ended if ended else FIRST_ANSWER
    return prompt * rates.prompt_token_s + answer * rates.answer_token_s
