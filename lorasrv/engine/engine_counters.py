"""Engine counters: counters of the engine and of its parts, as plain numbers."""

from dataclasses import dataclass

from lorasrv.engine.parts import EngineParts
from lorasrv.metrics.engine_stats import EngineStats


@dataclass(slots=True)
class CoreCounters:
    """Count what the engine core itself has done since the start."""

    arrived: int = 0
    failed: int = 0
    steps: int = 0
    # Monotonic clock.
    last_step_s: float = 0.0
    loads_from_disk: int = 0
    loads_from_host: int = 0
    load_failures: int = 0
    load_seconds: float = 0.0


def describe_engine(parts: EngineParts, own: CoreCounters) -> EngineStats:
    """Return the statistics that are published after a step. For the engine's thread."""
    scheduler = parts.scheduler
    memory, counters, predictor = parts.memory, scheduler.counters, scheduler.predictor
    fragmentation = memory.adapter_pool.fragmentation
    for_adapter = scheduler.num_waiting_for_adapter
    accounts = scheduler.speculator.accounts
    drafts, calibration = accounts.by_drafter, accounts.calibration
    host = parts.source.host_stats() if parts.source is not None else None
    return EngineStats(
        requests_running=scheduler.num_running,
        requests_waiting=scheduler.num_waiting - for_adapter,
        requests_waiting_for_adapter=for_adapter,
        requests_arrived_total=own.arrived,
        pages_total=memory.layout.num_pages,
        pages_free=memory.num_free,
        pages_kv=memory.num_kv_pages,
        pages_prefix=memory.num_unused_prefix_pages,
        pages_adapters=memory.adapters.num_pages,
        pages_adapters_idle=memory.adapters.num_evictable_pages,
        free_runs=fragmentation.free_runs,
        longest_free_run=fragmentation.longest_free_run,
        adapters_resident=memory.adapter_manager.num_resident,
        adapters_arriving=memory.adapter_manager.num_loading,
        steps_total=own.steps,
        prompt_tokens_total=counters.prompt_tokens,
        cached_tokens_total=counters.cached_tokens,
        generated_tokens_total=counters.generated_tokens,
        requests_finished_total=dict(counters.finished),
        requests_due_total=scheduler.num_starved,
        answers_predicted_total=predictor.num_predicted,
        answers_within_prediction_total=predictor.num_covered,
        predicted_tokens_total=predictor.predicted_tokens,
        tokens_of_predicted_total=predictor.actual_tokens,
        step_costs=memory.costs.step.as_dict(),
        load_costs={"load_byte": memory.costs.load.seconds, "copy_byte": memory.costs.copy.seconds},
        preemptions_total=counters.preemptions,
        swaps_total=counters.swaps,
        moved_pages_total=memory.evictor.num_moved_pages,
        copied_pages_total=memory.kv.num_copies,
        adapter_loads_disk_total=own.loads_from_disk,
        adapter_loads_host_total=own.loads_from_host,
        adapter_load_seconds_total=own.load_seconds,
        adapter_load_failures_total=own.load_failures,
        adapter_evictions_total=memory.adapter_manager.num_evictions,
        prefix_evictions_total=memory.prefixes.num_evictions if memory.prefixes is not None else 0,
        draft_tokens_total={name: dict(c.drafted_at) for name, c in drafts.items()},
        accepted_draft_tokens_total={name: dict(c.accepted_at) for name, c in drafts.items()},
        draft_tokens_by_chance_total=dict(calibration.drafted),
        accepted_draft_tokens_by_chance_total=dict(calibration.accepted),
        expected_draft_tokens_by_chance_total=dict(calibration.expected),
        min_draft_chance=scheduler.min_draft_chance,
        corpus_bytes=scheduler.speculator.kept_bytes,
        requests_failed_total=own.failed,
        last_step_s=own.last_step_s,
        weight_bytes=parts.weight_bytes,
        pool_bytes=parts.pool_bytes,
        host_cache_bytes=host.bytes_used if host else 0,
        host_cache_adapters=host.entries if host else 0,
        host_cache_evictions_total=host.evictions if host else 0,
        swap_bytes=memory.swap.nbytes,
        late_kernels_total=parts.executor.num_late_kernels,
        snapshot_bytes=memory.snapshots.num_bytes,
        snapshots_made_total=memory.snapshots.counters.made,
        snapshots_restored_total=memory.snapshots.counters.restored,
        snapshot_bytes_restored_total=memory.snapshots.counters.restored_bytes,
        snapshots_refused_total=dict(memory.snapshots.counters.refused),
        page_leases=memory.peer_pages.num_leases,
        peer_pages_sent_total=memory.peer_pages.counters.lent_pages,
        peer_pages_received_total=memory.peer_pages.counters.taken.restored_bytes // memory.layout.block_bytes,
        peer_prompts_received_total=memory.peer_pages.counters.taken.restored,
        peer_prompts_refused_total=dict(memory.peer_pages.counters.taken.refused),
    )
