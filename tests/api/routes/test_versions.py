"""Aliases, rollback, canaries, expected states, quotas and verdicts over HTTP and the command line."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from adapter_store.quota import StoreQuota
from api.config.settings import ServerSettings
from lorasrv.config import Limits


@pytest.fixture(autouse=True)
def digests(server, make_adapter) -> list[str]:
    """Of mia@1, mia@2 and mia@3."""
    return [server.upload(make_adapter(str(seed), seed=seed), "mia").json()["digest"] for seed in (1, 2, 3)]


def patch(server: Any, reference: str = "mia", if_match: str | None = None, **body: Any) -> Any:
    headers = {} if if_match is None else {"if-match": if_match}
    return server.http.patch(f"/v1/adapters/{reference}", json=body, headers=headers)


def shown(server: Any) -> Any:
    return server.http.get("/v1/adapters/mia").json()


class TestAliases:
    def test_set_ask_move_remove(self, server, engine, digests: list[str]) -> None:
        response = patch(server, aliases={"prod": 1, "next": 3})
        assert response.json() == {
            "object": "adapter", "id": "mia", "digest": digests[2], "aliases": {"next": 3, "prod": 1},
        }  # fmt: skip
        answer = server.chat(model="mia:prod")
        assert answer.headers["x-adapter-version"] == "1"
        assert (answer.headers["x-adapter-id"], answer.headers["x-adapter-digest"]) == ("mia", digests[0])
        assert answer.json()["model"] == "mia:prod"
        assert f"sha256:{engine.added[-1].adapter}" == digests[0]
        patch(server, aliases={"prod": 2, "next": None})
        assert shown(server)["aliases"] == {"prod": 2}
        assert server.chat(adapter_id="mia:prod").headers["x-adapter-version"] == "2"
        [listed] = server.http.get("/v1/adapters").json()["data"]
        assert listed["aliases"] == {"prod": 2}
        gone = server.chat(model="mia:next")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        assert server.http.get("/v1/models/mia:prod").json()["root"] == digests[1]

    def test_an_upload_moves_one(self, server, make_adapter) -> None:
        body = server.upload(make_adapter("4", seed=4), "mia", alias="prod").json()
        assert (body["version"], body["alias"]) == (4, "prod")
        assert shown(server)["aliases"] == {"prod": 4}

    @pytest.mark.parametrize(
        ("aliases", "param"),
        [
            ({"Prod": 1}, "aliases.Prod"),
            ({"3": 1}, "aliases.3"),
            ({"prod": 0}, "aliases.prod"),
            ({"prod": "1"}, "aliases.prod"),
            ({"prod": True}, "aliases.prod"),
            ({"prod": [1]}, "aliases.prod"),
            ({"prod": {}}, "aliases.prod"),
            ({"prod": {"1": 0.5}}, "aliases.prod"),
            ({"prod": {"1": 0.5, "2": 0.4}}, "aliases.prod"),
            ({"next": 1, "prod": {"1": 1.0, "2": 0}}, "aliases.prod"),
        ],
    )
    def test_what_is_none(self, server, engine, aliases: dict[str, Any], param: str) -> None:
        response = patch(server, aliases=aliases, pinned=True, limits={"weight": 2})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", param)
        assert (shown(server)["aliases"], shown(server)["limits"], engine.asked) == ({}, {}, [])

    def test_versions_that_are_not_there(self, server, engine) -> None:
        for body in ({"version": 9}, {"aliases": {"prod": 9}}, {"version": 1, "aliases": {"prod": 9}}):
            response = patch(server, **body)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (404, "version_not_found")
            assert "it has 1, 2, 3" in error["message"]
        assert (shown(server)["version"], shown(server)["aliases"]) == (3, {})

    @pytest.mark.parametrize("body", [{"version": 1}, {"aliases": {"prod": 1}}])
    def test_they_are_of_all_versions(self, server, body: dict[str, Any]) -> None:
        patch(server, aliases={"old": 1})
        for reference in ("mia@2", "mia:old"):
            response = patch(server, reference, **body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(body)))

    def test_removal_needs_force(self, server, engine, digests: list[str]) -> None:
        patch(server, aliases={"prod": 1})
        response = server.http.delete("/v1/adapters/mia@1")
        assert (response.status_code, response.headers["x-should-retry"]) == (409, "false")
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("version_in_use", "force")
        assert "mia:prod" in error["message"]
        assert server.http.delete("/v1/adapters/mia@1?force=false").status_code == 409
        assert server.http.delete("/v1/adapters/mia").status_code == 409
        done = server.http.delete("/v1/adapters/mia@1?force=true").json()
        assert (done["versions_removed"], done["aliases_removed"]) == (1, ["prod"])
        assert shown(server)["aliases"] == {}
        response = server.http.delete("/v1/adapters/mia:prod")
        assert response.status_code == 404

    def test_an_alias_is_not_deleted_as_a_version(self, server) -> None:
        patch(server, aliases={"prod": 1})
        response = server.http.delete("/v1/adapters/mia:prod?force=true")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_alias")
        assert shown(server)["aliases"] == {"prod": 1}

    def test_warm_and_pin_by_alias(self, server, engine, digests: list[str]) -> None:
        patch(server, aliases={"prod": 1, "both": {"1": 0.5, "2": 0.5}})
        patch(server, "mia:prod", pinned=True)
        assert engine.asked == [("pin", digests[0].removeprefix("sha256:"), True)]
        assert server.http.post("/v1/adapters/mia:prod:warm", json={}).json()["digest"] == digests[0]
        for response in (
            patch(server, "mia:both", pinned=True),
            server.http.post("/v1/adapters/mia:both:warm", json={}),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_alias")
            assert "mia@1 and mia@2" in response.json()["error"]["message"]


class TestRollback:
    def test_back(self, server, digests: list[str]) -> None:
        response = patch(server, version=1)
        assert response.json() == {"object": "adapter", "id": "mia", "digest": digests[0], "version": 1}
        assert server.chat(model="mia").headers["x-adapter-digest"] == digests[0]
        assert [v["version"] for v in shown(server)["versions"]] == [1, 2, 3]

    def test_everything_at_once(self, server, engine, digests: list[str]) -> None:
        body = patch(
            server, version=2, aliases={"prod": {"1": 0.9, "2": 0.1}}, limits={"weight": 2}, pinned=True
        ).json()
        assert (body["version"], body["aliases"], body["limits"]) == (2, {"prod": {"1": 0.9, "2": 0.1}}, {"weight": 2})
        assert body["digest"] == digests[1]
        assert engine.asked == [("pin", digests[1].removeprefix("sha256:"), True)]
        assert engine.limits == {"mia": Limits(weight=2)}


class TestCanary:
    def test_each_request_draws(self, server, store, monkeypatch) -> None:
        patch(server, aliases={"prod": {"1": 0.9, "2": 0.1}})
        numbers = iter([0.0, 0.95, 0.5, 0.9])
        monkeypatch.setattr(store._names, "_draw", lambda: next(numbers))
        answers = [server.chat(model="mia:prod", n=2) for _ in range(4)]
        assert [answer.headers["x-adapter-version"] for answer in answers] == ["1", "2", "1", "2"]
        assert [answer.json()["usage"]["lorasrv"]["adapter_version"] for answer in answers] == [1, 2, 1, 2]

    def test_as_a_model_it_is_shown_and_not_drawn(self, server, store, digests: list[str], monkeypatch) -> None:
        monkeypatch.setattr(store._names, "_draw", lambda: pytest.fail("drawn"))
        patch(server, aliases={"prod": {"1": 0.9, "2": 0.1}, "next": 3})
        cards = {
            name: server.http.get(f"/v1/models/{name}").json() for name in ("mia:prod", "mia:next", "mia@2", "mia")
        }
        targets = {
            name: [(target["version"], target["digest"], target["share"]) for target in card["targets"]]
            for name, card in cards.items()
        }
        first, second, third = digests
        assert targets == {
            "mia:prod": [(1, first, 0.9), (2, second, 0.1)],
            "mia:next": [(3, third, 1.0)],
            "mia@2": [(2, second, 1.0)],
            "mia": [(3, third, 1.0)],
        }
        assert {name: card["root"] for name, card in cards.items()} == {
            "mia:prod": None, "mia:next": third, "mia@2": second, "mia": third,
        }  # fmt: skip
        assert [card["id"] for card in cards.values()] == list(cards)
        assert server.http.get("/v1/models/mia:none").status_code == 404


class TestIfMatch:
    def test_what_was_seen(self, server, make_adapter, digests: list[str]) -> None:
        first = server.http.get("/v1/adapters/mia")
        seen = first.headers["etag"]
        assert seen == f'"{first.json()["etag"]}"'
        moved = patch(server, if_match=seen, version=1)
        assert moved.status_code == 200
        assert moved.headers["etag"] == server.http.get("/v1/adapters/mia").headers["etag"] != seen
        for stale in (seen, "", '"x"', '"*"', f"W/{moved.headers['etag']}", f'"{digests[2]}"'):
            for response in (
                patch(server, if_match=stale, version=2),
                patch(server, if_match=stale, pinned=True),
                server.http.delete("/v1/adapters/mia@2", headers={"if-match": stale}),
            ):
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (412, "precondition_failed")
                assert "has changed since you looked" in error["message"]
        for good in (moved.headers["etag"], f'"x", {moved.headers["etag"]}', "*", f'"{digests[0]}"'):
            assert patch(server, if_match=good, version=1).status_code == 200
        assert server.http.delete("/v1/adapters/mia@3", headers={"if-match": "*"}).status_code == 202

    def test_uploads(self, server, make_adapter) -> None:
        folder = make_adapter("4", seed=4)
        weights = (folder / "adapter_model.safetensors").read_bytes()
        digest = hashlib.sha256(weights).hexdigest()
        server.http.put(f"/v1/blobs/sha256:{digest}", content=weights)
        body = {
            "id": "mia",
            "config": json.loads((folder / "adapter_config.json").read_text()),
            "weights": f"sha256:{digest}",
        }
        seen = server.http.get("/v1/adapters/mia").headers["etag"]
        answers = [
            server.http.post("/v1/adapters", json=body, headers={"if-match": tag}) for tag in ('"x"', seen, seen)
        ]
        assert [answer.status_code for answer in answers] == [412, 201, 412]
        assert len(shown(server)["versions"]) == 4


class TestQuota:
    def test_over_it(self, server, store, make_adapter, tmp_path: Path) -> None:
        store.quota = StoreQuota(max_adapters=3)
        before = {path.name for path in (tmp_path / "store" / "blobs" / "sha256").iterdir()}
        response = server.upload(make_adapter("4", seed=4), "mia")
        assert (response.status_code, response.headers["x-should-retry"]) == (507, "false")
        error = response.json()["error"]
        assert error["code"] == "quota_exceeded"
        assert "3 adapter versions are stored, 1 more would be 4, 3 are allowed" in error["message"]
        assert {path.name for path in (tmp_path / "store" / "blobs" / "sha256").iterdir()} == before
        assert server.upload(make_adapter("1", seed=1), "mia").status_code == 200

    def test_the_flags(self) -> None:
        assert ServerSettings(max_adapters=5, store_bytes="2GiB").store_quota() == StoreQuota(5, 2 << 30)
        assert ServerSettings().store_quota() == StoreQuota()
        for wrong in ({"max_adapters": -1}, {"store_bytes": "-1"}, {"store_bytes": "much"}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                ServerSettings(**wrong)  # type: ignore[arg-type]


class TestVerdict:
    def test_it_is_shown(self, server, store) -> None:
        assert shown(server)["verified"] is None
        store.version_history.record_verdict(store.resolve("mia"), {"ok": True, "max_error": 0.01})
        assert shown(server)["verified"] == {"ok": True, "max_error": 0.01}
        patch(server, version=1)
        assert shown(server)["verified"] is None


class TestCommands:
    @pytest.fixture
    def run(self, cli, server):
        return lambda *arguments: cli(*arguments, "--server", server.url)

    def test_alias(self, run, server) -> None:
        assert run("alias", "mia").out == "mia: no aliases; add one with: lorasrv alias mia:NAME VERSION\n"
        assert run("alias", "mia:prod", 3).out == "mia:prod -> mia@3\n"
        done = run("alias", "mia:beta", "1=0.9", "2=0.1")
        assert (done.code, done.out, done.err) == (0, "mia:beta -> mia@1 90 %, mia@2 10 %\n", "")
        assert run("alias", "mia").out == "alias\tversion\nmia:beta\tmia@1 90 %, mia@2 10 %\nmia:prod\tmia@3\n"
        assert run("alias", "mia:prod").out == "alias\tversion\nmia:prod\tmia@3\n"
        assert json.loads(run("alias", "mia", "--json").out) == {
            "id": "mia", "aliases": {"beta": {"1": 0.9, "2": 0.1}, "prod": 3},
        }  # fmt: skip
        assert json.loads(run("alias", "mia:prod", 2, "--json").out) == {"id": "mia", "alias": "prod", "target": 2}
        assert "  mia:prod -> mia@2\n" in run("show", "mia").out
        assert run("alias", "mia:prod", "--remove").out == "removed mia:prod\n"
        assert shown(server)["aliases"] == {"beta": {"1": 0.9, "2": 0.1}}

    @pytest.mark.parametrize(
        ("arguments", "code", "says"),
        [
            (("mia:prod", "three"), 2, "'three' is not a version"),
            (("mia:prod", "1=0.5"), 2, "add up to 1"),
            (("mia:prod", "1=0.5", "1=0.5"), 2, "twice"),
            (("mia:prod", "1=x", "2=y"), 2, "not a version"),
            (("mia:prod", "1", "2"), 2, "not a version"),
            (("mia:prod", "1", "--remove"), 2, "not both"),
            (("mia", "1"), 2, "name the alias: mia:NAME"),
            (("mia", "--remove"), 2, "name the alias"),
            (("mia:prod", "--remove"), 1, "there is no alias mia:prod"),
            (("mia:prod",), 1, "there is no alias mia:prod"),
            (("mia:Prod", "1"), 1, "alias 'Prod' is not allowed"),
            (("mia:prod", "9"), 1, "has no version 9; it has 1, 2, 3"),
            (("zoe:prod", "1"), 1, "'zoe' does not exist"),
        ],
    )
    def test_alias_refused(self, run, server, arguments: tuple[str, ...], code: int, says: str) -> None:
        done = run("alias", *arguments)
        assert (done.code, done.out) == (code, "")
        assert says in done.err
        assert shown(server)["aliases"] == {}

    def test_rollback(self, run, server) -> None:
        assert run("rollback", "mia").out == "mia is mia@2 now (was mia@3)\n"
        assert run("rollback", "mia", "--to", 3).out == "mia is mia@3 now (was mia@2)\n"
        assert json.loads(run("rollback", "mia", "--to", 1, "--json").out) == {
            "id": "mia", "version": 1, "version_before": 3,
        }  # fmt: skip
        done = run("rollback", "mia")
        assert (done.code, done.out) == (1, "")
        assert "mia@1 is the oldest version there is" in done.err
        assert "has no version 7" in run("rollback", "mia", "--to", 7).err
        assert run("rollback", "mia", "--to", 0).code == 2
        assert shown(server)["version"] == 1

    def test_upload_and_rm(self, run, server, make_adapter) -> None:
        assert run("upload", make_adapter("4", seed=4), "--id", "mia", "--alias", "prod").code == 0
        assert shown(server)["aliases"] == {"prod": 4}
        done = run("rm", "mia@4")
        assert done.code == 1
        assert "while mia:prod points to it" in done.err
        assert run("rm", "mia@4", "--force").out == "removed mia@4 (1 version)\nremoved mia:prod\n"
