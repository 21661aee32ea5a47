"""Snapshots from the scheduler's side: when they are restored and made, who waits for them, what becomes of pages."""

from dataclasses import replace
from typing import Any

import pytest
from bare_scheduler import KEYS, Bench, names

from adapter_store.storage.snapshots import SnapshotName
from lorasrv.config import MemoryOptions
from lorasrv.engine.messages import MakeSnapshot
from lorasrv.engine.snapshot_keeper import SnapshotKeeper
from lorasrv.errors import SnapshotFailure
from lorasrv.memory import snapshots
from lorasrv.outputs import RequestId
from lorasrv.request import FixedPrefix, Peer, RequestStatus
from lorasrv.scheduler_output import NO_SNAPSHOTS

CACHING = MemoryOptions(host_cache_bytes=1 << 20, swap_bytes=1 << 16)
MIA = KEYS[0]
PREFIX = FixedPrefix("mia.1", "prefix:mia", 12)
ZOE = FixedPrefix("zoe.1", "prefix:zoe", 12)
NUM_BYTES = 3 * 1024
FACTS = {"base": "ab", "kernels": "numba"}
PROMPT = 18


class Keeper(Bench):
    """A scheduler with snapshots; what it orders is done by the test."""

    def __init__(self, **options: Any) -> None:
        super().__init__(memory=options.pop("memory", CACHING), facts=options.pop("facts", FACTS), **options)
        self.snapshots = self.accounts.snapshots

    def ask(self, name: str, prefix: FixedPrefix = PREFIX, **options: Any) -> None:
        self.add(name, PROMPT, prefix=prefix, **options)

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
    assert (keeper.snapshots.counters.restored, len(keeper.snapshot_orders)) == (1, 2)


@pytest.mark.parametrize(("tokens", "pages"), [(15, 0), (16, 1), (17, 1), (31, 1), (32, 2), (33, 2)])
def test_whole_pages_are_kept(tokens: int, pages: int) -> None:
    keeper = Keeper(page_size=16, max_num_batched_tokens=64)
    prefix = replace(PREFIX, num_tokens=tokens)
    for number in range(3):
        keeper.add(f"{number}", 40, prefix=prefix, cache_salt=f"{number}")
        keeper.steps_until_idle()
    assert [len(taken) for orders in keeper.snapshot_orders for _, taken in orders.saves] == [pages] * bool(pages)
    assert [keeper.cached(f"{number}") for number in range(3)] == [0, 16 * pages, 16 * pages]


def test_it_is_made_at_the_third_use_if_that_will_pay() -> None:
    for token_s, makes in ((1e-3, True), (1e-9, False)):
        keeper = Keeper()
        keeper.accounts.costs.token.seconds = token_s
        for number in range(3):
            assert not keeper.snapshot_orders
            keeper.ask(f"{number}")
            keeper.steps_until_idle()
        assert [len(orders.saves) for orders in keeper.snapshot_orders] == [1] * makes


@pytest.mark.parametrize("rate", ["token", "restore"])
def test_it_is_restored_if_that_is_faster(name: SnapshotName, rate: str) -> None:
    keeper = Keeper(stored={name: 1000})
    costs = keeper.accounts.costs
    costs.restore.seconds = 12 * costs.token.seconds / (3 * 1024)  # as fast as computing
    if rate == "token":
        costs.token.seconds *= 1.6
    keeper.ask("a")
    keeper.steps_until_idle()
    assert [len(orders.loads) for orders in keeper.snapshot_orders] == ([1] if rate == "token" else [])


@pytest.mark.parametrize("change", ["fact", "salt", "adapter", "tokens", "owner"])
def test_another_prefix_has_another_snapshot(name: SnapshotName, change: str) -> None:
    keeper = Keeper(stored={name: 1000}, facts={**FACTS, "base": "cd"} if change == "fact" else FACTS)
    others = {"salt": {"salt": "prefix:zoe"}, "tokens": {"num_tokens": 8}, "owner": {"owner": "mia.2"}}
    keeper.ask("a", replace(PREFIX, **others.get(change, {})), key=MIA if change == "adapter" else None)
    keeper.run()
    assert not keeper.snapshot_orders


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
    assert keeper.step().snapshots == NO_SNAPSHOTS, "the adapter may find no pages"
    keeper.load(MIA)
    step = keeper.step()
    assert step.orders.copies
    assert step.snapshots.copies, "both are copied at once"
    keeper.copy(MIA)
    keeper.snapshots.on_copied(wanted[0], 1e-5)
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
    assert not keeper.snapshot_orders
    assert keeper.snapshots.want(None, PREFIX, range(PROMPT)) is None


def test_one_that_cannot_be_kept_is_tried_less_and_less() -> None:
    keeper, tried = Keeper(), []
    for use in range(1, 17):
        keeper.ask(f"{use}")
        keeper.steps_until_idle()
        for file, _ in (save for orders in keeper.snapshot_orders for save in orders.saves):
            tried.append(use)
            if use < 12:
                keeper.snapshots.on_save_failed(file.name, "disk")
            elif use == 12:
                keeper.snapshots.on_saved(file.name, 1000, ())
                keeper.snapshots.on_saved(SnapshotName("zoe.1", "new"), 1000, (file.name,))
        keeper.snapshot_orders.clear()
    assert tried == [3, 6, 12, 15]


