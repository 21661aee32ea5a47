"""A chooser takes the placement's first replica that was not tried, and counts its work while the context is open."""

from contextlib import suppress

import pytest

from api.cluster.chooser import ReplicaAddress, ReplicaFigures, StaticChooser
from lorasrv.errors import NoReplicaReady
from lorasrv.placement.kinds import make_placement
from lorasrv.placement.placement import Demand
from lorasrv.placement.work import WorkRates

ADDRESSES = [ReplicaAddress(name, f"http://127.0.0.1:{port}") for port, name in enumerate("abc", 1)]
ASK = Demand("mia", 2.0)


async def test_tried_replicas_are_passed_over_in_the_order_of_the_placement() -> None:
    placement = make_placement("hash")
    chooser = StaticChooser(ADDRESSES, placement)
    tried: list[str] = []
    for expected in placement.rank(ASK):
        async with chooser.choose(ASK, tried) as address:
            assert address.id == expected
            assert address.url == next(one.url for one in ADDRESSES if one.id == expected)
            tried.append(address.id)
    with pytest.raises(NoReplicaReady, match="3 replicas could not answer"):
        async with chooser.choose(ASK, tried):
            pass


async def test_work_counts_until_the_context_ends_whichever_way() -> None:
    placement = make_placement("bounded")
    chooser = StaticChooser(ADDRESSES, placement)
    with suppress(RuntimeError):
        async with chooser.choose(ASK, ()) as address:
            assert placement.loads_s()[address.id] == 2.0
            raise RuntimeError
    assert set(placement.loads_s().values()) == {0.0}


async def test_replicas_that_do_not_answer_are_not_ready_and_chosen_last() -> None:
    """They may only be slow; one that says that it is not ready is not asked."""
    chooser = StaticChooser(ADDRESSES, make_placement("bounded"))
    says_no = ReplicaFigures("tiny", WorkRates(1e-3, 1e-3), is_ready=False, requests=0, seconds_ahead=0.0, adapters=0)

    async def order() -> list[str]:
        tried: list[str] = []
        with suppress(NoReplicaReady):
            while True:
                async with chooser.choose(ASK, tried) as address:
                    tried.append(address.id)
        return tried

    for name in await order():
        chooser.on_silence(name)
        # A new list, as one of Ray, does not say that it answers.
        chooser.set_addresses(ADDRESSES)
        assert (await order())[-len(chooser.silent) :] == sorted(chooser.silent)
        assert {one.id for one in chooser.replicas() if not one.is_ready} == chooser.silent
    chooser.on_figures("b", says_no)
    assert await order() == ["a", "c"]
    chooser.on_no_figures("c")
    assert await order() == ["c", "a"]


async def test_a_replica_that_is_not_ready_is_listed_and_not_chosen() -> None:
    chooser = StaticChooser(ADDRESSES, make_placement("bounded"))
    resting = [ReplicaAddress(one.id, one.url, is_ready=one.id == "b") for one in ADDRESSES]
    chooser.set_addresses(resting)
    async with chooser.choose(ASK, ()) as address:
        assert address.id == "b"
    assert list(chooser.replicas()) == resting
    chooser.set_addresses([])
    with pytest.raises(NoReplicaReady):
        async with chooser.choose(ASK, ()):
            pass
