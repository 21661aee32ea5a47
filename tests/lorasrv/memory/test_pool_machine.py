"""Pool, caches, tiers and scheduler together, in any order of events, against a memory that says whose each byte is.

The model's memory is a dictionary's worth of tags: a token's place holds a hash of (adapter, salt, every token up to
it), 128 bytes of an adapter hold (adapter, which 128 bytes). The machine does what the engine's other half would do:
page operations in their order, adapter copies at any later time, keys and values when a step computes them. Whatever a
step reads must carry the tag that it would have, had the request been alone. Every accepted request ends exactly once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from all_drafts import every_draft, scripted
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mispredict import expect_short_answers

from adapter_store.spec import AdapterKey
from adapter_store.storage.snapshots import SnapshotName
from lorasrv.config import POLICIES, Limits, MemoryOptions, SchedulerOptions
from lorasrv.memory.adapter_manager import AdapterState
from lorasrv.memory.eviction import Moves
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.memory.prefix_cache import PageChain
from lorasrv.outputs import EngineOutput, RequestId
from lorasrv.request import AdapterTerm, EngineCoreRequest, OnCold, Peer, Request, RequestStatus
from lorasrv.sampling_params import SamplingParams
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.scheduler_output import (
    CopyPages,
    DropSwap,
    PageOp,
    PeerSnapshot,
    ScheduledRequest,
    SchedulerOutput,
    SwapIn,
    SwapOut,
)
from lorasrv.speculation.drafter import Draft, DraftAsk, Drafter
from lorasrv.speculation.speculator import Speculator
from sgmv_kernels.formats.adapter_panels import AdapterLayout, PlacedAdapter, SiteDims
from sgmv_kernels.formats.kv_format import ALIGNMENT_BYTES

PAGE_SIZE = 4
PAGE_BYTES = 1024
UNITS = PAGE_BYTES // ALIGNMENT_BYTES
EOS = 2
NAMES = "abcdef"
LIMITS = [
    *(Limits(), Limits(), Limits(weight=3.0)),
    *(Limits(max_running=1, max_queued=3), Limits(tokens_per_s=6.0), Limits(resident_bytes=14 * 1024)),
]
MAX_TOKENS = 40
PEER = Peer("http://peer", computes=True)


def _key(name: str, version: int) -> AdapterKey:
    return AdapterKey(f"{ord(name):x}{version:062x}")


def _layout(key: AdapterKey) -> AdapterLayout:
    """Ranks 4 to 24 by name: 2 to 8 pages of panels of up to 3 pages."""
    rank = 4 * (int(key[:2], 16) - ord("a") + 1)
    return AdapterLayout((SiteDims(64, (64,)),), (((rank,),),), 2)


def _tag(*content: object) -> int:
    return hash(content) & (2**62 - 1)


class Guesses(Drafter):
    """Drafts of which the first are right, how many depends on the request."""

    name = "guesses"

    def __init__(self, says: Callable[[int], int]) -> None:
        self._says = says

    def draft(self, ask: DraftAsk) -> Draft:
        return scripted([self._guess(ask, depth) for depth in range(ask.max_tokens)])

    def _guess(self, ask: DraftAsk, depth: int) -> int:
        position = ask.request.num_tokens + depth
        return self._says(position) + (depth >= (ask.request.number + position) % 4)


@dataclass
class Submitted:
    """A step that is to be computed, and what its requests had when it was planned."""

    step: SchedulerOutput
    choose: int
    tokens: dict[RequestId, tuple[int, ...]]


@dataclass
class World:
    """The engine's books and the model of its memory. `late`: a step is computed when the next one is planned."""

    pages: int
    options: SchedulerOptions
    memory: MemoryOptions
    drafts: bool = False
    late: bool = False
    outputs: list[EngineOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = PoolLayout(self.pages, PAGE_SIZE, PAGE_BYTES, num_slabs=1)
        self.on_host: set[AdapterKey] = set()
        self.now = 0.0
        on_host, mode = self.on_host.__contains__, self.options.preemption_mode
        self.books = MemoryManager.make(layout, self.memory, mode, on_host, lambda: self.now, peer_facts={})
        self.choose = 0
        speculator = Speculator([Guesses(lambda at: self._says(self.choose, at))] if self.drafts else [], 100)
        self.scheduler = Scheduler(self.options, self.books, frozenset({EOS}), on_host, speculator)
        self.submitted: list[Submitted] = []
        self.units = np.zeros((self.pages, UNITS), dtype=np.int64)
        self.swapped: dict[RequestId, np.ndarray] = {}
        self.loading: set[AdapterKey] = set()
        self.copying: dict[AdapterKey, PlacedAdapter] = {}
        # What peers are asked for, the pages that are filled with it, and those that peers read.
        self.fetching: dict[SnapshotName, PeerSnapshot] = {}
        self.fetched: dict[SnapshotName, PeerSnapshot] = {}
        self.filling: dict[SnapshotName, tuple[PeerSnapshot, tuple[tuple[int, int], ...]]] = {}
        self.lent: dict[str, tuple[tuple[int, ...], np.ndarray]] = {}
        self.made_progress = False
        self.salts: dict[RequestId, str] = {}
        self.served_as: dict[RequestId, AdapterKey | None] = {}

    def submit(self, message: EngineCoreRequest) -> None:
        self.salts[message.request_id] = message.cache_salt
        self.served_as[message.request_id] = message.adapter_key
        self.scheduler.add(message)

    def step(self, choose: int) -> SchedulerOutput:
        self.now += 1.0
        self.choose = choose
        with every_draft():
            step = self.scheduler.schedule()
        if step.page_ops:
            self._compute()
        for op in step.page_ops:
            self._apply(op)
        self.loading = (self.loading | set(step.orders.loads)) - set(step.orders.cancels)
        for key, placed in step.orders.copies:
            assert key not in self.copying
            self.copying[key] = placed
        for name in step.snapshots.cancels:
            assert (self.fetching.pop(name, None) or self.fetched.pop(name, None)) is not None
        self.fetching |= {wanted.name: wanted for wanted in step.snapshots.loads if isinstance(wanted, PeerSnapshot)}
        for name, copies in step.snapshots.copies:
            self.filling[name] = self.fetched.pop(name), copies
        assert step.num_tokens <= self.options.max_num_batched_tokens
        assert len(step.scheduled) <= self.options.max_num_seqs
        tokens = {s.request_id: (*s.history, *s.draft_token_ids) for s in step.scheduled}
        self.submitted.append(Submitted(step, choose, tokens))
        self.made_progress = len(self.submitted) > 1 or step.num_preempted > 0 or step.wake_s is not None
        self.made_progress |= bool(step.scheduled)
        while len(self.submitted) > (self.late and bool(step.scheduled)):
            self._compute(1)
            oldest = self.submitted.pop(0)
            said = {s.request_id: self._said(s, oldest.choose) for s in oldest.step.scheduled if s.samples}
            self.outputs += self.scheduler.update_from_output(oldest.step, said)
        return step

    def _says(self, choose: int, position: int) -> int:
        return 3 + (choose + position) % 5

    def _said(self, share: ScheduledRequest, choose: int) -> tuple[int, ...]:
        first = share.start + share.num_known_tokens
        right = [self._says(choose, first + depth) for depth in range(share.num_logit_rows)]
        agreed = (depth for depth, draft in enumerate(share.draft_token_ids) if draft != right[depth])
        return tuple(right[: 1 + next(agreed, len(share.draft_token_ids))])

    def _compute(self, most: int | None = None) -> None:
        """As late as possible: when the results are wanted, or pages are to be copied."""
        for submitted in self.submitted[:most]:
            if submitted.tokens:
                self._write(submitted.step, submitted.tokens)
                submitted.tokens = {}

    def load(self, key: AdapterKey) -> None:
        self.loading.discard(key)
        self.on_host.add(key)
        self.books.adapter_manager.on_loaded(key)

    def copy(self, key: AdapterKey) -> None:
        placed = self.copying.pop(key)
        for source, target, size in placed.copies(0):
            self._adapter_units(target, size)[:] = self._adapter_tags(key, source, size)
        self.scheduler.on_adapter_copied(key)

    def fail(self, key: AdapterKey) -> None:
        self.loading.discard(key)
        self.copying.pop(key, None)
        self.scheduler.on_adapter_failed(key, "broken")

    def fetch(self, name: SnapshotName, count: int) -> None:
        """A peer has sent so many pages, or failed."""
        wanted = self.fetching.pop(name)
        if count:
            self.fetched[name] = wanted
            self.books.snapshots.on_loaded(name, 1e-3, min(count, wanted.num_pages))
        else:
            self.books.snapshots.on_load_failed(name, "cut", is_gone=False)

    def fill(self, name: SnapshotName, fails: bool) -> None:
        """What a peer has sent is in its pages."""
        wanted, copies = self.filling.pop(name)
        if fails:
            self.books.snapshots.on_load_failed(name, "copy", is_gone=False)
            return
        key, salt = wanted.message.adapter_key, wanted.message.cache_salt
        for place, page in copies:
            for slot in range(PAGE_SIZE):
                end = (wanted.first + place) * PAGE_SIZE + slot + 1
                self.units[page, slot] = _tag(key, salt, wanted.token_ids[:end])
        self.books.snapshots.on_copied(name, 1e-3)

    def lend(self, request: Request) -> None:
        """A peer asks for the pages of a request. What has been moved between steps is copied first."""
        left = self.scheduler.take_page_ops()
        if left:
            self._compute()
        for op in left:
            self._apply(op)
        chain = PageChain.of(PAGE_SIZE, request.adapter_key, self.salts[request.request_id])
        tokens = request.token_ids
        digests = [chain.hash(tokens, number) for number in range(len(tokens) // PAGE_SIZE)]
        lease = self.books.exchange.offer(digests)
        if lease.pages:
            self._compute()
            self.lent[lease.lease_id] = lease.pages, self.units[list(lease.pages)].copy()

    def check_lent(self) -> None:
        """What peers read does not change while they may read it."""
        self.lent = {lease: held for lease, held in self.lent.items() if lease in self.books.kv.leases()}
        for pages, content in self.lent.values():
            assert (self.units[list(pages), :PAGE_SIZE] == content[:, :PAGE_SIZE]).all(), "a lent page has changed"

    def _apply(self, op: PageOp) -> None:
        match op:
            case CopyPages():
                sources, targets = ([c[i] for c in op.copies] for i in (0, 1))
                assert len(set(targets)) == len(targets)
                assert set(targets).isdisjoint(sources)
                self.units[targets] = self.units[sources]
            case SwapOut():
                self.swapped[op.request_id] = self.units[list(op.pages)].copy()
            case SwapIn():
                self.units[list(op.pages)] = self.swapped.pop(op.request_id)
            case DropSwap():
                del self.swapped[op.request_id]

    def _write(self, step: SchedulerOutput, tokens: dict[RequestId, tuple[int, ...]]) -> None:
        """All write before any reads, as rows of a layer do; a page that two write is caught by what they read."""
        filling = {page for placed in self.copying.values() for page in placed.pages}
        filling |= {page for _, copies in self.filling.values() for _, page in copies}
        for share in step.scheduled:
            assert filling.isdisjoint(share.page_table), "a request has a page that is being filled"
            for position in range(share.start, share.start + len(share.token_ids)):
                tag = self._token(share, tokens, position)
                self.units[share.page_table[position // PAGE_SIZE], position % PAGE_SIZE] = tag
        for share in step.scheduled:
            self._check_reads(share, tokens)
            for key, _ in share.terms:
                self._check_adapter(key, step.placements[key])

    def _check_reads(self, share: ScheduledRequest, tokens: dict[RequestId, tuple[int, ...]]) -> None:
        request = self.scheduler._queue.requests.get(share.request_id)
        if request is not None:
            assert share.adapter_key == (None if request.fell_back else self.served_as[share.request_id])
        for position in range(share.start + len(share.token_ids)):
            found = self.units[share.page_table[position // PAGE_SIZE], position % PAGE_SIZE]
            assert found == self._token(share, tokens, position), (
                f"{share.request_id} reads another's token at {position}"
            )

    def _check_adapter(self, key: AdapterKey, placed: PlacedAdapter) -> None:
        for panel, offset in enumerate(placed.offsets[0].tolist()):
            size = int(placed.layout.panel_bytes[0][panel])
            expected = self._adapter_tags(key, int(placed.layout.packed_offsets[0][panel]), size)
            assert (self._adapter_units(offset, size) == expected).all(), f"adapter {key} is not what its pages hold"

    def _token(self, share: ScheduledRequest, tokens: dict[RequestId, tuple[int, ...]], position: int) -> int:
        return _tag(share.adapter_key, self.salts[share.request_id], tokens[share.request_id][: position + 1])

    def _adapter_units(self, offset: int, size: int) -> np.ndarray:
        return self.units.reshape(-1)[offset // ALIGNMENT_BYTES : (offset + size) // ALIGNMENT_BYTES]

    def _adapter_tags(self, key: AdapterKey, source: int, size: int) -> np.ndarray:
        first = source // ALIGNMENT_BYTES
        return np.array([_tag(key, first + unit) for unit in range(size // ALIGNMENT_BYTES)])


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
        seats = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_seqs + budget}
        scheduler = SchedulerOptions(**seats, **options, key_limits=LIMITS[2])
        self.world = World(pages, scheduler, MemoryOptions(swap_bytes=20 * PAGE_BYTES, **memory), drafts, late)
        if is_misled:
            expect_short_answers(self.world.scheduler.predictor)
        self.names = dict.fromkeys(NAMES, 0)
        self.deleted: set[AdapterKey] = set()
        self.accepted: list[RequestId] = []

    def _fits(self, layouts: Sequence[AdapterLayout], total: int) -> bool:
        books = self.world.books
        if sum(map(books.adapters.pages_for, layouts)) > books.adapter_pool.num_pages:
            return False
        return books.kv.pages_for(total) <= books.max_kv_pages(layouts)

    @rule(
        prefix=st.integers(0, 2),
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
    )
    def submit(self, prefix, shared, own, max_tokens, names, salt, on_cold, choices, who) -> None:
        """Of the base, an adapter or a sum of several."""
        ids = tuple(10 + prefix for _ in range(shared)) + tuple(20 + (own + i) % 3 for i in range(own))
        keys = [_key(name, self.names[name]) for name in names]
        terms = tuple(AdapterTerm(key, 1.0, _layout(key)) for key in keys)
        if not self._fits([term.layout for term in terms], len(ids) + max_tokens):
            return
        key = AdapterKey("+".join(keys)) if keys else None
        first: RequestId | None = None
        for choice in range(choices):
            rid = RequestId(f"r{len(self.accepted)}")
            self.accepted.append(rid)
            sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=choice)
            how = {"on_cold": on_cold, "cache_salt": salt, "fork_of": first, "adapter_id": names[:1], **who}
            self.world.submit(EngineCoreRequest(rid, ids, max_tokens, sampling, key, terms, **how))
            first = first or rid

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

    @precondition(lambda self: self.world.fetching or self.world.filling)
    @rule(data=st.data(), count=st.sampled_from([0, 1, 3, 99]))
    def receive(self, data: st.DataObject, count: int) -> None:
        """A peer has sent pages, or they are in the pool."""
        name = data.draw(st.sampled_from(sorted({*self.world.fetching, *self.world.filling})))
        self._end_fetch(name, count)

    @precondition(lambda self: self.world.scheduler.num_running)
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        self.world.lend(data.draw(st.sampled_from(self.world.scheduler._queue.running)))

    @precondition(lambda self: self.world.lent)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        self.world.books.exchange.end(data.draw(st.sampled_from(sorted(self.world.lent))))

    @precondition(lambda self: self.world.scheduler.has_requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.world.scheduler._queue.requests)))
        self.world.scheduler.finish(rid, RequestStatus.FINISHED_ABORTED)

    @rule(name=st.sampled_from(NAMES), limits=st.sampled_from([None, *LIMITS]))
    def limit(self, name: str, limits: Limits | None) -> None:
        self.world.scheduler.quotas.set_limits(name, limits)

    @rule()
    def evict(self) -> None:
        self.world.books.adapter_manager.evict_lowest()

    @rule(name=st.sampled_from(NAMES))
    def replace(self, name: str) -> None:
        self.names[name] += 1

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        """The content is gone from the store and from host memory; who has it in the pool goes on with it."""
        key = _key(name, self.names[name])
        if self.world.books.adapter_manager.state(key) in (AdapterState.ON_DISK, AdapterState.RESIDENT):
            self.deleted.add(key)
            self.world.on_host.discard(key)

    @rule(name=st.sampled_from(NAMES), seconds=st.sampled_from([0.0, 5.0, 1e9, None]))
    def warm_or_pin(self, name: str, seconds: float | None) -> None:
        key = _key(name, self.names[name])
        manager, layout = self.world.books.adapter_manager, _layout(key)
        most = self.world.books.adapter_pool.num_pages // 2
        room = most - self.world.books.adapters.pages_for(layout)
        if seconds is None and manager.num_pinned_pages() <= room:
            manager.pin(key, layout)
        elif seconds is not None and room >= 0:
            manager.reserve(key, layout, self.world.now + seconds)

    @rule(name=st.sampled_from(NAMES))
    def unpin(self, name: str) -> None:
        self.world.books.adapter_manager.unpin(_key(name, self.names[name]))

    @precondition(lambda self: self.world.scheduler.num_running and not self.world.submitted)
    @rule()
    def preempt(self) -> None:
        self.world.scheduler._planner.preempt(self.world.scheduler._queue.running[-1])

    @rule(data=st.data())
    def scatter(self, data: st.DataObject) -> None:
        """Move some pages of keys and values to wherever, so that free pages lie scattered."""
        books = self.world.books
        cached = books.prefixes.references() if books.prefixes is not None else ()
        used = sorted({*books.kv.references(), *cached} - set(books.kv.fixed()))
        free = sorted(page for first, n in books.kv_pool.free_runs() for page in range(first, first + n))
        count = data.draw(st.integers(0, min(4, len(used), len(free))))
        old = data.draw(st.permutations(used))[:count]
        new = data.draw(st.permutations(free))[:count]
        for page in new:
            books.kv_pool.take_page(page)
        moves = dict(zip(old, new, strict=True))
        if moves:
            books.kv_pool.move(moves)
            books.evictor._follow(Moves(moves, {}))
            self.world.scheduler._allocator.record_moves()

    @rule(more=st.integers(1, 4))
    def move(self, more: int) -> None:
        """Make a run that is longer than any there is."""
        evictor = self.world.books.evictor
        evictor._compact(self.world.books.adapter_pool.fragmentation.longest_free_run + more, keep_free=0)
        self.world.scheduler._allocator.record_moves()

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check_integrity()
            self.world.check_lent()

    def _end_fetch(self, name: SnapshotName, count: int) -> None:
        if name in self.world.fetching:
            self.world.fetch(name, count)
        else:
            self.world.fill(name, fails=not count)

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
        world = self.world
        for number in range(3000):
            if not world.scheduler.has_requests:
                break
            # As the engine's thread does: without progress it sleeps until a load or a copy has ended.
            arriving = sorted(world.loading | world.copying.keys())
            coming = sorted({*world.fetching, *world.filling})
            assert arriving or coming or number < 2 or world.made_progress, (
                "the engine sleeps, and requests wait for ever"
            )
            for name in coming:
                self._end_fetch(name, count=number % 4)
            for key in arriving:
                self._end_load(key)
            world.step(number)
        for name in sorted({*world.fetching, *world.filling}):
            self._end_fetch(name, count=0)
        for lease in world.lent:
            world.books.exchange.end(lease)
        world.step(0)
        ended = [o.request_id for o in world.outputs if o.finish_reason is not None]
        assert sorted(ended) == sorted(self.accepted), "every accepted request ends exactly once"
        assert world.books.kv.num_pages == 0
        assert not world.books.adapters.pins()
        assert not world.swapped
        world.scheduler.check_integrity()


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
test_pool_machine = PoolMachine.TestCase
