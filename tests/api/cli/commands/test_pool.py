"""Commands warm, pin, unpin and pool."""

import json
import sys
from dataclasses import replace

import pytest
from answers import failed, refused
from pool_maps import full_pool
from rich.console import Console

from adapter_store.spec import AdapterKey
from lorasrv.engine.messages import AdapterStatus
from lorasrv.errors import InvalidRequest
from lorasrv.outputs import AdapterTier


@pytest.fixture(autouse=True)
def keys(server, make_adapter) -> list[AdapterKey]:
    """The contents of mia@1 and mia@2."""
    done = [server.upload(make_adapter(str(seed), seed=seed), "mia").json() for seed in (1, 2)]
    return [AdapterKey(registered["digest"].removeprefix("sha256:")) for registered in done]


def test_warm(run, engine, keys: list[str]) -> None:
    done = run("warm", "mia")
    assert (done.code, done.out) == (0, f"mia is in the pool  {keys[1][:12]}  loaded in 12.3 ms\n")
    assert json.loads(run("warm", "mia@1", "--deadline-ms", 1500, "--json").out)["digest"] == f"sha256:{keys[0]}"
    assert run("warm", "mia", "--deadline-ms", 600_000).code == 0
    assert [asked[1:] for asked in engine.asked] == [(keys[1], 10.0), (keys[0], 1.5), (keys[1], 600.0)]


def test_warm_too_late_or_only_begun(run, engine, keys: list[str]) -> None:
    engine.reached = AdapterStatus(AdapterTier.DISK)
    late = run("warm", "mia", "--deadline-ms", 5)
    failed(late, 1, "lorasrv: mia was not loaded in time (disk); allow more with --deadline-ms\n")
    late = run("warm", "mia", "--json")
    assert (late.code, json.loads(late.out)["reached"]) == (1, False)
    begun = run("warm", "mia", "--deadline-ms", 0)
    assert (begun.code, begun.out) == (0, f"mia is loading from disk  {keys[1][:12]}\n")
    assert run("warm", "mia", "--deadline-ms", 0, "--json").code == 0


def test_pin_and_unpin(run, engine, keys: list[str]) -> None:
    assert run("pin", "mia").out == f"pinned mia  {keys[1][:12]}  resident\n"
    assert run("unpin", "mia@1").out == f"unpinned mia  {keys[0][:12]}  resident\n"
    assert json.loads(run("pin", "mia", "--json").out)["pinned"]
    assert engine.asked == [("pin", keys[1], True), ("pin", keys[0], False), ("pin", keys[1], True)]


@pytest.mark.parametrize("command", ["warm", "pin", "unpin"])
def test_refused(run, engine, command: str) -> None:
    assert run(command, "mio").err == "lorasrv: adapter 'mio' does not exist; did you mean mia?\n"
    engine.ask_error = InvalidRequest("it fits nowhere", param="adapter_id")
    failed(run(command, "mia"), 1, "lorasrv: it fits nowhere\n")
    assert run(command).code == 2


@pytest.mark.parametrize(
    "command", [("pool",), ("top", "--once"), ("top", "--once", "--json"), ("warm", "mia"), ("pin", "mia")]
)
def test_one_server_has_no_replicas(run, server, command: tuple[str, ...]) -> None:
    failed(run(*command, "--replica", "r0"), 1, "this is one server, not the address of several", "--replica")
    for path in ("/metrics", "/v1/pool", "/info"):
        refused(server.http.get(f"{path}?replica=r0"), 404, "replica", "leave replica out")


def test_pool_in_lines(run, server, engine, keys: list[AdapterKey]) -> None:
    engine.pool = full_pool(keys)
    assert [tuple(line.split("\t")) for line in run("pool").out.splitlines()] == [
        ("kind", "part", "pages"),
        ("pages", "total", "100"),
        ("pages", "kv", "10"),
        ("pages", "prefix", "9"),
        ("pages", "adapters", "30"),
        ("pages", "free", "51"),
        ("kind", "adapter", "pages", "used", "requests", "state", "pinned"),
        ("adapter", "mia@1", "20", "88 %", "1", "ready", "pinned"),
        ("adapter", "0" * 12 + " (deleted)", "6", "98 %", "0", "ready", "-"),
        ("adapter", "mia@2", "4", "98 %", "0", "copying", "-"),
        ("kind", "request", "adapter", "pages", "shared"),
        ("request", "cmpl-2#7", "-", "7", "0"),
        ("request", "chatcmpl-1#1", "mia@1", "3", "2"),
    ]
    engine.pool = replace(full := engine.pool, requests=(), adapters=())
    assert run("pool").out.splitlines()[-1] == "pages\tfree\t51", "no titles of rows that are not there"
    engine.pool = full
    shown, served = json.loads(run("pool", "--json").out), server.http.get("/v1/pool").json()
    for pool in (shown, served):
        assert pool["memory"].pop("resident_bytes") > 0, "which changes from one moment to the next"
    assert shown == served
    for wrong in (["warm", "mia", "--deadline-ms", "-1"], ["pool", "mia"]):
        assert run(*wrong).code == 2


def test_pool_at_a_terminal(run, engine, keys: list[AdapterKey], monkeypatch) -> None:
    console = lambda: Console(file=sys.stdout, width=100, force_terminal=True, color_system=None)  # noqa: E731
    monkeypatch.setattr("api.cli.commands.pool.out", console)
    engine.pool = full_pool(keys)
    bar, legend, *tables = run("pool").out.splitlines()
    assert bar == "█" * 60
    assert legend == "kv 10  prefix 9  adapters 30  free 51  of 100 pages of 1.0 KiB (16 tokens)"
    first_cells = [line.split()[0] for line in tables if line]
    assert first_cells == ["adapter", "mia@1", "0" * 12, "mia@2", "request", "cmpl-2#7", "chatcmpl-1#1"]
    engine.pool = replace(engine.pool, requests=(), adapters=())
    assert len(run("pool").out.splitlines()) == 2
