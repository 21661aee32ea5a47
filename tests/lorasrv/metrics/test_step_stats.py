"""Steps' time is shared by tokens, and taken once."""

from typing import Any

import pytest

from adapter_store.spec import AdapterKey
from lorasrv.metrics.step_stats import Moved, StepStats
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import AdapterOrders, ScheduledRequest, SchedulerOutput

MIA, TOM = AdapterKey("m"), AdapterKey("t")


def scheduled(number: int, rows: int, key: AdapterKey | None = None, adapter_id: str = "") -> ScheduledRequest:
    ids = tuple(range(rows))
    return ScheduledRequest(
        RequestId(f"r{number}"), ids, 0, (), key, True, SamplingParams(), 0, account=(adapter_id, key)
    )


def step(*requests: ScheduledRequest) -> SchedulerOutput:
    placements: dict[AdapterKey, Any] = {s.adapter_key: None for s in requests if s.adapter_key is not None}
    return SchedulerOutput(requests, placements, (), AdapterOrders(), 0)


def test_by_tokens_and_by_who_asked() -> None:
    book = StepStats()
    book.on_step_computed(
        step(
            scheduled(0, 6, MIA, "mia"), scheduled(1, 1, MIA, "also-mia"), scheduled(2, 1, TOM, "tom"), scheduled(3, 4)
        ),
        12.0,
    )
    book.on_step_computed(step(scheduled(3, 1)), 0.5)
    book.on_step_computed(step(), 99.0)
    spent = book.take()
    assert spent.seconds == {
        ("mia", MIA): pytest.approx(6.0),
        ("also-mia", MIA): pytest.approx(1.0),
        ("tom", TOM): pytest.approx(1.0),
        ("", None): pytest.approx(4.5),
    }
    assert (book.step_seconds.count, book.step_seconds.sum) == (2, 12.5)
    assert (book.distinct_adapters.counts[:3], book.distinct_adapters.sum) == ([1, 0, 1], 2.0)
    assert not book.take().seconds, "taken once"


def test_ways_of_adapters() -> None:
    book = StepStats()
    book.on_adapter_loaded(MIA, 0.5, 100)
    book.on_adapter_copied(MIA, 0.25, 100)
    book.on_adapter_copied(MIA, 0.25, 100)
    book.on_load_failed("disk")
    assert book.take().moved == {MIA: Moved(loads=1, load_bytes=100, copies=2, copy_bytes=200)}
    assert {tier: counted.sum for tier, counted in book.load_seconds.items()} == {"disk": 0.5, "host": 0.5}
    assert book.failures == {"disk": 1}
