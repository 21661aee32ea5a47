"""Uploads, versions, aliases, limits, lists and deletion over HTTP, on a real store; bad input leaves nothing."""

import asyncio
import hashlib
import json
import socket
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from answers import coded, error_of, named
from safetensors.numpy import load_file, save_file

from adapter_store.errors import AdapterChanged, StoreFull, StoreUnusable
from adapter_store.quota import StoreQuota
from adapter_store.registry.records import Change
from adapter_store.spec import AdapterKey
from adapter_store.store import AdapterStore
from api.app import create_app
from api.config.settings import ServerSettings
from api.schemas.adapters import LimitsBody
from lorasrv.config import Limits
from lorasrv.engine.pool_map import ReservedAdapter
from lorasrv.errors import AdapterDeleted, EngineDead, InvalidRequest
from lorasrv.metrics.request_stats import RequestTotals

WEIGHTS = "adapter_model.safetensors"
LIMITS = {"max_running": 2, "max_queued": 3, "tokens_per_s": 4.5, "resident_bytes": 1 << 20, "weight": 0.5}
UNKNOWN = (404, "model_not_found")


def put(server: Any, data: bytes, digest: str | None = None) -> Any:
    return server.http.put(f"/v1/blobs/sha256:{digest or hashlib.sha256(data).hexdigest()}", content=data)


def show(server: Any, adapter_id: str = "mia") -> Any:
    return server.http.get(f"/v1/adapters/{adapter_id}").json()


def delete(server: Any, reference: str = "mia", **headers: str) -> Any:
    return server.http.delete(f"/v1/adapters/{reference}", headers=headers)


def listed(server: Any) -> Any:
    return server.http.get("/v1/adapters").json()["data"]


def stored_files(tmp_path: Path) -> list[Path]:
    return [path for name in ("blobs", "tmp") for path in (tmp_path / "store" / name).rglob("*") if path.is_file()]


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.fixture
def digests(server, make_adapter) -> list[str]:
    """Of mia@1, mia@2 and mia@3."""
    return [server.upload(make_adapter(str(seed), seed=seed), "mia").json()["digest"] for seed in (1, 2, 3)]


@pytest.fixture
def keys(digests: list[str]) -> list[AdapterKey]:
    return [AdapterKey(digest.removeprefix("sha256:")) for digest in digests]


