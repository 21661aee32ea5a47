"""Uploads, versions, lists and removal over HTTP, on a real store; bad input leaves nothing behind."""

import hashlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from adapter_store.errors import StoreFull, StoreUnusable
from adapter_store.store import AdapterStore
from lorasrv.errors import AdapterDeleted, EngineDead
from lorasrv.metrics.request_stats import RequestTotals

WEIGHTS = "adapter_model.safetensors"


def put(server: Any, data: bytes, digest: str | None = None) -> Any:
    return server.http.put(f"/v1/blobs/sha256:{digest or hashlib.sha256(data).hexdigest()}", content=data)


def stored_files(tmp_path: Path) -> list[Path]:
    return [path for name in ("blobs", "tmp") for path in (tmp_path / "store" / name).rglob("*") if path.is_file()]


class TestBlobs:
    def test_new_then_known(self, server) -> None:
        response = put(server, b"some bytes")
        assert (response.status_code, response.json()["bytes"]) == (201, 10)
        assert put(server, b"some bytes").status_code == 200

    def test_uploading_again_repairs(self, server, tmp_path: Path) -> None:
        put(server, b"some bytes")
        [file] = stored_files(tmp_path)
        file.write_bytes(b"some bytez")
        assert put(server, b"some bytes").status_code == 200
        assert file.read_bytes() == b"some bytes"

    def test_many_chunks(self, server, make_server, store: AdapterStore, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(store, "max_blob_bytes", 1 << 30)
        data = bytes(range(256)) * (20 << 10)
        assert put(server, data).status_code == 201
        assert [file.stat().st_size for file in stored_files(tmp_path)] == [len(data)]

    @pytest.mark.parametrize("digest", ["0" * 64, hashlib.sha256(b"other").hexdigest()])
    def test_wrong_digest(self, server, tmp_path: Path, digest: str) -> None:
        response = put(server, b"bytes", digest)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "digest_mismatch")
        assert digest in error["message"]
        assert hashlib.sha256(b"bytes").hexdigest() in error["message"]
        assert stored_files(tmp_path) == []

    @pytest.mark.parametrize("digest", ["0" * 63, "0" * 65, "A" * 64, "..%2F" * 4, "%00" * 64])
    def test_malformed_digest(self, server, tmp_path: Path, digest: str) -> None:
        assert put(server, b"bytes", digest).status_code in (400, 404)
        assert stored_files(tmp_path) == []

    def test_length_is_required(self, server) -> None:
        response = server.http.put(f"/v1/blobs/sha256:{'0' * 64}", content=iter([b"x"]))
        assert (response.status_code, response.json()["error"]["code"]) == (411, "length_required")

    def test_longer_than_any_adapter(self, server, store: AdapterStore, tmp_path: Path) -> None:
        response = put(server, b"x" * (store.max_blob_bytes + 1))
        assert (response.status_code, response.json()["error"]["code"]) == (413, "blob_too_large")
        assert stored_files(tmp_path) == []

    def test_a_client_that_dies_half_way_leaves_nothing(self, server, tmp_path: Path, eventually) -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            head = f"PUT /v1/blobs/sha256:{'0' * 64} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"
            connection.sendall(head.encode() + b"x" * 500)
            eventually(lambda: stored_files(tmp_path))
        eventually(lambda: stored_files(tmp_path) == [])
        assert server.http.get("/health").status_code == 200

    @pytest.mark.parametrize(("error", "status"), [(StoreFull("x"), 507), (StoreUnusable("at /srv/x"), 503)])
    def test_disk_trouble(self, server, store: AdapterStore, monkeypatch, error: Exception, status: int) -> None:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(store, "open_blob", fail)
        response = put(server, b"x")
        assert (response.status_code, response.headers["x-should-retry"]) == (status, "false")
        assert "/srv" not in response.text
        assert server.chat().status_code == 200


