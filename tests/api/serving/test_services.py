"""The check of the store's disk, which all readiness probes share."""

import asyncio
import threading
from typing import TYPE_CHECKING, cast

from api.serving.services import StoreProbe

if TYPE_CHECKING:
    from adapter_store.store import AdapterStore

LONG_S = 3600.0


class Disk:
    """A store that counts the checks of its disk, which end when `goes_on` is set."""

    def __init__(self) -> None:
        self.checks = 0
        self.goes_on = threading.Event()

    def check_writable(self) -> None:
        self.checks += 1
        assert self.goes_on.wait(30)


def probe_of(disk: Disk, timeout_s: float, shared_s: float) -> StoreProbe:
    return StoreProbe(cast("AdapterStore", disk), timeout_s, shared_s)


async def test_probes_at_once_and_soon_after_share_one_check() -> None:
    disk = Disk()
    probe = probe_of(disk, LONG_S, LONG_S)
    at_once = [asyncio.create_task(probe.is_writable()) for _ in range(50)]
    await asyncio.sleep(0)
    at_once.pop().cancel()
    disk.goes_on.set()
    assert await asyncio.gather(*at_once) == [True] * 49, "one who leaves takes the check from nobody"
    assert [await probe.is_writable() for _ in range(50)] == [True] * 50
    assert disk.checks == 1


async def test_a_result_grows_old() -> None:
    disk = Disk()
    disk.goes_on.set()
    probe = probe_of(disk, LONG_S, 0.0)
    assert [await probe.is_writable() for _ in range(3)] == [True] * 3
    assert disk.checks == 3


async def test_a_check_that_hangs_is_waited_for_once() -> None:
    """No probe after its time is up waits, and none begins another check."""
    disk = Disk()
    probe = probe_of(disk, 0.3, 0.0)
    assert await asyncio.gather(*(probe.is_writable() for _ in range(50))) == [False] * 50
    async with asyncio.timeout(20):
        assert [await probe.is_writable() for _ in range(500)] == [False] * 500
    disk.goes_on.set()
    while not await probe.is_writable():
        await asyncio.sleep(0.01)
    assert disk.checks <= 2