@pytest.mark.parametrize("is_saved_first", [True, False])
def test_one_whose_version_is_deleted_as_soon_as_it_is_written_is_gone(*, is_saved_first: bool) -> None:
    keeper = Keeper()
    keeper.ask("first")
    keeper.steps_until_idle()
    keeper.snapshots.want(None, PREFIX, range(10, 10 + PROMPT))
    [(file, _)] = keeper.step().snapshots.saves
    # Two threads report this.
    told = [lambda: keeper.snapshots.on_saved(file.name, 1000, ()), lambda: keeper.snapshots.on_removed(file.name)]
    for tell in told if is_saved_first else reversed(told):
        tell()
    assert (keeper.snapshots.num_bytes, keeper.snapshots.is_coming(file.name)) == (0, False)
    keeper.scheduler.check_integrity()


def test_one_is_written_at_a_time() -> None:
    keeper = Keeper()
    for prefix in (PREFIX, ZOE):
        keeper.ask(prefix.owner, prefix)
    keeper.steps_until_idle()
    for prefix in (PREFIX, ZOE):
        keeper.snapshots.want(None, prefix, range(10, 10 + PROMPT))
    for prefix in (PREFIX, ZOE):
        [(file, _)] = keeper.step().snapshots.saves
        assert file.name.owner == prefix.owner
        assert not keeper.step().snapshots.saves
        keeper.snapshots.on_saved(file.name, 1000, ())


@pytest.mark.parametrize(("most", "makes"), [(NUM_BYTES, True), (NUM_BYTES - 1, False)])
def test_one_larger_than_all_may_be_is_not_made(most: int, makes: bool) -> None:
    keeper = Keeper(memory=replace(CACHING, snapshot_bytes=most))
    for number in range(3):
        keeper.ask(f"{number}")
        keeper.steps_until_idle()
    assert (len(keeper.snapshot_orders) == 1) is makes
    assert (keeper.snapshots.want(None, PREFIX, range(10, 10 + PROMPT)) is not None) is makes


@pytest.mark.parametrize("why", ["busy", "slow"])
def test_arriving_ones_count(name: SnapshotName, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    zoe = saved(Keeper(), prefix=ZOE)
    keeper = Keeper(stored={name: 1000, zoe: 1000})
    if why == "busy":
        monkeypatch.setattr(snapshots, "MAX_ARRIVING_BYTES", 2 * NUM_BYTES - 1)
    else:
        costs = keeper.accounts.costs
        costs.restore.seconds = 12 * costs.token.seconds / (2 * NUM_BYTES)  # twice as fast as computing
    keeper.ask("a")
    keeper.ask("b", ZOE)
    assert [file.name for file in keeper.step().snapshots.loads] == [name]
    assert keeper.snapshots.counters.refused == {why: 1}


def test_requests_of_the_same_lane_do_not_wait_for_it(name: SnapshotName) -> None:
    keeper = Keeper(stored={name: 1000})
    keeper.ask("a")
    keeper.add("plain", 3)
    assert names(keeper.step()) == ["plain"]


def test_it_is_given_up_if_its_own_pages_go_for_it(name: SnapshotName) -> None:
    keeper = Keeper(stored={name: 1000}, pages=8)
    keeper.add("first page", 5, max_tokens=1, prefix=replace(PREFIX, num_tokens=4))
    keeper.steps_until_idle()
    keeper.add("long", 16, max_tokens=4)
    keeper.step()
    keeper.ask("a")
    keeper.step()
    keeper.snapshots.on_loaded(name, 1e-5)
    assert (keeper.pool.num_free, keeper.accounts.prefixes and keeper.accounts.prefixes.num_cached) == (2, 1)
    step = keeper.step()
    assert (step.snapshots.cancels, step.snapshots.copies) == ((name,), ())
    keeper.run()


def test_a_call_that_too_many_others_follow_is_answered() -> None:
    keeper, answers = Keeper(), dict[int, object]()
    calls = SnapshotKeeper(keeper.snapshots, None, answers.__setitem__)
    for number in range(snapshots.MAX_WANTED + 1):
        assert not answers
        calls.call(number, MakeSnapshot(None, replace(PREFIX, salt=f"{number}"), tuple(range(PROMPT))))
    calls.take_reports()
    [(number, answer)] = answers.items()
    assert (number, type(answer)) == (0, SnapshotFailure)


def _asking_a_peer() -> tuple[Bench, SnapshotName]:
    """A request whose pages a peer is asked for; nothing has come yet."""
    bench = Bench(pages=30, memory=CACHING, peer_facts={}, max_num_batched_tokens=64)
    bench.add("warm", 3, 2, KEYS[4])
    bench.run()
    bench.add("r", 33, 4, KEYS[4], peer=Peer("http://peer", computes=True))
    [load] = bench.step().snapshots.loads
    return bench, load.name


def test_an_adapter_that_goes_while_pages_are_on_their_way_comes_back() -> None:
    """The pages have no places without it, and the request waits for the pages."""
    bench, name = _asking_a_peer()
    bench.add("big", 105, 4)
    for _ in range(4):
        bench.step()
    assert not bench.accounts.adapter_manager.is_resident(KEYS[4])
    bench.accounts.snapshots.on_loaded(name, 0.01, 8)
    for _ in range(20):
        bench.arrive()
        for copied, _ in bench.step().snapshots.copies:
            bench.accounts.snapshots.on_copied(copied, 0.01)
    assert "r" in bench.ends()


def test_what_comes_for_a_load_that_a_failed_plan_has_dropped_is_nobodys() -> None:
    bench, name = _asking_a_peer()
    bench.scheduler.finish(RequestId("r"), RequestStatus.FINISHED_ABORTED)
    bench.accounts.begin_step(0)  # drops the load; nobody sends the order to cancel it yet
    bench.accounts.snapshots.on_loaded(name, 0.01, 8)
    bench.accounts.snapshots.on_load_failed(name, "refused", is_gone=False)
    assert bench.step().snapshots.cancels == (name,)
