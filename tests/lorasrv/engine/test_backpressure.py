"""The queue's bounds, and when to come back where there is no room: by a clock that the test holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from adapter_store.quota import ANONYMOUS
from lorasrv.config import SchedulerOptions
from lorasrv.engine.backpressure import FADE_S, MAX_KEYS, MAX_RETRY_S, QueueLimiter, ThroughputEstimate, num_queued
from lorasrv.errors import EngineOverloaded
from lorasrv.metrics.engine_stats import EngineStats
from lorasrv.outputs import RequestId, RequestOutput, RequestTiming
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams


class TestDrainRate:
    def test_the_rate_is_right_from_the_first_amount_on(self) -> None:
        rate = ThroughputEstimate()
        assert rate.seconds_for(1) is None
        rate.advance(5.0)
        assert rate.seconds_for(1) is None, "nothing has gone yet"
        rate = ThroughputEstimate()
        for _ in range(3):
            rate.advance(0.5)
            rate.add(10)
        assert rate.seconds_for(20) == pytest.approx(1.0, rel=0.1)

    def test_the_rate_follows_what_changes(self) -> None:
        rate = ThroughputEstimate()
        for amount in (100, 1):
            for _ in range(int(6 * FADE_S)):
                rate.advance(1.0)
                rate.add(amount)
            assert rate.seconds_for(amount) == pytest.approx(1.0, rel=0.3)


@pytest.mark.parametrize(
    ("sent", "waiting", "running", "queued"),
    [
        (0, 0, 0, 0),
        (4, 0, 0, 0),  # as many free slots
        (5, 0, 0, 1),
        (5, 0, 3, 4),
        (1, 0, 4, 1),
        (0, 3, 1, 3),
        (2, 3, 1, 5),  # there are slots, but others wait for them, or for pages
        (1, 0, 9, 1),  # beams run beside those that they come from
    ],
)
def test_requests_beyond_the_free_slots_are_queued(sent: int, waiting: int, running: int, queued: int) -> None:
    assert num_queued(sent, waiting, running, 4) == queued


@dataclass
class Bench:
    """A room with two slots before it, and an engine that says what the test wants."""

    max_requests: int = 3
    max_tokens: int = 100
    now: float = 1000.0
    snapshot: EngineStats = field(default_factory=EngineStats)

    def __post_init__(self) -> None:
        options = SchedulerOptions(
            max_num_seqs=2, max_num_queued_seqs=self.max_requests, max_num_queued_tokens=self.max_tokens
        )
        self.room = QueueLimiter(options, lambda: self.snapshot, lambda: self.now)

    def refused(self, *wanted: int, who: str = ANONYMOUS) -> float:
        """The seconds that a refusal says."""
        with pytest.raises(EngineOverloaded) as caught:
            self.room.check(*wanted, principal=who)
        return caught.value.retry_after_s


def messages(*lengths: int, first: int = 0, fork_of: str | None = None) -> Sequence[EngineCoreRequest]:
    return [
        EngineCoreRequest(
            RequestId(f"r{first + number}"),
            tuple(range(length)),
            4,
            SamplingParams(),
            fork_of=None if fork_of is None else RequestId(fork_of),
        )
        for number, length in enumerate(lengths)
    ]


class TestRoom:
    def test_slots_and_places_in_the_queue_and_no_more(self) -> None:
        bench = Bench()
        for number in range(5):
            bench.room.check()
            bench.room.on_accepted(messages(1, first=number), 0.0)
        assert [bench.refused() for _ in range(3)] == [1.0, 1.0, 1.0], "nothing has been measured yet"
        # The engine has seen them all and runs one: the other slot is nobody's while there are no pages for it.
        bench.snapshot = EngineStats(requests_arrived_total=5, requests_running=1, requests_waiting=4)
        assert bench.refused() == 1.0
        bench.snapshot = EngineStats(requests_arrived_total=5, requests_running=2, requests_waiting=2)
        bench.room.check()
        assert bench.room.num_queued() == 2

    def test_choices_come_in_together_or_not(self) -> None:
        bench = Bench()
        bench.room.check(5)
        bench.room.on_accepted(messages(1, 1, 1), 0.0)
        bench.refused(3)
        bench.room.check(2)
        Bench(max_requests=1).room.check(8)  # more than the queue has places, but nobody waits

    def test_those_that_wait_for_adapters_are_queued_though_slots_are_free(self) -> None:
        bench = Bench()
        bench.room.on_accepted(messages(1, 1, 1), 0.0)
        bench.snapshot = EngineStats(requests_arrived_total=3, requests_waiting_for_adapter=3)
        bench.refused()

    def test_prompts_are_bounded_in_tokens(self) -> None:
        bench = Bench()
        bench.room.on_accepted(messages(80), 0.0)
        bench.room.on_accepted(messages(80, first=1, fork_of="r0"), 0.0)
        assert bench.room.num_tokens == 80
        bench.room.check(1, 20)
        bench.refused(1, 21)
        bench.room.on_finished(RequestId("r0"))
        bench.room.check(1, 1000)  # longer than may wait, but nobody does
        assert bench.room.num_tokens == 0

    @pytest.mark.parametrize("with_outputs", [False, True])
    def test_a_request_leaves_with_its_first_output_or_its_end_and_once(self, with_outputs: bool) -> None:
        bench = Bench()
        bench.room.on_accepted(messages(10, 5), 0.0)
        first = RequestId("r0")
        for number in range(2 * with_outputs):
            bench.room.on_output(first, RequestOutput(first, "x", (1,), 10, number + 1, RequestTiming()))
            assert bench.room.num_tokens == 5
        for _ in range(2):
            bench.room.on_finished(first)
        assert bench.room.num_tokens == 5


class TestWhenToComeBack:
    def drained(self, bench: Bench, rate: float, tokens: int = 1) -> None:
        """The room drains for a while at so many requests a second, and is full at its end."""
        bench.room.on_accepted(messages(*[tokens] * 40), 0.0)
        for number in range(40):
            bench.now += 1 / rate
            bench.room.on_finished(RequestId(f"r{number}"))
        bench.room.on_accepted(messages(*[1] * 5, first=100), 0.0)
        bench.snapshot = EngineStats(requests_arrived_total=40)

    def test_each_is_told_a_time_of_its_own_at_the_rate_of_draining(self) -> None:
        bench = Bench()
        self.drained(bench, rate=0.5)
        assert [bench.refused() for _ in range(3)] == pytest.approx([2.0, 4.0, 6.0], rel=0.2)
        bench.now += 6.0
        # What was promised is over; and as nothing drained meanwhile, it takes longer now.
        assert 2.0 < bench.refused() < 4.0

    def test_a_key_waits_behind_itself_and_shares_with_others(self) -> None:
        bench = Bench()
        self.drained(bench, rate=0.5)
        assert [bench.refused(who="ann") for _ in range(100)][-1] == MAX_RETRY_S
        # Two keys: half of what drains is for each.
        assert [bench.refused(who="bob") for _ in range(2)] == pytest.approx([4.0, 8.0], rel=0.2)
        assert bench.refused(who="carl") == pytest.approx(6.0, rel=0.2)
        bench.now += MAX_RETRY_S
        bench.refused(who="bob")
        assert list(bench.room._retry_at_s) == ["bob"], "what is over is forgotten"

    def test_promises_are_bounded(self) -> None:
        bench = Bench()
        self.drained(bench, rate=0.5)
        for number in range(2 * MAX_KEYS):
            bench.refused(who=f"k{number}")
        assert len(bench.room._retry_at_s) == MAX_KEYS

    def test_it_lies_between_a_second_and_a_minute(self) -> None:
        bench = Bench()
        self.drained(bench, rate=100.0)
        assert bench.refused() == 1.0
        bench = Bench()
        self.drained(bench, rate=0.05)
        assert [bench.refused() for _ in range(9)][-1] == MAX_RETRY_S

    def test_an_idle_hour_changes_nothing(self) -> None:
        bench = Bench()
        self.drained(bench, rate=0.5)
        for number in range(100, 105):
            bench.now += 2.0
            bench.room.on_finished(RequestId(f"r{number}"))
        bench.now += 3600.0
        bench.room.on_accepted(messages(*[1] * 5, first=200), 0.0)
        bench.snapshot = EngineStats(requests_arrived_total=45)
        assert 1.0 < bench.refused() < 3.0

    def test_long_prompts_wait_for_as_many_tokens_to_drain(self) -> None:
        bench = Bench(max_tokens=20)
        self.drained(bench, rate=2.0, tokens=4)
        assert bench.refused(1, 80) == pytest.approx(10.0, rel=0.2)
