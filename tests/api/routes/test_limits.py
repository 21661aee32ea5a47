"""Limits of an id: over HTTP and the command line, into the store, and from there to the engine."""

import asyncio
import json
from dataclasses import fields, replace
from typing import Any, cast

import pytest

from adapter_store.errors import AdapterChanged, StoreFull, StoreUnusable
from adapter_store.registry.records import Change
from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from api.app import create_app
from api.config.settings import ServerSettings
from api.schemas.adapters import LimitsBody
from lorasrv.config import Limits
from lorasrv.engine.pool_snapshot import ReservedAdapter
from lorasrv.errors import InvalidRequest

ALL = {"max_running": 2, "max_queued": 3, "tokens_per_s": 4.5, "resident_bytes": 1 << 20, "weight": 0.5}


@pytest.fixture(autouse=True)
def mia(server, make_adapter) -> str:
    """The digest of mia@2."""
    return [server.upload(make_adapter(str(seed), seed=seed), "mia").json()["digest"] for seed in (1, 2)][1]


def shown(server: Any) -> dict[str, Any]:
    [listed] = server.http.get("/v1/adapters").json()["data"]
    one = server.http.get("/v1/adapters/mia").json()
    assert one["limits"] == listed["limits"]
    return one["limits"]


class TestPatch:
    def test_all_of_them(self, server, engine, mia: str) -> None:
        assert shown(server) == {}
        response = server.patch(limits=ALL)
        assert response.status_code == 200
        assert response.json() == {"object": "adapter", "id": "mia", "digest": mia, "limits": ALL}
        assert shown(server) == ALL
        assert engine.limits == {"mia": Limits(**ALL)}
        assert engine.asked == []

    def test_new_ones_replace_the_old(self, server, engine) -> None:
        server.patch(limits=ALL)
        server.patch(limits={"weight": 3, "max_running": None})
        assert shown(server) == {"weight": 3}
        assert engine.limits == {"mia": Limits(weight=3)}

    @pytest.mark.parametrize("nothing", [{}, None, {"weight": None}])
    def test_none(self, server, engine, nothing: object) -> None:
        server.patch(limits=ALL)
        assert server.patch(limits=nothing).json()["limits"] == {}
        assert shown(server) == {}
        assert engine.limits == {"mia": None}

    def test_what_is_not_said_is_the_servers(self, make_server, engine) -> None:
        server = make_server(max_queued_per_adapter=7, max_running_per_adapter=5, max_queued_per_key=1)
        server.patch(limits={"max_running": 9})
        assert engine.limits == {"mia": Limits(max_running=9, max_queued=7)}
        assert shown(server) == {"max_running": 9}
        server.patch(limits={})
        assert engine.limits == {"mia": None}

    def test_with_a_pin(self, server, engine, mia: str) -> None:
        body = server.patch(pinned=True, limits={"weight": 2}).json()
        assert (body["pinned"], body["tier"], body["limits"]) == (True, "resident", {"weight": 2})
        assert engine.asked == [("pin", mia.removeprefix("sha256:"), True)]
        assert engine.limits == {"mia": Limits(weight=2)}

    def test_a_pin_alone_leaves_them(self, server, engine) -> None:
        server.patch(limits=ALL)
        engine.limits.clear()
        assert "limits" not in server.patch(pinned=False).json()
        assert (shown(server), engine.limits) == (ALL, {})

    def test_a_refused_pin_changes_nothing(self, server, engine) -> None:
        engine.ask_error = InvalidRequest("one too many", param="pinned")
        assert server.patch(pinned=True, limits=ALL).status_code == 400
        engine.ask_error = None
        assert (shown(server), engine.limits) == ({}, {})

    @pytest.mark.parametrize("was_pinned", [True, False])
    @pytest.mark.parametrize("pinned", [True, False])
    def test_a_refused_change_pins_nothing_and_lets_nothing_go(
        self, server, engine, store, mia: str, monkeypatch, was_pinned: bool, pinned: bool
    ) -> None:
        key = AdapterKey(mia.removeprefix("sha256:"))
        engine.pool = replace(engine.pool, promised=(ReservedAdapter(key, was_pinned, "ready"),))
        refused = AdapterChanged("mia", True), StoreFull("no room")
        for error, status in zip(refused, (412, 507), strict=True):
            engine.asked.clear()

            def refuse(*_: Any, error: Exception = error, **__: Any) -> None:
                raise error

            with monkeypatch.context() as patched:
                patched.setattr(store, "change", refuse)
                assert server.patch(pinned=pinned, limits=ALL).status_code == status
            assert [was_pinned, *(to for _, _, to in engine.asked)][-1] == was_pinned
        assert (shown(server), engine.limits) == ({}, {})
        assert server.patch(pinned=pinned, limits=ALL).status_code == 200
        assert engine.asked[-1] == ("pin", key, pinned)

    def test_a_refused_one_leaves_those_before(self, server, engine) -> None:
        server.patch(limits={"weight": 7})
        for body in ({"limits": {"weight": 0}}, {"limits": {"weight": 0}, "pinned": True}):
            response = server.patch(**body)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_value")
        assert (shown(server), engine.limits, engine.asked) == ({"weight": 7}, {"mia": Limits(weight=7)}, [])

    @pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
    def test_no_number(self, server, engine, number: str) -> None:
        response = server.http.patch(
            "/v1/adapters/mia",
            content=f'{{"limits": {{"tokens_per_s": {number}}}}}',
            headers={"content-type": "application/json"},
        )
        assert (response.status_code, engine.limits) == (400, {})

    def test_a_version_has_none_of_its_own(self, server, engine, mia: str) -> None:
        for reference in ("mia@1", f"mia@{mia}"):
            response = server.patch(reference, limits=ALL, pinned=True)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "limits")
        assert (engine.limits, engine.asked) == ({}, [])

    def test_unknown(self, server, engine) -> None:
        response = server.patch("mio", limits=ALL)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")

    def test_what_the_disk_refuses_does_not_reach_the_engine(self, server, engine, store, monkeypatch) -> None:
        def full(*_: object) -> None:
            raise StoreFull("x")

        monkeypatch.setattr(store._index, "change", full)
        assert server.patch(limits=ALL).status_code == 507
        assert (shown(server), engine.limits) == ({}, {})

    def test_the_body_has_every_limit_there_is(self) -> None:
        assert list(LimitsBody.model_fields) == [field.name for field in fields(Limits)]


