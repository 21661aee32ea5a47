"""Prefill and decode apart: pays where long prompts make answers stutter, and not elsewhere."""

from dataclasses import replace

import pytest

from lorasrv.config import MemoryOptions, SchedulerOptions
from lorasrv.memory.memory_manager import PoolLayout
from lorasrv.metrics.trace import TraceRequest
from lorasrv.offline.cluster.options import ClusterOptions
from lorasrv.offline.cluster.roles import RolesPlan, plan_roles, prefill_share
from lorasrv.offline.planner.adapter_sizes import layout_of_bytes
from lorasrv.offline.planner.laws import TrafficLaw
from lorasrv.offline.planner.machine_profile import MachineProfile
from lorasrv.offline.planner.sim_replica import SimServer

# Prompts cost much beside a step: 16 tokens as much as the step itself.
STEP = {"step": 8e-3, "token": 5e-4, "request": 1e-4, "adapter_byte": 0.0, "attention_pair": 0.0, "second_token": 0.0}
LAYOUT = layout_of_bytes(16384, 2, 2)
SERVER = SimServer(
    PoolLayout(8000, 16, 2048, 2),
    MemoryOptions(host_cache_bytes=1 << 30),
    # As large as the prompts: a step with one takes half a second.
    SchedulerOptions(max_num_seqs=16, max_num_batched_tokens=1024, target_itl_ratio=None),
    MachineProfile(STEP, load_byte_s=1e-9),
    lambda name: LAYOUT,
    8192,
)
BOUNDS_MS = {"ttft": 2500.0, "tpot": 15.0}


def _plan(prompt: float, answer: float, rate: float, transfer: float = 1e9, seconds: float = 10.0) -> RolesPlan:
    trace = TrafficLaw("poisson", rate, seconds, 8, 1.0, prompt, answer, 0.3).trace()
    return plan_roles(SERVER, trace, ClusterOptions(4, transfer_bytes_per_s=transfer), BOUNDS_MS)


def test_it_pays_for_long_prompts_where_answers_must_not_stutter() -> None:
    """No bound of the steps helps: prompts of so many chunks begin too late."""
    plan = _plan(1000, 40, 4.0)
    assert [trial.target_itl_ms for trial in plan.both] == [None, 15.0, 10.5]
    assert plan.pays
    assert plan.best_apart.figures.within > 0.9 > 0.7 > plan.best_both.figures.within
    assert plan.best_apart.figures.tpot_p99_ms < 15 < plan.both[0].figures.tpot_p99_ms
    assert plan.best_apart.prefill == 3


def test_it_does_not_pay_for_short_prompts() -> None:
    plan = _plan(40, 60, 12.0, seconds=4.0)
    assert not plan.pays
    assert plan.best_both.figures.within > 0.95


def test_it_does_not_pay_over_a_slow_link() -> None:
    """Pages of a prompt take some seconds."""
    assert not _plan(1000, 40, 4.0, transfer=1e5, seconds=4.0).pays


@pytest.mark.parametrize(("prompt", "answer", "share"), [(1000, 1, 3), (1, 1000, 1), (106, 100, 2)])
def test_the_first_ratio_is_that_of_the_work(prompt: int, answer: int, share: int) -> None:
    """A token of an answer costs 1.1 ms, one of a prompt 0.5."""
    costs = replace(SERVER.costs, step={**STEP, "step": 0.0, "token": 5e-4, "request": 0.0})
    server = replace(SERVER, costs=costs)
    assert prefill_share(server, [TraceRequest(0.0, prompt, answer)], 4) == share
