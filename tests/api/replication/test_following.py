"""What a cluster promises, on real sockets: docs/cluster.md names the test of each promise."""

import asyncio
import errno
import hashlib
import json
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest
from cluster_kit import SECRET, Cluster, Node, clustered
from fake_engine import HANG
from server import eventually
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from tiny_adapter import BASE

from adapter_store.errors import OriginDenied, OriginUnreachable, StoreFull, StoreUnusable
from adapter_store.registry.records import Change
from api.auth.key_store import KeyStore
from api.auth.principal import KeyLimits, Scope
from api.replication import follower, leases, usage_sender
from api.replication.follower import first_page
from api.replication.headers import BLOBS, LEASE_S, MIN_REVISION, REVISION, USAGE
from api.replication.registry_client import HttpOrigin, RegistryClient
from api.routes import registry as routes
from lorasrv.config import NO_SHARE, WHOLE, Limits, LimitShare
from lorasrv.metrics import usage_ledger
from lorasrv.metrics.usage import Usage
from lorasrv.metrics.usage_batch import MAX_NUMBER, UsageBatch, from_rows
from lorasrv.metrics.usage_db import LedgerFile


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with clustered(tmp_path) as started:
        yield started


@pytest.fixture
def upload(make_adapter: Callable[..., Path]) -> Callable[..., int]:
    """Upload an adapter to a server; the revision that its answer names."""

    def send(node: Node, adapter_id: str, seed: int = 0, key: str | None = None) -> int:
        folder = make_adapter(f"peft-{seed}", seed=seed)
        weights = (folder / "adapter_model.safetensors").read_bytes()
        digest = hashlib.sha256(weights).hexdigest()
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        node.http.put(f"/v1/blobs/sha256:{digest}", content=weights, headers=headers).raise_for_status()
        config = json.loads((folder / "adapter_config.json").read_text())
        body = {"id": adapter_id, "config": config, "weights": f"sha256:{digest}"}
        answer = node.http.post("/v1/adapters", json=body, headers=headers)
        answer.raise_for_status()
        return int(answer.headers[REVISION])

    return send


def test_what_was_uploaded_can_be_asked_at_once_anywhere(cluster: Cluster, upload: Callable[..., int]) -> None:
    """Without a wait, and without a header: a name that is not known here is asked for."""
    followers = [cluster.follow(name) for name in ("a", "bb")]
    for number in range(6):
        upload(cluster.registry, f"mia{number}", number)
        node = followers[number % 2]
        answer = node.ask(f"mia{number}")
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-adapter-version"] == "1"
        assert answer.json()["choices"][0]["text"] != node.ask(BASE).json()["choices"][0]["text"]


def test_what_was_uploaded_can_be_read_at_once_anywhere(cluster: Cluster, upload: Callable[..., int]) -> None:
    node = cluster.follow()
    for number, path in enumerate(
        ("adapters/NAME", "adapters/NAME/stats", "adapters/NAME/defaults", "models/NAME") * 5
    ):
        upload(cluster.registry, f"mia{number}", number)
        answer = node.http.get(f"/v1/{path.replace('NAME', f'mia{number}')}")
        assert answer.status_code == 200, answer.text


def test_what_a_registry_keeps_is_its_owners_alone(cluster: Cluster, upload: Callable[..., int]) -> None:
    """The names of followers, too."""
    cluster.registry.store.root.chmod(0o755)
    cluster.follow()
    upload(cluster.registry, "mia")
    kept = {path.name: path.stat().st_mode & 0o777 for path in cluster.registry.store.root.rglob("*") if path.is_file()}
    assert "followers.json" in kept
    assert {name: oct(mode) for name, mode in kept.items() if mode != 0o600} == {}


def test_a_revision_that_is_asked_for_is_waited_for(cluster: Cluster, upload: Callable[..., int]) -> None:
    node = cluster.follow()
    upload(cluster.registry, "mia", 1)
    assert node.ask("mia").headers["x-adapter-version"] == "1"
    for number in range(2, 6):
        revision = upload(cluster.registry, "mia", number)
        answer = node.ask("mia", **{MIN_REVISION: str(revision)})
        assert (answer.status_code, answer.headers["x-adapter-version"]) == (200, str(number))
        assert int(answer.headers[REVISION]) >= revision
    late = node.ask("mia", **{MIN_REVISION: str(revision + 1)})
    assert (late.status_code, late.json()["error"]["code"]) == (503, "revision_not_reached")
    assert node.ask("mia", **{MIN_REVISION: "soon"}).status_code == 400
    assert cluster.registry.ask("mia", **{MIN_REVISION: str(revision)}).status_code == 200
    # Who owns the names waits for nobody.
    unreached = cluster.registry.ask("mia", **{MIN_REVISION: str(revision + 1)})
    assert (unreached.status_code, unreached.json()["error"]["code"]) == (503, "revision_not_reached")


