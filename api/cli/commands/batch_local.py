"""Run batch lines on an engine in this process: lock the store, load the model, and compute like a server."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from api.batches.in_process import in_process_client
from api.batches.runner import Ask
from api.config.device_defaults import fitted
from api.config.settings import ServerSettings
from api.engine_server import open_store
from api.replication.share_holder import ShareHolder
from api.serving.adapter_limits import AdapterLimits
from api.serving.served_engine import ServedEngine
from api.serving.services import Services
from lorasrv.offline.verify.verifier import Verifier

Progress = Callable[[str, float], None]


@contextmanager
def embedded(settings: ServerSettings, progress: Progress) -> Iterator[AbstractAsyncContextManager[Ask]]:
    """Load the model, which takes seconds, and yield a context that starts the engine in the event loop.

    Raises:
        LorasrvError, AdapterError: the model, options or store are unusable, or a server uses the store.
    """
    from lorasrv.engine.async_engine import AsyncEngine

    settings = fitted(settings)
    with open_store(settings) as store:
        engine = AsyncEngine.build(settings.engine_config(), store, progress)
        limits = AdapterLimits(engine, store, settings.limits("adapter"), ShareHolder(engine))
        limits.check()
        services = Services.create(engine, store, settings, limits, Verifier())
        yield _running(engine, services)


@asynccontextmanager
async def _running(engine: ServedEngine, services: Services) -> AsyncIterator[Ask]:
    await engine.start()
    try:
        await services.limits.apply_all()
        yield in_process_client(services)
    finally:
        await engine.shutdown()
