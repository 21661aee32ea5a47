"""Verifying for real: a tiny model, adapters made by PEFT, the application, the process and the command line."""

import asyncio
import importlib.util
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from adapter_store.store import AdapterStore
from api.app import create_app
from api.config.settings import ServerSettings
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.models.loader import open_checkpoint
from lorasrv.models.lora_sites import base_shapes
from lorasrv.offline.verify.verifier import COMMAND, LIBRARY_BYTES, Verifier

_SPEC = importlib.util.spec_from_file_location("engine_fixtures", Path(__file__).parents[2] / "lorasrv" / "conftest.py")
assert _SPEC is not None
assert _SPEC.loader is not None
_FIXTURES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_FIXTURES)
# The engine's tests make tiny checkpoints.
corpus, tiny_tokenizer_file = _FIXTURES.corpus, _FIXTURES.tiny_tokenizer_file
tiny_hf_checkpoints = _FIXTURES.tiny_hf_checkpoints

TWICE_AS_STRONG = """
from dataclasses import replace
from adapter_store.formats.weights import AdapterWeights
from lorasrv.offline.verify import served, worker as child
pack = served.pack_adapter
def wrong(spec, layout, weights, dtype):
    twice = {site: replace(weights[site], scaling=2 * weights[site].scaling) for site in weights}
    return pack(spec, layout, AdapterWeights(weights.spec, twice), dtype)
served.pack_adapter = wrong
child.main()
"""


@pytest.fixture
def serve(
    tiny_hf_checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli, eventually
) -> Iterator[Callable[..., str]]:
    """serve(family, command, ...) -> URL of a real server that has `mia`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    stop: list[Callable[[], None]] = []

    def start(family: str, command: tuple[str, ...] = COMMAND, **settings: Any) -> str:
        model = tiny_hf_checkpoints[family]()
        torch.manual_seed(1)
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        peft = get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora)
        with torch.no_grad():
            for name, parameter in peft.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(0.3)
        peft.save_pretrained(tmp_path / "mia")
        monkeypatch.setattr("api.app.Verifier", lambda: Verifier(command))
        options = ServerSettings(model=str(model), pool_bytes="8MiB", store=tmp_path / "store", **settings)
        checkpoint = open_checkpoint(str(model))
        checkpoint.close()
        store = AdapterStore(tmp_path / "store", base_shapes(checkpoint.spec))
        engine = AsyncEngine.build(options.engine_config(), store)
        server = uvicorn.Server(
            uvicorn.Config(create_app(engine, store, options), log_config=None, timeout_graceful_shutdown=1)
        )
        listener = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()

        def end() -> None:
            server.should_exit = True
            thread.join(60)
            store.close()
            listener.close()

        stop.append(end)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        eventually(lambda: server.started)
        done = cli("upload", tmp_path / "mia", "--id", "mia", "--server", url)
        assert done.code == 0, done.err
        return url

    yield start
    for end in stop:
        end()


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "settings", "verdict"),
    [
        ("llama", {"quantization": "int8"}, "within"),
        ("gemma3", {"quantization": "none", "dtype": "float32", "kernels": "torch"}, "exact"),
    ],
)
def test_an_adapter_is_verified(serve, cli, family: str, settings: dict[str, str], verdict: str) -> None:
    import httpx2

    url = serve(family, **settings)
    done = cli("verify", "mia", "--server", url)
    assert done.code == 0, done.err
    assert verdict in done.out
    assert "computing with PEFT" in done.err
    stored = httpx2.get(f"{url}/v1/adapters/mia", trust_env=False).json()["verified"]
    assert stored["verdict"] == verdict
    assert stored["adapter_error"]["positions"] == 4 * 9
    assert stored["computed_with"]["quantization"] == settings["quantization"]
    assert stored["effect"]["shows_in_logits"]
    assert stored["cpu_seconds"] > 0
    assert 100 << 20 < stored["peak_bytes"] < LIBRARY_BYTES


@pytest.mark.long
def test_sabotage_in_the_process_is_found(serve, cli) -> None:
    url = serve("llama", (sys.executable, "-P", "-c", TWICE_AS_STRONG), quantization="int8")
    done = cli("verify", "mia", "--server", url)
    assert done.code == 1
    assert "differs" in done.out
    assert "linears are off" in done.err
