"""The kept bytes of /v1/models: always those of the store as it is, and encoded once."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest

from adapter_store.registry.records import AdapterRecord, VersionRecord
from adapter_store.spec import AdapterId, AdapterKey
from api.serving.model_list import ModelList, adapter_card, base_card

BASE = base_card("base", 7, 512, {"format": "int8"}, batch_invariant=True)


def record(name: str, number: int = 0) -> AdapterRecord:
    version = VersionRecord(1, AdapterKey(f"{number:064x}"), 1.0, 8, 100)
    return AdapterRecord.of(AdapterId(name), 1, 1.0, [version])


def records_of(*names: str) -> dict[AdapterId, AdapterRecord]:
    return {AdapterId(name): record(name) for name in names}


def ids(page: bytes) -> list[str]:
    return [card["id"] for card in json.loads(page)["data"]]


@pytest.fixture
def encoded() -> list[str]:
    return []


@pytest.fixture
def listed(encoded: list[str]) -> ModelList:
    def card(of: AdapterRecord) -> dict[str, object]:
        encoded.append(of.adapter_id)
        return adapter_card(BASE, of)

    return ModelList(BASE, card)


def test_the_same_state_is_the_same_bytes(listed, encoded) -> None:
    records = records_of("b", "a")
    page = listed.page(records, "", None, None)
    assert ids(page) == ["base", "a", "b"]
    assert listed.page(records, "", None, None) is page
    assert encoded == ["a", "b"]


def test_only_what_changed_is_encoded_again(listed, encoded) -> None:
    records = records_of("a", "b", "c", "e")
    listed.page(records, "", None, None)
    encoded.clear()
    equal = replace(records[AdapterId("e")])
    changed = {**records, AdapterId("b"): record("b", 5), AdapterId("d"): record("d"), AdapterId("e"): equal}
    del changed[AdapterId("c")]
    page = listed.page(changed, "", None, None)
    assert ids(page) == ["base", "a", "b", "d", "e"]
    assert json.loads(page)["data"][2]["root"].endswith("5")
    assert encoded == ["b", "d", "e"], "by identity: an equal record may be of another state"


def test_each_reader_has_the_list_of_its_own_state(listed) -> None:
    """Threads that list two states at once must not leave their bytes to each other."""
    states = [records_of("a"), records_of("a", "b")]

    def read(of: int) -> set[int]:
        return {len(ids(listed.page(states[of], "", None, None))) for _ in range(300)}

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(read, (0, 1, 0, 1))) == [{2}, {3}, {2}, {3}]


def test_what_is_uploaded_is_listed_at_once(server, make_adapter) -> None:
    models = lambda: [m["id"] for m in server.http.get("/v1/models").json()["data"]]  # noqa: E731
    assert models() == ["tiny-base"]
    folder = make_adapter()
    for name in ("b", "a"):
        server.upload(folder, name)
        assert name in models()
    before = server.http.get("/v1/models").json()["data"][1]["root"]
    server.upload(make_adapter("other", seed=1), "a")
    assert server.http.get("/v1/models").json()["data"][1]["root"] != before
    server.http.delete("/v1/adapters/b").raise_for_status()
    assert models() == ["tiny-base", "a"]


def test_a_key_is_ignored_by_a_server_without_keys(server) -> None:
    """Open WebUI verifies a connection by the list, with a key in the header."""
    response = server.http.get("/v1/models", headers={"authorization": "Bearer sk-anything"})
    assert (response.status_code, response.json()["object"]) == (200, "list")


def test_a_base_of_a_hub_s_name(make_server, engine) -> None:
    """openai-python sends the slash as %2F, others as it is."""
    engine.model_name = "org/model"
    server = make_server()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", timeout=20, max_retries=0) as client:
        assert client.models.retrieve("org/model").id == "org/model"
        with pytest.raises(openai.NotFoundError) as refused:
            client.models.retrieve("org/other")
        assert refused.value.code == "model_not_found"
    assert server.http.get("/v1/models/org/model").json()["id"] == "org/model"
    assert server.http.get("/v1/models/").json()["error"]["code"] == "not_found"
