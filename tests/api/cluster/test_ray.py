"""`lorasrv serve --replicas 2` as a whole: answers, uploads, kills, updates, ports, and what is left at the end."""

import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from process_tree import children_of, descendants, is_alive, listening
from prometheus_client.parser import text_string_to_metric_families
from served import ROOT, Served, lorasrv, serve
from server import eventually

from api.cluster.local import APP, REGISTRY_APP
from lorasrv.errors import ConfigError

pytest.importorskip("ray", reason="needs Ray; make test-cluster installs it")
pytestmark = [pytest.mark.cluster]

SECRET = "of-the-cluster-that-is-tested"
FLAGS = ("--served-model-name", "tiny", "--pool-bytes", "16MiB", "--kernels", "torch", "--log-level", "warning")
KILLS = int(os.environ.get("KILLS", "2"))
KILL_S = float(os.environ.get("KILL_SECONDS", "600"))
PAUSE_S = 0.05
"""Between two requests of a client: without it the load takes the CPUs that new replicas start on."""
READY_S = 400.0
"""Ray alone takes a minute where others use the machine."""
PLACES = ("/tmp", "/dev/shm", str(Path.home()))
MINE = ("lorasrv-replicas", "ray", ".ray", "plasma")


def traces() -> set[str]:
    """What Ray or we might leave, in the places where such things are left."""
    return {f"{place}/{name}" for place in PLACES for name in os.listdir(place) if name.startswith(MINE)}


