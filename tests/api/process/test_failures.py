"""Steps that fail or hang, a disk that refuses uploads, signals, and second servers.

The faults are injected, but for those that a test can cause from outside. Steps are counted from the start of the
process.
"""

import errno
import hashlib
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from answers import error_of
from served import Served, lorasrv, serve

OF_STEPS = "step-raises@2,step-raises@5,step-oom:4@6x3,step-raises:7"
OF_THE_DISK = "no-space@2x1,io-error@3x1,read-only@4x1,no-files@5x1,failing-reads@2x1,slow-disk:20ms@2"
POISON = 7
PROMPT = list(range(20, 50))


@pytest.fixture
def process(flags, adapter_dirs, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server with the faults that a test names."""
    faults = ("--testing", "--inject-faults", request.param) if hasattr(request, "param") else ()
    with serve(*flags, *faults, adapters={"mia": adapter_dirs["two"]}, ends=0) as served:
        yield served


def complete(served: Served, prompt: Any = PROMPT, **fields: Any) -> httpx2.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    return served.post("/v1/completions", **body | fields)


def text(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def code(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, error_of(answer)["code"]


def events(lines: Iterator[str]) -> list[Any]:
    """The events of a stream but for [DONE], its end."""
    *told, done = [line.removeprefix("data: ") for line in lines if line]
    assert done == "[DONE]"
    return [json.loads(event) for event in told]


def stream_of(served: Served, max_tokens: int) -> Any:
    body = {"model": "tiny", "prompt": PROMPT[:5], "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    body |= {"temperature": 0, "logit_bias": {str(POISON): -100}}
    return served.http.stream("POST", "/v1/completions", json=body)


@pytest.mark.parametrize("process", [OF_STEPS], indirect=True, ids=["of steps"])
def test_steps_that_raise_and_run_out_of_memory(process: Served) -> None:
    """The batch's requests end with an error and the server continues; short of memory, none ends."""
    with stream_of(process, 50) as answer:  # steps 1 and 2
        assert answer.status_code == 200
        *told, failed = events(answer.iter_lines())
    assert (len(told), failed["error"]["code"]) == (1, "step_failed")
    assert len(text(complete(process, max_tokens=2))) > 0  # 3 and 4
    answer = complete(process)  # 5
    assert code(answer) == (500, "step_failed")
    assert "x-should-retry" not in answer.headers, "once more is worth trying"
    short = text(complete(process))  # 6 to 8, no more than 4 tokens at a time
    assert text(complete(process)) == short
    assert process.figure("lorasrv_requests_failed_total") == 2
    assert "lorasrv.engine.step_retry" in process.log
    assert process.http.get("/health").status_code == 200

    poisonous = [*PROMPT[:4], POISON]
    refusals = [code(complete(process, poisonous)) for _ in range(3)]
    assert refusals == [(500, "step_failed"), (500, "step_failed"), (400, "poison_request")]
    assert text(complete(process)) == short
    process.calm_down()


def upload(served: Served, folder: Path, name: str) -> httpx2.Response:
    weights = (folder / "adapter_model.safetensors").read_bytes()
    digest = f"sha256:{hashlib.sha256(weights).hexdigest()}"
    answer = served.http.put(f"/v1/blobs/{digest}", content=weights)
    if not answer.is_success:
        return answer
    config = json.loads((folder / "adapter_config.json").read_text())
    return served.post("/v1/adapters", id=name, config=config, weights=digest)


@pytest.mark.parametrize("process", ["step-oom:0@1x1"], indirect=True, ids=["of memory"])
def test_a_step_without_any_memory(process: Served) -> None:
    """Not even one token fits: the request is refused for now, and the next one is answered."""
    refused = complete(process)
    assert code(refused) == (503, "out_of_memory")
    assert (refused.headers["retry-after"], refused.headers.get("x-should-retry")) == ("10", None)
    assert "later" in error_of(refused)["message"]
    assert len(text(complete(process))) > 0
    process.calm_down()


@pytest.mark.parametrize("process", [OF_THE_DISK], indirect=True, ids=["of the disk"])
def test_a_disk_that_refuses_uploads(process: Served, adapter_dirs) -> None:
    """ENOSPC, EIO, EROFS and EMFILE: nothing of them stays, answers continue, the log says what the disk said, and the
    fifth upload is taken.
    """
    before = text(complete(process, model="mia"))  # the adapter is read, and lies in memory
    for expected in ((507, "store_full"), *[(503, "store_unusable")] * 3):
        answer = upload(process, adapter_dirs["one"], "tom")
        assert code(answer) == expected
        assert "/" not in error_of(answer)["message"], "a path"
        assert answer.headers["x-should-retry"] == "false"
        assert text(complete(process, model="mia")) == before
    lines = [json.loads(line) for line in process.log.splitlines() if line.startswith("{")]
    causes = [line["cause"] for line in lines if line.get("why") in ("store_full", "store_unusable")]
    said = ("no room on the store's disk", *map(os.strerror, (errno.EIO, errno.EROFS, errno.EMFILE)))
    assert [words in cause for words, cause in zip(said, causes, strict=True)] == [True] * 4, causes
    assert [card["id"] for card in process.http.get("/v1/models").json()["data"]] == ["tiny", "mia"]
    assert upload(process, adapter_dirs["one"], "tom").status_code == 201
    # The second read of an adapter fails, which costs its own request only; the next one reads it.
    assert code(complete(process, model="tom")) == (503, "adapter_load_failed")
    assert text(complete(process, model="tom")) != before
    assert text(complete(process, model="mia")) == before
    process.calm_down()


@pytest.mark.parametrize("process", ["step-hangs:6s@3"], indirect=True, ids=["slow step"])
def test_sigterm_in_the_middle_of_a_stream(process: Served) -> None:
    """Not ready at once, new requests refused, the stream to its end, exit code 0."""
    with stream_of(process, 50) as answer, httpx2.Client(base_url=process.url, trust_env=False) as other:
        lines = answer.iter_lines()
        next(lines)
        process.signal(signal.SIGTERM)
        process.until(lambda: other.get("/ready").status_code == 503)
        assert other.get("/ready").json() == {"status": "draining"}
        refused = other.post("/v1/completions", json={"model": "tiny", "prompt": "hi"})
        told = events(lines)
    assert (refused.status_code, refused.headers["connection"]) == (503, "close")
    assert int(refused.headers["retry-after"]) > 0
    assert not any("error" in event for event in told)
    assert told[-1]["choices"][0]["finish_reason"] == "length"
    assert process.ended() == 0


@pytest.mark.long
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, None])
def test_a_second_signal_or_the_end_of_the_drain_time_ends_streams(flags, second: signal.Signals | None) -> None:
    """With an error event; without it the stream would continue for a minute."""
    more = ("--testing", "--inject-faults", "step-hangs:200ms@1x1000", "--drain-s", 300 if second else 5)
    with serve(*flags, *more, ends=0) as served, stream_of(served, 300) as answer:
        lines = answer.iter_lines()
        next(lines)
        served.signal(signal.SIGTERM)
        if second is not None:
            time.sleep(1)
            assert served.lives
            served.signal(second)
        *told, failed = events(lines)
        assert second or len(told) > 2, "it continued for a while"
        assert failed["error"]["code"] == "server_stopping"
        assert served.ended() == 0


