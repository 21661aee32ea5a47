"""Two engines: pages that one has computed serve the other to the bit, and what happens on the way costs time only."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tiny_engine import GREEDY, ask, engine_config, offline_engine, running, tokens, until

from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.engine.messages import EndLease, OfferPages
from lorasrv.errors import LeaseEnded, PeerFailed
from lorasrv.memory.eviction import Moves
from lorasrv.memory.prefix_cache import PageChain
from lorasrv.outputs import RequestOutput
from lorasrv.request import FixedPrefix, Peer, RequestOptions
from lorasrv.scheduler_output import PeerSnapshot, SchedulerOutput

PROMPT = [10 + (7 * i) % 300 for i in range(100)]
PAGE, WHOLE = 16, 6
TOLD = replace(GREEDY, logprobs=3)
PEER = Peer("http://peer", computes=False)
Data = npt.NDArray[np.uint8]


class Link:
    """What stands for the network: reads from one engine in a thread of the other, and can be told to fail."""

    def __init__(self, giver: AsyncEngine) -> None:
        self._giver, self._loop = giver, asyncio.get_running_loop()
        self.asked: list[PeerSnapshot] = []
        self.most: int | None = None
        self.before: Callable[[Callable[[], bool]], None] = lambda _: None

    def __call__(self, wanted: PeerSnapshot, page_bytes: int, is_wanted: Callable[[], bool]) -> Data:
        self.asked.append(wanted)
        self.before(is_wanted)
        assert wanted.facts == self._giver.pages.facts
        assert page_bytes == self._giver.pages.page_bytes
        lease = asyncio.run_coroutine_threadsafe(self._giver.pages.offer(wanted.digests), self._loop).result()
        count = len(lease.pages) if self.most is None else min(self.most, len(lease.pages))
        try:
            if not count:
                raise PeerFailed("missing", "it has none")
            return np.frombuffer(self._giver.pages.read(lease.lease_id, 0, count), np.uint8)
        finally:
            asyncio.run_coroutine_threadsafe(self._giver.pages.end(lease.lease_id), self._loop).result()


Pair = tuple[AsyncEngine, AsyncEngine, Link]


@contextlib.asynccontextmanager
async def linked(model: Path, store: AdapterStore, **options: Any) -> AsyncIterator[Pair]:
    # Codes: the bits of products of floats may depend on the number of rows, which pages that are there change.
    config = engine_config(model, quantization="int8", **options)
    giver = AsyncEngine.build(config, store)
    async with running(giver):
        link = Link(giver)
        taker = AsyncEngine.build(config, store, fetch=link)
        async with running(taker):
            yield giver, taker, link


@pytest.fixture
async def pair(model: Path, store: AdapterStore) -> AsyncIterator[Pair]:
    async with linked(model, store) as pair:
        yield pair


def told(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [one for output in outputs for one in output.logprobs]


def sent(outputs: Sequence[RequestOutput]) -> int:
    return outputs[-1].timing.num_peer_tokens


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "k8v4"])
async def test_an_answer_is_the_same_to_the_bit(
    model: Path, store: AdapterStore, keys: dict[str | None, AdapterKey | None], kv_cache_dtype: str
) -> None:
    async with linked(model, store, kv_cache_dtype=kv_cache_dtype) as (giver, taker, _):
        said = []
        for name in (None, "one", "two"):
            alone = await ask(giver, keys[name], PROMPT, sampling=TOLD)
            handed = await ask(taker, keys[name], PROMPT, sampling=TOLD, peer=PEER)
            assert (tokens(handed), told(handed)) == (tokens(alone), told(alone))
            assert (sent(handed), sent(alone)) == (WHOLE * PAGE, 0)
            assert handed[-1].timing.num_cached_tokens == WHOLE * PAGE
            said.append(tuple(tokens(alone)))
        assert len(set(said)) == 3, "an adapter that changes nothing proves nothing"
        assert taker.metrics.stats().peer_pages_received_total == 3 * WHOLE
        assert giver.metrics.stats().peer_pages_sent_total == 3 * WHOLE


async def test_pages_of_a_running_request_are_there_for_the_next_server(pair: Pair) -> None:
    giver, taker, link = pair
    whole = tokens(await ask(giver, None, PROMPT))
    stream = giver.generate(PROMPT, replace(GREEDY, max_tokens=400), RequestOptions(cache_salt="a"))
    begun: list[int] = []
    async for output in stream:
        begun += output.token_ids
        if len(begun) >= 14:
            break
    handed = await ask(taker, None, PROMPT + begun, sampling=replace(GREEDY, max_tokens=6), peer=PEER, cache_salt="a")
    assert sent(handed) == (len(PROMPT) + len(begun) - 1) // PAGE * PAGE
    assert sent(handed) > WHOLE * PAGE, "pages of its answer are among them"
    assert (begun + tokens(handed))[:20] == whole
    await stream.aclose()
    assert len(link.asked) == 1


def test_pages_that_a_failed_plan_has_moved_are_handed_over(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The accounts name the new places at once, so the copies are made before anybody reads there."""
    with offline_engine(model) as llm:
        engine, memory = llm.engine, llm.engine._memory
        llm.generate([PROMPT], GREEDY)
        chain = PageChain.of(PAGE, None, "")
        digests = tuple(chain.hash(PROMPT, number) for number in range(WHOLE))

        def handed() -> tuple[tuple[int, ...], Data]:
            engine.call_utility(7, OfferPages(digests))
            lease = engine.take_utility_results()[-1].content
            engine.call_utility(8, EndLease(lease.lease_id))
            return lease.pages, engine._executor.read_pages(lease.pages).numpy()

        def move_and_fail(*, ahead: bool) -> SchedulerOutput:
            moves = {page: memory.kv_pool.num_pages - 1 - number for number, page in enumerate(before)}
            for page in moves.values():
                memory.kv_pool.take_page(page)
            memory.kv_pool.move(moves)
            memory.evictor._follow(Moves(moves, {}))
            raise RuntimeError("planning fails after pages were moved")

        before, content = handed()
        monkeypatch.setattr(engine._scheduler, "schedule", move_and_fail)
        engine.step()
        after, same = handed()
        assert len(before) == len(after) == WHOLE
        assert set(before).isdisjoint(after)
        assert (same == content).all()


