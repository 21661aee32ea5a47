"""A real engine on a tiny model behind a real uvicorn in a thread of the test, which starts faster than a process."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import uvicorn

from adapter_store.formats.peft_dir import read_peft_dir
from adapter_store.store import AdapterStore
from api.app import create_app
from api.config.settings import ServerSettings
from api.replication.page_client import PageClient
from api.server import bind
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes

CALM_SECONDS = 30.0


def eventually(condition: Callable[[], object], within_s: float = CALM_SECONDS) -> None:
    """Wait until `condition` holds.

    Raises:
        AssertionError: it does not hold in time.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@contextmanager
def listening(app: Any, **options: Any) -> Iterator[SimpleNamespace]:
    """Serve an ASGI application, with these options of uvicorn, in a thread; yield its `port`, `thread`, `state`."""
    # Not `create_server`: asyncio disables Nagle's algorithm only for sockets whose protocol is given. With it, each
    # answer in two parts would wait 40 ms for the client's acknowledgement.
    listener = bind("127.0.0.1", 0)
    listener.listen()
    # No connection ends while its client stands still.
    options = {"timeout_keep_alive": 600, **options}
    running = uvicorn.Server(uvicorn.Config(app, ws="none", log_config=None, timeout_graceful_shutdown=1, **options))
    thread = threading.Thread(target=lambda: asyncio.run(running.serve([listener])), name="event loop")
    thread.start()
    try:
        eventually(lambda: running.started)
        yield SimpleNamespace(port=listener.getsockname()[1], thread=thread, state=running.server_state)
    finally:
        running.should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


@contextmanager
def server(
    model: Path, folder: Path, adapters: Mapping[str, Path] | None = None, **settings: Any
) -> Iterator[SimpleNamespace]:
    """Serve `model` with a store in `folder` and these PEFT folders by id.

    Yields:
        `http` a client, `url`, `engine`, `store`, `draining`, `thread` of the event loop; `post(path, **body)`;
        `held()`, what requests hold in the pool; `calm_down()`, which waits until they hold nothing.
    """
    given = {"model": str(model), "pool_bytes": "16MiB", "store": folder, "kernels": "torch", **settings}
    options = ServerSettings(**given)
    with contextlib.closing(open_checkpoint(options.model, options.load_format)) as checkpoint:
        shapes = base_shapes(checkpoint.spec)
    with AdapterStore(folder, shapes, reserved_ids=frozenset({"tiny"})) as store:
        for name, adapter in (adapters or {}).items():
            peft = read_peft_dir(adapter)
            store.register(name, peft.config, store.add_blob(peft.weights_path))
        fetch = PageClient.of(options.read_cluster_secret())
        engine = AsyncEngine.build(options.engine_config(), store, fetch=fetch)
        app = create_app(engine, store, options)
        with (
            listening(app) as running,
            httpx2.Client(base_url=f"http://127.0.0.1:{running.port}", trust_env=False, timeout=60) as http,
        ):

            def held() -> dict[str, Any]:
                pool = http.get("/v1/pool").json()
                pinned = [adapter["ids"] for adapter in pool["adapters"] if adapter["requests"]]
                return {"pages": pool["pages_kv"], "pinned": pinned, "requests": pool["requests"]}

            served = SimpleNamespace(http=http, url=str(http.base_url).rstrip("/"), engine=engine, store=store)
            served.thread, served.held, served.draining = running.thread, held, app.state.services.draining
            served.post = lambda path, **body: http.post(path, json=body)
            served.calm_down = lambda: eventually(lambda: not any(held().values()))
            yield served