class TestRemoval:
    def test_they_go_with_the_id(self, server, engine, make_adapter) -> None:
        server.patch(limits=ALL)
        server.http.delete("/v1/adapters/mia@1")
        assert (shown(server), engine.limits) == (ALL, {"mia": Limits(**ALL)})
        server.http.delete("/v1/adapters/mia")
        assert engine.limits == {"mia": None}
        server.upload(make_adapter("1", seed=1), "mia")
        assert shown(server) == {}

    def test_with_its_last_version(self, server, engine) -> None:
        server.patch(limits=ALL)
        for version in (1, 2):
            server.http.delete(f"/v1/adapters/mia@{version}")
        assert engine.limits == {"mia": None}

    def test_a_later_version_has_them(self, server, engine, make_adapter) -> None:
        server.patch(limits=ALL)
        server.upload(make_adapter("3", seed=3), "mia")
        assert (shown(server), engine.limits) == (ALL, {"mia": Limits(**ALL)})


class TestStart:
    def start(self, engine: Any, store: AdapterStore, **settings: Any) -> Any:
        return create_app(cast("Any", engine), store, ServerSettings(**settings))

    def test_the_engine_knows_them_before_the_first_request(self, server, engine, store, make_adapter) -> None:
        server.upload(make_adapter("3", seed=3), "zoe")
        server.upload(make_adapter("4", seed=4), "bob")
        server.patch(limits={"max_running": 2})
        server.patch("zoe", limits=ALL)
        engine.limits.clear()
        engine.is_alive = False
        app = self.start(engine, store, max_queued_per_adapter=6)

        async def serve() -> dict[str, Limits | None]:
            async with app.router.lifespan_context(app):
                return dict(engine.limits)

        assert asyncio.run(serve()) == {"mia": Limits(max_running=2, max_queued=6), "zoe": Limits(**ALL)}
        assert not engine.is_alive

    @pytest.mark.parametrize("limits", [{"max_running": 0}, {"weight": -1.0}, {"requests_per_moon": 3}])
    def test_limits_that_nobody_understands_stop_it(self, engine, store, limits: dict[str, float]) -> None:
        store.change("mia", Change(limits=limits))
        with pytest.raises(StoreUnusable, match="limits of 'mia'"):
            self.start(engine, store)

    def test_an_engine_that_dies_meanwhile_is_shut_down(self, engine, store, monkeypatch) -> None:
        store.change("mia", Change(limits={"weight": 2.0}))
        app = self.start(engine, store)

        async def die(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(engine, "set_limits", die)

        async def serve() -> None:
            async with app.router.lifespan_context(app):
                pytest.fail("it serves")

        with pytest.raises(ZeroDivisionError):
            asyncio.run(serve())
        assert not engine.is_alive


class TestCommand:
    @pytest.fixture
    def limit(self, cli, server):
        return lambda *arguments: cli("limit", "mia", *arguments, "--server", server.url)

    def test_set_show_and_take_away(self, cli, limit, server, engine) -> None:
        assert limit().out == "mia: no limits of its own\n"
        assert limit("--max-running", 4, "--resident-bytes", "64MiB").out == (
            "mia: max_running 4, resident_bytes 64.0 MiB\n"
        )
        done = limit("--weight", "2", "--tokens-per-s", "1234567.5", "--max-queued", 3, "--max-running", 5)
        assert (done.code, done.err) == (0, "")
        everything = "max_running 5, max_queued 3, tokens_per_s 1234567.5, resident_bytes 64.0 MiB, weight 2"
        assert done.out == f"mia: {everything}\n"
        assert engine.limits["mia"] == Limits(5, 3, 1234567.5, 64 << 20, 2.0)
        assert f"  {everything}\n" in cli("show", "mia", "--server", server.url).out
        assert limit("--none", "--weight", 4).out == "mia: weight 4\n"
        assert limit("--none").out == "mia: no limits of its own\n"
        assert engine.limits == {"mia": None}
        assert "  no limits of its own\n" in cli("show", "mia", "--server", server.url).out

    def test_showing_changes_nothing(self, limit, engine) -> None:
        assert limit().code == 0
        assert engine.limits == {}

    def test_json(self, cli, limit, server) -> None:
        assert json.loads(limit("--json", "--max-queued", 3).out) == {"id": "mia", "limits": {"max_queued": 3}}
        assert json.loads(limit("--json").out) == {"id": "mia", "limits": {"max_queued": 3}}
        assert json.loads(cli("show", "mia", "--json", "--server", server.url).out)["limits"] == {"max_queued": 3}

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (("--max-running", "0"), "--max-running must be above 0, not 0"),
            (("--max-running", "-1"), "--max-running must be above 0"),
            (("--max-queued", "many"), "--max-queued"),
            (("--tokens-per-s", "nan"), "--tokens-per-s must be above 0, not nan"),
            (("--tokens-per-s", "inf"), "--tokens-per-s must be above 0, not inf"),
            (("--resident-bytes", "much"), "--resident-bytes 'much' is not a size"),
            (("--resident-bytes", "0"), "--resident-bytes must be above 0"),
            (("--weight", "0"), "--weight must be above 0"),
        ],
    )
    def test_what_is_no_limit(self, limit, engine, options: tuple[str, ...], says: str) -> None:
        done = limit(*options)
        assert (done.code, done.out, engine.limits) == (2, "", {})
        assert says in done.err

    def test_unknown(self, cli, server) -> None:
        for options in ((), ("--none",), ("--weight", 2)):
            done = cli("limit", "nobody", *options, "--server", server.url)
            assert (done.code, done.out, done.err) == (1, "", "lorasrv: adapter 'nobody' does not exist\n")
