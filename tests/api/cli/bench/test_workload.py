"""Laws, lengths, arrivals, prompts and figures of `lorasrv bench`, each against its definition."""

import asyncio
import itertools
import random
import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.cli.bench.client import BenchRequest, RequestOutcome
from api.cli.bench.load import Load, closed_loop, open_loop, poisson
from api.cli.bench.prompts import LONG_WORDS, SHORT_WORDS, Prompts, Ruler, counted_texts
from api.cli.bench.roofline import MachineRates, Wave, Work, floor, mbu, mean_batch, mfu
from api.cli.bench.stats import Spread, figures, keeps
from api.cli.bench.sweep import Point, Settings, make_requests
from api.cli.bench.workload import (
    InvalidOption,
    Law,
    Lengths,
    amount,
    counts,
    hidden_key,
    parse_law,
    parse_lengths,
    rates,
    service_bounds,
    spelled,
)
from lorasrv.metrics.trace import TraceRequest
from lorasrv.models.spec import ModelSpec, operations

SEEDS = st.integers(0, 2**32)
BAD_OPTIONS = {
    "--law": (parse_law, ["zipf", "zipf:", "zipf:0", "zipf:nan", "zipf:-1", "uniform:2", "skewed", ""]),
    "--prompt-tokens": (lambda text: parse_lengths("--prompt-tokens", text), [
        "", "0", "-1", "x", "1.5", "uniform:5", "uniform:9:3", "uniform:0:3", "uniform:1:2:3", "lognormal:10",
        "lognormal:0:1", "lognormal:10:-1", "lognormal:nan:1", "lognormal:10:1:0", "normal:1:2", "99999999",
    ]),
    "--concurrency": (lambda text: counts("--concurrency", text), ["", "0", "1,,2", "1.5", "a", "-1"]),
    "--rate": (lambda text: rates("--rate", text), ["", "0", "nan", "inf", "1,-2"]),
    "--model-bytes": (lambda text: amount("--model-bytes", text), ["", "x", "-1", "0", "1X", "inf", "GB"]),
    "--slo": (
        service_bounds,
        ["ttft", "ttft=", "ttft=x", "ttft=0", "ttft=nan", "itl=5", "ttft=1,ttft=2", ""],
    ),
}  # fmt: skip
EXACT = Ruler(1.0, 1.0)
"""One token a word, and one for the nonce."""


class TestLaws:
    @given(st.sampled_from(["distinct", "uniform", "identical", "zipf:1.1"]), st.integers(1, 50), SEEDS)
    def test_positions_are_of_names(self, text: str, names: int, seed: int) -> None:
        picked = parse_law(text).pick(names, 60, random.Random(seed))
        assert len(picked) == 60
        assert set(picked) <= set(range(names))
        assert picked == parse_law(text).pick(names, 60, random.Random(seed))
        assert text != "identical" or set(picked) == {0}

    @given(st.integers(1, 20), st.integers(0, 100))
    def test_distinct_takes_turns(self, names: int, count: int) -> None:
        picked = Counter(Law("distinct").pick(names, count, random.Random(0)))
        assert max(picked.values(), default=0) - min(picked.values(), default=0) <= 1
        assert len(picked) == min(names, count)

    @given(st.floats(0.3, 2.5), SEEDS)
    @settings(max_examples=20, deadline=None)
    def test_zipf_has_its_weights(self, s: float, seed: int) -> None:
        picked = Counter(Law("zipf", s).pick(10, 20_000, random.Random(seed)))
        total = sum((k + 1) ** -s for k in range(10))
        for k in range(10):
            share = (k + 1) ** -s / total
            assert picked[k] / 20_000 == pytest.approx(share, abs=6 * (share / 20_000) ** 0.5)

    def test_as_text(self) -> None:
        assert [str(parse_law(text)) for text in ("zipf:1.1", "uniform")] == ["zipf:1.1", "uniform"]


class TestLengths:
    @given(st.integers(1, 1000), st.integers(0, 1000), st.floats(1, 4000), st.floats(0, 2), st.integers(1, 500), SEEDS)
    def test_within_bounds(self, low: int, more: int, mean: float, sigma: float, most: int, seed: int) -> None:
        rng = random.Random(seed)
        uniform = parse_lengths("--x", f"uniform:{low}:{low + more}")
        assert all(low <= uniform.draw(rng) <= low + more for _ in range(50))
        lognormal = parse_lengths("--x", f"lognormal:{mean}:{sigma}:{most}")
        assert all(1 <= lognormal.draw(rng) <= most for _ in range(50))
        assert parse_lengths("--x", str(low)).draw(rng) == low

    @given(st.integers(50, 2000), st.floats(0.05, 0.8), SEEDS)
    @settings(max_examples=15, deadline=None)
    def test_lognormal_has_its_mean(self, mean: int, sigma: float, seed: int) -> None:
        rng, lengths = random.Random(seed), Lengths("lognormal", mean, sigma)
        drawn = [lengths.draw(rng) for _ in range(10_000)]
        assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.06)


