"""Snapshots from the scheduler's side: when they are restored and made, who waits for them, what becomes of pages."""

from dataclasses import replace
from typing import Any

import pytest
from bare_scheduler import KEYS, Bench, names

from adapter_store.storage.snapshots import SnapshotName
from lorasrv.config import MemoryOptions
from lorasrv.outputs import RequestId
from lorasrv.request import FixedPrefix, RequestStatus
from lorasrv.scheduler_output import NO_SNAPSHOTS, SnapshotOrders

CACHING = MemoryOptions(host_cache_bytes=1 << 20, swap_bytes=1 << 16)
MIA = KEYS[0]
PREFIX = FixedPrefix("mia.1", "prefix:mia", 12)
FACTS = {"base": "ab", "kernels": "numba"}
PROMPT = 18


class Keeper(Bench):
    """A scheduler with snapshots; what it orders is done by the test."""

    def __init__(self, **options: Any) -> None:
        super().__init__(memory=options.pop("memory", CACHING), facts=options.pop("facts", FACTS), **options)
        self.snapshots = self.books.snapshots
        self.ordered: list[SnapshotOrders] = []

    def ask(self, name: str, prefix: FixedPrefix = PREFIX, **options: Any) -> None:
        self.add(name, PROMPT, prefix=prefix, **options)

    def step(self, token: int = 7) -> Any:
        step = super().step(token)
        if step.snapshots != NO_SNAPSHOTS:
            self.ordered.append(step.snapshots)
        return step

    def steps_until_idle(self) -> None:
        for _ in range(20):
            self.step()

    def cached(self, name: str) -> int:
        return next(o.timing.num_cached_tokens for o in self.outputs if o.request_id == name and o.timing)


def saved(keeper: Keeper, **options: Any) -> SnapshotName:
    """Let a keeper make the snapshot of a prefix, and tell it that it is on the disk."""
    keeper.ask("first", **options)
    keeper.steps_until_idle()
    made = keeper.snapshots.want(options.get("key"), options.get("prefix", PREFIX), range(10, 10 + PROMPT))
    assert made is not None
    [(file, pages)] = keeper.step().snapshots.saves
    assert (file.name, file.num_pages, len(pages)) == (made[0], 3, 3)
    keeper.snapshots.on_saved(file.name, 1000, ())
    return file.name


@pytest.fixture
def name() -> SnapshotName:
    return saved(Keeper())


def test_a_request_waits_for_its_snapshot_and_others_wait_with_it(name: SnapshotName) -> None:
    keeper = Keeper(stored={name: 1000})
    keeper.ask("a")
    keeper.ask("b", cache_salt="another's")
    keeper.add("other", 3, adapter_id="other")
    step = keeper.step()
    assert ([file.name for file in step.snapshots.loads], names(step)) == ([name], ["other"])
    keeper.snapshots.on_loaded(name, 1e-5)
    step = keeper.step()
    [(copied, pages)] = step.snapshots.copies
    assert (copied, [place for place, _ in pages], names(step)) == (name, [0, 1, 2], ["other"])
    keeper.snapshots.on_copied(name, 1e-5)
    keeper.steps_until_idle()
    assert (keeper.cached("a"), keeper.cached("b")) == (12, 12)
    assert keeper.ends().keys() == {"a", "b", "other"}
    assert (keeper.snapshots.counters.restored, len(keeper.ordered)) == (1, 2)


@pytest.mark.parametrize(("tokens", "pages"), [(15, 0), (16, 1), (17, 1), (31, 1), (32, 2), (33, 2)])
def test_whole_pages_are_kept(tokens: int, pages: int) -> None:
    keeper = Keeper(page_size=16, max_num_batched_tokens=64)
    prefix = replace(PREFIX, num_tokens=tokens)
    for number in range(3):
        keeper.add(f"{number}", 40, prefix=prefix, cache_salt=f"{number}")
        keeper.steps_until_idle()
    assert [len(taken) for orders in keeper.ordered for _, taken in orders.saves] == [pages] * bool(pages)
    assert [keeper.cached(f"{number}") for number in range(3)] == [0, 16 * pages, 16 * pages]


def test_it_is_made_at_the_third_use_if_that_will_pay() -> None:
    for token_s, makes in ((1e-3, True), (1e-9, False)):
        keeper = Keeper()
        keeper.books.costs.token.seconds = token_s
        for number in range(3):
            assert not keeper.ordered
            keeper.ask(f"{number}")
            keeper.steps_until_idle()
        assert [len(orders.saves) for orders in keeper.ordered] == [1] * makes


