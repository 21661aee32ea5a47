"""Leases of pages, and what is taken from peers, from the scheduler's side; accounts are checked after every step."""

from typing import Any

import pytest
from bare_scheduler import KEYS, Bench, names

from lorasrv.config import MemoryOptions
from lorasrv.memory import peer_pages
from lorasrv.memory.cost_model import CostModel
from lorasrv.memory.peer_pages import LEASE_S, MAX_WAIT_S, MIN_WAIT_S, PATIENCE
from lorasrv.memory.prefix_cache import page_hashes, root_hash
from lorasrv.outputs import RequestId
from lorasrv.request import Peer, RequestStatus
from lorasrv.scheduler_output import NO_SNAPSHOTS, PeerSnapshot

CACHING = MemoryOptions(host_cache_bytes=1 << 20, swap_bytes=1 << 16)
MIA = KEYS[0]
FACTS = {"base": "ab"}
PROMPT = 30
WHOLE = 7
PEER = Peer("http://peer:1", computes=True)


class Server(Bench):
    """A scheduler of a server that exchanges pages of four tokens; what it orders is done by the test."""

    def __init__(self, **options: Any) -> None:
        super().__init__(memory=options.pop("memory", CACHING), peer_facts=options.pop("facts", FACTS), **options)
        self.peer_pages, self.snapshots = self.accounts.peer_pages, self.accounts.snapshots

    def ask(self, name: str, **options: Any) -> None:
        self.add(name, PROMPT, peer=PEER, **options)

    def wanted(self) -> PeerSnapshot:
        """What the next step asks a peer for."""
        [wanted] = self.step().snapshots.loads
        assert isinstance(wanted, PeerSnapshot)
        return wanted

    def timing(self, name: str) -> Any:
        return next(o.timing for o in self.outputs if o.request_id == name and o.new_token_ids)

    def computed_prompt(self, name: str = "first") -> tuple[bytes, ...]:
        """The hashes of a prompt's pages, which are in the prefix cache."""
        self.add(name, PROMPT)
        self.steps_until_idle()
        return page_hashes(root_hash(None, ""), range(10, 10 + PROMPT), self.page_size)


def free(server: Server) -> int:
    """Pages that may be had."""
    return server.pool.num_free + server.accounts.num_unused_prefix_pages


def test_a_lease_holds_its_pages_until_the_clock_ends_it() -> None:
    server = Server()
    hashes = server.computed_prompt()
    lease = server.peer_pages.offer((*hashes[:3], b"unknown", hashes[4]))
    assert len(lease.pages) == 3, "pages behind one that is missing are of no use"
    assert (free(server), lease.until_s) == (64 - 3, server.now + LEASE_S)
    assert set(lease.pages) == set(server.kv.fixed())
    assert server.step().wake_s == lease.until_s
    while server.accounts.prefixes.evict_lowest():  # type: ignore[union-attr]
        pass
    server.accounts.check_integrity()
    assert server.peer_pages.offer(hashes[:3]).pages == lease.pages
    assert server.peer_pages.num_leases == 2
    server.now = lease.until_s
    server.step()
    assert (server.peer_pages.num_leases, server.peer_pages.wake_s(), free(server)) == (0, None, 64)
    server.peer_pages.end(lease.lease_id)


def test_an_end_is_an_end() -> None:
    server = Server()
    hashes = server.computed_prompt()
    lease, other = server.peer_pages.offer(hashes), server.peer_pages.offer(hashes[:2])
    server.peer_pages.end(lease.lease_id)
    assert set(server.kv.fixed()) == set(other.pages)
    server.peer_pages.end(lease.lease_id)
    server.peer_pages.end("none")
    assert server.peer_pages.num_leases == 1
    server.step()


def test_leases_hold_a_quarter_of_the_pool_at_most() -> None:
    server = Server(pages=40)
    hashes = server.computed_prompt()
    assert [len(server.peer_pages.offer(hashes).pages) for _ in range(3)] == [7, 3, 0]
    assert server.peer_pages.offer([b"unknown"]).pages == ()
    assert server.peer_pages.counters.not_lent == {"busy": 2}
    server.accounts.check_integrity()


def test_a_page_that_is_lent_is_not_moved() -> None:
    server = Server(pages=40)
    server.add("low", 24, cache_salt="in front")
    server.steps_until_idle()
    lease = server.peer_pages.offer(server.computed_prompt())
    while server.accounts.prefixes.evict_lowest():  # type: ignore[union-attr]
        pass
    assert min(lease.pages) > 0
    longest = server.accounts.adapter_pool.fragmentation.longest_free_run
    assert longest < server.pool.num_free == 40 - WHOLE
    assert not server.accounts.evictor._compact(longest + 1, keep_free=0)
    server.step()
    server.peer_pages.end(lease.lease_id)
    assert server.pool.num_free == 40 - WHOLE, "they are in the prefix cache"
    assert server.accounts.evictor._compact(longest + 1, keep_free=0), "now they may go out of the way"
    server.scheduler._allocator.record_moves()
    server.step()


