"""A fake engine with the real one's interface, a real store, and a real uvicorn on a loopback socket around them."""

import hashlib
import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
from fake_engine import FakeEngine
from raw_client import RawClient, json_request
from safetensors.numpy import load_file, save_file
from server import eventually, listening
from starlette.types import ASGIApp, Receive, Scope, Send
from tiny_adapter import BASE, SHAPES, tiny_adapter
from tiny_checkpoints import adapter_dirs, model, tiny_hf_checkpoints  # noqa: F401

from adapter_store.store import AdapterStore
from api import early_stop
from api.app import create_app
from api.asgi.limits import ConnectionLimits
from api.asgi.protocol import bounded
from api.cli.main import main
from api.config.settings import ServerSettings

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide the configuration of the user who runs the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "config"))
    for name in ("LORASRV_CONFIG", "LORASRV_SERVER", "LORASRV_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    with AdapterStore(tmp_path / "store", SHAPES, max_lora_rank=8, reserved_ids=frozenset({BASE})) as store:
        yield store


class Server:
    """A running server: its URL, and a client for it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx2.Client(base_url=self.url, trust_env=False, timeout=120)

    def chat(self, content: str = "hi", **fields: Any) -> httpx2.Response:
        body = {"model": BASE, "messages": [{"role": "user", "content": content}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def upload(self, folder: Path, adapter_id: str, **fields: Any) -> httpx2.Response:
        weights = (folder / "adapter_model.safetensors").read_bytes()
        digest = hashlib.sha256(weights).hexdigest()
        self.http.put(f"/v1/blobs/sha256:{digest}", content=weights).raise_for_status()
        config = json.loads((folder / "adapter_config.json").read_text())
        body = {"id": adapter_id, "config": config, "weights": f"sha256:{digest}", **fields}
        return self.http.post("/v1/adapters", json=body)

    def patch(self, reference: str = "mia", if_match: str | None = None, **body: Any) -> httpx2.Response:
        headers = {} if if_match is None else {"if-match": if_match}
        return self.http.patch(f"/v1/adapters/{reference}", json=body, headers=headers)

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx2.Response:
        return self.http.post("/v1/completions", json={"model": BASE, "prompt": prompt, **fields})

    def leaving(self, path: str = "/v1/completions", *headers: str, **fields: Any) -> RawClient:
        """A connection whose request has been sent, and whose answer is not read. `headers`: further lines of it."""
        prompts = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": MESSAGES}}
        body = {"model": BASE, **prompts[path]} if path in prompts else {}
        return RawClient(self.port).send(json_request(path, *headers, **body | fields))


class Dispatcher:
    """One uvicorn for all tests (starting one takes 0.3 s): hands requests to the application of the running test."""

    app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None
        await self.app(scope, receive, send)


@pytest.fixture(scope="session")
def dispatcher() -> Iterator[tuple[Dispatcher, Server]]:
    dispatcher = Dispatcher()
    with listening(dispatcher, http=bounded(ConnectionLimits()), lifespan="off") as running:
        server = Server(running.port)
        yield dispatcher, server
        server.http.close()


@pytest.fixture
def make_server(
    engine: FakeEngine, store: AdapterStore, dispatcher: tuple[Dispatcher, Server]
) -> Callable[..., Server]:
    """Serves the fake engine with the given settings."""
    engine.is_alive = True

    def start(**settings: Any) -> Server:
        dispatcher[0].app = create_app(engine, store, ServerSettings(**settings))
        return dispatcher[1]

    return start


@pytest.fixture
def server(make_server: Callable[..., Server]) -> Server:
    return make_server()


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., None]:
    return eventually


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., Path]:
    """Writes PEFT folders that fit the tiny base: `tiny_adapter` by name."""
    return lambda name="mia", **options: tiny_adapter(tmp_path / "peft" / name, **options)


@pytest.fixture
def as_mlx() -> Callable[[Path], Path]:
    """Writes the adapter of a PEFT folder, r 2 and alpha 4, beside it as MLX would have saved it."""

    def write(peft: Path) -> Path:
        folder = peft.with_name(f"{peft.name}-mlx")
        folder.mkdir()
        tensors = load_file(peft / "adapter_model.safetensors")
        halves = {".lora_A.weight": ".lora_a", ".lora_B.weight": ".lora_b"}
        renamed = {
            name.removeprefix("base_model.model.")[:-14] + halves[name[-14:]]: np.ascontiguousarray(tensor.T)
            for name, tensor in tensors.items()
        }
        save_file(renamed, folder / "adapters.safetensors")
        run = {"fine_tune_type": "lora", "lora_parameters": {"rank": 2, "scale": 2.0, "dropout": 0.0}, "model": BASE}
        (folder / "adapter_config.json").write_text(json.dumps(run))
        return folder

    return write


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., SimpleNamespace]]:
    """Runs the `lorasrv` command in this process: code, out, err."""
    handlers = {number: signal.getsignal(number) for number in early_stop.EXIT_CODES}

    def run(*arguments: object, stdin: str = "") -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["lorasrv", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return SimpleNamespace(code=int(exit_.value.code or 0), out=out, err=err)

    yield run
    early_stop.started()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def run(cli: Callable[..., SimpleNamespace], server: Server) -> Callable[..., SimpleNamespace]:
    """Runs a command that asks the server."""
    return lambda *arguments: cli(*arguments, "--server", server.url)
