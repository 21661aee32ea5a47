"""Lengths of answers are learnt while serving; and what follows for admission."""

import random

import pytest
from bare_scheduler import PAGE_SIZE, names
from hypothesis import given
from hypothesis import strategies as st
from tiny_scheduler import scheduler

from lorasrv.outputs import RequestId
from lorasrv.request import EngineCoreRequest, Request
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler.length_predictor import (
    MIN_ANSWERS,
    PLANNED_QUANTILE,
    UNKNOWN_TOKENS,
    LengthPredictor,
    peak_growth,
)


def _request(adapter: str = "mia", prompt: int = 10, max_tokens: int = 500, generated: int = 0, **how: bool) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **how)
    request = Request(EngineCoreRequest(RequestId("r"), (5,) * prompt, max_tokens, sampling, adapter_id=adapter))
    request.token_ids += [7] * generated
    return request


def _taught(lengths: list[int], adapter: str = "mia", predictor: LengthPredictor | None = None) -> LengthPredictor:
    predictor = predictor or LengthPredictor()
    for length in lengths:
        predictor.on_finished(_request(adapter, generated=length), was_cut=False)
    return predictor


def test_where_nothing_is_known_a_middling_answer_is_expected() -> None:
    assert LengthPredictor().length(_request(max_tokens=123), 0.5) == 123
    assert _taught([5] * (MIN_ANSWERS - 1)).length(_request(max_tokens=8000), 0.9) == UNKNOWN_TOKENS
    assert LengthPredictor().length(_request(max_tokens=8000, generated=400), 0.9) == 400 + UNKNOWN_TOKENS


def test_an_adapters_own_past_tells_most_and_others_a_newcomers() -> None:
    predictor = _taught([20] * 30)
    _taught([200] * 30, "leo", predictor)
    assert predictor.length(_request("mia"), 0.9) in range(20, 26)
    assert predictor.length(_request("leo"), 0.9) in range(200, 260)
    assert predictor.length(_request("new"), 0.4) in range(20, 26)
    assert predictor.length(_request("new"), 0.9) in range(200, 260)


def test_the_prompts_length_tells_too() -> None:
    predictor = LengthPredictor()
    for _ in range(20):
        predictor.on_finished(_request(prompt=4, generated=10), was_cut=False)
        predictor.on_finished(_request(prompt=400, generated=100), was_cut=False)
    assert predictor.length(_request(prompt=5), 0.9) < 20
    assert predictor.length(_request(prompt=300), 0.1) >= 100


def test_one_that_has_outgrown_the_short_ones_is_among_the_long() -> None:
    predictor = _taught([10] * 50 + [100] * 50)
    assert predictor.length(_request(), 0.4) < 20
    assert predictor.length(_request(generated=30), 0.1) >= 100
    assert predictor.length(_request(generated=300), 0.5) == 500, "nobody was ever so long"
    request = _request()
    assert predictor.planned_remaining(request) >= 90
    predictor = _taught([10] * 50 + [100] * 12)
    request = _request()
    before = predictor.planned_remaining(request)
    assert before < 20
    request.token_ids += [7] * (before + 1)
    assert predictor.planned_remaining(request) > 50


def test_answers_that_were_cut_only_say_that_they_were_no_shorter() -> None:
    predictor = LengthPredictor()
    for _ in range(40):
        predictor.on_finished(_request(max_tokens=16, generated=16), was_cut=True)
        predictor.on_finished(_request(max_tokens=500, generated=100), was_cut=False)
    assert predictor.length(_request(), 0.2) >= 100
    assert predictor.length(_request(max_tokens=16), 0.9) == 16


def test_who_ignores_the_end_goes_to_the_end() -> None:
    assert _taught([10] * 50).length(_request(max_tokens=300, ignore_eos=True), 0.5) == 300


@given(lengths=st.lists(st.integers(1, 5000), min_size=60, max_size=60), q=st.sampled_from([0.5, 0.8, 0.95]))
def test_a_quantile_covers_its_share(lengths: list[int], q: float) -> None:
    predictor = _taught(lengths)
    length = predictor.length(_request(max_tokens=8000), q)
    assert sum(n <= length for n in lengths) >= q * len(lengths) - 1e-9
    assert 1 <= length <= 8000


def test_calibration_is_counted() -> None:
    bench = scheduler()
    rng = random.Random(0)
    for i in range(300):
        bench.add(f"r{i}", max_tokens=200, adapter_id="mia", ends_at=rng.choice([5, 10, 20, 40]))
    bench.run(20_000)
    predictor = bench.scheduler.predictor
    assert predictor.num_predicted == 300
    assert 0.7 <= predictor.num_covered / 300 <= 1.0
    assert predictor.predicted_tokens >= predictor.actual_tokens


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorasrv.scheduler.length_predictor.MAX_HISTOGRAMS", 20)
    predictor = LengthPredictor()
    for i in range(100):
        _taught([10] * 10, f"a{i}", predictor)
    assert len(predictor._histograms) == 20
    assert predictor.length(_request("a99"), 0.5) < 20


def test_what_was_long_ago_counts_less() -> None:
    predictor = _taught([10] * 300 + [100] * 400)
    assert predictor.length(_request(), 0.5) >= 100


# Growth.


def test_the_worst_moment_is_just_before_an_end() -> None:
    assert peak_growth([], 4) == 0
    assert peak_growth([(4, 4, 90)], 4) == 1
    assert peak_growth([(4, 4, 90), (40, 4, 90)], 4) == 2
    assert peak_growth([(4, 40, 90), (40, 1, 90)], 4) == 2, "the one that ends gives back what the other needs"
    assert peak_growth([(4, 40, 20), (50, 50, 20)], 4) == 4, "what a policy drops needs no pages"


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), max_size=8), st.sampled_from([1, 4, 16]))
def test_it_is_the_worst_of_all_moments(requests: list[tuple[int, int]], page: int) -> None:
    def pages(at: int) -> int:
        return sum(-(-(now + at) // page) for now, to_come in requests if to_come >= at)

    held = sum(-(-now // page) for now, _ in requests)
    free = [(*request, 1000) for request in requests]
    assert peak_growth(free, page) == max(0, *(pages(at) - held for at in range(1, 41)), 0)


def test_admission_counts_on_predicted_growth_and_nobody_is_preempted() -> None:
    """Ten requests of 4 pages each, growing to 8, in a pool of 40."""
    bench = scheduler(slots=10, budget=400, pages=40)
    for i in range(10):
        bench.add(f"r{i}", prompt=4 * PAGE_SIZE, max_tokens=4 * PAGE_SIZE)
    assert len(names(bench.step())) == 5
    bench.run()
    assert bench.scheduler.counters.preemptions == 0


def test_short_answers_let_more_in() -> None:
    def admitted(ends_at: int) -> int:
        bench = scheduler(slots=10, budget=400, pages=40)
        for i in range(20):
            bench.add(f"teach{i}", prompt=4 * PAGE_SIZE, max_tokens=100, ends_at=ends_at)
        bench.run()
        for i in range(10):
            bench.add(f"r{i}", prompt=4 * PAGE_SIZE, max_tokens=100, ends_at=ends_at)
        return len(names(bench.step()))

    assert admitted(ends_at=2) == 8
    assert admitted(ends_at=90) == 1


def test_the_quantile_that_admission_plans_with_is_between_even_and_certain() -> None:
    assert 0.5 < PLANNED_QUANTILE < 1.0
