"""A registry and servers that follow it, with fake engines and real stores, on real sockets of this process."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
from fake_engine import FakeEngine
from pydantic import SecretStr
from server import eventually, listening
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tiny_adapter import BASE, SHAPES

from adapter_store.store import AdapterStore
from api.app import create_app
from api.config.settings import ServerSettings
from api.replication.follower import Follower
from api.replication.registry_client import HttpOrigin, RegistryClient

SECRET = "secret-of-the-cluster"
NAMES = frozenset({BASE})


class Line:
    """The network in front of a server: open; silent (nothing comes back); broken (connections end); deaf for paths
    whose answers are lost after the server has handled the request; or redirected to another server.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.is_silent = self.is_broken = False
        self.loses_answers_to: str | None = None
        self.other: ASGIApp | None = None
        # Paths of the requests that were passed on.
        self.passed: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            while self.is_silent:
                await asyncio.sleep(0.01)
            if self.is_broken:
                raise ConnectionError("the line is broken")
            if self.other is not None:
                await self.other(scope, receive, send)
                return
            self.passed.append(scope["path"])
            if scope["path"] == self.loses_answers_to:
                await self.app(scope, receive, _drop)
                raise ConnectionError("the answer is lost")
        await self.app(scope, receive, send)


async def _drop(message: Message) -> None:
    """Send nothing."""


@dataclass
class Node:
    """One server."""

    url: str
    http: httpx2.Client
    store: AdapterStore
    engine: FakeEngine
    line: Line
    services: Any
    follower: Follower | None = None
    # Seconds by which the server's clock is ahead.
    ahead: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(s=0.0))

    def ask(self, model: str, **headers: str) -> httpx2.Response:
        body = {"model": model, "prompt": "hi"}
        return self.http.post(
            "/v1/completions", json=body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

    def catches_up(self, other: "Node") -> None:
        eventually(lambda: self.store.feed.revision == other.store.feed.revision)


class Cluster:
    """Start servers, which end with the context."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.folder, self._opened = folder, opened
        self.registry = self.start("registry")

    def start(self, name: str, *, follows: str | None = None, **settings: Any) -> Node:
        """Start a server, which follows a registry if `follows` is its address."""
        ahead = SimpleNamespace(s=0.0)
        origin = None if follows is None else HttpOrigin(follows, SECRET)
        store = self._opened.enter_context(
            AdapterStore(self.folder / name, SHAPES, max_lora_rank=8, reserved_ids=NAMES, origin=origin)
        )
        follower = None
        if origin is not None:
            clock = lambda: time.monotonic() + ahead.s  # noqa: E731
            follower = Follower(store, origin, RegistryClient(origin, SECRET), f"{len(name):08x}", clock)
        engine = FakeEngine()
        options = ServerSettings(cluster_secret=SecretStr(SECRET), **settings)
        app = create_app(engine, store, options, follower)
        line = Line(app)
        running = self._opened.enter_context(listening(line))
        url = f"http://127.0.0.1:{running.port}"
        http = self._opened.enter_context(httpx2.Client(base_url=url, trust_env=False, timeout=60))
        return Node(url, http, store, engine, line, app.state.services, follower, ahead)

    def follow(self, name: str = "follower", **settings: Any) -> Node:
        """Start a server that follows the registry, and wait until it is ready."""
        node = self.start(name, follows=self.registry.url, **settings)
        eventually(lambda: node.http.get("/ready").status_code == 200)
        return node


@contextmanager
def clustered(folder: Path) -> Iterator[Cluster]:
    """Start a registry, and yield a cluster to which followers can be added."""
    with ExitStack() as opened:
        yield Cluster(folder, opened)
