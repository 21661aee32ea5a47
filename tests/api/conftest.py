"""A fake engine with the real one's interface, a real store, and a real uvicorn on a loopback socket around them."""

import asyncio
import hashlib
import io
import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import httpx2
import numpy as np
import pytest
import uvicorn
from safetensors.numpy import save_file
from starlette.types import ASGIApp, Receive, Scope, Send

from adapter_store.spec import AdapterKey, BaseShapes
from adapter_store.store import AdapterStore
from api.app import create_app
from api.cli.main import main
from api.settings import ServerSettings
from lorasrv.errors import AdapterLoadFailed, ContextLengthExceeded, EngineDead, InvalidRequest
from lorasrv.metrics import EngineMetrics, EngineSnapshot
from lorasrv.request import AdapterTier, FinishReason, RequestId, RequestOutput, RequestTiming, SamplingParams

if TYPE_CHECKING:
    from lorasrv.async_engine import AsyncEngine

BASE = "tiny-base"
HIDDEN, FFN, LAYERS, VOCAB, CONTEXT = 8, 16, 2, 256, 512
SHAPES = BaseShapes(
    family="llama",
    num_layers=LAYERS,
    modules={"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.v_proj": (HIDDEN, 4), "mlp.down_proj": (FFN, HIDDEN)},
    name=BASE,
)


class FakeTemplate:
    """Renders a conversation as `role:content` lines; one token a byte."""

    def encode(self, messages: Sequence[dict[str, str]], tokenizer: object) -> list[int]:
        return list("\n".join(f"{m['role']}:{m['content']}" for m in messages).encode())


class FakeStream(AsyncIterator[RequestOutput]):
    """Says what the engine scripted for it, one output a piece."""

    def __init__(self, engine: "FakeEngine", request_id: RequestId, outputs: list[RequestOutput]) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = outputs[0].num_prompt_tokens
        self._engine = engine
        self._outputs = iter(outputs)
        self._served = 0
        self._finished = False

    async def __anext__(self) -> RequestOutput:
        await asyncio.sleep(0)
        if self._served == self._engine.hang_after:
            await asyncio.Event().wait()
        if self._served == self._engine.die_after:
            self._finished = True
            raise EngineDead("the engine died: Test")
        if self._served == self._engine.bug_after:
            raise ZeroDivisionError
        if self._engine.load_error is not None:
            self._finished = True
            raise AdapterLoadFailed(self._engine.load_error)
        try:
            output = next(self._outputs)
        except StopIteration:
            raise StopAsyncIteration from None
        self._served += 1
        self._finished = output.finished
        return output

    async def aclose(self) -> None:
        if not self._finished:
            self._finished = True
            self._engine.aborted.append(self.request_id)


