"""Bundle the parts of a server that routes use; `create_app` puts them into `app.state`."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from adapter_store.errors import AdapterNotFound, StoreFull, StoreUnusable
from adapter_store.spec import AdapterId, AdapterKey
from adapter_store.store import AdapterStore
from api.asgi.draining import Draining
from api.asgi.limits import no_cuts
from api.auth.dependency import CallerDep
from api.auth.principal import Caller
from api.config.settings import ServerSettings
from api.errors import ModelNotFound
from api.replication.follower import Follower
from api.replication.registry import Registry
from api.serving.adapter_limits import AdapterLimits
from api.serving.admission import AdmissionController
from api.serving.fixed_prefixes import FixedPrefixes
from api.serving.model_list import ModelList, adapter_card, base_card
from api.serving.personas import Personas
from api.serving.served_engine import ServedEngine
from api.serving.store_view import ScopedStore, ScopedStores
from lorasrv.fair_lock import FairLock
from lorasrv.metrics.usage_ledger import Ledger
from lorasrv.offline.verify.verifier import Verifier
from lorasrv.text.uploaded_tokenizers import UploadedTokenizers

T = TypeVar("T")
PROBE_TIMEOUT_S = 2.0
PROBE_SHARED_S = 1.0
LONG_CHARS = 64 << 10
"""Requests whose texts have more characters in total are processed one at a time."""
MAX_LONG_TEXTS = 256
STALLED_AFTER_S = 60.0
"""Without a watchdog, time after which a stalled engine counts as dead."""


class StoreProbe:
    """Check whether the store's disk accepts writes; used in the event loop's thread.

    The check runs in its own thread, because a network disk may hang, and a readiness probe must not block others.
    Any client may probe, so probes share one check: those that arrive while it runs or up to `shared_s` after its end.
    Once it has run for `timeout_s`, no probe waits for it.
    """

    def __init__(
        self, store: AdapterStore, timeout_s: float = PROBE_TIMEOUT_S, shared_s: float = PROBE_SHARED_S
    ) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._shared_s = shared_s
        self._thread = ThreadPoolExecutor(1, "lorasrv-store-probe")
        self._check: asyncio.Task[bool] | None = None
        # Event loop time at which the check began, and at which it is too old; infinite while it runs.
        self._started_s = 0.0
        self._stale_s = 0.0

    async def is_writable(self) -> bool:
        """Return whether the disk accepts writes; False, too, if the check takes too long."""
        now = asyncio.get_running_loop().time()
        check = self._check
        if check is None or now >= self._stale_s:
            self._started_s, self._stale_s = now, math.inf
            check = self._check = asyncio.create_task(self._checked())
        done, _ = await asyncio.wait([check], timeout=max(0.0, self._started_s + self._timeout_s - now))
        return bool(done) and check.result()

    async def _checked(self) -> bool:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self._store.check_writable)
        except (StoreFull, StoreUnusable):
            return False
        else:
            return True
        finally:
            self._stale_s = loop.time() + self._shared_s


@dataclass(frozen=True, slots=True)
class Services:
    """Hold the parts of one server."""

    engine: ServedEngine
    store: AdapterStore
    settings: ServerSettings
    limits: AdapterLimits
    verifier: Verifier
    # Unix time.
    started_s: int
    draining: Draining
    connections_cut: Counter[str]
    admission: AdmissionController
    store_probe: StoreProbe
    ledger: Ledger
    views: ScopedStores
    personas: Personas
    prefixes: FixedPrefixes
    long_texts: FairLock
    uploaded_tokenizers: UploadedTokenizers
    registry: Registry
    # None: this server owns its store.
    follower: Follower | None = None

    @classmethod
    def create(
        cls,
        engine: ServedEngine,
        store: AdapterStore,
        settings: ServerSettings,
        limits: AdapterLimits,
        verifier: Verifier,
        follower: Follower | None = None,
    ) -> "Services":
        """Create the services of a server that starts now."""
        started_s, draining = int(time.time()), Draining()
        personas = Personas(store)
        on_refused = engine.observers.on_refused
        registry = Registry(store, draining, limits.shares, on_refused)
        limiter = registry.limiter if follower is None else follower.limiter(on_refused)
        base = base_card(
            settings.served_model_name or engine.model_name,
            started_s,
            engine.max_model_len,
            engine.weights.to_dict(),
            batch_invariant=engine.is_batch_invariant,
        )
        return cls(
            engine=engine,
            store=store,
            settings=settings,
            limits=limits,
            verifier=verifier,
            started_s=started_s,
            draining=draining,
            connections_cut=no_cuts(),
            admission=AdmissionController(engine, limiter),
            store_probe=StoreProbe(store),
            ledger=Ledger(engine, store, store.root, sends=follower is not None),
            views=ScopedStores(store, partial(ModelList, base, partial(adapter_card, base))),
            personas=personas,
            prefixes=FixedPrefixes(engine, personas),
            long_texts=FairLock("long texts", MAX_LONG_TEXTS),
            uploaded_tokenizers=UploadedTokenizers(),
            registry=registry,
            follower=follower,
        )

    async def in_thread(self, texts: object, work: Callable[[], T], caller: Caller) -> T:
        """Run work on texts of any length in a thread.

        Long texts are processed one at a time: eight million characters take most of a minute, and threads are few.

        Args:
            texts: the texts, in lists, objects or bodies.
            work: the function to run.
            caller: caller whose turn counts for a long text.
        Raises: EngineOverloaded: too many long texts are waiting, of this key or of all.
        """
        if not is_long(texts):
            return await run_in_threadpool(work)
        async with self.long_texts.turn(caller.principal):
            return await run_in_threadpool(work)

    def view(self, caller: Caller, user: str | None = None, versions: Mapping[str, str] | None = None) -> ScopedStore:
        """Return the store as visible to the caller; arguments as for `ScopedStore`."""
        return self.views.of(caller, user, versions)

    async def forget_deleted(self, adapter_ids: Iterable[str], unnamed: Collection[AdapterKey]) -> None:
        """Apply the limits of ids that changed, drop the counts of deleted ids, and drop the pins and past answers of
        contents that no name refers to any more.

        Args:
            adapter_ids: ids that changed or were deleted.
            unnamed: contents without a name.

        Raises: EngineDead.
        """
        for adapter_id in adapter_ids:
            if AdapterId(adapter_id) not in self.store.records():
                self.engine.request_stats.forget(adapter_id)
            await self.limits.apply(adapter_id)
        for key in (*unnamed, *self.store.compositions.having(unnamed)):
            await self.engine.unpin(key)
            await self.engine.forget_answers(adapter=key)

    async def looking_up(self, find: Callable[[], T]) -> T:
        """Run a lookup of names in a thread, because finding similar names among thousands takes milliseconds.

        A name that a follower does not know may be new: it asks the registry before refusing the name.

        Raises:
            OriginUnreachable: a follower does not know the name, and the registry does not answer.
        """
        begun_s, was_asked = time.monotonic(), self.follower is None
        while True:
            try:
                return await run_in_threadpool(find)
            except (AdapterNotFound, ModelNotFound):
                if was_asked or self.follower is None:
                    raise
                was_asked = await self.follower.news_since(begun_s)

    @property
    def health_problem(self) -> str | None:
        """Return why the engine is not alive, else None: its thread has ended, or makes no steps despite work."""
        if not self.engine.is_alive:
            return "engine dead"
        limit_s = self.settings.watchdog_s or STALLED_AFTER_S
        return "engine stalled" if self.engine.heartbeat.is_stuck(limit_s) else None

    @property
    def ready_problem(self) -> str | None:
        """Return why the server should get no new requests, else None: it drains or has no lease, the engine is not
        alive, or a process that computes a part of the model is silent. Running requests may continue."""
        if self.draining.is_on:
            return "draining"
        if (problem := self.health_problem or self.engine.silence) is not None:
            return problem
        return None if self.follower is None or self.follower.has_lease else "no lease from the registry"

    @property
    def base_name(self) -> str:
        """Return the name of the base model in the API."""
        return self.settings.served_model_name or self.engine.model_name


def is_long(texts: object) -> bool:
    """Return whether the texts in lists, objects and bodies are long in total.

    Other values count as one character. Stops as soon as the limit is reached.
    """
    left, count = [texts], 0
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


# Asynchronous, because FastAPI calls other dependencies in a thread, and a parsed body would wait for one.
async def get_services(request: Request) -> Services:
    """Return the server's services, as a dependency of routes."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


ServicesDep = Annotated[Services, Depends(get_services)]


async def get_view(services: ServicesDep, caller: CallerDep) -> ScopedStore:
    """Return the store as visible to the caller, as a dependency of routes."""
    return services.view(caller)


ViewDep = Annotated[ScopedStore, Depends(get_view)]
