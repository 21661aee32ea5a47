"""GET /v1/adapters/{id}/stats, and `lorasrv show`: whose figures, in which shape, and who may see them."""

import json
from typing import Any

import pytest

from api.auth import middleware as gate
from api.auth.principal import Caller, Scope
from lorasrv.errors import EngineDead

FIGURES = {
    "requests",
    "errors",
    "refused",
    "aborted",
    "fallbacks",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "compute_seconds",
    "disk_loads",
    "disk_bytes",
    "pool_copies",
    "pool_bytes",
    "resident_byte_hours",
    "found",
    "hit_ratio",
    "ttft",
    "first_used",
    "last_used",
}


def stats(server: Any, name: str = "mia") -> dict[str, Any]:
    answer = server.http.get(f"/v1/adapters/{name}/stats")
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


@pytest.fixture
def mia(server, make_adapter) -> Any:
    """A server with two versions of `mia`, of which each was asked once, and `tom`, who never was."""
    for seed in (1, 2):
        server.upload(make_adapter(seed=seed), "mia")
        assert server.chat(model="mia").status_code == 200
    server.upload(make_adapter("tom", seed=3), "tom")
    return server


def test_in_all_and_by_version(mia) -> None:
    shown = stats(mia)
    assert shown.keys() == {"object", "id", "versions"} | FIGURES
    assert (shown["object"], shown["id"], shown["requests"]) == ("adapter.stats", "mia", 2)
    assert [(v["version"], v["requests"]) for v in shown["versions"]] == [(1, 1), (2, 1)]
    assert all(v["digest"].startswith("sha256:") for v in shown["versions"])
    assert shown["found"] == {"resident": 0, "host": 0, "disk": 2}
    assert (shown["ttft"]["hot"]["count"], shown["ttft"]["cold"]["count"]) == (0, 2)
    assert shown["ttft"]["hot"]["p95_ms"] is None
    assert shown["generated_tokens"] == sum(v["generated_tokens"] for v in shown["versions"]) > 0


def test_never_asked(mia) -> None:
    shown = stats(mia, "tom")
    assert (shown["requests"], shown["last_used"]) == (0, None)
    assert shown["hit_ratio"] == {"resident": None, "host": None, "disk": None}


def test_the_base_by_both_of_its_names(mia) -> None:
    mia.chat()
    for name in ("base", "tiny-base"):
        shown = stats(mia, name)
        assert (shown["id"], shown["requests"], shown["versions"]) == ("tiny-base", 1, [])


def test_what_is_not_there(mia) -> None:
    for name in ("nobody", "mia@1", "mi"):
        answer = mia.http.get(f"/v1/adapters/{name}/stats")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "did you mean mia" in mia.http.get("/v1/adapters/mi/stats").text


def test_a_deleted_id_takes_it_along(mia, make_adapter) -> None:
    mia.http.delete("/v1/adapters/mia")
    mia.upload(make_adapter(seed=1), "mia")
    assert stats(mia)["requests"] == 0


def test_what_a_key_may_not_see_does_not_exist(mia, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "ANYBODY", Caller("k1", frozenset({Scope.INFER}), ("tom*",)))
    assert stats(mia, "tom")["id"] == "tom"
    hidden, unknown, base = (mia.http.get(f"/v1/adapters/{name}/stats") for name in ("mia", "nix", "base"))
    assert hidden.status_code == unknown.status_code == base.status_code == 404
    assert hidden.text == unknown.text.replace("nix", "mia"), "nor may the answer tell one from the other"


def test_a_dead_engine_and_a_disk_that_fails(mia, engine, store, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dead() -> None:
        raise EngineDead("dead")

    monkeypatch.setattr(engine, "residents", dead)
    assert stats(mia)["requests"] == 2
    (store.root / "ledger.db").unlink()
    (store.root / "ledger.db").mkdir()
    answer = mia.http.get("/v1/adapters/mia/stats")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "ledger_unusable")
    assert answer.headers["retry-after"] == "10"


class TestShow:
    def test_for_people_and_programs(self, cli, mia) -> None:
        text = cli("show", "mia", "--server", mia.url).out
        assert "2 requests, last 20" in text
        assert "found: resident 0 %, host 0 %, disk 100 %" in text
        assert "first token, cold: " in text
        assert "no requests" in cli("show", "tom", "--server", mia.url).out
        shown = json.loads(cli("show", "mia", "--json", "--server", mia.url).out)
        assert shown["stats"]["requests"] == 2
        assert shown["id"] == "mia"

    def test_the_base(self, cli, mia) -> None:
        mia.chat()
        assert cli("show", "base", "--server", mia.url).out.startswith("tiny-base, the base\n1 requests")
