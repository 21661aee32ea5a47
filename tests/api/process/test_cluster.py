"""One registry and two servers that follow it, by the real command line."""

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from served import Served, lorasrv, serve

from api.server import bind

PROMPT = {"prompt": "a b c d e f", "max_tokens": 12, "temperature": 0}


def say(served: Served, model: str) -> str:
    answer = served.post("/v1/completions", model=model, **PROMPT)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def counted(served: Served, name: str) -> int:
    return int(served.http.get(f"/v1/adapters/{name}/stats").json()["requests"])


def keeps_a_rate(registry: Served, nodes: list[Served], name: str) -> None:
    """All servers together compute an adapter's tokens at its rate, with a burst of two seconds and a debt of each."""
    rate, of_request, streams = 40.0, 18, 3
    registry.http.patch(f"/v1/adapters/{name}", json={"limits": {"tokens_per_s": rate}}).raise_for_status()
    for node in nodes:
        limited = lambda node=node: node.http.get(f"/v1/adapters/{name}").json()["limits"] == {"tokens_per_s": rate}  # noqa: E731
        node.until(limited)
    ends_s = time.monotonic() + 6.0

    def ask(node: Served) -> int:
        number = 0
        while time.monotonic() < ends_s:
            say(node, name)
            number += 1
        return number

    begun_s = time.monotonic()
    with ThreadPoolExecutor(streams * len(nodes)) as pool:
        answered = list(pool.map(ask, nodes * streams))
    numbers = [sum(answered[place :: len(nodes)]) for place in range(len(nodes))]
    computed = of_request * sum(numbers)
    assert computed <= rate * (time.monotonic() - begun_s + 2.0 * len(nodes)) + of_request * len(nodes), numbers
    assert computed >= rate, "it is used"
    assert all(numbers), "by everybody"
    registry.http.patch(f"/v1/adapters/{name}", json={"limits": {}}).raise_for_status()


@pytest.mark.slow
def test_a_registry_and_two_followers(
    cli: Callable[..., Any], refused: Callable[..., Any], flags, adapter_dirs: dict[str, Path], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of-this-cluster\n")
    common = ("--cluster-secret-file", secret, "--log-level", "warning", *flags)
    kept = tmp_path / "registry"
    with ExitStack() as opened:
        first = opened.enter_context(ExitStack())
        registry = first.enter_context(serve(*common, store=kept, command="registry", ends=-signal.SIGKILL))
        nodes = [
            opened.enter_context(serve(*common, "--registry", registry.url, store=tmp_path / name))
            for name in ("one", "two")
        ]
        for node in nodes:
            node.until(lambda node=node: node.http.get("/ready").status_code == 200)
        assert cli("upload", adapter_dirs["one"], "--id", "mia", "--server", registry.url).code == 0
        base, mine = say(nodes[0], "tiny"), say(nodes[0], "mia")
        assert mine == say(nodes[1], "mia") != base
        assert cli("upload", adapter_dirs["two"], "--id", "bob", "--server", registry.url).code == 0
        keeps_a_rate(registry, nodes, "bob")
        asked = registry.post("/v1/completions", model="mia", prompt="a")
        begun = registry.http.post(
            "/v1/batches", json={"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
        )
        sent = registry.http.post("/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "batch"})
        pinned = registry.http.patch("/v1/adapters/mia", json={"pinned": True})
        unpinned = registry.http.patch("/v1/adapters/mia", json={"pinned": False})
        for refusal in (asked, begun, sent, pinned, unpinned):
            assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "no_engine")
        elsewhere = cli("upload", adapter_dirs["two"], "--id", "zoe", "--server", nodes[0].url)
        assert elsewhere.code == 1
        assert f"follows the registry at {registry.url}" in elsewhere.err
        second = refused("registry", "--store", kept, "--port", 0, *common)
        assert second.code == 1
        assert "another server uses" in second.err or "in use" in second.err, second.err
        # A server that cannot follow says so in one line, and no model is loaded first: a wrong secret, and a folder
        # with adapters of its own.
        following = ("serve", "--port", 0, *flags, "--registry", registry.url, "--store")
        wrong = lorasrv(*following, tmp_path / "a", "--cluster-secret", "of-another-one")
        assert (wrong.returncode, "refuses this server's key" in wrong.stderr) == (1, True), wrong.stderr
        modules = refused(*following, tmp_path / "b", "--lora-modules", "mia=./mia")
        assert modules.code in (1, 2)
        assert "--lora-modules" in modules.err
        assert "Traceback" not in wrong.stderr
        assert "loading the model" not in wrong.stderr + modules.err

        registry.signal(signal.SIGKILL)
        registry.ended()
        assert [say(node, "mia") for node in nodes] == [mine, mine]
        nodes[1].until(lambda: nodes[1].http.delete("/v1/adapters/mia").status_code == 503)
        first.close()
        again = opened.enter_context(serve(*common, "--port", registry.port, store=kept, command="registry"))
        assert again.port == registry.port
        # Two were counted before it was killed, maybe, and two while it was dead.
        again.until(lambda: (counted(again, "mia"), counted(again, "base")) == (4, 1))
        assert cli("upload", adapter_dirs["two"], "--id", "zoe", "--server", again.url).code == 0
        for node in nodes:
            node.until(lambda node=node: node.http.get("/v1/adapters/zoe").status_code == 200)
        assert len({say(nodes[0], "zoe"), say(nodes[1], "zoe")}) == 1
        assert say(nodes[0], "zoe") not in (base, mine)
        again.until(lambda: counted(again, "zoe") == 3)
        assert again.http.delete("/v1/adapters/mia", params={"wait": "all"}, timeout=60).json()["followers"] == 2
        assert {node.post("/v1/completions", model="mia", **PROMPT).status_code for node in nodes} == {404}


@pytest.mark.slow
def test_a_follower_is_ready_when_its_registry_has_answered(flags, tmp_path: Path) -> None:
    """Until then it answers 503, and says that it waits."""
    with bind("127.0.0.1", 0) as one, bind("127.0.0.1", 0) as other:
        ports = [str(taken.getsockname()[1]) for taken in (one, other)]
    url, registry_url = (f"http://127.0.0.1:{port}" for port in ports)
    common = ("--cluster-secret", "of-this-cluster", "--log-level", "warning", *flags)
    following = ("--port", ports[0], "--registry", registry_url)
    with serve(*common, *following, store=tmp_path / "cache") as node, httpx2.Client(trust_env=False) as http:
        node.until(lambda: "waiting for the registry" in node.log)
        node.until(lambda: http.get(f"{url}/ready").json()["status"] == "no lease from the registry")
        assert "ready:" not in node.log
        with serve(*common, "--port", ports[1], store=tmp_path / "registry", command="registry"):
            node.until(lambda: f"ready: {url} " in node.log)
            assert http.get(f"{url}/ready").status_code == 200
