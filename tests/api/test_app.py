"""What runs beside the requests: started with the application, and ended with it whatever fails."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from adapter_store.store import AdapterStore
from api.app import create_app
from api.auth.key_cache import KeyCache
from api.batches.manager import BatchManager
from api.config.settings import ServerSettings
from api.observability.setup import Observability


def failing(what: str) -> Callable[..., Any]:
    async def fails(*_: object) -> None:
        raise OSError(what)

    return fails


@pytest.mark.parametrize("what", ["start", "close"])
def test_all_ends_though_one_part_fails(
    engine: Any, store: AdapterStore, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    ended: list[str] = []

    def noted(kind: type, name: str) -> None:
        ends = getattr(kind, name)

        async def note(self: Any) -> None:
            ended.append(kind.__name__)
            await ends(self)

        monkeypatch.setattr(kind, name, note)

    noted(type(engine), "shutdown")
    noted(KeyCache, "write_uses")
    noted(Observability, "close")
    monkeypatch.setattr(BatchManager, what, failing("the disk is gone"))
    app = create_app(engine, store, ServerSettings())

    async def run() -> None:
        async with app.router.lifespan_context(app):
            assert engine.is_alive

    with pytest.raises(OSError, match="the disk is gone"):
        asyncio.run(run())
    assert ended == [type(engine).__name__, "KeyCache", "Observability"]
    assert not engine.is_alive
