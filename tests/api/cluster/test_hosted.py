"""A whole server in a thread of a process whose event loops are another library's, as Ray's are uvloop's."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import httpx2
import pytest

from api.cluster.hosted import HostedServer
from api.config.settings import ServerSettings


class PolicyWithoutWatcher(asyncio.DefaultEventLoopPolicy):  # type: ignore[name-defined,misc]
    """Refuses as uvloop's does."""

    def get_child_watcher(self) -> NoReturn:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def process_of_another() -> Iterator[None]:
    policy, factory = asyncio.get_event_loop_policy(), logging.getLogRecordFactory()
    asyncio.set_event_loop_policy(PolicyWithoutWatcher())
    yield
    asyncio.set_event_loop_policy(policy)
    logging.setLogRecordFactory(factory)


def test_a_hosted_server_compiles_grammars(model: Path, tmp_path: Path) -> None:
    settings = ServerSettings(
        model=str(model), pool_bytes="16MiB", store=tmp_path / "store", kernels="torch", drain_s=1
    )
    hosted = HostedServer(settings, "one", "127.0.0.1", log=str(tmp_path / "log"))
    try:
        body = {"model": hosted.ready().model, "prompt": "a", "guided_regex": "(yes|no)", "temperature": 0}
        answer = httpx2.post(f"{hosted.ready().url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] in ("yes", "no")
    finally:
        hosted.close()
