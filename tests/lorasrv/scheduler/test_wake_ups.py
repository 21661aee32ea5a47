"""What one request gives back in a step brings the next step for those that wait for it: the engine would sleep."""

import pytest
from bare_scheduler import KEYS, Bench, layout_of, names

from adapter_store.spec import AdapterKey
from lorasrv.config import Limits, LimitShare, MemoryOptions
from lorasrv.request import AdapterTerm, RequestStatus
from lorasrv.scheduler_output import SchedulerOutput
from sgmv_kernels.formats.adapter_panels import AdapterLayout, SiteDims

A, B, C, D, E, F = KEYS[:6]
ONE_ADAPTER = MemoryOptions(host_cache_bytes=layout_of(B).nbytes + 1, swap_bytes=0, enable_prefix_caching=False)
AMPLE = MemoryOptions(host_cache_bytes=1 << 20, swap_bytes=0, enable_prefix_caching=False)


def sleeps(bench: Bench, step: SchedulerOutput) -> bool:
    """Whether the engine, which has had this step, makes no other until it gets a message."""
    is_moving = step.requests or step.num_preempted or bench.loading or bench.copying
    return not is_moving and (step.wake_s is None or step.wake_s > bench.now)


@pytest.mark.parametrize("ends_by", ["abort", "timeout"])
def test_host_memory_of_a_load_that_nobody_needs_any_more(ends_by: str) -> None:
    bench = Bench(pages=64, step_s=0.0, memory=ONE_ADAPTER)
    bench.add("first", key=A, **({"timeout_s": 5.0} if ends_by == "timeout" else {}))
    bench.step()
    bench.add("second", key=B)
    for _ in range(5):
        step = bench.step()
    assert bench.loading == {A}
    if ends_by == "abort":
        bench.scheduler.finish("first", RequestStatus.FINISHED_ABORTED)
    else:
        assert step.wake_s == 5.0
        bench.now = 5.0
    bench.step()
    assert bench.loading == {B}


@pytest.mark.parametrize("limits", [Limits(max_running=1), Limits(max_running=1, tokens_per_s=1.0)])
def test_a_limit_of_a_request_that_ends_by_its_timeout(limits: Limits) -> None:
    bench = Bench(pages=64, step_s=0.0, options={"key_limits": limits})
    bench.add("first", max_tokens=100, timeout_s=5.0, principal="k")
    bench.step()
    bench.add("second", max_tokens=3, principal="k")
    for _ in range(4):
        bench.step()
    bench.now = 5.0
    step = bench.step()
    assert "first" in bench.ends()
    assert names(step) == ["second"] or not sleeps(bench, step)
    if limits.tokens_per_s is None:
        assert names(step) == ["second"]


@pytest.mark.parametrize(("memory", "count"), [(ONE_ADAPTER, 1), (AMPLE, 20)])
def test_host_memory_of_requests_that_their_key_holds_back(memory: MemoryOptions, count: int) -> None:
    bench = Bench(pages=64, step_s=0.0, memory=memory, options={"key_limits": Limits(tokens_per_s=1.0)})
    bench.add("first", max_tokens=100, principal="k")
    bench.step()
    for number in range(count):
        bench.add(f"mine {number}", key=A, adapter_id=f"a{number}", principal="k")
    bench.add("other", key=B, principal="else")
    while not bench.loading:
        step = bench.step()
        assert not sleeps(bench, step)
    assert bench.loading == {B}


def test_host_memory_of_a_beam_that_waits_for_another_one() -> None:
    """It has computed all that it needs; its adapter is to be loaded for the other one."""
    bench = Bench(pages=64, memory=ONE_ADAPTER)
    bench.add_beams("beam", prompt=5, max_tokens=4, width=2, key=B)
    bench.step()
    bench.bring(B)
    while "beam" not in names(bench.step()):
        pass
    [beam] = bench.scheduler._queue.running
    bench.scheduler._planner.preempt(beam)
    bench.accounts.adapter_manager.evict(B)
    bench.add("other", key=A, max_tokens=1)
    bench.run(60)
    assert set(bench.ends()) == {"beam", "beam.1", "other"}


def test_host_memory_that_a_load_leaves_to_another() -> None:
    """Two keys wait for the large adapter; once it is being loaded, only its first place in the line counts."""
    memory = MemoryOptions(host_cache_bytes=layout_of(F).nbytes + layout_of(A).nbytes)
    bench = Bench(pages=64, step_s=0.0, memory=memory)
    for name, key in (("first", F), ("second", F), ("small", A)):
        bench.add(name, key=key, principal=name)
    while bench.step().wake_s == bench.now:
        assert len(bench.steps) < 5
    assert bench.loading == {F, A}


def test_the_adapters_of_a_sum_that_are_evicted_to_begin_anew() -> None:
    """No run of the pool is long enough for the second, because the first lies in its middle."""

    def layout(key: AdapterKey) -> AdapterLayout:
        return AdapterLayout((SiteDims({B: 352, C: 448, D: 600}[key], (16,)),), (((4,),),), 2)

    bench = Bench(pages=10, memory=AMPLE)
    manager = bench.accounts.adapter_manager
    for key in (B, D):
        manager.pin(key, layout(key))
        bench.step()
        bench.bring(key)
    for key in (B, D):
        manager.unpin(key)
        bench.accounts.adapter_manager._drop_reservation(key)
    manager.evict(B)
    bench.step()
    terms = tuple(AdapterTerm(key, 1.0, layout(key)) for key in (D, C))
    bench.add("sum", prompt=3, max_tokens=1, key=AdapterKey(f"{D}+{C}"), terms=terms)
    for _ in range(60):
        if not bench.scheduler.has_requests:
            break
        step = bench.step()
        assert not bench.scheduler.has_requests or not sleeps(bench, step)
        bench.arrive()
    assert bench.ends() == {"sum": "length"}
    assert manager.num_evictions >= 2, "it began anew"


def test_the_room_of_a_reservation_that_ends() -> None:
    bench = Bench(pages=10, memory=AMPLE)
    manager = bench.accounts.adapter_manager
    manager.reserve(F, layout_of(F), 30.0)
    bench.step()
    bench.bring(F)
    bench.step()
    manager.reserve(E, layout_of(E), 100.0)
    assert bench.step().wake_s == 30.0
    assert not bench.loading
    bench.now = 30.0
    bench.step()
    assert bench.loading == {E}


@pytest.mark.parametrize("has_room", [True, False])
def test_host_memory_of_an_adapter_whose_requests_are_held_back(has_room: bool) -> None:
    """It goes to the pool; if that has no room, the host copy is given up, and read again when its requests may run."""
    bench = Bench(pages=256 if has_room else 8, memory=ONE_ADAPTER)
    bench.add("large", prompt=26, max_tokens=5)
    bench.add("mine", key=A, adapter_id="a")
    bench.step()
    assert bench.loading == {A}
    bench.scheduler.quotas.set_share("a", LimitShare(0))
    bench.load(A)
    bench.add("other", key=B, adapter_id="b", principal="else")
    while "other" not in bench.ends():
        step = bench.step()
        assert not sleeps(bench, step)
        bench.arrive()
        assert len(bench.steps) < 30
    assert any(A in step.orders.cancels for step in bench.steps) != has_room
    bench.scheduler.quotas.set_share("a", LimitShare())
    while "mine" not in bench.ends():
        bench.step()
        bench.arrive()
        assert len(bench.steps) < 60