class TestRegister:
    def test_report(self, server, make_adapter: Callable[..., Path]) -> None:
        response = server.upload(make_adapter(rank=3), "mia")
        body = response.json()
        assert response.status_code == 201
        assert (body["id"], body["version"], body["created"]) == ("mia", 1, True)
        assert body["digest"].startswith("sha256:")
        assert body["report"]["modules_matched"] == 4
        assert body["report"]["rank_max"] == 3
        assert body["report"]["warnings"] == []

    def test_versions(self, server, make_adapter) -> None:
        first = server.upload(make_adapter("a", seed=1), "mia").json()
        assert server.upload(make_adapter("a", seed=1), "mia").status_code == 200
        second = server.upload(make_adapter("b", seed=2), "mia")
        assert (second.status_code, second.json()["version"]) == (201, 2)
        shown = server.http.get("/v1/adapters/mia").json()
        assert shown["version"] == 2
        assert shown["digest"] == second.json()["digest"]
        assert [version["digest"] for version in shown["versions"]] == [first["digest"], second.json()["digest"]]
        assert shown["report"]["modules_matched"] == 4
        [listed] = server.http.get("/v1/adapters").json()["data"]
        of_one = ("report", "verified", "tier", "traffic")
        assert listed == {name: value for name, value in shown.items() if name not in of_one}
        assert shown["tier"] == "resident"
        assert shown["traffic"] == {"requests": 0, "tokens": 0, "tokens_per_s": 0.0}

    def test_the_next_of_a_name_begins_anew(self, server, engine, make_adapter) -> None:
        traffic = lambda: server.http.get("/v1/adapters/mia").json()["traffic"]["requests"]  # noqa: E731
        for seed in (1, 2):
            server.upload(make_adapter(str(seed), seed=seed), "mia")
        engine.request_stats._accounts["mia"] = RequestTotals(requests=3)
        assert server.http.delete("/v1/adapters/mia@1").status_code < 300
        assert traffic() == 3, "an older version's end is not the name's"
        assert server.http.delete("/v1/adapters/mia").status_code < 300
        server.upload(make_adapter(), "mia")
        assert traffic() == 0

    def test_a_dead_engine_is_no_reason_to_hide_an_adapter(self, server, engine, make_adapter) -> None:
        server.upload(make_adapter(), "mia")
        engine.ask_error = EngineDead("the engine died")
        assert server.http.get("/v1/adapters/mia").json()["tier"] is None

    def test_if_not_exists(self, server, make_adapter) -> None:
        assert server.upload(make_adapter(), "mia", if_not_exists=True).status_code == 201
        response = server.upload(make_adapter("b", seed=1), "mia", if_not_exists=True)
        assert (response.status_code, response.headers["x-should-retry"]) == (409, "false")

    @pytest.mark.parametrize(
        "adapter_id", ["Mia", "../../etc/x", "a/b", "C:\\x", ".", "", "a\x00", "x" * 300, "warm", "tiny-base"]
    )
    def test_bad_ids(self, server, make_adapter, tmp_path: Path, adapter_id: str) -> None:
        response = server.upload(make_adapter(), adapter_id)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "invalid_adapter_id", "id")
        assert server.http.get("/v1/adapters").json()["data"] == []

    def test_every_problem_is_listed_and_nothing_stored(self, server, make_adapter, tmp_path: Path) -> None:
        folder = make_adapter(use_dora=True, modules_to_save=["lm_head"])
        tensors = load_file(folder / WEIGHTS)
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
        tensors[name] = tensors[name] * float("nan")
        tensors[name.replace("layers.0", "layers.7")] = tensors[name]
        save_file(tensors, folder / WEIGHTS)
        response = server.upload(folder, "mia")
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (422, "invalid_adapter")
        said = json.dumps(error["details"])
        assert all(word in said for word in ("use_dora", "modules_to_save", "NaN", "layers.7"))
        assert all(set(problem) == {"code", "field", "message"} for problem in error["details"])
        assert stored_files(tmp_path) == []
        assert server.http.get("/v1/adapters").json()["data"] == []

    @pytest.mark.parametrize("weights", [b"\x80\x04pickle", b"\xff" * 8 + b"{}", b"", b"x" * 100])
    def test_what_is_no_safetensors(self, server, make_adapter, tmp_path: Path, weights: bytes) -> None:
        folder = make_adapter()
        (folder / WEIGHTS).write_bytes(weights)
        assert server.upload(folder, "mia").status_code == 422
        assert stored_files(tmp_path) == []

    def test_weights_that_were_never_sent(self, server) -> None:
        body = {"id": "mia", "config": {}, "weights": f"sha256:{'0' * 64}"}
        response = server.http.post("/v1/adapters", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (404, "weights")

    def test_empty_extras_are_inert(self, server, make_adapter) -> None:
        assert server.upload(make_adapter(), "mia", alias=None, defaults={}).status_code == 201


class TestRemove:
    def test_an_id(self, server, make_adapter, tmp_path: Path) -> None:
        server.upload(make_adapter(), "mia")
        response = server.http.delete("/v1/adapters/mia")
        assert (response.status_code, response.json()["versions_removed"]) == (202, 1)
        assert server.http.get("/v1/adapters/mia").status_code == 404
        assert server.chat(model="mia").status_code == 404
        assert stored_files(tmp_path) == []

    def test_a_version(self, server, make_adapter) -> None:
        server.upload(make_adapter("a", seed=1), "mia")
        server.upload(make_adapter("b", seed=2), "mia")
        assert server.http.delete("/v1/adapters/mia@2").status_code == 202
        assert server.http.get("/v1/adapters/mia").json()["version"] == 1
        assert server.chat(model="mia@2").status_code == 404

    def test_unknown(self, server) -> None:
        response = server.http.delete("/v1/adapters/nobody")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")

    @pytest.mark.parametrize(("option", "value"), [("wait", "true"), ("wait", "-1"), ("wait", "61"), ("force", "yes")])
    def test_malformed_options(self, server, make_adapter, option: str, value: str) -> None:
        server.upload(make_adapter(), "mia")
        response = server.http.delete(f"/v1/adapters/mia?{option}={value}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, option)
        assert server.http.get("/v1/adapters/mia").status_code == 200

    def test_waiting(self, server, engine, make_adapter) -> None:
        key = server.upload(make_adapter(), "mia").json()["digest"].removeprefix("sha256:")
        with engine.in_flight.arriving("zoe", key, ["a"]), engine.in_flight.arriving("mia", "another content", ["b"]):
            assert server.http.delete("/v1/adapters/mia?wait=60").status_code == 200
            server.upload(make_adapter(), "mia")
            with engine.in_flight.arriving("mia", key, ["c", "d"]):
                response = server.http.delete("/v1/adapters/mia?wait=0.01")
                assert (response.status_code, response.json()["requests_running"]) == (202, 1)
                server.upload(make_adapter(), "mia")
                response = server.http.delete("/v1/adapters/mia")
                assert (response.status_code, response.json()["requests_running"]) == (202, 1)

    def test_force_ends_what_runs(self, server, engine, make_adapter) -> None:
        key = server.upload(make_adapter(), "mia").json()["digest"].removeprefix("sha256:")
        with engine.in_flight.arriving("mia", key, ["a"]) as use:
            done = server.http.delete("/v1/adapters/mia?force=true").json()
        assert done["requests_ended"] == 1
        with pytest.raises(AdapterDeleted, match="'mia' was deleted"):
            use.check()
