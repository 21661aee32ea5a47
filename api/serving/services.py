"""What routes work with, put into `app.state` by `create_app`; no module holds any of it.

Whether the store's disk takes uploads, asked in a thread of its own: a disk on the network may never answer, and
whoever asks whether the server is ready must hold up nobody.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from adapter_store.store import AdapterStore
from api.asgi.draining import Draining
from api.asgi.limits import no_cuts
from api.auth.principal import Caller, CallerDep
from api.auth.rate_limits import RateLimiter
from api.config.settings import ServerSettings
from api.serving.adapter_limits import AdapterLimits
from api.serving.admission import AdmissionController
from api.serving.model_list import ModelList, adapter_card, base_card
from api.serving.store_view import ScopedStore, ScopedStores
from lorasrv.fair_lock import FairLock
from lorasrv.metrics.usage_ledger import Ledger
from lorasrv.offline.verify.verifier import Verifier

if TYPE_CHECKING:
    from lorasrv.engine.async_engine import AsyncEngine

PATIENCE_S = 2.0


class StoreProbe:
    """For the event loop's thread."""

    def __init__(self, store: AdapterStore, patience_s: float = PATIENCE_S) -> None:
        self._store = store
        self._patience_s = patience_s
        self._thread = ThreadPoolExecutor(1, "lorasrv-store-probe")

    async def is_writable(self) -> bool:
        """False also if the disk does not say so in time."""
        asked = asyncio.get_running_loop().run_in_executor(self._thread, lambda: self._store.is_writable)
        try:
            return await asyncio.wait_for(asked, self._patience_s)
        except TimeoutError:
            return False


T = TypeVar("T")
LONG_CHARS = 64 << 10
MAX_LONG_TEXTS = 256


@dataclass(frozen=True, slots=True)
class Services:
    """One server's parts. `started_s` is Unix time."""

    engine: "AsyncEngine"
    store: AdapterStore
    settings: ServerSettings
    limits: AdapterLimits
    verifier: Verifier
    started_s: int
    draining: Draining
    connections_cut: Counter[str]
    admission: AdmissionController
    store_probe: StoreProbe
    ledger: Ledger
    views: ScopedStores
    long_texts: FairLock

    @classmethod
    def create(
        cls,
        engine: "AsyncEngine",
        store: AdapterStore,
        settings: ServerSettings,
        limits: AdapterLimits,
        verifier: Verifier,
    ) -> "Services":
        """Return the services of a server that starts now."""
        started_s = int(time.time())
        base = base_card(settings.served_model_name or engine.model_name, started_s, engine.max_model_len)
        return cls(
            engine,
            store,
            settings,
            limits,
            verifier,
            started_s,
            Draining(),
            no_cuts(),
            AdmissionController(engine, RateLimiter(on_refused=engine.observers.on_refused)),
            StoreProbe(store),
            Ledger(engine, store, store.root),
            ScopedStores(store, partial(ModelList, base, partial(adapter_card, base))),
            FairLock("long texts", MAX_LONG_TEXTS),
        )

    async def in_thread(self, said: object, work: Callable[[], T], caller: Caller) -> T:
        """The result of work on texts that may be longer than any context. Long ones one at a time: eight million
        characters take most of a minute, and threads are few, for everybody. `said`: the texts, in whatever they lie.

        Raises: EngineOverloaded: too many long ones wait, of this key or of all.
        """
        if not is_long(said):
            return await run_in_threadpool(work)
        async with self.long_texts.turn(caller.principal):
            return await run_in_threadpool(work)

    def view(self, caller: Caller) -> ScopedStore:
        """The store as the caller may know it: what routes work with."""
        return self.views.of(caller)

    @property
    def base_name(self) -> str:
        """What clients call the base."""
        return self.settings.served_model_name or self.engine.model_name


def is_long(said: object) -> bool:
    """Whether the texts in lists, objects and bodies are long together. What is no text counts as one character. Looks
    at no more than it must."""
    left, count = [said], 0
    while left and count <= LONG_CHARS:
        match left.pop():
            case str(text):
                count += len(text)
            case list(items) | tuple(items):
                left += items
            case dict(items):
                left += items.keys()
                left += items.values()
            case BaseModel() as body:
                left += vars(body).values()
            case _:
                count += 1
    return count > LONG_CHARS


# Asynchronous, though they wait for nothing: others are called in a thread, and a body that has been parsed would wait
# for one before it is checked.
async def get_services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


ServicesDep = Annotated[Services, Depends(get_services)]


async def get_view(services: ServicesDep, caller: CallerDep) -> ScopedStore:
    return services.view(caller)


ViewDep = Annotated[ScopedStore, Depends(get_view)]
