"""The list of replicas that an edge chooses from: new ones, those that are gone, and looks that fail."""

from collections.abc import Sequence

import pytest

from api.cluster.chooser import ReplicaAddress, ReplicaFigures
from api.cluster.pick import ReplicaWatch
from lorasrv.errors import NoReplicaReady
from lorasrv.placement.kinds import make_placement
from lorasrv.placement.placement import Demand
from lorasrv.placement.work import WorkRates

ASK = Demand("mia", 1.0)


def address(name: str, *, is_ready: bool = True) -> ReplicaAddress:
    return ReplicaAddress(name, f"http://{name}", is_ready=is_ready)


def figures(requests: int = 0, seconds: float = 0.0, *, is_ready: bool = True) -> ReplicaFigures:
    return ReplicaFigures("tiny", WorkRates(1e-3, 1e-3), is_ready, requests, seconds, adapters=0)


class Cluster:
    """Replicas as Ray would report them."""

    def __init__(self) -> None:
        self.seen: list[ReplicaAddress | BaseException] = []
        self.error: Exception | None = None

    async def look(self) -> Sequence[ReplicaAddress | BaseException]:
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
    cluster.seen = [address("b"), address("a"), address("c", is_ready=False)]
    await watch.refresh()
    assert [one.id for one in watch.replicas()] == ["a", "b", "c"]
    assert {await chosen(watch) for _ in range(50)} == {"a", "b"}
    cluster.seen = [address("b")]
    await watch.refresh()
    assert await chosen(watch) == "b"
    with pytest.raises(NoReplicaReady):
        await chosen(watch, ["b"])


async def test_a_look_that_fails_leaves_what_is_known(watch: ReplicaWatch, cluster: Cluster) -> None:
    cluster.seen = [address("a")]
    await watch.refresh()
    cluster.error = RuntimeError("the controller is gone")
    with pytest.raises(RuntimeError):
        await watch.refresh()
    assert await chosen(watch) == "a"


async def test_a_replica_that_does_not_answer_hides_no_new_one(watch: ReplicaWatch, cluster: Cluster) -> None:
    cluster.seen = [address("a"), address("b")]
    await watch.refresh()
    cluster.seen = [address("b"), address("c"), RuntimeError("a has died")]
    await watch.refresh()
    assert [one.id for one in watch.replicas()] == ["a", "b", "c"]
    cluster.seen = [address("b"), address("c")]
    await watch.refresh()
    assert [one.id for one in watch.replicas()] == ["b", "c"]


async def test_a_replica_says_by_itself_whether_it_is_ready(watch: ReplicaWatch, cluster: Cluster) -> None:
    cluster.seen = [address("a"), address("b", is_ready=False)]
    await watch.refresh()
    assert {await chosen(watch) for _ in range(20)} == {"a"}
    watch.on_figures("a", figures(is_ready=False))
    watch.on_figures("b", figures())
    assert {await chosen(watch) for _ in range(20)} == {"b"}
    watch.on_figures("gone", figures())
    assert [one.id for one in watch.replicas()] == ["a", "b"]


async def test_work_of_other_edges_counts_and_the_own_not_twice(cluster: Cluster) -> None:
    placement = make_placement("least")
    watch = ReplicaWatch(cluster.look, placement)
    cluster.seen = [address("a"), address("b")]
    await watch.refresh()
    async with watch.choose(ASK, ["b"]):
        # Of a's four requests one is from here, which counts as its second of work; the others as a says.
        watch.on_figures("a", figures(4, 8.0))
        watch.on_figures("b", figures(4, 6.9))
        assert placement.loads_s() == {"a": pytest.approx(1.0 + 8.0 * 3 / 4), "b": pytest.approx(6.9)}
        assert await chosen(watch) == "b"
    watch.on_figures("a", figures())
    assert await chosen(watch) == "a"


async def test_what_a_replica_said_is_forgotten_when_it_answers_without_figures(
    watch: ReplicaWatch, cluster: Cluster
) -> None:
    cluster.seen = [address("a")]
    await watch.refresh()
    watch.on_figures("a", figures(4, 8.0, is_ready=False))
    assert watch.loads_s()["a"] == 8.0
    watch.on_no_figures("a")
    assert watch.loads_s()["a"] == 0.0
    assert all(one.is_ready for one in watch.replicas())
    watch.on_no_figures("gone")


async def test_a_replica_that_goes_while_it_answers(watch: ReplicaWatch, cluster: Cluster) -> None:
    cluster.seen = [address("a")]
    await watch.refresh()
    async with watch.choose(ASK, ()):
        cluster.seen = [address("b")]
        await watch.refresh()
    assert await chosen(watch) == "b"
