"""Defaults of versions, as a server that runs keeps them."""

import json
import shutil
from pathlib import Path

import pytest
from following import NearOrigin, catch_up
from store_kit import BASE, add

from adapter_store.store import AdapterStore
from api.serving.personas import Personas


@pytest.mark.anyio
async def test_a_number_that_a_restored_registry_uses_again_is_another_version(tmp_path: Path) -> None:
    """Its prompt and its owner are those of now, in followers that have run all the time, too."""
    old, new = json.dumps({"system": "old"}), json.dumps({"system": "new"})
    with AdapterStore(tmp_path / "registry", BASE) as registry:
        add(registry, "mia")
    shutil.copytree(tmp_path / "registry", tmp_path / "backup")
    registry = AdapterStore(tmp_path / "registry", BASE)
    origin = NearOrigin(lambda: registry)
    with AdapterStore(tmp_path / "follower", BASE, origin=origin) as follower:
        personas = Personas(follower)
        registry.register_defaults("mia", old, registry.resolve("mia"), principal="ann")
        catch_up(follower, registry)
        assert (await personas.find(follower.resolve("mia"))).text == old
        registry.close()
        shutil.rmtree(tmp_path / "registry")
        shutil.copytree(tmp_path / "backup", tmp_path / "registry")
        with AdapterStore(tmp_path / "registry", BASE) as restored:
            origin.of = lambda: restored
            restored.register_defaults("mia", new, restored.resolve("mia"), principal="bob")
            catch_up(follower, restored)
            ref = follower.resolve("mia")
            found = await personas.find(ref)
    assert (ref.version, found.text, found.owner, found.ref) == (2, new, "bob", ref)


def test_defaults_of_another_version_are_told_from_a_fault(server, store, caplog: pytest.LogCaptureFixture) -> None:
    """As when a registry was updated before its followers; all else is served."""
    store.register_defaults("mia", json.dumps({"of_another_version": 1}))
    store.register_defaults("zoe", json.dumps({"system": "Be brief."}))
    for path, body in (
        ("/v1/chat/completions", {"model": "mia", "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/adapters/mia", None),
    ):
        answer = server.http.request("GET" if body is None else "POST", path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unusable")
    assert "the defaults of mia@1: unknown field of_another_version" in str([vars(each) for each in caplog.records])
    assert server.chat(model="zoe").status_code == 200
