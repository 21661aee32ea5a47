"""Leases by a clock that the tests turn."""

from pathlib import Path

import pytest

from api.replication.headers import LEASE_S
from api.replication.leases import Leases

pytestmark = pytest.mark.anyio


@pytest.fixture
def now_s() -> list[float]:
    return [0.0]


@pytest.fixture
def leases(tmp_path: Path, now_s: list[float]) -> Leases:
    return Leases(tmp_path, lambda: now_s[0])


async def test_one_that_cannot_take_over_is_waited_for_until_its_last_lease(leases: Leases, now_s: list[float]) -> None:
    """It goes on asking, but what it is lent since counts only once it has the revision."""
    await leases.renew("a", 1, promised=1)
    now_s[0] = 10.0
    # The deletion is revision 2, and another question comes before anybody waits for it.
    await leases.renew("a", 1, promised=2)
    assert leases._left_s(2) == LEASE_S - 10.0
    now_s[0] = LEASE_S
    await leases.renew("a", 1, promised=2)
    assert await leases.everywhere(2) == 0
    assert leases.replicas() == ["a"]
    assert leases._left_s(3) == LEASE_S
    await leases.renew("a", 3, promised=3)
    assert await leases.everywhere(3) == 1


async def test_what_is_kept_of_a_follower_is_bounded(leases: Leases, now_s: list[float]) -> None:
    for number in range(1000):
        now_s[0] = float(number)
        await leases.renew("a", number, promised=number)
    assert len(leases._leases["a"].ends_s) == LEASE_S