@pytest.mark.long
def test_a_step_that_hangs(flags) -> None:
    """An error event to each stream, /health 503, all stacks in the log, and an exit code that a supervisor sees."""
    more = ("--testing", "--inject-faults", "step-hangs@4", "--watchdog-s", 5)
    with serve(*flags, *more, ends=70) as served:
        assert complete(served, max_tokens=2).status_code == 200
        with stream_of(served, 50) as answer, httpx2.Client(base_url=served.url, trust_env=False) as other:
            lines = answer.iter_lines()
            next(lines)
            served.until(lambda: other.get("/health").status_code == 503)
            *_, failed = events(lines)
        assert failed["error"]["code"] == "engine_dead"
        assert served.ended() == 70
        assert "_hangs" in served.log, "the stack of the thread that hangs"
        assert "the engine is stuck" in served.log


@pytest.mark.long
def test_a_request_that_waits_past_the_queue_timeout(flags) -> None:
    """It ends with 504 and never runs; the request that has the only slot is not disturbed."""
    # Drafts could end the first answer before the fifth step.
    more = ("--max-num-seqs", 1, "--queue-timeout-s", 2, "--speculation", "off")
    hangs = ("--testing", "--inject-faults", "step-hangs:12s@5")
    with serve(*flags, *more, *hangs, ends=0) as served, stream_of(served, 100) as answer:
        lines = answer.iter_lines()
        next(lines)
        late = complete(served)
        assert (code(late), error_of(late)["param"]) == ((504, "timeout"), "timeout_s"), late.text
        assert events(lines)[-1]["choices"][0]["finish_reason"] == "length"
        assert complete(served).status_code == 200


def test_an_interpreter_that_hangs_is_ended_by_faulthandler(flags) -> None:
    more = ("--testing", "--inject-faults", "interpreter-hangs@3", "--watchdog-s", 1)
    with serve(*flags, *more, ends=1) as served:
        assert complete(served, max_tokens=2).status_code == 200
        with pytest.raises(httpx2.TransportError):
            complete(served)
        assert served.ended() == 1
        assert "Timeout" in served.log
        assert "_hangs_with_the_lock" in served.log


@pytest.mark.long
def test_a_store_or_port_in_use_and_a_restart_after_a_kill(flags, tmp_path: Path) -> None:
    """A second server on either says so in one line; after kill -9 the store is free again."""
    store = tmp_path / "store"
    with serve(*flags, store=store, ends=-signal.SIGKILL) as served:
        for port, why in ((0, f"store {store} is in use by another server"), (served.port, "listen")):
            done = lorasrv("serve", "--store", store, "--port", port, *flags)
            assert (done.returncode, done.stdout) == (1, "")
            assert why in done.stderr.splitlines()[-1]
            assert "Traceback" not in done.stderr
        assert complete(served).status_code == 200
        served.signal(signal.SIGKILL)
        served.ended()
    with serve(*flags, store=store) as again:
        assert complete(again).status_code == 200


@pytest.mark.long
def test_uploads_without_free_descriptors(flags, adapter_dirs) -> None:
    with serve(*flags) as served:
        assert complete(served).status_code == 200
        pid = served.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), limits[1]))
        assert code(upload(served, adapter_dirs["one"], "tom")) == (503, "store_unusable")
        assert complete(served).status_code == 200
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert upload(served, adapter_dirs["one"], "tom").status_code == 201
        assert complete(served, model="tom").status_code == 200