def test_a_request_waits_for_its_peer_and_others_do_not() -> None:
    server = Server()
    server.ask("a", cache_salt="ann")
    server.add("other", 3)
    step = server.step()
    [wanted] = step.snapshots.loads
    assert isinstance(wanted, PeerSnapshot)
    assert (names(step), wanted.num_pages, wanted.first, wanted.peer) == (["other"], WHOLE, 0, PEER)
    assert wanted.digests == page_hashes(root_hash(None, "ann"), range(10, 10 + PROMPT), 4)
    assert (wanted.token_ids, wanted.facts) == (tuple(range(10, 10 + 28)), FACTS)
    server.snapshots.on_loaded(wanted.name, 0.1, 5)
    [(_, copies)] = server.step().snapshots.copies
    assert [place for place, _ in copies] == [0, 1, 2, 3, 4]
    server.snapshots.on_copied(wanted.name, 0.1)
    server.steps_until_idle()
    assert (server.timing("a").num_peer_tokens, server.timing("a").num_cached_tokens) == (20, 20)
    assert server.peer_pages.counters.taken.restored_bytes == 5 * 1024
    assert server.accounts.costs.restore.seconds == Server().accounts.costs.restore.seconds, (
        "that is learned from the disk"
    )


def test_the_prompt_of_an_alora_is_computed_here() -> None:
    server = Server()
    server.ask("a", active_from=9)
    assert not server.step().snapshots.loads


def test_what_is_here_is_not_asked_for_and_not_counted() -> None:
    server = Server()
    hashes = server.computed_prompt()
    server.add("longer", PROMPT + 20, peer=PEER)
    wanted = server.wanted()
    assert (wanted.first, wanted.num_pages) == (7, 5)
    server.snapshots.on_loaded(wanted.name, 0.1, 5)
    server.step()
    server.snapshots.on_copied(wanted.name, 0.1)
    server.steps_until_idle()
    timing = server.timing("longer")
    assert (timing.num_cached_tokens, timing.num_peer_tokens, timing.has_peer) == (48, 20, True)
    server.ask("again")
    assert not server.step().snapshots.loads
    assert len(hashes) == WHOLE


@pytest.mark.parametrize(
    "options",
    [{"peer": None}, {"fork_of": RequestId("first")}, {"prompt": 16}, {"max_tokens": 1, "peer": None}],
)
def test_nothing_is_asked_for_without_need(options: dict[str, Any]) -> None:
    server = Server()
    server.add("first", 3)
    server.add("a", **{"prompt": PROMPT, "peer": PEER, **options})
    server.steps_until_idle()
    assert not server.snapshot_orders


@pytest.mark.parametrize("off", [{"facts": None}, {"memory": MemoryOptions(enable_prefix_caching=False)}])
def test_where_it_is_off(off: dict[str, Any]) -> None:
    server = Server(**off)
    server.ask("a")
    server.run()
    assert not server.snapshot_orders
    assert server.peer_pages.offer([b"any"]).pages == ()


@pytest.mark.parametrize(("token_s", "wait_s"), [(1e-6, MIN_WAIT_S), (0.2, PATIENCE * 28 * 0.2), (9.0, MAX_WAIT_S)])
def test_a_peer_has_about_as_long_as_computing_takes(
    token_s: float, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostModel, "recompute_s", lambda _, tokens: tokens * token_s)
    server = Server()
    server.ask("a")
    assert server.wanted().wait_s == pytest.approx(wait_s)


def test_it_comes_beside_its_adapter_and_is_placed_with_it() -> None:
    server = Server()
    server.ask("a", key=MIA)
    step = server.step()
    assert (len(step.snapshots.loads), step.orders.loads) == (1, (MIA,))
    wanted = step.snapshots.loads[0]
    server.snapshots.on_loaded(wanted.name, 0.1, WHOLE)
    assert server.step().snapshots == NO_SNAPSHOTS
    server.load(MIA)
    step = server.step()
    assert step.orders.copies
    assert step.snapshots.copies
    server.copy(MIA)
    server.snapshots.on_copied(wanted.name, 0.1)
    server.run()
    assert server.timing("a").num_peer_tokens == 28


@pytest.mark.parametrize("is_loaded", [False, True])
def test_nobody_waits_for_it_any_more(is_loaded: bool) -> None:
    server = Server()
    server.ask("a", key=MIA)
    server.ask("b", key=MIA)
    [wanted] = server.step().snapshots.loads
    server.scheduler.finish(RequestId("a"), RequestStatus.FINISHED_ABORTED)
    assert server.step().snapshots == NO_SNAPSHOTS, "another one waits"
    if is_loaded:
        server.snapshots.on_loaded(wanted.name, 0.1, WHOLE)
    server.scheduler.finish(RequestId("b"), RequestStatus.FINISHED_ABORTED)
    assert server.step().snapshots.cancels == (wanted.name,)
    server.ask("c", key=MIA)
    assert [load.name for load in server.step().snapshots.loads] == [wanted.name]
    server.snapshots.on_load_failed(wanted.name, "timeout", is_gone=False)
    server.run()
    assert server.ends().keys() == {"a", "b", "c"}
    assert server.peer_pages.counters.taken.refused == {"unneeded": 1, "timeout": 1}


def test_one_that_ends_before_its_first_step_asks_nobody() -> None:
    server = Server()
    server.ask("a")
    server.scheduler.finish(RequestId("a"), RequestStatus.FINISHED_ABORTED)
    assert server.step().snapshots == NO_SNAPSHOTS


def test_too_many_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorasrv.memory.snapshots.MAX_ARRIVING", 2)
    server = Server()
    for name in "abc":
        server.ask(name, cache_salt=name)
    assert len(server.step().snapshots.loads) == 2
    assert server.peer_pages.counters.taken.refused == {"busy": 1}
    assert peer_pages.MIN_PAGES <= WHOLE
