"""The list of replicas that an edge chooses from: new ones, those that are gone, and looks that fail."""

from collections.abc import Sequence

import pytest

from api.cluster.chooser import ReplicaAddress
from api.cluster.load import ReplicaLoad, ReplicaStatus
from api.cluster.pick import ReplicaWatch
from lorasrv.errors import NoReplicaReady
from lorasrv.placement.kinds import make_placement
from lorasrv.placement.placement import Ask

ASK = Ask("mia", 1.0)


def status(name: str, requests: int = 0, seconds: float = 0.0, *, is_ready: bool = True) -> ReplicaStatus:
    address = ReplicaAddress(name, f"http://{name}", is_ready=is_ready)
    return ReplicaStatus(address, ReplicaLoad(requests, seconds, 0, 1))


class Cluster:
    """Replicas as Ray would report them."""

    def __init__(self) -> None:
        self.seen: list[ReplicaStatus | BaseException] = []
        self.error: Exception | None = None

    async def look(self) -> Sequence[ReplicaStatus | BaseException]:
        if self.error is not None:
            raise self.error
        return self.seen


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def watch(cluster: Cluster) -> ReplicaWatch:
    return ReplicaWatch(cluster.look, make_placement("least"))


async def chosen(watch: ReplicaWatch, tried: Sequence[str] = ()) -> str:
    async with watch.choose(ASK, tried) as replica:
        return replica.id


async def test_replicas_come_and_go(watch: ReplicaWatch, cluster: Cluster) -> None:
    with pytest.raises(NoReplicaReady):
        await chosen(watch)
    cluster.seen = [status("b"), status("a"), status("c", is_ready=False)]
    await watch.refresh()
    assert [one.id for one in watch.replicas()] == ["a", "b", "c"]
    assert {await chosen(watch) for _ in range(50)} == {"a", "b"}
    cluster.seen = [status("b")]
    await watch.refresh()
    assert await chosen(watch) == "b"
    with pytest.raises(NoReplicaReady):
        await chosen(watch, ["b"])


async def test_a_look_that_fails_leaves_what_is_known(watch: ReplicaWatch, cluster: Cluster) -> None:
    cluster.seen = [status("a")]
    await watch.refresh()
    cluster.error = RuntimeError("the controller is gone")
    with pytest.raises(RuntimeError):
        await watch.refresh()
    assert await chosen(watch) == "a"


async def test_a_replica_that_does_not_answer_hides_no_new_one(watch: ReplicaWatch, cluster: Cluster) -> None:
    cluster.seen = [status("a"), status("b")]
    await watch.refresh()
    cluster.seen = [status("b"), status("c"), RuntimeError("a has died")]
    await watch.refresh()
    assert [one.id for one in watch.replicas()] == ["a", "b", "c"]
    cluster.seen = [status("b"), status("c")]
    await watch.refresh()
    assert [one.id for one in watch.replicas()] == ["b", "c"]


async def test_work_of_other_edges_counts_and_the_own_not_twice(cluster: Cluster) -> None:
    placement = make_placement("least")
    watch = ReplicaWatch(cluster.look, placement)
    cluster.seen = [status("a"), status("b")]
    await watch.refresh()
    async with watch.choose(ASK, ["b"]):
        # Of a's four requests one is from here, which counts as its second of work; the others as a says.
        cluster.seen = [status("a", 4, 8.0), status("b", 4, 6.9)]
        await watch.refresh()
        assert placement.loads_s() == {"a": pytest.approx(1.0 + 8.0 * 3 / 4), "b": pytest.approx(6.9)}
        assert await chosen(watch) == "b"
    cluster.seen = [status("a", 0, 0.0), status("b", 4, 6.9)]
    await watch.refresh()
    assert await chosen(watch) == "a"


async def test_a_replica_that_goes_while_it_answers(watch: ReplicaWatch, cluster: Cluster) -> None:
    cluster.seen = [status("a")]
    await watch.refresh()
    async with watch.choose(ASK, ()):
        cluster.seen = [status("b")]
        await watch.refresh()
    assert await chosen(watch) == "b"
