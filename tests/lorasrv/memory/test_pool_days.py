"""Busy days of the pool's world (`pool_world.py`): many requests of all kinds at once, drawn by seeds, with what fails
now and then. Random rules reach more corners (`test_pool_machine.py`); here there is always somebody in the way."""

import random
from dataclasses import replace
from typing import Any

import pytest
from mispredict import expect_short_answers
from pool_world import LIMITS, NAMES, PAGE_BYTES, PAGE_SIZE, PEER, World, key_of, layout_of

from adapter_store.spec import AdapterKey
from lorasrv.config import POLICIES, Limits, LimitShare, MemoryOptions, SchedulerOptions
from lorasrv.engine.input_processor import further_choices
from lorasrv.kv_policy import KvPolicy, SelectPolicy, WindowPolicy
from lorasrv.outputs import RequestId
from lorasrv.request import AdapterTerm, EngineCoreRequest, OnCold, RequestStatus
from lorasrv.sampling_params import MAX_LOGPROBS, BeamOptions, SamplingParams

POLICIES_OF_KV: list[KvPolicy] = [WindowPolicy(sink=4, recent=16), SelectPolicy(budget=40, sink=4, recent=16, every=32)]
WHO: list[dict[str, Any]] = [{}, {"principal": "other"}, {"priority": 1}, {"priority": -1}, {"timeout_s": 30.0}]