class TestBlobs:
    def test_new_known_and_repaired(self, server, store: AdapterStore, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(store, "max_blob_bytes", 1 << 30)
        data = bytes(range(256)) * (20 << 10)  # many chunks
        response = put(server, data)
        assert (response.status_code, response.json()["bytes"]) == (201, len(data))
        [file] = stored_files(tmp_path)
        file.write_bytes(data[:-1] + b"z")
        for _ in range(2):
            assert put(server, data).status_code == 200
            assert file.read_bytes() == data

    def test_wrong_and_malformed_digests(self, server, tmp_path: Path) -> None:
        for digest in ("0" * 64, hashlib.sha256(b"other").hexdigest()):
            response = put(server, b"bytes", digest)
            assert coded(response) == (400, "digest_mismatch")
            assert all(d in error_of(response)["message"] for d in (digest, hashlib.sha256(b"bytes").hexdigest()))
        for digest in ("0" * 63, "0" * 65, "A" * 64, "..%2F" * 4, "%00" * 64):
            assert put(server, b"bytes", digest).status_code in (400, 404)
        assert stored_files(tmp_path) == []

    def test_lengths(self, server, store: AdapterStore, tmp_path: Path) -> None:
        chunked = server.http.put(f"/v1/blobs/sha256:{'0' * 64}", content=iter([b"x"]))
        assert coded(chunked) == (411, "length_required")
        assert coded(put(server, b"x" * (store.max_blob_bytes + 1))) == (413, "blob_too_large")
        assert stored_files(tmp_path) == []

    def test_a_client_that_disconnects_half_way_leaves_nothing(self, server, tmp_path: Path, eventually) -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            head = f"PUT /v1/blobs/sha256:{'0' * 64} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"
            connection.sendall(head.encode() + b"x" * 500)
            eventually(lambda: stored_files(tmp_path))
        eventually(lambda: stored_files(tmp_path) == [])
        assert server.http.get("/health").status_code == 200

    @pytest.mark.parametrize(("error", "status"), [(StoreFull("x"), 507), (StoreUnusable("at /srv/x"), 503)])
    def test_disk_trouble(self, server, store: AdapterStore, monkeypatch, error: Exception, status: int) -> None:
        monkeypatch.setattr(store, "open_blob", raising(error))
        response = put(server, b"x")
        assert (response.status_code, response.headers["x-should-retry"]) == (status, "false")
        assert "/srv" not in response.text
        assert server.chat().status_code == 200


class TestRegister:
    def test_report(self, server, make_adapter) -> None:
        response = server.upload(make_adapter(rank=3), "mia", alias=None, defaults={})
        body = response.json()
        assert (response.status_code, body["id"], body["version"], body["created"]) == (201, "mia", 1, True)
        assert body["digest"].startswith("sha256:")
        assert {"modules_matched": 4, "rank_max": 3, "warnings": []}.items() <= body["report"].items()

    def test_versions(self, server, engine, make_adapter) -> None:
        first = server.upload(make_adapter("a", seed=1), "mia").json()
        assert server.upload(make_adapter("a", seed=1), "mia").status_code == 200
        second = server.upload(make_adapter("b", seed=2), "mia")
        assert (second.status_code, second.json()["version"]) == (201, 2)
        shown = show(server)
        assert (shown["version"], shown["digest"]) == (2, second.json()["digest"])
        assert [version["digest"] for version in shown["versions"]] == [first["digest"], second.json()["digest"]]
        assert shown["report"]["modules_matched"] == 4
        of_one = ("report", "verified", "persona", "tier", "traffic")
        assert listed(server) == [{name: value for name, value in shown.items() if name not in of_one}]
        assert shown["tier"] == "resident"
        assert shown["traffic"] == {"requests": 0, "tokens": 0, "tokens_per_s": 0.0}
        engine.ask_error = EngineDead("the engine died")
        assert show(server)["tier"] is None

    def test_the_verdict_of_the_current_version_is_shown(self, server, store, digests) -> None:
        assert show(server)["verified"] is None
        store.version_history.record_verdict(store.resolve("mia"), {"ok": True, "max_error": 0.01})
        assert show(server)["verified"] == {"ok": True, "max_error": 0.01}
        server.patch(version=1)
        assert show(server)["verified"] is None

    def test_if_not_exists(self, server, make_adapter) -> None:
        assert server.upload(make_adapter(), "mia", if_not_exists=True).status_code == 201
        response = server.upload(make_adapter("b", seed=1), "mia", if_not_exists=True)
        assert (response.status_code, response.headers["x-should-retry"]) == (409, "false")

    @pytest.mark.parametrize(
        "adapter_id", ["Mia", "../../etc/x", "a/b", "C:\\x", ".", "", "a\x00", "x" * 300, "warm", "tiny-base"]
    )
    def test_bad_ids(self, server, make_adapter, adapter_id: str) -> None:
        response = server.upload(make_adapter(), adapter_id)
        assert (coded(response), named(response)) == ((400, "invalid_adapter_id"), (400, "id"))
        assert listed(server) == []

    def test_every_problem_is_listed_and_nothing_stored(self, server, make_adapter, tmp_path: Path) -> None:
        folder = make_adapter(use_bdlora=True, layer_replication=[[0, 1]])
        tensors = load_file(folder / WEIGHTS)
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
        tensors[name] = tensors[name] * float("nan")
        tensors[name.replace("layers.0", "layers.7")] = tensors[name]
        save_file(tensors, folder / WEIGHTS)
        response = server.upload(folder, "mia")
        assert coded(response) == (422, "invalid_adapter")
        details = error_of(response)["details"]
        assert all(word in json.dumps(details) for word in ("use_bdlora", "layer_replication", "NaN", "layers.7"))
        assert all(set(problem) == {"code", "field", "message"} for problem in details)
        assert (stored_files(tmp_path), listed(server)) == ([], [])

    def test_weights_that_are_none(self, server, make_adapter, tmp_path: Path) -> None:
        folder = make_adapter()
        for weights in (b"\x80\x04pickle", b"\xff" * 8 + b"{}", b"", b"x" * 100):
            (folder / WEIGHTS).write_bytes(weights)
            assert server.upload(folder, "mia").status_code == 422
            assert stored_files(tmp_path) == []
        never_sent = {"id": "mia", "config": {}, "weights": f"sha256:{'0' * 64}"}
        assert named(server.http.post("/v1/adapters", json=never_sent)) == (404, "weights")

    def test_a_partial_adapter(self, server, make_adapter) -> None:
        folder = make_adapter(target_modules=["q_proj", "v_proj", "down_proj"])
        for allowed, status in (({}, 422), ({"allow_partial": False}, 422), ({"allow_partial": "yes"}, 400)):
            refused = server.upload(folder, "mia", **allowed)
            assert refused.status_code == status
            if status == 422:
                assert [problem["code"] for problem in error_of(refused)["details"]] == ["partial_adapter"]
        assert server.upload(folder, "mia", allow_partial=True).status_code == 201

    def test_an_mlx_configuration_is_refused_with_the_command_that_converts_it(self, server, make_adapter, as_mlx):
        folder = make_adapter()
        (folder / "adapter_config.json").write_bytes((as_mlx(folder) / "adapter_config.json").read_bytes())
        refused = server.upload(folder, "mia")
        assert refused.status_code == 422
        problems = {problem["code"]: problem["message"] for problem in error_of(refused)["details"]}
        assert "`lorasrv upload`" in problems["mlx_adapter"]

    def test_over_the_quota(self, server, store, make_adapter, digests, tmp_path: Path) -> None:
        store.quota = StoreQuota(max_adapters=3)
        before = set(stored_files(tmp_path))
        response = server.upload(make_adapter("4", seed=4), "mia")
        assert (coded(response), response.headers["x-should-retry"]) == ((507, "quota_exceeded"), "false")
        assert "3 adapter versions are stored, 1 more would be 4, 3 are allowed" in error_of(response)["message"]
        assert set(stored_files(tmp_path)) == before
        assert server.upload(make_adapter("1", seed=1), "mia").status_code == 200


class TestDelete:
    def test_an_id_and_a_version(self, server, make_adapter, digests, tmp_path: Path) -> None:
        assert delete(server, "mia@3").status_code == 202
        assert show(server)["version"] == 2
        assert server.chat(model="mia@3").status_code == 404
        response = delete(server)
        assert (response.status_code, response.json()["versions_removed"]) == (202, 2)
        assert coded(delete(server)) == UNKNOWN
        assert (server.http.get("/v1/adapters/mia").status_code, server.chat(model="mia").status_code) == (404, 404)
        assert stored_files(tmp_path) == []

    @pytest.mark.parametrize("option", ["wait=true", "wait=-1", "wait=61", "force=yes"])
    def test_malformed_options(self, server, make_adapter, option: str) -> None:
        server.upload(make_adapter(), "mia")
        assert named(delete(server, f"mia?{option}")) == (400, option.partition("=")[0])
        assert show(server)["version"] == 1

    def test_waiting(self, server, engine, make_adapter) -> None:
        server.upload(make_adapter(), "mia")
        with engine.in_flight.arriving([("zoe", 1)], ["a"]), engine.in_flight.arriving([("mia", 4)], ["b"]):
            assert delete(server, "mia?wait=60").status_code == 200
            for version, reference in ((2, "mia?wait=0.01"), (3, "mia")):
                server.upload(make_adapter(), "mia")
                with engine.in_flight.arriving([("mia", version)], ["c", "d"]):
                    response = delete(server, reference)
                    assert (response.status_code, response.json()["requests_running"]) == (202, 1)

    def test_force_ends_what_runs(self, server, engine, make_adapter) -> None:
        server.upload(make_adapter(), "mia")
        with engine.in_flight.arriving([("mia", 1)], ["a"]) as use:
            done = delete(server, "mia?force=true").json()
        assert done["requests_ended"] == 1
        with pytest.raises(AdapterDeleted, match="'mia' was deleted"):
            use.check()

    def test_traffic_ends_with_the_id_not_with_a_version(self, server, engine, make_adapter, digests) -> None:
        engine.request_stats._accounts["mia"] = RequestTotals(requests=3)
        assert delete(server, "mia@1").status_code == 202
        assert show(server)["traffic"]["requests"] == 3
        assert delete(server).status_code == 202
        server.upload(make_adapter(), "mia")
        assert show(server)["traffic"]["requests"] == 0

    def test_limits_end_with_the_last_version(self, server, engine, make_adapter, digests) -> None:
        server.patch(limits=LIMITS)
        server.upload(make_adapter("4", seed=4), "mia")
        delete(server, "mia@1")
        assert (show(server)["limits"], engine.limits) == (LIMITS, {"mia": Limits(**LIMITS)})
        for version in (2, 3, 4):
            delete(server, f"mia@{version}")
        assert engine.limits == {"mia": None}
        server.upload(make_adapter("1", seed=1), "mia")
        assert show(server)["limits"] == {}
        server.patch(limits=LIMITS)
        delete(server)
        assert engine.limits == {"mia": None}

    def test_an_aliased_version_needs_force(self, server, digests) -> None:
        server.patch(aliases={"prod": 1})
        for reference in ("mia@1", "mia@1?force=false", "mia"):
            response = delete(server, reference)
            assert (coded(response), response.headers["x-should-retry"]) == ((409, "version_in_use"), "false")
            assert (error_of(response)["param"], "mia:prod" in error_of(response)["message"]) == ("force", True)
            assert error_of(response)["message"].startswith(f"{reference.partition('?')[0]} cannot be deleted")
        assert coded(delete(server, "mia:prod?force=true")) == (400, "invalid_alias")
        assert show(server)["aliases"] == {"prod": 1}
        done = delete(server, "mia@1?force=true").json()
        assert (done["versions_removed"], done["aliases_removed"]) == (1, ["prod"])
        assert show(server)["aliases"] == {}
        assert delete(server, "mia:prod").status_code == 404

    def test_pins_of_a_content_without_a_name_are_taken_back(self, server, engine, keys: list[AdapterKey]) -> None:
        for reference, unpinned in (("mia@1", keys[:1]), ("mia", keys[1:])):
            engine.asked.clear()
            delete(server, reference).raise_for_status()
            assert sorted(engine.asked) == sorted(("pin", key, False) for key in unpinned)


@pytest.mark.usefixtures("digests")
class TestAliases:
    def test_set_ask_move_remove(self, server, engine, make_adapter, digests: list[str]) -> None:
        aliases = {"prod": 1, "next": 3}
        done = server.patch(aliases=aliases).json()
        assert done == {"object": "adapter", "id": "mia", "digest": digests[2], "aliases": aliases}
        answer = server.chat(model="mia:prod")
        wanted = {"x-adapter-id": "mia", "x-adapter-version": "1", "x-adapter-digest": digests[0]}
        assert {name: answer.headers[name] for name in wanted} == wanted
        assert answer.json()["model"] == "mia:prod"
        assert f"sha256:{engine.added[-1].adapter_key}" == digests[0]
        server.patch(aliases={"prod": 2, "next": None})
        assert [one["aliases"] for one in (show(server), *listed(server))] == [{"prod": 2}] * 2
        assert server.chat(adapter_id="mia:prod").headers["x-adapter-version"] == "2"
        assert coded(server.chat(model="mia:next")) == UNKNOWN
        assert server.http.get("/v1/models/mia:prod").json()["root"] == digests[1]
        body = server.upload(make_adapter("4", seed=4), "mia", alias="prod").json()
        assert (body["version"], body["alias"], show(server)["aliases"]) == (4, "prod", {"prod": 4})

    def test_unknown_versions(self, server) -> None:
        for body, param in (
            ({"version": 9}, "version"),
            ({"aliases": {"prod": 9}}, "aliases.prod"),
            ({"version": 1, "aliases": {"old": 2, "prod": {"1": 0.5, "9": 0.5}}}, "aliases.prod"),
        ):
            response = server.patch(**body)
            assert (coded(response), error_of(response)["param"]) == ((404, "version_not_found"), param)
            assert "it has 1, 2, 3" in error_of(response)["message"]
        assert (show(server)["version"], show(server)["aliases"]) == (3, {})

    @pytest.mark.parametrize("body", [{"version": 1}, {"aliases": {"prod": 1}}, {"limits": LIMITS, "pinned": True}])
    def test_fields_of_all_versions_are_refused_for_one(self, server, engine, digests, body: dict[str, Any]) -> None:
        server.patch(aliases={"old": 1})
        for reference in ("mia@2", f"mia@{digests[1]}", "mia:old"):
            assert named(server.patch(reference, **body)) == (400, next(iter(body)))
        assert (engine.limits, engine.asked) == ({}, [])

    def test_warm_and_pin_by_alias(self, server, engine, digests: list[str], keys: list[AdapterKey]) -> None:
        server.patch(aliases={"prod": 1, "both": {"1": 0.5, "2": 0.5}})
        server.patch("mia:prod", pinned=True)
        assert engine.asked == [("pin", keys[0], True)]
        warm = lambda name: server.http.post(f"/v1/adapters/{name}:warm", json={})  # noqa: E731
        assert warm("mia:prod").json()["digest"] == digests[0]
        for response in (server.patch("mia:both", pinned=True), warm("mia:both")):
            assert coded(response) == (400, "invalid_alias")
            assert "mia@1 and mia@2" in error_of(response)["message"]

    def test_rollback(self, server, digests: list[str]) -> None:
        done = server.patch(version=1).json()
        assert done == {"object": "adapter", "id": "mia", "digest": digests[0], "version": 1}
        assert server.chat(model="mia").headers["x-adapter-digest"] == digests[0]
        assert [v["version"] for v in show(server)["versions"]] == [1, 2, 3]

    def test_everything_at_once(self, server, engine, digests: list[str], keys: list[AdapterKey]) -> None:
        change = {"version": 2, "aliases": {"prod": {"1": 0.9, "2": 0.1}}, "limits": {"weight": 2}, "pinned": True}
        body = server.patch(**change).json()
        assert body | change | {"digest": digests[1], "tier": "resident"} == body
        assert engine.asked == [("pin", keys[1], True)]
        assert engine.limits == {"mia": Limits(weight=2)}

    def test_each_request_to_a_canary_draws(self, server, store, monkeypatch) -> None:
        server.patch(aliases={"prod": {"1": 0.9, "2": 0.1}})
        numbers = iter([0.0, 0.95, 0.5, 0.9])
        monkeypatch.setattr(store._names, "_draw", lambda: next(numbers))
        answers = [server.chat(model="mia:prod", n=2) for _ in range(4)]
        assert [answer.headers["x-adapter-version"] for answer in answers] == ["1", "2", "1", "2"]
        assert [answer.json()["usage"]["lorasrv"]["adapter_version"] for answer in answers] == [1, 2, 1, 2]

    def test_a_user_hears_one_version_of_a_canary(self, server, digests: list[str]) -> None:
        server.patch(aliases={"prod": {"1": 0.5, "2": 0.5}})

        def version(**body: Any) -> str:
            answer = server.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, **body})
            found: str = answer.headers["x-adapter-version"]
            return found

        said = [version(model="mia:prod", user=f"user {number % 16}") for number in range(48)]
        assert said[:16] == said[16:32] == said[32:]
        assert set(said) == {"1", "2"}
        assert server.chat(adapter_id="mia:prod", user="user 3").headers["x-adapter-version"] == said[3]

    def test_a_canary_as_a_model_is_shown_and_not_drawn(self, server, store, digests: list[str], monkeypatch) -> None:
        monkeypatch.setattr(store._names, "_draw", lambda: pytest.fail("drawn"))
        server.patch(aliases={"prod": {"1": 0.9, "2": 0.1}, "next": 3})
        first, second, third = digests
        for name, root, targets in (
            ("mia:prod", None, [(1, first, 0.9), (2, second, 0.1)]),
            ("mia:next", third, [(3, third, 1.0)]),
            ("mia@2", second, [(2, second, 1.0)]),
            ("mia", third, [(3, third, 1.0)]),
        ):
            card = server.http.get(f"/v1/models/{name}").json()
            assert (card["id"], card["root"]) == (name, root)
            assert [(target["version"], target["digest"], target["share"]) for target in card["targets"]] == targets
        assert server.http.get("/v1/models/mia:none").status_code == 404