@dataclass
class Cluster:
    """A running command, and what is known of its processes."""

    served: Served
    store: Path
    model: Path
    before: set[str]
    pids: set[int] = field(default_factory=set)

    def replica_pids(self) -> set[int]:
        return self.actors("Replica")

    def actors(self, deployment: str) -> set[int]:
        app = REGISTRY_APP if deployment == "Registry" else APP
        named = f"ray::ServeReplica:{app}:{deployment}"
        return {pid for pid, name in descendants(self.served.pid).items() if name.startswith(named)}

    def ready(self) -> list[str]:
        """Addresses of the replicas that are ready, whatever the edge thinks."""
        return sorted(filter(None, map(address_of, self.replica_pids())))

    def is_whole(self, number: int = 2) -> bool:
        """Whether so many replicas are ready, and the edge knows just these."""
        answer = httpx2.get(f"{self.served.url}/v1/replicas", trust_env=False, timeout=60)
        known = [one["url"] for one in answer.json().get("replicas", ()) if one["is_ready"]]
        return len(known) == number and sorted(known) == self.ready()

    def until(self, condition: Callable[[], object], within_s: float = 120.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert self.served.lives, self.served.log
            assert time.monotonic() < deadline, f"it did not happen\n{self.served.log}"
            time.sleep(0.1)

    def redeploy(self, **options: Any) -> None:
        """Deploy with other options, and wait until that is done."""
        home = (self.store / "replicas").resolve()
        whole = {
            "model": str(self.model),
            "store": str(self.store),
            "served_model_name": "tiny",
            "kernels": "torch",
            "pool_bytes": "16MiB",
            "cluster_secret": SECRET,
            "log_level": "warning",
            **options,
        }
        shape = {"edges": 0, "cpus": 0.0, "registry_app": REGISTRY_APP, "threads": 1}
        shape |= {"cache": str(home / "cache"), "log": str(home / "log")}
        command = [sys.executable, ROOT / "tests/support/redeploy.py", home, json.dumps(shape), json.dumps(whole)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stdout + done.stderr + self.served.log


def address_of(pid: int) -> str | None:
    """Where a server in this process answers that it is ready."""
    try:
        urls = [f"http://{host}:{port}" for host, port in listening(pid) if host == "127.0.0.1"]
    except OSError:
        return None
    return next(filter(is_ready, urls), None)


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/ready", trust_env=False, timeout=5).status_code == 200
    except httpx2.HTTPError:
        return False


@pytest.fixture(scope="module")
def cluster(model: Path, adapter_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    before, store = traces(), tmp_path_factory.mktemp("s") / "store"
    adapters = {name: adapter_dirs[name] for name in ("one", "two")}
    flags = ("--model", model, "--replicas", 2, "--cluster-secret", SECRET, *FLAGS)
    with serve(*flags, adapters=adapters, store=store, ends=0, ready_s=READY_S) as served:
        yield Cluster(served, store, model, before)


def ask(url: str, name: str, **more: Any) -> str:
    body = {"model": name, "prompt": "the river", "max_tokens": 6, "temperature": 0, **more}
    answer = httpx2.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


class Load:
    """Clients that ask and ask; counts how their requests end."""

    def __init__(self, url: str) -> None:
        self.ends: Counter[str] = Counter()
        self.failures: list[str] = []
        self.texts: dict[str, set[str]] = {"one": set(), "two": set()}
        self._url = url
        self._over = threading.Event()

    @contextmanager
    def running(self, clients: int = 4) -> Iterator["Load"]:
        threads = [threading.Thread(target=self._ask_on, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _ask_on(self, seed: int) -> None:
        choice = random.Random(seed)
        with httpx2.Client(base_url=self._url, trust_env=False, timeout=60) as http:
            while not self._over.is_set():
                self._ask(http, choice.choice(("one", "two")), choice.random() < 0.5)
                self._over.wait(PAUSE_S)

    def _ask(self, http: httpx2.Client, name: str, is_stream: bool) -> None:
        body = {"model": name, "prompt": "the river", "max_tokens": 12, "temperature": 0, "stream": is_stream}
        begun, text = False, ""
        try:
            with http.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    begun = begun or answer.status_code == 200
                    text += line
        except httpx2.HTTPError as error:
            text = f"{error!r}"
        self._enter(name, text, begun, is_stream)

    def _enter(self, name: str, text: str, begun: bool, is_stream: bool) -> None:
        if not begun:
            self.failures.append(text)
        elif not is_stream:
            self.ends["whole"] += 1
            self.texts[name].add(json.loads(text)["choices"][0]["text"])
        elif "[DONE]" in text:
            self.ends["streamed"] += 1
        else:
            # Begun and broken off: the client has been told, and never takes it for an answer.
            assert "replica_lost" in text, text
            self.ends["lost"] += 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of ray.serve, when it is imported
@pytest.mark.parametrize("given", [{"registry": "http://127.0.0.1:1"}, {"registry_app": "another"}])
def test_a_registry_follows_no_other(given: dict[str, str]) -> None:
    from api.cluster.app import build_registry

    with pytest.raises(ConfigError, match="a registry follows no other"):
        build_registry({"cluster_secret": SECRET, **given})


def test_answers_are_one_servers(cluster: Cluster) -> None:
    """Both replicas say the same, with the adapter; OpenAI's client sees one server."""
    cluster.until(cluster.is_whole)
    with openai.OpenAI(base_url=f"{cluster.served.url}/v1", api_key="none", max_retries=0) as client:
        assert {"tiny", "one", "two"} <= {model.id for model in client.models.list()}
        told = client.completions.create(model="one", prompt="the river", max_tokens=6, temperature=0)
        pieces = client.completions.create(model="one", prompt="the river", max_tokens=6, temperature=0, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == told.choices[0].text
    texts = {ask(url, "one") for url in cluster.ready()}
    assert texts == {told.choices[0].text}
    assert ask(cluster.served.url, "tiny") not in texts


def test_an_upload_reaches_every_replica(cluster: Cluster, adapter_dirs: dict[str, Path]) -> None:
    """An adapter that was uploaded through the edge answers at once, at each replica."""
    done = lorasrv("upload", adapter_dirs["three"], "--id", "late", "--server", cluster.served.url)
    assert done.returncode == 0, done.stderr
    texts = {ask(url, "late") for url in (cluster.served.url, *cluster.ready())}
    assert len(texts) == 1
    assert texts.isdisjoint({ask(cluster.served.url, name) for name in ("one", "tiny")})


def test_only_documented_ports_are_open(cluster: Cluster) -> None:
    """All ports are on the loopback interface, but one of each actor of Serve, where only the certificate gets in."""
    pids = descendants(cluster.served.pid)
    found = [(pid, pids[pid], address, port) for pid in pids for address, port in listening(pid)]
    open_ones = [
        (name, port) for _, name, address, port in found if address not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    ]
    assert {name.split(":")[2] for name, _ in open_ones} <= {"ServeReplica"}
    assert len(open_ones) == 3, "one of the registry and of each replica"
    unverified = ssl._create_unverified_context()
    for _, port in open_ones:
        assert not _speaks_http2(socket.create_connection(("127.0.0.1", port), 5)), "without TLS"
        with socket.create_connection(("127.0.0.1", port), 5) as bare:
            assert not _speaks_http2(unverified.wrap_socket(bare)), "without a certificate"


def _speaks_http2(connection: socket.socket) -> bool:
    """Send the preface and an empty SETTINGS frame of HTTP/2, and return whether the other side sends its own."""
    with connection:
        connection.settimeout(10)
        try:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
            return connection.recv(64)[3:4] == b"\4"
        except (ssl.SSLError, ConnectionError):
            return False


def test_secrets_are_the_owners(cluster: Cluster) -> None:
    home = (cluster.store / "replicas").resolve()
    assert home.stat().st_mode & 0o077 == 0
    for name in ("token", "key.pem", "log"):
        assert (home / name).stat().st_mode & 0o077 == 0, name


def test_kill_after_kill_no_request_fails(cluster: Cluster) -> None:
    """kill -9 of replicas under load: whatever had not begun is answered, with the same text as ever."""
    ends_s, kills = time.monotonic() + KILL_S, 0
    expected = {name: ask(cluster.served.url, name, max_tokens=12) for name in ("one", "two")}
    with Load(cluster.served.url).running() as load:
        while kills < KILLS and time.monotonic() < ends_s:
            cluster.until(cluster.is_whole)
            os.kill(random.choice(sorted(cluster.replica_pids())), signal.SIGKILL)
            kills += 1
            cluster.until(lambda: len(cluster.ready()) < 2, 10)
        cluster.until(cluster.is_whole)
    assert load.failures == []
    assert load.texts == {name: {text} for name, text in expected.items()}
    assert kills >= min(KILLS, 2)
    print(f"{kills} kills: {dict(load.ends)}")


def test_a_stopped_replica_delays_neither_requests_nor_news(cluster: Cluster) -> None:
    """Requests go to the other one, and to the one that Ray starts in its place."""
    cluster.until(cluster.is_whole)
    stopped, other = sorted(cluster.replica_pids())
    urls = set(cluster.ready())
    os.kill(stopped, signal.SIGSTOP)
    begun_s = time.monotonic()
    try:
        cluster.until(lambda: all(answers_soon(cluster.served.url, name) for name in ("tiny", "one", "two")), 10)
        os.kill(other, signal.SIGKILL)
        cluster.until(lambda: ready_at(cluster.served.url) - urls)
        cluster.until(lambda: all(answers_soon(cluster.served.url, name) for name in ("tiny", "one", "two")), 10)
        print(f"{time.monotonic() - begun_s:.1f} s")
    finally:
        os.kill(stopped, signal.SIGCONT)
    cluster.until(cluster.is_whole)


def answers_soon(url: str, name: str) -> bool:
    body = {"model": name, "prompt": "the river", "max_tokens": 2}
    try:
        return httpx2.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=2).status_code == 200
    except httpx2.TimeoutException:
        return False


def ready_at(url: str) -> set[str]:
    """Addresses of the replicas that the edge takes for ready."""
    answer = httpx2.get(f"{url}/v1/replicas", trust_env=False, timeout=60)
    return {one["url"] for one in answer.json().get("replicas", ()) if one["is_ready"]}


def test_updates_and_scaling_lose_nothing(cluster: Cluster) -> None:
    """Scale out, then update with other options and fewer replicas, under load: no request and no stream is lost."""
    with Load(cluster.served.url).running() as load:
        cluster.redeploy(replicas=3)
        cluster.until(lambda: cluster.is_whole(3))
        old, registry = cluster.replica_pids(), cluster.actors("Registry")
        cluster.redeploy(replicas=2, max_num_queued_seqs=77)
        cluster.until(lambda: not cluster.replica_pids() & old)
        cluster.until(cluster.is_whole)
    assert load.failures == []
    assert load.ends["lost"] == 0
    assert cluster.actors("Registry") == registry, "an application of its own, which nobody has updated"
    assert {info(url)["max_concurrent_requests"] for url in cluster.ready()} == {77}


def info(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx2.get(f"{url}/info", trust_env=False, timeout=30).json()
    return found


def test_without_the_controller_data_goes_on(cluster: Cluster) -> None:
    names = descendants(cluster.served.pid)
    controller = next(pid for pid, name in names.items() if name.startswith("ray::ServeController"))
    with Load(cluster.served.url).running() as load:
        os.kill(controller, signal.SIGKILL)
        cluster.until(lambda: sum(load.ends.values()) > 20)
    assert load.failures == []


def test_the_registry_is_started_again(cluster: Cluster, adapter_dirs: dict[str, Path]) -> None:
    """Requests go on while it is gone; then uploads reach every replica, at the address of before."""
    [registry] = cluster.actors("Registry")
    for url in cluster.ready():
        # What a replica has never fetched, it cannot fetch now.
        assert ask(url, "one") != ask(url, "two")
    with Load(cluster.served.url).running() as load:
        os.kill(registry, signal.SIGKILL)
        cluster.until(lambda: cluster.actors("Registry") - {registry})
        cluster.until(lambda: upload(cluster, adapter_dirs["three"], "later") == 0)
    assert load.failures == []
    assert load.ends["lost"] == 0
    assert len({ask(url, "later") for url in (cluster.served.url, *cluster.ready())}) == 1


def upload(cluster: Cluster, adapter: Path, name: str) -> int:
    return lorasrv("upload", adapter, "--id", name, "--server", cluster.served.url).returncode


def test_nothing_is_left(cluster: Cluster) -> None:
    """Ctrl-C ends all processes, and removes all files but the store's."""
    pids = descendants(cluster.served.pid)
    assert len(children_of(cluster.served.pid)) > 2
    cluster.served.signal(signal.SIGINT)
    assert cluster.served.ended() == 0
    assert [name for pid, name in pids.items() if is_alive(pid)] == []
    assert traces() == cluster.before
    assert not [path.name for path in cluster.store.iterdir() if path.name.startswith("replicas")]
    assert "Traceback" not in cluster.served.log


@contextmanager
def small_cluster(model: Path, store: Path, adapters: dict[str, Path], *flags: Any) -> Iterator[Cluster]:
    before = traces()
    flags = ("--model", model, "--replicas", 1, "--cluster-secret", SECRET, *FLAGS, *flags)
    with serve(*flags, adapters=adapters, store=store, ends=0, ready_s=READY_S) as served:
        yield Cluster(served, store, model, before)


def counted(url: str, name: str, **labels: str) -> float:
    """A counter of a server or an edge."""
    text = httpx2.get(f"{url}/metrics", trust_env=False, timeout=30).text
    found = text_string_to_metric_families(text)
    return sum(s.value for family in found for s in family.samples if s.name == name and s.labels == labels)


def test_a_replica_of_the_other_role_computes_prompts(
    model: Path, adapter_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """The answer is the same with it and without, once it is dead."""
    adapters = {"one": adapter_dirs["one"]}
    with small_cluster(model, tmp_path / "store", adapters, "--prefill-replicas", 1) as cluster:
        url = cluster.served.url
        known = httpx2.get(f"{url}/v1/replicas", trust_env=False).json()["replicas"]
        assert sorted(one["role"] for one in known) == ["both", "prefill"]
        [answering] = [one["url"] for one in known if one["role"] == "both"]
        prompt = "the river and the sea " * 38
        told = ask(url, "one", prompt=prompt)
        assert counted(url, "lorasrv_edge_peers_total", kind="prefill") == 1
        assert counted(answering, "lorasrv_peer_pages_received_total") > 10
        for pid in cluster.actors("Prefill"):
            os.kill(pid, signal.SIGKILL)
        assert ask(url, "one", prompt=prompt, cache_salt="other") == told


@pytest.mark.exhaustive
def test_a_killed_command_takes_its_processes_along(model: Path, adapter_dirs: dict[str, Path], tmp_path: Path) -> None:
    """What it leaves in its folder does not keep the next one from starting."""
    adapters = {"one": adapter_dirs["one"]}
    store = tmp_path / "store"
    flags = ("--model", model, "--replicas", 1, "--cluster-secret", SECRET, *FLAGS)
    with serve(*flags, adapters=adapters, store=store, ends=-signal.SIGKILL, ready_s=READY_S) as served:
        pids = descendants(served.pid)
        said = ask(served.url, "one")
        served.signal(signal.SIGKILL)
        served.ended()
        # Ray's agents, which serve nobody, take longer.
        kept = {pid: name for pid, name in pids.items() if not name.endswith("Agent")}
        assert len(kept) > 4
        eventually(lambda: not any(map(is_alive, kept)), within_s=60)
    with serve(*flags, store=store, ends=0, ready_s=READY_S) as again:
        assert ask(again.url, "one") == said


@pytest.mark.exhaustive
def test_a_backlog_starts_further_replicas(model: Path, adapter_dirs: dict[str, Path], tmp_path: Path) -> None:
    adapters = {name: adapter_dirs[name] for name in ("one", "two")}
    flags = ("--max-replicas", 2, "--target-backlog-s", 0.01)
    with small_cluster(model, tmp_path / "store", adapters, *flags) as cluster:
        cluster.until(lambda: cluster.is_whole(1))
        with Load(cluster.served.url).running(clients=12) as load:
            cluster.until(lambda: cluster.is_whole(2), 300)
        assert load.failures == []
