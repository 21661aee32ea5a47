"""Publish the engine's counters as plain numbers. The engine's thread writes them, any thread may read them; the API
gives the metrics their names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lorasrv.outputs import record


@dataclass(slots=True)
class SchedulerCounters:
    """Count events since the start."""

    preemptions: int = 0
    swaps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)


@record
class EngineStats:
    """Hold the state after one step; totals count from the start."""

    requests_running: int = 0
    requests_waiting: int = 0
    requests_waiting_for_adapter: int = 0
    requests_arrived_total: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_kv: int = 0
    pages_prefix: int = 0
    pages_adapters: int = 0
    pages_adapters_idle: int = 0
    free_runs: int = 0
    longest_free_run: int = 0
    adapters_resident: int = 0
    adapters_arriving: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    requests_finished_total: Mapping[str, int] = field(default_factory=dict)
    # Requests that reached the starvation bound.
    requests_due_total: int = 0
    answers_predicted_total: int = 0
    answers_within_prediction_total: int = 0
    predicted_tokens_total: int = 0
    tokens_of_predicted_total: int = 0
    step_costs: Mapping[str, float] = field(default_factory=dict)
    load_costs: Mapping[str, float] = field(default_factory=dict)
    preemptions_total: int = 0
    swaps_total: int = 0
    moved_pages_total: int = 0
    copied_pages_total: int = 0
    adapter_loads_disk_total: int = 0
    adapter_loads_host_total: int = 0
    adapter_load_seconds_total: float = 0.0
    adapter_load_failures_total: int = 0
    adapter_evictions_total: int = 0
    prefix_evictions_total: int = 0
    # By drafter and depth: draft tokens that steps verified, and those that became part of answers.
    draft_tokens_total: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    accepted_draft_tokens_total: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    # The same by tenth of each token's expected chance, and the sums of these chances.
    draft_tokens_by_chance_total: Mapping[int, int] = field(default_factory=dict)
    accepted_draft_tokens_by_chance_total: Mapping[int, int] = field(default_factory=dict)
    expected_draft_tokens_by_chance_total: Mapping[int, float] = field(default_factory=dict)
    # Acceptance chance that a draft token had to exceed to be verified.
    min_draft_chance: float = 0.0
    # Bytes of past answers that serve as drafts.
    corpus_bytes: int = 0
    requests_failed_total: int = 0
    # When the last step ended, on the monotonic clock.
    last_step_s: float = 0.0
    weight_bytes: int = 0
    pool_bytes: int = 0
    host_cache_bytes: int = 0
    host_cache_adapters: int = 0
    host_cache_evictions_total: int = 0
    swap_bytes: int = 0
    # GPU kernels that steps have waited for despite the warm-up.
    late_kernels_total: int = 0
    snapshot_bytes: int = 0
    snapshots_made_total: int = 0
    snapshots_restored_total: int = 0
    snapshot_bytes_restored_total: int = 0
    # By reason.
    snapshots_refused_total: Mapping[str, int] = field(default_factory=dict)
    page_leases: int = 0
    peer_pages_sent_total: int = 0
    peer_pages_received_total: int = 0
    peer_prompts_received_total: int = 0
    # By reason.
    peer_prompts_refused_total: Mapping[str, int] = field(default_factory=dict)

    @property
    def kv_cache_usage_ratio(self) -> float:
        """Return the share of pages that hold keys and values, among all pages except those of adapters in use."""
        reachable = self.pages_total - self.pages_adapters + self.pages_adapters_idle
        return self.pages_kv / reachable if reachable else 0.0


class EngineMetrics:
    """Hold the newest statistics. Replacing them is one assignment, so readers need no lock."""

    def __init__(self, first: EngineStats) -> None:
        self._stats = first

    def publish(self, stats: EngineStats) -> None:
        self._stats = stats

    def stats(self) -> EngineStats:
        return self._stats