@pytest.mark.usefixtures("digests")
class TestIfMatch:
    def test_a_change_needs_the_state_that_was_seen(self, server, digests: list[str]) -> None:
        first = server.http.get("/v1/adapters/mia")
        seen = first.headers["etag"]
        assert seen == f'"{first.json()["etag"]}"'
        moved = server.patch(if_match=seen, version=1).raise_for_status()
        assert moved.headers["etag"] == server.http.get("/v1/adapters/mia").headers["etag"] != seen
        for stale in (seen, "", '"x"', '"*"', f"W/{moved.headers['etag']}", f'"{digests[2]}"'):
            for response in (
                server.patch(if_match=stale, version=2),
                server.patch(if_match=stale, pinned=True),
                delete(server, "mia@2", **{"if-match": stale}),
            ):
                assert coded(response) == (412, "precondition_failed")
                assert "has changed since you looked" in error_of(response)["message"]
        for good in (moved.headers["etag"], f'"x", {moved.headers["etag"]}', "*", f'"{digests[0]}"'):
            assert server.patch(if_match=good, version=1).status_code == 200
        assert delete(server, "mia@3", **{"if-match": "*"}).status_code == 202

    def test_uploads(self, server, make_adapter) -> None:
        folder = make_adapter("4", seed=4)
        weights = put(server, (folder / WEIGHTS).read_bytes()).json()["digest"]
        body = {"id": "mia", "config": json.loads((folder / "adapter_config.json").read_text()), "weights": weights}
        seen = server.http.get("/v1/adapters/mia").headers["etag"]
        register = lambda tag: server.http.post("/v1/adapters", json=body, headers={"if-match": tag})  # noqa: E731
        assert [register(tag).status_code for tag in ('"x"', seen, seen)] == [412, 201, 412]
        assert len(show(server)["versions"]) == 4


