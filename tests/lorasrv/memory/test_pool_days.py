"""Busy days of the pool's world (`pool_world.py`): many requests of all kinds at once, drawn by seeds, with what fails
now and then. Random rules reach more corners (`test_pool_machine.py`); here there is always somebody in the way."""

import random
from dataclasses import replace
from typing import Any

import pytest
from mispredict import expect_short_answers
from pool_snapshots import Rows
from pool_world import BEAMS, LIMITS, NAMES, PAGE_BYTES, PEER, PERSONAS, World, key_of, layout_of, prefix_tokens

from adapter_store.storage.snapshots import SnapshotName
from lorasrv.config import POLICIES, Limits, LimitShare, MemoryOptions, SchedulerOptions
from lorasrv.kv_policy import KvPolicy, SelectPolicy, WindowPolicy
from lorasrv.request import FixedPrefix, OnCold, RequestStatus

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
        self.parts = draw.randint(22, 48), options, memory, draw.random() < 0.4, draw.random() < 0.8
        self.swap_faults, self.step_faults = draw.choice([0.0, 0.0, 0.3]), draw.choice([0.0, 0.0, 0.1])
        self.row_faults = draw.choice([0.0, 0.0, 0.02])
        self.is_misled = draw.random() < 0.6
        self.versions = dict.fromkeys(["", *NAMES], 0)
        asked = draw.sample(["", "", *PERSONAS, *NAMES, *NAMES, "ab", "ac", "bcd"], draw.choice([3, 8, 21]))
        self.asked = draw.choice([asked, list(PERSONAS)])
        self.layout = 0
        self.start({})

    def start(self, files: dict[SnapshotName, Rows]) -> None:
        """Start the server, with the snapshots that it has on the disk."""
        self.world = World(*self.parts, files, layout=self.layout)
        if self.is_misled:
            expect_short_answers(self.world.scheduler.predictor)

    def restart(self) -> None:
        """Stop the server, or kill it, and start it again; sometimes with another layout of pages."""
        if self.draw.random() < 0.5:
            self.end()
        self.layout += self.draw.random() < 0.1
        self.start(self.world.snapshots.files)

    def persona(self, names: str) -> FixedPrefix:
        """The fixed prefix of the current version."""
        return replace(PERSONAS[names], owner=f"{names}.{self.versions[names[:1]]}")

    def pass_by(self) -> None:
        for _ in range(self.draw.randint(20, 60)):
            self.something_happens()
            self.world.scheduler.check_integrity()
            self.world.check_lent()

    def something_happens(self) -> None:
        world, draw = self.world, self.draw
        events = {
            self.somebody_asks: 30,
            self.steps_pass: 40,
            self.something_arrives: 20,
            self.somebody_leaves: 4,
            self.limits_change: 6,
            self.lend: 2,
            self.snapshots_change: 6,
            lambda: world.evict(draw.choice([0, 3, 99])): 6,
            self.somebody_warms: 2,
        }
        draw.choices(list(events), list(events.values()))[0]()

    def somebody_asks(self) -> None:
        draw = self.draw
        names = draw.choice(self.asked)
        if draw.random() < 0.02 and names:
            self.versions[names[0]] += 1
        fields, how = {**draw.choice(WHO), "cache_salt": draw.choice(["", "", "tenant"])}, None
        ids = (10 + draw.randrange(3),) * draw.randint(0, 14)
        if names in PERSONAS and draw.random() < 0.8:
            fields["prefix"] = self.persona(names)
            ids = prefix_tokens(PERSONAS[names])
        ids += tuple(20 + (draw.randrange(3) + number) % 3 for number in range(draw.randint(1, 40)))
        count, kind = draw.choice([1, 1, 1, 2, 3]), draw.random()
        if kind < 0.25:
            how = draw.choice(POLICIES_OF_KV)
        elif kind < 0.4:
            how, count = BEAMS, draw.randint(2, 3)
        elif kind < 0.6:
            fields["peer"] = PEER
        on_cold = draw.choice([OnCold.WAIT, OnCold.WAIT, OnCold.WAIT, OnCold.FALLBACK_BASE, OnCold.REJECT])
        fields |= {"adapter_id": names[:1], "on_cold": on_cold, "ignore_eos": draw.random() < 0.5}
        keys = [key_of(name, self.versions[name]) for name in names]
        self.world.ask(ids, keys, draw.randint(1, 14), count, how, **fields)
        if "prefix" in fields and draw.random() < 0.3:
            self.make_snapshot(names)

    def steps_pass(self) -> None:
        for _ in range(self.draw.randint(1, 4)):
            self.world.swaps_fail = self.draw.random() < self.swap_faults
            self.world.steps_fail = self.draw.random() < self.step_faults
            self.world.row_fails = self.draw.random() < self.row_faults
            self.world.step(self.draw.randrange(5))
            self.world.scheduler.check_integrity()

    def something_arrives(self) -> None:
        world, draw = self.world, self.draw
        arriving, coming = sorted(world.loading | world.copying.keys()), world.snapshots.under_way()
        if arriving and not (coming and draw.random() < 0.5):
            key = draw.choice(arriving)
            arrives = world.fail if draw.random() < 0.15 else world.load if key in world.loading else world.copy
            arrives(key)
        elif coming:
            world.snapshots.end(draw.choice(coming), draw.choice([0, 1, 3, 99, 99, 99]))

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

    def snapshots_change(self) -> None:
        names, snapshots = self.draw.choice(sorted(PERSONAS.keys() & self.asked) or [""]), self.world.snapshots
        persona, files = self.persona(names), sorted(snapshots.files)
        match self.draw.choices(["make", "lose", "delete"], [8, files != [], 1])[0]:
            case "make":
                self.make_snapshot(names)
            case "lose":
                snapshots.remove(self.draw.choice(files), is_told=False)
            case "delete":
                self.versions[names[:1]] += 1
                for name in [name for name in files if name.owner == persona.owner]:
                    snapshots.remove(name, is_told=True)

    def make_snapshot(self, names: str) -> None:
        self.world.make_snapshot([key_of(name, self.versions[name]) for name in names], self.persona(names))

    def somebody_warms(self) -> None:
        key = key_of(self.draw.choice(NAMES), 0)
        self.world.accounts.adapter_manager.reserve(key, layout_of(key), self.world.now + self.draw.choice([0.0, 5.0]))

    def end(self) -> None:
        """Nobody comes any more and nothing fails."""
        world = self.world
        world.end(lambda key: (world.load if key in world.loading else world.copy)(key))


@pytest.mark.parametrize(
    "seeds", [range(16), pytest.param(range(16, 3000), marks=pytest.mark.exhaustive)], ids=["some", "many"]
)
def test_days(seeds: range) -> None:
    for seed in seeds:
        try:
            day = Day(seed)
            for _ in range(day.draw.randint(1, 4)):
                day.pass_by()
                day.restart()
            day.pass_by()
            day.end()
        except Exception as error:
            error.add_note(f"on day {seed}")
            raise