@pytest.mark.parametrize("rate", ["token", "restore"])
def test_it_is_restored_if_that_is_faster(name: SnapshotName, rate: str) -> None:
    keeper = Keeper(stored={name: 1000})
    costs = keeper.books.costs
    costs.restore.seconds = 12 * costs.token.seconds / (3 * 1024)  # as fast as computing
    if rate == "token":
        costs.token.seconds *= 1.6
    keeper.ask("a")
    keeper.steps_until_idle()
    assert [len(orders.loads) for orders in keeper.ordered] == ([1] if rate == "token" else [])


@pytest.mark.parametrize("change", ["fact", "salt", "adapter", "tokens", "owner"])
def test_another_prefix_has_another_snapshot(name: SnapshotName, change: str) -> None:
    keeper = Keeper(stored={name: 1000}, facts={**FACTS, "base": "cd"} if change == "fact" else FACTS)
    others = {"salt": {"salt": "prefix:zoe"}, "tokens": {"num_tokens": 8}, "owner": {"owner": "mia.2"}}
    keeper.ask("a", replace(PREFIX, **others.get(change, {})), key=MIA if change == "adapter" else None)
    keeper.run()
    assert not keeper.ordered


def test_one_that_cannot_be_read_is_computed_and_forgotten(name: SnapshotName) -> None:
    keeper = Keeper(stored={name: 1000})
    keeper.ask("a")
    keeper.step()
    keeper.snapshots.on_load_failed(name, "damaged", is_gone=True)
    keeper.steps_until_idle()
    assert (keeper.cached("a"), keeper.snapshots.num_bytes) == (0, 0)
    assert keeper.snapshots.counters.refused == {"damaged": 1}


def test_it_is_loaded_beside_its_adapter_and_placed_with_it() -> None:
    first = Keeper()
    first.ask("first", key=MIA)
    first.run()
    wanted = first.snapshots.want(MIA, PREFIX, range(10, 10 + PROMPT))
    assert wanted is not None
    keeper = Keeper(stored={wanted[0]: 1000})
    keeper.ask("a", key=MIA)
    step = keeper.step()
    assert (len(step.snapshots.loads), step.orders.loads) == (1, (MIA,))
    keeper.snapshots.on_loaded(wanted[0], 1e-5)
    assert keeper.step().snapshots == NO_SNAPSHOTS
    keeper.load(MIA)
    assert keeper.step().orders.copies
    assert keeper.step().snapshots.copies
    keeper.snapshots.on_copied(wanted[0], 1e-5)
    keeper.step()
    assert keeper.books.prefixes is not None
    assert keeper.books.prefixes.num_orphaned == 3
    keeper.copy(MIA)
    keeper.run()
    assert keeper.cached("a") == 12


def test_nobody_waits_for_pages_that_are_not_there(name: SnapshotName) -> None:
    keeper = Keeper(stored={name: 1000}, pages=8)
    keeper.add("long", 20, max_tokens=8)
    keeper.step()
    keeper.ask("a")
    keeper.step()
    keeper.snapshots.on_loaded(name, 1e-5)
    step = keeper.step()
    assert (step.snapshots.cancels, step.snapshots.copies) == ((name,), ())
    keeper.run()
    assert keeper.ends().keys() == {"long", "a"}


def test_an_aborted_request_leaves_its_snapshot_to_the_next(name: SnapshotName) -> None:
    keeper = Keeper(stored={name: 1000})
    keeper.ask("a")
    keeper.step()
    keeper.scheduler.finish(RequestId("a"), RequestStatus.FINISHED_ABORTED)
    keeper.snapshots.on_loaded(name, 1e-5)
    assert keeper.step().snapshots.copies
    keeper.snapshots.on_copied(name, 1e-5)
    keeper.ask("b")
    keeper.steps_until_idle()
    assert keeper.cached("b") == 12


def test_pages_of_the_fixed_prefix_are_shared_and_those_behind_it_are_not() -> None:
    keeper = Keeper()
    for number, salt in enumerate(("ann", "bob", "ann")):
        keeper.ask(f"{number}", cache_salt=salt)
        keeper.steps_until_idle()
    keeper.add("guess", PROMPT, cache_salt="ann")
    keeper.steps_until_idle()
    assert [keeper.cached(name) for name in ("0", "1", "2", "guess")] == [0, 12, 16, 0]


@pytest.mark.parametrize("off", [{"facts": None}, {"memory": replace(CACHING, enable_prefix_caching=False)}])
def test_nothing_is_kept_where_it_is_off(off: dict[str, Any]) -> None:
    keeper = Keeper(**off)
    for number in range(4):
        keeper.ask(f"{number}")
        keeper.steps_until_idle()
    assert not keeper.ordered
    assert keeper.snapshots.want(None, PREFIX, range(PROMPT)) is None