@pytest.mark.usefixtures("digests")
class TestLimits:
    def shown(self, server: Any) -> Any:
        [one] = listed(server)
        assert one["limits"] == show(server)["limits"]
        return one["limits"]

    def test_all_of_them(self, server, engine, digests) -> None:
        assert self.shown(server) == {}
        done = server.patch(limits=LIMITS).json()
        assert done == {"object": "adapter", "id": "mia", "digest": digests[2], "limits": LIMITS}
        assert (self.shown(server), engine.limits, engine.asked) == (LIMITS, {"mia": Limits(**LIMITS)}, [])
        assert list(LimitsBody.model_fields) == [field.name for field in fields(Limits)]
        engine.limits.clear()
        assert "limits" not in server.patch(pinned=False).json(), "a pin alone leaves them"
        assert (self.shown(server), engine.limits) == (LIMITS, {})

    @pytest.mark.parametrize(
        ("limits", "kept"),
        [({"weight": 3, "max_running": None}, {"weight": 3}), ({}, {}), (None, {}), ({"weight": None}, {})],
    )
    def test_new_ones_replace_the_old(self, server, engine, limits: object, kept: dict[str, Any]) -> None:
        server.patch(limits=LIMITS)
        assert server.patch(limits=limits).json()["limits"] == self.shown(server) == kept
        assert engine.limits == {"mia": Limits(**kept) if kept else None}

    def test_a_limit_that_is_not_set_is_the_servers(self, make_server, engine) -> None:
        server = make_server(max_queued_per_adapter=7, max_running_per_adapter=5, max_queued_per_key=1)
        server.patch(limits={"max_running": 9})
        assert engine.limits == {"mia": Limits(max_running=9, max_queued=7)}
        assert self.shown(server) == {"max_running": 9}
        server.patch(limits={})
        assert engine.limits == {"mia": None}

    @pytest.mark.parametrize("was_pinned", [True, False])
    @pytest.mark.parametrize("pinned", [True, False])
    def test_a_refused_change_leaves_the_pin(
        self, server, engine, store, keys, monkeypatch, was_pinned: bool, pinned: bool
    ) -> None:
        engine.pool = replace(engine.pool, promised=(ReservedAdapter(keys[2], was_pinned, "ready"),))
        for error, status in ((AdapterChanged("mia", True), 412), (StoreFull("no room"), 507)):
            engine.asked.clear()
            with monkeypatch.context() as patched:
                patched.setattr(store, "change", raising(error))
                assert server.patch(pinned=pinned, limits=LIMITS).status_code == status
            assert [was_pinned, *(to for _, _, to in engine.asked)][-1] == was_pinned
        assert (self.shown(server), engine.limits) == ({}, {})
        assert server.patch(pinned=pinned, limits=LIMITS).status_code == 200
        assert engine.asked[-1] == ("pin", keys[2], pinned)

    def test_a_refused_pin_or_limit_changes_nothing(self, server, engine) -> None:
        server.patch(limits={"weight": 7})
        for body in ({"limits": {"weight": 0}}, {"limits": {"weight": 0}, "pinned": True}):
            assert coded(server.patch(**body)) == (400, "invalid_value")
        assert engine.asked == []
        engine.ask_error = InvalidRequest("one too many", param="pinned")
        assert server.patch(pinned=True, limits=LIMITS).status_code == 400
        engine.ask_error = None
        assert (self.shown(server), engine.limits) == ({"weight": 7}, {"mia": Limits(weight=7)})
        assert coded(server.patch("mio", limits=LIMITS)) == UNKNOWN

    def test_no_number(self, server, engine) -> None:
        for number in ("NaN", "Infinity", "-Infinity", "1e999"):
            content, kind = f'{{"limits": {{"tokens_per_s": {number}}}}}', {"content-type": "application/json"}
            assert server.http.patch("/v1/adapters/mia", content=content, headers=kind).status_code == 400
        assert engine.limits == {}

    def test_what_the_disk_refuses_does_not_reach_the_engine(self, server, engine, store, monkeypatch) -> None:
        monkeypatch.setattr(store._index, "change", raising(StoreFull("x")))
        assert server.patch(limits=LIMITS).status_code == 507
        assert (self.shown(server), engine.limits) == ({}, {})


