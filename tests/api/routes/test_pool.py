"""Warming, pinning, and the map of the pool."""

from dataclasses import fields
from typing import Any

import pytest
from answers import coded, named
from pool_maps import full_pool

from adapter_store.errors import AdapterCorrupt
from adapter_store.spec import AdapterKey
from lorasrv.engine.messages import AdapterStatus
from lorasrv.engine.pool_map import PoolMap
from lorasrv.errors import AdapterLoadFailed, EngineDead, InvalidRequest
from lorasrv.outputs import AdapterTier

UNKNOWN = (404, "model_not_found")


@pytest.fixture(autouse=True)
def keys(server, make_adapter) -> list[AdapterKey]:
    """The contents of mia@1 and mia@2."""
    done = [server.upload(make_adapter(str(seed), seed=seed), "mia").json() for seed in (1, 2)]
    return [AdapterKey(registered["digest"].removeprefix("sha256:")) for registered in done]


def warm(server: Any, reference: str = "mia", **body: Any) -> Any:
    return server.http.post(f"/v1/adapters/{reference}:warm", json=body)


class TestWarm:
    def test_reached(self, server, engine, keys: list[str]) -> None:
        done = {"id": "mia", "digest": f"sha256:{keys[1]}", "tier": "resident", "reached": True, "load_ms": 12.3}
        assert warm(server).raise_for_status().json() == {"object": "adapter.warm", **done}
        assert engine.asked == [("warm", keys[1], 10.0)]

    @pytest.mark.parametrize("tier", [AdapterTier.HOST, AdapterTier.DISK])
    def test_not_reached(self, server, engine, tier: AdapterTier) -> None:
        engine.reached = AdapterStatus(tier)
        body = warm(server, deadline_ms=1).raise_for_status().json()
        assert (body["tier"], body["reached"], body["load_ms"]) == (tier, False, 0.0)

    def test_deadlines(self, server, engine) -> None:
        deadlines = (0, 1, 1500, 600_000)
        assert {warm(server, deadline_ms=ms).status_code for ms in deadlines} == {200}
        assert [asked[2] for asked in engine.asked] == [ms / 1000 for ms in deadlines]

    def test_by_any_reference(self, server, engine, keys: list[str]) -> None:
        for reference in ("mia@1", f"mia@sha256:{keys[0]}", f"mia@sha256:{keys[0][:12]}"):
            body = warm(server, reference).json()
            assert (body["id"], body["digest"]) == ("mia", f"sha256:{keys[0]}")
        assert {asked[1] for asked in engine.asked} == {keys[0]}

    @pytest.mark.parametrize("reference", ["mio", "mia@9", "mia:prod", "tiny-base", "%00", "warm"])
    def test_unknown(self, server, engine, reference: str) -> None:
        assert coded(warm(server, reference)) == ((404, "version_not_found") if reference == "mia@9" else UNKNOWN)
        assert engine.asked == []

    @pytest.mark.parametrize(
        ("error", "answer"),
        [
            (AdapterLoadFailed("the weights hold NaN"), (503, "adapter_load_failed")),
            (AdapterCorrupt("damaged"), (503, "adapter_corrupt")),
            (InvalidRequest("the adapter takes 9 pages", param="adapter_id"), (400, "invalid_value")),
            (EngineDead("the engine died"), (503, "engine_dead")),
        ],
    )
    def test_a_failed_load_has_its_own_status(self, server, engine, error: Exception, answer: object) -> None:
        engine.ask_error = error
        assert coded(warm(server)) == answer

    def test_malformed_bodies(self, server, engine) -> None:
        assert named(warm(server, deadline=5)) == (400, "deadline")
        assert server.http.post("/v1/adapters/mia:warm").status_code == 415
        assert server.http.post("/v1/adapters/mia:warm", json=[]).status_code == 400
        assert engine.asked == []

    def test_it_ends_if_the_client_disconnects(self, server, engine, eventually) -> None:
        engine.reached = None
        with server.leaving("/v1/adapters/mia:warm"):
            eventually(lambda: engine.asked)
            assert engine.aborted == []
        eventually(lambda: engine.aborted == ["warm"])