async def test_no_salt_finds_anothers_pages(pair: Pair) -> None:
    giver, taker, link = pair
    alone = await ask(giver, None, PROMPT, cache_salt="key:ann")
    for salt in ("key:bob", "", "key:ann\x1f", "persona:x\x1fkey:ann"):
        stolen = await ask(taker, None, PROMPT, cache_salt=salt, peer=PEER)
        assert (sent(stolen), tokens(stolen)) == (0, tokens(alone))
    assert sent(await ask(taker, None, PROMPT, cache_salt="key:ann", peer=PEER)) == WHOLE * PAGE
    assert taker.metrics.stats().peer_prompts_refused_total == {"missing": 4}
    assert len(link.asked) == 5


async def test_a_personas_prompt_is_the_same_prefix_on_both(pair: Pair) -> None:
    giver, taker, _ = pair
    prefix = FixedPrefix("mia.1", "prefix:mia", 40)
    alone = await ask(giver, None, PROMPT, cache_salt="ann", prefix=prefix)
    handed = await ask(taker, None, PROMPT, cache_salt="ann", prefix=prefix, peer=PEER)
    assert (sent(handed), tokens(handed)) == (WHOLE * PAGE, tokens(alone))
    assert sent(await ask(taker, None, PROMPT, cache_salt="bob", prefix=prefix, peer=PEER)) == 0


