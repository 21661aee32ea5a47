"""What a step looks at: its work is counted, and does not depend on how many wait, whatever they wait for."""

from collections.abc import Callable

import pytest
from bare_scheduler import Bench, layout_of
from counted_work import count_instructions
from tiny_scheduler import scheduler

from adapter_store.spec import AdapterKey
from lorasrv.config import POLICIES, Limits, MemoryOptions
from lorasrv.outputs import RequestId

SLOTS = 8
STEPS = 5
FEW, MANY = 150, 600


def _key(number: int) -> AdapterKey:
    return AdapterKey("a" + f"{number:063x}")


def _bench(policy: str, *, slots: int = SLOTS, host: int = 1 << 30, **options: object) -> Bench:
    memory = MemoryOptions(host_cache_bytes=host, enable_prefix_caching=False)
    bench = scheduler(policy, slots=slots, pages=40_000, bench={"checks": False, "memory": memory}, **options)
    for number in range(SLOTS):
        bench.add(f"runs{number}", max_tokens=1000, adapter_id=f"a{number}")
    bench.step()
    return bench


def _all_resident(policy: str, count: int) -> Bench:
    bench = _bench(policy)
    for number in range(count):
        bench.add(f"w{number}", adapter_id=f"b{number}")
    return bench


def _all_of_their_own_key(policy: str, count: int) -> Bench:
    bench = _bench(policy)
    for number in range(count):
        bench.add(f"w{number}", principal=f"k{number}")
    return bench


def _no_adapter_comes(policy: str, count: int, slots: int = SLOTS) -> Bench:
    bench = _bench(policy, slots=slots, host=8 * layout_of(_key(0)).nbytes)
    for number in range(count):
        bench.add(f"w{number}", key=_key(number))
    return bench


def _no_adapter_comes_to_free_slots(policy: str, count: int) -> Bench:
    return _no_adapter_comes(policy, count, 2 * SLOTS)


def _host_memory_for_all(policy: str, count: int) -> Bench:
    bench = _bench(policy)
    for number in range(count):
        bench.add(f"w{number}", key=_key(number))
    return bench


def _key_at_its_limit(policy: str, count: int) -> Bench:
    bench = _bench(policy, slots=2 * SLOTS, key_limits=Limits(max_running=SLOTS))
    for number in range(count):
        bench.add(f"w{number}", adapter_id=f"b{number}")
    return bench


def _adapters_at_their_limits(policy: str, count: int) -> Bench:
    bench = _bench(policy, slots=2 * SLOTS, adapter_limits=Limits(max_running=1))
    for number in range(count):
        bench.add(f"w{number}", adapter_id=f"a{number % SLOTS}", principal=f"k{number}")
    return bench


def _rates_used_up(policy: str, count: int) -> Bench:
    bench = scheduler(policy, slots=SLOTS, budget=4 * count, pages=40_000, bench={"checks": False})
    bench.add("long", max_tokens=1000)
    for number in range(count):
        bench.scheduler.quotas.set_limits(f"b{number}", Limits(tokens_per_s=1e-3))
        bench.add(f"first{number}", max_tokens=1, adapter_id=f"b{number}")
    while bench.scheduler.num_waiting:
        bench.step()
    for number in range(count):
        bench.add(f"w{number}", adapter_id=f"b{number}")
    return bench


def _all_starved(policy: str, count: int) -> Bench:
    bench = _bench(policy, max_wait_steps=3)
    for number in range(count):
        bench.add(f"w{number}", max_tokens=1000, adapter_id=f"b{number}")
    for _ in range(4):
        bench.step()
    return bench


def _choices_of_one_long_prompt(policy: str, count: int) -> Bench:
    bench = _bench(policy, slots=2 * SLOTS)
    bench.add("first", prompt=1000)
    for number in range(count):
        bench.add(f"w{number}", prompt=1000, fork_of=RequestId("first"), adapter_id=f"b{number}")
    return bench


def _all_hopeless_to_judge(policy: str, count: int) -> Bench:
    bench = _bench(policy, early_abort=True, queue_timeout_s=1e9)
    for number in range(count):
        bench.add(f"w{number}", adapter_id=f"b{number}")
    return bench


STATES = (
    _all_resident,
    _all_of_their_own_key,
    _no_adapter_comes,
    _no_adapter_comes_to_free_slots,
    _host_memory_for_all,
    _key_at_its_limit,
    _adapters_at_their_limits,
    _rates_used_up,
    _all_starved,
    _choices_of_one_long_prompt,
    _all_hopeless_to_judge,
)


def _most_work(state: Callable[[str, int], Bench], policy: str, count: int) -> int:
    """Instructions of the most laborious of the next steps."""
    bench = state(policy, count)
    schedule, most = bench.scheduler.schedule, 0

    def counted() -> object:
        nonlocal most
        steps: list[object] = []
        most = max(most, count_instructions(lambda: steps.append(schedule())))
        return steps[0]

    bench.scheduler.schedule = counted  # type: ignore[method-assign]
    for _ in range(STEPS):
        bench.step()
    return most


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__.strip("_"))
def test_a_step_does_not_depend_on_how_many_wait(state: Callable[[str, int], Bench], policy: str) -> None:
    assert _most_work(state, policy, MANY) < 1.3 * _most_work(state, policy, FEW)