class TestLimitsAtTheStart:
    def serve(self, engine: Any, store: AdapterStore, **settings: Any) -> dict[str, Limits | None]:
        """Start and stop the application: the limits that the engine knew in between."""
        app = create_app(engine, store, ServerSettings(**settings))

        async def run() -> dict[str, Limits | None]:
            async with app.router.lifespan_context(app):
                return dict(engine.limits)

        return asyncio.run(run())

    def test_the_engine_knows_them_before_the_first_request(self, server, engine, store, make_adapter) -> None:
        limits = {"mia": {"max_running": 2}, "zoe": LIMITS, "bob": None}
        for seed, name in enumerate(limits):
            server.upload(make_adapter(name, seed=seed), name)
            server.patch(name, limits=limits[name])
        engine.limits.clear()
        engine.is_alive = False
        known = self.serve(engine, store, max_queued_per_adapter=6)
        assert known == {"mia": Limits(max_running=2, max_queued=6), "zoe": Limits(**LIMITS)}
        assert not engine.is_alive

    @pytest.mark.parametrize("limits", [{"max_running": 0}, {"weight": -1.0}, {"requests_per_moon": 3}])
    def test_damaged_limits_stop_it(self, engine, store, digests, limits: dict[str, float]) -> None:
        store.change("mia", Change(limits=limits))
        with pytest.raises(StoreUnusable, match="limits of 'mia'"):
            self.serve(engine, store)

    def test_an_engine_that_dies_meanwhile_is_shut_down(self, engine, store, digests, monkeypatch) -> None:
        store.change("mia", Change(limits={"weight": 2.0}))
        monkeypatch.setattr(engine, "set_limits", raising(ZeroDivisionError()))
        with pytest.raises(ZeroDivisionError):
            self.serve(engine, store)
        assert not engine.is_alive
