"""A replica of several real processes, by the real command line: the same answers, and its end with any of them."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from httpx2 import Client
from process_tree import descendants, is_alive
from served import Served, serve

pytestmark = pytest.mark.slow
PROMPT = "The sea, and what the sailors of the old town told about it when the lamps were lit: " * 4
ENDED_WITH_A_RANK = 70


def texts(served: Served) -> dict[str, str]:
    """Greedy answers of the base and of an adapter."""
    found = {}
    for model in ("tiny", "mia"):
        body = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = served.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        found[model] = answer.json()["choices"][0]["text"]
    return found


def rank_of(served: Served) -> int:
    (rank,) = [pid for pid, line in descendants(served.pid).items() if "rank_process" in line]
    return rank


@pytest.fixture(scope="module")
def expected(flags: Any, adapter_dirs: dict[str, Path]) -> dict[str, str]:
    """What one process answers."""
    with serve(*flags, adapters={"mia": adapter_dirs["one"]}) as one:
        said = texts(one)
    assert said["tiny"] != said["mia"]
    return said


@pytest.mark.parametrize("option", ["--tp", pytest.param("--cp", marks=pytest.mark.long)])
def test_several_processes_answer_as_one_and_end_together(
    flags: Any, adapter_dirs: dict[str, Path], expected: dict[str, str], option: str
) -> None:
    adapters = {"mia": adapter_dirs["one"]}
    with serve(*flags, option, "2", adapters=adapters, ends=ENDED_WITH_A_RANK) as served:
        assert texts(served) == expected
        os.kill(rank_of(served), signal.SIGKILL)
        assert served.ended() == ENDED_WITH_A_RANK
        assert "Traceback" not in served.log


def test_clients_are_told_of_a_rank_that_hangs(flags: Any, adapter_dirs: dict[str, Path]) -> None:
    """New requests go elsewhere at once; then every stream ends with an error, and the server."""
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with serve(*flags, "--tp", "2", ends=ENDED_WITH_A_RANK) as served:
        with served.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(rank_of(served), signal.SIGSTOP)
            with Client(base_url=served.url, trust_env=False, timeout=30) as other:
                served.until(lambda: other.get("/ready").status_code == 503)
                assert other.get("/ready").json() == {"status": "rank 1 is silent"}
                assert other.get("/health").status_code == 200
            (error,) = [line for line in lines if "error" in line]
        assert "rank 1 has not answered" in error
        assert "engine_dead" in error
        assert served.ended() == ENDED_WITH_A_RANK


def test_ranks_end_with_the_server(flags: Any, adapter_dirs: dict[str, Path], expected: dict[str, str]) -> None:
    with serve(*flags, "--pp", "2", adapters={"mia": adapter_dirs["one"]}, ends=0) as served:
        assert texts(served) == expected
        rank = rank_of(served)
        # Supervisors tell all processes; a rank leaves that to the server, which ends its requests first.
        os.kill(rank, signal.SIGTERM)
        assert texts(served) == expected
        served.signal(signal.SIGTERM)
        assert served.ended() == 0
        assert not is_alive(rank)
