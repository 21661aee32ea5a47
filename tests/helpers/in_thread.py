"""A real engine on a tiny model behind a real uvicorn in a thread of the test: quicker to have than a process."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator, Mapping
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
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes

CALM_SECONDS = 30.0


@contextmanager
def tiny_server(model: Path, adapters: Mapping[str, Path], folder: Path, **settings: Any) -> Iterator[SimpleNamespace]:
    """Serves `model` with these PEFT folders by id: `http` is a client, `calm_down()` waits until nothing is held."""
    options = ServerSettings(
        **{"model": str(model), "pool_bytes": "16MiB", "store": folder, "kernels": "torch", **settings}
    )
    checkpoint = open_checkpoint(str(model))
    checkpoint.close()
    store = AdapterStore(folder, base_shapes(checkpoint.spec), reserved_ids=frozenset({"tiny"}))
    for name, adapter in adapters.items():
        peft = read_peft_dir(adapter)
        store.register(name, peft.config, store.add_blob(peft.weights_path))
    engine = AsyncEngine.build(options.engine_config(), store)
    app = create_app(engine, store, options)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()  # connections wait in the listener until it is ready
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with httpx2.Client(base_url=url, trust_env=False, timeout=60) as http:

        def held() -> dict[str, Any]:
            """What requests have in the pool now: pages, and adapters that they need."""
            pool = http.get("/v1/pool").json()
            pinned = [adapter["ids"] for adapter in pool["adapters"] if adapter["requests"]]
            return {"pages": pool["pages_kv"], "pinned": pinned, "requests": pool["requests"]}

        def calm_down() -> None:
            """Waits until that is nothing. Raises: AssertionError: that does not come."""
            deadline = time.monotonic() + CALM_SECONDS
            while any(held().values()):
                assert time.monotonic() < deadline, f"still held: {held()}"
                time.sleep(0.01)

        try:
            yield SimpleNamespace(http=http, url=url, engine=engine, store=store, held=held, calm_down=calm_down)
        finally:
            server.should_exit = True
            thread.join(60)
            store.close()
            listener.close()
            assert not thread.is_alive()
