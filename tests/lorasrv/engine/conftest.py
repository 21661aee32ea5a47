"""The engine without its bound on sleep: a wake-up that is missed is a request that never ends."""

import pytest

from lorasrv.engine import engine_thread


@pytest.fixture(autouse=True)
def sleeps_until_it_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "MAX_WAIT_S", engine_thread.MAX_SLEEP_S)