def test_many_who_ask_for_unknown_names_are_one_question(cluster: Cluster) -> None:
    node = cluster.follow()
    node.ask("nobody")
    before, begun_s = cluster.registry.line.passed.count("/v1/registry/changes"), time.monotonic()
    statuses: list[int] = []
    asking = [threading.Thread(target=lambda: statuses.append(node.ask("nobody").status_code)) for _ in range(12)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert statuses == [404] * 12
    asked = cluster.registry.line.passed.count("/v1/registry/changes") - before
    assert asked <= 2 + (time.monotonic() - begun_s)


def test_followers_see_two_hundred_uploads_that_come_at_once(cluster: Cluster, upload: Callable[..., int]) -> None:
    nodes = [cluster.follow("f" * (number + 1)) for number in range(4)]
    upload(cluster.registry, "first")
    digest = cluster.registry.store.records()["first"].versions[0].weights_digest
    config = dict(cluster.registry.store.version_history.peft_dir(cluster.registry.store.resolve("first")).config)

    def send(part: int) -> None:
        with httpx2.Client(base_url=cluster.registry.url, trust_env=False, timeout=60) as http:
            for number in range(25):
                body = {"id": f"a{part}-{number}", "config": config, "weights": f"sha256:{digest}"}
                http.post("/v1/adapters", json=body).raise_for_status()

    threads = [threading.Thread(target=send, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for node in nodes:
        node.catches_up(cluster.registry)
        assert dict(node.store.records()) == dict(cluster.registry.store.records())
        assert len(node.store.records()) == 201


def test_limits_and_deletions_reach_the_engines(cluster: Cluster, upload: Callable[..., int]) -> None:
    node = cluster.follow()
    upload(cluster.registry, "mia")
    cluster.registry.http.patch("/v1/adapters/mia", json={"limits": {"max_running": 2}}).raise_for_status()
    eventually(lambda: (limits := node.engine.limits.get("mia")) is not None and limits.max_running == 2)
    key = node.store.resolve("mia").key
    cluster.registry.http.delete("/v1/adapters/mia").raise_for_status()
    eventually(lambda: node.engine.limits["mia"] is None)
    eventually(lambda: ("pin", key, False) in node.engine.asked)
    assert key in node.engine.forgotten


def test_all_servers_together_keep_an_adapters_limits(cluster: Cluster, upload: Callable[..., int]) -> None:
    """Whoever is asked has them all, the registry too; who is asked no more gives them up."""
    nodes = [cluster.registry, cluster.follow("a"), cluster.follow("bb")]
    upload(cluster.registry, "mia")
    assert nodes[1].ask("mia").status_code == 200
    limits = {"max_running": 4, "tokens_per_s": 100.0}
    cluster.registry.http.patch("/v1/adapters/mia", json={"limits": limits}).raise_for_status()
    for node in nodes:
        eventually(lambda node=node: node.engine.limits.get("mia") is not None)
        assert node.engine.shares["mia"] == NO_SHARE, "told before the limits"
    for asked in nodes:
        eventually(lambda: all(node.engine.shares["mia"] == NO_SHARE for node in nodes))
        # Again if the answer came too late to be counted as demand.
        wanted = lambda asked=asked: asked.ask("mia").status_code == 200 and asked.engine.shares["mia"]  # noqa: E731
        eventually(lambda wanted=wanted: wanted() == LimitShare(4, 100.0))
        assert [node.engine.shares["mia"] for node in nodes if node is not asked] == [NO_SHARE] * 2
    cluster.registry.http.patch("/v1/adapters/mia", json={"limits": {}}).raise_for_status()
    for node in nodes:
        eventually(lambda node=node: node.engine.shares["mia"] == WHOLE)


def test_changes_belong_to_the_registry(cluster: Cluster, upload: Callable[..., int]) -> None:
    node = cluster.follow()
    upload(cluster.registry, "mia")
    node.catches_up(cluster.registry)
    verify = node.http.post("/v1/adapters/mia:verify", json={})
    for refused in (node.http.delete("/v1/adapters/mia"), verify):
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "store_follows")
        assert cluster.registry.url in refused.json()["error"]["message"]
    assert not [path for path in cluster.registry.line.passed if path.startswith(BLOBS)], "nothing was begun"
    asked = node.http.get("/v1/registry/changes", headers={"authorization": f"Bearer {SECRET}"})
    assert asked.status_code == 409
    assert node.http.get("/v1/adapters/mia").status_code == 200


def test_a_registry_that_dies(cluster: Cluster, upload: Callable[..., int]) -> None:
    """Answers go on, changes and unknown names say when to come again; after it is back, all is as before."""
    node = cluster.follow()
    upload(cluster.registry, "mia")
    assert node.ask("mia").status_code == 200
    cluster.registry.line.is_broken = True

    def refusal(answer: Any) -> tuple[int, str, str | None]:
        return answer.status_code, answer.json()["error"]["code"], answer.headers.get("retry-after")

    # An answer that was on its way while the line broke says once more that the registry is there.
    told = (503, "registry_unreachable", "5")
    eventually(lambda: refusal(node.http.delete("/v1/adapters/mia")) == told)
    assert node.ask("mia").status_code == node.ask(BASE).status_code == 200
    assert node.http.get("/ready").status_code == 200
    assert refusal(node.ask("zoe")) == told
    cluster.registry.line.is_broken = False
    upload(cluster.registry, "zoe")
    eventually(lambda: node.ask("zoe").status_code == 200)


def test_a_replica_that_is_cut_off(cluster: Cluster, upload: Callable[..., int]) -> None:
    """It answers to the end of its lease, then not, and comes back by itself."""
    node = cluster.follow()
    upload(cluster.registry, "mia")
    assert node.ask("mia").status_code == 200
    cluster.registry.line.is_silent = True
    node.ahead.s = LEASE_S - 10
    assert node.ask("mia").status_code == 200
    node.ahead.s = LEASE_S + 1
    over = node.ask("mia")
    assert (over.status_code, over.json()["error"]["code"]) == (503, "registry_unreachable")
    assert node.http.get("/ready").json() == {"status": "no lease from the registry"}
    assert node.http.get("/health").status_code == 200
    cluster.registry.line.is_silent = False
    eventually(lambda: node.http.get("/ready").status_code == 200)
    assert node.ask("mia").status_code == 200


@pytest.mark.parametrize(
    "answer",
    [
        RedirectResponse("https://registry.example/", 301),
        HTMLResponse("<html>Good morning</html>"),
        HTMLResponse("<html>Not here</html>", 404),
        JSONResponse({"status": "starting"}),
        PlainTextResponse("starting", headers={REVISION: "1"}),
    ],
    ids=["redirect", "page", "missing", "json", "cut"],
)
def test_another_server_in_the_registrys_place(
    cluster: Cluster, upload: Callable[..., int], answer: Response, caplog: pytest.LogCaptureFixture
) -> None:
    """It passes like a registry that is away: nothing is damaged by it, and the start says it in a line."""
    node = cluster.follow()
    upload(cluster.registry, "mia")
    node.catches_up(cluster.registry)
    key = node.store.resolve("mia").key
    cluster.registry.line.other = answer
    why = f"what answers at {cluster.registry.url} is no registry of lorasrv: it"
    if REVISION not in answer.headers:
        with pytest.raises(OriginUnreachable, match=why):
            node.store.load(key)
    eventually(lambda: why in node.ask("zoe").json()["error"]["message"])
    refused = node.ask("zoe")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "registry_unreachable")
    caplog.clear()
    origin = HttpOrigin(cluster.registry.url, SECRET)
    first_page(node.store, RegistryClient(origin, SECRET))
    (told,) = [record.message for record in caplog.records if record.name == first_page.__module__]
    assert told.startswith(why)
    assert told.endswith("this server is not ready until the registry answers")
    origin.close()
    cluster.registry.line.other = None
    # The next lease tells that the registry is back.
    eventually(lambda: not node.follower._origin.is_cut_off)
    assert node.store.load(key).spec.key == key
    upload(cluster.registry, "zoe", 2)
    eventually(lambda: node.ask("zoe").status_code == 200)
    assert not any(task.done() for task in node.follower._tasks)


@pytest.mark.parametrize("is_first", [False, True])
def test_changes_that_never_end(cluster: Cluster, upload: Callable[..., int], is_first: bool) -> None:
    """Pages that bring nothing and are not the last: who asks is told so, and nobody asks without pause."""
    node = cluster.follow()
    upload(cluster.registry, "mia")
    node.catches_up(cluster.registry)
    registry, asked = cluster.registry.services.registry, 0

    async def endless(*_: object) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        page = cluster.registry.store.feed.changes(None if is_first else cluster.registry.store.feed.head())
        return {"page": page.to_dict() | {"is_last": False}, "keys": None}

    object.__setattr__(registry, "changes", endless)
    refused = node.http.post("/v1/completions", json={"model": "zoe", "prompt": "hi"}, timeout=10)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unusable")
    before = asked
    time.sleep(0.5)
    assert asked - before < 10
    assert node.ask("mia").status_code == 200
    origin = HttpOrigin(cluster.registry.url, SECRET)
    with pytest.raises(StoreUnusable, match="do not go on"):
        first_page(node.store, RegistryClient(origin, SECRET))
    origin.close()


def test_a_registry_of_a_version_that_sends_keys_otherwise(cluster: Cluster) -> None:
    """Its keys would be left out, and it would be asked for them without pause."""
    node, registry = cluster.follow(), cluster.registry.services.registry

    async def older(*_: object) -> dict[str, Any]:
        return {"page": cluster.registry.store.feed.changes(None).to_dict(), "all_keys": []}

    object.__setattr__(registry, "changes", older)
    origin = HttpOrigin(cluster.registry.url, SECRET)
    with pytest.raises(StoreUnusable, match="without keys; run the same version on both"):
        first_page(node.store, RegistryClient(origin, SECRET))
    origin.close()


@pytest.mark.parametrize("limits", [{"max_running": -1.0}, {"of_another_version": 1.0}])
def test_limits_that_cannot_be_enforced(
    cluster: Cluster, upload: Callable[..., int], limits: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    """They are not taken over, as a server that keeps them does not start; later ones that can be are, all of them."""
    node = cluster.follow()
    for number, name in enumerate(("mia", "zoe")):
        upload(cluster.registry, name, number)
    node.catches_up(cluster.registry)
    cluster.registry.store.change("mia", Change(limits=limits))
    cluster.registry.store.change("zoe", Change(limits={"max_running": 3.0}))
    eventually(lambda: "limits of 'mia' that this version of lorasrv cannot enforce" in caplog.text)
    assert node.ask("mia").status_code == 200
    node.services.limits.check()
    cluster.registry.store.change("mia", Change(limits={"max_running": 2.0}))
    wanted = {"mia": Limits(max_running=2), "zoe": Limits(max_running=3)}
    eventually(lambda: {name: node.engine.limits.get(name) for name in wanted} == wanted)


def test_no_lease_is_longer_than_is_promised(cluster: Cluster) -> None:
    node = cluster.follow()
    registry = cluster.registry.services.registry
    answer, said = registry.lease, []

    async def longer(*args: Any) -> dict[str, Any]:
        said.append(await answer(*args) | {"lease_s": 1e9})
        return said[-1]

    object.__setattr__(registry, "lease", longer)
    eventually(lambda: len(said) > 1)
    cluster.registry.line.is_broken = True
    node.ahead.s = LEASE_S + 1
    assert node.ask(BASE).status_code == 503


def test_a_lease_needs_what_the_registry_has(cluster: Cluster, upload: Callable[..., int]) -> None:
    """A follower that hears the registry, but not its changes, must not go on: they may take a name away."""
    node = cluster.follow()
    upload(cluster.registry, "mia")
    node.catches_up(cluster.registry)
    changes = cluster.registry.services.registry.changes

    async def broken(*_: object) -> object:
        raise ValueError("a bug")

    object.__setattr__(cluster.registry.services.registry, "changes", broken)
    upload(cluster.registry, "mia", 2)
    eventually(lambda: node.follower is not None and node.follower._promise.position.revision == 2)
    node.ahead.s = LEASE_S + 1
    assert node.ask("mia").status_code == 503
    object.__setattr__(cluster.registry.services.registry, "changes", changes)
    eventually(lambda: node.ask("mia").status_code == 200)
    assert node.ask("mia").headers["x-adapter-version"] == "2"


def test_a_replica_says_that_it_is_not_ready(cluster: Cluster) -> None:
    """An edge is told where nobody else is answered: without a lease, and to the end of draining."""
    node = cluster.follow()

    def is_ready() -> bool:
        answer = node.http.get("/v1/replica", headers={"authorization": f"Bearer {SECRET}"})
        assert answer.status_code == 200, answer.text
        return bool(answer.json()["is_ready"])

    eventually(is_ready)
    cluster.registry.line.is_broken = True
    node.ahead.s = LEASE_S + 1
    eventually(lambda: not is_ready())
    assert node.ask(BASE).status_code == 503
    cluster.registry.line.is_broken = False
    eventually(is_ready)
    node.services.draining.begin(25.0)
    assert not is_ready()


def test_deletion_is_answered_when_nobody_takes_requests_for_it(cluster: Cluster, upload: Callable[..., int]) -> None:
    nodes = [cluster.follow(name) for name in ("a", "bb")]
    leases = cluster.registry.services.registry.leases
    leases._all_known_s = 0.0
    upload(cluster.registry, "mia")
    for node in nodes:
        assert node.ask("mia").status_code == 200
    answer = cluster.registry.http.delete("/v1/adapters/mia", params={"wait": "all"})
    assert (answer.status_code, answer.json()["followers"]) == (200, 2)
    for node in nodes:
        assert node.store.records() == {}
    upload(cluster.registry, "mia")
    for node in nodes:
        node.catches_up(cluster.registry)
    eventually(lambda: all(lease.revision == 3 for lease in leases._leases.values()))
    # One that says nothing any more is waited for to the end of its lease.
    clock, ahead = leases._clock, [0.0]
    leases._clock = lambda: clock() + ahead[0]
    stopped = nodes[0].follower
    for task in stopped._tasks:
        task.get_loop().call_soon_threadsafe(task.cancel)
    eventually(lambda: all(task.done() for task in stopped._tasks))
    done: list[httpx2.Response] = []
    deleting = threading.Thread(
        target=lambda: done.append(cluster.registry.http.delete("/v1/adapters/mia", params={"wait": "all"}))
    )
    deleting.start()
    eventually(lambda: nodes[1].store.records() == {})
    assert done == []
    ahead[0] = LEASE_S
    leases._news.set()
    deleting.join(20)
    assert done[0].status_code == 200


def test_one_ahead_of_a_restored_registry_has_not_taken_over_what_comes(
    cluster: Cluster, upload: Callable[..., int]
) -> None:
    cluster.registry.services.registry.leases._all_known_s = 0.0
    upload(cluster.registry, "mia")
    head = cluster.registry.store.feed.head()
    said = {"replica": "ab" * 8, "history": head.history, "revision": head.revision + 5}
    bearer = {"authorization": f"Bearer {SECRET}"}
    cluster.registry.http.post("/v1/registry/lease", json=said, headers=bearer).raise_for_status()
    assert cluster.registry.services.registry.leases._left_s(head.revision + 1) > 0


def test_a_registry_with_a_full_disk_says_so_to_a_new_follower(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(leases, "fsync_directory", full)
    answer = cluster.registry.http.post(
        "/v1/registry/lease", json={"replica": "ab" * 8}, headers={"authorization": f"Bearer {SECRET}"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (507, "store_full")
    client = HttpOrigin(cluster.registry.url, SECRET)
    with pytest.raises(OriginUnreachable, match="it answers 507 now: the disk of the adapter store is full"):
        client.check_answer(answer.status_code, answer.headers, answer.content)
    client.close()


@pytest.mark.parametrize("is_full", [False, True], ids=["", "full disk"])
def test_keys_of_an_answer_that_comes_late_are_not_taken(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """A revoked key would come back: the change of keys moves no position. Also where the answer before could be
    taken over in part."""
    node = cluster.follow()
    with closing(KeyStore(cluster.registry.store.root)) as key_store:
        key_store.create("ops", frozenset({Scope.ADMIN}))
        _, secret = key_store.create("bob", frozenset({Scope.INFER}))
        bearer = {"authorization": f"Bearer {secret}"}
        # Without keys it answers anybody, and with those from before bob's it does not know him yet.
        eventually(lambda: node.ask(BASE).status_code == 401 and node.ask(BASE, **bearer).status_code == 200)
        follower = node.follower
        assert follower is not None
        late, get, calls = asyncio.Event(), follower.client.get, []

        async def held(path: str, params: Any, wait_s: float = 0.0) -> Any:
            if late.is_set():
                # Nothing mends what the late answer did.
                await asyncio.sleep(3600.0)
            calls.append("asked" if wait_s else "catching up")
            answer = await get(path, params, wait_s)
            if wait_s:
                calls.append("answered")
                await late.wait()
            return answer

        monkeypatch.setattr(follower.client, "get", held)
        key_store.create("mia", frozenset({Scope.INFER}))
        eventually(lambda: "asked" in calls)
        key_store.create("zoe", frozenset({Scope.INFER}))
        eventually(lambda: "answered" in calls)
        if is_full:
            monkeypatch.setattr(node.store, "follow", Mock(side_effect=StoreFull("no room")))
        key_store.revoke("bob")
        eventually(lambda: node.ask(BASE, **bearer).status_code == 401)
        follower._tasks[0].get_loop().call_soon_threadsafe(late.set)
        time.sleep(1.0)
        assert node.ask(BASE, **bearer).status_code == 401


def test_keys_are_those_of_the_registry(cluster: Cluster, upload: Callable[..., int]) -> None:
    """Created, limited to patterns and revoked there, they count here; secrets never travel."""
    node = cluster.follow()
    with closing(KeyStore(cluster.registry.store.root)) as book:
        _, ann = book.create("ann", frozenset({Scope.INFER}), ("mia*",))
        _, ops = book.create("ops", frozenset({Scope.ADMIN}))
    eventually(lambda: node.ask(BASE).status_code == 401)
    upload(cluster.registry, "mia", key=ops)
    upload(cluster.registry, "zoe", key=ops)
    node.catches_up(cluster.registry)
    bearer = {"authorization": f"Bearer {ann}"}
    assert node.ask("mia", **bearer).status_code == 200
    assert node.ask("zoe", **bearer).status_code == 404
    for root in (node.store.root, cluster.registry.store.root):
        stored = b"".join(path.read_bytes() for path in root.glob("keys.db*"))
        assert ann.encode() not in stored
    with closing(KeyStore(cluster.registry.store.root)) as book:
        book.revoke("ann")
    eventually(lambda: node.ask("mia", **bearer).status_code == 401)


def test_a_revoked_key_is_not_honoured_longer_than_the_lease(cluster: Cluster) -> None:
    with closing(KeyStore(cluster.registry.store.root)) as book:
        _, ann = book.create("ann", frozenset({Scope.INFER}))
    node = cluster.follow()
    bearer = {"authorization": f"Bearer {ann}"}
    eventually(lambda: node.ask(BASE, **bearer).status_code == 200)
    cluster.registry.line.is_silent = True
    with closing(KeyStore(cluster.registry.store.root)) as book:
        book.revoke("ann")
    node.ahead.s = LEASE_S + 1
    assert node.ask(BASE, **bearer).status_code == 503
    cluster.registry.line.is_silent = False
    eventually(lambda: node.ask(BASE, **bearer).status_code == 401)


def test_a_key_expires_by_the_registrys_time(cluster: Cluster) -> None:
    """Also while the registry says nothing, and not by the follower's own wall clock."""
    registry = cluster.registry.services.registry
    begun_s = time.time()
    with closing(KeyStore(cluster.registry.store.root)) as book:
        secrets = [book.create(name, frozenset({Scope.INFER}), expires_s=begun_s + after_s)[1]
                   for name, after_s in (("ann", LEASE_S / 2), ("bob", 3600.0))]  # fmt: skip
    ann, bob = ({"authorization": f"Bearer {secret}"} for secret in secrets)
    node = cluster.follow()
    for bearer in (ann, bob):
        eventually(lambda bearer=bearer: node.ask(BASE, **bearer).status_code == 200)
    cluster.registry.line.is_silent = True
    node.ahead.s = LEASE_S / 2 + 1
    expired = node.ask(BASE, **ann)
    assert (expired.status_code, expired.json()["error"]["message"]) == (401, "this key is expired")
    assert node.ask(BASE, **bob).status_code == 200
    lease = registry.lease

    async def two_hours_later(*asked: Any) -> dict[str, Any]:
        return await lease(*asked) | {"now_s": begun_s + 7200}

    object.__setattr__(registry, "lease", two_hours_later)
    cluster.registry.line.is_silent = False
    eventually(lambda: node.ask(BASE, **bob).status_code == 401)


def test_all_servers_together_keep_a_keys_rate(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first request on; without the registry, what followers have is all there is."""
    most = 60
    with closing(KeyStore(cluster.registry.store.root)) as book:
        _, ann = book.create("ann", frozenset({Scope.INFER}), limits=KeyLimits(requests_per_min=most))
    nodes, bearer = [cluster.follow(name) for name in ("a", "bb")], {"authorization": f"Bearer {ann}"}
    for node in nodes:
        eventually(lambda node=node: node.ask(BASE).status_code == 401)
    begun_s = time.monotonic()
    with monkeypatch.context() as patient:
        # The registry has time to lend, however slow the machine is.
        patient.setattr(follower, "RENEWED_S", 60.0)
        patient.setattr(RegistryClient, "post", partialmethod(RegistryClient.post, timeout_s=60.0))
        assert [nodes[number % 2].ask(BASE, **bearer).status_code for number in range(10)] == [200] * 10
    statuses = Counter({200: 10})

    def use_up(*nodes: Node) -> bool:
        answers = [node.ask(BASE, **bearer) for node in nodes]
        statuses.update(answer.status_code for answer in answers)
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)
        return all(answer.status_code == 429 for answer in answers)

    eventually(lambda: use_up(*nodes))
    # What the other does not use comes within seconds.
    eventually(lambda: use_up(nodes[0]) and statuses[200] >= most)
    cluster.registry.line.is_broken = True
    eventually(lambda: use_up(*nodes))
    assert statuses.keys() == {200, 429}
    assert statuses[200] <= most * (1 + (time.monotonic() - begun_s) / 60)


def test_all_servers_together_keep_a_keys_answers(cluster: Cluster) -> None:
    """The one that is in use gets them all, and a server that has ended keeps none."""
    with closing(KeyStore(cluster.registry.store.root)) as book:
        _, ann = book.create("ann", frozenset({Scope.INFER}), limits=KeyLimits(max_concurrent=3))
    nodes, bearer = [cluster.follow(name) for name in ("a", "bb")], {"authorization": f"Bearer {ann}"}
    for node in nodes:
        node.engine.breaks(2, HANG)
        eventually(lambda node=node: node.ask(BASE).status_code == 401)
    body = {"model": BASE, "prompt": "hi", "stream": True}

    def begins(node: Node, opened: ExitStack) -> bool:
        with ExitStack() as refused:
            stream = node.http.stream("POST", "/v1/completions", json=body, headers=bearer)
            begun = refused.enter_context(stream).status_code == 200
            if begun:
                opened.push(refused.pop_all())
            return begun

    for node in (*nodes, nodes[0]):
        with ExitStack() as opened:
            for _ in range(3):
                eventually(lambda node=node, opened=opened: begins(node, opened))
            for other in nodes:
                assert other.ask(BASE, **bearer).status_code == 429


def stats(node: Node, name: str) -> dict[str, Any]:
    found: dict[str, Any] = node.http.get(f"/v1/adapters/{name}/stats").raise_for_status().json()
    return found


def test_the_registry_counts_what_its_followers_have_served_once(
    cluster: Cluster, upload: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is lost on the way; and nothing for the next adapter of a deleted one's name."""
    for module, name in ((usage_ledger, "WRITE_EVERY_S"), (usage_sender, "TRY_AGAIN_S")):
        monkeypatch.setattr(module, name, 0.05)
    # What servers that were killed have left: something on its way, and something after it.
    for folder in ("a", "bb"):
        killed = LedgerFile(cluster.folder / folder / usage_ledger.FILE_NAME, sends=True)
        killed.path.parent.mkdir()
        killed.add({("", None): Usage(requests=30)})
        killed.next_batch()
        killed.add({("", None): Usage(requests=20)})
    registry, nodes = cluster.registry, [cluster.follow(name) for name in ("a", "bb")]
    upload(registry, "mia")
    for number, node in enumerate(nodes, 2):
        for _ in range(number):
            assert node.ask("mia").status_code == node.ask(BASE).status_code == 200
    assert registry.ask("mia").status_code == 200
    eventually(lambda: (stats(registry, "mia")["requests"], stats(registry, "base")["requests"]) == (6, 105))
    assert [stats(node, "mia")["requests"] for node in nodes] == [2, 3], "of this server alone"
    assert stats(registry, "mia")["found"]["disk"] == 6

    registry.line.loses_answers_to = USAGE
    tried = registry.line.passed.count(USAGE)
    nodes[0].ask("mia")
    eventually(lambda: registry.line.passed.count(USAGE) >= tried + 3)
    nodes[0].ask("mia")
    registry.line.loses_answers_to = None
    eventually(lambda: stats(registry, "mia")["requests"] == 8)
    nodes[0].ask("mia")
    eventually(lambda: stats(registry, "mia")["requests"] == 9)

    registry.http.delete("/v1/adapters/mia").raise_for_status()
    upload(registry, "mia")
    for node in nodes:
        node.catches_up(registry)
        eventually(lambda node=node: stats(node, "mia")["requests"] == 0)
    nodes[1].ask("mia")
    eventually(lambda: stats(registry, "mia")["requests"] == stats(nodes[1], "mia")["requests"] == 1)


def test_a_batch_that_the_registry_refuses_holds_up_no_other(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is set aside with its counts. While the registry refuses all, they wait: it may be an older version."""
    for module, name in ((usage_ledger, "WRITE_EVERY_S"), (usage_sender, "TRY_AGAIN_S")):
        monkeypatch.setattr(module, name, 0.05)
    registry = cluster.registry
    file = LedgerFile(cluster.folder / "a" / usage_ledger.FILE_NAME, sends=True)
    file.path.parent.mkdir()
    file.add({("", None): Usage(requests=MAX_NUMBER)})
    refused = file.next_batch()
    file.add({("", None): Usage(requests=20)})

    with monkeypatch.context() as older:
        older.setattr(routes, "from_rows", lambda _: from_rows([None]))
        node = cluster.follow("a")
        eventually(lambda: registry.line.passed.count(USAGE) > 6)
        assert "never count" not in caplog.text
    eventually(lambda: stats(registry, "base")["requests"] == 20)
    node.ask(BASE)
    eventually(lambda: stats(registry, "base")["requests"] == 21)
    # The registry counts before the follower hears of it.
    eventually(lambda: file.next_batch() is None)
    with closing(sqlite3.connect(file.path)) as db:
        ((*kept, why),) = db.execute("SELECT source, sequence, body, why FROM refused").fetchall()
    assert UsageBatch(*kept) == refused
    assert "answers 400: " in why
    assert caplog.text.count("never count") == 1


@pytest.mark.parametrize(
    "changed",
    [{"source": "me"}, {"sequence": 0}, {"usage": [["mia", "", {"requests": -1}, []]]}, {"usage": {}}, {"more": 1}],
)
def test_a_batch_of_usage_that_is_none_is_refused(cluster: Cluster, changed: dict[str, Any]) -> None:
    headers = {"authorization": f"Bearer {SECRET}"}
    body = {"source": "0" * 32, "sequence": 1, "usage": []}
    refused = cluster.registry.http.post(USAGE, json=body | changed, headers=headers)
    assert refused.status_code in (400, 422), refused.text
    answers = [cluster.registry.http.post(USAGE, json=body, headers=headers).json() for _ in range(2)]
    assert answers == [{"counted": True}, {"counted": False}]
    assert cluster.follow().http.post(USAGE, json=body, headers=headers).status_code == 409


def test_a_follower_whose_disk_has_no_room_for_changes(
    cluster: Cluster, upload: Callable[..., int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests for new names may be sent to another server. The rest is answered until the lease ends, as the changes
    are not here; the log has one line. Once there is room, the follower recovers."""
    node = cluster.follow()
    refusals = Mock(side_effect=StoreFull("no room on the store's disk for its index"))
    with monkeypatch.context() as full:
        full.setattr(node.store, "follow", refusals)
        upload(cluster.registry, "mia")
        refused = node.ask("mia")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "adapter_cache_full")
        assert "no room on this replica's disk for the registry's changes" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "5"
        assert node.ask(BASE).status_code == 200
        eventually(lambda: refusals.call_count > 5)
        node.ahead.s = LEASE_S + 1
        assert node.http.get("/ready").json() == {"status": "no lease from the registry"}
        eventually(lambda: "no room on this replica's disk" in node.ask(BASE).json()["error"]["message"])
    eventually(lambda: node.ask("mia").status_code == 200)
    assert [message for message in caplog.messages if "cannot follow" in message] == [
        "cannot follow the registry, and try again until it works: no room on this replica's disk for the registry's "
        "changes; once some is free, they are taken"
    ]


def test_an_error_without_a_text_is_logged(
    cluster: Cluster, upload: Callable[..., int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with its traceback."""
    node = cluster.follow()
    failing = Mock(side_effect=AssertionError())
    with monkeypatch.context() as broken:
        broken.setattr(node.store, "follow", failing)
        upload(cluster.registry, "mia")
        eventually(lambda: failing.call_count > 2)
    [record] = [record for record in caplog.records if "cannot follow" in record.getMessage()]
    assert record.exc_info is not None


def test_a_follower_is_told_why_it_cannot_follow(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry's refusal of its key is no fault of its store, and a follower names the registry to follow."""
    node = cluster.follow()
    for client in (node.follower.client._client, node.follower._origin._client):
        client.headers["authorization"] = "Bearer of-another-cluster"
    refused = node.ask("zoe")
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "registry_refused")
    why = f"{cluster.registry.url} refuses this server's key (403, only servers of this cluster may ask this"
    assert why in refused.json()["error"]["message"]
    node.ahead.s = LEASE_S + 1
    eventually(lambda: "refuses this server's key" in node.ask(BASE).json()["error"]["message"])
    origin = HttpOrigin(node.url, SECRET)
    node.ahead.s = 0.0
    with pytest.raises(OriginDenied, match=f"answers 409, this server follows the registry at {cluster.registry.url}"):
        first_page(node.store, RegistryClient(origin, SECRET))
    origin.close()


@pytest.mark.parametrize("secret", [None, "another-secret", "admin"])
def test_only_servers_of_the_cluster_may_follow(cluster: Cluster, secret: str | None) -> None:
    if secret == "admin":
        with closing(KeyStore(cluster.registry.store.root)) as book:
            _, secret = book.create("ops", frozenset({Scope.ADMIN}))
    headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
    for method, path in (
        ("GET", "/v1/registry/changes"),
        ("GET", f"/v1/registry/blobs/{'0' * 64}"),
        ("POST", "/v1/registry/lease"),
        ("POST", "/v1/registry/usage"),
    ):
        assert cluster.registry.http.request(method, path, headers=headers).status_code in (401, 403)
    asked = cluster.registry.http.get("/v1/registry/changes", headers={"authorization": f"Bearer {SECRET}"})
    assert asked.status_code == 200
    assert asked.json()["page"]["is_last"] is True


def test_weights_come_in_ranges(cluster: Cluster, upload: Callable[..., int]) -> None:
    upload(cluster.registry, "mia")
    node = cluster.follow()
    ref = node.store.resolve("mia")
    digest = node.store.records()["mia"].versions[0].weights_digest
    path, headers = f"/v1/registry/blobs/{digest}", {"authorization": f"Bearer {SECRET}"}
    whole = cluster.registry.http.get(path, headers=headers)
    part = cluster.registry.http.get(path, headers=headers | {"range": "bytes=100-"})
    assert (part.status_code, part.content) == (206, whole.content[100:])
    assert hashlib.sha256(whole.content).hexdigest() == digest
    assert node.store.load(ref.key).spec.weights_digest == digest
    missing = cluster.registry.http.get(f"/v1/registry/blobs/{'0' * 64}", headers=headers)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "blob_not_found")
