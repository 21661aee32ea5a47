"""The number of replicas that work and adapters need, and how Ray Serve's figures become loads."""

from types import SimpleNamespace

import pytest

from api.cluster.autoscale import ADAPTER_SHARE, FIGURES, BacklogPolicy, replicas_for
from lorasrv.engine.replica_load import ReplicaLoad

POOL = 1000


def load(seconds: float, adapter_bytes: int = 0) -> ReplicaLoad:
    return ReplicaLoad(1, seconds, adapter_bytes, POOL)


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ([], 1),
        ([load(0.0)], 1),
        ([load(2.0)], 1),
        ([load(2.1)], 2),
        ([load(2.0), load(2.0)], 2),
        ([load(9.0), load(0.5)], 5),
        # Adapters in use of all replicas must find room, even where there is little work.
        ([load(0.1, 450), load(0.1, 400)], 2),
        ([load(0.1, 500), load(0.1, 501)], 3),
    ],
)
def test_work_and_adapters_decide(loads: list[ReplicaLoad], wanted: int) -> None:
    assert replicas_for(loads, target_s=2.0) == wanted


def test_adapters_in_use_always_fit() -> None:
    for used in range(0, 5 * POOL, 37):
        number = replicas_for([load(0.0, used)], 2.0)
        assert used <= number * ADAPTER_SHARE * POOL
        assert number == 1 or used > (number - 1) * ADAPTER_SHARE * POOL


def test_the_policy_reads_what_replicas_record() -> None:
    figures = {"a": load(5.0), "b": load(2.0)}
    by_name = {name: {one: float(getattr(it, name)) for one, it in figures.items()} for name in FIGURES}
    # A replica that has told only some of its figures is left out.
    by_name["requests"]["c"] = 9.0
    context = SimpleNamespace(aggregated_metrics=by_name, target_num_replicas=2)
    assert BacklogPolicy(2.0)(context) == (4, {})


@pytest.mark.parametrize("metrics", [None, {}, {"requests": {"a": 1.0}}])
def test_without_figures_nothing_changes(metrics: object) -> None:
    assert BacklogPolicy(2.0)(SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=3)) == (3, {})