class TestPin:
    @pytest.mark.parametrize("pinned", [True, False])
    def test_the_content_is_what_the_id_names_now(self, server, engine, keys: list[str], pinned: bool) -> None:
        engine.reached = AdapterStatus(AdapterTier.HOST)
        done = {"id": "mia", "digest": f"sha256:{keys[1]}", "pinned": pinned, "tier": "host"}
        assert server.patch(pinned=pinned).json() == {"object": "adapter", **done}
        assert server.patch("mia@1", pinned=pinned).json()["digest"] == f"sha256:{keys[0]}"
        assert engine.asked == [("pin", keys[1], pinned), ("pin", keys[0], pinned)]

    def test_unknown_or_one_too_many(self, server, engine) -> None:
        assert coded(server.patch("mio", pinned=True)) == UNKNOWN
        engine.ask_error = InvalidRequest("pinned adapters may take 5 pages", param="pinned")
        assert named(server.patch(pinned=True)) == (400, "pinned")

    def test_an_allowed_web_page_may(self, make_server) -> None:
        server = make_server(allowed_origins="https://app.example")
        preflight = {"origin": "https://app.example", "access-control-request-method": "PATCH"}
        response = server.http.options("/v1/adapters/mia", headers=preflight).raise_for_status()
        assert "PATCH" in response.headers["access-control-allow-methods"]

    def test_one_that_crosses_a_delete_is_taken_back(self, server, engine, store, keys: list[str], monkeypatch) -> None:
        monkeypatch.setattr(store, "is_named", lambda key: False)
        assert server.patch(pinned=True).status_code == 404
        assert engine.asked == [("pin", keys[1], True), ("pin", keys[1], False)]


class TestMap:
    def test_owners_of_pages(self, server, engine, keys: list[AdapterKey], make_adapter) -> None:
        assert server.upload(make_adapter("1", seed=1), "zoe").json()["digest"] == f"sha256:{keys[0]}"
        engine.pool = full_pool(keys)
        body = server.http.get("/v1/pool").json()
        named_one = {"digest": f"sha256:{keys[0]}", "ids": ["mia", "zoe"], "versions": ["mia@1", "zoe@1"]}
        size = {"pages": 20, "runs": [[80, 12], [60, 8]], "bytes_used": 18_000, "bytes_held": 20_480}
        assert body["adapters"][0] == {**named_one, **size, "state": "ready", "requests": 1, "pinned": True}
        others = [(a["ids"], a["state"], a["pinned"]) for a in body["adapters"][1:]]
        assert others == [(["mia"], "copying", False), ([], "ready", False)]
        assert body["requests"] == [
            {"request_id": "chatcmpl-1#1", **named_one, "pages": 3, "shared": 2, "runs": [[0, 2], [9, 1]]},
            {
                "request_id": "cmpl-2#7",
                "digest": None,
                "ids": [],
                "versions": [],
                "pages": 7,
                "shared": 0,
                "runs": [[2, 7]],
            },
        ]
        assert body["prefix_runs"] == [[10, 3], [20, 2], [30, 3], [34, 1]]
        promised = [(p["ids"], p["pinned"], p["state"]) for p in body["promised"]]
        assert promised == [(["mia", "zoe"], True, "ready"), ([], False, "waiting")]

    def test_every_figure_is_shown_and_totals_add_up(self, server, engine, keys: list[AdapterKey]) -> None:
        numbers = {f.name for f in fields(PoolMap)} - {"requests", "adapters", "promised", "prefix_page_ids"}
        for pool in (engine.pool, full_pool(keys)):
            engine.pool = pool
            body = server.http.get("/v1/pool").json()
            assert {name: body[name] for name in numbers} == {name: getattr(pool, name) for name in numbers}
            assert set(body) == numbers | {
                "object",
                "requests",
                "adapters",
                "promised",
                "prefix_runs",
                "memory",
                "traffic",
            }
            memory = body["memory"]
            assert memory["pool_used_bytes"] == (pool.pages_total - pool.pages_free) * pool.block_bytes
            assert memory["resident_bytes"] > 50e6, "this process"
            assert sum(body[f"pages_{part}"] for part in ("free", "kv", "prefix", "adapters")) == body["pages_total"]
            assert sum(adapter["pages"] for adapter in body["adapters"]) == body["pages_adapters"]

    def test_traffic_that_goes_to_another_version_meanwhile(self, server, engine, keys, monkeypatch) -> None:
        server.complete(model="mia@1").raise_for_status()
        account = dict(engine.request_stats.hottest(9))["mia"]

        async def tier(_: AdapterKey) -> AdapterTier:
            account.key = keys[1]
            return AdapterTier.HOST

        monkeypatch.setattr(engine, "tier", tier)
        (hot,) = server.http.get("/v1/pool").raise_for_status().json()["traffic"]["hottest"]
        assert (hot["id"], hot["digest"], hot["tier"]) == ("mia", f"sha256:{keys[0]}", "host")

    def test_a_dead_engine(self, server, engine) -> None:
        engine.ask_error = EngineDead("the engine died")
        assert server.http.get("/v1/pool").status_code == 503
