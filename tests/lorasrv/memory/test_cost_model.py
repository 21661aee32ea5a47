"""Keep or compute again: by measured rates, within the bytes there are."""

from dataclasses import replace

import pytest

from lorasrv.memory.cost_model import CostModel, StepShape
from lorasrv.memory.kv_cache_manager import SwapSpace
from lorasrv.outputs import RequestId
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler_output import AdapterOrders, ScheduledRequest, SchedulerOutput

BLOCK = 1000


def _shape(tokens: int) -> StepShape:
    return StepShape(tokens, 1, 0, 0)


def test_rates_begin_with_a_guess_and_follow_what_is_measured() -> None:
    costs = CostModel()
    guess = costs.recompute_s(100)
    costs.observe_step(_shape(100), 2.0)
    assert costs.recompute_s(100) == pytest.approx(2.0) != guess
    for _ in range(20):
        costs.observe_step(_shape(50), 0.5)
    assert costs.recompute_s(100) == pytest.approx(1.0)
    costs.observe_step(_shape(1), 9.0)
    assert costs.recompute_s(100) == pytest.approx(1.0), "a step of single tokens tells little"
    costs.observe_step(_shape(50), 500.0)
    assert costs.recompute_s(100) == pytest.approx(1.0), "one that met a page fault does not count"
    copy = costs.copy.seconds
    costs.copy.observe(1.0, 0)
    assert costs.copy.seconds == copy


def test_an_adapter_on_host_is_cheaper_to_have_back() -> None:
    costs = CostModel()
    assert 0 < costs.reload_s(1000, on_host=True) < costs.reload_s(1000, on_host=False)


def test_the_cheaper_way_is_taken() -> None:
    costs = CostModel()
    swap = SwapSpace("auto", 10 * BLOCK, BLOCK, costs)
    costs.page_copy.observe(1.0, BLOCK)
    costs.token.observe(1.0, 1)
    assert swap.should_swap(1, 3), "2 seconds out and in against 3"
    assert not swap.should_swap(2, 3), "4 seconds against 3"


def test_modes_and_the_bound() -> None:
    costs = CostModel()
    assert not SwapSpace("recompute", 10 * BLOCK, BLOCK, costs).should_swap(1, 10**9)
    swap = SwapSpace("swap", 10 * BLOCK + 1, BLOCK, costs)
    assert swap.should_swap(10, 1)
    assert not swap.should_swap(11, 10**9)
    assert not swap.should_swap(0, 0)
    swap.allocate(RequestId("a"), 7)
    assert swap.nbytes == 7 * BLOCK
    assert not swap.should_swap(4, 10**9)
    assert swap.should_swap(3, 1)
    swap.free(RequestId("a"))
    assert swap.should_swap(10, 1)
    assert list(swap.holders()) == []


def test_a_draft_token_costs_what_another_request_would() -> None:
    """A row to compute, and a row of logits."""
    plain = ScheduledRequest(RequestId("a"), (7,), 9, (0,), None, True, SamplingParams(), 1)
    drafted = replace(plain, token_ids=(7, 8, 9), draft_token_ids=(8, 9))
    shapes = [StepShape.of(SchedulerOutput((share,), {}, (), AdapterOrders(), 0)) for share in (plain, drafted)]
    assert [(s.tokens, s.requests, s.pairs) for s in shapes] == [(1, 1, 10), (3, 3, 33)]
    assert drafted.without_drafts() == plain