class Day:
    """One day: a world, and whoever comes."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        slots = draw.randint(1, 6)
        options = SchedulerOptions(
            max_num_seqs=slots,
            max_num_batched_tokens=slots + draw.randint(0, 20),
            scheduling_policy=draw.choice(POLICIES),
            max_wait_steps=draw.choice([1, 20, 512]),
            adapter_limits=draw.choice(LIMITS),
            key_limits=draw.choice([LIMITS[2], Limits(tokens_per_s=5.0), Limits(max_running=min(2, slots))]),
            early_abort=draw.random() < 0.3,
            preemption_mode=draw.choice(["auto", "recompute", "swap", "swap"]),
        )
        memory = MemoryOptions(
            swap_bytes=20 * PAGE_BYTES,
            enable_prefix_caching=draw.random() < 0.7,
            adapter_pool_fraction=draw.choice([None, None, None, 0.4]),
            host_cache_bytes=draw.choice([1 << 20, 9_000, 7_000]),
        )
        self.world = World(draw.randint(22, 48), options, memory, drafts=draw.random() < 0.4, late=draw.random() < 0.8)
        self.swap_faults, self.step_faults = draw.choice([0.0, 0.0, 0.3]), draw.choice([0.0, 0.0, 0.1])
        self.row_faults = draw.choice([0.0, 0.0, 0.02])
        if draw.random() < 0.6:
            expect_short_answers(self.world.scheduler.predictor)
        self.versions = dict.fromkeys(NAMES, 0)
        self.accepted: list[RequestId] = []

    def pass_by(self) -> None:
        for _ in range(self.draw.randint(40, 120)):
            self.something_happens()
            self.world.scheduler.check_integrity()
            self.world.check_lent()

    def something_happens(self) -> None:
        world, draw = self.world, self.draw
        events = {
            self.somebody_asks: 30,
            self.steps_pass: 40,
            self.something_arrives: 13,
            self.somebody_leaves: 4,
            self.limits_change: 6,
            self.lend: 2,
            lambda: world.accounts.adapter_manager.evict_lowest(): 2,
            self.somebody_warms: 2,
        }
        draw.choices(list(events), list(events.values()))[0]()

    def somebody_asks(self) -> None:
        draw, options, accounts = self.draw, self.world.options, self.world.accounts
        ids = (10 + draw.randrange(3),) * draw.randint(0, 14)
        ids += tuple(20 + (draw.randrange(3) + number) % 3 for number in range(draw.randint(1, 40)))
        names = draw.choice(["", "", *NAMES, *NAMES, "ab", "ac", "bcd"])
        if draw.random() < 0.02 and names:
            self.versions[names[0]] += 1
        keys = [key_of(name, self.versions[name]) for name in names]
        terms = tuple(AdapterTerm(key, 1.0, layout_of(key)) for key in keys)
        count, max_tokens, kind = draw.choice([1, 1, 1, 2, 3]), draw.randint(1, 14), draw.random()
        most, fields = len(ids) + max_tokens, {**draw.choice(WHO), "cache_salt": draw.choice(["", "", "tenant"])}
        sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=1, ignore_eos=draw.random() < 0.5)
        beams = 1
        if kind < 0.25:
            policy = draw.choice(POLICIES_OF_KV).placed(PAGE_SIZE, options.max_num_batched_tokens)
            fields["kv_policy"], most = policy, policy.most_tokens(len(ids), most)
        elif kind < 0.4:
            beams = count = draw.randint(2, 3)
            fields["beams"], sampling = BeamOptions(beams), replace(sampling, logprobs=MAX_LOGPROBS)
        elif kind < 0.6:
            fields["peer"] = PEER
        layouts = [term.layout for term in terms]
        has_room = sum(map(accounts.adapters.pages_for, layouts)) <= accounts.adapter_pool.num_pages
        if beams > options.max_num_seqs or not has_room:
            return
        if beams * accounts.kv.pages_for(most) > accounts.max_kv_pages(layouts):
            return
        on_cold = draw.choice([OnCold.WAIT, OnCold.WAIT, OnCold.WAIT, OnCold.FALLBACK_BASE, OnCold.REJECT])
        key = AdapterKey("+".join(keys)) if keys else None
        first, *others = [RequestId(f"r{len(self.accepted) + choice}") for choice in range(count)]
        self.accepted += [first, *others]
        fields |= {"adapter_id": names[:1], "on_cold": on_cold}
        message = EngineCoreRequest(first, ids, max_tokens, sampling, terms, adapter_key=key, **fields)
        for each in (message, *further_choices(message, others)):
            self.world.submit(each)

    def steps_pass(self) -> None:
        for _ in range(self.draw.randint(1, 4)):
            self.world.swaps_fail = self.draw.random() < self.swap_faults
            self.world.steps_fail = self.draw.random() < self.step_faults
            self.world.row_fails = self.draw.random() < self.row_faults
            self.world.step(self.draw.randrange(5))
            self.world.scheduler.check_integrity()

    def something_arrives(self) -> None:
        world, draw = self.world, self.draw
        if arriving := sorted(world.loading | world.copying.keys()):
            key = draw.choice(arriving)
            arrives = world.fail if draw.random() < 0.15 else world.load if key in world.loading else world.copy
            arrives(key)
        elif coming := sorted({*world.fetching, *world.filling}):
            world.receive(draw.choice(coming), draw.choice([0, 1, 3, 99]))

    def somebody_leaves(self) -> None:
        if requests := sorted(self.world.scheduler._queue.requests):
            how = self.draw.choice([RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED])
            self.world.scheduler.finish(self.draw.choice(requests), how)

    def limits_change(self) -> None:
        name, quotas = self.draw.choice(NAMES), self.world.scheduler.quotas
        if self.draw.random() < 0.5:
            quotas.set_limits(name, self.draw.choice([None, *LIMITS]))
        else:
            quotas.set_share(name, self.draw.choice([LimitShare(), LimitShare(1), LimitShare(3), LimitShare(2, 5.0)]))

    def lend(self) -> None:
        if running := self.world.scheduler._queue.running:
            self.world.lend(self.draw.choice(running))

    def somebody_warms(self) -> None:
        key = key_of(self.draw.choice(NAMES), 0)
        self.world.accounts.adapter_manager.reserve(key, layout_of(key), self.world.now + self.draw.choice([0.0, 5.0]))

    def end(self) -> None:
        """Nobody comes any more and nothing fails."""
        world = self.world
        world.end(self.accepted, lambda key: (world.load if key in world.loading else world.copy)(key))


@pytest.mark.parametrize(
    "seeds", [range(16), pytest.param(range(16, 3000), marks=pytest.mark.exhaustive)], ids=["some", "many"]
)
def test_days(seeds: range) -> None:
    for seed in seeds:
        try:
            day = Day(seed)
            day.pass_by()
            day.end()
        except Exception as error:
            error.add_note(f"on day {seed}")
            raise
