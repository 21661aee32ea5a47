"""Tests of the checks of a flood and of a soak: they report what is wrong, and nothing else."""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from flood import Outcome, call, open_loop, percentile
from marker_traffic import GONE, Ask, Asked, Name
from process_watch import Figures, Held, held_by, slope

sys.path.append(str(Path(__file__).parent / "benchmarks"))

import bench_overload
import soak

HELD = Held(100 << 20, 120 << 20, 12, 9)


def test_a_line_through_points() -> None:
    assert slope([(x, 3 * x + 7) for x in range(5)]) == pytest.approx(3)
    assert (slope([]), slope([(1, 1)]), slope([(1, 1), (1, 9)])) == (0, 0, 0)
    assert (percentile([], 0.5), percentile([3, 1, 2], 0.5), percentile([3, 1, 2], 0.99)) == (0, 2, 3)


def test_what_this_process_holds() -> None:
    held = held_by(os.getpid())
    assert held.peak_bytes >= held.rss_bytes > 1 << 20
    with open(os.devnull):
        assert held_by(os.getpid()).fds == held.fds + 1


def test_figures_are_added_up_over_labels() -> None:
    text = '# TYPE lorasrv_x_total counter\nlorasrv_x_total{tier="a",by="1"} 2\nlorasrv_x_total{tier="b",by="1"} 3\n'
    shown = Figures(text)
    assert (shown.sum("x_total"), shown.sum("x_total", tier="b"), shown.sum("x_total", tier="c")) == (5, 3, 0)
    with pytest.raises(KeyError):
        shown.sum("y")


def test_what_a_name_may_mean() -> None:
    name = Name("mia", {1})
    early, late = (Asked(Ask("mia", None), set(name.possible)) for _ in range(2))  # type: ignore[arg-type]
    name.asked |= {early, late}
    early.is_decided = True
    name.begin(2)
    assert (early.allowed, late.allowed, name.possible) == ({1}, {1, 2}, {1, 2})
    name.settle(2)
    name.begin(GONE)
    name.break_off()
    assert (name.possible, late.allowed, early.may_break) == ({2, GONE}, {1, 2, GONE}, True)


def answer(status: int, text: str, **headers: str) -> Callable[[httpx2.Request], httpx2.Response]:
    return lambda _: httpx2.Response(status, text=text, headers=headers)


def asked(handler: Callable[[httpx2.Request], httpx2.Response]) -> Outcome:
    async def one() -> Outcome:
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(handler), base_url="http://x") as http:
            return (await open_loop(http, lambda n: {"n": n}, 1e6, 1.0, most=1))[0]

    return asyncio.run(one())


def test_what_became_of_a_request() -> None:
    piece = 'data: {"choices": [{"text": "a"}]}\n\n'
    whole = asked(answer(200, piece * 3 + "data: [DONE]\n\n"))
    assert (whole.is_answered, whole.text, len(whole.gaps())) == (True, "aaa", 2)
    assert asked(answer(200, piece)).error == "the stream broke off"
    failed = asked(answer(200, piece + 'data: {"error": {"code": "bad"}}\n\n'))
    assert (failed.is_answered, failed.is_refused, failed.error) == (False, False, "bad")
    refused = asked(answer(429, '{"error": {"code": "full"}}', **{"retry-after": "3"}))
    assert (refused.is_refused, refused.retry_after, refused.error) == (True, "3", "full")

    def lost(_: httpx2.Request) -> httpx2.Response:
        raise httpx2.ReadError("gone")

    assert asked(lost).error == "ReadError: gone"
    assert call is not None


def flooded(*outcomes: Outcome, peak: int = 100 << 20, recovered_s: float | None = 1.0) -> Any:
    run = bench_overload.Overload(None, argparse.Namespace(queue_timeout_s=None))
    held = [Held(peak, peak, 12, 9)]
    run.phases["flood"] = bench_overload.Phase(list(outcomes), 1.0, held)
    run.recovered_s = recovered_s
    return run


GOOD, FULL = Outcome(0.0, 200, arrivals=[1.0]), Outcome(0.0, 429, "1", error="server_overloaded")


@pytest.mark.parametrize(
    ("outcomes", "more", "after", "says"),
    [
        ([GOOD, FULL], {}, HELD, None),
        ([GOOD, FULL, Outcome(0.0, 200, arrivals=[1.0], error="bad")], {}, HELD, "1 admitted requests failed"),
        ([GOOD, FULL, Outcome(0.0, 0, error="ReadError")], {}, HELD, "1 admitted requests failed"),
        ([GOOD, FULL, Outcome(0.0, 503, "1", error="x")], {}, HELD, "1 were refused with 503"),
        ([GOOD, Outcome(0.0, 429, None, error="x")], {}, HELD, "without Retry-After"),
        ([GOOD], {}, HELD, "no flood"),
        ([GOOD, FULL], {"peak": 200 << 20}, HELD, "memory grew by 100 MiB"),
        ([GOOD, FULL], {"recovered_s": None}, HELD, "no recovery"),
        ([GOOD, FULL], {}, Held(100 << 20, 120 << 20, 50, 9), "descriptors: 12 before, 50 after"),
    ],
)
def test_what_must_not_be_in_a_flood(
    outcomes: list[Outcome], more: dict[str, Any], after: Held, says: str | None
) -> None:
    found = bench_overload.complaints(flooded(*outcomes, **more), HELD, after)
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


def test_lines_of_a_log_that_must_not_be() -> None:
    for bad in ("Traceback (most recent call last):", "ERROR x: y", '{"level": "error", "event": "x"}'):
        assert soak.log_complaints(f"ready: x\n{bad}\n")
    assert soak.log_complaints('ready: x\nWARNING x: y\n{"level": "info"}\n') == []