class TestOptions:
    def test_values(self) -> None:
        assert counts("--x", "1,4,16") == (1, 4, 16)
        assert counts("--x", "0,2", least=0) == (0, 2)
        assert rates("--x", "0.5,2") == (0.5, 2.0)
        amounts = {"134M": 134e6, "1.5GB": 1.5e9, "512MiB": 2**29, "7": 7, "2k": 2000}
        assert {text: amount("--x", text) for text in amounts} == amounts
        assert spelled(service_bounds("ttft=500,tpot=99.5")) == "ttft=500,tpot=99.5"

    @pytest.mark.parametrize(
        ("option", "text"), [(name, text) for name, (_, bad) in BAD_OPTIONS.items() for text in bad]
    )
    def test_bad_values(self, option: str, text: str) -> None:
        with pytest.raises(InvalidOption, match=option):
            BAD_OPTIONS[option][0](text)

    def test_no_key_is_shown(self) -> None:
        shown = hidden_key(["bench", "--key", "s3", "--key=s4", "--url", "u"])
        assert shown == ["bench", "--key", "***", "--key=***", "--url", "u"]
        flags = ["--registry-key", "a", "--cluster-secret=b", "--watermark-key", "7", "--port", "1"]
        hidden = ["--registry-key", "***", "--cluster-secret=***", "--watermark-key", "***", "--port", "1"]
        assert hidden_key(flags) == hidden


class TestPrompts:
    def test_a_ruler_from_two_counts(self) -> None:
        ruler = Ruler.of(12 + 2 * SHORT_WORDS, 12 + 2 * LONG_WORDS)
        assert ruler == Ruler(12.0, 2.0)
        assert (ruler.words(112), ruler.words(3), ruler.words_alone(100)) == (50, 0, 50)
        assert [len(text.split()) for text in counted_texts()] == [1 + SHORT_WORDS, 1 + LONG_WORDS]

    @given(st.integers(1, 300), SEEDS)
    @settings(deadline=None)
    def test_as_long_as_wanted_and_never_alike(self, tokens: int, seed: int) -> None:
        prompts = [Prompts(EXACT, random.Random(seed)) for _ in range(2)]
        texts = [made.make(tokens).split() for made in prompts for _ in range(3)]
        assert {len(text) for text in texts} == {tokens}
        assert len({text[0] for text in texts}) == len(texts), "the first word tells every request from all others"
        assert texts[0][1:] == texts[3][1:], "but for it, the words are seeded"

    @given(st.integers(2, 200), st.integers(1, 200))
    @settings(deadline=None)
    def test_a_shared_beginning(self, tokens: int, shared: int) -> None:
        prompts = Prompts(EXACT, random.Random(0))
        one, other = (prompts.make(tokens, shared).split() for _ in range(2))
        assert one[:shared] == other[:shared]
        assert one[shared] != other[shared]
        assert len(one) == max(tokens, shared + 1)
        assert Prompts(EXACT, random.Random(0)).make(tokens, shared).split()[0] != one[0], "no other load has it"


def outcome(
    sent: float, arrivals: list[float], *, prompt: int = 10, tokens: int | None = None, model: str = "a"
) -> RequestOutcome:
    made = RequestOutcome(model, model != "base", sent, arrivals, arrivals[-1], prompt)
    made.output_tokens = len(arrivals) if tokens is None else tokens
    return made


def failed(kind: str) -> RequestOutcome:
    made = RequestOutcome("a", True, 0.0, ended_s=1.0)
    made.fail(kind, "why")
    return made