class FakeEngine:
    """Answers every request with `text`, or with the adapter's key; tests set what goes wrong."""

    def __init__(self) -> None:
        self.model_name = BASE
        self.max_model_len = CONTEXT
        self.page_size_tokens = 16
        self.spec = SimpleNamespace(vocab_size=VOCAB)
        self.tokenizer = object()
        self.chat_template: FakeTemplate | None = FakeTemplate()
        self.metrics = EngineMetrics(EngineSnapshot(pages_total=10, pages_free=7, requests_finished_total={"stop": 3}))
        self.is_alive = False
        self.error: str | None = None
        self.text = "Hello wörld"
        self.piece_chars = 1
        self.ignores_adapters = False
        self.reason = FinishReason.STOP
        self.error_at_end: str | None = None
        self.hang_after: int | None = None
        self.die_after: int | None = None
        self.bug_after: int | None = None
        self.load_error: str | None = None
        self.add_error: Exception | None = None
        self.added: list[SimpleNamespace] = []
        self.aborted: list[str] = []
        self._numbers = itertools.count()

    async def start(self) -> None:
        self.is_alive = True

    async def shutdown(self) -> None:
        self.is_alive = False

    async def add(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        adapter: AdapterKey | None = None,
        request_id: str | None = None,
        principal: str = "anonymous",
    ) -> FakeStream:
        if self.add_error is not None:
            raise self.add_error
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if not all(0 <= token < VOCAB for token in ids):
            raise InvalidRequest(f"token ids must lie in [0, {VOCAB})", param="prompt")
        if len(ids) + (sampling.max_tokens or 1) > CONTEXT:
            raise ContextLengthExceeded(f"{len(ids)} + {sampling.max_tokens} > {CONTEXT}", param="max_tokens")
        rid = RequestId(request_id or f"req-{next(self._numbers)}")
        self.added.append(SimpleNamespace(id=rid, prompt=ids, sampling=sampling, adapter=adapter, principal=principal))
        text = self.text if adapter is None or self.ignores_adapters else f"I am {adapter[:12]}"
        return FakeStream(self, rid, self._outputs(rid, text, len(ids), sampling, adapter))

    def _outputs(
        self, rid: RequestId, text: str, prompt: int, sampling: SamplingParams, adapter: AdapterKey | None
    ) -> list[RequestOutput]:
        cut = text[: sampling.max_tokens] if sampling.max_tokens else text
        reason = self.reason if cut == text else FinishReason.LENGTH
        timing = RequestTiming(queue_ms=1.5, load_ms=0.0 if adapter is None else 2.5)
        timing = timing if adapter is None else replace(timing, tier=AdapterTier.DISK)
        pieces = [cut[i : i + self.piece_chars] for i in range(0, len(cut), self.piece_chars)]
        # `_` is a token whose text is held back, as that of half a character is.
        outputs = [
            RequestOutput(rid, piece.replace("_", ""), (i,), prompt, i + 1, timing) for i, piece in enumerate(pieces)
        ]
        outputs[-1] = replace(outputs[-1], finish_reason=reason, error=self.error_at_end)
        return outputs


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
        self.http = httpx2.Client(base_url=self.url, trust_env=False, timeout=20)

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

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx2.Response:
        return self.http.post("/v1/completions", json={"model": BASE, "prompt": prompt, **fields})


class Dispatcher:
    """One uvicorn for all tests (starting one takes 0.3 s): hands requests to the application of the running test."""

    app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
            return
        assert self.app is not None
        await self.app(scope, receive, send)


@pytest.fixture(scope="session")
def dispatcher() -> Iterator[tuple[Dispatcher, Server]]:
    listener = socket.create_server(("127.0.0.1", 0))
    dispatcher = Dispatcher()
    uvicorn_server = uvicorn.Server(uvicorn.Config(dispatcher, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]})
    thread.start()
    eventually(lambda: uvicorn_server.started)
    server = Server(listener.getsockname()[1])
    yield dispatcher, server
    server.http.close()
    uvicorn_server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def make_server(
    engine: FakeEngine, store: AdapterStore, dispatcher: tuple[Dispatcher, Server]
) -> Callable[..., Server]:
    """Serves the fake engine with the given settings."""
    engine.is_alive = True

    def start(**settings: Any) -> Server:
        dispatcher[0].app = create_app(cast("AsyncEngine", engine), store, ServerSettings(**settings))
        return dispatcher[1]

    return start


@pytest.fixture
def server(make_server: Callable[..., Server]) -> Server:
    return make_server()


def eventually(condition: Callable[[], object], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., None]:
    return eventually


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., Path]:
    """Writes PEFT folders that fit the tiny base; `seed` makes another content."""

    def make(name: str = "mia", *, seed: int = 0, rank: int = 2, **config: Any) -> Path:
        folder = tmp_path / "peft" / name
        folder.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(seed)
        tensors = {}
        for layer in range(LAYERS):
            for module, (n_in, n_out) in {
                "self_attn.q_proj": (HIDDEN, HIDDEN),
                "self_attn.v_proj": (HIDDEN, 4),
            }.items():
                stem = f"base_model.model.model.layers.{layer}.{module}"
                tensors[f"{stem}.lora_A.weight"] = random.standard_normal((rank, n_in)).astype(np.float32)
                tensors[f"{stem}.lora_B.weight"] = random.standard_normal((n_out, rank)).astype(np.float32)
        save_file(tensors, folder / "adapter_model.safetensors")
        fields = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": 4,
            "target_modules": ["q_proj", "v_proj"],
            "base_model_name_or_path": BASE,
            **config,
        }
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        return folder

    return make


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Runs the `lorasrv` command in this process: code, out, err."""

    def run(*arguments: object, stdin: str = "") -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["lorasrv", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return SimpleNamespace(code=int(exit_.value.code or 0), out=out, err=err)

    return run
