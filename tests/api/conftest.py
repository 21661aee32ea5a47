"""A fake engine with the real one's interface, a real store, and a real uvicorn on a loopback socket around them."""

import asyncio
import hashlib
import io
import itertools
import json
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
from safetensors.numpy import load_file, save_file
from starlette.types import ASGIApp, Receive, Scope, Send

from adapter_store.spec import AdapterKey, BaseShapes
from adapter_store.store import AdapterStore
from api.app import create_app
from api.asgi.limits import ConnectionLimits
from api.asgi.protocol import bounded
from api.cli.main import main
from api.config.settings import ServerSettings
from api.server import bind
from lorasrv.config import Limits
from lorasrv.engine.messages import AdapterStatus
from lorasrv.engine.output_processor import InFlightRequests
from lorasrv.engine.pool_snapshot import PoolMap
from lorasrv.engine.watchdog import Heartbeat
from lorasrv.errors import AdapterCold, AdapterLoadFailed, ContextLengthExceeded, EngineDead, InvalidRequest
from lorasrv.metrics.engine_stats import EngineMetrics, EngineStats
from lorasrv.metrics.request_observer import RequestObserver
from lorasrv.metrics.request_stats import RequestStats
from lorasrv.metrics.step_stats import StepProfile, StepStats
from lorasrv.models.spec import ModelSpec
from lorasrv.outputs import AdapterTier, FinishReason, RequestId, RequestOutput, RequestTiming
from lorasrv.request import EngineCoreRequest, OnCold
from lorasrv.sampling_params import BeamOptions, SamplingParams

if TYPE_CHECKING:
    from lorasrv.engine.async_engine import AsyncEngine

BASE = "tiny-base"
HIDDEN, FFN, LAYERS, VOCAB, CONTEXT = 8, 16, 2, 256, 512
SHAPES = BaseShapes(
    family="llama",
    num_layers=LAYERS,
    modules={"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.v_proj": (HIDDEN, 4), "mlp.down_proj": (FFN, HIDDEN)},
    name=BASE,
)
SPEC = ModelSpec(
    family="llama",
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=VOCAB,
    max_position=CONTEXT,
    norm_eps=1e-5,
)

EMPTY_POOL = PoolMap(
    pages_total=10,
    pages_free=10,
    pages_kv=0,
    pages_prefix=0,
    pages_adapters=0,
    page_tokens=16,
    block_bytes=1024,
    free_runs=1,
    longest_free_run=10,
    moved_pages=0,
    requests=(),
    adapters=(),
    swap_bytes=0,
)


class FakeTemplate:
    """Renders a conversation as `role:content` lines; one token a byte."""

    source = ""
    variables: frozenset[str] = frozenset()

    def checked_variables(self, given: dict[str, Any]) -> dict[str, Any]:
        return given

    def encode(self, messages: Sequence[dict[str, str]], tokenizer: object, *_: object, **__: object) -> list[int]:
        return list("\n".join(f"{m['role']}:{m['content']}" for m in messages).encode())


class FakeGrammars:
    """Compiles nothing: a grammar is its own constraint."""

    async def compile(self, grammar: object, principal: str) -> object:
        return grammar


class FakeStream(AsyncIterator[RequestOutput]):
    """Says what the engine scripted for it, one output a piece; `suffers` what goes wrong with the engine, or not."""

    def __init__(
        self, engine: "FakeEngine", outputs: list[RequestOutput], suffers: bool, refusal: Exception | None
    ) -> None:
        self.request_id = outputs[0].request_id
        self.num_prompt_tokens = outputs[0].num_prompt_tokens
        self._engine = engine
        self._outputs = iter(outputs)
        self._suffers = suffers
        self._refusal = refusal
        self._served = 0
        self._finished = False
        self.num_generated_tokens = 0

    async def __anext__(self) -> RequestOutput:
        await asyncio.sleep(0)
        if self._suffers:
            await self._suffer()
        if self._refusal is not None:
            self._finished = True
            raise self._refusal
        try:
            output = next(self._outputs)
        except StopIteration:
            raise StopAsyncIteration from None
        self._served += 1
        self._finished = output.finished
        self.num_generated_tokens = output.num_generated_tokens
        self._engine.traffic.on_output(self.request_id, output)
        return output

    async def _suffer(self) -> None:
        if self._served == self._engine.hang_after:
            await asyncio.Event().wait()
        if self._served == self._engine.die_after:
            self._finished = True
            raise self._engine.death
        if self._served == self._engine.bug_after:
            raise ZeroDivisionError
        if self._engine.load_error is not None:
            self._finished = True
            raise AdapterLoadFailed(self._engine.load_error)

    async def aclose(self) -> None:
        if not self._finished:
            self._finished = True
            self._engine.aborted.append(self.request_id)
            self._engine.traffic.on_finished(self.request_id, "client")


