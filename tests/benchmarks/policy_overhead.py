"""What a step costs the scheduler itself: no model, no loads, 200 adapters that are all in the pool.

`bench_policies.py overhead` calls this. Times are this thread's own, so that a busy machine changes little. *steady*:
the seats are taken by long answers and nobody starts or ends. *churn*: answers of 16 to 48 tokens, so that about two a
step end, two start and two arrive.
"""

import argparse
import cProfile
import io
import itertools
import pstats
import random
import statistics
import time
from dataclasses import dataclass, field

from policy_load import quantile, row, table

from adapter_store.spec import AdapterKey
from lorasrv.config import MemoryOptions, SchedulerOptions
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.outputs import RequestId
from lorasrv.request import EngineCoreRequest
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler.scheduler import Scheduler
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims

SEATS = 64
NUM_ADAPTERS = 200
LAYOUT = AdapterLayout((SiteDims(64, (64,)),), (((8,),),), 2)
PAGE_BYTES = 4096
PROMPT = 32
CHURN_ANSWERS, STEADY_ANSWERS = (16, 48), (4000, 4000)
WARM_STEPS = 64
EOS = 2
KEYS = [AdapterKey(f"{number:064x}") for number in range(NUM_ADAPTERS)]


@dataclass
class Bare:
    """A scheduler whose model says 7, and which always has `waiting` requests beside those that run."""

    policy: str
    waiting: int
    answers: tuple[int, int]
    asked: int = NUM_ADAPTERS
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    schedule_us: list[float] = field(default_factory=list)
    update_us: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = PoolLayout(40_000, 16, PAGE_BYTES, num_layers=1)
        books = MemoryManager.make(layout, MemoryOptions(prefix_caching=False), "recompute", lambda _: True)
        options = SchedulerOptions(SEATS, 4096, policy=self.policy, max_wait_steps=1 << 30)
        self.scheduler = Scheduler(options, books, frozenset({EOS}), lambda _: True)
        self.adapters = books.adapter_manager
        self._numbers = itertools.count()
        for key in KEYS:
            self.adapters.reserve(key, LAYOUT, float("inf"))
        while not all(self.adapters.is_resident(key) for key in KEYS):
            self.step()
        self.measure(WARM_STEPS)

    def step(self) -> None:
        begun = time.thread_time_ns()
        step = self.scheduler.schedule()
        planned = time.thread_time_ns()
        for key in step.orders.loads:
            self.adapters.on_loaded(key)
        for key, _ in step.orders.copies:
            self.scheduler.on_adapter_copied(key)
        sampled = {share.request_id: (7,) for share in step.scheduled if share.samples}
        computed = time.thread_time_ns()
        self.scheduler.update_from_output(step, sampled)
        self.update_us.append((time.thread_time_ns() - computed) / 1e3)
        self.schedule_us.append((planned - begun) / 1e3)

    def measure(self, steps: int) -> None:
        self.schedule_us.clear()
        self.update_us.clear()
        for _ in range(steps):
            self._fill()
            self.step()

    def _fill(self) -> None:
        while len(self.scheduler.requests()) < SEATS + self.waiting:
            number = next(self._numbers)
            key = KEYS[self.rng.randrange(self.asked)]
            length, name = self.rng.randint(*self.answers), f"a{key[-3:]}"
            sampling = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
            rid, prompt = RequestId(f"r{number}"), (5,) * PROMPT
            self.scheduler.add(EngineCoreRequest(rid, prompt, length, sampling, key, LAYOUT, None, adapter_id=name))


def overhead(a: argparse.Namespace) -> None:
    """Microseconds of schedule() and update_from_output(), by policy and by how many wait."""
    print(f"{SEATS} running, requests for {a.asked} adapters, {a.steps} steps each", flush=True)
    table(("policy", "work", "waiting", "schedule µs p50", "p99", "update µs p50", "p99", "both, mean"))
    for policy in a.policies:
        for work, answers in (("steady", STEADY_ANSWERS), ("churn", CHURN_ANSWERS)):
            for waiting in (int(count) for count in a.waiting.split(",")):
                bare = Bare(policy, waiting, answers, a.asked)
                bare.measure(a.steps)
                times = [quantile(us, q) for us in (bare.schedule_us, bare.update_us) for q in (0.5, 0.99)]
                mean = statistics.mean(bare.schedule_us) + statistics.mean(bare.update_us)
                row(policy, work, waiting, *(f"{us:.0f}" for us in (*times, mean)))
    if a.profile:
        for policy in a.policies:
            _profile(policy, int(a.waiting.split(",")[-1]), a.steps)


def _profile(policy: str, waiting: int, steps: int) -> None:
    bare, profiler = Bare(policy, waiting, CHURN_ANSWERS), cProfile.Profile()
    for _ in range(steps):
        profiler.enable()
        bare.step()
        profiler.disable()
        bare._fill()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(14)
    lines = [line for line in text.getvalue().splitlines() if line.strip()]
    print(f"\n{policy}, churn, {waiting} waiting, {steps} steps, by own time:\n", flush=True)
    print("\n".join(f"    {line}" for line in lines[2:]), flush=True)