class TestFigures:
    def test_by_hand(self) -> None:
        # TTFT 100 and 500 ms, TPOT 50 and 200 ms, gaps 50 50 and 100 300.
        good = [outcome(0.0, [0.1, 0.15, 0.2]), outcome(1.0, [1.5, 1.6, 1.9], prompt=30, model="b")]
        load = Load([*good, failed("HTTP 500"), failed("HTTP 500")], 0.0, 2.0)
        found = figures(load, {"ttft": 500, "tpot": 100})
        assert (found.requests, found.failed, found.failures) == (4, 2, {"HTTP 500": 2})
        assert found.first_error == "HTTP 500: why"
        assert (found.output_tok_per_s, found.total_tok_per_s, found.requests_per_s) == (3.0, 23.0, 1.0)
        spread = (found.ttft_ms.p50, found.tpot_ms.p99, found.itl_ms.p50, found.itl_ms.p99)
        assert spread == pytest.approx((100, 200, 50, 300))
        assert found.adapters == 2
        assert (found.goodput_per_s, found.good_share) == (0.5, 0.25)
        assert (found.mbu, found.mfu) == (None, None)

    @pytest.mark.parametrize(
        ("slo", "kept"),
        [
            ({}, True),
            ({"ttft": 100.5}, True),
            ({"ttft": 99}, False),
            ({"tpot": 50.5, "ttft": 100.5}, True),
            ({"tpot": 49, "ttft": 100.5}, False),
            ({"e2e": 200.5}, True),
            ({"e2e": 199}, False),
        ],
    )
    def test_bounds_of_service(self, slo: dict[str, float], kept: bool) -> None:
        assert keeps(outcome(0.0, [0.1, 0.15, 0.2]), slo) is kept
        assert not keeps(failed("timeout"), slo | {"ttft": 1e9})

    def test_time_per_token(self) -> None:
        assert outcome(0.0, [0.1, 0.5], tokens=5).tpot_ms == pytest.approx(100), "several tokens may come at a time"
        single = outcome(0.0, [0.1])
        assert single.tpot_ms is None
        assert keeps(single, {"tpot": 1})
        assert figures(Load([single], 0.0, 1.0), {}).tpot_ms == Spread(None, None, None)

    @given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
    def test_quantiles_are_values_in_order(self, values: list[float]) -> None:
        spread = Spread.of(values)
        assert spread.p50 <= spread.p90 <= spread.p99
        assert {spread.p50, spread.p90, spread.p99} <= set(values)
        # The smallest with so many of all at or below it.
        for share, value in ((50, spread.p50), (90, spread.p90), (99, spread.p99)):
            assert 100 * sum(one <= value for one in values) >= share * len(values)
            assert 100 * sum(one < value for one in values) < share * len(values)

    def test_nothing_was_measured(self) -> None:
        found = figures(Load(), {"ttft": 1})
        assert (found.requests, found.output_tok_per_s, found.ttft_ms.p50, found.goodput_per_s) == (0, 0.0, None, 0.0)


RATES = MachineRates(read_bytes=1000.0, fp32_ops=100.0, int8_ops=400.0)
WORK = Work(
    model_bytes=100, kv_token_bytes=2, adapter_bytes=10, token_ops=6, sampled_ops=4, context_ops=1, adapter_ops=3
)


class TestWork:
    def test_mean_batch(self) -> None:
        # a from 1 to 3, b from 2 to 4: one, two, one, a second each.
        both = [outcome(0.0, [1.0, 3.0], prompt=10), outcome(0.0, [2.0, 4.0], prompt=20, model="b")]
        batch = mean_batch(both)
        figures = (batch.requests, batch.adapters, batch.context_tokens)
        assert figures == pytest.approx((4 / 3, 4 / 3, (11 + 32 + 21) / 3))
        assert mean_batch([outcome(0.0, [1.0])]) is None
        with_base = mean_batch([outcome(0.0, [1.0, 3.0], model="base"), outcome(0.0, [1.0, 3.0])])
        assert (with_base.requests, with_base.adapters) == (2, 1)

    def test_mbu(self) -> None:
        # 100 + 10 + 2 * 11 bytes in half a second, of 1,000 a second.
        assert mbu([outcome(0.0, [1.0, 1.5], prompt=10)], 500.0, WORK, RATES) == pytest.approx(0.264)
        assert mbu([], None, WORK, RATES) is None
        assert mbu([outcome(0.0, [1.0, 1.5])], 500.0, Work(token_ops=1), RATES) is None

    def test_mfu(self) -> None:
        # Prompt of 3 with an adapter: 3 * 9 + (1 + 2 + 3) + 4 = 37; one more token, which sees 4: 9 + 4 + 4 = 17.
        assert WORK.request_ops(outcome(0.0, [1.0, 1.5], prompt=3)) == 37 + 17
        assert mfu([outcome(0.0, [1.0, 1.5], prompt=3)], 2.0, WORK, RATES) == pytest.approx(54 / 2 / 100)
        assert mfu([outcome(0.0, [1.0, 1.5])], 2.0, Work(model_bytes=1), RATES) is None
        # What was cached is not computed.
        assert WORK.prompt_ops(3, 2, has_adapter=True) == 9 + 3 + 4
        # int8 has a rate of its own.
        assert (RATES.ops(WORK), RATES.ops(Work(is_int8=True))) == (100, 400)

    def test_floor(self) -> None:
        # Two prompts of 3: 74 operations at 100 a second; a step reads 100 + 20 + 2 * 4 * 2 bytes: 0.136 s, but
        # computes 2 * 17 operations: 0.34 s.
        found = floor(Wave(2, 2, 3, 2), WORK, RATES)
        assert (found.ttft_ms, found.tpot_ms) == (pytest.approx(740), pytest.approx(340))
        assert found.tok_per_s == pytest.approx(4 / 1.08)

    def test_operations_of_a_shape(self) -> None:
        spec = ModelSpec("llama", 2, 8, 16, 2, 1, 4, 256, 512, 1e-5)
        # qkv 8 x (8 + 4 + 4), o 8 x 8, gate and up 8 x 32, down 16 x 8.
        assert operations(spec).to_dict() == {
            "token": 2 * 2 * (128 + 64 + 256 + 128),
            "sampled_token": 2 * 8 * 256,
            "context_token": 2 * 2 * 2 * 8,
        }


