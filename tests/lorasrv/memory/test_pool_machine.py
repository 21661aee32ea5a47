"""Pool, caches, tiers and scheduler together, in any order of events, in a world that says whose each byte is
(`pool_world.py`). Every accepted request ends exactly once, and the engine never sleeps while one waits."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mispredict import expect_short_answers
from pool_world import BEAMS, LIMITS, NAMES, PAGE_BYTES, PEER, PERSONAS, World, key_of, layout_of, prefix_tokens

from adapter_store.spec import AdapterKey
from lorasrv.config import POLICIES, Limits, LimitShare, MemoryOptions, SchedulerOptions
from lorasrv.kv_policy import SelectPolicy, WindowPolicy
from lorasrv.memory.adapter_manager import AdapterState
from lorasrv.memory.eviction import Moves
from lorasrv.request import OnCold, RequestStatus

WINDOW = WindowPolicy(sink=4, recent=16)
SELECT = SelectPolicy(budget=40, sink=4, recent=16, every=32)


class PoolMachine(RuleBasedStateMachine):
    """Any order of arrivals, steps, loads, copies, failures, aborts, evictions, replacements, preemptions and moves."""

    @initialize(
        pages=st.integers(22, 48),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(0, 20),
        options=st.fixed_dictionaries(
            {
                "scheduling_policy": st.sampled_from(POLICIES),
                "max_wait_steps": st.sampled_from([1, 20, 512]),
                "adapter_limits": st.sampled_from(LIMITS),
                "early_abort": st.booleans(),
                "preemption_mode": st.sampled_from(["auto", "recompute", "swap"]),
            }
        ),
        memory=st.fixed_dictionaries(
            {
                "enable_prefix_caching": st.sampled_from([True, True, False]),
                "adapter_pool_fraction": st.sampled_from([None, None, None, 0.4]),
                "host_cache_bytes": st.sampled_from([1 << 20, 9_000, 7_000]),
            }
        ),
        is_misled=st.booleans(),
        drafts=st.booleans(),
        late=st.booleans(),
    )
    def begin(self, pages, max_num_seqs, budget, options, memory, is_misled, drafts, late) -> None:
        slots = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_seqs + budget}
        scheduler = SchedulerOptions(**slots, **options, key_limits=LIMITS[2])
        self.world = World(pages, scheduler, MemoryOptions(swap_bytes=20 * PAGE_BYTES, **memory), drafts, late)
        if is_misled:
            expect_short_answers(self.world.scheduler.predictor)
        self.names = dict.fromkeys(NAMES, 0)
        self.deleted: set[AdapterKey] = set()

    @rule(
        begins=st.integers(10, 12),
        is_persona=st.booleans(),
        shared=st.integers(0, 14),
        own=st.integers(1, 40),
        max_tokens=st.integers(1, 10),
        names=st.sampled_from(["", *NAMES, *NAMES, "ab", "ac", "bcd", "abcd"]),
        salt=st.sampled_from(["", "", "tenant"]),
        on_cold=st.sampled_from([OnCold.WAIT, OnCold.WAIT, OnCold.WAIT, OnCold.FALLBACK_BASE, OnCold.REJECT]),
        choices=st.sampled_from([1, 1, 1, 2, 3]),
        who=st.sampled_from(
            [{}, {"principal": "other"}, {"priority": 1}, {"priority": -1}, {"timeout_s": 4.0}, {"peer": PEER}]
        ),
        how=st.sampled_from([None, None, None, None, BEAMS, WINDOW, SELECT]),
    )
    def submit(self, begins, is_persona, shared, own, max_tokens, names, salt, on_cold, choices, who, how) -> None:
        """Of the base, an adapter or a sum of several; by beam search, or seeing only some of its tokens."""
        fields = {"on_cold": on_cold, "cache_salt": salt, "adapter_id": names[:1], **who}
        ids = (begins,) * shared
        if is_persona and names in PERSONAS:
            fields["prefix"] = PERSONAS[names]
            ids = prefix_tokens(PERSONAS[names])
        ids += tuple(20 + (own + i) % 3 for i in range(own))
        self.world.ask(ids, [key_of(name, self.names[name]) for name in names], max_tokens, choices, how, **fields)

    @rule(what=st.sampled_from(["swaps_fail", "steps_fail", "row_fails"]))
    def fail_next(self, what: str) -> None:
        """The next swaps, the next steps in flight, or the numbers of the next row."""
        setattr(self.world, what, True)

    @rule(name=st.sampled_from(NAMES), share=st.sampled_from([LimitShare(), LimitShare(1), LimitShare(2, 5.0)]))
    def share(self, name: str, share: LimitShare) -> None:
        """What a registry lets this server use of an adapter's limits."""
        self.world.scheduler.quotas.set_share(name, share)

    @rule(choose=st.integers(0, 4), count=st.integers(1, 4))
    def step(self, choose: int, count: int) -> None:
        for number in range(count):
            self.world.step(choose + number)

    @precondition(lambda self: self.world.loading or self.world.copying)
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def arrive(self, data: st.DataObject, fails: bool) -> None:
        """A load or a copy has ended."""
        key = data.draw(st.sampled_from(sorted(self.world.loading | self.world.copying.keys())))
        self._end_load(key, fails)

    @precondition(lambda self: self.world.snapshots.under_way())
    @rule(data=st.data(), count=st.sampled_from([0, 1, 3, 99]))
    def end_snapshot(self, data: st.DataObject, count: int) -> None:
        """Pages of a snapshot have come from a peer or the disk, or are in the pool or on the disk."""
        self.world.snapshots.end(data.draw(st.sampled_from(self.world.snapshots.under_way())), count)

    @rule(names=st.sampled_from(list(PERSONAS)))
    def make_snapshot(self, names: str) -> None:
        self.world.make_snapshot([key_of(name, self.names[name]) for name in names], PERSONAS[names])

    @precondition(lambda self: self.world.snapshots.files)
    @rule(data=st.data(), is_told=st.booleans())
    def remove_snapshot(self, data: st.DataObject, is_told: bool) -> None:
        self.world.snapshots.remove(data.draw(st.sampled_from(sorted(self.world.snapshots.files))), is_told=is_told)

    @precondition(lambda self: self.world.scheduler.num_running)
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        self.world.lend(data.draw(st.sampled_from(self.world.scheduler._queue.running)))

    @precondition(lambda self: self.world.lent)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        self.world.accounts.peer_pages.end(data.draw(st.sampled_from(sorted(self.world.lent))))

    @precondition(lambda self: self.world.scheduler.has_requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.world.scheduler._queue.requests)))
        self.world.scheduler.finish(rid, RequestStatus.FINISHED_ABORTED)

    @rule(name=st.sampled_from(NAMES), limits=st.sampled_from([None, *LIMITS]))
    def limit(self, name: str, limits: Limits | None) -> None:
        self.world.scheduler.quotas.set_limits(name, limits)

    @rule(num_pages=st.sampled_from([0, 3, 99]))
    def evict(self, num_pages: int) -> None:
        self.world.evict(num_pages)

    @rule(name=st.sampled_from(NAMES))
    def replace(self, name: str) -> None:
        self.names[name] += 1

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        """The content is gone from the store and from host memory; who has it in the pool goes on with it."""
        key = key_of(name, self.names[name])
        if self.world.accounts.adapter_manager.state(key) in (AdapterState.ON_DISK, AdapterState.RESIDENT):
            self.deleted.add(key)
            self.world.on_host.discard(key)

    @rule(name=st.sampled_from(NAMES), seconds=st.sampled_from([0.0, 5.0, 1e9, None]))
    def warm_or_pin(self, name: str, seconds: float | None) -> None:
        key = key_of(name, self.names[name])
        manager, layout = self.world.accounts.adapter_manager, layout_of(key)
        most = self.world.accounts.adapter_pool.num_pages // 2
        room = most - self.world.accounts.adapters.pages_for(layout)
        if seconds is None and manager.num_pinned_pages() <= room:
            manager.pin(key, layout)
        elif seconds is not None and room >= 0:
            manager.reserve(key, layout, self.world.now + seconds)

    @rule(name=st.sampled_from(NAMES))
    def unpin(self, name: str) -> None:
        self.world.accounts.adapter_manager.unpin(key_of(name, self.names[name]))

    @precondition(lambda self: self.world.scheduler.num_running and not self.world.flights)
    @rule()
    def preempt(self) -> None:
        self.world.scheduler._planner.preempt(self.world.scheduler._queue.running[-1])

    @rule(data=st.data())
    def scatter(self, data: st.DataObject) -> None:
        """Move some pages of keys and values to wherever, so that free pages lie scattered."""
        accounts = self.world.accounts
        cached = accounts.prefixes.references() if accounts.prefixes is not None else ()
        used = sorted({*accounts.kv.references(), *cached} - set(accounts.kv.fixed()))
        free = sorted(page for first, n in accounts.kv_pool.free_runs() for page in range(first, first + n))
        count = data.draw(st.integers(0, min(4, len(used), len(free))))
        old = data.draw(st.permutations(used))[:count]
        new = data.draw(st.permutations(free))[:count]
        for page in new:
            accounts.kv_pool.take_page(page)
        moves = dict(zip(old, new, strict=True))
        if moves:
            accounts.kv_pool.move(moves)
            accounts.evictor._follow(Moves(moves, {}))
            self.world.scheduler._allocator.record_moves()

    @rule(more=st.integers(1, 4))
    def move(self, more: int) -> None:
        """Make a run that is longer than any there is."""
        evictor = self.world.accounts.evictor
        evictor._compact(self.world.accounts.adapter_pool.fragmentation.longest_free_run + more, keep_free=0)
        self.world.scheduler._allocator.record_moves()

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check_integrity()
            self.world.check_lent()

    def _end_load(self, key: AdapterKey, fails: bool = False) -> None:
        world = self.world
        if fails or (key in self.deleted and key in world.loading):
            world.fail(key)
        elif key in world.loading:
            world.load(key)
        else:
            world.copy(key)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.end(self._end_load)


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
test_pool_machine = PoolMachine.TestCase
