"""TGI's routes around a real engine with a tiny model: the very text and probabilities of the OpenAI routes."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import uvicorn

from adapter_store.store import AdapterStore
from api.app import create_app
from api.config.settings import ServerSettings
from lorasrv.config import EngineConfig, MemoryOptions, ModelOptions
from lorasrv.engine.async_engine import AsyncEngine
from lorasrv.models.loader.hf import read_spec
from lorasrv.models.lora_sites import base_shapes

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPT = "a wörd"


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    model = tmp_path_factory.mktemp("tiny")
    (model / "config.json").write_text(json.dumps(CONFIG))
    options = ModelOptions(model=str(model), load_format="dummy", quantization="none", dtype="float32", kernels="torch")
    config = EngineConfig(model=options, memory=MemoryOptions(pool_bytes=4 << 20))
    with AdapterStore(model / "store", base_shapes(read_spec(model))) as store:
        app = create_app(AsyncEngine.build(config, store), store, ServerSettings(served_model_name="tiny"))
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx2.Client(base_url=url, trust_env=False, timeout=60) as client:
            yield client
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def generate(http: httpx2.Client, **parameters: Any) -> dict[str, Any]:
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 24, "details": True, **parameters}}
    response = http.post("/generate", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def complete(http: httpx2.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, **fields}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def test_text_and_probabilities_are_those_of_the_openai_route(http) -> None:
    expected = complete(http, logprobs=0)
    answer = generate(http, decoder_input_details=True)
    assert answer["generated_text"] == expected["text"]
    tokens = answer["details"]["tokens"]
    assert [token["logprob"] for token in tokens] == expected["logprobs"]["token_logprobs"]
    assert "".join(token["text"] for token in tokens) == expected["text"]


def test_prompt_s_probabilities(http) -> None:
    prefill = generate(http, decoder_input_details=True)["details"]["prefill"]
    echoed = complete(http, logprobs=0, echo=True, max_tokens=1)["logprobs"]["token_logprobs"]
    assert [token["logprob"] for token in prefill] == echoed[: len(prefill)]
    tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert [token["id"] for token in prefill] == tokens
    assert (
        "".join(token["text"] for token in prefill)
        == http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    )


def test_top_tokens(http) -> None:
    details = generate(http, top_n_tokens=3)["details"]
    # Greedy: what was chosen is the likeliest, with the very same probability.
    for token, top in zip(details["tokens"], details["top_tokens"], strict=True):
        assert len(top) == 3
        assert (token["id"], token["logprob"]) == (top[0]["id"], top[0]["logprob"])


def test_stream_is_the_whole_answer_in_tokens(http) -> None:
    parameters = {"do_sample": True, "seed": 5, "stop": ["\x00never"]}
    whole = generate(http, **parameters)
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 24, "details": True, **parameters}}
    parts = http.post("/generate_stream", json=body).text.split("\n\n")[:-1]
    events = [json.loads(part.removeprefix("data: ")) for part in parts]
    assert [event["token"] for event in events] == whole["details"]["tokens"]
    assert events[-1]["generated_text"] == whole["generated_text"]
    assert events[-1]["details"]["seed"] == whole["details"]["seed"] == 5


def test_a_seed_that_was_told_gives_the_same_answer(http) -> None:
    first = generate(http, do_sample=True)
    assert generate(http, do_sample=True, seed=first["details"]["seed"])["generated_text"] == first["generated_text"]


def test_best_of(http) -> None:
    details = generate(http, do_sample=True, best_of=4, decoder_input_details=True)["details"]
    mean = lambda tokens: sum(token["logprob"] for token in tokens) / len(tokens)  # noqa: E731
    others = details["best_of_sequences"]
    assert mean(details["tokens"]) == max(
        mean(tokens) for tokens in (details["tokens"], *(o["tokens"] for o in others))
    )
    assert len(details["prefill"]) == details["prompt_tokens"]
