"""The engine's accounts with the parts that they need, and a memory that knows the owner of each byte.

The memory is a dictionary of tags: a token's place has a hash of (adapter, salt, the keys that its row sees, every
token up to it), and 128 bytes of an adapter have a tag of (adapter, index of the 128 bytes). `World` does the work of
the engine's other half: page operations in order, adapter copies at any later time, keys and values when a step
computes them. Everything that a step reads must have the tag that it would have if the request were alone.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from all_drafts import every_draft, scripted
from pool_snapshots import Rows, TagLoader

from adapter_store.spec import AdapterKey
from adapter_store.storage.snapshots import SnapshotName
from lorasrv.config import Limits, LimitShare, MemoryOptions, SchedulerOptions
from lorasrv.engine.input_processor import further_choices
from lorasrv.engine.messages import MakeSnapshot
from lorasrv.engine.snapshot_keeper import SnapshotKeeper
from lorasrv.kv_policy import HOLE, KvPolicy
from lorasrv.memory.memory_manager import MemoryManager, PoolLayout
from lorasrv.memory.prefix_cache import PageChain
from lorasrv.outputs import EngineOutput, RequestId, TokenLogprobs
from lorasrv.request import AdapterTerm, EngineCoreRequest, FixedPrefix, Peer, Request
from lorasrv.sampling_params import MAX_LOGPROBS, BeamOptions, SamplingParams
from lorasrv.scheduler.scheduler import Scheduler
from lorasrv.scheduler_output import (
    CopyPages,
    DropSwap,
    ModelRunnerOutput,
    PageOp,
    PeerSnapshot,
    ScheduledRequest,
    SchedulerOutput,
    SwapIn,
    SwapOut,
)
from lorasrv.speculation.drafter import Draft, Drafter, DraftQuery
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
PEER = Peer("http://peer", computes=True)
PERSONAS = {
    name: FixedPrefix(f"{name}.1", f"prefix:{name}", 5 + 4 * pages) for pages, name in enumerate(["", "a", "b", "ac"])
}
"""Fixed prefixes of personas, by the names of their adapters."""
BEAMS = "beams"


def key_of(name: str, version: int) -> AdapterKey:
    return AdapterKey(f"{ord(name):x}{version:062x}")


def layout_of(key: AdapterKey) -> AdapterLayout:
    """Return a layout of rank 4 to 24, by name: 2 to 8 pages of panels of up to 3 pages."""
    rank = 4 * (int(key[:2], 16) - ord("a") + 1)
    return AdapterLayout((SiteDims(64, (64,)),), (((rank,),),), 2)


def prefix_tokens(persona: FixedPrefix) -> tuple[int, ...]:
    return (100 + persona.num_tokens,) * persona.num_tokens


def _sum_of(keys: Sequence[AdapterKey]) -> AdapterKey | None:
    return AdapterKey("+".join(keys)) if keys else None


def _tag(*content: object) -> int:
    return hash(content) & (2**62 - 1)


def token_tag(message: EngineCoreRequest, adapter: AdapterKey | None, tokens: tuple[int, ...]) -> int:
    """Return the tag of the last of some tokens."""
    place, policy, prefix = (len(tokens) - 1) // PAGE_SIZE, message.kv_policy, message.prefix
    if policy is not None:
        return _tag(adapter, message.cache_salt, policy.salt(place), tokens)
    if prefix is not None and place < prefix.num_tokens // PAGE_SIZE:
        return _tag(adapter, prefix.salt, b"", tokens)
    return _tag(adapter, message.cache_salt, b"", tokens)


class Guesses(Drafter):
    """A drafter whose first tokens are right; their number depends on the request."""

    name = "guesses"

    def __init__(self, says: Callable[[int], int]) -> None:
        self._says = says

    def draft(self, ask: DraftQuery) -> Draft:
        return scripted([self._guess(ask, depth) for depth in range(ask.max_tokens)])

    def _guess(self, ask: DraftQuery, depth: int) -> int:
        position = ask.request.num_tokens + depth
        return self._says(position) + (depth >= (ask.request.number + position) % 4)


@dataclass
class Flight:
    """A step that was submitted, and whether it has been computed."""

    step: SchedulerOutput
    choose: int
    is_computed: bool = False


@dataclass
class World:
    """The accounts and the model of the memory. `late`: a step is planned while the previous one is in flight."""

    pages: int
    options: SchedulerOptions
    memory: MemoryOptions
    drafts: bool = False
    late: bool = False
    # Snapshots on the disk.
    files: dict[SnapshotName, Rows] = field(default_factory=dict)
    # Number of the layout of pages; snapshots of another one are not read.
    layout: int = 0
    outputs: list[EngineOutput] = field(default_factory=list)

    def __post_init__(self) -> None:
        layout = PoolLayout(self.pages, PAGE_SIZE, PAGE_BYTES, num_slabs=1)
        self.on_host: set[AdapterKey] = set()
        self.now = 0.0
        on_host, mode = self.on_host.__contains__, self.options.preemption_mode
        stored = {name: rows.nbytes for name, rows in self.files.items()}
        facts: dict[str, Any] = {"facts": {"layout": self.layout}, "stored": stored, "peer_facts": {}}
        self.accounts = MemoryManager.make(layout, self.memory, mode, on_host, lambda: self.now, **facts)
        self.choose = 0
        speculator = Speculator([Guesses(lambda at: self._says(self.choose, at))] if self.drafts else [], 100)
        self.scheduler = Scheduler(self.options, self.accounts, frozenset({EOS}), speculator)
        self.flights: list[Flight] = []
        self.is_serial = False
        self.units = np.zeros((self.pages, UNITS), dtype=np.int64)
        self.swapped: dict[RequestId, np.ndarray] = {}
        self.loading: set[AdapterKey] = set()
        self.copying: dict[AdapterKey, PlacedAdapter] = {}
        self.snapshots = TagLoader(self.units, self._peer_rows, self.files, self.layout)
        self.told: dict[int, object] = {}
        self.keeper = SnapshotKeeper(self.accounts.snapshots, self.snapshots, self.told.__setitem__)  # type: ignore[arg-type]
        # The pages that peers read.
        self.lent: dict[str, tuple[tuple[int, ...], np.ndarray]] = {}
        self.made_progress, self._sleeps = False, True
        self.messages: dict[RequestId, EngineCoreRequest] = {}
        self.num_calls = 0
        # The next failures: the swaps of a step, the steps in flight, the numbers of a row.
        self.swaps_fail = self.steps_fail = self.row_fails = False

    def ask(
        self,
        ids: tuple[int, ...],
        keys: Sequence[AdapterKey],
        max_tokens: int,
        count: int,
        how: KvPolicy | str | None = None,
        **fields: Any,
    ) -> None:
        """Submit the choices of a request of the base, an adapter or a sum of several, unless it can never fit.

        Args:
            how: `BEAMS`, or the policy of its keys and values.
        """
        terms = tuple(AdapterTerm(key, 1.0, layout_of(key)) for key in keys)
        ignores_eos = fields.pop("ignore_eos", False)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=1, ignore_eos=ignores_eos)
        most, beams = len(ids) + max_tokens, 1
        if isinstance(how, KvPolicy):
            policy = fields["kv_policy"] = how.placed(PAGE_SIZE, self.options.max_num_batched_tokens)
            most = policy.most_tokens(len(ids), most)
            fields.pop("peer", None)
        elif how == BEAMS:
            beams, fields["beams"], sampling = count, BeamOptions(count), replace(sampling, logprobs=MAX_LOGPROBS)
        accounts, layouts = self.accounts, [term.layout for term in terms]
        has_room = sum(map(accounts.adapters.pages_for, layouts)) <= accounts.adapter_pool.num_pages
        if not has_room or beams > self.options.max_num_seqs:
            return
        if beams * accounts.kv.pages_for(most) > accounts.max_kv_pages(layouts):
            return
        first, *others = [RequestId(f"r{len(self.messages) + choice}") for choice in range(count)]
        message = EngineCoreRequest(first, ids, max_tokens, sampling, terms, adapter_key=_sum_of(keys), **fields)
        for each in (message, *further_choices(message, others)):
            self.messages[each.request_id] = each
            self.scheduler.add(each)

    def evict(self, num_pages: int) -> None:
        """Evict an adapter and prefix pages, as if others needed the memory."""
        self.accounts.adapter_manager.evict_lowest()
        if (prefixes := self.accounts.prefixes) is not None:
            for _ in range(num_pages):
                prefixes.evict_orphaned() or prefixes.evict_lowest()

    def make_snapshot(self, keys: Sequence[AdapterKey], persona: FixedPrefix) -> None:
        """Call for a snapshot as an operator does."""
        self.num_calls += 1
        self.keeper.call(self.num_calls, MakeSnapshot(_sum_of(keys), persona, prefix_tokens(persona)))

    def step(self, choose: int) -> None:
        """Plan a step and apply its orders; collect the step in flight, as the engine does. If the engine would sleep
        afterwards, check that the same step once more changes nothing."""
        self.now += 1.0
        self._step(choose)
        if self._sleeps and self.scheduler.has_requests:
            under_way = self._under_way()
            self.scheduler._queue.step -= 1  # waits are counted in steps
            self._step(choose)
            assert self._sleeps, "the engine sleeps, and requests could go on"
            assert self._under_way() == under_way, "the engine sleeps, and something could be loaded"

    def _under_way(self) -> list[Any]:
        return [sorted(self.loading), sorted(self.copying), self.snapshots.under_way()]

    def _step(self, choose: int) -> None:
        self.choose = choose
        if self.flights and self.scheduler.expects_drafts():
            self._collect()
            self.made_progress, self._sleeps = True, False
            return
        self.keeper.take_reports()
        self.snapshots.check_files(self.accounts.snapshots._stored)
        with every_draft():
            step = self.scheduler.schedule(ahead=self.late and not self.is_serial)
        if step.page_ops or step.snapshots.saves:
            self._compute()
        has_tokens = bool(step.requests)
        for op in step.page_ops:
            step = self._apply_or_fail(op, step)
        self.swaps_fail = False
        self._take_orders(step)
        assert step.num_tokens <= self.options.max_num_batched_tokens
        assert len(step.requests) <= self.options.max_num_seqs
        was_in_flight = bool(self.flights)
        if step.requests:
            self.flights.append(Flight(step, choose))
        else:
            self.scheduler.discard(step)
        self.outputs += self.scheduler.take_outputs()
        has_room = self.late and bool(step.requests) and not (self.is_serial or step.is_awaited)
        has_changed = was_in_flight or has_tokens or step.num_preempted > 0
        self.made_progress = has_changed or step.wake_s is not None
        self._sleeps = not has_changed and (step.wake_s is None or step.wake_s > self.now)
        while len(self.flights) > has_room:
            self._collect()

    def _take_orders(self, step: SchedulerOutput) -> None:
        self.loading = (self.loading | set(step.orders.loads)) - set(step.orders.cancels)
        for key, placed in step.orders.copies:
            assert key not in self.copying
            self.copying[key] = placed
        self.keeper.send(step.snapshots)

    def _collect(self) -> None:
        if len(self.flights) > 1 and self.steps_fail:
            self.steps_fail = False
            self._compute()  # the step fails after computing: its results are lost
            for flight in self.flights:
                self.scheduler.discard(flight.step)
            self.flights.clear()
            self.is_serial = True
            self.outputs += self.scheduler.take_outputs()
            return
        if len(self.flights) == 1:
            self.is_serial = False
        self._compute()
        flight = self.flights.pop(0)
        draw = random.Random(flight.step.number)
        said: dict[RequestId, tuple[int, ...]] = {}
        logprobs: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
        masses: dict[RequestId, list[list[float]]] = {}
        for scheduled in flight.step.requests:
            if scheduled.num_observed:
                seen = sum(page != HOLE for page in scheduled.page_table)
                masses[scheduled.request_id] = [[draw.random() for _ in range(seen)]] * scheduled.num_observed
            if not scheduled.samples:
                continue
            if self.row_fails:
                self.row_fails = False
                continue
            said[scheduled.request_id] = self._said(scheduled, flight.choose)
            if self.messages[scheduled.request_id].beams is not None:
                tokens = [*draw.sample(range(30, 90), MAX_LOGPROBS - 1), EOS]
                top = tuple(zip(draw.sample(tokens, MAX_LOGPROBS), range(0, -MAX_LOGPROBS, -1), strict=True))
                logprobs[scheduled.request_id] = (TokenLogprobs(*top[0], top),)
        self.outputs += self.scheduler.update_from_output(flight.step, ModelRunnerOutput(said, logprobs, masses=masses))

    def _says(self, choose: int, position: int) -> int:
        return 3 + (choose + position) % 5

    def _said(self, scheduled: ScheduledRequest, choose: int) -> tuple[int, ...]:
        first = scheduled.start + scheduled.num_known_tokens
        right = [self._says(choose, first + depth) for depth in range(scheduled.num_logit_rows)]
        agreed = (depth for depth, draft in enumerate(scheduled.draft_token_ids) if draft != right[depth])
        return tuple(right[: 1 + next(agreed, len(scheduled.draft_token_ids))])

    def _compute(self) -> None:
        """Compute the oldest step, as late as possible: when its results are needed, or pages must be copied."""
        if self.flights and not self.flights[0].is_computed:
            oldest = self.flights[0]
            oldest.step, oldest.is_computed = self.scheduler.resolve(oldest.step), True
            self._write(oldest.step)

    def load(self, key: AdapterKey) -> None:
        self.loading.discard(key)
        self.on_host.add(key)
        self.accounts.adapter_manager.on_loaded(key)

    def copy(self, key: AdapterKey) -> None:
        placed = self.copying.pop(key)
        for source, target, size in placed.copies(0):
            self._adapter_units(target, size)[:] = self._adapter_tags(key, source, size)
        self.scheduler.on_adapter_copied(key)

    def fail(self, key: AdapterKey) -> None:
        self.loading.discard(key)
        self.copying.pop(key, None)
        self.scheduler.on_adapter_failed(key, "broken")

    def _peer_rows(self, wanted: PeerSnapshot) -> Rows:
        message, rows = wanted.message, np.zeros((wanted.num_pages, UNITS), dtype=np.int64)
        for place in range(wanted.num_pages):
            for slot in range(PAGE_SIZE):
                position = (wanted.first + place) * PAGE_SIZE + slot
                rows[place, slot] = token_tag(message, message.adapter_key, wanted.token_ids[: position + 1])
        return rows

    def end(self, end_load: Callable[[AdapterKey], None]) -> None:
        """Run without further failures: check that every request ends, once, and releases everything that it held."""
        self.swaps_fail = self.steps_fail = self.row_fails = False
        for name in NAMES:
            self.scheduler.quotas.set_share(name, LimitShare())
        for number in range(3000):
            if not (self.scheduler.has_requests or self.flights):
                break
            # Like the engine's thread, which sleeps without progress until a load or a copy has ended.
            arriving, coming = sorted(self.loading | self.copying.keys()), self.snapshots.under_way()
            assert arriving or coming or number < 2 or self.made_progress, "the engine sleeps, and requests wait"
            for snapshot in coming:
                self.snapshots.end(snapshot, number % 4)
            for key in arriving:
                end_load(key)
            self.step(number)
        while coming := self.snapshots.under_way():
            for snapshot in coming:
                self.snapshots.end(snapshot, 1)
            self.step(0)
        for lease in self.lent:
            self.accounts.peer_pages.end(lease)
        self.step(0)
        ended = [output.request_id for output in self.outputs if output.finish_reason is not None]
        assert sorted(ended) == sorted(self.messages), "every accepted request ends exactly once"
        assert self.accounts.kv.num_pages == 0
        assert not self.accounts.adapters.pins()
        assert not self.swapped
        self.scheduler.check_integrity()

    def lend(self, request: Request) -> None:
        """Lend the pages of a request to a peer. Pages moved between steps are copied first."""
        left = self.scheduler.take_page_ops()
        if left:
            self._compute()
        for op in left:
            self._apply(op)
        message = self.messages[request.request_id]
        chain = PageChain.of(PAGE_SIZE, request.adapter_key, message.cache_salt, prefix=message.prefix)
        tokens = request.token_ids
        digests = [chain.hash(tokens, number) for number in range(len(tokens) // PAGE_SIZE)]
        lease = self.accounts.peer_pages.offer(digests)
        if lease.pages:
            self._compute()
            self.lent[lease.lease_id] = lease.pages, self.units[list(lease.pages)].copy()

    def check_lent(self) -> None:
        """Check that lent pages do not change while peers may read them."""
        self.lent = {lease: held for lease, held in self.lent.items() if lease in self.accounts.kv.leases()}
        for pages, content in self.lent.values():
            assert (self.units[list(pages), :PAGE_SIZE] == content[:, :PAGE_SIZE]).all(), "a lent page has changed"

    def _apply_or_fail(self, op: PageOp, step: SchedulerOutput) -> SchedulerOutput:
        """Apply an operation. After a failed swap, the step runs without its request."""
        if not self.swaps_fail or not isinstance(op, SwapOut | SwapIn):
            self._apply(op)
            return step
        self.swapped.pop(op.request_id, None)
        return self.scheduler.on_swap_failed(op.request_id, step)

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
                self.swapped.pop(op.request_id, None)  # absent if swapping out failed

    def _write(self, step: SchedulerOutput) -> None:
        """Write the tags of all rows before any reads, as in a layer; if two rows write one page, a read detects it."""
        filling = {page for placed in self.copying.values() for page in placed.pages}
        filling |= {page for _, copies in self.snapshots.filling.values() for _, page in copies}
        for scheduled in step.requests:
            seen = {page for place, page in enumerate(scheduled.page_table) if place not in self._hole(scheduled)}
            assert filling.isdisjoint(seen), "a request has a page that is being filled"
            for position in range(scheduled.start, scheduled.start + len(scheduled.token_ids)):
                page = scheduled.page_table[position // PAGE_SIZE]
                assert page != HOLE, "a token has no page"
                self.units[page, position % PAGE_SIZE] = self._token(scheduled, position)
        for scheduled in step.requests:
            self._check_reads(scheduled)
            for key, _ in scheduled.terms:
                self._check_adapter(key, step.placements[key])

    def _check_reads(self, scheduled: ScheduledRequest) -> None:
        request = self.scheduler._queue.requests.get(scheduled.request_id)
        if request is not None:
            served_as = self.messages[scheduled.request_id].adapter_key
            assert scheduled.adapter_key == (None if request.fell_back else served_as)
        for position in range(scheduled.start + len(scheduled.token_ids)):
            page = scheduled.page_table[position // PAGE_SIZE]
            if page == HOLE or position // PAGE_SIZE in self._hole(scheduled):
                continue
            assert self.units[page, position % PAGE_SIZE] == self._token(scheduled, position), (
                f"{scheduled.request_id} reads another's token at {position}"
            )

    def _hole(self, scheduled: ScheduledRequest) -> range:
        """Return the places of pages that no row of the scheduled request sees."""
        policy = self.messages[scheduled.request_id].kv_policy
        return range(0) if policy is None else policy.hole(scheduled.start)

    def _check_adapter(self, key: AdapterKey, placed: PlacedAdapter) -> None:
        for panel, offset in enumerate(placed.offsets[0].tolist()):
            size = int(placed.layout.panel_bytes[0][panel])
            expected = self._adapter_tags(key, int(placed.layout.packed_offsets[0][panel]), size)
            assert (self._adapter_units(offset, size) == expected).all(), f"adapter {key} is not what its pages hold"

    def _token(self, scheduled: ScheduledRequest, position: int) -> int:
        tokens = (*scheduled.history[: scheduled.start], *scheduled.token_ids)
        return token_tag(self.messages[scheduled.request_id], scheduled.adapter_key, tokens[: position + 1])

    def _adapter_units(self, offset: int, size: int) -> np.ndarray:
        return self.units.reshape(-1)[offset // ALIGNMENT_BYTES : (offset + size) // ALIGNMENT_BYTES]

    def _adapter_tags(self, key: AdapterKey, source: int, size: int) -> np.ndarray:
        first = source // ALIGNMENT_BYTES
        return np.array([_tag(key, first + unit) for unit in range(size // ALIGNMENT_BYTES)])