class TestSweep:
    def test_laws_do_not_disturb_each_other(self) -> None:
        names, lengths = [f"a{n}" for n in range(8)], Lengths("uniform", 1, 99)
        one, other = (
            make_requests(Point(8, concurrency=4), Settings(names, "base", Law(kind), lengths), EXACT)
            for kind in ("uniform", "distinct")
        )
        assert [(a.max_tokens, len(a.prompt)) for a in one] == [(a.max_tokens, len(a.prompt)) for a in other]
        assert [request.model for request in one] != [request.model for request in other]
        requests = make_requests(Point(0, concurrency=1), Settings(["a"], "base"), EXACT)
        found = {(request.model, request.has_adapter, request.at_s) for request in requests}
        assert found == {("base", False, None)}, "no adapters"

    @given(st.floats(0.1, 100), SEEDS)
    @settings(max_examples=20, deadline=None)
    def test_poisson(self, rate: float, seed: int) -> None:
        times = poisson(rate, 4000, random.Random(seed))
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert times[0] == 0.0
        assert min(gaps) >= 0
        assert statistics.fmean(gaps) == pytest.approx(1 / rate, rel=0.12)
        assert statistics.stdev(gaps) == pytest.approx(1 / rate, rel=0.2)

    TRACE = (
        TraceRequest(0.0, 20, 4, "x"),
        TraceRequest(0.5, 30, 5, "y", cached_tokens=8),
        TraceRequest(0.7, 30, 6, "y", cached_tokens=12),
        TraceRequest(0.9, 40, 7),
    )

    def test_a_trace_as_it_is(self) -> None:
        requests = make_requests(Point(None), Settings((), "base", trace=self.TRACE), EXACT)
        shown = [(request.at_s, len(request.prompt.split()), request.max_tokens, request.model) for request in requests]
        assert shown == [(0.0, 20, 4, "x"), (0.5, 30, 5, "y"), (0.7, 30, 6, "y"), (0.9, 40, 7, "base")]
        first, second = requests[1].prompt.split(), requests[2].prompt.split()
        assert first[:12] == second[:12], "what a cache knew is in both"
        assert first[12] != second[12]

    def test_a_trace_over_other_names_and_times(self) -> None:
        make = lambda point: make_requests(point, Settings(("m", "n"), "base", trace=self.TRACE), EXACT)  # noqa: E731
        requests = make(Point(1, rate=2.0))
        assert [request.model for request in requests] == ["m", "m", "m", "base"]
        assert [request.at_s for request in requests] != [0.0, 0.5, 0.7, 0.9]
        models = [request.model for request in make(Point(2, concurrency=1))]
        assert models == ["n", "m", "m", "base"], "the most popular takes the first name"


class TestLoad:
    """When requests are sent; on a clock of counts, not of seconds."""

    def test_a_closed_loop_keeps_so_many_running(self) -> None:
        running, most = 0, 0

        async def send(one: BenchRequest) -> RequestOutcome:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return outcome(0.0, [1.0])

        load, told = Load(), []
        asyncio.run(closed_loop(send, [BenchRequest("a", "p", 1)] * 10, 3, load, told.append))
        assert (most, len(load.outcomes), told) == (3, 10, list(range(1, 11)))

    def test_an_open_loop_waits_for_no_answer(self) -> None:
        all_run = asyncio.Barrier(5)

        async def send(one: BenchRequest) -> RequestOutcome:
            await all_run.wait()
            return outcome(0.0, [1.0])

        load = Load()
        asyncio.run(open_loop(send, [BenchRequest("a", "p", 1, at_s=n / 1000) for n in range(5)], load))
        assert (len(load.outcomes), load.wall_s > 0) == (5, True)
