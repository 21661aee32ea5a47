"""Threads for the disk work of batches: few, and not those that online requests wait for."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_POOL = ThreadPoolExecutor(4, thread_name_prefix="batch")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, whose threads admit requests: a file of megabytes must not keep those."""
    return await asyncio.get_running_loop().run_in_executor(_POOL, lambda: work(*args, **kwargs))
