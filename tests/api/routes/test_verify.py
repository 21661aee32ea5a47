"""Verifying over HTTP and from the command line, with processes that play the verifier: ends, refusals, progress."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from answers import coded, error_of, events, failed, named
from peft_adapters import peft_adapter
from server import server

from api.auth.key_store import KeyStore
from api.auth.principal import Scope
from api.schemas.openapi_examples import EXAMPLES
from lorasrv.offline.verify import verifier
from lorasrv.offline.verify.verifier import COMMAND, LIBRARY_BYTES, Verifier

EXAMPLE = EXAMPLES["POST", "/v1/adapters/{reference}:verify"].answer
ABOUT = ("object", "id", "version", "digest", "created")
RESULT: dict[str, Any] = {name: value for name, value in EXAMPLE.items() if name not in ABOUT} | {"notes": ["a note"]}

PART = """
import json, os, pathlib, sys, time
job = json.loads(sys.stdin.buffer.readline())
pathlib.Path({pids!r}).joinpath(str(os.getpid())).write_text(json.dumps(job))
def tell(**event):
    print(json.dumps(event), flush=True)
tell(progress=["loading", 0.5])
"""
ENDS = {
    "answers": f"tell(result=json.loads({json.dumps(RESULT)!r}))",
    "differs": f"tell(result=dict(json.loads({json.dumps(RESULT)!r}), verdict='differs', reasons=['it is wrong']))",
    "hangs": "time.sleep(600)",
    "fails": "tell(error='the adapter overflows'); sys.exit('Traceback: /secret/path')",
    "crashes": "print('noise of a library', file=sys.stderr); os._exit(7)",
    "is killed": "os.kill(os.getpid(), 9)",
}
NO_TEMPORARY_FOLDER = """
import tempfile
def nowhere():
    raise FileNotFoundError("No usable temporary directory found in ['/tmp']")
tempfile.gettempdir = nowhere
from lorasrv.offline.verify.worker import main
main()
"""


class Children:
    """The processes that were started, by the files that each has left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def jobs(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in (file.read_text() for file in self.folder.iterdir()) if text]

    def alive(self) -> list[int]:
        return [int(file.name) for file in self.folder.iterdir() if Path(f"/proc/{file.name}").exists()]


@pytest.fixture
def children(tmp_path: Path) -> Children:
    (folder := tmp_path / "pids").mkdir()
    return Children(folder)


@pytest.fixture
def verified_by(make_server, make_adapter, monkeypatch: pytest.MonkeyPatch, children: Children) -> Callable[[str], Any]:
    """A server whose verifications end so; `mia` is there to be verified."""

    def start(end: str) -> Any:
        script = PART.format(pids=str(children.folder)) + ENDS[end]
        monkeypatch.setattr("api.app.Verifier", lambda: Verifier([sys.executable, "-c", script]))
        server = make_server()
        server.upload(make_adapter(), "mia").raise_for_status()
        return server

    return start


@pytest.fixture
def end_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Ends the time of the verification that runs, which does not end by itself."""
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Timeout]] = []

    def timeout(seconds: float) -> asyncio.Timeout:
        running.append((asyncio.get_running_loop(), asyncio.timeout(None)))
        return running[-1][1]

    def end() -> None:
        loop, limit = running.pop()
        loop.call_soon_threadsafe(limit.reschedule, loop.time())

    monkeypatch.setattr(verifier, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": timeout}))
    return end


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    """Runs what has to wait while the test goes on."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def verify(server: Any, reference: str = "mia", **body: Any) -> Any:
    return server.http.post(f"/v1/adapters/{reference}:verify", json=body)


