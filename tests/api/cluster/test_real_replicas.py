"""Two real `lorasrv serve` processes behind an edge, one of which is killed under load."""

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cli_process
import httpx2
import pytest
from fake_replicas import edge_of
from served import serve
from server import eventually

from api.cluster import survey
from api.cluster.chooser import StaticChooser
from lorasrv.placement.kinds import make_placement

pytestmark = pytest.mark.slow
SECRET = "secret-of-the-cluster"
NUM_WHOLE, NUM_STREAMS = 40, 6
TOKENS = 200


SLOW_STEPS = ("--testing", "--inject-faults", "step-hangs:200ms@1x1000")
"""No stream of `TOKENS` ends for seconds, however late a test hears that it has begun."""


@contextmanager
def started(
    model: Path, adapter_dirs: dict[str, Path], *ends: int, of_first: Sequence[str] = ()
) -> Iterator[SimpleNamespace]:
    """Replicas that are to end with these codes, the first with these flags, behind an edge."""
    flags = ("--model", model, "--served-model-name", "tiny", "--pool-bytes", "16MiB", "--cluster-secret", SECRET)
    adapters = {"mia": adapter_dirs["two"], "tom": adapter_dirs["one"]}
    with ExitStack() as opened:
        replicas = []
        for number, code in enumerate(ends):
            more = () if number else of_first
            replicas.append(opened.enter_context(serve(*flags, *more, adapters=adapters, ends=code)))
        chooser = StaticChooser((), make_placement("bounded"))
        edge = opened.enter_context(edge_of([one.url for one in replicas], chooser=chooser, secret=SECRET))
        yield SimpleNamespace(replicas=replicas, **vars(edge))


@pytest.fixture
def cluster(model, adapter_dirs) -> Iterator[SimpleNamespace]:
    """The first is to be killed, in the middle of whatever it answers."""
    with started(model, adapter_dirs, -signal.SIGKILL, 0, of_first=SLOW_STEPS) as cluster:
        yield cluster


def body_of(number: int, tokens: int) -> dict[str, Any]:
    """Bodies of base and adapters, greedy and seeded, none like another."""
    model = ("tiny", "mia", "tom")[number % 3]
    sampling = {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": number}
    body = {"model": model, "prompt": [number + 1, 7, 9], "max_tokens": tokens, "ignore_eos": True}
    return {**body, **sampling}


def test_commands_ask_the_replica_that_they_name(model, adapter_dirs) -> None:
    with started(model, adapter_dirs, 0, 0) as cluster:
        at = ("--server", cluster.url, "--json")
        law = ("--law", "poisson", "--seconds", 5, "--predict-only", "--model", model)
        for command in (("top", "--once"), ("pool",), ("plan", *law)):
            unnamed = cli_process.run(*command, *at)
            assert (unnamed.returncode, unnamed.stdout) == (1, "")
            assert "is the address of several replicas; choose one with --replica r0 or r1" in unnamed.stderr
        assert json.loads(cli_process.run("top", "--once", "--replica", "r1", *at).stdout)["up"]
        total = cluster.replicas[1].http.get("/v1/pool").json()["pages_total"]
        assert json.loads(cli_process.run("pool", "--replica", "r1", *at).stdout)["pages_total"] == total
        assert json.loads(cli_process.run("pin", "mia", "--replica", "r1", *at).stdout)["pinned"]
        pinned = [one.http.get("/v1/pool").json()["promised"] for one in cluster.replicas]
        assert [[adapter["pinned"] for adapter in promised] for promised in pinned] == [[], [True]]
        planned = cli_process.run("plan", *law, "--replica", "r1", "--pool-bytes", "16MiB", *at)
        source = json.loads(planned.stdout)["costs"]["source"]
        assert source == f"costs learnt by {cluster.url}, replica r1", planned.stderr
        assert "there is no replica 'r9'" in cli_process.run("pool", "--replica", "r9", *at).stderr


def test_what_an_edge_asks_by_itself_fills_no_log(model, adapter_dirs) -> None:
    with started(model, adapter_dirs, 0) as cluster:
        replica = cluster.replicas[0]
        asked = 'lorasrv_http_requests_total{method="GET",route="/v1/replica",status="200"}'
        replica.until(lambda: replica.figure(asked) > 0)
        answer = httpx2.post(f"{cluster.url}/v1/completions", json=body_of(1, 2), timeout=60, trust_env=False)
        assert answer.status_code == 200
        replica.until(lambda: "/v1/completions" in replica.log)
        assert "/v1/replica" not in replica.log


def test_a_stopped_replica_gets_nothing_until_it_goes_on(
    model, adapter_dirs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", survey.__name__)
    # Else the other one, if it stands still for a moment, may be taken for stopped.
    monkeypatch.setattr(survey, "ANSWER_S", 5.0)
    with started(model, adapter_dirs, 0, 0) as cluster:
        stopped, stats, suspects = cluster.replicas[0], cluster.edge.stats, cluster.edge.suspects

        def ask_all() -> int:
            """Ask for the base and every adapter, and return how often the first replica was asked."""
            before = stats.sent["r0"]
            for number in range(9):
                answer = httpx2.post(
                    f"{cluster.url}/v1/completions", json=body_of(number, 2), timeout=30, trust_env=False
                )
                assert answer.status_code == 200
            return stats.sent["r0"] - before

        eventually(lambda: ask_all() > 0)
        stopped.signal(signal.SIGSTOP)
        try:
            eventually(lambda: "r0" in suspects())
            assert ask_all() == 0
        finally:
            stopped.signal(signal.SIGCONT)
        eventually(lambda: "r0" not in suspects())
        assert ask_all() > 0
    told = [record.getMessage() for record in caplog.records if record.name == survey.__name__]
    where = f"replica r0 at {stopped.url}"
    assert told == [f"{where} does not answer, so it is not ready", f"{where} answers again"]


def test_a_kill_under_load_fails_nothing(cluster: Any) -> None:
    """Whole answers are computed again, streams go on: all say what the other replica says alone."""
    victim, other = cluster.replicas
    begun = threading.Semaphore(0)

    def whole(number: int) -> str:
        answer = httpx2.post(f"{cluster.url}/v1/completions", json=body_of(number, 8), timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def streamed(number: int) -> str:
        body = {**body_of(number, TOKENS), "stream": True}
        text, told = "", False
        with httpx2.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
            for line in filter(None, answer.iter_lines()):
                if not told:
                    told = True
                    begun.release()
                if line == "data: [DONE]":
                    return text
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        raise AssertionError("the stream has no end")

    with ThreadPoolExecutor(NUM_STREAMS + 8) as pool:
        streams = [pool.submit(streamed, number) for number in range(NUM_STREAMS)]
        for _ in streams:
            assert begun.acquire(timeout=60)
        wholes = [pool.submit(whole, number) for number in range(NUM_WHOLE)]
        wait(wholes, return_when=FIRST_COMPLETED)
        eventually(lambda: cluster.edge.stats.sent["r0"])
        victim.signal(signal.SIGKILL)
        answers = [one.result() for one in wholes], [one.result() for one in streams]
    for tokens, texts in zip((8, TOKENS), answers, strict=True):
        for number, text in enumerate(texts):
            alone = other.post("/v1/completions", **body_of(number, tokens)).json()["choices"][0]["text"]
            assert text == alone, number
    stats = cluster.edge.stats
    assert stats.failed["r0"] > 0, "it was killed while it had requests"
    assert stats.lost == 0
    assert set(stats.answers) == {200}
    other.calm_down()