async def test_what_does_not_come_is_computed(pair: Pair) -> None:
    giver, taker, link = pair
    for count in range(WHOLE):
        alone = await ask(giver, None, PROMPT, sampling=TOLD, cache_salt=f"{count}")
        link.most = count
        handed = await ask(taker, None, PROMPT, sampling=TOLD, cache_salt=f"{count}", peer=PEER)
        assert (tokens(handed), told(handed), sent(handed)) == (tokens(alone), told(alone), count * PAGE)


async def test_pages_that_are_here_are_not_asked_for(pair: Pair) -> None:
    giver, taker, link = pair
    longer = PROMPT + PROMPT
    await ask(giver, None, longer)
    await ask(taker, None, PROMPT)
    handed = await ask(taker, None, longer, peer=PEER)
    [wanted] = link.asked
    assert (wanted.first, wanted.num_pages, sent(handed)) == (WHOLE, 6, 6 * PAGE)
    assert handed[-1].timing.num_cached_tokens == 12 * PAGE
    assert sent(await ask(taker, None, longer, peer=PEER)) == 0
    assert sent(await ask(taker, None, PROMPT[:60], cache_salt="too short", peer=PEER)) == 0
    assert len(link.asked) == 1


async def test_others_run_while_one_waits_and_a_broken_peer_costs_time_only(pair: Pair) -> None:
    giver, taker, link = pair
    alone, blocked = tokens(await ask(giver, None, PROMPT)), threading.Event()

    def fail(_: object) -> None:
        assert blocked.wait(60)
        raise RuntimeError("of a kind that nobody expects")

    link.before = fail
    waiting = asyncio.ensure_future(ask(taker, None, PROMPT, peer=PEER))
    await until(lambda: bool(link.asked))
    assert tokens(await ask(taker, None, PROMPT[:50])) != []
    assert not waiting.done()
    blocked.set()
    assert tokens(await waiting) == alone
    assert taker.metrics.stats().peer_prompts_received_total == 0


async def test_a_fetch_for_nobody_ends(pair: Pair) -> None:
    _, taker, link = pair
    ended = threading.Event()

    def linger(is_wanted: Callable[[], bool]) -> None:
        while is_wanted():
            ended.wait(0.001)
        ended.set()
        raise PeerFailed("timeout", "nobody waits")

    link.before = linger
    stream = await taker.add(PROMPT, GREEDY, RequestOptions(peer=PEER))
    await until(lambda: bool(link.asked))
    await stream.aclose()
    await until(ended.is_set)
    await until(lambda: taker.metrics.stats().peer_prompts_refused_total == {"unneeded": 1})


async def test_a_lease_that_has_ended_gives_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, _, link = pair
    await ask(giver, None, PROMPT)
    await ask(pair[1], None, PROMPT, peer=PEER)
    [wanted] = link.asked
    lease = await giver.pages.offer(wanted.digests)
    await until(lambda: giver.metrics.stats().page_leases == 1)
    whole = bytes(giver.pages.read(lease.lease_id, 0, WHOLE))
    assert whole == b"".join(bytes(giver.pages.read(lease.lease_id, place, 1)) for place in range(WHOLE))
    read, ends = giver.pages._read, asyncio.get_running_loop()

    def read_late(pages: tuple[int, ...]) -> Any:
        asyncio.run_coroutine_threadsafe(giver.pages.end(lease.lease_id), ends).result()
        return read(pages)

    monkeypatch.setattr(giver.pages, "_read", read_late)
    with pytest.raises(LeaseEnded):
        await asyncio.to_thread(giver.pages.read, lease.lease_id, 0, 1)
    monkeypatch.undo()
    with pytest.raises(LeaseEnded):
        giver.pages.read(lease.lease_id, 0, 1)
    kept = await giver.pages.offer(wanted.digests)
    monkeypatch.setattr(giver.pages, "_clock", lambda: kept.until_s)
    with pytest.raises(LeaseEnded):
        giver.pages.read(kept.lease_id, 0, 1)
    await giver.pages.end(kept.lease_id)