class TestAnswer:
    def test_the_verdict_is_returned_and_stored(self, verified_by, store) -> None:
        server = verified_by("answers")
        before = server.http.get("/v1/adapters/mia").json()
        assert before["verified"] is None
        body = verify(server).raise_for_status().json()
        about = {"object": "adapter.verdict", "id": "mia", "version": 1, "digest": before["digest"]}
        assert {**body, **RESULT, **about} == body
        assert server.http.get("/v1/adapters/mia").json()["verified"] == body
        assert store.version_history.verdict(store.resolve("mia@1")) == body

    def test_of_a_version_that_is_deleted_meanwhile_it_is_only_returned(self, verified_by, store, monkeypatch) -> None:
        record = store.version_history.record_verdict

        def deleted_first(*arguments: Any) -> None:
            store.delete("mia")
            record(*arguments)

        server, ref = verified_by("answers"), store.resolve("mia")
        monkeypatch.setattr(store.version_history, "record_verdict", deleted_first)
        response = verify(server)
        assert (response.status_code, response.json()["id"]) == (200, "mia")
        assert store.version_history.verdict(ref) is None

    def test_the_process_gets_what_the_server_serves(self, verified_by, children: Children, store) -> None:
        verify(verified_by("answers"), prompts=["hello", "you"]).raise_for_status()
        (job,) = children.jobs()
        assert job["key"] == store.resolve("mia").key
        assert job["config"]["target_modules"] == ["q_proj", "v_proj"]
        assert [bytes(ids) for ids in job["prompts"]] == [b"user:hello", b"user:you"]
        assert (job["model"]["device"], job["model"]["model"]) == ("cpu", "smollm2-135m")

    def test_without_a_template_prompts_are_taken_as_they_are(self, verified_by, children: Children, engine) -> None:
        server = verified_by("answers")
        engine.chat_template, engine.tokenizer = None, SimpleNamespace(encode=lambda text: list(text.encode()))
        verify(server, prompts=["hello"]).raise_for_status()
        assert bytes(children.jobs()[0]["prompts"][0]) == b"hello"

    def test_built_in_prompts_are_cut_to_what_fits(self, verified_by, children: Children, engine) -> None:
        server = verified_by("answers")
        engine.max_model_len = 20
        verify(server).raise_for_status()
        (job,) = children.jobs()
        assert len(job["prompts"]) == 4
        assert all(0 < len(ids) + job["new_tokens"] <= 20 for ids in job["prompts"])

    def test_progress_as_events(self, verified_by) -> None:
        progress, verdict = events(verify(verified_by("answers"), stream=True))
        assert (progress, verdict["verdict"]) == ({"progress": ["loading", 0.5]}, "within")


class TestEnds:
    def test_no_folder_for_temporary_files(self, make_server, make_adapter, monkeypatch: pytest.MonkeyPatch) -> None:
        command = [sys.executable, "-P", "-c", NO_TEMPORARY_FOLDER]
        monkeypatch.setattr("api.app.Verifier", lambda: Verifier(command))
        server = make_server()
        server.upload(make_adapter(), "mia").raise_for_status()
        response = verify(server)
        assert coded(response) == (503, "verification_failed")
        assert "no folder for temporary files that can be written" in error_of(response)["message"]

    @pytest.mark.parametrize(
        ("end", "says"),
        [("fails", "the adapter overflows"), ("crashes", "exit code 7"), ("is killed", "signal 9")],
    )
    def test_no_verdict(self, verified_by, store, children: Children, end: str, says: str) -> None:
        server = verified_by(end)
        response = verify(server)
        assert (coded(response), response.headers["x-should-retry"]) == ((503, "verification_failed"), "false")
        assert says in error_of(response)["message"]
        assert "/secret" not in response.text
        assert store.version_history.verdict(store.resolve("mia")) is None
        assert children.alive() == []
        (failure,) = [told for told in events(verify(server, stream=True)) if "error" in told]
        assert says in failure["error"]["message"]

    def test_the_time_is_up(self, verified_by, children: Children, eventually, beside, end_time) -> None:
        done = beside.submit(verify, verified_by("hangs"), timeout_s=1.0)
        eventually(children.jobs)
        end_time()
        response = done.result(60)
        assert (named(response), "1 s" in error_of(response)["message"]) == ((504, "timeout_s"), True)
        assert (len(children.jobs()), children.alive()) == (1, [])

    @pytest.mark.parametrize("stream", [False, True])
    def test_the_client_disconnects(self, verified_by, children: Children, eventually, stream: bool) -> None:
        with verified_by("hangs").leaving("/v1/adapters/mia:verify", stream=stream):
            eventually(children.jobs)
            assert children.alive()
        eventually(lambda: children.alive() == [])

    def test_one_at_a_time(self, verified_by, children: Children, eventually, beside) -> None:
        server = verified_by("hangs")
        first = beside.submit(verify, server)
        eventually(children.jobs)
        response = verify(server, "mia@1")
        assert coded(response) == (429, "verification_running")
        assert "mia@1 is being verified" in error_of(response)["message"]
        assert int(response.headers["retry-after"]) > 0
        for pid in children.alive():
            os.kill(pid, signal.SIGKILL)
        assert first.result(60).status_code == 503
        assert verify(server, timeout_s=0.5).status_code == 504, "the next one may begin"

    @pytest.mark.long
    def test_deleted_weights_stay_readable_until_then(
        self, verified_by, children: Children, eventually, store, beside, end_time
    ) -> None:
        server = verified_by("hangs")
        done = beside.submit(verify, server)
        eventually(children.jobs)
        server.http.delete("/v1/adapters/mia").raise_for_status()
        store.collector.collect()
        assert Path(children.jobs()[0]["weights"]).is_file()
        end_time()
        assert done.result(60).status_code == 504
        eventually(lambda: store.collector.collect() or not Path(children.jobs()[0]["weights"]).exists())

    def test_the_server_stops(self, verified_by, children: Children, eventually, dispatcher, beside) -> None:
        server = verified_by("hangs")
        done = beside.submit(verify, server)
        eventually(children.jobs)
        asyncio.run(dispatcher[0].app.state.services.verifier.close())
        assert (done.result(20).status_code, verify(server).status_code) == (503, 503)
        assert "shutting down" in error_of(done.result())["message"]
        assert children.alive() == []