class FakeEngine:
    """Answers every request with `text` (choice by choice: `texts`), or with the adapter's key.

    Tests set what goes wrong, for all choices or for `unlucky_choice` alone. `cold_for_s`: no adapter is in the pool.
    """

    def __init__(self) -> None:
        self.model_name = BASE
        self.quantization = "int8"
        self.profile = StepProfile()
        self.traffic = RequestStats()
        self.queue_limiter = SimpleNamespace(num_tokens=0)
        self.step_stats = StepStats()
        self.max_model_len = CONTEXT
        self.page_size_tokens = 16
        self.spec = SPEC
        self.tokenizer = object()
        self.chat_template: FakeTemplate | None = FakeTemplate()
        self.grammars = FakeGrammars()
        self.metrics = EngineMetrics(EngineStats(pages_total=10, pages_free=7, requests_finished_total={"stop": 3}))
        self.heartbeat = Heartbeat()
        self.is_alive = False
        self.error: str | None = None
        self.text = "Hello wörld"
        self.texts: tuple[str, ...] = ()
        self.piece_chars = 1
        self.held = "_"
        self.ignores_adapters = False
        self.reason = FinishReason.STOP
        self.error_at_end: str | None = None
        self.unlucky_choice: int | None = None
        self.hang_after: int | None = None
        self.die_after: int | None = None
        self.death: Exception = EngineDead("the engine died: Test")
        self.bug_after: int | None = None
        self.load_error: str | None = None
        self.add_error: Exception | None = None
        self.cached_tokens = 0
        self.cold_for_s: float | None = None
        self.reached = AdapterStatus(AdapterTier.RESIDENT, 12.34)
        self.ask_error: Exception | None = None
        self.pool = EMPTY_POOL
        self.resident: list[tuple[AdapterKey, int]] = []
        self.added: list[SimpleNamespace] = []
        self.aborted: list[str] = []
        self.asked: list[tuple[object, ...]] = []
        self.limits: dict[str, Limits | None] = {}
        self.in_flight = InFlightRequests(lambda *_: None)
        self._numbers = itertools.count()

    @property
    def observers(self) -> RequestObserver:
        return self.traffic

    def check_admission(self, principal: str) -> None:
        assert principal

    async def start(self) -> None:
        self.is_alive = True

    async def shutdown(self) -> None:
        self.is_alive = False

    def abort_all(self, why: str, kind: type[EngineDead] = EngineDead) -> None:
        self.error = why

    async def add_choices(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        count: int,
        *,
        request_id: str | None = None,
        adapter: AdapterKey | None = None,
        principal: str = "anonymous",
        on_cold: OnCold = OnCold.WAIT,
        cache_salt: str = "",
        adapter_id: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        constraint: object = None,
        shown_token_ids: frozenset[int] = frozenset(),
        beams: BeamOptions | None = None,
    ) -> list[FakeStream]:
        if self.add_error is not None:
            raise self.add_error
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if not all(0 <= token < VOCAB for token in ids):
            raise InvalidRequest(f"token ids must lie in [0, {VOCAB})", param="prompt")
        if len(ids) + (sampling.max_tokens or 1) > self.max_model_len:
            raise ContextLengthExceeded(
                f"{len(ids)} + {sampling.max_tokens} > {self.max_model_len}", param="max_tokens"
            )
        label = request_id or f"req-{next(self._numbers)}"
        asked = SimpleNamespace(
            id=label,
            prompt=ids,
            sampling=sampling,
            count=count,
            adapter=adapter,
            principal=principal,
            on_cold=on_cold,
            cache_salt=cache_salt,
            adapter_id=adapter_id,
            priority=priority,
            timeout_s=timeout_s,
            constraint=constraint,
            shown_token_ids=shown_token_ids,
            beams=beams,
        )
        streams = [self._stream(RequestId(f"{label}#{i}"), i, asked) for i in range(count)]
        self.added.append(asked)
        self._count(streams, asked)
        return streams

    def _count(self, streams: list[FakeStream], asked: SimpleNamespace) -> None:
        first = EngineCoreRequest(
            streams[0].request_id,
            tuple(asked.prompt),
            asked.sampling.max_tokens or 1,
            asked.sampling,
            adapter_key=asked.adapter,
            adapter_id=asked.adapter_id,
            principal=asked.principal,
        )
        further = [replace(first, request_id=s.request_id, fork_of=first.request_id) for s in streams[1:]]
        self.traffic.on_accepted([first, *further], time.monotonic())

    def _stream(self, rid: RequestId, index: int, asked: SimpleNamespace) -> FakeStream:
        cold = asked.adapter is not None and self.cold_for_s is not None
        refusal = AdapterCold("the adapter is not in the pool yet", retry_after_s=self.cold_for_s or 0.0)
        outputs = self._outputs(rid, index, asked, fell_back=cold and asked.on_cold is OnCold.FALLBACK_BASE)
        suffers = self.unlucky_choice in (None, index)
        return FakeStream(self, outputs, suffers, refusal if cold and asked.on_cold is OnCold.REJECT else None)

    def _outputs(self, rid: RequestId, index: int, asked: SimpleNamespace, fell_back: bool) -> list[RequestOutput]:
        prompt = len(asked.prompt)
        text = self.texts[index] if self.texts else self.text
        if asked.adapter is not None and not fell_back and not self.ignores_adapters:
            text = f"I am {asked.adapter[:12]}"
        cut = text[: asked.sampling.max_tokens] if asked.sampling.max_tokens else text
        reason = self.reason if cut == text else FinishReason.LENGTH
        # As the real one: further choices share all of the prompt but its last token.
        cached = prompt - 1 if index else self.cached_tokens
        timing = RequestTiming(queue_ms=1.5, num_preemptions=index, num_cached_tokens=cached, fell_back=fell_back)
        if asked.adapter is not None:
            timing = replace(timing, tier=AdapterTier.DISK, load_ms=2.5)
        pieces = [cut[i : i + self.piece_chars] for i in range(0, len(cut), self.piece_chars)]
        # `_` (`held`) is a token whose text is held back, as that of half a character is.
        outputs = [
            RequestOutput(rid, piece.replace(self.held, ""), (i,), prompt, i + 1, timing)
            for i, piece in enumerate(pieces)
        ]
        error = self.error_at_end if self.unlucky_choice in (None, index) else None
        reason = FinishReason.ERROR if error is not None else reason
        outputs[-1] = replace(outputs[-1], finish_reason=reason, error=error)
        return outputs

    async def warm(self, adapter: AdapterKey, deadline_s: float) -> AdapterStatus:
        self.asked.append(("warm", adapter, deadline_s))
        if self.hang_after is not None:
            try:
                await asyncio.Event().wait()
            finally:
                self.aborted.append("warm")
        return self._reply()

    async def pin(self, adapter: AdapterKey) -> AdapterStatus:
        self.asked.append(("pin", adapter, True))
        return self._reply()

    async def unpin(self, adapter: AdapterKey) -> AdapterStatus:
        self.asked.append(("pin", adapter, False))
        return self._reply()

    async def set_limits(self, adapter_id: str, limits: Limits | None) -> None:
        assert self.is_alive
        self.limits[adapter_id] = limits

    async def tier(self, adapter: AdapterKey) -> AdapterTier:
        return self._reply().tier

    async def residents(self) -> list[tuple[AdapterKey, int]]:
        return self.resident

    async def pool_map(self) -> PoolMap:
        self._reply()
        return self.pool

    def _reply(self) -> AdapterStatus:
        if self.ask_error is not None:
            raise self.ask_error
        return self.reached


@pytest.fixture(autouse=True)
def _nobodys_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What whoever runs the tests has configured is not theirs."""
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
    # Not `create_server`: asyncio turns Nagle's algorithm off only where the protocol is named, and each answer in two
    # parts would wait 40 ms for the client's acknowledgement.
    listener = bind("127.0.0.1", 0)
    listener.listen()
    dispatcher = Dispatcher()
    config = uvicorn.Config(
        dispatcher, http=bounded(ConnectionLimits()), ws="none", log_config=None, timeout_graceful_shutdown=1
    )
    uvicorn_server = uvicorn.Server(config)
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
