"""A registry without an engine: what checks is the real one, and what computes is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from server import listening
from tiny_checkpoints import filled_store

from api.app import create_app
from api.config.settings import ServerSettings
from api.replication.store_engine import StoreEngine
from lorasrv.config import ModelOptions

SECRET = "of-one-cluster"
CHAT = {"messages": [{"role": "user", "content": "x"}]}
OFFER = {"layout": 1, "facts": {}, "digests": ["0" * 64], "prompt": None, "wait_s": 1}


@pytest.fixture(scope="module")
def http(
    model: Path, adapter_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx2.Client]:
    folder = tmp_path_factory.mktemp("registry") / "store"
    for store in filled_store(folder, model, {"mia": adapter_dirs["one"]}):
        engine = StoreEngine.build(ModelOptions(model=str(model)), store)
        app = create_app(engine, store, ServerSettings(store=folder, cluster_secret=SECRET, metrics_compat="vllm"))
        with listening(app) as running, httpx2.Client(base_url=f"http://127.0.0.1:{running.port}") as client:
            yield client


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", {"prompt": "x"}),
        ("POST", "/v1/chat/completions", CHAT),
        ("POST", "/v1/adapters/mia:warm", {}),
        ("PATCH", "/v1/adapters/mia", {"pinned": True}),
        ("PATCH", "/v1/adapters/mia", {"pinned": False}),
        ("POST", "/v1/adapters/mia:snapshot", None),
        ("GET", "/v1/pool", None),
        ("GET", "/v1/replica", None),
        ("POST", "/v1/pages/offer", OFFER),
        ("GET", "/v1/pages/none", None),
    ],
)
def test_what_computes_is_refused(http: httpx2.Client, method: str, path: str, body: Any) -> None:
    of_cluster = path.startswith(("/v1/replica", "/v1/pages"))
    headers = {"authorization": f"Bearer {SECRET}"} if of_cluster else {}
    answer = http.request(method, path, json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_engine"), answer.text


def test_texts_are_counted_with_the_real_tokenizer(http: httpx2.Client) -> None:
    assert http.post("/tokenize", json={"prompt": "x"}).json()["count"] > 0


def test_its_metrics_name_no_adapter_in_a_pool(http: httpx2.Client) -> None:
    answer = http.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert "lorasrv_up 1.0" in answer.text