class TestRefused:
    def test_memory(self, verified_by, children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
        server = verified_by("answers")
        monkeypatch.setattr("lorasrv.offline.verify.verifier.free_bytes", lambda: 100 << 20)
        response = verify(server)
        assert coded(response) == (503, "verification_unavailable")
        assert all(word in error_of(response)["message"] for word in ("0.10 GiB are free", "ignore_memory"))
        assert children.jobs() == []
        assert verify(server, ignore_memory=True).status_code == 200

    def test_ignoring_memory_needs_admin(
        self, verified_by, children: Children, store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without memory the server goes down, for everybody."""
        server, keys = verified_by("answers"), KeyStore(store.root)
        for scope, status in ((Scope.UPLOAD, 403), (Scope.ADMIN, 200)):
            _, secret = keys.create(f"only-{scope}", frozenset({scope}))
            # Other tests have the same client.
            monkeypatch.setitem(server.http.headers, "authorization", f"Bearer {secret}")
            assert verify(server, ignore_memory=True).status_code == status
            assert len(children.jobs()) == (status == 200)

    @pytest.mark.parametrize("missing", ["peft", "transformers"])
    def test_packages(self, verified_by, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
        server, find = verified_by("answers"), util.find_spec
        monkeypatch.setattr(util, "find_spec", lambda name, *args: None if name == missing else find(name, *args))
        response = verify(server)
        assert coded(response) == (503, "verification_unavailable")
        assert all(word in error_of(response)["message"] for word in (missing, "pip install -e '.[train]'"))

    def test_an_unknown_adapter(self, verified_by) -> None:
        response = verify(verified_by("answers"), "mio")
        assert (response.status_code, "mia" in error_of(response)["message"]) == (404, True)


class TestCommand:
    @pytest.fixture
    def run(self, cli, verified_by) -> Callable[..., Any]:
        return lambda end, *arguments: cli("verify", *arguments, "--server", verified_by(end).url)

    def test_a_verdict(self, verified_by, cli, children: Children, tmp_path: Path) -> None:
        server = verified_by("answers")
        (tmp_path / "prompts.txt").write_text("one\n\n  two \n")
        done = cli("verify", "mia", "--server", server.url, "--prompts", tmp_path / "prompts.txt")
        assert (done.code, "loading" in done.err) == (0, True)
        assert [words for words in ("mia@1", "within", "35 of 36", "note: a note") if words not in done.out] == []
        assert " UTC: within, logits off by at most " in cli("show", "mia", "--server", server.url).out
        assert [bytes(ids) for ids in children.jobs()[0]["prompts"]] == [b"user:one", b"user:two"]

    @pytest.mark.parametrize(("end", "verdict", "code"), [("answers", "within", 0), ("differs", "differs", 1)])
    def test_as_json(self, run, end: str, verdict: str, code: int) -> None:
        done = run(end, "mia@1", "--json", "--timeout", 60)
        assert (done.code, json.loads(done.out)["verdict"], "it is wrong" in done.err) == (code, verdict, code == 1)

    @pytest.mark.parametrize(
        ("end", "timeout_s", "says"),
        [("fails", 120, "overflows"), ("hangs", 1, "lorasrv: --timeout: the verification was not done within 1 s")],
    )
    def test_no_verdict(self, run, end: str, timeout_s: int, says: str) -> None:
        failed(run(end, "mia", "--timeout", timeout_s), 1, says)

    def test_no_prompt(self, cli, tmp_path: Path) -> None:
        (tmp_path / "none.txt").write_text("\n \n")
        failed(cli("verify", "mia", "--prompts", tmp_path / "none.txt"), 2, "none.txt")


TWICE_AS_STRONG = """
from dataclasses import replace
from adapter_store.formats.weights import AdapterWeights
from lorasrv.offline.verify import served, worker
pack = served.pack_adapter
def wrong(base, layout, weights, dtype):
    twice = {site: replace(weights[site], scaling=2 * weights[site].scaling) for site in weights}
    return pack(base, layout, AdapterWeights(weights.spec, twice), dtype)
served.pack_adapter = wrong
worker.main()
"""
EVERYTHING = {"use_dora": True, "bias": "lora_only", "modules_to_save": ["norm"], "use_rslora": True}


def names(answer: Any) -> Any:
    """Return the names of an answer's fields, nested."""
    return {name: names(value) for name, value in answer.items()} if isinstance(answer, dict) else None


@pytest.mark.long
class TestReal:
    """A real server, an adapter that PEFT has made, and the real process beside it."""

    @pytest.fixture
    def verified(self, tiny_hf_checkpoints, cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
        def run(
            family: str, command: tuple[str, ...] = COMMAND, lora: dict[str, Any] | None = None, **settings: Any
        ) -> tuple[Any, Any]:
            model = tiny_hf_checkpoints[family]()
            peft_adapter(model, tmp_path / "mia", seed=1, strength=0.3, **(lora or {}))
            monkeypatch.setattr("api.app.Verifier", lambda: Verifier(command))
            settings = {"kernels": "auto", **settings}
            with server(model, tmp_path / "store", {"mia": tmp_path / "mia"}, **settings) as served:
                done = cli("verify", "mia", "--server", served.url)
                return done, served.http.get("/v1/adapters/mia").json()["verified"]

        return run

    def test_an_adapter_is_verified(self, verified) -> None:
        done, stored = verified("qwen2", lora=EVERYTHING, quantization="int8", dtype="float32")
        assert done.code == 0, done.err
        assert ("within" in done.out, "computing with PEFT" in done.err) == (True, True)
        assert stored["verdict"] == "within"
        assert stored["adapter_error"]["positions"] == 4 * 9
        assert stored["computed_with"]["quantization"] == "int8"
        assert stored["effect"]["shows_in_logits"]
        assert names(stored) == names(EXAMPLE), "the description of the API and the console's test go by it"
        assert stored["cpu_seconds"] > 0
        assert 100 << 20 < stored["peak_bytes"] < LIBRARY_BYTES

    def test_sabotage_in_the_process_is_found(self, verified) -> None:
        done, _ = verified("llama", (sys.executable, "-P", "-c", TWICE_AS_STRONG), quantization="int8")
        assert (done.code, "differs" in done.out, "linears are off" in done.err) == (1, True, True)
