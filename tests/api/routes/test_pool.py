"""Warming, pinning, and the map of the pool."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from adapter_store.errors import AdapterCorrupt
from adapter_store.spec import AdapterKey
from lorasrv.engine.messages import AdapterStatus
from lorasrv.engine.pool_snapshot import AdapterPages, PoolMap, RequestPages, ReservedAdapter
from lorasrv.errors import AdapterLoadFailed, EngineDead, InvalidRequest
from lorasrv.outputs import AdapterTier, RequestId


@pytest.fixture(autouse=True)
def keys(server, make_adapter) -> list[str]:
    """The contents of mia@1 and mia@2."""
    done = [server.upload(make_adapter(str(seed), seed=seed), "mia").json() for seed in (1, 2)]
    return [registered["digest"].removeprefix("sha256:") for registered in done]


def warm(server: Any, reference: str = "mia", **body: Any) -> Any:
    return server.http.post(f"/v1/adapters/{reference}:warm", json=body)


FAILURES = [
    (AdapterLoadFailed("the weights hold NaN"), 503, "adapter_load_failed"),
    (AdapterCorrupt("damaged"), 503, "adapter_corrupt"),
    (InvalidRequest("the adapter takes 9 pages", param="adapter_id"), 400, "invalid_value"),
    (EngineDead("the engine died"), 503, "engine_dead"),
]


class TestWarm:
    def test_reached(self, server, engine, keys: list[str]) -> None:
        response = warm(server)
        assert response.status_code == 200
        assert response.json() == {
            "object": "adapter.warm",
            "id": "mia",
            "digest": f"sha256:{keys[1]}",
            "tier": "resident",
            "reached": True,
            "load_ms": 12.3,
        }
        assert engine.asked == [("warm", keys[1], 10.0)]

    @pytest.mark.parametrize("tier", [AdapterTier.HOST, AdapterTier.DISK])
    def test_not_reached(self, server, engine, tier: AdapterTier) -> None:
        engine.reached = AdapterStatus(tier)
        response = warm(server, deadline_ms=1)
        assert response.status_code == 200
        body = response.json()
        assert (body["tier"], body["reached"], body["load_ms"]) == (tier, False, 0.0)

    @pytest.mark.parametrize("deadline_ms", [0, 1, 1500, 600_000])
    def test_deadlines(self, server, engine, deadline_ms: int) -> None:
        assert warm(server, deadline_ms=deadline_ms).status_code == 200
        assert [asked[2] for asked in engine.asked] == [deadline_ms / 1000]

    def test_by_any_reference(self, server, engine, keys: list[str]) -> None:
        for reference in ("mia@1", f"mia@sha256:{keys[0]}", f"mia@sha256:{keys[0][:12]}"):
            body = warm(server, reference).json()
            assert (body["id"], body["digest"]) == ("mia", f"sha256:{keys[0]}")
        assert {asked[1] for asked in engine.asked} == {keys[0]}

    @pytest.mark.parametrize("reference", ["mio", "mia@9", "mia:prod", "tiny-base", "%00", "warm"])
    def test_unknown(self, server, engine, reference: str) -> None:
        response = warm(server, reference)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert engine.asked == []

    @pytest.mark.parametrize(("error", "status", "code"), FAILURES)
    def test_a_failed_load_has_its_own_status(self, server, engine, error: Exception, status: int, code: str) -> None:
        engine.ask_error = error
        response = warm(server)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)

    def test_malformed_bodies(self, server, engine) -> None:
        response = warm(server, deadline=5)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "deadline")
        assert server.http.post("/v1/adapters/mia:warm").status_code == 415
        assert server.http.post("/v1/adapters/mia:warm", json=[]).status_code == 400
        assert engine.asked == []

    def test_nobody_waits_for_a_client_that_left(self, server, engine, eventually) -> None:
        engine.reached = None
        with server.leaving("/v1/adapters/mia:warm"):
            eventually(lambda: engine.asked)
            assert engine.aborted == []
        eventually(lambda: engine.aborted == ["warm"])


class TestPin:
    @pytest.mark.parametrize("pinned", [True, False])
    def test_the_content_is_what_the_id_names_now(self, server, engine, keys: list[str], pinned: bool) -> None:
        engine.reached = AdapterStatus(AdapterTier.HOST)
        response = server.patch(pinned=pinned)
        assert response.status_code == 200
        assert response.json() == {
            "object": "adapter",
            "id": "mia",
            "digest": f"sha256:{keys[1]}",
            "pinned": pinned,
            "tier": "host",
        }
        assert engine.asked == [("pin", keys[1], pinned)]

    def test_an_older_version_is_let_go_by_its_own_name(self, server, engine, keys: list[str]) -> None:
        assert server.patch("mia@1", pinned=False).json()["digest"] == f"sha256:{keys[0]}"
        assert engine.asked == [("pin", keys[0], False)]

    def test_unknown(self, server, engine) -> None:
        response = server.patch("mio", pinned=True)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")

    def test_one_too_many(self, server, engine) -> None:
        engine.ask_error = InvalidRequest("pinned adapters may take 5 pages", param="pinned")
        response = server.patch(pinned=True)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "pinned")

    def test_web_pages_that_are_allowed_may(self, make_server) -> None:
        server = make_server(allowed_origins="https://app.example")
        preflight = {"origin": "https://app.example", "access-control-request-method": "PATCH"}
        response = server.http.options("/v1/adapters/mia", headers=preflight)
        assert response.status_code == 200
        assert "PATCH" in response.headers["access-control-allow-methods"]


def full_pool(keys: list[str]) -> PoolMap:
    """Two contents of ids, one of none, and two requests."""
    adapters = [
        AdapterPages(AdapterKey(keys[0]), "ready", 20, ((80, 12), (60, 8)), 18_000, 20_480, 1, True),
        AdapterPages(AdapterKey(keys[1]), "copying", 4, ((50, 4),), 4_000, 4_096, 0, False),
        AdapterPages(AdapterKey("0" * 64), "ready", 6, ((40, 6),), 6_000, 6_144, 0, False),
    ]
    requests = [
        RequestPages(RequestId("chatcmpl-1#1"), AdapterKey(keys[0]), 3, 2, (9, 0, 1)),
        RequestPages(RequestId("cmpl-2#7"), None, 7, 0, tuple(range(2, 9))),
    ]
    promised = (
        ReservedAdapter(AdapterKey(keys[0]), True, "ready"),
        ReservedAdapter(AdapterKey("1" * 64), False, "waiting"),
    )
    figures = (100, 51, 10, 9, 30, 16, 1024, 2, 40, 3)
    prefix = (12, 10, 11, 20, 21, 30, 31, 32, 34)
    return PoolMap(*figures, tuple(requests), tuple(adapters), 2048, promised, prefix)


class TestMap:
    def test_whose_pages(self, server, engine, keys: list[str], make_adapter) -> None:
        assert server.upload(make_adapter("1", seed=1), "zoe").json()["digest"] == f"sha256:{keys[0]}"
        engine.pool = full_pool(keys)
        body = server.http.get("/v1/pool").json()
        assert body["adapters"][0] == {
            "digest": f"sha256:{keys[0]}",
            "ids": ["mia", "zoe"],
            "state": "ready",
            "pages": 20,
            "runs": [[80, 12], [60, 8]],
            "bytes_used": 18_000,
            "bytes_held": 20_480,
            "requests": 1,
            "pinned": True,
        }
        assert [(a["ids"], a["state"], a["pinned"]) for a in body["adapters"][1:]] == [
            (["mia"], "copying", False),
            ([], "ready", False),
        ]
        assert body["requests"] == [
            {
                "request_id": "chatcmpl-1#1",
                "digest": f"sha256:{keys[0]}",
                "ids": ["mia", "zoe"],
                "pages": 3,
                "shared": 2,
                "runs": [[0, 2], [9, 1]],
            },
            {"request_id": "cmpl-2#7", "digest": None, "ids": [], "pages": 7, "shared": 0, "runs": [[2, 7]]},
        ]
        assert body["prefix_runs"] == [[10, 3], [20, 2], [30, 3], [34, 1]]
        assert [(p["ids"], p["pinned"], p["state"]) for p in body["promised"]] == [
            (["mia", "zoe"], True, "ready"),
            ([], False, "waiting"),
        ]

    def test_totals_add_up(self, server, engine, keys: list[str]) -> None:
        for pool in (engine.pool, full_pool(keys)):
            engine.pool = pool
            body = server.http.get("/v1/pool").json()
            parts = [body[f"pages_{part}"] for part in ("free", "kv", "prefix", "adapters")]
            assert sum(parts) == body["pages_total"]
            assert sum(adapter["pages"] for adapter in body["adapters"]) == body["pages_adapters"]

    def test_every_figure_is_shown(self, server, engine, keys: list[str]) -> None:
        engine.pool = full_pool(keys)
        body = server.http.get("/v1/pool").json()
        numbers = {f.name for f in fields(PoolMap)} - {"requests", "adapters", "promised", "prefix_page_ids"}
        assert {name: body[name] for name in numbers} == {name: getattr(engine.pool, name) for name in numbers}
        assert set(body) == numbers | {"object", "requests", "adapters", "promised", "prefix_runs", "traffic"}

    def test_a_dead_engine(self, server, engine) -> None:
        engine.ask_error = EngineDead("the engine died")
        assert server.http.get("/v1/pool").status_code == 503


class TestCommands:
    def test_warm(self, run, engine, keys: list[str]) -> None:
        done = run("warm", "mia")
        assert (done.code, done.out) == (0, f"mia is in the pool  {keys[1][:12]}  loaded in 12.3 ms\n")
        assert json.loads(run("warm", "mia@1", "--deadline-ms", 1500, "--json").out)["digest"] == f"sha256:{keys[0]}"
        assert [asked[1:] for asked in engine.asked] == [(keys[1], 10.0), (keys[0], 1.5)]

    def test_warm_too_late(self, run, engine) -> None:
        engine.reached = AdapterStatus(AdapterTier.DISK)
        late = run("warm", "mia", "--deadline-ms", 5)
        assert (late.code, late.out) == (1, "")
        assert late.err == "lorasrv: mia was not loaded in time (disk); allow more with --deadline-ms\n"
        late = run("warm", "mia", "--json")
        assert (late.code, json.loads(late.out)["reached"]) == (1, False)

    def test_warm_only_begins(self, run, engine, keys: list[str]) -> None:
        engine.reached = AdapterStatus(AdapterTier.DISK)
        begun = run("warm", "mia", "--deadline-ms", 0)
        assert (begun.code, begun.out) == (0, f"mia is loading from disk  {keys[1][:12]}\n")
        assert run("warm", "mia", "--deadline-ms", 0, "--json").code == 0

    def test_pin_and_unpin(self, run, engine, keys: list[str]) -> None:
        assert run("pin", "mia").out == f"pinned mia  {keys[1][:12]}  resident\n"
        assert run("unpin", "mia@1").out == f"unpinned mia  {keys[0][:12]}  resident\n"
        assert json.loads(run("pin", "mia", "--json").out)["pinned"]
        assert engine.asked == [("pin", keys[1], True), ("pin", keys[0], False), ("pin", keys[1], True)]

    @pytest.mark.parametrize("command", ["warm", "pin", "unpin"])
    def test_refused(self, run, engine, command: str) -> None:
        assert run(command, "mio").err == "lorasrv: adapter 'mio' does not exist; did you mean mia?\n"
        engine.ask_error = InvalidRequest("it fits nowhere", param="adapter_id")
        done = run(command, "mia")
        assert (done.code, done.out, done.err) == (1, "", "lorasrv: it fits nowhere\n")

    def test_usage(self, run) -> None:
        for arguments in (["warm"], ["warm", "mia", "--deadline-ms", "-1"], ["pin"], ["pool", "mia"]):
            assert run(*arguments).code == 2

    def test_pool_in_lines(self, run, engine, keys: list[str]) -> None:
        engine.pool = full_pool(keys)
        rows = [tuple(line.split("\t")) for line in run("pool").out.splitlines()]
        assert rows == [
            ("pages", "total", "100"),
            ("pages", "kv", "10"),
            ("pages", "prefix", "9"),
            ("pages", "adapters", "30"),
            ("pages", "free", "51"),
            ("adapter", "mia", "20", "88 %", "1", "ready", "pinned"),
            ("adapter", "0" * 12, "6", "98 %", "0", "ready", "-"),
            ("adapter", "mia", "4", "98 %", "0", "copying", "-"),
            ("request", "cmpl-2#7", "-", "7", "0"),
            ("request", "chatcmpl-1#1", "mia", "3", "2"),
        ]

    def test_pool_as_json(self, run, server) -> None:
        assert json.loads(run("pool", "--json").out) == server.http.get("/v1/pool").json()

    def test_pool_for_people(self, run, engine, keys: list[str], monkeypatch) -> None:
        import sys

        from rich.console import Console

        console = lambda: Console(file=sys.stdout, width=100, force_terminal=True, color_system=None)  # noqa: E731
        monkeypatch.setattr("api.cli.commands.pool.out", console)
        engine.pool = full_pool(keys)
        bar, legend, *tables = run("pool").out.splitlines()
        assert bar == "█" * 60
        assert legend == "kv 10  prefix 9  adapters 30  free 51  of 100 pages: 1.0 KiB, 16 tokens each"
        assert [line.split()[0] for line in tables if line] == [
            *("adapter", "mia", "0" * 12, "mia"),
            *("request", "cmpl-2#7", "chatcmpl-1#1"),
        ]
        engine.pool = replace(engine.pool, requests=(), adapters=())
        assert len(run("pool").out.splitlines()) == 2


def test_deleting_lets_go_of_pins_that_no_name_is_left_for(server, engine, keys: list[str]) -> None:
    server.http.delete("/v1/adapters/mia@1").raise_for_status()
    assert engine.asked == [("pin", keys[0], False)]
    server.http.delete("/v1/adapters/mia").raise_for_status()
    assert engine.asked[1:] == [("pin", keys[1], False)]


def test_a_pin_that_crosses_a_delete_is_taken_back(server, engine, store, keys: list[str], monkeypatch) -> None:
    monkeypatch.setattr(store, "is_named", lambda key: False)
    assert server.patch(pinned=True).status_code == 404
    assert engine.asked == [("pin", keys[1], True), ("pin", keys[1], False)]
