"""GET /v1/adapters/{id}/stats, and `lorasrv show`: whose figures, in which shape, and who may see them."""

import json
from typing import Any

import pytest
from answers import coded

from api.auth import middleware
from api.auth.principal import Caller, Scope
from api.cli.commands.adapters import stats_lines
from lorasrv.errors import EngineDead

FIGURES = {
    "requests", "errors", "refused", "aborted", "fallbacks", "prompt_tokens", "cached_tokens", "generated_tokens",
    "speculation", "compute_seconds", "disk_loads", "disk_bytes", "pool_copies", "pool_bytes", "resident_byte_hours",
    "found", "hit_ratio", "ttft", "first_used", "last_used",
}  # fmt: skip


def ask(server: Any, name: str = "mia") -> Any:
    return server.http.get(f"/v1/adapters/{name}/stats")


def stats(server: Any, name: str = "mia") -> dict[str, Any]:
    shown: dict[str, Any] = ask(server, name).raise_for_status().json()
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
    hot, cold = shown["ttft"]["hot"], shown["ttft"]["cold"]
    assert (hot["count"], cold["count"], hot["p95_ms"]) == (0, 2, None)
    assert shown["generated_tokens"] == sum(v["generated_tokens"] for v in shown["versions"]) > 0


def test_without_requests_and_of_the_base(mia) -> None:
    shown = stats(mia, "tom")
    assert (shown["requests"], shown["last_used"]) == (0, None)
    assert shown["hit_ratio"] == {"resident": None, "host": None, "disk": None}
    mia.chat()
    for name in ("base", "tiny-base"):
        shown = stats(mia, name)
        assert (shown["id"], shown["requests"], shown["versions"]) == ("tiny-base", 1, [])


def test_unknown(mia) -> None:
    assert {coded(ask(mia, name)) for name in ("nobody", "mia@1", "mi")} == {(404, "model_not_found")}
    assert "did you mean mia" in ask(mia, "mi").text


def test_a_deleted_ids_figures_go_with_it(mia, make_adapter) -> None:
    mia.http.delete("/v1/adapters/mia")
    mia.upload(make_adapter(seed=1), "mia")
    assert stats(mia)["requests"] == 0


def test_a_hidden_adapter_does_not_exist_for_a_key(mia, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "ANYBODY", Caller("k1", frozenset({Scope.INFER}), ("tom*",)))
    assert stats(mia, "tom")["id"] == "tom"
    hidden, unknown, base = (ask(mia, name) for name in ("mia", "nix", "base"))
    assert hidden.status_code == unknown.status_code == base.status_code == 404
    assert hidden.text == unknown.text.replace("nix", "mia"), "nor may the answer tell one from the other"


def test_a_dead_engine_and_a_disk_that_fails(mia, engine, store, monkeypatch: pytest.MonkeyPatch) -> None:
    async def dead() -> None:
        raise EngineDead("dead")

    monkeypatch.setattr(engine, "residents", dead)
    assert stats(mia)["requests"] == 2
    (store.root / "ledger.db").unlink()
    (store.root / "ledger.db").mkdir()
    answer = ask(mia)
    assert (coded(answer), answer.headers["retry-after"]) == ((503, "ledger_unusable"), "10")


def test_show(cli, mia) -> None:
    text = cli("show", "mia", "--server", mia.url).out
    wanted = (
        "  in all: 2 requests, last 20",
        "found: resident 0 %, host 0 %, disk 100 %",
        "first token, cold: ",
        " ms on average of 2 requests, half within ",
    )
    assert [words for words in wanted if words not in text] == []
    assert "  in all: no requests\n" in cli("show", "tom", "--server", mia.url).out
    shown = json.loads(cli("show", "mia", "--json", "--server", mia.url).out)
    assert (shown["stats"]["requests"], shown["id"]) == (2, "mia")
    mia.chat()
    assert cli("show", "base", "--server", mia.url).out.startswith("tiny-base, the base\nin all: 1 request, last")


def test_show_says_what_drafts_are_worth(mia) -> None:
    shown = stats(mia)
    assert not [line for line in stats_lines(shown) if "draft" in line]
    assert next(stats_lines({**shown, "requests": 1})).startswith("in all: 1 request, last")
    assert next(stats_lines({**shown, "requests": 2, "errors": 1})).startswith("in all: 2 requests, 1 failed, last")
    assert next(stats_lines({**shown, "requests": 0, "prompt_tokens": 5})).startswith("in all: 0 requests")
    shown["speculation"] = {"steps": 420, "drafted": 310, "accepted": 171, "tokens_per_step": 1.405}
    assert "1.41 tokens a step; 55 % of 310 draft tokens right" in list(stats_lines(shown))
