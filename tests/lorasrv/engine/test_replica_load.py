"""The work of a replica, from the counts of its engine."""

import pytest

from lorasrv.engine.replica_load import ReplicaLoad
from lorasrv.metrics.engine_stats import EngineStats


def test_load_of_an_engine() -> None:
    stats = EngineStats(
        requests_running=4,
        requests_waiting=1,
        requests_waiting_for_adapter=2,
        requests_arrived_total=10,
        prompt_tokens_total=1000,
        generated_tokens_total=150,
        requests_finished_total={"stop": 2, "length": 1},
        pages_total=100,
        pages_adapters=30,
        pages_adapters_idle=10,
        pool_bytes=6400,
        step_costs={"step": 0.016, "token": 0.001, "request": 0.002},
    )
    found = ReplicaLoad.of(stats)
    # 100 tokens of a prompt, 50 of an answer; half of each running request is over.
    each = 100 * 0.001 + 50 * (0.001 + 0.002 + 0.016 / 16)
    assert found == ReplicaLoad(7, pytest.approx((3 + 4 / 2) * each), 20 * 64, 6400)
