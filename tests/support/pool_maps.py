"""A map of a pool that holds two adapters with names, one without, and two requests."""

from collections.abc import Sequence

from adapter_store.spec import AdapterKey
from lorasrv.engine.pool_map import AdapterPages, PoolMap, RequestPages, ReservedAdapter
from lorasrv.outputs import RequestId


def full_pool(keys: Sequence[AdapterKey]) -> PoolMap:
    """Return the map; `keys` are the contents that have names."""
    adapters = (
        AdapterPages(keys[0], "ready", 20, ((80, 12), (60, 8)), 18_000, 20_480, 1, True),
        AdapterPages(keys[1], "copying", 4, ((50, 4),), 4_000, 4_096, 0, False),
        AdapterPages(AdapterKey("0" * 64), "ready", 6, ((40, 6),), 6_000, 6_144, 0, False),
    )
    requests = (
        RequestPages(RequestId("chatcmpl-1#1"), keys[0], 3, 2, (9, 0, 1)),
        RequestPages(RequestId("cmpl-2#7"), None, 7, 0, tuple(range(2, 9))),
    )
    promised = (ReservedAdapter(keys[0], True, "ready"), ReservedAdapter(AdapterKey("1" * 64), False, "waiting"))
    figures = (100, 51, 10, 9, 30, 16, 1024, 2, 40, 3)
    return PoolMap(*figures, requests, adapters, 2048, promised, (12, 10, 11, 20, 21, 30, 31, 32, 34))
